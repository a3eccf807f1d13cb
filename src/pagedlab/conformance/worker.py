"""Replays recordings of vLLM's worker: whole runs, step by step.

Strict mode drives the whole engine from requests to slots and tokens; lenient mode hands each
recorded message to our worker, without a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from pagedlab.conformance.checkpoint import replay_checkpoint
from pagedlab.conformance.report import Outcome, first_difference
from pagedlab.conformance.single_engine import (
    Document,
    build_engine,
    one_group,
    one_thread,
    recorded_events,
    run_config,
)
from pagedlab.conformance.worked_examples import replay_worked_example
from pagedlab.errors import UserError
from pagedlab.kernels.jit import How
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.request import Request, RequestStatus
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from pagedlab.trace.events import BatchOrdered, Event, InputsPrepared, RowAssigned, RowFreed, RowMoved, SlotsMapped
from pagedlab.worker.persistent_batch import PersistentBatchRunner

__all__ = ["replay_checkpoint", "replay_run", "replay_worked_example"]

RUN_FIELDS = ("name", "checkpoint", "config", "requests", "aborts", "outputs", "steps")
ORDERED = ("scheduler_output.num_scheduled_tokens",)  # a mapping whose order is part of the message


def replay_run(document: Document, path: str, checkpoints: Iterable[Path], mode: str) -> list[Outcome]:
    """One recorded run, from its requests (strict) or from its messages (lenient).

    Args:
        checkpoints: folders in which the folder that the run names in ``checkpoint`` is looked for.

    Raises:
        UserError: a part of the document is missing, or the checkpoint is in none of the folders.
    """
    if missing := [field for field in RUN_FIELDS if field not in document]:
        raise UserError(f"{path} has no {missing[0]}: a recorded run has {', '.join(RUN_FIELDS)}.")
    if mode == "lenient":
        return [_run_outcome(document, path, mode, lenient_steps(document))]
    model_dir = find_checkpoint(document["checkpoint"], checkpoints)
    return [_run_outcome(document, path, mode, strict_steps(document, model_dir))]


def find_checkpoint(name: str, places: Iterable[Path]) -> Path:
    """The directory with the weights of the checkpoint called ``name``.

    Raises:
        UserError: it is in none of the places.
    """
    places = list(places)
    for place in places:
        for folder in (place / name, place):
            if folder.name == Path(name).name:
                for model_dir in (folder / "checkpoint", folder):
                    if (model_dir / "config.json").is_file():
                        return model_dir
    looked = ", ".join(str(place) for place in places[:3]) or "no folder"
    raise UserError(f"checkpoint {name} was not found in {looked}: say with --checkpoints DIR where its folder lies.")


def _run_outcome(document: Document, path: str, mode: str, steps: Iterator[Document]) -> Outcome:
    """Compare step by step; stop at the first difference."""
    about = document.get("about", "")
    with one_thread():
        difference = _first_difference(document, steps)
    if difference is None:
        return Outcome(document["name"], path, "worker", mode, True, None, "", about)
    report = "  step {step}, {field}: expected {expected!r}, got {got!r}".format(**difference)
    return Outcome(document["name"], path, "worker", mode, False, difference, report, about)


def _first_difference(document: Document, steps: Iterator[Document]) -> Document | None:
    for expected, got in zip([*document["steps"], _outputs(document)], steps, strict=False):
        difference = first_difference(_comparable(expected, got), got, ordered=ORDERED)
        if difference is not None:
            field, wanted, found = difference
            return {"step": expected["step"], "field": field, "expected": wanted, "got": found}
    return None


def _comparable(expected: Document, got: Document) -> Document:
    """The recorded fields that this mode replays, each of them; rows that left have no order among themselves."""
    expected = {key: expected[key] for key in got}
    if "row_changes" in expected:
        changes = expected["row_changes"]
        expected["row_changes"] = {**changes, "removed": sorted(changes["removed"], key=lambda entry: entry["row"])}
    return expected


def _outputs(document: Document) -> Document:
    """What is compared once the run is over, as if it were one more step."""
    return {
        "step": None,
        "outputs": [{k: entry[k] for k in ("req_id", "token_ids", "finish_reason")} for entry in document["outputs"]],
    }


# ------------------------------------------------------------------ our side of a run


def strict_steps(document: Document, model_dir: Path) -> Iterator[Document]:
    """Everything a recording says about each step, as the whole engine does it."""
    scheduler, worker = build_engine(model_dir, run_config(document))
    requests = {entry["req_id"]: entry for entry in document["requests"]}
    arrival_times = {req_id: float(i) for i, req_id in enumerate(requests)}
    token_ids: dict[str, list[int]] = {req_id: [] for req_id in requests}
    finish_reasons: dict[str, str | None] = dict.fromkeys(requests)
    for step in range(len(document["steps"])):
        arrivals = [req_id for req_id, entry in requests.items() if entry["arrive_before_step"] == step]
        aborts = [entry["req_id"] for entry in document["aborts"] if entry["before_step"] == step]
        for req_id in arrivals:
            scheduler.add_request(make_request(requests[req_id], arrival_times[req_id], document["config"]))
        for req_id in aborts:
            scheduler.finish_requests([req_id], RequestStatus.FINISHED_ABORTED)
            finish_reasons[req_id] = "abort"
        queues = {
            "waiting": [r.request_id for r in scheduler.waiting],
            "running": [r.request_id for r in scheduler.running],
        }
        message = scheduler.schedule()
        pool = scheduler.kv_cache_manager.block_pool
        num_free = pool.num_free_blocks
        assert isinstance(worker.runner, PersistentBatchRunner)
        rows_before = list(worker.runner.batch.req_ids)
        with recorded_events() as events:
            answer = worker.execute_model(message)
        outputs = scheduler.update_from_output(message, answer)
        finished = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
        for output in outputs:
            token_ids[output.request_id] += output.new_token_ids
            finish_reasons[output.request_id] = output.finish_reason
        yield {
            "step": step,
            "arrivals": arrivals,
            "aborts": aborts,
            "queues_before": queues,
            "scheduler_output": describe_message(message),
            "free_blocks_after_schedule": num_free,
            "rows_before": rows_before,
            **describe_worker_step(worker.runner, events),
            "sampled_token_ids": [answer.sampled_token_ids[req_id] for req_id in worker.runner.batch.req_ids if req_id],
            "finished_after_step": [{"req_id": req_id, "reason": finished[req_id]} for req_id in sorted(finished)],
            "free_blocks_after_step": pool.num_free_blocks,
        }
    yield {
        "step": None,
        "outputs": [
            {"req_id": req_id, "token_ids": token_ids[req_id], "finish_reason": finish_reasons[req_id]}
            for req_id in (entry["req_id"] for entry in document["outputs"])
        ],
    }


def lenient_steps(document: Document, how: How = "torch") -> Iterator[Document]:
    """Each recorded message in our worker; the recorded tokens stand in for a model."""
    config = run_config(document)
    runner = PersistentBatchRunner(config, device=torch.device("cpu"), index_kernels=how)
    runner.initialize_kv_cache(one_group(config.block_size), document["config"]["max_model_len"])
    requests = {entry["req_id"]: entry for entry in document["requests"]}
    for recorded in document["steps"]:
        message = read_message(recorded["scheduler_output"], requests)
        rows_before = list(runner.batch.req_ids)
        with recorded_events() as events:
            runner._update_states(message)
            if message.total_num_scheduled_tokens:
                runner._prepare_inputs(message)
        described = describe_worker_step(runner, events)
        runner.keep_tokens(dict(zip(recorded["rows"]["req_ids"], recorded["sampled_token_ids"], strict=True)))
        yield {"step": recorded["step"], "rows_before": rows_before, **described}


def describe_worker_step(runner: PersistentBatchRunner, events: list[Event]) -> Document:
    """Row changes and flat arrays from the worker's own events, rows from its tables."""
    batch, num_reqs = runner.batch, runner.batch.num_reqs
    freed = [event for event in events if isinstance(event, RowFreed)]
    why = {"finished": "finished", "preempted": "not scheduled", "not_scheduled": "not scheduled"}
    return {
        "row_changes": {
            "removed": [
                {"req_id": event.request_id, "row": event.row, "why": why[event.why]}
                for event in sorted(freed, key=lambda event: event.row)
            ],
            "added": [{"req_id": e.request_id, "row": e.row} for e in events if isinstance(e, RowAssigned)],
            "moved": [
                {"req_id": e.request_id, "from_row": e.from_row, "to_row": e.row}
                for e in events
                if isinstance(e, RowMoved)
            ],
        },
        "rows": {
            "req_ids": list(batch.req_ids),
            "req_id_to_index": dict(batch.req_id_to_index),
            "num_computed_tokens": batch.num_computed_tokens[:num_reqs].tolist(),
            "num_prompt_tokens": [len(runner.requests[req_id].prompt_token_ids) for req_id in batch.req_ids if req_id],
            "num_known_tokens": batch.num_tokens[:num_reqs].tolist(),
            "num_blocks": batch.block_tables[0].num_blocks_per_row[:num_reqs].tolist(),
            "block_table": [row.block_ids[0] for row in runner.row_states()],
        },
        "inputs": _describe_inputs(events),
    }


