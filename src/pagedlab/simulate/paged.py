"""Runs the real control plane, scheduler and block pool, on a workload without a model."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagedlab.engine.core import EngineCore
from pagedlab.errors import UserError
from pagedlab.request import Request
from pagedlab.scenarios.scenario import Scenario, engine_core_on
from pagedlab.scenarios.stand_in import ScriptedModel
from pagedlab.sched.output import ModelRunnerOutput, SchedulerOutput
from pagedlab.simulate.memory import MemoryBySteps
from pagedlab.simulate.workload import SimulatedRequest, Workload
from pagedlab.trace.events import RowState

Follow = Callable[[int], None]  # is told how many requests have ended


class Source(Protocol):
    """Where requests come from."""

    @property
    def num_requests(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> Mapping[str, int]: ...

    @property
    def output_token_ids(self) -> Mapping[str, Sequence[int]]: ...

    def steps(self) -> list[int]:
        """The steps before which something happens, ascending."""

    def actions_before(self, step: int) -> list[tuple[str, str]]: ...

    def make_request(self, request_id: str) -> Request: ...


class ScenarioSource:
    """A scenario as a workload; it must bring its own tokens."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.num_requests = len(scenario.requests)
        self.num_prompt_tokens = {r: len(spec["prompt_token_ids"]) for r, spec in scenario.requests.items()}
        self.output_token_ids = {r: spec["sampled_token_ids"] for r, spec in scenario.requests.items()}

    def actions_before(self, step: int) -> list[tuple[str, str]]:
        return self.scenario.actions_before(step)

    def make_request(self, request_id: str) -> Request:
        return self.scenario.make_request(request_id)

    def steps(self) -> list[int]:
        return sorted({entry["before_step"] for entry in self.scenario.script})

    def simulated_requests(self) -> list[SimulatedRequest]:
        """Lengths and arrivals alone; aborts and resets are left out."""
        most = self.scenario.config.get("max_model_len", 2048)
        return [
            SimulatedRequest(
                request_id,
                entry["before_step"],
                self.num_prompt_tokens[request_id],
                max(1, num_outputs(self.make_request(request_id), self.output_token_ids[request_id], most)),
            )
            for entry in self.scenario.script
            for request_id in entry.get("add", ())
        ]


class WorkloadSource:
    """Lengths and groups as a workload; requests are made when they arrive."""

    def __init__(self, workload: Workload, config: Mapping[str, Any]) -> None:
        self._workload = workload
        self._config = config
        self._by_id = {r.request_id: r for r in workload.requests}
        self._arrivals: dict[int, list[str]] = defaultdict(list)
        for request in workload.requests:
            self._arrivals[request.arrival_step].append(request.request_id)
        self.num_requests = len(workload.requests)
        self.num_prompt_tokens = {r.request_id: r.num_prompt_tokens for r in workload.requests}
        self.output_token_ids = {r.request_id: workload.output_token_ids(r) for r in workload.requests}

    def steps(self) -> list[int]:
        return sorted(self._arrivals)

    def actions_before(self, step: int) -> list[tuple[str, str]]:
        return [("add", request_id) for request_id in self._arrivals.get(step, ())]

    def make_request(self, request_id: str) -> Request:
        caching = self._config.get("enable_prefix_caching", True)
        return self._workload.make_request(self._by_id[request_id], self._config["block_size"], caching)


@dataclass
class Simulation:
    """What a run brought."""

    memory: MemoryBySteps
    finish_reasons: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)   # request -> sentence
    errors: dict[str, str] = field(default_factory=dict)    # request -> sentence
    queue_steps: dict[str, int] = field(default_factory=dict)  # request -> steps from arrival to first schedule
    first_token_steps: dict[str, int] = field(default_factory=dict)  # … to its first token, that step included
    end_steps: dict[str, int] = field(default_factory=dict)    # … to its last token, that step included
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_recomputed_tokens: int = 0  # computed a second time, after a preemption
    num_prompt_tokens: int = 0      # of admitted requests
    num_cached_tokens: int = 0      # of these, taken from the prefix cache at first admission
    num_idle_steps: int = 0         # left out: nothing to do until the next arrival
    lookup_hits: int = 0            # as vLLM's metrics count: every look-up, blocked ones again and again
    lookup_queries: int = 0

    @property
    def num_steps(self) -> int:
        return self.memory.num_steps


def simulate(source: Source, config: dict[str, Any], follow: Follow = lambda ended: None) -> Simulation:
    """Run until the last request has ended; idle time until the next arrival is left out.

    Args:
        config: as a scenario's.

    Raises:
        UserError: a scenario's sampled_token_ids are too few.
    """
    observer = Observer(source, MemoryBySteps((config["num_blocks"] - 1) * config["block_size"]))
    core = engine_core_on(observer, config)
    observer.core = core
    result = observer.result
    pending = deque(source.steps())
    now = 0
    while pending or core.has_unfinished_requests():
        if not core.has_unfinished_requests() and pending[0] > now:
            result.num_idle_steps += pending[0] - now
            now = pending[0]
        observer.now = now
        if pending and pending[0] == now:
            pending.popleft()
            _apply(source, core, observer, now)
        for output in core.step():
            if output.new_token_ids:
                result.first_token_steps.setdefault(output.request_id, observer.steps_since_arrival(output.request_id))
            if output.finish_reason is not None:
                result.finish_reasons[output.request_id] = output.finish_reason
                if output.error is None:
                    result.end_steps[output.request_id] = observer.steps_since_arrival(output.request_id)
            if output.error is not None:
                result.errors[output.request_id] = output.error
        now += 1
        if now % 64 == 0:
            follow(len(result.finish_reasons) + len(result.refused))
    follow(source.num_requests)
    stats = core.scheduler.kv_cache_manager.prefix_cache_stats
    result.lookup_hits = stats.hits + stats.preempted_hits
    result.lookup_queries = stats.queries + stats.preempted_queries
    return result


