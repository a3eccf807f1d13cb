"""``pagedlab conformance``: our decisions beside recorded ones."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

import pagedlab
from pagedlab.conformance.collect import Ignored, Recording, collect
from pagedlab.conformance.report import Outcome, Unreadable
from pagedlab.errors import UserError
from pagedlab.viz.text import safe
from pagedlab.wording import plural

Mode = Literal["strict", "lenient", "both"]
PACKAGE = Path(pagedlab.__file__).parent


def conformance(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Recordings: files or folders.")],
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option("--checkpoints", metavar="DIR", help="Where the checkpoint folder that a run names is found."),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="For whole runs: the whole engine (strict), our worker on recorded messages (lenient).")
    ] = "both",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay recordings of the real vLLM against this engine.

    Exit status: 0 all are equal; 1 one differs; 2 one cannot be replayed, whatever the others gave.
    That one is damaged, lacks a part or names a checkpoint that is not found; it is named, and the rest is replayed.
    """
    outcomes: list[Outcome] = []
    unreadable: list[Unreadable] = []
    ignored: list[str] = []
    for found in collect(paths):
        if isinstance(found, Ignored):
            ignored.append(found.name)
            continue
        for result in [found] if isinstance(found, Unreadable) else _replay_safely(found, checkpoints or [], mode):
            if isinstance(result, Unreadable):
                unreadable.append(result)
                continue
            outcomes.append(result)
            if not as_json:
                _print_line(result)
    if not outcomes and not unreadable:
        where = ", ".join(map(str, paths))
        raise UserError(f"found no recording in {where}: give recordings or folders that hold some.")
    failed = sum(not outcome.ok for outcome in outcomes)
    others = len(unreadable) - 1
    if as_json:
        _print_json(outcomes, unreadable, ignored)
    elif outcomes or others:
        _print_summary(outcomes, unreadable, ignored, failed)
    if unreadable:
        first = unreadable[0].why
        raise UserError(f"{first} {plural(others, 'other')} cannot be replayed either." if others else first)
    if failed:
        raise typer.Exit(1)


def _replay_safely(recording: Recording, checkpoints: list[Path], mode: Mode) -> Iterator[Outcome | Unreadable]:
    """An exception of the engine is a difference, one while a recording is read makes that unreadable; neither ends."""
    if recording.kind == "run" and mode == "both":
        yield from _replay_safely(recording, checkpoints, "strict")
        yield from _replay_safely(recording, checkpoints, "lenient")
        return
    try:
        yield from replay(recording, checkpoints, mode)
    except UserError as error:
        why = str(error)
        yield Unreadable(recording.path, why if str(recording.file) in why else f"{recording.path}: {why}")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        what = f"{type(error).__name__}: {error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
        ours = [place for frame in frames if (place := Path(frame.filename)).is_relative_to(PACKAGE)]
        if ours[-1].parent.name == "conformance":  # there the document is read; elsewhere the engine works
            yield Unreadable(recording.path, f"{recording.path} is malformed: {what}.")
            return
        name = str(recording.document.get("name", recording.file.name))
        first = {"step": None, "field": "exception", "expected": None, "got": what}
        report = f"{name}: the replay ended with an exception (a damaged recording, or a changed engine)\n  {what}\n"
        kind = "worker" if recording.kind == "run" else recording.kind
        broken = "lenient" if kind == "worker" and mode == "lenient" else "strict"
        yield Outcome(name, recording.path, kind, broken, False, first, report)


def replay(recording: Recording, checkpoints: list[Path], mode: Mode) -> Iterable[Outcome | Unreadable]:
    """Hand a recording to the half of the engine it is about; torch is imported only for the worker's."""
    if recording.kind == "scheduler":
        from pagedlab.conformance.scheduler import replay_scheduler

        return replay_scheduler(recording.document, recording.path)
    if recording.kind == "kv_init":
        from pagedlab.conformance.kv_init import replay_kv_init

        return replay_kv_init(recording.document, recording.path)
    if recording.kind == "run":
        from pagedlab.conformance.worker import replay_run

        places = [*checkpoints, *recording.file.resolve().parents]
        return replay_run(recording.document, recording.path, places, mode)
    if recording.kind == "checkpoint":
        from pagedlab.conformance.checkpoint import replay_checkpoint

        return replay_checkpoint(recording.file)
    from pagedlab.conformance.worked_examples import replay_worked_example

    return replay_worked_example(recording.document, recording.path)


def _print_line(outcome: Outcome) -> None:
    verdict = "ok  " if outcome.ok else "DIFF"
    mode = f" ({outcome.mode})" if outcome.kind == "worker" else ""
    print(safe(f"{verdict} {outcome.name}{mode}  {outcome.about}"))
    if not outcome.ok:
        for line in outcome.report.split("\n"):
            print(safe(line))


def _print_summary(outcomes: list[Outcome], unreadable: list[Unreadable], ignored: list[str], failed: int) -> None:
    for name in ignored:
        print(safe(f"ignored {name}"))
    for one in unreadable:
        print(safe(f"BAD  {one.why}"))
    by_kind = {kind: sum(o.kind == kind for o in outcomes) for kind in dict.fromkeys(o.kind for o in outcomes)}
    kinds = ", ".join(f"{count} {kind}" for kind, count in by_kind.items())
    bad = f"{len(unreadable)} could not be replayed; " if unreadable else ""
    print(f"{len(outcomes)} replayed ({kinds or 'none'}): {len(outcomes) - failed} ok, {failed} with a difference; "
          f"{bad}{plural(len(ignored), 'other file')} ignored.")


def _print_json(outcomes: list[Outcome], unreadable: list[Unreadable], ignored: list[str]) -> None:
    scenarios = []
    for outcome in outcomes:
        fields = dataclasses.asdict(outcome)
        scenarios.append({k: fields[k] for k in ("name", "path", "kind", "mode", "ok", "first_difference")})
    passed = sum(outcome.ok for outcome in outcomes)
    print(json.dumps({
        "passed": passed, "failed": len(outcomes) - passed, "ignored": len(ignored), "ignored_names": ignored,
        "unreadable": [dataclasses.asdict(one) for one in unreadable], "scenarios": scenarios,
    }))  # fmt: skip
