"""What paging replaced: one unbroken range of slots per request, reserved when it is admitted.

The engines before vLLM had to know where a request's keys and values would end. Orca's authors did
not publish theirs; the PagedAttention paper (SOSP 2023, section 6.1) models three, all with a buddy
allocator: reserve the model's maximum (``max``), over-reserve the output by less than two (``pow2``),
or know the output's length (``oracle``), which nobody can. Scheduling is ours in all of them: running
requests first, then the queue in order, the same budget and seats; nobody is ever preempted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagedlab.errors import UserError
from pagedlab.simulate.memory import MemoryBySteps
from pagedlab.simulate.paged import Follow, Simulation
from pagedlab.simulate.workload import SimulatedRequest

RESERVATIONS = ("max", "pow2", "oracle")


class Allocator(Protocol):
    """Hands out ranges of slots."""

    num_free: int

    def size_of(self, num_slots: int) -> int:
        """Slots that a request for so many takes."""

    def allocate(self, num_slots: int) -> int | None:
        """First slot of a range, None if no hole is long enough."""

    def free(self, start: int) -> None: ...


class HoleList:
    """First fit (lowest hole that is long enough) or best fit (shortest such hole, lowest of equals)."""

    def __init__(self, num_slots: int, best: bool) -> None:
        self.num_free = num_slots
        self._best = best
        self._holes = [(0, num_slots)]    # (start, length), by start; no two touch
        self._length: dict[int, int] = {}  # start of an allotted range -> its length

    def size_of(self, num_slots: int) -> int:
        return num_slots

    def allocate(self, num_slots: int) -> int | None:
        """[(0, 4), (10, 3)] and 3 slots: first fit gives 0, best fit 10."""
        fitting = [i for i, (_, length) in enumerate(self._holes) if length >= num_slots]
        if not fitting:
            return None
        i = min(fitting, key=lambda i: self._holes[i][1]) if self._best else fitting[0]
        start, length = self._holes[i]
        self._holes[i : i + 1] = [(start + num_slots, length - num_slots)] if length > num_slots else []
        self._length[start] = num_slots
        self.num_free -= num_slots
        return start

    def free(self, start: int) -> None:
        """Give a range back and join it with its neighbours."""
        length = self._length.pop(start)
        self.num_free += length
        i = bisect_left(self._holes, (start, 0))
        if i < len(self._holes) and start + length == self._holes[i][0]:
            length += self._holes.pop(i)[1]
        if i > 0 and sum(self._holes[i - 1]) == start:
            start, before = self._holes.pop(i - 1)
            length += before
            i -= 1
        self._holes.insert(i, (start, length))


class Buddies:
    """Ranges of 2**k slots at multiples of 2**k; a freed one joins its twin if that is free too.

    15,728 slots are at first the ranges 8192, 4096, 2048, 1024, 256, 64, 32 and 16 long.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]  # order -> starts
        self._order: dict[int, int] = {}  # start of an allotted range -> its order
        start = 0
        for order in range(num_slots.bit_length() - 1, -1, -1):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def size_of(self, num_slots: int) -> int:
        """The next power of two: 25 takes 32."""
        return 1 << (num_slots - 1).bit_length()

    def allocate(self, num_slots: int) -> int | None:
        """Split the smallest range that is long enough, lowest first, until it is just long enough."""
        wanted = (num_slots - 1).bit_length()
        order = next((k for k in range(wanted, len(self._free)) if self._free[k]), None)
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        self._order[start] = wanted
        self.num_free -= 1 << wanted
        return start

    def free(self, start: int) -> None:
        order = self._order.pop(start)
        self.num_free += 1 << order
        while order + 1 < len(self._free) and (twin := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(twin)
            start = min(start, twin)
            order += 1
        self._free[order].add(start)


def make_allocator(fit: str, num_slots: int) -> Allocator:
    return Buddies(num_slots) if fit == "buddy" else HoleList(num_slots, best=fit == "best")


def num_reserved(request: SimulatedRequest, reservation: str, max_model_len: int) -> int:
    """Slots set aside at admission: a prompt of 100 and an output of 25 take 2,048, 132 or 125."""
    if reservation == "max":
        return max_model_len
    if reservation == "pow2":
        output = 1 << (request.num_output_tokens - 1).bit_length()
        return min(request.num_prompt_tokens + output, max_model_len)
    return request.num_prompt_tokens + request.num_output_tokens


@dataclass(slots=True)
class _Running:
    request: SimulatedRequest
    start: int           # first slot of its range
    size: int            # slots of its range
    computed: int = 0    # tokens whose KV is there
    known: int = 0       # prompt, and output so far

    @property
    def final(self) -> int:
        """Tokens whose KV it will have in the end; the last one sampled is never computed."""
        return self.request.num_prompt_tokens + self.request.num_output_tokens - 1


def simulate_contiguous(
    requests: Sequence[SimulatedRequest],
    config: Mapping[str, Any],
    reservation: str,
    fit: str,
    follow: Follow = lambda ended: None,
) -> Simulation:
    """The workload on one of the older allocators, with as many slots as the paged pool has.

    Raises:
        UserError: one reservation is larger than all memory.
    """
    run = _Run(requests, config, reservation, fit)
    now = 0
    while run.arriving or run.waiting or run.running:
        if not run.waiting and not run.running and run.arriving[0].arrival_step > now:
            run.result.num_idle_steps += run.arriving[0].arrival_step - now
            now = run.arriving[0].arrival_step
        run.step(now)
        now += 1
        if now % 64 == 0:
            follow(len(run.result.finish_reasons) + len(run.result.refused))
    follow(len(requests))
    return run.result


class _Run:
    """Queues, allocator and books of one run."""

    def __init__(
        self, requests: Sequence[SimulatedRequest], config: Mapping[str, Any], reservation: str, fit: str
    ) -> None:
        num_slots = (config["num_blocks"] - 1) * config["block_size"]
        self.max_model_len = config.get("max_model_len", 2048)
        self.allocator = make_allocator(fit, num_slots)
        if reservation == "max" and self.allocator.size_of(self.max_model_len) > num_slots:
            raise UserError(
                f"reserving the maximum takes {self.allocator.size_of(self.max_model_len):,} slots a request and there "
                f"are {num_slots:,}: raise num_blocks or lower max_model_len."
            )
        self.reservation = reservation
        self.budget = config.get("max_num_batched_tokens", 2048)
        self.threshold = config.get("long_prefill_token_threshold", 0) or self.max_model_len
        self.chunked = config.get("enable_chunked_prefill", True)
        self.max_num_seqs = config.get("max_num_seqs", 256)
        self.arriving = deque(sorted(requests, key=lambda r: r.arrival_step))
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[_Running] = []
        self.result = Simulation(MemoryBySteps(num_slots))

    def step(self, now: int) -> None:
        while self.arriving and self.arriving[0].arrival_step <= now:
            self._let_in(self.arriving.popleft())
        scheduled, blocked = self._schedule(now)
        self._count(blocked)
        for row in scheduled:
            if row.computed == row.known:  # caught up: one token sampled
                row.known += 1
                request_id, so_far = row.request.request_id, now - row.request.arrival_step + 1
                self.result.first_token_steps.setdefault(request_id, so_far)
                if row.known > row.final:
                    self.allocator.free(row.start)
                    self.result.finish_reasons[request_id] = "length"
                    self.result.end_steps[request_id] = so_far
        self.running = [row for row in self.running if row.known <= row.final]

    def _let_in(self, request: SimulatedRequest) -> None:
        room = self.max_model_len - request.num_prompt_tokens
        size = self.allocator.size_of(num_reserved(request, self.reservation, self.max_model_len))
        if room < 1 or size > self._longest_range():
            self.result.refused[request.request_id] = f"request {request.request_id} can never fit."
            return
        if request.num_output_tokens > room:  # ends at max_model_len
            request = SimulatedRequest(request.request_id, request.arrival_step, request.num_prompt_tokens, room)
        self.waiting.append(request)

    def _longest_range(self) -> int:
        slots = self.result.memory.num_slots
        return 1 << (slots.bit_length() - 1) if isinstance(self.allocator, Buddies) else slots

    def _schedule(self, now: int) -> tuple[list[_Running], int]:
        """Rows that got tokens, and how many slots the head of the queue could not get (0: it was not refused)."""
        budget = self.budget
        scheduled: list[_Running] = []
        for row in self.running:
            budget -= self._grant(row, budget, scheduled)
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            head = self.waiting[0]
            wanted = min(head.num_prompt_tokens, self.threshold)
            if wanted > budget and not self.chunked:
                break
            num_slots = num_reserved(head, self.reservation, self.max_model_len)
            start = self.allocator.allocate(num_slots)
            if start is None:
                return scheduled, self.allocator.size_of(num_slots)
            row = _Running(head, start, self.allocator.size_of(num_slots), known=head.num_prompt_tokens)
            self.waiting.popleft()
            self.running.append(row)
            self.result.queue_steps[head.request_id] = now - head.arrival_step
            self.result.num_prompt_tokens += head.num_prompt_tokens
            budget -= self._grant(row, budget, scheduled)
        return scheduled, 0

    def _grant(self, row: _Running, budget: int, scheduled: list[_Running]) -> int:
        num_tokens = min(row.known - row.computed, self.threshold, budget)
        if num_tokens:
            row.computed += num_tokens
            self.result.num_scheduled_tokens += num_tokens
            scheduled.append(row)
        return num_tokens

    def _count(self, blocked: int) -> None:
        computed = sum(row.computed for row in self.running)
        self.result.memory.add(
            used=self.result.memory.num_slots - self.allocator.num_free,
            token_states=computed,
            reserved=sum(row.final for row in self.running) - computed,
            scattered=0 < blocked <= self.allocator.num_free,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
        )
