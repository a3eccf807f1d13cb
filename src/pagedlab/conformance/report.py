"""What replaying one recording found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """One scenario, one line of the report."""

    name: str
    path: str
    kind: str                              # scheduler, worker, worked_examples, checkpoint or kv_init
    mode: str                              # strict or lenient
    ok: bool
    first_difference: dict[str, Any] | None  # step, field, expected, got
    report: str                            # for people; empty when ok
    about: str = ""                        # the scenario's sentence


@dataclass(frozen=True)
class Unreadable:
    """A recording, or a part of one, that could not be replayed; the others are."""

    path: str
    why: str                               # one sentence


Difference = tuple[str, Any, Any]  # field, expected, got


def first_difference(expected: Any, got: Any, *, ordered: tuple[str, ...] = (), field: str = "") -> Difference | None:
    """Where two nested values part first; fields that only ``got`` has are not compared.

    Keys of the objects named in ``ordered`` must also come in the same order.
    """
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            name = f"{field}.{key}" if field else str(key)
            if key not in got:
                return name, value, None
            difference = first_difference(value, got[key], ordered=ordered, field=name)
            if difference is not None:
                return difference
        extra = [key for key in got if key not in expected] if field else []
        if extra:
            return f"{field}.{extra[0]}", None, got[extra[0]]
        if field in ordered and list(expected) != list(got):
            return f"{field} (order)", list(expected), list(got)
        return None
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for i, (a, b) in enumerate(zip(expected, got, strict=True)):
            difference = first_difference(a, b, ordered=ordered, field=f"{field}[{i}]")
            if difference is not None:
                return difference
        return None
    return None if expected == got and type(expected) is type(got) else (field, expected, got)
