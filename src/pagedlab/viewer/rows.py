"""Which row a request has in either index design, from the scheduler's messages alone.

A trace records the rows of the runner it was made with, or none at all. The rules by which rows are
taken and given up need nothing but the messages, so that the page can show both designs beside each
other. A test holds these rows against those that both runners record of the same run.
"""

from __future__ import annotations

from pagedlab.trace.events import StepScheduled


def _ids(message: StepScheduled) -> list[str]:
    """New ones first, then those the worker knows: the order in which both runners seat them."""
    return [*(r.request_id for r in message.new), *(r.request_id for r in message.cached)]


class PersistentRows:
    """vllm/v1/worker/gpu_input_batch.py: rows without holes; batch row and state row are the same."""

    def __init__(self) -> None:
        self.requests: list[str | None] = []  # row -> request

    def apply(self, message: StepScheduled) -> list[str]:
        """Leave, sit down in the lowest hole, close what is left: row -> request.

        Rows [a, b, c], b finishes and nobody comes: c moves to row 1.
        """
        scheduled, resumed = message.num_scheduled_tokens, {c.request_id for c in message.cached if c.resumed}
        rows = [r if r in scheduled and r not in resumed else None for r in self.requests]
        seated = set(rows)
        for request_id in (r for r in _ids(message) if r not in seated):
            row = rows.index(None) if None in rows else len(rows)
            rows[row : row + 1] = [request_id]
        while None in rows:
            last = rows.pop()
            if last is not None:
                rows[rows.index(None)] = last
        self.requests = rows
        return [r for r in rows if r is not None]


class StateRows:
    """vllm/v1/worker/gpu/states.py: a row for as long as a request runs, from a stack of free ones."""

    def __init__(self, max_num_seqs: int) -> None:
        self.free = list(range(max_num_seqs))  # 8 seats give row 7 first, then 6
        self.row_of: dict[str, int] = {}

    def apply(self, message: StepScheduled) -> list[str]:
        """Give rows up and take them; returns the batch order: fewest new tokens first, ties as scheduled."""
        for request_id in (*message.preempted, *message.finished_req_ids):
            if request_id in self.row_of:
                self.free.append(self.row_of.pop(request_id))
        for request_id in _ids(message):
            if request_id not in self.row_of:
                self.row_of[request_id] = self.free.pop()
        counts = message.num_scheduled_tokens
        return sorted(counts, key=counts.__getitem__)


class BothDesigns:
    """Follows the messages and writes each step's rows as numbers for the page."""

    def __init__(self, max_num_seqs: int) -> None:
        self.persistent = PersistentRows()
        self.state_table = StateRows(max_num_seqs)

    def apply(self, message: StepScheduled, index_of: dict[str, int]) -> list[int]:
        """How many requests; (request, tokens, state row) of each, by persistent row; then the other batch order."""
        by_row, by_size = self.persistent.apply(message), self.state_table.apply(message)
        numbers = [len(by_row)]
        for request_id in by_row:
            state_row = self.state_table.row_of[request_id]
            numbers += (index_of[request_id], message.num_scheduled_tokens[request_id], state_row)
        row_of = {request_id: row for row, request_id in enumerate(by_row)}
        return numbers + [row_of[request_id] for request_id in by_size]
