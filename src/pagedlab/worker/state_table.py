"""The newer runner: request state in fixed rows, a batch that is gathered anew each step.

batch_idx → req_state_idx → position → logical block + offset → physical block → slot
(vllm/v1/worker/gpu/model_runner.py).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from pagedlab.kv.specs import KVCacheConfig
from pagedlab.sched.output import SchedulerOutput
from pagedlab.trace.events import BlocksAppended, RowFreed, RowsStaged, RowState
from pagedlab.trace.tracer import trace
from pagedlab.worker.batch_events import row_assigned
from pagedlab.worker.block_tables import BlockTables
from pagedlab.worker.flat_indices import flatten_batch, token_indices
from pagedlab.worker.input_batch import InputBatch
from pagedlab.worker.request_table import RequestTable
from pagedlab.worker.requests import CachedRequestState
from pagedlab.worker.runner import GPUModelRunner


class StateTableRunner(GPUModelRunner):
    """Rows are given up at preemption, at once, and taken anew on return. Nothing ever moves."""

    has_state_rows: ClassVar[bool] = True

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        super().initialize_kv_cache(kv_cache_config, max_model_len)
        max_num_reqs = self.config.max_num_seqs
        self.request_table = RequestTable(max_num_reqs, max_model_len, self.device)
        self.block_tables = BlockTables(max_num_reqs, self.max_num_blocks, self.device)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=self.device)  # 0 beyond the batch

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Preempted and finished leave, new and returning ones take rows, known ones grow."""
        table, cached = self.request_table, scheduler_output.scheduled_cached_reqs
        for req_id in scheduler_output.preempted_req_ids:
            self._free_row(req_id, "preempted")
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)  # an id cancelled while it waited was never seen here
            self._free_row(req_id, "finished")

        touched = [self._assign_row(self._add_request(new)) for new in scheduler_output.scheduled_new_reqs]
        for index, req_id in enumerate(cached.req_ids):
            request, new_block_ids = self._update_request(cached, index)
            row = table.req_state_indices.get(req_id)
            if row is None:
                touched.append(self._assign_row(request))
                continue
            touched.append(row)
            table.update_request(row, request)
            if new_block_ids is not None:
                self.block_tables.append_block_ids(row, new_block_ids, overwrite=False)
                if trace.blocks:
                    trace.emit(BlocksAppended(request_id=req_id, row=row, block_ids=[list(b) for b in new_block_ids]))

        num_bytes = table.apply_staged_writes() + self.block_tables.apply_staged_writes()
        if trace.blocks:
            what = ["token_ids", "num_computed_tokens", "block_tables"]
            trace.emit(RowsStaged(rows=touched, num_bytes=num_bytes, what=what))

    def _assign_row(self, request: CachedRequestState) -> int:
        row = self.request_table.add_request(request)
        self.block_tables.append_block_ids(row, request.block_ids, overwrite=True)
        if trace.blocks:
            trace.emit(row_assigned(request, row))
        return row

    def _free_row(self, req_id: str, why: Literal["finished", "preempted"]) -> None:
        row = self.request_table.remove_request(req_id)
        if trace.blocks and row is not None:
            trace.emit(RowFreed(request_id=req_id, row=row, why=why))

    def _prepare_inputs(self, scheduler_output: SchedulerOutput) -> InputBatch:
        """Fewest new tokens first, so that decodes come before prompts; ties keep schedule order.

        A with 8 new tokens in state row 6 and B with 1 in row 7: the batch is B, A, idx_mapping
        [7, 6], query_start_loc [0, 1, 9].
        """
        counts = scheduler_output.num_scheduled_tokens
        return self._gather_batch({req_id: counts[req_id] for req_id in sorted(counts, key=counts.__getitem__)})

    def _gather_batch(self, counts: dict[str, int]) -> InputBatch:
        """The batch of these requests, in this order: request -> number of new tokens."""
        table, device = self.request_table, self.device
        rows = [table.req_state_indices[req_id] for req_id in counts]
        num_scheduled_tokens = list(counts.values())
        idx_mapping = torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)
        flat = flatten_batch(
            torch.tensor(num_scheduled_tokens, dtype=torch.int32).to(device, non_blocking=True),
            table.num_computed_tokens.tensor[idx_mapping, 0],
            sum(num_scheduled_tokens),
        )
        self.seq_lens[: len(rows)] = flat.seq_lens
        self.seq_lens[len(rows) :] = 0
        state_row_of_token = idx_mapping.long()[flat.req_indices]  # [T] int64   token -> req_state_idx
        where = token_indices(state_row_of_token, flat.positions, self.max_model_len)
        return self._input_batch(
            [self.requests[req_id] for req_id in counts],
            num_scheduled_tokens,
            idx_mapping=idx_mapping,
            flat=flat._replace(seq_lens=self.seq_lens[: len(rows)]),
            input_ids=table.token_ids.tensor.view(-1)[where].long(),
            tables=self.block_tables.gather(idx_mapping, self.index_kernels),
            num_blocks=[self.block_tables.num_blocks[group, rows] for group in range(len(self.groups))],
        )

    def row_states(self) -> list[RowState]:
        rows = sorted(self.request_table.req_state_indices.items(), key=lambda item: item[1])
        return [RowState(row=r, request_id=req_id, block_ids=self.block_tables.block_ids(r)) for req_id, r in rows]
