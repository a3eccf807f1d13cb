"""Random models beside transformers: dense, mixture and hybrid, in every way a request can be computed."""

import dataclasses
import json
import shutil

import pytest
import torch

from paged_driver import PagedDriver
from pagedlab.attention.torch_backend import TorchBackend
from pagedlab.models.config import ModelConfig
from pagedlab.models.layers import RotaryEmbedding
from pagedlab.models.loader import new_model
from pagedlab.models.qwen3_moe import SparseMoE

TOLERANCE = 1e-3
COMMON = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 20, "max_position_embeddings": 256, "initializer_range": 0.4,
    "rms_norm_eps": 1e-6,
}
SIZES = {
    "dense": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "biased": {"num_hidden_layers": 2, "attention_bias": True},
    "moe": {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "moe-unnormalized": {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 24, "norm_topk_prob": False},
    "hybrid": {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 13,
               "layer_types": ["full_attention", "sliding_attention"] * 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name → (directory, transformers' model)"""
    transformers = pytest.importorskip("transformers")
    made = {}
    for name, size in SIZES.items():
        torch.manual_seed(len(made))
        moe = name.startswith("moe")
        config = (transformers.Qwen3MoeConfig if moe else transformers.Qwen3Config)(**COMMON, **size)
        model = (transformers.Qwen3MoeForCausalLM if moe else transformers.Qwen3ForCausalLM)(config).eval()
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.data.uniform_(0.5, 1.5)
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        made[name] = directory, model
    return made


@pytest.fixture(params=SIZES)
def pair(request, models):
    return models[request.param]


@torch.inference_mode()
def expected_logits(model, token_ids):
    return model(torch.tensor([token_ids])).logits[0]


def random_ids(length, seed):
    return torch.randint(300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_near(found, expected):
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
def test_whole_prompt_gives_transformers_logits_at_every_position(pair, block_size):
    directory, model = pair
    driver = PagedDriver(directory, block_size=block_size, num_blocks=128)
    token_ids = random_ids(50, seed=1)
    driver.start("r0")
    assert_near(driver.step({"r0": token_ids}, all_positions=True), expected_logits(model, token_ids))


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_chunked_prompt_gives_the_same_logits(pair, chunk):
    directory, model = pair
    driver = PagedDriver(directory, block_size=4)
    token_ids = random_ids(45, seed=2)
    driver.start("r0")
    chunks = [driver.step({"r0": token_ids[i : i + chunk]}, all_positions=True) for i in range(0, 45, chunk)]
    assert_near(torch.cat(chunks), expected_logits(model, token_ids))


def test_prefills_and_decodes_of_many_lengths_share_a_step(pair):
    directory, model = pair
    driver = PagedDriver(directory, block_size=4, num_blocks=200)
    texts = {f"r{i}": random_ids(length, seed=i) for i, length in enumerate([1, 2, 3, 9, 17, 31, 60])}
    for r, token_ids in texts.items():
        driver.start(r)
        if len(token_ids) % 3 == 0:  # these decode, the others prefill
            driver.step({r: token_ids[:-1]})
    logits = driver.step({r: t[driver.computed[r] :] for r, t in texts.items()})
    for found, token_ids in zip(logits, texts.values(), strict=True):
        assert_near(found, expected_logits(model, token_ids)[-1])


def test_prefix_hit_starts_in_the_middle_of_a_sequence(pair):
    directory, model = pair
    driver = PagedDriver(directory, block_size=4)
    token_ids = random_ids(40, seed=3)
    driver.start("r0")
    driver.step({"r0": token_ids[:33]})
    shared = [table[:8] for table in driver.tables["r0"]]
    driver.start("r1", shared, num_computed=32)
    assert_near(driver.step({"r1": token_ids[32:]})[0], expected_logits(model, token_ids)[-1])


def test_a_hit_may_read_blocks_that_the_same_step_fills(pair):
    directory, model = pair
    driver = PagedDriver(directory, block_size=4)
    token_ids = random_ids(30, seed=4)
    driver.start("r1")
    for table in driver.tables["r1"]:
        table.extend(driver.free.pop() for _ in range(5))
    driver.start("r0", [table[:5] for table in driver.tables["r1"]])
    driver.computed["r1"] = 20
    logits = driver.step({"r1": token_ids[20:], "r0": token_ids[:20]})  # the reader comes first
    assert_near(logits[0], expected_logits(model, token_ids)[-1])


def test_bfloat16_of_the_same_weights_stays_near(pair):
    directory, model = pair
    driver = PagedDriver(directory, dtype=torch.bfloat16)
    token_ids = random_ids(20, seed=5)
    driver.start("r0")
    found, expected = driver.step({"r0": token_ids})[0], expected_logits(model, token_ids)[-1]
    assert torch.corrcoef(torch.stack([found, expected]))[0, 1] > 0.9


def test_a_hybrid_model_has_two_kinds_of_layers_and_its_window_matters(models):
    directory, model = models["hybrid"]
    driver = PagedDriver(directory, block_size=4)
    assert [spec.sliding_window for spec in driver.groups] == [None, 13]
    token_ids = random_ids(40, seed=6)
    model.config.layer_types, before = ["full_attention"] * 4, model.config.layer_types
    try:
        windowless = expected_logits(model, token_ids)
    finally:
        model.config.layer_types = before
    driver.start("r0")
    found = driver.step({"r0": token_ids}, all_positions=True)
    assert_near(found[:13], windowless[:13])
    assert (found[20:] - windowless[20:]).abs().max() > 0.1


def test_experts_see_only_their_own_tokens(models):
    driver = PagedDriver(models["moe"][0])
    moe = next(m for m in driver.model.modules() if isinstance(m, SparseMoE))
    x = torch.randn(11, 64)
    weights, experts = moe.route(x)
    alone = torch.zeros_like(x)
    for token in range(11):
        for choice in range(3):
            expert = experts[token, choice]
            gate, up = (moe.gate_up_proj[expert] @ x[token]).chunk(2)
            alone[token] += weights[token, choice] * (moe.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(moe(x), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size, theta", [(16, 1e4), (20, 1e4), (128, 1e6)])
def test_angles_are_those_of_transformers_to_the_bit(head_size, theta, dtype):
    """Of one token, of a few and of many, near and far, in any order, as transformers turns each half."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = transformers.Qwen3Config(
        head_dim=head_size, rope_parameters={"rope_type": "default", "rope_theta": theta}, num_attention_heads=1
    )
    theirs, ours = Qwen3RotaryEmbedding(config), RotaryEmbedding(head_size, theta, dtype, torch.device("cpu"))
    order = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 5, 16, 17, 300):
        positions = torch.randint(0, 131_072, (count,), generator=order)
        cos, sin = theirs(torch.empty(0, dtype=dtype), positions[None])
        first, second = sin[0].chunk(2, dim=-1)
        found_cos, found_sin = ours.cos_sin(positions)
        assert torch.equal(found_cos[:, 0], cos[0])
        assert torch.equal(found_sin[:, 0], torch.cat((-first, second), dim=-1))


def test_the_longest_request_that_a_config_promises_costs_no_memory(models):
    directory, _ = models["dense"]
    config = dataclasses.replace(ModelConfig.from_directory(directory), max_position_embeddings=10**9)
    model = new_model(config, device=torch.device("cpu"), dtype=torch.float32, attention_backend=TorchBackend())
    held = [value for value in vars(model.rotary).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in held) == config.head_dim


ROPE = {"rope_theta": 1e4, "rope_scaling": None}
OTHER_CONFIGS = {
    "as released": ROPE | {"torch_dtype": "float32", "use_sliding_window": False, "sliding_window": 4,
                           "max_window_layers": 1, "attention_dropout": 0.1},
    "as saved today": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "dtype": "float32"},
    "unscaled by name": {"rope_theta": 1e4, "rope_scaling": {"type": "default"}},
    "a window": ROPE | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": None},
    "a window that is longer than the text": ROPE | {"use_sliding_window": True, "sliding_window": 99,
                                                     "max_window_layers": 0},
}


@pytest.mark.parametrize("name", OTHER_CONFIGS)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_same_folder_means_the_same_model_to_transformers(models, tmp_path, kind, name):
    transformers = pytest.importorskip("transformers")
    directory, _ = models[kind]
    changes = OTHER_CONFIGS[name]
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    for field in ("rope_parameters", "rope_theta", "dtype", "layer_types"):
        config.pop(field, None)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    driver, prompt = PagedDriver(tmp_path), random_ids(30, seed=3)
    driver.start("r0")
    assert_near(driver.step({"r0": prompt}, all_positions=True), expected_logits(model, prompt))
