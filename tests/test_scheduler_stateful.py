"""Any engine, anything that may happen to it: after each step every invariant holds."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engines import GROUPS, POLICIES, Shape, act_at_random, random_shape
from invariants import Broken, Watched
from pagedlab.errors import UserError
from pagedlab.trace.events import CONSIDERED_REASONS, NOT_REACHED_REASONS
from pagedlab.trace.tracer import trace

shapes = st.builds(
    Shape,
    num_blocks=st.integers(2, 16),
    groups=st.sampled_from(GROUPS),
    enable_prefix_caching=st.booleans(),
    enable_chunked_prefill=st.booleans(),
    policy=st.sampled_from(POLICIES),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 24),
    max_model_len=st.integers(2, 40),
    long_prefill_token_threshold=st.sampled_from((0, 0, 1, 3, 7)),
)


class AnyEngine(RuleBasedStateMachine):
    """Requests come and go in any order; the checks are inside Watched."""

    @initialize(shape=shapes)
    def start(self, shape):
        self.shape = shape
        self.watched = Watched(shape.engine_core())
        self.recording = self.watched.recording(snapshot_every=10)
        self.recording.__enter__()

    def teardown(self):
        if hasattr(self, "recording"):
            self.recording.__exit__(None, None, None)

    @property
    def unfinished(self):
        return list(self.watched.core.scheduler.requests)

    @rule(shared=st.integers(0, 40), own=st.lists(st.integers(0, 1), max_size=12), max_tokens=st.integers(1, 20),
          priority=st.integers(0, 2), arrival_time=st.integers(0, 3), salt=st.sampled_from((None, None, "salt")),
          at_the_door=st.booleans())
    def add(self, shared, own, max_tokens, priority, arrival_time, salt, at_the_door):
        prompt = [*range(shared), *own][: self.shape.longest_prompt] or [0]
        request = self.shape.request(f"r{len(self.watched.added)}", prompt, max_tokens, priority, arrival_time, salt)
        try:
            self.watched.add(request, at_the_door=at_the_door)
        except UserError:
            assert at_the_door

    @rule()
    def step(self):
        self.watched.step()

    @rule(count=st.integers(2, 6))
    def several_steps(self, count):
        for _ in range(count):
            self.watched.step()

    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick):
        ids = self.unfinished
        self.watched.core.abort_requests(pick.sample(ids, pick.randint(0, len(ids))))

    @rule(pick=st.randoms(use_true_random=False))
    def abort_while_the_model_is_busy(self, pick):
        ids = [pick.choice(["nobody", *self.unfinished])]
        self.watched.meanwhile.append(lambda: self.watched.core.abort_requests(ids))
        self.watched.step()

    @rule()
    def reset_prefix_cache(self):
        pool = self.watched.core.scheduler.kv_cache_manager.block_pool
        was_unused, order = pool.num_used_blocks == 0, list(pool.free_block_queue)
        assert self.watched.core.reset_prefix_cache() is was_unused
        assert list(pool.free_block_queue) == order
        assert not was_unused or not any(block.block_hash for block in pool.blocks)


TestAnyEngine = AnyEngine.TestCase
TestAnyEngine.settings = settings(
    max_examples=800, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_every_invariant_holds_in_random_engines_and_every_reason_occurs():
    seen = set()
    for seed in range(120):
        rng = random.Random(seed)
        shape = random_shape(rng)
        watched, num_added = Watched(shape.engine_core()), 0
        with watched.recording():
            for _ in range(40):
                num_added = act_at_random(rng, watched, shape, num_added)
                watched.step()
                seen |= {getattr(e, "reason", None) for e in watched.step_events}
    assert seen >= set(CONSIDERED_REASONS) | set(NOT_REACHED_REASONS)


def test_a_drained_engine_has_all_blocks_free():
    for seed in range(20):
        rng = random.Random(1000 + seed)
        shape = random_shape(rng)
        watched, num_added = Watched(shape.engine_core()), 0
        for _ in range(15):
            num_added = act_at_random(rng, watched, shape, num_added)
            watched.step()
        for _ in range(2000):
            if not watched.core.has_unfinished_requests():
                break
            watched.step()
        pool = watched.core.scheduler.kv_cache_manager.block_pool
        assert not watched.core.has_unfinished_requests() and pool.num_free_blocks == pool.num_blocks - 1
        assert watched.core.reset_prefix_cache()


# ------------------------------------------------------------------ the checker finds what is broken


def busy_engine(**config):
    """Two requests that share two blocks, one with blocks of its own, one waiting, some blocks cached and free."""
    shape = Shape(**{"num_blocks": 16, "max_num_seqs": 3, "max_model_len": 60, **config})
    watched = Watched(shape.engine_core())
    watched.add(shape.request("old", list(range(50, 62)), 1))
    watched.step()
    for request_id, prompt in (("a", [*range(10)]), ("b", [*range(8), 30, 31]), ("c", [*range(70, 75)]), ("d", [1])):
        watched.add(shape.request(request_id, prompt, 30))
    for _ in range(3):
        watched.step()
    return watched


def pool_of(watched):
    return watched.core.scheduler.kv_cache_manager.block_pool


def table_of(watched, request_id, group=0):
    return watched.core.scheduler.kv_cache_manager.groups[group].tables[request_id]


def lose_a_block(watched):
    pool_of(watched).free_block_queue.popleft_n(1)


def free_a_held_block(watched):
    pool_of(watched).free_block_queue.append_n([table_of(watched, "c")[0]])


def cut_a_link(watched):
    queue = pool_of(watched).free_block_queue
    second = list(queue)[1]
    second.prev_free_block = queue._head


def shorten_the_walk(watched):
    queue = pool_of(watched).free_block_queue
    list(queue)[1].next_free_block = None


def miscount(watched):
    pool_of(watched).free_block_queue.num_free_blocks += 1


def free_the_null_block(watched):
    pool_of(watched).free_block_queue.append_n([pool_of(watched).null_block])


def hold_the_null_block(watched):
    pool_of(watched).null_block.ref_cnt = 1


def count_an_owner_twice(watched):
    table_of(watched, "c")[0].ref_cnt += 1


def forget_an_owner(watched):
    table_of(watched, "a")[0].ref_cnt -= 1


def share_without_a_hash(watched):
    theirs, ours = table_of(watched, "a"), table_of(watched, "c")
    theirs[-1].ref_cnt += 1
    watched.core.scheduler.kv_cache_manager.block_pool.free_blocks([(1, ours[-1])], "c", 0, "finished")
    ours[-1] = theirs[-1]


def share_at_another_place(watched):
    ours, theirs = table_of(watched, "c"), table_of(watched, "a")
    pool_of(watched).free_blocks([(1, ours[1])], "c", 0, "finished")
    theirs[0].ref_cnt += 1
    ours[1] = theirs[0]


def wrong_hash(watched):
    block = table_of(watched, "c")[0]
    cached = pool_of(watched)._cached[0]
    del cached[block.block_hash]
    block.block_hash = bytes(32)
    cached[block.block_hash] = {block.block_id: block}


def forget_in_the_map(watched):
    pool_of(watched)._cached[0].popitem()


def forget_on_the_block(watched):
    table_of(watched, "a")[0].block_hash = None


def cache_a_block_that_is_not_full(watched):
    block = table_of(watched, "d" if "d" in watched.core.scheduler.kv_cache_manager.groups[0].tables else "c")[-1]
    block.block_hash = b"x" * 32
    pool_of(watched)._cached[0][block.block_hash] = {block.block_id: block}


def wait_and_run(watched):
    watched.core.scheduler.waiting.add(watched.core.scheduler.running[0])


def lose_a_request(watched):
    watched.core.scheduler.waiting.pop()


def take_one_seat_too_many(watched):
    object.__setattr__(watched.core.scheduler.config, "max_num_seqs", 2)


def overtake(watched):
    running = watched.core.scheduler.running
    running.append(running.pop(0))


def wait_in_another_order(watched):
    for n, entry in enumerate(watched.core.scheduler.waiting._heap):
        entry[2].priority = -n


def compute_too_much(watched):
    watched.core.scheduler.running[0].num_computed_tokens += 3


def drop_a_block_from_a_table(watched):
    block = table_of(watched, "c").pop()
    pool_of(watched).free_blocks([(1, block)], "c", 0, "finished")


def keep_a_table(watched):
    watched.core.scheduler.kv_cache_manager.groups[0].tables["gone"] = []


def forget_what_is_in_sight(watched):
    table = table_of(watched, "c")
    pool_of(watched).free_blocks([(0, table[0])], "c", 0, "out_of_window")
    table[0] = pool_of(watched).null_block


STATES = {
    "conservation": (lose_a_block, free_a_held_block),
    "free_queue_links": (cut_a_link, shorten_the_walk),
    "free_queue_count": (miscount,),
    "null_block": (free_the_null_block, hold_the_null_block),
    "ref_counts": (count_an_owner_twice, forget_an_owner),
    "sharing": (share_without_a_hash, share_at_another_place),
    "hashes": (wrong_hash, cache_a_block_that_is_not_full),
    "cache_map": (forget_in_the_map, forget_on_the_block),
    "queues": (wait_and_run, lose_a_request),
    "seats": (take_one_seat_too_many,),
    "first come first served": (overtake,),
    "progress": (compute_too_much,),
    "tables": (drop_a_block_from_a_table, keep_a_table),
    "window": (forget_what_is_in_sight,),
}


@pytest.mark.parametrize("invariant, corrupt", [(i, c) for i, cs in STATES.items() for c in cs],
                         ids=lambda value: value.__name__ if callable(value) else "")
def test_a_corrupted_state_is_found(invariant, corrupt):
    watched = busy_engine()
    watched._check_everything()
    corrupt(watched)
    with pytest.raises(Broken) as broken:
        watched._check_everything()
    assert broken.value.invariant in (invariant, *(("sharing",) if corrupt is forget_on_the_block else ()),
                                      *(("cache_map",) if corrupt is cache_a_block_that_is_not_full else ()))


def test_a_waiting_queue_in_another_order_than_the_policys_is_found():
    watched = busy_engine(policy="priority")
    for request_id in ("e", "f"):
        watched.add(watched_shape(watched).request(request_id, [1], 5))
    wait_in_another_order(watched)
    with pytest.raises(Broken, match="order"):
        watched._check_everything()


def watched_shape(watched):
    return Shape(num_blocks=16)


MESSAGES = {
    "budget": lambda o: setattr(o, "total_num_scheduled_tokens", o.total_num_scheduled_tokens + 1),
    "grants": lambda o: o.num_scheduled_tokens.update(a=0) or setattr(
        o, "total_num_scheduled_tokens", sum(o.num_scheduled_tokens.values())),
    "message: a victim": lambda o: o.preempted_req_ids.append("a"),
    "message: a finished": lambda o: o.finished_req_ids.append("a"),
    "message: new and cached": lambda o: o.scheduled_cached_reqs.req_ids.pop(),
    "message: the worker": lambda o: o.scheduled_cached_reqs.new_block_ids.__setitem__(0, ([9],)),
}


@pytest.mark.parametrize("invariant", MESSAGES)
def test_a_corrupted_message_is_found(invariant):
    watched = busy_engine()
    schedule = watched.core.scheduler.schedule

    def corrupted():
        output = schedule()
        MESSAGES[invariant](output)
        return output

    watched.core.scheduler.schedule = corrupted
    with pytest.raises(Broken, match=invariant):
        watched.step()


def test_a_slot_that_two_requests_write_is_found():
    """Both tables say so, the counts agree, the hash is there: only who writes what gives it away."""
    watched = busy_engine()
    watched.step()  # both have begun the same block of their own
    ours, theirs = table_of(watched, "a"), table_of(watched, "b")
    copies = watched.worker.tables
    pool_of(watched).free_blocks([(len(ours) - 1, ours[-1])], "a", 0, "finished")
    ours[-1] = theirs[-1]
    theirs[-1].ref_cnt += 1
    copies["a"][0][-1] = theirs[-1].block_id
    output = watched.core.scheduler.schedule()
    with pytest.raises(Broken, match=r"slots: slot .* is written twice"):
        watched.worker.check(output)


def test_a_hit_on_the_wrong_content_is_found(monkeypatch):
    """Hashes that do not depend on the parent let one prompt read the other's middle."""
    from pagedlab.kv import hashing

    right = hashing.hash_block_tokens
    monkeypatch.setattr(hashing, "hash_block_tokens", lambda parent, tokens, extra=b"": right(None, tokens, extra))
    monkeypatch.setattr("invariants.check_hashes", lambda scheduler: None)  # would see it earlier
    shape = Shape(num_blocks=20)
    watched = Watched(shape.engine_core())
    watched.add(shape.request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1))
    watched.step()
    watched.add(shape.request("b", [5, 6, 7, 8, 5], 1))
    output = watched.core.scheduler.schedule()
    with pytest.raises(Broken, match="contents"):
        watched.worker.check(output)


