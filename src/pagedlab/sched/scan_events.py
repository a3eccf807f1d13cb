"""The events about a scan of the queues: who was looked at, and who not; built only inside a guard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagedlab.config import SchedulerConfig
from pagedlab.request import Request
from pagedlab.sched.waiting_queue import WaitingQueue
from pagedlab.trace.events import Outcome, QueueName, QueueNotReached, RequestConsidered

Scan = Iterator[RequestConsidered | QueueNotReached]


def scheduled(
    request: Request, queue: QueueName, wanted: int, granted: int, budget_after: int, config: SchedulerConfig
) -> RequestConsidered:
    """A grant smaller than wanted names what cut it."""
    if granted == wanted:
        reason, limit = "all_tokens", None
    elif granted == config.long_prefill_token_threshold:
        reason, limit = "long_prefill_threshold", granted
    elif budget_after == 0:
        reason, limit = "token_budget", granted
    else:
        reason, limit = "max_model_len", config.max_model_len
    return _considered(request, queue, wanted, granted, budget_after, "scheduled", reason, limit=limit)


def skipped(request: Request, wanted: int, budget: int) -> RequestConsidered:
    """It runs, and max_model_len leaves it nothing to compute."""
    return _considered(request, "running", wanted, 0, budget, "skipped", "no_tokens_left")


def preempted_itself(
    request: Request, wanted: int, budget: int, needed_and_free: tuple[int, int], running: Sequence[Request], index: int
) -> Scan:
    """It was the victim of its own need for blocks, which ends the scan before ``index``."""
    yield _considered(
        request, "running", wanted, 0, budget, "preempted", "self_preemption", needed_and_free=needed_and_free
    )
    yield from rest_of_running(running, index, "self_preemption")


def head_refused(
    waiting: WaitingQueue, reason: str, wanted: int, in_one_piece: int, budget: int, needed_and_free: tuple[int, int]
) -> Scan:
    """Nobody overtakes the head, whether it lacks blocks or its piece is more than the budget."""
    lacks_blocks = reason == "not_enough_free_blocks"
    head, numbers = waiting.peek(), needed_and_free if lacks_blocks else (None, None)
    limit = in_one_piece if in_one_piece < wanted and not lacks_blocks else None
    yield _considered(head, "waiting", wanted, 0, budget, "refused", reason, needed_and_free=numbers, limit=limit)
    if len(waiting) > 1:
        yield QueueNotReached(
            queue="waiting", count=len(waiting) - 1, first_request_id=waiting.second().request_id,
            reason="head_blocked", head_request_id=head.request_id,
            num_needed_blocks=numbers[0], num_free_blocks=numbers[1],
        )  # fmt: skip


def rest_of_running(running: Sequence[Request], index: int, reason: str) -> Scan:
    """The scan ended before ``index``, if that is not the end of the list."""
    if index < len(running):
        first = running[index].request_id
        yield QueueNotReached(queue="running", count=len(running) - index, first_request_id=first, reason=reason)


def whole_waiting(waiting: WaitingQueue, reason: str, limit: int | None = None) -> Scan:
    """The scan ended before the head, if there is one."""
    if waiting:
        first = waiting.peek().request_id
        yield QueueNotReached(queue="waiting", count=len(waiting), first_request_id=first, reason=reason, limit=limit)


def _considered(
    request: Request, queue: QueueName, wanted: int, granted: int, budget_after: int, outcome: Outcome, reason: str, *,
    needed_and_free: tuple[int, int] | tuple[None, None] = (None, None), limit: int | None = None,
) -> RequestConsidered:  # fmt: skip
    # Computed is what is not wanted, also of one that has just lost all it had computed.
    return RequestConsidered(
        request_id=request.request_id, queue=queue, num_computed_tokens=request.num_tokens - wanted,
        num_tokens_wanted=wanted, num_tokens_granted=granted,
        budget_before=budget_after + granted, budget_after=budget_after, outcome=outcome, reason=reason,
        num_needed_blocks=needed_and_free[0], num_free_blocks=needed_and_free[1], limit=limit,
    )  # fmt: skip
