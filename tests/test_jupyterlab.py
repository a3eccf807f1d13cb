"""The viewer and the pictures in a live JupyterLab, held against the trace."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest

from pagedlab.figures.record import FOLDER, stored

CELLS = [
    f"from pagedlab import Trace\ntrace = Trace.load({str(FOLDER / 'preemption.jsonl.zst')!r})\ntrace.view()",
    "trace.slot_mapping(0)",
    "trace.timeline()",
    "trace.block_table('r0')",
]


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab of its own, with one notebook; the address."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    (tmp_path / "root").mkdir()
    nbformat.write(notebook, tmp_path / "root" / "t.ipynb")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTERLAB_SETTINGS_DIR",
              "JUPYTERLAB_WORKSPACES_DIR")  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
         "--IdentityProvider.token=", f"--ServerApp.root_dir={tmp_path / 'root'}"],
        env={**os.environ, **{name: str(tmp_path / name) for name in places}},
        stdout=subprocess.DEVNULL, stderr=(tmp_path / "log").open("w"), cwd=tmp_path,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=5)
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=30)


def tables_shown(page):
    """Request -> its blocks, as the viewer's block tables show them."""
    return page.evaluate(
        """() => {
          const host = [...document.querySelectorAll("*")].find((e) => e.shadowRoot?.querySelector(".viewer"));
          const requests = [...host.shadowRoot.querySelectorAll(".tables .request")];
          return Object.fromEntries(requests.map((r) => [
            r.dataset.request, [...r.querySelectorAll(".block")].map((b) => Number(b.dataset.block))]));
        }"""
    )


def test_the_viewer_is_live_in_jupyterlab_and_keeps_its_keys(browser, lab):
    trace = stored("preemption")
    errors = []
    page = browser.new_page(viewport={"width": 1400, "height": 1300}, color_scheme="dark")
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{lab}/lab/tree/t.ipynb", wait_until="domcontentloaded")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
    page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()
    where = page.locator(".position")
    where.wait_for()
    page.locator(".pagedlab-index").wait_for()
    assert page.locator("iframe[title='pagedlab viewer']").count() == 0, "the live widget, not its fallback"

    for step in (0, 1, 2, 8):
        for _ in range(20):
            if f"step {step} ·" in where.text_content():
                break
            page.locator("button[aria-label^='step on']").click()
            page.wait_for_timeout(300)
        state = trace.at(step=step)
        assert tables_shown(page) == {
            request_id: request.block_ids[0] for request_id, request in state.requests.items() if any(request.block_ids)
        }

    cells = page.locator(".jp-Notebook .jp-Cell").count()
    text = where.text_content()
    page.locator("canvas.timeline").focus()
    for key in ("a", "b", "x", "d", "d", "m"):
        page.keyboard.press(key)
    page.get_by_label("filter events").click()
    page.keyboard.type("dd xab")
    page.keyboard.press("Shift+Enter")
    page.wait_for_timeout(500)
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells == len(CELLS)
    assert page.get_by_label("filter events").input_value() == "dd xab"
    assert where.text_content() == text
    page.locator("canvas.timeline").focus()
    page.keyboard.press("Home")
    page.wait_for_timeout(500)
    assert re.match("before the first step", where.text_content())
    colour = "(node) => getComputedStyle(node).backgroundColor"
    assert page.locator(".viewer").evaluate(colour) == "rgb(255, 255, 255)", "JupyterLab's theme, not the system's"
    page.locator(".lm-MenuBar-itemLabel", has_text="Settings").click()
    page.locator(".lm-Menu-itemLabel", has_text="Theme").first.hover()
    page.locator(".lm-Menu-itemLabel", has_text="JupyterLab Dark").first.click()
    page.locator("body[data-jp-theme-light=false]").wait_for(state="attached")
    assert page.locator(".viewer").evaluate(colour) == "rgb(20, 23, 28)"
    page.close()
    assert not errors
