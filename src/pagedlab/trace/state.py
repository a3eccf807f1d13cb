"""The engine's state at a moment, rebuilt by folding the trace event by event.

A fold starts at an ``engine_snapshot`` and applies what follows; at level `blocks` and above it
arrives at exactly what a walk over the live objects finds. Nothing here asks the engine anything:
what an event does not say, the state does not know.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from pagedlab.errors import UserError
from pagedlab.trace.events import (
    BatchOrdered,
    BlockAllocated,
    BlockCached,
    BlockEvicted,
    BlockFreed,
    BlocksAppended,
    BlockTouched,
    EngineSnapshot,
    Event,
    Groups,
    InputsPrepared,
    MetadataBuilt,
    PrefixCacheReset,
    RequestAborted,
    RequestAdded,
    RequestConsidered,
    RequestFinished,
    RequestOutput,
    RequestPreempted,
    RequestState,
    RowAssigned,
    RowFreed,
    RowMoved,
    RowState,
    SlotsAllocated,
    SlotsMapped,
    StepScheduled,
    StepStarted,
    TablesGathered,
    TokensSampled,
    TraceGap,
)


@dataclass
class FlatBatch:
    """The latest inputs of the forward pass, as far as they have been built; level `tensors`."""

    step: int = -1
    ordered: BatchOrdered | None = None
    tables: dict[int, TablesGathered] = field(default_factory=dict)   # group -> rows read
    inputs: InputsPrepared | None = None
    slots: dict[int, SlotsMapped] = field(default_factory=dict)       # group -> slot mapping
    metadata: dict[int, MetadataBuilt] = field(default_factory=dict)  # group -> for the backend


@dataclass
class EngineState:
    """Queues, requests, pool, rows and flat batch of one engine."""

    engine: int
    step: int                                 # the last step whose schedule() began
    seq: int                                  # the event this is the state after
    block_sizes: list[int]                    # per KV-cache group
    sliding_windows: list[int | None]         # per KV-cache group, in tokens; None is full attention
    num_blocks: int                           # null block included
    requests: dict[str, RequestState]         # unfinished ones; block_ids is the block table
    waiting: list[str]                        # in serving order
    running: list[str]
    free_queue: OrderedDict[int, None]        # front first; any block leaves in constant time
    ref_counts: dict[int, int]                # only where > 0
    cached_blocks: dict[int, str]             # block id -> short hash
    rows: dict[int, RowState]                 # the worker's rows
    batch: FlatBatch = field(default_factory=FlatBatch)

    @classmethod
    def from_snapshot(cls, snapshot: EngineSnapshot) -> EngineState:
        return cls(
            engine=snapshot.engine,
            step=snapshot.step,
            seq=snapshot.seq,
            block_sizes=list(snapshot.block_sizes),
            sliding_windows=list(snapshot.sliding_windows),
            num_blocks=snapshot.num_blocks,
            requests={r.request_id: _copy_request(r) for r in snapshot.requests},
            waiting=list(snapshot.waiting),
            running=list(snapshot.running),
            free_queue=OrderedDict.fromkeys(snapshot.free_queue),
            ref_counts=dict(snapshot.ref_counts),
            cached_blocks=dict(snapshot.cached_blocks),
            rows={r.row: _copy_row(r) for r in snapshot.rows},
        )

    def copy(self) -> EngineState:
        """Independent of this one, except for the events in ``batch``, which nobody changes."""
        batch = copy(self.batch)
        batch.tables, batch.slots, batch.metadata = dict(batch.tables), dict(batch.slots), dict(batch.metadata)
        return EngineState(
            self.engine, self.step, self.seq, self.block_sizes, self.sliding_windows, self.num_blocks,
            {k: _copy_request(r) for k, r in self.requests.items()}, list(self.waiting), list(self.running),
            self.free_queue.copy(), dict(self.ref_counts), dict(self.cached_blocks),
            {k: _copy_row(r) for k, r in self.rows.items()}, batch,
        )

    @property
    def num_groups(self) -> int:
        return len(self.block_sizes)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    def owners(self) -> dict[int, list[tuple[str, int, int]]]:
        """Block id -> the (request, group, logical block) whose tables hold it; null block left out."""
        owners: dict[int, list[tuple[str, int, int]]] = {}
        for request_id, request in self.requests.items():
            for group, table in enumerate(request.block_ids):
                for logical_block, block_id in enumerate(table):
                    if block_id:
                        owners.setdefault(block_id, []).append((request_id, group, logical_block))
        return owners

    def state_of_block(self, block_id: int) -> str:
        """null, free, cached (free, but can still be hit), in_use or shared."""
        if block_id == 0:
            return "null"
        ref_cnt = self.ref_counts.get(block_id, 0)
        if ref_cnt:
            return "shared" if ref_cnt > 1 else "in_use"
        return "cached" if block_id in self.cached_blocks else "free"

    def apply(self, event: Event) -> None:
        """Take one event in; events that change nothing here only move ``seq`` and ``step``."""
        self.seq, self.step = event.seq, event.step
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    # ------------------------------------------------------------------ used by the handlers

    def _enqueue(self, request: RequestState) -> None:
        at = bisect_right(self.waiting, request.queue_key, key=self._queue_key)
        self.waiting.insert(at, request.request_id)

    def _dequeue(self, request_id: str) -> None:
        """Leave whichever queue it is in."""
        if request_id in self.requests and self.requests[request_id].status != "running":
            at = bisect_left(self.waiting, self._queue_key(request_id), key=self._queue_key)
            if self.waiting[at : at + 1] == [request_id]:
                del self.waiting[at]
                return
        for queue in (self.waiting, self.running):
            if request_id in queue:
                queue.remove(request_id)

    def _queue_key(self, request_id: str) -> list[Any]:
        return self.requests[request_id].queue_key


class Fold:
    """States of all engines of a trace, and the proof that no record was left out.

    Raises:
        UserError: from :meth:`apply`, when a record is missing before the event, or the event
            cannot follow what came before.
    """

    def __init__(self) -> None:
        self.states: dict[int, EngineState] = {}
        self._next_seq: dict[str, int] = {}      # process -> seq that must come next

    @classmethod
    def starting_at(cls, snapshot: Event) -> Fold:
        fold = cls()
        fold.apply(snapshot)
        return fold

    @classmethod
    def resuming(cls, state: EngineState, event: Event) -> Fold:
        """``state`` is the one after ``event``, and is changed from here on."""
        fold = cls()
        fold.states[state.engine] = state
        fold._next_seq[event.proc] = event.seq + 1
        return fold

    def apply(self, event: Event) -> None:
        expected = self._next_seq.get(event.proc)
        if expected is not None and event.seq != expected and type(event) is not TraceGap:
            raise UserError(
                f"the record with seq {expected} is missing before seq {event.seq} (step {event.step}), so the state "
                "after it cannot be rebuilt: fold the whole trace, not a filtered one."
            )
        self._next_seq[event.proc] = event.seq + 1
        if type(event) is TraceGap:
            self.states.clear()  # unknown until the next snapshot
        elif type(event) is EngineSnapshot:
            self.states[event.engine] = EngineState.from_snapshot(event)
        elif event.engine in self.states and event.proc in ("engine", "worker:0"):  # other workers' rows are copies
            try:
                self.states[event.engine].apply(event)
            except (LookupError, TypeError, ValueError):
                raise UserError(
                    f"{describe(event)} does not fit the state before it: the trace is damaged or incomplete."
                ) from None


# ------------------------------------------------------------------ one handler per event that changes the state


def _request_added(state: EngineState, e: RequestAdded) -> None:
    request = RequestState(
        request_id=e.request_id,
        status="waiting",
        token_ids=list(e.prompt_token_ids),
        token_texts=None if e.prompt_token_texts is None else list(e.prompt_token_texts),
        num_prompt_tokens=len(e.prompt_token_ids),
        num_computed_tokens=0,
        num_cached_tokens=-1,
        num_preemptions=0,
        priority=e.priority,
        arrival_time=e.arrival_time,
        queue_key=e.queue_key,
        block_ids=[[] for _ in state.block_sizes],
    )
    state.requests[e.request_id] = request
    state._enqueue(request)


def _request_aborted(state: EngineState, e: RequestAborted) -> None:
    state._dequeue(e.request_id)


def _request_finished(state: EngineState, e: RequestFinished) -> None:
    if e.finish_reason != "abort":  # an aborted one left its queue with request_aborted
        state._dequeue(e.request_id)
    state.requests.pop(e.request_id, None)


def _prefix_cache_reset(state: EngineState, e: PrefixCacheReset) -> None:
    if e.done:
        state.cached_blocks.clear()


def _request_considered(state: EngineState, e: RequestConsidered) -> None:
    request = state.requests.get(e.request_id)
    if request is None or e.queue != "waiting" or e.outcome != "scheduled":
        return
    state._dequeue(e.request_id)
    state.running.append(e.request_id)
    request.status = "running"
    request.num_computed_tokens = e.num_computed_tokens
    if request.num_cached_tokens < 0:
        request.num_cached_tokens = e.num_computed_tokens


def _slots_allocated(state: EngineState, e: SlotsAllocated) -> None:
    request = state.requests.get(e.request_id)
    if request is not None:
        for table, hit, new in zip(request.block_ids, e.hit_block_ids, e.new_block_ids, strict=True):
            table += hit
            table += new


def _request_preempted(state: EngineState, e: RequestPreempted) -> None:
    request = state.requests.get(e.request_id)
    if request is None:
        return
    state._dequeue(e.request_id)
    request.status, request.num_computed_tokens, request.queue_key = "preempted", 0, e.queue_key
    request.num_preemptions += 1
    request.block_ids = [[] for _ in state.block_sizes]
    state._enqueue(request)


def _block_allocated(state: EngineState, e: BlockAllocated) -> None:
    state.free_queue.pop(e.block_id, None)
    state.ref_counts[e.block_id] = state.ref_counts.get(e.block_id, 0) + 1


def _block_touched(state: EngineState, e: BlockTouched) -> None:
    _block_allocated(state, e)  # type: ignore[arg-type]  # one more owner, gone from the free queue


def _block_cached(state: EngineState, e: BlockCached) -> None:
    state.cached_blocks[e.block_id] = e.hash


def _block_evicted(state: EngineState, e: BlockEvicted) -> None:
    state.cached_blocks.pop(e.block_id, None)


def _block_freed(state: EngineState, e: BlockFreed) -> None:
    ref_cnt = state.ref_counts.get(e.block_id, 0) - 1
    if ref_cnt > 0:
        state.ref_counts[e.block_id] = ref_cnt
    else:
        state.ref_counts.pop(e.block_id, None)
        state.free_queue[e.block_id] = None
    if e.why == "out_of_window" and e.request_id in state.requests:
        table = state.requests[e.request_id].block_ids[e.group]
        if e.logical_block < len(table):
            table[e.logical_block] = 0


def _step_started(state: EngineState, e: StepStarted) -> None:
    state.batch = FlatBatch(step=e.step)


def _step_scheduled(state: EngineState, e: StepScheduled) -> None:
    before = {r.request_id: r.num_computed_tokens for r in e.new}
    before.update((r.request_id, r.num_computed_tokens) for r in e.cached)
    for request_id, num_computed_tokens in before.items():
        if request_id in state.requests:
            granted = e.num_scheduled_tokens.get(request_id, 0)
            state.requests[request_id].num_computed_tokens = num_computed_tokens + granted


def _tokens_sampled(state: EngineState, e: TokensSampled) -> None:
    """The text of a token comes with the sampler's event, the token itself with request_output."""
    request = state.requests.get(e.request_id)
    if e.kept and request is not None and request.token_texts is not None and e.text is not None:
        request.token_texts.append(e.text)


