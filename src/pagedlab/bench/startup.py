"""From the command to the first token: where the time goes in this very process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedlab.config import EngineConfig

TORCH = "import torch"


def measure_startup(config: EngineConfig, prompt: str) -> dict[str, float]:
    """Seconds per part, in order. To be called before anything has imported torch."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is already imported, so its import cannot be timed")
    parts = {"start Python and the command line": _seconds_since_process_start()}
    clock = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal clock
        parts[part], clock = time.perf_counter() - clock, time.perf_counter()

    import torch  # noqa: F401

    lap(TORCH)
    from pagedlab.engine.llm import LLM
    from pagedlab.sampling_params import SamplingParams

    lap("import the engine")
    llm = LLM(config=config)
    lap("rest of building the engine")
    parts["rest of building the engine"] -= sum(llm.startup_seconds.values())
    parts |= llm.startup_seconds
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    lap("first token")
    return parts


def _seconds_since_process_start() -> float:
    """Since the system started this process, as far as it says; else since Python was up."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, starttime: ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()
