"""The timeline and the pool, drawn by matplotlib on a canvas of their own: no pyplot, no global state kept."""

from __future__ import annotations

import io
import re
import warnings
from functools import cached_property
from typing import Any

from pagedlab.display.picture import COLOURS, Picture, hue
from pagedlab.display.requests import request_order, state_in
from pagedlab.errors import UserError
from pagedlab.trace.state import EngineState
from pagedlab.trace.trace import Trace
from pagedlab.viewer.pack import pack
from pagedlab.viz.text import safe
from pagedlab.wording import plural

LANE_COLOURS = ("recomputed", "prefill", "decode", "queued", "preempted", "passed-over")  # by kind of segment
LANE_NAMES = ("recomputed", "prefill", "decode", "queued", "preempted", "passed over")
MOST_LANES = 40
MOST_BLOCKS = 4096


class Chart(Picture):
    """A matplotlib figure that exists only while it is drawn."""

    def __init__(self, title: str, width: float, height: float) -> None:
        """Raises UserError where matplotlib is missing."""
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise UserError("this picture needs matplotlib: pip install pagedlab[notebooks].") from None
        self.title, self._size = title, (width, height)

    def _repr_svg_(self) -> str:
        return self.svg

    def draw(self, figure: Any) -> None:
        """Fill a ``matplotlib.figure.Figure``."""
        raise NotImplementedError

    @cached_property
    def svg(self) -> str:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        # The same trace gives the same bytes; letters stay text, so that the reader's fonts draw every script.
        with rc_context({"svg.hashsalt": "pagedlab", "svg.fonttype": "none"}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            figure = Figure(figsize=self._size, facecolor=COLOURS["paper"], layout="constrained")
            FigureCanvasSVG(figure)
            self.draw(figure)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Title": safe(self.title)})
        text = file.getvalue()
        return _at_home_on_a_page(text[text.index("<svg") :])


class Timeline(Chart):
    """``trace.timeline()``: tokens per step against the budget, blocks in use, and a lane per request."""

    def __init__(self, trace: Trace) -> None:
        """
        Raises:
            UserError: recorded below `blocks`, or no step in the trace.
        """
        trace.need("blocks", "timeline")
        self._meta = pack(trace).meta
        columns = self._meta["columns"]
        if not any(step >= 0 for step in columns["step"]):
            raise UserError("this trace has no steps, so it has no timeline.")
        self._lanes = min(len(self._meta["requests"]), MOST_LANES)
        super().__init__(f"timeline of {plural(columns['step'][-1] + 1, 'step')}", 8.6, 3.2 + 0.24 * self._lanes)

    def draw(self, figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, max(0.5, 0.24 * self._lanes)])
        self._draw_tokens(top)
        self._draw_lanes(bottom)

    def _draw_tokens(self, axes: Any) -> None:
        columns = self._meta["columns"]
        keep = [i for i, step in enumerate(columns["step"]) if step >= 0]
        steps = [columns["step"][i] for i in keep]
        below = [0] * len(keep)
        for name, words, hatch in (
            ("decode", "decode tokens", ""),
            ("recomputed", "computed again", "\\\\"),
            ("prefill", "prompt tokens", "//"),
        ):
            heights = [columns[name][i] for i in keep]
            if not any(heights):
                continue
            axes.bar(steps, heights, 0.86, below, color=COLOURS[name], label=words, hatch=hatch,
                     edgecolor=COLOURS["paper"], linewidth=0)  # fmt: skip
            below = [a + b for a, b in zip(below, heights, strict=True)]
        most, budget = max([*below, 1]), max(columns["budget"])
        if 0 < budget <= 4 * most:
            axes.axhline(budget, color=COLOURS["dim"], linestyle=(0, (4, 3)), linewidth=1.2, label="token budget")
        preempted = [columns["step"][i] for i in keep if columns["preempted"][i]]
        if preempted:
            axes.plot(preempted, [max(most, budget if budget <= 4 * most else 0) * 1.06] * len(preempted), "v",
                      color=COLOURS["alert"], label="preemption")  # fmt: skip
        axes.set_ylabel("tokens")
        blocks = axes.twinx()
        usable = max(1, self._meta["num_blocks"] - 1)
        blocks.step(steps, [columns["used"][i] for i in keep], where="mid", color=COLOURS["ink"], linewidth=1.5,
                    label="blocks in use")  # fmt: skip
        blocks.set_ylim(0, usable * 1.1)
        blocks.set_ylabel(f"blocks of {usable}")
        for each in (axes, blocks):
            each.yaxis.get_major_locator().set_params(integer=True)
            each.spines[["top"]].set_visible(False)
        (bars, bar_names), (lines, line_names) = axes.get_legend_handles_labels(), blocks.get_legend_handles_labels()
        names = bar_names + line_names
        axes.figure.legend(bars + lines, names, loc="outside upper center", ncols=6, fontsize=8, frameon=False)

    def _draw_lanes(self, axes: Any) -> None:
        for request, kind, first, last, _ in self._meta["segments"]:
            if request < self._lanes:
                height = 0.72 if kind <= 2 else 0.24
                axes.barh(request, last - first + 0.9, height, first - 0.45, color=COLOURS[LANE_COLOURS[kind]],
                          hatch="//" if kind <= 1 else "", edgecolor=COLOURS["paper"], linewidth=0)  # fmt: skip
        names = [safe(r["id"], width=20) for r in self._meta["requests"][: self._lanes]]
        axes.set_yticks(range(self._lanes), names)
        for label, _ in zip(axes.get_yticklabels(), names, strict=True):
            label.set_parse_math(False)
        axes.set_ylim(self._lanes - 0.5, -0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
        more = len(self._meta["requests"]) - self._lanes
        axes.set_xlabel("step" if more <= 0 else f"step ({more} more requests are not drawn)")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)


