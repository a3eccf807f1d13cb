"""What cannot be served is refused at the door or ended, with its numbers; nothing spins, nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines import GROUPS, Shape
from pagedlab.engine.guards import MAX_STEPS_WITHOUT_PROGRESS, explain_hopeless, most_blocks_held
from pagedlab.errors import UserError
from pagedlab.sampling_params import SamplingParams
from pagedlab.trace.events import RequestFinished, RequestRefused
from pagedlab.trace.tracer import tracing


def engine(**config):
    shape = Shape(**config)
    return shape, shape.engine_core()


def steps_to_end(core, most=1000):
    """Outputs by request, until nothing is left; fails if that takes ``most`` steps."""
    ended = {}
    for step in range(most):
        if not core.has_unfinished_requests():
            return step, ended
        ended.update((o.request_id, o) for o in core.step() if o.finish_reason)
    raise AssertionError(f"unfinished after {most} steps: {list(core.scheduler.requests)}")


# ------------------------------------------------------------------ the door


@pytest.mark.parametrize("config, prompt_length, reason, message, numbers", [
    ({}, 0, "empty_prompt", "request A has an empty prompt: give at least one token.", {}),
    ({"max_model_len": 20}, 20, "prompt_too_long",
     "request A has a prompt of 20 tokens, but max_model_len is 20 and one token of output needs room: "
     "shorten the prompt or raise max_model_len.", {"num_prompt_tokens": 20, "max_model_len": 20}),
    ({"max_model_len": 20}, 21, "prompt_too_long", "prompt of 21 tokens, but max_model_len is 20",
     {"num_prompt_tokens": 21, "max_model_len": 20}),
    ({"num_blocks": 6}, 21, "never_fits",
     "request A has a prompt of 21 tokens that needs 6 blocks, but the pool has 5 usable blocks: "
     "shorten the prompt or give the pool more blocks (num_blocks or kv_cache_memory).",
     {"num_needed_blocks": 6, "num_usable_blocks": 5}),
    ({"num_blocks": 7, "groups": ((4, None), (4, None))}, 13, "never_fits", "needs 8 blocks, but the pool has 6",
     {"num_needed_blocks": 8, "num_usable_blocks": 6}),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, 9, "larger_than_budget",
     "prompt of 9 tokens, but the budget is 8 tokens a step and chunked prefill is off",
     {"num_prompt_tokens": 9, "max_num_batched_tokens": 8}),
])  # fmt: skip
def test_a_hopeless_request_is_refused_with_the_numbers(config, prompt_length, reason, message, numbers):
    shape, core = engine(**config)
    with tracing("steps") as trace, pytest.raises(UserError) as refusal:
        core.add_request(shape.request("A", list(range(prompt_length))))
    assert message in str(refusal.value)
    (event,) = [e for e in trace if isinstance(e, RequestRefused)]
    assert (event.request_id, event.reason, event.message, event.numbers) == ("A", reason, str(refusal.value), numbers)
    assert not core.has_unfinished_requests() and not len(core.scheduler.waiting)


def test_min_tokens_beyond_max_model_len_are_refused_and_what_just_fits_is_served():
    shape, core = engine(max_model_len=20)
    request = shape.request("A", list(range(15)))
    request.sampling_params = SamplingParams(min_tokens=6, max_tokens=8)
    with tracing("steps") as trace, pytest.raises(UserError, match="min_tokens 6, but max_model_len is 20: lower "
                                                                   "min_tokens to 5 or less, or raise max_model_len"):
        core.add_request(request)
    (event,) = [e for e in trace if isinstance(e, RequestRefused)]
    assert (event.reason, event.numbers["min_tokens"]) == ("min_tokens_too_large", 6)
    request.sampling_params = SamplingParams(min_tokens=5, max_tokens=8)
    core.add_request(request)
    assert steps_to_end(core)[1]["A"].finish_reason == "length"


@pytest.mark.parametrize("config, prompt_length", [
    ({"max_model_len": 20}, 19),
    ({"num_blocks": 6}, 20),
    ({"num_blocks": 9, "groups": ((4, None), (4, None))}, 13),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, 8),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 4}, 20),
    ({"num_blocks": 5, "groups": ((4, 8),), "max_num_batched_tokens": 4}, 30),  # a window, in chunks
])  # fmt: skip
def test_the_largest_request_that_fits_is_let_in_and_served(config, prompt_length):
    shape, core = engine(**config)
    core.add_request(shape.request("A", list(range(prompt_length)), max_tokens=1))
    _, ended = steps_to_end(core)
    assert ended["A"].finish_reason == "length"


def test_an_id_is_free_again_once_its_request_has_ended():
    shape, core = engine()
    core.add_request(shape.request("A", [1], max_tokens=1))
    with pytest.raises(UserError, match="request A is still running: wait for it, abort it, or use another id"):
        core.add_request(shape.request("A", [1]))
    steps_to_end(core)
    core.add_request(shape.request("A", [1], max_tokens=1))
    assert steps_to_end(core)[1]["A"].finish_reason == "length"


def test_the_scheduler_itself_refuses_nothing():
    """It is faithful to 0.14.1; only the engine around it guards."""
    shape, core = engine(num_blocks=3)
    core.scheduler.add_request(shape.request("A", list(range(30))))
    assert [core.scheduler.schedule().num_scheduled_tokens for _ in range(3)] == [{}, {}, {}]


@given(length=st.integers(1, 60), budget=st.integers(1, 30), num_blocks=st.integers(2, 20),
       threshold=st.sampled_from((0, 3, 9)), caching=st.booleans(),
       groups=st.sampled_from(GROUPS))
@example(length=55, budget=20, num_blocks=4, threshold=3, caching=False, groups=((4, 8),))  # no hit helps it back
@settings(max_examples=300, deadline=None)
def test_whoever_passes_the_door_alone_gets_its_first_token(length, budget, num_blocks, threshold, caching, groups):
    """And whoever is refused for blocks would never have got one: the door is exact."""
    shape, core = engine(num_blocks=num_blocks, groups=groups, max_num_batched_tokens=budget, max_model_len=61,
                         long_prefill_token_threshold=threshold, enable_prefix_caching=caching)
    request = shape.request("A", list(range(length)), max_tokens=1)
    try:
        core.add_request(request)
    except UserError:
        assert most_blocks_held(core.scheduler, length) > num_blocks - 1
        core.scheduler.add_request(request)  # past the door
        for _ in range(4 * length + 5):
            output = core.scheduler.schedule()
            core.scheduler.update_from_output(output, core.executor.execute_model(output))
        assert request.num_output_tokens == 0
        return
    _, ended = steps_to_end(core, most=200)
    assert ended["A"].finish_reason == "length"


# ------------------------------------------------------------------ the watch


def test_exactly_the_request_at_fault_is_ended_after_100_steps_and_the_others_go_on():
    shape, core = engine(num_blocks=6)
    core.add_request(shape.request("grows", [1, 2, 3], max_tokens=100))  # 20 tokens fit
    core.add_request(shape.request("short", [4], max_tokens=2))
    core.add_request(shape.request("next", [5, 6], max_tokens=3))
    _, ended = steps_to_end(core)
    assert {r: o.finish_reason for r, o in ended.items()} == {"short": "length", "next": "length", "grows": "error"}
    assert core.scheduler.kv_cache_manager.block_pool.num_free_blocks == 5


def test_the_sentence_and_the_trace_have_the_numbers():
    shape, core = engine(num_blocks=3)
    core.add_request(shape.request("grows", [1, 2, 3], max_tokens=100))
    with tracing("steps") as trace:
        _, ended = steps_to_end(core)
    assert ended["grows"].error == (
        "request grows made no progress in 100 steps: with 9 tokens it needs 3 blocks and the pool has 2 usable "
        "blocks (num_blocks counts the null block too); give the pool more blocks or ask for fewer tokens."
    )
    (event,) = [e for e in trace if isinstance(e, RequestFinished)]
    assert (event.finish_reason, event.num_output_tokens) == ("error", 6)
    assert event.numbers == {
        "num_tokens": 9, "num_needed_blocks": 3, "num_usable_blocks": 2, "steps_without_progress": 100,
    }  # fmt: skip


@pytest.mark.parametrize("config, says", [
    ({}, "with 13 tokens it needs 4 blocks and the pool has 3 usable blocks (num_blocks counts"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 12}, "with 13 tokens it needs 4 blocks and the pool"),
])
def test_a_request_that_outgrows_the_pool_blames_no_budget_and_nobody_else(config, says):
    shape, core = engine(num_blocks=4, max_num_seqs=1, **config)
    core.add_request(shape.request("grows", [1] * 12, max_tokens=9))
    core.add_request(shape.request("waits", [1], max_tokens=1))
    _, ended = steps_to_end(core)
    assert says in ended["grows"].error and "waits" not in ended["grows"].error and ended["waits"].error is None


@pytest.mark.parametrize("others, says", [
    ([], "the pool has 5 usable blocks (num_blocks"), (["b"], "5 usable blocks, for which b competed (num_blocks"),
    (["c", "b"], "5 usable blocks, for which b and others competed (num_blocks"),
])
def test_who_would_fit_alone_hears_who_competed(others, says):
    shape, core = engine(num_blocks=6)
    for request_id in ("a", *others):
        core.add_request(shape.request(request_id, [1] * 9))
    message, numbers = explain_hopeless(core.scheduler, core.scheduler.requests["a"])
    assert "with 9 tokens it needs 3 blocks and the pool has" in message and says in message
    assert (numbers["num_needed_blocks"], numbers["num_usable_blocks"]) == (3, 5)


def test_a_prompt_in_pieces_of_one_token_needs_no_chunking():
    """vLLM cuts by the threshold also where chunked prefill is off."""
    shape, core = engine(enable_chunked_prefill=False, long_prefill_token_threshold=1, max_num_batched_tokens=4)
    core.add_request(shape.request("A", [1] * 9, max_tokens=1))
    assert steps_to_end(core)[1]["A"].finish_reason == "length"


def test_requests_that_end_in_the_step_they_begin_are_progress():
    shape, core = engine(max_num_seqs=1)
    for n in range(MAX_STEPS_WITHOUT_PROGRESS + 5):
        core.add_request(shape.request(f"r{n}", [1], max_tokens=1))
    _, ended = steps_to_end(core)
    assert {o.finish_reason for o in ended.values()} == {"length"}


def test_it_takes_100_steps_without_progress_not_fewer():
    shape, core = engine(num_blocks=3)
    core.add_request(shape.request("grows", [1, 2, 3], max_tokens=100))
    progress = 6  # steps that bring a token: 3 + 5 tokens fit, the sixth token needs no slot
    for _ in range(progress + MAX_STEPS_WITHOUT_PROGRESS - 1):
        core.step()
        assert core.has_unfinished_requests()
    (output,) = core.step()
    assert output.finish_reason == "error" and not core.has_unfinished_requests()


def test_an_ended_request_is_reported_to_the_worker_once():
    shape, core = engine(num_blocks=3)
    core.add_request(shape.request("grows", [1, 2, 3], max_tokens=100))
    steps_to_end(core)
    assert core.scheduler.schedule().finished_req_ids == ["grows"]
    assert core.scheduler.schedule().finished_req_ids == []


def test_a_request_behind_a_hopeless_one_is_served_in_every_policy():
    for policy in ("fcfs", "priority"):
        shape, core = engine(num_blocks=4, policy=policy)
        core.scheduler.add_request(shape.request("huge", list(range(30)), priority=0))  # past the door
        core.add_request(shape.request("small", [1], max_tokens=3, priority=1))
        steps, ended = steps_to_end(core)
        assert {r: o.finish_reason for r, o in ended.items()} == {"huge": "error", "small": "length"}
        assert steps < 2 * MAX_STEPS_WITHOUT_PROGRESS


def test_two_hopeless_requests_are_ended_one_after_the_other():
    shape, core = engine(num_blocks=4)
    for request_id in ("one", "two"):
        core.scheduler.add_request(shape.request(request_id, list(range(30))))
    core.add_request(shape.request("small", [1], max_tokens=3))
    steps, ended = steps_to_end(core)
    assert [o.finish_reason for o in ended.values()] == ["error", "error", "length"]
    assert list(ended) == ["one", "two", "small"] and steps < 3 * MAX_STEPS_WITHOUT_PROGRESS


def test_computing_the_same_tokens_again_is_no_progress():
    """Without caching an impossible prompt in chunks is computed again and again: it looks busy and is not."""
    shape, core = engine(num_blocks=6, max_num_batched_tokens=8, enable_prefix_caching=False)
    core.scheduler.add_request(shape.request("huge", list(range(30))))
    steps, ended = steps_to_end(core)
    assert ended["huge"].finish_reason == "error" and steps <= MAX_STEPS_WITHOUT_PROGRESS + 5


def test_a_long_prompt_in_small_chunks_is_progress():
    shape, core = engine(num_blocks=100, max_num_batched_tokens=1, max_model_len=400)
    core.add_request(shape.request("long", [0] * 300, max_tokens=1))
    steps, ended = steps_to_end(core)
    assert steps == 300 and ended["long"].finish_reason == "length"


def test_a_preempted_request_longer_than_a_step_is_ended_with_the_budget_as_the_reason():
    """With chunked prefill off its prompt fitted in one piece, prompt and output together do not."""
    shape, core = engine(num_blocks=6, enable_chunked_prefill=False, max_num_batched_tokens=8,
                         enable_prefix_caching=False)
    core.add_request(shape.request("A", [1] * 4, max_tokens=9))
    core.add_request(shape.request("B", [2] * 4, max_tokens=9))
    _, ended = steps_to_end(core)
    assert {r: o.finish_reason for r, o in ended.items()} == {"A": "length", "B": "error"}
    assert ended["B"].error == (
        "request B made no progress in 100 steps: it was preempted and has 9 tokens to compute again, but the budget "
        "is 8 tokens a step and chunked prefill is off; switch it on or raise max_num_batched_tokens."
    )


def test_an_id_that_comes_again_starts_from_nothing():
    shape, core = engine(num_blocks=100, max_num_batched_tokens=1, max_model_len=400)
    core.add_request(shape.request("long", [0] * 300, max_tokens=1))
    for _ in range(250):
        core.step()
    core.abort_requests(["long"])
    core.add_request(shape.request("long", [1] * 300, max_tokens=1))
    steps, ended = steps_to_end(core)
    assert steps == 300 and ended["long"].finish_reason == "length"


def test_an_idle_engine_is_not_hopeless():
    shape, core = engine()
    for _ in range(3 * MAX_STEPS_WITHOUT_PROGRESS):
        assert core.step() == []
    core.add_request(shape.request("A", [1], max_tokens=1))
    assert steps_to_end(core)[0] == 1


def test_thrashing_requests_that_get_somewhere_are_left_alone():
    """Preemption back and forth for hundreds of steps, but each finishes."""
    shape, core = engine(num_blocks=12, max_num_seqs=6, max_model_len=44)
    for n in range(12):
        core.add_request(shape.request(f"r{n}", [n] * 9, max_tokens=30))
    _, ended = steps_to_end(core, most=2000)
    assert {o.finish_reason for o in ended.values()} == {"length"}
