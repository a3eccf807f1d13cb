"""LLM: prompts in, results out, on the embedded model."""

import signal

import pytest
import torch

from pagedlab import LLM, EngineConfig, SamplingParams, Trace, UserError, tracing

PROMPTS = ["It is a truth universally acknowledged", "Emma", "She had been a friend and companion such as few"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=40)


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    """After each test on the shared engine every block is free again."""
    yield
    if "llm" in request.fixturenames:
        shared = request.getfixturevalue("llm")
        assert not shared.has_unfinished_requests() and num_free(shared) == 39


def num_free(llm: LLM) -> int:
    return llm.core.scheduler.kv_cache_manager.block_pool.num_free_blocks


def token_ids(outputs) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


# ------------------------------------------------------------------ generate


def test_bug_39_results_come_in_prompt_order_call_after_call(llm):
    first = llm.generate(PROMPTS, GREEDY)
    second = llm.generate(PROMPTS[::-1], GREEDY)
    assert [o.prompt for o in first] == PROMPTS and [o.prompt for o in second] == PROMPTS[::-1]
    assert token_ids(first) == token_ids(second)[::-1]
    ids = [int(o.request_id[1:]) for o in first + second]
    assert ids == sorted(set(ids))
    assert all(len(o.outputs[0].token_ids) == 6 and o.finished for o in first + second)


def test_text_token_ids_and_dicts_are_the_same_prompt(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    forms = [PROMPTS[0], [PROMPTS[0]], ids, [ids], {"prompt_token_ids": ids}, [{"prompt": PROMPTS[0]}]]
    results = [llm.generate(form, GREEDY) for form in forms]
    assert len({tuple(token_ids(r)[0]) for r in results}) == 1 and all(len(r) == 1 for r in results)
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm):
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    assert [len(ids) for ids in token_ids(llm.generate(PROMPTS, each))] == [1, 2, 3]
    with pytest.raises(UserError, match="2 entries for 3 prompts"):
        llm.generate(PROMPTS, each[:2])


def test_ids_may_be_numpy_arrays_or_tensors(llm):
    torch = pytest.importorskip("torch")
    ids = llm.tokenizer.encode(PROMPTS[0])
    tensor = torch.tensor(ids)
    same = [ids, tensor, tensor.numpy(), [tensor], [tensor.numpy()], tensor[None], iter([ids])]
    assert len({tuple(token_ids(llm.generate(form, GREEDY))[0]) for form in same}) == 1


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (17, GREEDY, "a prompt is text or a list of token ids, not int"),
        ([None], GREEDY, "a prompt is text or a list of token ids"),
        ("a", {"temperature": 0}, "sampling_params must be SamplingParams"),
        ("a", 5, "sampling_params must be SamplingParams"),
    ],
)
def test_what_is_no_prompt_or_no_parameter_is_refused_in_one_sentence(llm, prompts, params, message):
    with pytest.raises(UserError, match=message):
        llm.generate(prompts, params)


@pytest.mark.parametrize("bad", ["", [], [9999], [-1], "x " * 700, {"text": "x"}])
def test_one_bad_prompt_refuses_the_whole_call_before_anything_is_added(llm, bad):
    with pytest.raises(UserError):
        llm.generate([PROMPTS[0], bad], GREEDY)
    assert not llm.core.scheduler.requests


def test_a_prompt_too_long_for_the_pool_says_how_many_blocks_it_needs_and_there_are():
    tiny = LLM(num_blocks=3, block_size=4)
    assert tiny.max_model_len == 8
    with pytest.raises(UserError, match="prompt of 9 tokens that needs 3 blocks, but the pool has 2 usable"):
        tiny.generate([[5] * 9], GREEDY)
    with pytest.raises(UserError, match="prompt of 8 tokens, but max_model_len is 8"):
        tiny.generate([[5] * 8], GREEDY)


def test_a_seeded_request_draws_the_same_whoever_runs_beside_it(llm):
    seeded = SamplingParams(temperature=0.9, seed=42, max_tokens=8)
    unseeded = SamplingParams(temperature=0.9, max_tokens=8)
    alone = token_ids(llm.generate(PROMPTS[0], seeded))
    assert token_ids(llm.generate(PROMPTS[:2], [seeded, unseeded]))[:1] == alone
    assert token_ids(LLM(num_blocks=40, max_num_batched_tokens=3).generate(PROMPTS[0], seeded)) == alone