def _request_output(state: EngineState, e: RequestOutput) -> None:
    if e.request_id in state.requests:
        state.requests[e.request_id].token_ids += e.new_token_ids


def _row_assigned(state: EngineState, e: RowAssigned) -> None:
    state.rows[e.row] = RowState(row=e.row, request_id=e.request_id, block_ids=_copy_groups(e.block_ids))


def _row_freed(state: EngineState, e: RowFreed) -> None:
    state.rows.pop(e.row, None)


def _row_moved(state: EngineState, e: RowMoved) -> None:
    row = state.rows.pop(e.from_row, None)
    if row is not None:
        row.row = e.row
        state.rows[e.row] = row


def _blocks_appended(state: EngineState, e: BlocksAppended) -> None:
    row = state.rows.get(e.row)
    if row is None:
        return
    if e.replaced:
        row.block_ids = _copy_groups(e.block_ids)
    else:
        for table, new in zip(row.block_ids, e.block_ids, strict=True):
            table += new


def _batch_ordered(state: EngineState, e: BatchOrdered) -> None:
    state.batch.ordered = e


def _tables_gathered(state: EngineState, e: TablesGathered) -> None:
    state.batch.tables[e.group] = e


def _inputs_prepared(state: EngineState, e: InputsPrepared) -> None:
    state.batch.inputs = e


