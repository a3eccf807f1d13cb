"""The event about a look-up in the prefix cache; built only inside a guard."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from pagedlab.kv.block_pool import BlockPool
from pagedlab.kv.group import KVCacheGroup
from pagedlab.kv.hashing import short_hash
from pagedlab.kv.prefix import PrefixHit, blocks_in_sight
from pagedlab.request import Request
from pagedlab.trace.events import PrefixMatched


def prefix_matched(
    pool: BlockPool,
    groups: Sequence[KVCacheGroup],
    request: Request,
    hit: PrefixHit,
    block_size: int,         # tokens per hashed block
    enable_caching: bool,
) -> PrefixMatched:
    """What was found and why the hit stopped there; the next longer one would end ``step`` tokens later."""
    event = PrefixMatched(
        request_id=request.request_id, num_tokens=request.num_tokens, num_computed_tokens=hit.num_tokens,
        block_ids=hit.block_ids(), stopped_at_block=hit.num_tokens // block_size, why="", block_size=block_size,
    )  # fmt: skip
    step = lcm(*(group.block_size for group in groups))
    if request.sampling_params.skip_reading_prefix_cache:
        event.why = "prompt_logprobs"
    elif not enable_caching:
        event.why = "caching_off"
    elif hit.num_tokens + step > request.num_tokens:
        event.why = "partial_block"
    elif hit.num_tokens + step == request.num_tokens:
        event.why = "last_token_must_be_computed"
    else:
        _explain_miss(pool, groups, request, hit.num_tokens, hit.num_tokens + step, event)
    return event


def _explain_miss(
    pool: BlockPool,
    groups: Sequence[KVCacheGroup],
    request: Request,
    num_hit: int,
    num_longer: int,
    event: PrefixMatched,
) -> None:
    """Name the first group, and in it the first block, for whose lack the hit is not ``num_longer`` tokens."""
    complete = pool.history.num_recorded == pool.num_ever_cached
    for group in groups:
        size, hashes = group.block_size, group.block_hashes(request)
        first = num_hit // size
        if group.sliding_window is not None:
            first = num_longer // size - max(1, blocks_in_sight(group))
        for i in range(max(0, first), num_longer // size):
            if pool.get_cached_block(hashes[i], group.group_id) is not None:
                continue
            tokens = tuple(request.all_token_ids[i * size : (i + 1) * size])
            miss = pool.history.explain(group.group_id, hashes[i], hashes[i - 1] if i else None, tokens, complete)
            event.why = miss.why if group.sliding_window is None else "window_group"
            event.group, event.hash, event.key_differs = group.group_id, short_hash(hashes[i]), miss.key_differs
            event.similar_block_id = miss.similar_block_id
            event.evicted_at_step, event.evicted_for = miss.evicted_at_step, miss.evicted_for
            return
