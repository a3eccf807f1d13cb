"""What does not fit in memory is told with the knob that makes it smaller."""

from __future__ import annotations

import pytest
import torch

from pagedlab.config import EngineConfig
from pagedlab.engine import build
from pagedlab.errors import UserError
from pagedlab.worker.worker import Worker

CONFIG = {"num_blocks": 64, "device": "cpu", "attention_backend": "torch", "max_model_len": 256}


def sentence_for(**knobs) -> str:
    with pytest.raises(UserError) as caught:
        build.build_engine(EngineConfig(**{**CONFIG, **knobs}))
    return str(caught.value)


@pytest.mark.parametrize("runner", ["state-table", "persistent"])
@pytest.mark.parametrize(("knobs", "what", "ending"), [
    ({"num_blocks": 10**6}, "the KV cache of 1,000,000 blocks takes", "lower num_blocks or kv_cache_memory."),
    ({"max_num_seqs": 10**6}, "the tables of 1,000,000 requests of 256 tokens take",
     "lower max_num_seqs or max_model_len."),
    ({"max_num_batched_tokens": 10**9}, "the slots of a step of 1,000,000,000 tokens take",
     "lower max_num_batched_tokens."),
], ids=["cache", "seats", "tokens"])  # fmt: skip
def test_the_largest_part_is_blamed_and_nothing_is_allocated(monkeypatch, runner, knobs, what, ending):
    monkeypatch.setattr(build, "free_ram_bytes", lambda: 2**30)
    monkeypatch.setattr(Worker, "initialize_from_config", lambda *_: pytest.fail("it was allocated"))
    sentence = sentence_for(runner=runner, **knobs)
    assert sentence.startswith(what) and sentence.endswith(f" GiB, more than this machine can give: {ending}")


def test_what_fits_is_built(monkeypatch):
    monkeypatch.setattr(build, "free_ram_bytes", lambda: 2**30)
    assert build.build_engine(EngineConfig(**CONFIG)).kv_cache_config.num_blocks == 64


def raising(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=["torch", "numpy"])
def test_an_allocation_that_fails_is_the_same_sentence(monkeypatch, error):
    monkeypatch.setattr(build, "free_ram_bytes", lambda: 2**60)
    monkeypatch.setattr(Worker, "initialize_from_config", raising(error))
    assert sentence_for(max_num_seqs=10**6).endswith("lower max_num_seqs or max_model_len.")


def test_a_largest_step_that_does_not_fit_is_one_sentence(monkeypatch):
    monkeypatch.setattr(Worker, "determine_available_memory", raising(torch.OutOfMemoryError("CUDA out of memory")))
    assert sentence_for(num_blocks=None, max_num_batched_tokens=10**6, max_num_seqs=8) == (
        "the largest step, of 1,000,000 tokens and 8 requests, does not fit beside the model: "
        "lower max_num_batched_tokens or max_num_seqs."
    )


@pytest.mark.parametrize("words", ["an illegal instruction", "CUDA error: an illegal memory access was encountered"])
def test_another_error_keeps_its_own_words(monkeypatch, words):
    monkeypatch.setattr(Worker, "initialize_from_config", raising(RuntimeError(words)))
    with pytest.raises(RuntimeError, match=words):
        build.build_engine(EngineConfig(**CONFIG))
