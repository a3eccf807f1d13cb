"""The request-state table: one fixed row per request (vllm/v1/worker/gpu/states.py)."""

from __future__ import annotations

import torch

from pagedlab.worker.requests import CachedRequestState
from pagedlab.worker.staged import StagedTensor


class RequestTable:
    """Owns the ``req_state_idx`` rows. A request keeps its row until it is finished or preempted.

    Rows never move, so a step in which nobody joins or leaves touches nothing but new tokens.
    Written only by StateTableRunner._update_states.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, device: torch.device) -> None:
        self.req_state_indices: dict[str, int] = {}        # request -> row
        self.free_rows = list(range(max_num_reqs))         # a stack: 8 seats give row 7 first, then 6
        self.num_tokens = [0] * max_num_reqs               # req_state_idx -> known tokens written so far
        self.token_ids = StagedTensor(max_num_reqs, max_model_len, device)       # known ids; stale beyond num_tokens
        self.num_computed_tokens = StagedTensor(max_num_reqs, 1, device)         # before this step

    def add_request(self, request: CachedRequestState) -> int:
        """Take a row, the one given back last first, and stage everything that is known."""
        row = self.free_rows.pop()
        self.req_state_indices[request.req_id] = row
        self.num_tokens[row] = 0
        self.update_request(row, request)
        return row

    def update_request(self, row: int, request: CachedRequestState) -> None:
        """Stage the tokens that became known since the last step, and the progress."""
        self.token_ids.stage(row, self.num_tokens[row], request.token_ids_from(self.num_tokens[row]))
        self.num_tokens[row] = request.num_tokens
        self.num_computed_tokens.stage(row, 0, [request.num_computed_tokens])

    def remove_request(self, req_id: str) -> int | None:
        """Give the row back; None if the request has none."""
        row = self.req_state_indices.pop(req_id, None)
        if row is not None:
            self.free_rows.append(row)
        return row

    def apply_staged_writes(self) -> int:
        """Returns the bytes that went to the device."""
        return self.token_ids.apply() + self.num_computed_tokens.apply()
