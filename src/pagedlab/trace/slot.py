"""``pagedlab why TRACE --slot N``: whose key and value a place of the cache held, step by step."""

from __future__ import annotations

from pagedlab.errors import UserError
from pagedlab.trace.events import (
    BlockAllocated,
    BlockCached,
    BlockFreed,
    BlockTouched,
    Event,
    SlotsMapped,
)
from pagedlab.trace.state import EngineState
from pagedlab.trace.trace import Trace
from pagedlab.trace.why import Answer
from pagedlab.wording import plural

_WHY_FREED = {"finished": "has finished", "aborted": "was cancelled", "preempted": "was preempted",
              "out_of_window": "will not look at it again"}
_STATES = {"free": "free", "cached": "free and can still be hit", "in_use": "in use", "shared": "shared"}


def slot_history(trace: Trace, slot: int) -> Answer:
    """Every write to the slot, and what happened to its block in between.

    Worked example, blocks of 16 tokens: slot 207 is offset 15 of block 12, as 207 = 12 · 16 + 15.

    Raises:
        UserError: recorded below `tensors`, or the pool has no such slot.
    """
    trace.need("tensors", "why --slot")
    first = trace.first_snapshot
    sizes = sorted(set(first.block_sizes)) if first is not None else []
    if first is None or not sizes or not 0 <= slot < first.num_blocks * sizes[-1]:
        known = f": they go from 0 to {first.num_blocks * sizes[-1] - 1:,}" if first is not None and sizes else ""
        raise UserError(f"no slot {slot} in this trace{known}.")
    answer = Answer(data={"slot": slot, "writes": []})
    for size in sizes:
        block_id, offset = divmod(slot, size)
        answer.lines.append(f"Slot {slot} is offset {offset} of block {block_id}: {block_id} · {size} + {offset}.")
        answer.data.update(block_id=block_id, offset=offset)
    block_ids = {slot // size for size in sizes}
    if block_ids == {0}:
        answer.lines.append("Block 0 is the null block: no token's key and value are ever kept there.")
        return answer
    for index, e in enumerate(trace.events):
        if e.engine != trace.engine:
            continue
        if type(e) is SlotsMapped:
            line = _written(e, slot, trace.state_after(index), answer) if slot in e.slot else None
        else:
            line = _line(e, block_ids)
        if line:
            when = f"step {e.step}" if e.step >= 0 else "before step 0"
            answer.lines.append(f"{when}: {line}")
    state = trace.at()
    held = [f"block {b} is {_STATES[state.state_of_block(b)]}" for b in sorted(block_ids) if b]
    writes = answer.data["writes"]
    if writes:
        last = writes[-1]
        content = f"holds position {last['position']} of {last['request_id']}, {last['text']!r}"
    else:
        content = "nothing was written here" if trace.header.model else "no model ran, so nothing was written"
    answer.lines.append(f"In the end: {content}; {', '.join(held)}.")
    return answer


def _written(e: SlotsMapped, slot: int, state: EngineState, answer: Answer) -> str:
    i = e.slot.index(slot)
    request_id, position = e.request_id[i], e.position[i]
    request = state.requests.get(request_id)
    known = [] if request is None else request.token_texts or [f"#{t}" for t in request.token_ids]
    text = known[position] if position < len(known) else "?"
    answer.data["writes"].append({"step": e.step, "request_id": request_id, "position": position,
                                  "logical_block": e.logical_block[i], "group": e.group, "text": text})
    return (f"written with position {position} of {request_id}, {text!r} (logical block {e.logical_block[i]} + "
            f"{e.offset[i]}, token {e.token[i]} of the step)")


def _line(e: Event, block_ids: set[int]) -> str | None:
    if not isinstance(e, BlockAllocated | BlockTouched | BlockCached | BlockFreed) or e.block_id not in block_ids:
        return None
    match e:
        case BlockAllocated():
            return f"block {e.block_id} is handed to {e.request_id}, as its logical block {e.logical_block}"
        case BlockTouched():
            return f"{e.request_id} hits block {e.block_id} and takes it as its logical block {e.logical_block}"
        case BlockCached():
            return f"block {e.block_id} is full, and from now on found under {e.hash}"
        case BlockFreed(ref_cnt=0):
            return f"block {e.block_id} is free, as {e.request_id} {_WHY_FREED[e.why]}; what it holds stays"
        case BlockFreed():
            return (f"{e.request_id} lets go of block {e.block_id}, as it {_WHY_FREED[e.why]}; "
                    f"{plural(e.ref_cnt, 'owner')} left")
    return None
