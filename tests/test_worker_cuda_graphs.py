"""Padding of decode batches to captured sizes. Recording itself needs a GPU; here a pass stands in for a graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pagedlab.trace.events import MetadataBuilt
from pagedlab.trace.tracer import trace
from pagedlab.worker import cuda_graphs
from pagedlab.worker.cuda_graphs import DecodeGraphs, capture_graph, captured_sizes
from recorded_graph import RecordedGraph
from test_worker_engine import PROMPTS, Engine, config


def test_sizes_are_small_powers_of_two_then_multiples_of_eight():
    assert captured_sizes(20) == [1, 2, 4, 8, 16, 24]
    assert captured_sizes(1) == [1, 2, 4, 8] and captured_sizes(10**6)[-1] == cuda_graphs.LARGEST_SIZE


def engine_with_graphs(capture, runner="persistent"):
    """An engine on the interpreted kernels whose decodes run in buffers of captured sizes."""
    pytest.importorskip("triton")
    engine = Engine(config(attention_backend="triton", runner=runner))
    r = engine.worker.runner
    r.decode_graphs = DecodeGraphs(
        r.model, r.groups, r.metadata_builders, max_num_seqs=8, max_model_len=96, max_num_blocks=r.max_num_blocks,
        device=r.device, capture=capture,
    )  # fmt: skip
    return engine


def run_three(engine):
    for req_id in ("r0", "r1", "r2"):
        engine.add(req_id, PROMPTS[req_id], temperature=0, max_tokens=4)
    return engine.run()


@pytest.mark.parametrize("runner", ["persistent", "state-table"])
def test_padded_decodes_give_the_tokens_and_logits_of_the_eager_pass(runner):
    replays = []

    def capture(run):
        return lambda: replays.append(1) or run()

    eager = run_three(Engine(config(runner=runner)))
    padded = run_three(engine_with_graphs(capture, runner))
    assert len(replays) == 3 + 1  # three decode steps of three rows in a buffer of four, and the check
    assert padded.tokens == eager.tokens
    for req_id, rows in eager.recorder.logits.items():
        assert (torch.stack(rows) - torch.stack(padded.recorder.logits[req_id])).abs().max() < 1e-3


@pytest.mark.parametrize("runner", ["persistent", "state-table"])
def test_replays_depend_on_nothing_but_memory_that_stays(runner, monkeypatch, capsys):
    eager = run_three(Engine(config(runner=runner)))
    replayed = run_three(engine_with_graphs(partial(RecordedGraph, monkeypatch), runner))
    assert replayed.tokens == eager.tokens and not capsys.readouterr().err
    assert replayed.worker.runner.decode_graphs.captured == [4]


def test_padding_does_not_touch_the_cache_of_anyone():
    engine = engine_with_graphs(lambda run: run)
    for layer in engine.worker.runner.model.attention_layers.values():
        layer.kv_cache.fill_(float("nan"))
    run_three(engine)
    for layer in engine.worker.runner.model.attention_layers.values():
        assert layer.kv_cache[:, 0].isnan().all()  # the null block, where padding would go if it went anywhere


def test_graph_that_differs_from_the_eager_pass_is_not_trusted(capsys):
    engine = run_three(engine_with_graphs(lambda run: lambda: run() + 1))
    assert engine.tokens == run_three(Engine(config())).tokens and not engine.worker.runner.decode_graphs.captured
    assert capsys.readouterr().err.startswith("pagedlab: notice: running without CUDA graphs (a replay differs")


def test_capture_that_fails_is_one_notice_and_the_engine_goes_on(capsys):
    def fail(run):
        raise RuntimeError("operation not permitted when stream is capturing\nand a long explanation")

    engine = run_three(engine_with_graphs(fail))
    assert engine.tokens == run_three(Engine(config())).tokens
    assert capsys.readouterr().err.count("notice") == 1


def test_trace_says_when_a_graph_is_replayed_and_level_kernels_runs_eagerly():
    for level, replayed in (("tensors", True), ("kernels", False)):
        engine, events = engine_with_graphs(lambda run: run), []
        trace.start(events, record=level)
        try:
            run_three(engine)
        finally:
            trace.stop()
        backends = {event.backend for event in events if isinstance(event, MetadataBuilt)}
        assert ("triton, CUDA graph of 4 rows replayed" in backends) is replayed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_captured_graph_replays_with_new_contents():
    x = torch.zeros(4, device="cuda")
    assert not (x * 2).any()  # loads the kernel, which a capture must not
    replay = capture_graph(lambda: x * 2)
    x.fill_(3)
    assert replay().tolist() == [6.0] * 4
