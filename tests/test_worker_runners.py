"""Both runners behind one seam: rows, tables and slots on any schedule, without a model."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import GROUPS, Shape, act_at_random, random_shape
from invariants import Watched
from pagedlab.config import EngineConfig
from pagedlab.conformance.single_engine import one_group, run_config
from pagedlab.conformance.worker import read_message
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from pagedlab.trace.events import (
    BlocksAppended,
    RowAssigned,
    RowFreed,
    RowMoved,
    SlotsMapped,
    TablesGathered,
    TokensSampled,
)
from pagedlab.trace.tracer import trace
from pagedlab.worker.persistent_batch import PersistentBatch, PersistentBatchRunner
from pagedlab.worker.state_table import StateTableRunner
from test_worker_recordings import NAMES, run

CPU = torch.device("cpu")
RUNNERS = [PersistentBatchRunner, StateTableRunner]
POISON = 2**31 - 1


def make_runner(runner_class, config, kv_cache_config, max_model_len, how="torch"):
    runner = runner_class(config, device=CPU, index_kernels=how)
    runner.initialize_kv_cache(kv_cache_config, max_model_len)
    return runner


def message(new=(), cached=(), counts=None, preempted=(), finished=(), resumed=()):
    """new: (id, prompt, computed, blocks); cached: (id, computed, new blocks); one group."""
    greedy = SamplingParams(temperature=0)
    return SchedulerOutput(
        [NewRequestData(r, prompt, greedy, (blocks,), computed) for r, prompt, computed, blocks in new],
        CachedRequestData([r for r, *_ in cached], set(resumed),
                          [None if blocks is None else (blocks,) for *_, blocks in cached],
                          [computed for _, computed, _ in cached], [0 for _ in cached], {}),
        counts or {}, sum((counts or {}).values()), [0], list(preempted), list(finished),
    )  # fmt: skip


class RunnersOnASchedule:
    """An engine on a random schedule whose executor hands every message to each runner.

    Each is held to the scheduler's own state, and all to each other. The public part is what
    ``act_at_random`` drives.
    """

    def __init__(self, shape, runner_classes=RUNNERS, how="torch"):
        self.core = shape.engine_core()
        self.core.executor = self
        self.scheduler = self.core.scheduler
        config = EngineConfig(max_num_seqs=shape.max_num_seqs, max_num_batched_tokens=shape.max_num_batched_tokens)
        groups = tuple(
            KVCacheGroupSpec((f"layer{i}",), AttentionSpec(size, 1, 1, "float32", window))
            for i, (size, window) in enumerate(shape.groups)
        )
        kv_cache_config = KVCacheConfig(shape.num_blocks, groups)
        self.runners = [make_runner(c, config, kv_cache_config, shape.max_model_len, how) for c in runner_classes]
        self.meanwhile = []  # done while the model is busy
        self.seen = set()    # what kinds of steps there were

    def add(self, request, *, at_the_door=True):
        (self.core if at_the_door else self.scheduler).add_request(request)

    def step(self):
        return self.core.step()

    def execute_model(self, scheduler_output):
        answers = []
        self.seen.update(kinds_of(scheduler_output, self.scheduler, self.runners[0]))
        for runner in self.runners:
            runner._update_states(scheduler_output)
            poison_stale_tails(runner)
            if not scheduler_output.total_num_scheduled_tokens:
                continue
            batch = runner._prepare_inputs(scheduler_output)
            self.check(batch, scheduler_output, runner)
            sampled = {
                req_id: [] if discarded else [len(req_id) + runner.requests[req_id].num_tokens % 3]
                for req_id, discarded in zip(batch.req_ids, batch.sample_is_discarded, strict=True)
            }
            runner.keep_tokens(sampled)
            if trace.decisions and runner is self.runners[0]:  # what a sampler would say
                for row in runner.row_states():
                    if row.request_id in sampled:
                        tokens = sampled[row.request_id]
                        trace.emit(TokensSampled(request_id=row.request_id, row=row.row, token_id=sum(tokens),
                                                 kept=bool(tokens)))
            answers.append((self.by_request(batch), sampled))
        while self.meanwhile:
            self.meanwhile.pop()()
        if not answers:
            return ModelRunnerOutput({})
        assert all(answer == answers[0] for answer in answers)
        return ModelRunnerOutput(answers[0][1])

    def by_request(self, batch):
        """What reaches the model, whatever the order: (request, position) -> token and slots."""
        rows, positions, ids = batch.req_indices.tolist(), batch.positions.tolist(), batch.input_ids.tolist()
        slots = zip(*(mapping.tolist() for mapping in batch.slot_mappings), strict=True)
        columns = zip(rows, positions, ids, slots, strict=True)
        return {(batch.req_ids[row], position): (token, where) for row, position, token, where in columns}

    def check(self, batch, scheduler_output, runner):
        """slot -> block and offset -> request and position -> token, by the scheduler's own tables."""
        requests = self.scheduler.requests
        for (req_id, position), (token, slots) in self.by_request(batch).items():
            tables = self.scheduler.kv_cache_manager.get_block_ids(req_id)
            assert requests[req_id].all_token_ids[position] == token
            for group, slot, table in zip(self.scheduler.kv_cache_manager.groups, slots, tables, strict=True):
                block_id, offset = divmod(slot, group.block_size)
                assert (table.index(block_id) * group.block_size + offset, block_id > 0) == (position, True)
        for req_id, seq_len in zip(batch.req_ids, batch.seq_lens.tolist(), strict=True):
            request = requests[req_id]
            discarded = batch.sample_is_discarded[batch.req_ids.index(req_id)]
            assert discarded == (seq_len < request.num_tokens)
        assert dict(zip(batch.req_ids, batch.num_scheduled_tokens, strict=True)) == dict(
            scheduler_output.num_scheduled_tokens
        )
        if runner.has_state_rows:
            assert batch.num_scheduled_tokens == sorted(batch.num_scheduled_tokens)
        else:
            assert batch.req_ids == runner.batch.req_ids

    def row_states(self):
        return self.runners[0].row_states()


