"""Weights from safetensors files into a model (vllm/model_executor/model_loader).

Each checkpoint tensor is copied into the part of our merged weights that it fills, converted to
the wanted dtype on the way. All names and shapes are compared before the first byte is copied.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagedlab.attention.backends import AttentionBackend
from pagedlab.errors import UserError, notice
from pagedlab.memory import free_ram_bytes
from pagedlab.models.config import ModelConfig
from pagedlab.models.layers import MergedLinear
from pagedlab.models.qwen3 import Qwen3ForCausalLM
from pagedlab.models.qwen3_moe import Qwen3MoeForCausalLM
from pagedlab.wording import plural, printable

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
STORED_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    shard: Path
    shape: tuple[int, ...]
    dtype: str                 # as safetensors spells it: F32, BF16, …


def load_model(
    model_dir: Path, model_config: ModelConfig, *, device: torch.device, dtype: torch.dtype,
    attention_backend: AttentionBackend,
) -> Qwen3ForCausalLM:
    """Build the model that the config describes and fill it from the directory's weights.

    Weights that are NaN or infinite are loaded as they are, with a notice on stderr.

    Raises:
        UserError: no weights, a shard that is missing or cut off, a tensor that is missing, that the
            config has no place for, or that has another shape than the config says or is quantized.
    """
    stored = read_headers(Path(model_dir))
    _count(stored, model_config, Path(model_dir))
    model = new_model(model_config, device=device, dtype=dtype, attention_backend=attention_backend)
    targets = model.checkpoint_tensors()
    _compare(stored, targets, model_config, Path(model_dir))
    not_finite: list[str] = []
    by_shard: dict[Path, list[str]] = {}
    for name in targets:
        by_shard.setdefault(stored[name].shard, []).append(name)
    for shard, names in by_shard.items():
        try:
            with safe_open(shard, framework="pt") as file:
                for name in names:
                    targets[name].copy_(file.get_tensor(name))
                    if not _is_finite(targets[name]):
                        not_finite.append(name)
        except SafetensorError as error:
            raise UserError(f"{shard} is damaged: {error}.") from None
    del targets
    if not_finite:
        _warn(not_finite, str(dtype).removeprefix("torch."), model_dir)
    for module in model.modules():
        if isinstance(module, MergedLinear):
            module.choose_product()
    return model


def _is_finite(weight: Tensor) -> bool:
    """In one pass: the sum of finite numbers is finite, or overflows, and then each is looked at."""
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def _warn(names: list[str], dtype: str, model_dir: Path) -> None:
    hold = "holds" if len(names) == 1 else f"and {len(names) - 1} more hold"
    notice(f"{names[0]} {hold} NaN or infinity as {dtype}: what the model in {model_dir} says means nothing.")


def new_model(
    model_config: ModelConfig, *, device: torch.device, dtype: torch.dtype, attention_backend: AttentionBackend
) -> Qwen3ForCausalLM:
    """The model with uninitialised weights.

    Raises:
        UserError: they do not fit into the device's memory.
    """
    model_class = Qwen3MoeForCausalLM if model_config.num_experts else Qwen3ForCausalLM
    try:
        model = model_class(model_config, attention_backend, dtype, device).eval()
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU is one
        if "memory" not in str(error) and "overflow" not in str(error):
            raise
        raise UserError(
            f"the weights do not fit into the memory of this {device.type} device: choose a smaller model or dtype."
        ) from None
    needed = model.num_parameters * dtype.itemsize
    if device.type == "cpu" and needed > (free := free_ram_bytes()):  # promised, but we would be ended as it is filled
        raise UserError(
            f"the weights take {needed / 2**30:,.1f} GiB as {str(dtype).removeprefix('torch.')}, but this machine has "
            f"{free / 2**30:,.1f} GiB free: choose a smaller model or dtype."
        )
    return model


def read_headers(model_dir: Path) -> dict[str, StoredTensor]:
    """Name → place and shape of every tensor in the directory's shards, from their headers alone."""
    index = model_dir / INDEX_NAME
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise UserError(f"{index} is not a safetensors index: it needs a weight_map.") from None
        if strange := [n for n in shards if not isinstance(n, str) or not n or Path(n).name != n]:
            raise UserError(f"{index} names a shard {strange[0]!r}: shards are files beside it.")
    elif (model_dir / SINGLE_NAME).is_file():
        shards = [SINGLE_NAME]
    else:
        raise UserError(f"{model_dir} has no weights: it needs {SINGLE_NAME} or {INDEX_NAME} with its shards.")
    if missing := [shard for shard in shards if not os.path.isfile(model_dir / shard)]:  # any name may stand there
        raise UserError(
            f"{model_dir} lacks {printable(missing[0])}, which {INDEX_NAME} names: copy or download it again."
        )
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        stored |= _read_header(model_dir / shard)
    return stored


def _read_header(shard: Path) -> dict[str, StoredTensor]:
    """A shard is: length of the header (8 bytes), the header (JSON), then the tensors' bytes."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            start = file.read(8)
            if start == b"version ":
                raise UserError(f"{shard} is a pointer that git-lfs left: run git lfs pull beside it for the weights.")
            header_size = int.from_bytes(start, "little")
            if size < 8 or header_size > size - 8:
                raise UserError(f"{shard} is cut off: its header alone should take {header_size} bytes.")
            header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        needed = 8 + header_size + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        stored = {name: StoredTensor(shard, tuple(t["shape"]), t["dtype"]) for name, t in header.items()}
    except UserError:
        raise
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{shard} is not a safetensors file.") from None
    if size != needed:
        raise UserError(f"{shard} is cut off or damaged: it has {size} bytes where its header promises {needed}.")
    return stored


def _count(stored: dict[str, StoredTensor], config: ModelConfig, model_dir: Path) -> None:
    """A glance before anything is built: a config may ask for millions of experts."""
    layers = range(config.num_hidden_layers)
    least = len(layers) + config.num_experts * sum(map(config.is_moe_layer, layers))
    if len(stored) < least:
        raise UserError(
            f"{model_dir} holds {plural(len(stored), 'tensor')}, too few for the {plural(len(layers), 'layer')} "
            f"{f'of {config.num_experts:,} experts ' if config.num_experts else ''}that its config.json asks for."
        )


def _compare(
    stored: dict[str, StoredTensor], targets: dict[str, Tensor], config: ModelConfig, model_dir: Path
) -> None:
    """Hold the file against the config; a tied model may still store its head."""
    if missing := [name for name in targets if name not in stored]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{model_dir} has no tensor {missing[0]}{more}, which its config.json asks for.")
    for name, target in targets.items():
        if stored[name].shape != tuple(target.shape):
            raise UserError(
                f"{model_dir}: {name} has shape {list(stored[name].shape)}, "
                f"but config.json asks for {list(target.shape)}."
            )
        if stored[name].dtype not in STORED_DTYPES:
            raise UserError(
                f"{model_dir}: {name} is stored as {stored[name].dtype}, but pagedlab reads "
                f"{', '.join(STORED_DTYPES)}: use the checkpoint that is not quantized."
            )
    known = {*targets, "lm_head.weight"} if config.tie_word_embeddings else targets
    if extra := sorted(name for name in stored if name not in known and not name.endswith(".inv_freq")):
        raise UserError(
            f"{model_dir} holds {plural(len(extra), 'tensor')} that its config.json has no place for, "
            f"such as {printable(extra[0])}."
        )
