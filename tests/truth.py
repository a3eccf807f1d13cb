"""What every field of an event must say, found without the code that emits it.

``Watched`` asks `Truth` for each event of the control plane and of the worker's rows. It looks at the
state folded from the events before, at the live engine, and at what other events of the same decision
said; where it names a field, the event must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

from pagedlab.engine.core import EngineCore
from pagedlab.kv.hashing import short_hash
from pagedlab.trace.events import (
    BlockAllocated,
    BlockCached,
    BlockEvicted,
    BlockFreed,
    BlockTouched,
    Event,
    PrefixCacheReset,
    PrefixMatched,
    QueueNotReached,
    RequestAborted,
    RequestAdded,
    RequestConsidered,
    RequestFinished,
    RequestOutput,
    RequestPreempted,
    RowAssigned,
    RowFreed,
    SlotsAllocated,
    SlotsRefused,
    StepFinished,
    StepScheduled,
    StepStarted,
    TokensSampled,
)
from pagedlab.trace.state import EngineState

Said = dict[str, Any]  # field -> what it must be
Place = tuple[str, int, int, int]  # request, group, logical block, block id


class Untrue(AssertionError):
    """An event says something that is not so."""


class Truth:
    """Remembers, between events, what those of one decision or one step have in common."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.scheduler = core, core.scheduler
        self.manager = core.scheduler.kv_cache_manager
        self.taken: list[Place] = []                       # touched or allocated, slots_allocated follows
        self.num_free_hits = [0 for _ in self.manager.groups]
        self.evicted: list[tuple[str, int]] = []           # (for whom, block id), slots_allocated follows
        self.evictions: dict[tuple[int, str], tuple[int, str]] = {}  # (group, hash) -> (step, for whom), the latest
        self.freed: list[tuple[str, str]] = []             # (request, why), the reason's own event follows
        self.num_freed = 0                                 # of those, blocks that went to the free queue
        self.matched: dict[str, PrefixMatched] = {}        # of this step
        self.allocated: dict[str, SlotsAllocated] = {}     # of this step
        self.refused: SlotsRefused | None = None           # the latest
        self.budget = 0                                    # tokens left when the latest request was looked at
        self.preempted: dict[str, int] = {}                # in this step -> tokens computed before
        self.finished: set[str] = set()                    # since the last step_scheduled
        self.scheduled: StepScheduled | None = None        # the latest
        self.sampled: dict[str, int] = {}                  # kept tokens of this step
        self.ending: dict[str, str] = {}                   # request -> finish reason, request_finished follows

    def check(self, state: EngineState, event: Event) -> None:
        """``state`` is the one before the event, the engine the one after the change."""
        look = _LOOK.get(type(event))
        if look is None:
            return
        try:
            rights = look(self, state, event)
        except (AttributeError, LookupError, TypeError) as error:
            raise Untrue(f"{type(event).__name__} of step {event.step} does not fit: {error!r}") from None
        for name, right in rights.items():
            said = getattr(event, name)
            if said != right:
                raise Untrue(f"{type(event).__name__} of step {event.step} says {name} {said}, but it is {right}")

    def need_same(self, event: Event, what: str, said: object, right: object) -> None:
        if said != right:
            raise Untrue(f"{type(event).__name__} of step {event.step}: {what} {said}, but {right}")

    # ---------------------------------------------------------------- requests come and go

    def request_added(self, state: EngineState, e: RequestAdded) -> Said:
        request = self.scheduler.requests[e.request_id]
        params, block_size = request.sampling_params, self.manager.block_size
        return {
            "prompt_token_ids": request.all_token_ids, "priority": request.priority, "prompt": request.prompt,
            "arrival_time": request.arrival_time, "cache_salt": request.cache_salt,
            "queue_key": self.scheduler.waiting.keys()[e.request_id],
            "num_full_blocks": request.num_tokens // block_size if self.manager.enable_caching else 0,
            "sampling": {
                "max_tokens": request.max_tokens, "eos_token_id": request.eos_token_id, "stop": list(params.stop),
                "stop_token_ids": list(params.stop_token_ids),
                **{n: getattr(params, n) for n in ("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
                                                   "ignore_eos", "prompt_logprobs")},
            },
        }  # fmt: skip

    def request_aborted(self, state: EngineState, e: RequestAborted) -> Said:
        self.ending[e.request_id] = "abort"
        return {"queue": "running" if e.request_id in state.running else "waiting"}

    def request_finished(self, state: EngineState, e: RequestFinished) -> Said:
        request = state.requests[e.request_id]
        why = "aborted" if e.finish_reason == "abort" else "finished"
        self._freed_because(e, e.request_id, why, sum(b > 0 for table in request.block_ids for b in table))
        self.finished.add(e.request_id)
        num_output = len(request.token_ids) - request.num_prompt_tokens
        return {
            "finish_reason": self.ending.pop(e.request_id, "error"),  # nothing announces an error
            "num_prompt_tokens": request.num_prompt_tokens, "num_output_tokens": num_output,
            "num_cached_tokens": max(request.num_cached_tokens, 0), "num_preemptions": request.num_preemptions,
            "stop_reason": None,                                      # no request of the small engines has stop tokens
        }  # fmt: skip

    def prefix_cache_reset(self, state: EngineState, e: PrefixCacheReset) -> Said:
        return {"num_used_blocks": len(state.ref_counts), "done": not state.ref_counts}

    # ---------------------------------------------------------------- blocks

    def block_allocated(self, state: EngineState, e: BlockAllocated) -> Said:
        self.taken.append((e.request_id, e.group, e.logical_block, e.block_id))
        return {"ref_cnt": self.manager.block_pool.blocks[e.block_id].ref_cnt}

    def block_touched(self, state: EngineState, e: BlockTouched) -> Said:
        self.num_free_hits[e.group] += e.was_free
        return self.block_allocated(state, e)  # type: ignore[arg-type]

    def block_cached(self, state: EngineState, e: BlockCached) -> Said:
        block = self.manager.block_pool.blocks[e.block_id]
        table = self.manager.groups[e.group].tables.get(e.request_id, [])
        right = {"group": block.group_id, "ref_cnt": block.ref_cnt}
        return {**right, "logical_block": table.index(block) if block in table else None}

    def block_evicted(self, state: EngineState, e: BlockEvicted) -> Said:
        self.evicted.append((e.request_id, e.block_id))
        self.evictions[e.group, e.hash] = e.step, e.request_id
        return {"ref_cnt": 0, "group": self.manager.block_pool.blocks[e.block_id].group_id}

    def block_freed(self, state: EngineState, e: BlockFreed) -> Said:
        self.freed.append((e.request_id, e.why))
        self.num_freed += e.ref_cnt == 0
        tables = state.requests[e.request_id].block_ids if e.request_id in state.requests else []
        table = tables[e.group] if e.group < len(tables) else []
        return {"logical_block": table.index(e.block_id) if e.block_id in table else None}

    def _freed_because(self, event: Event, request_id: str, why: str, num_blocks: int | None = None) -> int:
        """All blocks freed since the last such event were this request's, for this reason."""
        self.need_same(event, "blocks were freed by", set(self.freed), {(request_id, why)} if self.freed else set())
        if num_blocks is not None:
            self.need_same(event, "blocks were freed", len(self.freed), num_blocks)
        num_freed, self.num_freed = self.num_freed, 0
        self.freed.clear()
        return num_freed

    # ---------------------------------------------------------------- schedule()

    def step_started(self, state: EngineState, e: StepStarted) -> Said:
        self.matched, self.allocated, self.refused, self.preempted = {}, {}, None, {}
        self.budget = e.token_budget
        return {"token_budget": self.scheduler.config.max_num_batched_tokens}

    def prefix_matched(self, state: EngineState, e: PrefixMatched) -> Said:
        self.matched[e.request_id] = e
        sizes = state.block_sizes
        cut = e.why in ("never_cached", "evicted", "reset", "miss", "window_group")
        right: Said = {"num_tokens": len(state.requests[e.request_id].token_ids), "block_size": self.manager.block_size,
                       "stopped_at_block": e.num_computed_tokens // self.manager.block_size}
        for size, ids in zip(sizes, e.block_ids, strict=True):
            self.need_same(e, "a hit has tokens", len(ids) * size, e.num_computed_tokens)
            self.need_same(e, "not cached", [b for b in ids if b and b not in state.cached_blocks], [])
        if not cut:
            return {**right, **dict.fromkeys(("group", "hash", "key_differs", "similar_block_id", "evicted_at_step",
                                              "evicted_for"))}
        group = self.manager.groups[e.group]
        longer = e.num_computed_tokens + lcm(*sizes)
        hashes = group.block_hashes(self.scheduler.requests[e.request_id])[: longer // group.block_size]
        missing = [short_hash(h) for h in hashes if self.manager.block_pool.get_cached_block(h, e.group) is None]
        if group.sliding_window is None:
            right["hash"] = missing[0]
        else:
            right["why"] = "window_group"
            self.need_same(e, "the hash that was looked for", e.hash in missing, True)
        was_evicted = self.evictions.get((e.group, e.hash)) if e.evicted_at_step is not None else None
        if e.why == "evicted" or was_evicted:
            right["evicted_at_step"], right["evicted_for"] = was_evicted or ("a step", "somebody")
        else:
            right["evicted_at_step"] = right["evicted_for"] = None
        return right

    def slots_allocated(self, state: EngineState, e: SlotsAllocated) -> Said:
        request = state.requests[e.request_id]
        waits = e.request_id in state.waiting
        hit = self.matched[e.request_id] if waits else None
        right: list[Place] = []
        for group, (table, hits, new) in enumerate(zip(request.block_ids, e.hit_block_ids, e.new_block_ids,
                                                       strict=True)):
            right += [(e.request_id, group, i, b) for i, b in enumerate(hits) if b]
            right += [(e.request_id, group, i, b) for i, b in enumerate(new, len(table) + len(hits))]
        self.need_same(e, "blocks were taken", sorted(self.taken), sorted(right))
        new_ids = {b for ids in e.new_block_ids for b in ids}
        self.need_same(e, "evicted", [x for x in self.evicted if x[0] != e.request_id or x[1] not in new_ids], [])
        self._freed_because(e, e.request_id, "out_of_window")
        computed = hit.num_computed_tokens if hit else request.num_computed_tokens
        num_free_hits = self.num_free_hits
        self.taken, self.evicted, self.num_free_hits = [], [], [0 for _ in num_free_hits]
        self.allocated[e.request_id] = e
        return {
            "num_new_tokens": self._piece(len(request.token_ids), computed, waits),
            "hit_block_ids": hit.block_ids if hit else [[] for _ in state.block_sizes],
            "needed_from_free_hits": num_free_hits, "needed_new": [len(ids) for ids in e.new_block_ids],
            "num_tokens": min(computed + e.num_new_tokens, self.scheduler.config.max_model_len),
            "num_free_after": self.manager.block_pool.num_free_blocks,
        }  # fmt: skip

    def slots_refused(self, state: EngineState, e: SlotsRefused) -> Said:
        self.refused = e
        self._freed_because(e, e.request_id, "out_of_window")
        request = state.requests[e.request_id]
        hit = self.matched[e.request_id] if e.request_id in state.waiting else None
        hits = hit.block_ids if hit else [[] for _ in state.block_sizes]
        computed = hit.num_computed_tokens if hit else request.num_computed_tokens
        end = min(computed + e.num_new_tokens, self.scheduler.config.max_model_len)
        free_hits = [sum(b > 0 and b not in state.ref_counts for b in ids) for ids in hits]
        new = [max(-(-end // size) - len(table) - len(ids), 0)
               for size, table, ids in zip(state.block_sizes, request.block_ids, hits, strict=True)]
        return {"num_new_tokens": self._piece(len(request.token_ids), computed, hit is not None),
                "needed_from_free_hits": free_hits, "needed_new": new, "num_needed": sum(free_hits) + sum(new),
                "num_free": self.manager.block_pool.num_free_blocks}

    def _piece(self, num_tokens: int, computed: int, waits: bool) -> int:
        """What a request asks slots for: all it lacks, cut by the budget and two limits; victims come after the cut."""
        config = self.scheduler.config
        return min(num_tokens - computed, self.budget, config.long_prefill_token_threshold or self.budget,
                   self.budget if waits else config.max_model_len - 1 - computed)

    def request_considered(self, state: EngineState, e: RequestConsidered) -> Said:
        threshold = self.scheduler.config.long_prefill_token_threshold
        waits = e.request_id in state.waiting and e.request_id not in self.preempted  # or it preempted itself
        request, limit, numbers = state.requests[e.request_id], None, (None, None)
        wanted, reason = e.num_tokens_wanted, e.reason
        computed = self.matched[e.request_id].num_computed_tokens if waits else request.num_computed_tokens
        if e.request_id in self.preempted:
            computed = self.preempted[e.request_id]
        if e.outcome == "scheduled":
            self.need_same(e, "granted", e.num_tokens_granted, self.allocated[e.request_id].num_new_tokens)
            reason = "all_tokens"
            if e.num_tokens_granted < wanted:
                cuts = {"max_model_len": self.scheduler.config.max_model_len, "token_budget": e.budget_before}
                cuts = {"long_prefill_threshold": threshold, **cuts} if threshold else cuts
                reason = next(n for n in ("long_prefill_threshold", "token_budget", "max_model_len")
                              if n == "max_model_len" or cuts.get(n) == e.num_tokens_granted)
                limit = cuts[reason]
        elif reason in ("not_enough_free_blocks", "self_preemption"):
            self.need_same(e, "who was refused", self.refused and self.refused.request_id, e.request_id)
            numbers = self.refused.num_needed, self.refused.num_free
        elif reason == "no_tokens_left":
            left = min(len(request.token_ids), self.scheduler.config.max_model_len - 1) - computed
            self.need_same(e, "tokens are left to compute", left, 0)
        elif reason == "chunked_prefill_off":
            limit = threshold if 0 < threshold < wanted else None
            self.need_same(e, "it fits", min(limit or wanted, wanted) > e.budget_before, True)
        self.budget = e.budget_after
        outcomes = {"not_enough_free_blocks": "refused", "chunked_prefill_off": "refused", "no_tokens_left": "skipped",
                    "self_preemption": "preempted"}
        return {
            "queue": "waiting" if waits else "running", "num_tokens_wanted": len(request.token_ids) - computed,
            "num_computed_tokens": computed, "reason": reason, "limit": limit,
            "outcome": outcomes.get(reason, "scheduled"),
            "num_needed_blocks": numbers[0], "num_free_blocks": numbers[1],
        }  # fmt: skip

    def queue_not_reached(self, state: EngineState, e: QueueNotReached) -> Said:
        is_blocked = e.reason == "head_blocked"
        by_blocks = is_blocked and self.refused is not None and self.refused.request_id == state.waiting[0]
        seats = self.scheduler.config.max_num_seqs if e.reason == "max_num_seqs_reached" else None
        return {
            "head_request_id": state.waiting[0] if is_blocked else None, "limit": seats,
            "num_needed_blocks": self.refused.num_needed if by_blocks else None,
            "num_free_blocks": self.refused.num_free if by_blocks else None,
        }  # fmt: skip

    def request_preempted(self, state: EngineState, e: RequestPreempted) -> Said:
        request, num_free = state.requests[e.request_id], self.manager.block_pool.num_free_blocks
        num_blocks = sum(b > 0 for table in request.block_ids for b in table)
        num_freed = self._freed_because(e, e.request_id, "preempted", num_blocks)
        self.preempted[e.request_id] = request.num_computed_tokens
        taken_back = self.allocated.pop(e.request_id, None)
        policy = self.scheduler.policy
        return {
            "on_behalf_of": self.refused and self.refused.request_id, "num_tokens_lost": request.num_computed_tokens,
            "num_tokens_taken_back": taken_back.num_new_tokens if taken_back else 0, "block_ids": request.block_ids,
            "num_free_before": num_free - num_freed, "num_free_after": num_free, "rule": policy.rule,
            "queue_key": self.scheduler.waiting.keys()[e.request_id],
        }  # fmt: skip

    def step_scheduled(self, state: EngineState, e: StepScheduled) -> Said:
        self.scheduled, finished, self.finished, self.sampled = e, self.finished, set(), {}
        for request in (*e.new, *e.cached):
            live, granted = self.scheduler.requests[request.request_id], e.num_scheduled_tokens[request.request_id]
            table = list(self.manager.get_block_ids(request.request_id))
            self.need_same(e, "computed", request.num_computed_tokens, live.num_computed_tokens - granted)
            was_admitted = request.request_id in self.matched
            if request in e.new:
                self.need_same(e, "table", request.block_ids, table)
                self.need_same(e, "new", (was_admitted, live.num_preemptions), (True, 0))
                continue
            self.need_same(e, "resumed", (request.resumed, live.num_preemptions > 0 or not request.resumed),
                           (was_admitted, True))
            new = self.allocated[request.request_id].new_block_ids
            self.need_same(e, "news", request.new_block_ids,
                           table if request.resumed else new if any(new) else None)
        return {"finished_req_ids": sorted(finished), "preempted": list(self.preempted),
                "num_common_prefix_blocks": self._num_common_prefix_blocks(state)}

    def _num_common_prefix_blocks(self, state: EngineState) -> list[int]:
        """Leading blocks that all running requests hold, per group with full attention."""
        counts = [0 for _ in state.block_sizes]
        for group, window in enumerate(state.sliding_windows):
            if window is None and state.running and self.manager.enable_caching:
                tables = [state.requests[r].block_ids[group] for r in state.running]
                shortest = min(map(len, tables))
                same = [len({table[i] for table in tables}) == 1 for i in range(shortest)]
                counts[group] = [*same, False].index(False)
        return counts

    # ---------------------------------------------------------------- the worker, and update_from_output

    def row_assigned(self, state: EngineState, e: RowAssigned) -> Said:
        computed = state.requests[e.request_id].num_computed_tokens
        return {"num_computed_tokens": computed - self.scheduled.num_scheduled_tokens[e.request_id]}

    def row_freed(self, state: EngineState, e: RowFreed) -> Said:
        if e.request_id in self.scheduled.finished_req_ids:
            return {"why": "finished"}
        return {"why": "preempted" if e.request_id in self.scheduled.preempted else "not_scheduled"}

    def tokens_sampled(self, state: EngineState, e: TokensSampled) -> Said:
        if e.kept:
            self.sampled[e.request_id] = e.token_id
        request = state.requests[e.request_id]
        rows = {row.request_id: row.row for row in state.rows.values()}
        return {"row": rows[e.request_id], "kept": request.num_computed_tokens == len(request.token_ids)}

    def request_output(self, state: EngineState, e: RequestOutput) -> Said:
        request = state.requests[e.request_id]
        if e.finish_reason is not None:
            self.ending[e.request_id] = e.finish_reason
        return {"new_token_ids": [self.sampled.pop(e.request_id)], "num_cached_tokens": request.num_cached_tokens}

    def step_finished(self, state: EngineState, e: StepFinished) -> Said:
        self.need_same(e, "requests that are about to end", self.ending, {})
        lost = [r for r in self.sampled if r in state.requests]
        self.need_same(e, "kept tokens without an output", lost, [])
        return {"num_scheduled_tokens": self.scheduled.total_num_scheduled_tokens}


_LOOK: dict[type[Event], Callable[[Truth, EngineState, Any], Said]] = {
    RequestAdded: Truth.request_added,
    RequestAborted: Truth.request_aborted,
    RequestFinished: Truth.request_finished,
    PrefixCacheReset: Truth.prefix_cache_reset,
    BlockAllocated: Truth.block_allocated,
    BlockTouched: Truth.block_touched,
    BlockCached: Truth.block_cached,
    BlockEvicted: Truth.block_evicted,
    BlockFreed: Truth.block_freed,
    StepStarted: Truth.step_started,
    PrefixMatched: Truth.prefix_matched,
    SlotsAllocated: Truth.slots_allocated,
    SlotsRefused: Truth.slots_refused,
    RequestConsidered: Truth.request_considered,
    QueueNotReached: Truth.queue_not_reached,
    RequestPreempted: Truth.request_preempted,
    StepScheduled: Truth.step_scheduled,
    RowAssigned: Truth.row_assigned,
    RowFreed: Truth.row_freed,
    TokensSampled: Truth.tokens_sampled,
    RequestOutput: Truth.request_output,
    StepFinished: Truth.step_finished,
}
