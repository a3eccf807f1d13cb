"""`pagedlab why`: the branch that decided, in words with its numbers."""

from __future__ import annotations

import random
import re

import pytest

from pagedlab.errors import UserError
from pagedlab.scenarios.library import builtin_names, load_scenario
from pagedlab.scenarios.run import run
from pagedlab.sched.policy import Priority
from pagedlab.trace.events import (
    QueueNotReached,
    RequestAborted,
    RequestAdded,
    RequestConsidered,
    RequestFinished,
    RequestPreempted,
    StepStarted,
)
from pagedlab.trace.state import Fold
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import trace as tracer
from pagedlab.trace.tracer import tracing
from pagedlab.trace.why import why
from standin import make_request
from test_trace_fold import CONFIGS, new_core, random_actions, recording


def told(name, **changes):
    with tracing("decisions") as trace:
        run(load_scenario(name).with_config(**changes))
    return trace


def sentences(trace, request_id, step=None):
    return "\n".join(why(trace, request_id, step).lines)


# ------------------------------------------------------------------ why was it not scheduled?


def test_looked_at_and_refused_gives_the_blocks_it_needs_and_those_that_are_free():
    text = sentences(told("head-of-line"), "r1", 1)
    assert "r1 was looked at in the waiting queue and refused: 16 tokens need 4 blocks (4 new) and 2 are free" in text


def test_free_hits_count_as_needed():
    text = sentences(told("free-hits"), "r2", 2)
    assert "6 tokens need 4 blocks (2 new + 2 hit but free) and 3 are free" in text


def test_never_reached_behind_a_blocked_head():
    answer = why(told("head-of-line"), "r2", 1)
    assert answer.data == {"request_id": "r2", "step": 1, "outcome": "not_reached", "queue": "waiting",
                           "reason": "head_blocked"}
    assert "r1 stands at the head of the queue and could not be scheduled" in answer.lines[0]
    assert "16 tokens need 4 blocks (4 new) and 2 are free" in answer.lines[0]


def test_never_reached_because_the_budget_was_used_up_names_who_used_it():
    text = sentences(told("budget"), "r2", 0)
    assert "the step's budget of 12 tokens was used up before its turn (r0 10, r1 2)" in text


def test_never_reached_because_all_seats_are_taken():
    assert "all 2 seats were taken" in sentences(told("seats"), "r2", 0)


def test_never_reached_because_the_step_preempted():
    text = sentences(told("no-admission"), "r2", 1)
    assert "the step preempted (r1 for itself), and a step that preempts admits no one" in text


def test_refused_because_chunked_prefill_is_off():
    trace = told("chunking-off")
    texts = [sentences(trace, r, s) for r in trace.requests for s in trace.steps if s >= 0]
    assert any("in one piece" in t and "chunked prefill is off" in t for t in texts)
    assert any("nobody overtakes it" in t and "chunked prefill is off" in t for t in texts)


def test_a_piece_that_the_threshold_cut_and_that_does_not_fit_is_named_with_its_own_size():
    trace = told("chunking-off", long_prefill_token_threshold=7)
    texts = [sentences(trace, r, s) for r in trace.requests for s in trace.steps if s >= 0]
    assert any("wants 7 tokens in one piece (of 8, cut to long_prefill_token_threshold)" in t for t in texts)


# ------------------------------------------------------------------ why fewer tokens?


def test_fewer_tokens_than_wanted_names_the_limit_and_who_went_before():
    text = sentences(told("budget"), "r1", 0)
    assert "got 2 of the 10 tokens it wanted, cut to what was left of the token budget (2 tokens after r0 10)" in text
    text = sentences(told("long-prefill-threshold"), "r0", 0)
    assert "cut to long_prefill_token_threshold (4)" in text


# ------------------------------------------------------------------ why preempted?


def test_preempted_names_who_needed_how_many_blocks_and_the_rule():
    text = sentences(told("victim-already-scheduled"), "r0", 2)
    assert "r0 was preempted for r1 (1 token needs 1 block (1 new) and 0 are free)" in text
    assert "the rule chose the largest priority value, then the latest arrival" in text
    assert "It lost 3 tokens of computed KV; 1 of its blocks went to the free queue (0 free before, 1 after)" in text
    assert "What it had been granted in this same step, 1 token, was taken back" in text


