"""Plays a scenario's script on an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pagedlab.engine.core import EngineCore
from pagedlab.errors import UserError
from pagedlab.scenarios.scenario import Scenario, build_engine_core


@dataclass
class ScenarioResult:
    """What came out, by request id."""

    num_steps: int = 0
    token_ids: dict[str, list[int]] = field(default_factory=dict)
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


def run(scenario: Scenario) -> ScenarioResult:
    """Run a scenario that brings its own tokens, on the stand-in model.

    Raises:
        UserError: the scenario needs a model.
    """
    if scenario.needs_model:
        raise UserError(f"scenario {scenario.name} needs a model: its requests have no sampled_token_ids.")
    result = ScenarioResult()
    play(scenario, CoreStage(scenario, build_engine_core(scenario), result), result)
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
