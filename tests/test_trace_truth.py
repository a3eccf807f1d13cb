"""Every field of an event is true: `truth.Truth` holds it in each stateful run, and here each field is spoiled once."""

from __future__ import annotations

import random
from itertools import islice

import msgspec
import pytest

from engines import act_at_random, random_shape
from invariants import Broken, Watched
from pagedlab.trace.events import KINDS, LEVELS, Event
from pagedlab.trace.tracer import trace

ENVELOPE = set(Event.__struct_fields__)
# What no other event and no live object says; test_scheduler_events.py and test_trace_why.py have examples of each.
UNIQUE = {
    "prefix_matched": {"key_differs", "similar_block_id"},
    "request_added": {"prompt_token_texts"},
    "request_finished": {"numbers"},
    "step_finished": {"stage_ns"},
    "tokens_sampled": {"text", "logprob", "top"},
}
# Events before the engine runs, and those that the small engines do not emit: they have no worker and no tokenizer.
ELSEWHERE = {"trace_header", "engine_snapshot", "trace_finished", "trace_gap", "kv_spec", "kv_memory", "kv_config",
             "kv_allocated", "request_refused", "rows_staged", "text_emitted"}
SPOILED = [kind for kind, cls in KINDS.items() if LEVELS.index(cls.level) <= 2 and kind not in ELSEWHERE]


def spoiled(value, n):
    """Another value of the same type; of a record, the nth field is another."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "!"
        case None:
            return 1
        case [first, *rest]:
            return [spoiled(first, n), *rest]
        case []:
            return ["!"]
        case dict():
            return {**value, "!": 1, **{k: spoiled(v, n) for k, v in list(value.items())[:1]}}
    fields = value.__struct_fields__
    name = fields[n % len(fields)]
    return msgspec.structs.replace(value, **{name: spoiled(getattr(value, name), n)})


def is_found(kind, name, seed):
    """Spoil one field of one event in a random engine; None if no such event came."""
    rng, emit, left = random.Random(seed), trace.emit, [seed % 5]
    shape = random_shape(rng)
    watched, num_added = Watched(shape.engine_core()), 0

    def spoiling(event):
        if type(event) is KINDS[kind] and getattr(event, "kept", True):  # nobody knows what was thrown away
            left[0] -= 1
            if left[0] == -1:
                setattr(event, name, spoiled(getattr(event, name), seed))
        emit(event)

    trace.emit = spoiling
    try:
        with watched.recording():
            for _ in range(30):
                num_added = act_at_random(rng, watched, shape, num_added)
                watched.step()
    except Broken:
        return True
    finally:
        del trace.emit
    return False if left[0] < 0 else None


@pytest.mark.parametrize("kind", SPOILED)
def test_a_spoiled_field_is_found(kind):
    for name in sorted(set(KINDS[kind].__struct_fields__) - ENVELOPE - UNIQUE.get(kind, set())):
        tried = (is_found(kind, name, seed) for seed in range(60))
        assert list(islice((found for found in tried if found is not None), 4)) == [True] * 4, f"{kind}.{name}"
