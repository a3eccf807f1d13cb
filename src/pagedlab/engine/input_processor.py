"""From what a user submits to requests of the engine core (vllm/v1/engine/input_processor.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagedlab.engine.tokenizer import Tokenizer
from pagedlab.errors import UserError
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams

# Text, token ids, or {"prompt": …} / {"prompt_token_ids": …} with, if wanted, a "cache_salt".
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class ProcessedInput:
    """One submitted prompt: the requests it becomes, one per wanted continuation.

    With n = 1 the request has the id of the prompt; with more, child i is "i_r0", as in vLLM.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    requests: list[Request]


class InputProcessor:
    """Checks prompts and parameters; everything is refused before anything is changed.

    Attributes:
        eos_token_id: the first end-of-text id; it ends a request with stop_reason None.
        other_eos_ids: those that only generation_config names; they act as stop ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        block_hasher: Callable[[Request], list[bytes]] | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self.other_eos_ids = tuple(eos_token_ids[1:])
        self.max_model_len = max_model_len
        self._block_hasher = block_hasher
        self._num_submitted = 0
        self._ids_given: set[str] = set()  # by users, where they look like our own

    def process(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        arrival_time: float = 0.0,
    ) -> ProcessedInput:
        """Tokenize, check, and make one request per continuation.

        Raises:
            UserError: ids outside the vocabulary, text without a tokenizer, or
                parameters that this model cannot serve.
        """
        text, token_ids, cache_salt = self._tokenize(prompt)
        self._check(request_id, token_ids, sampling_params)
        params = self._resolve(sampling_params, len(token_ids))
        requests = []
        for index in range(params.n):
            seed = None if params.seed is None else params.seed + index
            requests.append(
                Request(
                    request_id if params.n == 1 else f"{index}_{request_id}",
                    token_ids,
                    params if params.n == 1 else replace(params, n=1, seed=seed),
                    priority=priority,
                    arrival_time=arrival_time,
                    cache_salt=cache_salt,
                    eos_token_id=self.eos_token_id,
                    block_hasher=self._block_hasher,
                    prompt=text,
                )
            )
        return ProcessedInput(request_id, text, token_ids, params, requests)

    def next_request_id(self) -> str:
        """r0, r1, …: never twice in the life of an engine, also not one that a user gave."""
        while (request_id := f"r{self._num_submitted}") in self._ids_given:
            self._num_submitted += 1
        self._num_submitted += 1
        return request_id

    def note_request_id(self, request_id: str) -> None:
        """Remember an id that the user chose, lest it be given once more."""
        if re.fullmatch(r"r\d+", request_id):
            self._ids_given.add(request_id)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """Text if there is any, token ids, and the cache salt."""
        cache_salt = None
        if isinstance(prompt, Mapping):
            cache_salt = prompt.get("cache_salt")
            if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
                raise UserError("cache_salt must be a non-empty string.")
            _check_unicode("cache_salt", cache_salt or "")
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
                raise UserError("a prompt as a dict has a 'prompt' or 'prompt_token_ids', maybe with a 'cache_salt'.")
            if "prompt_token_ids" in prompt:
                text = prompt.get("prompt")
                if text is not None and not isinstance(text, str):
                    raise UserError(f"a prompt is text or a list of token ids, not {type(text).__name__}.")
                return text, _token_ids(prompt["prompt_token_ids"]), cache_salt
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("this model folder has no tokenizer.json: give token ids instead of text.")
            _check_unicode("the prompt", prompt)
            return prompt, self.tokenizer.encode(prompt), cache_salt
        return None, _token_ids(prompt), cache_salt

    def _check(self, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise UserError(
                    f"token id {token_id} in the prompt of {request_id} is outside the vocabulary: "
                    f"ids go from 0 to {self.vocab_size - 1}."
                )
        for token_id in params.stop_token_ids:
            if token_id >= self.vocab_size:
                raise UserError(
                    f"stop token id {token_id} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}."
                )
        if params.stop and self.tokenizer is None:
            raise UserError("this model folder has no tokenizer.json, so there is no text to find stop strings in.")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise UserError(f"{name} is {getattr(params, name)}, but the vocabulary has {self.vocab_size} tokens.")

    def _resolve(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Fill in what depends on the model: the other end-of-text ids, and an open max_tokens."""
        stop_token_ids = tuple(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids += tuple(i for i in self.other_eos_ids if i not in stop_token_ids)
        # At least 1: a prompt that leaves no room is refused at the door, with the numbers.
        room = max(self.max_model_len - num_prompt_tokens, 1)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(room, params.min_tokens)  # that min_tokens have no room is said there too
        return replace(params, stop_token_ids=stop_token_ids, max_tokens=max_tokens)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"{name} is not valid Unicode text: it has a lone surrogate.") from e


def _token_ids(prompt: object) -> list[int]:
    """A list of whole numbers; numpy's and torch's integers are welcome."""
    if isinstance(prompt, bytes):  # its members are numbers too, but hardly token ids
        raise UserError("a prompt is text or a list of token ids, not bytes: decode them.")
    try:
        ids = [i if type(i) is int else i.__index__() for i in prompt]  # type: ignore[attr-defined]
    except (TypeError, AttributeError) as e:
        raise UserError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}.") from e
    return ids
