"""One engine: a scheduler, an executor and the step that joins them (vllm/v1/engine/core.py).

    add_request -> schedule -> execute_model -> update_from_output -> outputs
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pagedlab.engine.guards import ProgressWatch, check_at_the_door, explain_hopeless
from pagedlab.kv.hashing import short_hash
from pagedlab.request import Request, RequestStatus
from pagedlab.sched.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from pagedlab.sched.scheduler import Scheduler
from pagedlab.trace.events import EngineSnapshot, RequestState, RowState, StepFinished
from pagedlab.trace.tracer import trace

_engine_ids = itertools.count()


def next_engine_id() -> int:
    """A number of its own for each engine of this process; drawn early, for events before the first step."""
    return next(_engine_ids)


class Executor(Protocol):
    """Runs the model on what was scheduled: the worker, or a stand-in without a model."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...

    def row_states(self) -> list[RowState]:
        """The rows of the worker's tables, for snapshots."""


class EngineCore:
    """Needs no torch: the executor brings the model."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        about: dict[str, dict[str, Any]],                 # the trace header's model, config and tokenizer
        token_text: Callable[[int], str] | None = None,   # for people who read the trace
        engine_id: int | None = None,                     # if events of this engine came before it
    ) -> None:
        self.engine_id = next_engine_id() if engine_id is None else engine_id
        self.scheduler = scheduler
        self.executor = executor
        self.about = about
        self.token_text = token_text
        self.stage_ns = {"schedule": 0, "execute_model": 0, "update_from_output": 0}  # of the latest step
        self._watch = ProgressWatch()

    @property
    def step_id(self) -> int:
        """The last step whose schedule() began, -1 before the first."""
        return self.scheduler.step_id

    def add_request(self, request: Request) -> None:
        """Let a request in.

        Raises:
            UserError: it could never be served, or its id is in use; nothing has changed.
        """
        if trace.on:
            trace.enter(self)
            request.prompt_token_texts = self._texts(request.prompt_token_ids)
        check_at_the_door(self.scheduler, request)
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Cancel requests wherever they are; unknown ids are ignored."""
        if trace.on:
            trace.enter(self)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False while any block is in use."""
        if trace.on:
            trace.enter(self)
        return self.scheduler.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.requests)

    def step(self) -> list[EngineCoreOutput]:
        """Schedule, run the model, take its answer."""
        if trace.on:
            trace.enter(self)
        start = time.perf_counter_ns()
        scheduler_output = self.scheduler.schedule()
        scheduled = time.perf_counter_ns()
        model_runner_output = self.executor.execute_model(scheduler_output)
        executed = time.perf_counter_ns()
        outputs = self.scheduler.update_from_output(scheduler_output, model_runner_output)
        outputs += self._end_hopeless(scheduler_output, len(outputs))
        self.stage_ns = {
            "schedule": scheduled - start,
            "execute_model": executed - scheduled,
            "update_from_output": time.perf_counter_ns() - executed,
        }
        if trace.on:
            worker_ns = getattr(self.executor, "stage_ns", {})
            trace.emit(
                StepFinished(stage_ns={**self.stage_ns, **worker_ns},
                             num_scheduled_tokens=scheduler_output.total_num_scheduled_tokens)
            )
        return outputs

    def snapshot(self) -> EngineSnapshot:
        """The whole state, read off the live objects."""
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        return EngineSnapshot(
            block_sizes=[group.block_size for group in manager.groups],
            sliding_windows=[group.sliding_window for group in manager.groups],
            num_blocks=pool.num_blocks,
            waiting=[r.request_id for r in self.scheduler.waiting],
            running=[r.request_id for r in self.scheduler.running],
            requests=self._request_states(),
            free_queue=[block.block_id for block in pool.free_block_queue],
            ref_counts={block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt},
            cached_blocks={b.block_id: short_hash(b.block_hash) for b in pool.blocks if b.block_hash is not None},
            rows=self.executor.row_states(),
        )

    def _request_states(self) -> list[RequestState]:
        queue_keys = self.scheduler.waiting.keys()
        return [
            RequestState(
                request_id=r.request_id, status=r.status.value, token_ids=list(r.all_token_ids),
                token_texts=self._texts(r.all_token_ids), num_prompt_tokens=r.num_prompt_tokens,
                num_computed_tokens=r.num_computed_tokens, num_cached_tokens=r.num_cached_tokens,
                num_preemptions=r.num_preemptions, priority=r.priority, arrival_time=r.arrival_time,
                queue_key=queue_keys.get(r.request_id, []),
                block_ids=list(self.scheduler.kv_cache_manager.get_block_ids(r.request_id)),
            )
            for r in self.scheduler.requests.values()
        ]

    def _texts(self, token_ids: list[int]) -> list[str] | None:
        return [self.token_text(t) for t in token_ids] if self.token_text else None

    def _end_hopeless(self, scheduler_output: SchedulerOutput, num_outputs: int) -> list[EngineCoreOutput]:
        request = self._watch.hopeless(self.scheduler, scheduler_output, num_outputs)
        if request is None:
            return []
        message, numbers = explain_hopeless(self.scheduler, request)
        self.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR, numbers)
        return [
            EngineCoreOutput(request.request_id, [], "error", num_cached_tokens=max(request.num_cached_tokens, 0),
                             error=message)
        ]
