"""Runs the notebooks and writes what they show: ``python notebooks/build.py [FOLDER] [--format markdown|ipynb|html]``.

The notebooks are stored as text (jupytext's percent format); everything written here is made, not edited.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 300  # for one cell, on a busy machine
AT_A_TIME = 2


def sources() -> list[Path]:
    """The notebooks, in reading order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook, run from top to bottom in its own folder; a cell that fails raises CellExecutionError.

    Widget state is not stored: a page without a kernel then falls back to each widget's own HTML.
    """
    notebook = jupytext.read(source)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", store_widget_state=False, coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=ERROR"], resources={"metadata": {"path": str(HERE)}},
    ).execute()  # fmt: skip
    return notebook


def execute_all(names: list[str] | None = None) -> dict[str, nbformat.NotebookNode]:
    """File name without ``.py`` -> the executed notebook; two run at a time."""
    chosen = [source for source in sources() if names is None or source.stem in names]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return dict(zip([source.stem for source in chosen], pool.map(execute, chosen), strict=True))


def build(folder: str | os.PathLike[str], names: list[str] | None = None) -> list[Path]:
    """Run the notebooks and write each as Markdown with its outputs inside, fit for any Markdown site.

    Args:
        folder: made if it is not there.
        names: stems such as ``"03_two_five_three"``; None is all.
    """
    return write(execute_all(names), Path(folder), "markdown")


def write(notebooks: dict[str, nbformat.NotebookNode], folder: Path, kind: str) -> list[Path]:
    """Executed notebooks as ``markdown``, as ``ipynb``, or as nbconvert's ``html``."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for stem, notebook in notebooks.items():
        path = folder / f"{stem}.{'md' if kind == 'markdown' else kind}"
        if kind == "ipynb":
            text = nbformat.writes(notebook)
        else:
            text = to_markdown(notebook) if kind == "markdown" else HTMLExporter().from_notebook_node(notebook)[0]
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def to_markdown(notebook: nbformat.NotebookNode) -> str:
    """Prose as it stands, code fenced, outputs as HTML that no Markdown reader takes apart.

    A cell tagged ``answer`` is folded away with what it shows, so that the reader can predict first.
    """
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        if cell.cell_type != "code":
            continue
        part = f"```python\n{cell.source}\n```"
        if shown := "".join(filter(None, map(_output, cell.outputs))):
            part += f'\n\n<div class="notebook-output">{shown}</div>'
        if "answer" in cell.metadata.get("tags", ()):
            part = f'<details class="answer" markdown="1"><summary>Show the answer</summary>\n\n{part}\n\n</details>'
        parts.append(part)
    return "\n\n".join(parts) + "\n"


def _output(output: Any) -> str:
    """One output as HTML on as few lines as its kind allows."""
    if output.output_type == "stream":
        return _preformatted(output.text)
    if output.output_type not in ("display_data", "execute_result"):
        return ""
    data = output.data
    if "text/html" in data:
        return f"<div>{_joined(data['text/html'])}</div>"
    if "image/svg+xml" in data:
        image = base64.b64encode(_joined(data["image/svg+xml"]).encode()).decode()
        return f'<img alt="{escape(_joined(data["text/plain"]))}" src="data:image/svg+xml;base64,{image}">'
    return _preformatted(_joined(data.get("text/plain", "")))


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "".join(text)


def _preformatted(text: str) -> str:
    """Blank lines would end an HTML block in Markdown, so line ends are written as references."""
    style = "overflow-x:auto;font-size:13px;line-height:1.45"
    return f'<pre class="output" style="{style}">{escape(text.rstrip()).replace(chr(10), "&#10;")}</pre>'


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=str(HERE / "_built"), help="default: notebooks/_built")
    parser.add_argument("--format", choices=("markdown", "ipynb", "html"), default="markdown", dest="kind")
    parser.add_argument("--only", action="append", metavar="NAME", help="a notebook's file name without .py")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.only or ()) - {source.stem for source in sources()}
    if unknown:
        print(f"pagedlab: there is no notebook {min(unknown)!r} in {HERE}.", file=sys.stderr)
        return 2
    print("\n".join(map(str, write(execute_all(chosen.only), Path(chosen.folder), chosen.kind))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
