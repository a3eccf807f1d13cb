"""The viewer in a real Chromium: what it shows is what the trace says."""

import gzip
import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pagedlab.conformance.scheduler import Replay
from pagedlab.errors import UserError
from pagedlab.figures.record import record, stored
from pagedlab.scenarios.run import run
from pagedlab.scenarios.scenario import Scenario
from pagedlab.trace.events import EngineSnapshot, SlotsMapped
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import tracing
from pagedlab.viewer import page as viewer_page
from pagedlab.viewer.pack import pack
from pagedlab.viewer.page import write_page

ROOT = Path(__file__).parent.parent
RECORDINGS = Path(__file__).parent / "data" / "conformance" / "scheduler"
HOSTILE = [
    "</script><script>window.pwned = 1</script>",
    '<img src=x onerror="window.pwned = 1">',
    "'\"><svg onload=window.pwned=1>",
    "\x1b[31mred\x1b[0m \x07 \x00",
    "\u202eright to left\u202c \u2066isolate",
    "🦊👩‍👩‍👧 你好 नमस्ते שלום",
    "${window.pwned=1} {{constructor.constructor('window.pwned=1')()}}",
]


def recorded(names):
    """Traces of recorded scenarios, at blocks."""
    with gzip.open(RECORDINGS / "handmade.jsonl.gz", "rt") as file:
        documents = [json.loads(line) for line in file]
    with gzip.open(RECORDINGS / "random.jsonl.gz", "rt") as file:
        documents += [json.loads(line) for line in file]
    for document in documents:
        if document["name"] in names:
            with tracing("blocks") as trace:
                replay = Replay(Scenario.from_document(document, document["name"]))
                for _ in document["steps"]:
                    replay.step()
            yield document["name"], trace


class Page:
    """A viewer in a tab, and everything that went wrong in it."""

    def __init__(self, browser, path, **context):
        self.errors, self.requests = [], []
        self.tab = browser.new_page(**{"viewport": {"width": 1400, "height": 900}, **context})
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.tab.on("dialog", lambda dialog: (self.errors.append("a dialog"), dialog.dismiss()))
        self.tab.on("request", lambda r: self.requests.append(r.url))
        self.tab.goto(path.as_uri())
        self.tab.wait_for_function("window.viewer")
        self.settle()

    def settle(self):
        self.tab.evaluate("viewer.settled")

    def goto(self, event):
        self.tab.evaluate("async (e) => { viewer.settled = viewer.goto(e); await viewer.settled; }", event)

    def state(self):
        return self.tab.evaluate("viewer.snapshot()")

    def inside(self, selector):
        return self.tab.locator(f"#viewer {selector}")

    def close(self):
        self.tab.close()
        assert self.errors == []
        assert [u for u in self.requests if not u.startswith(("file:", "data:", "blob:"))] == []


def plain(state):
    """Trace.at in the words of the page's snapshot()."""
    return {
        "waiting": state.waiting,
        "running": state.running,
        "free_queue": list(state.free_queue),
        "ref_counts": {str(k): v for k, v in state.ref_counts.items()},
        "cached_blocks": {str(k): v for k, v in state.cached_blocks.items()},
        "requests": {
            k: {
                "status": r.status, "computed": r.num_computed_tokens, "known": len(r.token_ids), "tables": r.block_ids,
            }
            for k, r in state.requests.items()
        },
        "rows": {str(k): r.request_id for k, r in state.rows.items()},
    }  # fmt: skip


def shown_events(trace):
    """The events the page has, by its own index."""
    events = [e for e in trace if e.engine == trace.engine and e.kind != "trace_header"]
    first = next(i for i, e in enumerate(events) if e.kind == "engine_snapshot")
    about, rest = events[:first], events[first + 1 :]
    return about + [e for e in rest if e.kind not in ("engine_snapshot", "trace_finished")]


def assert_states_equal(page, trace, indices):
    events = shown_events(trace)
    for index in indices:
        if events[index].step < 0 and events[index].kind.startswith("kv_"):
            continue  # before the engine's first state
        page.goto(index)
        assert page.state() == plain(trace.at(seq=events[index].seq)), f"event {index}: {events[index].kind}"


def test_the_viewers_modules_are_all_packed_each_after_those_it_imports_from():
    seen: dict[str, set[str]] = {}
    for name in viewer_page.MODULES:
        text = viewer_page.asset(name)
        assert len(text.splitlines()) <= 350, f"{name} is too long to be read in one sitting"
        for names, source in re.findall(r'^import \{(.*?)\} from "\./(.*?)";$', text, re.MULTILINE):
            assert {n.strip() for n in names.split(",")} <= seen[source], (name, source)
        seen[name] = set(re.findall(r"^export (?:async )?(?:const|function|class) (\w+)", text, re.MULTILINE))
    assert sorted(seen) == sorted(p.name for p in Path(viewer_page.__file__).parent.glob("*.js"))
    assert not re.search(r"^import\b", viewer_page.module(), re.MULTILINE)


