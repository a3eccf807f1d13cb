"""Scheduler and worker together on a recorded checkpoint: one request, however it is served, says the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagedlab.config import EngineConfig
from pagedlab.conformance.checkpoint import LogitsRecorder
from pagedlab.conformance.single_engine import build_engine, one_thread
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.request import Request, RequestStatus
from pagedlab.sampling_params import SamplingParams
from pagedlab.worker.runner import GPUModelRunner
from test_worker_recordings import CHECKPOINTS
from test_worker_runners import POISON, poison_stale_tails

MODEL = CHECKPOINTS / "dense-tied-a" / "checkpoint"
RUNNERS = ["persistent", "state-table"]


def config(**knobs):
    small = {"block_size": 4, "num_blocks": 64, "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return EngineConfig(device="cpu", **{**small, **knobs})


class Engine:
    """Scheduler and worker, with every output and every step's counts kept."""

    def __init__(self, engine_config, model_dir=MODEL):
        self.config = engine_config
        self.scheduler, self.worker = build_engine(model_dir, engine_config)
        self.recorder = self.worker.runner.sampler = LogitsRecorder(self.worker.runner.sampler)
        self.tokens, self.finish_reasons, self.logprobs, self.prompt_logprobs = {}, {}, {}, {}
        self.steps = []
        self.num_preemptions = {}

    def add(self, req_id, prompt, eos_token_id=0, **params):
        hasher = request_block_hasher(self.config.block_size) if self.config.enable_prefix_caching else None
        self.scheduler.add_request(Request(
            req_id, prompt, SamplingParams(**{"ignore_eos": True, **params}), eos_token_id=eos_token_id,
            arrival_time=float(len(self.tokens)), block_hasher=hasher,
        ))  # fmt: skip
        self.tokens[req_id], self.logprobs[req_id], self.prompt_logprobs[req_id] = [], [], []

    def step(self):
        message = self.scheduler.schedule()
        with one_thread():
            answer = self.worker.execute_model(message)
        self.num_preemptions |= {r.request_id: r.num_preemptions for r in self.scheduler.requests.values()}
        for output in self.scheduler.update_from_output(message, answer):
            self.tokens[output.request_id] += output.new_token_ids
            self.finish_reasons[output.request_id] = output.finish_reason
            self.logprobs[output.request_id].append(output.logprobs)
            self.prompt_logprobs[output.request_id] += output.prompt_logprobs or []
        self.steps.append(dict(message.num_scheduled_tokens))

    def run(self):
        for _ in range(2000):
            if not self.scheduler.requests:
                return self
            self.step()
        raise AssertionError("no end in sight: some request can never fit the pool")


def run(requests, **knobs):
    engine = Engine(config(**knobs))
    for req_id, (prompt, params) in requests.items():
        engine.add(req_id, prompt, **params)
    return engine.run()


# ------------------------------------------------------------------ bug reports


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "seed": 42}, {"temperature": 0.8}])
def test_bug_row_18_partial_chunk_keeps_no_sample_and_advances_no_random_state(runner, params):
    prompt = list(range(10, 20))
    chunked = Engine(config(num_blocks=12, max_num_batched_tokens=4, runner=runner))
    chunked.add("a", prompt, max_tokens=2, **params)
    outputs = []
    while chunked.scheduler.requests:
        chunked.step()
        outputs.append(len(chunked.tokens["a"]))
    assert [step["a"] for step in chunked.steps] == [4, 4, 2, 1]
    assert outputs == [0, 0, 1, 2]
    whole = run({"a": (prompt, {"max_tokens": 2, **params})}, num_blocks=12, runner=runner)
    assert chunked.tokens == whole.tokens


def pool_of_row_2(order):
    """Two requests of 8 tokens in 5 usable blocks and 2 seats: the one that comes second is preempted."""
    params = {"A": {"seed": 42, "temperature": 0.8}, "B": {"temperature": 1.0}}
    prompts = {"A": list(range(1, 9)), "B": list(range(21, 29))}
    requests = {r: (prompts[r], {"max_tokens": 6, **params[r]}) for r in order}
    return run(requests, num_blocks=6, max_num_seqs=2)


