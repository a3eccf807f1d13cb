"""What the README and the page of experiments print can be run as it stands, in order, in an empty folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LEFT_OUT = ("--model Qwen/", " bench", " conformance ")  # a download, measurements, and tests of their own


def blocks(page):
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def run(arguments, folder):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "COLUMNS": "120", "PYTHONPATH": ""},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def play(page, folder):
    """Write files, run commands and programs in the order of the page; gives what each command printed."""
    printed = {}
    for language, title, text in blocks(page):
        if title:
            (folder / title).write_text(text, encoding="utf-8")
        elif language == "python":
            status, printed[text], err = run(["-c", text], folder)
            assert status == 0, err
        elif language == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line, comments=True)
                if not program.endswith(("pagedlab", "python")) or any(part in line for part in LEFT_OUT):
                    continue
                module = ["-m", "pagedlab"] if program.endswith("pagedlab") else []
                status, printed[line], err = run([*module, *arguments], folder)
                assert status == ("# status 1" in line), (line, printed[line], err)
    return printed


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiments")
    return folder, play("walkthrough/your-own.md", folder)


def test_every_example_of_the_page_of_experiments_runs_as_printed(experiments):
    folder, printed = experiments
    assert len(printed) >= 15
    assert "4 tokens from the prefix cache" in printed["pagedlab why late.jsonl.zst r1"]
    assert "1 passed" in printed["python -m pytest -q test_shortest.py"]
    assert "sliding window of 8 tokens" in next(out for line, out in printed.items() if "--model hybrid" in line)
    assert (folder / "handout.html").is_file() and any((folder / "slides").glob("*.svg"))
    assert (folder / "work.html").is_file() and (folder / "long.jsonl").is_file()


def test_the_policy_of_the_page_does_what_the_page_says(experiments):
    _, printed = experiments
    (plain,) = (out for line, out in printed.items() if line.startswith("pagedlab simulate work") and "pol" not in line)
    (sorted_,) = (out for line, out in printed.items() if line.startswith("pagedlab simulate work") and "pol" in line)
    mean = re.compile(r"to first token +mean ([\d.]+),")
    assert float(mean.search(sorted_)[1]) < float(mean.search(plain)[1])
    assert re.search(r"In all: [1-9]\d+ steps in the queue", printed["pagedlab why shortest.jsonl.zst long"])


def test_the_examples_of_the_readme_run_as_printed(tmp_path):
    printed = play("README.md", tmp_path)
    assert "truth" not in printed and len(printed) >= 7
    assert (tmp_path / "two.html").is_file()


def test_an_example_that_fails_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("```sh\npagedlab why nothing.jsonl r0\n```\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    with pytest.raises(AssertionError, match="there is no trace nothing"):
        play("page.md", tmp_path)
