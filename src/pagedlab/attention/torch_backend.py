"""Attention in plain torch: fast on a CPU, the reference on a GPU.

Many decodes of similar length share one call. On a CPU it reads values where they lie, by their slots, and in
float32 keys too; on a GPU, and for each prefill chunk, the blocks of a row are copied side by side for
``scaled_dot_product_attention``.
Memory that this step's requests did not write (the tail of a last block, the null block) may hold
NaN; it is never part of the arithmetic, as 0 · NaN would be NaN.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedlab.attention.backends import AttentionBackend, AttentionImpl, AttentionLayerConfig, MetadataBuilder
from pagedlab.attention.metadata import CommonAttentionMetadata, emit_metadata_built
from pagedlab.kernels.reshape_and_cache import new_write_log, reshape_and_cache_reference
from pagedlab.kv.specs import AttentionSpec
from pagedlab.trace.tracer import trace

CALL_COST_BYTES = 1 << 21  # keys and values that could be read in the time that one more call takes on a CPU


@dataclass(frozen=True)
class Call(ABC):
    """Rows whose queries are answered together: B rows of Q queries over S positions."""

    batch_idx: Tensor            # [B] int64
    logical_block: Tensor        # [B, n] int64     entries of a row's table that are read, some more than once
    block_ids: Tensor            # [B, n] int64     what stands there
    mask: Tensor | None          # [B, 1, Q, S]     0 or -inf, None if all is seen or is_causal says it
    reads_by: ClassVar[str]      # the field that leads to keys and values

    @abstractmethod
    def answer(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """[B · Q, num_heads, head_size] and [2, num_blocks, block_size, num_kv_heads, head_size] → like queries."""


@dataclass(frozen=True)
class ReadInPlace(Call):
    """Decodes (Q is 1) that read the cache as a table whose rows are keys or values of one head.

    Scores are a product of queries and keys taken at a few places only, which torch has for sparse matrices,
    though in float32 alone: in other dtypes the keys are copied. A weighted sum of values is an embedding bag.
    """

    cache_rows: Tensor           # [B · num_heads · S] int64       rows shorter than S repeat their last
    starts: Tensor               # [B · num_heads] int64           where each query's cache rows begin: multiples of S
    scores: Tensor | None        # [B · num_heads, N] float32      sparse, columns are cache rows; written by each layer
    reads_by = "cache_rows"

    def answer(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        keys, values = heads_first(kv_cache).view(2, -1, kv_cache.shape[-1])
        if self.scores is None:
            scores = self._scores_of_copied_keys(query, keys, kv_cache.shape[-2]) * scale
        else:
            keys = keys[: self.scores.shape[1]]
            torch.sparse.sampled_addmm(self.scores, query.flatten(0, 1), keys.T, beta=0.0, alpha=scale, out=self.scores)
            scores = self.scores.values().view(*query.shape[:2], -1)             # [B, num_heads, S]
        if self.mask is not None:
            scores = scores + self.mask[:, :, 0]
        weights = scores.softmax(-1).flatten().to(values.dtype)
        summed = F.embedding_bag(self.cache_rows, values, self.starts, mode="sum", per_sample_weights=weights)
        return summed.view_as(query)

    def _scores_of_copied_keys(self, query: Tensor, keys: Tensor, num_kv_heads: int) -> Tensor:
        """[B, num_heads, S] float32"""
        by_kv_head = self.cache_rows.view(len(query), num_kv_heads, query.shape[1] // num_kv_heads, -1)
        copied = F.embedding(by_kv_head[:, :, 0], keys).float()                  # [B, num_kv_heads, S, head_size]
        return (query.float().unflatten(1, (num_kv_heads, -1)) @ copied.mT).flatten(1, 2)


@dataclass(frozen=True)
class Copied(Call):
    """Rows whose blocks are copied side by side."""

    positions: slice             # S of the n · block_size copied ones
    unseen: Tensor | None        # [B, n · block_size] bool        copied positions that no query sees
    is_causal: bool              # query i sees positions 0 to i
    reads_by = "block_ids"

    def answer(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        key, value = (self._gather(cache) for cache in heads_first(kv_cache))    # [B, num_kv_heads, S, head_size]
        answer = F.scaled_dot_product_attention(
            query.unflatten(0, (len(self.batch_idx), -1)).transpose(1, 2),       # [B, num_heads, Q, head_size]
            key, value, attn_mask=self.mask, is_causal=self.is_causal, scale=scale, enable_gqa=True,
        )  # fmt: skip
        return answer.transpose(1, 2).flatten(0, 1)

    def _gather(self, cache: Tensor) -> Tensor:
        """Zeros where no query looks: [B, num_kv_heads, S, head_size]."""
        blocks = cache.index_select(0, self.block_ids.flatten())    # [B · n, num_kv_heads, block_size, head_size]
        rows = blocks.unflatten(0, self.block_ids.shape).transpose(1, 2).flatten(2, 3)
        if self.unseen is not None:
            rows = rows.masked_fill(self.unseen[:, None, :, None], 0)
        return rows[:, :, self.positions]


@dataclass(frozen=True)
class TorchAttentionMetadata:
    """A step's calls; their queries, one call's after the other's, are a permutation of the flat batch."""

    common: CommonAttentionMetadata
    calls: list[Call]
    num_tokens: list[int]        # of each call
    tokens: Tensor               # [T] int64   token of each query, call by call
    places: Tensor               # [T] int64   where in that order each token stands


