"""Where events go: one guarded line per site, ``if trace.on: trace.emit(Event(...))``.

The guard is an attribute that is False while nobody listens, so a site costs a few nanoseconds.
``trace.on`` guards events of level ``steps``; ``trace.decisions``, ``trace.blocks``,
``trace.tensors`` and ``trace.kernels`` guard the finer ones. No engine code reads the trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from pagedlab.errors import UserError
from pagedlab.trace.events import LEVELS, EngineSnapshot, Event, Level, TraceFinished, TraceHeader

if TYPE_CHECKING:
    from pagedlab.trace.trace import Trace


SNAPSHOT_EVENTS = 8192         # after so many events a snapshot is written again, that a reader may jump to …
SNAPSHOT_VALUES_PER_EVENT = 8  # … but no more than so many of its values per event: a large state comes seldom


class Sink(Protocol):
    """Takes events in order: a list, a file, a live view."""

    def append(self, event: Event, /) -> None: ...


class TracedEngine(Protocol):
    """What the tracer asks of an engine when tracing starts on it."""

    engine_id: int
    about: dict[str, dict[str, Any]]  # the header's model, config and tokenizer

    @property
    def step_id(self) -> int:
        """The last step whose schedule() began, -1 before the first."""

    def snapshot(self) -> EngineSnapshot | None:
        """The whole state; None while the engine is still being built."""


class Tracer:
    """Stamps events and hands them to the sinks; the module's ``trace`` is the only one."""

    def __init__(self) -> None:
        self.on = self.decisions = self.blocks = self.tensors = self.kernels = False
        self.layers: str | list[int] = "all"
        self._sinks: tuple[Sink, ...] = ()
        self._proc = "engine"

    def start(
        self, *sinks: Sink, record: Level = "tensors", layers: str | list[int] = "all", snapshot_every: int = 256
    ) -> None:
        """Begin recording; the header follows with the first engine that emits.

        Raises:
            UserError: a recording is already running, ``record`` is not a level, or ``layers`` no list of layers.
        """
        if self.on:
            raise UserError("tracing is already on: end the other `with tracing()` first.")
        if record not in LEVELS:
            raise UserError(f"record is {record!r}: choose one of {', '.join(LEVELS)}.")
        if layers != "all" and not (isinstance(layers, list) and all(type(i) is int and i >= 0 for i in layers)):
            raise UserError(f"layers is {layers!r}: give 'all' or a list of numbers like [0, 3].")
        self._sinks, self._record, self.layers, self._snapshot_every = sinks, record, layers, snapshot_every
        self._seq, self._engine, self._step = 0, -1, -1
        self._next_snapshot: dict[int, tuple[int, int, int]] = {}  # engine -> due from this step or seq, and this seq
        self._has_header = False
        depth = LEVELS.index(record)
        self.on = True
        self.decisions, self.blocks, self.tensors, self.kernels = (depth >= i for i in range(1, 5))

    def stop(self) -> None:
        """End recording; a trace that saw no engine still gets a header."""
        try:
            if self.on and not self._has_header:
                self._write_header({"model": {}, "config": {}, "tokenizer": {}})
            if self.on:
                self.emit(TraceFinished(num_records=self._seq + 1))
        finally:  # also if a sink fails, a full disk for example
            self.on = self.decisions = self.blocks = self.tensors = self.kernels = False
            self._sinks = ()

    def emit(self, event: Event) -> None:
        event.seq, event.engine, event.step = self._seq, self._engine, self._step
        event.t_ns, event.proc = time.monotonic_ns(), self._proc
        self._seq += 1
        for sink in self._sinks:
            sink.append(event)

    def enter(self, engine: TracedEngine) -> None:
        """What follows is about this engine: called, guarded, at each of its entry points."""
        self._engine, self._step = engine.engine_id, engine.step_id
        if not self._has_header:
            self._write_header(engine.about)
        due = self._next_snapshot.get(engine.engine_id)
        if due is None or (self.blocks and due[2] <= self._seq and (due[0] <= engine.step_id or due[1] <= self._seq)):
            snapshot = engine.snapshot()
            if snapshot is not None:
                self.emit(snapshot)
                spacing = num_values(snapshot) // SNAPSHOT_VALUES_PER_EVENT
                self._next_snapshot[engine.engine_id] = (
                    engine.step_id + self._snapshot_every, self._seq + SNAPSHOT_EVENTS, self._seq + spacing
                )

    def begin_step(self, step_id: int) -> None:
        """What follows belongs to this step: called, guarded, where schedule() begins."""
        self._step = step_id

    def traces_layer(self, layer_index: int) -> bool:
        """Whether kernel events of this layer are wanted."""
        return self.layers == "all" or layer_index in self.layers

    def _write_header(self, about: dict[str, Any]) -> None:
        from pagedlab.version import __version__

        self._has_header = True
        engine, step, self._engine, self._step = self._engine, self._step, 0, -1
        self.emit(
            TraceHeader(
                pagedlab=__version__,
                source={"engine": "pagedlab", "version": __version__},
                record=self._record,
                layers=self.layers,
                ends_with="trace_finished",
                clock={"wall_ns": time.time_ns(), "t_ns": time.monotonic_ns()},
                **about,
            )
        )
        self._engine, self._step = engine, step


def num_values(snapshot: EngineSnapshot) -> int:
    """About how many numbers and texts the record holds."""
    per_request = (2 * len(r.token_ids) if r.token_texts else len(r.token_ids) for r in snapshot.requests)
    return snapshot.num_blocks + sum(per_request)


trace = Tracer()


@contextmanager
def tracing(record: Level = "tensors", layers: str | list[int] = "all", *sinks: Sink) -> Iterator[Trace]:
    """Record whatever engines do inside the ``with`` block, also engines that are already warm.

    Yields a Trace that fills as events arrive and is complete after the block.
    """
    from pagedlab.trace.trace import Trace

    events: list[Event] = []
    trace.start(events, *sinks, record=record, layers=layers)
    try:
        yield Trace(events)
    finally:
        trace.stop()
