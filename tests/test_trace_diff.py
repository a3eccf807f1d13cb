"""`pagedlab diff`, Perfetto export and `pagedlab scenario-from`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import msgspec
import pytest

from pagedlab.errors import UserError
from pagedlab.scenarios.library import builtin_names, load_scenario
from pagedlab.scenarios.run import run as run_scenario
from pagedlab.scenarios.scenario import Scenario
from pagedlab.trace.diff import canonical, diff
from pagedlab.trace.events import KINDS
from pagedlab.trace.to_scenario import scenario_from
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import tracing
from test_trace_fold import CONFIGS, new_core, random_actions, recording, renumbered


def record(seed=1, num_steps=30, level="blocks", **config):
    core = new_core(**{"num_blocks": 9, **config})
    limits = core.scheduler.config
    core.about["config"].update(
        block_size=core.scheduler.kv_cache_manager.block_size, policy=limits.policy,
        max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len, long_prefill_token_threshold=limits.long_prefill_token_threshold,
        enable_prefix_caching=core.scheduler.kv_cache_manager.enable_caching,
    )
    with recording(level) as events:
        for _ in random_actions(random.Random(seed), core, num_steps):
            pass
    return Trace(events)


def test_the_same_run_twice_has_no_difference():
    assert record().diff(record()) is None
    assert record(level="decisions").diff(record(level="kernels")) is None


def test_volatile_fields_and_numbers_do_not_count():
    a = record()
    b = Trace([msgspec.structs.replace(e, t_ns=e.t_ns + 5, engine=e.engine + 3) for e in a])
    assert b.engine != a.engine and a.diff(b) is None
    for event in a:
        shown = canonical(event)
        assert shown["kind"] == event.kind and not {"seq", "t_ns", "engine", *event.volatile} & set(shown)


def test_a_knob_left_to_its_default_counts_as_a_difference_of_the_engines():
    scenario = load_scenario("priority")
    unsaid = dataclasses.replace(scenario, config={k: v for k, v in scenario.config.items() if k != "policy"})
    traces = []
    for one in (unsaid, scenario):
        with tracing("decisions") as trace:
            run_scenario(one)
        traces.append(trace)
    found = traces[0].diff(traces[1])
    assert found is not None and found.notes == ["config: policy is 'fcfs' in A and 'priority' in B"]


def test_a_last_step_that_schedules_nothing_is_no_difference_but_one_that_does_is():
    with tracing() as trace:
        run_scenario(load_scenario("budget"))
    last = max(trace.steps)
    assert not trace.steps[last].scheduled.num_scheduled_tokens and trace.steps[last - 1].scheduled.num_scheduled_tokens
    without = Trace([e for e in trace if e.step < last])
    assert trace.diff(without) is None and without.diff(trace) is None
    shorter = Trace([e for e in trace if e.step < last - 1])
    assert trace.diff(shorter).step == shorter.diff(trace).step == last - 1


def test_what_differs_before_the_first_step_is_said_to_be_there():
    traces = []
    for name in ("abort", "budget"):
        with tracing("decisions") as trace:
            run_scenario(load_scenario(name))
        traces.append(trace)
    found = traces[0].diff(traces[1])
    assert found is not None and found.step == -1 and "before step 0: the first decision" in "\n".join(found.lines)


def test_every_volatile_field_exists():
    for cls in KINDS.values():
        assert set(cls.volatile) <= set(cls.__struct_fields__), cls


def test_a_smaller_budget_shows_the_first_decision_it_changes_with_both_reasons():
    found = record(max_num_batched_tokens=16).diff(record(max_num_batched_tokens=9))
    assert found is not None and found.is_decision
    assert found.a.kind == found.b.kind == "slots_allocated"  # 16 tokens take one block more than 9
    text = "\n".join(found.lines)
    assert "config: max_num_batched_tokens is 16 in A and 9 in B" in text
    assert "cut to what was left of the token budget" in "\n".join(found.reasons_b)
    assert f"step {found.step}" in text and "A:" in text and "B:" in text
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["step"], data["is_decision"], data["reasons_b"]) == (found.step, True, found.reasons_b)
    assert [data[name]["num_new_tokens"] for name in "ab"] == [found.a.num_new_tokens, found.b.num_new_tokens]


def test_a_first_step_that_differs_has_reasons_and_an_end_is_null():
    traces = []
    for budget in (16, 2):
        with tracing("decisions") as trace:
            run_scenario(load_scenario("budget").with_config(max_num_batched_tokens=budget))
        traces.append(trace)
    found = traces[0].diff(traces[1])
    assert found.step == 0 and found.reasons_a and found.reasons_b
    assert "step 0: the first decision that differs" in found.lines
    ended = trace.diff(Trace([e for e in trace if e.step < 3])).to_dict()
    assert ended["a"]["kind"] == "slots_allocated" and ended["b"] is None


def test_a_run_with_a_model_and_one_without_say_so():
    trace = record()
    header = msgspec.structs.replace(trace.header, model={"name": "some"})
    found = trace.diff(Trace([header, *[e for e in record(max_num_batched_tokens=5) if e.seq > 0]]))
    assert "model: B has one, A has none" in found.notes


def test_a_changed_decision_is_found_where_it_is_and_a_changed_number_only_if_no_decision_differs():
    a = record()
    events = list(a)
    number = next(i for i, e in enumerate(events) if e.kind == "step_started" and e.step == 9)
    decision = next(i for i, e in enumerate(events) if e.kind == "request_considered" and e.step == 14)
    events[number] = msgspec.structs.replace(events[number], num_free_blocks=77)
    found = a.diff(Trace(events))
    assert not found.is_decision and found.fields == ("num_free_blocks",) and found.step == 9
    events[decision] = msgspec.structs.replace(events[decision], num_tokens_granted=5)
    found = a.diff(Trace(events))
    assert found.is_decision and found.fields == ("num_tokens_granted",) and found.step == 14


def test_a_run_that_ends_earlier_parts_there():
    a = record()
    b = Trace([e for e in a if e.step < 20])
    found = a.diff(b)
    assert found.b is None and found.step == 20 and "the trace ends here" in "\n".join(found.lines)


def test_a_left_out_event_is_a_difference():
    a = record()
    i = next(i for i, e in enumerate(a) if e.kind == "block_cached")
    assert a.diff(Trace(renumbered([*a.events[:i], *a.events[i + 1 :]]))) is not None


# ------------------------------------------------------------------ Perfetto


def test_perfetto_has_a_track_per_request_and_stage_and_counters(tmp_path):
    trace = record()
    trace.to_perfetto(tmp_path / "p.json")
    records = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    names = {r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert names >= {"step", "schedule", "execute_model", "update_from_output", *trace.requests}
    assert {r["name"] for r in records if r["ph"] == "C"} == {"free blocks", "token budget", "requests"}
    slices = [r for r in records if r["ph"] == "X"]
    assert all(r["dur"] >= 0 and r["ts"] >= 0 for r in slices)
    assert sum(r["name"].startswith("step ") for r in slices) == 30
    scheduled = sum(len(e.num_scheduled_tokens) for e in trace.filter("step_scheduled"))
    assert sum(r["name"].endswith(("token", "tokens")) for r in slices) == scheduled
    tracks = {}
    for r in slices:  # slices of one track do not overlap
        tracks.setdefault((r["pid"], r["tid"]), []).append((r["ts"], r["ts"] + r["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start + 0.001 for (_, end), (start, _) in itertools.pairwise(spans))


def test_perfetto_stages_stay_inside_their_step_also_where_the_machine_paused_before_its_first_event(tmp_path):
    trace = record()
    for finished in trace.filter("step_finished"):
        finished.stage_ns["schedule"] += 10_000_000  # began 10 ms before step_started came to be written
    trace.to_perfetto(tmp_path / "p.json")
    slices = [r for r in json.loads((tmp_path / "p.json").read_text())["traceEvents"] if r["ph"] == "X"]
    for r in slices:
        if r["name"] in ("schedule", "execute_model", "update_from_output"):
            step = next(s for s in slices if s["name"] == f"step {r['args']['step']}")
            assert r["dur"] >= 0 and step["ts"] <= r["ts"] and r["ts"] + r["dur"] <= step["ts"] + step["dur"] + 0.001


# ------------------------------------------------------------------ scenario-from


def reproduces(trace, document):
    scenario = Scenario.from_document(json.loads(json.dumps(document)), "test")
    with tracing("blocks") as again:
        run_scenario(scenario)
    kinds = ["request_considered", "request_preempted", "slots_allocated", "slots_refused", "step_scheduled",
             "queue_not_reached", "block_allocated", "block_freed", "request_output", "request_finished"]
    last = max(trace.steps)
    return [canonical(e) for e in trace.filter(kinds, step=range(last + 1))] == [
        canonical(e) for e in again.filter(kinds, step=range(last + 1))]


@pytest.mark.parametrize("config", CONFIGS[:3])
@pytest.mark.parametrize("seed", range(3))
def test_a_scenario_from_a_trace_reproduces_its_decisions(config, seed):
    trace = record(seed, **config)
    document = scenario_from(trace)
    assert reproduces(trace, document)
    changed = json.loads(json.dumps(document))
    changed["config"]["num_blocks"] -= 1
    assert not reproduces(trace, changed)


def test_groups_and_windows_are_part_of_the_scenario():
    trace = record(2, num_blocks=14, block_sizes=(4, 8), windows=(None, 9))
    document = scenario_from(trace)
    assert document["config"]["groups"] == [
        {"kind": "full", "block_size": 4}, {"kind": "sliding_window", "block_size": 8, "sliding_window": 9}]
    assert reproduces(trace, document)


def test_anonymised_it_names_nobody_and_still_makes_the_same_decisions():
    trace = record(3)
    document = scenario_from(trace, anonymise=True)
    text = json.dumps(document)
    assert '"salt"' not in text
    ids = sorted(trace.requests)
    scenario = Scenario.from_document(document, "test")
    with tracing("blocks") as again:
        run_scenario(scenario)
    back = dict(zip(sorted(document["requests"]), ids, strict=True))
    for step in list(trace.steps)[1:]:
        ours, theirs = trace.steps[step].scheduled, again.steps[step].scheduled
        assert {back[r]: n for r, n in theirs.num_scheduled_tokens.items()} == ours.num_scheduled_tokens


def test_a_trace_that_begins_in_mid_life_makes_no_scenario():
    core = new_core(9)
    actions = random_actions(random.Random(1), core, 20)
    for _ in range(10):
        next(actions)
    with recording() as events:
        next(actions)
    with pytest.raises(UserError, match="begins in the middle of a run"):
        scenario_from(Trace(events))


@pytest.mark.parametrize("name", [n for n in builtin_names() if not load_scenario(n).needs_model])
def test_every_built_in_scenario_survives_the_way_through_a_trace(name):
    scenario = load_scenario(name)
    with tracing("blocks") as trace:
        run_scenario(scenario)
    document = scenario_from(trace)
    assert set(document["requests"]) == {e.request_id for e in trace.filter("request_added")}
    assert reproduces(trace, document)


def test_without_caching_the_first_hit_is_where_two_runs_part():
    found = diff(record(enable_prefix_caching=True), record(enable_prefix_caching=False))
    assert found is not None and found.is_decision and found.a.kind == "prefix_matched"
    assert any("tokens hit (block" in line for line in found.reasons_a)
    assert any("prefix caching is switched off" in line for line in found.reasons_b)
