"""Replays the worked examples: every intermediate list of two classic steps, from the runners themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from pagedlab.config import EngineConfig
from pagedlab.conformance.report import Outcome, Unreadable, first_difference
from pagedlab.conformance.single_engine import Document, one_group
from pagedlab.kernels.slot_mapping import slot_chain
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from pagedlab.wording import plural
from pagedlab.worker.block_table import BlockTable
from pagedlab.worker.flat_indices import flatten_batch, token_indices
from pagedlab.worker.persistent_batch import PersistentBatchRunner
from pagedlab.worker.state_table import StateTableRunner

CPU = torch.device("cpu")


def replay_worked_example(document: Document, path: str) -> list[Outcome | Unreadable]:
    """Each case of a file is an outcome, or named if it is malformed; ``split_blocks`` is out of scope."""
    outcomes = [_outcome(case, path, _example) for case in document["cases"]]
    if "row_operations" in document:
        outcomes.append(_outcome(document["row_operations"], path, _row_operations, "row_operations"))
    return outcomes


def _outcome(
    case: Document, path: str, replay: Callable[[Document], Document], name: str | None = None
) -> Outcome | Unreadable:
    try:
        name = name or str(case["name"])
        got = replay(case)
    except Exception as error:  # whatever a number out of place makes the runners or torch raise
        return Unreadable(path, f"{path}: worked example {name or case!r} is malformed ({error!r}).")
    expected = {key: value for key, value in case.items() if key in got}
    difference = first_difference(expected, got)
    about = f"{plural(len(expected), 'list')} equal" if difference is None else ""
    if difference is None:
        return Outcome(name, path, "worked_examples", "strict", True, None, "", about)
    field, wanted, found = difference
    first = {"step": None, "field": field, "expected": wanted, "got": found}
    report = f"  {field}: expected {wanted!r}, got {found!r}"
    return Outcome(name, path, "worked_examples", "strict", False, first, report, about)


def _example(case: Document) -> Document:
    return _state_rows(case) if "idx_mapping" in case else _flat_indices(case)


def _message(requests: list[tuple[str, int, int, list[int]]], block_size: int) -> SchedulerOutput:
    """(request, computed, new tokens, block ids) as a step that sees all of them for the first time."""
    for req_id, computed, new, block_ids in requests:
        if computed + new > len(block_ids) * block_size:  # a damaged number would become as many token ids
            raise ValueError(f"request {req_id} has {computed} and {new} tokens, more than its blocks hold")
    greedy = SamplingParams(temperature=0)
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(req_id, list(range(computed + new)), greedy, (block_ids,), computed)
            for req_id, computed, new, block_ids in requests
        ],
        scheduled_cached_reqs=CachedRequestData([], set(), [], [], [], {}),
        num_scheduled_tokens={req_id: new for req_id, _, new, _ in requests},
        total_num_scheduled_tokens=sum(new for _, _, new, _ in requests),
        num_common_prefix_blocks=[0],
        preempted_req_ids=[],
        finished_req_ids=[],
    )


def _flat_indices(case: Document) -> Document:
    """The persistent batch on one recorded table."""
    block_size, max_model_len, counts = case["block_size"], case["max_model_len"], case["num_scheduled_tokens"]
    config = EngineConfig(block_size=block_size, max_num_seqs=len(counts), max_num_batched_tokens=sum(counts))
    runner = PersistentBatchRunner(config, device=CPU, index_kernels="torch")
    runner.initialize_kv_cache(one_group(block_size), max_model_len)
    columns = (case["num_computed_tokens"], counts, case["block_table"])
    message = _message([(f"r{i}", *request) for i, request in enumerate(zip(*columns, strict=True))], block_size)
    runner._update_states(message)
    batch = runner._prepare_inputs(message)
    table = batch.block_tables[0]
    flat = flatten_batch(torch.tensor(counts), torch.tensor(case["num_computed_tokens"]), sum(counts))
    chain = slot_chain(table, batch.req_indices, batch.positions, block_size)
    where = token_indices(batch.req_indices, batch.positions, max_model_len)
    shortcut = where // block_size
    return {
        "K": table.shape[1],
        "M": max_model_len,
        "num_scheduled_tokens": batch.num_scheduled_tokens,
        "block_table": [row.block_ids[0] for row in runner.row_states()],
        "req_indices": batch.req_indices.tolist(),
        "arange": flat.arange.tolist(),
        "query_start_loc": batch.query_start_loc.tolist(),
        "positions": batch.positions.tolist(),
        "token_indices": where.tolist(),
        "block_table_indices": chain.table_index.tolist(),
        "block_numbers": chain.block_id.tolist(),
        "block_offsets": chain.offset.tolist(),
        "slot_mapping": batch.slot_mappings[0].tolist(),
        "seq_lens": batch.seq_lens.tolist(),
        "logits_indices": batch.logits_indices.tolist(),
        "wrong_if_token_indices_div_block_size": shortcut.tolist(),
        "that_shortcut_agrees": bool((shortcut == chain.table_index).all()),
    }


def _state_rows(case: Document) -> Document:
    """The state-table runner, with requests put into the recorded rows."""
    block_size, requests = case["block_size"], case["requests_in_scheduling_order"]
    config = EngineConfig(
        block_size=block_size,
        max_num_seqs=case["max_num_reqs"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
    )
    runner = StateTableRunner(config, device=CPU, index_kernels="torch")
    runner.initialize_kv_cache(one_group(block_size), case["K"] * block_size)
    runner.request_table.free_rows = [request["state_row"] for request in reversed(requests)]
    message = _message([
        (request["name"], request["num_computed_tokens"], request["num_new_tokens"], request["block_ids"])
        for request in requests
    ], block_size)  # fmt: skip
    runner._update_states(message)
    if case["batch_order_rule"].startswith("fewest new tokens first"):
        batch = runner._prepare_inputs(message)
    else:  # a case for contrast, in an order that is not the runner's
        counts = message.num_scheduled_tokens
        batch = runner._gather_batch({req_id: counts[req_id] for req_id in case["batch_order"]})
    table = batch.block_tables[0]
    chain = slot_chain(table, batch.req_indices, batch.positions, block_size)
    num_blocks = runner.block_tables.num_blocks[0, batch.idx_mapping].tolist()
    return {
        "batch_order": batch.req_ids,
        "idx_mapping": batch.idx_mapping.tolist(),
        "query_start_loc": batch.query_start_loc.tolist(),
        "seq_lens": batch.seq_lens.tolist(),
        "seq_lens_padded": runner.seq_lens.tolist(),
        "batch_row_of_token": batch.req_indices.tolist(),
        "positions": batch.positions.tolist(),
        "gathered_block_table": [row[:n] for row, n in zip(table.tolist(), num_blocks, strict=True)],
        "block_ids": chain.block_id.tolist(),
        "block_offsets": chain.offset.tolist(),
        "slot_mapping": batch.slot_mappings[0].tolist(),
        "slot_mapping_padded": runner.slot_mappings[0].tolist(),
        "logits_indices": batch.logits_indices.tolist(),
    }


def _row_operations(case: Document) -> Document:
    """The persistent batch's table after each operation, stale cells included."""
    table = BlockTable(case["max_num_reqs"], case["K"], CPU)
    log = []
    for entry in case["log"]:
        _operate(table, entry["after"])
        log.append({
            "after": entry["after"],
            "num_blocks_per_row": table.num_blocks_per_row.tolist(),
            "raw_rows": table.host.tolist(),
        })  # fmt: skip
    return {"log": log}


def _operate(table: BlockTable, words: str) -> None:
    """One operation in the recording's words, such as "append [7,8] to row 1"."""
    lists = [[int(i) for i in ids.split(",")] for ids in re.findall(r"\[([\d, ]+)\]", words)]
    numbers: list[Any] = [int(i) for i in re.findall(r"\d+", re.sub(r"\[[^]]*\]", "", words))]
    if words.startswith("rows"):
        for row, block_ids in zip(numbers, lists, strict=True):
            table.add_row(row, block_ids)
    elif words.startswith("add"):
        table.add_row(numbers[0], lists[0])
    elif words.startswith("append"):
        table.append_row(numbers[0], lists[0] if lists else [])
    elif words.startswith("move"):
        table.move_row(numbers[0], numbers[1])
    elif words.startswith("swap"):
        table.swap_rows(numbers[0], numbers[1])
    else:
        raise ValueError(f"row operation {words!r} is not one of add, append, move and swap")
