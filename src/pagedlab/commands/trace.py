"""``pagedlab trace``: watch prompts, or a scenario, travel through the engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from pagedlab.commands.inspect import Detail
from pagedlab.commands.knobs import Knobs, takes_knobs
from pagedlab.commands.prompts import for_model, read_prompts
from pagedlab.errors import UserError, notice
from pagedlab.trace.events import LEVELS, Event, Level, StepStarted
from pagedlab.trace.file import TraceFile, refuse_overwriting, why_unwritable
from pagedlab.trace.tracer import trace as tracer

if TYPE_CHECKING:
    from pagedlab.engine.llm import LLM
    from pagedlab.scenarios.run import ScenarioResult
    from pagedlab.scenarios.scenario import Scenario
    from pagedlab.viz.terminal import TerminalTracer

DEFAULT_NUM_BLOCKS = 64  # a pool that fits on a screen; memory would give thousands


@takes_knobs
def trace(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Text to continue; several run together.")
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option("--scenario", metavar="NAME|FILE", help="Run a story: one of `pagedlab scenarios`, or a file."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Save the trace: .jsonl, or .jsonl.zst, compressed."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the interactive page of the run as well.")
    ] = None,
    detail: Detail = None,
    record: Annotated[
        str | None,
        typer.Option(
            "--record", metavar="LEVEL", help="How much to save, in the same words, never less; default tensors."
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option("--layers", metavar="LIST", help="Layers that --record kernels traces: all, 0 or 0,3,5."),
    ] = "all",
    pause: Annotated[bool, typer.Option("--pause", help="Wait for a key after each step.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    *,
    knobs: Knobs,
) -> None:
    """Watch prompts travel from add_request to KV slots and back to text.

    Without --num-blocks, --kv-cache-memory or --max-model-len the pool has 64 blocks, which fit on a screen.
    """
    shown, saved = _levels(detail, record)
    wanted_layers = _layers(layers)
    if scenario is not None and prompts:
        raise UserError("give prompts or --scenario, not both.")
    from pagedlab.viz.terminal import TerminalTracer

    if html is not None and (why := why_unwritable(html)):
        raise UserError(f"cannot write the page {html}: {why}.")
    if html is not None and LEVELS.index(saved) < LEVELS.index("blocks"):
        raise UserError(f"--html needs --record blocks or finer, not {saved}.")
    if html is not None and out is not None and html.absolute() == out.absolute():
        raise UserError(f"--out and --html are the same file {html}: give two.")
    for written in (out, html):
        refuse_overwriting(Path(scenario or ""), written)
    file = TraceFile(out) if out is not None else None
    with _Recording(file, html, TerminalTracer(detail=shown, pause=pause), saved, wanted_layers):
        if scenario is not None:
            _run_scenario(scenario, knobs)
        else:
            _run_prompts(read_prompts(prompts, or_else=", or --scenario NAME"), knobs, chat)


class _Recording:
    """Traces a block into a view, a file and a page; whatever ends it, what was traced until then is saved.

    Events are held back until the first step begins, so a run that is refused shows and writes nothing.
    """

    def __init__(
        self, file: TraceFile | None, page: Path | None, view: TerminalTracer, record: Level, layers: str | list[int]
    ) -> None:
        self._file, self._page, self._view, self._record, self._layers = file, page, view, record, layers
        self._events: list[Event] = []  # for the page
        self._held: list[Event] | None = []

    def append(self, event: Event, /) -> None:
        if self._held is None:
            self._pass_on(event)
            return
        self._held.append(event)
        if type(event) is StepStarted:
            held, self._held = self._held, None
            for earlier in held:
                self._pass_on(earlier)

    def _pass_on(self, event: Event) -> None:
        if self._file is not None:
            self._file.append(event)
        if self._page is not None:
            self._events.append(event)
        self._view.append(event)

    def __enter__(self) -> None:
        tracer.start(self, record=self._record, layers=self._layers)

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            tracer.stop()
            if self._held is None:
                self._view.close()
        finally:
            if self._held is None:
                self._save("interrupted; " if kind is not None and issubclass(kind, KeyboardInterrupt) else "")

    def _save(self, interrupted: str) -> None:
        if self._file is not None:
            self._file.close()
            until_here = " until here" if interrupted else ""
            if self._file.exists:
                notice(f"{interrupted}the trace{until_here} is in {self._file.path}")
        if self._page is not None:
            from pagedlab.trace.trace import Trace
            from pagedlab.viewer.page import write_page

            write_page(Trace(self._events), self._page)
            notice(f"the page is {self._page}")


def _levels(detail: str | None, record: str | None) -> tuple[Level, Level]:
    """What is shown (default blocks) and what is recorded (default tensors), which is never less."""
    for name, value in (("--detail", detail), ("--record", record)):
        if value is not None and value not in LEVELS:
            raise UserError(f"{name} is {value!r}: choose one of {', '.join(LEVELS)}.")
    saved = LEVELS.index(record or "tensors")
    shown = LEVELS.index(detail) if detail is not None else min(LEVELS.index("blocks"), saved)
    return cast(Level, LEVELS[shown]), cast(Level, LEVELS[max(saved, shown)])


def _layers(text: str) -> str | list[int]:
    if text == "all":
        return text
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UserError(f"--layers is {text!r}: give all, one number, or several like 0,3,5.")
    return [int(part) for part in parts]


def _check_layers(llm: LLM) -> None:
    last = llm.model_config.num_hidden_layers - 1
    if isinstance(tracer.layers, list) and max(tracer.layers) > last:
        raise UserError(f"--layers names layer {max(tracer.layers)}, but the model's layers are 0 to {last}.")


def _run_prompts(prompts: list[str], knobs: Knobs, chat: bool) -> None:
    params = knobs.sampling_params()
    sized = {"num_blocks", "kv_cache_memory", "max_model_len"} & set(knobs.engine)
    config = knobs.engine_config(**({} if sized else {"num_blocks": DEFAULT_NUM_BLOCKS}))

    from pagedlab.engine.llm import LLM

    llm = LLM(config=config)
    _check_layers(llm)
    llm.generate(for_model(llm, prompts, chat=chat), params)


def _run_scenario(name: str, knobs: Knobs) -> None:
    """A story on the stand-in model if it brings its tokens, else on a real one."""
    from pagedlab.scenarios.library import load_scenario
    from pagedlab.scenarios.run import ScenarioResult, play, run

    knobs.engine_config()  # refuses impossible values, also for a story that needs no model
    story = load_scenario(name).with_config(**knobs.engine)
    if not story.needs_model:
        run(story)
        return
    from pagedlab.engine.llm import LLM

    result = ScenarioResult()
    llm = LLM(config=story.engine_config())
    _check_layers(llm)
    play(story, _LLMStage(story, llm, knobs, result), result)


class _LLMStage:
    """What a scenario's script acts on when the scenario needs a model."""

    def __init__(self, scenario: Scenario, llm: LLM, knobs: Knobs, result: ScenarioResult) -> None:
        self._scenario, self._llm, self._knobs, self._result = scenario, llm, knobs, result

    def add(self, request_id: str) -> None:
        spec = self._scenario.requests[request_id]
        prompt = {k: spec[k] for k in ("prompt", "prompt_token_ids", "cache_salt") if spec.get(k) is not None}
        params = self._scenario.sampling_params(request_id)
        self._llm.add_request(
            prompt,
            dataclasses.replace(params, **self._knobs.sampling),
            request_id=request_id,
            priority=spec.get("priority", 0),
            arrival_time=spec.get("arrival_time"),
        )

    def abort(self, request_id: str) -> None:
        for output in self._llm.abort(request_id):
            self._result.finish_reasons[output.request_id] = "abort"

    def reset_prefix_cache(self) -> None:
        self._llm.reset_prefix_cache()

    def step(self) -> None:
        for output in self._llm.step():
            completion = output.outputs[0]
            self._result.token_ids[output.request_id] = completion.token_ids
            if completion.finish_reason is not None:
                self._result.finish_reasons[output.request_id] = completion.finish_reason
            if completion.error is not None:
                self._result.errors[output.request_id] = completion.error

    def is_busy(self) -> bool:
        return self._llm.has_unfinished_requests()
