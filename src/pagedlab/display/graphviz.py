"""From DOT text to SVG by whatever renderer this machine has: pygraphviz, ``dot``, graphviz-pure."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

from pagedlab.errors import UserError

HOW_TO_GET_ONE = "to see the diagram drawn, run: pip install pygraphviz (its wheel brings graphviz along)."
TIMEOUT_S = 60


def to_svg(dot: str) -> str | None:
    """The drawing, without the XML prologue; None where there is no renderer.

    Raises:
        UserError: the renderer ran and failed; its first words are quoted.
    """
    svg = _with_pygraphviz(dot)
    if svg is None:
        program = _program()
        svg = None if program is None else _with_program(program, dot)
    return None if svg is None else svg[svg.index("<svg") :]


def _with_pygraphviz(dot: str) -> str | None:
    try:
        import pygraphviz  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    drawn = pygraphviz.AGraph(dot).draw(format="svg", prog="dot")
    return drawn.decode("utf-8") if isinstance(drawn, bytes) else str(drawn)


def _program() -> str | None:
    """``dot`` on the PATH, else the one that graphviz-pure installs beside this Python."""
    pure = Path(sysconfig.get_path("scripts")) / "graphviz-pure"
    return shutil.which("dot") or (str(pure) if pure.is_file() else None)


def _with_program(program: str, dot: str) -> str:
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=dot.encode(), capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{program} did not draw the diagram ({error}): {HOW_TO_GET_ONE}") from None
    if done.returncode or b"<svg" not in done.stdout:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{program} did not draw the diagram ({words[0] if words else 'no svg'}): {HOW_TO_GET_ONE}")
    return done.stdout.decode("utf-8")
