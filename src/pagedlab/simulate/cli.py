"""``pagedlab simulate``: the control plane alone, on thousands of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from pagedlab.config import check_seed
from pagedlab.errors import UserError
from pagedlab.simulate.generator import DEFAULT_GENERATOR, GENERATORS
from pagedlab.trace.events import Level

MOST_REQUESTS = 1_000_000
FITS = ("buddy", "first", "best")
RECORDS = ("steps", "decisions", "blocks")  # there is no worker that could say more
_POOL, _DRAWN = "Pool and scheduler", "Generated workloads"
_LENGTHS = "fixed:N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA or exponential:MEAN"


def _option(name: str, help_text: str, panel: str) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=panel, show_default=False)


def simulate_command(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="A built-in scenario or a scenario file, or a .jsonl file: one request a line with arrival_step, "
            "num_prompt_tokens, num_output_tokens, and optionally prefix_group with num_prefix_tokens, priority, "
            "request_id.",
        ),
    ] = None,
    generator: Annotated[
        str | None,
        _option("--generator", f"Draw a workload: {', '.join(GENERATORS)}; default {DEFAULT_GENERATOR}.", _DRAWN),
    ] = None,
    requests: Annotated[int | None, _option("--requests", "How many to draw; default 1000.", _DRAWN)] = None,
    seed: Annotated[int | None, _option("--seed", "The same seed draws the same workload; default 0.", _DRAWN)] = None,
    prompt_lengths: Annotated[str | None, _option("--prompt-lengths", f"{_LENGTHS}.", _DRAWN)] = None,
    output_lengths: Annotated[str | None, _option("--output-lengths", "The same.", _DRAWN)] = None,
    arrivals: Annotated[
        str | None, _option("--arrivals", "at-once, every:STEPS, poisson:RATE (a step) or bursts:SIZE:STEPS.", _DRAWN)
    ] = None,
    prefix_groups: Annotated[
        int | None, _option("--prefix-groups", "Requests fall into so many groups with a common beginning.", _DRAWN)
    ] = None,
    prefix_tokens: Annotated[int | None, _option("--prefix-tokens", "Tokens of that beginning.", _DRAWN)] = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="contiguous", help="Also run the allocators from before paging."),
    ] = None,
    fit: Annotated[
        str, typer.Option("--fit", help=f"How those find a range of slots: {', '.join(FITS)}.")
    ] = "buddy",
    as_json: Annotated[bool, typer.Option("--json", help="For machines, with every step's memory.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="TRACE", help="Save the run: .jsonl, or .jsonl.zst.")
    ] = None,
    record: Annotated[
        str, typer.Option("--record", help="How much of it: steps, decisions, or blocks, as check and view need.")
    ] = "decisions",
    block_size: Annotated[int | None, _option("--block-size", "Tokens per KV block; default 16.", _POOL)] = None,
    num_blocks: Annotated[
        int | None, _option("--num-blocks", "Blocks, null block included; default 984, as in the paper.", _POOL)
    ] = None,
    max_model_len: Annotated[
        int | None, _option("--max-model-len", "Most tokens of prompt and output; default 2048.", _POOL)
    ] = None,
    max_num_seqs: Annotated[int | None, _option("--max-num-seqs", "Seats; default 256.", _POOL)] = None,
    max_num_batched_tokens: Annotated[
        int | None, _option("--max-num-batched-tokens", "Token budget of a step; default 2048.", _POOL)
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None, _option("--long-prefill-token-threshold", "Most tokens a request gets in a step; 0: off.", _POOL)
    ] = None,
    policy: Annotated[str | None, _option("--policy", "fcfs, priority, or module:Class of your own.", _POOL)] = None,
    no_prefix_caching: Annotated[bool, _option("--no-prefix-caching", "Never reuse blocks.", _POOL)] = False,
    no_chunked_prefill: Annotated[bool, _option("--no-chunked-prefill", "Prompts whole or not.", _POOL)] = False,
) -> None:
    """Run scheduler and block pool without a model, and say where steps, tokens and KV memory went.

    Time is counted in steps. Token ids are derived from group and position, so the prefix cache works.
    """
    knobs = {
        "block_size": block_size, "num_blocks": num_blocks, "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
        "long_prefill_token_threshold": long_prefill_token_threshold, "policy": policy,
        "enable_prefix_caching": False if no_prefix_caching else None,
        "enable_chunked_prefill": False if no_chunked_prefill else None,
    }  # fmt: skip
    knobs = {name: value for name, value in knobs.items() if value is not None}
    drawn = {
        "prompt_lengths": prompt_lengths, "output_lengths": output_lengths, "arrivals": arrivals,
        "prefix_groups": prefix_groups, "prefix_tokens": prefix_tokens,
    }  # fmt: skip
    if compare not in (None, "contiguous"):
        raise UserError(f"--compare is {compare!r}: there is only contiguous.")
    if fit not in FITS:
        raise UserError(f"--fit is {fit!r}: choose one of {', '.join(FITS)}.")
    if record not in RECORDS:
        raise UserError(f"--record is {record!r}: choose one of {', '.join(RECORDS)}.")
    if requests is not None and not 1 <= requests <= MOST_REQUESTS:
        raise UserError(f"--requests is {requests}: give a whole number from 1 to {MOST_REQUESTS}.")
    if seed is not None:
        check_seed(seed)
    drawn["num_requests"], drawn["seed"] = requests, seed
    given = [name for name, value in {"generator": generator, **drawn}.items() if value is not None]
    if workload is not None and given:
        option = given[0].removeprefix("num_").replace("_", "-")
        raise UserError(f"--{option} is for generated workloads: leave it out, or leave out {workload}.")
    from pagedlab.simulate.command import run_simulations

    run_simulations(workload, generator, drawn, knobs, fit if compare else None, as_json=as_json, out=out,
                    record=cast(Level, record))
