"""Stored traces: one of every format version still opens, and an example still says what the engine does.

``python tests/test_trace_stored.py`` writes the example anew after a wanted change. Files in
``versions/`` are never rewritten: they are what an older version wrote.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedlab.scenarios.library import load_scenario
from pagedlab.scenarios.run import run
from pagedlab.trace.check import check
from pagedlab.trace.diff import canonical
from pagedlab.trace.events import VERSION
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import tracing
from pagedlab.trace.why import why

DATA = Path(__file__).parent / "data" / "traces"
EXAMPLES = ("hybrid", "victim-already-scheduled")
VERSIONS = sorted((DATA / "versions").iterdir())


def play(name: str) -> Trace:
    with tracing("kernels") as trace:
        run(load_scenario(name))
    return trace


@pytest.mark.parametrize("path", VERSIONS, ids=lambda p: p.name)
def test_a_trace_of_every_format_version_opens_and_answers(path, capsys, tmp_path):
    trace = Trace.load(path)
    assert capsys.readouterr().err == ""
    assert path.name.startswith(".".join(map(str, trace.header.version)))
    assert check(trace) is None
    assert trace.at().num_free_blocks == trace.at(seq=trace.first_snapshot.seq).num_free_blocks
    for request_id in trace.requests:
        assert why(trace, request_id).lines
    assert trace.diff(trace) is None
    trace.to_perfetto(tmp_path / "p.json")


def test_there_is_one_of_the_current_version():
    assert any(path.name.startswith(".".join(map(str, VERSION))) for path in VERSIONS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_stored_example_is_what_the_engine_does(name):
    """Compared in canonical form: without times, versions and whatever else is volatile."""
    stored, now = Trace.load(DATA / f"{name}.jsonl.zst"), play(name)
    assert [canonical(e) for e in now] == [canonical(e) for e in stored]


def test_a_changed_decision_would_not_be_the_stored_example():
    stored = Trace.load(DATA / "hybrid.jsonl.zst")
    with tracing("kernels") as other:
        run(load_scenario("hybrid").with_config(max_num_batched_tokens=5))
    assert [canonical(e) for e in other] != [canonical(e) for e in stored]
    assert stored.diff(other) is not None


if __name__ == "__main__":
    for example in EXAMPLES:
        play(example).save(DATA / f"{example}.jsonl.zst")
