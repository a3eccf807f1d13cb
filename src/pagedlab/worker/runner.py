"""GPUModelRunner: turns the scheduler's message into one forward pass and its samples.

``execute_model`` is the worker's whole step: follow the message (``_update_states``), lay the batch
out flat (``_prepare_inputs``), run the model on it, sample. The two designs of this engine differ
only in the first two methods (vllm/v1/worker/gpu_model_runner.py, vllm/v1/worker/gpu/model_runner.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from pagedlab.config import EngineConfig
from pagedlab.kernels.jit import How, PointerTable
from pagedlab.kernels.slot_mapping import PAD_SLOT_ID, compute_slot_mapping
from pagedlab.kv.specs import KVCacheConfig
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.output import BlockIds, CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from pagedlab.trace.events import RowState
from pagedlab.trace.tracer import trace
from pagedlab.worker.batch_events import batch_events
from pagedlab.worker.flat_indices import FlatIndices
from pagedlab.worker.input_batch import InputBatch


@dataclass(slots=True)
class CachedRequestState:
    """What the worker remembers of a request until it is reported finished, row or no row.

    A copy that follows the scheduler only through SchedulerOutput; written only by the runner.
    Sliding-window groups keep every id here: the scheduler replaces out-of-window blocks by the null
    block without telling, and nobody reads them any more.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: BlockIds                    # per group
    num_computed_tokens: int               # before the current step
    generator: torch.Generator | None      # seeded requests only; lives through preemption
    output_token_ids: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0           # prompt positions reported so far

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt plus output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids_from(self, start: int) -> list[int]:
        """Known tokens from position ``start`` on."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt :]
        return self.prompt_token_ids[start:] + self.output_token_ids


class GPUModelRunner(ABC):
    """The name is vLLM's; the device may be a CPU."""

    has_state_rows: ClassVar[bool]  # rows that differ from batch order: idx_mapping says something

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: torch.device,
        index_kernels: How,           # how the slot mapping and the gather run
    ) -> None:
        self.config = config
        self.device = device
        self.index_kernels = index_kernels
        self.requests: dict[str, CachedRequestState] = {}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Make the index arrays for these groups; each design adds its tables."""
        self.max_model_len = max_model_len
        sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self.block_sizes = torch.tensor(sizes, dtype=torch.int32, device=self.device)  # [G]
        self.max_num_blocks = [-(-max_model_len // size) for size in sizes]            # G × K
        self.slot_mappings = torch.full(                                               # [G, max_num_batched_tokens]
            (len(sizes), self.config.max_num_batched_tokens), PAD_SLOT_ID, dtype=torch.int64, device=self.device
        )

    # -------------------------------------------------------------- what the two designs fill in

    @abstractmethod
    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Bring requests, rows and block tables in line with the message."""

    @abstractmethod
    def _prepare_inputs(self, scheduler_output: SchedulerOutput) -> InputBatch:
        """Lay the scheduled tokens of all rows out flat."""

    @abstractmethod
    def row_states(self) -> list[RowState]:
        """The rows in use, for snapshots."""

    # -------------------------------------------------------------- what they share

    def _add_request(self, new: NewRequestData) -> CachedRequestState:
        """Remember a request seen for the first time."""
        seed = new.sampling_params.seed
        request = self.requests[new.req_id] = CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            sampling_params=new.sampling_params,
            block_ids=tuple(list(ids) for ids in new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
            generator=None if seed is None else torch.Generator(self.device).manual_seed(seed),
        )
        return request

    def _update_request(self, cached: CachedRequestData, index: int) -> tuple[CachedRequestState, BlockIds | None]:
        """Apply one entry of the cached list; returns the new ids, for the row's table."""
        request = self.requests[cached.req_ids[index]]
        new_block_ids = cached.new_block_ids[index]
        request.num_computed_tokens = cached.num_computed_tokens[index]
        if request.req_id in cached.resumed_req_ids:  # everything was given back: a whole new table
            assert new_block_ids is not None
            request.block_ids = tuple(list(ids) for ids in new_block_ids)
        elif new_block_ids is not None:
            for block_ids, new_ids in zip(request.block_ids, new_block_ids, strict=True):
                block_ids.extend(new_ids)
        return request, new_block_ids

    def keep_tokens(self, sampled_token_ids: dict[str, list[int]]) -> None:
        """Remember what was sampled; the next ``_update_states`` writes it into the row."""
        for req_id, token_ids in sampled_token_ids.items():
            self.requests[req_id].output_token_ids += token_ids

    def _input_batch(
        self,
        requests: Sequence[CachedRequestState],  # batch_idx -> request
        num_scheduled_tokens: list[int],         # [R]
        idx_mapping: Tensor,                     # [R] int32   batch_idx -> req_state_idx
        flat: FlatIndices,
        input_ids: Tensor,                       # [T] int64
        tables: PointerTable,                    # G × [R or more, K_g] int32   batch_idx -> block ids
        num_blocks: Sequence[Tensor],            # G × [R] int32
    ) -> InputBatch:
        """Map the slots and freeze the step's arrays."""
        slot_mappings = compute_slot_mapping(
            tables, num_blocks, flat.query_start_loc, flat.positions, self.block_sizes, self.slot_mappings,
            self.index_kernels,
        )  # fmt: skip
        num_reqs = len(requests)
        seq_lens = [r.num_computed_tokens + n for r, n in zip(requests, num_scheduled_tokens, strict=True)]
        batch = InputBatch(
            req_ids=[r.req_id for r in requests],
            num_reqs=num_reqs,
            num_tokens=len(input_ids),
            num_scheduled_tokens=num_scheduled_tokens,
            idx_mapping=idx_mapping,
            req_indices=flat.req_indices,
            input_ids=input_ids,
            positions=flat.positions,
            query_start_loc=flat.query_start_loc,
            seq_lens=flat.seq_lens,
            logits_indices=flat.logits_indices,
            block_tables=tuple(table[:num_reqs] for table in tables.tables),
            slot_mappings=slot_mappings,
            sample_is_discarded=[n < r.num_tokens for r, n in zip(requests, seq_lens, strict=True)],
            max_query_len=max(num_scheduled_tokens),
            max_seq_len=max(seq_lens),
        )
        if trace.tensors:
            for event in batch_events(
                batch, [n.tolist() for n in num_blocks], self.block_sizes.tolist(), self.index_kernels,
                with_idx_mapping=self.has_state_rows,
            ):  # fmt: skip
                trace.emit(event)
        return batch