def test_open_max_tokens_goes_on_to_max_model_len():
    small = LLM(num_blocks=3, block_size=8)
    (output,) = small.generate("Emma", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == small.max_model_len == 16
    assert output.outputs[0].finish_reason == "length"


# ------------------------------------------------------------------ ends


def test_a_stop_token_ends_the_request_and_is_kept_out_of_the_text(llm):
    (free,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.9, seed=1, max_tokens=8))
    stop_id = free.outputs[0].token_ids[3]
    first = free.outputs[0].token_ids.index(stop_id)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=8, stop_token_ids=[stop_id])
    (output,) = llm.generate(PROMPTS[0], params)
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_id)
    assert completion.token_ids == free.outputs[0].token_ids[: first + 1]
    assert completion.text == llm.tokenizer.decode(completion.token_ids[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_text_and_request(llm, include):
    params = {"temperature": 0.9, "seed": 5, "max_tokens": 24}
    (free,) = llm.generate(PROMPTS[0], SamplingParams(**params))
    text = free.outputs[0].text
    stop = text[6:9]
    stopping = SamplingParams(**params, stop=[stop], include_stop_str_in_output=include)
    (output,) = llm.generate(PROMPTS[0], stopping)
    begin = text.find(stop)
    assert output.outputs[0].text == text[: begin + (len(stop) if include else 0)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    streamed = "".join(o.outputs[0].text for o in llm.stream(PROMPTS[0], stopping))
    assert streamed == output.outputs[0].text


@pytest.mark.parametrize("only_the_best", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0}])
def test_a_distribution_cut_to_its_best_token_is_greedy(llm, only_the_best):
    greedy = token_ids(llm.generate(PROMPTS, GREEDY))
    params = {"temperature": 1.3, "max_tokens": 6, "ignore_eos": True, **only_the_best}
    assert token_ids(llm.generate(PROMPTS, SamplingParams(**params))) == greedy


def test_end_of_text_ends_a_request_unless_ignored_and_never_before_min_tokens(llm, monkeypatch):
    usual = token_ids(llm.generate(PROMPTS[0], GREEDY))[0]
    eos = usual[2]  # make the third token of this run the end of text
    monkeypatch.setattr(llm._inputs, "eos_token_id", eos)
    monkeypatch.setattr(llm.core.executor.runner.sampler, "eos_token_ids", (eos,))
    params = {"temperature": 0, "max_tokens": 6}
    (output,) = llm.generate(PROMPTS[0], SamplingParams(**params))
    first = usual.index(eos)
    assert output.outputs[0].token_ids == usual[: first + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert token_ids(llm.generate(PROMPTS[0], SamplingParams(**params, ignore_eos=True))) == [usual]
    (longer,) = token_ids(llm.generate(PROMPTS[0], SamplingParams(**params, min_tokens=5)))
    assert len(longer) >= 5 and eos not in longer[:5]


# ------------------------------------------------------------------ n


def test_bug_33_continuations_have_their_own_seeds_and_ends(llm):
    params = {"temperature": 1.0, "max_tokens": 5}
    prompt = llm.tokenizer.encode(PROMPTS[2])[:6]
    solo = [token_ids(llm.generate([prompt], SamplingParams(**params, seed=s)))[0] for s in (7, 8, 9)]
    child, stop_id = next(
        (i, ids[1])
        for i, ids in enumerate(solo)
        if ids[1] != ids[0] and not any(ids[1] in other for j, other in enumerate(solo) if j != i)
    )
    three = SamplingParams(**params, n=3, seed=7, stop_token_ids=[stop_id])
    for _ in range(2):  # reproducible
        (output,) = llm.generate([prompt], three)
        assert [c.index for c in output.outputs] == [0, 1, 2]
        assert token_ids([output]) == [ids[:2] if i == child else ids for i, ids in enumerate(solo)]
        assert [c.finish_reason for c in output.outputs] == ["stop" if i == child else "length" for i in range(3)]


def test_bug_33_aborting_the_parent_after_two_steps_gives_all_blocks_back(llm):
    before = num_free(llm)
    request_id = llm.add_request(PROMPTS[2], SamplingParams(n=3, seed=7, max_tokens=20, ignore_eos=True))
    llm.step()
    llm.step()
    assert len(llm.core.scheduler.running) == 3 and num_free(llm) < before
    (output,) = llm.abort(request_id)
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3 and output.finished
    assert num_free(llm) == before and llm.step() == [] and not llm.has_unfinished_requests()


# ------------------------------------------------------------------ request ids


def test_bug_34_an_id_in_use_is_refused_and_the_first_request_lives_on(llm):
    alone = token_ids(llm.generate(PROMPTS[0], GREEDY))
    llm.add_request(PROMPTS[0], GREEDY, request_id="A")
    llm.step()
    table = llm.core.scheduler.kv_cache_manager.get_block_ids("A")
    for params in (GREEDY, SamplingParams(n=2)):
        with pytest.raises(UserError, match="request A is still running"):
            llm.add_request("Emma", params, request_id="A")
    assert llm.core.scheduler.kv_cache_manager.get_block_ids("A") == table and len(llm.core.scheduler.requests) == 1
    outputs = []
    while llm.has_unfinished_requests():
        outputs = llm.step() or outputs
    assert token_ids(outputs) == alone


def test_bug_34_an_aborted_id_may_come_again_before_the_next_step(llm):
    alone = token_ids(llm.generate(PROMPTS[1], GREEDY))
    llm.add_request(PROMPTS[0], GREEDY, request_id="B")
    llm.step()
    llm.abort("B")
    llm.add_request(PROMPTS[1], GREEDY, request_id="B")
    outputs = []
    while llm.has_unfinished_requests():
        outputs = llm.step() or outputs
    assert token_ids(outputs) == alone and llm.abort("B") == []


# ------------------------------------------------------------------ streaming, step by step


def test_streamed_chunks_add_up_to_the_generated_text(llm):
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=20)
    whole = {o.prompt: o.outputs[0] for o in llm.generate(PROMPTS, params)}
    texts, ids, ended = dict.fromkeys(PROMPTS, ""), {p: [] for p in PROMPTS}, []
    for output in llm.stream(PROMPTS, params):
        texts[output.prompt] += output.outputs[0].text
        ids[output.prompt] += output.outputs[0].token_ids
        ended += [output.prompt] if output.finished else []
        assert not output.outputs[0].text.endswith("\ufffd") or output.finished
    assert sorted(ended) == sorted(PROMPTS)
    assert texts == {p: c.text for p, c in whole.items()} and ids == {p: c.token_ids for p, c in whole.items()}


def test_a_stream_that_is_left_early_aborts_its_request(llm):
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.core.scheduler.requests


def test_a_stream_that_nobody_reads_aborts_its_requests(llm):
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True))
    assert len(llm.core.scheduler.requests) == len(PROMPTS)
    del stream
    assert not llm.core.scheduler.requests


