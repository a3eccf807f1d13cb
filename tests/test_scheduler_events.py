"""What the trace says about a decision is what made it: each reason in a scenario of its own."""

from __future__ import annotations

import pytest

from engines import Shape
from pagedlab.kv.hashing import short_hash
from pagedlab.sampling_params import SamplingParams
from pagedlab.trace.events import (
    PrefixCacheReset,
    PrefixMatched,
    QueueNotReached,
    RequestAborted,
    RequestConsidered,
    RequestPreempted,
)
from pagedlab.trace.tracer import tracing

A = list(range(1, 14))  # three full blocks and a token


class Engine:
    def __init__(self, **config):
        self.shape = Shape(**{"num_blocks": 20, "max_num_batched_tokens": 50, **config})
        self.core = self.shape.engine_core()
        self.pool = self.core.scheduler.kv_cache_manager.block_pool

    def add(self, request_id, prompt, max_tokens=1, **options):
        request = self.shape.request(request_id, prompt, max_tokens, **options)
        self.core.add_request(request)
        return request

    def run(self, *arguments, **options):
        self.add(*arguments, **options)
        while self.core.has_unfinished_requests():
            self.core.step()


def of_kind(trace, cls, request_id=None):
    return [e for e in trace if isinstance(e, cls) and (request_id is None or e.request_id == request_id)]


def last_match(trace):
    return of_kind(trace, PrefixMatched)[-1]


# ------------------------------------------------------------------ why a prefix hit ended


def test_a_prompt_nobody_had_before_was_never_cached():
    engine = Engine()
    with tracing("decisions") as trace:
        engine.run("a", A)
    event = last_match(trace)
    assert (event.why, event.num_computed_tokens, event.stopped_at_block) == ("never_cached", 0, 0)
    assert (event.key_differs, event.similar_block_id, event.group) == (None, None, 0)


