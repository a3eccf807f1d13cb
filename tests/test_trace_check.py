"""`pagedlab check`: silent on any real run, and each invariant finds its own corruption."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import msgspec
import pytest

from pagedlab.errors import UserError
from pagedlab.sched.policy import FirstComeFirstServed, Priority
from pagedlab.trace.check import INVARIANTS, STEPS_OVERTAKEN, STEPS_WITHOUT_PROGRESS, check
from pagedlab.trace.events import BlockEvicted, KvWritten, SlotsMapped
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import trace
from standin import make_request
from test_trace_fold import CONFIGS, fold_all, new_core, random_actions, recording, renumbered
from test_trace_truth import ENVELOPE, spoiled

replace = msgspec.structs.replace


def run(seed=3, num_steps=60, **config):
    core = new_core(**{"num_blocks": 9, **config})
    core.about["config"]["max_num_seqs"] = core.scheduler.config.max_num_seqs
    with recording(snapshot_every=20) as events:
        for _ in random_actions(random.Random(seed), core, num_steps):
            pass
    return events


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_a_real_run_breaks_no_invariant(config, seed):
    notices = []
    assert check(Trace(run(seed, **config)), notices) is None
    assert notices == []


def change(events, kind, where=lambda e: True, nth=0, **fields):
    """The same trace with other values in the nth such event; a value may be a function of the event."""
    found = [i for i, e in enumerate(events) if e.kind == kind and where(e)]
    i = found[nth]
    values = {k: v(events[i]) if callable(v) else v for k, v in fields.items()}
    return [*events[:i], replace(events[i], **values), *events[i + 1 :]]


def drop(events, kind, where=lambda e: True, nth=0):
    i = [i for i, e in enumerate(events) if e.kind == kind and where(e)][nth]
    return renumbered([*events[:i], *events[i + 1 :]])


CORRUPTIONS = {
    "complete": [lambda ev: [*ev[:40], *ev[41:]]],
    "snapshot": [lambda ev: change(ev, "engine_snapshot", nth=1, free_queue=lambda e: e.free_queue[::-1]),
                 lambda ev: change(ev, "engine_snapshot", nth=1, cached_blocks={})],
    "conservation": [lambda ev: change(ev, "engine_snapshot", num_blocks=20),
                     lambda ev: change(ev, "block_freed", block_id=99)],
    "null_block": [lambda ev: change(ev, "block_allocated", block_id=0),
                   lambda ev: change(ev, "block_freed", block_id=0), lambda ev: change(ev, "block_cached", block_id=0),
                   lambda ev: change(ev, "block_touched", block_id=0),
                   lambda ev: change(ev, "engine_snapshot", free_queue=lambda e: [*e.free_queue[:-1], 0])],
    "free_queue": [lambda ev: change(ev, "engine_snapshot", free_queue=lambda e: e.free_queue[::-1]),
                   lambda ev: change(ev, "block_freed", lambda e: e.free_queue_index, free_queue_index=0),
                   lambda ev: change(ev, "block_touched", was_free=lambda e: not e.was_free)],
    "ref_counts": [lambda ev: change(ev, "block_allocated", ref_cnt=2), lambda ev: change(ev, "block_freed", ref_cnt=3),
                   lambda ev: change(ev, "slots_allocated", new_block_ids=lambda e: [[1, *g] for g in e.new_block_ids]),
                   lambda ev: drop(ev, "block_freed", lambda e: e.ref_cnt == 0 and e.logical_block == 0, nth=1)],
    "hashes": [lambda ev: change(ev, "block_touched", hash="00000000"), lambda ev: drop(ev, "block_evicted"),
               lambda ev: change(ev, "block_evicted", hash="00000000"), lambda ev: drop(ev, "block_cached")],
    "tables": [lambda ev: change(ev, "step_scheduled", lambda e: e.cached, nth=3, cached=lambda e: [
        replace(c, num_computed_tokens=60) for c in e.cached])],
    "budget": [lambda ev: change(ev, "request_considered", budget_after=lambda e: e.budget_after + 1),
               lambda ev: change(ev, "request_considered", num_tokens_wanted=99, budget_after=-1,
                                 num_tokens_granted=lambda e: e.budget_before + 1),
               lambda ev: change(ev, "request_considered", budget_before=lambda e: e.budget_before + 1,
                                 budget_after=lambda e: e.budget_after + 1),
               lambda ev: change(ev, "step_scheduled", total_num_scheduled_tokens=1000),
               lambda ev: change(ev, "step_scheduled", lambda e: e.num_scheduled_tokens, nth=4, num_scheduled_tokens={},
                                 total_num_scheduled_tokens=0),
               lambda ev: change(ev, "request_preempted", budget_after=99)],
    "seats": [lambda ev: change(ev, "trace_header", config={"max_num_seqs": 1})],
    "counts": [lambda ev: change(ev, "step_started", nth=5, num_waiting=77),
               lambda ev: change(ev, "slots_refused", num_free=77),
               lambda ev: change(ev, "slots_refused", num_needed=0),
               lambda ev: change(ev, "slots_allocated", num_free_after=0),
               lambda ev: change(ev, "queue_not_reached", count=1, first_request_id="r99")],
    "reasons": [lambda ev: drop(ev, "queue_not_reached", lambda e: e.reason == "head_blocked"),
                lambda ev: drop(ev, "request_considered", lambda e: e.outcome == "refused")],
    "append": [lambda ev: change(ev, "request_output", new_token_ids=[1, 2])],
    "rows": [lambda ev: drop(ev, "row_freed"), lambda ev: change(ev, "row_moved", from_row=9),
             lambda ev: drop(ev, "blocks_appended"),
             lambda ev: change(ev, "row_assigned", block_ids=lambda e: [[b % 8 + 1 for b in g] for g in e.block_ids])],
}


@pytest.mark.parametrize(("invariant", "corrupt"), [(name, c) for name, all_ in CORRUPTIONS.items() for c in all_])
def test_each_invariant_finds_its_corruption(invariant, corrupt):
    events = run()
    violation = check(Trace(corrupt(events)))
    assert violation is not None, "nothing was found"
    assert violation.invariant == invariant, str(violation)
    assert f"step {violation.step}" in str(violation)


def test_every_invariant_has_a_corruption():
    tested_below = {"sharing", "slots", "writes"}
    assert set(CORRUPTIONS) | tested_below == set(INVARIANTS)


def test_the_first_bad_step_is_the_one_that_is_named():
    events = run()
    bad = change(events, "step_started", lambda e: e.step == 17, num_running=55)
    bad = change(bad, "step_started", lambda e: e.step == 31, num_running=55)
    violation = check(Trace(bad))
    assert violation is not None and violation.step == 17


def test_a_block_in_two_tables_must_have_a_hash():
    """Two snapshotted requests hold block 1, which is cached; then it is not."""
    events = run(num_steps=1)
    snapshot = next(e for e in events if e.kind == "engine_snapshot")
    start = next(e for e in events if e.kind == "step_started")
    added = run()
    a = next(e for e in added if e.kind == "engine_snapshot" and len(e.requests) >= 2)
    requests = [replace(r, status="running", block_ids=[[1]], num_computed_tokens=2) for r in a.requests[:2]]
    ids = [r.request_id for r in requests]
    shared = replace(snapshot, requests=requests, running=ids, waiting=[], ref_counts={1: 2}, cached_blocks={1: "ab"},
                     free_queue=[2, 3, 4, 5, 6, 7, 8])
    start = replace(start, num_waiting=0, num_running=2, num_free_blocks=7)
    end = next(e for e in events if e.kind == "step_finished")
    assert check(Trace(renumbered([events[0], shared, start, end]))) is None
    violation = check(Trace(renumbered([events[0], replace(shared, cached_blocks={}), start, end])))
    assert violation is not None and violation.invariant == "sharing"


def with_slots(events):
    """Add to each step the slot mapping and the writes that follow from its state."""
    from pagedlab.trace.state import Fold

    fold, result = Fold(), []
    for event in renumbered(list(events)):
        fold.apply(event)
        result.append(event)
        if event.kind != "step_scheduled" or not event.num_scheduled_tokens:
            continue
        state, columns = fold.states[event.engine], {n: [] for n in (
            "token", "request_id", "row", "position", "logical_block", "offset", "table_index", "block_id", "slot")}
        for row, (request_id, n) in enumerate(event.num_scheduled_tokens.items()):
            request = state.requests[request_id]
            for position in range(request.num_computed_tokens - n, request.num_computed_tokens):
                logical, offset = divmod(position, 4)
                block_id = request.block_ids[0][logical]
                values = (len(columns["token"]), request_id, row, position, logical, offset, row * 16 + logical,
                          block_id, block_id * 4 + offset)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
        mapped = SlotsMapped(group=0, block_size=4, table_stride=16, **columns)
        written = KvWritten(layer="model.layers.0", group=0, source="torch", checksum=[0] * len(columns["token"]),
                            **{name: columns[name] for name in ("token", "slot", "block_id", "offset")})
        for e in (mapped, written):
            e.engine, e.step, e.proc = event.engine, event.step, event.proc
            result.append(e)
    return renumbered(result)


def test_slots_follow_from_the_tables_and_the_kernel_writes_them():
    events = with_slots(run(num_steps=15))
    assert check(Trace(events)) is None
    for column in ("position", "logical_block", "offset", "table_index", "block_id", "slot"):
        bad = change(events, "slots_mapped", **{column: lambda e, c=column: [getattr(e, c)[0] + 1, *getattr(e, c)[1:]]})
        violation = check(Trace(bad))
        assert violation is not None and violation.invariant == "slots", column
    violation = check(Trace(change(events, "kv_written", slot=lambda e: [e.slot[0] + 1, *e.slot[1:]])))
    assert violation is not None and violation.invariant == "writes"


def test_a_run_that_gets_nowhere_raises_an_alarm():
    """A prompt that fits the door's check but never the pool: 0.14.1 would spin for ever."""
    core = new_core(3, enable_prefix_caching=False)
    with recording() as events:
        trace.enter(core)
        core.scheduler.add_request(make_request(core.scheduler, "r0", list(range(5)), 30))
        for _ in range(STEPS_WITHOUT_PROGRESS + 20):
            core.step()
    notices = []
    assert check(Trace(events), notices) is None
    assert len(notices) == 1 and "livelock" in notices[0] and "r0" in notices[0]


