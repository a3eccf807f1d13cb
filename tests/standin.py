"""A stand-in for the model half, torch-free: rows as a worker keeps them, tokens from a script.

Used by tests that are about the control plane and its trace.
"""

from __future__ import annotations

from pagedlab.config import SchedulerConfig
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.output import ModelRunnerOutput, SchedulerOutput
from pagedlab.sched.scheduler import Scheduler
from pagedlab.trace.events import BlocksAppended, RowAssigned, RowFreed, RowMoved, RowState, TokensSampled
from pagedlab.trace.tracer import trace


class StandInExecutor:
    """Keeps rows dense like the persistent batch; samples token ids that count up per request."""

    def __init__(self, vocab_size: int = 7) -> None:
        self.vocab_size = vocab_size
        self.rows: list[RowState] = []              # place in the list = row
        self.num_known: dict[str, int] = {}         # request -> prompt and output tokens
        self.tables: dict[str, list[list[int]]] = {}

    def row_states(self) -> list[RowState]:
        return [RowState(row=r.row, request_id=r.request_id, block_ids=[list(g) for g in r.block_ids])
                for r in self.rows]

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        cached = output.scheduled_cached_reqs
        computed = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = output.num_scheduled_tokens
        for request_id in output.finished_req_ids:
            self.num_known.pop(request_id, None)
            self.tables.pop(request_id, None)
        for row in [r for r in self.rows if r.request_id not in scheduled]:
            why = "preempted" if row.request_id in output.preempted_req_ids else "not_scheduled"
            self._free(row, "finished" if row.request_id in output.finished_req_ids else why)
        for new in output.scheduled_new_reqs:
            self.num_known[new.req_id] = len(new.prompt_token_ids)
            self._assign(new.req_id, [list(g) for g in new.block_ids], new.num_computed_tokens)
        for i, request_id in enumerate(cached.req_ids):
            self._update_cached(request_id, cached.new_block_ids[i], request_id in cached.resumed_req_ids,
                                cached.num_computed_tokens[i])
        sampled = {}
        for request_id, num_tokens in scheduled.items():
            kept = computed[request_id] + num_tokens >= self.num_known[request_id]
            token_id = self.num_known[request_id] % self.vocab_size
            if kept:
                self.num_known[request_id] += 1
            sampled[request_id] = [token_id] if kept else []
            if trace.decisions:
                row = next(r.row for r in self.rows if r.request_id == request_id)
                trace.emit(TokensSampled(request_id=request_id, row=row, token_id=token_id, text=f"<{token_id}>",
                                         kept=kept))
        return ModelRunnerOutput(sampled)

    def _update_cached(self, request_id: str, new: tuple[list[int], ...] | None, resumed: bool, computed: int) -> None:
        table = self.tables[request_id]
        if resumed:
            assert new is not None
            self.tables[request_id] = table = [list(ids) for ids in new]
        elif new is not None:
            for ids, more in zip(table, new, strict=True):
                ids += more
        row = next((r for r in self.rows if r.request_id == request_id), None)
        if row is None:
            self._assign(request_id, table, computed)
        elif new is not None:
            row.block_ids = [list(ids) for ids in table]
            if trace.blocks:
                trace.emit(BlocksAppended(request_id=request_id, row=row.row, block_ids=[list(g) for g in new],
                                          replaced=resumed))

    def _assign(self, request_id: str, block_ids: list[list[int]], computed: int) -> None:
        self.tables[request_id] = block_ids
        self.rows.append(RowState(row=len(self.rows), request_id=request_id, block_ids=[list(g) for g in block_ids]))
        if trace.blocks:
            trace.emit(RowAssigned(request_id=request_id, row=len(self.rows) - 1,
                                   block_ids=[list(g) for g in block_ids], num_computed_tokens=computed))

    def _free(self, row: RowState, why: str) -> None:
        hole = row.row
        last = self.rows.pop()
        if trace.blocks:
            trace.emit(RowFreed(request_id=row.request_id, row=hole, why=why))
        if last is not row:
            self.rows[hole] = last
            last.row = hole
            if trace.blocks:
                trace.emit(RowMoved(request_id=last.request_id, from_row=len(self.rows), row=hole))


def make_scheduler(
    num_blocks: int, block_sizes: tuple[int, ...] = (4,), windows: tuple[int | None, ...] = (None,),
    enable_prefix_caching: bool = True, policy: object = None, **config: object,
) -> Scheduler:
    groups = tuple(
        KVCacheGroupSpec((f"layer{i}",), AttentionSpec(size, 1, 8, "float32", window))
        for i, (size, window) in enumerate(zip(block_sizes, windows, strict=True))
    )
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, **config}
    return Scheduler(SchedulerConfig(**settings), KVCacheConfig(num_blocks, groups), block_size=min(block_sizes),
                     enable_prefix_caching=enable_prefix_caching, policy=policy)


def make_request(scheduler: Scheduler, request_id: str, prompt: list[int], max_tokens: int = 8,
                 priority: int = 0, cache_salt: str | None = None, arrival_time: float = 0.0) -> Request:
    manager = scheduler.kv_cache_manager
    hasher = request_block_hasher(manager.block_size) if manager.enable_caching else None
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), priority=priority,
                   cache_salt=cache_salt, arrival_time=arrival_time, block_hasher=hasher)
