"""The terminal tracer: what it shows is what the events say, in any width, colour and encoding."""

import io
import os
import re
import subprocess
import sys
import threading
import unicodedata
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from pagedlab.engine.core import EngineCore
from pagedlab.errors import UserError
from pagedlab.scenarios.library import builtin_names, load_scenario
from pagedlab.scenarios.run import run
from pagedlab.trace.events import (
    CONSIDERED_REASONS,
    LEVELS,
    NOT_REACHED_REASONS,
    PREFIX_STOPS,
    BlockFreed,
    EngineSnapshot,
    KernelLaunched,
    KvAllocated,
    KvConfig,
    KvGroup,
    KvMemory,
    KvRead,
    KvSpec,
    KvTensor,
    KvWritten,
    QueueNotReached,
    RequestConsidered,
    RequestFinished,
    RequestPreempted,
    SlotsMapped,
    StepScheduled,
    StepStarted,
    TokensSampled,
    TraceGap,
    TraceHeader,
)
from pagedlab.trace.tracer import trace
from pagedlab.viz.keys import Pause, Quit
from pagedlab.viz.layout import Pen
from pagedlab.viz.scenario_list import print_scenarios
from pagedlab.viz.svg import export_svg, recording_console
from pagedlab.viz.terminal import BRIEF, TerminalTracer
from pagedlab.viz.theme import ASCII_GLYPHS, STYLES, Glyphs, Theme, make_console
from standin import StandInExecutor, make_request, make_scheduler

WIDTHS = (20, 40, 60, 80, 120, 150, 200)
PLAIN = [name for name in builtin_names() if not load_scenario(name).needs_model]  # run without torch


