"""``pagedlab view``: a trace as one page that opens offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedlab.errors import UserError


def view(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, recorded at blocks or finer.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Default: beside it.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="A:B", help="Only steps A to B.")] = None,
) -> None:
    """Write an interactive page: scrub through the run, follow any token to its slot."""
    from pagedlab.trace.file import refuse_overwriting
    from pagedlab.trace.trace import Trace
    from pagedlab.viewer.page import write_page

    refuse_overwriting(trace, out)
    loaded = Trace.load(trace)
    stem = trace.name.removesuffix(".zst").removesuffix(".jsonl")
    path = out or trace.with_name(f"{stem}.html")
    write_page(loaded, path, parse_steps(steps))
    print(path)


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """``3:10`` -> (3, 10)."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal():
        raise UserError(f"--steps is {text!r}: give the first and the last step, for example 0:50.")
    if int(first) > int(last):
        raise UserError(f"--steps is {text!r}: the first step comes after the last.")
    return int(first), int(last)
