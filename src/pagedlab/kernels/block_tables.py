"""Gather of block tables: from the rows that requests keep to the rows of this step's batch.

Only the request-state-table runner needs it (vllm/v1/worker/gpu/block_table.py,
gather_block_tables): its requests never move, so the batch gets a copy of their tables in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedlab.kernels.jit import How, PointerTable, kernel
from pagedlab.trace.events import KernelLaunched
from pagedlab.trace.tracer import trace

if TYPE_CHECKING:
    import triton.language as tl  # at run time the first use of a kernel puts it here, see jit.kernel

TILE = 256  # block ids that one iteration of the kernel copies


def gather_block_tables_reference(
    block_table: Tensor,        # [max_num_reqs, K] int32   req_state_idx -> block ids
    input_block_table: Tensor,  # [max_num_reqs, K] int32   batch_idx -> block ids, written here
    num_blocks: Tensor,         # [max_num_reqs] int32      req_state_idx -> valid entries
    idx_mapping: Tensor,        # [num_reqs] int32          batch_idx -> req_state_idx
) -> None:
    """The torch twin, for one group: copy the valid part of every row, leave the rest stale.

    With idx_mapping [7, 6], state row 6 holding [81, 44] and state row 7 holding [37, 12], batch row
    0 becomes [37, 12, …] and batch row 1 [81, 44, …]; behind them stays what earlier steps left.
    """
    rows = idx_mapping.long()
    target = input_block_table[: len(rows)]
    is_valid = torch.arange(block_table.shape[1], device=rows.device) < num_blocks[rows, None]
    target.copy_(torch.where(is_valid, block_table[rows], target))


def gather_block_tables(
    block_tables: PointerTable,        # G × [max_num_reqs, K_g] int32   by req_state_idx
    input_block_tables: PointerTable,  # G × [max_num_reqs, K_g] int32   by batch_idx, written here
    num_blocks: Tensor,                # [G, max_num_reqs] int32
    idx_mapping: Tensor,               # [num_reqs] int32
    how: How,
) -> None:
    """Gather the tables of all groups at once: the kernel's launch, or its torch twin."""
    grid = (len(block_tables.tables), len(idx_mapping))
    if how == "torch":
        for group, table in enumerate(block_tables.tables):
            gather_block_tables_reference(table, input_block_tables.tables[group], num_blocks[group], idx_mapping)
    else:
        kernel(gather_block_tables_kernel, how)[grid](
            block_tables.pointers, input_block_tables.pointers, block_tables.strides,
            num_blocks, num_blocks.stride(0), idx_mapping, TILE=TILE,
        )  # fmt: skip
    if trace.kernels:
        meta = {"TILE": TILE} if how != "torch" else {}
        trace.emit(KernelLaunched(name="gather_block_tables", layer="", grid=list(grid), meta=dict(meta), how=how))


def gather_block_tables_kernel(  # type: ignore[no-untyped-def]
    block_table_ptrs,        # [G] uint64             addresses of [max_num_reqs, K_g] int32
    input_block_table_ptrs,  # [G] uint64             addresses of [max_num_reqs, K_g] int32
    table_strides,           # [G] int64              K_g
    num_blocks,              # [G, max_num_reqs] int32
    num_blocks_stride,       # from group to group
    idx_mapping,             # [num_reqs] int32
    TILE: tl.constexpr,
):
    """One program per (group, batch row)."""
    group = tl.program_id(0)
    batch_idx = tl.program_id(1)
    req_state_idx = tl.load(idx_mapping + batch_idx).to(tl.int64)
    count = tl.load(num_blocks + group * num_blocks_stride + req_state_idx)
    stride = tl.load(table_strides + group)
    source = tl.load(block_table_ptrs + group).to(tl.pointer_type(tl.int32)) + req_state_idx * stride
    target = tl.load(input_block_table_ptrs + group).to(tl.pointer_type(tl.int32)) + batch_idx.to(tl.int64) * stride
    for first in range(0, count, TILE):
        column = first + tl.arange(0, TILE)
        mask = column < count
        tl.store(target + column, tl.load(source + column, mask=mask, other=0), mask=mask)
