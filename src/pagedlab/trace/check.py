"""``pagedlab check``: invariants that hold at every moment of any run, over any trace.

The trace is folded once; each event is held against the state before and after it, and each step
against the whole state at its end. The first thing that is wrong is named with its step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedlab.errors import UserError
from pagedlab.trace.events import (
    BlockAllocated,
    BlockCached,
    BlockEvicted,
    BlockFreed,
    BlocksAppended,
    BlockTouched,
    EngineSnapshot,
    Event,
    KvWritten,
    QueueNotReached,
    RequestAdded,
    RequestConsidered,
    RequestFinished,
    RequestOutput,
    RequestPreempted,
    RowAssigned,
    RowFreed,
    RowMoved,
    SlotsAllocated,
    SlotsMapped,
    SlotsRefused,
    StepFinished,
    StepScheduled,
    StepStarted,
    TraceHeader,
)
from pagedlab.trace.state import EngineState, Fold, describe, same
from pagedlab.trace.trace import Trace
from pagedlab.wording import plural

INVARIANTS = {
    "complete": "no record is missing, and each fits the state before it",
    "snapshot": "a snapshot inside the trace equals the state folded from the events before it",
    "conservation": "every block but the null block is either free or held, never both, never neither",
    "null_block": "block 0 is never handed out, cached or freed",
    "free_queue": "blocks are taken from the front of the free queue, hits from anywhere in it, and return to its end",
    "ref_counts": "a block's reference count is the number of tables that hold it",
    "sharing": "a block held by several tables is cached, so they share it by its hash",
    "hashes": "a block gets a hash while it is held, keeps it until it is evicted, and is hit under it",
    "tables": "every computed token of a running request has a block, and waiting requests hold none",
    "budget": "the step's grants add up and stay within the token budget",
    "seats": "no more requests run than max_num_seqs",
    "counts": "the numbers that an event gives agree with the state",
    "reasons": "every unfinished request has a reason in each step",
    "append": "a token is appended only when everything known before it is computed",
    "rows": "a row belongs to one request, and its table is the request's",
    "slots": "a token's slot follows from its position through its request's block table",
    "writes": "the kernel wrote exactly the slots of the slot mapping",
}
STEPS_WITHOUT_PROGRESS = 50  # after so many check raises its alarm; the engine's guard acts after 100
STEPS_OVERTAKEN = 200        # a request that waits so long while later ones are admitted is starving


@dataclass(frozen=True)
class Violation:
    """The first broken invariant."""

    invariant: str   # a key of INVARIANTS
    engine: int
    step: int
    seq: int
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.message} (seq {self.seq}; {self.invariant}: {INVARIANTS[self.invariant]})"


class _Broken(Exception):
    def __init__(self, invariant: str, message: str) -> None:
        self.invariant, self.message = invariant, message


def check(trace: Trace, notices: list[str] | None = None) -> Violation | None:
    """The first broken invariant, or None; alarms that break nothing are added to ``notices``.

    Raises:
        UserError: recorded below `blocks`.
    """
    trace.need("blocks", "check")
    fold = Fold()
    engines: dict[int, EngineCheck] = {}
    for event in trace:
        engine = engines.get(event.engine)
        try:
            if type(event) is EngineSnapshot:
                if event.engine in fold.states and engine is not None:
                    engine.snapshot(fold.states[event.engine], event)
                else:  # the engine's first, or the first after a gap
                    engine = engines[event.engine] = EngineCheck(trace.header, notices)
            state = fold.states.get(event.engine)
            if engine is not None and state is not None:
                engine.before(state, event)
            fold.apply(event)
            state = fold.states.get(event.engine)
            if engine is not None and state is not None:
                engine.after(state, event)
        except _Broken as broken:
            return Violation(broken.invariant, event.engine, event.step, event.seq, broken.message)
        except UserError as error:
            return Violation("complete", event.engine, event.step, event.seq, str(error).rstrip("."))
        except (LookupError, TypeError, ValueError):
            return Violation("complete", event.engine, event.step, event.seq, f"{describe(event)} makes no sense here")
    for engine_id, engine in engines.items():
        if engine_id in fold.states:
            engine.end(fold.states[engine_id])
    return None


class EngineCheck:
    """The invariants of one engine, and what must be remembered from event to event."""

    def __init__(self, header: TraceHeader, notices: list[str] | None = None) -> None:
        seats = header.config.get("max_num_seqs")
        self.max_num_seqs = seats if isinstance(seats, int) else None
        self.notices = notices if notices is not None else []
        self.in_step = False
        self.token_budget = self.budget = 0
        self.grants: dict[str, int] = {}          # of this step, in order
        self.explained: set[str] = set()          # requests that have a reason in this step
        self.slots: dict[int, dict[int, int]] = {}  # group -> token -> slot of this step
        self.furthest: dict[str, int] = {}        # request -> most tokens ever computed
        self.steps_without_progress = 0
        self.progress = True
        self.came: dict[str, tuple[int, int]] = {}  # unfinished request -> how many came before it, and in which step
        self.num_came = 0
        self.admitted: list[int] = []               # how many came before each one that was admitted

    def before(self, state: EngineState, event: Event) -> None:
        check = _BEFORE.get(type(event))
        if check is not None:
            check(self, state, event)

    def after(self, state: EngineState, event: Event) -> None:
        check = _AFTER.get(type(event))
        if check is not None:
            check(self, state, event)

    def snapshot(self, state: EngineState, e: EngineSnapshot) -> None:
        difference = same(state, EngineState.from_snapshot(e))
        if difference is not None:
            raise _Broken("snapshot", f"the fold and the snapshot differ in {difference}")

    # ---------------------------------------------------------------- blocks

    def block_allocated(self, state: EngineState, e: BlockAllocated) -> None:
        _check_id(state, e.block_id, "handed out")
        front = next(iter(state.free_queue), None)
        if e.block_id != front:
            raise _Broken("free_queue", f"block {e.block_id} was allocated, but block {front} is at the front")
        if e.block_id in state.cached_blocks:
            raise _Broken("hashes", f"block {e.block_id} was allocated and still has a hash")
        if e.ref_cnt != 1:
            raise _Broken("ref_counts", f"block {e.block_id} was allocated with reference count {e.ref_cnt}")

    def block_touched(self, state: EngineState, e: BlockTouched) -> None:
        _check_id(state, e.block_id, "hit")
        if e.was_free != (e.block_id in state.free_queue):
            where = "is" if e.block_id in state.free_queue else "is not"
            raise _Broken("free_queue", f"block {e.block_id} was hit as {'free' if e.was_free else 'held'}, but it "
                                        f"{where} in the free queue")
        if state.cached_blocks.get(e.block_id) != e.hash:
            raise _Broken("hashes", f"block {e.block_id} was hit under {e.hash}, but its hash is "
                                    f"{state.cached_blocks.get(e.block_id)}")
        _check_count(e.block_id, e.ref_cnt, state.ref_counts.get(e.block_id, 0) + 1)

    def block_cached(self, state: EngineState, e: BlockCached) -> None:
        _check_id(state, e.block_id, "cached")
        if e.block_id in state.cached_blocks:
            raise _Broken("hashes", f"block {e.block_id} was cached, but it has the hash "
                                    f"{state.cached_blocks[e.block_id]} already")
        if not state.ref_counts.get(e.block_id):
            raise _Broken("hashes", f"block {e.block_id} was cached while nobody holds it")
        _check_count(e.block_id, e.ref_cnt, state.ref_counts[e.block_id])

    def block_evicted(self, state: EngineState, e: BlockEvicted) -> None:
        if state.cached_blocks.get(e.block_id) != e.hash:
            raise _Broken("hashes", f"block {e.block_id} was evicted from {e.hash}, but its hash is "
                                    f"{state.cached_blocks.get(e.block_id)}")
        if state.ref_counts.get(e.block_id):
            raise _Broken("hashes", f"block {e.block_id} was evicted while it is held")

    def block_freed(self, state: EngineState, e: BlockFreed) -> None:
        _check_id(state, e.block_id, "freed")
        held = state.ref_counts.get(e.block_id, 0)
        if not held:
            raise _Broken("ref_counts", f"block {e.block_id} was freed by {e.request_id}, but nobody holds it")
        _check_count(e.block_id, e.ref_cnt, held - 1)
        index = None if held > 1 else len(state.free_queue)
        if e.free_queue_index != index:
            raise _Broken("free_queue", f"block {e.block_id} was freed to place {e.free_queue_index} of the free "
                                        f"queue, but the end is place {index}")
        if e.hash != state.cached_blocks.get(e.block_id):
            raise _Broken("hashes", f"block {e.block_id} was freed with the hash {e.hash}, but its hash is "
                                    f"{state.cached_blocks.get(e.block_id)}")

    # ---------------------------------------------------------------- schedule()

    def step_started(self, state: EngineState, e: StepStarted) -> None:
        self._step_ends(state)
        self.in_step = True
        self.token_budget = self.budget = e.token_budget
        self.grants, self.explained, self.slots = {}, set(), {}
        for what, said, found in (
            ("waiting requests", e.num_waiting, len(state.waiting)),
            ("running requests", e.num_running, len(state.running)),
            ("free blocks", e.num_free_blocks, len(state.free_queue)),
        ):
            if said != found:
                raise _Broken("counts", f"the step starts with {said} {what}, but there are {found}")

    def slots_allocated(self, state: EngineState, e: SlotsAllocated) -> None:
        needed = sum(e.needed_from_free_hits) + sum(e.needed_new)
        if e.num_free_after != len(state.free_queue) or e.num_free_before - needed != e.num_free_after:
            raise _Broken("counts", f"{e.request_id} took {needed} of {e.num_free_before} free blocks and left "
                                    f"{e.num_free_after}, but {len(state.free_queue)} are free")

    def slots_refused(self, state: EngineState, e: SlotsRefused) -> None:
        if e.num_free != len(state.free_queue) or e.num_needed <= e.num_free:
            raise _Broken("counts", f"{e.request_id} was refused {plural(e.num_needed, 'block')} with {e.num_free} "
                                    f"free, but {len(state.free_queue)} are free")

    def request_considered(self, state: EngineState, e: RequestConsidered) -> None:
        self.explained.add(e.request_id)
        if e.budget_before != self.budget or e.budget_before - e.num_tokens_granted != e.budget_after:
            raise _Broken("budget", f"{e.request_id} was granted {plural(e.num_tokens_granted, 'token')} of "
                                    f"{e.budget_before} and left {e.budget_after}, but {self.budget} were left")
        if e.budget_after < 0 or not 0 <= e.num_tokens_granted <= max(e.num_tokens_wanted, 0):
            raise _Broken("budget", f"{e.request_id} was granted {plural(e.num_tokens_granted, 'token')}, wanted "
                                    f"{e.num_tokens_wanted}, and the budget was {e.budget_before}")
        self.budget = e.budget_after
        if e.outcome == "scheduled":
            self.grants[e.request_id] = e.num_tokens_granted
            if e.queue == "waiting" and e.request_id in self.came:
                self.admitted.append(self.came[e.request_id][0])

    def request_preempted(self, state: EngineState, e: RequestPreempted) -> None:
        self.explained.add(e.request_id)
        self.budget += self.grants.pop(e.request_id, 0)
        if e.budget_after != self.budget:
            raise _Broken("budget", f"{e.request_id} was preempted and left a budget of {e.budget_after}, but "
                                    f"{self.budget} tokens are left")

    def queue_not_reached(self, state: EngineState, e: QueueNotReached) -> None:
        queue = state.waiting if e.queue == "waiting" else state.running
        rest = queue[-e.count :] if 0 < e.count <= len(queue) else []
        if rest[:1] != [e.first_request_id]:
            raise _Broken("counts", f"{e.count} requests of the {e.queue} queue from {e.first_request_id} on were not "
                                    f"reached, but it has {len(queue)}, and there stands {(rest or ['nobody'])[0]}")
        self.explained.update(rest)

    def step_scheduled(self, state: EngineState, e: StepScheduled) -> None:
        total = sum(e.num_scheduled_tokens.values())
        if total != e.total_num_scheduled_tokens or total > self.token_budget:
            raise _Broken("budget", f"{total} tokens are scheduled, the step says {e.total_num_scheduled_tokens} and "
                                    f"has a budget of {self.token_budget}")
        if e.num_scheduled_tokens != self.grants:
            raise _Broken("budget", f"{e.num_scheduled_tokens} is scheduled, but {self.grants} was granted")
        if self.max_num_seqs is not None and len(state.running) > self.max_num_seqs:
            raise _Broken("seats", f"{len(state.running)} requests run, max_num_seqs is {self.max_num_seqs}")
        for request_id in state.requests:
            if request_id not in self.explained:
                raise _Broken("reasons", f"{request_id} is unfinished, and nothing says why it was scheduled or not")
        for request_id in e.num_scheduled_tokens:
            computed = state.requests[request_id].num_computed_tokens
            if computed > self.furthest.get(request_id, 0):
                self.furthest[request_id] = computed
                self.progress = True
        self._check_tables(state)

    # ---------------------------------------------------------------- worker and update_from_output

    def row_assigned(self, state: EngineState, e: RowAssigned) -> None:
        if e.row in state.rows:
            raise _Broken("rows", f"row {e.row} was given to {e.request_id}, but {state.rows[e.row].request_id} has it")

    def row_freed(self, state: EngineState, e: RowFreed) -> None:
        _check_row(state, e.row, e.request_id)

    def row_moved(self, state: EngineState, e: RowMoved) -> None:
        _check_row(state, e.from_row, e.request_id)
        if e.row in state.rows:
            raise _Broken("rows", f"{e.request_id} moved to row {e.row}, but {state.rows[e.row].request_id} has it")

    def blocks_appended(self, state: EngineState, e: BlocksAppended) -> None:
        _check_row(state, e.row, e.request_id)

    def slots_mapped(self, state: EngineState, e: SlotsMapped) -> None:
        slots = self.slots[e.group] = {}
        tables = {r: state.requests[r].block_ids[e.group] for r in set(e.request_id)}
        columns = e.token, e.request_id, e.row, e.position, e.logical_block, e.offset, e.table_index, e.block_id, e.slot
        for token, request_id, row, position, logical, offset, index, block_id, slot in zip(*columns, strict=True):
            right_logical, right_offset = divmod(position, e.block_size)
            table = tables[request_id]
            held = table[right_logical] if right_logical < len(table) else 0
            if (logical, offset, index) != (right_logical, right_offset, row * e.table_stride + right_logical):
                raise _Broken("slots", f"token {token} of {request_id} at position {position} has logical block "
                                       f"{logical}, offset {offset}, table index {index}")
            if block_id != held or not held or slot != block_id * e.block_size + offset:
                raise _Broken("slots", f"token {token} of {request_id} at position {position} has slot {slot} in "
                                       f"block {block_id}, but its table says block {held}")
            slots[token] = slot
        if len(set(slots.values())) != len(slots):
            raise _Broken("slots", f"two tokens of group {e.group} have the same slot")

    def kv_written(self, state: EngineState, e: KvWritten) -> None:
        written = {t: s for t, s in zip(e.token, e.slot, strict=True) if s >= 0}
        if e.group not in self.slots or written == self.slots[e.group]:
            return
        token = min(t for t in {*written, *self.slots[e.group]} if written.get(t) != self.slots[e.group].get(t))
        raise _Broken("writes", f"layer {e.layer} wrote token {token} to slot {written.get(token)}, but its slot is "
                                f"{self.slots[e.group].get(token)}")

    def request_added(self, state: EngineState, e: RequestAdded) -> None:
        if e.request_id in state.requests:
            raise _Broken("counts", f"{e.request_id} was added while a request with this id is unfinished")
        self.came[e.request_id] = self.num_came, e.step
        self.num_came += 1

    def request_output(self, state: EngineState, e: RequestOutput) -> None:
        self.progress = True
        request = state.requests.get(e.request_id)
        if request is not None and e.new_token_ids and request.num_computed_tokens != len(request.token_ids):
            raise _Broken("append", f"{e.request_id} got a new token with {request.num_computed_tokens} of "
                                    f"{len(request.token_ids)} tokens computed")

    def request_finished(self, state: EngineState, e: RequestFinished) -> None:
        self.furthest.pop(e.request_id, None)
        self.came.pop(e.request_id, None)

    def step_finished(self, state: EngineState, e: StepFinished) -> None:
        self._step_ends(state)

    def end(self, state: EngineState) -> None:
        """Alarms about who is still waiting where the trace ends."""
        for request_id in state.waiting:
            place, step = self.came.get(request_id, (0, state.step))
            if state.step - step > STEPS_OVERTAKEN and state.requests[request_id].num_preemptions == 0:
                overtook = sum(other > place for other in self.admitted)
                if overtook:
                    self.notices.append(
                        f"starvation: {request_id} has waited {plural(state.step - step, 'step')}, while "
                        f"{plural(overtook, 'request')} that came after it had been admitted"
                    )

    # ---------------------------------------------------------------- the whole state

    def _step_ends(self, state: EngineState) -> None:
        if not self.in_step:
            return
        self.in_step = False
        self._check_pool(state)
        self._check_tables(state)
        for row in state.rows.values():
            _check_row_table(state, row.row)
        self.steps_without_progress = 0 if self.progress or not state.requests else self.steps_without_progress + 1
        self.progress = False
        if self.steps_without_progress == STEPS_WITHOUT_PROGRESS:
            at_fault = (state.running or state.waiting)[0]
            self.notices.append(
                f"livelock: up to step {state.step} no request got any further in {STEPS_WITHOUT_PROGRESS} steps; "
                f"{at_fault} stands first of {plural(len(state.requests), 'unfinished request')}"
            )

    def _check_pool(self, state: EngineState) -> None:
        held = Counter[int]()
        for request in state.requests.values():
            for table in request.block_ids:
                held.update(table)
        del held[0]
        if held != state.ref_counts:
            block = min(b for b in {*held, *state.ref_counts} if held.get(b, 0) != state.ref_counts.get(b, 0))
            raise _Broken("ref_counts", f"block {block} has reference count {state.ref_counts.get(block, 0)} and is "
                                        f"in {held.get(block, 0)} tables")
        for block, count in held.items():
            if count > 1 and block not in state.cached_blocks:
                raise _Broken("sharing", f"block {block} is in {count} tables and has no hash")
            if block in state.free_queue:
                raise _Broken("conservation", f"block {block} is held and free")
        if len(held) + len(state.free_queue) != state.num_blocks - 1:
            raise _Broken("conservation", f"{len(held)} blocks are held and {len(state.free_queue)} free, of "
                                          f"{state.num_blocks - 1} usable ones")
        if 0 in state.free_queue or 0 in state.cached_blocks:
            raise _Broken("null_block", "the null block is free or cached")

    def _check_tables(self, state: EngineState) -> None:
        for request_id in state.running:
            request = state.requests[request_id]
            for group, (table, block_size) in enumerate(zip(request.block_ids, state.block_sizes, strict=True)):
                if len(table) * block_size < request.num_computed_tokens:
                    raise _Broken("tables", f"{request_id} has {request.num_computed_tokens} computed tokens, but "
                                            f"{len(table)} blocks of {block_size} in group {group}")
        for request_id in state.waiting:
            if any(state.requests[request_id].block_ids):
                raise _Broken("tables", f"{request_id} waits and holds blocks")


def _check_id(state: EngineState, block_id: int, what: str) -> None:
    if block_id == 0:
        raise _Broken("null_block", f"the null block was {what}")
    if not 0 < block_id < state.num_blocks:
        raise _Broken("conservation", f"block {block_id} was {what}, but the pool has {state.num_blocks} blocks")


def _check_count(block_id: int, said: int, found: int) -> None:
    if said != found:
        raise _Broken("ref_counts", f"block {block_id} is said to have {said} owners, but {found} took it")


def _check_row(state: EngineState, row: int, request_id: str) -> None:
    holder = state.rows.get(row)
    if holder is None or holder.request_id != request_id:
        found = f"{holder.request_id}'s" if holder else "free"
        raise _Broken("rows", f"row {row} is said to be {request_id}'s, but it is {found}")


def _check_row_table(state: EngineState, row: int) -> None:
    """The worker's copy may keep ids of blocks that have left a window; those ahead must agree."""
    holder = state.rows[row]
    request = state.requests.get(holder.request_id)
    if request is None or request.status != "running":
        return  # the worker hears of it with the next step
    for group, (copy, table) in enumerate(zip(holder.block_ids, request.block_ids, strict=True)):
        if len(copy) != len(table) or any(theirs and ours != theirs for ours, theirs in zip(copy, table, strict=True)):
            raise _Broken("rows", f"row {row} of {holder.request_id} has blocks {copy} in group {group}, but the "
                                  f"request's table is {table}")


