"""``pagedlab bench``: offline throughput, and the time to the first token."""

from __future__ import annotations

import json
import resource
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pagedlab.commands.knobs import Knobs, takes_engine_knobs
from pagedlab.errors import UserError
from pagedlab.trace.events import LEVELS, Level
from pagedlab.trace.file import TraceFile
from pagedlab.trace.tracer import trace as tracer
from pagedlab.wording import plural

if TYPE_CHECKING:
    from pagedlab.bench.throughput import Run, Workload
    from pagedlab.bench.yardstick import BareProducts
    from pagedlab.engine.llm import LLM

MOST = 100_000  # requests, rounds
STARTUP_PROMPT = "It is a truth universally acknowledged"


@takes_engine_knobs
def bench(
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="How many requests.")] = 16,
    input_len: Annotated[
        str, typer.Option("--input-len", metavar="MIN-MAX", help="Prompt length, uniform in this range.")
    ] = "32-128",
    output_len: Annotated[
        str, typer.Option("--output-len", metavar="MIN-MAX", help="Output length, uniform in this range.")
    ] = "16-48",
    rounds: Annotated[int, typer.Option("--rounds", help="Measured runs, after one to warm up.")] = 3,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="transformers", help="Run this on the same checkpoint, in turn.")
    ] = None,
    random_weights: Annotated[
        str | None,
        typer.Option("--random-weights", metavar="SHAPE", help="Build a checkpoint of this shape: qwen3-0.6b."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Trace one more run into this file, and time it.")
    ] = None,
    record: Annotated[str, typer.Option("--record", help=f"How much of it: {', '.join(LEVELS)}.")] = "decisions",
    startup: Annotated[bool, typer.Option("--startup", help="Measure the way to the first token instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    knobs: Knobs,
) -> None:
    """Measure tokens per second, each stage's share of the time, and memory.

    Prompts are random token ids, all there at the beginning; every token is the likeliest.
    Without --max-num-seqs there is a seat for each request, so that the pool of a CPU is small, and warm after one run.
    Steps in which all decode are held against a dense model's bare matrix products on a CPU: the median of passes.
    """
    lens = _range("--input-len", input_len), _range("--output-len", output_len)
    for name, value in (("--num-prompts", num_prompts), ("--rounds", rounds)):
        if not 1 <= value <= MOST:
            raise UserError(f"{name} is {value}: give a whole number from 1 to {MOST}.")
    if compare not in (None, "transformers"):
        raise UserError(f"--compare is {compare!r}: only transformers can be compared with.")
    if record not in LEVELS:
        raise UserError(f"--record is {record!r}: choose one of {', '.join(LEVELS)}.")
    file = TraceFile(out) if out is not None else None
    if random_weights is not None and "model" in knobs.engine:
        raise UserError("give --model or --random-weights, not both.")
    if startup:
        for name, given in (("--random-weights", random_weights), ("--compare", compare), ("--out", out)):
            if given is not None:
                raise UserError(f"--startup stops at the first token: leave out {name}.")
        _startup(knobs, as_json)
        return
    if random_weights is not None:
        from pagedlab.bench.random_weights import random_checkpoint

        knobs.engine["model"] = str(random_checkpoint(random_weights))
    report = _throughput(knobs, num_prompts, *lens, rounds, compare, file, cast(Level, record))
    print(json.dumps(report, indent=2) if as_json else _describe(report))


def _throughput(
    knobs: Knobs,
    num_prompts: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    rounds: int,
    compare: str | None,
    file: TraceFile | None,
    record: Level,
) -> dict[str, Any]:
    """Warm up, then measure in alternation with the rival if there is one; everything as medians."""
    from pagedlab.bench.throughput import Workload, check_fits, run_engine
    from pagedlab.config import EngineConfig
    from pagedlab.engine.llm import LLM

    fitting: dict[str, Any] = {}
    if "max_num_seqs" not in knobs.engine:  # so that the pool is small, and warm after one run
        fitting["max_num_seqs"] = min(num_prompts, EngineConfig.max_num_seqs)
    if not {"num_blocks", "kv_cache_memory", "max_model_len"} & set(knobs.engine):
        fitting["max_model_len"] = input_len[1] + output_len[1]
    llm = LLM(config=knobs.engine_config(**fitting))
    check_fits(llm, input_len, output_len)
    workload = Workload.draw(
        num_prompts=num_prompts, input_len=input_len, output_len=output_len,
        vocab_size=llm.model_config.vocab_size, seed=llm.config.seed,
    )  # fmt: skip
    run_engine(llm, workload)
    worker: Any = llm.core.executor
    memory = _peak_memory_bytes(worker.device.type)  # before a rival takes its own
    rival = None
    if compare is not None:
        from pagedlab.bench.padded import PaddedGenerate
        from pagedlab.models.resolve import resolve_model

        rival = PaddedGenerate(resolve_model(llm.config.model), dtype=worker.dtype, device=worker.device)
        rival.run(workload)
    ours, theirs, bare = [], [], []
    yardstick = _yardstick(llm, num_prompts)
    for i in range(rounds):
        ours.append(run_engine(llm, workload))
        if yardstick is not None:
            bare.append(yardstick.seconds())
        if rival is not None:
            theirs.append(rival.run(workload))
        print(f"\rround {i + 1}/{rounds}", end="\n" if i + 1 == rounds else "", file=sys.stderr, flush=True)
    report = _report(llm, workload, memory, ours, theirs)
    steps = [seconds for run in ours for seconds in run.decode_seconds.get(num_prompts, [])]
    if bare and steps:
        step, products = statistics.median(steps), statistics.median(bare)
        report["decode"] = {
            "num_requests": num_prompts, "num_steps": len(steps), "step_seconds": step,
            "bare_products_seconds": products, "share_of_bare_products": products / step,
        }  # fmt: skip
    if file is not None:
        tracer.start(file, record=record)
        try:
            traced = run_engine(llm, workload)
        finally:
            tracer.stop()
            file.close()
        report["traced"] = {"record": record, "file": str(file.path), "seconds": traced.seconds}
    return report


def _yardstick(llm: LLM, num_requests: int) -> BareProducts | None:
    """For a dense model on a CPU, where matrix products are nearly all there is."""
    worker: Any = llm.core.executor
    if worker.device.type != "cpu" or llm.model_config.num_experts:
        return None
    from pagedlab.bench.yardstick import BareProducts

    return BareProducts(worker.runner.model, num_requests, worker.dtype)


def _report(llm: LLM, workload: Workload, memory: int, ours: list[Run], theirs: list[Run]) -> dict[str, Any]:
    header = llm.core.about
    seconds = statistics.median(run.seconds for run in ours)
    report: dict[str, Any] = {
        "model": header["model"]["name"],
        "engine": {k: header["config"][k] for k in ("device", "dtype", "attention_backend", "runner", "block_size")},
        "num_prompts": len(workload.prompts),
        "num_input_tokens": workload.num_input_tokens,
        "num_output_tokens": workload.num_output_tokens,
        "seed": llm.config.seed,
        "rounds": len(ours),
        "seconds": seconds,
        "output_tokens_per_second": workload.num_output_tokens / seconds,
        "total_tokens_per_second": (workload.num_input_tokens + workload.num_output_tokens) / seconds,
        "num_steps": ours[0].num_steps,
        "stage_seconds": {
            name: statistics.median(run.stage_seconds[name] for run in ours) for name in ours[0].stage_seconds
        },
        "kv_cache_bytes": sum(t.size for t in llm.kv_cache_config.kv_cache_tensors),
        "num_blocks": llm.kv_cache_config.num_blocks,
        "peak_memory_bytes": memory,
    }
    if theirs:
        rival_seconds = statistics.median(run.seconds for run in theirs)
        report["transformers"] = {
            "seconds": rival_seconds,
            "output_tokens_per_second": workload.num_output_tokens / rival_seconds,
            "ratio": rival_seconds / seconds,
            "ratio_per_round": [their.seconds / our.seconds for our, their in zip(ours, theirs, strict=True)],
        }
    return report


def _describe(report: dict[str, Any]) -> str:
    from pagedlab.bench.throughput import INNER_STAGES, OUTER_STAGES

    seconds, stages, engine = report["seconds"], report["stage_seconds"], report["engine"]
    lines = [
        f"{report['model']}: {engine['dtype']} on {engine['device']}, attention {engine['attention_backend']}, "
        f"runner {engine['runner']}, blocks of {engine['block_size']}",
        f"{plural(report['num_prompts'], 'request')}, {plural(report['num_input_tokens'], 'token')} in, "
        f"{report['num_output_tokens']:,} out, seed {report['seed']}, median of {plural(report['rounds'], 'round')}",
        "",
        f"  {report['output_tokens_per_second']:10,.1f} output tokens per second",
        f"  {report['total_tokens_per_second']:10,.1f} tokens per second, prompts included",
        f"  {seconds:10.2f} s in {plural(report['num_steps'], 'step')}",
        "",
    ]
    rest = seconds
    for outer in OUTER_STAGES:
        lines.append(f"  {stages[outer] / seconds:10.1%} {outer}")
        rest -= stages[outer]
        if outer == "execute_model":
            lines += [f"  {stages[s] / seconds:14.1%} {s}" for s in INNER_STAGES if s in stages]
            if engine["device"] == "cuda":
                lines.append(" " * 17 + "(of the host, which waits for the GPU in sample)")
    lines += [
        f"  {rest / seconds:10.1%} text and the rest",
        "",
        f"  {report['peak_memory_bytes'] / 2**20:10,.0f} MiB at the peak",
        f"  {report['kv_cache_bytes'] / 2**20:10,.0f} MiB set aside for {report['num_blocks']:,} KV blocks"
        + (", taken as they are written" if engine["device"] == "cpu" else ""),
    ]
    if decode := report.get("decode"):
        lines += [
            "",
            f"  {decode['step_seconds'] * 1000:10,.1f} ms a step "
            + ("that decodes" if decode["num_requests"] == 1 else f"while all {decode['num_requests']} decode"),
            f"  {decode['bare_products_seconds'] * 1000:10,.1f} ms for the model's bare matrix products, "
            f"{decode['share_of_bare_products']:.0%} of that",
        ]
    if rival := report.get("transformers"):
        lines += [
            "",
            f"  {rival['output_tokens_per_second']:10,.1f} output tokens per second by transformers' padded generate",
            f"  {rival['ratio']:10.2f} times as fast as it (rounds: "
            + ", ".join(f"{r:.2f}" for r in rival["ratio_per_round"]) + ")",
        ]
    if traced := report.get("traced"):
        more = traced["seconds"] / seconds - 1
        lines += ["", f"  {more:10.1%} more time in one run traced at {traced['record']}, see {traced['file']}"]
    return "\n".join(lines)


def _startup(knobs: Knobs, as_json: bool) -> None:
    from pagedlab.bench.startup import TORCH, measure_startup

    parts = measure_startup(knobs.engine_config(), STARTUP_PROMPT)
    total = sum(parts.values())
    if as_json:
        print(json.dumps({"parts": parts, "total": total, "without_torch": total - parts[TORCH]}, indent=2))
        return
    for part, seconds in parts.items():
        print(f"{seconds:8.3f} s  {part}")
    print(f"{total:8.3f} s  from the command to the first token, {total - parts[TORCH]:.3f} s without {TORCH}")


def _range(name: str, text: str) -> tuple[int, int]:
    """ "32-128", or "64" for always the same."""
    first, _, last = text.replace(":", "-").partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise UserError(f"{name} is {text!r}: give a range like 32-128, or one number.")
    least, most = int(first), int(last or first)
    if not 1 <= least <= most:
        raise UserError(f"{name} is {text!r}: the range goes from at least 1 upward.")
    return least, most


def _peak_memory_bytes(device: str) -> int:
    """The most that was held so far: of the GPU if the engine ran there, else of the process."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