def kinds_of(output, scheduler, runner):
    """What makes a schedule worth testing."""
    tables = [t for r in scheduler.running for t in scheduler.kv_cache_manager.get_block_ids(r.request_id)]
    kinds = {
        "hit": any(new.num_computed_tokens for new in output.scheduled_new_reqs),
        "resumed": output.scheduled_cached_reqs.resumed_req_ids,
        "preempted": output.preempted_req_ids,
        "unseen finished": any(r not in runner.requests for r in output.finished_req_ids),
        "empty": not output.num_scheduled_tokens,
        "out of window": any(0 in table for table in tables),
        "chunk": any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running),
        "passed over": any(
            r.request_id in runner.requests and r.request_id not in output.num_scheduled_tokens
            for r in scheduler.running
        ),
    }
    return {kind for kind, is_so in kinds.items() if is_so}


def poison_stale_tails(runner, poison=POISON):
    """No valid entry lies there: whoever reads one takes a token to a place that no pool has."""
    if isinstance(runner, PersistentBatchRunner):
        for table in runner.batch.block_tables:
            for row in range(len(table.host)):
                used = table.num_blocks_per_row[row] if row < runner.batch.num_reqs else 0
                table.host[row, used:] = poison
        return
    for group, table in enumerate(runner.block_tables.block_tables.tables):
        for row in range(len(table)):
            used = row in runner.request_table.req_state_indices.values()
            table[row, int(runner.block_tables.num_blocks[group, row]) if used else 0 :] = poison
        runner.block_tables.input_block_tables.tables[group].fill_(poison)


def run_at_random(rng, driven, shape, num_steps):
    num_added = 0
    for _ in range(num_steps):
        num_added = act_at_random(rng, driven, shape, num_added)
        driven.step()


