"""How ``pagedlab scenarios`` prints the list: a name and a sentence each."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from pagedlab.viz.layout import Pen
from pagedlab.viz.terminal import BRIEF
from pagedlab.viz.text import pad, safe
from pagedlab.viz.theme import Theme

HOW_TO_RUN = "pagedlab trace --scenario NAME"


def print_scenarios(console: Console, scenarios: Iterable[tuple[str, str, bool]]) -> None:
    """One paragraph for each (name, sentence, needs_model); those that need no model say so by a dot.

    Names stand in a column of their own, or above the sentence where it is narrow.
    """
    pen = Pen(Theme.for_console(console), max(console.width, 20), BRIEF)
    rows = [(safe(name, width=30, ascii=pen.glyphs.ascii), pen.plain(sentence), needs)
            for name, sentence, needs in scenarios]
    column = max((len(name) for name, _, _ in rows), default=0) + 2
    lines: list[Text] = []
    for name, sentence, needs_model in rows:
        note = (" (on the model)" if needs_model else "", "dim")
        if pen.width < 60:
            lines += [pen.line((name, "request")), *pen.paragraph("  ", sentence, note, hang=2)]
        else:
            lines += pen.paragraph((pad(name, column).replace(" ", "\u00a0"), "request"), sentence, note, hang=column)
    lines += [Text(end=""), *pen.paragraph(("run one: ", "dim"), HOW_TO_RUN)]
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", crop=True)
