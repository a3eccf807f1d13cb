"""Public bug reports of engines of this kind, restated as scenarios: the rows about the control plane.

The number in a test's name is the row's in the collection this project started from. Block size is
4 unless said, the pool's size includes the null block, requests end after ``max_tokens``. A name
ends in ``faithful_to_0_14`` where the scheduler alone shows what the real vLLM 0.14 shows although
it is a fault, and in ``guarded`` where the engine around it keeps the fault from the user; the other
tests hold for both.
"""

from __future__ import annotations

from itertools import count

import pytest

from engines import Shape
from pagedlab.config import EngineConfig
from pagedlab.errors import UserError
from pagedlab.request import RequestStatus
from pagedlab.sched.output import ModelRunnerOutput
from pagedlab.trace.tracer import tracing


class CountingModel:
    """Says 50 in the first step, 51 in the second, whoever asks."""

    def __init__(self, scheduler):
        self.scheduler, self.counter, self.latest, self.meanwhile = scheduler, count(50), None, None

    def execute_model(self, output):
        self.latest, token = output, next(self.counter)
        requests = self.scheduler.requests
        behind = {r for r in output.num_scheduled_tokens if requests[r].num_computed_tokens < requests[r].num_tokens}
        if self.meanwhile:
            self.meanwhile()
        return ModelRunnerOutput({r: [] if r in behind else [token] for r in output.num_scheduled_tokens})

    def row_states(self):
        return []


class Run:
    """An engine and what came out of it. Without ``guards`` the scheduler is alone, as in the recorder."""

    def __init__(self, num_blocks, *, guards=True, budget=64, max_num_seqs=8, max_len=64, caching=True,
                 policy="fcfs", groups=((4, None),)):
        self.shape = Shape(num_blocks=num_blocks, groups=groups, enable_prefix_caching=caching, policy=policy,
                           max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_len)
        self.core, self.guards = self.shape.engine_core(), guards
        self.scheduler = self.core.scheduler
        self.core.executor = self.model = CountingModel(self.scheduler)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.text, self.ended, self.errors = {}, {}, {}

    def add(self, request_id, prompt, max_tokens=1, **options):
        request = self.shape.request(request_id, list(prompt), max_tokens, **options)
        (self.core if self.guards else self.scheduler).add_request(request)
        return request

    def step(self):
        """One step; what was scheduled."""
        if self.guards:
            outputs = self.core.step()
        else:
            output = self.scheduler.schedule()
            outputs = self.scheduler.update_from_output(output, self.model.execute_model(output))
        for o in outputs:
            self.text.setdefault(o.request_id, []).extend(o.new_token_ids)
            if o.finish_reason:
                self.ended[o.request_id] = o.finish_reason
                self.errors[o.request_id] = o.error
        return self.model.latest.num_scheduled_tokens

    def to_end(self, most=300):
        steps = [self.step()]
        while self.scheduler.requests and len(steps) < most:
            steps.append(self.step())
        return steps

    def table(self, request_id):
        """The block table of a scenario with one group."""
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return table

    @property
    def free(self):
        return self.pool.num_free_blocks


def new_table(run, request_id):
    """The table a new or resumed request was sent to the worker with."""
    output = run.model.latest
    for new in output.scheduled_new_reqs:
        if new.req_id == request_id:
            return new.block_ids[0]
    known = output.scheduled_cached_reqs
    assert request_id in known.resumed_req_ids
    return known.new_block_ids[known.req_ids.index(request_id)][0]


# ------------------------------------------------------------------ prefix cache


def test_row_1_a_fully_cached_prompt_still_computes_its_last_block():
    run = Run(10)
    run.add("A", range(1, 9))
    run.step()
    b = run.add("B", range(1, 9))
    assert run.step() == {"B": 4}
    assert b.num_cached_tokens == 4 and new_table(run, "B") == [1, 3]


def test_row_1_a_prompt_one_longer_than_the_cached_blocks_computes_one_token():
    run = Run(10)
    run.add("A", range(1, 10))
    run.step()
    b = run.add("B", range(1, 10))
    assert run.step() == {"B": 1}
    assert b.num_cached_tokens == 8 and new_table(run, "B") == [1, 2, 4]


