"""`pagedlab why --slot`: what a slot of the cache held, and when."""

import pytest

from pagedlab.errors import UserError
from pagedlab.figures.record import RECORDED, stored
from pagedlab.scenarios.library import load_scenario
from pagedlab.scenarios.run import run
from pagedlab.trace.events import InputsPrepared, KvWritten
from pagedlab.trace.slot import slot_history
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import tracing


def told(name, record="tensors"):
    with tracing(record) as trace:
        run(load_scenario(name))
    return trace


def test_a_slot_that_two_requests_used_one_after_the_other():
    assert slot_history(stored("preemption"), 13).lines == [
        "Slot 13 is offset 1 of block 3: 3 · 4 + 1.",
        "step 0: block 3 is handed to r1, as its logical block 0",
        "step 0: block 3 is full, and from now on found under c8fe2bdc",
        "step 0: written with position 1 of r1, ' is' (logical block 0 + 1, token 8 of the step)",
        "step 2: block 3 is free, as r1 was preempted; what it holds stays",
        "step 6: block 3 is handed to r0, as its logical block 3",
        "step 7: written with position 13 of r0, ' to' (logical block 3 + 1, token 0 of the step)",
        "step 7: block 3 is free, as r0 has finished; what it holds stays",
        "step 8: block 3 is handed to r1, as its logical block 0",
        "step 8: block 3 is full, and from now on found under c8fe2bdc",
        "step 8: written with position 1 of r1, ' is' (logical block 0 + 1, token 1 of the step)",
        "step 11: block 3 is free, as r1 has finished; what it holds stays",
        "In the end: holds position 1 of r1, ' is'; block 3 is free and can still be hit.",
    ]


@pytest.mark.parametrize("name", RECORDED)
def test_its_writes_are_those_that_the_writer_reports_with_the_tokens_the_model_was_given(name):
    trace = stored(name)
    texts = {}  # token id -> text, from the events that carry both
    for request in trace.requests.values():
        texts.update(zip(request.added.prompt_token_ids, request.added.prompt_token_texts, strict=True))
    texts.update((e.token_id, e.text) for e in trace.filter("tokens_sampled"))
    reported = {}  # slot -> (step, position, text), in order
    for step in trace.steps.values():
        inputs = next((e for e in step if type(e) is InputsPrepared), None)
        written = next((e for e in step if type(e) is KvWritten), None)
        for token, slot in zip(written.token, written.slot, strict=True) if written else ():
            reported.setdefault(slot, []).append((step.step, inputs.positions[token], texts[inputs.input_ids[token]]))
    size, num_blocks = trace.first_snapshot.block_sizes[0], trace.first_snapshot.num_blocks
    for slot in range(size, size * num_blocks):
        writes = slot_history(trace, slot).data["writes"]
        assert [(w["step"], w["position"], w["text"]) for w in writes] == reported.get(slot, [])
    assert reported


def test_a_shared_block_is_free_when_its_last_owner_is_gone():
    with tracing() as trace:
        run(load_scenario("twins").with_made_up_tokens(lambda text: list(range(6))))
    assert slot_history(trace, 5).lines[1:] == [
        "step 0: block 1 is handed to r0, as its logical block 0",
        "step 0: block 1 is full, and from now on found under 9372cbe7",
        "step 0: r1 hits block 1 and takes it as its logical block 0",
        "step 3: r0 lets go of block 1, as it has finished; 1 owner left",
        "step 3: block 1 is free, as r1 has finished; what it holds stays",
        "In the end: no model ran, so nothing was written; block 1 is free and can still be hit.",
    ]


def test_slots_of_the_null_block_never_hold_anything():
    assert slot_history(stored("preemption"), 3).lines[1].startswith("Block 0 is the null block")


def test_what_has_no_answer_is_one_sentence():
    with pytest.raises(UserError, match="no slot 20 in this trace: they go from 0 to 19"):
        slot_history(stored("preemption"), 20)
    with pytest.raises(UserError, match="no slot -1"):
        slot_history(stored("preemption"), -1)
    with pytest.raises(UserError, match="needs `tensors`"):
        slot_history(told("abort", "blocks"), 5)
    with pytest.raises(UserError, match="no slot 5 in this trace"):
        slot_history(Trace([stored("preemption").header]), 5)
