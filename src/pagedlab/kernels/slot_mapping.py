"""Slot mapping: where in the KV cache every token of this step is written.

The chain is token → row → position → logical block + offset → table index → block → slot
(vllm/v1/worker/block_table.py, compute_slot_mapping; vllm/v1/worker/gpu/block_table.py for the
kernel that serves all KV-cache groups in one launch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pagedlab.kernels.jit import How, PointerTable, kernel
from pagedlab.trace.events import KernelLaunched
from pagedlab.trace.tracer import trace

if TYPE_CHECKING:
    import triton.language as tl  # at run time the first use of a kernel puts it here, see jit.kernel

PAD_SLOT_ID = -1  # tokens that only pad the batch: nothing is written for them
TILE = 256        # tokens that one iteration of the kernel maps


class SlotChain(NamedTuple):
    """Every intermediate on the way from a token to its slot; each has one entry per token."""

    logical_block: Tensor  # [num_tokens] int64   which of its request's blocks
    offset: Tensor         # [num_tokens] int64   place inside the block
    table_index: Tensor    # [num_tokens] int64   row · K + logical_block, into the flattened table
    block_id: Tensor       # [num_tokens] int64   physical block
    slot: Tensor           # [num_tokens] int64   block_id · block_size + offset


def slot_chain(
    block_table: Tensor,   # [num_rows, K] int32    row -> block ids, stale beyond the valid ones
    req_indices: Tensor,   # [num_tokens] int64     token -> row
    positions: Tensor,     # [num_tokens] int64     token -> place in its own request
    block_size: int,
) -> SlotChain:
    """Follow the chain for every token.

    Three requests of 2, 5 and 3 tokens, block size 2, K = 3 columns, table [[7], [3, 9, 1], [4, 2]]:
    ``table_index`` is [0, 0, 3, 3, 4, 4, 5, 6, 6, 7], ``block_id`` [7, 7, 3, 3, 9, 9, 1, 4, 4, 2],
    ``offset`` [0, 1, 0, 1, 0, 1, 0, 0, 1, 0] and ``slot`` [14, 15, 6, 7, 18, 19, 2, 8, 9, 4].

    The column count K = ceil(max_model_len / block_size) must be the table's own: dividing a flat
    token index by the block size lands in the wrong row as soon as max_model_len is no multiple.
    """
    logical_block = positions // block_size
    offset = positions % block_size
    table_index = req_indices * block_table.shape[1] + logical_block
    block_id = block_table.reshape(-1)[table_index].long()
    return SlotChain(logical_block, offset, table_index, block_id, block_id * block_size + offset)


def compute_slot_mapping_reference(
    block_table: Tensor,      # [num_reqs, K] int32       batch_idx -> block ids
    num_blocks: Tensor,       # [num_reqs] int32          batch_idx -> valid entries of its row
    query_start_loc: Tensor,  # [num_reqs + 1] int32      batch_idx -> first token
    positions: Tensor,        # [num_tokens] int64        token -> place in its own request
    block_size: int,
) -> Tensor:                  # [num_tokens] int64        token -> slot
    """The torch twin of the kernel, for one group.

    With block size 16, row [37, 12] at position 31 and row [81, 44] at 16…23 the slots are
    [207, 704, 705, …, 711].

    Raises:
        IndexError: a position lies beyond its row's valid blocks. The row may still hold an
            earlier request's ids there, so reading on would overwrite somebody's KV.
    """
    batch_idx = torch.arange(len(query_start_loc) - 1, device=positions.device)
    req_indices = batch_idx.repeat_interleave(query_start_loc.diff(), output_size=len(positions))
    past_end = positions // block_size >= num_blocks.to(positions.device)[req_indices]
    if past_end.any():
        rows = req_indices[past_end].tolist()
        raise IndexError(f"rows {rows} have no block for positions {positions[past_end].tolist()}")
    return slot_chain(block_table, req_indices, positions, block_size).slot


def compute_slot_mapping(
    block_tables: PointerTable,  # G × [num_reqs or more, K_g] int32   batch_idx -> block ids
    num_blocks: Sequence[Tensor],  # G × [num_reqs] int32   valid entries; only the torch twin looks
    query_start_loc: Tensor,     # [num_reqs + 1] int32
    positions: Tensor,           # [num_tokens] int64
    block_sizes: Tensor,         # [G] int32
    out: Tensor,                 # [G, max_num_tokens] int64; filled with -1 from num_tokens on
    how: How,
) -> tuple[Tensor, ...]:         # G × [num_tokens] int64, views of out
    """Slots of all groups at once: the kernel's launch, or its torch twin group by group."""
    num_groups, num_reqs, num_tokens = len(block_tables.tables), len(query_start_loc) - 1, len(positions)
    grid = (num_groups, num_reqs + 1)
    if how == "torch":
        out[:, num_tokens:] = PAD_SLOT_ID
        for group, table in enumerate(block_tables.tables):
            out[group, :num_tokens] = compute_slot_mapping_reference(
                table, num_blocks[group], query_start_loc, positions, int(block_sizes[group])
            )
    else:
        kernel(slot_mapping_kernel, how)[grid](
            block_tables.pointers, block_tables.strides, block_sizes, query_start_loc, positions,
            out, out.stride(0), out.shape[1], TILE=TILE, PAD_SLOT=PAD_SLOT_ID,
        )  # fmt: skip
    if trace.kernels:
        meta = {"TILE": TILE} if how != "torch" else {}
        trace.emit(KernelLaunched(name="compute_slot_mapping", layer="", grid=list(grid), meta=dict(meta), how=how))
    return tuple(out[group, :num_tokens] for group in range(num_groups))


def slot_mapping_kernel(  # type: ignore[no-untyped-def]
    block_table_ptrs,   # [G] uint64              addresses of [num_reqs, K_g] int32
    table_strides,      # [G] int64               K_g
    block_sizes,        # [G] int32
    query_start_loc,    # [num_reqs + 1] int32
    positions,          # [num_tokens] int64
    slot_mapping,       # [G, max_num_tokens] int64
    slot_stride,        # from group to group
    max_num_tokens,
    TILE: tl.constexpr,
    PAD_SLOT: tl.constexpr,
):
    """One program per (group, batch row), and one more per group that pads with PAD_SLOT."""
    group = tl.program_id(0)
    batch_idx = tl.program_id(1)
    out = slot_mapping + group.to(tl.int64) * slot_stride
    start = tl.load(query_start_loc + batch_idx)
    if batch_idx == tl.num_programs(1) - 1:  # start is num_tokens here
        for first in range(start, max_num_tokens, TILE):
            token = first + tl.arange(0, TILE)
            pad = tl.full((TILE,), PAD_SLOT, tl.int64)
            tl.store(out + token, pad, mask=token < max_num_tokens)
    else:
        end = tl.load(query_start_loc + batch_idx + 1)
        block_size = tl.load(block_sizes + group)
        stride = tl.load(table_strides + group)
        table = tl.load(block_table_ptrs + group).to(tl.pointer_type(tl.int32))
        row = table + batch_idx.to(tl.int64) * stride
        for first in range(start, end, TILE):
            token = first + tl.arange(0, TILE)
            mask = token < end
            position = tl.load(positions + token, mask=mask, other=0)
            block_id = tl.load(row + position // block_size, mask=mask, other=0).to(tl.int64)
            tl.store(out + token, block_id * block_size + position % block_size, mask=mask)
