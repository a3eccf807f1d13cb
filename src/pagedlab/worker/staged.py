"""A device tensor that is written in batches (vllm/v1/worker/gpu/buffer_utils.py, StagedWriteTensor)."""

from __future__ import annotations

import torch


class StagedTensor:
    """Rows that stay on the device; a step's small writes are collected and applied at once.

    A request's row changes by a few numbers per step. Copying whole tables would move megabytes;
    one copy of (where, what) pairs moves only what changed. No cell is staged twice in one step.
    """

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        self.tensor = torch.zeros((num_rows, num_columns), dtype=torch.int32, device=device)
        self._cells: list[int] = []   # places in the flattened tensor
        self._values: list[int] = []  # parallel to _cells

    def stage(self, row: int, start: int, values: list[int]) -> None:
        """Remember to write ``values`` into ``row`` from column ``start`` on.

        With 4 columns, row 2, start 1 and values [7, 8] go to cells 9 and 10 of the flattened tensor.
        """
        first = row * self.tensor.shape[1] + start
        self._cells += range(first, first + len(values))
        self._values += values

    def apply(self) -> int:
        """Write what was staged; returns the bytes that went to the device."""
        if not self._cells:
            return 0
        cells = torch.tensor(self._cells, dtype=torch.int64)
        values = torch.tensor(self._values, dtype=torch.int32)
        device = self.tensor.device
        self.tensor.view(-1)[cells.to(device, non_blocking=True)] = values.to(device, non_blocking=True)
        self._cells, self._values = [], []
        return cells.nbytes + values.nbytes
