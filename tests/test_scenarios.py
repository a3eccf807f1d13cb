"""Scenarios: the format's mistakes, the player, and each built-in story."""

import copy
import json

import pytest

import pagedlab.scenarios.scenario as scenario_module
from pagedlab.errors import UserError
from pagedlab.scenarios.check import check_document
from pagedlab.scenarios.library import builtin_names, list_scenarios, load_scenario
from pagedlab.scenarios.run import run
from pagedlab.scenarios.scenario import Scenario
from pagedlab.trace.events import CONSIDERED_REASONS, KINDS, NOT_REACHED_REASONS, PREFIX_STOPS
from pagedlab.trace.tracer import trace

GOOD = {
    "format": "pagedlab-scenario/1",
    "name": "good",
    "about": "One request.",
    "config": {"block_size": 4, "num_blocks": 8, "max_model_len": 32},
    "requests": {"r0": {"prompt_token_ids": [1, 2, 3], "max_tokens": 2, "sampled_token_ids": [7, 8]}},
    "script": [{"before_step": 0, "add": ["r0"]}],
}
ON_MODEL = {"format": "pagedlab-scenario/1", "config": {}, "requests": {"r0": {"prompt": "Emma"}}}


def events_of(name: str) -> list:
    events: list = []
    trace.start(events, record="kernels")
    try:
        run(load_scenario(name))
    finally:
        trace.stop()
    return events


def of_kind(events: list, kind: str) -> list:
    return [e for e in events if e.kind == kind]


def changed(path: list, value: object) -> dict:
    document = copy.deepcopy(GOOD)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


# ------------------------------------------------------------------ the format


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([], "one JSON object"),
        (changed(["format"], "other/1"), "format 'other/1'"),
        (changed(["config"], []), "no config"),
        (changed(["requests"], {}), "no request"),
        (changed(["script"], {}), "no script"),
        (changed(["name"], 3), "name must be text"),
        (changed(["speed"], 3), "unknown field 'speed'"),
        (changed(["config", "blocks"], 3), "config has an unknown field 'blocks'"),
        (changed(["config", "num_blocks"], 1), "num_blocks is 1"),
        (changed(["config", "num_blocks"], None), "config has no num_blocks"),
        (changed(["requests", "r0", "sampled_token_ids", 0], 10**30), "r0: sampled_token_ids must be a list of whole"),
        (changed(["requests", "r0", "priority"], -(10**30)), "r0: priority must be a whole number"),
        (changed(["requests", "r0", "arrival_time"], 10**30), "r0: arrival_time must be a number"),
        (changed(["requests", "r0", "cache_salt"], "\ud800"), "r0: cache_salt must be text or null"),
        (changed(["script", 0, "add", 0], {"a": 1}), "names request {'a': 1}, which is not"),
        (changed(["config", "block_size"], 0), "block_size is 0"),
        (changed(["config", "enable_prefix_caching"], 1), "enable_prefix_caching must be true or false"),
        (changed(["config", "groups"], []), "groups must be a list"),
        (changed(["config", "groups"], [{"kind": "full", "block_size": 6}]), "multiple of the block_size 4"),
        (changed(["config", "groups"], [{"kind": "full", "block_size": 4, "layers": 3}]), "layers 3: give a list"),
        (changed(["config", "groups"], [{"kind": "full", "block_size": 4, "layers": [3]}]), "layers [3]: give a list"),
        (changed(["config", "groups"], [{"kind": "cross", "block_size": 4}]), "kind 'cross'"),
        (changed(["config", "groups"], [{"kind": "sliding_window", "block_size": 4}]), "sliding_window None"),
        (changed(["config", "groups"], [{"kind": "full", "block_size": 4, "sliding_window": 8}]), "leave the window"),
        (changed(["requests", "r0"], "Emma"), "request r0 must be a JSON object"),
        (changed(["requests", "r0"], {"sampled_token_ids": [1]}), "request r0 has no prompt"),
        (changed(["requests", "r0"], {"prompt": "a", "sampled_token_ids": [1]}), "give prompt_token_ids as well"),
        (changed(["requests", "r0", "prompt_token_ids"], [1, -1]), "list of whole numbers"),
        (changed(["requests", "r0", "prompt"], 5), "prompt must be text"),
        (changed(["requests", "r0", "priority"], "high"), "priority must be a whole number"),
        (changed(["requests", "r0", "ignore_eos"], 1), "ignore_eos must be true or false"),
        (changed(["requests", "r0", "max_tokens"], 0), "request r0: max_tokens is 0"),
        (changed(["requests", "r0", "sampling"], {"heat": 1}), "sampling has an unknown field 'heat'"),
        (changed(["requests", "r0", "sampling"], {"temperature": -1}), "temperature is -1"),
        (changed(["requests", "r1"], {"prompt_token_ids": [1]}), "request r1 has no sampled_token_ids"),
        (changed(["script", 0], []), "script entry 0 must be a JSON object"),
        (changed(["script", 0, "before_step"], -1), "before_step -1"),
        (changed(["script", 0, "abort"], ["r0"]), "has 2 actions"),
        (changed(["script", 0, "add"], []), "add must be a list of request ids"),
        (changed(["script", 0, "add"], ["r9"]), "request 'r9', which is not among the requests"),
        (changed(["script"], [{"before_step": 2, "add": ["r0"]}, {"before_step": 1, "add": ["r0"]}]), "order them"),
        (changed(["script"], [{"before_step": 10**9, "add": ["r0"]}]), "entry 0 comes before step 1,000,000,000"),
        (changed(["script"], [{"before_step": 1, "add": ["r0"]}, {"before_step": 10_002, "abort": ["r0"]}]),
         "entry 1 comes before step 10,002, 10,001 steps after step 1, where"),
        (changed(["script"], [{"before_step": 2, "abort": ["r0"]}]), "adds no request"),
        (changed(["script"], [{"before_step": 0, "reset_prefix_cache": False}]), "must be true"),
        ({**ON_MODEL, "config": {"groups": [{"kind": "full", "block_size": 4}]}}, "the model decides them"),
        ({**GOOD, "config": {"block_size": 4}}, "no num_blocks"),
    ],
)  # fmt: skip
def test_each_mistake_has_one_sentence_with_its_place(document, says):
    with pytest.raises(UserError) as caught:
        Scenario.from_document(document, "mine.json")
    message = str(caught.value)
    assert says in message and message.startswith("mine.json") and message.endswith(".") and "\n" not in message


