"""Backends as models use them: chosen once, the same results, and honest about what their kernels did."""

import importlib.util
import json
import shutil

import pytest
import torch

from paged_driver import CHECKPOINTS, PagedDriver
from pagedlab import LLM, SamplingParams
from pagedlab.attention.backends import AttentionLayerConfig, choose_attention_backend
from pagedlab.attention.flash_attn_backend import FlashAttentionBackend
from pagedlab.attention.forward_context import set_forward_context
from pagedlab.config import EngineConfig
from pagedlab.errors import UserError
from pagedlab.kernels.jit import has_c_compiler
from pagedlab.kernels.paged_attention import paged_attention_reference
from pagedlab.kernels.reshape_and_cache import reshape_and_cache_reference
from pagedlab.trace.events import (
    KernelLaunched,
    KvRead,
    KvWritten,
    MetadataBuilt,
    PrefixMatched,
    RequestConsidered,
    RequestPreempted,
)
from pagedlab.trace.tracer import trace
from pagedlab.worker.worker import resolve_index_kernels

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DENSE = CHECKPOINTS / "dense-untied-a" / "checkpoint"
CASES = {c["name"]: c for c in json.loads((CHECKPOINTS / "dense-untied-a" / "expected.json").read_text())["cases"]}


def choose(name, **changes):
    sizes = {"head_size": 64, "block_sizes": [16], "dtype": torch.float32} | changes
    return choose_attention_backend(name, torch.device("cpu"), **sizes)


def run(backend, record=None, layers="all"):
    """A chunk of a prompt, then the rest beside another prompt; → (logits of both steps, events)."""
    driver = PagedDriver(DENSE, backend=backend)
    events = []
    if record:
        trace.start(events, record=record, layers=layers)
    try:
        driver.start("r0")
        driver.start("r1")
        first = driver.step({"r0": list(range(20))})
        second = driver.step({"r0": [7], "r1": list(range(5))})
    finally:
        trace.stop()
    return torch.cat([first, second]), events


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


@needs_triton
def test_interpreted_kernels_give_the_recorded_tokens():
    driver = PagedDriver(DENSE, backend="triton")
    case = CASES["p02-len16"]
    [(token_ids, _)] = driver.greedy({"r0": case["prompt_token_ids"]}, 4, chunk=9).values()
    assert token_ids == case["greedy_token_ids"][:4]


@needs_triton
def test_both_backends_agree_and_report_the_same_writes_and_reads():
    torch_logits, torch_events = run("torch", "kernels")
    triton_logits, triton_events = run("triton", "kernels")
    assert (torch_logits - triton_logits).abs().max() < 1e-3
    assert {event.source for event in of(KvWritten, torch_events)} == {"torch"}
    assert {event.source for event in of(KvWritten, triton_events)} == {"triton-interpreted"}
    assert {event.how for event in of(KernelLaunched, triton_events)} == {"interpreted"}
    for mine, theirs in zip(of(KvWritten, torch_events), of(KvWritten, triton_events), strict=True):
        assert (mine.layer, mine.token, mine.slot, mine.block_id, mine.offset) == (
            theirs.layer, theirs.token, theirs.slot, theirs.block_id, theirs.offset)
        if mine.layer == "model.layers.0.self_attn.attn":  # before it both computed the same bits
            assert mine.checksum == theirs.checksum
    for mine, theirs in zip(of(KvRead, torch_events), of(KvRead, triton_events), strict=True):
        assert (mine.layer, mine.request_id, mine.block_ids) == (theirs.layer, theirs.request_id, theirs.block_ids)


def test_kernel_events_say_what_the_step_did():
    _, events = run("torch", "kernels")
    writes, reads = of(KvWritten, events), of(KvRead, events)
    assert [len(event.token) for event in writes] == [20] * 3 + [6] * 3
    assert all(s == b * 16 + o for e in writes for s, b, o in zip(e.slot, e.block_id, e.offset, strict=True))
    assert [(event.request_id, len(event.block_ids)) for event in reads] == [("r0", 2)] * 3 + [("r0", 2), ("r1", 1)] * 3
    assert {block_id for event in reads for block_id in event.block_ids} == {b for e in writes for b in e.block_id}
    assert [event.backend for event in of(MetadataBuilt, events)] == ["torch", "torch"]


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_only_the_layers_asked_for_are_logged(backend):
    _, events = run(backend, "kernels", layers=[1])
    for kind in (KernelLaunched, KvWritten, KvRead):
        assert {event.layer for event in of(kind, events)} == {"model.layers.1.self_attn.attn"}
    assert not of(KvWritten, run(backend, "tensors")[1])


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_logging_changes_no_bit_of_the_result(backend):
    assert torch.equal(run(backend)[0], run(backend, "kernels")[0])


