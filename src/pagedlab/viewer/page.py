"""One self-contained HTML file: no server, no network, opens offline."""

from __future__ import annotations

import json
import os
import re
from importlib.resources import files
from pathlib import Path

from pagedlab.errors import UserError
from pagedlab.trace.file import whole_file
from pagedlab.trace.trace import Trace
from pagedlab.viewer.pack import Packed, pack
from pagedlab.wording import plural

MODULES = (
    "model.js", "dom.js", "paint.js", "controls.js", "timeline.js", "queues.js", "pool.js", "tables.js", "lens.js",
    "kernels.js", "events.js", "viewer.js",
)  # fmt: skip
MAX_BYTES = 25 << 20  # of a page; beyond that a browser is no pleasure


def asset(name: str) -> str:
    """A file that ships with the viewer."""
    return (files("pagedlab.viewer") / name).read_text(encoding="utf-8")


def module() -> str:
    """The viewer as one ES module: its files in the order of their imports, joined; no two declare the same name."""
    text = "\n".join(map(asset, MODULES))
    return re.sub(r"^(import [^;]*;\n|export (?!default))", "", text, flags=re.MULTILINE)


def html(packed: Packed, title: str) -> str:
    """A page around a packed trace. What a stranger wrote is data in it, never markup or script."""
    chunks = "\n".join(
        f'<script type="text/plain" data-chunk="{name}">{data}</script>' for name, data in packed.chunks.items()
    )
    return _PAGE.format(
        title=_escape(title),
        meta=json.dumps(packed.meta).replace("<", "\\u003c"),
        css=json.dumps(asset("viewer.css")).replace("<", "\\u003c"),
        chunks=chunks,
        module=module().replace("</script", "<\\/script"),
    )


def write_page(trace: Trace, path: Path, steps: tuple[int, int] | None = None) -> int:
    """Write the page of a trace; returns its bytes.

    Raises:
        UserError: recorded too coarsely, no such steps, or larger than 25 MiB; nothing is written.
    """
    packed = pack(trace, steps)
    name = os.fsencode(path.stem).decode("utf-8", "replace")  # a file's name may be no text
    text = html(packed, f"pagedlab: {name}")
    size = len(text.encode())
    if size > MAX_BYTES:
        last = packed.meta["columns"]["step"][-1]
        raise UserError(
            f"the page would take {size / 2**20:.0f} MiB and {MAX_BYTES >> 20} is the most a browser should load: "
            f"view a part of the {plural(last + 1, 'step')}, for example with "
            f"--steps 0:{max(1, last * MAX_BYTES // (2 * size))}."
        )
    try:
        with whole_file(path) as place:
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another place.") from None
    return size


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>html {{ color-scheme: light dark; scroll-padding-top: 3em; }} body {{ margin: 0; }} #viewer {{ min-height: 100vh; }}</style>
</head>
<body>
<div id="viewer"></div>
<script type="application/json" id="meta">{meta}</script>
<script type="application/json" id="css">{css}</script>
{chunks}
<script type="module">
{module}
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const readChunk = (name) => document.querySelector(`script[data-chunk="${{name}}"]`).textContent;
window.viewer = mount(document.getElementById("viewer"), {{ meta: read("meta"), readChunk, css: read("css") }});
if (parent === window) viewer.main.focus({{ preventScroll: true }}); // so that keys work at once
addEventListener("message", (event) => {{ // in a frame, light or dark as the page around it says
  const theme = event.data?.pagedlabTheme;
  if (event.source === parent && ["light", "dark"].includes(theme)) viewer.setTheme(theme);
}});
</script>
</body>
</html>
"""  # noqa: E501
