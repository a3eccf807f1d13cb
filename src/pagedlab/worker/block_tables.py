"""Block tables of all groups by state row, and their gathered copies by batch row.

See vllm/v1/worker/gpu/block_table.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedlab.kernels.block_tables import gather_block_tables
from pagedlab.kernels.jit import How, PointerTable
from pagedlab.worker.staged import StagedTensor


class BlockTables:
    """Owns both sides: tables that stay, ``input_block_tables`` that every step fills anew.

    The gather copies a row's valid ids only; what lies beyond in ``input_block_tables`` is an earlier
    step's, of any request, and nothing may read it. Written only by StateTableRunner.
    """

    def __init__(self, max_num_reqs: int, max_num_blocks: list[int], device: torch.device) -> None:
        self._staged = [StagedTensor(max_num_reqs, k, device) for k in max_num_blocks]  # per group, by req_state_idx
        self.num_blocks = torch.zeros((len(max_num_blocks), max_num_reqs), dtype=torch.int32)  # [G, rows], on the host
        self.block_tables = PointerTable.of([staged.tensor for staged in self._staged])
        self.input_block_tables = PointerTable.of([torch.zeros_like(staged.tensor) for staged in self._staged])

    def append_block_ids(self, req_state_idx: int, block_ids: tuple[list[int], ...], *, overwrite: bool) -> None:
        """Stage ids behind a row's valid ones, or from its start."""
        for group, ids in enumerate(block_ids):
            start = 0 if overwrite else int(self.num_blocks[group, req_state_idx])
            self._staged[group].stage(req_state_idx, start, ids)
            self.num_blocks[group, req_state_idx] = start + len(ids)

    def apply_staged_writes(self) -> int:
        """Returns the bytes that went to the device."""
        return sum(staged.apply() for staged in self._staged)

    def gather(self, idx_mapping: Tensor, how: How) -> PointerTable:
        """Fill ``input_block_tables`` for this batch: idx_mapping is [R] int32, batch_idx -> req_state_idx."""
        num_blocks = self.num_blocks.to(idx_mapping.device)
        gather_block_tables(self.block_tables, self.input_block_tables, num_blocks, idx_mapping, how)
        return self.input_block_tables

    def block_ids(self, req_state_idx: int) -> list[list[int]]:
        """A row's valid entries, per group."""
        counts = self.num_blocks[:, req_state_idx].tolist()
        rows = zip(self.block_tables.tables, counts, strict=True)
        return [table[req_state_idx, :count].tolist() for table, count in rows]
