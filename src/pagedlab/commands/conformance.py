"""``pagedlab conformance``: our decisions beside recorded ones."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from pagedlab.conformance.collect import Ignored, Recording, collect
from pagedlab.conformance.report import Outcome
from pagedlab.errors import UserError
from pagedlab.wording import plural

Mode = Literal["strict", "lenient", "both"]


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
    """Replay recordings of the real vLLM against this engine; exit 1 at a difference."""
    outcomes: list[Outcome] = []
    ignored: list[str] = []
    for found in collect(paths):
        if isinstance(found, Ignored):
            ignored.append(found.name)
            continue
        for outcome in _replay_safely(found, checkpoints or [], mode):
            outcomes.append(outcome)
            if not as_json:
                _print_line(outcome)
    if not outcomes:
        where = ", ".join(map(str, paths))
        raise UserError(f"found no recording in {where}: give recordings or folders that hold some.")
    failed = sum(not outcome.ok for outcome in outcomes)
    if as_json:
        _print_json(outcomes, ignored)
    else:
        _print_summary(outcomes, ignored, failed)
    if failed:
        raise typer.Exit(1)


def _replay_safely(recording: Recording, checkpoints: list[Path], mode: Mode) -> Iterable[Outcome]:
    """A recording that breaks off, or a changed engine that raises, is a difference and not the end."""
    try:
        return replay(recording, checkpoints, mode)
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
        name = str(recording.document.get("name", recording.file.name))
        first = {"step": None, "field": "exception", "expected": None, "got": what}
        report = f"{name}: the replay ended with an exception (a damaged recording, or a changed engine)\n  {what}\n"
        kind = "worker" if recording.kind == "run" else recording.kind
        broken = "lenient" if kind == "worker" and mode == "lenient" else "strict"
        return [Outcome(name, recording.path, kind, broken, False, first, report)]


def replay(recording: Recording, checkpoints: list[Path], mode: Mode) -> Iterable[Outcome]:
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
    print(f"{verdict} {outcome.name}{mode}  {outcome.about}")
    if outcome.report and not outcome.ok:
        print(outcome.report)


def _print_summary(outcomes: list[Outcome], ignored: list[str], failed: int) -> None:
    for name in ignored:
        print(f"ignored {name}")
    by_kind = {kind: sum(o.kind == kind for o in outcomes) for kind in dict.fromkeys(o.kind for o in outcomes)}
    kinds = ", ".join(f"{count} {kind}" for kind, count in by_kind.items())
    print(f"{len(outcomes)} replayed ({kinds}): {len(outcomes) - failed} ok, {failed} with a difference; "
          f"{plural(len(ignored), 'other file')} ignored.")


def _print_json(outcomes: list[Outcome], ignored: list[str]) -> None:
    scenarios = []
    for outcome in outcomes:
        fields = dataclasses.asdict(outcome)
        scenarios.append({k: fields[k] for k in ("name", "path", "kind", "mode", "ok", "first_difference")})
    passed = sum(outcome.ok for outcome in outcomes)
    print(json.dumps({
        "passed": passed, "failed": len(outcomes) - passed, "ignored": len(ignored), "ignored_names": ignored,
        "scenarios": scenarios,
    }))  # fmt: skip
