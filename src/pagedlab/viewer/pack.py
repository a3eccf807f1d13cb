"""Folds a trace once and packs what the viewer's page needs to stand at any event of it.

Per event, the change it makes to the state as a few integers (ops.py); every so many steps a
snapshot, written in the same language, that rebuilds the state from nothing; and the raw events, in
columns. All of it is cut into chunks that the page inflates when somebody looks at them. Nothing
here needs torch.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec

from pagedlab.config import EngineConfig
from pagedlab.errors import UserError
from pagedlab.trace.events import (
    CONSIDERED_REASONS,
    NOT_REACHED_REASONS,
    PREFIX_STOPS,
    BlockAllocated,
    BlockCached,
    BlockEvicted,
    BlockFreed,
    BlockTouched,
    EngineSnapshot,
    Event,
    KvConfig,
    RequestAdded,
    RequestFinished,
    RequestOutput,
    StepScheduled,
    StepStarted,
    TokensSampled,
    TraceFinished,
)
from pagedlab.trace.state import EngineState, Fold, describe
from pagedlab.trace.trace import Trace
from pagedlab.viewer.ops import RULES, snapshot_ops
from pagedlab.viewer.rows import BothDesigns

MAX_STEPS_PER_CHUNK = 128
MAX_NUMBERS_PER_CHUNK = 80_000
EVENTS_PER_CHUNK = 2048
STEPS_PER_ROW_CHUNK = 128
RECOMPUTED, PREFILL, DECODE, QUEUED, PREEMPTED, PASSED_OVER = range(6)  # what a request did in a step


@dataclass
class Packed:
    """One JSON document and its chunks (base64 of deflated bytes), by name."""

    meta: dict[str, Any]
    chunks: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return len(json.dumps(self.meta)) + sum(map(len, self.chunks.values()))


_NOTHING_YET = EngineSnapshot(
    block_sizes=[1], num_blocks=1, waiting=[], running=[], requests=[], free_queue=[], ref_counts={},
    cached_blocks={}, rows=[],
)  # fmt: skip


def pack(trace: Trace, steps: tuple[int, int] | None = None) -> Packed:
    """Pack one engine's events, of all steps or of ``steps`` (first, last).

    Raises:
        UserError: recorded below `blocks`, no engine in the trace, or no such steps.
    """
    trace.need("blocks", "view")
    events, state, earlier = _events_and_start(trace, steps)
    return _Packer(trace, events, state, earlier).run()


def _events_and_start(
    trace: Trace, steps: tuple[int, int] | None
) -> tuple[list[Event], EngineState, list[StepScheduled]]:
    """The events to show, the state before the first of them, and the messages that led there."""
    engine = trace.engine
    events = [e for e in trace.events if e.engine == engine]
    first = next((i for i, e in enumerate(events) if type(e) is EngineSnapshot), None)
    if first is None and not any(type(e) is StepStarted for e in events):  # cut before the engine was ready
        return [e for e in events if e.kind != "trace_header"], EngineState.from_snapshot(_NOTHING_YET), []
    if first is None:
        raise UserError(
            "this trace holds no engine snapshot, so there is nothing to view: record one with pagedlab trace."
        )
    snapshot = events[first]
    fold = Fold.starting_at(snapshot)
    state = fold.states[engine].copy()
    about = [e for e in events[:first] if e.kind not in ("trace_header",)]
    for_readers = (EngineSnapshot, TraceFinished)  # later snapshots and the end mark: nothing the engine did
    events = [e for e in events[first + 1 :] if type(e) not in for_readers]
    if steps is None:
        return about + events, state, []
    start = next((i for i, e in enumerate(events) if e.step >= steps[0]), None)
    if start is None or steps[1] < steps[0]:
        last = events[-1].step if events else -1
        raise UserError(f"no steps {steps[0]}:{steps[1]} in this trace: it ends at step {last}.")
    for event in events[:start]:
        state.apply(event)
    kept = [e for e in events[start:] if e.step <= steps[1]]
    return kept, state, [e for e in events[:start] if type(e) is StepScheduled]


class _Packer:
    def __init__(
        self, trace: Trace, events: list[Event], state: EngineState, earlier: list[StepScheduled]
    ) -> None:
        self.trace, self.events, self.state = trace, events, state
        self.requests: dict[str, int] = {}  # request -> index
        self.request_info: list[dict[str, Any]] = []
        self.token_texts: dict[int, str] = {}  # token id -> text
        self.packed = Packed({})
        self.columns: dict[str, list[int]] = {
            name: []
            for name in ("step", "first_event", "prefill", "recomputed", "decode", "budget", "used", "preempted",
                         "waiting", "running")
        }  # fmt: skip
        self.segments: list[list[int]] = []  # request, kind, first step, last step, tokens
        self._open: dict[int, list[int]] = {}  # request -> its latest segment
        self._furthest: dict[int, int] = {}  # request -> most tokens ever computed
        for request in state.requests.values():
            self._know(request.request_id, request.token_ids, request.token_texts, request.num_prompt_tokens, None)
        self.designs = self._follow_designs(earlier)
        self.rows: list[list[int]] = []  # per step, what BothDesigns says

    def _follow_designs(self, earlier: list[StepScheduled]) -> BothDesigns | None:
        """Rows follow from all messages since the engine began; unknown if tracing began in mid-life."""
        snapshot = self.trace.first_snapshot
        if snapshot is None or snapshot.running:
            return None
        designs = BothDesigns(int(self.trace.header.config.get("max_num_seqs") or EngineConfig.max_num_seqs))
        ended = {r: -1 for m in earlier for r in m.num_scheduled_tokens}
        for message in earlier:
            designs.apply(message, ended | self.requests)
        return designs

    # ------------------------------------------------------------------ walk

    def run(self) -> Packed:
        self._collect_requests()
        chunk_ops = self._start_chunk(0)
        steps_in_chunk, snapshot, latest = 0, len(chunk_ops), 0
        for index, event in enumerate(self.events):
            if type(event) is StepStarted or not self.columns["step"]:
                if steps_in_chunk == MAX_STEPS_PER_CHUNK or len(chunk_ops) - snapshot > MAX_NUMBERS_PER_CHUNK:
                    self._finish_chunk(chunk_ops)
                    chunk_ops = self._start_chunk(index)
                    steps_in_chunk, snapshot, latest = 0, len(chunk_ops), index
                self._start_step(event, index)
                steps_in_chunk += 1
            ops = self._ops(event)
            if ops:
                chunk_ops += (index - latest, len(ops), *ops)
                latest = index
            self.state.apply(event)
            self._after(event)
        self._finish_chunk(chunk_ops)
        self._pack_events()
        self._pack_block_index()
        self._pack_rows()
        self.packed.meta |= self._meta()
        return self.packed

    def _start_chunk(self, first_event: int) -> list[int]:
        """A chunk: its first event, the ops that rebuild the state before it, then (gap, length, ops) per event."""
        snapshot = snapshot_ops(self.state, self.requests)
        return [first_event, len(snapshot), *snapshot]

    def _finish_chunk(self, ops: list[int]) -> None:
        starts = self.packed.meta.setdefault("op_chunks", [])
        self.packed.chunks[f"ops{len(starts)}"] = _deflate(_varints(ops))
        starts.append(ops[0])

    def _collect_requests(self) -> None:
        """Every request's tokens, prompt and output, known from the start: the page shows a part of them."""
        for event in self.events:
            if type(event) is RequestAdded:
                prompt = event.prompt_token_ids
                self._know(event.request_id, prompt, event.prompt_token_texts, len(prompt), event)
            elif type(event) is RequestOutput and event.request_id in self.requests:
                self.request_info[self.requests[event.request_id]]["tokens"] += event.new_token_ids
            elif type(event) is TokensSampled and event.text is not None:
                self.token_texts.setdefault(event.token_id, event.text)
                for candidate in event.top:
                    if candidate.text is not None:
                        self.token_texts.setdefault(candidate.token_id, candidate.text)

    def _know(
        self,
        request_id: str,
        token_ids: list[int],
        texts: list[str] | None,
        num_prompt: int,
        added: RequestAdded | None,
    ) -> None:
        if request_id in self.requests:
            return
        self.requests[request_id] = len(self.requests)
        self.request_info.append({
            "id": request_id, "num_prompt_tokens": num_prompt, "tokens": list(token_ids),
            "prompt": added.prompt if added else None, "priority": added.priority if added else 0,
            "added_step": added.step if added else None, "finished_step": None, "finish_reason": None,
        })  # fmt: skip
        for token_id, text in zip(token_ids, texts or (), strict=False):
            self.token_texts.setdefault(token_id, text)

    # ------------------------------------------------------------------ one event -> ops

    def _ops(self, event: Event) -> list[int]:
        """What the event changes, in the page's language; asked before the event is folded in."""
        rule = RULES.get(type(event))
        try:
            return rule(self, event) if rule else []
        except (LookupError, TypeError, ValueError):
            raise UserError(
                f"{describe(event)} does not fit the state before it: the trace is damaged or incomplete."
            ) from None

    def place(self, queue_key: list[Any], leaving: str | None = None) -> int:
        """Where a request with this key will stand in the waiting queue."""
        keys = [self.state.requests[r].queue_key for r in self.state.waiting if r != leaving]
        return sum(key <= queue_key for key in keys)

    # ------------------------------------------------------------------ steps, lanes

    def _start_step(self, event: Event, index: int) -> None:
        columns = self.columns
        columns["step"].append(event.step)
        columns["first_event"].append(index)
        columns["budget"].append(event.token_budget if type(event) is StepStarted else 0)
        for name in ("prefill", "recomputed", "decode", "preempted"):
            columns[name].append(0)
        for name in ("used", "waiting", "running"):
            columns[name].append(0)
        self.rows.append([0])
        self._measure()

    def _measure(self) -> None:
        self.columns["used"][-1] = self.state.num_blocks - 1 - self.state.num_free_blocks
        self.columns["waiting"][-1] = len(self.state.waiting)
        self.columns["running"][-1] = len(self.state.running)

    def _after(self, event: Event) -> None:
        """Totals of the step, once the event is folded in."""
        if type(event) is StepScheduled:
            self._measure()
            if self.designs is not None:
                self.rows[-1] = self.designs.apply(event, self.requests)
            self.columns["preempted"][-1] = len(event.preempted)
            before = {r.request_id: r.num_computed_tokens for r in event.new}
            before |= {r.request_id: r.num_computed_tokens for r in event.cached}
            for request_id, granted in event.num_scheduled_tokens.items():
                self._scheduled(request_id, before[request_id], granted, event.step)
            for request_id, request in self.state.requests.items():
                if request_id not in event.num_scheduled_tokens:
                    idle = {"running": PASSED_OVER, "preempted": PREEMPTED}.get(request.status, QUEUED)
                    self._segment(self.requests[request_id], idle, event.step, 0)
        elif type(event) is RequestFinished and event.request_id in self.requests:
            info = self.request_info[self.requests[event.request_id]]
            info["finished_step"], info["finish_reason"] = event.step, event.finish_reason

    def _scheduled(self, request_id: str, computed: int, granted: int, step: int) -> None:
        index = self.requests[request_id]
        again = max(0, min(granted, self._furthest.get(index, 0) - computed))
        fresh_prompt = max(0, min(self.request_info[index]["num_prompt_tokens"] - computed, granted) - again)
        self.columns["recomputed"][-1] += again
        self.columns["prefill"][-1] += fresh_prompt
        self.columns["decode"][-1] += granted - again - fresh_prompt
        self._furthest[index] = max(self._furthest.get(index, 0), computed + granted)
        kind = RECOMPUTED if again else PREFILL if fresh_prompt else DECODE
        self._segment(index, kind, step, granted)

    def _segment(self, request: int, kind: int, step: int, tokens: int) -> None:
        """Lengthen the request's lane; a new piece begins where it does something else."""
        latest = self._open.get(request)
        if latest is not None and latest[1] == kind and latest[3] == step - 1:
            latest[3], latest[4] = step, latest[4] + tokens
            return
        self._open[request] = [request, kind, step, step, tokens]
        self.segments.append(self._open[request])

    # ------------------------------------------------------------------ chunks that are read on demand

    def _pack_events(self) -> None:
        starts = []
        for first in range(0, len(self.events), EVENTS_PER_CHUNK):
            starts.append(first)
            part = self.events[first : first + EVENTS_PER_CHUNK]
            self.packed.chunks[f"events{len(starts) - 1}"] = _deflate(_columns(part))
        self.packed.meta["event_chunks"] = starts

    def _pack_block_index(self) -> None:
        """(event, block) of every event in a block's life, for its story."""
        flat: list[int] = []
        last = 0
        for index, event in enumerate(self.events):
            if type(event) in _BLOCK_EVENTS:
                flat += (index - last, event.block_id)  # type: ignore[attr-defined]
                last = index
        self.packed.chunks["block_events"] = _deflate(_varints(flat))

    def _pack_rows(self) -> None:
        if self.designs is None:
            return
        for first in range(0, len(self.rows), STEPS_PER_ROW_CHUNK):
            numbers = itertools.chain.from_iterable(self.rows[first : first + STEPS_PER_ROW_CHUNK])
            self.packed.chunks[f"rows{first // STEPS_PER_ROW_CHUNK}"] = _deflate(_varints(numbers))

    def _groups(self, config: KvConfig | None) -> list[dict[str, Any]]:
        """What each KV-cache group keeps; without a model, as far as its window says."""
        if config is not None:
            return [
                {"kind": g.kind_of_attention, "window": g.sliding_window, "layers": g.layers} for g in config.groups
            ]
        return [
            {"kind": "sliding_window" if window else "full", "window": window, "layers": []}
            for window in self.state.sliding_windows
        ]

    def _table_widths(self, config: KvConfig | None) -> list[int | None]:
        """K of each group's block table: as many columns as the longest request needs blocks."""
        longest = config.max_model_len if config else self.trace.header.config.get("max_model_len")
        return [-(-int(longest) // size) if longest else None for size in self.state.block_sizes]

    def _meta(self) -> dict[str, Any]:
        header = msgspec.to_builtins(self.trace.header)
        config = next((e for e in self.events if type(e) is KvConfig), None)
        first_step = self.columns["step"][0] if self.columns["step"] else -1
        return {
            "format": "pagedlab-view/1",
            "header": {
                k: header[k] for k in ("pagedlab", "source", "model", "config", "tokenizer", "record", "layers")
            },
            "engine": self.state.engine,
            "num_blocks": self.state.num_blocks,
            "block_sizes": self.state.block_sizes,
            "groups": self._groups(config),
            "table_widths": self._table_widths(config),
            "steps_per_row_chunk": STEPS_PER_ROW_CHUNK if self.designs else 0,
            "is_complete": any(type(e) is TraceFinished for e in self.trace.events),
            "num_events": len(self.events),
            "first_seq": self.events[0].seq if self.events else 0,
            "first_step": first_step,
            "columns": self.columns,
            "segments": self.segments,
            "requests": self.request_info,
            "token_texts": {str(k): v for k, v in self.token_texts.items()},
            "reasons": {**NOT_REACHED_REASONS, **CONSIDERED_REASONS},
            "prefix_stops": PREFIX_STOPS,
        }


_BLOCK_EVENTS = (BlockAllocated, BlockTouched, BlockCached, BlockEvicted, BlockFreed)


# ------------------------------------------------------------------ bytes


def _varints(numbers: Iterable[int]) -> bytes:
    """LEB128: seven bits a byte, the low ones first. 300 -> ac 02."""
    out = bytearray()
    for number in numbers:
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


def _columns(events: list[Event]) -> bytes:
    """JSON by kind and field, so that equal things stand together: {kind: {i: […], field: […]}}."""
    groups: dict[type[Event], list[int]] = {}
    for i, event in enumerate(events):
        groups.setdefault(type(event), []).append(i)
    by_kind: dict[str, dict[str, list[Any]]] = {}
    for cls, indices in groups.items():
        alike = [events[i] for i in indices]
        fields = {name: list(map(attrgetter(name), alike)) for name in cls.__struct_fields__}
        by_kind[alike[0].kind] = {"i": indices, **fields}
    for columns in by_kind.values():
        for name in ("i", "seq", "t_ns"):  # differences are small and repeat
            values = columns[name]
            columns[name] = [values[0], *(b - a for a, b in itertools.pairwise(values))]
    return msgspec.json.encode(by_kind)


def _deflate(data: bytes) -> str:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(compressor.compress(data) + compressor.flush()).decode()