def _apply(source: Source, core: EngineCore, observer: Observer, now: int) -> None:
    """What the workload does before this step."""
    for action, request_id in source.actions_before(now):
        if action == "add":
            request = source.make_request(request_id)
            try:
                core.add_request(request)
            except UserError as refusal:
                observer.result.refused[request_id] = str(refusal)
            else:
                observer.arrived(request)
        elif action == "abort":
            if request_id in core.scheduler.requests:
                observer.result.finish_reasons[request_id] = "abort"
            core.abort_requests([request_id])
        else:
            core.reset_prefix_cache()


class Observer:
    """The stand-in model as an executor, which keeps the books of each step on the way."""

    core: EngineCore

    def __init__(self, source: Source, memory: MemoryBySteps) -> None:
        self.result = Simulation(memory)
        self.now = 0
        self._model = ScriptedModel(source.num_prompt_tokens, source.output_token_ids)
        self._outputs = source.output_token_ids
        self._arrival: dict[str, int] = {}
        self._final: dict[str, int] = {}     # request -> tokens whose KV it will have in the end
        self._computed: dict[str, int] = {}  # request -> computed tokens after the latest step
        self._lost: dict[str, int] = {}      # preempted request -> computed tokens it had at most

    def arrived(self, request: Request) -> None:
        tokens = self._outputs[request.request_id]
        most = num_outputs(request, tokens, self.core.scheduler.config.max_model_len)
        self._arrival[request.request_id] = self.now
        self._final[request.request_id] = request.num_prompt_tokens + most - 1  # the last token is never computed

    def steps_since_arrival(self, request_id: str) -> int:
        """With this step."""
        return self.now - self._arrival[request_id] + 1

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._count_tokens(scheduler_output)
        self._count_memory()
        return self._model.execute_model(scheduler_output)

    def row_states(self) -> list[RowState]:
        return self._model.row_states()

    def _count_tokens(self, output: SchedulerOutput) -> None:
        result, requests = self.result, self.core.scheduler.requests
        result.num_preemptions += len(output.preempted_req_ids)
        result.num_scheduled_tokens += output.total_num_scheduled_tokens
        for request_id in output.preempted_req_ids:
            self._lost[request_id] = max(self._lost.get(request_id, 0), self._computed.pop(request_id, 0))
        for new in output.scheduled_new_reqs:
            result.queue_steps[new.req_id] = self.now - self._arrival[new.req_id]
            result.num_prompt_tokens += len(new.prompt_token_ids)
            result.num_cached_tokens += new.num_computed_tokens
        for request_id in list(self._lost):
            if num_new := output.num_scheduled_tokens.get(request_id):
                after = requests[request_id].num_computed_tokens
                result.num_recomputed_tokens += max(0, min(after, self._lost[request_id]) - (after - num_new))
                if after >= self._lost[request_id]:
                    del self._lost[request_id]
            elif request_id not in requests:
                del self._lost[request_id]

    def _count_memory(self) -> None:
        scheduler = self.core.scheduler
        manager, final, computed_now = scheduler.kv_cache_manager, self._final, self._computed
        block_size = self.result.memory.num_slots // (manager.block_pool.num_blocks - 1)
        unused = reserved = 0.0
        for request in scheduler.running:
            computed_now[request.request_id] = computed = request.num_computed_tokens
            for group in manager.groups:
                # Only a table's last block is partly filled, and it is nobody else's. The blocks of all
                # groups cost the same, so a slot of a coarser group counts as part of one.
                slots = len(group.tables[request.request_id]) * group.block_size - computed
                scale = block_size / group.block_size
                unused += slots * scale
                reserved += min(slots, final[request.request_id] - computed) * scale
        used = manager.block_pool.num_used_blocks * block_size
        self.result.memory.add(
            used=used, token_states=used - unused, reserved=reserved, scattered=False,
            num_running=len(scheduler.running), num_waiting=len(scheduler.waiting),
        )  # fmt: skip


def num_outputs(request: Request, token_ids: Sequence[int], max_model_len: int) -> int:
    """How many tokens a request will generate, as check_stop decides it."""
    params = request.sampling_params
    most = min(len(token_ids), request.max_tokens or max_model_len, max_model_len - request.num_prompt_tokens)
    stops = set(params.stop_token_ids)
    if request.eos_token_id is not None and not params.ignore_eos:
        stops.add(request.eos_token_id)
    if stops:
        for i in range(max(params.min_tokens - 1, 0), most):
            if token_ids[i] in stops:
                return i + 1
    return most