def test_a_request_that_others_overtake_for_long_raises_an_alarm():
    """One urgent request after the other takes the only seat; in order of arrival nobody starves."""
    for policy, starves in ((Priority(), True), (FirstComeFirstServed(), False)):
        core = new_core(20, max_num_seqs=1, policy=policy)
        with recording() as events:
            core.add_request(make_request(core.scheduler, "patient", [1, 2, 3], 3, priority=5))
            for i in range(STEPS_OVERTAKEN + 10):
                core.add_request(make_request(core.scheduler, f"r{i}", [1, 2, i], 1, priority=1))
                core.step()
        notices = []
        assert check(Trace(events), notices) is None
        assert [n.startswith("starvation: patient has waited") for n in notices] == [True] * starves


HELD = {  # what the state, or another record, says as well
    "block_allocated": ("block_id", "ref_cnt"),
    "block_cached": ("block_id", "hash", "ref_cnt"),
    "block_evicted": ("block_id", "hash"),
    "block_freed": ("block_id", "free_queue_index", "hash", "ref_cnt"),
    "block_touched": ("block_id", "hash", "ref_cnt", "was_free"),
    "blocks_appended": ("block_ids", "replaced", "request_id", "row"),
    "queue_not_reached": ("count", "first_request_id", "queue"),
    "request_considered": ("budget_after", "budget_before", "num_tokens_granted", "outcome", "request_id"),
    "request_preempted": ("budget_after", "request_id"),
    "row_assigned": ("block_ids", "request_id", "row"),
    "row_freed": ("request_id", "row"),
    "row_moved": ("from_row", "request_id", "row"),
    "slots_allocated": ("hit_block_ids", "needed_from_free_hits", "needed_new", "new_block_ids", "num_free_after",
                        "num_free_before"),
    "slots_refused": ("num_free",),
    "step_scheduled": ("num_scheduled_tokens", "total_num_scheduled_tokens"),
    "step_started": ("num_free_blocks", "num_running", "num_waiting"),
}  # fmt: skip


