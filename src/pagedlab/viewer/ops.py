"""The language between packer and page: what each event changes in the state, as a few integers.

The page (model.js) knows the same numbers and applies them without interpreting an event.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from pagedlab.trace.events import (
    BlockAllocated,
    BlockCached,
    BlockEvicted,
    BlockFreed,
    BlockTouched,
    Event,
    PrefixCacheReset,
    RequestAborted,
    RequestAdded,
    RequestConsidered,
    RequestFinished,
    RequestOutput,
    RequestPreempted,
    RowAssigned,
    RowFreed,
    RowMoved,
    SlotsAllocated,
    StepScheduled,
)
from pagedlab.trace.state import EngineState


class Op(IntEnum):
    """What the page knows how to do; arguments are integers, requests and tokens by index."""

    ADD = 1  # request, place in waiting
    DEQUEUE = 2  # request: leave whichever queue it is in
    RUN = 3  # request, computed tokens: append to running
    ADVANCE = 4  # request, tokens scheduled
    LEARN = 5  # request, tokens that became known
    PREEMPT = 6  # request, place in waiting: tables emptied, nothing computed
    FINISH = 7  # request
    REF = 8  # block, count
    FREE_APPEND = 9  # block: to the back of the free queue
    FREE_REMOVE = 10  # block: out of the free queue
    HASH = 11  # block, short hash as a number
    UNHASH = 12  # block
    UNHASH_ALL = 13
    TABLE_PUSH = 14  # request, group, block
    TABLE_NULL = 15  # request, group, logical block: left the window
    ROW = 16  # row, request + 1 (0: one that ended before this trace begins)
    ROW_CLEAR = 17  # row
    STATUS = 18  # request, 0 waiting, 1 running, 2 preempted
    TABLE = 19  # request, group, count, blocks …: a whole table
    FREE_QUEUE = 20  # count, blocks …: the whole queue, front first


class Walk(Protocol):
    """What a rule asks of the packer: the state before the event, and requests by index."""

    requests: dict[str, int]
    state: EngineState

    def place(self, queue_key: list[Any], leaving: str | None = None) -> int:
        """Where a request with this key will stand in the waiting queue."""


def snapshot_ops(state: EngineState, requests: dict[str, int]) -> list[int]:
    """What rebuilds a state from nothing; ``requests`` gives each its index."""
    ops: list[int] = []
    statuses = {"running": 1, "preempted": 2}
    for place, request_id in enumerate(state.waiting):
        ops += (Op.ADD, requests[request_id], place)
    for request_id in state.running:
        ops += (Op.RUN, requests[request_id], state.requests[request_id].num_computed_tokens)
    for request_id, request in state.requests.items():
        index = requests[request_id]
        ops += (Op.LEARN, index, len(request.token_ids), Op.STATUS, index, statuses.get(request.status, 0))
        for group, table in enumerate(request.block_ids):
            ops += (Op.TABLE, index, group, len(table), *table)
    ops += (Op.FREE_QUEUE, len(state.free_queue), *state.free_queue)
    for block_id, count in state.ref_counts.items():
        ops += (Op.REF, block_id, count)
    for block_id, short_hash in state.cached_blocks.items():
        ops += (Op.HASH, block_id, int(short_hash, 16))
    for row, row_state in state.rows.items():
        ops += (Op.ROW, row, requests.get(row_state.request_id, -1) + 1)
    return ops


# ------------------------------------------------------------------ rules: event -> ops


def _added(p: Walk, e: RequestAdded) -> list[int]:
    request = p.requests[e.request_id]
    return [Op.ADD, request, p.place(e.queue_key), Op.LEARN, request, len(e.prompt_token_ids)]


def _aborted(p: Walk, e: RequestAborted) -> list[int]:
    return [Op.DEQUEUE, p.requests[e.request_id]]


def _finished(p: Walk, e: RequestFinished) -> list[int]:
    return [Op.FINISH, p.requests[e.request_id]]


def _considered(p: Walk, e: RequestConsidered) -> list[int]:
    if e.queue != "waiting" or e.outcome != "scheduled":
        return []
    return [Op.RUN, p.requests[e.request_id], e.num_computed_tokens]


def _slots(p: Walk, e: SlotsAllocated) -> list[int]:
    request = p.requests[e.request_id]
    ops: list[int] = []
    for group, (hit, new) in enumerate(zip(e.hit_block_ids, e.new_block_ids, strict=True)):
        for block_id in (*hit, *new):
            ops += (Op.TABLE_PUSH, request, group, block_id)
    return ops


def _preempted(p: Walk, e: RequestPreempted) -> list[int]:
    return [Op.PREEMPT, p.requests[e.request_id], p.place(e.queue_key, e.request_id)]


def _allocated(p: Walk, e: BlockAllocated) -> list[int]:
    return [Op.FREE_REMOVE, e.block_id, Op.REF, e.block_id, e.ref_cnt]


def _touched(p: Walk, e: BlockTouched) -> list[int]:
    leave = [Op.FREE_REMOVE, e.block_id] if e.was_free else []
    return [*leave, Op.REF, e.block_id, e.ref_cnt]


def _freed(p: Walk, e: BlockFreed) -> list[int]:
    ops = [Op.REF, e.block_id, e.ref_cnt]
    if e.ref_cnt == 0:
        ops += (Op.FREE_APPEND, e.block_id)
    if e.why == "out_of_window":
        ops += (Op.TABLE_NULL, p.requests[e.request_id], e.group, e.logical_block)
    return ops


def _cached(p: Walk, e: BlockCached) -> list[int]:
    return [Op.HASH, e.block_id, int(e.hash, 16)]


def _evicted(p: Walk, e: BlockEvicted) -> list[int]:
    return [Op.UNHASH, e.block_id]


def _reset(p: Walk, e: PrefixCacheReset) -> list[int]:
    return [Op.UNHASH_ALL] if e.done else []


def _scheduled(p: Walk, e: StepScheduled) -> list[int]:
    ops: list[int] = []
    for request_id, granted in e.num_scheduled_tokens.items():
        ops += (Op.ADVANCE, p.requests[request_id], granted)
    return ops


def _output(p: Walk, e: RequestOutput) -> list[int]:
    if e.request_id not in p.state.requests:
        return []
    return [Op.LEARN, p.requests[e.request_id], len(e.new_token_ids)]


def _row(p: Walk, e: RowAssigned) -> list[int]:
    return [Op.ROW, e.row, p.requests.get(e.request_id, -1) + 1]


def _row_freed(p: Walk, e: RowFreed) -> list[int]:
    return [Op.ROW_CLEAR, e.row]


def _row_moved(p: Walk, e: RowMoved) -> list[int]:
    return [Op.ROW_CLEAR, e.from_row, Op.ROW, e.row, p.requests.get(e.request_id, -1) + 1]


RULES: dict[type[Event], Callable[[Walk, Any], list[int]]] = {
    RequestAdded: _added, RequestAborted: _aborted, RequestFinished: _finished, RequestConsidered: _considered,
    SlotsAllocated: _slots, RequestPreempted: _preempted, BlockAllocated: _allocated, BlockTouched: _touched,
    BlockFreed: _freed, BlockCached: _cached, BlockEvicted: _evicted, PrefixCacheReset: _reset,
    StepScheduled: _scheduled, RequestOutput: _output, RowAssigned: _row, RowFreed: _row_freed, RowMoved: _row_moved,
}  # fmt: skip
