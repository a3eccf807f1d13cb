"""``Trace``: the events of one recording, and the ways to ask it things. Needs no torch."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import msgspec

from pagedlab.errors import UserError
from pagedlab.trace.events import (
    KINDS,
    LEVELS,
    BatchOrdered,
    EngineSnapshot,
    Event,
    Level,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    SlotsMapped,
    StepScheduled,
    TablesGathered,
    TraceFinished,
    TraceGap,
    TraceHeader,
)
from pagedlab.trace.file import load_trace, save_trace
from pagedlab.wording import plural

if TYPE_CHECKING:
    from pagedlab.display.block_table import BlockTableDiagram
    from pagedlab.display.charts import PoolMap, Timeline
    from pagedlab.display.tables import SlotMappingTable
    from pagedlab.trace.diff import Difference
    from pagedlab.trace.state import EngineState

CHECKPOINT_EVENTS = 4096  # where the file has no snapshot, at() keeps a state every so many events …
MAX_CHECKPOINTS = 64      # … but not many more states than this of one trace


class StepTrace:
    """The events of one step, in order."""

    def __init__(self, step: int, events: list[Event]) -> None:
        self.step = step
        self.events = events

    @property
    def scheduled(self) -> StepScheduled | None:
        """The SchedulerOutput; None if the trace ends before it."""
        return next((e for e in self.events if type(e) is StepScheduled), None)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return f"<step {self.step}: {plural(len(self.events), 'event')}>"


class RequestTrace:
    """The events that name one request, in order."""

    def __init__(self, request_id: str, events: list[Event]) -> None:
        self.request_id = request_id
        self.events = events

    @property
    def added(self) -> RequestAdded | None:
        """None if tracing began after the request came."""
        return next((e for e in self.events if type(e) is RequestAdded), None)

    @property
    def finished(self) -> RequestFinished | None:
        return next((e for e in self.events if type(e) is RequestFinished), None)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return f"<request {self.request_id}: {plural(len(self.events), 'event')}>"


class Trace:
    """Events of one recording: iterate it, filter it, ask for the state at any moment.

    ``Trace(events)`` keeps the list it is given, so that it can be read while it fills.
    With several engines in one recording, ``steps``, ``requests`` and ``at`` are about
    ``engine``, by default the first one; ``trace.of_engine(1)`` is the same trace seen for another.
    """

    def __init__(self, events: list[Event], engine: int | None = None, _header: TraceHeader | None = None) -> None:
        self.events = events
        self._engine = engine
        self._header = _header
        self._num_indexed = 0
        self._by_step: dict[int, list[int]] = {}         # step -> indices into events
        self._by_request: dict[str, list[int]] = {}      # request -> indices into events
        self._starts: list[int] = []                     # indices a fold can start at, ascending
        self._checkpoints: dict[int, EngineState] = {}   # index of an event -> state after it

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file; see :func:`pagedlab.trace.file.load_trace` for what is refused."""
        return cls(load_trace(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.jsonl`` or ``.jsonl.zst`` file, all of it or nothing.

        Of a filtered trace, each place where records are missing becomes a ``trace_gap``.
        """
        header = self.header
        events = self.events[1:] if self.events and self.events[0] is header else self.events
        if not events or type(events[-1]) is not TraceFinished:
            header = msgspec.structs.replace(header, ends_with=None)
        save_trace([header, *_with_gaps(events)], path)

    # ------------------------------------------------------------------ as a sequence

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return (
            f"<Trace: {plural(len(self), 'event')}, {plural(len(self.steps), 'step')}, "
            f"{plural(len(self.requests), 'request')}>"
        )

    @property
    def header(self) -> TraceHeader:
        if self._header is None:
            if not self.events or type(self.events[0]) is not TraceHeader:
                raise UserError("this trace has no header yet: it begins with the first engine that is traced.")
            self._header = self.events[0]
        return self._header

    @property
    def engines(self) -> list[int]:
        """Ids of the engines that were traced, in order of appearance."""
        return list(dict.fromkeys(e.engine for e in self.events if type(e) is EngineSnapshot))

    @property
    def engine(self) -> int:
        """The engine that ``steps``, ``requests`` and ``at`` are about."""
        if self._engine is None:
            first = next((e for e in self.events if type(e) is EngineSnapshot), None)
            if first is None:
                return 0
            self._engine = first.engine
        return self._engine

    @property
    def first_snapshot(self) -> EngineSnapshot | None:
        """The state in which tracing found the engine."""
        return next((e for e in self.events if type(e) is EngineSnapshot and e.engine == self.engine), None)

    def of_engine(self, engine: int) -> Trace:
        """The same events, with another engine in focus."""
        if engine not in self.engines:
            raise UserError(f"no engine {engine} in this trace: it has {', '.join(map(str, self.engines)) or 'none'}.")
        return Trace(self.events, engine, self._header)

    def filter(
        self,
        kind: str | Iterable[str] | None = None,
        step: int | Iterable[int] | None = None,
        request: str | None = None,
    ) -> Trace:
        """The events of these kinds and steps that name this request.

        Raises:
            UserError: no event kind has this name.
        """
        kinds = None if kind is None else {KINDS[check_kind(k)] for k in ([kind] if isinstance(kind, str) else kind)}
        steps = None if step is None else {step} if isinstance(step, int) else set(step)
        events = [
            e
            for e in self.events
            if (kinds is None or type(e) in kinds)
            and (steps is None or e.step in steps)
            and (request is None or request in request_ids_of(e))
        ]
        return Trace(events, self._engine, self.header if self.events else None)

    def need(self, level: Level, for_what: str) -> None:
        """Refuse a trace that was recorded too coarsely.

        Raises:
            UserError: the trace holds less than ``for_what`` needs.
        """
        record = self.header.record
        if LEVELS.index(record) < LEVELS.index(level):
            raise UserError(f"recorded at `{record}`; `{for_what}` needs `{level}`: re-run with --record {level}")

    # ------------------------------------------------------------------ by step and by request

    @property
    def steps(self) -> Mapping[int, StepTrace]:
        """Steps of the engine; -1 holds what happened before the first."""
        self._index()
        return _Lookup("step", self._by_step, lambda step, events: StepTrace(step, events), self.events)

    @property
    def requests(self) -> Mapping[str, RequestTrace]:
        self._index()
        return _Lookup("request", self._by_request, lambda rid, events: RequestTrace(rid, events), self.events)

    def no_step(self, step: int) -> str:
        """The sentence for a step that is not there."""
        return _Lookup.sentence("step", step, self.steps)

    def no_request(self, request_id: str) -> str:
        """The sentence for a request that is not there."""
        return _Lookup.sentence("request", request_id, self.requests)

    def _index(self) -> None:
        """Take in the events that came since the last time."""
        engine = self.engine
        for i in range(self._num_indexed, len(self.events)):
            event = self.events[i]
            if event.engine != engine or type(event) in (TraceHeader, TraceFinished):
                continue
            if type(event) is EngineSnapshot:
                self._starts.append(i)
            self._by_step.setdefault(event.step, []).append(i)
            for request_id in request_ids_of(event):
                self._by_request.setdefault(request_id, []).append(i)
        self._num_indexed = len(self.events)

    # ------------------------------------------------------------------ the state at a moment

    def at(
        self, step: int | None = None, after: str | None = None, *, seq: int | None = None, request: str | None = None
    ) -> EngineState:
        """The whole state right after one event, rebuilt by folding.

        ``at(step=12)`` is the end of step 12; ``at(step=12, after="slots_allocated")`` the moment
        after its last such event, with ``request=`` the last one that names the request;
        ``at(seq=…)`` the moment after the event with this number; ``at()`` the end.

        Raises:
            UserError: recorded below `blocks`, or there is no such moment.
        """
        self.need("blocks", "at")
        self._index()
        return self.state_after(self._find(step, after, seq, request))

    def _find(self, step: int | None, after: str | None, seq: int | None, request: str | None) -> int:
        if seq is not None:
            i = bisect_right(self.events, seq, key=lambda e: e.seq) - 1
            if i < 0 or self.events[i].seq != seq:
                raise UserError(f"no event has seq {seq}: they go from {self.events[0].seq} to {self.events[-1].seq}.")
            return i
        indices: Iterable[int] = range(len(self.events))
        if step is not None:
            if step not in self._by_step:
                raise UserError(self.no_step(step))
            indices = self._by_step[step]
        if request is not None:
            if request not in self._by_request:
                raise UserError(self.no_request(request))
            wanted = set(self._by_request[request])
            indices = [i for i in indices if i in wanted]
        if after is not None:
            cls = KINDS[check_kind(after)]
            indices = [i for i in indices if type(self.events[i]) is cls]
        found = list(indices)[-1:]
        if not found:
            what = " ".join(filter(None, (after or "event", request and f"of {request}")))
            raise UserError(f"there is no {what} {'in this trace' if step is None else f'in step {step}'}.")
        return found[0]

    def state_after(self, index: int) -> EngineState:
        """The state after ``events[index]``; the caller may change it."""
        from pagedlab.trace.state import Fold

        self._index()
        start = max((i for i in self._checkpoints if i <= index), default=-1)
        at = bisect_right(self._starts, index) - 1
        snapshot = self._starts[at] if at >= 0 else -1
        if snapshot < 0:
            raise UserError("there is no state yet: the engine's first snapshot comes later.")
        if snapshot >= start:
            fold = Fold.starting_at(self.events[snapshot])
            start = snapshot
        else:
            fold = Fold.resuming(self._checkpoints[start].copy(), self.events[start])
        spacing = max(CHECKPOINT_EVENTS, len(self.events) // MAX_CHECKPOINTS)
        for i in range(start + 1, index + 1):
            fold.apply(self.events[i])
            if (i - start) % spacing == 0 and self.engine in fold.states:
                self._checkpoints[i] = fold.states[self.engine].copy()
        if self.engine not in fold.states:
            lost = f"there is no state at seq {self.events[index].seq}: records were lost before it"
            raise UserError(f"{lost}, and the next snapshot comes later.")
        return fold.states[self.engine]

    # ------------------------------------------------------------------ elsewhere

    def view(self, steps: tuple[int, int] | None = None) -> Any:
        """The interactive viewer, for a notebook: live where widgets run, a page in a frame elsewhere."""
        from pagedlab.viewer.widget import viewer

        return viewer(self, steps)

    def block_table(self, request: str, step: int | None = None) -> BlockTableDiagram:
        """The request's block table, drawn; by default in the last step that schedules it."""
        from pagedlab.display.block_table import BlockTableDiagram

        return BlockTableDiagram(self, request, step)

    def slot_mapping(self, step: int, group: int = 0) -> SlotMappingTable:
        """Every token of a step on its way to its slot, as a table."""
        from pagedlab.display.tables import SlotMappingTable

        return SlotMappingTable(self, step, group)

    def block_pool(self, step: int | None = None) -> PoolMap:
        """The block pool in a step, drawn; by default at the end."""
        from pagedlab.display.charts import PoolMap

        return PoolMap(self, step)

    def timeline(self) -> Timeline:
        """Tokens and blocks per step and a lane per request, drawn."""
        from pagedlab.display.charts import Timeline

        return Timeline(self)

    def diff(self, other: Trace) -> Difference | None:
        """The first decision in which two runs part; None if there is none."""
        from pagedlab.trace.diff import diff

        return diff(self, other)

    def to_pandas(self) -> Any:
        """A DataFrame: one row per event, one column per field; lists and objects stay Python values."""
        try:
            import pandas  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise UserError("to_pandas needs pandas: pip install pandas.") from None
        rows = [{"kind": e.kind, **{f: getattr(e, f) for f in e.__struct_fields__}} for e in self.events]
        return pandas.DataFrame(rows)

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome trace JSON: a track per request and per stage, counters for pool and budget."""
        from pagedlab.trace.perfetto import write_perfetto

        write_perfetto(self, path)


def _with_gaps(events: list[Event]) -> Iterator[Event]:
    """The events of a part, each jump in the numbers filled by one record that counts the lost ones."""
    next_seq: dict[str, int] = {events[0].proc: 1} if events else {}  # the header has number 0
    for event in events:
        missing = event.seq - next_seq.get(event.proc, event.seq)
        if missing > 0:
            gap = TraceGap(num_lost=missing, why="left out when this part of a trace was saved")
            gap.seq, gap.proc = event.seq - 1, event.proc
            gap.engine, gap.step, gap.t_ns = event.engine, event.step, event.t_ns
            yield gap
        next_seq[event.proc] = event.seq + 1
        yield event


def check_kind(kind: str) -> str:
    """The name itself, if events of this kind exist."""
    if kind not in KINDS:
        close = get_close_matches(kind, KINDS, 1)
        raise UserError(f"no event kind is called {kind!r}" + (f": did you mean {close[0]!r}?" if close else "."))
    return kind


def request_ids_of(event: Event) -> Iterable[str]:
    """The requests an event names, each once."""
    request_id = getattr(event, "request_id", None)
    if type(request_id) is str:
        if type(event) is RequestPreempted and event.on_behalf_of != request_id:
            return (request_id, event.on_behalf_of)
        return (request_id,)
    if type(event) is StepScheduled:
        return dict.fromkeys((*event.num_scheduled_tokens, *event.preempted, *event.finished_req_ids))
    if type(event) is SlotsMapped:
        return dict.fromkeys(event.request_id)
    if type(event) is BatchOrdered or type(event) is TablesGathered:
        return dict.fromkeys(event.request_ids)
    return ()


class _Lookup(Mapping[Any, Any]):
    """Steps or requests by key, built when asked for; a wrong key gets a sentence."""

    def __init__(
        self, what: str, index: dict[Any, list[int]], make: Callable[[Any, list[Event]], Any], events: list[Event]
    ) -> None:
        self._what, self._indices, self._make, self._events = what, index, make, events

    def __getitem__(self, key: Any) -> Any:
        if key not in self._indices:
            raise KeyError(self.sentence(self._what, key, self._indices))
        return self._make(key, [self._events[i] for i in self._indices[key]])

    def __contains__(self, key: object) -> bool:
        return key in self._indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    @staticmethod
    def sentence(what: str, key: Any, index: Mapping[Any, Any]) -> str:
        if not index:
            return f"this trace has no {what}s."
        if what == "step":
            return f"no step {key}: this trace has steps {max(min(index), 0)} to {max(index)}."
        close = get_close_matches(str(key), list(index), 3) or list(index)[:3]
        return f"no request {key!r} in this trace: it has {len(index)}, among them {', '.join(map(repr, close))}."
