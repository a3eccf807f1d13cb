"""Simulation: workloads, the books of each step, the allocators from before paging, and the command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pagedlab.errors import UserError
from pagedlab.scenarios.library import list_scenarios, load_scenario
from pagedlab.scenarios.run import run
from pagedlab.simulate.cli import simulate_command
from pagedlab.simulate.contiguous import RESERVATIONS, Buddies, HoleList, num_reserved, simulate_contiguous
from pagedlab.simulate.generator import GENERATORS, generate
from pagedlab.simulate.paged import Observer, ScenarioSource, WorkloadSource, simulate
from pagedlab.simulate.workload import SimulatedRequest, Workload, mean, read_jsonl
from pagedlab.trace.check import check
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import trace
from pagedlab.viewer.pack import pack

POOL = {"block_size": 16, "num_blocks": 984, "max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
SMALL = {"block_size": 4, "num_blocks": 31, "max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 24}
SCRIPTED = [s.name for s in list_scenarios() if not s.needs_model]


def short_requests(count: int = 40, arrivals: str = "poisson:1") -> Workload:
    return generate(
        "fixed", num_requests=count, seed=1, max_model_len=64, prompt_lengths="uniform:1:40",
        output_lengths="uniform:1:24", arrivals=arrivals,
    )  # fmt: skip


# ------------------------------------------------------------------ workloads


def test_requests_of_a_group_share_exactly_their_prefix():
    a = SimulatedRequest("r0", 0, 10, 4, prefix_group="a", num_prefix_tokens=6)
    b = SimulatedRequest("r1", 0, 9, 4, prefix_group="a", num_prefix_tokens=6)
    c = SimulatedRequest("r2", 0, 9, 4, prefix_group="c", num_prefix_tokens=6)
    workload = Workload("w", "", [a, b, c])
    ids = [workload.prompt_token_ids(r) for r in (a, b, c)]
    assert ids[0][:6] == ids[1][:6] and [len(i) for i in ids] == [10, 9, 9]
    outputs = [list(workload.output_token_ids(r)) for r in (a, b, c)]
    texts = [prompt + out for prompt, out in zip(ids, outputs, strict=True)]
    for one, other, shared in ((0, 1, 6), (0, 2, 0), (1, 2, 0)):
        same = [p for p, (x, y) in enumerate(zip(texts[one], texts[other], strict=False)) if x == y]
        assert same == list(range(shared))


def test_more_requests_than_token_ids_still_share_nothing():
    workload = Workload("w", "", [SimulatedRequest(f"r{i}", 0, 2, 1) for i in range(40_000)])
    assert len({workload.prompt_token_ids(r)[0] for r in workload.requests}) == 40_000


def test_shared_prefixes_are_found_by_the_prefix_cache():
    workload = Workload("w", "", [SimulatedRequest(f"r{i}", 10 * i, 50, 4, "a", 32) for i in range(5)])
    result = simulate(WorkloadSource(workload, POOL), POOL)
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (250, 4 * 32)
    off = {**POOL, "enable_prefix_caching": False}
    assert simulate(WorkloadSource(workload, off), off).num_cached_tokens == 0


def test_jsonl_is_read_in_order_of_arrival(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text(
        '{"arrival_step": 5, "num_prompt_tokens": 3, "num_output_tokens": 2, '
        '"prefix_group": 7, "num_prefix_tokens": 2}\n'
        '\n{"arrival_step": 1, "num_prompt_tokens": 4, "num_output_tokens": 1, "request_id": "mine", "priority": -1}\n'
    )
    first, second = read_jsonl(path).requests
    assert (first.request_id, first.arrival_step, first.priority) == ("mine", 1, -1)
    assert (second.request_id, second.prefix_group, second.num_prefix_tokens) == ("r0", "7", 2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"arrival_step": 0}', "no num_prompt_tokens"),
        ('{"arrival_step": -1, "num_prompt_tokens": 1, "num_output_tokens": 1}', "arrival_step is -1"),
        ('{"arrival_step": 0, "num_prompt_tokens": 0, "num_output_tokens": 1}', "num_prompt_tokens is 0"),
        ('{"arrival_step": 0, "num_prompt_tokens": 1, "num_output_tokens": 1.5}', "num_output_tokens is 1.5"),
        ('{"arrival_step": 0, "num_prompt_tokens": 1, "num_output_tokens": 1, "speed": 1}', "unknown field 'speed'"),
        ('{"arrival_step":0, "num_prompt_tokens":1, "num_output_tokens":1, "num_prefix_tokens":1}', "no prefix_group"),
        (
            '{"arrival_step": 0, "num_prompt_tokens": 4, "num_output_tokens": 1, "prefix_group": 1, '
            '"num_prefix_tokens": 5}',
            "num_prefix_tokens is 5, more than the 4 of the whole prompt",
        ),
        ("", "has no request"),
    ],
)
def test_a_bad_line_is_one_sentence_with_its_number(tmp_path, line, says):
    path = tmp_path / "w.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=says):
        read_jsonl(path)


@pytest.mark.parametrize("option", [
    ["--arrivals", "poisson:1e-320"], ["--arrivals", "bursts:0.5:1e300"], ["--prompt-lengths", "lognormal:1e308:2"],
    ["--prompt-lengths", "fixed:inf"], ["--output-lengths", "exponential:1e-320"],
])
def test_numbers_beyond_reason_are_refused(option):
    with pytest.raises(UserError, match="not between 1e-9 and 1e9"):
        command("--requests", "5", *option)


def test_a_wild_distribution_is_drawn_again_until_something_fits():
    drawn = generate("fixed", num_requests=50, max_model_len=2048, prompt_lengths="lognormal:100:1e4")
    assert {r.num_prompt_tokens for r in drawn.requests} == {1}
    with pytest.raises(UserError, match="hardly ever"):
        generate("fixed", num_requests=50, max_model_len=2048, prompt_lengths="fixed:1e9")


def test_a_strangers_sentence_cannot_steer_the_terminal(tmp_path):
    document = {
        "format": "pagedlab-scenario/1", "name": None, "about": "clear\x1b[2J",
        "config": {"block_size": 4, "num_blocks": 8},
        "requests": {"r0": {"prompt_token_ids": [1, 2], "max_tokens": 1, "sampled_token_ids": [3]}},
    }  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(document))
    said = command(str(tmp_path / "s.json")).stdout
    assert "clear\ufffd[2J" in said and "\x1b[2J" not in said
    line = {"request_id": "\x1b[2J", "arrival_step": 0, "num_prompt_tokens": 9, "num_output_tokens": 1}
    (tmp_path / "w.jsonl").write_text(json.dumps(line))
    said = command(str(tmp_path / "w.jsonl"), "--max-model-len", "4").stdout
    assert "request \ufffd[2J has a prompt of 9 tokens" in said and "\x1b[2J" not in said
    (tmp_path / "s.json").write_text(json.dumps(document | {"about": None}))
    assert "Workload: scenario" in command(str(tmp_path / "s.json")).stdout


def test_drawn_prompts_hold_their_whole_prefix():
    lengths = {"prompt_lengths": "uniform:1:100", "prefix_groups": 2, "prefix_tokens": 60}
    drawn = generate("uniform", num_requests=50, max_model_len=2048, **lengths).requests
    assert all(r.num_prompt_tokens >= r.num_prefix_tokens == 60 for r in drawn)
    with pytest.raises(UserError, match="hardly ever hold the 101 tokens of their prefix"):
        generate("uniform", num_requests=5, max_model_len=2048, **{**lengths, "prefix_tokens": 101})


def test_the_same_seed_draws_the_same_workload_and_another_seed_another():
    draws = [generate("sharegpt-like", num_requests=50, seed=s, max_model_len=2048).requests for s in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_draws_requests_that_fit(name):
    requests = generate(name, num_requests=200, seed=0, max_model_len=2048).requests
    assert len(requests) == 200 and all(r.num_prompt_tokens + r.num_output_tokens <= 2048 for r in requests)
    assert all(r.num_prompt_tokens >= 1 and r.num_output_tokens >= 1 for r in requests)


def test_lognormal_is_given_by_its_mean():
    workload = generate(
        "fixed", num_requests=20_000, seed=0, max_model_len=100_000, prompt_lengths="lognormal:200:0.5"
    )
    assert mean([r.num_prompt_tokens for r in workload.requests]) == pytest.approx(200, rel=0.02)


@pytest.mark.parametrize("text", ["normal:3", "uniform:9:3", "fixed", "fixed:x", "fixed:0", "lognormal:3:inf"])
def test_a_malformed_distribution_is_one_sentence(text):
    with pytest.raises(UserError):
        generate("fixed", num_requests=1, max_model_len=64, prompt_lengths=text)


# ------------------------------------------------------------------ the books


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_simulated_scenario_decides_as_it_does_when_played(name):
    def decisions(action):
        events = []
        trace.start(events, record="decisions")
        try:
            action()
        finally:
            trace.stop()
        return [(e.num_scheduled_tokens, e.preempted) for e in events if e.kind == "step_scheduled"]

    scenario = load_scenario(name)
    played = decisions(lambda: run(scenario))
    simulated = decisions(lambda: simulate(ScenarioSource(scenario), scenario.config))
    assert [d for d in simulated if d[0] or d[1]] == [d for d in played if d[0] or d[1]]


def test_tracing_does_not_change_a_simulation():
    quiet = simulate(WorkloadSource(short_requests(), SMALL), SMALL)
    trace.start([], record="decisions")
    try:
        traced = simulate(WorkloadSource(short_requests(), SMALL), SMALL)
    finally:
        trace.stop()
    assert quiet.memory == traced.memory and quiet.finish_reasons == traced.finish_reasons


def test_scheduled_tokens_are_the_needed_ones_and_the_recomputed_ones():
    workload = short_requests()
    config = {**SMALL, "enable_prefix_caching": False}
    result = simulate(WorkloadSource(workload, config), config)
    needed = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in workload.requests)
    assert result.num_preemptions > 5 and set(result.finish_reasons.values()) == {"length"}
    assert result.num_scheduled_tokens == needed + result.num_recomputed_tokens


def test_idle_time_is_left_out_and_queue_times_count_from_arrival():
    requests = [SimulatedRequest("r0", 0, 4, 3), SimulatedRequest("r1", 100, 4, 2), SimulatedRequest("r2", 100, 4, 1)]
    config = {**SMALL, "max_num_seqs": 1}
    result = simulate(WorkloadSource(Workload("w", "", requests), config), config)
    assert (result.num_steps, result.num_idle_steps) == (6, 97)
    assert result.queue_steps == {"r0": 0, "r1": 0, "r2": 2}
    assert result.first_token_steps == {"r0": 1, "r1": 1, "r2": 3}
    assert result.end_steps == {"r0": 3, "r1": 2, "r2": 3}


def walk(observer: Observer) -> tuple[float, float]:
    """(used, token states) counted the long way: over distinct blocks."""
    scheduler = observer.core.scheduler
    (group,) = scheduler.kv_cache_manager.groups
    filled: dict[int, int] = {}
    for request in scheduler.running:
        for i, block in enumerate(group.tables[request.request_id]):
            tokens = min(max(request.num_computed_tokens - i * group.block_size, 0), group.block_size)
            filled[block.block_id] = max(filled.get(block.block_id, 0), tokens)
    return len(filled) * group.block_size, sum(filled.values())


def test_memory_of_each_step_is_what_a_walk_over_the_blocks_finds(monkeypatch):
    requests = [SimulatedRequest(f"r{i}", i, 10 + i % 7, 13 + i % 9, str(i % 2), 8) for i in range(40)]
    found, per_table = [], []
    count = Observer._count_memory

    def count_and_walk(self):
        count(self)
        found.append(walk(self))
        (group,) = self.core.scheduler.kv_cache_manager.groups
        per_table.append(sum(len(table) for table in group.tables.values()) * group.block_size)

    monkeypatch.setattr(Observer, "_count_memory", count_and_walk)
    result = simulate(WorkloadSource(Workload("w", "", requests), SMALL), SMALL)
    memory = result.memory
    for step, (used, token_states) in enumerate(found):
        assert memory.num_slots - memory.free[step] == used
        assert memory.token_states[step] == token_states
        assert min(memory.reserved[step], memory.internal_waste[step]) >= 0
    assert max(states for _, states in found) > memory.num_slots * 0.8 and result.num_preemptions
    assert any(tables > used for tables, (used, _) in zip(per_table, found, strict=True))  # shared: not counted twice


def test_shares_add_up_to_the_pool():
    memory = simulate(WorkloadSource(short_requests(), SMALL), SMALL).memory
    assert sum(memory.shares(range(memory.num_steps)).values()) == pytest.approx(100)
    assert sum(memory.shares(memory.pressed_steps()).values()) == pytest.approx(100)


# ------------------------------------------------------------------ before paging


def test_first_fit_takes_the_lowest_hole_and_best_fit_the_tightest():
    for best, expected in ((False, 0), (True, 10)):
        holes = HoleList(13, best=best)
        ranges = [holes.allocate(n) for n in (4, 6, 3)]
        holes.free(ranges[0])
        holes.free(ranges[2])
        assert holes.allocate(3) == expected


def test_a_buddy_range_is_a_power_of_two_at_a_multiple_of_itself():
    buddies = Buddies(15_728)
    assert buddies.size_of(25) == 32
    assert [buddies.allocate(2048) for _ in range(8)] == [12_288, 8192, 10_240, 0, 2048, 4096, 6144, None]


def test_scattered_memory_refuses_what_would_fit_in_all():
    holes = HoleList(12, best=False)
    ranges = [holes.allocate(4) for _ in range(3)]
    holes.free(ranges[0])
    holes.free(ranges[2])
    assert holes.num_free == 8 and holes.allocate(5) is None


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["buddy", "first", "best"]), num_slots=st.integers(1, 200),
    script=st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=60),
)  # fmt: skip
def test_ranges_never_overlap_and_freeing_all_restores_the_whole(kind, num_slots, script):
    make = {"buddy": Buddies, "first": lambda n: HoleList(n, False), "best": lambda n: HoleList(n, True)}[kind]
    allocator, held = make(num_slots), {}
    for gives_back, number in script:
        if gives_back and held:
            start = sorted(held)[number % len(held)]
            allocator.free(start)
            del held[start]
        elif (start := allocator.allocate(number)) is not None:
            held[start] = allocator.size_of(number)
        taken = [slot for start, size in held.items() for slot in range(start, start + size)]
        assert len(taken) == len(set(taken)) and all(0 <= slot < num_slots for slot in taken)
        assert allocator.num_free == num_slots - len(taken)
    for start in held:
        allocator.free(start)
    fresh = make(num_slots)
    largest = 1 << (num_slots.bit_length() - 1) if kind == "buddy" else num_slots
    assert allocator.allocate(largest) == fresh.allocate(largest) is not None


def test_reservations_of_a_prompt_of_100_and_an_output_of_25():
    request = SimulatedRequest("r0", 0, 100, 25)
    assert [num_reserved(request, r, 2048) for r in RESERVATIONS] == [2048, 132, 125]


def test_contiguous_runs_compute_every_token_once():
    workload = short_requests()
    needed = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in workload.requests)
    for reservation in RESERVATIONS:
        result = simulate_contiguous(workload.requests, {**SMALL, "num_blocks": 65}, reservation, "buddy")
        assert result.num_scheduled_tokens == needed and len(result.finish_reasons) == len(workload.requests)


def test_figure_2_of_the_paper_in_its_order_and_near_its_numbers():
    workload = generate("sharegpt-like", num_requests=400, seed=0, max_model_len=2048)
    measured = {}
    for name in RESERVATIONS:
        memory = simulate_contiguous(workload.requests, POOL, name, "buddy").memory
        measured[name] = memory.shares(memory.pressed_steps())["token_states"]
    memory = simulate(WorkloadSource(workload, POOL), POOL).memory
    measured["paged"] = memory.shares(memory.pressed_steps())["token_states"]
    paper = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "paged": 96.3}
    assert sorted(measured, key=measured.get) == list(paper)
    assert measured == pytest.approx(paper, abs=6)  # a stand-in for ShareGPT's lengths, so near, not equal


# ------------------------------------------------------------------ the command

app = typer.Typer()
app.command()(simulate_command)


def command(*arguments: str):
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_report_states_workload_pool_memory_and_what_differs_from_the_paper():
    said = command("--requests", "60", "--arrivals", "at-once", "--compare", "contiguous").stdout
    for part in ("stand-in for ShareGPT", "15,728 slots", "recomputed tokens", "while any waited", "Orca (Pow2)",
                 "26.8", "What differs", "internal: given to one that", "to first token    mean"):  # fmt: skip
        assert part in said
    assert max(len(line) for line in said.splitlines()) <= 80


def test_json_has_every_step_and_nothing_else_on_stdout():
    said = json.loads(command("budget", "--json").stdout)
    assert said["paged"]["num_steps"] == len(said["memory_by_step"]["token_states"]) == 4
    assert said["paged"]["finish_reasons"] == {"length": 3} and said["contiguous"] == {}


def test_out_saves_a_trace_of_decisions(tmp_path):
    path = tmp_path / "t.jsonl"
    assert command("priority", "--out", str(path)).stderr == f"pagedlab: notice: the trace is in {path}\n"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["record"] == "decisions" and "request_preempted" in {line["kind"] for line in lines}


def test_recorded_at_blocks_a_simulation_can_be_checked_and_viewed(tmp_path):
    path = tmp_path / "t.jsonl"
    command("--requests", "20", "--num-blocks", "80", "--out", str(path), "--record", "blocks")
    recorded = Trace.load(path)
    assert check(recorded) is None and pack(recorded).chunks


def test_times_of_requests_count_from_arrival_paged_or_not():
    workload = Workload("w", "", [SimulatedRequest("long", 0, 4, 9), SimulatedRequest("short", 0, 4, 1)])
    config = {**SMALL, "max_num_seqs": 1}
    paged = simulate(WorkloadSource(workload, config), config)
    for result in (paged, simulate_contiguous(workload.requests, config, "oracle", "first")):
        assert result.queue_steps == {"long": 0, "short": 9}
        assert result.first_token_steps == {"long": 1, "short": 10} and result.end_steps == {"long": 9, "short": 10}


def test_where_nobody_is_admitted_there_are_no_times(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"arrival_step": 0, "num_prompt_tokens": 3000, "num_output_tokens": 2}\n')
    said = command(str(path)).stdout
    assert "1 refused" in said and "until admitted    nobody" in said and "for example: request r0 has a prompt" in said


def test_idle_steps_are_counted_apart():
    assert "(1 idle step left out)" in command("hybrid").stdout


def test_text_scenarios_run_with_made_up_outputs():
    said = command("preemption").stdout
    assert "made up" in said and "preemptions         1" in said


def test_knobs_override_a_scenario():
    assert json.loads(command("preemption", "--num-blocks", "20", "--json").stdout)["paged"]["num_preemptions"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "there is no scenario 'nope'"),
        (["missing.jsonl"], "missing.jsonl cannot be read"),
        (["twins", "--seed", "3"], "--seed is for generated workloads"),
        (["--generator", "x"], "choose one of sharegpt-like"),
        (["--fit", "worst"], "choose one of buddy"),
        (["--record", "tensors"], "choose one of steps, decisions, blocks"),
        (["--compare", "paged"], "only contiguous"),
        (["--requests", "0"], "--requests is 0"),
        (["--requests", "1000000000000"], "--requests is 1000000000000"),
        (["--seed", "-1"], "seed is -1"),
        (["--num-blocks", "1"], "null block"),
        (["--prefix-groups", "2"], "both prefix groups and prefix tokens"),
        (["--num-blocks", "50", "--max-model-len", "2048", "--compare", "contiguous"], "reserving the maximum"),
    ],
)
def test_bad_input_is_one_sentence(arguments, says):
    with pytest.raises(UserError, match=says):
        command(*arguments)


def test_simulating_imports_no_torch():
    code = (
        "import sys; from pagedlab.simulate.command import run_simulations;"
        "run_simulations('twins', None, {}, {}, 'buddy', as_json=True, out=None);"
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
