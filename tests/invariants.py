"""What must hold after every step of any engine, whatever its policy, groups and pool.

Three looks at one engine, each independent of the others:

* the live objects (`check_live`): links, owners, hashes recomputed from tokens, queues, tables;
* the message to the worker (`WorkerCopy`): a copy of the tables that follows the messages only, the
  slots that the step's tokens get, and a shadow of the KV memory that remembers in each slot which
  tokens it was computed from, so that reading anything but one's own prefix is noticed;
* the trace (`Watched.append`): the fold after each event, the checks behind `pagedlab check`, and
  one exact reason for each unfinished request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from math import lcm
from typing import Any

from live import walk_live
from pagedlab.engine.core import EngineCore
from pagedlab.kv.block import KVCacheBlock
from pagedlab.kv.block_pool import BlockPool
from pagedlab.request import Request, RequestStatus
from pagedlab.sched.output import ModelRunnerOutput, SchedulerOutput
from pagedlab.sched.policy import FirstComeFirstServed
from pagedlab.sched.scheduler import Scheduler
from pagedlab.trace.check import EngineCheck, _Broken
from pagedlab.trace.events import (
    EngineSnapshot,
    Event,
    PrefixMatched,
    QueueNotReached,
    RequestConsidered,
    RequestPreempted,
    RowState,
    TraceHeader,
)
from pagedlab.trace.state import Fold, same
from pagedlab.trace.tracer import trace
from truth import Truth, Untrue


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


def need(condition: object, invariant: str, message: str) -> None:
    if not condition:
        raise Broken(invariant, message)


# ------------------------------------------------------------------ the live objects


def check_pool(pool: BlockPool) -> None:
    """Counts, links and hashes agree."""
    free = list(pool.free_block_queue)
    assert len(free) == pool.num_free_blocks, "the count disagrees with a walk of the free queue"
    assert len({b.block_id for b in free}) == len(free), "a block is twice in the free queue"
    for block in pool.blocks[1:]:
        assert (block.ref_cnt == 0) == (block.prev_free_block is not None), f"{block} is free and in use, or lost"
        if block.block_hash is not None:
            holders = pool._cached[block.group_id].get(block.block_hash, {})
            assert holders.get(block.block_id) is block, f"{block} is not found under its hash"
    assert pool.null_block.ref_cnt == 0 and pool.null_block.block_hash is None, "the null block was used"
    assert sum(len(h) for c in pool._cached for h in c.values()) == sum(
        b.block_hash is not None for b in pool.blocks
    ), "the map holds a block without a hash"


def check_live(scheduler: Scheduler) -> None:
    """Everything that needs no memory of earlier steps."""
    check_free_queue(scheduler)
    check_owners(scheduler)
    check_hashes(scheduler)
    check_queues(scheduler)
    check_tables(scheduler)


def check_free_queue(scheduler: Scheduler) -> None:
    """Links agree in both directions and with the count; free and used blocks are the whole pool."""
    pool = scheduler.kv_cache_manager.block_pool
    queue = pool.free_block_queue
    forward, block = [], queue._head.next_free_block
    while block is not queue._tail:
        need(block is not None, "free_queue_links", "a walk from the front ends before the tail")
        need(len(forward) <= pool.num_blocks, "free_queue_links", "a walk from the front never ends")
        forward.append(block)
        block = block.next_free_block
    backward, block = [], queue._tail.prev_free_block
    while block is not queue._head:
        need(block is not None, "free_queue_links", "a walk from the back ends before the head")
        need(len(backward) <= pool.num_blocks, "free_queue_links", "a walk from the back never ends")
        backward.append(block)
        block = block.prev_free_block
    need(forward == backward[::-1], "free_queue_links", "the walks from either end differ")
    need(len(forward) == queue.num_free_blocks, "free_queue_count",
         f"{queue.num_free_blocks} blocks are counted, a walk finds {len(forward)}")
    need(pool.null_block not in forward, "null_block", "the null block is free")
    free = {b.block_id for b in forward}
    used = {b.block_id for b in pool.blocks if b.ref_cnt > 0}
    need(not free & used, "conservation", f"{free & used} are free and in use")
    need(len(free) == len(forward), "conservation", "a block is free twice")
    missing = set(range(1, pool.num_blocks)) - free - used
    need(not missing, "conservation", f"{missing} are neither free nor in use")
    need(all(b.ref_cnt >= 0 for b in pool.blocks), "ref_counts", "a reference count is negative")


def owners(scheduler: Scheduler) -> Iterator[tuple[KVCacheBlock, str, int, int]]:
    """(block, request, group, logical block) of every place in every table, null blocks left out."""
    for group in scheduler.kv_cache_manager.groups:
        for request_id, table in group.tables.items():
            for logical_block, block in enumerate(table):
                if not block.is_null:
                    yield block, request_id, group.group_id, logical_block


def check_owners(scheduler: Scheduler) -> None:
    """Reference counts are the number of tables; what is shared is shared by its hash, at the same place."""
    pool = scheduler.kv_cache_manager.block_pool
    places: dict[int, list[tuple[str, int, int]]] = {}
    for block, request_id, group, logical_block in owners(scheduler):
        if pool.blocks[block.block_id] is not block:
            raise Broken("tables", f"{block} is not the pool's")
        places.setdefault(block.block_id, []).append((request_id, group, logical_block))
    for block in pool.blocks[1:]:
        held_by = places.get(block.block_id, ())
        if block.ref_cnt != len(held_by):
            raise Broken("ref_counts", f"{block} is held by {held_by}")
        if len(held_by) > 1:
            need(block.block_hash is not None, "sharing", f"{block} has no hash and is held by {held_by}")
            need(len({(g, i) for _, g, i in held_by}) == 1, "sharing", f"{block} is held at different places {held_by}")
            need(len({r for r, _, _ in held_by}) == len(held_by), "sharing", f"{block} is twice in one table")
    need(pool.null_block.ref_cnt == 0 and pool.null_block.block_hash is None, "null_block", "the null block was used")


def check_hashes(scheduler: Scheduler) -> None:
    """The map and the blocks agree; a held block's hash is that of its owner's tokens, computed anew."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    in_map: set[int] = set()
    for group_id, cached in enumerate(pool._cached):
        for block_hash, holders in cached.items():
            need(holders, "cache_map", "a hash has no block")
            for block_id, block in holders.items():
                if pool.blocks[block_id] is not block or block_id in in_map:
                    raise Broken("cache_map", f"{block} is entered as {block_id}, or twice")
                in_map.add(block_id)
                if (block.block_hash, block.group_id) != (block_hash, group_id):
                    raise Broken("cache_map", f"{block} is entered under a hash that is not its own")
    hashed = {block.block_id for block in pool.blocks if block.block_hash is not None}
    need(in_map == hashed, "cache_map", f"blocks {in_map} are in the map, {hashed} have a hash")
    if not manager.enable_caching:
        need(not hashed, "hashes", "a block is cached although caching is off")
        return
    right = {request_id: hashes_anew(r, manager.block_size) for request_id, r in scheduler.requests.items()}
    for block, request_id, group_id, logical_block in owners(scheduler):
        if block.block_hash is None:
            continue
        last = (logical_block + 1) * manager.groups[group_id].block_size // manager.block_size - 1
        if last >= len(right[request_id]):
            raise Broken("hashes", f"{block} is cached and not full")
        if block.block_hash[-32:] != right[request_id][last]:
            raise Broken("hashes", f"{block} does not have the hash of block {logical_block} of {request_id}")


