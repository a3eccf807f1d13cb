"""The persistent batch's block table of one KV-cache group (vllm/v1/worker/block_table.py)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class BlockTable:
    """[max_num_seqs, K] block ids, prepared on the host and copied to the device once per step.

    Row r is valid up to ``num_blocks_per_row[r]``. What stands beyond is an earlier request's:
    rows are never cleared, and nothing may read there. Written only by PersistentBatch.
    """

    def __init__(self, max_num_seqs: int, max_num_blocks: int, device: torch.device) -> None:
        self.host = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)   # [max_num_seqs, K]
        self.num_blocks_per_row = np.zeros(max_num_seqs, dtype=np.int32)       # [max_num_seqs]
        self.device_table = torch.zeros(self.host.shape, dtype=torch.int32, device=device)

    def append_row(self, row: int, block_ids: list[int]) -> None:
        """Put ids behind the valid ones. Row [4, ·, ·, ·] and [7, 8] give [4, 7, 8, ·]."""
        start = self.num_blocks_per_row[row]
        self.num_blocks_per_row[row] += len(block_ids)
        self.host[row, start : start + len(block_ids)] = block_ids

    def add_row(self, row: int, block_ids: list[int]) -> None:
        """Start the row anew. [9] over [5, 6, 3, ·] leaves [9, 6, 3, ·] with one valid entry."""
        self.num_blocks_per_row[row] = 0
        self.append_row(row, block_ids)

    def move_row(self, from_row: int, row: int) -> None:
        """Copy the valid entries only: [5, 6, ·, ·] over [1, 2, 3, ·] gives [5, 6, 3, ·]."""
        count = self.num_blocks_per_row[from_row]
        self.host[row, :count] = self.host[from_row, :count]
        self.num_blocks_per_row[row] = count

    def swap_rows(self, row: int, other: int) -> None:
        """Exchange whole rows, stale entries too: for backends that want decodes first."""
        self.host[[row, other]] = self.host[[other, row]]
        self.num_blocks_per_row[[row, other]] = self.num_blocks_per_row[[other, row]]

    def block_ids(self, row: int) -> list[int]:
        """The valid entries."""
        return [int(b) for b in self.host[row, : self.num_blocks_per_row[row]]]

    def commit(self, num_reqs: int) -> Tensor:  # [num_reqs, K] int32, on the device
        """Copy the first ``num_reqs`` rows to the device, whole. Their memory is not pinned: it may change at once."""
        self.device_table[:num_reqs].copy_(torch.from_numpy(self.host[:num_reqs]), non_blocking=True)
        return self.device_table[:num_reqs]