def test_self_preemption_says_itself():
    assert "r1 was preempted for itself (1 token needs 1 block" in sentences(told("self-preemption"), "r1", 1)


# ------------------------------------------------------------------ why did the prefix hit stop?


def prefix_story(first, second, salts=(None, None), num_blocks=20, between=None, block_size=4):
    """What `why` says about the second of two requests that are one after the other alone in the engine."""
    core = new_core(num_blocks, block_sizes=(block_size,), max_model_len=64, max_num_batched_tokens=64)
    with recording("decisions") as events:
        for i, (prompt, salt) in enumerate(zip((first, second), salts, strict=True)):
            core.add_request(make_request(core.scheduler, f"r{i}", prompt, 1, cache_salt=salt))
            while core.has_unfinished_requests():
                core.step()
            if i == 0 and between is not None:
                between(core)
    trace = Trace(events)
    return sentences(trace, "r1", trace.requests["r1"].finished.step)


PROMPT = list(range(20, 32))


def test_a_hit_that_stops_before_the_last_token():
    text = prefix_story(PROMPT, PROMPT)
    assert "8 of its 12 tokens hit (block 1, 2); it stopped at block 2: the last token must be computed" in text
    assert "hits are whole blocks, so 4 tokens remain." in text


def test_a_prefix_shorter_than_a_block():
    text = prefix_story(PROMPT, PROMPT[:3])
    assert "all its 3 tokens cannot fill a block of 4, and only full blocks are reusable" in text


def test_a_rest_that_does_not_fill_a_block():
    text = prefix_story(PROMPT, PROMPT[:6])
    assert "4 of its 6 tokens hit (block 1); it stopped at block 1: the rest, 2 tokens, cannot fill a block" in text


def test_other_tokens_after_the_same_beginning():
    text = prefix_story(PROMPT, [*PROMPT[:5], 99, *PROMPT[6:]])
    assert "4 of its 12 tokens hit (block 1); it stopped at block 1: no block with this key was ever cached" in text
    assert "what came before is the same, but its tokens are others" in text


def test_the_same_tokens_after_another_beginning():
    text = prefix_story(PROMPT, [1, 2, 3, 4, *PROMPT[4:8], 5, 6])
    assert "0 of its 10 tokens hit" in text
    other_start = prefix_story(PROMPT, [*PROMPT[4:8], *PROMPT[4:8], 5, 6])
    assert "its tokens are the same" in other_start


def test_another_cache_salt():
    text = prefix_story(PROMPT, PROMPT, ("a", "b"))
    assert "its tokens are the same, but its cache salt is another" in text


def test_evicted_names_the_step_and_for_whom():
    def use_up(core):
        core.add_request(make_request(core.scheduler, "big", list(range(200, 228)), 1))
        while core.has_unfinished_requests():
            core.step()

    text = prefix_story(PROMPT, PROMPT, num_blocks=8, between=use_up)
    assert "a block with this key was cached and has been evicted since" in text
    assert "until step 1, when it was handed to big" in text


def test_forgotten_in_a_reset():
    text = prefix_story(PROMPT, PROMPT, between=lambda core: core.reset_prefix_cache())
    assert "a block with this key was cached before the prefix cache was reset" in text


def test_caching_switched_off():
    assert "prefix caching is switched off" in sentences(told("caching-off"), "r1", 3)


def test_a_prompt_that_max_model_len_leaves_nothing_to_compute_is_skipped():
    """The door refuses it; past the door it waits for ever, as in 0.14.1."""
    core = new_core(20, max_model_len=12, max_num_batched_tokens=8)
    with recording("decisions") as events:
        tracer.enter(core)
        core.scheduler.add_request(make_request(core.scheduler, "r0", [1] * 12))
        for _ in range(3):
            core.step()
    (line,) = why(Trace(events), "r0", 2).lines
    assert line.startswith("r0 was looked at in the running queue and skipped: max_model_len leaves it nothing to")


# ------------------------------------------------------------------ the journey