_Check = Callable[[EngineCheck, EngineState, Any], None]

_BEFORE: dict[type[Event], _Check] = {
    RequestAdded: EngineCheck.request_added,
    StepStarted: EngineCheck.step_started,
    BlockAllocated: EngineCheck.block_allocated,
    BlockTouched: EngineCheck.block_touched,
    BlockCached: EngineCheck.block_cached,
    BlockEvicted: EngineCheck.block_evicted,
    BlockFreed: EngineCheck.block_freed,
    RowAssigned: EngineCheck.row_assigned,
    RowFreed: EngineCheck.row_freed,
    RowMoved: EngineCheck.row_moved,
    RequestOutput: EngineCheck.request_output,
}
_AFTER: dict[type[Event], _Check] = {
    SlotsAllocated: EngineCheck.slots_allocated,
    SlotsRefused: EngineCheck.slots_refused,
    RequestConsidered: EngineCheck.request_considered,
    RequestPreempted: EngineCheck.request_preempted,
    QueueNotReached: EngineCheck.queue_not_reached,
    StepScheduled: EngineCheck.step_scheduled,
    BlocksAppended: EngineCheck.blocks_appended,
    SlotsMapped: EngineCheck.slots_mapped,
    KvWritten: EngineCheck.kv_written,
    RequestFinished: EngineCheck.request_finished,
    StepFinished: EngineCheck.step_finished,
}
