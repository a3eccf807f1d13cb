"""Finds recordings in files and folders, and tells their kinds apart by shape."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedlab.conformance.report import Unreadable
from pagedlab.errors import UserError

SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Recording:
    """One thing to replay."""

    kind: str                  # scheduler, run, worked_examples, checkpoint or kv_init
    path: str                  # with the line number of a .jsonl
    document: dict[str, Any]   # empty for a checkpoint folder
    file: Path                 # the file, or the checkpoint's folder


@dataclass(frozen=True)
class Ignored:
    """Something in a folder that is no recording, or a part of one that is out of scope."""

    name: str


Found = Recording | Ignored | Unreadable


def collect(paths: Sequence[Path]) -> Iterator[Found]:
    """Walk files and folders in a fixed order.

    Raises:
        UserError: a path does not exist.
    """
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist: give a recording or a folder of recordings.")
    for path in paths:
        yield from _folder(path) if path.is_dir() else _file(path)


def _folder(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Found]:
    """``above``: the real folders on the way down, lest a link leads round in a circle."""
    if folder.resolve() in above:
        yield Ignored(str(folder))
        return
    try:
        paths, is_checkpoint = sorted(folder.iterdir()), (folder / "expected.json").is_file()
    except OSError as error:
        yield Unreadable(str(folder), f"the folder {folder} cannot be read ({error.strerror}).")
        return
    if is_checkpoint:
        yield Recording("checkpoint", str(folder), {}, folder)
        return
    for path in paths:
        if path.is_dir():
            yield from _folder(path, (*above, folder.resolve()))
        elif path.name.endswith(SUFFIXES):
            yield from _file(path)
        else:
            yield Ignored(str(path))


def _file(path: Path) -> Iterator[Found]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = f"{path} cannot be read ({error}): give a recording (.json, .jsonl or .jsonl.gz)."
        yield Unreadable(str(path), why)
        return
    if ".jsonl" in path.suffixes:
        lines = [(f"{path}:{i}", line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        lines = [(str(path), text)]
    for name, line in lines:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Unreadable(name, f"{name} is not valid JSON ({error}): give a recording.")
            continue
        kind = kind_of_document(document)
        if kind is None:
            yield Ignored(name)
            continue
        yield Recording(kind, name, document, path)
        if "split_blocks" in document:
            yield Ignored(f"{name}: split_blocks (kernel blocks smaller than the manager's are out of scope)")


def kind_of_document(document: Any) -> str | None:
    """The kind of recording a document is, None if it is none."""
    if not isinstance(document, dict):
        return None
    steps, cases = document.get("steps"), document.get("cases")
    if document.get("format") == "pagedlab-conformance/1" and isinstance(steps, list):
        return "scheduler"
    if isinstance(steps, list) and "checkpoint" in document:
        return "run"
    if isinstance(cases, list) and cases and isinstance(cases[0], dict):
        inputs = cases[0].get("input")
        if isinstance(inputs, dict) and "specs" in inputs:
            return "kv_init"
        if "slot_mapping" in cases[0]:
            return "worked_examples"
    return None
