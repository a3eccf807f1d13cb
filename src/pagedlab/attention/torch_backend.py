"""Attention in plain torch: fast on a CPU, the reference on a GPU.

Reads the paged cache through the block table: the blocks of a row are gathered, then one
``scaled_dot_product_attention`` serves many decodes of similar length, or one prefill chunk.
Memory that this step's requests did not write (the tail of a last block, the null block) may hold
NaN; it is never part of the arithmetic, as 0 · NaN would be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedlab.attention.backends import AttentionBackend, AttentionImpl, AttentionLayerConfig, MetadataBuilder
from pagedlab.attention.metadata import CommonAttentionMetadata, emit_metadata_built
from pagedlab.kernels.reshape_and_cache import new_write_log, reshape_and_cache_reference
from pagedlab.kv.specs import AttentionSpec
from pagedlab.trace.tracer import trace

CALL_COST_BYTES = 1 << 18  # keys and values that could be copied in the time that one more call takes on a CPU


@dataclass(frozen=True)
class Attended:
    """Rows whose queries are answered by one call: B rows of Q queries over S positions."""

    batch_idx: list[int]         # [B]
    num_tokens: int              # B · Q
    block_ids: Tensor            # [B, n] int64      from the first visible block on
    first_block: Tensor          # [B] int64         logical block that column 0 is
    num_blocks: Tensor           # [B] int64         columns beyond repeat the row's last block
    positions: slice             # S of the n · block_size gathered ones
    unseen: Tensor | None        # int64             places of [B · n · block_size] that no query sees
    mask: Tensor | None          # [B, 1, Q, S]      0 or -inf, None if all is seen or is_causal says it
    is_causal: bool              # query i sees positions 0 to i


@dataclass(frozen=True)
class TorchAttentionMetadata:
    common: CommonAttentionMetadata
    calls: list[Attended]
    tokens: Tensor               # [T] int64   token of each query, call by call


class TorchMetadataBuilder(MetadataBuilder):
    """Plans a step's calls: each prefill chunk alone, decodes together with those of similar length where that pays."""

    def build(self, common: CommonAttentionMetadata) -> TorchAttentionMetadata:
        seq_lens = common.seq_lens.tolist()
        starts = common.query_start_loc.tolist()
        alike = [[batch_idx] for batch_idx, query_len in enumerate(common.query_lens) if query_len > 1]
        alike += self._group_decodes([i for i, query_len in enumerate(common.query_lens) if query_len == 1], seq_lens)
        calls = [self._plan(common, rows, seq_lens) for rows in alike]
        in_order = [t for rows in alike for i in rows for t in range(starts[i], starts[i + 1])]
        tokens = torch.tensor(in_order, dtype=torch.int64, device=common.block_table.device)
        if trace.tensors:
            emit_metadata_built(
                common, "torch", {f"block_ids.{i}": call.block_ids for i, call in enumerate(calls)}
            )
        return TorchAttentionMetadata(common, calls, tokens)

    def _group_decodes(self, decodes: list[int], seq_lens: list[int]) -> list[list[int]]:
        """Decodes that share a call, longest first; the rows of a call are padded to its longest.

        A call more pays where it spares the shorter rows more padding than its own overhead is worth. With
        blocks of 64 KiB of keys and values and rows of 9, 8, 3 and 3 blocks: a call from the third row on
        spares 2 · 6 blocks, 768 KiB, so there are two calls.
        """
        window, block_size = self.spec.sliding_window, self.spec.block_size
        visible = {i: seq_lens[i] if window is None else min(seq_lens[i], window) for i in decodes}
        num_blocks = {i: -(-visible[i] // block_size) for i in decodes}
        groups: list[list[int]] = []
        ordered = sorted(decodes, key=lambda i: -num_blocks[i])
        for place, batch_idx in enumerate(ordered):
            spared = num_blocks[groups[-1][0]] - num_blocks[batch_idx] if groups else 0
            if not groups or spared * (len(ordered) - place) * self.spec.page_size_bytes > CALL_COST_BYTES:
                groups.append([])
            groups[-1].append(batch_idx)
        return groups

    def _plan(self, common: CommonAttentionMetadata, rows: list[int], seq_lens: list[int]) -> Attended:
        """Which blocks are gathered and who sees what.

        Block size 4, one decode with seq_len 10, window 3: its query at position 9 sees 7 to 9,
        so blocks 1 and 2 are gathered, 8 positions from 4 on, of which the slice 3 to 6 is used; beside
        other decodes all 8 are used, with zeros at the unseen 4 to 6 and 10 to 11.
        """
        block_size, window, device = self.spec.block_size, self.spec.sliding_window, common.block_table.device
        query_len = common.query_lens[rows[0]]
        row = torch.tensor(rows, device=device)                                    # [B] int64
        seq_len = torch.tensor([seq_lens[i] for i in rows], device=device)         # [B] int64
        first_query = seq_len - query_len                                          # [B] int64  its position
        first_seen = torch.zeros_like(seq_len) if window is None else (first_query - window + 1).clamp(min=0)
        first_block = first_seen // block_size                                     # [B] int64
        num_blocks = (seq_len + block_size - 1) // block_size - first_block        # [B] int64
        n = int(num_blocks.max())
        column = torch.arange(n, device=device)
        logical_block = first_block[:, None] + torch.minimum(column, num_blocks[:, None] - 1)  # [B, n] int64
        block_ids = common.block_table[row[:, None], logical_block].long()         # [B, n] int64
        position = (first_block * block_size)[:, None] + torch.arange(n * block_size, device=device)
        positions, unseen = slice(None), None
        if len(rows) == 1:
            positions = slice(int(first_seen) % block_size, seq_lens[rows[0]] - int(first_block) * block_size)
        else:
            unseen = ((position < first_seen[:, None]) | (position >= seq_len[:, None])).flatten().nonzero().flatten()
        mask, is_causal = self._mask(position[:, positions], first_query, query_len)
        return Attended(
            batch_idx=rows,
            num_tokens=len(rows) * query_len,
            block_ids=block_ids,
            first_block=first_block,
            num_blocks=num_blocks,
            positions=positions,
            unseen=unseen,
            mask=mask,
            is_causal=is_causal,
        )

    def _mask(self, position: Tensor, first_query: Tensor, query_len: int) -> tuple[Tensor | None, bool]:
        """Query at position p sees key positions p - window + 1 to p."""
        window = self.spec.sliding_window
        if query_len > 1 and position.shape[1] == query_len and (window is None or query_len <= window):
            return None, True
        query = first_query[:, None] + torch.arange(query_len, device=position.device)  # [B, Q] positions
        seen = position[:, None, :] <= query[:, :, None]                                # [B, Q, S]
        if window is not None:
            seen &= position[:, None, :] > query[:, :, None] - window
        if bool(seen.all()):
            return None, False
        mask = torch.zeros(seen.shape, dtype=getattr(torch, self.spec.dtype), device=position.device)
        return mask.masked_fill_(~seen, float("-inf"))[:, None], False


class TorchImpl(AttentionImpl):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: TorchAttentionMetadata
    ) -> Tensor:
        common = metadata.common
        log = new_write_log(len(key), key.device) if self.wants_log() else None
        reshape_and_cache_reference(key, value, kv_cache, common.slot_mapping, log)
        if trace.kernels and log is not None:
            self.report_launch("reshape_and_cache", (), {"num_tokens": len(key)}, "torch")
            self.report_writes(common.group_id, "torch", log)
        reads = torch.full(common.block_table.shape, -1) if log is not None else None  # [R, K]
        output = paged_attention_calls(query, kv_cache, metadata, self.config.scale, reads)
        if trace.kernels and reads is not None:
            self.report_launch("paged_attention", (), {"calls": len(metadata.calls)}, "torch")
            self.report_reads(common.group_id, "torch", common.req_ids, reads)
        return output


def paged_attention_calls(
    query: Tensor,               # [T, num_heads, head_size]
    kv_cache: Tensor,            # [2, num_blocks, block_size, num_kv_heads, head_size]
    metadata: TorchAttentionMetadata,
    scale: float,
    reads: Tensor | None = None,  # [R, K]  block ids that were gathered, -1 elsewhere; filled if given
) -> Tensor:                     # [T, num_heads, head_size]
    """Answer every query from the cache; padding tokens get zeros."""
    answers = []
    queries = query[metadata.tokens].split([call.num_tokens for call in metadata.calls])
    for call, rows in zip(metadata.calls, queries, strict=True):
        key, value = (_gather(cache, call) for cache in kv_cache)                # [B, num_kv_heads, S, head_size]
        answer = F.scaled_dot_product_attention(
            rows.unflatten(0, (len(call.batch_idx), -1)).transpose(1, 2),        # [B, num_heads, Q, head_size]
            key, value, attn_mask=call.mask, is_causal=call.is_causal, scale=scale, enable_gqa=True,
        )  # fmt: skip
        answers.append(answer.transpose(1, 2).flatten(0, 1))
        if reads is not None:
            for row, batch_idx in enumerate(call.batch_idx):
                first, count = int(call.first_block[row]), int(call.num_blocks[row])
                reads[batch_idx, first : first + count] = call.block_ids[row, :count]
    output = torch.zeros_like(query)
    output[metadata.tokens] = torch.cat(answers)
    return output


def _gather(cache: Tensor, call: Attended) -> Tensor:
    """Copy the rows' blocks side by side, zeros where no query looks: [B, num_kv_heads, S, head_size]."""
    blocks = cache.index_select(0, call.block_ids.flatten())        # [B · n, block_size, num_kv_heads, head_size]
    flat = blocks.flatten(0, 1)                                     # [B · n · block_size, num_kv_heads, head_size]
    if call.unseen is not None:
        flat.index_fill_(0, call.unseen, 0)
    return flat.view(len(call.batch_idx), -1, *cache.shape[2:])[:, call.positions].transpose(1, 2)


class TorchBackend(AttentionBackend):
    name = "torch"

    def make_impl(self, config: AttentionLayerConfig) -> AttentionImpl:
        return TorchImpl(config)

    def make_builder(self, group_id: int, spec: AttentionSpec) -> MetadataBuilder:
        return TorchMetadataBuilder(group_id, spec)