@needs_triton
def test_mixture_of_prefill_and_decode_in_a_hybrid_model_needs_no_special_case(tmp_path):
    config = json.loads((DENSE / "config.json").read_text())
    for file in DENSE.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config |= {"use_sliding_window": True, "sliding_window": 6,
               "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    logits = []
    for backend in ("torch", "triton"):
        driver = PagedDriver(tmp_path, backend=backend, block_size=4)
        assert len(driver.groups) == 2
        driver.start("r0")
        driver.start("r1")
        driver.step({"r0": list(range(11))})
        logits.append(driver.step({"r1": list(range(9)), "r0": [3]}))
    assert (logits[0] - logits[1]).abs().max() < 1e-3


def test_auto_is_torch_on_a_cpu():
    assert choose("auto").name == "torch"


def test_torch_takes_any_block_size_and_triton_only_powers_of_two():
    assert choose("torch", block_sizes=[48]).name == "torch"
    with pytest.raises(UserError, match="power of two, not 48"):
        choose("triton", block_sizes=[16, 48])


@pytest.mark.parametrize("head_size", [16, 320])
def test_triton_says_which_head_sizes_it_serves(head_size):
    with pytest.raises(UserError, match=f"head sizes 32 to 256, not {head_size}"):
        choose("triton", head_size=head_size)


@needs_triton
def test_gpu_without_a_c_compiler_is_one_sentence_and_its_index_maps_run_in_torch(monkeypatch):
    gpu = torch.device("cuda")
    assert resolve_index_kernels(EngineConfig(), gpu) == ("compiled" if has_c_compiler() else "torch")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match=r"attention_backend triton needs a C compiler, .* install gcc, or choose"):
        choose_attention_backend("auto", gpu, head_size=64, block_sizes=[16], dtype=torch.float32)
    assert resolve_index_kernels(EngineConfig(), gpu) == "torch"


def test_triton_without_triton_is_one_sentence(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    with pytest.raises(UserError, match=r"triton, which is not installed: install pagedlab\[triton\]"):
        choose("triton")


def test_flash_attn_needs_a_gpu():
    with pytest.raises(UserError, match="runs on a CUDA GPU only"):
        choose("flash-attn", block_sizes=[256], dtype=torch.bfloat16)


@needs_triton
@pytest.mark.parametrize("window", [None, 5])
def test_flash_attn_is_asked_for_the_same_attention(window):
    """A stand-in for the package computes what its documentation says of these arguments."""

    def varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                    window_size, block_table):
        assert causal and max_seqlen_q == 9 and max_seqlen_k == 21
        assert window_size[1] == (-1 if window is None else 0)
        return paged_attention_reference(
            q, torch.stack([k, v]), cu_seqlens_q, cu_seqlens_k.diff(), block_table, scale=softmax_scale,
            sliding_window=None if window is None else window_size[0] + 1,
        )

    outputs = []
    for backend in (FlashAttentionBackend(varlen_func, "interpreted"), choose("torch", head_size=32)):
        driver = PagedDriver(DENSE)
        layer = AttentionLayerConfig("model.layers.0.self_attn.attn", 0, 6, 2, 32, 0.2, window)
        impl = backend.make_impl(layer)
        (spec, _names), = driver.groups.items()
        driver.builders = [backend.make_builder(0, type(spec)(16, 2, 32, "float32", window))]
        cache = impl.view_kv_cache(torch.zeros(2 * 64 * 16 * 2 * 32), 64, driver.builders[0].spec)
        driver.start("r0")
        driver.start("r1")
        generator = torch.Generator().manual_seed(0)
        for work in ({"r0": [1] * 20}, {"r0": [1], "r1": [1] * 9}):
            metadata = driver.metadata(driver.input_batch(work))["model.layers.0.self_attn.attn"]
            total = sum(map(len, work.values()))
            q, k, v = (torch.randn(total, heads, 32, generator=generator) for heads in (6, 2, 2))
            if total == 20:
                driver.computed["r0"] = 20
                reshape_and_cache_reference(k, v, cache, metadata.common.slot_mapping)
            else:
                outputs.append(impl.forward(q, k, v, cache, metadata))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


def test_a_pass_that_measures_memory_touches_no_cache():
    driver = PagedDriver(DENSE)
    tokens = torch.arange(8)
    with torch.inference_mode(), set_forward_context({}):
        assert driver.model(tokens, tokens).isfinite().all()
    assert all(layer.kv_cache.isnan().all() for layer in driver.model.attention_layers.values())


def test_a_model_outside_a_forward_context_is_a_mistake_in_the_program():
    driver = PagedDriver(DENSE)
    with pytest.raises(AssertionError, match="set_forward_context"):
        driver.model(torch.arange(3), torch.arange(3))


@needs_triton
@pytest.mark.parametrize("runner", ["persistent", "state-table"])
def test_interpreted_kernels_serve_a_crowded_engine(runner):
    """Chunked prompts, a shared prefix and a preemption: the tokens of a roomy engine on the torch backend."""
    prompts = [list(range(40, 50)), [*range(40, 48), 7], [5, 6, 7]]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    roomy = LLM(DENSE, num_blocks=60)
    crowded = LLM(
        DENSE, num_blocks=8, block_size=4, max_num_batched_tokens=12, attention_backend="triton", runner=runner
    )
    expected = [list(output.outputs[0].token_ids) for output in roomy.generate(prompts, params)]
    events = []
    trace.start(events, record="decisions")
    try:
        found = [list(output.outputs[0].token_ids) for output in crowded.generate(prompts, params)]
    finally:
        trace.stop()
    assert found == expected
    assert of(RequestPreempted, events)
    assert any(event.num_computed_tokens for event in of(PrefixMatched, events))
    assert any(0 < event.num_tokens_granted < event.num_tokens_wanted for event in of(RequestConsidered, events))
