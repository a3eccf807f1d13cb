"""One step, gathered: its events, and the state as it was when the scheduler had decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from pagedlab.trace.events import (
    Event,
    QueueNotReached,
    RequestAborted,
    RequestConsidered,
    RequestFinished,
    RequestPreempted,
    RequestState,
    SlotsRefused,
    StepScheduled,
    StepStarted,
    TokensSampled,
)
from pagedlab.trace.state import EngineState

E = TypeVar("E", bound=Event)


@dataclass
class Pool:
    """Copy of the block pool at one moment."""

    num_blocks: int                                                # null block included
    ref_counts: Mapping[int, int] = field(default_factory=dict)    # only where > 0
    cached: Mapping[int, str] = field(default_factory=dict)        # block id -> short hash
    next_free: list[int] = field(default_factory=list)             # front of the free queue
    num_free: int = 0

    @classmethod
    def of(cls, state: EngineState) -> Pool:
        front = list(islice(state.free_queue, 8))
        return cls(state.num_blocks, dict(state.ref_counts), dict(state.cached_blocks), front, len(state.free_queue))

    def state_of(self, block_id: int) -> str:
        """null, shared, in_use, cached or free."""
        if block_id == 0:
            return "null"
        owners = self.ref_counts.get(block_id, 0)
        if owners:
            return "shared" if owners > 1 else "in_use"
        return "cached" if block_id in self.cached else "free"

    def counts(self) -> dict[str, int]:
        shared = sum(1 for owners in self.ref_counts.values() if owners > 1)
        used = len(self.ref_counts)
        cached = sum(1 for block_id in self.cached if block_id not in self.ref_counts)
        return {
            "in_use": used - shared,
            "shared": shared,
            "cached": cached,
            "free": max(0, self.num_blocks - 1 - used - cached),
            "null": min(1, self.num_blocks),
        }


@dataclass
class RequestView:
    """A request in this step: what it knew and had computed when the scheduler had decided."""

    request: RequestState
    num_tokens: int            # known
    num_computed_tokens: int   # before this step
    num_scheduled_tokens: int  # granted
    block_ids: list[list[int]]

    def token(self, position: int) -> tuple[int, str | None]:
        texts = self.request.token_texts
        text = texts[position] if texts is not None and position < len(texts) else None
        return self.request.token_ids[position], text


class StepView:
    """Filled event by event; complete when the next step begins."""

    def __init__(self, engine: int, step: int) -> None:
        self.engine, self.step = engine, step
        self.events: list[Event] = []
        self.waiting: list[str] = []           # when the step began
        self.running: list[str] = []
        self.waiting_tokens: dict[str, int] = {}
        self.pool: Pool | None = None          # when the scheduler had decided
        self.pool_after: Pool | None = None    # when the step was over
        self.requests: dict[str, RequestView] = {}  # in schedule order
        self.is_over = False

    def add(self, event: Event, state: EngineState | None) -> None:
        """Take one event; ``state`` already contains it, None where the trace does not tell it."""
        self.events.append(event)
        if state is None:
            return
        if isinstance(event, StepStarted):
            self.waiting, self.running = list(state.waiting), list(state.running)
            self.waiting_tokens = {
                name: len(state.requests[name].token_ids) for name in self.waiting if name in state.requests
            }
        elif isinstance(event, StepScheduled):
            self._take_picture(event, state)

    def _take_picture(self, scheduled: StepScheduled, state: EngineState) -> None:
        self.pool = Pool.of(state)
        computed = {new.request_id: new.num_computed_tokens for new in scheduled.new}
        computed |= {cached.request_id: cached.num_computed_tokens for cached in scheduled.cached}
        for name, granted in scheduled.num_scheduled_tokens.items():
            request = state.requests.get(name)
            if request is not None:
                self.requests[name] = RequestView(
                    request, len(request.token_ids), computed.get(name, 0), granted,
                    [list(table) for table in request.block_ids],
                )

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def first(self, kind: type[E]) -> E | None:
        return next((event for event in self.events if isinstance(event, kind)), None)

    def about(self, kind: type[E], request_id: str) -> list[E]:
        return [event for event in self.of(kind) if getattr(event, "request_id", None) == request_id]

    def focus(self) -> set[str]:
        """Requests to which something happened beyond computing one more token."""
        names = self.special()
        for event in self.events:
            match event:
                case RequestFinished() | RequestAborted() | TokensSampled(kept=False):
                    names.add(event.request_id)
        return names

    def growing(self) -> set[str]:
        """Requests that computed their latest token and took a block for it."""
        scheduled = self.first(StepScheduled)
        return {
            part.request_id for part in (scheduled.cached if scheduled is not None else [])
            if _has_ids(part.new_block_ids) and not part.resumed
            and self.requests[part.request_id].num_scheduled_tokens == 1
        } if self.requests else set()

    def special(self) -> set[str]:
        """Requests that were scheduled in any other way than for their latest token, or not at all."""
        names: set[str] = set()
        scheduled = self.first(StepScheduled)
        if scheduled is not None:
            names |= {part.request_id for part in scheduled.new}
            names |= {part.request_id for part in scheduled.cached if part.resumed or _has_ids(part.new_block_ids)}
            names |= {name for name, granted in scheduled.num_scheduled_tokens.items() if granted > 1}
        for event in self.events:
            match event:
                case RequestPreempted() | SlotsRefused():
                    names.add(event.request_id)
                case RequestConsidered() if (event.outcome, event.reason) != ("scheduled", "all_tokens"):
                    names.add(event.request_id)
        return names

    def refusals(self) -> tuple[tuple[str, str, int | None], ...]:
        """Who was refused and why; the same as in the step before is no news."""
        return tuple(
            (event.request_id, event.reason, event.num_needed_blocks)
            for event in self.of(RequestConsidered) if event.outcome in ("refused", "skipped")
        )

    def not_reached_key(self) -> tuple[tuple[str, str, int], ...]:
        """What a reader would call "the same reason as in the step before"."""
        return tuple((event.queue, event.reason, event.count) for event in self.of(QueueNotReached))


def _has_ids(groups: list[list[int]] | None) -> bool:
    return any(groups or [])
