"""The pictures of a trace: what they show equals the trace, whatever renderer there is, whatever a stranger wrote."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pagedlab.display import graphviz
from pagedlab.display.chooser import MOST_CHOICES, Chooser
from pagedlab.display.picture import COLOURS, HUES, tint
from pagedlab.display.tables import MOST_TOKENS, IndexTable
from pagedlab.errors import UserError
from pagedlab.figures.record import FOLDER, stored
from pagedlab.scenarios.library import load_scenario
from pagedlab.scenarios.run import run
from pagedlab.trace.events import SlotsMapped, TokensSampled
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import tracing
from pagedlab.viewer.page import asset

HOSTILE = '</svg><script>alert(1)</script>\x1b[31m"\u202ex$\\frac{1}{2}$'


def hostile_trace() -> Trace:
    """A run without a model whose request ids and token texts are hostile."""
    scenario = load_scenario("preemption").with_made_up_tokens(lambda text: list(range(len(text.split()))))
    names = {"r0": HOSTILE, "r1": "<img src=x onerror=alert(2)>"}
    requests = {names[r]: spec for r, spec in scenario.requests.items()}
    with tracing("blocks") as trace:
        run(dataclasses.replace(scenario, requests=requests, script=[{"before_step": 0, "add": list(requests)}]))
    for event in trace:
        if hasattr(event, "prompt_token_texts"):
            event.prompt_token_texts = [HOSTILE] * len(event.prompt_token_ids)
    return trace


def texts_of(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")]


def test_colours_are_the_viewers() -> None:
    light = asset("viewer.css").split(".viewer {")[1].split("}")[0]
    in_css = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+)", light))
    assert in_css == COLOURS
    in_js = re.search(r"const HUES = \[(.*?)\]", asset("paint.js"))
    assert in_js and re.findall(r'"(#\w+)"', in_js.group(1)) == list(HUES)


def test_tint_mixes_into_white() -> None:
    assert tint("#000000", 0.2) == "#cccccc" and tint("#0072b2", 1) == "#0072b2"


# ---------------------------------------------------------------- block table


def test_block_table_says_what_the_state_holds() -> None:
    trace = stored("preemption")
    diagram = trace.block_table("r1", step=9)
    state = trace.at(step=9, after="step_scheduled")
    table = state.requests["r1"].block_ids[0]
    for logical, block in enumerate(table):
        assert f"table0:l{logical}:e -> pool:b{block}:w" in diagram.dot
        assert f"<B>{logical} → {block}</B>" in diagram.dot
    assert diagram.dot.count(" -> pool:") == len(table)
    shown = texts_of(diagram.svg)
    assert shown.count("·") == len(table) * state.block_sizes[0] - len(state.requests["r1"].token_ids)


def test_block_table_of_the_last_scheduled_step_by_default() -> None:
    trace = stored("preemption")
    assert trace.block_table("r0").step == 7 and trace.block_table("r1").step == 11


def test_block_table_refuses_with_a_sentence() -> None:
    trace = stored("preemption")
    with pytest.raises(UserError, match="r1 holds no blocks in step 3: it is preempted then"):
        trace.block_table("r1", step=3)
    with pytest.raises(UserError, match="no request 'r9'"):
        trace.block_table("r9")
    with pytest.raises(UserError, match="no step 99"):
        trace.block_table("r0", step=99)


def test_tables_of_all_groups_are_drawn() -> None:
    scenario = load_scenario("hybrid")
    with tracing("blocks") as trace:
        run(scenario)
    dot = trace.block_table(next(iter(scenario.requests))).dot
    assert "group 0" in dot and "group 1" in dot and "table1:l" in dot


def test_renderers_are_tried_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dot = stored("two-five-three").block_table("r1").dot
    assert graphviz.renderer()[0] == sys.executable  # type: ignore[index]  # pygraphviz, from the notebooks extra
    monkeypatch.setattr(graphviz, "find_spec", lambda name: None)
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\ncat > /dev/null\necho \'<?xml version="1.0"?><svg id="by-a-program"/>\'\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert graphviz.to_svg(dot) == '<svg id="by-a-program"/>\n'
    program.write_text("#!/bin/sh\ncat > /dev/null\necho no memory >&2\nexit 3\n")
    with pytest.raises(UserError, match=r"did not draw the diagram \(no memory\)"):
        graphviz.to_svg(dot)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(graphviz.sysconfig, "get_path", lambda name: str(tmp_path))
    assert graphviz.renderer() is None
    (tmp_path / "graphviz-pure").touch()
    assert graphviz.renderer() == [str(tmp_path / "graphviz-pure"), "-Tsvg"]


def test_without_a_renderer_the_dot_text_and_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(graphviz, "renderer", lambda: None)
    diagram = stored("two-five-three").block_table("r1")
    html = diagram._repr_html_()
    assert "pip install pygraphviz" in html and "digraph block_table" in html and "<TABLE" not in html
    with pytest.raises(UserError, match="no graphviz was found: to see the diagram drawn"):
        diagram.save(tmp_path / "x.svg")
    assert not list(tmp_path.iterdir())
    assert diagram.save(tmp_path / "x.dot").read_text() == diagram.dot


def test_what_a_renderer_prints_stays_out_of_the_notebook(capfd: pytest.CaptureFixture[str]) -> None:
    stored("two-five-three").block_table("r1")._repr_html_()
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- tables


def test_slot_mapping_shows_the_events_lists() -> None:
    trace = stored("two-five-three")
    table = trace.slot_mapping(0)
    event = next(e for e in trace.steps[0] if type(e) is SlotsMapped)
    assert table.lists["slot"] == event.slot and table.lists["table index"] == event.table_index
    assert table.lists["block"] == event.block_id and table.lists["batch row"] == event.row
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", table._repr_html_().split(">slot<")[1])
    assert cells[: len(event.slot)] == [str(s) for s in event.slot]
    in_svg = texts_of(table.svg)
    at = in_svg.index("slot")
    assert in_svg[at + 1 : at + 1 + len(event.slot)] == [str(s) for s in event.slot]


def test_slot_mapping_of_the_state_table_runner_has_state_rows() -> None:
    table = stored("state-rows").slot_mapping(0)
    assert table.lists["batch row"] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert table.lists["state row"] == [3, 3, 1, 1, 1, 2, 2, 2, 2, 2]


def test_slot_mapping_refuses_with_a_sentence() -> None:
    trace = stored("two-five-three")
    with pytest.raises(UserError, match="no step 50"):
        trace.slot_mapping(50)
    with pytest.raises(UserError, match="no KV-cache group 3"):
        trace.slot_mapping(0, group=3)
    with pytest.raises(UserError, match="step 3 computed no tokens"):
        trace.slot_mapping(3)
    with pytest.raises(UserError, match="recorded at `blocks`; `slot_mapping` needs `tensors`"):
        hostile_trace().slot_mapping(0)


def test_long_tables_are_cut_and_say_so() -> None:
    table = IndexTable({"n": list(range(MOST_TOKENS + 7))})
    assert "… and 7 more" in table._repr_html_() and "… and 7 more" in table.svg
    assert table._repr_html_().count("<td") == MOST_TOKENS


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(UserError, match="lists side by side need one length"):
        IndexTable({"a": [1], "b": [1, 2]})
    with pytest.raises(UserError, match="no list"):
        IndexTable({})


def test_marked_cells_are_pointed_at_and_no_others() -> None:
    table = IndexTable({"a": [1, 2, 3], "b": [1, 2, 3]}, marks={"b": [1]})
    assert table._repr_html_().count("outline:2px") == 1
    assert table.svg.count(f'stroke="{COLOURS["alert"]}"') == 1


# ---------------------------------------------------------------- a table with controls


def test_a_chooser_needs_a_table_per_choice() -> None:
    table = IndexTable({"a": [1]})
    with pytest.raises(UserError, match=r"no table for \(2,\)"):
        Chooser({"n": [1, 2]}, {(1,): table})
    with pytest.raises(UserError, match=r"no table for \(3,\), the choice to start with"):
        Chooser({"n": [1]}, {(1,): table}, start=(3,))
    with pytest.raises(UserError, match="too many for one page"):
        Chooser({"n": range(MOST_CHOICES + 1)}, {(n,): table for n in range(MOST_CHOICES + 1)})


def test_a_chooser_shows_a_strangers_text_as_text(browser: Any, tmp_path: Path) -> None:
    tables = {(n,): IndexTable({HOSTILE: [HOSTILE, n]}, title=HOSTILE, notes={HOSTILE: HOSTILE}) for n in (1, 2)}
    chooser = Chooser({HOSTILE: [1, 2]}, tables)
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    path = tmp_path / "x.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{chooser._repr_html_()}", encoding="utf-8")
    page.goto(path.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("td").first.wait_for()
    assert frame.locator("td").nth(1).text_content() == "1"
    frame.locator("input").press("ArrowRight")
    assert frame.locator("td").nth(1).text_content() == "2"
    assert "</svg><script>" in frame.locator("th").text_content()
    page.close()
    assert not problems


# ---------------------------------------------------------------- charts


def test_pool_shows_every_block_and_the_front_of_the_free_queue() -> None:
    trace = stored("preemption")
    words = texts_of(trace.block_pool(2).svg)
    state = trace.at(step=2, after="step_scheduled")
    assert [w for w in words if w in ("∅", "1", "2", "3", "4")] == ["∅", "1", "2", "3", "4"]
    assert f"next to be handed out: {', '.join(map(str, state.free_queue))}" in " ".join(words)
    shared = texts_of(stored("prefix-hit").block_pool(4).svg)
    assert "r1" in shared


def test_timeline_has_a_lane_for_every_request() -> None:
    words = texts_of(stored("preemption").timeline().svg)
    assert {"r0", "r1", "preemption", "computed again", "token budget", "step"} <= set(words)


def test_charts_are_the_same_bytes_each_time_and_leave_matplotlib_as_it_was() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    trace = stored("mixed-batch")
    assert trace.timeline().svg == trace.timeline().svg
    assert trace.block_pool(1).svg == trace.block_pool(1).svg
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"needs matplotlib: pip install pagedlab\[notebooks\]"):
        stored("preemption").timeline()


# ---------------------------------------------------------------- all of them


def test_pictures_are_saved_whole_or_refused(tmp_path: Path) -> None:
    trace = stored("two-five-three")
    for i, picture in enumerate((trace.block_table("r0"), trace.slot_mapping(0), trace.block_pool(), trace.timeline())):
        path = picture.save(tmp_path / f"{i}.svg")
        ElementTree.fromstring(path.read_text())
        assert repr(picture).startswith("<") and picture.title in repr(picture)
    with pytest.raises(UserError, match=r"does not end in \.svg"):
        trace.timeline().save(tmp_path / "x.png")
    with pytest.raises(UserError, match="cannot write"):
        trace.slot_mapping(0).save(tmp_path / "no" / "x.svg")


def test_a_strangers_text_is_shown_and_never_markup() -> None:
    trace = hostile_trace()
    pictures = [trace.block_table(HOSTILE), trace.block_pool(0), trace.timeline()]
    table = IndexTable({HOSTILE: [HOSTILE, "<b>"]}, title=HOSTILE, notes={HOSTILE: HOSTILE})
    for text in (*(p.svg for p in pictures), pictures[0]._repr_html_(), table._repr_html_(), table.svg):
        assert "<script" not in text and "<img" not in text and "\x1b" not in text and "\u202e" not in text
    for svg in (*(p.svg for p in pictures), table.svg):
        ElementTree.fromstring(svg)
        assert any("␛" in words or "script" in words for words in texts_of(svg)), "shown, not dropped"


def test_pictures_need_no_torch() -> None:
    code = (
        "import sys; from pagedlab import Trace; t = Trace.load(sys.argv[1]); "
        "t.block_table('r0').svg; t.timeline().svg; "
        "t.slot_mapping(0).svg; t.block_pool().svg; assert 'torch' not in sys.modules; "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    path = str(FOLDER / "two-five-three.jsonl.zst")
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=120)


def test_texts_come_from_prompts_and_samples() -> None:
    trace = stored("two-five-three")
    sampled = next(e for e in trace if type(e) is TokensSampled and e.request_id == "r0")
    assert sampled.text is not None
    assert trace.slot_mapping(1).lists["text"][0] == sampled.text.replace(" ", "·")
