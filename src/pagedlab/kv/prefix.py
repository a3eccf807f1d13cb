"""The longest prefix of a request whose blocks are cached, in every group.

Source: find_longest_cache_hit in vllm/v1/core/single_type_kv_cache_manager.py and
HybridKVCacheCoordinator in vllm/v1/core/kv_cache_coordinator.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from pagedlab.kv.block import KVCacheBlock
from pagedlab.kv.block_pool import BlockPool
from pagedlab.kv.group import KVCacheGroup
from pagedlab.request import Request


@dataclass(slots=True)
class PrefixHit:
    """Blocks to start a table with, per group; null blocks before a window."""

    num_tokens: int
    blocks: tuple[list[KVCacheBlock], ...]

    def block_ids(self) -> list[list[int]]:
        return [[block.block_id for block in blocks] for blocks in self.blocks]


def find_longest_cache_hit(
    pool: BlockPool, groups: Sequence[KVCacheGroup], request: Request, max_length: int
) -> PrefixHit:
    """Search at most ``max_length`` tokens; the hit must hold in every group.

    Each group can only shorten what the others found. Any beginning of a hit is a hit again with full
    attention, so those groups are asked once; those with a window in turn, until none shortens it any
    more. With different block sizes the hit is a multiple of all of them.
    """
    alignment = lcm(*(group.block_size for group in groups))
    hits: dict[int, list[KVCacheBlock]] = {}  # group -> its blocks
    length = max_length
    for group in groups:
        if group.sliding_window is None:
            hits[group.group_id] = _search_full(pool, group, group.block_hashes(request), length, alignment)
            length = len(hits[group.group_id]) * group.block_size
    windowed = [group for group in groups if group.sliding_window is not None]
    shortened = True
    while shortened:
        before = length
        for group in windowed:
            hits[group.group_id] = _search_window(pool, group, group.block_hashes(request), length, alignment)
            length = len(hits[group.group_id]) * group.block_size
        shortened = length < before and len(windowed) > 1  # a single one has nothing to add
    return PrefixHit(length, tuple(hits[group.group_id][: length // group.block_size] for group in groups))


def _search_full(
    pool: BlockPool, group: KVCacheGroup, hashes: Sequence[bytes], max_length: int, alignment: int
) -> list[KVCacheBlock]:
    """Left to right, up to the first block that is not cached."""
    hit: list[KVCacheBlock] = []
    for block_hash in hashes[: max_length // group.block_size]:
        block = pool.get_cached_block(block_hash, group.group_id)
        if block is None:
            break
        hit.append(block)
    while len(hit) * group.block_size % alignment:
        hit.pop()
    return hit


def _search_window(
    pool: BlockPool, group: KVCacheGroup, hashes: Sequence[bytes], max_length: int, alignment: int
) -> list[KVCacheBlock]:
    """Right to left, up to an unbroken run as long as the window looks back.

    Window 5 and block size 4: the next token looks back 4 tokens, so one cached block is enough,
    and a table [·, ·, 9] is a hit of three blocks. At the very beginning a shorter run will do. Window
    1 looks back at nothing: a cached block sets the length of the hit and is then not taken.
    """
    in_sight = blocks_in_sight(group)
    num_blocks = min(max_length // group.block_size, len(hashes))
    hit = [pool.null_block] * num_blocks
    run = 0
    for i in range(num_blocks - 1, -1, -1):
        block = pool.get_cached_block(hashes[i], group.group_id)
        if block is None:
            run = 0
            continue
        if run == 0 and (i + 1) * group.block_size % alignment:
            continue
        if in_sight:
            hit[i] = block
        run += 1
        if run >= in_sight:
            return hit[: i + run]
    return hit[:run]


def blocks_in_sight(group: KVCacheGroup) -> int:
    """Blocks before the end of a hit that the next token looks at, besides its own."""
    assert group.sliding_window is not None
    return -(-(group.sliding_window - 1) // group.block_size)
