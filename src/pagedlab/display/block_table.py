"""A request's block table: logical blocks with their tokens, and arrows to the physical blocks."""

from __future__ import annotations

import os
from functools import cached_property
from html import escape
from pathlib import Path

from pagedlab.display.graphviz import HOW_TO_GET_ONE, to_svg
from pagedlab.display.picture import COLOURS, Picture, hue, tint, write_text
from pagedlab.display.requests import request_order, state_in, token_texts
from pagedlab.errors import UserError
from pagedlab.trace.events import RequestState, StepScheduled
from pagedlab.trace.state import EngineState
from pagedlab.trace.trace import Trace
from pagedlab.viz.text import safe
from pagedlab.wording import plural

MOST_LOGICAL_BLOCKS = 16   # drawn; the last ones, where the new tokens go
MOST_PHYSICAL_BLOCKS = 32  # drawn; beyond that only those of the table
CELL_WIDTH = 12            # characters of a token's text


class BlockTableDiagram(Picture):
    """``trace.block_table(request)``: drawn by graphviz; without it, the DOT text and a sentence."""

    def __init__(self, trace: Trace, request: str, step: int | None = None) -> None:
        """The table as the step's message leaves the scheduler; by default in the last step that schedules it.

        Raises:
            UserError: recorded below `blocks`, no such request or step, or it holds no block then.
        """
        trace.need("blocks", "block_table")
        if request not in trace.requests:
            raise UserError(trace.no_request(request))
        if step is None:
            step = _last_step(trace, request)
        state = state_in(trace, step)
        if request not in state.requests or not any(state.requests[request].block_ids):
            status = state.requests[request].status if request in state.requests else "not in the engine"
            raise UserError(f"{request} holds no blocks in step {step}: it is {status} then.")
        self.step, self.request_id = step, request
        scheduled = trace.steps[step].scheduled
        granted = scheduled.num_scheduled_tokens.get(request, 0) if scheduled else 0
        self._texts = token_texts(trace)
        self._order = request_order(trace)
        self._colour = hue(self._order.get(request, -1))
        self.title = f"block table of {safe(request)} in step {step}"
        self.dot = self._dot(state, state.requests[request], granted)

    @cached_property
    def svg(self) -> str:
        """Raises UserError where no graphviz is found."""
        drawn = to_svg(self.dot)
        if drawn is None:
            raise UserError(f"no graphviz was found: {HOW_TO_GET_ONE}")
        return drawn

    def _repr_html_(self) -> str:
        try:
            return f'<div style="overflow-x:auto">{self.svg}</div>'
        except UserError as error:
            return f"<p>{escape(str(error))}</p><pre>{escape(self.dot)}</pre>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``.svg``, or ``.dot`` for the text that graphviz draws; see :meth:`Picture.save`."""
        return write_text(Path(path), self.dot) if Path(path).suffix == ".dot" else super().save(path)

    # ------------------------------------------------------------------ DOT

    def _dot(self, state: EngineState, request: RequestState, granted: int) -> str:
        groups = [self._logical(state, request, granted, group) for group in range(state.num_groups)]
        edges = []
        for group, table in enumerate(request.block_ids):
            first = max(0, len(table) - MOST_LOGICAL_BLOCKS)
            edges += [
                f'table{group}:l{logical}:e -> pool:b{block}:w [color="{self._colour}"];'
                for logical, block in enumerate(table)
                if block and logical >= first
            ]
        return "\n".join([
            "digraph block_table {",
            f'  graph [rankdir=LR, ranksep=1.1, nodesep=0.25, bgcolor="{COLOURS["paper"]}"];',
            '  node [shape=plain, fontname="Helvetica,Arial,sans-serif", fontsize=11];',
            "  edge [penwidth=1.4, arrowsize=0.7];",
            *groups,
            self._pool(state, request),
            *(f"  {edge}" for edge in edges),
            "}",
            "",
        ])  # fmt: skip

    def _logical(self, state: EngineState, request: RequestState, granted: int, group: int) -> str:
        """One node: a row per logical block, a cell per token."""
        size, table = state.block_sizes[group], request.block_ids[group]
        computed = request.num_computed_tokens  # after the message has left, this step's tokens count
        width = min(size, 16)
        of_group = f", group {group}, blocks of {size}" if state.num_groups > 1 else ""
        head = f"{request.request_id}: {plural(len(request.token_ids), 'token')}{of_group}"
        rows = [f'<TR><TD COLSPAN="{width + 1}" BORDER="0"><B>{_words(head)}</B></TD></TR>']
        first = max(0, len(table) - MOST_LOGICAL_BLOCKS)
        if first:
            hidden = plural(first, "block")
            rows.append(f'<TR><TD COLSPAN="{width + 1}" BORDER="0">… {hidden} before</TD></TR>')
        for logical in range(first, len(table)):
            cells = []
            for offset in range(size):
                position = logical * size + offset
                status = (
                    "empty" if position >= len(request.token_ids)
                    else "known" if position >= computed
                    else "now" if position >= computed - granted
                    else "done"
                )  # fmt: skip
                cells.append(self._cell(request, position, status))
            for at in range(0, size, width):
                port = f'PORT="l{logical}" ' if at + width >= size else ""
                block = table[logical]
                name = f"<B>{logical} → {block or '∅'}</B>" if at == 0 else ""
                target = f'<TD {port}BGCOLOR="{tint(self._colour, 0.25)}">{name}</TD>'
                rows.append(f"<TR>{''.join(cells[at : at + width])}{target}</TR>")
        return f'  table{group} [label=<<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="2" CELLPADDING="3" ' \
               f'COLOR="{COLOURS["line"]}">{"".join(rows)}</TABLE>>];'  # fmt: skip

    def _cell(self, request: RequestState, position: int, status: str) -> str:
        if status == "empty":
            return f'<TD BGCOLOR="{COLOURS["paper"]}"><FONT COLOR="{COLOURS["dim"]}">·</FONT></TD>'
        token = request.token_ids[position]
        text = _words(self._texts.get(token, f"#{token}"), token=True)
        colour = {"done": COLOURS["wash"], "now": tint(COLOURS["accent"], 0.22), "known": COLOURS["paper"]}[status]
        style = ' STYLE="DASHED"' if status == "known" else ""
        return f'<TD BGCOLOR="{colour}"{style}>{text}</TD>'

    def _pool(self, state: EngineState, request: RequestState) -> str:
        """One node: the physical blocks, in order."""
        mine = {block for table in request.block_ids for block in table if block}
        blocks = list(range(state.num_blocks)) if state.num_blocks <= MOST_PHYSICAL_BLOCKS else sorted({0} | mine)
        owners = state.owners()
        rows = ['<TR><TD BORDER="0"><B>pool</B></TD></TR>']
        before = -1
        for block in blocks:
            if block != before + 1:
                rows.append('<TR><TD BORDER="0">…</TD></TR>')
            before = block
            status = state.state_of_block(block)
            refs = state.ref_counts.get(block, 0)
            if block in mine:
                colour, ink, words = self._colour, "#ffffff", f"×{refs}" if refs > 1 else ""
            elif block in owners:
                other = owners[block][0][0]
                words = f"{other} ×{refs}" if refs > 1 else other
                colour, ink = tint(hue(self._order.get(other, -1)), 0.25), COLOURS["ink"]
            else:
                words = "free, cached" if status == "cached" else status.replace("_", " ")
                colour = COLOURS["cached"] if status == "cached" else COLOURS["paper"]
                ink = COLOURS["ink"] if status == "cached" else COLOURS["dim"]
            label = f"block {block}{f': {_words(words)}' if words else ''}"
            rows.append(f'<TR><TD PORT="b{block}" BGCOLOR="{colour}"><FONT COLOR="{ink}">{label}</FONT></TD></TR>')
        if state.num_blocks - 1 > before:
            rows.append(f'<TR><TD BORDER="0">… to {state.num_blocks - 1}</TD></TR>')
        return f'  pool [label=<<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="1" CELLPADDING="3" ' \
               f'COLOR="{COLOURS["line"]}">{"".join(rows)}</TABLE>>];'  # fmt: skip


def _words(text: str, token: bool = False) -> str:
    """A stranger's text inside a label: visible, short, and never markup."""
    return escape(safe(text, width=CELL_WIDTH if token else 60, token=token)) or "·"


def _last_step(trace: Trace, request: str) -> int:
    """The last step that schedules the request."""
    for event in reversed(trace.requests[request].events):
        if type(event) is StepScheduled and request in event.num_scheduled_tokens:
            return event.step
    raise UserError(f"{request} was never scheduled in this trace, so it has no block table.")
