"""Records the traces that figures and pages are drawn from: ``python -m pagedlab.figures.record``."""

from __future__ import annotations

import dataclasses
from importlib.resources import files
from pathlib import Path

from pagedlab.scenarios.library import load_scenario
from pagedlab.scenarios.run import run
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import tracing

FOLDER = Path(str(files("pagedlab.figures") / "traces"))
RECORDED = {  # file -> (scenario, runner)
    "two-five-three": ("two-five-three", "persistent"),
    "state-rows": ("two-five-three", "state-table"),
    "mixed-batch": ("mixed-batch", "persistent"),
    "prefix-hit": ("prefix-hit", "persistent"),
    "preemption": ("preemption", "persistent"),
}


def stored(name: str) -> Trace:
    """A trace that ships with the package."""
    return Trace.load(FOLDER / f"{name}.jsonl.zst")


def record(scenario_name: str, runner: str) -> Trace:
    """Run a scenario on the embedded model, at the finest level."""
    from pagedlab.engine.llm import LLM

    scenario = load_scenario(scenario_name)
    with tracing("kernels") as trace:
        run(scenario, LLM(config=dataclasses.replace(scenario.engine_config(), runner=runner)))
    return trace


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, (scenario_name, runner) in RECORDED.items():
        record(scenario_name, runner).save(FOLDER / f"{name}.jsonl.zst")
        print(f"{name}.jsonl.zst")