@pytest.mark.parametrize("runner", RUNNERS)
def test_bug_row_32_seed_is_independent_of_neighbours_preemption_and_chunks(runner):
    prompt, mine = list(range(1, 9)), {"seed": 42, "temperature": 0.8, "max_tokens": 6}
    other = list(range(21, 29)), {"temperature": 1.0, "max_tokens": 6}
    alone = run({"A": (prompt, mine)}, runner=runner).tokens["A"]
    unseeded = run({"A": (prompt, mine), "B": other}, runner=runner)
    before = run({"B": other, "A": (prompt, mine)}, runner=runner)
    seeded = run({"A": (prompt, mine), "B": (other[0], {**other[1], "seed": 7})}, runner=runner)
    preempted = run({"B": other, "A": (prompt, mine)}, num_blocks=6, max_num_seqs=2, runner=runner)
    chunked = run({"A": (prompt, mine)}, max_num_batched_tokens=4, runner=runner)
    assert preempted.num_preemptions["A"] == 1
    for engine in (unseeded, before, seeded, preempted, chunked):
        assert engine.tokens["A"] == alone
    assert run({"A": (prompt, {**mine, "seed": 43})}, runner=runner).tokens["A"] != alone


def test_bug_row_32_generator_made_anew_on_return_is_noticed(monkeypatch):
    """The counterpart: recreated at preemption, the seed gives other tokens."""
    update = GPUModelRunner._update_request

    def recreate(self, cached, index):
        request, new_block_ids = update(self, cached, index)
        if request.req_id in cached.resumed_req_ids and request.generator is not None:
            request.generator.manual_seed(request.sampling_params.seed)
        return request, new_block_ids

    monkeypatch.setattr(GPUModelRunner, "_update_request", recreate)
    alone = run({"A": (list(range(1, 9)), {"seed": 42, "temperature": 0.8, "max_tokens": 6})}).tokens["A"]
    assert pool_of_row_2("BA").tokens["A"] != alone


@pytest.mark.parametrize("runner", RUNNERS)
def test_bug_row_40_solo_together_and_beside_an_empty_row_are_the_same(runner):
    prompts = {"a": [5, 6, 7], "b": list(range(30, 39)), "c": [70, 71, 72, 73]}
    params = {"temperature": 0, "max_tokens": 6, "logprobs": 3}
    together = run({r: (p, params) for r, p in prompts.items()}, runner=runner)
    for req_id, prompt in prompts.items():
        solo = run({req_id: (prompt, params)}, runner=runner)
        assert solo.tokens[req_id] == together.tokens[req_id]
        for mine, theirs in zip(solo.logprobs[req_id], together.logprobs[req_id], strict=True):
            assert mine.token_ids == theirs.token_ids and mine.rank == theirs.rank == 1
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    for rows in together.recorder.logits.values():
        assert torch.isfinite(torch.stack(rows)).all()


@pytest.mark.parametrize("runner", RUNNERS)
def test_bug_row_40_request_that_ends_with_end_of_text_keeps_that_token(runner):
    prompts = {"a": [5, 6, 7], "b": list(range(30, 39))}
    free = run({r: (p, {"temperature": 0, "max_tokens": 6}) for r, p in prompts.items()}, runner=runner)
    second = free.tokens["a"][1]
    assert second != free.tokens["a"][0]
    engine = Engine(config(runner=runner))
    engine.add("a", prompts["a"], eos_token_id=second, ignore_eos=False, temperature=0, max_tokens=6)
    engine.add("b", prompts["b"], temperature=0, max_tokens=6)
    engine.run()
    assert (engine.tokens["a"], engine.finish_reasons["a"]) == (free.tokens["a"][:2], "stop")
    assert engine.tokens["b"] == free.tokens["b"]


# ------------------------------------------------------------------ every path, the same logits


PROMPTS = {f"r{i}": [(7 * i + 3 * j * j) % 500 + 1 for j in range(5 + 9 * i)] for i in range(6)}


@pytest.fixture(scope="module")
def reference():
    """Each prompt alone in a roomy pool."""
    params = {"temperature": 0, "max_tokens": 12}
    return {r: run({r: (p, params)}) for r, p in PROMPTS.items()}


