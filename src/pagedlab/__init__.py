"""pagedlab: see how a paged-attention LLM engine works, on a real one.

Names are loaded on first use, so that reading a trace or asking for help never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pagedlab.version import __version__

_NAMES = {
    "LLM": "pagedlab.engine.llm",
    "CompletionOutput": "pagedlab.engine.output_processor",
    "RequestOutput": "pagedlab.engine.output_processor",
    "SamplingParams": "pagedlab.sampling_params",
    "EngineConfig": "pagedlab.config",
    "Trace": "pagedlab.trace.trace",
    "tracing": "pagedlab.trace.tracer",
    "UserError": "pagedlab.errors",
}

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'pagedlab' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
