"""A trace as Chrome trace JSON, which https://ui.perfetto.dev opens: requests, stages, counters.

Only the step and stage tracks show what ran when. A request's track shows the steps it took part in
and, between them, how it waited.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagedlab.errors import UserError
from pagedlab.trace.events import (
    Event,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    StepScheduled,
    StepStarted,
)
from pagedlab.wording import plural

if TYPE_CHECKING:
    from pagedlab.trace.trace import Trace

Record = dict[str, Any]
ENGINE, REQUESTS = 1, 2                       # Perfetto's processes: the engine's tracks, the requests' tracks
_WHOLE = ("schedule", "execute_model", "update_from_output")  # stages that follow each other; others are inside


def write_perfetto(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the file.

    Raises:
        UserError: it cannot be written.
    """
    data = msgspec.json.encode({"traceEvents": list(perfetto_records(trace)), "displayTimeUnit": "ms"})
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def perfetto_records(trace: Trace) -> Iterator[Record]:
    """Chrome trace events of the trace's engine; times in microseconds from the first record."""
    tracks = _Tracks(trace.events[0].t_ns if trace.events else 0)
    yield {"ph": "M", "name": "process_name", "pid": ENGINE, "tid": 0, "args": {"name": "engine"}}
    yield {"ph": "M", "name": "process_name", "pid": REQUESTS, "tid": 0, "args": {"name": "requests"}}
    engine = trace.engine
    for event in trace:
        if event.engine == engine:
            yield from tracks.take(event)
    yield from tracks.close(trace.events[-1] if trace.events else None)


class _Tracks:
    """What is open on each track while the events go by."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.tids: dict[tuple[int, str], int] = {}      # (process, track) -> number, with its name once written
        self.waiting: dict[str, tuple[int, str]] = {}   # request -> since when, and why
        self.started: StepStarted | None = None
        self.scheduled: StepScheduled | None = None

    def take(self, e: Event) -> Iterator[Record]:
        match e:
            case RequestAdded():
                self.waiting[e.request_id] = (e.t_ns, "queued")
            case StepStarted():
                self.started, self.scheduled = e, None
                used = {"waiting": e.num_waiting, "running": e.num_running}
                yield self._counter("free blocks", e.t_ns, {"free": e.num_free_blocks})
                yield self._counter("requests", e.t_ns, used)
            case StepScheduled():
                self.scheduled = e
                budget = self.started.token_budget if self.started is not None else e.total_num_scheduled_tokens
                left = {"scheduled": e.total_num_scheduled_tokens, "left": budget - e.total_num_scheduled_tokens}
                yield self._counter("token budget", e.t_ns, left)
                for request_id in e.num_scheduled_tokens:
                    yield from self._end_of_waiting(request_id, self.started.t_ns if self.started else e.t_ns)
            case RequestPreempted():
                yield from self._instant(e.request_id, f"preempted for {e.on_behalf_of}", e)
                self.waiting[e.request_id] = (e.t_ns, "preempted")
            case StepFinished() if self.started is not None:
                yield from self._step(self.started, e)
                self.started = None
            case RequestFinished():
                yield from self._end_of_waiting(e.request_id, e.t_ns)
                yield from self._instant(e.request_id, f"finished: {e.finish_reason}", e)

    def close(self, last: Event | None) -> Iterator[Record]:
        for request_id in list(self.waiting):
            assert last is not None
            yield from self._end_of_waiting(request_id, last.t_ns)

    def _step(self, started: StepStarted, finished: StepFinished) -> Iterator[Record]:
        duration = finished.t_ns - started.t_ns
        yield from self._slice(ENGINE, "step", f"step {started.step}", started.t_ns, duration,
                               {"tokens": finished.num_scheduled_tokens})
        # The stages end where the step does; the first one began a little before its own event.
        at = inside = finished.t_ns - sum(finished.stage_ns.get(stage, 0) for stage in _WHOLE)
        for stage, nanoseconds in finished.stage_ns.items():
            if stage in _WHOLE:
                begin = max(at, started.t_ns)
                yield from self._slice(ENGINE, stage, stage, begin, at + nanoseconds - begin, {"step": started.step})
                inside = at if stage == "execute_model" else inside
                at += nanoseconds
            else:  # a part of execute_model, in the order in which they run
                yield from self._slice(ENGINE, stage, stage, inside, nanoseconds, {"step": started.step})
                inside += nanoseconds
        for request_id, num_tokens in (self.scheduled.num_scheduled_tokens if self.scheduled else {}).items():
            name = plural(num_tokens, "token")
            yield from self._slice(REQUESTS, request_id, name, started.t_ns, duration, {"step": started.step})

    def _end_of_waiting(self, request_id: str, t_ns: int) -> Iterator[Record]:
        since, why = self.waiting.pop(request_id, (t_ns, ""))
        if t_ns > since:
            yield from self._slice(REQUESTS, request_id, why, since, t_ns - since, {})

    def _slice(self, pid: int, track: str, name: str, t_ns: int, duration: int, args: Record) -> Iterator[Record]:
        yield from self._name(pid, track)
        yield {"ph": "X", "name": name, "pid": pid, "tid": self.tids[pid, track], "ts": self._microseconds(t_ns),
               "dur": duration / 1000, "args": args}

    def _instant(self, request_id: str, name: str, e: Event) -> Iterator[Record]:
        yield from self._name(REQUESTS, request_id)
        yield {"ph": "i", "s": "t", "name": name, "pid": REQUESTS, "tid": self.tids[REQUESTS, request_id],
               "ts": self._microseconds(e.t_ns), "args": {"step": e.step}}

    def _counter(self, name: str, t_ns: int, values: Record) -> Record:
        return {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": self._microseconds(t_ns), "args": values}

    def _name(self, pid: int, track: str) -> Iterator[Record]:
        if (pid, track) not in self.tids:
            self.tids[pid, track] = len(self.tids) + 1
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": self.tids[pid, track], "args": {"name": track}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": self.tids[pid, track],
                   "args": {"sort_index": self.tids[pid, track]}}

    def _microseconds(self, t_ns: int) -> float:
        return (t_ns - self.start_ns) / 1000
