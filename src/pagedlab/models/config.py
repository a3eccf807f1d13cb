"""A checkpoint's ``config.json``, read without torch (vllm/transformers_utils/config.py)."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedlab.errors import UserError

MODEL_TYPES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
FILE_DTYPES = ("float32", "bfloat16", "float16")
LAYER_TYPES = ("full_attention", "sliding_attention")
LARGEST_FLOAT = sys.float_info.max
MOST = 10**9          # of anything a config counts: the product of two still fits into 64 bits
MOST_MODULES = 10**4  # layers, experts: each is an object of its own


@dataclass(frozen=True)
class ModelConfig:
    """What the engine and the model need to know of a Qwen3 or Qwen3-MoE checkpoint.

    Attributes:
        head_dim: of one head; not hidden_size / num_attention_heads in general.
        dtype: of the weights in the file; what they are computed in is the engine's choice.
        layer_types: per layer, ``full_attention`` or ``sliding_attention``.
        sliding_window: tokens a query of a sliding layer sees, itself included; None if no layer slides.
        num_experts: 0 for a dense model.
        eos_token_ids: end-of-text ids of config.json, then those that only generation_config.json has.
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def sliding_window_of(self, layer_index: int) -> int | None:
        """Tokens a query of this layer sees, None for all."""
        return self.sliding_window if self.layer_types[layer_index] == "sliding_attention" else None

    def is_moe_layer(self, layer_index: int) -> bool:
        """With decoder_sparse_step 2 and no mlp_only_layers, layers 1, 3, 5, … have experts."""
        return (
            self.num_experts > 0
            and layer_index not in self.mlp_only_layers
            and (layer_index + 1) % self.decoder_sparse_step == 0
        )

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` and, if there is one, ``generation_config.json``.

        Raises:
            UserError: no such directory, no or invalid config.json, a family other than Qwen3 and Qwen3-MoE,
                quantized weights, a field that is missing or impossible, no RoPE base, scaled or partial RoPE.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise UserError(f"model directory {directory} does not exist: give a directory with a config.json.")
        config = _read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(config, generation, where=str(directory / "config.json"))

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None, where: str = "config"
    ) -> ModelConfig:
        """The same from the parsed files; ``where`` names them in errors."""
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
            raise UserError(
                f"{where} describes a model of type {model_type!r}: "
                f"pagedlab runs {' and '.join(MODEL_TYPES)} checkpoints."
            )
        _refuse_quantized(config, where)
        read = _Reader(config, where)
        num_layers, num_heads = read.count("num_hidden_layers", most=MOST_MODULES), read.count("num_attention_heads")
        num_kv_heads = read.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UserError(
                f"{where}: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly."
            )
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"{where}: hidden_act is {config['hidden_act']!r}, but Qwen3 uses silu.")
        hidden_size = read.count("hidden_size")
        head_dim = read.count("head_dim", max(hidden_size // num_heads, 1))
        if head_dim % 2:
            raise UserError(f"{where}: head_dim is {head_dim}, but rotary embedding needs an even one.")
        window, layer_types = _attention_of_layers(read, model_type, num_layers)
        return cls(
            model_type=model_type,
            architecture=MODEL_TYPES[model_type],
            vocab_size=read.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.count("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read.number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(read),
            max_position_embeddings=read.count("max_position_embeddings"),
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            attention_bias=read.flag("attention_bias"),
            dtype=_dtype(config, where),
            layer_types=layer_types,
            sliding_window=window,
            eos_token_ids=_eos_token_ids(read, generation_config or {}),
            **(_moe_fields(read, num_layers) if model_type == "qwen3_moe" else {}),
        )


class _Reader:
    """Reads numbers and flags, and says which file has a wrong one."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def count(self, name: str, default: int | None = None, most: int = MOST) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            found = "is missing" if value is None else f"is {value!r}"
            raise UserError(f"{self.where}: {name} {found}, but it must be a positive whole number.")
        if value > most:
            raise UserError(f"{self.where}: {name} is {value}, but it must be at most {most}.")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """``default`` if the file is silent; null is false, as in transformers."""
        value = self.config.get(name, default)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{self.where}: {name} is {value!r}, but it must be true or false.")
        return bool(value)

    def number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_FLOAT:
            raise UserError(f"{self.where}: {name} is {value!r}, but it must be a positive number.")
        return float(value)


def _refuse_quantized(config: dict[str, Any], where: str) -> None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UserError(
            f"{where} describes quantized weights ({method or 'of an unnamed kind'}): use the checkpoint that is not "
            f"quantized, in {', '.join(FILE_DTYPES[:-1])} or {FILE_DTYPES[-1]}."
        )


def _attention_of_layers(read: _Reader, model_type: str, num_layers: int) -> tuple[int | None, tuple[str, ...]]:
    """The window, and which layers slide: given, or the layers from max_window_layers on.

    A mixture that slides does so in every layer, as in transformers.
    """
    config, where = read.config, read.where
    given = config.get("layer_types")
    window = None
    if read.flag("use_sliding_window", default=given is not None) and config.get("sliding_window") is not None:
        window = read.count("sliding_window")
    if given is not None:
        if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
            raise UserError(f"{where}: layer_types is {given!r}, but it must be a list of names.")
        layer_types = tuple(given)
    elif window is None:
        layer_types = ("full_attention",) * num_layers
    else:
        first = 0 if model_type == "qwen3_moe" else config.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise UserError(f"{where}: max_window_layers is {first!r}, but it must be a whole number of 0 or more.")
        layer_types = tuple(LAYER_TYPES[i >= first] for i in range(num_layers))
    if len(layer_types) != num_layers:
        raise UserError(f"{where}: layer_types has {len(layer_types)} entries for {num_layers} layers.")
    if unknown := set(layer_types) - set(LAYER_TYPES):
        raise UserError(f"{where}: layer_types has {min(unknown)!r}, but it may hold only {' and '.join(LAYER_TYPES)}.")
    if "sliding_attention" not in layer_types:
        return None, layer_types
    if window is None:
        raise UserError(f"{where}: layer_types has sliding layers, but sliding_window is not set or not in use.")
    return window, layer_types


def _rope_theta(read: _Reader) -> float:
    """The base of RoPE from either spelling; a silent default of 10000 would change every token."""
    config, where = read.config, read.where
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, rope in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(rope, dict):
            raise UserError(f"{where}: {name} is {rope!r}, but it must be a JSON object.")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise UserError(
                f"{where}: {name} asks for RoPE of type {rope_type!r}, but pagedlab has only the unscaled kind: "
                "remove it if it was added for requests longer than the model was trained on."
            )
    for rope in (config, parameters, scaling):
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise UserError(f"{where}: partial_rotary_factor is {rope['partial_rotary_factor']!r}, "
                            "but Qwen3 turns its heads as a whole.")
    bases = [rope["rope_theta"] for rope in (config, parameters) if rope.get("rope_theta") is not None]
    given = {read.number("rope_theta", base) for base in bases}
    if not given:
        raise UserError(f"{where} gives no RoPE base: it needs rope_theta, or rope_parameters with a rope_theta.")
    if len(given) > 1:
        raise UserError(f"{where} gives two RoPE bases, rope_theta {config['rope_theta']} and "
                        f"rope_parameters {parameters['rope_theta']}: remove the wrong one.")
    return given.pop()


def _dtype(config: dict[str, Any], where: str) -> str:
    """``dtype`` or the older ``torch_dtype``; float32 if the file is silent."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in FILE_DTYPES:
        raise UserError(f"{where}: dtype is {dtype!r}, but pagedlab reads {', '.join(FILE_DTYPES)}.")
    return dtype


def _eos_token_ids(read: _Reader, generation_config: dict[str, Any]) -> tuple[int, ...]:
    """An id or a list of ids in either file, in this order; all of them end a text, the first as its proper end.

    Small checkpoints made for tests often keep the ids of a large vocabulary, which never come up.
    """
    ids: dict[int, None] = {}
    files = {read.where: read.config, f"generation_config.json beside {read.where}": generation_config}
    for where, config in files.items():
        given = config.get("eos_token_id")
        several = given if isinstance(given, list) else [] if given is None else [given]
        if wrong := [i for i in several if type(i) is not int or i < 0]:
            raise UserError(f"{where}: eos_token_id has {wrong[0]!r}, but ids are whole numbers of 0 or more.")
        ids |= dict.fromkeys(i for i in several if i < read.count("vocab_size"))
    return tuple(ids)


def _moe_fields(read: _Reader, num_layers: int) -> dict[str, Any]:
    spelling = "num_local_experts" if "num_local_experts" in read.config else "num_experts"  # transformers 5 and 4
    num_experts, per_token = read.count(spelling, most=MOST_MODULES), read.count("num_experts_per_tok")
    if per_token > num_experts:
        raise UserError(f"{read.where}: {per_token} experts per token are asked for, but there are only {num_experts}.")
    mlp_only = read.config.get("mlp_only_layers") or []
    if not isinstance(mlp_only, list) or not all(type(i) is int for i in mlp_only):
        raise UserError(f"{read.where}: mlp_only_layers is {mlp_only!r}, but it must be a list of layer numbers.")
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": read.count("moe_intermediate_size"),
        "norm_topk_prob": read.flag("norm_topk_prob"),
        "decoder_sparse_step": read.count("decoder_sparse_step", 1),
        "mlp_only_layers": tuple(mlp_only),
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist: a model directory needs a {path.name}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}).") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, but it must be a JSON object.")
    return config
