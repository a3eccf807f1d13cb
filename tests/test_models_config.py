"""config.json as people write it, and as people break it."""

import json
import subprocess
import sys

import pytest

from paged_driver import CHECKPOINTS
from pagedlab.errors import UserError
from pagedlab.models.config import ModelConfig

DENSE = json.loads((CHECKPOINTS / "dense-untied-a" / "checkpoint" / "config.json").read_text())
MOE = json.loads((CHECKPOINTS / "moe-a" / "checkpoint" / "config.json").read_text())


def without(config, *names, **changes):
    return {key: value for key, value in config.items() if key not in names} | changes


@pytest.mark.parametrize("name", ["dense-tied-a", "dense-untied-a", "moe-a"])
def test_both_spellings_of_rope_mean_the_same_model(name):
    older = ModelConfig.from_directory(CHECKPOINTS / name / "checkpoint")
    newer = json.loads((CHECKPOINTS / name / "config_rope_parameters.json").read_text())
    assert ModelConfig.from_dict(newer, {"eos_token_id": 0}) == older


def test_reading_a_config_does_not_import_torch():
    code = "import sys, pagedlab.models.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_dtype_is_the_older_name_of_dtype():
    assert ModelConfig.from_dict(without(DENSE, "dtype", torch_dtype="bfloat16")).dtype == "bfloat16"
    assert ModelConfig.from_dict(without(DENSE, dtype="torch.float16")).dtype == "float16"


def test_end_of_text_ids_of_both_files_count():
    config = ModelConfig.from_dict(without(DENSE, eos_token_id=7), {"eos_token_id": [3, 7]})
    assert config.eos_token_ids == (7, 3)  # the first is the one whose stop_reason is None


def test_an_end_of_text_id_beyond_the_vocabulary_never_comes_up():
    config = ModelConfig.from_dict(without(DENSE, eos_token_id=DENSE["vocab_size"]), {"eos_token_id": [3, 10**9]})
    assert config.eos_token_ids == (3,)


