"""How the work of a step grows, counted in function calls, so that no clock and no neighbour disturbs."""

from __future__ import annotations

import sys

import pytest

from engines import Shape
from pagedlab.request import RequestStatus


def count_calls(work):
    """Python and C functions called while ``work`` runs."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def decoding(num_requests, num_blocks=20_000, num_waiting=0):
    """An engine whose running requests have computed their prompts and are one step further."""
    shape = Shape(num_blocks=num_blocks, max_num_seqs=num_requests, max_num_batched_tokens=100_000,
                  max_model_len=200_000)
    core = shape.engine_core()
    for n in range(num_requests + num_waiting):
        core.add_request(shape.request(f"r{n}", [n, 1, 2, 3, 4], max_tokens=1000))
    core.step()
    core.step()
    return shape, core


def calls_of_a_step(core):
    scheduler = core.scheduler

    def step():
        output = scheduler.schedule()
        answers.append(output)

    answers = []
    schedule = count_calls(step)
    answer = core.executor.execute_model(answers[0])
    return schedule, count_calls(lambda: scheduler.update_from_output(answers[0], answer))


def test_a_step_costs_the_same_in_any_pool():
    costs = {n: calls_of_a_step(decoding(32, num_blocks=n)[1]) for n in (200, 100_000)}
    assert costs[200] == costs[100_000]


def test_a_step_costs_the_same_however_many_requests_wait():
    costs = {n: calls_of_a_step(decoding(8, num_waiting=n)[1]) for n in (10, 10_000)}
    assert costs[10] == costs[10_000]


def test_a_step_grows_linearly_in_the_requests_scheduled():
    few, many = (calls_of_a_step(decoding(n)[1]) for n in (64, 1024))
    for a, b in zip(few, many, strict=True):
        assert 14 < b / a < 17, (few, many)


def test_a_decode_step_of_a_request_takes_few_calls():
    """What a reader of the scheduler may expect of one request in one step; a loop gone wrong shows here."""
    schedule, update = calls_of_a_step(decoding(256)[1])
    assert schedule / 256 < 30 and update / 256 < 30


def test_hashing_is_linear_in_the_prompt_and_constant_for_an_output_token():
    shape = Shape()
    few = count_calls(lambda: shape.request("a", list(range(10_000))))
    many = count_calls(lambda: shape.request("b", list(range(100_000))))
    assert 9.5 < many / few < 10.5
    short, long = shape.request("a", [1] * 10), shape.request("b", [1] * 100_002)
    assert count_calls(lambda: short.append_output_token(1)) == count_calls(lambda: long.append_output_token(1))


def test_adding_and_aborting_many_waiting_requests_is_linear():
    costs = []
    for n in (1_000, 10_000):
        shape, core = decoding(2)
        requests = [shape.request(f"w{i}", [1, 2]) for i in range(n)]
        added = count_calls(lambda: [core.scheduler.add_request(r) for r in requests])  # noqa: B023
        ids = [r.request_id for r in requests]
        aborted = count_calls(lambda: core.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED))  # noqa: B023
        costs.append((added, aborted))
        assert len(core.scheduler.waiting) == 0
    for few, many in zip(*costs, strict=True):
        assert 9 < many / few < 11, costs


@pytest.mark.parametrize("num_waiting", [10, 5_000])
def test_a_traced_step_costs_the_same_however_many_requests_wait(num_waiting):
    from pagedlab.trace.tracer import trace

    _, core = decoding(4, num_waiting=num_waiting)
    events = []
    trace.start(events, record="decisions", snapshot_every=10_000)
    try:
        core.step()  # with the snapshot, which lists them all
        before = len(events)
        calls = count_calls(core.step)
    finally:
        trace.stop()
    assert len(events) - before < 40 and calls < 1_000
