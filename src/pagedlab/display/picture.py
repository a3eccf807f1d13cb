"""What every picture can do: show itself in a notebook, and be saved as SVG."""

from __future__ import annotations

import os
from pathlib import Path

from pagedlab.errors import UserError
from pagedlab.trace.file import whole_file

# The viewer's light theme and its owner colours (viewer/viewer.css, HUES in viewer/paint.js); a test holds them equal.
# A picture brings its own paper, so it reads the same on a dark page.
COLOURS = {
    "paper": "#fff", "ink": "#1b1f24", "dim": "#626975", "line": "#c9ced6", "wash": "#f4f5f7", "empty": "#fbfbfc",
    "cached": "#b9c2cf", "accent": "#c2410c", "alert": "#be123c",
    "prefill": "#0072b2", "recomputed": "#b45309", "decode": "#2f9e72",
    "queued": "#c9ced6", "preempted": "#be123c", "passed-over": "#8b93a1",
}  # fmt: skip
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7a00", "#6a51a3")


def hue(request_index: int) -> str:
    """The colour of the request that came ``request_index``-th; -1 is nobody the trace knows."""
    return "#777" if request_index < 0 else HUES[request_index % len(HUES)]


def tint(colour: str, share: float) -> str:
    """``colour`` mixed into white: ``tint("#000000", 0.2)`` is ``#cccccc``."""
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - c) * share):02x}" for c in channels)


class Picture:
    """Something drawn from a trace, as SVG; ``title`` says in one line what it shows."""

    title: str

    @property
    def svg(self) -> str:
        """The whole picture as one SVG document."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.title}>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture, all of it or nothing, and return its path.

        Raises:
            UserError: the name does not end in .svg, or it cannot be written.
        """
        target = Path(path)
        if target.suffix.lower() != ".svg":
            raise UserError(f"{target.name} does not end in .svg: pictures are saved as SVG, for example x.svg.")
        return write_text(target, self.svg)


def write_text(target: Path, text: str) -> Path:
    """All of it or nothing."""
    try:
        with whole_file(target) as place:
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror}): choose another place.") from None
    return target
