"""A model that says what it was told to say, so that the control plane runs alone.

After scheduling, a request whose computed tokens have reached all of its known tokens gets exactly
one sampled token: ``sampled_token_ids[k]``, where k counts the output tokens it already has. Any
other scheduled request is in the middle of its prompt, or of its recomputation, and gets none.
Preemption keeps output tokens, so k never goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedlab.errors import UserError
from pagedlab.sched.output import ModelRunnerOutput, SchedulerOutput
from pagedlab.trace.events import RowState, TokensSampled
from pagedlab.trace.tracer import trace


class ScriptedModel:
    """An Executor without a model; it owns nothing and remembers nothing between steps."""

    def __init__(
        self,
        num_prompt_tokens: Mapping[str, int],             # request -> length of its prompt
        sampled_token_ids: Mapping[str, Sequence[int]],   # request -> what it will say
    ) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._sampled_token_ids = sampled_token_ids

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Sample for every scheduled request that has caught up.

        A prompt of 5 tokens in chunks of 4: nothing after the first chunk, ``sampled_token_ids[0]``
        after the second (4 + 1 computed = 5 + 0 known), ``[1]`` a step later (5 + 1 = 5 + 1).

        Raises:
            UserError: a request says more than its script holds.
        """
        num_scheduled = scheduler_output.num_scheduled_tokens
        known = scheduler_output.scheduled_cached_reqs
        progress = {r.req_id: (r.num_computed_tokens, 0) for r in scheduler_output.scheduled_new_reqs}
        progress.update(
            zip(known.req_ids, zip(known.num_computed_tokens, known.num_output_tokens, strict=True), strict=True)
        )
        sampled = {}
        for row, (request_id, num_new_tokens) in enumerate(num_scheduled.items()):
            num_computed, num_output = progress[request_id]
            caught_up = num_computed + num_new_tokens == self._num_prompt_tokens[request_id] + num_output
            sampled[request_id] = [self._next_token(request_id, num_output)] if caught_up else []
            if trace.decisions and caught_up:
                trace.emit(TokensSampled(request_id=request_id, row=row, token_id=sampled[request_id][0], kept=True))
        return ModelRunnerOutput(sampled)

    def row_states(self) -> list[RowState]:
        """There is no worker, so there are no rows."""
        return []

    def _next_token(self, request_id: str, num_output: int) -> int:
        script = self._sampled_token_ids[request_id]
        if num_output >= len(script):
            raise UserError(
                f"request {request_id} has {len(script)} sampled_token_ids and needs one more: "
                "give as many as it may generate (max_tokens)."
            )
        return script[num_output]
