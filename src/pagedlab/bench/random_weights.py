"""Checkpoints of a real model's shape with random weights: as slow as the real one, and no download."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pagedlab.errors import UserError, notice
from pagedlab.trace.file import whole_file

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {  # config.json of Qwen/Qwen3-0.6B
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1000000.0,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "eos_token_id": 151645,
    },
}  # fmt: skip


def random_checkpoint(name: str, cache_dir: Path | None = None) -> Path:
    """The folder of a checkpoint of this shape, built on first use and kept.

    Raises:
        UserError: the name is unknown, or the cache folder cannot be written.
    """
    if name not in SHAPES:
        raise UserError(f"--random-weights is {name!r}: choose one of {', '.join(SHAPES)}.")
    cache = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedlab"
    folder = cache / f"{name}-random"
    if (folder / "config.json").is_file():  # written last
        return folder
    notice(f"building random weights of the shape of {name} in {folder} …")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / "model.safetensors") as place:
            save_file(_tensors(SHAPES[name]), place, metadata={"format": "pt"})
        with whole_file(folder / "config.json") as place:
            place.write_text(json.dumps(_config(SHAPES[name]), indent=2) + "\n")
    except (OSError, SafetensorError) as e:  # safetensors raises the second, on a full disk for example
        raise UserError(f"cannot write {folder}: {getattr(e, 'strerror', None) or e}.") from e
    return folder


def _config(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "sliding_window": None, "use_sliding_window": False,
        "dtype": "bfloat16", "torch_dtype": "bfloat16", **shape,
    }  # fmt: skip


def _tensors(shape: dict[str, Any]) -> dict[str, Tensor]:
    """Weights as a Qwen3 starts training with: normal with deviation 0.02, norms at one; seed 0."""
    generator = torch.Generator().manual_seed(0)
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    q_size, kv_size = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(shape["vocab_size"], hidden), "model.norm.weight": ones(hidden)}
    for i in range(shape["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        tensors |= {
            f"model.layers.{i}.input_layernorm.weight": ones(hidden),
            f"{attention}.q_proj.weight": matrix(q_size, hidden),
            f"{attention}.k_proj.weight": matrix(kv_size, hidden),
            f"{attention}.v_proj.weight": matrix(kv_size, hidden),
            f"{attention}.o_proj.weight": matrix(hidden, q_size),
            f"{attention}.q_norm.weight": ones(head_dim),
            f"{attention}.k_norm.weight": ones(head_dim),
            f"model.layers.{i}.post_attention_layernorm.weight": ones(hidden),
            f"{mlp}.gate_proj.weight": matrix(shape["intermediate_size"], hidden),
            f"{mlp}.up_proj.weight": matrix(shape["intermediate_size"], hidden),
            f"{mlp}.down_proj.weight": matrix(hidden, shape["intermediate_size"]),
        }
    return tensors
