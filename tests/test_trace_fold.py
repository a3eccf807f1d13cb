"""Law 1, Complete: folding the trace gives the state that a walk over the live objects finds."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from live import walk_live
from pagedlab.engine.core import EngineCore
from pagedlab.errors import UserError
from pagedlab.trace.check import check
from pagedlab.trace.events import (
    BlockAllocated,
    BlockCached,
    BlockEvicted,
    BlockFreed,
    BlocksAppended,
    BlockTouched,
    PrefixCacheReset,
    RequestAborted,
    RequestAdded,
    RequestConsidered,
    RequestFinished,
    RequestOutput,
    RequestPreempted,
    RowAssigned,
    RowFreed,
    RowMoved,
    SlotsAllocated,
    StepScheduled,
    TraceGap,
)
from pagedlab.trace.state import EngineState, Fold, same
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import trace
from standin import StandInExecutor, make_request, make_scheduler

# Every event that changes what law 1 speaks of. The others only inform.
STATE_BEARING = (
    RequestAdded, RequestAborted, RequestFinished, PrefixCacheReset, RequestConsidered, SlotsAllocated,
    RequestPreempted, BlockAllocated, BlockTouched, BlockCached, BlockEvicted, BlockFreed, StepScheduled,
    RequestOutput, RowAssigned, RowFreed, RowMoved, BlocksAppended,
)  # fmt: skip


@contextmanager
def recording(record="blocks", **options):
    events = []
    trace.start(events, record=record, **options)
    try:
        yield events
    finally:
        trace.stop()


def new_core(num_blocks, **config):
    return EngineCore(make_scheduler(num_blocks, **config), StandInExecutor(),
                      about={"model": {}, "config": {}, "tokenizer": {}})


def random_actions(rng, core, num_steps, prompts=4, max_prompt=20):
    """Requests that share beginnings, aborts and resets between steps; yields after each step."""
    bases = [[rng.randrange(7) for _ in range(max_prompt)] for _ in range(2)]
    num_added = 0
    for _ in range(num_steps):
        for _ in range(rng.choice((0, 0, 1, 2))):
            base = rng.choice(bases)
            prompt = base[: rng.randrange(1, max_prompt)]
            if rng.random() < 0.3:
                prompt = [*prompt, rng.randrange(7)]
            request = make_request(core.scheduler, f"r{num_added}", prompt, rng.randrange(1, 12),
                                   rng.randrange(3), rng.choice((None, None, "salt")), float(num_added))
            num_added += 1
            try:
                core.add_request(request)
            except UserError:
                continue
        if rng.random() < 0.08 and core.scheduler.requests:
            core.abort_requests([rng.choice(list(core.scheduler.requests))])
        if rng.random() < 0.05:
            core.reset_prefix_cache()
        core.step()
        yield


CONFIGS = (
    {"num_blocks": 6},
    {"num_blocks": 9, "policy": None, "long_prefill_token_threshold": 5},
    {"num_blocks": 12, "enable_prefix_caching": False},
    {"num_blocks": 14, "block_sizes": (4, 4), "windows": (None, 8)},
    {"num_blocks": 14, "block_sizes": (4, 8), "windows": (None, 9), "max_num_batched_tokens": 7},
    {"num_blocks": 40, "max_num_seqs": 8},
)


@pytest.mark.parametrize("record", ["blocks", "kernels"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_folding_gives_the_live_state_after_each_step(config, seed, record):
    core, fold = new_core(**config), Fold()
    with recording(record) as events:
        taken = 0
        for _ in random_actions(random.Random(seed), core, 60):
            for event in events[taken:]:
                fold.apply(event)
            taken = len(events)
            assert same(fold.states[core.engine_id], walk_live(core)) is None


@pytest.mark.parametrize("num_steps_before", (0, 15))
def test_every_known_token_has_its_text_in_the_fold(num_steps_before):
    core = new_core(9)
    core.token_text = lambda token_id: f"<{token_id}>"
    actions, fold, taken = random_actions(random.Random(1), core, num_steps_before + 40), Fold(), 0
    for _ in range(num_steps_before):
        next(actions)
    with recording() as events:
        for _ in actions:
            for event in events[taken:]:
                fold.apply(event)
            taken = len(events)
            for request in fold.states[core.engine_id].requests.values():
                assert request.token_texts == [f"<{token_id}>" for token_id in request.token_ids]


def test_folding_can_begin_in_the_middle_of_a_run():
    core = new_core(6)
    actions = random_actions(random.Random(5), core, 60)
    for _ in range(25):
        next(actions)
    with recording() as events:
        for _ in actions:
            pass
    assert events[1].requests, "the engine was idle: the test shows nothing"
    assert same(Trace(events).at(), walk_live(core)) is None


@pytest.mark.parametrize("act", [
    lambda core: core.add_request(make_request(core.scheduler, "late", [1])),
    lambda core: core.abort_requests(["r0"]), lambda core: core.reset_prefix_cache(), lambda core: core.step(),
])  # fmt: skip
def test_whatever_comes_first_after_tracing_began_has_the_header_and_a_snapshot_before_it(act):
    core = new_core(6)
    core.add_request(make_request(core.scheduler, "r0", [1, 2, 3]))
    core.step()
    new_core(6).step()  # another engine, which the trace is not about
    with recording() as events:
        act(core)
    assert [e.kind for e in events[:2]] == ["trace_header", "engine_snapshot"] and len(events) > 3
    assert {e.engine for e in events[1:]} == {core.engine_id} and events[1].step == 0
    assert [r.request_id for r in events[1].requests] == ["r0"]


def test_the_stages_of_a_step_take_no_longer_than_the_step():
    core = new_core(6)
    assert set(core.stage_ns.values()) == {0}
    core.add_request(make_request(core.scheduler, "r0", [1, 2, 3]))
    start = time.perf_counter_ns()
    core.step()
    elapsed = time.perf_counter_ns() - start
    assert min(core.stage_ns.values()) > 0 and sum(core.stage_ns.values()) <= elapsed


def test_a_snapshot_inside_the_trace_equals_what_the_fold_has():
    core = new_core(9)
    with recording(snapshot_every=5) as events:
        for _ in random_actions(random.Random(1), core, 40):
            pass
    fold, compared = Fold(), 0
    for event in events:
        if event.kind == "engine_snapshot" and core.engine_id in fold.states:
            assert same(fold.states[core.engine_id], EngineState.from_snapshot(event)) is None
            compared += 1
        fold.apply(event)
    assert compared >= 5


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(2, 12), caching=st.booleans(), hybrid=st.booleans(),
       policy=st.sampled_from(("fcfs", "priority")), budget=st.integers(1, 20), seats=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_folding_gives_the_live_state_in_any_small_engine(seed, num_blocks, caching, hybrid, policy, budget, seats):
    groups = {"block_sizes": (2, 4), "windows": (None, 5)} if hybrid else {"block_sizes": (4,), "windows": (None,)}
    core = new_core(num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=seats,
                    policy=None, **groups)
    from pagedlab.sched.policy import resolve_policy
    from pagedlab.sched.waiting_queue import WaitingQueue

    core.scheduler.policy = resolve_policy(policy)
    core.scheduler.waiting = WaitingQueue(core.scheduler.policy.key)
    fold, taken = Fold(), 0
    with recording() as events:
        for _ in random_actions(random.Random(seed), core, 12):
            for event in events[taken:]:
                fold.apply(event)
            taken = len(events)
            assert same(fold.states[core.engine_id], walk_live(core)) is None


# ------------------------------------------------------------------ the counterparts


def rich_run(num_steps=120):
    """A run in which every state-bearing kind occurs; ends with an idle engine when nothing is left."""
    core = new_core(12, block_sizes=(4, 4), windows=(None, 8))
    with recording() as events:
        for _ in random_actions(random.Random(3), core, num_steps):
            pass
    return core, events


def test_any_missing_record_is_noticed():
    _, events = rich_run(30)
    for i in range(2, len(events) - 1):
        with pytest.raises(UserError, match=f"seq {events[i].seq} is missing"):
            fold_all(events[:i] + events[i + 1 :])


def test_without_the_record_numbers_a_missing_state_bearing_event_still_breaks_the_fold():
    """Kind by kind: leave one out, renumber so that nothing is suspicious, and the state differs at once."""
    _, events = rich_run()
    seen = {type(e) for e in events}
    assert seen >= set(STATE_BEARING), [c.__name__ for c in STATE_BEARING if c not in seen]
    for cls in STATE_BEARING:
        for i in [i for i, e in enumerate(events) if type(e) is cls and bears_state(e)][:10]:
            with_it, without = fold_all(events[: i + 1]), fold_all(events[:i])
            assert same(with_it, without) is not None, f"{events[i].kind} (seq {i}) changes nothing"


def bears_state(event):
    """Not every event of a state-bearing kind changes something."""
    match event:
        case RequestConsidered():
            return event.queue == "waiting" and event.outcome == "scheduled"
        case SlotsAllocated():
            return any(event.new_block_ids) or any(event.hit_block_ids)
        case StepScheduled():
            return event.total_num_scheduled_tokens > 0
        case PrefixCacheReset():
            return event.done and event.seq > 100  # nothing is cached before
    return True


def test_a_fold_that_is_wrong_once_is_still_wrong_when_the_step_ends():
    """An event left out and renumbered, in steps after which the request is still there."""
    core, before, num_tried = new_core(9, max_num_batched_tokens=9), 0, 0
    with recording() as events:
        for _ in random_actions(random.Random(2), core, 25):
            live, step, first = walk_live(core), list(events[before:]), before
            before = len(events)
            if any(type(e) is RequestFinished for e in step) or first == 0:
                continue
            assert same(fold_all(events), live) is None
            for i, event in enumerate(step):
                if type(event) in STATE_BEARING and bears_state(event):
                    rest = renumbered([*events[: first + i], *events[first + i + 1 :]])
                    assert is_broken(rest, live), event.kind
                    num_tried += 1
    assert num_tried > 50


def is_broken(events, live):
    """The fold does not arrive at the live state, or `pagedlab check` says what is wrong on the way."""
    return check(Trace(events)) is not None or same(fold_all(events), live) is not None


def renumbered(events):
    return [msgspec.structs.replace(e, seq=i) for i, e in enumerate(events)]


def fold_all(events):
    fold = Fold()
    for event in events:
        fold.apply(event)
    (state,) = fold.states.values()
    return state


def test_a_block_is_null_free_cached_in_use_or_shared():
    core, fold, seen = new_core(14, block_sizes=(4, 4), windows=(None, 8)), Fold(), set()
    with recording() as events:
        for _ in random_actions(random.Random(1), core, 40):
            pass
    for event in events:
        fold.apply(event)
        if type(event) is StepScheduled:
            state, owners = fold.states[core.engine_id], fold.states[core.engine_id].owners()
            for block_id in range(1, 14):
                num_owners = len(owners.get(block_id, ()))
                free = "cached" if block_id in state.cached_blocks else "free"
                right = free if num_owners == 0 else "in_use" if num_owners == 1 else "shared"
                assert state.state_of_block(block_id) == right
                seen.add(right)
            assert state.state_of_block(0) == "null" and 0 not in owners
    assert seen == {"free", "cached", "in_use", "shared"}


def test_folding_on_changes_neither_an_earlier_copy_nor_the_events():
    core = new_core(9)
    core.token_text = str
    with recording(snapshot_every=10) as events:
        for _ in random_actions(random.Random(1), core, 40):
            pass
    fold, copies, said = Fold(), [], repr(events)
    for event in events:
        fold.apply(event)
        if type(event) is StepScheduled:
            copies.append((fold.states[core.engine_id].copy(), repr(fold.states[core.engine_id])))
    assert all(repr(copy) == as_it_was for copy, as_it_was in copies) and repr(events) == said


def test_after_a_gap_the_state_is_unknown_until_a_snapshot():
    _, events = rich_run(20)
    cut = len(events) // 2
    gap = TraceGap(num_lost=3, why="test")
    gap.seq, gap.engine, gap.proc = events[cut].seq, events[cut].engine, events[cut].proc
    fold = Fold()
    for event in (*events[:cut], gap):
        fold.apply(event)
    assert fold.states == {}


def test_two_engines_in_one_trace_have_two_states():
    first, second = new_core(6), new_core(9)
    with recording() as events:
        one = random_actions(random.Random(1), first, 30)
        two = random_actions(random.Random(2), second, 30)
        for _ in zip(one, two, strict=True):
            pass
    whole = Trace(events)
    assert whole.engines == [first.engine_id, second.engine_id]
    for core in (first, second):
        assert same(whole.of_engine(core.engine_id).at(), walk_live(core)) is None
