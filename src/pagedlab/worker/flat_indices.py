"""The flat index arrays of one step: several requests' tokens laid end to end.

Both runners call these functions; what differs between them is where a row's tokens and blocks are
kept (vllm/v1/worker/gpu_model_runner.py, _prepare_inputs).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FlatIndices(NamedTuple):
    """R requests, T tokens."""

    req_indices: Tensor      # [T] int64      token -> batch_idx
    arange: Tensor           # [T] int64      0, 1, 2, … within each request
    positions: Tensor        # [T] int64      token -> place in its own request
    query_start_loc: Tensor  # [R + 1] int32  batch_idx -> first token
    seq_lens: Tensor         # [R] int32      computed + scheduled
    logits_indices: Tensor   # [R] int64      batch_idx -> its last token


def flatten_batch(
    num_scheduled_tokens: Tensor,  # [R] int32   new tokens of each row
    num_computed_tokens: Tensor,   # [R] int32   tokens whose keys and values are already written
    num_tokens: int,               # T, their sum; known to the host
) -> FlatIndices:
    """Lay the new tokens of all rows end to end.

    Counts [2, 5, 3] with nothing computed: ``req_indices`` [0, 0, 1, 1, 1, 1, 1, 2, 2, 2],
    ``positions`` [0, 1, 0, 1, 2, 3, 4, 0, 1, 2], ``query_start_loc`` [0, 2, 7, 10], ``seq_lens``
    [2, 5, 3], ``logits_indices`` [1, 6, 9]. With computed [3, 1, 6] only positions and lengths
    change: [3, 4, 1, 2, 3, 4, 5, 6, 7, 8] and [5, 6, 9].
    """
    device = num_scheduled_tokens.device
    num_reqs = len(num_scheduled_tokens)
    query_start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
    torch.cumsum(num_scheduled_tokens, 0, dtype=torch.int32, out=query_start_loc[1:])
    batch_idx = torch.arange(num_reqs, device=device)
    req_indices = batch_idx.repeat_interleave(num_scheduled_tokens, output_size=num_tokens)
    arange = torch.arange(num_tokens, device=device) - query_start_loc[req_indices]
    return FlatIndices(
        req_indices=req_indices,
        arange=arange,
        positions=num_computed_tokens[req_indices] + arange,
        query_start_loc=query_start_loc,
        seq_lens=num_computed_tokens + num_scheduled_tokens,
        logits_indices=query_start_loc[1:].long() - 1,
    )


def token_indices(
    rows: Tensor,        # [T] int64   token -> row of the token buffer
    positions: Tensor,   # [T] int64
    max_model_len: int,  # M, columns of the buffer
) -> Tensor:             # [T] int64   row · M + position, into the flattened [rows, M] token buffer
    """Where each token's id stands. Rows [0, 0, 1], positions [0, 1, 4], M = 6: [0, 1, 10]."""
    return rows * max_model_len + positions
