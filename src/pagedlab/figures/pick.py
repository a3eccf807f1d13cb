"""Picks events of one kind out of a trace."""

from __future__ import annotations

from typing import TypeVar

from pagedlab.trace.events import Event
from pagedlab.trace.trace import Trace

E = TypeVar("E", bound=Event)


def only(trace: Trace, cls: type[E], step: int | None = None) -> list[E]:
    """The events of a class, of the whole trace or of a step."""
    return [e for e in trace if type(e) is cls and (step is None or e.step == step)]