class Encoded(io.StringIO):
    """A text file that claims an encoding."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding


def show(events, width=80, detail="blocks", console=None, is_damaged=False) -> str:
    console = console or Console(file=io.StringIO(), width=width, color_system=None, markup=False, emoji=False)
    TerminalTracer(console, detail).show(events)
    text = console.file.getvalue()
    assert is_damaged or "cannot be shown" not in text
    return text


def record(name: str, record="kernels"):
    events: list = []
    trace.start(events, record=record)
    try:
        run(load_scenario(name))
    finally:
        trace.stop()
    return events


@pytest.fixture(scope="module")
def scenarios():
    return {name: record(name) for name in PLAIN}


@pytest.fixture(scope="module")
def real():
    """Three prompts on the embedded model, one of them sharing a block with the first; level kernels."""
    from pagedlab import LLM, EngineConfig, SamplingParams

    events: list = []
    trace.start(events, record="kernels")
    try:
        llm = LLM(config=EngineConfig(num_blocks=24, block_size=4, device="cpu"))
        prompts = ["She was very happy to see her sister", "It is a truth 真理 universally",
                   "She was very happy to see the"]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9))
    finally:
        trace.stop()
    return events


def assert_fits(text: str, width: int) -> None:
    for line in text.split("\n"):
        assert cell_len(line) <= width, f"{cell_len(line)} cells: {line}"
        for char in line:
            assert unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp"), ascii(line)
            assert char == "\u200e" or unicodedata.category(char) != "Cf", ascii(line)


# ------------------------------------------------------------------ widths, colours, encodings


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("detail", LEVELS)
def test_no_line_is_wider_than_the_console(real, width, detail):
    assert_fits(show(real, width, detail), width)


@pytest.mark.parametrize("name", PLAIN)
def test_every_scenario_fits_narrow_and_wide(scenarios, name):
    for width in (40, 80, 200):
        assert_fits(show(scenarios[name], width, "tensors" if width == 80 else "blocks"), width)


def test_without_colour_not_one_escape_code_is_written(real, monkeypatch):
    plain = show(real)
    assert "\x1b" not in plain
    console = Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True, markup=False, emoji=False)
    assert show(real, console=console) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console(io.StringIO(), width=80)
    assert show(real, console=console) == plain


def test_colour_adds_styles_and_changes_no_text(real):
    console = recording_console(80)
    TerminalTracer(console).show(real)
    coloured = console.file.getvalue()
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == show(real), "only colours and weights, no cursor movement"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_where_the_glyphs_cannot_be_encoded_letters_take_their_place(real, encoding):
    text = show(real, console=Console(file=Encoded(encoding), width=80, color_system=None, markup=False, emoji=False))
    text.encode("ascii")
    assert_fits(text, 80)
    assert "->" in text


def test_each_state_has_a_sign_of_its_own():
    for glyphs in (Glyphs(), ASCII_GLYPHS):
        digits = "23456789"
        blocks = [glyphs.null, glyphs.free, glyphs.cached, glyphs.in_use, glyphs.many, *digits]
        assert len(set(blocks)) == len(blocks)
        token = "It"
        cells = [token, glyphs.written + token, glyphs.known[0] + token + glyphs.known[1], glyphs.empty]
        assert len(set(cells)) == len(cells)
        assert all(cell_len(sign) == 1 for sign in [*blocks, glyphs.empty, glyphs.written])


def contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_colour_can_be_read_on_black_and_on_white():
    for spec in STYLES.values():
        for word in spec.split():
            if word.startswith("#"):
                assert contrast(word, "#ffffff") >= 3.5, spec
                assert contrast(word, "#101318") >= 3.5, spec


# ------------------------------------------------------------------ what is shown is what the events say


def test_every_mapped_slot_is_shown_with_its_whole_chain(real):
    text = show(real, 120, "tensors")
    shown = Counter(
        tuple(map(int, numbers))
        for numbers in re.findall(
            r"^ +(?:index)? +(\d+) → .* → +(\d+) → +(\d+) → +(\d+) \+ (\d+) → +(?:[^=→]* = )?(\d+) → +(\d+) → +(\d+)$",
            text.replace("index ", "      "), re.MULTILINE)
    )
    expected = Counter(
        row for e in real if isinstance(e, SlotsMapped)
        for row in zip(e.token, e.row, e.position, e.logical_block, e.offset, e.table_index, e.block_id, e.slot,
                       strict=True)
    )
    assert shown == expected and expected


def test_a_long_chain_says_how_many_tokens_it_leaves_out(real):
    text = show(real, 80, "blocks")
    first = next(e for e in real if isinstance(e, SlotsMapped))
    assert f"… {len(first.token) - BRIEF.chain} more" in text


def test_each_decision_shows_its_budget_and_grant(scenarios):
    text = re.sub(r"\s+", " ", show(scenarios["budget"], 200, "decisions"))
    for e in scenarios["budget"]:
        if isinstance(e, RequestConsidered) and e.num_tokens_wanted > 1:
            assert f"{e.num_tokens_granted} of {e.num_tokens_wanted} tokens granted" in text
            assert f"budget {e.budget_before} → {e.budget_after}" in text


def test_a_preemption_names_victim_beneficiary_rule_and_loss(scenarios):
    text = re.sub(r"\s+", " ", show(scenarios["priority"], 80, "decisions"))
    found = [e for e in scenarios["priority"] if isinstance(e, RequestPreempted)]
    assert found
    for e in found:
        assert f"{e.request_id} preempted on behalf of {e.on_behalf_of} (rule: {e.rule})" in text
        assert f"{e.num_tokens_lost} computed tokens must be computed again" in text


def test_the_strip_counts_blocks_as_the_events_do(scenarios):
    """The numbers under the strip add up to the usable blocks, in every step of every scenario."""
    for events in scenarios.values():
        usable = next(e for e in events if isinstance(e, EngineSnapshot)).num_blocks - 1
        text = re.sub(r"\s+", " ", show(events, 200, "tensors"))
        counted = re.findall(
            r"■ (\d+) in use (?:(\d+) shared \(digit = owners\) )?(?:(\d+) free = |· (\d+) free)", text)
        assert counted
        for used, shared, free_with_cached, free in counted:
            assert int(used) + int(shared or 0) + int(free_with_cached or free) == usable


def test_the_strip_shows_each_block_in_its_state(scenarios):
    events = scenarios["free-hits"]
    text = show(events, 200, "tensors")
    strips = re.findall(r"\d+ (∅[∅·□■2-9+ ]+)", text)
    assert any("■" in strip and "□" in strip for strip in strips)
    for strip in strips:
        assert strip.startswith("∅") and strip.count("∅") == 1


def test_every_refusal_and_stop_is_told_in_a_sentence(scenarios):
    for name, events in scenarios.items():
        text = re.sub(r"\s+", " ", show(events, 200, "decisions"))
        for e in events:
            if isinstance(e, QueueNotReached):
                assert NOT_REACHED_REASONS[e.reason] in text, name
            elif isinstance(e, RequestConsidered) and e.outcome != "scheduled":
                assert CONSIDERED_REASONS[e.reason] in text, name


def test_a_request_that_is_refused_is_never_said_to_run(scenarios):
    for name in ("head-of-line", "priority", "hopeless"):
        events = scenarios[name]
        steps = re.split(r"\n── step (\d+)", show(events, 200, "decisions"))[1:]
        considered = [e for e in events if isinstance(e, RequestConsidered)]
        refused = {(e.step, e.request_id) for e in considered if e.outcome == "refused"}
        for step, body in zip(steps[::2], steps[1::2], strict=True):
            for line in body.split("\n"):
                for request_id in re.findall(r"(r\d+)[^.]*? keeps? running", line.split("│")[0]):
                    assert (int(step), request_id) not in refused, (name, step)


def test_the_prefix_cache_says_why_it_stopped(scenarios):
    text = re.sub(r"\s+", " ", show(scenarios["whole-prompt-cached"], 80, "decisions"))
    assert PREFIX_STOPS["last_token_must_be_computed"] in text
    text = re.sub(r"\s+", " ", show(scenarios["reset"], 80, "decisions"))
    assert PREFIX_STOPS["reset"] in text


def test_a_sampled_token_is_known_but_has_no_key_and_value_until_the_next_step(real):
    text = show(real, 200, "tensors")
    sampled = next(e for e in real if isinstance(e, TokensSampled) and e.request_id == "r1")
    shown = sampled.text.replace(" ", "·")
    first, second = text.index(f"({shown})"), text.index(f"▸{shown}│")
    assert first < text.index("── step 1 ") < second


def test_blocks_left_out_of_a_table_are_counted_and_dated(scenarios):
    text = show(scenarios["window-cuts-hit"], 120)
    first, second = re.split(r"── step 1 ", text)[:2]
    assert "logical 1–4 → blocks 2–5, full: 16 tokens of this step" in first and "computed before" in first
    assert "logical 1–3 → blocks 2–4, full: 12 tokens computed before" in second
    assert "2 ∅ null (out of the window)" in second


def test_finished_requests_and_their_texts_are_summed_up_at_the_end(real):
    text = show(real, 120)
    end = text[text.index("── end"):]
    for e in real:
        if isinstance(e, RequestFinished):
            assert f"{e.num_prompt_tokens} prompt + {e.num_output_tokens} output tokens" in end
    assert "She was very happy to see her sister" in end


def test_the_memory_arithmetic_is_spelled_out_with_terms_that_multiply(real):
    opening = re.sub(r"\s+", " ", show(real, 80)[:3000])
    two, size, heads, dims, width, page = (
        int(x.replace(",", "")) for x in re.search(
            r"= (2) \(key, value\) · (\d+) tokens · (\d+) kv heads · (\d+) dims · (\d) bytes = ([\d,]+) B",
            opening).groups()
    )
    assert two * size * heads * dims * width == page
    page, layers, block = (int(x.replace(",", "")) for x in re.search(
        r"one block = ([\d,]+) B × (\d+) layers = ([\d,]+) B", opening).groups())
    assert page * layers == block
    assert "24 blocks" in opening and "23 hold tokens: 92 slots" in opening


def test_several_groups_and_a_budget_in_bytes_are_told():
    envelope = {"engine": 0, "step": -1}
    full = KvGroup(kind_of_attention="full", block_size=16, sliding_window=None, page_bytes=8192, layers=["a", "b"])
    window = KvGroup(kind_of_attention="sliding_window", block_size=16, sliding_window=64, page_bytes=8192,
                     layers=["c", "d"])
    events = [
        header(),
        KvSpec(layer="a", kind_of_attention="full", block_size=16, num_kv_heads=2, head_dim=32, dtype="float32",
               sliding_window=None, page_bytes=8192, seq=1, **envelope),
        KvMemory(available_bytes=1_000_000, how="stated", terms={}, seq=2, **envelope),
        KvConfig(num_blocks=61, groups=[full, window], tensors=[KvTensor(size=499_712, shared_by=["a", "c"])] * 2,
                 bytes_per_block=16_384, available_bytes=1_000_000, max_model_len=64, seq=3, **envelope),
        KvAllocated(shapes=[[2, 61, 16, 2, 32]], bytes=[999_424], shared_by=[["a", "c"]], dtype="float32", device="cpu",
                    seq=4, **envelope),
    ]
    text = re.sub(r"\s+", " ", show(events, 80))
    assert "1,000,000 B (as stated) ÷ one block = 61 blocks" in text and "60 hold tokens" in text
    assert "group 1: 2 layers, sliding window of 64 tokens" in text
    assert "nothing to do with grouped-query attention" in text


def test_the_first_line_says_so_when_kernels_are_recorded(real):
    assert show(real, 80).startswith("runs eagerly")
    assert "runs eagerly" not in show(record("twins" if "twins" in PLAIN else PLAIN[0], "tensors"), 80)


def test_what_the_writer_reports_is_shown_beside_the_mapped_slots(real):
    text = show(real, 120, "kernels")
    first = next(e for e in real if isinstance(e, KvWritten))
    assert f"plain torch reports {len(first.slot)} slots = the mapped ones" in text
    for checksum in first.checksum:
        assert f"{checksum:08x}" in text
    assert sum(isinstance(e, KernelLaunched | KvRead) for e in real) and "attention read for r0: blocks" in text


def test_a_writer_that_reports_other_slots_than_the_mapped_ones_is_exposed(real):
    events = list(real)
    at = next(i for i, e in enumerate(events) if isinstance(e, KvWritten))
    lie = {name: getattr(events[at], name) for name in events[at].__struct_fields__}
    events[at] = KvWritten(**{**lie, "slot": [slot + 1 for slot in lie["slot"]]})
    assert "NOT the mapped ones" not in show(real, 120, "kernels")
    assert "NOT the mapped ones" in show(events, 120, "kernels")


# ------------------------------------------------------------------ length


def test_five_words_and_32_tokens_fit_a_few_screens():
    from pagedlab import LLM, SamplingParams

    events: list = []
    trace.start(events)
    try:
        llm = LLM(num_blocks=64, device="cpu")
        llm.generate("It is a truth universally", SamplingParams(temperature=0, max_tokens=32))
    finally:
        trace.stop()
    assert show(events, 80).count("\n") < 220
    assert show(events, 80, "steps").count("\n") < 60
    steps = [int(n) for n in re.findall(r"(?:── |^)step (\d+)", show(events, 80), re.MULTILINE)]
    assert steps == list(range(sum(isinstance(e, StepStarted) for e in events))), "every step is shown once"


def test_thousands_of_blocks_are_drawn_in_few_cells_and_each_cell_says_for_how_many_it_stands():
    scheduler = make_scheduler(20_000, max_num_batched_tokens=64, max_model_len=4096)
    core = EngineCore(scheduler, StandInExecutor(), about={"model": {}, "config": {}, "tokenizer": {}})
    block_pool = scheduler.kv_cache_manager.block_pool
    held = block_pool.free_block_queue.popleft_n(9000)
    for block in held:
        block.ref_cnt = 1
    events: list = []
    trace.start(events, record="blocks")
    try:
        core.add_request(make_request(scheduler, "r0", list(range(40)), max_tokens=2))
        core.step()
    finally:
        trace.stop()
    text = show(events, 80)
    cells = re.search(r"1 cell = (\d+) blocks, drawn as its busiest", text)
    assert cells and int(cells.group(1)) > 1
    assert text.count("\n") < 60
    assert "are all free" in text or "19,999" in text


# ------------------------------------------------------------------ strangers' text


def hostile_trace(request_id: str, prompt: str, token: str, model: str):
    scheduler = make_scheduler(12)
    about = {"model": {"name": model, "architecture": model, "num_hidden_layers": 2}, "config": {"policy": model},
             "tokenizer": {"name": model}}
    core = EngineCore(scheduler, StandInExecutor(), about=about, token_text=lambda token_id: token)
    events: list = []
    trace.start(events, record="tensors")
    try:
        for name in (request_id, request_id + "2"):
            request = make_request(scheduler, name, [1, 2, 3, 4, 5], max_tokens=3)
            core.add_request(request)
        events[-1].prompt = prompt
        while core.has_unfinished_requests():
            core.step()
    finally:
        trace.stop()
    return events


NASTY = "ab \n\r\t\x1b\x07\x9b\u202e\u2066\u200d\u0301\ufe0f\u05d0\u0627中👍\U0001f3fd\U0001f1e9[]/:"
nasty = st.text(st.characters(codec=None), max_size=24) | st.text(st.sampled_from([*NASTY]), max_size=24)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nasty.filter(bool), nasty, nasty, nasty, st.sampled_from([60, 80, 160]), st.booleans())
def test_no_text_from_outside_breaks_the_layout(request_id, prompt, token, model, width, ascii):
    events = hostile_trace(request_id, prompt, token, model)
    file = Encoded("ascii" if ascii else "utf-8")
    console = Console(file=file, width=width, color_system=None, markup=False, emoji=False)
    TerminalTracer(console, "tensors").show(events)
    text = file.getvalue()
    assert_fits(text, width)
    if ascii:
        text.encode("ascii")


def test_markup_and_emoji_codes_in_a_prompt_are_printed_as_they_are():
    text = show(hostile_trace("r[red]", "[bold]x[/bold]", ":smile:", "[link=x]m"), 80)
    assert ":smile:" in text and "r[red]" in text and "[link=x]m" in text


# ------------------------------------------------------------------ traces of all kinds


def header(**fields):
    about = {"model": {}, "config": {}, "tokenizer": {}, "source": {}, "clock": {}, "pagedlab": "0"}
    return TraceHeader(**{**about, "record": "tensors", **fields}, seq=0, engine=0)


def test_a_trace_that_holds_only_a_header_opens():
    assert "no step in this trace" in show([header()])


def test_a_trace_cut_anywhere_opens(scenarios, real):
    for events in (scenarios["priority"], real):
        for end in range(1, len(events), max(1, len(events) // 16)):
            assert_fits(show(events[:end], 80), 80)


def test_a_live_engine_and_its_saved_trace_look_the_same(scenarios):
    console = Console(file=io.StringIO(), width=80, color_system=None, markup=False, emoji=False)
    tracer = TerminalTracer(console)
    for event in scenarios["priority"]:
        tracer.append(event)
    tracer.close()
    tracer.close()
    assert console.file.getvalue() == show(scenarios["priority"], 80)


@pytest.mark.parametrize("level", LEVELS)
def test_a_trace_of_any_level_is_shown_at_any_detail(level):
    events = record("priority", level)
    for detail in LEVELS:
        text = show(events, 80, detail)
        assert_fits(text, 80)
        assert all(f"step {step}" in text for step in range(3))


def test_several_engines_in_one_trace_are_told_apart(scenarios):
    events = []
    for engine, name in enumerate(("budget", "seats")):
        events += [e for e in scenarios[name] if not (engine and isinstance(e, TraceHeader))]
    for seq, event in enumerate(events):
        event.seq = seq
    text = show(events, 80)
    assert "engine" in text and text.count("── end of engine") == 2


def test_lost_records_are_told_and_what_follows_is_still_shown(scenarios):
    events = [*scenarios["priority"][:30], *scenarios["priority"][60:]]
    text = show(events, 80)
    assert "from here on without queues and pool" in text and "── end" in text
    gap = TraceGap(num_lost=7, why="the disk was full", seq=events[29].seq + 1, engine=events[29].engine)
    text = show([*events[:30], gap, *events[30:]], 80)
    assert "7 records are missing here: the disk was full" in text


def test_lists_that_do_not_belong_together_do_not_stop_the_show(real):
    events = list(real)
    at = next(i for i, e in enumerate(events) if isinstance(e, SlotsMapped))
    broken = {name: getattr(events[at], name) for name in events[at].__struct_fields__}
    events[at] = SlotsMapped(**{**broken, "slot": broken["slot"][:1]})
    text = show(events, 80, "kernels", is_damaged=True)
    assert "cannot be shown" in text and "── end" in text


def test_requests_that_share_a_block_show_its_number_of_owners(real):
    frees = [e for e in real if isinstance(e, BlockFreed) and e.ref_cnt == 1]
    assert frees, "the third prompt shares the first block"
    assert re.search(r"block \d+ 2 ", show(real, 80))


def test_an_unknown_detail_is_one_sentence():
    with pytest.raises(UserError, match="detail is 'all'"):
        TerminalTracer(make_console(io.StringIO()), "all")


# ------------------------------------------------------------------ keys


def test_pause_without_a_terminal_gives_a_notice_and_shows_everything(scenarios, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    console = Console(file=io.StringIO(), width=80, color_system=None)
    TerminalTracer(console, pause=True).show(scenarios["budget"])
    assert capsys.readouterr().err == "pagedlab: --pause needs a terminal to read keys from; showing every step.\n"
    assert console.file.getvalue() == show(scenarios["budget"], 80)


@pytest.fixture
def keyboard(monkeypatch):
    """Press a key shortly after the pause has begun to wait for it."""
    pty = pytest.importorskip("pty")
    keys, terminal = pty.openpty()
    file = io.StringIO()
    with os.fdopen(terminal, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        pause = Pause(Console(file=file, width=80, color_system=None))

        def wait(key: bytes | None = None) -> None:
            timer = threading.Timer(0.05, os.write, (keys, key)) if key else None
            if timer:
                timer.start()
            pause.wait()

        yield wait, file
    os.close(keys)


def test_space_enter_n_and_arrows_go_one_step_on(keyboard):
    press, _ = keyboard
    for key in (b" ", b"\r", b"n", b"\x1b[B", b"\x1b[C"):
        press(key)


def test_c_runs_on_without_asking_again(keyboard):
    press, file = keyboard
    press(b"c")
    asked = file.getvalue()
    press()
    assert file.getvalue() == asked and "\x1b" not in asked


def test_q_ends_like_ctrl_c_and_ctrl_c_does(keyboard):
    press, _ = keyboard
    with pytest.raises(Quit):
        press(b"q")
    with pytest.raises(KeyboardInterrupt):
        press(b"\x03")


# ------------------------------------------------------------------ picture, list, imports


def test_the_picture_is_whole_xml_that_loads_nothing(scenarios):
    from xml.etree import ElementTree

    for light in (False, True):
        svg = export_svg(scenarios["priority"], width=80, light=light, until_step=3)
        ElementTree.fromstring(svg)
        assert re.findall(r"https?://[^\"' ]+", svg) == ["http://www.w3.org/2000/svg"]
        assert "@font-face" not in svg and "step" in svg
    assert export_svg(scenarios["priority"], width=80) == export_svg(scenarios["priority"], width=80)


def test_a_hostile_prompt_cannot_leave_the_picture():
    from xml.etree import ElementTree

    svg = export_svg(hostile_trace("r0", "x", "</text><script>alert(1)</script>", "&<>\"'\x00"), width=200)
    ElementTree.fromstring(svg)
    assert "<script" not in svg


@pytest.mark.parametrize("width", [30, 80])
def test_the_scenario_list_has_every_name_and_fits(width):
    file = io.StringIO()
    listed = [(name, load_scenario(name).about, load_scenario(name).needs_model) for name in builtin_names()]
    print_scenarios(Console(file=file, width=width, color_system=None), listed)
    assert_fits(file.getvalue(), width)
    assert all(name in file.getvalue() for name in builtin_names())


def test_the_tracer_needs_neither_torch_nor_an_engine():
    code = (
        "import sys, pagedlab.viz.terminal, pagedlab.viz.svg, pagedlab.viz.scenario_list; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'triton', 'transformers') "
        "or m.startswith(('pagedlab.engine', 'pagedlab.sched', 'pagedlab.worker'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_wrapped_text_never_loses_a_word():
    pen = Pen(Theme.for_console(Console(file=io.StringIO(), color_system=None)), 24, BRIEF)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "dog", "averylongwordthatmustbecutsomewhere"]
    lines = [line.plain for line in pen.paragraph(" ".join(words), hang=4)]
    assert all(cell_len(line) <= 24 for line in lines)
    assert "".join(lines).replace(" ", "") == "".join(words)
    assert all(b.startswith("    ") for _, b in pairwise(lines))


def test_long_lists_of_ids_are_shortened_and_counted():
    pen = Pen(Theme.for_console(Console(file=io.StringIO(), color_system=None)), 80, BRIEF)
    assert pen.ids([1, 2, 3, 7]) == "1–3, 7"
    assert pen.ids([3, 2, 1]) == "3, 2, 1"
    assert pen.ids(range(0, 40, 2), limit=3) == "0, 2, 4, … 17 more"
    assert pen.ids([]) == "none"


def test_a_step_is_gathered_whole_although_its_text_comes_after_it(real):
    text = show(real, 200)
    scheduled = [e for e in real if isinstance(e, StepScheduled)]
    assert text.count("── step") + len(re.findall(r"^step \d+", text, re.MULTILINE)) == len(scheduled)


def test_without_a_model_it_says_where_tokens_come_from(scenarios, real):
    assert "none: what would be sampled comes from a script" in show(scenarios["abort"])
    assert "comes from a script" not in show(real)


def test_a_request_that_max_model_len_cuts_short_says_so_when_it_arrives():
    arrivals = [line for line in show(record("stop-and-length"), 200).splitlines() if line.startswith("arrives")]
    assert ["(asked for 8, but max_model_len is 12)" in line for line in arrivals] == [False, False, False, True]
    assert "up to 3 more" in arrivals[3]