def _slots_mapped(state: EngineState, e: SlotsMapped) -> None:
    state.batch.slots[e.group] = e


def _metadata_built(state: EngineState, e: MetadataBuilt) -> None:
    state.batch.metadata[e.group] = e


_HANDLERS: dict[type[Event], Callable[[EngineState, Any], None]] = {
    RequestAdded: _request_added,
    RequestAborted: _request_aborted,
    RequestFinished: _request_finished,
    PrefixCacheReset: _prefix_cache_reset,
    RequestConsidered: _request_considered,
    SlotsAllocated: _slots_allocated,
    RequestPreempted: _request_preempted,
    BlockAllocated: _block_allocated,
    BlockTouched: _block_touched,
    BlockCached: _block_cached,
    BlockEvicted: _block_evicted,
    BlockFreed: _block_freed,
    StepStarted: _step_started,
    StepScheduled: _step_scheduled,
    TokensSampled: _tokens_sampled,
    RequestOutput: _request_output,
    RowAssigned: _row_assigned,
    RowFreed: _row_freed,
    RowMoved: _row_moved,
    BlocksAppended: _blocks_appended,
    BatchOrdered: _batch_ordered,
    TablesGathered: _tables_gathered,
    InputsPrepared: _inputs_prepared,
    SlotsMapped: _slots_mapped,
    MetadataBuilt: _metadata_built,
}


