"""``scenario-from``: a saved trace as a scenario that reproduces its decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pagedlab.errors import UserError
from pagedlab.trace.file import refuse_overwriting, whole_file


def scenario_from(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A saved trace: .jsonl or .jsonl.zst.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Default: print it.")] = None,
    anonymise: Annotated[bool, typer.Option("--anonymise", help="Replace request ids, tokens and salts.")] = False,
) -> None:
    """Turn a trace into a small scenario for a bug report: what the model said becomes a script.

    pagedlab trace --scenario FILE runs it, without a model.
    """
    from pagedlab.trace.to_scenario import scenario_from as convert
    from pagedlab.trace.trace import Trace

    refuse_overwriting(trace, out)
    document = convert(Trace.load(trace), anonymise=anonymise, name=trace.name.split(".")[0])
    text = json.dumps(document, ensure_ascii=True, indent=1)
    if out is None:
        print(text)
        return
    try:
        with whole_file(out) as place:
            place.write_text(text + "\n", "utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}): choose another place with -o.") from None
