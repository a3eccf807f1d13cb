"""Finds scenarios: the built-in ones by name, others by path."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagedlab.errors import UserError
from pagedlab.scenarios.scenario import Scenario

_BUILTIN = files("pagedlab.scenarios") / "builtin"


def builtin_names() -> list[str]:
    return sorted(entry.name.removesuffix(".json") for entry in _BUILTIN.iterdir() if entry.name.endswith(".json"))


def list_scenarios() -> list[Scenario]:
    """All built-in scenarios by name; those with ``needs_model`` run on the embedded model."""
    return [load_scenario(name) for name in builtin_names()]


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A built-in scenario, or a file (``.json``, ``.json.gz``).

    Raises:
        UserError: there is neither, or the document is not a scenario.
    """
    name = str(name_or_path)
    if name in builtin_names():
        return Scenario.from_document(json.loads((_BUILTIN / f"{name}.json").read_text()), name)
    path = Path(name_or_path)
    if path.is_file():
        return Scenario.from_document(read_document(path), str(path))
    if path.suffix or path.is_dir() or len(path.parts) > 1:
        raise UserError(f"there is no scenario file {name}.")
    raise UserError(f"there is no scenario {name!r}: choose {', '.join(builtin_names())}, or give a file.")


def read_document(path: Path) -> Any:
    """The JSON in a file.

    Raises:
        UserError: it cannot be read, or is not JSON.
    """
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, EOFError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}).") from None