def test_a_pause_of_ten_thousand_steps_is_allowed_and_in_a_recording_as_many_as_it_has():
    script = [{"before_step": 10_000, "add": ["r0"]}, {"before_step": 20_000, "abort": ["r0"]}]
    assert Scenario.from_document(changed(["script"], script), "mine.json").last_scripted_step == 20_000
    recording = {**changed(["script"], [{"before_step": 30_000, "add": ["r0"]}]), "steps": [{}] * 30_000}
    check_document(recording, "recorded.json")
    with pytest.raises(UserError, match="leave at most 29,999 steps between"):
        check_document({**recording, "steps": [{}] * 29_999}, "recorded.json")


def test_a_scenario_without_a_script_adds_everything_before_step_0():
    scenario = Scenario.from_document({k: v for k, v in GOOD.items() if k != "script"}, "mine.json")
    assert scenario.actions_before(0) == [("add", "r0")]
    assert run(scenario).token_ids == {"r0": [7, 8]}


def test_the_example_in_the_format_s_description_runs():
    text = scenario_module.__doc__
    example = json.loads(text[text.index("    {\n") : text.index("    }\n\n") + 6])
    assert run(Scenario.from_document(example, "example")).token_ids == {"r0": [7, 8], "r1": [9]}


def test_a_scenario_with_text_needs_a_model_and_says_so_when_run_without():
    scenario = Scenario.from_document(ON_MODEL, "mine.json")
    assert scenario.needs_model and scenario.sampling_params("r0").temperature == 0
    with pytest.raises(UserError, match="needs a model"):
        run(scenario)


def test_a_file_that_is_not_json_or_not_there_is_one_sentence(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_scenario(broken)
    with pytest.raises(UserError, match="no scenario file"):
        load_scenario(tmp_path / "missing.json")
    with pytest.raises(UserError, match="choose abort, "):
        load_scenario("twinz")


def test_a_file_is_read_like_a_built_in_scenario(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD))
    assert run(load_scenario(path)).finish_reasons == {"r0": "length"}


def test_a_script_that_is_too_short_says_how_many_tokens_are_missing():
    document = changed(["requests", "r0", "max_tokens"], 5)
    with pytest.raises(UserError, match="2 sampled_token_ids and needs one more"):
        run(Scenario.from_document(document, "mine.json"))


def test_knobs_change_a_scenario_without_touching_the_original():
    scenario = load_scenario("budget")
    changed_scenario = scenario.with_config(max_num_batched_tokens=32)
    assert run(changed_scenario).num_steps < run(scenario).num_steps
    assert scenario.config["max_num_batched_tokens"] == 12


# ------------------------------------------------------------------ the built-in stories


def test_built_in_scenarios_are_listed_with_a_sentence_each():
    scenarios = list_scenarios()
    assert len(scenarios) >= 20 and [s.name for s in scenarios] == builtin_names()
    assert all(s.about.endswith(".") and len(s.about) <= 160 for s in scenarios)
    assert {"two-five-three", "prefix-hit", "twins", "chunked-prefill", "preemption", "eviction", "priority"} <= {
        s.name for s in scenarios
    }