PATHS = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 7},
    "threshold": {"long_prefill_token_threshold": 5},
    "tight": {"num_blocks": 20},
    "tight without caching": {"num_blocks": 20, "enable_prefix_caching": False},
    "one seat": {"max_num_seqs": 1},
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("path", PATHS)
def test_every_path_gives_the_same_logits_and_tokens(runner, path, reference):
    requests = {r: (p, {"temperature": 0, "max_tokens": 12}) for r, p in PROMPTS.items()}
    engine = run(requests, runner=runner, **PATHS[path])
    if path.startswith("tight"):
        assert sum(engine.num_preemptions.values()) > 0
    for req_id, alone in reference.items():
        compare(engine, alone, req_id)


def compare(engine, alone, req_id):
    """Logits within 1e-3 while the tokens are the same; tokens wherever the margin exceeds 4e-3."""
    pairs = zip(engine.recorder.logits[req_id], alone.recorder.logits[req_id], strict=True)
    for i, (mine, theirs) in enumerate(pairs):
        assert (mine - theirs).abs().max() < 1e-3
        best, second = theirs.topk(2).values.tolist()
        if engine.tokens[req_id][i] != alone.tokens[req_id][i]:
            assert best - second <= 4e-3
            return


@pytest.mark.parametrize("runner", RUNNERS)
def test_prefix_hits_give_the_same_logits(runner, reference):
    engine = Engine(config(runner=runner))
    for round_ in range(2):
        for req_id, prompt in PROMPTS.items():
            engine.add(f"{req_id}.{round_}", prompt, temperature=0, max_tokens=12)
        engine.run()
    assert engine.scheduler.kv_cache_manager.prefix_cache_stats.hits > 40
    for req_id, alone in reference.items():
        engine.recorder.logits[req_id], engine.tokens[req_id] = (
            engine.recorder.logits[f"{req_id}.1"], engine.tokens[f"{req_id}.1"]
        )  # fmt: skip
        compare(engine, alone, req_id)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("poison", [POISON, -3])  # one that no pool has, one that torch would take from the end
def test_stale_tails_are_read_by_no_kernel(runner, poison, reference):
    engine = Engine(config(runner=runner, num_blocks=20))
    update = engine.worker.runner._update_states

    def update_and_poison(message):
        update(message)
        poison_stale_tails(engine.worker.runner, poison)

    engine.worker.runner._update_states = update_and_poison
    for req_id, prompt in PROMPTS.items():
        engine.add(req_id, prompt, temperature=0, max_tokens=12)
    engine.run()
    for req_id, alone in reference.items():
        compare(engine, alone, req_id)


@pytest.mark.parametrize("runner", RUNNERS)
def test_interpreted_triton_kernels_give_the_same_tokens(runner, reference):
    """Chunks, decodes and a prefix hit, end to end; the interpreter is slow, so two short ones."""
    pytest.importorskip("triton")
    engine = Engine(config(runner=runner, attention_backend="triton", max_num_batched_tokens=9))
    for req_id in ("r0", "r1"):
        engine.add(req_id, PROMPTS[req_id], temperature=0, max_tokens=4)
    engine.run()
    engine.add("r1 again", PROMPTS["r1"], temperature=0, max_tokens=2)
    engine.run()
    assert engine.tokens["r1 again"] == engine.tokens["r1"][:2]
    for req_id in ("r0", "r1"):
        theirs_by_token = reference[req_id].recorder.logits[req_id]
        for mine, theirs in zip(engine.recorder.logits[req_id], theirs_by_token, strict=False):
            assert (mine - theirs).abs().max() < 1e-3
        assert engine.tokens[req_id] == reference[req_id].tokens[req_id][:4]


# ------------------------------------------------------------------ log-probabilities, memory, aborts


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("knobs", [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 17}])
def test_prompt_logprobs_are_those_of_one_whole_pass_and_each_is_given_once(runner, knobs):
    prompt = PROMPTS["r2"]
    params = {"temperature": 0, "max_tokens": 8, "prompt_logprobs": 2}
    requests = {"b": (PROMPTS["r3"], {"temperature": 0, "max_tokens": 20}), "a": (prompt, params)}
    engine = run(requests, runner=runner, **knobs)
    entries = engine.prompt_logprobs["a"]
    assert len(entries) == len(prompt) - 1
    whole = Engine(config())
    whole.add("a", prompt, **params)
    hidden = []
    model = whole.worker.runner.model
    model.register_forward_hook(lambda module, args, output: hidden.append(output))
    whole.step()
    expected = model.compute_logits(hidden[0][:-1]).log_softmax(-1)
    for row, token_id, entry in zip(expected, prompt[1:], entries, strict=True):
        found = dict(zip(entry.token_ids, entry.logprobs, strict=True))
        assert found[token_id] == pytest.approx(float(row[token_id]), abs=1e-3)
        assert entry.rank == int((row >= row[token_id]).sum())
        assert set(row.topk(2).indices.tolist()) <= set(found)