# ------------------------------------------------------------------ any schedule


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from(GROUPS))
def test_both_runners_write_every_token_to_the_same_slot_on_any_schedule(seed, groups):
    rng = random.Random(seed)
    shape = dataclasses.replace(random_shape(rng), groups=groups)
    run_at_random(rng, RunnersOnASchedule(shape), shape, 30)


def test_random_schedules_have_everything_that_can_happen_to_a_row():
    """The property test above is only worth something if such schedules occur."""
    seen = set()
    for seed in range(60):
        rng = random.Random(seed)
        shape = random_shape(rng)
        driven = RunnersOnASchedule(shape)
        run_at_random(rng, driven, shape, 30)
        seen |= driven.seen
    assert seen == {
        "hit", "resumed", "preempted", "unseen finished", "empty", "out of window", "chunk", "passed over",
    }  # fmt: skip


def test_runner_that_maps_from_position_zero_is_noticed(monkeypatch):
    """The counterpart: a worker that forgets computed tokens does not pass."""
    update = PersistentBatch.update_request

    def forget(batch, row, request):
        update(batch, row, request)
        batch.num_computed_tokens[row] = 0

    monkeypatch.setattr(PersistentBatch, "update_request", forget)
    rng = random.Random(1)
    shape = Shape(num_blocks=20)
    with pytest.raises((AssertionError, ValueError)):
        run_at_random(rng, RunnersOnASchedule(shape), shape, 60)


@pytest.mark.parametrize("seed", range(4))
def test_interpreted_index_kernels_do_the_same_on_any_schedule(seed):
    pytest.importorskip("triton")
    rng = random.Random(seed)
    shape = dataclasses.replace(random_shape(rng), groups=((4, None), (4, 5), (8, 12)))
    run_at_random(rng, RunnersOnASchedule(shape, how="interpreted"), shape, 15)


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_fold_of_the_events_is_the_live_engine_after_every_step(runner_class):
    for seed in range(20):
        rng = random.Random(seed)
        shape = random_shape(rng)
        watched = Watched(RunnersOnASchedule(shape, [runner_class]).core)
        with watched.recording("tensors"):
            run_at_random(rng, watched, shape, 25)


# ------------------------------------------------------------------ rows of the persistent batch