@pytest.mark.parametrize("name", [s.name for s in list_scenarios() if not s.needs_model])
def test_a_built_in_scenario_is_deterministic_and_the_same_untraced(name):
    first = [e for e in events_of(name) if e.kind == "step_scheduled"]
    second = [e for e in events_of(name) if e.kind == "step_scheduled"]
    assert [e.num_scheduled_tokens for e in first] == [e.num_scheduled_tokens for e in second]
    assert run(load_scenario(name)).num_steps == len(first)


def test_every_reason_a_user_can_meet_occurs_in_a_built_in_scenario():
    seen: dict[str, set[str]] = {"request_considered": set(), "queue_not_reached": set(), "prefix_matched": set()}
    for scenario in list_scenarios():
        if not scenario.needs_model:
            for event in events_of(scenario.name):
                if event.kind in seen:
                    seen[event.kind].add(event.why if event.kind == "prefix_matched" else event.reason)
    # The door refuses the prompts that would be cut at max_model_len; a miss of unknown age needs a trace that
    # begins in mid-life; prompt_logprobs needs a model.
    assert seen["request_considered"] == set(CONSIDERED_REASONS) - {"max_model_len", "no_tokens_left"}
    assert seen["queue_not_reached"] == set(NOT_REACHED_REASONS)
    assert seen["prefix_matched"] == set(PREFIX_STOPS) - {"miss", "prompt_logprobs"}


def matched(name: str) -> dict[str, tuple[int, str]]:
    """Request -> length of its (last) prefix hit and why it stopped."""
    return {e.request_id: (e.num_computed_tokens, e.why) for e in of_kind(events_of(name), "prefix_matched")}


def test_cache_salt_shares_only_under_the_same_salt():
    hits = matched("cache-salt")
    assert (hits["r1"][0], hits["r2"][0]) == (0, 8)
    (miss,) = [e for e in of_kind(events_of("cache-salt"), "prefix_matched") if e.request_id == "r1"]
    assert miss.key_differs == "cache_salt"


def test_whole_prompt_cached_computes_one_block_again_and_one_token_for_the_longer_prompt():
    hits = matched("whole-prompt-cached")
    assert hits["r1"] == (4, "last_token_must_be_computed") and hits["r2"][0] == 8


def test_window_cuts_hit_to_two_of_three_blocks():
    assert matched("window-cuts-hit")["r2"][0] == 8


def test_sliding_window_hits_all_of_the_prompt_that_it_needs():
    events = events_of("sliding-window")
    assert [e.logical_block for e in of_kind(events, "block_freed") if e.why == "out_of_window"]
    assert "window_group" in {e.why for e in of_kind(events, "prefix_matched")}


def test_hybrid_gives_back_blocks_of_the_window_group_only():
    freed = [e for e in of_kind(events_of("hybrid"), "block_freed") if e.why == "out_of_window"]
    assert freed and {e.group for e in freed} == {1}


def test_reset_is_refused_while_blocks_are_in_use_and_done_afterwards():
    assert [e.done for e in of_kind(events_of("reset"), "prefix_cache_reset")] == [False, True]
    assert matched("reset")["r1"] == (0, "reset")


def test_priority_takes_the_blocks_of_the_first_come_with_the_largest_value():
    assert of_kind(events_of("priority"), "request_preempted")[0].request_id == "r0"


def test_victim_already_scheduled_returns_its_token():
    (event,) = of_kind(events_of("victim-already-scheduled"), "request_preempted")
    assert (event.request_id, event.num_tokens_taken_back) == ("r0", 1)


def test_uncomputed_hit_resumes_with_more_tokens_than_were_computed():
    events = events_of("uncomputed-hit")
    victim = of_kind(events, "request_preempted")[0]
    computed = max(e.num_computed_tokens for e in of_kind(events, "request_considered")
                   if e.request_id == "r0" and e.seq < victim.seq)  # fmt: skip
    resumed = next(e for e in of_kind(events, "prefix_matched") if e.request_id == "r0" and e.seq > victim.seq)
    assert resumed.num_computed_tokens > computed


def test_self_preemption_is_its_own_victim():
    assert {(e.request_id, e.on_behalf_of) for e in of_kind(events_of("self-preemption"), "request_preempted")} == {
        ("r1", "r1")
    }


def test_free_hits_are_counted_as_needed():
    refusals = of_kind(events_of("free-hits"), "slots_refused")
    assert (refusals[0].needed_from_free_hits, refusals[0].needed_new, refusals[0].num_free) == ([2], [2], 3)


def test_abort_reaches_running_waiting_and_preempted_requests():
    aborted = [(e.request_id, e.queue) for e in of_kind(events_of("abort"), "request_aborted")]
    assert aborted == [("r2", "waiting"), ("r1", "waiting"), ("r0", "running")]
    assert [e.request_id for e in of_kind(events_of("abort"), "request_preempted")] == ["r1"]