class PoolMap(Chart):
    """``trace.block_pool(step)``: every block in physical order, by state and owner."""

    def __init__(self, trace: Trace, step: int | None = None) -> None:
        """The pool as the step's message leaves the scheduler; without a step, as the trace ends.

        Raises:
            UserError: recorded below `blocks`, no such step, or a pool too large to draw.
        """
        trace.need("blocks", "block_pool")
        self._state: EngineState = trace.at() if step is None else state_in(trace, step)
        if self._state.num_blocks > MOST_BLOCKS:
            raise UserError(
                f"a pool of {self._state.num_blocks:,} blocks is too large for one picture (at most {MOST_BLOCKS:,}): "
                "use trace.view()."
            )
        self._order = request_order(trace)
        self._columns = 16 if self._state.num_blocks <= 256 else 64
        rows = -(-self._state.num_blocks // self._columns)
        when = "at the end" if step is None else f"in step {step}"
        size = 0.52 if self._columns == 16 else 0.135
        super().__init__(f"block pool {when}", 8.6, 0.72 + size * rows)

    def draw(self, figure: Any) -> None:
        from matplotlib.patches import Patch, Rectangle

        axes = figure.subplots()
        state, columns = self._state, self._columns
        owners = state.owners()
        for block in range(state.num_blocks):
            is_now = state.state_of_block(block)
            owner = self._order.get(owners[block][0][0], -1) if block in owners else -1
            fill, hatch, edge, width, ink = _look(is_now, hue(owner))
            x, y = block % columns, block // columns
            axes.add_patch(
                Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, facecolor=fill, hatch=hatch, edgecolor=edge, linewidth=width)
            )
            if columns == 16:
                refs = state.ref_counts.get(block, 0)
                label = "∅" if block == 0 else f"{block}×{refs}" if refs > 1 else str(block)
                axes.text(x + 0.5, y + 0.5, label, ha="center", va="center", color=ink, fontsize=9)
        axes.set(xlim=(0, columns), ylim=(-(-state.num_blocks // columns), 0), aspect="equal")
        axes.set_axis_off()
        front = ", ".join(map(str, list(state.free_queue)[:8])) or "none"
        axes.set_title(f"{self.title}: {state.num_free_blocks} free, next to be handed out: {front}", fontsize=10,
                       loc="left", color=COLOURS["ink"])  # fmt: skip
        held = dict.fromkeys(r for block in sorted(owners) for r, _, _ in owners[block])
        keys = [Patch(facecolor=hue(self._order.get(r, -1)), label=safe(r, width=20)) for r in list(held)[:8]]
        for name in ("shared", "cached", "free", "null"):
            fill, hatch, edge, width, _ = _look(name, "#ffffff")
            words = {"shared": "shared (×owners)", "cached": "free, but still cached"}.get(name, name)
            keys.append(Patch(facecolor=fill, hatch=hatch, edgecolor=edge, linewidth=width, label=words))
        legend = figure.legend(handles=keys, loc="outside lower left", ncols=6, fontsize=8, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _look(status: str, owner: str) -> tuple[str, str, str, float, str]:
    """Fill, hatch, edge, its width and ink of a block: told apart by pattern as well as by colour."""
    return {
        "null": (COLOURS["dim"], "", COLOURS["dim"], 1.0, "#ffffff"),
        "free": (COLOURS["empty"], "", COLOURS["line"], 1.0, COLOURS["ink"]),
        "cached": (COLOURS["cached"], "////", COLOURS["paper"], 0.0, COLOURS["ink"]),
        "in_use": (owner, "", owner, 1.0, "#ffffff"),
        "shared": (owner, "", COLOURS["ink"], 2.5, "#ffffff"),
    }[status]


def _at_home_on_a_page(svg: str) -> str:
    """No wider than what is around it; and matplotlib's ``* {…}`` rule, which would reach everything else
    on the page, is inherited instead."""
    rules = re.search(r'<style type="text/css">\*\{(.*?)\}</style>', svg, re.DOTALL)
    style = "max-width:100%;height:auto"
    if rules is not None:
        svg, style = svg.replace(rules.group(0), ""), f"{style};{rules.group(1)}"
    return svg.replace("<svg", f'<svg style="{style}"', 1)
