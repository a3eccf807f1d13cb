"""The default runner: a batch whose rows live across steps.

A request keeps its row while it is scheduled; rows stay dense from 0, so that the first
``num_reqs`` rows of every table are the batch. Joining, leaving and closing holes follow vLLM 0.14
exactly (vllm/v1/worker/gpu_model_runner.py, _update_states; vllm/v1/worker/gpu_input_batch.py).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch

from pagedlab.kernels.jit import PointerTable
from pagedlab.kv.specs import KVCacheConfig
from pagedlab.sched.output import SchedulerOutput
from pagedlab.trace.events import BlocksAppended, RowFreed, RowMoved, RowsStaged, RowState
from pagedlab.trace.tracer import trace
from pagedlab.worker.batch_events import row_assigned
from pagedlab.worker.block_table import BlockTable
from pagedlab.worker.flat_indices import FlatIndices, flatten_batch, token_indices
from pagedlab.worker.input_batch import InputBatch
from pagedlab.worker.requests import CachedRequestState
from pagedlab.worker.runner import GPUModelRunner


class PersistentBatch:
    """Rows of per-request arrays on the host. Written only by PersistentBatchRunner._update_states.

    Between ``remove_request`` and ``condense`` the batch has holes; new requests take the lowest
    first, and what is left is closed from the end: the last row moves to the lowest hole.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, max_num_blocks: list[int], device: torch.device
    ) -> None:
        self.req_ids: list[str | None] = []         # row -> request; None is a hole
        self.req_id_to_index: dict[str, int] = {}   # request -> row
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)  # known ids; stale beyond num_tokens
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)           # [max_num_seqs] prompt + output
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int32)  # [max_num_seqs] before this step
        self.block_tables = [BlockTable(max_num_seqs, k, device) for k in max_num_blocks]  # per group

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    def add_request(self, request: CachedRequestState) -> int:
        """Seat a request in the lowest hole, else behind the last row."""
        row = self.req_ids.index(None) if None in self.req_ids else len(self.req_ids)
        self.req_ids[row : row + 1] = [request.req_id]
        self.req_id_to_index[request.req_id] = row
        self.num_tokens[row] = 0
        self.update_request(row, request)
        for table, block_ids in zip(self.block_tables, request.block_ids, strict=True):
            table.add_row(row, block_ids)
        return row

    def update_request(self, row: int, request: CachedRequestState) -> None:
        """Write the tokens that became known since the last step, and the progress."""
        self.token_ids[row, self.num_tokens[row] : request.num_tokens] = request.token_ids_from(self.num_tokens[row])
        self.num_tokens[row] = request.num_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens

    def remove_request(self, req_id: str) -> int | None:
        """Leave a hole; None if the request has no row."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is not None:
            self.req_ids[row] = None
        return row

    def condense(self) -> list[tuple[str, int, int]]:
        """Close the holes; returns (request, from row, to row) in the order done.

        Rows [a, ·, c, ·, e]: e moves to row 1, the trailing holes are dropped, and [a, e, c] is left.
        """
        moves = []
        while self.num_reqs < len(self.req_ids):
            req_id = self.req_ids.pop()
            if req_id is None:
                continue
            from_row, row = len(self.req_ids), self.req_ids.index(None)
            self.req_ids[row] = req_id
            self.req_id_to_index[req_id] = row
            num_tokens = self.num_tokens[row] = self.num_tokens[from_row]
            self.token_ids[row, :num_tokens] = self.token_ids[from_row, :num_tokens]
            self.num_computed_tokens[row] = self.num_computed_tokens[from_row]
            for table in self.block_tables:
                table.move_row(from_row, row)
            moves.append((req_id, from_row, row))
        return moves


class PersistentBatchRunner(GPUModelRunner):
    """Batch row and state row are the same."""

    has_state_rows: ClassVar[bool] = False

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        super().initialize_kv_cache(kv_cache_config, max_model_len)
        self.batch = PersistentBatch(self.config.max_num_seqs, max_model_len, self.max_num_blocks, self.device)
        self.table_pointers = PointerTable.of([table.device_table for table in self.batch.block_tables])

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Finished leave, then those not scheduled; known ones advance; new, then returning ones sit down.

        A row is lost without preemption or end when the scheduler passes over a running request: it is
        seated again, as cached and not resumed, when it is next scheduled.
        """
        batch = self.batch
        scheduled, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)  # an id cancelled while it waited was never seen here
            self._free_row(req_id, "finished")
        for req_id in list(batch.req_id_to_index):
            if req_id not in scheduled or req_id in cached.resumed_req_ids:
                self._free_row(req_id, "preempted" if req_id in scheduler_output.preempted_req_ids else "not_scheduled")

        to_seat = [self._add_request(new) for new in scheduler_output.scheduled_new_reqs]
        for index, req_id in enumerate(cached.req_ids):
            request, new_block_ids = self._update_request(cached, index)
            row = batch.req_id_to_index.get(req_id)
            if row is None:
                to_seat.append(request)
                continue
            batch.update_request(row, request)
            if new_block_ids is not None:
                for table, block_ids in zip(batch.block_tables, new_block_ids, strict=True):
                    table.append_row(row, block_ids)
                if trace.blocks:
                    trace.emit(BlocksAppended(request_id=req_id, row=row, block_ids=[list(b) for b in new_block_ids]))

        for request in to_seat:
            row = batch.add_request(request)
            if trace.blocks:
                trace.emit(row_assigned(request, row))
        for req_id, from_row, row in batch.condense():
            if trace.blocks:
                trace.emit(RowMoved(request_id=req_id, from_row=from_row, row=row))

    def _free_row(self, req_id: str, why: Literal["finished", "not_scheduled", "preempted"]) -> None:
        row = self.batch.remove_request(req_id)
        if trace.blocks and row is not None:
            trace.emit(RowFreed(request_id=req_id, row=row, why=why))

    def _prepare_inputs(self, scheduler_output: SchedulerOutput) -> InputBatch:
        batch, num_reqs = self.batch, self.batch.num_reqs
        for table in batch.block_tables:  # first, so that the copy overlaps with the arithmetic below
            table.commit(num_reqs)
        if trace.blocks:
            num_bytes = sum(table.host[:num_reqs].nbytes for table in batch.block_tables)
            trace.emit(RowsStaged(rows=list(range(num_reqs)), num_bytes=num_bytes, what=["block_table"]))

        requests = [self.requests[req_id] for req_id in batch.req_ids if req_id is not None]
        counts = [scheduler_output.num_scheduled_tokens[r.req_id] for r in requests]
        num_computed = torch.from_numpy(batch.num_computed_tokens[:num_reqs])
        flat = flatten_batch(torch.tensor(counts, dtype=torch.int32), num_computed, sum(counts))
        where = token_indices(flat.req_indices, flat.positions, self.max_model_len)
        input_ids = torch.from_numpy(batch.token_ids).view(-1)[where].long()
        return self._input_batch(
            requests,
            counts,
            idx_mapping=torch.arange(num_reqs, dtype=torch.int32, device=self.device),
            flat=FlatIndices(*(array.to(self.device, non_blocking=True) for array in flat)),
            input_ids=input_ids.to(self.device, non_blocking=True),
            tables=self.table_pointers,
            num_blocks=[torch.from_numpy(table.num_blocks_per_row[:num_reqs]) for table in batch.block_tables],
        )

    def row_states(self) -> list[RowState]:
        return [
            RowState(row=row, request_id=req_id, block_ids=[table.block_ids(row) for table in self.batch.block_tables])
            for row, req_id in enumerate(self.batch.req_ids)
            if req_id is not None
        ]
