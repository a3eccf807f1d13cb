"""Policies: the two built-in ones, one of the user's own as a worked example, and what is refused."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from engines import Shape
from invariants import Watched
from pagedlab.errors import UserError
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams
from pagedlab.scenarios.library import load_scenario
from pagedlab.scenarios.run import run
from pagedlab.sched.output import ModelRunnerOutput
from pagedlab.sched.policy import FirstComeFirstServed, Policy, Priority, resolve_policy
from pagedlab.sched.waiting_queue import WaitingQueue
from pagedlab.trace.events import RequestConsidered, RequestPreempted
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import tracing

# ------------------------------------------------------------------ the worked example


class ShortestPromptFirst:
    """Shortest prompt first; out of blocks, the longest prompt steps back."""

    rule = "the longest prompt"

    def key(self, request):
        return (request.num_prompt_tokens,)

    def victim(self, running, needing):
        return max(running, key=lambda r: r.num_prompt_tokens)

    def requeue(self, waiting, victim):
        waiting.add(victim)


EXAMPLE = f"{__name__}:ShortestPromptFirst"
LENGTHS = {"long": 12, "middle": 6, "short": 3}


def admitted(trace):
    return [e.request_id for e in trace if isinstance(e, RequestConsidered) and e.queue == "waiting" and
            e.outcome == "scheduled"]


def first_served(policy, **config):
    shape = Shape(policy=policy, max_num_seqs=1, num_blocks=20, **config)
    core = shape.engine_core()
    with tracing("decisions") as trace:
        for request_id, length in LENGTHS.items():
            core.add_request(shape.request(request_id, list(range(length)), max_tokens=2))
        while core.has_unfinished_requests():
            core.step()
    return core, trace


def test_the_trace_shows_the_effect_of_a_policy_of_ones_own():
    assert admitted(first_served("fcfs")[1]) == ["long", "middle", "short"]
    assert admitted(first_served(EXAMPLE)[1]) == ["short", "middle", "long"]


def test_a_policy_of_ones_own_chooses_the_victim_and_names_its_rule_in_the_trace():
    shape = Shape(policy=EXAMPLE, num_blocks=7, max_num_batched_tokens=50)
    watched = Watched(shape.engine_core())
    preempted = []
    with watched.recording():
        for request_id, length in (("short", 3), ("long", 12), ("middle", 4)):
            watched.add(shape.request(request_id, [length] * length, max_tokens=12))
        while watched.core.has_unfinished_requests():
            watched.step()
            preempted += [e for e in watched.step_events if isinstance(e, RequestPreempted)]
    assert preempted and {e.request_id for e in preempted} <= {"long", "middle"}
    assert preempted[0].request_id == "long" and preempted[0].rule == "the longest prompt"
    assert preempted[0].queue_key[0] == 12


def test_the_header_of_a_trace_names_the_policy(tmp_path):
    document = {
        "format": "pagedlab-scenario/1", "name": "mine", "about": "Mine.",
        "config": {"block_size": 4, "num_blocks": 9, "policy": EXAMPLE},
        "requests": {"r0": {"prompt_token_ids": [1, 2], "sampled_token_ids": [3], "max_tokens": 1}},
    }  # fmt: skip
    from pagedlab.scenarios.scenario import Scenario, build_engine_core

    scenario = Scenario.from_document(document, "mine")
    core = build_engine_core(scenario)
    assert type(core.scheduler.policy).__name__ == "ShortestPromptFirst"
    with tracing("steps") as trace:
        core.add_request(scenario.make_request("r0"))
    assert trace.header.config["policy"] == EXAMPLE


def test_the_command_takes_a_policy_from_the_working_directory(tmp_path):
    source = Path(__file__).read_text()
    example = source[source.index("class ShortestPromptFirst"):source.index("EXAMPLE =")]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    (tmp_path / "mine.py").write_text(example)
    (tmp_path / "work.jsonl").write_text("".join(
        json.dumps({"arrival_step": 0, "num_prompt_tokens": n, "num_output_tokens": 2, "request_id": r}) + "\n"
        for r, n in LENGTHS.items()
    ))
    command = ["simulate", "work.jsonl", "--policy", "mine:ShortestPromptFirst", "--max-num-seqs", "1", "--out",
               "t.jsonl"]
    script = f"import sys; sys.path.pop(0); sys.argv = {['pagedlab', *command]!r}; import pagedlab.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    trace = Trace.load(tmp_path / "t.jsonl")
    assert admitted(trace) == ["short", "middle", "long"]
    assert trace.header.config["policy"] == "mine:ShortestPromptFirst"


class KeyIsNoTuple(ShortestPromptFirst):
    def key(self, request):
        return request.num_prompt_tokens


def test_a_key_that_is_no_tuple_is_one_sentence_and_nothing_is_added():
    shape = Shape(policy=f"{__name__}:KeyIsNoTuple")
    core = shape.engine_core()
    with pytest.raises(UserError, match=r"the policy's key of a is 3: return a tuple, \(3,\) for example"):
        core.add_request(shape.request("a", [1, 2, 3], max_tokens=2))
    assert not core.has_unfinished_requests()


class Forgetful(ShortestPromptFirst):
    def requeue(self, waiting, victim):
        pass


def test_a_policy_that_does_not_put_its_victim_back_is_told_so():
    with pytest.raises(UserError, match=r"requeue did not put r0 back: call waiting\.add or prepend"):
        run(load_scenario("priority").with_config(policy=f"{__name__}:Forgetful"))


# ------------------------------------------------------------------ the built-in ones


def request(request_id, priority=0, arrival_time=0.0):
    return Request(request_id, [1], SamplingParams(), priority=priority, arrival_time=arrival_time)


def order(policy, requests):
    waiting = WaitingQueue(policy.key)
    for r in requests:
        waiting.add(r)
    return [r.request_id for r in waiting]


def test_first_come_first_served_looks_at_neither_priority_nor_arrival_time():
    assert order(FirstComeFirstServed(), [request("b", 5, 9.0), request("a", 0, 1.0)]) == ["b", "a"]


def test_priority_orders_by_value_then_arrival_then_the_id_as_text():
    requests = [request("r2", 1, 1.0), request("r10", 1, 1.0), request("late", 1, 2.0), request("urgent", -1, 9.0)]
    assert order(Priority(), requests) == ["urgent", "r10", "r2", "late"]


def test_the_newest_is_the_victim_of_first_come_first_served_and_returns_to_the_front():
    policy, running = FirstComeFirstServed(), [request("a"), request("b"), request("c")]
    waiting = WaitingQueue(policy.key)
    waiting.add(request("d"))
    for expected in ("c", "b"):
        victim = policy.victim(running, running[0])
        assert victim.request_id == expected
        running.remove(victim)
        policy.requeue(waiting, victim)
    assert [r.request_id for r in waiting] == ["b", "c", "d"]


def test_the_victim_of_priority_has_the_largest_value_then_the_latest_arrival_then_stands_first():
    policy = Priority()
    assert policy.victim([request("a", 1), request("b", 2), request("c", 0)], None).request_id == "b"
    assert policy.victim([request("a", 1, 1.0), request("b", 1, 3.0)], None).request_id == "b"
    assert policy.victim([request("a", 1, 1.0), request("b", 1, 1.0)], None).request_id == "a"


def test_a_victim_of_priority_waits_by_its_key_not_in_front():
    policy = Priority()
    waiting = WaitingQueue(policy.key)
    waiting.add(request("b", 1))
    policy.requeue(waiting, request("a", 2))
    assert [r.request_id for r in waiting] == ["b", "a"]


# ------------------------------------------------------------------ the waiting queue


def test_a_victim_with_nothing_left_to_compute_makes_the_scan_pass_over_a_request_as_in_0_14():
    """The real Scheduler of 0.14.1 gave these numbers; a, which may not end before the limit, is never done."""
    shape = Shape(policy="priority", num_blocks=6, max_model_len=8, max_num_batched_tokens=64)
    scheduler = shape.engine_core().scheduler
    endless = shape.request("a", [1, 2, 3, 4, 5], priority=9)
    endless.sampling_params = SamplingParams(min_tokens=20, max_tokens=20, temperature=0)
    coming = {0: [endless], 4: [shape.request("b", [1, 2, 3], 6, priority=1, arrival_time=1.0),
                                shape.request("c", [9, 9, 9], 6, priority=1, arrival_time=2.0),
                                shape.request("d", [7, 7], 6, priority=1, arrival_time=3.0)]}
    scheduled = []
    for step in range(8):
        for new in coming.get(step, ()):
            scheduler.add_request(new)
        output = scheduler.schedule()
        scheduled.append((output.num_scheduled_tokens, output.preempted_req_ids))
        scheduler.update_from_output(output, ModelRunnerOutput({r: [50] for r in output.num_scheduled_tokens}))
    assert [numbers for numbers, _ in scheduled[:4]] == [{"a": 5}, {"a": 1}, {"a": 1}, {}]
    assert scheduled[4:] == [({"b": 3, "c": 3, "d": 2}, []), ({"b": 1, "c": 1, "d": 1}, []),
                             ({"b": 1, "d": 1}, ["a"]), ({"b": 1, "c": 1}, ["d"])]


def test_the_waiting_queue_serves_like_a_sorted_list():
    """Beside a list that is sorted anew each time."""
    for seed in range(30):
        rng, waiting, model, front, back = random.Random(seed), WaitingQueue(Priority().key), [], 0, 0
        for n in range(80):
            action = rng.choice(("add", "add", "prepend", "pop", "remove"))
            r = request(f"r{n}", rng.randrange(3), float(rng.randrange(2)))
            if action == "add":
                back += 1
                waiting.add(r)
                model.append((Priority().key(r), back, r))
            elif action == "prepend":
                front -= 1
                waiting.prepend(r)
                model.append((Priority().key(r), front, r))
            elif action == "pop" and model:
                assert waiting.peek() is model[0][2]
                assert waiting.pop() is model.pop(0)[2]
            elif action == "remove" and model:
                gone = rng.sample(model, rng.randint(1, len(model)))
                waiting.remove(entry[2] for entry in gone)
                model = [entry for entry in model if entry not in gone]
            model.sort()
            assert list(waiting) == [entry[2] for entry in model] and len(waiting) == len(model)
            if len(model) > 1:
                assert waiting.second() is model[1][2]


# ------------------------------------------------------------------ names


class NeedsAnArgument(ShortestPromptFirst):
    def __init__(self, argument):
        self.argument = argument


class HasNoVictim:
    def key(self, request):
        return ()


ready_made = ShortestPromptFirst()


def test_a_policy_is_found_by_name_as_a_class_or_an_object():
    assert isinstance(resolve_policy("fcfs"), FirstComeFirstServed)
    assert isinstance(resolve_policy("priority"), Priority)
    assert type(resolve_policy(EXAMPLE)).__name__ == "ShortestPromptFirst"
    assert resolve_policy(f"{__name__}:ready_made").rule == "the longest prompt"


def test_the_example_is_a_policy_for_the_type_checker_too():
    policy: Policy = ShortestPromptFirst()
    assert {"rule", "key", "victim", "requeue"} <= {n for n in dir(policy) if not n.startswith("_")}


@pytest.mark.parametrize("name, complaint", [
    ("lifo", "policy 'lifo' cannot be loaded (No module named 'lifo'): give an importable package.module:name."),
    ("", "policy '' cannot be loaded"),
    ("no.such.module:Policy", "cannot be loaded (No module named 'no')"),
    (f"{__name__}:Nothing", "cannot be loaded (module"),
    (":Policy", "cannot be loaded"),
    (f"{__name__}:", "cannot be loaded"),
    (f"{__name__}:HasNoVictim", "has no method victim: it needs key, victim and requeue."),
    (f"{__name__}:NeedsAnArgument", "cannot be loaded"),
    (f"{__name__}:EXAMPLE", "has no method key"),
])  # fmt: skip
def test_a_policy_that_is_none_is_one_sentence(name, complaint):
    with pytest.raises(UserError) as error:
        resolve_policy(name)
    assert complaint in str(error.value) and "\n" not in str(error.value)


class ChoosesNobody(ShortestPromptFirst):
    def victim(self, running, needing):
        return None


def test_a_policy_that_chooses_who_does_not_run_is_one_sentence():
    scenario = load_scenario("self-preemption").with_config(policy=f"{__name__}:ChoosesNobody")
    with pytest.raises(UserError, match="the policy chose None as victim, which does not run"):
        run(scenario)
