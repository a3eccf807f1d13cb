"""``pagedlab figures``: the figures of the walkthrough, drawn from recorded traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedlab.errors import UserError


def figures(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write, or what to check.")] = Path(
        "figures"
    ),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a file says something else.")
    ] = False,
) -> None:
    """Draw the figures as SVG, light and dark."""
    from pagedlab.figures.files import differing_figures, write_figures

    if not check:
        for path in write_figures(folder):
            print(path)
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: there are no figures to check.")
    different = differing_figures(folder)
    for name in different:
        print(f"{folder / name} does not say what pagedlab figures draws")
    if different:
        raise typer.Exit(1)
    print("ok")