@pytest.mark.parametrize("prompt, options, hit, differs, similar", [
    ([*A[:4], 99, *A[5:]], {}, 4, None, None),                         # another first token: nothing is close
    ([*A[:5], 99, *A[6:]], {}, 4, "tokens", 2),                        # the same parent and start, other tokens
    ([99, *A[1:4], *A[4:]], {}, 0, None, None),
    ([*A[4:8], *A[4:]], {}, 0, "parent", 2),                           # block 2's tokens after nothing
    (A, {"cache_salt": "mine"}, 0, "cache_salt", 1),
])  # fmt: skip
def test_a_miss_says_which_part_of_the_key_differs(prompt, options, hit, differs, similar):
    engine = Engine()
    with tracing("decisions") as trace:
        engine.run("a", A)
        engine.run("b", prompt, **options)
    event = last_match(trace)
    assert (event.why, event.num_computed_tokens, event.stopped_at_block) == ("never_cached", hit, hit // 4)
    if differs != "parent":
        assert (event.key_differs, event.similar_block_id) == (differs, similar)
    else:  # of a first block, a salt would differ in the same way: no parent either
        assert event.similar_block_id == similar and event.key_differs in ("parent", "cache_salt")


def test_a_hit_that_ends_at_an_evicted_block_says_when_and_for_whom():
    engine = Engine(num_blocks=8)
    with tracing("decisions") as trace:
        engine.run("a", A)                      # blocks 1, 2, 3, 4; 3 usable ones are untouched
        engine.run("big", list(range(50, 70)))  # takes 5, 6, 7, 4, 3
        engine.run("b", A)
    event = last_match(trace)
    assert (event.why, event.num_computed_tokens, event.stopped_at_block) == ("evicted", 8, 2)
    assert (event.evicted_at_step, event.evicted_for) == (1, "big")


def test_what_was_evicted_before_a_reset_is_still_called_evicted():
    engine = Engine(num_blocks=8)
    with tracing("decisions") as trace:
        engine.run("a", A)
        engine.run("big", list(range(50, 70)))
        assert engine.core.reset_prefix_cache()
        engine.run("b", A)
    assert (last_match(trace).why, last_match(trace).num_computed_tokens) == ("reset", 0)
    engine = Engine(num_blocks=5)
    with tracing("decisions") as trace:
        engine.run("a", A)
        engine.run("big", list(range(50, 63)))
        assert engine.core.reset_prefix_cache()
        engine.run("b", A)
    assert (last_match(trace).why, last_match(trace).evicted_for) == ("evicted", "big")


def test_what_a_reset_forgot_is_not_called_evicted():
    engine = Engine()
    with tracing("decisions") as trace:
        engine.run("a", A)
        assert engine.core.reset_prefix_cache()
        engine.run("b", A)
    assert last_match(trace).why == "reset"
    assert [(e.done, e.num_used_blocks) for e in of_kind(trace, PrefixCacheReset)] == [(True, 0)]


def test_a_long_trace_forgets_the_oldest_keys_and_does_not_claim_to_know(monkeypatch):
    monkeypatch.setattr("pagedlab.kv.prefix_history.MAX_KEYS", 4)
    engine = Engine(num_blocks=8)
    history = engine.pool.history
    with tracing("decisions") as trace:
        engine.run("a", A)
        assert len(history._keys) == 3 and history.num_recorded == engine.pool.num_ever_cached
        engine.run("big", list(range(50, 70)))
        assert len(history._keys) == len(history._by_tokens) == len(history._by_start) == 4
        engine.run("b", [*A[:4], 99, 99, 99, 99, 99])
    assert last_match(trace).why == "miss"


def test_a_trace_that_joined_late_does_not_claim_to_know():
    engine = Engine()
    engine.run("a", A)
    with tracing("decisions") as trace:
        engine.run("b", [99, *A])
    assert last_match(trace).why == "miss"


@pytest.mark.parametrize("length, hit, why", [
    (13, 12, "partial_block"), (12, 8, "last_token_must_be_computed"), (3, 0, "partial_block"),
    (4, 0, "last_token_must_be_computed"), (11, 8, "partial_block"),
])  # fmt: skip
def test_a_hit_as_long_as_it_can_be_ends_before_the_last_token(length, hit, why):
    engine = Engine()
    engine.run("a", A)
    with tracing("decisions") as trace:
        engine.run("b", A[:length])
    assert (last_match(trace).num_computed_tokens, last_match(trace).why) == (hit, why)


def test_without_caching_or_with_prompt_logprobs_the_cache_is_not_asked():
    engine = Engine(enable_prefix_caching=False)
    with tracing("decisions") as trace:
        engine.run("a", A)
    assert last_match(trace).why == "caching_off"
    engine = Engine()
    engine.run("a", A)
    request = engine.shape.request("b", A, 1)
    request.sampling_params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with tracing("decisions") as trace:
        engine.core.add_request(request)
        engine.core.step()
    assert (last_match(trace).why, last_match(trace).num_computed_tokens) == ("prompt_logprobs", 0)


def test_the_window_group_that_cut_a_hit_is_named_with_the_block_it_lacks():
    engine = Engine(num_blocks=40, groups=((4, None), (4, 12), (4, 5)))
    with tracing("decisions") as trace:
        engine.run("a", A)
        assert engine.pool.blocks[11].group_id == 2  # its third block there
        engine.pool._evict(engine.pool.blocks[11], "somebody")
        engine.run("b", A)
    event = last_match(trace)
    assert (event.why, event.group, event.num_computed_tokens) == ("window_group", 2, 8)
    assert (event.evicted_for, event.similar_block_id) == ("somebody", 11)


def test_the_hash_in_the_event_is_the_one_that_was_looked_for():
    engine = Engine()
    engine.run("a", A)
    with tracing("decisions") as trace:
        b = engine.add("b", [*A[:8], 98, 98, 98, 98, 1])
        engine.core.step()
    assert last_match(trace).hash == short_hash(b.block_hashes[2])


# ------------------------------------------------------------------ why a grant is smaller than wanted


def considered(trace, request_id):
    return of_kind(trace, RequestConsidered, request_id)


@pytest.mark.parametrize("config, granted, reason, limit", [
    ({}, 13, "all_tokens", None),
    ({"max_num_batched_tokens": 5}, 5, "token_budget", 5),
    ({"long_prefill_token_threshold": 6}, 6, "long_prefill_threshold", 6),
    ({"long_prefill_token_threshold": 6, "max_num_batched_tokens": 5}, 5, "token_budget", 5),
    ({"long_prefill_token_threshold": 5, "max_num_batched_tokens": 6}, 5, "long_prefill_threshold", 5),
])  # fmt: skip
def test_a_grant_names_what_cut_it(config, granted, reason, limit):
    engine = Engine(**config)
    with tracing("decisions") as trace:
        engine.add("a", A)
        engine.core.step()
    (event,) = considered(trace, "a")
    assert (event.num_tokens_wanted, event.num_tokens_granted) == (13, granted)
    assert (event.reason, event.limit) == (reason, limit)
    assert event.budget_before - event.budget_after == granted


def test_a_prompt_too_long_for_what_is_left_of_the_budget_waits_when_chunking_is_off():
    engine = Engine(enable_chunked_prefill=False, max_num_batched_tokens=14)
    with tracing("decisions") as trace:
        for n, request_id in enumerate("abc"):
            engine.add(request_id, [n, *A[1:]])
        engine.core.step()
    (event,) = considered(trace, "b")
    assert (event.outcome, event.reason, event.num_tokens_wanted) == ("refused", "chunked_prefill_off", 13)
    (behind,) = of_kind(trace, QueueNotReached)
    assert (behind.reason, behind.head_request_id, behind.first_request_id) == ("head_blocked", "b", "c")


def test_a_refusal_for_lack_of_blocks_has_its_numbers():
    engine = Engine(num_blocks=6)
    with tracing("decisions") as trace:
        engine.add("a", A, 5)
        engine.add("b", list(range(40, 52)), 5)
        engine.core.step()
    (event,) = considered(trace, "b")
    assert (event.outcome, event.reason) == ("refused", "not_enough_free_blocks")
    assert (event.num_needed_blocks, event.num_free_blocks) == (3, 1)


# ------------------------------------------------------------------ why a scan ended


def test_who_was_not_reached_is_counted_from_the_first():
    engine = Engine(max_num_seqs=2)
    with tracing("decisions") as trace:
        for n in range(5):
            engine.add(f"r{n}", [n, n], 3)
        engine.core.step()
    (event,) = of_kind(trace, QueueNotReached)
    assert (event.queue, event.count, event.first_request_id) == ("waiting", 3, "r2")
    assert (event.reason, event.limit) == ("max_num_seqs_reached", 2)


def test_running_requests_behind_a_used_up_budget_are_named():
    engine = Engine(max_num_batched_tokens=4)
    with tracing("decisions") as trace:
        for n in range(4):
            engine.add(f"r{n}", [n], 9)
        engine.core.step()
        engine.add("long", A, 1)
        engine.core.step()
    event = of_kind(trace, QueueNotReached)[-1]
    assert (event.queue, event.count, event.first_request_id, event.reason) == (
        "waiting", 1, "long", "token_budget_exhausted")


def test_a_victim_names_who_it_made_room_for_and_what_it_lost():
    engine = Engine(num_blocks=5)
    with tracing("decisions") as trace:
        engine.add("a", A[:8], 6)
        engine.add("b", list(range(40, 48)), 6)
        engine.core.step()
        engine.core.step()
    (event,) = of_kind(trace, RequestPreempted)
    assert (event.request_id, event.on_behalf_of, event.rule) == ("b", "a", "the last of the running list")
    assert (event.num_tokens_lost, event.num_tokens_taken_back, event.block_ids) == (8, 0, [[3, 4]])
    assert (event.num_free_before, event.num_free_after) == (0, 2)


def test_an_abort_says_which_queue_it_emptied():
    engine = Engine(max_num_seqs=1)
    with tracing("steps") as trace:
        engine.add("a", A, 9)
        engine.add("b", A, 9)
        engine.core.step()
        engine.core.abort_requests(["b", "nobody", "a", "b"])
    assert [(e.request_id, e.queue) for e in of_kind(trace, RequestAborted)] == [("b", "waiting"), ("a", "running")]
