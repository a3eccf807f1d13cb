"""What the scheduler asks of the KV cache: a prefix hit, slots, and to take everything back.

Source: vllm/v1/core/kv_cache_manager.py. Tokens of a request being scheduled:

    |<------ computed ------>|<-- hit -->|<------- new ------->|
    | blocks held in tables  | cached    | blocks to allocate  |

``computed`` is 0 when there is a hit (only a request without blocks looks one up), and the hit is
empty for a running request.
"""

from __future__ import annotations

from math import lcm

from pagedlab.kv.block_pool import BlockPool
from pagedlab.kv.group import KVCacheGroup
from pagedlab.kv.hashing import short_hash
from pagedlab.kv.prefix import PrefixHit, blocks_in_sight, find_longest_cache_hit
from pagedlab.kv.specs import KVCacheConfig
from pagedlab.request import Request
from pagedlab.sched.output import BlockIds
from pagedlab.trace.events import PrefixMatched, SlotsAllocated, SlotsRefused, WhyFreed
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
        self.block_pool = BlockPool(kv_cache_config.num_blocks, len(groups), enable_caching)
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
        skip = request.sampling_params.skip_reading_prefix_cache
        if self.enable_caching and not skip:
            hit = find_longest_cache_hit(self.block_pool, self.groups, request, request.num_tokens - 1)
            self.prefix_cache_stats.record(request, hit.num_tokens)
        if trace.decisions:
            trace.emit(self._prefix_matched(request, hit, "prompt_logprobs" if skip else "caching_off"))
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

    def _prefix_matched(self, request: Request, hit: PrefixHit, why_not_searched: str) -> PrefixMatched:
        """Why the hit stopped; the next longer one would end ``step`` tokens later."""
        block_size = self.block_size
        stopped_at = hit.num_tokens // block_size
        event = PrefixMatched(
            request_id=request.request_id, num_tokens=request.num_tokens, num_computed_tokens=hit.num_tokens,
            block_ids=hit.block_ids(), stopped_at_block=stopped_at,
            why=why_not_searched, block_size=block_size,
        )
        if not self.enable_caching or why_not_searched == "prompt_logprobs":
            return event
        step = lcm(*(group.block_size for group in self.groups))
        if hit.num_tokens + step > request.num_tokens:
            event.why = "partial_block"
        elif hit.num_tokens + step == request.num_tokens:
            event.why = "last_token_must_be_computed"
        else:
            self._explain_miss(request, hit.num_tokens, hit.num_tokens + step, event)
        return event

    def _explain_miss(self, request: Request, num_hit: int, num_longer: int, event: PrefixMatched) -> None:
        """Name the first group, and in it the first block, for whose lack the hit is not ``num_longer`` tokens."""
        for group in self.groups:
            size, hashes = group.block_size, group.block_hashes(request)
            first = num_hit // size
            if group.sliding_window is not None:
                first = num_longer // size - max(1, blocks_in_sight(group))
            for i in range(max(0, first), num_longer // size):
                if self.block_pool.get_cached_block(hashes[i], group.group_id) is not None:
                    continue
                tokens = tuple(request.all_token_ids[i * size : (i + 1) * size])
                history = self.block_pool.history
                complete = history.num_recorded == self.block_pool.num_ever_cached
                miss = history.explain(group.group_id, hashes[i], hashes[i - 1] if i else None, tokens, complete)
                event.why = miss.why if group.sliding_window is None else "window_group"
                event.group, event.hash, event.key_differs = group.group_id, short_hash(hashes[i]), miss.key_differs
                event.similar_block_id = miss.similar_block_id
                event.evicted_at_step, event.evicted_for = miss.evicted_at_step, miss.evicted_for
                return
