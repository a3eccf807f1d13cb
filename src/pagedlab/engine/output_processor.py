"""From the engine core's outputs to what a user gets (vllm/v1/engine/output_processor.py, vllm/outputs.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from pagedlab.engine.detokenizer import Detokenizer
from pagedlab.engine.input_processor import ProcessedInput
from pagedlab.engine.tokenizer import Tokenizer
from pagedlab.sched.output import EngineCoreOutput, TopLogprobs
from pagedlab.trace.events import TextEmitted
from pagedlab.trace.tracer import trace

OutputKind = Literal["cumulative", "delta", "final_only"]  # as vllm.sampling_params.RequestOutputKind


@dataclass(frozen=True)
class Logprob:
    """One candidate at one position; rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: which of the ``n``.
        finish_reason: stop, length, abort or error; None while it runs.
        stop_reason: the stop string or stop token id; None for end-of-text and for the others.
        cumulative_logprob: sum over ``token_ids``, if ``logprobs`` were asked for.
        error: one sentence with the numbers, if finish_reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass
class RequestOutput:
    """A prompt and its continuations: all of them so far, or (kind "delta") what one step added.

    Attributes:
        prompt: the text, None if token ids were given.
        prompt_logprobs: one dict per prompt token, None for the first, which nothing precedes.
        outputs: by index; of a delta, only the continuations that the step went on with.
        finished: no continuation runs any more.
        num_cached_tokens: prompt tokens that the prefix cache gave the first continuation.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass
class _Child:
    """One continuation while it runs; written only by the OutputProcessor."""

    parent: _Parent
    output: CompletionOutput
    detokenizer: Detokenizer | None
    num_reported: int = 0              # tokens handed out by an earlier delta
    text_reported: int = 0             # characters, likewise


@dataclass
class _Parent:
    """A submitted prompt."""

    processed: ProcessedInput
    kind: OutputKind
    children: list[_Child] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class OutputProcessor:
    """Text, log-probabilities and finish reasons of all requests under way.

    Owns the detokenizers. A stop string is found here, so it is here that the engine core is told
    to abort the request.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._parents: dict[str, _Parent] = {}
        self._children: dict[str, _Child] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parents or request_id in self._children

    def unfinished_request_ids(self) -> list[str]:
        """Ids as they were submitted, in order."""
        return list(self._parents)

    def add_request(self, processed: ProcessedInput, *, kind: OutputKind = "cumulative") -> None:
        """Expect outputs for a prompt; ``kind`` says how much each RequestOutput holds."""
        parent = _Parent(processed, kind)
        params = processed.sampling_params
        if params.prompt_logprobs is not None:
            parent.prompt_logprobs = [None]
        for index, request in enumerate(processed.requests):
            output = CompletionOutput(index, "", [])
            if params.logprobs is not None:
                output.logprobs, output.cumulative_logprob = [], 0.0
            detokenizer = None if self._tokenizer is None else Detokenizer(self._tokenizer, params)
            child = _Child(parent, output, detokenizer)
            parent.children.append(child)
            self._children[request.request_id] = child
        self._parents[processed.request_id] = parent

    def abort_requests(self, request_ids: Iterable[str]) -> tuple[list[str], list[RequestOutput]]:
        """Forget requests; a parent's id stands for all its children. Unknown ids are ignored.

        Returns the ids to abort in the engine core, and what the requests had until now.
        """
        core_ids, outputs = [], []
        for request_id in request_ids:
            parent = self._parents.get(request_id)
            if parent is None:
                continue
            touched = []
            for request, child in zip(parent.processed.requests, parent.children, strict=True):
                if self._children.pop(request.request_id, None) is not None:
                    core_ids.append(request.request_id)
                    self._take(child, EngineCoreOutput(request.request_id, [], finish_reason="abort"))
                    touched.append(child)
            del self._parents[request_id]
            outputs.append(self._request_output(parent, touched, finished=True))
        return core_ids, outputs

    def process_outputs(self, core_outputs: Iterable[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Take one step's outputs.

        Returns a RequestOutput per prompt that went on (or, of kind final_only, ended), and the ids
        of requests that a stop string ended, which the engine core must abort.
        """
        touched: dict[str, list[_Child]] = {}
        to_abort = []
        for core_output in core_outputs:
            child = self._children.get(core_output.request_id)
            if child is None:
                continue  # aborted while the step ran
            self._take(child, core_output)
            if child.output.finish_reason is not None:
                del self._children[core_output.request_id]
                if core_output.finish_reason is None:
                    to_abort.append(core_output.request_id)
            touched.setdefault(child.parent.processed.request_id, []).append(child)
        outputs = []
        for request_id, children in touched.items():
            parent = self._parents[request_id]
            finished = all(child.output.finish_reason is not None for child in parent.children)
            if finished:
                del self._parents[request_id]
            if finished or parent.kind != "final_only":
                children.sort(key=lambda child: child.output.index)
                outputs.append(self._request_output(parent, children, finished))
        return outputs, to_abort

    def _take(self, child: _Child, core_output: EngineCoreOutput) -> None:
        """Bring one continuation up to date."""
        output, detokenizer = child.output, child.detokenizer
        output.token_ids += core_output.new_token_ids
        output.finish_reason, output.stop_reason = core_output.finish_reason, core_output.stop_reason
        output.error = core_output.error
        if output.index == 0:
            child.parent.num_cached_tokens = max(core_output.num_cached_tokens, child.parent.num_cached_tokens)
            self._take_prompt_logprobs(child.parent, core_output.prompt_logprobs or [])
        if output.logprobs is not None and core_output.logprobs is not None:
            chosen = core_output.new_token_ids[-1]
            candidates = self._candidates(core_output.logprobs, chosen)
            output.logprobs.append(candidates)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + candidates[chosen].logprob
        if detokenizer is None:
            return
        text = detokenizer.update(
            core_output.new_token_ids,
            finished=output.finish_reason is not None,
            by_stop_token=output.finish_reason == "stop",
        )
        if trace.on and text:
            trace.emit(TextEmitted(request_id=core_output.request_id, text=text))
        output.text = detokenizer.text
        if detokenizer.stop_reason is not None:
            output.finish_reason, output.stop_reason = "stop", detokenizer.stop_reason

    def _take_prompt_logprobs(self, parent: _Parent, new: list[TopLogprobs]) -> None:
        """Logprobs of the prompt's second token on, as its chunks are computed."""
        prompt_token_ids = parent.processed.prompt_token_ids
        for top in new:
            assert parent.prompt_logprobs is not None, "prompt logprobs that nobody asked for"
            parent.prompt_logprobs.append(self._candidates(top, prompt_token_ids[len(parent.prompt_logprobs)]))

    def _candidates(self, top: TopLogprobs, chosen: int) -> dict[int, Logprob]:
        """Candidates by token id, the chosen one with its own rank.

        The others are in order of rank: [7 (rank 9), 3, 5] gives 3 and 5 the ranks 1 and 2, where
        7 was chosen though it is not among the two most likely.
        """
        in_front = 1 if top.token_ids[0] == chosen and top.rank != 1 else 0
        return {
            token_id: Logprob(
                logprob=logprob,
                rank=top.rank if token_id == chosen else place + 1 - in_front,
                decoded_token=None if self._tokenizer is None else self._tokenizer.token_text(token_id),
            )
            for place, (token_id, logprob) in enumerate(zip(top.token_ids, top.logprobs, strict=True))
        }

    def _request_output(self, parent: _Parent, touched: list[_Child], finished: bool) -> RequestOutput:
        """All continuations so far, or as a delta what the touched ones gained."""
        is_delta = parent.kind == "delta"
        return RequestOutput(
            request_id=parent.processed.request_id,
            prompt=parent.processed.prompt,
            prompt_token_ids=parent.processed.prompt_token_ids,
            outputs=[_delta(c) for c in touched] if is_delta else [_copy(c.output) for c in parent.children],
            finished=finished,
            num_cached_tokens=parent.num_cached_tokens,
            prompt_logprobs=parent.prompt_logprobs,
        )


def _copy(output: CompletionOutput) -> CompletionOutput:
    """A snapshot that later steps do not change."""
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return replace(output, token_ids=list(output.token_ids), logprobs=logprobs)


def _delta(child: _Child) -> CompletionOutput:
    """What the continuation gained since the last delta."""
    delta = _copy(child.output)
    delta.text = delta.text[child.text_reported :]
    delta.token_ids = delta.token_ids[child.num_reported :]
    if delta.logprobs is not None:
        delta.logprobs = delta.logprobs[child.num_reported :]
    child.text_reported, child.num_reported = len(child.output.text), len(child.output.token_ids)
    return delta