def test_row_2_a_resumed_request_schedules_what_its_prefix_hit_leaves():
    run = Run(6, max_num_seqs=2)
    run.add("A", range(1, 9), 6)
    b = run.add("B", range(21, 29), 6)
    assert run.step() == {"A": 8, "B": 8}
    assert run.step() == {"A": 1}
    assert b.status is RequestStatus.PREEMPTED and run.free == 2
    assert [run.step() for _ in range(4)] == [{"A": 1}] * 4
    assert run.ended == {"A": "length"}
    assert run.step() == {"B": 5}
    assert b.num_computed_tokens == 9 and new_table(run, "B") == run.table("B") == [3, 4, 5]
    assert run.model.latest.scheduled_cached_reqs.num_computed_tokens == [4]
    assert len(run.to_end()) == 4
    assert run.text["B"] == [50, 56, 57, 58, 59, 60] and b.num_preemptions == 1


def test_row_3_a_request_preempted_while_decoding_computes_its_output_again_and_samples_once():
    run = Run(7, max_num_seqs=2)
    run.add("A", range(1, 9), 9)
    b = run.add("B", range(21, 29), 9)
    assert run.step() == {"A": 8, "B": 8}
    assert [run.step() for _ in range(4)] == [{"A": 1, "B": 1}] * 4
    before = list(run.text["B"])
    assert run.step() == {"A": 1}
    assert (b.num_computed_tokens, b.num_tokens, b.num_output_tokens) == (0, 13, 5)
    assert [r.request_id for r in run.scheduler.waiting] == ["B"]
    while "A" not in run.ended:
        run.step()
    assert run.scheduler.step_id == 8  # the ninth step
    assert run.step() == {"B": 5}
    assert new_table(run, "B") == [3, 4, 6, 5]
    assert run.model.latest.scheduled_cached_reqs.num_computed_tokens == [8]
    assert len(run.text["B"]) == 6
    run.to_end()
    assert len(run.text["B"]) == 9 and run.text["B"][:5] == before


def test_row_4_the_second_of_two_equal_prompts_in_one_step_shares_the_firsts_blocks():
    run = Run(12)
    run.add("A", range(1, 11), 5)
    run.add("B", range(1, 11), 5)
    assert run.step() == {"A": 10, "B": 2}
    assert (run.table("A"), run.table("B")) == ([1, 2, 3], [1, 2, 4])
    assert [run.pool.blocks[i].ref_cnt for i in (1, 2, 3, 4)] == [2, 2, 1, 1]


def test_row_4_two_equal_prompts_of_whole_blocks_leave_one_hash_on_two_blocks():
    run = Run(12)
    run.add("A", range(1, 9), 5)
    run.add("B", range(1, 9), 5)
    assert run.step() == {"A": 8, "B": 4}
    assert (run.table("A"), run.table("B")) == ([1, 2], [1, 3])
    assert run.pool.blocks[2].block_hash == run.pool.blocks[3].block_hash is not None


def test_row_27_a_window_group_hits_what_is_in_sight_only():
    run = Run(14, groups=((4, 4),))
    run.add("A", range(1, 18))
    run.step()
    run.pool._evict(run.pool.blocks[1], "test")
    b = run.add("B", range(1, 18))
    run.step()
    assert b.num_cached_tokens == 16 and new_table(run, "B") == [0, 0, 0, 4, 6]


def test_row_27_a_hit_of_a_hybrid_model_holds_in_both_groups():
    run = Run(30, groups=((4, None), (4, 4)))
    run.add("A", range(1, 18))
    run.step()
    b = run.add("B", range(1, 18))
    run.step()
    assert run.model.latest.scheduled_new_reqs[0].block_ids == ([1, 2, 3, 4, 11], [0, 0, 0, 9, 12])
    assert b.num_cached_tokens == 16


def test_row_27_without_the_full_groups_first_block_there_is_no_common_hit():
    run = Run(30, groups=((4, None), (4, 4)))
    run.add("A", range(1, 18))
    run.step()
    run.pool._evict(run.pool.blocks[1], "test")
    b = run.add("B", range(1, 18))
    run.step()
    assert b.num_cached_tokens == 0