def hashes_anew(request: Request, block_size: int) -> list[bytes]:
    """The hashes of the blocks that a request's tokens fill, without the engine's own code."""
    hashes, parent = [], bytes(32)
    for first in range(0, request.num_tokens - block_size + 1, block_size):
        salt = request.cache_salt if first == 0 else None
        parent = _hash_anew(parent, tuple(request.all_token_ids[first : first + block_size]), salt)
        hashes.append(parent)
    return hashes


@lru_cache(4096)
def _hash_anew(parent: bytes, tokens: tuple[int, ...], salt: str | None) -> bytes:
    extra = b"" if salt is None else b"\x00cache_salt\x00" + salt.encode()
    return sha256(parent + b"".join(t.to_bytes(8, "little", signed=True) for t in tokens) + extra).digest()


def check_queues(scheduler: Scheduler) -> None:
    """Each unfinished request is in one queue, with the status of that queue, in the policy's order."""
    waiting, running = list(scheduler.waiting), scheduler.running
    ids = [r.request_id for r in (*running, *waiting)]
    need(len(ids) == len(set(ids)), "queues", f"a request is in two places: {ids}")
    need(set(ids) == set(scheduler.requests), "queues", "a request is lost, or finished and still queued")
    need(all(r.status is RequestStatus.RUNNING for r in running), "queues", "who runs has another status")
    need(all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting), "queues",
         "who waits has another status")
    need(len(running) <= scheduler.config.max_num_seqs, "seats", f"{len(running)} run")
    keys = [scheduler.policy.key(r) for r in waiting]
    need(keys == sorted(keys), "order", "who waits is not in the policy's order")
    for request in scheduler.requests.values():
        if not 0 <= request.num_computed_tokens <= request.num_tokens:
            raise Broken("progress", f"{request.request_id} has computed {request.num_computed_tokens} of "
                                     f"{request.num_tokens} tokens")
    for request in waiting:
        need(request.num_computed_tokens == 0, "progress", f"{request.request_id} waits with computed tokens")


