"""Attention over the paged cache, in one launch for prefill chunks, decodes and prefix hits.

After vLLM's ``triton_unified_attention``: a program takes a tile of one row's queries and one
key-value head, walks that row's visible positions tile by tile through the block table, and keeps a
running softmax (Milakov and Gimelshein, 2018). For few long decodes the positions are split over
several programs whose parts a second kernel combines (flash-decoding). The torch twin is
``paged_attention_reference`` below, one row at a time and in float64 if asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedlab.kernels.jit import How, kernel

if TYPE_CHECKING:
    import triton.language as tl  # at run time the first use of a kernel puts it here, see jit.kernel

HEAD_SIZES = (32, 256)     # smallest and largest
MIN_POSITIONS_PER_SPLIT = 256
MAX_SPLITS = 16
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class QueryTiles:
    """How the flat queries are cut: no tile spans two rows.

    With query_lens [1, 9] and 4 queries per tile: batch_idx [0, 1, 1, 1], first_query [0, 0, 4, 8].
    """

    batch_idx: Tensor         # [num_tiles] int32   row of each tile
    first_query: Tensor       # [num_tiles] int32   its first query, counted within the row
    block_m: int              # rows of the score matrix: queries × query heads per key-value head, padded

    @classmethod
    def cut(
        cls, query_lens: list[int], heads_per_kv_head: int, longest_block_m: int, device: torch.device
    ) -> QueryTiles:
        is_long = max(query_lens, default=0) * heads_per_kv_head > 16
        block_m = max(16, _next_power_of_2(heads_per_kv_head), longest_block_m if is_long else 0)
        step = block_m // heads_per_kv_head
        tiles = [(row, first) for row, query_len in enumerate(query_lens) for first in range(0, query_len, step)]
        columns = [[row for row, _ in tiles], [first for _, first in tiles]]
        batch_idx, first_query = (torch.tensor(column, dtype=torch.int32).to(device) for column in columns)
        return cls(batch_idx, first_query, block_m)


def longest_block_m(head_size: int, element_size: int) -> int:
    """Score rows of a prefill program: as many as its registers hold."""
    return 32 if element_size == 4 and head_size > 128 else 64


def choose_num_splits(num_tiles: int, num_kv_heads: int, max_query_len: int, max_seq_len: int,
                      num_processors: int) -> int:
    """Split only decodes that would leave processors idle, into parts worth a program.

    One decode of 8192 tokens with 8 key-value heads on 132 processors: 8 programs would run, so the
    positions are split over min(8192 // 256, 264 // 8, 16) = 16 programs each. Always a power of two: each
    number is a kernel of its own, and a growing decode shall not wait for a compiler every 256 tokens.
    """
    if max_query_len > 1 or not num_tiles:
        return 1
    wanted = 2 * num_processors // (num_tiles * num_kv_heads)
    most = max(1, min(max_seq_len // MIN_POSITIONS_PER_SPLIT, wanted, MAX_SPLITS))
    return 1 << (most.bit_length() - 1)


def launch_config(head_size: int, block_m: int, element_size: int) -> dict[str, int]:
    """Tile width and warps, by compiling: the widest that needs no local memory on sm_80 and sm_90."""
    size = _next_power_of_2(head_size)
    if element_size == 4:  # products without tensor cores
        if size > 64:
            return {"TILE": 16, "num_warps": 8, "num_stages": 1}
        return {"TILE": 32, "num_warps": 4 if block_m == 16 else 8, "num_stages": 1}
    tile = 64 if 32 < size < 256 else 32
    return {"TILE": tile, "num_warps": 8 if size > 64 and block_m > 16 else 4, "num_stages": 2}


def paged_attention(
    query: Tensor,            # [T, num_heads, head_size]
    kv_cache: Tensor,         # [2, num_blocks, block_size, num_kv_heads, head_size]
    output: Tensor,           # [T, num_heads, head_size]  written for every query of the tiles
    tiles: QueryTiles,
    query_start_loc: Tensor,  # [R + 1] int32
    seq_lens: Tensor,         # [R] int32
    block_table: Tensor,      # [R, K] int32
    *,
    scale: float,
    sliding_window: int | None,
    num_splits: int,
    how: How,
    reads: Tensor | None = None,  # [R, K] int32, -1 where a table entry was not read; filled if given
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Launch; the grid and the meta-parameters come back for the event."""
    num_heads, head_size = query.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[2:4]
    key_cache, value_cache = kv_cache
    config = launch_config(head_size, tiles.block_m, query.element_size())
    grid = (len(tiles.batch_idx), num_kv_heads, num_splits)
    part = partial_sums = output
    if num_splits > 1:
        part = torch.empty(num_splits, *query.shape, dtype=torch.float32, device=query.device)
        partial_sums = torch.empty(num_splits, *query.shape[:2], 2, dtype=torch.float32, device=query.device)
    shape = {"GROUP": num_heads // num_kv_heads, "HEAD_SIZE": head_size, "PADDED_SIZE": _next_power_of_2(head_size)}
    meta = {**shape, "BLOCK_SIZE": block_size, "BLOCK_M": tiles.block_m, "WINDOW": sliding_window or 0,
            "NUM_SPLITS": num_splits, **config}
    if grid[0]:
        kernel(paged_attention_kernel, how)[grid](
            query, key_cache, value_cache, part, partial_sums, tiles.batch_idx, tiles.first_query, query_start_loc,
            seq_lens, block_table, block_table if reads is None else reads, scale * LOG2_E, len(query),
            *query.stride()[:2], *key_cache.stride()[:3], *output.stride()[:2], block_table.stride(0),
            LOG=reads is not None, DOT_IN_FLOAT32=how == "interpreted", **meta,
        )  # fmt: skip
        if num_splits > 1:
            kernel(combine_splits_kernel, how)[(len(query), num_heads)](
                part, partial_sums, output, len(query), num_heads, *output.stride()[:2],
                HEAD_SIZE=head_size, PADDED_SIZE=shape["PADDED_SIZE"], NUM_SPLITS=num_splits,
            )  # fmt: skip
    return grid, meta


def paged_attention_kernel(  # type: ignore[no-untyped-def]
    query,                         # [T, num_heads, HEAD_SIZE]
    key_cache, value_cache,        # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    output,                        # like query; with splits [NUM_SPLITS, T, num_heads, HEAD_SIZE] float32
    partial_sums,                  # [NUM_SPLITS, T, num_heads, 2] float32: maximum and sum, only with splits
    tile_batch_idx, tile_first_query,  # [num_tiles] int32
    query_start_loc,               # [R + 1] int32
    seq_lens,                      # [R] int32
    block_table,                   # [R, K] int32
    log,                           # [R, K] int32, only with LOG
    scale,                         # of the scores, times log2(e)
    num_tokens,
    query_stride_t, query_stride_h,
    cache_stride_block, cache_stride_offset, cache_stride_h,
    output_stride_t, output_stride_h,
    table_stride,
    GROUP: tl.constexpr,           # query heads per key-value head
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,     # next power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,          # 0: all positions
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,            # positions at a time; spans blocks where they are smaller
    LOG: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,  # for the interpreter of triton 3.9, which multiplies bfloat16 as integers
):
    """One program: up to BLOCK_M // GROUP queries of one row, all query heads of one key-value head.

    Score row m is query m // GROUP of the tile and head m % GROUP of the group.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    batch_idx = tl.load(tile_batch_idx + tile).to(tl.int64)
    first_query = tl.load(tile_first_query + tile)
    start = tl.load(query_start_loc + batch_idx)
    query_len = tl.load(query_start_loc + batch_idx + 1) - start
    seq_len = tl.load(seq_lens + batch_idx)

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PADDED_SIZE)
    query_idx = first_query + m // GROUP                      # [BLOCK_M] within the row
    in_row = (m // GROUP < BLOCK_M // GROUP) & (query_idx < query_len)
    is_dim = dim < HEAD_SIZE
    token = (start + query_idx).to(tl.int64)                  # [BLOCK_M] place in the flat batch
    head = kv_head * GROUP + m % GROUP                        # [BLOCK_M]
    q = tl.load(
        query + token[:, None] * query_stride_t + head[:, None] * query_stride_h + dim[None, :],
        mask=in_row[:, None] & is_dim[None, :], other=0.0,
    )                                                         # [BLOCK_M, PADDED_SIZE]
    if DOT_IN_FLOAT32:
        q = q.to(tl.float32)
    query_position = seq_len - query_len + query_idx          # [BLOCK_M]

    # positions that some query of the tile sees: [begin, end)
    last_query = tl.minimum(first_query + BLOCK_M // GROUP, query_len) - 1
    end = seq_len - query_len + last_query + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(seq_len - query_len + first_query - WINDOW + 1, 0)
    if NUM_SPLITS > 1:
        per_split = ((end - begin + NUM_SPLITS - 1) // NUM_SPLITS + TILE - 1) // TILE * TILE
        begin += split * per_split
        end = tl.minimum(end, begin + per_split)

    row = block_table + batch_idx * table_stride
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, PADDED_SIZE), 0.0, tl.float32)
    for first in range(begin, end, TILE):
        position = first + tl.arange(0, TILE)
        written = position < end                              # what lies beyond may hold anything, NaN too
        block_id = tl.load(row + position // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        if LOG:
            tl.store(log + batch_idx * table_stride + position // BLOCK_SIZE, block_id.to(tl.int32), mask=written)
        place = block_id * cache_stride_block + (position % BLOCK_SIZE).to(tl.int64) * cache_stride_offset
        place += kv_head.to(tl.int64) * cache_stride_h        # [TILE]
        mask = written[:, None] & is_dim[None, :]
        k = tl.load(key_cache + place[:, None] + dim[None, :], mask=mask, other=0.0)  # [TILE, PADDED_SIZE]
        if DOT_IN_FLOAT32:
            k = k.to(tl.float32)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale                       # [BLOCK_M, TILE]
        seen = position[None, :] <= query_position[:, None]
        if WINDOW > 0:
            seen = seen & (position[None, :] > query_position[:, None] - WINDOW)
        scores = tl.where(seen & written[None, :] & in_row[:, None], scores, float("-inf"))
        # tl.reduce, not tl.max: that runs interpreted only if TRITON_INTERPRET was set before triton was imported
        new_largest = tl.maximum(largest, tl.reduce(scores, 1, tl.standard._elementwise_max))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that has seen nothing yet
        p = tl.exp2(scores - shift[:, None])                  # [BLOCK_M, TILE]
        rescale = tl.exp2(largest - shift)
        total = total * rescale + tl.reduce(p, 1, tl.standard._sum_combine)
        v = tl.load(value_cache + place[:, None] + dim[None, :], mask=mask, other=0.0)  # [TILE, PADDED_SIZE]
        p = p.to(v.dtype)
        if DOT_IN_FLOAT32:
            p = p.to(tl.float32)
            v = v.to(tl.float32)
        acc = acc * rescale[:, None] + tl.dot(p, v, input_precision="ieee")
        largest = new_largest

    if NUM_SPLITS > 1:
        out_row = (split.to(tl.int64) * num_tokens + token) * (tl.num_programs(1) * GROUP) + head  # [BLOCK_M]
        tl.store(output + out_row[:, None] * HEAD_SIZE + dim[None, :], acc, mask=in_row[:, None] & is_dim[None, :])
        tl.store(partial_sums + out_row * 2, largest, mask=in_row)
        tl.store(partial_sums + out_row * 2 + 1, total, mask=in_row)
    else:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(
            output + token[:, None] * output_stride_t + head[:, None] * output_stride_h + dim[None, :],
            acc.to(output.dtype.element_ty), mask=in_row[:, None] & is_dim[None, :],
        )


def combine_splits_kernel(  # type: ignore[no-untyped-def]
    part,                          # [NUM_SPLITS, T, num_heads, HEAD_SIZE] float32
    partial_sums,                  # [NUM_SPLITS, T, num_heads, 2] float32
    output,                        # [T, num_heads, HEAD_SIZE]
    num_tokens, num_heads,
    output_stride_t, output_stride_h,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """One program weighs one query head's parts by their maxima and adds them."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_SIZE)
    largest = tl.load(partial_sums + (token * num_heads + head) * 2)
    for split in range(1, NUM_SPLITS):
        row = (split * num_tokens + token) * num_heads + head
        largest = tl.maximum(largest, tl.load(partial_sums + row * 2))
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # a padding row of a CUDA graph saw nothing
    total = 0.0
    acc = tl.full((PADDED_SIZE,), 0.0, tl.float32)
    for split in range(NUM_SPLITS):
        row = (split * num_tokens + token) * num_heads + head
        weight = tl.exp2(tl.load(partial_sums + row * 2) - largest)  # 0 for a part that saw nothing
        total += weight * tl.load(partial_sums + row * 2 + 1)
        acc += weight * tl.load(part + row * HEAD_SIZE + dim, mask=dim < HEAD_SIZE, other=0.0)
    tl.store(
        output + token * output_stride_t + head * output_stride_h + dim,
        (acc / tl.where(total > 0.0, total, 1.0)).to(output.dtype.element_ty), mask=dim < HEAD_SIZE,
    )


def paged_attention_reference(
    query: Tensor,            # [T, num_heads, head_size]
    kv_cache: Tensor,         # [2, num_blocks, block_size, num_kv_heads, head_size]
    query_start_loc: Tensor,  # [R + 1] int32
    seq_lens: Tensor,         # [R] int32
    block_table: Tensor,      # [R, K] int32
    *,
    scale: float,
    sliding_window: int | None,
    reads: Tensor | None = None,  # [R, K] int32
) -> Tensor:                  # [T, num_heads, head_size]
    """The definition, in the dtype of its inputs: row by row, score matrix in full.

    The last query of a row sits at position seq_len - 1. With seq_len 10, 2 queries and window 3,
    they sit at 8 and 9 and see positions 6 to 8 and 7 to 9.
    """
    output = torch.zeros_like(query)
    block_size = kv_cache.shape[2]
    starts = query_start_loc.tolist()
    for batch_idx, seq_len in enumerate(seq_lens.tolist()):
        start, stop = starts[batch_idx], starts[batch_idx + 1]
        if start == stop:
            continue
        query_position = torch.arange(seq_len - (stop - start), seq_len, device=query.device)[:, None]  # [Q, 1]
        begin = 0 if sliding_window is None else max(0, seq_len - (stop - start) - sliding_window + 1)
        position = torch.arange(begin, seq_len, device=query.device)                    # [S]
        block_id = block_table[batch_idx, position // block_size].long()                # [S]
        key, value = kv_cache[:, block_id, position % block_size]                       # [S, num_kv_heads, head_size]
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))          # [S, num_heads, head_size]
        scores = torch.einsum("qhd,shd->hqs", query[start:stop], key) * scale
        unseen = position > query_position                                              # [Q, S]
        if sliding_window is not None:
            unseen |= position <= query_position - sliding_window
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        output[start:stop] = torch.einsum("hqs,shd->qhd", weights, value)
        if reads is not None:
            logical_block = (position // block_size).unique()
            reads[batch_idx, logical_block] = block_table[batch_idx, logical_block]
    return output


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
