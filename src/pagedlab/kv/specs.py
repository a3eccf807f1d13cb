"""What layers need of the KV cache, and what they get (vllm/v1/kv_cache_interface.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BlockIds = tuple[list[int], ...]  # one list per KV-cache group

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}


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
    keeps_all_blocks: bool = False    # windowed attention, but blocks are kept for all tokens

    @property
    def kind(self) -> str:
        """How blocks are given out: ``full`` or ``sliding_window``."""
        return "full" if self.sliding_window is None or self.keeps_all_blocks else "sliding_window"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values of block_size tokens.

        Qwen3-0.6B in bfloat16: 2 · 16 tokens · 8 heads · 128 numbers · 2 bytes = 65,536.
        """
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    def max_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Most blocks that one request of ``max_model_len`` tokens holds at a time.

        A window layer holds the last window - 1 tokens and those of one step, and one block more
        because a window need not begin at a block's first token: with block size 16, window 1,024
        and 2,048 tokens a step, a request of 2,048 tokens holds up to 128 + 1 = 129 blocks.
        """
        if self.kind == "full":
            return -(-max_model_len // self.block_size)
        assert self.sliding_window is not None
        num_tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        return -(-num_tokens // self.block_size) + 1


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers of one type: they keep and forget the same tokens, so they share block tables."""

    layer_names: tuple[str, ...]
    kv_cache_spec: AttentionSpec      # what the scheduler sees; the first layer's where pages are unequal
    layer_specs: Mapping[str, AttentionSpec] = field(default_factory=dict)  # only where pages are unequal

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: of one layer, or of all layers together where their pages are unequal."""
        if self.layer_specs:
            return sum(spec.page_size_bytes for spec in self.layer_specs.values())
        return self.kv_cache_spec.page_size_bytes

    def spec_of(self, layer_name: str) -> AttentionSpec:
        """The layer's own spec, with the group's block size."""
        return self.layer_specs.get(layer_name, self.kv_cache_spec)


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
    kv_cache_tensors: tuple[KVCacheTensor, ...] = ()
