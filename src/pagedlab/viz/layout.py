"""Lines that are never wider than the console: wrapping, tables, columns.

Everything is built from parts, a string or a string with the name of a style. Strings from the
outside go through :meth:`Pen.name` or :meth:`Pen.token` first; nothing here reads markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Span, Text

from pagedlab.viz.text import pad, safe
from pagedlab.viz.theme import Glyphs, Theme

Part = str | tuple[str, str]  # text, or text and the name of a style
Row = Sequence[Part]
ASCII = str.maketrans({
    "→": "->", "·": "*", "×": "x", "−": "-", "–": "-", "…": "...", "─": "-", "│": "|", "≥": ">=", "÷": "/",
})
GLUE = "\u00a0"      # a space at which no line is broken; printed as an ordinary one
GUTTER = 9           # cells for a section's name at the left
NARROW = 72          # below this a section's name stands on a line of its own


@dataclass(frozen=True)
class Limits:
    """How much of a long list is shown; what is left out is always counted."""

    requests: int       # requests with details in one step
    chain: int          # tokens in the index chain
    tables: int         # requests whose block table is shown in one step
    first_blocks: int   # blocks shown of each long run in one table, from its front
    prompt: int         # tokens of a request that arrives
    candidates: int     # of the sampler
    ids: int            # ids in a list
    text_lines: int     # of the growing text


def glue(words: str) -> str:
    """Keeps the words on one line."""
    return words.replace(" ", GLUE)


def _joined(line: Text) -> Text:
    """Neighbouring pieces of one style become one piece, which is shorter on the wire and in a picture."""
    spans: list[Span] = []
    for span in line.spans:
        if spans and spans[-1].end == span.start and spans[-1].style == span.style:
            spans[-1] = Span(spans[-1].start, span.end, span.style)
        else:
            spans.append(span)
    line.spans = spans
    return line


@dataclass(frozen=True)
class Pen:
    """Writes lines of one width in one theme."""

    theme: Theme
    width: int
    limits: Limits

    @property
    def glyphs(self) -> Glyphs:
        return self.theme.glyphs

    def narrow(self, width: int) -> Pen:
        return replace(self, width=max(width, 8))

    # ---------------------------------------------------------------- words

    def name(self, request_id: str, width: int = 16) -> Part:
        return safe(request_id, width=width, ascii=self.glyphs.ascii, token=True), "request"

    def token(self, text: str | None, token_id: int, width: int = 14) -> str:
        """The token's text, its id where the trace has no text."""
        if text is None:
            return f"#{token_id}"
        return safe(text, width=width, ascii=self.glyphs.ascii, token=True) or '""'

    def plain(self, text: str, width: int | None = None) -> str:
        return safe(text, width=width, ascii=self.glyphs.ascii)

    def ids(self, ids: Iterable[int], limit: int | None = None) -> str:
        """Runs of neighbours shortened: ``1–3, 7``; a long list is cut and counted."""
        runs: list[list[int]] = []
        count = 0
        for block_id in ids:
            count += 1
            if runs and block_id == runs[-1][-1] + 1 and runs[-1][0] != 0:
                runs[-1] = [runs[-1][0], block_id]
            else:
                runs.append([block_id])
        limit = limit or self.limits.ids
        shown = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs[:limit]]
        hidden = count - sum(run[-1] - run[0] + 1 for run in runs[:limit])
        if hidden:
            shown.append(f"… {hidden} more")
        return ", ".join(shown) or "none"

    def _text(self, parts: Iterable[Part]) -> Text:
        line = Text(no_wrap=True, end="")
        for part in parts:
            words, style = part if isinstance(part, tuple) else (part, "")
            line.append(words.translate(ASCII) if self.glyphs.ascii else words, self.theme[style] if style else None)
        return _joined(line)

    # ---------------------------------------------------------------- lines

    def line(self, *parts: Part) -> Text:
        """One line; what does not fit is cut off with a sign."""
        line = self._text(parts)
        if line.cell_len > self.width:
            line.truncate(self.width - 1, overflow="crop")
            line.append("~" if self.glyphs.ascii else "…")
        return line

    def paragraph(self, *parts: Part, hang: int = 0) -> list[Text]:
        """Wrapped at spaces; lines after the first are indented by ``hang``."""
        words = self._words(self._text(parts))
        lines: list[Text] = []
        line = Text(no_wrap=True, end="")
        is_blank = True
        for word in words:
            if line.cell_len + len(word.plain.rstrip(" ")) and not is_blank and (
                line.cell_len + cell_len(word.plain.rstrip(" ")) > self.width
            ):
                lines.append(line)
                line, is_blank = Text(" " * hang, no_wrap=True, end=""), True
            while line.cell_len + cell_len(word.plain.rstrip(" ")) > self.width:
                head, word = self._cut(word, max(self.width - line.cell_len, 2))
                lines.append(line + head)
                line, is_blank = Text(" " * hang, no_wrap=True, end=""), True
            line.append_text(word)
            is_blank = False
        if not is_blank:
            lines.append(line)
        for line in lines:
            line.rstrip()
            if GLUE in line.plain:
                line.plain = line.plain.replace(GLUE, " ")
        return [_joined(line) for line in lines]

    @staticmethod
    def _words(text: Text) -> list[Text]:
        """Pieces that end after their spaces."""
        plain = text.plain
        cuts = [i + 1 for i, char in enumerate(plain[:-1]) if char == " " and plain[i + 1] != " "]
        return [piece for piece in text.divide(cuts) if piece.plain]

    @staticmethod
    def _cut(word: Text, width: int) -> tuple[Text, Text]:
        at = used = 0
        for char in word.plain:
            size = cell_len(char)
            if used + size > width and at:
                break
            used, at = used + size, at + 1
        head, tail = word.divide([at])
        return head, tail

    def table(self, header: Row, rows: Sequence[Row], *, right: Sequence[bool], gap: str = "  ") -> list[Text]:
        """Columns as wide as their widest cell, the header dim above them."""
        everything = [*([header] if header else []), *rows]
        shown = [[self._text([part]) for part in row] for row in everything]
        widths = [max((row[i].cell_len for row in shown if i < len(row)), default=0) for i in range(len(right))]
        lines = []
        for index, row in enumerate(shown):
            line = Text(no_wrap=True, end="")
            for i, cell in enumerate(row):
                if i:
                    line.append(gap.translate(ASCII) if self.glyphs.ascii else gap, self.theme["dim"])
                fill = " " * (widths[i] - cell.cell_len)
                if header and index == 0:
                    cell.stylize(self.theme["dim"])
                line.append_text(Text(fill) + cell if right[i] else cell + Text(fill))
            line.rstrip()
            lines.append(self.line() if not line.plain else self._crop(line))
        return lines

    def _crop(self, line: Text) -> Text:
        if line.cell_len > self.width:
            line.truncate(self.width - 1, overflow="crop")
            line.append("~" if self.glyphs.ascii else "…")
        return line

    def title(self, left: str, *right: Part) -> Text:
        """``── step 3 ───────── running 2 · waiting 1 ──``"""
        rule = "-" if self.glyphs.ascii else "─"
        head = self._text([(rule * 2 + " ", "rule"), (left, "heading"), " "])
        tail = self._text([" ", *right, (" " + rule * 2, "rule")] if right else [])
        room = self.width - head.cell_len - tail.cell_len
        if room < 1:
            return self._crop(head + self._text([" ", *right] if right else []))
        return head + self._text([(rule * room, "rule")]) + tail

    def section(self, name: str, body: list[Text]) -> list[Text]:
        """The section's name in a gutter at the left, or above where it is narrow."""
        if not body:
            return []
        if self.width < NARROW:
            return [self.line((name, "heading")), *(Text(" ", end="") + line for line in body)]
        first = self._text([(pad(name, GUTTER - 1), "heading"), " "])
        return [(first if i == 0 else Text(" " * GUTTER, end="")) + line for i, line in enumerate(body)]

    @property
    def inside(self) -> Pen:
        """A pen as wide as a section's body."""
        return self.narrow(self.width - (1 if self.width < NARROW else GUTTER))

    def side_by_side(self, left: list[Text], right: list[Text], left_width: int, gap: int = 3) -> list[Text]:
        bar = Text(" " * (gap // 2) + ("|" if self.glyphs.ascii else "│") + " " * (gap - gap // 2 - 1),
                   style=self.theme["dim"], end="")
        lines = []
        for i in range(max(len(left), len(right))):
            a = left[i] if i < len(left) else Text(end="")
            b = right[i] if i < len(right) else Text(end="")
            line = a + Text(" " * (left_width - a.cell_len), end="") + bar + b
            line.rstrip()
            lines.append(line)
        return lines
