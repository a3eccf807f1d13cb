"""The Python API: build an engine, hand it prompts, get text (vllm/entrypoints/llm.py).

    from pagedlab import LLM, SamplingParams
    llm = LLM()
    print(llm.generate("It is a truth", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagedlab.config import EngineConfig
from pagedlab.engine.arguments import check_request, engine_config, is_one_prompt, one_per_prompt
from pagedlab.engine.build import build_engine
from pagedlab.engine.guards import check_at_the_door, id_in_use, refuse
from pagedlab.engine.input_processor import InputProcessor, ProcessedInput, Prompt
from pagedlab.engine.interrupt import Interrupts
from pagedlab.engine.output_processor import OutputKind, OutputProcessor, RequestOutput
from pagedlab.errors import UserError
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.sampling_params import SamplingParams
from pagedlab.trace.tracer import trace

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """An engine in this process, and the two ways to use it.

    ``generate`` and ``stream`` take prompts and see them through. ``add_request``, ``step`` and
    ``abort`` are the level below, for whoever wants to watch or drive single steps.

    Attributes:
        config: as it was given.
        model_config: what the checkpoint says.
        max_model_len: most tokens of prompt plus output, resolved.
        kv_cache_config: groups, blocks and buffers of the KV cache.
        core: the engine core: ``core.scheduler`` and its queues and blocks, ``core.executor``.
        startup_seconds: where the time to build the engine went.
        interrupts: ``with llm.interrupts`` around a loop over ``step`` lets Ctrl-C act between steps only.
    """

    def __init__(self, model: str | Path | None = None, *, config: EngineConfig | None = None, **knobs: Any) -> None:
        """Build an engine from a model and knobs, or from an EngineConfig.

        Args:
            model: a directory or a hub id; None is the embedded model.
            config: all knobs at once, instead of ``model`` and ``knobs``.
            knobs: fields of EngineConfig.

        Raises:
            UserError: an unknown or impossible knob, no such model, or one that does not fit.
        """
        self.config = engine_config(model, config, knobs)
        engine = build_engine(self.config)
        self.model_config, self.tokenizer, self.core = engine.model_config, engine.tokenizer, engine.core
        self.max_model_len, self.kv_cache_config = engine.max_model_len, engine.kv_cache_config
        self.startup_seconds = engine.startup_seconds
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            max_model_len=self.max_model_len,
            block_hasher=request_block_hasher(self.config.block_size) if self.config.enable_prefix_caching else None,
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self._inboxes: dict[str, list[RequestOutput]] = {}  # request -> where generate or stream waits for it
        self._unclaimed: list[RequestOutput] = []           # of add_request, for the next step()
        self._num_added = 0
        self.interrupts = Interrupts()

    # ---------------------------------------------------------------- prompts in, results out

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params | None = None,
        *,
        priority: Sequence[int] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts; the results are in the order of the prompts.

        All prompts are checked before the first one enters, so a bad one changes nothing. After
        Ctrl-C the requests are aborted and the engine can be used again.

        Args:
            prompts: text, token ids, ``{"prompt_token_ids": […]}``, or a list of these.
            sampling_params: for all, or one per prompt; the default is ``SamplingParams()`` (temperature 1, 16
                tokens), where vLLM's ``LLM`` would start from the checkpoint's generation_config.json.
            priority: one per prompt, smaller is more urgent; only the priority policy looks at it.
            progress: count finished prompts on stderr.

        Raises:
            UserError: a bad prompt or parameter; the sentence says which.
        """
        inbox: list[RequestOutput] = []
        request_ids = self._submit(prompts, sampling_params, priority, "final_only", inbox)
        results: dict[str, RequestOutput] = {}
        with self._owning(request_ids), self.interrupts:
            while len(results) < len(request_ids):
                self._run_step()
                results |= {output.request_id: output for output in inbox}
                inbox.clear()
                if progress:
                    print(f"\r{len(results)}/{len(request_ids)} prompts", end="", file=sys.stderr, flush=True)
        if progress:
            print(file=sys.stderr)
        return [results[request_id] for request_id in request_ids]

    def stream(
        self, prompts: Prompts, sampling_params: Params | None = None, *, priority: Sequence[int] | None = None
    ) -> Iterator[RequestOutput]:
        """As ``generate``, but yields what each step adds, in whole characters.

        ``output.outputs`` holds the continuations that grew, with only their new text and tokens;
        the texts of one index add up to the final text. Closing the iterator aborts what still runs.

        Raises:
            UserError: at once, not at the first output.
        """
        inbox: list[RequestOutput] = []
        request_ids = self._submit(prompts, sampling_params, priority, "delta", inbox)
        outputs = self._stream(request_ids, inbox)
        next(outputs)  # into its ``with``, so that an iterator that nobody reads aborts its requests too
        return outputs

    def _stream(self, request_ids: list[str], inbox: list[RequestOutput]) -> Generator[Any, None, None]:
        """Yields None once, then outputs."""
        num_running = len(request_ids)
        with self._owning(request_ids):
            yield
            while num_running or inbox:
                if not inbox:
                    self._run_step()
                    continue
                output = inbox.pop(0)
                num_running -= output.finished
                yield output

    def chat_prompt(self, messages: list[dict[str, str]]) -> Prompt:
        """A conversation as the prompt that the model's chat template makes of it.

        Raises:
            UserError: the model has no tokenizer or no template, or it refuses the messages.
        """
        if self.tokenizer is None:
            raise UserError("this model folder has no tokenizer.json: give token ids instead of text.")
        text = self.tokenizer.apply_chat_template(messages)
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    # ---------------------------------------------------------------- step by step

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        kind: OutputKind = "cumulative",
    ) -> str:
        """Let one prompt in and return its id; ``step`` then reports on it.

        Args:
            kind: whether the reports hold everything so far, only what is new ("delta"), or come
                once, at the end ("final_only").
            request_id: r0, r1, … if None; one that is in use is refused.
            arrival_time: breaks ties of the priority policy. If None, requests are numbered as they
                come, so that a trace does not depend on the clock.

        Raises:
            UserError: a bad prompt or parameter, or an id in use; nothing has changed.
        """
        (params,) = one_per_prompt("sampling_params", sampling_params or SamplingParams(), SamplingParams, 1)
        check_request(request_id, priority, arrival_time, kind)
        processed = self._process(prompt, params, request_id, priority, arrival_time)
        self._add([processed], kind)
        return processed.request_id

    def step(self) -> list[RequestOutput]:
        """Run one step and return what became of the requests from ``add_request``.

        Without work it schedules nothing, and tells the worker who has finished.
        """
        self._run_step()
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    def abort(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """Cancel requests, with all their continuations; returns what they had. Unknown ids are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        core_ids, outputs = self._outputs.abort_requests(request_ids)
        self.core.abort_requests(core_ids)
        for output in outputs:
            self._inboxes.get(output.request_id, []).append(output)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether another ``step`` has anything to do or to report."""
        return self.core.has_unfinished_requests() or bool(self._unclaimed)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing is changed, while any block is in use."""
        return self.core.reset_prefix_cache()

    def _run_step(self) -> None:
        """One step of the core, its outputs to whoever waits for them.

        A step that is cut off by an exception may have marked blocks as cached that were never
        written, so everything is aborted and the prefix cache emptied before the exception goes on.
        """
        with self.interrupts:
            try:
                core_outputs = self.core.step()
            except BaseException:
                self.abort(self._outputs.unfinished_request_ids())
                self.core.reset_prefix_cache()
                raise
            outputs, to_abort = self._outputs.process_outputs(core_outputs)
            if to_abort:
                self.core.abort_requests(to_abort)
            for output in outputs:
                self._inboxes.get(output.request_id, self._unclaimed).append(output)
            self.interrupts.raise_if_came()

    # ---------------------------------------------------------------- at the door

    def _submit(
        self,
        prompts: Prompts,
        sampling_params: Params | None,
        priority: Sequence[int] | None,
        kind: OutputKind,
        inbox: list[RequestOutput],
    ) -> list[str]:
        """Let several prompts in, all or none."""
        each: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        params = one_per_prompt("sampling_params", sampling_params or SamplingParams(), SamplingParams, len(each))
        priorities = one_per_prompt("priority", 0 if priority is None else priority, int, len(each))
        batch = [self._process(p, s, None, n, None) for p, s, n in zip(each, params, priorities, strict=True)]
        self._add(batch, kind)
        request_ids = [processed.request_id for processed in batch]
        self._inboxes |= dict.fromkeys(request_ids, inbox)
        return request_ids

    def _process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        arrival_time: float | None,
    ) -> ProcessedInput:
        if request_id is None:
            request_id = self._inputs.next_request_id()
        else:
            self._inputs.note_request_id(request_id)
        self._num_added += 1
        return self._inputs.process(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            arrival_time=float(self._num_added) if arrival_time is None else arrival_time,
        )

    def _add(self, batch: list[ProcessedInput], kind: OutputKind) -> None:
        """Check everything, then change something."""
        if trace.on:
            trace.enter(self.core)
        for processed in batch:
            if processed.request_id in self._outputs:
                refuse(processed.request_id, id_in_use(processed.request_id))
            for request in processed.requests:
                check_at_the_door(self.core.scheduler, request)
        for processed in batch:
            self._outputs.add_request(processed, kind=kind)
            for request in processed.requests:
                self.core.add_request(request)

    @contextmanager
    def _owning(self, request_ids: list[str]) -> Iterator[None]:
        """Whatever ends the block, none of these requests outlives it."""
        try:
            yield
        finally:
            self.abort(request_ids)
            for request_id in request_ids:
                del self._inboxes[request_id]
