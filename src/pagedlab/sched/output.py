"""What the scheduler tells the worker, and what the worker answers: plain data, no tensors.

This module and ``kv/specs.py`` are the only places where the two halves of the engine meet
(vllm/v1/core/sched/output.py, vllm/v1/outputs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedlab.kv.specs import BlockIds
from pagedlab.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """A request the worker sees for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: BlockIds            # the whole table: hit blocks first, 0 before a window
    num_computed_tokens: int       # length of the prefix hit


@dataclass(slots=True)
class CachedRequestData:
    """Requests the worker knows, as differences; parallel lists, running before resumed."""

    req_ids: list[str]
    resumed_req_ids: set[str]                # came back after preemption: tables are replaced
    new_block_ids: list[BlockIds | None]     # appended (None: nothing), or the whole new table
    num_computed_tokens: list[int]           # before this step
    num_output_tokens: list[int]
    all_token_ids: dict[str, list[int]]      # of the resumed ones: prompt and output


@dataclass(slots=True)
class SchedulerOutput:
    """One step's decisions."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]     # in schedule order: running, then admitted
    total_num_scheduled_tokens: int
    num_common_prefix_blocks: list[int]      # per group
    preempted_req_ids: list[str]             # in the order they were preempted
    finished_req_ids: list[str]              # since the previous step, sorted


@dataclass(slots=True)
class TopLogprobs:
    """Most likely candidates at one position, the chosen token first if it is not among them."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int                                # of the chosen token, 1 is the most likely


@dataclass(slots=True)
class ModelRunnerOutput:
    """Sampled tokens, by request; a request in the middle of its prompt has an empty list."""

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, TopLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TopLogprobs]] = field(default_factory=dict)  # of this step's chunk


@dataclass(slots=True)
class EngineCoreOutput:
    """What one step brought one request (vllm/v1/engine/__init__.py)."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None         # stop, length, abort or error
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: TopLogprobs | None = None
    prompt_logprobs: list[TopLogprobs] | None = None
    error: str | None = None                 # the sentence, for finish_reason "error"
