"""``replay``, ``why``, ``check`` and ``diff``: questions to saved traces. None of them imports torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pagedlab.errors import UserError, notice
from pagedlab.trace.events import LEVELS
from pagedlab.wording import plural

TracePath = Annotated[Path, typer.Argument(metavar="TRACE", help="A saved trace: .jsonl or .jsonl.zst.")]
Detail = Annotated[
    str | None,
    typer.Option(
        "--detail", metavar="LEVEL",
        help="How much to show, each with the former: steps (a line each), decisions (who got what, and why), blocks "
        "(pool, tables, slots), tensors (the worker's inputs), kernels (what they wrote and read); default blocks.",
    ),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def replay(
    trace: TracePath,
    detail: Detail = None,
    pause: Annotated[bool, typer.Option("--pause", help="Wait for a key after each step.")] = False,
) -> None:
    """Show a saved trace in the same tracer that showed it live."""
    from pagedlab.trace.trace import Trace
    from pagedlab.viz.terminal import TerminalTracer

    if detail is not None and detail not in LEVELS:
        raise UserError(f"--detail is {detail!r}: choose one of {', '.join(LEVELS)}.")
    loaded = Trace.load(trace)
    recorded = LEVELS.index(loaded.header.record)
    if detail is not None:
        loaded.need(detail, f"replay --detail {detail}")  # type: ignore[arg-type]
    shown = detail or LEVELS[min(recorded, LEVELS.index("blocks"))]
    TerminalTracer(detail=shown, pause=pause).show(loaded)  # type: ignore[arg-type]


def why(
    trace: TracePath,
    request: Annotated[str | None, typer.Argument(metavar="REQUEST", help="A request id, r0 for example.")] = None,
    step: Annotated[int | None, typer.Option(help="What was decided about it in this step; else its journey.")] = None,
    slot: Annotated[
        int | None, typer.Option(help="Instead of a request: what this slot of the cache held, and when.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Why a request waited, got fewer tokens, was preempted or missed the prefix cache; what a slot held."""
    from pagedlab.trace.slot import slot_history
    from pagedlab.trace.trace import Trace
    from pagedlab.trace.why import why as explain
    from pagedlab.viz.text import safe

    loaded = Trace.load(trace)
    if slot is not None:
        if request is not None or step is not None:
            raise UserError("--slot asks about the cache: leave out the request and --step.")
        answer = slot_history(loaded, slot)
    elif request is None:
        there = plural(len(loaded.requests), "request") + "".join(f", {name}" for name in list(loaded.requests)[:8])
        more = ", …" if len(loaded.requests) > 8 else ""
        raise UserError(f"name a request, or a slot with --slot: this trace has {there}{more}.")
    else:
        answer = explain(loaded, request, step)
    if as_json:
        print(json.dumps(answer.data))
        return
    for line in answer.lines:
        print(safe(line))


def check(trace: TracePath, as_json: AsJson = False) -> None:
    """Hold every event to the invariants of pool, queues, tables and slots; exit 1 at the first broken one."""
    from pagedlab.trace.check import check as first_violation
    from pagedlab.trace.trace import Trace
    from pagedlab.viz.text import safe

    notices: list[str] = []
    violation = first_violation(Trace.load(trace), notices)
    for text in notices:
        notice(text)
    if as_json:
        print(json.dumps({"ok": violation is None, "violation": violation and asdict(violation), "notices": notices}))
    else:
        print("ok" if violation is None else safe(str(violation)))
    if violation is not None:
        raise typer.Exit(1)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A trace.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one; requests are matched by id.")],
    as_json: AsJson = False,
) -> None:
    """Find the first decision in which two runs part; exit 1 if there is one."""
    from pagedlab.trace.trace import Trace
    from pagedlab.viz.text import safe

    difference = Trace.load(a).diff(Trace.load(b))
    if as_json:
        print(json.dumps({"same": difference is None, "difference": difference and difference.to_dict()}))
    elif difference is None:
        print("no difference in any decision")
    else:
        for line in difference.lines:
            print(safe(line))
    if difference is not None:
        raise typer.Exit(1)
