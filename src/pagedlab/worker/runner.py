"""GPUModelRunner: turns the scheduler's message into one forward pass and its samples.

``execute_model`` is the worker's whole step: follow the message (``_update_states``), lay the batch
out flat (``_prepare_inputs``), run the model on it, sample. The two designs of this engine differ
only in the first two methods (vllm/v1/worker/gpu_model_runner.py, vllm/v1/worker/gpu/model_runner.py).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pagedlab.attention.backends import AttentionBackend
from pagedlab.attention.forward_context import set_forward_context
from pagedlab.attention.metadata import CommonAttentionMetadata
from pagedlab.config import EngineConfig
from pagedlab.kernels.jit import How, PointerTable
from pagedlab.kernels.slot_mapping import PAD_SLOT_ID, compute_slot_mapping
from pagedlab.kv.specs import BlockIds, KVCacheConfig
from pagedlab.models.qwen3 import Qwen3ForCausalLM
from pagedlab.sched.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput, TopLogprobs
from pagedlab.trace.events import RowState
from pagedlab.trace.tracer import trace
from pagedlab.worker.batch_events import batch_events
from pagedlab.worker.cuda_graphs import DecodeGraphs
from pagedlab.worker.flat_indices import FlatIndices
from pagedlab.worker.input_batch import InputBatch
from pagedlab.worker.kv_memory import allocate_kv_cache
from pagedlab.worker.requests import CachedRequestState
from pagedlab.worker.sampler import Sampler, top_logprobs

LOGITS_AT_ONCE = 256  # prompt positions whose logits are in memory together


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
        self.decode_graphs: DecodeGraphs | None = None
        self.stage_ns: dict[str, int] = {}  # host time of the latest step's parts

    def load_model(self, model: Qwen3ForCausalLM, backend: AttentionBackend, sampler: Sampler) -> None:
        """Take the parts that compute; without them a runner still maps messages to indices."""
        self.model, self.backend, self.sampler = model, backend, sampler

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Make the index arrays for these groups; each design adds its tables."""
        self.groups = kv_cache_config.kv_cache_groups
        self.max_model_len = max_model_len
        sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self.block_sizes = torch.tensor(sizes, dtype=torch.int32, device=self.device)  # [G]
        self.max_num_blocks = [-(-max_model_len // size) for size in sizes]            # G × K
        self.slot_mappings = torch.full(                                               # [G, max_num_batched_tokens]
            (len(sizes), self.config.max_num_batched_tokens), PAD_SLOT_ID, dtype=torch.int64, device=self.device
        )
        if kv_cache_config.kv_cache_tensors:
            self.metadata_builders = [
                self.backend.make_builder(group_id, group.kv_cache_spec) for group_id, group in enumerate(self.groups)
            ]
            allocate_kv_cache(kv_cache_config, self.model.attention_layers, self.device)
            if self._can_use_graphs():
                self.decode_graphs = DecodeGraphs(
                    self.model, self.groups, self.metadata_builders, max_num_seqs=self.config.max_num_seqs,
                    max_model_len=max_model_len, max_num_blocks=self.max_num_blocks, device=self.device,
                )  # fmt: skip

    def _can_use_graphs(self) -> bool:
        """A mixture asks the device how many tokens each expert got, which a graph cannot."""
        on_gpu = self.device.type == "cuda" and self.backend.name == "triton"
        return on_gpu and not self.config.enforce_eager and not self.model.config.num_experts

    # -------------------------------------------------------------- one step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; one without tokens only clears rows."""
        start = time.perf_counter_ns()
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return ModelRunnerOutput({})
        batch = self._prepare_inputs(scheduler_output)
        prepared = time.perf_counter_ns()
        hidden = self._forward(batch)                                     # [T or more, hidden_size]
        logits = self.model.compute_logits(hidden[batch.logits_indices])  # [R, vocab]
        computed = time.perf_counter_ns()
        requests = [self.requests[req_id] for req_id in batch.req_ids]
        sampled, logprobs = self.sampler.sample(logits, requests, batch.sample_is_discarded)
        kept = {
            request.req_id: [] if is_discarded else [token_id]
            for request, token_id, is_discarded in zip(requests, sampled, batch.sample_is_discarded, strict=True)
        }
        self.keep_tokens(kept)
        output = ModelRunnerOutput(kept, logprobs, self._prompt_logprobs(batch, hidden))
        self.stage_ns = {
            "prepare_inputs": prepared - start,
            "forward": computed - prepared,
            "sample": time.perf_counter_ns() - computed,
        }
        return output

    def _forward(self, batch: InputBatch) -> Tensor:
        """The model on the flat batch: as a CUDA graph where that is possible, else layer by layer.

        Kernels report what they do only when they are launched, so level ``kernels`` runs eagerly.
        """
        if self.decode_graphs is not None and not trace.kernels:
            hidden = self.decode_graphs.run(batch)
            if hidden is not None:
                return hidden
        metadata: dict[str, Any] = {}  # the forward context: every layer gets what its group's builder made
        for group_id, (group, builder) in enumerate(zip(self.groups, self.metadata_builders, strict=True)):
            built = builder.build(CommonAttentionMetadata.from_input_batch(batch, group_id))
            metadata.update(dict.fromkeys(group.layer_names, built))
        with set_forward_context(metadata):
            hidden = self.model(batch.input_ids, batch.positions)
        return hidden

    def _prompt_logprobs(self, batch: InputBatch, hidden: Tensor) -> dict[str, list[TopLogprobs]]:
        """For requests that want it: the logits at position i judge prompt token i + 1, each once.

        A prompt computed again after preemption is not reported again.
        """
        reported = {}
        first_token = 0  # of this row in the flat batch
        for req_id, num_new_tokens in zip(batch.req_ids, batch.num_scheduled_tokens, strict=True):
            request = self.requests[req_id]
            start, count = request.num_computed_tokens, request.sampling_params.prompt_logprobs
            begin = max(start, request.num_prompt_logprobs)
            end = min(start + num_new_tokens, len(request.prompt_token_ids) - 1)
            if count is not None and begin < end:
                judged = torch.tensor(request.prompt_token_ids[begin + 1 : end + 1], device=self.device)
                rows = hidden[first_token + begin - start : first_token + end - start]
                reported[req_id] = [
                    entry
                    for part, token_ids in zip(rows.split(LOGITS_AT_ONCE), judged.split(LOGITS_AT_ONCE), strict=True)
                    for entry in top_logprobs(self.model.compute_logits(part), token_ids, [count] * len(part))
                ]
                request.num_prompt_logprobs = end
            first_token += num_new_tokens
        return reported

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