def test_a_journey_has_a_line_per_change_and_sums_that_are_true():
    answer = why(told("no-admission"), "r1")
    assert answer.lines == [
        "before step 0: added with 8 tokens",
        "step 0: admitted: got all 8 tokens it lacked; no prefix hit: no block with this key was ever cached",
        "step 1: preempted for itself, 8 tokens of KV lost (chosen: the last of the running list)",
        "steps 2-4: not scheduled: 1 token needs 3 blocks (1 new + 2 hit but free) and 2 are free",
        "step 5: not scheduled: 5 tokens need 3 blocks (2 new + 1 hit but free) and 1 is free",
        answer.lines[5],
        "steps 7-10: 1 token each",
        "step 10: finished: length after 8 prompt and 6 output tokens",
        answer.lines[8],
    ]
    assert answer.lines[5].startswith("step 6: admitted: 4 tokens from the prefix cache, got all 5 tokens it lacked; "
                                      "the hit stopped at block 1: block 4 held that key")
    assert "4 steps in the queue" in answer.lines[8]
    del answer.data["queue_ns"]
    assert answer.data == {"request_id": "r1", "queue_steps": 4, "num_cached_tokens": 4, "num_recomputed_tokens": 4,
                           "num_preemptions": 1, "num_output_tokens": 6}


MANY_VICTIMS = {"num_blocks": 12, "max_num_batched_tokens": 7, "max_num_seqs": 6, "policy": Priority()}


@pytest.mark.parametrize("seed, config", [
    *((seed, {"num_blocks": 8, "max_num_batched_tokens": 7}) for seed in (0, 1, 2, 4, 5, 6)),
    *((seed, MANY_VICTIMS) for seed in (0, 16, 19)),
    *((seed, {**MANY_VICTIMS, "num_blocks": 8, "max_num_batched_tokens": 9, "long_prefill_token_threshold": 2,
              "enable_prefix_caching": False}) for seed in (7, 22, 40)),  # victims that were computing again
])  # fmt: skip
def test_recomputed_tokens_are_those_computed_more_than_once(seed, config):
    """Counted independently: positions that a step computes again although they were computed before."""
    core = new_core(**config)
    with recording("decisions") as events:
        for _ in random_actions(random.Random(seed), core, 60):
            pass
    trace, computed, again = Trace(events), {}, {}
    for e in trace.filter("step_scheduled"):
        for entry in (*e.new, *e.cached):
            start = entry.num_computed_tokens
            known = computed.setdefault(entry.request_id, set())
            positions = set(range(start, start + e.num_scheduled_tokens[entry.request_id]))
            again[entry.request_id] = again.get(entry.request_id, 0) + len(positions & known)
            known |= set(range(start)) | positions
    for request_id in trace.requests:
        data = why(trace, request_id).data
        assert data["num_recomputed_tokens"] == again.get(request_id, 0), request_id
        mine = trace.requests[request_id]
        preempted = [e for e in mine if type(e) is RequestPreempted and e.request_id == request_id]
        assert data["num_preemptions"] == len(preempted)
        if mine.finished is not None:
            assert data["num_output_tokens"] == mine.finished.num_output_tokens
    assert any(again.values())