def test_a_damaged_field_is_found_where_something_holds_it_and_is_never_worse_than_a_sentence():
    """One field of one record after the other is another; check and fold refuse it, or go on."""
    events = run(num_steps=40, num_blocks=14, block_sizes=(4, 8), windows=(None, 9), max_num_batched_tokens=12)
    tried = Counter()
    for i, event in enumerate(events):
        for name in set(event.__struct_fields__) - ENVELOPE:
            value = getattr(event, name)
            tried[event.kind, name] += 1
            if value in (None, [], "") or event.kind == "trace_header" or tried[event.kind, name] > 4:
                continue
            damaged = [*events[:i], replace(event, **{name: spoiled(value, tried[event.kind, name])}), *events[i + 1 :]]
            violation = check(Trace(damaged))
            assert violation is not None or name not in HELD.get(event.kind, ()), f"{event.kind}.{name}"
            assert violation is None or violation.invariant in INVARIANTS
            with suppress(UserError):
                fold_all(damaged)
    assert {kind for kind, _ in tried} >= set(HELD)


def test_a_held_block_cannot_be_evicted():
    events = run()
    i = next(i for i, e in enumerate(events) if e.kind == "block_cached")
    cached = events[i]
    evicted = BlockEvicted(block_id=cached.block_id, ref_cnt=0, group=0, request_id="r0", hash=cached.hash)
    evicted.engine, evicted.step = cached.engine, cached.step
    violation = check(Trace(renumbered([*events[: i + 1], evicted, *events[i + 1 :]])))
    assert violation.seq == cached.seq + 1 and "was evicted while it is held" in violation.message


def test_a_trace_without_blocks_is_refused_with_the_level_it_needs():
    core = new_core(9)
    with recording("decisions") as events:
        for _ in random_actions(random.Random(0), core, 5):
            pass
    with pytest.raises(UserError, match="recorded at `decisions`; `check` needs `blocks`: re-run with --record blocks"):
        check(Trace(events))