def test_refused_requests_do_not_disturb_the_one_behind_them():
    result = run(load_scenario("refused"))
    assert set(result.refused) == {"r0", "r1", "r2", "r3"}  # r3 the second time: its id is in use
    assert result.finish_reasons == {"r3": "length"}


def test_hopeless_ends_with_the_numbers_and_the_next_one_runs():
    result = run(load_scenario("hopeless"))
    assert result.finish_reasons == {"r0": "error", "r1": "length"}
    assert "4 blocks" in result.errors["r0"] and "3 usable blocks" in result.errors["r0"]


def test_stop_and_length_ends_in_four_ways():
    events = of_kind(events_of("stop-and-length"), "request_finished")
    assert {e.request_id: (e.finish_reason, e.stop_reason, e.num_output_tokens) for e in events} == {
        "r0": ("length", None, 3), "r1": ("stop", None, 3), "r2": ("stop", 7, 2), "r3": ("length", None, 3),
    }  # fmt: skip


# ------------------------------------------------------------------ stories told by the embedded model


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[list, object]]:
    """Every built-in scenario with text, run once on the embedded model at the deepest level."""
    from pagedlab import LLM

    runs = {}
    for scenario in list_scenarios():
        if scenario.needs_model:
            events: list = []
            trace.start(events, record="kernels")
            try:
                runs[scenario.name] = (events, run(scenario, LLM(config=scenario.engine_config())))
            finally:
                trace.stop()
    return runs


def test_every_story_on_the_model_ends_without_refusal_or_error(told):
    for name, (_, result) in told.items():
        assert not result.refused and not result.errors, name
        assert set(result.finish_reasons) == set(load_scenario(name).requests) == set(result.texts), name


def test_two_five_three_is_one_flat_batch_of_ten_tokens(told):
    batch = of_kind(told["two-five-three"][0], "batch_ordered")[0]
    assert (batch.num_scheduled_tokens, batch.query_start_loc) == ([2, 5, 3], [0, 2, 7, 10])


def test_prefix_hit_takes_two_blocks_of_the_finished_request(told):
    hit = of_kind(told["prefix-hit"][0], "prefix_matched")[1]
    assert (hit.request_id, hit.num_computed_tokens) == ("r1", 8)


def test_prefix_miss_finds_nothing_after_another_word_in_the_first_block(told):
    _, other_word, too_short = of_kind(told["prefix-miss"][0], "prefix_matched")
    assert (other_word.num_computed_tokens, other_word.stopped_at_block, other_word.why) == (0, 0, "never_cached")
    assert (other_word.key_differs, other_word.similar_block_id) == ("tokens", 1)
    assert (too_short.num_computed_tokens, too_short.why) == (0, "partial_block")


def test_twins_share_blocks_in_the_step_that_admits_both(told):
    hit = of_kind(told["twins"][0], "prefix_matched")[1]
    assert (hit.step, hit.request_id, hit.num_computed_tokens) == (0, "r1", 8)
    assert told["twins"][1].token_ids["r0"] == told["twins"][1].token_ids["r1"]


def test_chunked_prefill_gives_its_first_token_after_the_last_piece(told):
    steps = [e.num_scheduled_tokens.get("r0") for e in of_kind(told["chunked-prefill"][0], "step_scheduled")]
    assert steps == [8, 8, 6, 1, 1, None]
    assert of_kind(told["chunked-prefill"][0], "request_output")[0].step == 2


def test_mixed_batch_decodes_beside_a_prompt_and_moves_the_last_row_into_the_hole(told):
    assert of_kind(told["mixed-batch"][0], "step_scheduled")[1].num_scheduled_tokens == {"r0": 1, "r1": 1, "r2": 8}
    assert [(e.request_id, e.from_row, e.row) for e in of_kind(told["mixed-batch"][0], "row_moved")] == [("r2", 2, 0)]


def test_preemption_hits_the_newer_request_and_both_finish(told):
    (lost,) = of_kind(told["preemption"][0], "request_preempted")
    assert (lost.request_id, lost.on_behalf_of) == ("r1", "r0")


def test_eviction_takes_the_end_of_the_oldest_prompt_and_leaves_its_beginning(told):
    last = of_kind(told["eviction"][0], "prefix_matched")[-1]
    assert (last.request_id, last.num_computed_tokens, last.why, last.evicted_for) == ("r3", 4, "evicted", "r2")


def test_built_in_scenarios_together_show_every_event_kind(told):
    seen = {e.kind for events, _ in told.values() for e in events}
    for scenario in list_scenarios():
        if not scenario.needs_model:
            seen |= {e.kind for e in events_of(scenario.name)}
    assert set(KINDS) - seen == {"trace_gap"}  # no scenario loses records