def test_row_28_a_look_up_ends_at_the_first_missing_block():
    run = Run(12)
    run.add("A", range(1, 14))
    run.step()
    run.pool._evict(run.pool.blocks[1], "test")
    assert [bool(run.pool.blocks[i].block_hash) for i in (1, 2, 3)] == [False, True, True]
    b = run.add("B", range(1, 14))
    run.step()
    assert b.num_cached_tokens == 0 and new_table(run, "B") == [5, 6, 7, 8]


# ------------------------------------------------------------------ preemption and admission


def test_row_8_a_victim_already_scheduled_in_the_step_is_taken_out_of_it():
    run = Run(5, policy="priority")
    y = run.add("Y", [90, 91], 20, priority=9)
    run.step()
    run.add("X", range(1, 5), 20, priority=0)
    run.add("Z", range(11, 17), 20, priority=1)
    assert run.step() == {"Y": 1, "X": 4, "Z": 6}
    assert run.free == 0 and run.table("Y") == [1]
    assert run.step() == {"X": 1, "Z": 1}
    output = run.model.latest
    assert output.preempted_req_ids == ["Y"] and output.total_num_scheduled_tokens == 2
    assert "Y" not in output.scheduled_cached_reqs.req_ids and not output.scheduled_new_reqs
    assert output.scheduled_cached_reqs.new_block_ids[0] == ([1],)
    assert y.num_computed_tokens == 0


def test_row_9_nobody_is_admitted_in_a_preempting_step_or_past_a_head_that_does_not_fit_and_the_trace_tells_which():
    run = Run(6, max_num_seqs=4)
    run.add("A", range(1, 9), 6)
    run.add("B", range(21, 29), 6)
    run.step()
    run.add("C", [77], 1)
    with tracing("decisions") as trace:
        assert run.step() == {"A": 1}
        assert run.model.latest.preempted_req_ids == ["B"] and run.free == 2
        assert run.step() == {"A": 1} and run.free == 2
    first, second = (
        [e for e in trace if type(e).__name__ == "QueueNotReached" and e.step == step] for step in (1, 2)
    )
    assert [(e.queue, e.reason, e.count, e.first_request_id) for e in first] == [
        ("waiting", "preemption_this_step", 2, "B")
    ]
    assert [(e.queue, e.reason, e.count, e.first_request_id) for e in second] == [("waiting", "head_blocked", 1, "C")]
    assert (second[0].head_request_id, second[0].num_needed_blocks, second[0].num_free_blocks) == ("B", 3, 2)
    (refused,) = [e for e in trace if type(e).__name__ == "SlotsRefused" and e.request_id == "B" and e.step == 2]
    assert (refused.needed_from_free_hits, refused.needed_new, refused.num_needed) == ([2], [1], 3)
    assert refused.num_free == 2


def test_row_11_a_refused_look_up_leaves_the_hit_blocks_free():
    run = Run(7, max_num_seqs=4)
    run.add("A", range(1, 9))
    run.step()
    run.add("X", range(101, 113), 4)
    run.step()
    c = run.add("C", [*range(1, 9), *range(31, 39)])
    free = []
    for _ in range(3):
        assert run.step() == {"X": 1}
        assert [run.pool.blocks[i].ref_cnt for i in (1, 2)] == [0, 0]
        free.append(run.free)
    assert free == [2, 2, 6] and run.ended["X"] == "length"
    assert run.step() == {"C": 8} and c.num_cached_tokens == 8


def test_row_14_a_prompt_that_fills_the_context_is_refused_guarded():
    for budget in (64, 8):
        for length in (16, 17):
            run = Run(12, budget=budget, max_len=16)
            with pytest.raises(UserError, match=f"prompt of {length} tokens, but max_model_len is 16"):
                run.add("A", range(length), 4)
            assert not run.core.has_unfinished_requests() and run.free == 11


def test_row_14_a_prompt_that_fills_the_context_in_chunks_stands_still_faithful_to_0_14():
    run = Run(12, guards=False, budget=8, max_len=16)
    run.add("A", range(16), 4)
    assert [run.step() for _ in range(20)] == [{"A": 8}, {"A": 7}] + [{}] * 18
    assert "A" not in run.ended
    run = Run(12, guards=False, budget=64, max_len=16)
    run.add("A", range(16), 4)
    assert run.step() == {"A": 16} and run.ended == {"A": "length"}


