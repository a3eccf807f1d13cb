"""The three recorded checkpoints: activations, logits and greedy tokens of vLLM and transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file

from paged_driver import CHECKPOINTS, PagedDriver

NAMES = ["dense-tied-a", "dense-untied-a", "moe-a"]
TOLERANCE = 1e-3


def cases(name):
    return {case["name"]: case for case in json.loads((CHECKPOINTS / name / "expected.json").read_text())["cases"]}


@pytest.mark.parametrize("name", NAMES)
def test_activations_of_every_layer_match_the_recorded_ones(name):
    driver = PagedDriver(CHECKPOINTS / name / "checkpoint")
    recorded = load_file(CHECKPOINTS / name / "activations.safetensors")
    found = {}

    def keep(key):
        return lambda module, args, output: found.__setitem__(key, output)

    for i, layer in enumerate(driver.model.layers):
        layer.input_layernorm.register_forward_hook(keep(f"layer{i}.attn_input"))
        layer.self_attn.register_forward_hook(keep(f"layer{i}.attn_output"))
        layer.post_attention_layernorm.register_forward_hook(keep(f"layer{i}.mlp_input"))
        layer.mlp.register_forward_hook(keep(f"layer{i}.mlp_output"))
        layer.register_forward_hook(keep(f"layer{i}.output"))
    driver.model.norm.register_forward_hook(keep("final_norm"))
    driver.start("r0")
    found["logits"] = driver.step({"r0": cases(name)["p01-len5"]["prompt_token_ids"]}, all_positions=True)
    assert set(recorded) - set(found) == {"embedding"}
    for key in found:  # the residual stream of these random weights grows to 1,000, where float32 steps by 6e-5
        assert (found[key] - recorded[key]).abs().max() < 1e-5 * recorded[key].abs().max(), key


@pytest.mark.parametrize("name", NAMES)
def test_logits_at_the_last_prompt_position_match(name):
    driver = PagedDriver(CHECKPOINTS / name / "checkpoint")
    recorded = load_file(CHECKPOINTS / name / "last_prompt_logits.safetensors")
    for case in cases(name).values():
        driver.start(case["name"])
        logits = driver.step({case["name"]: case["prompt_token_ids"]})[0]
        assert (logits - recorded[case["name"]]).abs().max() < TOLERANCE, case["name"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [7, 10**9])
def test_greedy_tokens_match_batched_and_chunked(name, chunk):
    driver = PagedDriver(CHECKPOINTS / name / "checkpoint", num_blocks=160)
    recorded = load_file(CHECKPOINTS / name / "last_prompt_logits.safetensors")
    prompts = {key: case["prompt_token_ids"] for key, case in cases(name).items()}
    for key, (token_ids, logits) in driver.greedy(prompts, 24, chunk).items():
        assert token_ids == cases(name)[key]["greedy_token_ids"][:24]
        assert (logits - recorded[key]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_stays_near(name, dtype):
    driver = PagedDriver(CHECKPOINTS / name / "checkpoint", dtype=dtype)
    recorded = load_file(CHECKPOINTS / name / "last_prompt_logits.safetensors")
    case = cases(name)["p01-len5"]
    driver.start("r0")
    logits = driver.step({"r0": case["prompt_token_ids"]})[0]
    assert logits.dtype == torch.float32
    assert torch.corrcoef(torch.stack([logits, recorded["p01-len5"]]))[0, 1] > 0.95