STORIES = [
    "hybrid_two_block_sizes", "priority_victim_already_scheduled", "reset_prefix_cache", "abort_two_at_once",
    "sliding_window_prefix_hit", "resume_in_chunks", "duplicate_blocks_first_one_wins",
]  # fmt: skip


def test_the_page_stands_where_the_trace_stands_at_random_events_of_recorded_runs(browser, tmp_path):
    seen = 0
    for name, trace in recorded([*STORIES, "random-0002", "random-0040", "random-0118"]):
        path = tmp_path / f"{name}.html"
        write_page(trace, path)
        page = Page(browser, path)
        count = len(shown_events(trace))
        assert page.tab.evaluate("viewer.meta.num_events") == count
        rng = random.Random(name)
        assert_states_equal(page, trace, [*rng.sample(range(count), min(12, count)), count - 1, 0])
        page.close()
        seen += 1
    assert seen >= len(STORIES) + 1


def test_the_page_stands_where_the_trace_stands_on_the_model_with_rows(browser, tmp_path):
    for name in ("preemption", "state-rows"):
        trace = stored(name)
        path = tmp_path / f"{name}.html"
        write_page(trace, path)
        page = Page(browser, path)
        count = len(shown_events(trace))
        assert_states_equal(page, trace, range(0, count, max(1, count // 25)))
        page.close()


def test_a_page_of_some_steps_starts_from_the_state_before_them(browser, tmp_path):
    trace = stored("preemption")
    path = tmp_path / "part.html"
    write_page(trace, path, steps=(5, 8))
    page = Page(browser, path)
    assert page.tab.evaluate("viewer.meta.columns.step") == [5, 6, 7, 8]
    page.goto(page.tab.evaluate("viewer.meta.num_events") - 1)
    last = max(e.seq for e in trace if e.step == 8)
    assert page.state() == plain(trace.at(seq=last))
    page.close()


def test_a_changed_op_is_noticed_by_the_comparison(browser, tmp_path, monkeypatch):
    """The counterpart: with one rule of the packer spoiled, the states differ."""
    from pagedlab.trace.events import BlockFreed
    from pagedlab.viewer.ops import RULES

    monkeypatch.setitem(RULES, BlockFreed, lambda packer, event: [])
    trace = stored("preemption")
    path = tmp_path / "spoiled.html"
    write_page(trace, path)
    page = Page(browser, path)
    page.goto(len(shown_events(trace)) - 1)
    assert page.state() != plain(trace.at())
    page.close()


def test_keys_timeline_and_buttons_move_through_the_run(browser, tmp_path):
    trace = stored("mixed-batch")
    path = tmp_path / "mixed.html"
    write_page(trace, path)
    page = Page(browser, path)
    at = "viewer.cursor.event"
    page.goto(40)
    page.inside(".viewer").focus()
    page.tab.keyboard.press("ArrowRight")
    page.settle()
    assert page.tab.evaluate(at) == 41
    page.tab.keyboard.press("ArrowLeft")
    page.settle()
    assert page.tab.evaluate(at) == 40
    page.tab.keyboard.press("End")
    page.settle()
    assert page.tab.evaluate(at) == len(shown_events(trace)) - 1
    page.tab.keyboard.press("Home")
    page.settle()
    page.tab.keyboard.press("Shift+ArrowRight")
    page.settle()
    assert "step 0" in page.inside(".position").inner_text()
    box = page.inside(".timeline").bounding_box()
    page.tab.mouse.click(box["x"] + box["width"] * 0.999, box["y"] + 20)
    page.settle()
    assert page.tab.evaluate("viewer.stepIndex(viewer.cursor.event)") == page.tab.evaluate("viewer.steps") - 1
    page.close()


def test_a_click_on_a_block_tells_its_life(browser, tmp_path):
    trace = stored("preemption")
    path = tmp_path / "preemption.html"
    write_page(trace, path)
    page = Page(browser, path)
    size = page.tab.evaluate("viewer.pool.layout().size")
    box = page.inside(".pool").bounding_box()
    page.tab.mouse.click(box["x"] + size * 3.5, box["y"] + size / 2)
    page.inside(".story li").first.wait_for()
    story = page.inside(".story").inner_text()
    told = [e for e in trace if getattr(e, "block_id", None) == 3 and e.kind.startswith("block_")]
    assert "Block 3" in story
    assert page.inside(".story li").count() == len(told)
    assert story.count("handed out") == sum(e.kind == "block_allocated" for e in told)
    page.close()


def test_the_life_of_a_block_follows_the_moment_until_it_is_forgotten(browser, tmp_path):
    trace = stored("preemption")
    write_page(trace, tmp_path / "life.html")
    page = Page(browser, tmp_path / "life.html")
    events = shown_events(trace)
    told = [i for i, e in enumerate(events) if getattr(e, "block_id", None) == 3 and e.kind.startswith("block_")]
    page.goto(told[0])
    page.tab.evaluate("viewer.chooseBlock(3)")
    page.inside(".story li").first.wait_for()
    for n in (1, 3, len(told)):
        page.goto(told[n - 1])
        assert page.inside(".story .past").count() == n
        owners = trace.at(seq=events[told[n - 1]].seq).ref_counts.get(3, 0)
        assert f"{owners} owner{'' if owners == 1 else 's'}" in page.inside(".story h3").inner_text()
    page.tab.keyboard.press("Escape")
    assert page.inside(".story").inner_text() == ""
    page.close()


def test_what_was_read_for_a_request_that_has_left_is_not_denied(browser, tmp_path):
    trace = stored("preemption")
    write_page(trace, tmp_path / "left.html")
    page = Page(browser, tmp_path / "left.html")
    events = shown_events(trace)
    step = next(e.step for e in events if e.kind == "request_finished" and e.request_id == "r0")
    page.goto(max(i for i, e in enumerate(events) if e.step == step))
    read = [e for e in events if e.kind == "kv_read" and e.step == step][-1]
    said = page.inside(".writes").inner_text()
    blocks = ", ".join(map(str, read.block_ids))
    assert f"for the queries of r0: blocks {blocks}. It has given its blocks back since." in said
    assert "r0 holds no blocks at this moment" in page.inside(".lens").inner_text()
    assert "It holds no blocks." in page.inside(".tables").inner_text(), "r1 was preempted"
    page.close()


def test_a_block_that_is_no_longer_marked_leaves_no_trace_on_its_neighbours(browser, tmp_path):
    write_page(stored("preemption"), tmp_path / "marks.html")
    page = Page(browser, tmp_path / "marks.html")
    pixels = "viewer.pool.canvas.toDataURL()"
    before = page.tab.evaluate(pixels)
    page.tab.evaluate("viewer.chooseBlock(2)")
    assert page.tab.evaluate(pixels) != before
    page.tab.keyboard.press("Escape")
    assert page.tab.evaluate(pixels) == before
    page.close()


def chain(page, design):
    """The links of one design's chain: {name: what is shown}."""
    links = page.inside(f'.links[data-design="{design}"] .link').all()
    return {link.get_attribute("data-link"): link.locator("b").inner_text() for link in links}


@pytest.mark.parametrize("name", ["two-five-three", "state-rows"])
def test_the_token_lens_shows_the_chain_that_the_worker_recorded(browser, tmp_path, name):
    trace = stored(name)
    path = tmp_path / "lens.html"
    write_page(trace, path)
    page = Page(browser, path)
    events = shown_events(trace)
    index = next(i for i, e in enumerate(events) if isinstance(e, SlotsMapped))
    mapped = events[index]
    ordered = next(e for e in events[:index][::-1] if e.kind == "batch_ordered")
    page.goto(index)
    for i in (0, 4, 9):
        request_id, position = mapped.request_id[i], mapped.position[i]
        # a table is shown for the request that the moment is about, or the chosen one
        page.tab.evaluate(
            "([id]) => { viewer.request = viewer.meta.requests.findIndex((r) => r.id === id); viewer.draw(); }",
            [request_id],
        )
        page.inside(f'.request[data-request="{request_id}"] .cell[data-position="{position}"]').click()
        said = chain(page, "state-table" if ordered.idx_mapping else "persistent")
        assert said["flat index"] == str(mapped.token[i])
        assert said["position"] == str(position)
        assert said["logical block"] == str(mapped.logical_block[i])
        assert said["offset"] == str(mapped.offset[i])
        assert said["table index"] == str(mapped.table_index[i])
        assert said["block"] == str(mapped.block_id[i])
        assert said["slot"] == str(mapped.slot[i])
        page.tab.evaluate("new Promise(requestAnimationFrame)")
        assert [a.get_attribute("data-block") for a in page.inside(".arrows .lit").all()] == [said["block"]]
        assert page.tab.evaluate("viewer.litBlocks()") == [mapped.block_id[i]]
        assert page.inside(".chip.lit").get_attribute("data-request") == request_id
        batch_row = ordered.request_ids.index(request_id)
        assert said["batch row"] == str(batch_row)
        assert said["state row"] == str(ordered.idx_mapping[batch_row] if ordered.idx_mapping else mapped.row[i])
    page.close()


def test_a_record_is_shown_a_field_a_line_and_one_block_is_spoken_of_as_one(browser, tmp_path):
    trace = stored("mixed-batch")
    write_page(trace, tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html")
    events = shown_events(trace)
    index = next(i for i, e in enumerate(events) if e.kind == "request_added" and e.request_id == "r2")
    page.goto(index)
    raw = page.inside(".raw").inner_text()
    texts = json.loads(raw)["prompt_token_texts"]
    assert len(texts) == 22 and sum(text in raw for text in ('"prompt_token_texts":["It"," was"', ' "prompt":')) == 2
    assert all(line.startswith(("{", ' "')) and '":' in line for line in raw.splitlines())
    assert page.inside(".writes").inner_text().count("for the queries of r1: block 2.") == 1
    page.close()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_lens_says_where_a_slot_lies_in_the_memory_of_the_runs_backend(browser, tmp_path, backend):
    torch = pytest.importorskip("torch")
    from pagedlab.attention.backends import AttentionLayerConfig, choose_attention_backend
    from pagedlab.kv.specs import AttentionSpec

    header, *events = stored("mixed-batch").events
    config = header.config | {"attention_backend": backend}
    write_page(Trace([msgspec.structs.replace(header, config=config), *events]), tmp_path / "lens.html")
    model, num_blocks = header.model, config["num_blocks"]
    spec = AttentionSpec(
        block_size=config["block_size"], num_kv_heads=model["num_key_value_heads"], head_size=model["head_dim"],
        dtype=config["dtype"],
    )  # fmt: skip
    layer = AttentionLayerConfig("layer", 0, model["num_attention_heads"], spec.num_kv_heads, spec.head_size, 1.0, None)
    chosen = choose_attention_backend(
        backend, torch.device("cpu"), head_size=spec.head_size, block_sizes=[spec.block_size], dtype=torch.float32
    )
    memory = torch.zeros(num_blocks * spec.page_size_bytes // 4)
    kv_cache = chosen.make_impl(layer).view_kv_cache(memory, num_blocks, spec)
    page = Page(browser, tmp_path / "lens.html")
    for block, offset in ((1, 0), (2, 3), (num_blocks - 1, 1)):
        key, value, other = (kv_cache[place].data_ptr() - memory.data_ptr() for place in (
            (0, block, offset, 0), (1, block, offset, 0), (0, block, offset, 1)))  # fmt: skip
        said = page.tab.evaluate("([b, o]) => viewer.lens.address(0, b, o)", [block, offset])
        assert f"key at byte {key:,}, value at {value:,}" in said
        beside = other - key == spec.head_size * 4
        assert said.startswith("key") if beside else f"each further head {other - key:,} bytes on" in said
    page.close()


@pytest.mark.parametrize("scenario", ["two-five-three", "mixed-batch", "preemption"])
@pytest.mark.parametrize("level", ["kernels", "blocks"])
def test_the_lens_shows_the_other_design_as_a_run_of_it_records(browser, tmp_path, scenario, level):
    """What is derived from one run's messages equals what the other runner records; at `blocks` both are derived."""
    recorded = {runner: record(scenario, runner) for runner in ("persistent", "state-table")}
    for shown, other in (("persistent", "state-table"), ("state-table", "persistent")):
        trace = recorded[shown]
        if level == "blocks":
            fine = ("tensors", "kernels")
            trace = Trace([e for e in trace.events if type(e).level not in fine])
        path = tmp_path / f"{shown}.html"
        write_page(trace, path)
        page = Page(browser, path)
        events = shown_events(trace)
        for step in sorted(s for s in recorded[other].steps if s >= 0):
            mapped = next((e for e in recorded[other].steps[step] if isinstance(e, SlotsMapped)), None)
            ordered = next((e for e in recorded[other].steps[step] if e.kind == "batch_ordered"), None)
            if mapped is None:
                continue
            page.goto(next(i for i, e in enumerate(events) if e.step == step and e.kind == "step_scheduled"))
            for i in {0, len(mapped.token) // 2, len(mapped.token) - 1}:
                at = [mapped.request_id[i], mapped.position[i]]
                page.tab.evaluate(
                    "([id, p]) => viewer.chooseToken(viewer.meta.requests.findIndex((r) => r.id === id), p)", at
                )
                said = chain(page, other)
                row = ordered.request_ids.index(mapped.request_id[i])
                assert said["flat index"] == str(mapped.token[i]), (step, at)
                assert said["batch row"] == str(row)
                assert said["state row"] == str(ordered.idx_mapping[row] if ordered.idx_mapping else row)
                assert said["table index"] == str(mapped.table_index[i])
                assert said["slot"] == str(mapped.slot[i])
        page.close()


def test_rows_of_a_run_that_was_met_in_mid_life_are_not_guessed():
    trace = stored("mixed-batch")
    first = next(i for i, e in enumerate(trace.events) if e.step == 2)
    state = trace.at(seq=trace.events[first - 1].seq)
    snapshot = EngineSnapshot(
        seq=0, engine=trace.engine, step=1, block_sizes=state.block_sizes, num_blocks=state.num_blocks,
        waiting=state.waiting, running=state.running, requests=list(state.requests.values()),
        free_queue=list(state.free_queue), ref_counts=state.ref_counts, cached_blocks=state.cached_blocks, rows=[],
    )  # fmt: skip
    packed = pack(Trace([trace.header, snapshot, *trace.events[first:]]))
    assert packed.meta["steps_per_row_chunk"] == 0
    assert not [name for name in packed.chunks if name.startswith("rows")]


def test_the_kernels_reads_are_shown_for_the_chosen_query(browser, tmp_path):
    trace = stored("two-five-three")
    path = tmp_path / "reads.html"
    write_page(trace, path)
    page = Page(browser, path)
    events = shown_events(trace)
    reads = [(i, e) for i, e in enumerate(events) if e.kind == "kv_read" and e.step == 0 and e.request_id == "r1"]
    index, read = reads[-1]
    page.goto(index)
    page.tab.evaluate("viewer.chooseToken(viewer.meta.requests.findIndex((r) => r.id === 'r1'), 3)")
    blocks = [int(b.get_attribute("data-block")) for b in page.inside(".writes .read").all()]
    assert blocks == read.block_ids
    assert page.inside(".writes .seen").count() == 4, "positions 0 to 3"
    assert page.inside(".writes .masked").count() == len(blocks) * 2 - 4
    layers = page.inside(".writes select option").all_inner_texts()
    assert layers == [e.layer for e in events[:index] if e.kind == "kv_written" and e.step == 0]
    page.inside(".writes select").select_option(layers[0])
    log = next(e for e in events if e.kind == "kv_written" and e.layer == layers[0])
    shown = [int(b.inner_text().split()[1]) for b in page.inside(".writes .blocks >> nth=0").locator(".head").all()]
    assert shown == list(dict.fromkeys(log.block_id))
    page.close()


def test_without_a_choice_lens_and_reads_show_the_request_that_the_event_is_about(browser, tmp_path):
    trace = stored("two-five-three")
    write_page(trace, tmp_path / "about.html")
    page = Page(browser, tmp_path / "about.html")
    events = shown_events(trace)
    texts = {"r0": "was", "r1": "to", "r2": "Darcy"}
    for i, event in enumerate(events):
        if event.kind == "kv_read" and event.step == 0:
            page.goto(i)
            assert chain(page, "persistent")["token"].strip() == texts[event.request_id]
            assert f"for the queries of {event.request_id}: block" in page.inside(".writes").inner_text()
    page.close()


def test_the_table_of_the_chosen_token_stays_while_the_events_go_on(browser, tmp_path):
    trace = stored("two-five-three")
    write_page(trace, tmp_path / "stays.html")
    page = Page(browser, tmp_path / "stays.html")
    events = shown_events(trace)
    mapped = next(i for i, e in enumerate(events) if isinstance(e, SlotsMapped))
    page.goto(mapped)
    page.tab.evaluate("viewer.chooseToken(viewer.requestOf('r1'), 3)")
    for i in range(mapped, len(events), 7):
        page.goto(i)
        if "r1" in trace.at(seq=events[i].seq).requests:
            assert page.inside(".request").first.get_attribute("data-request") == "r1", i
    page.tab.evaluate("viewer.chooseRequest(viewer.requestOf('r0'))")
    assert "r0 neither waits nor runs at this moment" in page.inside(".tables").inner_text()
    page.close()


def test_requests_are_seen_moving_between_the_queues(browser, tmp_path):
    trace = stored("preemption")
    path = tmp_path / "moves.html"
    write_page(trace, path)
    page = Page(browser, path)
    events = shown_events(trace)
    at = next(i for i, e in enumerate(events) if e.kind == "request_preempted")
    page.goto(at - 1)
    assert page.inside('[data-queue="running"] .chip').count() == 2
    sliding = page.tab.evaluate(
        "async (e) => { await viewer.goto(e);"
        "return viewer.queues.element.querySelector('[data-queue=waiting] .chip').getAnimations().length; }",
        at,
    )
    assert sliding >= 1, "the chip slides to its new queue"
    waiting = page.inside('[data-queue="waiting"]').inner_text()
    assert "from running: preempted for r0: the last of the running list" in waiting
    finished = next(i for i, e in enumerate(events) if e.kind == "request_finished")
    page.goto(finished)
    said = f"{events[finished].request_id}: finished ({events[finished].finish_reason})"
    assert said in page.inside('[data-queue="left"]').inner_text()
    page.close()


def test_the_queue_says_what_the_prefix_cache_gave(browser, tmp_path):
    trace = stored("prefix-hit")
    write_page(trace, tmp_path / "hit.html")
    page = Page(browser, tmp_path / "hit.html")
    events = shown_events(trace)
    hit = next(e for e in events if e.kind == "prefix_matched" and e.num_computed_tokens)
    page.goto(max(i for i, e in enumerate(events) if e.step == hit.step))
    said = f"from waiting: {hit.num_computed_tokens} tokens found in the prefix cache: granted 3 of 3 tokens"
    assert said in page.inside('[data-queue="running"]').inner_text()
    page.close()


def test_tables_of_several_groups_stand_side_by_side(browser, tmp_path):
    (_, trace), *_ = recorded(["hybrid_decode"])
    path = tmp_path / "groups.html"
    write_page(trace, path)
    page = Page(browser, path)
    page.goto(max(i for i, e in enumerate(shown_events(trace)) if e.kind == "slots_allocated"))
    boxes = [g.bounding_box() for g in page.inside(".request >> nth=0").locator(".group").all()]
    assert len(boxes) == 2
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.close()


def test_a_cut_trace_opens_up_to_the_cut_and_says_so(browser, tmp_path, capsys):
    whole = tmp_path / "whole.jsonl"
    stored("preemption").save(whole)
    data = whole.read_bytes()
    for share in (0.5, 0.0):
        cut = tmp_path / f"cut{share}.jsonl"
        cut.write_bytes(data[: max(int(len(data) * share), data.index(b"\n") + 1)])
        trace = Trace.load(cut)
        assert "the file is cut" in capsys.readouterr().err
        path = tmp_path / "cut.html"
        write_page(trace, path)
        page = Page(browser, path)
        assert "it was cut" in page.inside(".about").inner_text()
        if share:
            assert_states_equal(page, trace, [len(shown_events(trace)) - 1])
        page.close()
    path = tmp_path / "whole.html"
    write_page(Trace.load(whole), path)
    page = Page(browser, path)
    assert "cut" not in page.inside(".about").inner_text()
    page.close()


def test_everything_can_be_reached_by_keyboard(browser, tmp_path):
    path = tmp_path / "keys.html"
    write_page(stored("mixed-batch"), path)
    page = Page(browser, path)
    page.inside(".lanes").focus()
    page.tab.keyboard.press("ArrowDown")
    page.tab.keyboard.press("ArrowDown")
    assert page.tab.evaluate("viewer.request") == 1
    page.inside(".pool").focus()
    page.tab.keyboard.press("ArrowRight")
    assert page.tab.evaluate("viewer.block") == 1
    page.inside(".life li").first.wait_for()
    page.inside(".tables .cell:enabled").first.focus()
    page.tab.keyboard.press("Enter")
    assert page.tab.evaluate("viewer.token.position") == 0
    assert page.tab.evaluate("viewer.root.activeElement.classList.contains('chosen')"), "the focus stays on the token"
    page.tab.keyboard.press("Escape")
    assert page.tab.evaluate("[viewer.request, viewer.block, viewer.token]") == [None, None, None]
    unnamed = page.tab.evaluate(
        "[...viewer.root.querySelectorAll('button, select, input, [tabindex=\"0\"]')]"
        ".filter((n) => !(n.textContent.trim() || n.getAttribute('aria-label') || n.closest('label'))).length"
    )
    assert unnamed == 0
    page.close()


def test_keys_work_at_once_and_after_every_click(browser, tmp_path):
    """What was clicked is drawn anew; the focus stays with it, or at least with the viewer."""
    path = tmp_path / "focus.html"
    write_page(stored("mixed-batch"), path)
    page = Page(browser, path)
    at = "viewer.cursor.event"

    def press(key):
        page.tab.keyboard.press(key)
        page.settle()

    page.goto(60)
    press("ArrowRight")
    assert page.tab.evaluate(at) == 61, "without a click"
    places = (".events .row", ".tables .head", ".tables .cell:enabled", ".queues .chip", ".pool", ".play >> nth=0")
    for i, place in enumerate(places):
        page.inside(place).first.click()
        page.tab.evaluate("async () => { viewer.controls.playing = false; await viewer.settled; }")
        before = page.tab.evaluate(at)
        press("PageDown")
        assert page.tab.evaluate(at) > before, place
        assert page.tab.evaluate("viewer.root.activeElement !== null"), (i, place)
        page.goto(60)
    page.close()


def test_up_and_down_choose_in_tables_and_events_where_the_tab_key_stops_once(browser, tmp_path):
    path = tmp_path / "choose.html"
    write_page(stored("mixed-batch"), path)
    page = Page(browser, path)
    for place in (".tables", ".events"):
        stops = f"[...viewer.root.querySelectorAll('{place}, {place} *')].filter((n) => n.tabIndex === 0).length"
        assert page.tab.evaluate(stops) == 1, place
    page.inside(".tables [tabindex='0']").focus()
    keys = []
    for _ in range(3):
        page.tab.keyboard.press("ArrowDown")
        keys.append(page.tab.evaluate("viewer.root.activeElement.dataset.key"))
    page.tab.keyboard.press("ArrowUp")
    assert page.tab.evaluate("viewer.root.activeElement.dataset.key") == keys[1] and len(set(keys)) == 3
    page.tab.keyboard.press("ArrowRight")  # time goes on, the focus stays
    page.settle()
    assert page.tab.evaluate("viewer.root.activeElement.dataset.key") == keys[1]
    page.inside("input[type=search]").fill("block")
    rows = [int(row.get_attribute("data-index")) for row in page.inside(".events .row").all()]
    page.goto(rows[0])
    page.inside(".events").focus()
    for expected in (*rows[1:3], rows[1]):
        page.tab.keyboard.press("ArrowUp" if expected < page.tab.evaluate("viewer.cursor.event") else "ArrowDown")
        page.settle()
        assert page.tab.evaluate("viewer.cursor.event") == expected
    assert page.inside(".events").get_attribute("aria-activedescendant") == f"event-{rows[1]}"
    page.close()


def alike(names, path):
    """The page and the trace of requests that differ in nothing but their names."""
    spec = {"prompt_token_ids": [1, 2], "max_tokens": 2, "sampled_token_ids": [3, 4]}
    scenario = Scenario.from_document(
        {"format": "pagedlab-scenario/1", "name": "alike", "about": "", "requests": dict.fromkeys(names, spec),
         "config": {"block_size": 4, "num_blocks": 100}, "script": [{"before_step": 0, "add": names}]},
        "alike",
    )  # fmt: skip
    with tracing("blocks") as trace:
        run(scenario)
    write_page(trace, path)
    return trace


def test_a_lane_chosen_by_key_is_scrolled_to(browser, tmp_path):
    path = tmp_path / "many.html"
    alike([f"r{i}" for i in range(60)], path)
    page = Page(browser, path)
    page.inside(".lanes").focus()
    for _ in range(50):
        page.tab.keyboard.press("ArrowDown")
    assert page.tab.evaluate("viewer.request") == 49
    mark, around = page.inside(".lane-mark").bounding_box(), page.inside(".scroll").bounding_box()
    assert around["y"] <= mark["y"] and mark["y"] + mark["height"] <= around["y"] + around["height"] + 1
    page.close()


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_contrast_with_what_they_stand_on(browser, tmp_path, theme):
    """WCAG AA: 4.5 for small text."""
    path = tmp_path / "contrast.html"
    write_page(stored("prefix-hit"), path)
    page = Page(browser, path, color_scheme=theme)
    names = ("paper", "ink", "dim", "wash", "alert", "accent")
    paper, ink, dim, wash, alert, accent = (page.tab.evaluate(f"viewer.theme.colour('{name}')") for name in names)
    page.close()

    def ratio(a, b):
        high, low = sorted((luminance(full(a)), luminance(full(b))), reverse=True)
        return (high + 0.05) / (low + 0.05)

    def full(colour):
        return colour if len(colour) == 7 else "#" + "".join(c * 2 for c in colour[1:])

    for front, back in ((ink, paper), (ink, wash), (dim, paper), (dim, wash), (alert, wash), (accent, paper)):
        assert ratio(front, back) >= 4.5, (front, back)


def test_the_event_list_filters_by_kind_request_and_block(browser, tmp_path):
    trace = stored("preemption")
    path = tmp_path / "filter.html"
    write_page(trace, path)
    page = Page(browser, path)
    events = shown_events(trace)
    page.goto(max(i for i, e in enumerate(events) if e.step == 2))
    step = [e for e in events if e.step == 2]
    for words, expected in (
        ("block_freed", [e for e in step if e.kind == "block_freed"]),
        ("considered r0", [e for e in step if e.kind == "request_considered" and e.request_id == "r0"]),
        ("block 4", [e for e in step if getattr(e, "block_id", None) == 4]),
        ("slots_mapped r0", [e for e in step if e.kind == "slots_mapped" and "r0" in e.request_id]),
    ):
        page.inside("input[type=search]").fill(words)
        rows = [int(row.get_attribute("data-index")) for row in page.inside(".events .row").all()]
        assert rows == [events.index(e) for e in expected] and rows, words
    page.goto(rows[0])
    assert page.inside(".position").inner_text().endswith(": slots_mapped")
    page.close()


def test_a_strangers_text_is_shown_and_never_run(browser, tmp_path):
    from pagedlab import LLM, SamplingParams

    llm = LLM(num_blocks=200, block_size=4)
    with tracing("tensors") as trace:
        llm.generate(HOSTILE, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    path = tmp_path / "hostile.html"
    write_page(trace, path)
    page = Page(browser, path)
    for index in range(0, len(shown_events(trace)), 9):
        page.goto(index)
    assert page.tab.evaluate("window.pwned") is None
    page.tab.evaluate("viewer.goto(viewer.lastEventOf(1))")
    text = page.inside(".viewer").inner_text()
    assert "\x1b" not in text and "\u202e" not in text
    assert page.tab.evaluate("document.querySelectorAll('img, svg[onload]').length") == 0
    added = next(i for i, e in enumerate(shown_events(trace)) if e.kind == "request_added")
    page.goto(added)
    assert "</script><script>window.pwned" in page.inside(".raw").inner_text()
    page.close()


@pytest.mark.parametrize("width", [320, 800, 1600])
def test_long_ids_are_cut_in_the_middle_and_never_widen_the_page(browser, tmp_path, width):
    names, path = [f"cmpl-{'0123456789abcdef' * 8}-{i}" for i in range(3)], tmp_path / "long.html"
    trace = alike(names, path)
    page = Page(browser, path, viewport={"width": width, "height": 800})
    page.goto(next(i for i, e in enumerate(shown_events(trace)) if e.kind == "request_output"))
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert page.inside(".chip b").all_inner_texts() == [f"cmpl-0123…9abcdef-{i}" for i in range(3)]
    assert page.inside(".request h3").first.get_attribute("title") == names[0]
    page.close()


@pytest.mark.parametrize("width", [390, 820, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_a_tablet_and_a_projector(browser, tmp_path, width, scheme):
    path = tmp_path / "fits.html"
    write_page(stored("prefix-hit"), path)
    page = Page(browser, path, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    background = page.tab.evaluate("getComputedStyle(viewer.main).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    page.close()


def test_the_page_follows_the_system_until_a_theme_is_chosen(browser, tmp_path):
    path = tmp_path / "system.html"
    write_page(stored("prefix-hit"), path)
    page = Page(browser, path, color_scheme="light", bypass_csp=True)
    drawn = page.inside(".timeline").get_attribute("data-drawn")
    page.tab.emulate_media(color_scheme="dark")
    page.tab.wait_for_function("viewer.timeline.canvas.dataset.drawn.endsWith('dark')")
    assert drawn.endswith("light")
    page.tab.evaluate("postMessage({ pagedlabTheme: 'light' }, '*')")  # of the page itself: nobody is around it
    page.tab.wait_for_function("viewer.theme.name === 'light'")
    page.tab.evaluate("postMessage({ pagedlabTheme: 'url(x)' }, '*')")
    page.tab.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert page.tab.evaluate("viewer.main.dataset.theme") == "light"
    page.close()


def test_play_goes_on_by_itself_and_stops(browser, tmp_path):
    path = tmp_path / "play.html"
    write_page(stored("mixed-batch"), path)
    page = Page(browser, path, bypass_csp=True)
    page.tab.evaluate("async () => { viewer.controls.speed = 30; await viewer.goto(0); viewer.main.focus(); }")
    page.tab.keyboard.press("Space")
    page.tab.wait_for_function("viewer.stepIndex(viewer.cursor.event) >= 3")
    page.tab.keyboard.press("Space")
    assert page.tab.evaluate("viewer.controls.playing") is False
    page.tab.evaluate("viewer.goto(viewer.meta.num_events - 1)")
    page.tab.evaluate("viewer.controls.play()")
    page.tab.wait_for_function("viewer.controls.playing === false")
    page.close()


def test_a_crowd_is_shown_as_it_is(browser, tmp_path):
    """256 requests, the benchmark's run in small: states at random events, the chips counted, words for the rest."""
    spec = importlib.util.spec_from_file_location("bench_viewer", ROOT / "benchmarks" / "viewer.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    trace = bench.record(num_requests=256, num_blocks=2000, num_steps=120)
    path = tmp_path / "crowd.html"
    assert write_page(trace, path) < 4 << 20
    page = Page(browser, path)
    count = len(shown_events(trace))
    assert_states_equal(page, trace, random.Random(1).sample(range(count), 8))
    state = trace.at()
    page.goto(count - 1)
    for name, queue in (("waiting", state.waiting), ("running", state.running)):
        column = page.inside(f'[data-queue="{name}"]')
        assert f"{name} ({len(queue)})" in column.inner_text()
        chips = [c.get_attribute("data-request") for c in column.locator(".chip").all()]
        assert chips == queue[:24]
        assert (f"{len(queue) - 24} more" in column.inner_text()) == (len(queue) > 24)
    page.close()


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "it is empty"),
        (b"hello\n", "its first line is not a trace header"),
        (b'{"kind":"trace_header","seq":0,"format":"pagedlab-trace","version":[9,0]}\n', "trace format 9.0"),
    ],
)
def test_the_command_refuses_what_is_not_a_trace_in_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", "pagedlab", "view", str(path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not path.with_suffix(".html").exists()


def test_bad_input_is_one_sentence_and_leaves_no_file(tmp_path, monkeypatch):
    with tracing("decisions") as coarse:
        pass
    path = tmp_path / "page.html"
    with pytest.raises(UserError, match="recorded at `decisions`; `view` needs `blocks`"):
        write_page(coarse, path)
    trace = stored("prefix-hit")
    with pytest.raises(UserError, match="no steps 900:901 in this trace: it ends at step"):
        write_page(trace, path, steps=(900, 901))
    monkeypatch.setattr(viewer_page, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match="--steps 0:"):
        write_page(trace, path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot write"):
        monkeypatch.undo()
        write_page(trace, tmp_path / "nowhere" / "page.html")
