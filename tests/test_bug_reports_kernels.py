"""Rows 24, 25 and 40 of the public bug reports, restated in cases of known outcome."""

import dataclasses
import importlib.util

import pytest
import torch

from paged_driver import CHECKPOINTS, PagedDriver
from pagedlab import LLM, SamplingParams
from pagedlab.kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference

DENSE = CHECKPOINTS / "dense-untied-a" / "checkpoint"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
both_backends = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])


@both_backends
def test_row_24_what_the_cache_held_before_never_shows(backend):
    """Masked slots times NaN: a batch of lengths 5 and 9, six decodes, three fillings, the same bits."""
    runs = []
    for fill in (float("nan"), 1e4, 0.0):
        driver = PagedDriver(DENSE, backend=backend, block_size=4, fill=fill)
        driver.start("a")
        driver.start("b")
        logits = [driver.step({"a": [3, 1, 4, 1, 5], "b": [9, 2, 6, 5, 3, 5, 8, 9, 7]})]
        for _ in range(6):
            token_ids = logits[-1].argmax(-1).tolist()
            logits.append(driver.step({"a": token_ids[:1], "b": token_ids[1:]}))
        runs.append(torch.stack(logits))
    assert runs[0].isfinite().all()
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("kernel", ["torch", pytest.param("interpreted", marks=needs_triton)])
def test_row_25_padding_writes_nowhere_and_a_slot_beyond_the_cache_is_refused(kernel):
    def write(key, cache, slots):
        if kernel == "torch":
            reshape_and_cache_reference(key, key, cache, torch.tensor(slots))
        else:
            reshape_and_cache(key, key, cache, torch.tensor(slots), "interpreted")

    cache = torch.zeros(2, 6, 4, 1, 8)
    write(torch.ones(4, 1, 8), cache, [5, -1, -1, 17])
    assert cache[0].sum((-1, -2)).flatten().nonzero().flatten().tolist() == [5, 17]
    before = cache.clone()
    with pytest.raises(IndexError, match="slot 24 is outside the cache"):
        write(torch.ones(1, 1, 8), cache, [24])
    assert torch.equal(cache, before)
    write(torch.full((8, 1, 8), 2.0), cache, [0, 1, 2, -1, -1, -1, -1, -1])  # a batch of 3 padded to 8
    assert torch.equal(cache[:, 0, 3:], before[:, 0, 3:]) and torch.equal(cache[:, 1:], before[:, 1:])
    assert cache[:, 0, :3].eq(2).all()


def test_row_40_solo_and_batched_requests_give_the_same_tokens_and_all_of_them():
    """Prompts of 3, 9 and 4 tokens; one ends at its second output, which counts."""
    prompts = [[11, 12, 13], list(range(30, 39)), [7, 8, 9, 10]]
    llm = LLM(DENSE, num_blocks=40, block_size=4)
    free = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    second = llm.generate(prompts[1], free)[0].outputs[0].token_ids[1]
    params = [free, dataclasses.replace(free, stop_token_ids=[second]), free]
    solo = [llm.generate(prompt, p)[0].outputs[0] for prompt, p in zip(prompts, params, strict=True)]
    together = [output.outputs[0] for output in llm.generate(prompts, params)]
    for alone, batched in zip(solo, together, strict=True):
        assert list(alone.token_ids) == list(batched.token_ids)
        for mine, theirs in zip(alone.logprobs, batched.logprobs, strict=True):
            assert {token_id: x.logprob for token_id, x in mine.items()} == pytest.approx(
                {token_id: x.logprob for token_id, x in theirs.items()}, abs=1e-4)
    assert [len(output.token_ids) for output in together] == [6, 2, 6]
    assert together[1].finish_reason == "stop"


@both_backends
def test_row_40_an_idle_row_beside_others_gives_no_nan(backend):
    driver = PagedDriver(DENSE, backend=backend, block_size=4)
    for name in ("a", "idle", "b"):
        driver.start(name)
    driver.step({"idle": [1, 2]})
    logits = driver.step({"a": [3, 4, 5], "idle": [], "b": [6, 7, 8, 9]})
    assert logits[[0, 2]].isfinite().all()
    driver.start("c")
    assert (driver.step({"c": [3, 4, 5]})[0] - logits[0]).abs().max() < 1e-4
