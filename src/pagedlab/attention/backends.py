"""The seam between models and attention implementations (vllm/v1/attention/backend.py, selector.py).

A backend is chosen once, when the model is built. It gives each layer its implementation and each
KV-cache group the builder of its per-step metadata.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedlab.attention.metadata import CommonAttentionMetadata
from pagedlab.errors import UserError
from pagedlab.kernels.jit import has_c_compiler
from pagedlab.kernels.paged_attention import HEAD_SIZES
from pagedlab.kernels.reshape_and_cache import write_log_columns
from pagedlab.kv.specs import AttentionSpec
from pagedlab.trace.events import KernelLaunched, KvRead, KvWritten
from pagedlab.trace.tracer import trace


@dataclass(frozen=True)
class AttentionLayerConfig:
    """What one layer's implementation needs to know; never changes."""

    layer_name: str              # "model.layers.3.self_attn.attn"
    layer_index: int
    num_heads: int               # query heads
    num_kv_heads: int
    head_size: int
    scale: float                 # scores are multiplied by it
    sliding_window: int | None   # tokens a query sees, itself included; None for all


class AttentionImpl(ABC):
    """Computes one layer's attention over the paged cache."""

    def __init__(self, config: AttentionLayerConfig) -> None:
        self.config = config

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        """Write all keys and values of the step, then attend.

        In this order for all rows: a row may read blocks that another one fills in the same step.

        Args:
            query: [T, num_heads, head_size]
            key, value: [T, num_kv_heads, head_size]
            kv_cache: [2, num_blocks, block_size, num_kv_heads, head_size]
            metadata: what this backend's builder made for the layer's group

        Returns:
            [T, num_heads, head_size]; zero for padding tokens.
        """

    def view_kv_cache(self, memory: Tensor, num_blocks: int, spec: AttentionSpec) -> Tensor:
        """A layer's buffer, flat and in the spec's dtype, as [2, num_blocks, block_size, num_kv_heads, head_size].

        The dimensions may have another order in memory (in vLLM, ``get_kv_cache_stride_order`` says which).
        """
        return memory.view(2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)

    def wants_log(self) -> bool:
        """Whether the kernels of this layer are to log what they do: a compile-time flag of theirs."""
        return trace.kernels and trace.traces_layer(self.config.layer_index)

    def report_launch(self, name: str, grid: tuple[int, ...], meta: dict[str, Any], how: str) -> None:
        if trace.kernels:
            trace.emit(
                KernelLaunched(name=name, layer=self.config.layer_name, grid=list(grid), meta=meta, how=how)  # type: ignore[arg-type]
            )

    def report_writes(self, group: int, source: str, log: Tensor) -> None:
        if trace.kernels:
            columns = write_log_columns(log)
            trace.emit(KvWritten(layer=self.config.layer_name, group=group, source=source, **columns))  # type: ignore[arg-type]

    def report_reads(self, group: int, source: str, req_ids: list[str], log: Tensor) -> None:
        """One event per request; ``log`` is [R, K] int32 and holds -1 where a table entry was not read."""
        if trace.kernels:
            for request_id, entries in zip(req_ids, log.tolist(), strict=False):
                block_ids = [block_id for block_id in entries if block_id >= 0]
                trace.emit(
                    KvRead(
                        layer=self.config.layer_name, group=group, source=source,  # type: ignore[arg-type]
                        request_id=request_id, block_ids=block_ids,
                    )
                )


class MetadataBuilder(ABC):
    """Builds, once per step and KV-cache group, what the group's layers need."""

    def __init__(self, group_id: int, spec: AttentionSpec) -> None:
        self.group_id, self.spec = group_id, spec

    @abstractmethod
    def build(self, common: CommonAttentionMetadata) -> Any: ...


class AttentionBackend(ABC):
    """One way to compute attention."""

    name: str

    @abstractmethod
    def make_impl(self, config: AttentionLayerConfig) -> AttentionImpl: ...

    @abstractmethod
    def make_builder(self, group_id: int, spec: AttentionSpec) -> MetadataBuilder: ...


def choose_attention_backend(
    name: str, device: torch.device, *, head_size: int, block_sizes: list[int], dtype: torch.dtype
) -> AttentionBackend:
    """The backend called ``name``; "auto" is torch on a CPU and triton on a GPU.

    Without a GPU the triton backend runs under Triton's interpreter: right, and very slow.

    Raises:
        UserError: the backend is not installed, or cannot run here or with this block or head size.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        from pagedlab.attention.torch_backend import TorchBackend

        return TorchBackend()
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            f"attention_backend {name} needs triton, which is not installed: install pagedlab[triton], "
            "or choose the torch backend."
        )
    if device.type == "cuda" and not has_c_compiler():
        raise UserError(
            f"attention_backend {name} needs a C compiler, with which triton builds its launcher: install gcc, "
            "or choose the torch backend."
        )
    if name == "triton":
        from pagedlab.attention.triton_backend import TritonBackend

        check_triton_sizes(head_size, block_sizes)
        return TritonBackend(device)
    from pagedlab.attention.flash_attn_backend import BLOCK_SIZE_MULTIPLE, FlashAttentionBackend

    if device.type != "cuda" or importlib.util.find_spec("flash_attn") is None:
        where = "runs on a CUDA GPU only" if device.type != "cuda" else "needs the package flash-attn"
        raise UserError(f"attention_backend flash-attn {where}: choose the torch or triton backend.")
    if dtype == torch.float32:
        raise UserError("attention_backend flash-attn computes in bfloat16 or float16: choose one as dtype.")
    if wrong := [size for size in block_sizes if size % BLOCK_SIZE_MULTIPLE]:
        raise UserError(
            f"attention_backend flash-attn needs a block size that is a multiple of {BLOCK_SIZE_MULTIPLE}, "
            f"not {wrong[0]}: change --block-size or choose the triton backend."
        )
    return FlashAttentionBackend(importlib.import_module("flash_attn").flash_attn_varlen_func)


def check_triton_sizes(head_size: int, block_sizes: list[int]) -> None:
    """Refuse what our kernel was not built for."""
    least, most = HEAD_SIZES
    if not least <= head_size <= most:
        raise UserError(
            f"attention_backend triton serves head sizes {least} to {most}, not {head_size}: choose the torch backend."
        )
    if wrong := [size for size in block_sizes if size & (size - 1)]:
        raise UserError(
            f"attention_backend triton needs a block size that is a power of two, not {wrong[0]}: "
            "change --block-size or choose the torch backend."
        )
