"""The figures: drawn the same every time, held to by a check, and from runs that can be had again."""

import itertools
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagedlab.cli import app
from pagedlab.errors import UserError
from pagedlab.figures import files
from pagedlab.figures.draw import FIGURES
from pagedlab.figures.files import differing_figures, said, write_figures
from pagedlab.figures.record import RECORDED, record, stored
from pagedlab.figures.svg import HEIGHT, WIDTH
from pagedlab.figures.symbols import code
from pagedlab.trace.check import check
from pagedlab.trace.diff import canonical

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("figures")
    write_figures(target)
    return target


def test_the_command_writes_every_figure_light_and_dark(tmp_path):
    result = CliRunner().invoke(app, ["figures", str(tmp_path / "new" / "figures")])
    assert result.exit_code == 0, result.output
    written = sorted(path.name for path in (tmp_path / "new" / "figures").iterdir())
    assert written == sorted(f"{name}.{theme}.svg" for name in FIGURES for theme in ("light", "dark"))
    assert len(written) == 14


def test_two_drawings_are_the_same_bytes(folder, tmp_path):
    write_figures(tmp_path)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_the_stored_figures_say_what_the_command_draws():
    result = CliRunner().invoke(app, ["figures", str(ROOT / "figures"), "--check"])
    assert (result.exit_code, result.output) == (0, "ok\n")


@pytest.mark.parametrize("name", list(FIGURES))
def test_a_changed_number_fails_the_check(name, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    victim = tmp_path / f"{name}.light.svg"
    text = victim.read_text()
    number = re.search(r">(\d+)</text>|(\d+) tokens?<|(\d+) of \d+<", text)
    at = next(i for i in range(1, 4) if number[i])
    changed = str(int(number[at]) + 1)
    victim.write_text(text[: number.start(at)] + changed + text[number.end(at) :])
    result = CliRunner().invoke(app, ["figures", str(tmp_path), "--check"])
    assert result.exit_code == 1
    assert victim.name in result.output and result.output.count("\n") == 1


def test_a_moved_box_a_turned_arrow_and_a_missing_file_fail_the_check(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    box, arrow, gone = (tmp_path / f"{name}.dark.svg" for name in list(FIGURES)[:3])
    box.write_text(re.sub(r'<rect x="40" y="\d+"', '<rect x="41" y="1"', box.read_text(), count=1))
    arrow.write_text(re.sub(r'<path d="M \d+', '<path d="M 9', arrow.read_text(), count=1))
    # the head of an arrow is a path in <defs>; turn one that is drawn
    arrow.write_text(re.sub(r'(<path d=")[^"]*(" fill="none")', r"\1M 0 0 L 1 1\2", arrow.read_text(), count=1))
    gone.unlink()
    assert differing_figures(tmp_path) == [box.name, arrow.name, gone.name]


def test_colours_and_fonts_are_not_what_a_figure_says(folder):
    light = (folder / "5-worker-inputs.light.svg").read_text()
    assert said(light.replace("#0072b2", "#123456").replace("system-ui", "Arial")) == said(light)


BOXES = """(tag) => [...document.querySelectorAll("svg > " + tag)].map((t) => {
  const b = t.getBBox(); return { words: t.textContent, x: b.x, y: b.y, width: b.width, height: b.height }; })"""


@pytest.mark.parametrize("name", list(FIGURES))
def test_words_stay_inside_their_box_and_off_each_other(browser, name, folder):
    tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    tab.set_content((folder / f"{name}.light.svg").read_text())
    texts = [box for box in tab.evaluate(BOXES, "text") if box["words"].strip()]
    rects = tab.evaluate(BOXES, "rect")
    tab.close()
    assert len(texts) > 20 and len(rects) > 5
    for text in texts:
        y = text["y"] + text["height"] / 2
        around = [r for r in rects if r["y"] <= y <= r["y"] + r["height"] and any(
            r["x"] <= x <= r["x"] + r["width"] for x in (text["x"] + 2, text["x"] + text["width"] / 2))]  # fmt: skip
        box = min(around, key=lambda r: r["width"] * r["height"])
        assert box["x"] <= text["x"] and text["x"] + text["width"] <= box["x"] + box["width"], text["words"]
        assert box["y"] - 1 <= text["y"] and text["y"] + text["height"] <= box["y"] + box["height"] + 1, text["words"]
    for a, b in itertools.combinations(texts, 2):
        across = min(a["x"] + a["width"], b["x"] + b["width"]) - max(a["x"], b["x"])
        down = min(a["y"] + a["height"], b["y"] + b["height"]) - max(a["y"], b["y"])
        assert across < 2 or down < 3, (a["words"], b["words"])


def test_a_figure_cannot_name_code_that_is_gone():
    with pytest.raises(UserError, match=r"has no Scheduler\.no_such_thing"):
        code("sched.scheduler:Scheduler.no_such_thing")


@pytest.mark.parametrize("name", list(RECORDED))
def test_a_stored_trace_is_what_the_engine_does(name):
    """Compared in canonical form; what follows from the last bits of the weights' products is left out there."""
    now = record(*RECORDED[name])
    assert [canonical(e) for e in now] == [canonical(e) for e in stored(name)]
    assert check(now) is None


def test_another_run_is_not_the_stored_one():
    assert [canonical(e) for e in record("prefix-hit", "state-table")] != [canonical(e) for e in stored("prefix-hit")]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["figures", str(tmp_path / "file")])
    assert result.exit_code != 0
    with pytest.raises(UserError, match="cannot write figures"):
        files.write_figures(tmp_path / "file")
