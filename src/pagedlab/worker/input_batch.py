"""What both runners hand to the model: the flat batch of one step, built once, then read only.

Two index spaces meet here: ``batch_idx`` counts the rows of this step's batch, ``req_state_idx``
the rows a request keeps across steps. For the persistent batch they are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class InputBatch:
    """Flat arrays of one forward pass; T tokens of R requests, G KV-cache groups.

    There is no padding here: decodes that replay a CUDA graph are copied into padded buffers
    (worker/cuda_graphs.py), where padding has slot -1 and seq_len 0.
    """

    req_ids: list[str]                     # [R]     batch_idx -> request
    num_reqs: int                          # R
    num_tokens: int                        # T
    num_scheduled_tokens: list[int]        # [R]     batch_idx -> new tokens
    idx_mapping: Tensor                    # [R] int32      batch_idx -> req_state_idx
    req_indices: Tensor                    # [T] int64      token -> batch_idx
    input_ids: Tensor                      # [T] int64      token -> id
    positions: Tensor                      # [T] int64      token -> place in its own request
    query_start_loc: Tensor                # [R + 1] int32  batch_idx -> first token
    seq_lens: Tensor                       # [R] int32      batch_idx -> computed + scheduled
    logits_indices: Tensor                 # [R] int64      batch_idx -> its last token
    block_tables: tuple[Tensor, ...]       # G × [R, K_g] int32   batch_idx -> block ids, stale beyond the valid part
    slot_mappings: tuple[Tensor, ...]      # G × [T] int64        token -> slot
    sample_is_discarded: list[bool]        # [R]     prompt or recomputation not complete
    max_query_len: int                     # most new tokens of one request
    max_seq_len: int
