"""The viewer in a notebook: live where widgets run, the same page in a frame where they do not."""

from __future__ import annotations

import html as html_escape
import json
from typing import Any

from pagedlab.trace.trace import Trace
from pagedlab.viewer.pack import pack
from pagedlab.viewer.page import asset, html, module

FRAME_HEIGHT = 900  # pixels


def viewer(trace: Trace, steps: tuple[int, int] | None = None) -> Any:
    """An anywidget over a packed trace; without anywidget, an object that displays the page in a frame.

    Exported notebooks and sites show the frame, so nothing is lost where no kernel runs.
    """
    packed = pack(trace, steps)
    frame = _frame(html(packed, "pagedlab"))
    try:
        import anywidget  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import traitlets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return Frame(frame)

    class Viewer(anywidget.AnyWidget):  # type: ignore[misc,unused-ignore]
        """Holds the packed trace; the page keeps the place it stands at to itself."""

        _esm = module()
        meta = traitlets.Unicode("").tag(sync=True)
        chunks = traitlets.Dict().tag(sync=True)
        css = traitlets.Unicode("").tag(sync=True)

        def _repr_mimebundle_(self, **kwargs: Any) -> Any:
            bundle, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
            return {**bundle, "text/html": frame}, metadata

    return Viewer(meta=json.dumps(packed.meta), chunks=packed.chunks, css=asset("viewer.css"))


class Frame:
    """The page in a sandboxed frame: its script runs, and reaches nothing around it."""

    def __init__(self, frame: str) -> None:
        self._frame = frame

    def _repr_html_(self) -> str:
        return self._frame


def _frame(page: str) -> str:
    """The page as one line of markup, which no Markdown takes apart."""
    srcdoc = html_escape.escape(page, quote=True).replace("\n", "&#10;")
    return (
        f'<iframe sandbox="allow-scripts" class="pagedlab-viewer" title="pagedlab viewer" '
        f'style="width:100%;height:{FRAME_HEIGHT}px;border:0" srcdoc="{srcdoc}"></iframe>'
    )