@pytest.mark.parametrize("prompt", [b"bytes", {"prompt": 5, "prompt_token_ids": [1]}, torch.tensor(5)])
def test_a_prompt_of_another_type_is_refused(llm, prompt):
    with pytest.raises(UserError, match="a prompt is text or a list of token ids, not "):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("wrong", [
    {"request_id": 5}, {"request_id": ""}, {"priority": "high"}, {"priority": 1.5}, {"arrival_time": float("nan")},
    {"arrival_time": "now"}, {"kind": "all"}, {"sampling_params": {"temperature": 0}},
])  # fmt: skip
def test_a_request_of_the_wrong_kind_is_refused_and_changes_nothing(llm, wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=name):
        llm.add_request(PROMPTS[0], **wrong)
    assert not llm.has_unfinished_requests()


def test_a_config_of_another_type_is_refused():
    with pytest.raises(UserError, match="config must be an EngineConfig, not dict"):
        LLM(config={"num_blocks": 4})


def test_requests_added_by_hand_survive_a_generate_in_between(llm):
    alone = token_ids(llm.generate(PROMPTS[:2], GREEDY))
    llm.add_request(PROMPTS[0], GREEDY, request_id="by-hand")
    between = token_ids(llm.generate(PROMPTS[1], GREEDY))
    last = None
    while llm.has_unfinished_requests():
        last = llm.step()[-1]
    assert [last.outputs[0].token_ids, *between] == alone and last.request_id == "by-hand"


# ------------------------------------------------------------------ logprobs


