"""``pagedlab doctor``: what this machine has."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine has: torch, triton, GPU, graphviz, the embedded model."""
    from pagedlab.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps(findings, indent=2))
        return
    width = max(map(len, findings))
    for name, finding in findings.items():
        print(f"{name:<{width}}  {finding}")
