"""``pagedlab scenarios``: the built-in stories."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def scenarios(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the built-in scenarios, a sentence each."""
    from pagedlab.scenarios.library import list_scenarios
    from pagedlab.viz.scenario_list import print_scenarios
    from pagedlab.viz.theme import make_console

    found = list_scenarios()
    if as_json:
        print(json.dumps([{"name": s.name, "about": s.about, "needs_model": s.needs_model} for s in found]))
        return
    print_scenarios(make_console(), [(s.name, s.about, s.needs_model) for s in found])
