"""When a request ends, beside the rule written out: stop tokens before length, and nothing before min_tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engines import Shape
from pagedlab.engine.core import EngineCore
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.output import ModelRunnerOutput

EOS, MAX_MODEL_LEN = 2, 12


class Scripted:
    """An executor that answers each step with the next of its tokens."""

    def __init__(self, token_ids):
        self.token_ids = iter(token_ids)

    def execute_model(self, output):
        return ModelRunnerOutput({r: [next(self.token_ids)] for r in output.num_scheduled_tokens})

    def row_states(self):
        return []


def ends(script, num_prompt, params):
    """(number of output tokens, finish reason, stop reason)."""
    for n, token_id in enumerate(script, 1):
        if n < params.min_tokens:
            continue
        if token_id == EOS and not params.ignore_eos:
            return n, "stop", None
        if token_id in params.stop_token_ids:
            return n, "stop", token_id
        if n == params.max_tokens or num_prompt + n == MAX_MODEL_LEN:
            return n, "length", None
    raise AssertionError("the script is too short")


@given(
    script=st.lists(st.integers(1, 4), min_size=MAX_MODEL_LEN, max_size=MAX_MODEL_LEN),
    num_prompt=st.integers(1, 5), max_tokens=st.none() | st.integers(1, 7), min_tokens=st.integers(0, 7),
    ignore_eos=st.booleans(), stop_token_ids=st.sampled_from(([], [], [3], [EOS], [3, EOS])),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_request_ends_at_the_first_token_that_may_end_it(
    script, num_prompt, max_tokens, min_tokens, ignore_eos, stop_token_ids
):
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens or min_tokens),
                            ignore_eos=ignore_eos, stop_token_ids=stop_token_ids, temperature=0.0)
    scheduler = Shape(max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False).engine_core().scheduler
    core = EngineCore(scheduler, Scripted(script), about={"model": {}, "config": {}, "tokenizer": {}})
    request = Request("r0", [1] * num_prompt, params, eos_token_id=EOS)
    core.add_request(request)
    outputs = []
    while core.has_unfinished_requests():
        outputs += core.step()
    num_output, finish_reason, stop_reason = ends(script, num_prompt, params)
    assert [o.new_token_ids for o in outputs] == [[t] for t in script[:num_output]]
    assert [o.finish_reason for o in outputs] == [None] * (num_output - 1) + [finish_reason]
    assert outputs[-1].stop_reason == request.stop_reason == stop_reason
