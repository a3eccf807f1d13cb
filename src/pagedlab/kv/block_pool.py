"""The pool: who holds which block, and which block can be found under which hash.

Source: vllm/v1/core/block_pool.py. One pool serves all KV-cache groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedlab.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from pagedlab.kv.hashing import short_hash
from pagedlab.kv.prefix_history import PrefixHistory
from pagedlab.request import Request
from pagedlab.trace.events import BlockAllocated, BlockCached, BlockEvicted, BlockFreed, BlockTouched, WhyFreed
from pagedlab.trace.tracer import trace


class BlockPool:
    """Owns reference counts, hashes and the map from hash to blocks.

    Every block is in one of four states: free, free but cached (evictable), in use, and in use by
    several (shared). Block 0 is the null block: taken out at once and never handed out.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.num_blocks = num_blocks  # null block included
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.null_block = self.free_block_queue.popleft_n(1)[0]
        # Per group: hash -> the blocks that hold it, first cached first. Equal blocks are not merged:
        # a table, once written, never changes.
        self._cached: list[dict[bytes, dict[int, KVCacheBlock]]] = [{} for _ in range(num_groups)]
        self.num_ever_cached = 0
        self.history = PrefixHistory()

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, cached ones included."""
        return self.free_block_queue.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - 1 - self.free_block_queue.num_free_blocks

    def get_cached_block(self, block_hash: bytes, group_id: int) -> KVCacheBlock | None:
        """The block first cached under this hash, in use or free."""
        holders = self._cached[group_id].get(block_hash)
        return next(iter(holders.values())) if holders else None

    def get_new_blocks(
        self, num_blocks: int, request_id: str, group_id: int, first_logical_block: int
    ) -> list[KVCacheBlock]:
        """Take blocks from the front of the free queue; cached ones lose their hash.

        Raises:
            ValueError: fewer are free.
        """
        new_blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in new_blocks:
            if block.block_hash is not None:
                self._evict(block, request_id)
            block.ref_cnt = 1
        if trace.blocks:
            for logical_block, block in enumerate(new_blocks, first_logical_block):
                trace.emit(
                    BlockAllocated(block_id=block.block_id, ref_cnt=1, group=group_id, request_id=request_id,
                                   logical_block=logical_block)
                )
        return new_blocks

    def touch(self, blocks: Iterable[KVCacheBlock], request_id: str, group_id: int) -> None:
        """One more owner for each block of a hit; free ones leave the free queue."""
        for logical_block, block in enumerate(blocks):
            if block.is_null:
                continue
            was_free = block.ref_cnt == 0
            if was_free:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
            if trace.blocks:
                assert block.block_hash is not None
                trace.emit(
                    BlockTouched(block_id=block.block_id, ref_cnt=block.ref_cnt, group=group_id,
                                 request_id=request_id, logical_block=logical_block,
                                 hash=short_hash(block.block_hash), was_free=was_free)
                )

    def free_blocks(
        self, ordered_blocks: Sequence[tuple[int, KVCacheBlock]], request_id: str, group_id: int, why: WhyFreed
    ) -> None:
        """One owner less for each (logical block, block), in the order given.

        Blocks nobody holds go to the back of the free queue and keep their hash. Callers give a
        table from its end, so that of one prefix the tail is evicted first.
        """
        for logical_block, block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.append_n((block,))
            if trace.blocks:
                is_free = block.ref_cnt == 0
                trace.emit(
                    BlockFreed(block_id=block.block_id, ref_cnt=block.ref_cnt, group=group_id,
                               request_id=request_id, logical_block=logical_block,
                               hash=short_hash(block.block_hash) if block.block_hash else None,
                               free_queue_index=self.num_free_blocks - 1 if is_free else None, why=why)
                )

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],   # the request's table in this group
        block_hashes: Sequence[bytes],    # of its full blocks, at this group's block size
        num_cached_blocks: int,
        num_full_blocks: int,
        group_id: int,
        block_size: int,
    ) -> None:
        """Make blocks num_cached_blocks … num_full_blocks - 1 findable under their hashes."""
        cached = self._cached[group_id]
        for logical_block in range(num_cached_blocks, num_full_blocks):
            block, block_hash = blocks[logical_block], block_hashes[logical_block]
            if block.is_null:
                continue
            block.block_hash, block.group_id = block_hash, group_id
            cached.setdefault(block_hash, {})[block.block_id] = block
            self.num_ever_cached += 1
            if trace.decisions:
                parent = block_hashes[logical_block - 1] if logical_block else None
                first = logical_block * block_size
                tokens = tuple(request.all_token_ids[first : first + block_size])
                self.history.cached(group_id, block_hash, parent, tokens, block.block_id)
            if trace.blocks:
                trace.emit(
                    BlockCached(block_id=block.block_id, ref_cnt=block.ref_cnt, group=group_id,
                                request_id=request.request_id, logical_block=logical_block,
                                hash=short_hash(block_hash))
                )

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes; refused (False) while any block is in use. The queue keeps its order."""
        if self.num_used_blocks > 0:
            return False
        for cached in self._cached:
            cached.clear()
        for block in self.blocks:
            block.block_hash = None
        if trace.decisions:
            self.history.reset()
        return True

    def _evict(self, block: KVCacheBlock, for_request: str) -> None:
        block_hash, group_id = block.block_hash, block.group_id
        assert block_hash is not None
        holders = self._cached[group_id][block_hash]
        del holders[block.block_id]
        if not holders:
            del self._cached[group_id][block_hash]
        block.block_hash = None
        if trace.decisions and not holders:
            self.history.evicted(group_id, block_hash, for_request)
        if trace.blocks:
            trace.emit(
                BlockEvicted(block_id=block.block_id, ref_cnt=0, group=group_id, request_id=for_request,
                             hash=short_hash(block_hash))
            )
