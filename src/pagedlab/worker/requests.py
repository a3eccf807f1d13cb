"""What the worker remembers of each request (vllm/v1/worker/gpu_input_batch.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagedlab.kv.specs import BlockIds
from pagedlab.sampling_params import SamplingParams


@dataclass(slots=True)
class CachedRequestState:
    """What the worker remembers of a request until it is reported finished, row or no row.

    A copy that follows the scheduler only through SchedulerOutput; written only by the runner.
    Sliding-window groups keep every id here: the scheduler replaces out-of-window blocks by the null
    block without telling, and nobody reads them any more.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: BlockIds                    # per group
    num_computed_tokens: int               # before the current step
    generator: torch.Generator | None      # seeded requests only; lives through preemption
    output_token_ids: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0           # prompt positions reported so far

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt plus output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids_from(self, start: int) -> list[int]:
        """Known tokens from position ``start`` on."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt :]
        return self.prompt_token_ids[start:] + self.output_token_ids
