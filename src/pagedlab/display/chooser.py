"""A table with controls that need no kernel: every choice is computed beforehand and travels along."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import product

from pagedlab.display.picture import COLOURS
from pagedlab.display.tables import IndexTable
from pagedlab.errors import UserError

MOST_CHOICES = 400
ROW_HEIGHT = 24  # pixels


class Chooser:
    """One slider per control; what is shown is the table that belongs to the values chosen.

    ``Chooser({"block_size": [1, 2]}, {(1,): table_a, (2,): table_b})``. The page keeps no other state
    and runs in a sandboxed frame, so it works in a live notebook, in an export and on a site.
    """

    def __init__(
        self,
        choices: Mapping[str, Sequence[int]],
        tables: Mapping[tuple[int, ...], IndexTable],
        start: tuple[int, ...] | None = None,
    ) -> None:
        """
        Args:
            choices: control -> its values in order.
            tables: one table per combination of values, in the order of ``choices``.
            start: the combination shown first; the first one by default.

        Raises:
            UserError: a combination has no table, or there are too many for one page.
        """
        combinations = list(product(*choices.values()))
        missing = [c for c in combinations if c not in tables]
        if not combinations or missing:
            raise UserError(f"no table for {missing[0] if missing else 'any choice'}: give one per combination.")
        if len(combinations) > MOST_CHOICES:
            raise UserError(f"{len(combinations)} combinations are too many for one page: at most {MOST_CHOICES}.")
        self.choices, self.tables = dict(choices), {c: tables[c] for c in combinations}
        self.start = combinations[0] if start is None else start
        if self.start not in self.tables:
            raise UserError(f"no table for {self.start}, the choice to start with.")

    @property
    def html(self) -> str:
        """The whole page."""
        data = {
            "choices": self.choices,
            "start": list(self.start),
            "tables": {",".join(map(str, c)): table.as_shown() for c, table in self.tables.items()},
        }
        return _PAGE.replace("DATA", json.dumps(data, ensure_ascii=True).replace("<", "\\u003c"))

    def _repr_html_(self) -> str:
        rows = max(len(table.lists) * len(table.pieces()) for table in self.tables.values())
        height = 64 + ROW_HEIGHT * (rows + len(self.choices))
        page = escape(self.html, quote=True).replace("\n", "&#10;")
        return (
            f'<iframe sandbox="allow-scripts" title="a table with controls" style="width:100%;height:{height}px;'
            f'border:0" srcdoc="{page}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<Chooser: {', '.join(self.choices)}, {len(self.tables)} tables>"


# Text reaches the page only through textContent, so nothing in the data can become markup.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<style>
body { margin: 0; padding: 8px; background: PAPER; color: INK; font: 14px/1.4 system-ui, sans-serif; }
label { display: flex; gap: 10px; align-items: center; margin: 2px 0; }
label span { min-width: 130px; font: 13px ui-monospace, monospace; }
output { min-width: 3em; font: 700 14px ui-monospace, monospace; }
input { width: min(320px, 50vw); accent-color: ACCENT; }
.scroll { overflow-x: auto; }
h2 { font-size: 14px; margin: 8px 0 4px; }
table { border-collapse: collapse; margin: 4px 0; }
th, td { padding: 2px 7px; font: 13px ui-monospace, monospace; white-space: pre; text-align: center; }
td { border: 1px solid LINE; }
th { text-align: left; padding-left: 0; }
td.note { border: 0; color: DIM; font: 13px system-ui, sans-serif; text-align: left; }
td.mark { outline: 2px solid ALERT; outline-offset: -2px; font-weight: 700; }
tr.strong th, tr.strong td:not(.note) { font-weight: 700; }
</style>
</head>
<body>
<form></form>
<h2 aria-live="polite"></h2>
<div class="scroll"></div>
<script type="application/json" id="data">DATA</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const chosen = data.start.slice();
const make = (tag, text, className) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
};
function show() {
  const table = data.tables[chosen.join(",")];
  document.querySelector("h2").textContent = table.title;
  const place = document.querySelector(".scroll");
  place.replaceChildren(...table.pieces.map(([first, end]) => {
    const node = make("table");
    for (const row of table.rows) {
      const line = make("tr", undefined, row.strong ? "strong" : "");
      const head = make("th", row.name);
      head.scope = "row";
      line.append(head);
      for (let i = first; i < end; i += 1) {
        const cell = make("td", row.values[i], row.marks.includes(i) ? "mark" : "");
        cell.style.background = table.colours[i];
        line.append(cell);
      }
      line.append(make("td", row.note, "note"));
      node.append(line);
    }
    return node;
  }));
}
Object.entries(data.choices).forEach(([name, values], at) => {
  const label = make("label");
  const output = make("output", String(chosen[at]));
  const slider = make("input");
  slider.type = "range";
  slider.min = 0;
  slider.max = values.length - 1;
  slider.value = values.indexOf(chosen[at]);
  slider.setAttribute("aria-label", name);
  slider.addEventListener("input", () => {
    chosen[at] = values[Number(slider.value)];
    output.textContent = String(chosen[at]);
    slider.setAttribute("aria-valuetext", output.textContent);
    show();
  });
  label.append(make("span", name), slider, output);
  document.querySelector("form").append(label);
});
show();
</script>
</body>
</html>
"""
for _name in ("paper", "ink", "accent", "line", "dim", "alert"):
    _PAGE = _PAGE.replace(_name.upper(), COLOURS[_name])
