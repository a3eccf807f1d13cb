"""``pagedlab diff``: where two runs part, and why each went its way.

Requests are matched by id. The canonical form of an event leaves out what differs from run to run
without meaning anything: its number, times, versions and whatever its class marks as volatile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec

from pagedlab.trace.events import (
    KINDS,
    LEVELS,
    EngineSnapshot,
    Event,
    RequestAdded,
    TokensSampled,
    TraceFinished,
    TraceGap,
    TraceHeader,
)
from pagedlab.trace.trace import Trace, request_ids_of
from pagedlab.trace.why import explain_step

# What was decided, as opposed to the numbers it was decided by. Kinds not listed decide nothing.
DECISIONS: dict[str, tuple[str, ...]] = {
    "request_added": ("request_id", "prompt_token_ids", "priority", "cache_salt"),
    "request_refused": ("request_id", "reason"),
    "request_aborted": ("request_id",),
    "prefix_cache_reset": ("done",),
    "prefix_matched": ("request_id", "num_computed_tokens", "block_ids"),
    "slots_allocated": ("request_id", "hit_block_ids", "new_block_ids"),
    "slots_refused": ("request_id",),
    "request_considered": ("request_id", "queue", "num_computed_tokens", "num_tokens_granted", "outcome"),
    "request_preempted": ("request_id", "on_behalf_of"),
    "step_scheduled": ("num_scheduled_tokens", "preempted", "finished_req_ids"),
    "tokens_sampled": ("request_id", "token_id"),  # those kept
    "request_output": ("request_id", "new_token_ids", "finish_reason"),
    "request_finished": ("request_id", "finish_reason"),
}
_NOT_COMPARED = {TraceHeader, EngineSnapshot, TraceGap, TraceFinished}
_TEXTS = ("prompt", "prompt_token_texts", "text", "sampling")  # what was asked for is among the notes
_ENVELOPE = ("seq", "engine", "t_ns")
_COMPARED: dict[type[Event], tuple[str, ...]] = {}


def canonical(event: Event) -> dict[str, Any]:
    """The event as plain data, without what is volatile; stored examples compare this."""
    return {"kind": event.kind, **{name: msgspec.to_builtins(getattr(event, name)) for name in _compared(event)}}


def _compared(event: Event) -> tuple[str, ...]:
    """Names of the fields of the canonical form."""
    cls = type(event)
    if cls not in _COMPARED:
        left_out = (*_ENVELOPE, *event.volatile)
        _COMPARED[cls] = tuple(name for name in event.__struct_fields__ if name not in left_out)
    return _COMPARED[cls]


@dataclass(frozen=True)
class Difference:
    """Two events that stand in the same place and differ; one is None where its run ends first."""

    a: Event | None
    b: Event | None
    fields: tuple[str, ...]            # that differ; empty if the events are about different things
    is_decision: bool                  # False: the same decisions by other numbers
    reasons_a: list[str] = field(default_factory=list)
    reasons_b: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how the two engines differ

    @property
    def step(self) -> int:
        return (self.a or self.b).step  # type: ignore[union-attr]  # one of them is there

    @property
    def lines(self) -> list[str]:
        """For people: what differs, each side with its reasons."""
        what = "the first decision that differs" if self.is_decision else "no decision differs, but these numbers do"
        when = f"step {self.step}" if self.step >= 0 else "before step 0"
        lines = [*self.notes, f"{when}: {what}"]
        for name, event, reasons in (("A", self.a, self.reasons_a), ("B", self.b, self.reasons_b)):
            lines.append(f"  {name}: {self._show(event)}")
            lines += [f"     {reason}" for reason in reasons]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "step": self.step, "is_decision": self.is_decision, "fields": list(self.fields), "notes": self.notes,
            "a": None if self.a is None else canonical(self.a), "b": None if self.b is None else canonical(self.b),
            "reasons_a": self.reasons_a, "reasons_b": self.reasons_b,
        }

    def _show(self, event: Event | None) -> str:
        if event is None:
            return "the trace ends here; until now the two agree"
        names = self.fields or DECISIONS.get(event.kind, ())
        shown = [name for name in ("request_id",) if hasattr(event, name) and name not in names]
        values = (f"{name}={_short(getattr(event, name))}" for name in (*shown, *names))
        return f"{event.kind} {', '.join(values)}"


def diff(a: Trace, b: Trace) -> Difference | None:
    """The first decision in which two runs part, else the first number that differs, else None.

    Traces of different levels are compared at what both hold. Numbers are compared in the kinds of
    events that both hold, since a run without a model has no worker to speak; texts are not. Steps that
    only one has and that schedule nothing do not count: a scenario ends with one, ``LLM.generate`` does not.
    """
    last = _last_step_that_counts(a, b)
    depth = min(LEVELS.index(a.header.record), LEVELS.index(b.header.record))
    held = [{type(e) for e in t if LEVELS.index(e.level) <= depth} - _NOT_COMPARED for t in (a, b)]
    decisions = {KINDS[kind] for kind in DECISIONS if LEVELS.index(KINDS[kind].level) <= depth}
    for kinds in (decisions, held[0] & held[1]):
        only_decisions = kinds is decisions
        for left, right in zip_longest(_comparable(a, kinds, last), _comparable(b, kinds, last)):
            fields = differing_fields(left, right)
            if fields:
                kept = DECISIONS[left.kind] if only_decisions else fields
                fields = tuple(name for name in fields if name in kept and name not in _TEXTS)
            if fields != ():
                return _explained(a, b, Difference(left, right, fields or (), only_decisions))
    return None


def differing_fields(a: Event | None, b: Event | None) -> tuple[str, ...] | None:
    """Names of the fields in which two events differ; None if they are not about the same thing."""
    if a is None or b is None or type(a) is not type(b) or a.step != b.step:
        return None
    if getattr(a, "request_id", None) != getattr(b, "request_id", None):
        return None
    return tuple(name for name in _compared(a) if _ordered(getattr(a, name)) != _ordered(getattr(b, name)))


def _ordered(value: Any) -> Any:
    """The order of a mapping counts: it is the order of scheduling."""
    return list(value.items()) if isinstance(value, dict) else value


def _last_step_that_counts(a: Trace, b: Trace) -> int:
    """The last step of the shorter run if the longer one only idles after it, else of the longer one."""
    shorter, longer = sorted((a, b), key=lambda trace: max(trace.steps, default=-1))
    end = max(shorter.steps, default=-1)
    scheduled = [step.scheduled for number, step in longer.steps.items() if number > end]
    is_idle = all(s is not None and not s.num_scheduled_tokens and not s.preempted for s in scheduled)
    return end if is_idle else max(longer.steps)


def _comparable(trace: Trace, kinds: set[type[Event]], last_step: int) -> Iterator[Event]:
    engine = trace.engine
    for event in trace:
        if event.engine == engine and type(event) in kinds and event.step <= last_step and not (
            type(event) is TokensSampled and not event.kept
        ):
            yield event


def _explained(a: Trace, b: Trace, difference: Difference) -> Difference:
    """Add what either trace says about the requests of the two events in that step."""
    named: dict[str, None] = {}
    for event in (difference.a, difference.b):
        if event is not None:
            named.update(dict.fromkeys(list(request_ids_of(event))[:3]))
    reasons: list[list[str]] = []
    for trace in (a, b):
        lines: list[str] = []
        for request_id in named:
            known = difference.step in trace.steps and difference.step >= 0 and request_id in trace.requests
            if known and LEVELS.index(trace.header.record) >= LEVELS.index("decisions"):
                lines += explain_step(trace, request_id, trace.steps[difference.step]).lines
        reasons.append(lines)
    return Difference(difference.a, difference.b, difference.fields, difference.is_decision, reasons[0], reasons[1],
                      _notes(a, b))


def _notes(a: Trace, b: Trace) -> list[str]:
    """How the engines and the requests differ to begin with."""
    notes = []
    for what in ("config", "model"):
        left, right = getattr(a.header, what), getattr(b.header, what)
        if bool(left) != bool(right):
            notes.append(f"{what}: {'A' if left else 'B'} has one, {'B' if left else 'A'} has none")
        for name in left:
            if name in right and left[name] != right[name]:
                notes.append(f"{what}: {name} is {_short(left[name])} in A and {_short(right[name])} in B")
    asked_a = {e.request_id: e.sampling for e in a if type(e) is RequestAdded}
    asked_b = {e.request_id: e.sampling for e in b if type(e) is RequestAdded}
    for request_id, asked in asked_a.items():
        for name, value in asked.items():
            other = asked_b.get(request_id, asked).get(name, value)
            if value != other:
                notes.append(f"{request_id} asks for {name} {_short(value)} in A and {_short(other)} in B")
    return notes


def _short(value: Any, most: int = 160) -> str:
    text = repr(msgspec.to_builtins(value))
    return text if len(text) <= most else text[: most - 1] + "…"
