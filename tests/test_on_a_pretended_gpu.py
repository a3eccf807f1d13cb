"""Whole runs on tensors that say they lie on a GPU: nothing is mixed with host memory, and captures never wait."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pagedlab import LLM, SamplingParams, tracing
from pretended_gpu import GPU, OnGpu, PretendedGpu
from test_worker_recordings import CHECKPOINTS

PROMPTS = [[*range(5, 27)], [*range(5, 21), 4, 4], [9, 8, 7]]  # more than a step, a prefix hit, a short one
PARAMS = [
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=3, logprobs=3, max_tokens=3, min_tokens=2),
    SamplingParams(temperature=1.0, prompt_logprobs=2, max_tokens=3),
    SamplingParams(temperature=0, logprobs=1, max_tokens=3, ignore_eos=True),
]  # fmt: skip


def tokens(model="dense-tied-a", params=PARAMS, **knobs):
    knobs = {"block_size": 4, "max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 40,
             "dtype": "float32"} | knobs  # fmt: skip
    llm = LLM(CHECKPOINTS / model / "checkpoint", **knobs)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "model, backend, runner",
    [("dense-tied-a", "torch", "persistent"), ("moe-a", "torch", "state-table"),
     ("dense-tied-a", "triton", "state-table"), ("moe-a", "triton", "persistent")],
)  # fmt: skip
def test_all_that_is_traced_and_sampled_stays_on_one_device(monkeypatch, model, backend, runner):
    expected = tokens(model)
    with PretendedGpu(monkeypatch), tracing(record="kernels") as trace:
        assert tokens(model, device="cuda", attention_backend=backend, runner=runner) == expected
    assert {event.source for event in trace if event.kind == "kv_read"} == {backend}


@pytest.mark.parametrize("runner", ["persistent", "state-table"])
def test_decodes_are_captured_without_a_word_from_the_host(monkeypatch, capsys, runner):
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    expected = tokens(params=greedy)
    with PretendedGpu(monkeypatch) as gpu:
        assert tokens(params=greedy, device="cuda", runner=runner) == expected
    assert gpu.num_captures == 1 and not capsys.readouterr().err


def test_memory_is_profiled_on_the_device(monkeypatch):
    with PretendedGpu(monkeypatch):
        tokens(device="cuda", attention_backend="torch", num_blocks=None)


def test_what_a_gpu_would_refuse_is_refused(monkeypatch):
    with PretendedGpu(monkeypatch) as gpu:
        x = torch.ones(3, device=GPU)
        assert isinstance(x, OnGpu) and (x + 1).tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError, match="two devices"):
            torch.ones(3)[x.long()]
        for waits in (lambda: x.sum().item(), lambda: x[x > 0], lambda: x.copy_(torch.ones(3)), lambda: x.tolist()):
            with pytest.raises(RuntimeError, match="capturing"):
                gpu.capture(waits)
