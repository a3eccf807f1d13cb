"""A model with full and sliding layers through the whole engine, beside transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from test_worker_engine import RUNNERS, Engine, config

WINDOW = 13
LAYERS = {
    "two groups": ["full_attention", "sliding_attention"] * 2,
    "four groups": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "window only": ["sliding_attention"] * 2,
}
NUM_GROUPS = dict(zip(map(tuple, LAYERS.values()), (2, 4, 1), strict=True))
PROMPTS = {f"r{i}": torch.randint(1, 300, (n,), generator=torch.Generator().manual_seed(i)).tolist()
           for i, n in enumerate((3, 20, 41, 5, 4, 6, 30))}  # fmt: skip


@pytest.fixture(scope="module", params=LAYERS)
def model(request, tmp_path_factory):
    """(directory, transformers' model)"""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    layer_types = LAYERS[request.param]
    reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=20,
        max_position_embeddings=256, initializer_range=0.4, num_hidden_layers=len(layer_types), layer_types=layer_types,
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0,
    )).eval()  # fmt: skip
    directory = tmp_path_factory.mktemp("hybrid")
    reference.save_pretrained(directory)
    return Path(directory), reference


@torch.inference_mode()
def compare_with_transformers(engine, reference, req_id, prompt):
    """One full pass over prompt and output: logits within 1e-3, tokens wherever the margin exceeds 4e-3."""
    tokens = engine.tokens[req_id]
    expected = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert (torch.stack(engine.recorder.logits[req_id]) - expected).abs().max() < 1e-3
    best = expected.topk(2).values
    is_safe = best[:, 0] - best[:, 1] > 4e-3
    assert is_safe.sum() > len(tokens) // 2
    assert torch.equal(torch.tensor(tokens)[is_safe], expected.argmax(-1)[is_safe])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("knobs", [{"num_blocks": 400}, {"num_blocks": 400, "max_num_batched_tokens": 6}, {}])
def test_hybrid_model_gives_transformers_tokens_past_the_window_with_hits_and_preemption(model, runner, knobs):
    directory, reference = model
    num_groups = NUM_GROUPS[tuple(reference.config.layer_types)]
    tight = {"num_blocks": {1: 14, 2: 36, 4: 50}[num_groups]}
    engine = Engine(config(runner=runner, **(knobs or tight)), model_dir=directory)
    assert len(engine.scheduler.kv_cache_manager.groups) == num_groups
    for round_ in range(2):
        for req_id, prompt in PROMPTS.items():
            engine.add(f"{req_id}.{round_}", prompt, temperature=0, max_tokens=24)
        engine.run()
    for name in engine.tokens:
        compare_with_transformers(engine, reference, name, PROMPTS[name.split(".")[0]])
    if knobs:
        assert engine.scheduler.kv_cache_manager.prefix_cache_stats.hits > 0
    else:
        assert sum(engine.num_preemptions.values()) > 0


def poison_blocks(engine, *, in_use):
    """NaN into all blocks that are in use, or into those that are not, the null block among them; → how many."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    block_ids = [b.block_id for b in pool.blocks if (b.ref_cnt > 0 and b is not pool.null_block) == in_use]
    for layer in engine.worker.runner.model.attention_layers.values():
        layer.kv_cache[:, block_ids] = float("nan")
    return len(block_ids)


def crowded(model, **knobs):
    """Every prompt at once in a small pool that caches nothing: blocks are given back in each step."""
    directory, reference = model
    num_blocks = {1: 14, 2: 36, 4: 50}[NUM_GROUPS[tuple(reference.config.layer_types)]]
    engine = Engine(config(num_blocks=num_blocks, enable_prefix_caching=False, **knobs), model_dir=directory)
    for req_id, prompt in PROMPTS.items():
        engine.add(req_id, prompt, temperature=0, max_tokens=24)
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_that_slid_out_or_were_freed_are_never_read(model, dtype):
    clean, poisoned = crowded(model, dtype=dtype).run(), crowded(model, dtype=dtype)
    num_poisoned = 0
    while poisoned.scheduler.requests:
        num_poisoned += poison_blocks(poisoned, in_use=False)
        poisoned.step()
    assert num_poisoned > 400 and sum(poisoned.num_preemptions.values()) > 0
    for req_id in PROMPTS:
        found, expected = (torch.stack(engine.recorder.logits[req_id]) for engine in (poisoned, clean))
        assert found.isfinite().all() and torch.equal(found, expected)


def test_a_block_in_use_that_lost_its_values_would_show(model):
    """The counterpart."""
    engine = crowded(model)
    for _ in range(3):
        engine.step()
    assert poison_blocks(engine, in_use=True)
    engine.step()
    assert any(rows[-1].isnan().any() for rows in engine.recorder.logits.values())