def test_logprobs_of_output_and_prompt_do_not_depend_on_chunks(llm):
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (whole,) = llm.generate(PROMPTS[0], params)
    (chunked,) = LLM(num_blocks=40, max_num_batched_tokens=4).generate(PROMPTS[0], params)
    completion = whole.outputs[0]
    assert completion.cumulative_logprob == pytest.approx(sum(
        d[i].logprob for i, d in zip(completion.token_ids, completion.logprobs, strict=True)
    ))
    assert all(d[i].rank == 1 for i, d in zip(completion.token_ids, completion.logprobs, strict=True))
    assert whole.prompt_logprobs[0] is None and len(whole.prompt_logprobs) == len(whole.prompt_token_ids)
    for token_id, a, b in zip(
        whole.prompt_token_ids[1:], whole.prompt_logprobs[1:], chunked.prompt_logprobs[1:], strict=True
    ):
        assert token_id in a and a.keys() == b.keys()
        assert a[token_id].logprob == pytest.approx(b[token_id].logprob, abs=1e-3)


# ------------------------------------------------------------------ interruption


def test_ctrl_c_takes_effect_between_steps_and_leaves_a_usable_engine(llm, monkeypatch):
    before = token_ids(llm.generate(PROMPTS, GREEDY))
    execute = llm.core.executor.execute_model
    steps = []

    def interrupted(scheduler_output):
        steps.append(scheduler_output)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return execute(scheduler_output)

    monkeypatch.setattr(llm.core.executor, "execute_model", interrupted)
    with tracing() as trace, pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert len(steps) == 2 and len(trace.filter("step_finished")) == 2
    assert not llm.core.scheduler.requests and token_ids(llm.generate(PROMPTS, GREEDY)) == before


def test_a_step_that_fails_leaves_no_unwritten_block_in_the_prefix_cache(llm, monkeypatch):
    before = token_ids(llm.generate(PROMPTS, GREEDY))
    llm.reset_prefix_cache()

    def fails(scheduler_output):
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm.core.executor, "execute_model", fails)
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    outputs = llm.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == before and all(o.num_cached_tokens == 0 for o in outputs)


# ------------------------------------------------------------------ tracing, knobs


def test_tracing_a_warm_engine_changes_nothing_and_starts_from_a_snapshot(llm):
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=6)
    long_prompt = " ".join(PROMPTS)
    llm.generate(long_prompt, params)
    untraced = token_ids(llm.generate(long_prompt, params))
    with tracing() as trace:
        (output,) = llm.generate(long_prompt, params)
    assert token_ids([output]) == untraced and output.num_cached_tokens >= 16
    assert isinstance(trace, Trace) and trace.header.model["name"] == "pagedlab-embedded"
    assert [e.text for e in trace.filter("text_emitted")] and "".join(
        e.text for e in trace.filter("text_emitted")
    ) == output.outputs[0].text
    (snapshot,) = trace.filter("engine_snapshot")
    assert snapshot.cached_blocks


def test_a_refusal_at_the_door_is_an_event_with_its_numbers(llm):
    with tracing() as trace, pytest.raises(UserError):
        llm.generate("x " * 700, GREEDY)
    (refused,) = trace.filter("request_refused")
    assert refused.reason == "never_fits" and refused.numbers["num_usable_blocks"] == 39
    assert not list(trace.filter("request_added"))


def test_the_header_holds_what_was_resolved():
    with tracing() as trace:
        LLM(num_blocks=5, block_size=8)
    config = trace.header.config
    assert (config["max_model_len"], config["num_blocks"], config["device"][:3]) in ((32, 5, "cpu"), (32, 5, "cud"))
    kinds = [type(e).__name__ for e in trace]
    assert kinds.index("KvSpec") < kinds.index("KvMemory") < kinds.index("KvConfig") < kinds.index("KvAllocated")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"colour": "red"}, "no knob 'colour'"),
        ({"config": EngineConfig(), "block_size": 8}, "not both"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": 1}, "null block"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"max_model_len": 100_000}, "model's own limit"),
        ({"kv_cache_memory": 49_152}, "needs"),
        ({"policy": "no.such:policy"}, "policy"),
    ],
)
def test_impossible_knobs_are_refused_at_construction(arguments, message):
    with pytest.raises(UserError, match=message):
        LLM(**arguments)


def test_two_prompts_fit_a_pool_that_forces_preemption_and_keep_their_tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    roomy = token_ids(llm.generate(PROMPTS, params))
    with tracing() as trace:
        cramped = token_ids(LLM(num_blocks=10, block_size=4).generate(PROMPTS, params))
    assert cramped == roomy and len(trace.filter("request_preempted"))
