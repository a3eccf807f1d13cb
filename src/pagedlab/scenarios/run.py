"""Plays a scenario's script on an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from pagedlab.engine.core import EngineCore
from pagedlab.errors import UserError
from pagedlab.scenarios.scenario import Scenario, build_engine_core


@dataclass
class ScenarioResult:
    """What came out, by request id."""

    num_steps: int = 0
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)           # only with a model
    finish_reasons: dict[str, str] = field(default_factory=dict)  # stop, length, abort or error
    refused: dict[str, str] = field(default_factory=dict)         # sentence, for those not let in
    errors: dict[str, str] = field(default_factory=dict)          # sentence, for finish reason error


class Stage(Protocol):
    """What a script acts on: an engine with or without a model."""

    def add(self, request_id: str) -> None:
        """Raises UserError where the request is refused."""

    def abort(self, request_id: str) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def step(self) -> None: ...

    def is_busy(self) -> bool: ...


class ModelEngine(Protocol):
    """What a scenario asks of ``pagedlab.LLM``, which it does not import: it needs torch."""

    core: EngineCore

    def add_request(
        self, prompt: Any, sampling_params: Any, *, request_id: str, priority: int, arrival_time: float | None
    ) -> str: ...

    def step(self) -> list[Any]: ...

    def abort(self, request_id: str) -> list[Any]: ...

    def reset_prefix_cache(self) -> bool: ...

    def has_unfinished_requests(self) -> bool: ...


def run(scenario: Scenario, llm: ModelEngine | None = None) -> ScenarioResult:
    """Play a scenario: on the stand-in model if it brings its own tokens, else on ``llm``.

    ``LLM(config=scenario.engine_config())`` is the engine the scenario has in mind.

    Raises:
        UserError: the scenario needs a model and there is none.
    """
    result = ScenarioResult()
    if not scenario.needs_model:
        play(scenario, CoreStage(scenario, build_engine_core(scenario), result), result)
    elif llm is not None:
        play(scenario, ModelStage(scenario, llm, result), result)
    else:
        raise UserError(f"scenario {scenario.name} needs a model: its requests have no sampled_token_ids.")
    return result


def play(scenario: Scenario, stage: Stage, result: ScenarioResult) -> None:
    """Script entries before their step, then the step; one step more after the last request has finished.

    That last step schedules nothing: it tells the worker who has finished.
    """
    while result.num_steps <= scenario.last_scripted_step or stage.is_busy():
        for action, request_id in scenario.actions_before(result.num_steps):
            if action == "add":
                try:
                    stage.add(request_id)
                except UserError as refusal:
                    result.refused[request_id] = str(refusal)
            elif action == "abort":
                stage.abort(request_id)
            else:
                stage.reset_prefix_cache()
        stage.step()
        result.num_steps += 1
    stage.step()
    result.num_steps += 1


class CoreStage:
    """An engine core on the stand-in model."""

    def __init__(self, scenario: Scenario, core: EngineCore, result: ScenarioResult) -> None:
        self.scenario, self.core, self.result = scenario, core, result

    def add(self, request_id: str) -> None:
        self.core.add_request(self.scenario.make_request(request_id))

    def abort(self, request_id: str) -> None:
        if request_id in self.core.scheduler.requests:
            self.result.finish_reasons[request_id] = "abort"
        self.core.abort_requests([request_id])

    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()

    def step(self) -> None:
        for output in self.core.step():
            self.result.token_ids.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.result.finish_reasons[output.request_id] = output.finish_reason
            if output.error is not None:
                self.result.errors[output.request_id] = output.error

    def is_busy(self) -> bool:
        return self.core.has_unfinished_requests()


class ModelStage:
    """``pagedlab.LLM``, driven step by step."""

    def __init__(self, scenario: Scenario, llm: ModelEngine, result: ScenarioResult) -> None:
        self.scenario, self.llm, self.result = scenario, llm, result

    def add(self, request_id: str) -> None:
        spec = self.scenario.requests[request_id]
        kept = ("prompt_token_ids", "cache_salt") if "prompt_token_ids" in spec else ("prompt", "cache_salt")
        self.llm.add_request(
            {name: spec[name] for name in kept if spec.get(name) is not None},
            self.scenario.sampling_params(request_id),
            request_id=request_id,
            priority=spec.get("priority", 0),
            arrival_time=spec.get("arrival_time"),
        )

    def abort(self, request_id: str) -> None:
        self._take(self.llm.abort(request_id))

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def step(self) -> None:
        if self.llm.has_unfinished_requests():
            self._take(self.llm.step())
        else:
            self.llm.core.step()  # an idle step, which LLM.step would leave out

    def is_busy(self) -> bool:
        return self.llm.has_unfinished_requests()

    def _take(self, outputs: list[Any]) -> None:
        for output in outputs:
            first = output.outputs[0]
            self.result.token_ids[output.request_id] = list(first.token_ids)
            self.result.texts[output.request_id] = first.text
            if first.finish_reason is not None:
                self.result.finish_reasons[output.request_id] = first.finish_reason
            if first.error is not None:
                self.result.errors[output.request_id] = first.error