TOO_LARGE = [
    pytest.param({"budget": 8, "caching": True}, id="chunks"),
    pytest.param({"budget": 8, "caching": False}, id="chunks_without_cache"),
    pytest.param({"budget": 64}, id="one_piece"),
]


@pytest.mark.parametrize("options", TOO_LARGE)
def test_row_15_a_request_larger_than_the_pool_is_refused_and_the_next_one_served_guarded(options):
    run = Run(6, **options)
    with pytest.raises(UserError, match=r"request A .* needs 10 blocks, but the pool has 5 usable blocks"):
        run.add("A", range(40), 2)
    run.add("B", [1, 2], 1)
    run.to_end()
    assert run.ended == {"B": "length"} and run.free == 5


@pytest.mark.parametrize("options", TOO_LARGE)
def test_row_15_a_request_larger_than_the_pool_that_got_in_is_ended_with_its_numbers_guarded(options):
    run = Run(6, **options)
    run.scheduler.add_request(run.shape.request("A", list(range(40)), 2))  # past the door
    run.add("B", [1, 2], 1)
    steps = run.to_end()
    assert len(steps) < 120
    assert run.ended == {"A": "error", "B": "length"}
    assert "request A" in run.errors["A"] and "needs 10 blocks and the pool has 5" in run.errors["A"]
    assert run.free == 5


def test_row_15_a_request_larger_than_the_pool_blocks_everything_faithful_to_0_14():
    expected = {
        "chunks": [{"A": 8}, {"A": 8}] + [{}] * 10,
        "chunks_without_cache": [{"A": 8}, {"A": 8}, {}] * 4,
        "one_piece": [{}] * 12,
    }
    for option in TOO_LARGE:
        run = Run(6, guards=False, **option.values[0])
        run.add("A", range(40), 2)
        run.add("B", [1, 2], 1)
        assert [run.step() for _ in range(12)] == expected[option.id]
        assert run.free == 5 and run.ended == {}


def test_row_16_a_pool_of_the_null_block_alone_is_a_configuration_error_guarded():
    with pytest.raises(UserError, match="num_blocks is 1: block 0 is the null block"):
        EngineConfig(num_blocks=1)
    with pytest.raises(UserError, match="needs 1 block, but the pool has 0 usable blocks"):
        Run(1).add("A", [1], 1)


def test_row_16_a_pool_of_the_null_block_alone_waits_silently_faithful_to_0_14():
    run = Run(1, guards=False)
    run.add("A", [1], 1)
    assert [run.step() for _ in range(5)] == [{}] * 5


def test_row_16_a_request_that_outgrows_the_pool_ends_with_an_error_that_names_it_guarded():
    run = Run(2)
    run.add("A", [1, 2, 3], 8)
    steps = run.to_end()
    assert steps[:2] == [{"A": 3}, {"A": 1}] and not any(steps[2:]) and len(steps) < 120
    assert run.ended == {"A": "error"} and run.text["A"] == [50, 51]
    assert "with 5 tokens it needs 2 blocks and the pool has 1 usable block " in run.errors["A"]


def test_row_16_a_request_that_outgrows_the_pool_waits_for_ever_faithful_to_0_14():
    run = Run(2, guards=False)
    a = run.add("A", [1, 2, 3], 8)
    assert [run.step() for _ in range(20)] == [{"A": 3}, {"A": 1}] + [{}] * 18
    assert a.status is RequestStatus.PREEMPTED and run.free == 1


def test_row_36_the_last_sampled_token_needs_no_slot():
    run = Run(3)
    run.add("A", range(8), 1)
    assert run.step() == {"A": 8} and run.ended == {"A": "length"}
    run = Run(12, max_len=16)
    a = run.add("A", range(13), 99)
    run.to_end()
    assert len(run.text["A"]) == 3 and a.num_computed_tokens == 15


# ------------------------------------------------------------------ blocks, budget, chunks


def test_row_17_the_token_that_fills_a_block_needs_no_new_one():
    run = Run(2, guards=False)
    a = run.add("A", [1, 2, 3], 8)
    run.step()
    assert run.step() == {"A": 1} and run.table("A") == [1]   # position 3, the block's last
    assert run.step() == {} and a.num_preemptions == 1        # position 4


