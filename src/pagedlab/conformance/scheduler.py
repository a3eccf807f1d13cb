"""Replays recordings of vLLM's scheduler: the same inputs, our decisions, the first difference.

The format and the order in which a step is driven are described beside the recordings. Our guards
are not in the way here: requests go straight to the scheduler, as they did in the recorder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagedlab.conformance.report import Outcome, first_difference
from pagedlab.errors import UserError
from pagedlab.request import RequestStatus
from pagedlab.scenarios.scenario import Scenario, build_engine_core
from pagedlab.sched.output import EngineCoreOutput, SchedulerOutput
from pagedlab.sched.scheduler import Scheduler
from pagedlab.trace.events import Event
from pagedlab.trace.tracer import trace, tracing

RECORDED = (  # of every step; reset_results stands only where there was a reset
    "new", "cached", "num_scheduled_tokens", "total_num_scheduled_tokens", "num_common_prefix_blocks", "preempted",
    "finished_req_ids", "after_schedule", "outputs", "after_update",
)  # fmt: skip


def replay_scheduler(document: dict[str, Any], path: str) -> list[Outcome]:
    """Drive our scheduler through one recording; compare every recorded field of every step.

    Raises:
        UserError: the document is not such a recording, or its inputs are not proper.
    """
    recorded = document.get("steps")
    if not isinstance(recorded, list):
        raise UserError(f"{path} has no recorded steps: it is a scenario, not a recording.")
    for n, step in enumerate(recorded):
        if not isinstance(step, dict) or not isinstance(step.get("step"), int):
            raise UserError(f"{path}: entry {n} of steps does not say which step it is.")
        missing = [field for field in RECORDED if field not in step]
        if missing:
            raise UserError(f"{path}: step {step['step']} lacks {missing[0]}, so it could not be compared.")
    scenario = Scenario.from_document(document, path)
    difference = _first_difference(scenario, document)
    if difference is None:
        return [Outcome(scenario.name, path, "scheduler", "strict", True, None, "", scenario.about)]
    step, field, expected, got = difference
    first = {"step": step, "field": field, "expected": expected, "got": got}
    report = _report(scenario, document, difference)
    return [Outcome(scenario.name, path, "scheduler", "strict", False, first, report, scenario.about)]


Difference = tuple[int | None, str, Any, Any]  # step, field, expected, got


def _first_difference(scenario: Scenario, document: dict[str, Any]) -> Difference | None:
    replay = Replay(scenario)
    for expected in document["steps"]:
        difference = first_difference(expected, replay.step(), ordered=("num_scheduled_tokens", "outputs"))
        if difference is not None:
            return (expected["step"], *difference)
    expected_stats = document.get("prefix_cache_stats")
    if expected_stats is not None:
        difference = first_difference(expected_stats, vars(replay.scheduler.kv_cache_manager.prefix_cache_stats))
        if difference is not None:
            return (None, f"prefix_cache_stats.{difference[0]}", *difference[1:])
    return None


class Replay:
    """Our scheduler on one scenario, in the recorder's order, step by step."""

    def __init__(self, scenario: Scenario) -> None:
        self.core = build_engine_core(scenario)
        self.scheduler: Scheduler = self.core.scheduler
        self._scenario = scenario
        self._step = -1

    def step(self) -> dict[str, Any]:
        """Everything a recording says about one step, as ours."""
        self._step += 1
        scheduler, core = self.scheduler, self.core
        if trace.on:
            trace.enter(core)
        resets = []
        for action, argument in self._scenario.actions_before(self._step):
            if action == "add":
                scheduler.add_request(self._scenario.make_request(argument))
            elif action == "abort":
                scheduler.finish_requests([argument], RequestStatus.FINISHED_ABORTED)
            else:
                resets.append(scheduler.reset_prefix_cache())
        output = scheduler.schedule()
        decided = _message(output) | {"after_schedule": _pool(scheduler)}
        answer = core.executor.execute_model(output)
        outputs = scheduler.update_from_output(output, answer)
        decided |= {"outputs": {o.request_id: _output(o) for o in outputs}}
        decided |= {"after_update": _pool(scheduler) | _references(scheduler)}
        return {"step": self._step, **({"reset_results": resets} if resets else {}), **decided}


def _message(output: SchedulerOutput) -> dict[str, Any]:
    known = output.scheduled_cached_reqs
    return {
        "new": [
            {"id": r.req_id, "num_computed_tokens": r.num_computed_tokens, "block_ids": list(r.block_ids)}
            for r in output.scheduled_new_reqs
        ],
        "cached": [
            {"id": r, "num_computed_tokens": computed, "new_block_ids": blocks and list(blocks),
             "resumed": r in known.resumed_req_ids}
            for r, computed, blocks in zip(
                known.req_ids, known.num_computed_tokens, known.new_block_ids, strict=True
            )
        ],
        "num_scheduled_tokens": output.num_scheduled_tokens,
        "total_num_scheduled_tokens": output.total_num_scheduled_tokens,
        "num_common_prefix_blocks": output.num_common_prefix_blocks,
        "preempted": output.preempted_req_ids,
        "finished_req_ids": output.finished_req_ids,
    }


def _pool(scheduler: Scheduler) -> dict[str, Any]:
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "waiting": [r.request_id for r in scheduler.waiting],
        "running": [r.request_id for r in scheduler.running],
        "num_free_blocks": pool.num_free_blocks,
        "free_queue": [block.block_id for block in pool.free_block_queue],
    }


def _references(scheduler: Scheduler) -> dict[str, Any]:
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return {
        "ref_counts": {str(b.block_id): b.ref_cnt for b in blocks if b.ref_cnt},
        "cached_blocks": [b.block_id for b in blocks if b.block_hash is not None],
    }


def _output(output: EngineCoreOutput) -> dict[str, Any]:
    return {"new_token_ids": output.new_token_ids, "finish_reason": output.finish_reason}


def _report(scenario: Scenario, document: dict[str, Any], difference: Difference) -> str:
    """The difference side by side, and our own events of that step: why we decided so."""
    step, field, expected, got = difference
    lines = [
        f"{scenario.name}: {scenario.about}",
        f"  step      {'after the last' if step is None else step}",
        f"  field     {field}",
        f"  expected  {expected!r}",
        f"  got       {got!r}",
    ]
    if step is not None:
        lines.append("  our events of that step:")
        lines += [f"    {line}" for line in _describe_events(scenario, step, len(document["steps"]))]
    return "\n".join(lines) + "\n"


def _describe_events(scenario: Scenario, step: int, num_steps: int) -> Iterator[str]:
    """Replay once more with tracing on, and say what the scheduler said; ``step`` may be any number."""
    import msgspec

    events: list[Event] = []
    with tracing("blocks") as recorded:
        replay = Replay(scenario)
        for _ in range(min(step + 1, num_steps)):
            replay.step()
        events = list(recorded)
    envelope = ("kind", "seq", "engine", "step", "t_ns", "proc")
    for event in events:
        if event.step == step:
            fields = msgspec.to_builtins(event)
            said = ", ".join(f"{k}={v}" for k, v in fields.items() if k not in envelope and v not in (None, [], {}))
            yield f"{fields['kind']}: {said}"
