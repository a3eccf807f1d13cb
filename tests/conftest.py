"""Browser tests run where a Chromium is found; elsewhere the last line says what was not run.

With PAGEDLAB_REQUIRE_CHROMIUM=1, as in CI, a missing Chromium is a failure.

What the tests expect is a CPU's, so a GPU is hidden from them; CUDA_VISIBLE_DEVICES=0 shows it to those that need one.
"""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def find_chromium():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser(request):
    """A headless Chromium that asks nobody outside for anything."""
    path = find_chromium()
    if path is None:
        if os.environ.get("PAGEDLAB_REQUIRE_CHROMIUM"):
            pytest.fail("no Chromium found, and PAGEDLAB_REQUIRE_CHROMIUM is set")
        pytest.skip("no Chromium found")
    from playwright.sync_api import sync_playwright

    quiet = ["disable-gpu", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync",
             "disable-quic"]  # fmt: skip
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", *(f"--{flag}" for flag in quiet)]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def notebook_builder():
    """The module ``notebooks/build.py``."""
    path = Path(__file__).parent.parent / "notebooks" / "build.py"
    spec = importlib.util.spec_from_file_location("build_notebooks", path)
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build


@pytest.fixture(scope="session")
def notebook_nodes(notebook_builder):
    """Every notebook by its stem, executed once for all tests that look at them."""
    return notebook_builder.execute_all()


@pytest.fixture(scope="session")
def executed_notebooks(notebook_builder, notebook_nodes, tmp_path_factory):
    """A folder with every notebook as Markdown."""
    folder = tmp_path_factory.mktemp("notebooks")
    notebook_builder.write(notebook_nodes, folder, "markdown")
    return folder


def pytest_terminal_summary(terminalreporter):
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "Chromium" in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"not run: {len(skipped)} browser tests, because no Chromium was found")
