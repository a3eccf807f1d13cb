"""Requests that wait, in the order a policy wants (vllm/v1/core/sched/request_queue.py)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pagedlab.errors import UserError
from pagedlab.request import Request

Entry = tuple[tuple[Any, ...], int, Request]


class WaitingQueue:
    """A heap of (policy key, sequence number): one structure for every policy.

    Adding counts the sequence number up, putting back in front counts it down, so with equal keys
    the order is that of a plain queue.
    """

    def __init__(self, key: Callable[[Request], tuple[Any, ...]]) -> None:
        self._key = key
        self._heap: list[Entry] = []
        self._last, self._first = 0, 0  # sequence numbers given out at either end
        self.latest_key: tuple[Any, ...] = ()  # (*policy key, sequence number) of the latest entry, for the trace

    def add(self, request: Request) -> None:
        """Behind all requests with the same key."""
        self._last += 1
        self._push(request, self._last)

    def prepend(self, request: Request) -> None:
        """In front of all requests with the same key."""
        self._first -= 1
        self._push(request, self._first)

    def _push(self, request: Request, sequence: int) -> None:
        key = self._key(request)
        if not isinstance(key, tuple):
            what = f"the policy's key of {request.request_id} is {key!r}"
            raise UserError(f"{what}: return a tuple, ({key!r},) for example.")
        self.latest_key = (*key, sequence)
        heapq.heappush(self._heap, (key, sequence, request))

    def peek(self) -> Request:
        return self._heap[0][2]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def second(self) -> Request:
        """The one behind the head, in constant time."""
        return min(self._heap[1:3])[2]

    def remove(self, requests: Iterable[Request]) -> None:
        gone = {request.request_id for request in requests}
        self._heap = [entry for entry in self._heap if entry[2].request_id not in gone]
        heapq.heapify(self._heap)

    def keys(self) -> dict[str, list[Any]]:
        """request_id -> (*policy key, sequence number), in serving order."""
        return {request.request_id: [*key, sequence] for key, sequence, request in sorted(self._heap)}

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        """In serving order."""
        return (entry[2] for entry in sorted(self._heap))