class TorchMetadataBuilder(MetadataBuilder):
    """Plans a step's calls: each prefill chunk alone, decodes together with those of similar length where that pays."""

    def __init__(self, group_id: int, spec: AttentionSpec, heads_per_kv_head: int) -> None:
        super().__init__(group_id, spec)
        self.heads_per_kv_head = heads_per_kv_head

    def build(self, common: CommonAttentionMetadata) -> TorchAttentionMetadata:
        seq_lens = common.seq_lens.tolist()
        starts = common.query_start_loc.tolist()
        alike = [[batch_idx] for batch_idx, query_len in enumerate(common.query_lens) if query_len > 1]
        alike += self._group_decodes([i for i, query_len in enumerate(common.query_lens) if query_len == 1], seq_lens)
        calls = [self._plan(common, rows) for rows in alike]
        in_order = [[t for i in rows for t in range(starts[i], starts[i + 1])] for rows in alike]
        tokens = torch.tensor(list(chain(*in_order)), dtype=torch.int64, device=common.block_table.device)
        if trace.tensors:
            emit_metadata_built(
                common, "torch",
                {f"{call.reads_by}.{i}": getattr(call, call.reads_by) for i, call in enumerate(calls)},
            )  # fmt: skip
        return TorchAttentionMetadata(common, calls, [len(part) for part in in_order], tokens, tokens.argsort())

    def _group_decodes(self, decodes: list[int], seq_lens: list[int]) -> list[list[int]]:
        """Decodes that share a call, longest first; the rows of a call are padded to its longest.

        A call more pays where it spares the shorter rows more padding than its own overhead is worth. With
        blocks of 64 KiB of keys and values and rows of 24, 23, 3 and 3 blocks: a call from the third row on
        spares 2 · 21 blocks, 2.6 MiB, so there are two calls.
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

    def _plan(self, common: CommonAttentionMetadata, rows: list[int]) -> Call:
        """Which blocks are read and who sees what."""
        window, device = self.spec.sliding_window, common.block_table.device
        query_len = common.query_lens[rows[0]]
        batch_idx = torch.tensor(rows, device=device)                              # [B] int64
        seq_len = common.seq_lens[batch_idx].long()                                # [B] int64
        first_query = seq_len - query_len                                          # [B] int64  its position
        first_seen = torch.zeros_like(seq_len) if window is None else (first_query - window + 1).clamp(min=0)
        plan = self._plan_in_place if query_len == 1 and device.type == "cpu" else self._plan_copy
        return plan(common.block_table, batch_idx, first_seen, first_query, seq_len)

    def _plan_in_place(
        self, block_table: Tensor, batch_idx: Tensor, first_seen: Tensor, first_query: Tensor, seq_len: Tensor
    ) -> ReadInPlace:
        """The cache row of every position that a decode sees, per head.

        Block size 4, two key-value heads, window 3, seq_len 10 and a table of [7, 3, 5]: positions 7 to 9 are at
        offset 3 of block 3 and offsets 0 and 1 of block 5. The second head of block 3 has cache rows 28 to 31, that
        of block 5 rows 44 to 47, so the query heads of this key-value head read rows 31, 44 and 45.
        """
        block_size, num_kv_heads = self.spec.block_size, self.spec.num_kv_heads
        end = int((seq_len - first_seen).max())
        wanted = first_seen[:, None] + torch.arange(end)                           # [B, S] int64
        position = torch.minimum(wanted, first_query[:, None])                     # beyond the row: its last again
        logical_block = position // block_size                                     # [B, S] int64
        block_ids = block_table[batch_idx[:, None], logical_block].long()          # [B, S] int64
        kv_head = torch.arange(num_kv_heads).repeat_interleave(self.heads_per_kv_head)
        beyond = wanted > first_query[:, None]
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))[:, None, None] if beyond.any() else None
        heads = block_ids[:, None] * num_kv_heads + kv_head[:, None]               # [B, num_heads, S] int64
        cache_rows = (heads * block_size + (position % block_size)[:, None]).flatten()
        starts = torch.arange(0, len(cache_rows) + 1, end)
        scores = None
        if self.spec.dtype == "float32" and samples_products():
            scores = torch.sparse_csr_tensor(
                starts, cache_rows, torch.zeros(len(cache_rows)), size=(len(starts) - 1, int(cache_rows.max()) + 1),
                check_invariants=False,
            )  # fmt: skip
        return ReadInPlace(batch_idx, logical_block, block_ids, mask, cache_rows, starts[:-1], scores)

    def _plan_copy(
        self, block_table: Tensor, batch_idx: Tensor, first_seen: Tensor, first_query: Tensor, seq_len: Tensor
    ) -> Copied:
        """The blocks that hold what the rows see.

        Block size 4, one decode with seq_len 10, window 3: its query at position 9 sees 7 to 9,
        so blocks 1 and 2 are copied, 8 positions from 4 on, of which the slice 3 to 6 is used; beside
        other decodes all 8 are used, with zeros at the unseen 4 to 6 and 10 to 11.
        """
        block_size, device = self.spec.block_size, block_table.device
        first_block = first_seen // block_size                                     # [B] int64
        num_blocks = (seq_len + block_size - 1) // block_size - first_block        # [B] int64
        column = torch.arange(int(num_blocks.max()), device=device)
        logical_block = first_block[:, None] + torch.minimum(column, num_blocks[:, None] - 1)  # [B, n] int64
        block_ids = block_table[batch_idx[:, None], logical_block].long()          # [B, n] int64
        places = torch.arange(len(column) * block_size, device=device)
        position = (first_block * block_size)[:, None] + places                    # [B, n · block_size] int64
        positions, unseen = slice(None), None
        if len(batch_idx) == 1:
            positions = slice(int(first_seen) % block_size, int(seq_len) - int(first_block) * block_size)
        else:
            unseen = (position < first_seen[:, None]) | (position >= seq_len[:, None])
        mask, is_causal = self._mask(position[:, positions], first_query, int(seq_len[0] - first_query[0]))
        return Copied(batch_idx, logical_block, block_ids, mask, positions, unseen, is_causal)

    def _mask(self, position: Tensor, first_query: Tensor, query_len: int) -> tuple[Tensor | None, bool]:
        """Query at position p sees key positions p - window + 1 to p: the mask, and whether is_causal says it."""
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
    def view_kv_cache(self, memory: Tensor, num_blocks: int, spec: AttentionSpec) -> Tensor:
        """The tokens of a head lie side by side in a block, as in vLLM's CPU backend: a decode reads in longer runs."""
        return memory.view(2, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size).transpose(2, 3)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: TorchAttentionMetadata
    ) -> Tensor:
        common = metadata.common
        log = new_write_log(len(key), key.device) if self.wants_log() else None
        reshape_and_cache_reference(key, value, kv_cache, common.slot_mapping, log)
        if trace.kernels and log is not None:
            self.report_launch("reshape_and_cache", (), {"num_tokens": len(key)}, "torch")
            self.report_writes(common.group_id, "torch", log)
        shape, device = common.block_table.shape, common.block_table.device
        reads = torch.full(shape, -1, device=device) if log is not None else None  # [R, K]
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
    reads: Tensor | None = None,  # [R, K] int64   block ids that were read, -1 elsewhere; filled if given
) -> Tensor:                     # [T, num_heads, head_size]
    """Answer every query from the cache. No token is padding here: only the triton backend runs in CUDA graphs."""
    queries = query.index_select(0, metadata.tokens).split(metadata.num_tokens)
    answers = [call.answer(rows, kv_cache, scale) for call, rows in zip(metadata.calls, queries, strict=True)]
    if reads is not None:
        for call in metadata.calls:
            reads[call.batch_idx[:, None], call.logical_block] = call.block_ids.to(reads.dtype)
    return torch.cat(answers).index_select(0, metadata.places)


def heads_first(kv_cache: Tensor) -> Tensor:
    """As it lies in memory: [2, num_blocks, num_kv_heads, block_size, head_size]."""
    return kv_cache.transpose(2, 3)


@cache
def samples_products() -> bool:
    """Whether this build of torch samples products on a CPU; its remark that sparse tensors are young is not shown."""
    one = torch.ones(1, 1)
    index = torch.tensor([0, 1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            places = torch.sparse_csr_tensor(index, index[:1], one[0], size=(1, 1), check_invariants=False)
            return torch.sparse.sampled_addmm(places, one, one, beta=0.0).values().tolist() == [1.0]
    except (RuntimeError, AttributeError):
        return False


class TorchBackend(AttentionBackend):
    name = "torch"

    def make_impl(self, config: AttentionLayerConfig) -> AttentionImpl:
        self.heads_per_kv_head = config.num_heads // config.num_kv_heads  # the same in every layer
        return TorchImpl(config)

    def make_builder(self, group_id: int, spec: AttentionSpec) -> MetadataBuilder:
        return TorchMetadataBuilder(group_id, spec, self.heads_per_kv_head)
