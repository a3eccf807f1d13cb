"""What layers need of the KV cache, and what they get (vllm/v1/kv_cache_interface.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's cache: full attention, or a sliding window.

    ``sliding_window`` counts tokens: a token sees itself and the window - 1 tokens before it.
    """

    block_size: int                   # tokens per block
    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int | None = None  # None: full attention

    @property
    def kind(self) -> str:
        return "full" if self.sliding_window is None else "sliding_window"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values of block_size tokens."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers of one type: they keep and forget the same tokens, so they share block tables."""

    layer_names: tuple[str, ...]
    kv_cache_spec: AttentionSpec


@dataclass(frozen=True)
class KVCacheTensor:
    """One buffer; layers of different groups may view the same bytes."""

    size: int                         # bytes
    shared_by: tuple[str, ...]


@dataclass(frozen=True)
class KVCacheConfig:
    """The one pool of blocks that serves all groups."""

    num_blocks: int                   # null block included
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    kv_cache_tensors: tuple[KVCacheTensor, ...] = field(default=())
