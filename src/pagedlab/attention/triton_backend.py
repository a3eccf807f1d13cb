"""Attention by our Triton kernels: compiled on a GPU, interpreted (slowly) on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pagedlab.attention.backends import AttentionBackend, AttentionImpl, AttentionLayerConfig, MetadataBuilder
from pagedlab.attention.metadata import CommonAttentionMetadata, emit_metadata_built
from pagedlab.kernels.paged_attention import QueryTiles, choose_num_splits, longest_block_m, paged_attention
from pagedlab.kernels.reshape_and_cache import new_write_log, reshape_and_cache
from pagedlab.kv.specs import DTYPE_BYTES, AttentionSpec
from pagedlab.trace.tracer import trace

KernelHow = Literal["compiled", "interpreted"]
SOURCES = {"compiled": "triton", "interpreted": "triton-interpreted"}  # how a kernel ran → what kv_written calls it


@dataclass(frozen=True)
class TritonAttentionMetadata:
    common: CommonAttentionMetadata
    tiles: QueryTiles
    num_splits: int


class TritonMetadataBuilder(MetadataBuilder):
    def __init__(self, group_id: int, spec: AttentionSpec, heads_per_kv_head: int, num_processors: int) -> None:
        super().__init__(group_id, spec)
        self.heads_per_kv_head, self.num_processors = heads_per_kv_head, num_processors
        self.longest_block_m = longest_block_m(spec.head_size, DTYPE_BYTES[spec.dtype])

    def build(self, common: CommonAttentionMetadata) -> TritonAttentionMetadata:
        tiles = QueryTiles.cut(
            common.query_lens, self.heads_per_kv_head, self.longest_block_m, common.block_table.device
        )
        visible = min(common.max_seq_len, self.spec.sliding_window or common.max_seq_len)
        num_splits = choose_num_splits(
            len(tiles.batch_idx), self.spec.num_kv_heads, common.max_query_len, visible, self.num_processors
        )
        if trace.tensors:
            emit_metadata_built(
                common, "triton",
                {"tiles": tiles.batch_idx, "query_start_loc": common.query_start_loc, "seq_lens": common.seq_lens,
                 "block_table": common.block_table, "slot_mapping": common.slot_mapping},
            )
        return TritonAttentionMetadata(common, tiles, num_splits)


class TritonImpl(AttentionImpl):
    def __init__(self, config: AttentionLayerConfig, how: KernelHow) -> None:
        super().__init__(config)
        self.how = how

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: TritonAttentionMetadata
    ) -> Tensor:
        common = metadata.common
        write_key_values(self, self.how, key, value, kv_cache, common)
        reads = torch.full_like(common.block_table, -1) if self.wants_log() else None  # [R, K]
        output = torch.empty_like(query)
        output[common.num_actual_tokens :].zero_()
        grid, meta = paged_attention(
            query, kv_cache, output, metadata.tiles, common.query_start_loc, common.seq_lens, common.block_table,
            scale=self.config.scale, sliding_window=self.config.sliding_window, num_splits=metadata.num_splits,
            how=self.how, reads=reads,
        )
        if trace.kernels and reads is not None:
            self.report_launch("paged_attention", grid, meta, self.how)
            self.report_reads(common.group_id, SOURCES[self.how], common.req_ids, reads)
        return output


def write_key_values(
    impl: AttentionImpl, how: KernelHow, key: Tensor, value: Tensor, kv_cache: Tensor, common: CommonAttentionMetadata
) -> None:
    """Launch ``reshape_and_cache`` for all tokens of the step and report what its log says."""
    log = new_write_log(len(key), key.device) if impl.wants_log() else None
    grid = reshape_and_cache(key, value, kv_cache, common.slot_mapping, how, log)
    if trace.kernels and log is not None:
        impl.report_launch("reshape_and_cache", grid, {"num_tokens": len(key)}, how)
        impl.report_writes(common.group_id, SOURCES[how], log)


class TritonBackend(AttentionBackend):
    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self.how: KernelHow = "compiled" if device.type == "cuda" else "interpreted"
        self.num_processors = 1  # interpreted programs run one after the other: nothing to gain from splits
        if device.type == "cuda":
            self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def make_impl(self, config: AttentionLayerConfig) -> AttentionImpl:
        self.heads_per_kv_head = config.num_heads // config.num_kv_heads  # the same in every layer
        return TritonImpl(config, self.how)

    def make_builder(self, group_id: int, spec: AttentionSpec) -> MetadataBuilder:
        return TritonMetadataBuilder(group_id, spec, self.heads_per_kv_head, self.num_processors)
