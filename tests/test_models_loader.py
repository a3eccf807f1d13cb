"""Weights that are not what config.json promises are refused before anything is copied."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_driver import CHECKPOINTS, PagedDriver
from pagedlab.attention.torch_backend import TorchBackend
from pagedlab.errors import UserError
from pagedlab.models import loader
from pagedlab.models.config import ModelConfig
from pagedlab.models.loader import load_model, new_model


@pytest.fixture
def single(tmp_path):
    return shutil.copytree(CHECKPOINTS / "dense-tied-a" / "checkpoint", tmp_path / "single")


@pytest.fixture
def sharded(tmp_path):
    return shutil.copytree(CHECKPOINTS / "dense-untied-a" / "checkpoint", tmp_path / "sharded")


def load(directory, dtype=torch.float32):
    config = ModelConfig.from_directory(directory)
    return load_model(
        directory, config, device=torch.device("cpu"), dtype=dtype, attention_backend=TorchBackend()
    )


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model-00002-of-00003\.safetensors"):
        load(sharded)


def test_a_shard_whose_name_no_file_can_have_is_missing(sharded):
    for name, shown in (("x" * 300, "x{300}"), ("x" * 5_000, "x{299}…"), ("\n", "\ufffd")):
        (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UserError, match=f"lacks {shown}, which"):
            load(sharded)


@pytest.mark.parametrize("shard", [3, "../model.safetensors", "/etc/passwd", ""])
def test_an_index_names_files_beside_it(sharded, shard):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(UserError, match="shards are files beside it"):
        load(sharded)


def test_a_header_that_nests_too_deep_is_refused(single):
    deep = b"[" * 100_000
    (single / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(UserError, match="is not a safetensors file"):
        load(single)


@pytest.mark.parametrize("sizes", [
    {"vocab_size": 10**9, "hidden_size": 10**6},
    {"vocab_size": 10**9, "hidden_size": 10**9, "head_dim": 10**9, "num_attention_heads": 10**9,
     "num_key_value_heads": 10**9},
])
def test_a_model_larger_than_the_memory_or_than_any_address_is_refused(single, sizes):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | sizes))
    with pytest.raises(UserError, match="do not fit into the memory"):
        load(single)


@pytest.mark.parametrize("keep", [0, 5, 100, 200_000, 690_519])
def test_a_shard_that_is_cut_off_is_named(sharded, keep):
    shard = sharded / "model-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model-00001-of-00003\.safetensors is cut off"):
        load(sharded)


def test_a_file_that_is_no_safetensors_file_is_named(single):
    (single / "model.safetensors").write_bytes((9).to_bytes(8, "little") + b"not json!" + b"x" * 100)
    with pytest.raises(UserError, match="is not a safetensors file"):
        load(single)


def test_a_pointer_that_git_lfs_left_is_told_from_weights(single):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1192135096\n"
    (single / "model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match="git lfs pull"):
        load(single)


def test_no_weights_at_all(single):
    (single / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        load(single)


def test_an_index_without_a_map(sharded):
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="is not a safetensors index"):
        load(sharded)


def test_a_wrong_shape_says_tensor_found_and_expected(single):
    rewrite(single, lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.zeros(64, 128)}))
    with pytest.raises(UserError, match=r"k_proj\.weight has shape \[64, 128\].*asks for \[128, 128\]"):
        load(single)


def test_quantized_weights_are_refused(single):
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(single, lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(UserError, match=r"down_proj\.weight is stored as I8, but pagedlab reads"):
        load(single)


def test_a_header_that_contradicts_itself_is_refused(single):
    path = single / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["model.layers.0.input_layernorm.weight"]["data_offsets"][1] -= 4
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        load(single)


@pytest.mark.parametrize("wrong", [{"shape": 3}, {"shape": None}, {"data_offsets": []}, {"data_offsets": ["a", "b"]}])
def test_a_header_with_a_wrong_field_is_refused(single, wrong):
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | wrong
    text = json.dumps({"model.norm.weight": tensor}).encode()
    (single / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(UserError, match="is not a safetensors file"):
        load(single)


def test_a_missing_tensor_is_named(single):
    rewrite(single, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight, which"):
        load(single)


def test_more_layers_than_the_config_has_are_refused(single):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    with pytest.raises(UserError, match=r"no place for, such as model\.layers\.2\."):
        load(single)


def test_a_strange_name_in_the_file_is_printed_safely(single):
    rewrite(single, lambda t: t.update({"\x1b[31m" + "x" * 5_000: torch.zeros(1)}))
    with pytest.raises(UserError, match=r"no place for, such as \ufffd\[31mx+…\.$"):
        load(single)


def test_a_tied_model_may_store_its_head(single):
    rewrite(single, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load(single)
    assert model.lm_head.weight is model.embed_tokens


def test_weights_are_converted_as_asked(single):
    stored = load_file(single / "model.safetensors")["model.norm.weight"]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(load(single, dtype).norm.weight, stored.to(dtype))
        assert {p.dtype for p in load(single, dtype).parameters()} == {dtype}


NORM, MLP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_said_and_loaded(single, capsys, value):
    def spoil(tensors):
        tensors[NORM][3] = value

    rewrite(single, spoil)
    model = load(single)
    assert not model.norm.weight.isfinite().all()
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"pagedlab: notice: {NORM} holds NaN or infinity as float32: ")


def test_several_weights_that_are_not_finite_are_one_notice(single, capsys):
    def spoil(tensors):
        tensors[NORM][3] = tensors[MLP][1, 2] = float("nan")

    rewrite(single, spoil)
    load(single)
    assert " and 1 more hold NaN or infinity" in capsys.readouterr().err


def test_large_finite_weights_are_no_reason_for_a_notice(single, capsys):
    def enlarge(tensors):
        tensors[MLP][:] = torch.finfo(torch.float32).max  # their sum overflows

    rewrite(single, enlarge)
    load(single)
    assert capsys.readouterr().err == ""
    load(single, dtype=torch.float16)  # as which they do overflow
    assert f"{MLP} holds NaN or infinity as float16" in capsys.readouterr().err


def test_one_shard_and_several_hold_the_same_model(sharded, tmp_path):
    tensors = {}
    for shard in sharded.glob("*.safetensors"):
        tensors |= load_file(shard)
    together = shutil.copytree(sharded, tmp_path / "together", ignore=shutil.ignore_patterns("model*"))
    save_file(tensors, together / "model.safetensors")
    prompt = list(range(40))
    logits = []
    for directory in (sharded, together):
        driver = PagedDriver(directory)
        driver.start("r0")
        logits.append(driver.step({"r0": prompt}))
    assert torch.equal(*logits)


RELEASED = {  # hidden, intermediate, layers, heads, key-value heads, tied; parameters as its card counts them
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True, 596_049_920),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, True, 1_720_574_976),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True, 4_022_468_096),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, False, 8_190_735_360),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, False, 14_768_307_200),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, False, 32_762_123_264),
    "Qwen3-30B-A3B": (2048, 6144, 48, 32, 4, False, 30_532_122_624),
    "Qwen3-235B-A22B": (4096, 12288, 94, 64, 4, False, 235_093_634_560),
}


def released_config(name):
    hidden, intermediate, layers, heads, kv_heads, tied, _ = RELEASED[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": hidden,
        "initializer_range": 0.02, "intermediate_size": intermediate, "max_position_embeddings": 40960,
        "max_window_layers": layers, "model_type": "qwen3", "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    }
    if "-A" in name:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
            "mlp_only_layers": [], "moe_intermediate_size": 1536 if hidden == 4096 else 768, "norm_topk_prob": True,
            "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001,
        }
    return config


def build(config, device="meta"):
    return new_model(ModelConfig.from_dict(config, {"eos_token_id": [151645, 151643], "temperature": 0.6}),
                     device=torch.device(device), dtype=torch.bfloat16, attention_backend=TorchBackend())


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_makes_a_model_of_its_size(name):
    model = build(released_config(name))
    assert model.num_parameters == RELEASED[name][-1]
    assert model.config.eos_token_ids == (151645, 151643)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"])
def test_real_models_load_by_shape_at_true_widths(name, tmp_path):
    """One layer, a short vocabulary and a quarter of the experts."""
    config = released_config(name) | {"num_hidden_layers": 1, "max_window_layers": 1, "vocab_size": 64}
    if "num_experts" in config:
        config["num_experts"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {name: tensor.shape for name, tensor in build(config).checkpoint_tensors().items()}
    save_file({name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()},
              tmp_path / "model.safetensors")
    driver = PagedDriver(tmp_path, dtype=torch.bfloat16)
    driver.start("r0")
    assert driver.step({"r0": [1, 2, 3]}).isfinite().all()


def test_a_model_larger_than_the_free_memory_is_refused_with_the_numbers(single, monkeypatch):
    monkeypatch.setattr(loader, "free_ram_bytes", lambda: 2**20)
    with pytest.raises(UserError, match=r"weights take 0\.0 GiB as float32, but this machine has 0\.0 GiB free"):
        load(single)


def test_a_config_that_asks_for_millions_of_experts_is_refused_before_they_are_built(single, monkeypatch):
    monkeypatch.setattr(loader, "new_model", None)
    config = json.loads((single / "config.json").read_text()) | {
        "model_type": "qwen3_moe", "num_hidden_layers": 10**4, "layer_types": None, "num_experts": 10**4,
        "num_experts_per_tok": 1, "moe_intermediate_size": 1,
    }  # fmt: skip
    (single / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"35 tensors, too few for the 10,000 layers of 10,000 experts"):
        load(single)
