"""flash-attn's paged varlen function, where that package is installed (vllm/v1/attention/backends/flash_attn.py).

Keys and values are written by our own kernel; what flash-attn reads it does not report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedlab.attention.backends import AttentionBackend, AttentionImpl, AttentionLayerConfig, MetadataBuilder
from pagedlab.attention.metadata import CommonAttentionMetadata, emit_metadata_built
from pagedlab.attention.triton_backend import KernelHow, write_key_values
from pagedlab.kv.specs import AttentionSpec
from pagedlab.trace.tracer import trace

BLOCK_SIZE_MULTIPLE = 256  # of the paged cache, in flash-attn 2


@dataclass(frozen=True)
class FlashAttentionMetadata:
    common: CommonAttentionMetadata
    seq_start_loc: Tensor  # [R + 1] int32   running sum of seq_lens, from 0


class FlashMetadataBuilder(MetadataBuilder):
    def build(self, common: CommonAttentionMetadata) -> FlashAttentionMetadata:
        seq_start_loc = F.pad(common.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        if trace.tensors:
            emit_metadata_built(
                common, "flash-attn",
                {"seq_start_loc": seq_start_loc, "query_start_loc": common.query_start_loc,
                 "block_table": common.block_table, "slot_mapping": common.slot_mapping},
            )
        return FlashAttentionMetadata(common, seq_start_loc)


class FlashAttentionImpl(AttentionImpl):
    def __init__(self, config: AttentionLayerConfig, varlen_func: Any, how: KernelHow) -> None:
        super().__init__(config)
        self.varlen_func, self.how = varlen_func, how

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: FlashAttentionMetadata
    ) -> Tensor:
        common = metadata.common
        write_key_values(self, self.how, key, value, kv_cache, common)
        window = self.config.sliding_window
        output = torch.zeros_like(query)
        output[: common.num_actual_tokens] = self.varlen_func(
            query[: common.num_actual_tokens],
            kv_cache[0],
            kv_cache[1],
            cu_seqlens_q=common.query_start_loc,
            cu_seqlens_k=metadata.seq_start_loc,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            softmax_scale=self.config.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=common.block_table,
        )
        if trace.kernels and self.wants_log():
            self.report_launch("flash_attn_varlen_func", (), {"max_seqlen_k": common.max_seq_len}, "compiled")
        return output


class FlashAttentionBackend(AttentionBackend):
    name = "flash-attn"

    def __init__(self, varlen_func: Any, how: KernelHow = "compiled") -> None:
        self.varlen_func, self.how = varlen_func, how

    def make_impl(self, config: AttentionLayerConfig) -> AttentionImpl:
        return FlashAttentionImpl(config, self.varlen_func, self.how)

    def make_builder(self, group_id: int, spec: AttentionSpec) -> MetadataBuilder:
        return FlashMetadataBuilder(group_id, spec)
