"""What ``pagedlab simulate`` does once its options are known to be in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagedlab.config import EngineConfig
from pagedlab.errors import notice
from pagedlab.scenarios.library import load_scenario
from pagedlab.simulate.contiguous import RESERVATIONS, simulate_contiguous
from pagedlab.simulate.generator import DEFAULT_GENERATOR, generate
from pagedlab.simulate.paged import Follow, ScenarioSource, Simulation, Source, WorkloadSource, simulate
from pagedlab.simulate.report import LABELS, report_json, report_text
from pagedlab.simulate.workload import SimulatedRequest, read_jsonl
from pagedlab.trace.events import Level
from pagedlab.trace.file import TraceFile, refuse_overwriting
from pagedlab.trace.tracer import trace

# What the PagedAttention paper had for OPT-13B on an A100: 12 GiB of KV cache, 15,728 slots of 819,200 bytes.
POOL = {"block_size": 16, "num_blocks": 984, "max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 2048}


def run_simulations(
    workload: str | None,
    generator: str | None,
    drawn: Mapping[str, Any],
    knobs: Mapping[str, Any],
    fit: str | None,
    *,
    as_json: bool,
    out: Path | None,
    record: Level = "decisions",
) -> None:
    """Run, with a bar per run on stderr, and print the report.

    Args:
        drawn: arguments of ``generate``; None leaves a generator's own part.
        knobs: what was given of the pool and the scheduler.
        fit: how the allocators from before paging find their slots; None leaves them out.
        record: how much of it ``out`` holds.

    Raises:
        UserError: no such workload, or one that cannot run like this.
    """
    refuse_overwriting(Path(workload or ""), out)
    about, config, source, lengths = _find_workload(workload, generator, drawn, knobs)
    with _bars(source.num_requests) as follow:
        contiguous = {
            name: simulate_contiguous(lengths, config, name, fit, follow(LABELS[name]))
            for name in (RESERVATIONS if fit is not None else ())
            if fit is not None
        }
        paged = _run_paged(source, config, out, record, follow(LABELS["paged"]))
    if as_json:
        print(json.dumps(report_json(about, config, paged, contiguous, fit)))
    else:
        print(report_text(about, config, paged, contiguous, fit), end="")
    if out is not None:
        notice(f"the trace is in {out}")


def _find_workload(
    workload: str | None, generator: str | None, drawn: Mapping[str, Any], knobs: Mapping[str, Any]
) -> tuple[str, dict[str, Any], Source, list[SimulatedRequest]]:
    """A sentence about the workload, the configuration, and the requests: for the engine, and as mere lengths."""
    if workload is None or workload.endswith(".jsonl"):
        config = _checked({**POOL, **knobs})
        if "max_model_len" not in knobs:  # what the usable blocks hold, if that is less
            config["max_model_len"] = min(config["max_model_len"], (config["num_blocks"] - 1) * config["block_size"])
        if workload is not None:
            made = read_jsonl(Path(workload))
        else:
            made = generate(generator or DEFAULT_GENERATOR, max_model_len=config["max_model_len"], **drawn)
        return made.about, config, WorkloadSource(made, config), made.requests
    scenario = load_scenario(workload).with_config(**knobs)
    about = f"scenario {scenario.name}. {scenario.about.removesuffix('.')}"
    if scenario.needs_model:
        from pagedlab.engine.tokenizer import Tokenizer
        from pagedlab.models.resolve import resolve_model

        config = _checked({**POOL, **scenario.config})
        scenario = scenario.with_config(**config).with_made_up_tokens(Tokenizer(resolve_model(scenario.model)).encode)
        about += ". Its texts are cut into tokens as the model would; the outputs are made up, to the full length"
    config = {"max_model_len": POOL["max_model_len"], **_checked(scenario.config)}
    source = ScenarioSource(scenario)
    return about, config, source, source.simulated_requests()


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    """Have EngineConfig look at every value, and complain with its own sentences."""
    EngineConfig(**{name: value for name, value in config.items() if name in EngineConfig.field_names()})
    return config


def _run_paged(
    source: Source, config: dict[str, Any], out: Path | None, record: Level, follow: Follow
) -> Simulation:
    if out is None:
        return simulate(source, config, follow)
    file = TraceFile(out)
    trace.start(file, record=record)
    try:
        return simulate(source, config, follow)
    except KeyboardInterrupt:
        notice(f"interrupted; the trace until here is in {out}")
        raise
    finally:
        trace.stop()
        file.close()


@contextmanager
def _bars(num_requests: int) -> Iterator[Any]:
    """Yields a function that starts a bar; in a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"))
    hidden = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden) as bars:

        def start(name: str) -> Follow:
            task = bars.add_task(name, total=num_requests)
            return lambda ended: bars.update(task, completed=ended)

        yield start
