"""Writes the figures, and tells when a written one no longer says what would be drawn."""

from __future__ import annotations

import re
from pathlib import Path

from pagedlab.errors import UserError
from pagedlab.figures.draw import FIGURES
from pagedlab.figures.svg import THEMES


def file_name(figure: str, theme: str) -> str:
    return f"{figure}.{theme}.svg"


def write_figures(folder: Path) -> list[Path]:
    """Draw all figures in both themes.

    Raises:
        UserError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, draw in FIGURES.items():
            drawing = draw()
            for theme in THEMES:
                path = folder / file_name(name, theme)
                path.write_text(drawing.render(theme), encoding="utf-8")
                written.append(path)
        return written
    except OSError as error:
        raise UserError(f"cannot write figures to {folder} ({error.strerror}): choose another folder.") from None


def said(svg: str) -> list[str]:
    """What a figure says: its words and its shapes, without colours and fonts."""
    return re.findall(r'(?<=>)[^<\n]+(?=</text>)|<(?:text|rect) x="[^"]*" y="[^"]*"|<path d="[^"]*"', svg)


def differing_figures(folder: Path) -> list[str]:
    """Names of files that are missing or say something else than the command would draw."""
    different = []
    for name, draw in FIGURES.items():
        drawing = draw()
        for theme in THEMES:
            path = folder / file_name(name, theme)
            if not path.is_file() or said(path.read_text(encoding="utf-8")) != said(drawing.render(theme)):
                different.append(path.name)
    return different
