"""The block tables of one KV-cache group.

Source: vllm/v1/core/single_type_kv_cache_manager.py. vLLM has a class per type of attention; here
full attention is a window that never ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedlab.kv.block import KVCacheBlock
from pagedlab.kv.block_pool import BlockPool
from pagedlab.kv.hashing import merge_hashes
from pagedlab.kv.specs import AttentionSpec
from pagedlab.request import Request
from pagedlab.trace.events import WhyFreed


class KVCacheGroup:
    """Owns request -> blocks for the layers that keep and forget the same tokens."""

    def __init__(self, group_id: int, spec: AttentionSpec, pool: BlockPool, hash_block_size: int) -> None:
        self.group_id = group_id
        self.block_size = spec.block_size
        self.sliding_window = spec.sliding_window if spec.kind == "sliding_window" else None
        self.pool = pool
        self.hash_ratio = spec.block_size // hash_block_size  # hashed blocks per block of this group
        self.tables: dict[str, list[KVCacheBlock]] = {}       # request -> logical block -> block
        self.num_cached_blocks: dict[str, int] = {}           # leading blocks of a table that have been cached

    def block_hashes(self, request: Request) -> Sequence[bytes]:
        """Hashes of the request's full blocks at this group's block size."""
        return request.block_hashes if self.hash_ratio == 1 else merge_hashes(request.block_hashes, self.hash_ratio)

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no later token of the request will look at.

        The next token sees itself and the window - 1 tokens before it. Window 8, block size 4, 13
        computed tokens: tokens 0-5 are out of sight, so block 0 is skipped and block 1 is not.
        """
        if self.sliding_window is None:
            return 0
        return max(0, num_computed_tokens - self.sliding_window + 1) // self.block_size

    def free_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back what has left the window; the table keeps the null block in its place.

        This happens when the request is scheduled the next time, not when the blocks fall out.
        """
        table = self.tables.get(request_id)
        if not table:
            return
        last = min(self.num_skipped_blocks(num_computed_tokens), len(table))
        removed = []
        for logical_block in range(last - 1, -1, -1):  # the later block is evicted first
            if table[logical_block].is_null:
                break  # and so are all before it
            removed.append((logical_block, table[logical_block]))
            table[logical_block] = self.pool.null_block
        if removed:
            self.pool.free_blocks(removed, request_id, self.group_id, "out_of_window")

    def num_blocks_needed(
        self, request_id: str, num_tokens: int, hit_blocks: Sequence[KVCacheBlock]
    ) -> tuple[int, int]:
        """Blocks that must leave the free queue so that ``num_tokens`` tokens have a slot.

        Returns (hit blocks that are free now, new blocks). A free hit costs as much as a new block:
        either way the queue gets one shorter.
        """
        table = self.tables.get(request_id)
        needed_new = -(-num_tokens // self.block_size) - len(table or hit_blocks)
        needed_from_free_hits = 0
        if hit_blocks:
            needed_from_free_hits = sum(block.ref_cnt == 0 and not block.is_null for block in hit_blocks)
        return needed_from_free_hits, needed_new if needed_new > 0 else 0

    def take_hits(self, request_id: str, hit_blocks: list[KVCacheBlock]) -> None:
        """Start a table with the blocks of a prefix hit."""
        self.pool.touch(hit_blocks, request_id, self.group_id)
        self.tables[request_id] = list(hit_blocks)
        self.num_cached_blocks[request_id] = len(hit_blocks)

    def allocate(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Append blocks until ``num_tokens`` tokens have a slot; returns the new ones."""
        table = self.tables.setdefault(request_id, [])
        num_new = -(-num_tokens // self.block_size) - len(table)
        if num_new <= 0:
            return []
        new_blocks = self.pool.get_new_blocks(num_new, request_id, self.group_id, len(table))
        table += new_blocks
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the blocks that ``num_tokens`` tokens fill findable.

        0.14.1 fault: this runs when the tokens are *scheduled*. A request whose tokens are taken
        back in the same step leaves hashes on blocks nobody computed (only the priority policy can).
        """
        request_id = request.request_id
        num_cached = self.num_cached_blocks.get(request_id, 0)
        num_full = num_tokens // self.block_size
        if num_full > num_cached:
            self.pool.cache_full_blocks(
                request, self.tables[request_id], self.block_hashes(request), num_cached, num_full,
                self.group_id, self.block_size,
            )
            self.num_cached_blocks[request_id] = num_full

    def free(self, request_id: str, why: WhyFreed) -> None:
        """Give a whole table back, from its end."""
        table = self.tables.pop(request_id, [])
        self.num_cached_blocks.pop(request_id, None)
        if table:
            ordered = [(i, table[i]) for i in range(len(table) - 1, -1, -1)]
            self.pool.free_blocks(ordered, request_id, self.group_id, why)

    def num_common_prefix_blocks(self, request_id: str) -> int:
        """Leading blocks of this table that every request with a table holds (cascade attention)."""
        if self.sliding_window is not None:
            return 0
        num_holders = len(self.tables)
        count = 0
        for block in self.tables[request_id]:
            if block.ref_cnt != num_holders:
                break
            count += 1
        return count
