"""Colours, glyphs and words of the pictures: one palette, and none of it carries meaning alone.

The hues follow Okabe and Ito's palette, which the common kinds of colour blindness keep apart, at a
lightness that has contrast on black and on white. Every state also has a glyph of its own, so that a
pipe, a log and NO_COLOR lose nothing; where the output cannot show the glyphs there are letters.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#2f7fc4", "#c2640a", "#0e8a68", "#b0569a", "#d4451f", "#7e7e7e"

STYLES = {
    "null": f"{GREY}",
    "free": f"{GREY}",
    "cached": f"{GREEN}",
    "in_use": f"{BLUE}",
    "shared": f"bold {ORANGE}",
    "heading": f"bold {BLUE}",
    "rule": f"{BLUE}",
    "dim": f"{GREY}",
    "request": "bold",
    "number": "bold",
    "good": f"{GREEN}",
    "bad": f"bold {RED}",
    "computed": "",
    "written": f"bold {ORANGE}",
    "known": f"{PURPLE}",
    "empty": f"{GREY}",
    "bar": f"{BLUE}",
    "chosen": f"bold {ORANGE}",
}


@dataclass(frozen=True)
class Glyphs:
    """Signs; each state's is different from every other state's."""

    null: str = "∅"
    free: str = "·"
    cached: str = "□"
    in_use: str = "■"
    many: str = "+"          # shared by ten or more; by fewer the digit says how many
    written: str = "▸"
    known: tuple[str, str] = ("(", ")")
    empty: str = "░"
    cell: str = "│"
    arrow: str = "→"
    rule: str = "─"
    bullet: str = "•"
    more: str = "…"
    times: str = "×"
    dot: str = "·"
    minus: str = "−"
    bar: tuple[str, ...] = ("▏", "▎", "▍", "▌", "▋", "▊", "▉", "█")
    ascii: bool = False


ASCII_GLYPHS = Glyphs(
    null="x", free=".", cached="o", in_use="#", written=">", empty="_", cell="|", arrow="->", rule="-",
    bullet="*", more="...", times="x", dot="*", minus="-", bar=("#",), ascii=True,
)


@dataclass(frozen=True)
class Theme:
    """What one console can show."""

    glyphs: Glyphs = field(default_factory=Glyphs)
    styles: dict[str, Style] = field(default_factory=dict)

    @classmethod
    def for_console(cls, console: Console) -> Theme:
        """No style at all where there is no colour, so that not even bold leaves an escape code."""
        is_plain = console.no_color or console.color_system is None
        styles = {name: Style.null() if is_plain else Style.parse(spec or "none") for name, spec in STYLES.items()}
        return cls(ASCII_GLYPHS if not encodes(console.encoding) else Glyphs(), styles)

    def __getitem__(self, name: str) -> Style:
        return self.styles[name]


def encodes(encoding: str) -> bool:
    """Whether text in this encoding can hold all glyphs."""
    try:
        "".join(str(sign) for sign in vars(Glyphs()).values()).encode(encoding)
        "中⟨⏎".encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


class PlainConsole(Console):
    """Leaves it to the program to end when the reader (``head``, ``less``) has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(file: TextIO | None = None, *, width: int | None = None) -> Console:
    """The console every command prints with: text is never read as markup, emoji code or highlight.

    With NO_COLOR set, or where the output is not a terminal, nothing but text and newlines is written.
    """
    return PlainConsole(
        file=file or sys.stdout,
        width=width,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=False,
    )


DARK = TerminalTheme(
    (16, 19, 24), (216, 220, 226),
    [(40, 44, 52), (212, 69, 31), (14, 138, 104), (194, 100, 10), (47, 127, 196), (176, 86, 154), (60, 150, 170),
     (216, 220, 226)],
    [(122, 122, 122), (212, 69, 31), (14, 138, 104), (194, 100, 10), (47, 127, 196), (176, 86, 154), (60, 150, 170),
     (255, 255, 255)],
)
LIGHT = TerminalTheme(
    (255, 255, 255), (36, 41, 47),
    [(36, 41, 47), (212, 69, 31), (14, 138, 104), (194, 100, 10), (47, 127, 196), (176, 86, 154), (60, 150, 170),
     (110, 119, 129)],
    [(122, 122, 122), (212, 69, 31), (14, 138, 104), (194, 100, 10), (47, 127, 196), (176, 86, 154), (60, 150, 170),
     (140, 149, 159)],
)
