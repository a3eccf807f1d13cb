"""How one request wants its tokens chosen (names and defaults of vllm/sampling_params.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedlab.config import check_seed
from pagedlab.errors import UserError

MOST_CONTINUATIONS = 16_384  # of one prompt: each is a request of its own, made before the first step


@dataclass(frozen=True)
class SamplingParams:
    """Validated at construction; never written afterwards.

    Defaults are vLLM's: temperature 1, no truncation of the distribution, 16 tokens.

    Attributes:
        n: how many continuations; child i uses seed + i.
        temperature: 0 is greedy.
        top_p: smallest set of tokens whose probabilities reach this sum, 1 keeps all.
        top_k: number of most likely tokens kept, 0 keeps all.
        min_p: least probability relative to the most likely token, 0 keeps all.
        seed: makes the request's draws independent of its neighbours and of chunking.
        stop: strings that end the text; cut off unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end the request; kept as the last token.
        ignore_eos: go on after end-of-text.
        max_tokens: most output tokens, None for as many as ``max_model_len`` allows.
        min_tokens: end-of-text and stop tokens are impossible before so many output tokens.
        logprobs: how many most likely candidates to report per output token.
        prompt_logprobs: the same per prompt token; such a request skips prefix-cache hits,
            as a hit leaves no logits behind.
        skip_special_tokens: leave special tokens such as end-of-text out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):  # None, as vLLM writes it, is none
            object.__setattr__(self, name, () if getattr(self, name) is None else getattr(self, name))
        if not isinstance(self.stop, str | list | tuple) or not isinstance(self.stop_token_ids, list | tuple):
            name = "stop_token_ids" if isinstance(self.stop, str | list | tuple) else "stop"
            raise UserError(f"{name} is {getattr(self, name)!r}: give a list.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, least in (("n", 1), ("min_tokens", 0)):
            _whole_number(name, getattr(self, name), least)
        if self.n > MOST_CONTINUATIONS:
            raise UserError(f"n is {self.n}: give at most {MOST_CONTINUATIONS}.")
        for name, least in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0)):
            if getattr(self, name) is not None:
                _whole_number(name, getattr(self, name), least)
        if self.seed is not None:
            check_seed(self.seed)
        if type(self.top_k) is not int or self.top_k < -1:
            raise UserError(f"top_k is {self.top_k!r}: give 0 (or -1) to keep all tokens, or a positive whole number.")
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise UserError("top_p is 0: give a number above 0 and at most 1.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}: "
                "lower the first or raise the second."
            )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} is {getattr(self, name)!r}: give True or False.")
        if any(not isinstance(s, str) or not s for s in stop):
            raise UserError("a stop string is empty or not text: give non-empty strings.")
        if any(type(t) is not int or t < 0 for t in self.stop_token_ids):
            raise UserError("stop_token_ids must be whole numbers of 0 or more.")

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """A prompt token that hits the cache has no logits, so prompt_logprobs must compute it."""
        return self.prompt_logprobs is not None


def _whole_number(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise UserError(f"{name} is {value!r}: give a whole number of {least} or more.")


def _number(name: str, value: object, least: float, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or math.isinf(value):  # type: ignore[operator,arg-type]
        limit = f"from {least:g} to {most:g}" if most < math.inf else f"of {least:g} or more"
        raise UserError(f"{name} is {value!r}: give a number {limit}.")
