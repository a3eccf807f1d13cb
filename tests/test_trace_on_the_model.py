"""The laws on the real engine: the embedded model, both runners, through preemption, aborts and hits."""

from __future__ import annotations

import random

import msgspec
import pytest

from live import walk_live
from pagedlab.scenarios.library import builtin_names, load_scenario
from pagedlab.scenarios.run import run
from pagedlab.trace.check import check
from pagedlab.trace.diff import canonical
from pagedlab.trace.events import BlocksAppended, RowAssigned, RowFreed, RowMoved
from pagedlab.trace.file import TraceFile, load_trace
from pagedlab.trace.state import Fold, same
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import trace, tracing
from pagedlab.trace.why import why

torch = pytest.importorskip("torch")
replace = msgspec.structs.replace


def play(runner, level, seed=0, num_steps=45, after_step=None, sink=None, **knobs):
    """Requests that share beginnings, in a pool too small for all; returns the tokens by request."""
    from pagedlab import LLM, SamplingParams

    rng = random.Random(seed)
    sizes = {"block_size": 4, "num_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    knobs = {**sizes, "runner": runner, **knobs}
    events = []
    if level:
        trace.start(events, *([sink] if sink is not None else []), record=level)
    try:
        llm, tokens, added = LLM(**knobs), {}, 0
        bases = [[rng.randrange(20, 60) for _ in range(20)] for _ in range(2)]
        for _ in range(num_steps):
            if added < 16 and rng.random() < 0.6:
                prompt = rng.choice(bases)[: rng.randrange(2, 20)]
                params = SamplingParams(temperature=0, max_tokens=rng.randrange(2, 12), ignore_eos=True)
                llm.add_request({"prompt_token_ids": prompt}, params, request_id=f"r{added}")
                added += 1
            if rng.random() < 0.05 and llm.core.scheduler.requests:
                llm.abort(rng.choice(list(llm.core.scheduler.requests)))
            for output in llm.step() if llm.has_unfinished_requests() else []:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if after_step is not None:
                after_step(llm.core, events)
    finally:
        if level:
            trace.stop()
    return tokens, events


@pytest.mark.parametrize("runner", ["persistent", "state-table"])
@pytest.mark.parametrize("level", ["blocks", "kernels"])
def test_folding_gives_the_live_state_after_each_step_of_the_real_engine(runner, level):
    fold, taken, compared = Fold(), 0, 0

    def compare(core, events):
        nonlocal taken, compared
        for event in events[taken:]:
            fold.apply(event)
        taken = len(events)
        if core.engine_id in fold.states:
            assert same(fold.states[core.engine_id], walk_live(core)) is None
            compared += 1

    _, events = play(runner, level, after_step=compare)
    assert compared > 40
    kinds = {type(e) for e in events}
    assert {RowAssigned, RowFreed, BlocksAppended} <= kinds and (runner != "persistent" or RowMoved in kinds)
    assert any(e.kind == "request_preempted" for e in events)
    notices = []
    assert check(Trace(events), notices) is None and notices == []


@pytest.mark.parametrize("runner", ["persistent", "state-table"])
def test_each_row_event_of_the_real_worker_bears_state(runner):
    _, events = play(runner, "blocks", num_steps=30)
    for cls in (RowAssigned, RowFreed, RowMoved, BlocksAppended):
        for i in [i for i, e in enumerate(events) if type(e) is cls][:5]:
            with_it, without = fold(events[: i + 1]), fold(events[:i])
            assert same(with_it, without) is not None, events[i].kind


def fold(events):
    whole = Fold()
    for event in events:
        whole.apply(event)
    (state,) = whole.states.values()
    return state


@pytest.mark.parametrize("runner", ["persistent", "state-table"])
def test_tokens_are_the_same_with_tracing_off_and_on(runner):
    untraced, _ = play(runner, None)
    for level in ("steps", "blocks", "kernels"):
        traced, _ = play(runner, level)
        assert traced == untraced, level


@pytest.mark.parametrize("name", [n for n in builtin_names() if load_scenario(n).needs_model])
def test_every_story_on_the_model_passes_the_check_and_answers_why(name):
    from pagedlab import LLM

    scenario = load_scenario(name)
    with tracing("kernels") as story:
        run(scenario, LLM(config=scenario.engine_config()))
    notices = []
    assert check(story, notices) is None and notices == []
    for request_id in story.requests:
        assert why(story, request_id).lines
        assert all(why(story, request_id, step).data["outcome"] for step in story.steps if step >= 0)


def test_no_event_is_changed_after_it_was_emitted(tmp_path):
    """What was written at once equals what the events say at the end of the run."""
    with TraceFile(tmp_path / "live.jsonl") as sink:
        _, events = play("persistent", "kernels", num_steps=30, sink=sink)
    assert load_trace(tmp_path / "live.jsonl") == events


def test_the_same_run_twice_is_the_same_canonical_trace():
    first, second = (play("persistent", "kernels", num_steps=12)[1] for _ in range(2))
    assert Trace(first).diff(Trace(second)) is None
    assert [canonical(e) for e in first] == [canonical(e) for e in second]


def test_a_wrong_slot_or_a_wrong_write_of_the_real_worker_is_found():
    _, events = play("persistent", "kernels", num_steps=12)
    for kind, invariant in (("slots_mapped", "slots"), ("kv_written", "writes")):
        i = [i for i, e in enumerate(events) if e.kind == kind][3]
        bad = list(events)
        bad[i] = replace(events[i], slot=[events[i].slot[0] ^ 1, *events[i].slot[1:]])
        violation = check(Trace(bad))
        assert violation is not None and violation.invariant == invariant and violation.step == events[i].step