def test_max_window_layers_says_from_where_on_layers_slide():
    config = without(DENSE, "layer_types", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert ModelConfig.from_dict(config).layer_types == ("full_attention", "full_attention", "sliding_attention")
    assert [ModelConfig.from_dict(config).sliding_window_of(i) for i in range(3)] == [None, None, 8]


def test_a_window_that_is_not_in_use_changes_nothing():
    config = ModelConfig.from_dict(without(DENSE, use_sliding_window=False, sliding_window=8))
    assert config.sliding_window is None


def test_sparse_step_and_mlp_only_layers_choose_the_layers_with_experts():
    config = ModelConfig.from_dict(without(MOE, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [config.is_moe_layer(i) for i in range(4)] == [False, True, False, False]


BROKEN = {
    "another family": (without(DENSE, model_type="llama"), "model of type 'llama'"),
    "no family": (without(DENSE, "model_type"), "model of type None"),
    "no RoPE base": (without(DENSE, "rope_theta"), "gives no RoPE base"),
    "rope_parameters without a base": (
        without(DENSE, "rope_theta", rope_parameters={"rope_type": "default"}), "gives no RoPE base"),
    "two RoPE bases": (without(DENSE, rope_parameters={"rope_theta": 5.0}), "gives two RoPE bases"),
    "scaled RoPE": (
        without(DENSE, rope_scaling={"type": "yarn", "factor": 4.0}),
        "rope_scaling asks for RoPE of type 'yarn', but .* remove it"),
    "scaled RoPE in the newer spelling": (
        without(DENSE, "rope_theta", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}),
        "rope_parameters asks for RoPE of type 'yarn'"),
    "half a head of RoPE": (without(DENSE, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5, but"),
    "fp8": (
        without(DENSE, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        "quantized weights .fp8.: use the checkpoint that is not"),
    "4 bits": (without(MOE, quantization_config={"quant_method": "gptq", "bits": 4}), "quantized weights .gptq."),
    "a nameless quantization": (without(DENSE, quantization_config={"bits": 4}), "quantized weights .of an unnamed"),
    "a field is missing": (without(DENSE, "hidden_size"), "hidden_size is missing"),
    "a field is text": (without(DENSE, vocab_size="many"), "vocab_size is 'many'"),
    "heads that cannot share": (without(DENSE, num_key_value_heads=4), "cannot share"),
    "an odd head": (without(DENSE, head_dim=31), "even"),
    "an unknown dtype": (without(DENSE, dtype="int8"), "dtype is 'int8'"),
    "too few layer types": (without(DENSE, layer_types=["full_attention"]), "1 entries for 3 layers"),
    "an unknown layer type": (without(DENSE, layer_types=["linear_attention"] * 3), "'linear_attention'"),
    "a window without a width": (
        without(DENSE, layer_types=["sliding_attention"] * 3, use_sliding_window=True), "sliding_window is not set"),
    "more experts per token than experts": (without(MOE, num_experts_per_tok=9), "only 8"),
    "no name of a family": (without(DENSE, model_type=["qwen3"]), "model of type"),
    "an epsilon that is text": (without(DENSE, rms_norm_eps="small"), "rms_norm_eps is 'small'"),
    "an epsilon that is no number": (without(DENSE, rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "an end-of-text id that is text": (without(DENSE, eos_token_id=[1, "end"]), "eos_token_id has 'end'"),
    "an end-of-text list of lists": (without(DENSE, eos_token_id=[[1]]), "eos_token_id has .1., but"),
    "a negative end-of-text id": (without(DENSE, eos_token_id=-1), "eos_token_id has -1"),
    "a RoPE base that is text": (without(DENSE, rope_theta="large"), "rope_theta is 'large'"),
    "a RoPE base of 0": (without(DENSE, rope_theta=0), "rope_theta is 0"),
    "rope_parameters that are text": (without(DENSE, rope_parameters="default"), "rope_parameters is 'default'"),
    "rope_scaling that is text": (without(DENSE, rope_scaling="yarn"), "rope_scaling is 'yarn'"),
    "scaled RoPE beside unscaled": (
        without(DENSE, rope_parameters={"rope_type": "default", "rope_theta": DENSE["rope_theta"]},
                rope_scaling={"type": "yarn"}), "RoPE of type 'yarn'"),
    "layer types that are text": (without(DENSE, layer_types="full_attention"), "must be a list of names"),
    "layer types that are numbers": (without(DENSE, layer_types=[1, 2, 3]), "must be a list of names"),
    "a first window layer that is text": (
        without(DENSE, "layer_types", use_sliding_window=True, sliding_window=8, max_window_layers="x"),
        "max_window_layers is 'x'"),
    "a number beyond 64 bits": (without(DENSE, vocab_size=10**30), f"vocab_size is {10**30}, but it must be at most"),
    "a million layers": (without(DENSE, num_hidden_layers=10**6), "num_hidden_layers is 1000000, but"),
    "a million experts": (without(MOE, "num_local_experts", num_experts=10**6), "num_experts is 1000000, but"),
    "an epsilon beyond any float": (without(DENSE, rms_norm_eps=10**400), "rms_norm_eps is 1000"),
    "a flag that is text": (without(DENSE, tie_word_embeddings="false"), "tie_word_embeddings is 'false', but"),
    "a flag that is a number": (without(MOE, norm_topk_prob=1), "norm_topk_prob is 1, but it must be true or false"),
    "a layer that is no list": (without(MOE, mlp_only_layers=3), "mlp_only_layers is 3, but it must be a list"),
    "layers that are text": (without(MOE, mlp_only_layers=["0"]), "mlp_only_layers is .'0'., but it must be a list"),
    "another activation": (without(DENSE, hidden_act="gelu"), "hidden_act is 'gelu'"),
}


@pytest.mark.parametrize("config, words", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_config_is_refused_in_one_sentence(config, words):
    with pytest.raises(UserError, match=words) as error:
        ModelConfig.from_dict(config)
    assert "\n" not in str(error.value)


def test_a_wrong_end_of_text_id_is_sought_in_the_file_that_has_it():
    with pytest.raises(UserError, match=r"^generation_config\.json beside here: eos_token_id has 'end'"):
        ModelConfig.from_dict(DENSE, {"eos_token_id": "end"}, where="here")


def test_a_quantization_of_nothing_is_none():
    assert ModelConfig.from_dict(without(DENSE, quantization_config=None)) == ModelConfig.from_dict(DENSE)


def test_unknown_directory_missing_file_and_bad_json_are_told_apart(tmp_path):
    with pytest.raises(UserError, match="does not exist: give a directory"):
        ModelConfig.from_directory(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"needs a config\.json"):
        ModelConfig.from_directory(tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="cannot be read as JSON"):
            ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="must be a JSON object"):
        ModelConfig.from_directory(tmp_path)
