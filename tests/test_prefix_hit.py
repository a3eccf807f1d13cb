"""The longest prefix hit, beside a search that tries every length: any blocks may be cached, in any group."""

from __future__ import annotations

from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from engines import GROUPS, Shape
from pagedlab.kv.hashing import short_hash
from pagedlab.trace.events import PrefixMatched
from pagedlab.trace.tracer import tracing


def blocks_needed(size, window, length):
    """Of one group, so that ``length`` tokens are a hit: all, or what the next token looks back at."""
    end = length // size
    if window == 1:  # 0.14.1: it looks back at nothing and asks for a block, which it does not take
        return range(end - 1, end)
    return range(0 if window is None else max(0, length - window + 1) // size, end)


def tried_one_by_one(groups, ids, missing, max_length):
    """(length, block ids per group) of the longest hit; 0 stands before a window."""
    for length in range(max_length, 0, -1):
        needed = [blocks_needed(size, window, length) for size, window in groups]
        if any(length % size for size, _ in groups) or any(m & set(n) for m, n in zip(missing, needed, strict=True)):
            continue
        return length, [[0 if i not in n or window == 1 else table[i] for i in range(n.stop)]
                        for (_, window), table, n in zip(groups, ids, needed, strict=True)]
    return 0, [[] for _ in groups]


@given(groups=st.sampled_from(GROUPS), num_tokens=st.integers(1, 49), data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_longest_hit_is_found_and_a_block_that_a_longer_one_lacks_is_named(groups, num_tokens, data):
    shape = Shape(num_blocks=400, groups=groups)
    manager = shape.engine_core().scheduler.kv_cache_manager
    request, ids, missing = shape.request("r0", list(range(num_tokens))), [], []
    for group in manager.groups:
        blocks = manager.block_pool.get_new_blocks(num_tokens // group.block_size, "r0", group.group_id, 0)
        missing.append(data.draw(st.sets(st.integers(0, 48 // group.block_size), max_size=4)))
        for i in {*range(len(blocks))} - missing[-1]:
            hashes = group.block_hashes(request)
            manager.block_pool.cache_full_blocks(request, blocks, hashes, i, i + 1, group.group_id, group.block_size)
        ids.append([block.block_id for block in blocks])

    with tracing("decisions") as trace:
        hit = manager.get_computed_blocks(request)
    assert (hit.num_tokens, hit.block_ids()) == tried_one_by_one(groups, ids, missing, num_tokens - 1)

    (event,) = (e for e in trace if isinstance(e, PrefixMatched))
    longer = hit.num_tokens + lcm(*(size for size, _ in groups))
    lacking = [
        (group.group_id, short_hash(group.block_hashes(request)[i]))
        for group, (size, window), gone in zip(manager.groups, groups, missing, strict=True) if longer < num_tokens
        for i in blocks_needed(size, window, longer) if i in gone
    ]
    assert (event.group, event.hash) == (lacking[0] if lacking else (None, None))