def _copy_groups(groups: Groups) -> Groups:
    return [list(ids) for ids in groups]


def _copy_request(request: RequestState) -> RequestState:
    copied = copy(request)
    copied.token_ids = list(request.token_ids)
    copied.token_texts = None if request.token_texts is None else list(request.token_texts)
    copied.block_ids = _copy_groups(request.block_ids)
    return copied


def _copy_row(row: RowState) -> RowState:
    return RowState(row=row.row, request_id=row.request_id, block_ids=_copy_groups(row.block_ids))


# ------------------------------------------------------------------ are two states the same?

_REQUEST_FIELDS = (
    "status", "num_prompt_tokens", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "priority",
    "token_ids", "block_ids",
)  # fmt: skip


def same(a: EngineState, b: EngineState) -> str | None:
    """None if both are the same state, else one sentence on the first difference.

    Not compared: the place in the trace, the flat batch, texts, arrival times and queue keys (the
    order they make is).
    """
    for name in ("block_sizes", "sliding_windows", "num_blocks", "waiting", "running"):
        if getattr(a, name) != getattr(b, name):
            return f"{name}: {getattr(a, name)} and {getattr(b, name)}"
    if a.requests.keys() != b.requests.keys():
        return f"unfinished requests: {sorted(a.requests)} and {sorted(b.requests)}"
    for request_id, request in a.requests.items():
        for name in _REQUEST_FIELDS:
            ours, theirs = getattr(request, name), getattr(b.requests[request_id], name)
            if ours != theirs:
                return f"{name} of {request_id}: {ours} and {theirs}"
    for name, what in (("ref_counts", "reference count"), ("cached_blocks", "hash")):
        if difference := _first_difference(getattr(a, name), getattr(b, name)):
            return f"{what} of block {difference}"
    if list(a.free_queue) != list(b.free_queue):
        return f"free queue, front first: {_some(a.free_queue)} and {_some(b.free_queue)}"
    if a.rows.keys() != b.rows.keys():
        return f"rows in use: {sorted(a.rows)} and {sorted(b.rows)}"
    for index, row in a.rows.items():
        if row != b.rows[index]:
            return f"row {index}: {row} and {b.rows[index]}"
    return None


def _first_difference(a: dict[int, Any], b: dict[int, Any]) -> str | None:
    if a == b:
        return None
    key = min(k for k in {*a, *b} if a.get(k) != b.get(k))
    return f"{key}: {a.get(key)} and {b.get(key)}"


def _some(ids: Iterable[int], most: int = 24) -> str:
    listed = list(ids)
    return f"{listed[:most]}{f' … {len(listed)} blocks' if len(listed) > most else ''}"


def describe(event: Event) -> str:
    """Where an event is, for a message."""
    return f"{event.kind} (seq {event.seq}, step {event.step})"
