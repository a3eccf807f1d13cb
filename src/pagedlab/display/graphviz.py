"""From DOT text to SVG by whatever renderer this machine has: pygraphviz, ``dot``, graphviz-pure.

Each runs as a process of its own: what it prints stays out of a notebook, and what it does to a
strange input stays out of the engine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from pagedlab.errors import UserError

HOW_TO_GET_ONE = "to see the diagram drawn, run: pip install pygraphviz (its wheel brings graphviz along)."
TIMEOUT_S = 60
_DRAW_WITH_PYGRAPHVIZ = (
    "import sys, pygraphviz as p; "
    "sys.stdout.buffer.write(p.AGraph(sys.stdin.buffer.read().decode()).draw(format='svg', prog='dot'))"
)


def to_svg(dot: str) -> str | None:
    """The drawing, without the XML prologue; None where there is no renderer.

    Raises:
        UserError: the renderer failed; its first words are quoted.
    """
    command = renderer()
    if command is None:
        return None
    try:
        done = subprocess.run(command, input=dot.encode(), capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"graphviz did not draw the diagram ({error}): {HOW_TO_GET_ONE}") from None
    svg = done.stdout.decode("utf-8", errors="replace")
    if done.returncode or "<svg" not in svg:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it gave no SVG"]
        raise UserError(f"graphviz did not draw the diagram ({words[-1]}): {HOW_TO_GET_ONE}")
    return svg[svg.index("<svg") :]


def renderer() -> list[str] | None:
    """The command that reads DOT and writes SVG."""
    if find_spec("pygraphviz") is not None:
        return [sys.executable, "-c", _DRAW_WITH_PYGRAPHVIZ]
    pure = Path(sysconfig.get_path("scripts")) / "graphviz-pure"
    program = shutil.which("dot") or (str(pure) if pure.is_file() else None)
    return None if program is None else [program, "-Tsvg"]