def test_the_shadow_memory_finds_the_known_fault_of_0_14():
    """A victim's blocks stay cached uncomputed; with the excuse taken away, the check sees it."""
    from pagedlab.conformance.scheduler import Replay
    from pagedlab.scenarios.scenario import Scenario
    from test_conformance_scheduler import recordings_in

    replay = Replay(Scenario.from_document(recordings_in("handmade")["priority_victim_blocks_stay_cached"], "it"))
    watched = Watched(replay.core)
    with pytest.raises(Broken, match="contents: r0 reads position 24"):
        for _ in range(7):
            replay_step_under_watch(replay, watched)


def replay_step_under_watch(replay, watched):
    for action, request_id in replay._scenario.actions_before(replay._step + 1):
        assert action == "add"
        watched.add(replay._scenario.make_request(request_id))
    replay._step += 1
    watched.step()


@pytest.mark.parametrize("kind", ["request_considered", "queue_not_reached", "request_preempted", "block_freed",
                                  "block_allocated", "block_cached", "slots_allocated"])
def test_an_event_that_is_not_emitted_is_missed(monkeypatch, kind):
    """Swallow the third event of a kind; the watch notices it at the latest when the step ends."""
    emit, seen = trace.emit, []

    def swallowing(event):
        if event.kind == kind and any(getattr(event, "new_block_ids", [kind])):  # the others only inform
            seen.append(event)
            if len(seen) == 3:
                return
        emit(event)

    monkeypatch.setattr(trace, "emit", swallowing)
    shape = Shape(num_blocks=10, max_num_seqs=3)
    watched = Watched(shape.engine_core())
    with watched.recording():  # noqa: SIM117
        with pytest.raises(Broken):
            for n in range(60):
                if n % 3 == 0:
                    watched.add(shape.request(f"r{n}", list(range(n % 7, 12)), 9))
                watched.step()
    assert len(seen) >= 3
