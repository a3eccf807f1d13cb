"""Workloads without text: when requests arrive, how long they are, and what they share.

Time is counted in steps. Token ids are derived, not stored: token p of a request is the p-th of its
prefix group as far as the group's common prefix reaches, then the p-th of the request itself. Two
different sources never have the same id at the same position, so the prefix cache finds exactly what
a group shares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedlab.errors import UserError
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams
from pagedlab.wording import plural

MAX_TOKENS = 1 << 20     # most tokens of one request
MIN_VOCABULARY = 32_768  # so many token ids, or one per source if there are more sources
STRIDE = 7               # neighbours in one text have different ids


@dataclass(frozen=True)
class SimulatedRequest:
    """One request of a workload."""

    request_id: str
    arrival_step: int
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_group: str | None = None  # requests of one group begin with the same tokens …
    num_prefix_tokens: int = 0       # … so many of them
    priority: int = 0


@dataclass
class Workload:
    """Requests in order of arrival."""

    name: str
    about: str                        # how it came to be, for the report
    requests: list[SimulatedRequest]
    _sources: dict[str, int] = field(default_factory=dict, repr=False)  # prefix group or request -> source of ids

    def __post_init__(self) -> None:
        self.requests.sort(key=lambda r: r.arrival_step)
        groups = dict.fromkeys(r.prefix_group for r in self.requests if r.prefix_group is not None)
        names = [f"group {group}" for group in groups] + [f"request {r.request_id}" for r in self.requests]
        self._sources = {name: source for source, name in enumerate(names)}

    def prompt_token_ids(self, request: SimulatedRequest) -> list[int]:
        """Source 5 of the request and source 0 of its group, 2 tokens shared: [0, 7, 19, 26, …]."""
        shared = request.num_prefix_tokens if request.prefix_group is not None else 0
        own = self._tokens(f"request {request.request_id}", shared, request.num_prompt_tokens - shared)
        return [*self._tokens(f"group {request.prefix_group}", 0, shared), *own] if shared else list(own)

    def output_token_ids(self, request: SimulatedRequest) -> Sequence[int]:
        return self._tokens(f"request {request.request_id}", request.num_prompt_tokens, request.num_output_tokens)

    def make_request(self, request: SimulatedRequest, block_size: int, enable_prefix_caching: bool) -> Request:
        params = SamplingParams(temperature=0, max_tokens=request.num_output_tokens)
        return Request(
            request.request_id,
            self.prompt_token_ids(request),
            params,
            priority=request.priority,
            arrival_time=float(request.arrival_step),
            block_hasher=request_block_hasher(block_size) if enable_prefix_caching else None,
        )

    def _tokens(self, source: str, first: int, count: int) -> DerivedTokens:
        return DerivedTokens(self._sources[source], first, count, max(MIN_VOCABULARY, len(self._sources)))


@dataclass(frozen=True)
class DerivedTokens(Sequence[int]):
    """Tokens ``first`` … of one source, made when asked for: (source + 7 · position) mod vocabulary."""

    source: int
    first: int
    length: int
    vocabulary: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """One token; slices are not needed and not there."""
        if not 0 <= index < self.length:
            raise IndexError(index)
        return (self.source + STRIDE * (self.first + index)) % self.vocabulary


def read_jsonl(path: Path) -> Workload:
    """One request a line: arrival_step, num_prompt_tokens, num_output_tokens, and if wanted request_id,
    prefix_group with num_prefix_tokens, priority.

    Raises:
        UserError: the file cannot be read, or a line is wrong; the sentence says which.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8: give one JSON object a line.") from None
    requests: list[SimulatedRequest] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            request = _request_from_line(line, f"{path}, line {number}", f"r{len(requests)}")
            if request.request_id in seen:
                raise UserError(f"{path}, line {number}: request_id {request.request_id!r} occurs twice.")
            seen.add(request.request_id)
            requests.append(request)
    if not requests:
        raise UserError(f"{path} has no request: give one JSON object a line.")
    return Workload(path.name, f"{plural(len(requests), 'request')} from {path}", requests)


_NUMBERS = {"arrival_step": 0, "num_prompt_tokens": 1, "num_output_tokens": 1, "num_prefix_tokens": 0}  # least values
_NEEDED = ("arrival_step", "num_prompt_tokens", "num_output_tokens")
_FIELDS = (*_NUMBERS, "request_id", "prefix_group", "priority")


def _request_from_line(line: str, where: str, request_id: str) -> SimulatedRequest:
    try:
        given: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}).") from None
    if not isinstance(given, dict):
        raise UserError(f"{where} must be a JSON object with {', '.join(_NEEDED)}.")
    for name in given:
        if name not in _FIELDS:
            raise UserError(f"{where} has an unknown field {name!r}: known ones are {', '.join(_FIELDS)}.")
    for name in _NEEDED:
        if name not in given:
            raise UserError(f"{where} has no {name}.")
    for name, least in _NUMBERS.items():
        value = given.get(name, least)
        if type(value) is not int or not least <= value < MAX_TOKENS:
            raise UserError(f"{where}: {name} is {value!r}: give a whole number from {least} to {MAX_TOKENS - 1}.")
    if type(given.get("priority", 0)) is not int:
        raise UserError(f"{where}: priority must be a whole number.")
    group = given.get("prefix_group")
    if group is not None and not isinstance(group, str | int):
        raise UserError(f"{where}: prefix_group must be text, a number or null.")
    if given.get("num_prefix_tokens") and group is None:
        raise UserError(f"{where} has num_prefix_tokens and no prefix_group to share them with.")
    if given.get("num_prefix_tokens", 0) > given["num_prompt_tokens"]:
        raise UserError(
            f"{where}: num_prefix_tokens is {given['num_prefix_tokens']}, more than the {given['num_prompt_tokens']} "
            "of the whole prompt: give at most num_prompt_tokens."
        )
    return SimulatedRequest(
        request_id=str(given.get("request_id", request_id)),
        arrival_step=given["arrival_step"],
        num_prompt_tokens=given["num_prompt_tokens"],
        num_output_tokens=given["num_output_tokens"],
        prefix_group=None if group is None else str(group),
        num_prefix_tokens=given.get("num_prefix_tokens", 0),
        priority=given.get("priority", 0),
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
