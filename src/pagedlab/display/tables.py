"""Lists side by side: one row per list, one column per token, coloured by the request the token is of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

from pagedlab.display.picture import COLOURS, Picture, hue, tint
from pagedlab.display.requests import request_order, token_texts
from pagedlab.errors import UserError
from pagedlab.trace.events import BatchOrdered, InputsPrepared, SlotsMapped
from pagedlab.trace.trace import Trace
from pagedlab.viz.text import safe

COLUMNS = 16       # tokens side by side; more go on below
MOST_TOKENS = 128  # shown; the rest is counted
CELL_WIDTH = 10    # characters of a value


class IndexTable(Picture):
    """Parallel lists over the same tokens.

    ``IndexTable({"req_indices": [0, 0, 1], "positions": [0, 1, 0]}, owners=[0, 0, 1])`` shows two
    rows of three cells, the first two in one colour and the third in another.
    """

    def __init__(
        self,
        lists: Mapping[str, Sequence[Any]],
        owners: Sequence[int] | None = None,
        *,
        title: str = "",
        notes: Mapping[str, str] | None = None,
        strong: Sequence[str] = (),
        marks: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        """
        Args:
            lists: name -> values, all of one length.
            owners: per value a number that chooses the colour: a request's place by arrival.
            notes: name -> how the list is made, shown behind it.
            strong: names of lists to set off.
            marks: name -> places in the list to point at.

        Raises:
            UserError: the lists differ in length, or there is none.
        """
        lengths = {name: len(values) for name, values in lists.items()}
        if owners is not None:
            lengths["owners"] = len(owners)
        if not lists or len(set(lengths.values())) > 1:
            raise UserError(f"lists side by side need one length, and these have {lengths or 'no list'}.")
        self.title = title
        self.lists = {name: list(values) for name, values in lists.items()}
        self._owners = [-1] * next(iter(lengths.values())) if owners is None else list(owners)
        self._notes, self._strong = dict(notes or {}), set(strong)
        self._marks = {name: set(places) for name, places in (marks or {}).items()}

    def pieces(self) -> list[range]:
        """The columns in pieces that fit beside each other."""
        shown = min(len(self._owners), MOST_TOKENS)
        return [range(first, min(first + COLUMNS, shown)) for first in range(0, shown, COLUMNS)] or [range(0)]

    @property
    def _left_out(self) -> str:
        more = len(self._owners) - MOST_TOKENS
        return f"… and {more:,} more" if more > 0 else ""

    def _colour(self, i: int) -> str:
        return COLOURS["wash"] if self._owners[i] < 0 else tint(hue(self._owners[i]), 0.25)

    def as_shown(self) -> dict[str, Any]:
        """Plain data for a page that draws the table itself; every text is already made visible."""
        return {
            "title": safe(self.title),
            "pieces": [[piece.start, piece.stop] for piece in self.pieces()],
            "colours": [self._colour(i) for i in range(len(self._owners))],
            "rows": [
                {
                    "name": safe(name),
                    "values": [safe(str(v), width=CELL_WIDTH) for v in values],
                    "note": safe(self._notes.get(name, "")),
                    "strong": name in self._strong,
                    "marks": sorted(self._marks.get(name, ())),
                }
                for name, values in self.lists.items()
            ],
        }

    # ------------------------------------------------------------------ as HTML

    def _repr_html_(self) -> str:
        base = f"background:{COLOURS['paper']};color:{COLOURS['ink']};border:0"
        heads = f"{base};text-align:left;padding:2px 10px 2px 0;white-space:nowrap;font:13px ui-monospace,monospace"
        parts = []
        for piece in self.pieces():
            rows = []
            mark = f";outline:2px solid {COLOURS['alert']};outline-offset:-2px;font-weight:700"
            cell = f"{base};border:1px solid {COLOURS['line']};padding:2px 7px;text-align:center"
            for name, values in self.lists.items():
                weight = ";font-weight:700" if name in self._strong else ""
                cells = "".join(
                    f'<td style="{cell};background:{self._colour(i)};font:13px ui-monospace,monospace;white-space:pre;'
                    f'unicode-bidi:isolate{weight}{mark if i in self._marks.get(name, ()) else ""}">'
                    f"{_text(values[i])}</td>"
                    for i in piece
                )
                note = self._notes.get(name, "")
                about = (
                    f'<td style="{base};color:{COLOURS["dim"]};padding:2px 10px;text-align:left;white-space:nowrap;'
                    f'font:13px system-ui,sans-serif">{_text(note, 80)}</td>'
                )
                head = f'<th scope="row" style="{heads}{weight}">{_text(name, 40)}</th>'
                rows.append(f'<tr style="{base}">{head}{cells}{about if self._notes else ""}</tr>')
            style = f"{base};border-collapse:collapse;margin:6px 0"
            parts.append(f'<table class="pagedlab-index" style="{style}">{"".join(rows)}</table>')
        title = f'<div style="font:600 14px system-ui,sans-serif">{_text(self.title, 120)}</div>' if self.title else ""
        return f'<div style="{base};overflow-x:auto;padding:8px">{title}{"".join(parts)}{self._left_out}</div>'

    # ------------------------------------------------------------------ as SVG

    @cached_property
    def svg(self) -> str:
        texts = {name: [safe(str(v), width=CELL_WIDTH) for v in vs] for name, vs in self.lists.items()}
        cell = 10 + 8 * max((len(t) for values in texts.values() for t in values), default=1)
        left = 20 + 8 * max(len(name) for name in self.lists)
        right = 10 + 7 * max((len(note) for note in self._notes.values()), default=0)
        shapes, y = [], 12.0
        if self.title:
            shapes.append(_line(8, y + 10, safe(self.title), weight=600, family="sans-serif"))
            y += 26
        for piece in self.pieces():
            for name, values in texts.items():
                weight = 700 if name in self._strong else 400
                shapes.append(_line(8, y + 16, safe(name), weight=weight))
                for column, i in enumerate(piece):
                    x = left + column * cell
                    shapes.append(
                        f'<rect x="{x:g}" y="{y:g}" width="{cell:g}" height="22" fill="{self._colour(i)}" '
                        f'stroke="{COLOURS["alert" if i in self._marks.get(name, ()) else "line"]}"/>'
                    )
                    shapes.append(_line(x + cell / 2, y + 16, values[i], weight=weight, anchor="middle"))
                if name in self._notes:
                    note = safe(self._notes[name])
                    shapes.append(_line(left + len(piece) * cell + 10, y + 16, note, fill="dim", family="sans-serif"))
                y += 22
            y += 14
        if self._left_out:
            shapes.append(_line(8, y + 8, self._left_out, fill="dim"))
            y += 18
        width = max(left + min(COLUMNS, len(self._owners)) * cell + right, 16 + 8 * len(self.title))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {y:g}" width="{width:g}" height="{y:g}" '
            f'role="img"><title>{escape(safe(self.title))}</title><rect width="100%" height="100%" '
            f'fill="{COLOURS["paper"]}"/>{"".join(shapes)}</svg>\n'
        )


class SlotMappingTable(IndexTable):
    """``trace.slot_mapping(step)``: the chain from each token of a step to its slot."""

    def __init__(self, trace: Trace, step: int, group: int = 0) -> None:
        """
        Raises:
            UserError: recorded below `tensors`, no such step or group, or nothing ran in the step.
        """
        trace.need("tensors", "slot_mapping")
        if step not in trace.steps or step < 0:
            raise UserError(trace.no_step(step))
        events = trace.steps[step].events
        mapped = {e.group: e for e in events if type(e) is SlotsMapped}
        inputs = next((e for e in events if type(e) is InputsPrepared), None)
        if not mapped or inputs is None:
            raise UserError(f"step {step} computed no tokens, so it has no slot mapping.")
        if group not in mapped:
            raise UserError(f"there is no KV-cache group {group}: this trace has groups 0 to {max(mapped)}.")
        e, texts, order = mapped[group], token_texts(trace), request_order(trace)
        ordered = next((o for o in events if type(o) is BatchOrdered), None)
        rows = {"state row": [ordered.idx_mapping[row] for row in e.row]} if ordered and ordered.idx_mapping else {}
        of_group = f", group {group}" if len(mapped) > 1 else ""
        super().__init__(
            {
                "text": [safe(texts.get(t, f"#{t}"), token=True) for t in inputs.input_ids[: len(e.token)]],
                "request": e.request_id,
                "token": e.token,
                "batch row": e.row,
                **rows,
                "position": e.position,
                "logical block": e.logical_block,
                "offset": e.offset,
                "table index": e.table_index,
                "block": e.block_id,
                "slot": e.slot,
            },
            [order.get(request_id, -1) for request_id in e.request_id],
            title=f"slot mapping of step {step}{of_group}",
            notes={
                "token": "its place in the flat batch",
                **({"state row": "idx_mapping[batch row]"} if rows else {}),
                "position": "its place in its own request",
                "logical block": f"position // {e.block_size}",
                "offset": f"position % {e.block_size}",
                "table index": f"batch row · {e.table_stride} + logical block",
                "block": "read from the table there",
                "slot": f"block · {e.block_size} + offset",
            },
            strong=["slot"],
        )


def _text(value: Any, width: int = CELL_WIDTH) -> str:
    """A stranger's text as HTML: visible, one line, never markup."""
    return escape(safe(str(value), width=width))


def _line(
    x: float, y: float, words: str, *, weight: int = 400, anchor: str = "start", fill: str = "ink",
    family: str = "ui-monospace,monospace",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:g}" y="{y:g}" font-family="{family}" font-size="13" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{COLOURS[fill]}" xml:space="preserve">{escape(words)}</text>'
    )
