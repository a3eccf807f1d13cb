"""Finds recordings in files and folders, and tells their kinds apart by shape."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedlab.errors import UserError

SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Recording:
    """One thing to replay."""

    kind: str                  # scheduler, run, worked_examples, checkpoint or kv_init
    path: str                  # with the line number of a .jsonl
    document: dict[str, Any]   # of a checkpoint folder, its expected.json
    file: Path                 # the file, or the checkpoint's folder


@dataclass(frozen=True)
class Ignored:
    """Something in a folder that is no recording, or a part of one that is out of scope."""

    name: str


def collect(paths: Iterable[Path]) -> Iterator[Recording | Ignored]:
    """Walk files and folders in a fixed order.

    Raises:
        UserError: a path does not exist, or a file that was named cannot be read.
    """
    for path in paths:
        if path.is_dir():
            yield from _folder(path)
        elif path.exists():
            yield from _file(path)
        else:
            raise UserError(f"{path} does not exist: give a recording or a folder of recordings.")


def _folder(folder: Path) -> Iterator[Recording | Ignored]:
    expected = folder / "expected.json"
    if expected.is_file():
        yield Recording("checkpoint", str(folder), _parse(expected.read_text(), str(expected)), folder)
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _folder(path)
        elif not path.name.endswith(SUFFIXES):
            yield Ignored(str(path))
        else:
            try:
                yield from _file(path)
            except UserError:
                yield Ignored(str(path))


def _file(path: Path) -> Iterator[Recording | Ignored]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            text = file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a recording (.json, .jsonl or .jsonl.gz).") from None
    if ".jsonl" in path.suffixes:
        lines = [(f"{path}:{i}", line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        lines = [(str(path), text)]
    for name, line in lines:
        document = _parse(line, name)
        kind = kind_of_document(document)
        if kind is None:
            yield Ignored(name)
            continue
        yield Recording(kind, name, document, path)
        if "split_blocks" in document:
            yield Ignored(f"{name}: split_blocks (kernel blocks smaller than the manager's are out of scope)")


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON ({error}): give a recording.") from None
    return document if isinstance(document, dict) else {}


def kind_of_document(document: dict[str, Any]) -> str | None:
    """The kind of recording a document is, None if it is none."""
    steps, cases = document.get("steps"), document.get("cases")
    if document.get("format") == "pagedlab-conformance/1" and isinstance(steps, list):
        return "scheduler"
    if isinstance(steps, list) and "checkpoint" in document:
        return "run"
    if isinstance(cases, list) and cases and isinstance(cases[0], dict):
        if "specs" in (cases[0].get("input") or {}):
            return "kv_init"
        if "slot_mapping" in cases[0]:
            return "worked_examples"
    return None