def check_tables(scheduler: Scheduler) -> None:
    """A table has exactly the blocks that the computed tokens need; null blocks only out of sight."""
    running = {r.request_id for r in scheduler.running}
    for group in scheduler.kv_cache_manager.groups:
        need(set(group.tables) == running, "tables", f"tables of {sorted(group.tables)}, running {sorted(running)}")
        need(set(group.num_cached_blocks) <= running, "tables", "a count of cached blocks outlived its table")
        for request in scheduler.running:
            table, computed = group.tables[request.request_id], request.num_computed_tokens
            right = -(-min(computed, scheduler.config.max_model_len) // group.block_size)
            if len(table) != right:
                raise Broken("tables", f"{request.request_id}: {len(table)} blocks for {computed} tokens")
            num_null = sum(block.block_id == 0 for block in table)
            need(all(block.block_id == 0 for block in table[:num_null]), "window", "a null block between others")
            if num_null > group.num_skipped_blocks(computed):
                raise Broken("window", f"{request.request_id}: {num_null} blocks are gone, the window allows "
                                       f"{group.num_skipped_blocks(computed)}")


# ------------------------------------------------------------------ the message to the worker


class WorkerCopy:
    """What a worker knows: tables that follow the messages, and a shadow of the KV memory."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tables: dict[str, list[list[int]]] = {}
        self.shadow: dict[tuple[int, int], bytes] = {}  # (block, offset) -> what its KV was computed from
        self._prefix: dict[str, list[bytes]] = {}       # request -> per position, all tokens up to it
        # 0.14.1 fault: blocks of a victim that was already scheduled stay cached and were never computed.
        self.contents_are_known = True

    def check(self, output: SchedulerOutput) -> None:
        """To be asked between schedule() and update_from_output()."""
        self._check_counts(output)
        self._follow(output)
        self._check_copies(output)
        self._compute(output)

    def _check_counts(self, output: SchedulerOutput) -> None:
        config, scheduled = self.scheduler.config, output.num_scheduled_tokens
        need(sum(scheduled.values()) == output.total_num_scheduled_tokens, "budget", "the total is not the sum")
        need(output.total_num_scheduled_tokens <= config.max_num_batched_tokens, "budget",
             f"{output.total_num_scheduled_tokens} tokens")
        need(all(n > 0 for n in scheduled.values()), "grants", f"an empty grant: {scheduled}")
        if config.long_prefill_token_threshold:
            need(all(n <= config.long_prefill_token_threshold for n in scheduled.values()), "grants",
                 f"more than the threshold: {scheduled}")
        new = [r.req_id for r in output.scheduled_new_reqs]
        known = output.scheduled_cached_reqs.req_ids
        need(sorted(new + known) == sorted(scheduled), "message", "new and cached are not the scheduled ones")
        need(not set(output.preempted_req_ids) & set(scheduled), "message", "a victim is scheduled")
        running = {r.request_id for r in self.scheduler.running}
        need(set(scheduled) <= running, "message", "who is scheduled does not run")
        need(not set(output.finished_req_ids) & set(scheduled), "message", "a finished request is scheduled")

    def _follow(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self.tables.pop(request_id, None)
            self._prefix.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            need(new.req_id not in self.tables, "message", f"{new.req_id} is new twice")
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        known = output.scheduled_cached_reqs
        for request_id, blocks in zip(known.req_ids, known.new_block_ids, strict=True):
            need(request_id in self.tables, "message", f"{request_id} is called known and never was new")
            if request_id in known.resumed_req_ids:
                self.tables[request_id] = [list(ids) for ids in blocks or ()]
            elif blocks is not None:
                for table, more in zip(self.tables[request_id], blocks, strict=True):
                    table += more

    def _check_copies(self, output: SchedulerOutput) -> None:
        for request_id in output.num_scheduled_tokens:
            for copy, table in zip(self.tables[request_id], self.scheduler.kv_cache_manager.get_block_ids(request_id),
                                   strict=True):
                agree = len(copy) == len(table) and all(b in (0, a) for a, b in zip(copy, table, strict=False))
                need(agree, "message", f"the worker believes {request_id} has {copy}, it has {table}")

    def _compute(self, output: SchedulerOutput) -> None:
        """Write the KV of the step's tokens, each slot once, then read what each of them sees."""
        written = set()
        groups = self.scheduler.kv_cache_manager.groups
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            contents = self._contents(request)
            for group, table in zip(groups, self.tables[request_id], strict=True):
                for position in range(request.num_computed_tokens - num_tokens, request.num_computed_tokens):
                    slot = table[position // group.block_size], position % group.block_size
                    if slot[0] == 0:
                        raise Broken("slots", f"position {position} of {request_id} has the null block")
                    if slot in written:
                        raise Broken("slots", f"slot {slot} is written twice")
                    written.add(slot)
                    self.shadow[slot] = contents[position]
        if not self.contents_are_known:
            return
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            contents, end = self._contents(request), request.num_computed_tokens
            for group, table in zip(groups, self.tables[request_id], strict=True):
                window = group.sliding_window
                first = 0 if window is None else max(0, end - num_tokens - window + 1)
                for position in range(first, end):
                    slot = table[position // group.block_size], position % group.block_size
                    if self.shadow.get(slot) != contents[position]:
                        raise Broken("contents", f"{request_id} reads position {position} in slot {slot} and finds "
                                                 "something else")

    def _contents(self, request: Request) -> list[bytes]:
        known = self._prefix.setdefault(request.request_id, [])
        for position in range(len(known), request.num_tokens):
            before = known[-1] if known else repr(request.cache_salt).encode()
            known.append(sha256(before + str(request.all_token_ids[position]).encode()).digest()[:8])
        return known


# ------------------------------------------------------------------ an engine under watch


class Watched:
    """An EngineCore whose every step is checked from all three sides."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.worker = WorkerCopy(core.scheduler)
        self.added: dict[str, int] = {}                     # request -> order of adding
        self.meanwhile: list[Callable[[], None]] = []       # done while the model is busy
        self.num_events = 0
        self.is_broken = False                              # an event did not fit: those after it are not looked at
        self._fold, self._check, self._truth = Fold(), None, Truth(core)
        self.step_events: list[Event] = []
        self._executor, core.executor = core.executor, self
        self._check_reasons_of: tuple[list[str], list[str]] = ([], [])

    @contextmanager
    def recording(self, record: str = "blocks", snapshot_every: int = 64) -> Iterator[None]:
        trace.start(self, record=record, snapshot_every=snapshot_every)
        try:
            yield
        finally:
            trace.stop()

    def append(self, event: Event) -> None:
        """The sink: fold, and hold each event against the state before and after it."""
        if self.is_broken:
            return
        self.is_broken, self.num_events = True, self.num_events + 1
        self.step_events.append(event)
        if isinstance(event, TraceHeader):
            self._check = EngineCheck(event)
            self._check.max_num_seqs = self.core.scheduler.config.max_num_seqs
        try:
            state = self._fold.states.get(event.engine)
            if state is not None:
                if isinstance(event, EngineSnapshot):
                    self._check.snapshot(state, event)
                self._check.before(state, event)
                self._truth.check(state, event)
            self._fold.apply(event)
            state = self._fold.states.get(event.engine)
            if state is not None:
                self._check.after(state, event)
        except _Broken as broken:
            raise Broken(f"trace {broken.invariant}", broken.message) from None
        except Untrue as untrue:
            raise Broken("truth", str(untrue)) from None
        if isinstance(event, RequestPreempted) and event.num_tokens_taken_back:
            self.worker.contents_are_known = False
        self.is_broken = False

    def add(self, request: Request, *, at_the_door: bool = True) -> None:
        """Raises UserError if the guards refuse it; they are not asked with ``at_the_door`` False."""
        if at_the_door:
            self.core.add_request(request)
        else:
            if trace.on:
                trace.enter(self.core)
            self.core.scheduler.add_request(request)
        self.added[request.request_id] = len(self.added)

    def step(self) -> list[Any]:
        scheduler = self.core.scheduler
        self._check_reasons_of = [r.request_id for r in scheduler.running], [r.request_id for r in scheduler.waiting]
        self.step_events.clear()
        outputs = self.core.step()
        self._check_everything()
        return outputs

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Stands where the executor stands: between schedule() and update_from_output()."""
        self.worker.check(output)
        self._check_everything()
        if trace.on:
            check_reasons(self.core.scheduler, self.step_events, output, *self._check_reasons_of)
        answer = self._executor.execute_model(output)
        for action in self.meanwhile:
            action()
        self.meanwhile.clear()
        return answer

    def row_states(self) -> list[RowState]:
        return self._executor.row_states()

    def _check_everything(self) -> None:
        scheduler = self.core.scheduler
        check_live(scheduler)
        check_pool(scheduler.kv_cache_manager.block_pool)
        if isinstance(scheduler.policy, FirstComeFirstServed):
            served = [self.added[r.request_id] for r in (*scheduler.running, *scheduler.waiting)]
            need(served == sorted(served), "first come first served", f"the order of adding is {served}")
        if trace.on and (state := self._fold.states.get(self.core.engine_id)) is not None:
            difference = same(state, walk_live(self.core))
            need(difference is None, "fold", str(difference))


# ------------------------------------------------------------------ reasons


def check_reasons(
    scheduler: Scheduler, events: list[Event], output: SchedulerOutput, running: list[str], waiting: list[str]
) -> None:
    """Each request of the queues as they were before the step has one reason, and the reason is true.

    One: looked at, or lost its blocks to another, or named with all behind it as not reached.
    """
    looked_at = {q: [e for e in events if isinstance(e, RequestConsidered) and e.queue == q] for q in QUEUES}
    missed = {q: [e for e in events if isinstance(e, QueueNotReached) and e.queue == q] for q in QUEUES}
    victims = [e.request_id for e in events if isinstance(e, RequestPreempted)]
    need(victims == output.preempted_req_ids, "reasons", "the events name other victims than the message")
    seen = Counter(e.request_id for es in looked_at.values() for e in es)
    need(all(n == 1 for n in seen.values()), "reasons", f"looked at twice: {seen}")
    for event in events:
        if isinstance(event, PrefixMatched):
            _check_prefix(scheduler, event)
    for event in (*looked_at["running"], *looked_at["waiting"]):
        _check_considered(scheduler, event, output, victims)
    rest = [r for r in running if r not in seen and r not in victims]
    _check_not_reached(scheduler, "running", rest, missed["running"], output)
    rest = [r.request_id for r in scheduler.waiting]
    refused = [e.request_id for e in looked_at["waiting"] if e.outcome == "refused"]
    need(refused == rest[: len(refused)] and len(refused) <= 1, "reasons", "who was refused is not the head")
    _check_not_reached(scheduler, "waiting", rest[len(refused) :], missed["waiting"], output)
    if looked_at["waiting"] and not victims:
        admitted = [e.request_id for e in looked_at["waiting"] if e.outcome == "scheduled"]
        need(admitted == waiting[: len(admitted)], "order", f"{admitted} came in, {waiting} waited")
    need(not (victims and looked_at["waiting"]), "reasons", "a preempting step looked at the waiting queue")


QUEUES = ("running", "waiting")


def _check_prefix(scheduler: Scheduler, event: PrefixMatched) -> None:
    """The hit is whole blocks and leaves a token to compute; the reason why it is no longer has its evidence."""
    manager = scheduler.kv_cache_manager
    step = lcm(*(group.block_size for group in manager.groups))
    left = event.num_tokens - event.num_computed_tokens
    need(left > 0 and event.num_computed_tokens % step == 0, "reasons", f"a hit of {event.num_computed_tokens} tokens")
    right = "caching_off" if not manager.enable_caching else "partial_block" if left < step else (
        "last_token_must_be_computed" if left == step else None)
    need(event.why == right if right else event.why in MISSES and event.group is not None and event.hash, "reasons",
         f"{event.request_id}'s hit of {event.num_computed_tokens} of {event.num_tokens} ends because of {event.why}")
    need((event.evicted_at_step is not None) <= (event.why in ("evicted", "window_group")), "reasons", "evicted?")


MISSES = ("never_cached", "evicted", "reset", "miss", "window_group")


def _check_considered(
    scheduler: Scheduler, event: RequestConsidered, output: SchedulerOutput, victims: list[str]
) -> None:
    granted = output.num_scheduled_tokens.get(event.request_id)
    if event.outcome == "scheduled":
        taken_back = granted is None and event.request_id in victims
        need(taken_back or granted == event.num_tokens_granted, "reasons", f"{event.request_id} got {granted}")
        need((event.num_tokens_granted == event.num_tokens_wanted) == (event.reason == "all_tokens"), "reasons",
             f"{event.request_id} wanted {event.num_tokens_wanted}, got {event.num_tokens_granted}: {event.reason}")
    else:
        need(granted is None, "reasons", f"{event.request_id} is scheduled and said to be {event.outcome}")
    if event.reason == "not_enough_free_blocks":
        need(event.num_needed_blocks > event.num_free_blocks, "reasons", "there were enough free blocks")
    if event.reason == "self_preemption":
        need(event.request_id in victims, "reasons", f"{event.request_id} is no victim")


def _check_not_reached(
    scheduler: Scheduler, queue: str, rest: list[str], events: list[QueueNotReached], output: SchedulerOutput
) -> None:
    need(len(events) == bool(rest), "reasons", f"{rest} of {queue} and {len(events)} events about them")
    if not rest:
        return
    (event,) = events
    # Victims of the step wait as well, at the front or by their key, and are counted with the others.
    need((event.count, event.first_request_id) == (len(rest), rest[0]), "reasons",
         f"{event.count} from {event.first_request_id}, but {rest} were not reached")
    truth = {
        "token_budget_exhausted": output.total_num_scheduled_tokens == scheduler.config.max_num_batched_tokens,
        "max_num_seqs_reached": len(scheduler.running) == scheduler.config.max_num_seqs,
        "head_blocked": queue == "waiting" and not output.preempted_req_ids,
        "preemption_this_step": bool(output.preempted_req_ids),
        "self_preemption": queue == "running" and bool(output.preempted_req_ids),
    }
    if queue == "waiting" and event.num_needed_blocks is not None:
        need(event.num_needed_blocks > event.num_free_blocks, "reasons", "the head is blocked and would fit")
    need(truth.get(event.reason), "reasons", f"{queue} was not reached because of {event.reason}, which is not true")