def test_request_preempted_with_prompt_logprobs_reports_no_position_twice():
    params = {"temperature": 0, "max_tokens": 12, "prompt_logprobs": 0}
    requests = {"b": (PROMPTS["r1"], {"temperature": 0, "max_tokens": 30}), "a": (PROMPTS["r2"], params)}
    engine = run(requests, num_blocks=15)
    assert engine.num_preemptions["a"] >= 1
    assert len(engine.prompt_logprobs["a"]) == len(PROMPTS["r2"]) - 1


def test_abort_of_running_and_waiting_requests_clears_rows():
    engine = Engine(config(max_num_seqs=2))
    for req_id, prompt in PROMPTS.items():
        engine.add(req_id, prompt, temperature=0, max_tokens=12)
    engine.step()
    engine.scheduler.finish_requests(list(PROMPTS), RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert engine.worker.row_states() == [] and engine.worker.runner.requests == {}


@pytest.mark.parametrize("runner", RUNNERS)
def test_bfloat16_and_float16_run(runner):
    for dtype in ("bfloat16", "float16"):
        engine = run({"r1": (PROMPTS["r1"], {"temperature": 0, "max_tokens": 4})}, dtype=dtype, runner=runner)
        assert len(engine.tokens["r1"]) == 4


def test_memory_is_as_stated_or_a_share_of_what_is_free_and_never_more_than_full_seats_use():
    _, worker = build_engine(MODEL, config())
    page = 2 * 4 * 4 * 32 * 4 * 3  # keys and values, block size, heads, head size, bytes, layers
    available, how, terms = worker.determine_available_memory()
    assert (available, how) == (min(available, (8 * 24 + 1) * page), "share_of_free_ram")
    assert terms["most_that_full_seats_use"] == (8 * 24 + 1) * page
    worker.config = dataclasses.replace(worker.config, kv_cache_memory=12345)
    assert worker.determine_available_memory()[:2] == (12345, "stated")


def test_a_gpu_gives_its_share_less_others_weights_and_the_largest_step_and_no_more_than_full_seats_use(monkeypatch):
    """The figures are made up: 5 MiB of kernels are loaded in the largest step, 1 MiB torch keeps for later."""
    _, worker = build_engine(MODEL, config())
    steps, mib = [], 2**20
    for name, value in {
        "empty_cache": None, "reset_peak_memory_stats": None, "synchronize": None, "memory_allocated": 20 * mib,
        "max_memory_allocated": 28 * mib, "memory_reserved": 21 * mib,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (70 * mib if steps else 75 * mib, 100 * mib))
    worker.device, worker._run_largest_step = torch.device("cuda"), lambda: steps.append(1)
    worker.config = config(max_num_seqs=1000)
    available, how, terms = worker.determine_available_memory()
    assert (available, how) == (90 * mib - 9 * mib - 20 * mib - 8 * mib, "profiled")
    assert (terms["used_by_others"], terms["weights"], terms["largest_step"]) == (9 * mib, 20 * mib, 8 * mib)
    worker.config = config(max_num_seqs=2)
    assert worker.determine_available_memory()[0] == (2 * 24 + 1) * 2 * 4 * 4 * 32 * 4 * 3


def test_largest_step_computes_all_tokens_draws_for_all_seats_and_leaves_the_random_stream(monkeypatch):
    _, worker = build_engine(MODEL, config(max_num_seqs=20, max_num_batched_tokens=30))
    sampler, model, shapes = worker.runner.sampler, worker.runner.model, []
    before, draw = sampler.generator.get_state(), sampler.draw
    monkeypatch.setattr(sampler, "draw", lambda logits, rows: shapes.append(logits.shape) or draw(logits, rows))
    model.register_forward_hook(lambda module, arguments, hidden: shapes.append(hidden.shape))
    worker._run_largest_step()
    assert shapes == [(30, worker.model_config.hidden_size), (20, worker.model_config.vocab_size)]
    assert torch.equal(sampler.generator.get_state(), before)
