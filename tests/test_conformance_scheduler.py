"""Decision for decision: the recordings of the real vLLM 0.14.1 scheduler, and proof that they bite."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from pagedlab.conformance.scheduler import replay_scheduler
from pagedlab.errors import UserError
from pagedlab.kv import manager as kv_manager
from pagedlab.kv.block import FreeKVCacheBlockQueue
from pagedlab.kv.group import KVCacheGroup
from pagedlab.kv.prefix import find_longest_cache_hit
from pagedlab.sched.policy import FirstComeFirstServed, Priority
from pagedlab.sched.scheduler import Scheduler

DATA = Path(__file__).parent / "data" / "conformance" / "scheduler"


@cache
def recordings_in(file):
    with gzip.open(DATA / f"{file}.jsonl.gz", "rt") as lines:
        return {document["name"]: document for document in map(json.loads, lines)}


def recording(name):
    """A hand-made one; a copy that may be spoiled."""
    return copy.deepcopy(recordings_in("handmade")[name])


def replay(document):
    (outcome,) = replay_scheduler(document, document["name"])
    return outcome


def names_of_differences(documents):
    return {o.name: o for d in documents for o in replay_scheduler(d, d["name"]) if not o.ok}


# ------------------------------------------------------------------ no difference


def test_all_429_recordings_replay_without_a_difference():
    documents = [*recordings_in("handmade").values(), *recordings_in("random").values()]
    assert len(documents) == 429
    assert {d["recorded_from"] for d in documents} == {"vllm 0.14.1"}
    assert {name: o.report for name, o in names_of_differences(documents).items()} == {}


def test_cases_that_fuzzing_beside_the_real_scheduler_found_replay_without_a_difference():
    documents = recordings_in("found_by_fuzzing")
    assert set(documents) == {"window_of_one", "window_of_one_beside_full"}
    assert {name: o.report for name, o in names_of_differences(documents.values()).items()} == {}


def test_decisions_are_the_same_while_a_trace_is_recorded():
    from pagedlab.trace.tracer import tracing

    documents = recordings_in("handmade").values()
    for level in ("steps", "decisions", "blocks"):
        with tracing(level) as trace:
            assert names_of_differences(documents) == {}
        assert len(list(trace)) > 1000


# ------------------------------------------------------------------ a spoiled recording is noticed


def test_a_changed_block_id_is_reported_with_step_and_field():
    document = recording("prefix_hit_after_finish")
    step = next(s for s in document["steps"] if s["new"] and s["new"][0]["num_computed_tokens"])
    step["new"][0]["block_ids"][0][-1] += 1
    last = len(step["new"][0]["block_ids"][0]) - 1
    first = replay(document).first_difference
    assert (first["step"], first["field"]) == (step["step"], f"new[0].block_ids[0][{last}]")
    assert first["expected"] == first["got"] + 1


def test_another_order_of_num_scheduled_tokens_is_reported():
    document = recording("three_requests_one_step")
    step = next(s for s in document["steps"] if len(s["num_scheduled_tokens"]) == 3)
    step["num_scheduled_tokens"] = dict(reversed(step["num_scheduled_tokens"].items()))
    first = replay(document).first_difference
    assert (first["step"], first["field"]) == (step["step"], "num_scheduled_tokens (order)")


def test_another_order_of_outputs_is_reported():
    document = recording("three_requests_one_step")
    step = next(s for s in document["steps"] if len(s["outputs"]) == 3)
    step["outputs"] = dict(reversed(step["outputs"].items()))
    assert replay(document).first_difference["field"] == "outputs (order)"


@pytest.mark.parametrize("spoil, field", [
    (lambda s: s["after_update"]["ref_counts"].update({"2": 2}), "after_update.ref_counts.2"),
    (lambda s: s["after_update"]["ref_counts"].update({"9": 1}), "after_update.ref_counts.9"),
    (lambda s: s["after_update"]["ref_counts"].pop("2"), "after_update.ref_counts.2"),
    (lambda s: s["after_schedule"]["free_queue"].reverse(), "after_schedule.free_queue[0]"),
    (lambda s: s["after_schedule"]["free_queue"].pop(), "after_schedule.free_queue"),
    (lambda s: s["after_schedule"].update(num_free_blocks=7), "after_schedule.num_free_blocks"),
    (lambda s: s["preempted"].pop(), "preempted"),
    (lambda s: s["after_schedule"]["waiting"].clear(), "after_schedule.waiting"),
    (lambda s: s["after_update"]["cached_blocks"].append(9), "after_update.cached_blocks"),
    (lambda s: s["cached"][0].update(resumed=True), "cached[0].resumed"),
    (lambda s: s.update(total_num_scheduled_tokens=99), "total_num_scheduled_tokens"),
    (lambda s: s.update(finished_req_ids=["r9"]), "finished_req_ids"),
    (lambda s: s["num_common_prefix_blocks"].append(0), "num_common_prefix_blocks"),
    (lambda s: s["outputs"]["r0"].update(finish_reason="stop"), "outputs.r0.finish_reason"),
    (lambda s: s["outputs"].clear(), "outputs.r0"),
])
def test_a_spoiled_field_is_reported_with_its_step_and_name(spoil, field):
    document = recording("abort_preempted")
    step = next(s for s in document["steps"] if s["preempted"])
    spoil(step)
    outcome = replay(document)
    assert (outcome.first_difference["step"], outcome.first_difference["field"]) == (step["step"], field)


def test_an_extra_step_is_reported():
    document = recording("single_request")
    extra = copy.deepcopy(document["steps"][1])
    extra["step"] = len(document["steps"])
    document["steps"].append(extra)
    assert replay(document).first_difference["step"] == extra["step"]


def test_a_step_that_lacks_a_field_is_refused_and_not_passed_over():
    document = recording("single_request")
    del document["steps"][2]["after_update"]
    with pytest.raises(UserError, match="step 2 lacks after_update, so it could not be compared"):
        replay_scheduler(document, "one.json")


def test_a_left_out_step_is_reported():
    document = recording("preempt_newest")
    del document["steps"][3]
    assert replay(document).first_difference["step"] == 4


def test_a_step_with_an_endless_number_is_reported():
    document = recording("preempt_newest")
    document["steps"][3]["step"] = 2**63
    first = replay(document).first_difference
    assert (first["step"], first["field"], first["got"]) == (2**63, "step", 3)


def test_a_refused_reset_recorded_as_done_is_reported():
    document = recording("reset_prefix_cache")
    step = next(s for s in document["steps"] if s.get("reset_results") == [False])
    step["reset_results"] = [True]
    first = replay(document).first_difference
    assert (first["step"], first["field"]) == (step["step"], "reset_results[0]")


def test_spoiled_cache_statistics_are_reported_after_the_last_step():
    document = recording("prefix_hit_after_finish")
    document["prefix_cache_stats"]["hits"] += 4
    first = replay(document).first_difference
    assert (first["step"], first["field"]) == (None, "prefix_cache_stats.hits")


@pytest.mark.parametrize("name", ["preempt_newest", "hybrid_prefix_hit", "abort_two_at_once"])
def test_every_single_recorded_value_is_compared(name):
    """Spoil one value after the other; each is found in its own step, under its own name."""
    whole = recordings_in("handmade")[name]
    for i, step in enumerate(whole["steps"]):
        for path in paths_of_values(step):
            if path == ("step",):
                continue
            document = {**whole, "steps": [*whole["steps"]]}
            document["steps"][i] = copy.deepcopy(step)
            spoil(document["steps"][i], path)
            first = replay(document).first_difference
            assert first is not None and first["step"] == i, path
            assert first["field"].startswith(path[0]), (path, first)


def paths_of_values(value, path=()):
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    children = list(children)
    if not children:
        yield path
    for key, child in children:
        yield from paths_of_values(child, (*path, key))


def spoil(step, path):
    *parents, last = path
    for key in parents:
        step = step[key]
    value = step[last]
    if isinstance(value, bool):
        step[last] = not value
    elif isinstance(value, int):
        step[last] = value + 1
    elif isinstance(value, str):
        step[last] = value + "x"
    elif isinstance(value, list):
        value.append(0)
    elif isinstance(value, dict):
        value["r99"] = 1
    else:
        step[last] = 0  # null


# ------------------------------------------------------------------ a changed rule is noticed


def _first_victim(self, running, needing):
    return running[0]


def _requeue_at_back(self, waiting, victim):
    waiting.add(victim)


def _no_last_token_cap(pool, groups, request, max_length):
    return find_longest_cache_hit(pool, groups, request, max_length + 1)


_num_blocks_needed = KVCacheGroup.num_blocks_needed
_append_n = FreeKVCacheBlockQueue.append_n


def _free_hits_cost_nothing(self, request_id, num_tokens, hit_blocks):
    return 0, _num_blocks_needed(self, request_id, num_tokens, hit_blocks)[1]


def _free_from_the_start(self, request_id, why):
    table = self.tables.pop(request_id, [])
    self.num_cached_blocks.pop(request_id, None)
    self.pool.free_blocks(list(enumerate(table)), request_id, self.group_id, why)


def _last_free_block_first(self, n):
    taken = list(self)[-n:] if n else []
    for block in taken:
        self.remove(block)
    return taken


def _never_freed_from_the_window(self, request_id, num_computed_tokens):
    pass


def _admit_after_preemption(self, step):
    _schedule_running(self, step)
    if step.preempted:
        self._schedule_waiting(step)


_schedule_running = Scheduler._schedule_running


@pytest.mark.parametrize("owner, method, changed, found_by", [
    (FirstComeFirstServed, "victim", _first_victim, "preempt_newest"),
    (FirstComeFirstServed, "requeue", _requeue_at_back, "preempted_goes_to_front"),
    (Priority, "victim", _first_victim, "priority_preempts_lowest"),
    (kv_manager, "find_longest_cache_hit", _no_last_token_cap, "prompt_fully_cached"),
    (KVCacheGroup, "num_blocks_needed", _free_hits_cost_nothing, "free_hits_count_as_needed"),
    (KVCacheGroup, "free", _free_from_the_start, "eviction_order"),
    (FreeKVCacheBlockQueue, "popleft_n", _last_free_block_first, "single_request"),
    (KVCacheGroup, "free_skipped_blocks", _never_freed_from_the_window, "sliding_window_decode"),
    (Scheduler, "_schedule_running", _admit_after_preemption, "no_admission_after_preemption"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_scheduler_with_a_changed_rule_is_found_out(monkeypatch, owner, method, changed, found_by):
    monkeypatch.setattr(owner, method, changed)
    documents = recordings_in("handmade").values()
    found = {}
    for document in documents:
        try:
            found |= names_of_differences([document])
        except ValueError:  # the changed rule took a block that is not there
            found[document["name"]] = None
    assert found_by in found


def test_the_report_is_readable_and_says_why_we_decided_so(monkeypatch):
    monkeypatch.setattr(FirstComeFirstServed, "victim", _first_victim)
    outcome = replay(recording("preempt_newest"))
    report = outcome.report.splitlines()
    assert report[0] == f"preempt_newest: {recording('preempt_newest')['about']}"
    step = outcome.first_difference["step"]
    assert report[1].split() == ["step", str(step)]
    assert report[2].split() == ["field", outcome.first_difference["field"]]
    assert report[3].split(maxsplit=1) == ["expected", repr(outcome.first_difference["expected"])]
    assert report[4].split(maxsplit=1) == ["got", repr(outcome.first_difference["got"])]
    assert any(line.startswith("    request_preempted: ") and "on_behalf_of" in line for line in report[5:])
    assert any(line.startswith("    slots_refused: ") and "num_needed" in line for line in report[5:])


# ------------------------------------------------------------------ the command


def run_cli(monkeypatch, capsys, *arguments):
    from pagedlab.cli import main

    monkeypatch.setattr(sys, "argv", ["pagedlab", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    printed = capsys.readouterr()
    return exit_.value.code, printed.out, printed.err


def write(path, *documents):
    path.write_text("".join(json.dumps(d) + "\n" for d in documents))
    return path


def test_the_command_replays_the_folder_and_exits_0(monkeypatch, capsys):
    status, out, err = run_cli(monkeypatch, capsys, "conformance", DATA)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert sum(line.startswith("ok ") for line in lines) == 431
    assert f"ignored {DATA / 'README.md'}" in lines
    assert lines[-1] == "431 replayed (431 scheduler): 431 ok, 0 with a difference; 1 other file ignored."
    assert any(line.startswith("ok   single_request  ") and line.endswith(".") for line in lines)


def test_a_difference_exits_1_and_prints_its_report(monkeypatch, capsys, tmp_path):
    bad = recording("single_request")
    bad["steps"][1]["total_num_scheduled_tokens"] = 5
    file = write(tmp_path / "two.jsonl", bad, recording("preempt_newest"))
    status, out, _ = run_cli(monkeypatch, capsys, "conformance", file)
    assert status == 1
    assert "DIFF single_request" in out and "ok   preempt_newest" in out
    assert "total_num_scheduled_tokens" in out and "request_considered: " in out
    assert out.splitlines()[-1].startswith("2 replayed (2 scheduler): 1 ok, 1 with a difference")


def test_json_has_the_shape_of_the_contract(monkeypatch, capsys, tmp_path):
    bad = recording("single_request")
    bad["steps"][1]["total_num_scheduled_tokens"] = 5
    file = write(tmp_path / "two.jsonl", bad, recording("preempt_newest"))
    (tmp_path / "notes.txt").write_text("nothing")
    status, out, _ = run_cli(monkeypatch, capsys, "conformance", "--json", tmp_path)
    answer = json.loads(out)
    assert status == 1
    assert (answer["passed"], answer["failed"], answer["ignored"]) == (1, 1, 1)
    difference = {"step": 1, "field": "total_num_scheduled_tokens", "expected": 5, "got": 1}
    assert answer["scenarios"] == [
        {"name": "single_request", "path": f"{file}:1", "kind": "scheduler", "mode": "strict", "ok": False,
         "first_difference": difference},
        {"name": "preempt_newest", "path": f"{file}:2", "kind": "scheduler", "mode": "strict", "ok": True,
         "first_difference": None},
    ]


def test_files_folders_and_compressed_files_are_all_taken(monkeypatch, capsys, tmp_path):
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    one, two = recording("single_request"), recording("preempt_newest")
    (tmp_path / "deep" / "one.json").write_text(json.dumps(one, indent=1))
    with gzip.open(tmp_path / "deep" / "deeper" / "two.json.gz", "wt") as file:
        json.dump(two, file)
    with gzip.open(tmp_path / "both.jsonl.gz", "wt") as file:
        file.write(json.dumps(one) + "\n\n" + json.dumps(two) + "\n")
    paths = tmp_path / "deep", tmp_path / "both.jsonl.gz"
    status, out, _ = run_cli(monkeypatch, capsys, "conformance", "--json", *paths)
    assert status == 0
    assert sorted(s["name"] for s in json.loads(out)["scenarios"]) == 2 * ["preempt_newest"] + 2 * ["single_request"]


def test_other_files_in_a_folder_are_counted_as_ignored_by_name(monkeypatch, capsys, tmp_path):
    write(tmp_path / "a.json", recording("single_request"))
    (tmp_path / "coverage.json").write_text("{}")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "check.py").write_text("")
    status, out, _ = run_cli(monkeypatch, capsys, "conformance", tmp_path)
    assert status == 0
    for name in ("coverage.json", "list.json", "check.py"):
        assert f"ignored {tmp_path / name}" in out.splitlines()
    assert "3 other files ignored" in out


def test_a_link_that_leads_back_up_is_not_followed(monkeypatch, capsys, tmp_path):
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "one.json", recording("single_request"))
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    status, out, _ = run_cli(monkeypatch, capsys, "conformance", tmp_path)
    assert status == 0 and f"ignored {tmp_path / 'a' / 'up'}" in out.splitlines()
    assert out.startswith("ok ") and "1 replayed" in out.splitlines()[-1]


def test_what_cannot_be_replayed_is_named_and_the_rest_is_replayed(monkeypatch, capsys, tmp_path):
    malformed, differing = recording("single_request"), recording("single_request")
    del malformed["steps"][1]["outputs"]
    differing["steps"][1]["total_num_scheduled_tokens"] = 5
    write(tmp_path / "a.json", malformed)
    _text(tmp_path / "b.json", '{"format": "pagedlab-confor')
    _cut_gzip(tmp_path / "c.jsonl.gz")
    first, last = json.dumps(recording("preempt_newest")), json.dumps(recording("single_request"))
    _text(tmp_path / "d.jsonl", f"{first}\n{{\n{last}\n")
    status, out, err = run_cli(monkeypatch, capsys, "conformance", tmp_path)
    assert status == 2
    assert [line.split()[1] for line in out.splitlines() if line.startswith("ok ")] == [
        "preempt_newest", "single_request",
    ]  # fmt: skip
    for name in ("a.json", "b.json", "c.jsonl.gz", "d.jsonl:2"):
        assert any(line.startswith("BAD ") and str(tmp_path / name) in line for line in out.splitlines()), name
    assert "2 ok, 0 with a difference; 4 could not be replayed; 0 other files ignored." in out.splitlines()[-1]
    assert err.count("\n") == 1 and "step 1 lacks outputs" in err
    assert err.endswith("3 others cannot be replayed either.\n")

    write(tmp_path / "e.json", differing)  # a difference is still told, the status stays
    status, out, _ = run_cli(monkeypatch, capsys, "conformance", "--json", tmp_path)
    found = json.loads(out)
    assert (status, found["passed"], found["failed"], len(found["unreadable"])) == (2, 2, 1, 4)
    assert found["unreadable"][1]["path"] == str(tmp_path / "b.json")


def test_a_malformed_case_of_kv_initialization_does_not_end_the_others(monkeypatch, capsys, tmp_path):
    with gzip.open(DATA.parent / "kv_init.json.gz", "rt") as file:
        document = json.load(file)
    document["cases"][3]["input"].pop("available_bytes")
    write(tmp_path / "kv_init.json", document)
    status, out, err = run_cli(monkeypatch, capsys, "conformance", tmp_path)
    assert status == 2 and "29 ok, 0 with a difference; 1 could not be replayed" in out
    assert document["cases"][3]["name"] in err and "available_bytes" in err


@pytest.mark.parametrize("spoil", [
    lambda document: document["cases"][0].pop("block_table"),
    lambda document: document["cases"][0].update(block_size=0),
    lambda document: document["cases"][0].update(block_table=[[10**12]] * 3),
    lambda document: document["cases"][0].update(num_computed_tokens=[0, 10**12, 0]),
    lambda document: document["cases"].insert(1, "no case"),
    lambda document: document.update(row_operations=None),
    lambda document: document["row_operations"]["log"][0].update(after="burn row 3"),
])
def test_a_damaged_worked_example_is_named_and_the_others_are_replayed(monkeypatch, capsys, tmp_path, spoil):
    with gzip.open(DATA.parent / "worker" / "worked_examples" / "flat_indices.json.gz", "rt") as file:
        document = json.load(file)
    spoil(document)
    path = write(tmp_path / "example.json", document)
    status, out, err = run_cli(monkeypatch, capsys, "conformance", "--json", path)
    found = json.loads(out)
    others = len(document["cases"])  # of them and of the row operations one is damaged
    assert (status, found["passed"], found["failed"], len(found["unreadable"])) == (2, others, 0, 1)
    assert found["unreadable"][0]["path"] == str(path) and "worked example" in err and err.count("\n") == 1


@pytest.mark.parametrize("spoil, word", [
    (lambda run: run["requests"][0].pop("max_tokens"), "KeyError: 'max_tokens'"),
    (lambda run: run.update(checkpoint=7), "TypeError"),
    (lambda run: run["config"].pop("max_model_len"), "no max_model_len"),
    (lambda run: run["steps"][1].pop("row_changes"), "row_changes"),
    (lambda run: run["steps"][1].update(row_changes=None), "TypeError"),
])
def test_a_run_that_cannot_be_read_is_no_difference(monkeypatch, capsys, tmp_path, spoil, word):
    with gzip.open(DATA.parent / "worker" / "index_maps.jsonl.gz", "rt") as file:
        document = json.loads(file.readline())
    spoil(document)
    path = write(tmp_path / "run.json", document)
    status, out, err = run_cli(
        monkeypatch, capsys, "conformance", path, "--checkpoints", DATA.parent.parent / "checkpoints"
    )
    assert status == 2 and "DIFF" not in out
    assert str(path) in err and word in err and err.count("\n") == 1


def test_a_recording_whose_checkpoint_is_missing_is_replayed_from_its_messages(monkeypatch, capsys, tmp_path):
    with gzip.open(DATA.parent / "worker" / "index_maps.jsonl.gz", "rt") as file:
        document = json.loads(file.readline())
    document["checkpoint"] = "nowhere"
    write(tmp_path / "run.json", document)
    status, out, err = run_cli(monkeypatch, capsys, "conformance", tmp_path)
    assert status == 2 and out.startswith(f"ok   {document['name']} (lenient)")
    assert "checkpoint nowhere was not found" in err and "run.json" in err


def test_terminal_sequences_in_a_recording_stay_visible_text(monkeypatch, capsys, tmp_path):
    hostile = recording("single_request")
    hostile["about"] = "clear\x1b[2J"
    status, out, _ = run_cli(monkeypatch, capsys, "conformance", write(tmp_path / "a.json", hostile))
    assert status == 0 and "\x1b" not in out and "␛[2J" in out


@pytest.mark.parametrize("make, complaint", [
    (lambda folder: folder, "found no recording in"),
    (lambda folder: folder / "missing.json", "does not exist"),
    (lambda folder: write(folder / "other.json", {"format": "something else"}), "found no recording in"),
    (lambda folder: _binary(folder / "noise.json"), "cannot be read"),
    (lambda folder: _binary(folder / "noise.jsonl.gz"), "cannot be read"),
    (lambda folder: _text(folder / "cut.json", '{"format": "pagedlab-confor'), "is not valid JSON"),
    (lambda folder: _cut_gzip(folder / "cut.jsonl.gz"), "cannot be read"),
], ids=["empty folder", "missing", "no recording", "binary", "not gzip", "cut JSON", "cut gzip"])
def test_bad_input_is_one_sentence_and_exit_2(monkeypatch, capsys, tmp_path, make, complaint):
    status, out, err = run_cli(monkeypatch, capsys, "conformance", make(tmp_path))
    assert (status, out) == (2, "")
    assert err.startswith("pagedlab: ") and complaint in err and err.count("\n") == 1


def _binary(path):
    path.write_bytes(bytes(range(128, 256)))
    return path


def _text(path, text):
    path.write_text(text)
    return path


def _cut_gzip(path):
    path.write_bytes(gzip.compress(json.dumps(recordings_in("handmade")["single_request"]).encode())[:-20])
    return path


@pytest.mark.parametrize("spoil", [
    lambda d: d.pop("config"),
    lambda d: d.update(config=[]),
    lambda d: d["config"].pop("block_size"),
    lambda d: d["config"].pop("num_blocks"),
    lambda d: d["config"].update(num_blocks="many"),
    lambda d: d["config"].update(groups=[{}]),
    lambda d: d["config"].update(groups=7),
    lambda d: d.update(requests={"r0": {}}),
    lambda d: d.update(requests={"r0": 3}),
    lambda d: d["requests"]["r0"].update(prompt_token_ids="text"),
    lambda d: d.update(script=[{}]),
    lambda d: d.update(script=[{"before_step": 0, "add": ["nobody"]}]),
    lambda d: d.update(script=[7]),
    lambda d: d.update(steps=[{}]),
    lambda d: d.update(steps=[7]),
    lambda d: d["requests"]["r0"].update(sampled_token_ids=[]),
])
def test_a_document_that_is_no_proper_recording_is_one_sentence(spoil):
    document = recording("single_request")
    spoil(document)
    with pytest.raises(UserError) as error:
        replay(document)
    assert "single_request" in str(error.value) or "request r0" in str(error.value)


def test_scheduler_recordings_are_replayed_without_importing_torch():
    script = (
        "import sys; from pagedlab.cli import main\n"
        f"sys.argv = ['pagedlab', 'conformance', '--json', {str(DATA / 'handmade.jsonl.gz')!r}]\n"
        "try:\n    main()\nfinally:\n"
        "    heavy = {'torch', 'triton', 'transformers'} & set(sys.modules)\n"
        "    print(sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert json.loads(done.stdout)["passed"] == 77


def test_an_engine_that_raises_is_a_difference_and_not_the_end(monkeypatch, capsys):
    monkeypatch.setattr(KVCacheGroup, "free", lambda self, request_id, why: 1 // 0)
    status, out, _ = run_cli(monkeypatch, capsys, "conformance", DATA / "handmade.jsonl.gz", "--json")
    found = json.loads(out)
    ended = [s for s in found["scenarios"] if not s["ok"]]
    assert status == 1 and len(found["scenarios"]) == 77
    assert len(ended) == found["failed"] >= 75  # all in which anything ends or is preempted
    assert {(s["mode"], s["first_difference"]["field"]) for s in ended} == {("strict", "exception")}
    assert all("ZeroDivisionError" in s["first_difference"]["got"] for s in ended)
