"""What a caller of the Python API gives, checked and brought into one form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from pagedlab.config import EngineConfig
from pagedlab.engine.output_processor import OutputKind
from pagedlab.errors import UserError


def engine_config(model: str | Path | None, config: EngineConfig | None, knobs: Mapping[str, Any]) -> EngineConfig:
    """A config as it is given, or one of these knobs."""
    if config is not None:
        if model is not None or knobs:
            raise UserError("give LLM either a config or a model with knobs, not both.")
        if not isinstance(config, EngineConfig):
            raise UserError(f"config must be an EngineConfig, not {type(config).__name__}.")
        return config
    unknown = sorted(set(knobs) - set(EngineConfig.field_names()))
    if unknown:
        raise UserError(f"LLM has no knob {unknown[0]!r}: it has {', '.join(EngineConfig.field_names())}.")
    return EngineConfig(model=None if model is None else str(model), **knobs)


def check_request(request_id: object, priority: object, arrival_time: object, kind: object) -> None:
    """What decides the order of a queue must be comparable, and what names a request a name."""
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise UserError(f"request_id is {request_id!r}: give a text that is not empty, or nothing.")
    if type(priority) is not int:
        raise UserError(f"priority is {priority!r}: give a whole number.")
    if arrival_time is not None and (not isinstance(arrival_time, int | float) or not math.isfinite(arrival_time)):
        raise UserError(f"arrival_time is {arrival_time!r}: give a number, or nothing.")
    if kind not in get_args(OutputKind):
        raise UserError(f"kind is {kind!r}: choose one of {', '.join(get_args(OutputKind))}.")


def is_one_prompt(prompts: object) -> bool:
    """Text, a dict, or ids; otherwise each member is a prompt."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return True
    if getattr(prompts, "ndim", None) == 0:  # an array that holds a single number
        return True
    first = next(iter(prompts), None) if hasattr(prompts, "__len__") else None
    return isinstance(first, int) or getattr(first, "ndim", None) == 0


def one_per_prompt(name: str, given: Any, kind: type, count: int) -> list[Any]:
    """The same for all prompts, or as many as there are."""
    each = [given] * count if isinstance(given, kind) or not isinstance(given, Iterable) else list(given)
    wrong = next((value for value in each if not isinstance(value, kind)), None)
    if wrong is not None:
        raise UserError(f"{name} must be {kind.__name__} or a list of them, not {type(wrong).__name__}.")
    if len(each) != count:
        raise UserError(f"{name} has {len(each)} entries for {count} prompts: give one for all, or one each.")
    return each
