"""A request as the engine core sees it (vllm/v1/request.py)."""

from __future__ import annotations

import enum
from collections.abc import Callable

from pagedlab.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"        # waits again, all blocks given back
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"       # ended by the engine's guards, see engine/guards.py

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED


_FINISHED = frozenset(s for s in RequestStatus if s.name.startswith("FINISHED"))


class Request:
    """Tokens and progress of one request.

    There are no phases: the scheduler lets ``num_computed_tokens`` catch up with ``num_tokens``.
    All mutable fields are written only by the Scheduler.
    """

    __slots__ = (
        "_hash_new_full_blocks",
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "eos_token_id",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "prompt",
        "prompt_token_texts",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,                 # smaller is more urgent; only the priority policy looks
        arrival_time: float = 0.0,         # seconds; breaks ties of the priority policy
        cache_salt: str | None = None,     # only requests with the same salt share blocks
        eos_token_id: int | None = None,
        block_hasher: Callable[[Request], list[bytes]] | None = None,  # None: no prefix caching
        prompt: str | None = None,         # text, for people who read the trace
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.priority = priority
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.eos_token_id = eos_token_id
        self.prompt = prompt
        self.prompt_token_texts: list[str] | None = None  # filled in at the door while somebody traces
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = sampling_params.max_tokens  # None: up to max_model_len
        self.all_token_ids = list(prompt_token_ids)   # prompt, then output
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0       # tokens whose KV is written once the current step has run
        self.num_cached_tokens = -1        # prefix hit at first admission, -1 before it
        self.num_preemptions = 0
        self._hash_new_full_blocks = block_hasher
        self.block_hashes: list[bytes] = []  # of the full blocks among all_token_ids
        if block_hasher is not None:
            self.block_hashes += block_hasher(self)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt plus output so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    def append_output_token(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        if self._hash_new_full_blocks is not None:
            self.block_hashes += self._hash_new_full_blocks(self)
