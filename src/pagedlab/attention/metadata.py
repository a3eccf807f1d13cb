"""What the runner hands to every attention backend (CommonAttentionMetadata in vllm/v1/attention/backend.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagedlab.trace.events import MetadataBuilt
from pagedlab.trace.tracer import trace
from pagedlab.worker.input_batch import InputBatch


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """One KV-cache group's view of the step: which queries there are and where their KV lies.

    Queries of row ``batch_idx`` are tokens query_start_loc[batch_idx] up to query_start_loc[batch_idx + 1];
    they are the last of that row's seq_lens[batch_idx] tokens. With query_start_loc [0, 1, 9] and
    seq_lens [32, 24], token 0 is position 31 of row 0 and tokens 1 to 8 are positions 16 to 23 of row 1.
    """

    group_id: int
    req_ids: list[str]           # [R]           for events only
    query_lens: list[int]        # [R]           new tokens of each row, on the host
    num_actual_tokens: int       # T without padding
    query_start_loc: Tensor      # [R + 1] int32
    seq_lens: Tensor             # [R] int32     tokens whose KV exists once this step has written its own
    max_query_len: int
    max_seq_len: int
    block_table: Tensor          # [R, K] int32  stale beyond a row's cdiv(seq_len, block_size) entries
    slot_mapping: Tensor         # [T] int64     -1 for padding

    @classmethod
    def from_input_batch(cls, batch: InputBatch, group_id: int) -> CommonAttentionMetadata:
        return cls(
            group_id=group_id,
            req_ids=batch.req_ids,
            query_lens=batch.num_scheduled_tokens,
            num_actual_tokens=batch.num_tokens,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            block_table=batch.block_tables[group_id],
            slot_mapping=batch.slot_mappings[group_id],
        )


def emit_metadata_built(common: CommonAttentionMetadata, backend: str, tensors: dict[str, Tensor]) -> None:
    """Every builder reports what it hands to its layers; called under the guard of ``tensors``."""
    if trace.tensors:
        trace.emit(
            MetadataBuilt(
                group=common.group_id,
                backend=backend,
                shapes={name: list(tensor.shape) for name, tensor in tensors.items()},
                num_actual_tokens=common.num_actual_tokens,
                max_query_len=common.max_query_len,
                max_seq_len=common.max_seq_len,
            )
        )
