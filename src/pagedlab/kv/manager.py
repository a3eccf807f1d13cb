"""What the scheduler asks of the KV cache: a prefix hit, slots, and to take everything back.

Source: vllm/v1/core/kv_cache_manager.py. Tokens of a request being scheduled:

    |<------ computed ------>|<-- hit -->|<------- new ------->|
    | blocks held in tables  | cached    | blocks to allocate  |

``computed`` is 0 when there is a hit (only a request without blocks looks one up), and the hit is
empty for a running request.
"""

from __future__ import annotations

from pagedlab.kv.block_pool import BlockPool
from pagedlab.kv.group import KVCacheGroup
from pagedlab.kv.prefix import PrefixHit, find_longest_cache_hit
from pagedlab.kv.prefix_events import prefix_matched
from pagedlab.kv.specs import BlockIds, KVCacheConfig
from pagedlab.request import Request
from pagedlab.trace.events import SlotsAllocated, SlotsRefused, WhyFreed
from pagedlab.trace.tracer import trace


class PrefixCacheStats:
    """Tokens looked up and found; requests that were preempted before count apart."""

    def __init__(self) -> None:
        self.requests = self.queries = self.hits = 0
        self.preempted_requests = self.preempted_queries = self.preempted_hits = 0

    def record(self, request: Request, num_hits: int) -> None:
        """One look-up, also when the request is then not admitted."""
        if request.num_preemptions:
            self.preempted_requests += 1
            self.preempted_queries += request.num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += request.num_tokens
            self.hits += num_hits


class KVCacheManager:
    """One list of groups over one pool."""

    def __init__(
        self, kv_cache_config: KVCacheConfig, *, block_size: int, max_model_len: int, enable_caching: bool
    ) -> None:
        self.block_size = block_size  # tokens per hashed block; every group's is a multiple
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        groups = kv_cache_config.kv_cache_groups
        self.block_pool = BlockPool(kv_cache_config.num_blocks, len(groups))
        self.groups = [KVCacheGroup(i, g.kv_cache_spec, self.block_pool, block_size) for i, g in enumerate(groups)]
        self.windowed_groups = [group for group in self.groups if group.sliding_window is not None]
        self.no_hit = PrefixHit(0, tuple([] for _ in groups))
        self.no_blocks: BlockIds = tuple([] for _ in groups)
        self.prefix_cache_stats = PrefixCacheStats()
        self.refused = (0, 0)  # (blocks needed, blocks free) of the latest refusal, for whoever explains it

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest usable prefix hit of a request without blocks. Takes nothing yet.

        At least the last token must be computed, to get logits: the hit is limited to known tokens
        - 1 and then to whole blocks, so a fully cached prompt computes a whole block again.
        """
        hit = self.no_hit
        if self.enable_caching and not request.sampling_params.skip_reading_prefix_cache:
            hit = find_longest_cache_hit(self.block_pool, self.groups, request, request.num_tokens - 1)
            self.prefix_cache_stats.record(request, hit.num_tokens)
        if trace.decisions:
            trace.emit(prefix_matched(self.block_pool, self.groups, request, hit, self.block_size, self.enable_caching))
        return hit

    def allocate_slots(self, request: Request, num_new_tokens: int, hit: PrefixHit | None = None) -> BlockIds | None:
        """Give the next ``num_new_tokens`` tokens of a request a slot each.

        First frees what has left a sliding window, also when the rest is then refused. Full blocks
        are cached at once, before they are computed: a twin admitted in the same step hits them.

        Returns the ids of the new blocks per group, or None if more blocks are needed than are free.
        """
        request_id = request.request_id
        hit = hit or self.no_hit
        num_computed = request.num_computed_tokens + hit.num_tokens
        num_tokens = min(num_computed + num_new_tokens, self.max_model_len)
        for group in self.windowed_groups:
            group.free_skipped_blocks(request_id, num_computed)

        pool = self.block_pool
        num_free = pool.free_block_queue.num_free_blocks
        needed_from_free_hits, needed_new, num_needed = [], [], 0
        for group, hit_blocks in zip(self.groups, hit.blocks, strict=True):
            from_free_hits, new = group.num_blocks_needed(request_id, num_tokens, hit_blocks)
            needed_from_free_hits.append(from_free_hits)
            needed_new.append(new)
            num_needed += from_free_hits + new
        if num_needed > num_free:
            self.refused = (num_needed, num_free)
            if trace.decisions:
                trace.emit(
                    SlotsRefused(request_id=request_id, num_new_tokens=num_new_tokens,
                                 needed_from_free_hits=needed_from_free_hits, needed_new=needed_new,
                                 num_needed=num_needed, num_free=num_free)
                )
            return None

        if hit.num_tokens:
            for group, hit_blocks in zip(self.groups, hit.blocks, strict=True):
                group.take_hits(request_id, hit_blocks)
        new_block_ids = self.no_blocks
        if num_needed or request_id not in self.groups[0].tables:
            new_block_ids = tuple(
                [block.block_id for block in group.allocate(request_id, num_tokens)] for group in self.groups
            )
        if self.enable_caching:
            for group in self.groups:
                group.cache_blocks(request, num_tokens)
        if trace.decisions:
            trace.emit(
                SlotsAllocated(request_id=request_id, num_new_tokens=num_new_tokens, num_tokens=num_tokens,
                               needed_from_free_hits=needed_from_free_hits, needed_new=needed_new,
                               hit_block_ids=hit.block_ids() if hit.num_tokens else list(self.no_blocks),
                               new_block_ids=list(new_block_ids),
                               num_free_before=num_free, num_free_after=pool.free_block_queue.num_free_blocks)
            )
        return new_block_ids

    def free(self, request: Request, why: WhyFreed) -> None:
        """Take all blocks back, group by group, each table from its end."""
        for group in self.groups:
            group.free(request.request_id, why)

    def get_block_ids(self, request_id: str) -> BlockIds:
        """The request's block table per group; 0 where a block has left the window."""
        return tuple([block.block_id for block in group.tables.get(request_id, ())] for group in self.groups)

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Per group; 0 without caching."""
        if not self.enable_caching:
            return [0] * len(self.groups)
        return [group.num_common_prefix_blocks(request_id) for group in self.groups]