def persistent(max_num_seqs=4):
    config = EngineConfig(block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    return make_runner(PersistentBatchRunner, config, one_group(4), 32)


def seat(runner, names, first_block=1):
    runner._update_states(message(
        new=[(r, [1, 2, 3], 0, [first_block + i]) for i, r in enumerate(names)], counts=dict.fromkeys(names, 3)
    ))  # fmt: skip


def test_last_row_moves_to_the_lowest_hole():
    runner = persistent()
    seat(runner, "abcd")
    runner._update_states(message(cached=[(r, 3, None) for r in "bcd"], counts=dict.fromkeys("bcd", 1), finished="a"))
    assert runner.batch.req_ids == ["d", "b", "c"]
    assert [row.block_ids for row in runner.row_states()] == [[[4]], [[2]], [[3]]]


def test_new_request_takes_the_lowest_hole_and_nothing_moves():
    runner = persistent()
    seat(runner, "abcd")
    runner._update_states(message(
        new=[("e", [9], 0, [8])], cached=[("b", 3, None), ("d", 3, None)], counts={"b": 1, "d": 1, "e": 1},
        finished="ac",
    ))  # fmt: skip
    assert runner.batch.req_ids == ["e", "b", "d"]  # d closed the hole that was left


def test_new_requests_are_seated_before_returning_ones():
    runner = persistent()
    seat(runner, "ab")
    runner._update_states(message(cached=[("a", 3, None)], counts={"a": 1}, preempted="b"))
    runner._update_states(message(
        new=[("c", [5], 0, [7])], cached=[("a", 4, None), ("b", 0, [8])], resumed="b", counts={"a": 1, "b": 3, "c": 1}
    ))  # fmt: skip
    assert runner.batch.req_ids == ["a", "c", "b"]


def test_request_passed_over_loses_its_row_and_sits_down_again_with_its_tokens():
    runner = persistent()
    seat(runner, "abc")
    runner.keep_tokens({"a": [50], "b": [60], "c": [70]})
    runner._update_states(message(cached=[("a", 3, None)], counts={"a": 1}, preempted="b"))
    assert runner.batch.req_ids == ["a"]
    runner._update_states(message(cached=[("a", 4, None), ("c", 3, [9])], counts={"a": 1, "c": 1}))
    assert runner.batch.req_ids == ["a", "c"]
    assert runner.row_states()[1].block_ids == [[3, 9]]
    assert runner.batch.token_ids[1, :4].tolist() == [1, 2, 3, 70]


def test_returning_request_brings_a_whole_new_table():
    runner = persistent()
    seat(runner, "ab")
    runner._update_states(message(cached=[("a", 3, None)], counts={"a": 1}, preempted="b"))
    runner._update_states(message(cached=[("a", 4, None), ("b", 0, [6])], resumed="b", counts={"a": 1, "b": 3}))
    assert runner.row_states()[1].block_ids == [[6]]


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_finished_ids_that_were_never_seen_are_ignored_and_empty_steps_only_clear_rows(runner_class):
    config = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    runner = make_runner(runner_class, config, one_group(4), 32)
    seat(runner, "ab")
    assert runner.execute_model(message(finished=["a", "b", "nobody"])).sampled_token_ids == {}
    assert runner.row_states() == [] and runner.requests == {}


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_id_that_ends_and_comes_again_in_one_message_starts_anew(runner_class):
    config = EngineConfig(block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
    runner = make_runner(runner_class, config, one_group(4), 32)
    seat(runner, "a")
    again = message(new=[("a", [7, 8], 0, [5])], counts={"a": 2}, finished="a")
    runner._update_states(again)
    assert runner._prepare_inputs(again).input_ids.tolist() == [7, 8]
    assert [row.block_ids for row in runner.row_states()] == [[[5]]]


# ------------------------------------------------------------------ rows of the state table


def test_state_rows_are_a_stack_so_that_eight_seats_give_seven_then_six():
    config = EngineConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    runner = make_runner(StateTableRunner, config, one_group(4), 32)
    seat(runner, "ab")
    assert runner.request_table.req_state_indices == {"a": 7, "b": 6}
    runner._update_states(message(
        new=[("c", [1], 0, [9])], cached=[("b", 3, None)], counts={"b": 1, "c": 1}, finished="a"
    ))  # fmt: skip
    assert runner.request_table.req_state_indices == {"b": 6, "c": 7}


def test_state_row_is_given_up_at_preemption_and_kept_when_passed_over():
    config = EngineConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    runner = make_runner(StateTableRunner, config, one_group(4), 32)
    seat(runner, "abc")
    runner._update_states(message(cached=[("a", 3, None)], counts={"a": 1}, preempted="b"))
    assert runner.request_table.req_state_indices == {"a": 7, "c": 5}
    runner._update_states(message(cached=[("c", 3, None), ("b", 0, [6])], resumed="b", counts={"b": 3, "c": 1}))
    assert runner.request_table.req_state_indices == {"a": 7, "c": 5, "b": 6}


def test_fewest_new_tokens_come_first_and_ties_keep_schedule_order():
    config = EngineConfig(block_size=16, max_num_seqs=8, max_num_batched_tokens=64)
    runner = make_runner(StateTableRunner, config, one_group(16), 64)
    counts = {"a": 8, "b": 1, "c": 8, "d": 1}
    first = message(new=[(r, [1] * n, 0, [i + 1]) for i, (r, n) in enumerate(counts.items())], counts=counts)
    runner._update_states(first)
    batch = runner._prepare_inputs(first)
    assert (batch.req_ids, batch.idx_mapping.tolist()) == (["b", "d", "a", "c"], [6, 4, 7, 5])


# ------------------------------------------------------------------ what is stale, and what is said


@pytest.mark.parametrize("runner_class", RUNNERS)
@pytest.mark.parametrize("name", ["s07-preempt-resume", "s12-priority-preempt", "x02-random"])
def test_stale_tails_reach_neither_slots_nor_events(runner_class, name):
    document = run(name)
    config = run_config(document)
    clean, poisoned = (
        make_runner(runner_class, config, one_group(config.block_size), document["config"]["max_model_len"])
        for _ in range(2)
    )
    requests = {entry["req_id"]: entry for entry in document["requests"]}
    for step in document["steps"]:
        output = read_message(step["scheduler_output"], requests)
        results = []
        for runner in (clean, poisoned):
            runner._update_states(output)
            if runner is poisoned:
                poison_stale_tails(runner)
            if step["inputs"] is None:
                continue
            events = []
            trace.start(events, record="tensors")
            try:
                results.append(runner._prepare_inputs(output).slot_mappings[0].tolist())
            finally:
                trace.stop()
            results.append([e.slot for e in events if isinstance(e, SlotsMapped)])
            results.append([e.block_table for e in events if isinstance(e, TablesGathered)])
            runner.keep_tokens(dict(zip(step["rows"]["req_ids"], step["sampled_token_ids"], strict=True)))
        assert results[:3] == results[3:]
        assert str(POISON) not in str(results)


@pytest.mark.parametrize("runner_class", RUNNERS)
@pytest.mark.parametrize("name", NAMES)
def test_row_events_rebuild_the_rows(runner_class, name):
    """Folding row_assigned, row_freed, row_moved and blocks_appended gives the live rows after each step."""
    document = run(name)
    config = run_config(document)
    runner = make_runner(runner_class, config, one_group(config.block_size), document["config"]["max_model_len"])
    requests = {entry["req_id"]: entry for entry in document["requests"]}
    rows = {}
    for step in document["steps"]:
        events = []
        trace.start(events, record="blocks")
        try:
            runner._update_states(read_message(step["scheduler_output"], requests))
        finally:
            trace.stop()
        for event in events:
            if isinstance(event, RowFreed):
                assert rows.pop(event.row)[0] == event.request_id
            elif isinstance(event, RowAssigned):
                assert event.row not in rows
                rows[event.row] = (event.request_id, [list(ids) for ids in event.block_ids])
            elif isinstance(event, RowMoved):
                rows[event.row] = rows.pop(event.from_row)
            elif isinstance(event, BlocksAppended):
                for mine, new in zip(rows[event.row][1], event.block_ids, strict=True):
                    mine += new
        runner.keep_tokens(dict(zip(step["rows"]["req_ids"], step["sampled_token_ids"], strict=True)))
        assert {s.row: (s.request_id, s.block_ids) for s in runner.row_states()} == rows


def test_slot_of_the_event_is_the_kernels_and_the_derived_chain_leads_to_it():
    runner = make_runner(PersistentBatchRunner, EngineConfig(block_size=4, max_num_seqs=2), one_group(4), 32)
    first = message(new=[("a", list(range(6)), 0, [9, 3])], counts={"a": 6})
    runner._update_states(first)
    events = []
    trace.start(events, record="tensors")
    try:
        batch = runner._prepare_inputs(first)
    finally:
        trace.stop()
    (event,) = [e for e in events if isinstance(e, SlotsMapped)]
    assert event.slot == batch.slot_mappings[0].tolist() == [36, 37, 38, 39, 12, 13]
    derived = [b * event.block_size + o for b, o in zip(event.block_id, event.offset, strict=True)]
    assert derived == event.slot
    places = zip(event.row, event.logical_block, strict=True)
    assert event.table_index == [row * event.table_stride + block for row, block in places]