def _describe_inputs(events: list[Event]) -> Document | None:
    ordered = next((event for event in events if isinstance(event, BatchOrdered)), None)
    if ordered is None:
        return None
    prepared = next(event for event in events if isinstance(event, InputsPrepared))
    mapped = next(event for event in events if isinstance(event, SlotsMapped))
    return {
        "num_scheduled_tokens": ordered.num_scheduled_tokens,
        "req_indices": prepared.req_indices,
        "positions": prepared.positions,
        "query_start_loc": ordered.query_start_loc,
        "seq_lens": prepared.seq_lens,
        "input_ids": prepared.input_ids,
        "logits_indices": prepared.logits_indices,
        "block_table_indices": mapped.table_index,
        "block_numbers": mapped.block_id,
        "block_offsets": mapped.offset,
        "slot_mapping": mapped.slot,
        "sample_is_discarded": prepared.sample_is_discarded,
    }


# ------------------------------------------------------------------ the recordings' notation


def make_request(entry: Document, arrival_time: float, config: Document) -> Request:
    """A recorded request; sampling is greedy, end-of-text is id 0."""
    return Request(
        entry["req_id"],
        entry["prompt_token_ids"],
        _greedy(entry),
        priority=entry["priority"],
        arrival_time=arrival_time,
        eos_token_id=0,
        block_hasher=request_block_hasher(config["block_size"]) if config["enable_prefix_caching"] else None,
    )