@pytest.mark.parametrize("config", [*CONFIGS, MANY_VICTIMS, {"num_blocks": 8, "policy": Priority()}])
@pytest.mark.parametrize("num_steps_before", (0, 15))
def test_queues_and_times_in_the_answers_are_those_of_the_fold(config, num_steps_before):
    core = new_core(**config)
    actions = random_actions(random.Random(4), core, num_steps_before + 40)
    for _ in range(num_steps_before):
        next(actions)
    with recording("blocks") as events:
        for _ in actions:
            pass
    trace, fold, num_waited, starts = Trace(events), Fold(), {}, {}
    for event in events:
        fold.apply(event)
        if type(event) is StepStarted:
            state = fold.states[core.engine_id]
            starts[event.step] = {r: "running" if r in state.running else "waiting" for r in state.requests}
    for number, queues in starts.items():
        for request_id, queue in queues.items():
            mine = [e for e in trace.steps[number] if getattr(e, "request_id", None) == request_id]
            looked_at = [e for e in mine if type(e) is RequestConsidered]
            answer = why(trace, request_id, number)
            admitted = bool(looked_at) and queue == "waiting" and looked_at[0].outcome == "scheduled"
            num_waited[request_id] = num_waited.get(request_id, 0) + (queue == "waiting" and not admitted)
            if any(type(e) is RequestPreempted for e in mine):
                assert answer.data["outcome"] == "preempted"
            elif looked_at:
                assert answer.data["outcome"] == looked_at[0].outcome
                if looked_at[0].outcome == "scheduled":
                    first = f"{request_id} was {'admitted' if admitted else 'running'} and got"
                    assert any(line.startswith(first) for line in answer.lines)
            else:
                assert (answer.data["outcome"], answer.data["queue"]) == ("not_reached", queue)
                assert answer.lines[0].startswith(f"{request_id} was {queue} and was not looked at")
                (missed,) = (e for e in trace.steps[number] if type(e) is QueueNotReached and e.queue == queue)
                first = missed.first_request_id
                assert answer.lines[1].endswith("(it stood first)." if first == request_id else f"(from {first} on).")
            assert not any("(block )" in line for line in answer.lines)
    for request_id in {r for queues in starts.values() for r in queues}:
        answer, request = why(trace, request_id), trace.requests[request_id]
        s = "" if (n := num_waited.get(request_id, 0)) == 1 else "s"
        assert answer.data["queue_steps"] == n and f"In all: {n} step{s} in the queue" in answer.lines[-1]
        for e in request:
            between = f"after step {e.step}" if e.step >= 0 else "before step 0"
            if type(e) is RequestAdded:
                assert answer.lines[0].startswith(f"{between}: added with {len(e.prompt_token_ids)} token")
            elif type(e) is RequestAborted:
                assert answer.lines[-2] == f"{between}: cancelled while {e.queue}"
            elif type(e) is RequestPreempted and e.request_id == request_id and e.num_tokens_taken_back:
                said = [line for line in answer.lines if line.startswith(f"step {e.step}: ")]
                assert len(said) == 1 and said[0].startswith(f"step {e.step}: preempted for {e.on_behalf_of}, ")
                decodes = (re.match(r"steps (\d+)-(\d+): 1 token each", line) for line in answer.lines)
                assert not any(m and int(m[1]) <= e.step <= int(m[2]) for m in decodes)
            elif type(e) is RequestFinished and e.finish_reason != "abort":
                assert answer.lines[-2].startswith(f"step {e.step}: finished: {e.finish_reason} after")


@pytest.mark.parametrize("name", [n for n in builtin_names() if not load_scenario(n).needs_model])
def test_every_request_has_an_answer_in_every_step_of_every_scenario(name):
    trace = told(name)
    for request_id, request in trace.requests.items():
        assert len(why(trace, request_id).lines) >= 1
        for step in [s for s in trace.steps if s >= 0]:
            answer = why(trace, request_id, step)
            assert answer.lines and answer.data["outcome"], (request_id, step)
        assert [e for e in request if type(e) is RequestFinished] or trace.filter("request_refused", request=request_id)


def test_a_request_that_was_there_when_tracing_began_has_a_journey():
    core = new_core(20)
    core.add_request(make_request(core.scheduler, "old", list(range(8)), 6))
    core.step()
    with recording("decisions") as events:
        for _ in range(3):
            core.step()
    lines = why(Trace(events), "old").lines
    assert lines[0] == "after step 0: when tracing began it was running, 8 of 9 tokens computed"
    assert lines[1] == "steps 1-3: 1 token each"


def test_wrong_questions_get_a_sentence():
    trace = told("budget")
    with pytest.raises(UserError, match=r"no request 'r9' in this trace: it has 3, among them 'r0', 'r1', 'r2'"):
        why(trace, "r9")
    with pytest.raises(UserError, match="no step 99: this trace has steps 0 to"):
        why(trace, "r0", 99)
    with pytest.raises(UserError, match="no step -1"):
        why(trace, "r0", -1)
    with tracing("steps") as coarse:
        run(load_scenario("budget"))
    with pytest.raises(UserError, match="recorded at `steps`; `why` needs `decisions`: re-run with --record decisions"):
        why(coarse, "r0")


def test_a_request_refused_at_the_door_is_answered_with_its_numbers():
    trace = told("refused")
    refused = trace.filter("request_refused").events[0]
    assert refused.message.rstrip(".") in sentences(trace, refused.request_id)
    assert refused.message in sentences(trace, refused.request_id, 0)
