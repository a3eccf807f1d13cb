"""Integer for integer: the recordings of the real vLLM 0.14.1 worker, and proof that they bite."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from pagedlab.conformance import checkpoint
from pagedlab.conformance.checkpoint import WAYS, replay_checkpoint
from pagedlab.conformance.single_engine import build_engine, one_thread, run_config
from pagedlab.conformance.worked_examples import replay_worked_example
from pagedlab.conformance.worker import _comparable, find_checkpoint, lenient_steps, make_request, replay_run
from pagedlab.errors import UserError
from pagedlab.request import RequestStatus
from pagedlab.worker.persistent_batch import PersistentBatch

DATA = Path(__file__).parent / "data"
CHECKPOINTS = DATA / "checkpoints"
WORKER = DATA / "conformance" / "worker"


@cache
def all_runs():
    with gzip.open(WORKER / "index_maps.jsonl.gz", "rt") as lines:
        return {document["name"]: document for document in map(json.loads, lines)}


NAMES = sorted(all_runs())


def run(name):
    """A copy that may be spoiled."""
    return copy.deepcopy(all_runs()[name])


def worked_example(name):
    return json.loads(gzip.open(WORKER / "worked_examples" / f"{name}.json.gz").read())


def first_difference(document, mode):
    (outcome,) = replay_run(document, document["name"], [CHECKPOINTS], mode)
    return outcome.first_difference


# ------------------------------------------------------------------ no difference


def test_there_are_25_runs_that_show_every_kind_of_row_change():
    steps = [step for document in all_runs().values() for step in document["steps"]]
    assert len(NAMES) == 25 and len(steps) == 741
    assert {entry["why"] for s in steps for entry in s["row_changes"]["removed"]} == {"finished", "not scheduled"}
    assert any(s["row_changes"]["moved"] for s in steps) and any(s["inputs"] is None for s in steps)


@pytest.mark.parametrize("name", NAMES)
def test_whole_engine_gives_the_recorded_messages_rows_slots_and_tokens(name):
    assert first_difference(run(name), "strict") is None


@pytest.mark.parametrize("name", NAMES)
def test_recorded_messages_give_the_recorded_rows_and_slots(name):
    assert first_difference(run(name), "lenient") is None


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_slot_mapping_kernel_gives_the_recorded_slots(name):
    pytest.importorskip("triton")
    document = run(name)
    for expected, got in zip(document["steps"], lenient_steps(document, "interpreted"), strict=True):
        assert _comparable(expected, got) == got


@pytest.mark.parametrize("name", ["flat_indices", "state_rows"])
def test_worked_examples_come_out_of_the_runners_with_every_intermediate_list(name):
    outcomes = replay_worked_example(worked_example(name), name)
    assert len(outcomes) >= 6
    assert {outcome.name: outcome.report for outcome in outcomes if not outcome.ok} == {}


@pytest.mark.parametrize("name", ["dense-tied-a", "dense-untied-a", "moe-a"])
def test_checkpoint_gives_the_recorded_tokens_and_logits_alone_batched_and_in_a_tight_pool(name):
    outcomes = replay_checkpoint(CHECKPOINTS / name)
    assert [outcome.name for outcome in outcomes] == [f"{name}/{way}" for way in (*WAYS, "spelling")]
    assert {outcome.name: outcome.report for outcome in outcomes if not outcome.ok} == {}


@pytest.mark.parametrize("name", NAMES)
def test_state_table_runner_gives_the_recorded_tokens_and_every_token_its_recorded_slot(name):
    """The newer design has other rows and another order, but the same tokens in the same slots."""
    document = run(name)
    config = dataclasses.replace(run_config(document), runner="state-table")
    scheduler, worker = build_engine(CHECKPOINTS / document["checkpoint"] / "checkpoint", config)
    batches = keep_batches(worker.runner)
    tokens = {entry["req_id"]: [] for entry in document["requests"]}
    with one_thread():
        for step in document["steps"]:
            for i, entry in enumerate(document["requests"]):
                if entry["arrive_before_step"] == step["step"]:
                    scheduler.add_request(make_request(entry, float(i), document["config"]))
            aborted = [entry["req_id"] for entry in document["aborts"] if entry["before_step"] == step["step"]]
            scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
            message = scheduler.schedule()
            for output in scheduler.update_from_output(message, worker.execute_model(message)):
                tokens[output.request_id] += output.new_token_ids
            if step["inputs"] is not None:
                assert slots_of(batches.pop()) == recorded_slots(step)
    assert tokens == {entry["req_id"]: entry["token_ids"] for entry in document["outputs"]}


def keep_batches(runner):
    """Every InputBatch that the runner prepares."""
    batches, prepare = [], runner._prepare_inputs
    runner._prepare_inputs = lambda message: batches.append(prepare(message)) or batches[-1]
    return batches


def slots_of(batch):
    places = zip(batch.req_indices.tolist(), batch.positions.tolist(), strict=True)
    keys = [(batch.req_ids[row], position) for row, position in places]
    return dict(zip(keys, batch.slot_mappings[0].tolist(), strict=True))


def recorded_slots(step):
    ids, inputs = step["rows"]["req_ids"], step["inputs"]
    keys = [(ids[row], p) for row, p in zip(inputs["req_indices"], inputs["positions"], strict=True)]
    return dict(zip(keys, inputs["slot_mapping"], strict=True))


# ------------------------------------------------------------------ a spoiled recording, or engine, is noticed


@pytest.mark.parametrize("spoil, field", [
    (lambda s: s["inputs"]["slot_mapping"].__setitem__(-1, 5), "inputs.slot_mapping[{last}]"),
    (lambda s: s["inputs"]["block_table_indices"].__setitem__(0, 99), "inputs.block_table_indices[0]"),
    (lambda s: s["inputs"]["positions"].__setitem__(0, 99), "inputs.positions[0]"),
    (lambda s: s["inputs"]["sample_is_discarded"].__setitem__(0, True), "inputs.sample_is_discarded[0]"),
    (lambda s: s["rows"]["num_known_tokens"].__setitem__(0, 1), "rows.num_known_tokens[0]"),
    (lambda s: s["rows"]["block_table"][0].append(3), "rows.block_table[0]"),
    (lambda s: s["row_changes"]["moved"].append({"req_id": "f", "from_row": 1, "to_row": 0}), "row_changes.moved"),
])
@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_spoiled_field_is_reported_with_step_and_name(spoil, field, mode):
    document = run("s04-condense-moves")
    spoil(document["steps"][4])
    last = len(document["steps"][4]["inputs"]["slot_mapping"]) - 1
    difference = first_difference(document, mode)
    assert (difference["step"], difference["field"]) == (4, field.format(last=last))


def test_spoiled_output_token_is_reported_at_the_step_that_samples_it():
    document = run("s01-solo")
    document["steps"][3]["sampled_token_ids"][0][0] += 1
    difference = first_difference(document, "strict")
    assert (difference["step"], difference["field"]) == (3, "sampled_token_ids[0][0]")


def test_recordings_notice_holes_that_are_closed_from_the_front(monkeypatch):
    def shift_down(batch):
        moves = []
        while None in batch.req_ids:
            hole = batch.req_ids.index(None)
            del batch.req_ids[hole]
            for row in range(hole, len(batch.req_ids)):
                batch.req_id_to_index[batch.req_ids[row]] = row
        return moves

    monkeypatch.setattr(PersistentBatch, "condense", shift_down)
    assert first_difference(run("s04-condense-moves"), "lenient")["field"].startswith("row_changes.moved")


def test_recordings_notice_a_sample_of_an_unfinished_prompt_that_is_kept():
    document = run("s03-chunked-mixed")
    step = next(s for s in document["steps"] if s["inputs"] and any(s["inputs"]["sample_is_discarded"]))
    row = step["inputs"]["sample_is_discarded"].index(True)
    step["sampled_token_ids"][row] = [7]
    assert first_difference(document, "lenient")["field"].startswith("rows.num_known_tokens")


def test_checkpoint_whose_logits_are_off_by_two_thousandths_differs(monkeypatch):
    recorded = checkpoint.load_file
    monkeypatch.setattr(checkpoint, "load_file", lambda f: {k: v + 2e-3 for k, v in recorded(f).items()})
    monkeypatch.setattr(checkpoint, "WAYS", {"batched": WAYS["batched"]})
    outcome, _ = replay_checkpoint(CHECKPOINTS / "dense-tied-a")
    assert not outcome.ok and "last_prompt_logits" in outcome.first_difference["field"]


def test_spoiled_worked_example_is_reported():
    document = worked_example("state_rows")
    document["cases"][0]["slot_mapping"][0] = 208
    first, *others = replay_worked_example(document, "state_rows")
    assert first.first_difference == {"step": None, "field": "slot_mapping[0]", "expected": 208, "got": 207}
    assert all(outcome.ok for outcome in others)


def test_missing_checkpoint_is_one_sentence_that_names_the_flag():
    with pytest.raises(UserError, match=r"checkpoint dense-tied-a was not found .*--checkpoints DIR"):
        find_checkpoint("dense-tied-a", [DATA])


def test_recording_that_lacks_a_part_is_one_sentence(tmp_path):
    document = run("s01-solo")
    del document["outputs"]
    with pytest.raises(UserError, match=r"s01-solo has no outputs: a recorded run has name, "):
        replay_run(document, "s01-solo", [CHECKPOINTS], "lenient")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "expected.json").write_text('{"cases": [{"name": "a"}]}')
    with pytest.raises(UserError, match="has no cases with "):
        replay_checkpoint(tmp_path)


@pytest.mark.parametrize("spoiled, words", [
    ({"prompt_token_ids": []}, "has no cases with proper"),
    ({"prompt_token_ids": [1, -1]}, "has no cases with proper"),
    ({"prompt_token_ids": "text"}, "has no cases with proper"),
    ({"max_new_tokens": 0}, "has no cases with proper"),
    ({"name": None}, "has no cases with proper"),
    ({"prompt_token_ids": [10**9]}, "beyond the model's vocabulary or length"),
    ({"max_new_tokens": 10**9}, "beyond the model's vocabulary or length"),
])
def test_expected_tokens_that_no_run_could_give_are_one_sentence(tmp_path, spoiled, words):
    (tmp_path / "checkpoint").symlink_to(CHECKPOINTS / "dense-tied-a" / "checkpoint")
    cases = json.loads((CHECKPOINTS / "dense-tied-a" / "expected.json").read_text())["cases"]
    (tmp_path / "expected.json").write_text(json.dumps({"cases": [cases[0] | spoiled]}))
    with pytest.raises(UserError, match=words):
        replay_checkpoint(tmp_path)
