"""The block pool beside a model of lists and dicts: whatever is done to both, they agree."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from invariants import check_pool
from pagedlab.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from pagedlab.kv.block_pool import BlockPool
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams

OWNER = Request("r0", [1], SamplingParams())


def cache(pool, block, block_hash, group=0):
    """Enter one full block of a table of one."""
    pool.cache_full_blocks(OWNER, [block], [block_hash], 0, 1, group, 4)


class PoolBesideModel(RuleBasedStateMachine):
    """The model: a list of free ids, a count per id, and per (group, hash) the ids in order of caching."""

    @initialize(num_blocks=st.integers(2, 12), num_groups=st.integers(1, 2))
    def start(self, num_blocks, num_groups):
        self.pool, self.num_groups = BlockPool(num_blocks, num_groups), num_groups
        self.free = list(range(1, num_blocks))
        self.ref_counts = {}                 # id -> owners, only where > 0
        self.cached = {}                     # (group, hash) -> ids, first cached first
        self.key_of = {}                     # id -> (group, hash)

    @rule(n=st.integers(0, 5), group=st.integers(0, 1))
    def take_new_blocks(self, n, group):
        if n > len(self.free):
            before = self.free_ids
            with pytest.raises(ValueError, match=f"cannot take {n} blocks, {len(self.free)} are free"):
                self.pool.get_new_blocks(n, "r0", group % self.num_groups, 0)
            assert self.free_ids == before
            return
        taken = self.pool.get_new_blocks(n, "r0", group % self.num_groups, 0)
        assert [b.block_id for b in taken] == self.free[:n]
        for block_id in self.free[:n]:
            self.ref_counts[block_id] = 1
            self._forget(block_id)
        del self.free[:n]

    @rule(pick=st.integers(0), block_hash=st.sampled_from((b"a", b"b", b"c")), group=st.integers(0, 1))
    def cache_a_held_block(self, pick, block_hash, group):
        held = [i for i in self.ref_counts if i not in self.key_of]
        if held:
            block_id, key = held[pick % len(held)], (group % self.num_groups, block_hash)
            cache(self.pool, self.pool.blocks[block_id], block_hash, key[0])
            self.cached.setdefault(key, []).append(block_id)
            self.key_of[block_id] = key

    @rule(block_hash=st.sampled_from((b"a", b"b", b"c")), group=st.integers(0, 1))
    def hit(self, block_hash, group):
        key = group % self.num_groups, block_hash
        block = self.pool.get_cached_block(block_hash, key[0])
        ids = self.cached.get(key, [])
        assert (block and block.block_id) == (ids[0] if ids else None)
        if block is not None:
            self.pool.touch([block, self.pool.null_block], "r0", key[0])  # a null block before a window is no hit
            self.ref_counts[block.block_id] = self.ref_counts.get(block.block_id, 0) + 1
            if block.block_id in self.free:
                self.free.remove(block.block_id)

    @rule(picks=st.lists(st.integers(0), max_size=4))
    def free_blocks(self, picks):
        given_back = []
        for pick in picks:
            if self.ref_counts:
                block_id = sorted(self.ref_counts)[pick % len(self.ref_counts)]
                given_back.append((0, self.pool.blocks[block_id]))
                self.ref_counts[block_id] -= 1
                if not self.ref_counts[block_id]:
                    del self.ref_counts[block_id]
                    self.free.append(block_id)
        self.pool.free_blocks([*given_back, (9, self.pool.null_block)], "r0", 0, "finished")

    @rule()
    def reset(self):
        assert self.pool.reset_prefix_cache() is not bool(self.ref_counts)
        if not self.ref_counts:
            self.cached, self.key_of = {}, {}

    def _forget(self, block_id):
        key = self.key_of.pop(block_id, None)
        if key is not None:
            self.cached[key].remove(block_id)

    @property
    def free_ids(self):
        return [b.block_id for b in self.pool.free_block_queue]

    @invariant()
    def agree(self):
        if not hasattr(self, "pool"):
            return
        check_pool(self.pool)
        assert self.free_ids == self.free
        assert self.pool.num_free_blocks == len(self.free)
        assert self.pool.num_used_blocks == len(self.ref_counts)
        assert {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt} == self.ref_counts
        assert {b.block_id for b in self.pool.blocks if b.block_hash} == set(self.key_of)


TestPoolBesideModel = PoolBesideModel.TestCase
TestPoolBesideModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# ------------------------------------------------------------------ the checker finds what is broken


def used_pool():
    pool = BlockPool(8, 1)
    first, second, third = pool.get_new_blocks(3, "r0", 0, 0)
    cache(pool, first, b"a")
    cache(pool, second, b"a")
    pool.free_blocks([(1, second)], "r0", 0, "finished")
    return pool, first, second, third


def double_free(pool, first, second, third):
    pool.free_block_queue.append_n([second])


def lose(pool, first, second, third):
    pool.free_block_queue.remove(second)


def free_and_held(pool, first, second, third):
    pool.free_block_queue.append_n([third])


def miscount(pool, first, second, third):
    pool.free_block_queue.num_free_blocks -= 1


def owner_forgotten(pool, first, second, third):
    third.ref_cnt = 0


def hash_forgotten(pool, first, second, third):
    first.block_hash = None


def map_forgotten(pool, first, second, third):
    del pool._cached[0][b"a"][second.block_id]


def other_hash(pool, first, second, third):
    first.block_hash = b"z"


def null_block_held(pool, first, second, third):
    pool.null_block.ref_cnt = 1


def null_block_cached(pool, first, second, third):
    pool.null_block.block_hash = b"a"


@pytest.mark.parametrize("corrupt", [
    double_free, lose, free_and_held, miscount, owner_forgotten, hash_forgotten, map_forgotten, other_hash,
    null_block_held, null_block_cached,
])
def test_a_corrupted_pool_is_found(corrupt):
    pool, *blocks = used_pool()
    check_pool(pool)
    corrupt(pool, *blocks)
    with pytest.raises(AssertionError):
        check_pool(pool)


# ------------------------------------------------------------------ single sentences


def test_block_0_is_never_handed_out():
    pool = BlockPool(4, 1)
    assert [b.block_id for b in pool.get_new_blocks(3, "r0", 0, 0)] == [1, 2, 3]
    assert pool.num_free_blocks == 0


def test_a_pool_of_the_null_block_alone_has_nothing_to_give():
    pool = BlockPool(1, 1)
    assert pool.num_free_blocks == pool.num_used_blocks == 0
    with pytest.raises(ValueError):
        pool.get_new_blocks(1, "r0", 0, 0)


def test_a_free_block_keeps_its_hash_until_it_is_handed_out_again():
    pool, first, second, _ = used_pool()
    pool.free_blocks([(0, first)], "r0", 0, "finished")
    assert first.block_hash == b"a" and pool.get_cached_block(b"a", 0) is first
    pool.get_new_blocks(6, "r1", 0, 0)  # 4, 5, 6, 7, then 2 and 1
    assert first.block_hash is second.block_hash is None and pool.get_cached_block(b"a", 0) is None


def test_of_two_blocks_with_one_hash_the_first_cached_is_hit_and_the_other_after_its_eviction():
    pool, first, second, _ = used_pool()
    assert pool.get_cached_block(b"a", 0) is first
    pool._evict(first, "r1")
    assert pool.get_cached_block(b"a", 0) is second


def test_groups_do_not_hit_each_others_blocks():
    pool = BlockPool(4, 2)
    (block,) = pool.get_new_blocks(1, "r0", 1, 0)
    cache(pool, block, b"a", 1)
    assert pool.get_cached_block(b"a", 0) is None and pool.get_cached_block(b"a", 1) is block


def test_a_table_given_back_from_its_end_loses_its_tail_first():
    pool = BlockPool(5, 1)
    table = pool.get_new_blocks(3, "r0", 0, 0)
    pool.free_blocks([(i, table[i]) for i in (2, 1, 0)], "r0", 0, "finished")
    assert [b.block_id for b in pool.free_block_queue] == [4, 3, 2, 1]


def test_a_block_that_is_not_free_cannot_leave_the_queue():
    queue = FreeKVCacheBlockQueue([KVCacheBlock(1)])
    with pytest.raises(ValueError, match="block 2 is not in the free queue"):
        queue.remove(KVCacheBlock(2))
    assert queue.num_free_blocks == 1