def test_row_17_the_token_after_a_full_block_needs_one_in_its_own_step():
    run = Run(3)
    run.add("A", [1, 2, 3, 4], 8)
    run.step()
    assert run.table("A") == [1]
    run.step()
    assert run.table("A") == [1, 2] and run.model.latest.scheduled_cached_reqs.new_block_ids == [([2],)]


def test_row_18_a_chunk_that_is_not_the_last_brings_no_token():
    run = Run(12, budget=4)
    run.add("A", range(10), 2)
    steps, outputs, blocks = [], [], []
    while not run.ended:
        steps.append(run.step()["A"])
        outputs.append(len(run.text.get("A", [])))
        output = run.model.latest
        sent = [n.block_ids for n in output.scheduled_new_reqs] or output.scheduled_cached_reqs.new_block_ids
        blocks.append(sent[0] and sent[0][0])
    assert (steps, outputs, blocks) == ([4, 4, 2, 1], [0, 0, 1, 2], [[1], [2], [3], None])


def test_row_19_each_admitted_request_takes_from_the_budget():
    run = Run(12, budget=8)
    for n, request_id in enumerate("ABC"):
        run.add(request_id, range(10 * n, 10 * n + 4), 2)
    assert [run.step(), run.step()] == [{"A": 4, "B": 4}, {"A": 1, "B": 1, "C": 4}]
    run = Run(12, budget=8)
    for n, request_id in enumerate("AB"):
        run.add(request_id, range(10 * n, 10 * n + 6), 3)
    assert [run.step() for _ in range(3)] == [{"A": 6, "B": 2}, {"A": 1, "B": 4}, {"A": 1, "B": 1}]


# ------------------------------------------------------------------ ids and aborts


def test_row_34_an_id_in_use_is_refused_and_the_first_request_goes_on_guarded():
    run = Run(12)
    a = run.add("A", range(8), 4)
    run.step()
    table, length = run.table("A"), a.num_tokens
    with pytest.raises(UserError, match="request A is still running"):
        run.add("A", [1, 2, 3], 4)
    assert (run.table("A"), a.num_tokens, run.scheduler.requests["A"]) == (table, length, a)
    assert run.to_end() == [{"A": 1}] * 3
    assert run.text == {"A": [50, 51, 52, 53]} and run.free == 11


def test_row_34_an_aborted_id_may_come_again_before_the_next_step_and_only_the_first_is_aborted_guarded():
    run = Run(12)
    run.add("A", range(8), 4)
    run.step()
    run.core.abort_requests(["A"])
    assert run.free == 11
    second = run.add("A", [1, 2, 3], 4)
    assert run.step() == {"A": 3}
    output = run.model.latest
    assert output.finished_req_ids == ["A"]  # the first one: workers drop finished ids before they take new ones
    assert [n.prompt_token_ids for n in output.scheduled_new_reqs] == [[1, 2, 3]]
    run.to_end()
    assert second.num_output_tokens == 4 and run.ended == {"A": "length"} and run.free == 11


def test_row_34_an_id_in_use_breaks_the_scheduler_alone_faithful_to_0_14():
    run = Run(12, guards=False)
    run.add("A", range(8), 4)
    run.step()
    run.add("A", [1, 2, 3], 4)
    run.step()
    assert [r.request_id for r in run.scheduler.running] == ["A", "A"]  # on one record
    run.to_end()
    assert run.ended == {"A": "length"} and [r.request_id for r in run.scheduler.running] == ["A"]
    with pytest.raises(KeyError):
        run.step()


def test_row_35_an_abort_in_the_middle_of_a_chunked_prompt_leaks_nothing():
    run = Run(12, budget=4)
    run.add("A", range(10), 2)
    run.step()
    assert run.free == 10
    run.core.abort_requests(["A"])
    assert run.free == 11 and run.step() == {}


def test_row_35_an_abort_while_the_step_is_running_drops_its_token():
    run = Run(12, budget=16)
    a = run.add("A", range(10), 2)
    run.model.meanwhile = lambda: run.core.abort_requests(["A"])
    assert run.step() == {"A": 10}
    assert (run.text, a.num_output_tokens, run.free) == ({}, 0, 11)
    run.model.meanwhile = None
    run.step()
    assert run.model.latest.finished_req_ids == ["A"]
    run.step()
    assert run.model.latest.finished_req_ids == []
