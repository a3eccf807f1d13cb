"""The tracer's output as an SVG, drawn from a trace like everything else.

``python -m pagedlab.viz.svg TRACE FILE`` writes one; the README's picture was made with it.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from pagedlab.trace.events import LEVELS, Event, Level
from pagedlab.trace.trace import Trace
from pagedlab.viz.terminal import TerminalTracer
from pagedlab.viz.theme import DARK, LIGHT

# Fonts every system has; no address to load one from, so the file stands alone.
FONTS = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: FONTS; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: ui-sans-serif, system-ui, sans-serif; font-size: 16px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
""".replace("FONTS", FONTS)


def recording_console(width: int) -> Console:
    """A console in full colour that keeps what it is given and writes nothing."""
    return Console(
        file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="truecolor",
        legacy_windows=False, markup=False, emoji=False, highlight=False, no_color=False, _environ={},
    )


def export_svg(
    events: Iterable[Event],
    *,
    width: int = 100,
    detail: Level = "blocks",
    title: str = "pagedlab trace",
    light: bool = False,
    until_step: int | None = None,
) -> str:
    """Replay a trace into a picture.

    Args:
        title: in the frame's bar.
        light: on white instead of on dark.
        until_step: the last step shown, without the summary at the end; None shows all.
    """
    console = recording_console(width)
    tracer = TerminalTracer(console, detail)
    if until_step is None:
        tracer.show(events)
    else:
        for event in events:
            if event.step > until_step:
                break
            tracer.append(event)
        tracer.close(summary=False)
    return console.export_svg(
        title=title, theme=LIGHT if light else DARK, code_format=FRAME, font_aspect_ratio=0.61, unique_id="pagedlab",
    )


def main() -> None:
    """The command behind the README's picture."""
    parser = argparse.ArgumentParser(prog="python -m pagedlab.viz.svg", description=main.__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--detail", choices=LEVELS, default="blocks")
    parser.add_argument("--title", default="pagedlab trace")
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--until-step", type=int)
    args = parser.parse_args()
    svg = export_svg(Trace.load(args.trace), width=args.width, detail=args.detail, title=args.title, light=args.light,
                     until_step=args.until_step)
    args.file.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
