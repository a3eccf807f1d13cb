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
