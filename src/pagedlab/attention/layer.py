"""The attention layer that models call (vllm/attention/layer.py)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagedlab.attention.backends import AttentionBackend, AttentionLayerConfig
from pagedlab.attention.forward_context import get_forward_context
from pagedlab.kv.specs import AttentionSpec


class Attention(nn.Module):
    """Holds one layer's KV cache and hands each step to the backend's implementation."""

    kv_cache: Tensor  # [2, num_blocks, block_size, num_kv_heads, head_size]; view given by the worker, written by impl

    def __init__(self, config: AttentionLayerConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.impl = backend.make_impl(config)  # chosen once
        self.kv_cache = torch.empty(0)

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> AttentionSpec:
        """What this layer needs of the cache; ``dtype`` is the one the model computes in."""
        return AttentionSpec(
            block_size=block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            dtype=dtype,
            sliding_window=self.config.sliding_window,
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries [T, num_heads, head_size], keys and values [T, num_kv_heads, head_size] → like queries.

        This is the one place that reads the forward context.
        """
        metadata = get_forward_context().get(self.config.layer_name)
        if metadata is None:  # a pass that only measures memory: no cache yet
            return torch.zeros_like(query)
        return self.impl.forward(query, key, value, self.kv_cache, metadata)
