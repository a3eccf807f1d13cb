"""What several pictures ask of a trace: the order of the requests, their texts, the state of a step."""

from __future__ import annotations

from pagedlab.errors import UserError
from pagedlab.trace.events import RequestAdded, StepScheduled, TokensSampled
from pagedlab.trace.state import EngineState
from pagedlab.trace.trace import Trace


def request_order(trace: Trace) -> dict[str, int]:
    """Request -> its place by arrival, which decides its colour, as in the viewer."""
    first = trace.first_snapshot
    known = [r.request_id for r in first.requests] if first else []
    added = [e.request_id for e in trace if type(e) is RequestAdded and e.engine == trace.engine]
    return {request_id: i for i, request_id in enumerate(dict.fromkeys([*known, *added]))}


def token_texts(trace: Trace) -> dict[int, str]:
    """Token id -> its text, as far as the trace tells."""
    texts: dict[int, str] = {}
    for request in trace.first_snapshot.requests if trace.first_snapshot else ():
        texts |= dict(zip(request.token_ids, request.token_texts or (), strict=False))
    for event in trace:
        if type(event) is RequestAdded:
            texts |= dict(zip(event.prompt_token_ids, event.prompt_token_texts or (), strict=False))
        elif type(event) is TokensSampled and event.text is not None:
            texts[event.token_id] = event.text
    return texts


def state_in(trace: Trace, step: int) -> EngineState:
    """The state as the step's message leaves the scheduler.

    Raises:
        UserError: no such step, or the trace ends before its message.
    """
    if step not in trace.steps or step < 0:
        raise UserError(trace.no_step(step))
    if trace.steps[step].scheduled is None:
        raise UserError(f"step {step} has no step_scheduled event in this trace: choose an earlier step.")
    return trace.at(step=step, after=str(StepScheduled.__struct_config__.tag))