def _greedy(entry: Document) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=entry["max_tokens"],
        stop_token_ids=entry["stop_token_ids"],
        ignore_eos=entry["ignore_eos"],
    )


def describe_message(message: SchedulerOutput) -> Document:
    """Our SchedulerOutput as a recording writes it; one KV-cache group."""
    cached = message.scheduled_cached_reqs
    return {
        "num_scheduled_tokens": message.num_scheduled_tokens,
        "total_num_scheduled_tokens": message.total_num_scheduled_tokens,
        "new": [
            {"req_id": new.req_id, "num_computed_tokens": new.num_computed_tokens, "block_ids": new.block_ids[0]}
            for new in message.scheduled_new_reqs
        ],
        "cached": [
            {
                "req_id": req_id,
                "resumed": req_id in cached.resumed_req_ids,
                "num_computed_tokens": cached.num_computed_tokens[i],
                "num_output_tokens": cached.num_output_tokens[i],
                "new_block_ids": None if (block_ids := cached.new_block_ids[i]) is None else block_ids[0],
            }
            for i, req_id in enumerate(cached.req_ids)
        ],
        "preempted_req_ids": sorted(message.preempted_req_ids),
        "finished_req_ids": sorted(message.finished_req_ids),
    }


def read_message(recorded: Document, requests: dict[str, Document]) -> SchedulerOutput:
    """A recorded message as our SchedulerOutput; ``requests`` has the prompts."""
    cached = recorded["cached"]
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                new["req_id"],
                requests[new["req_id"]]["prompt_token_ids"],
                _greedy(requests[new["req_id"]]),
                (new["block_ids"],),
                new["num_computed_tokens"],
            )
            for new in recorded["new"]
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[entry["req_id"] for entry in cached],
            resumed_req_ids={entry["req_id"] for entry in cached if entry["resumed"]},
            new_block_ids=[None if (ids := entry["new_block_ids"]) is None else (ids,) for entry in cached],
            num_computed_tokens=[entry["num_computed_tokens"] for entry in cached],
            num_output_tokens=[entry["num_output_tokens"] for entry in cached],
            all_token_ids={},
        ),
        num_scheduled_tokens=recorded["num_scheduled_tokens"],
        total_num_scheduled_tokens=recorded["total_num_scheduled_tokens"],
        num_common_prefix_blocks=[0],
        preempted_req_ids=recorded["preempted_req_ids"],
        finished_req_ids=recorded["finished_req_ids"],
    )
