"""Trace files: whole, cut anywhere, from another version, not a trace at all."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap

import pytest
import zstandard
from msgspec.structs import replace

from pagedlab.display.picture import write_text
from pagedlab.errors import UserError
from pagedlab.trace import file
from pagedlab.trace.events import RequestConsidered, TextEmitted
from pagedlab.trace.file import TraceFile, encode, load_trace, save_trace
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import trace
from pagedlab.viewer.page import write_page
from test_trace_fold import new_core, random_actions, recording


@pytest.fixture(scope="module")
def events():
    core = new_core(9)
    with recording("kernels") as recorded:
        for _ in random_actions(random.Random(1), core, 30):
            pass
    return recorded


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_what_is_saved_loads_equal_and_without_a_notice(events, tmp_path, capsys, name):
    Trace(events).save(tmp_path / name)
    assert Trace.load(tmp_path / name).events == events
    assert capsys.readouterr().err == ""
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_a_run_written_as_it_happens_equals_the_same_run_in_memory(tmp_path, name):
    core, in_memory = new_core(9), []
    with TraceFile(tmp_path / name) as sink:
        trace.start(in_memory, sink, record="blocks")
        for _ in random_actions(random.Random(1), core, 10):
            pass
        trace.stop()
    assert load_trace(tmp_path / name) == in_memory


def test_every_line_is_an_object_with_the_envelope(events, tmp_path):
    save_trace(events, tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert records[0]["kind"] == "trace_header" and records[0]["format"] == "pagedlab-trace"
    assert records[0]["version"] == [1, 0] and records[1]["kind"] == "engine_snapshot"
    assert [r["seq"] for r in records] == list(range(len(records)))
    for record in records:
        assert {"kind", "seq", "engine", "step", "t_ns", "proc"} <= set(record)


@pytest.mark.parametrize(
    "lost, sentence",
    [([40], "1 record before seq 41 "), ([40, 41, 90], "3 records, the first before seq 42 ")],
)
def test_a_trace_that_lost_records_opens_with_one_notice(events, tmp_path, capsys, lost, sentence):
    path = tmp_path / "lost.jsonl"
    kept = [e for e in events if e.seq not in lost]
    path.write_bytes(b"".join(encode(e) + b"\n" for e in kept))
    assert load_trace(path) == kept
    step = next(e.step for e in kept if e.seq > lost[0])
    expected = f"pagedlab: notice: {path}: it lacks {sentence}(step {step}); what follows may be wrong\n"
    assert capsys.readouterr().err == expected


def test_a_part_of_a_trace_and_one_of_several_processes_lack_nothing_by_accident(events, tmp_path, capsys):
    Trace(events).filter(step=2).save(tmp_path / "part.jsonl")  # says itself what was left out
    load_trace(tmp_path / "part.jsonl")
    worker = [replace(e, proc="worker:1", seq=e.seq - 20) for e in events[30:50]]
    both = [*events[:60], *worker, *events[60:]]
    (tmp_path / "both.jsonl").write_bytes(b"".join(encode(e) + b"\n" for e in both))
    assert load_trace(tmp_path / "both.jsonl") == both
    assert capsys.readouterr().err == ""


def test_a_file_cut_anywhere_after_its_header_opens_up_to_the_cut_with_one_notice(events, tmp_path, capsys):
    save_trace(events, tmp_path / "whole.jsonl")
    data = (tmp_path / "whole.jsonl").read_bytes()
    after_header = data.index(b"\n") + 1
    cuts = {after_header, len(data) - 1, len(data) - 2, data.index(b"\n", len(data) // 2) + 1}
    cuts |= {random.Random(i).randrange(after_header, len(data) - 1) for i in range(60)}
    for cut in cuts:
        (tmp_path / "cut.jsonl").write_bytes(data[:cut])
        loaded = load_trace(tmp_path / "cut.jsonl")
        whole_lines = data[:cut].count(b"\n") + (data[cut : cut + 1] == b"\n")
        assert loaded == events[:whole_lines], cut
        notices = capsys.readouterr().err.splitlines()
        if cut == len(data) - 1:  # only the last newline is missing: nothing is lost
            assert notices == []
        else:
            assert len(notices) == 1 and "cut" in notices[0] and notices[0].startswith("pagedlab: notice: "), cut


def test_a_compressed_file_cut_after_its_header_opens_with_one_notice(events, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(file, "FLUSH_BYTES", 4096)
    save_trace(events, tmp_path / "whole.jsonl.zst")
    data = (tmp_path / "whole.jsonl.zst").read_bytes()
    lengths = set()
    for cut in range(900, len(data) - 4, 211):
        (tmp_path / "cut.jsonl.zst").write_bytes(data[:cut])
        loaded = load_trace(tmp_path / "cut.jsonl.zst")
        assert loaded == events[: len(loaded)]
        lengths.add(len(loaded))
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert len(lengths) > 5


def test_a_file_compressed_by_the_zstd_tool_opens(events, tmp_path):
    save_trace(events, tmp_path / "t.jsonl")
    data = (tmp_path / "t.jsonl").read_bytes()
    two_frames = zstandard.compress(data[:5000]) + zstandard.compress(data[5000:])
    (tmp_path / "t.jsonl.zst").write_bytes(two_frames)
    assert load_trace(tmp_path / "t.jsonl.zst") == events


def test_unknown_fields_are_ignored_and_unknown_kinds_are_skipped_with_one_notice(events, tmp_path, capsys):
    save_trace(events, tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_text("utf-8").splitlines()
    later = [line[:-1] + ',"a_later_field":{"x":[1]}}' for line in lines]
    later.insert(5, '{"kind":"a_later_kind","seq":77,"whatever":[1,2]}')
    later.insert(9, '{"kind":"a_later_kind","seq":78}')
    (tmp_path / "t.jsonl").write_text("\n".join(later) + "\n", "utf-8")
    assert load_trace(tmp_path / "t.jsonl") == events
    notices = capsys.readouterr().err.splitlines()
    assert len(notices) == 1 and "2 records" in notices[0] and "a_later_kind" in notices[0]


def header_line(events):
    return file.encode(events[0])


BAD_FILES = {
    "empty": (lambda ev: b"", "it is empty"),
    "blank": (lambda ev: b"\n\n\n", "not a pagedlab trace"),
    "text": (lambda ev: b"Call me Ishmael.\n" * 50, "not a pagedlab trace"),
    "binary": (lambda ev: bytes(range(256)) * 9, "not a pagedlab trace"),
    "other json": (lambda ev: b'{"hello": 1}\n[1]\n', "not a pagedlab trace"),
    "a list": (lambda ev: b"[1, 2]\n", "not a pagedlab trace"),
    "deep nesting": (lambda ev: b"[" * 500_000, "not a pagedlab trace"),
    "no header": (lambda ev: b"\n".join(map(file.encode, ev[1:])), "not a pagedlab trace"),
    "cut header": (lambda ev: header_line(ev)[:60], "not a pagedlab trace"),
    "header lacks a field": (lambda ev: header_line(ev).replace(b'"record"', b'"rekord"') + b"\n", "no valid trace h"),
    "later major version": (lambda ev: header_line(ev).replace(b"[1,0]", b"[2,0]") + b"\n", r"trace format 2\.0"),
    "garbage inside": (lambda ev: b"\n".join([header_line(ev), b"{oops", *map(file.encode, ev[1:])]), "line 2 is not"),
    "wrong types": (lambda ev: b"\n".join([header_line(ev), b'{"kind":"step_started","seq":1,"num_waiting":"two"}',
                                           *map(file.encode, ev[1:])]), "line 2 is not a valid record"),
    "no seq": (lambda ev: b"\n".join([header_line(ev), b'{"kind":"text_emitted","request_id":"r0","text":"x"}',
                                      *map(file.encode, ev[1:])]), "line 2 is not a valid record"),
    "second header": (lambda ev: b"\n".join([header_line(ev), *map(file.encode, ev)]), "second header"),
    "damaged zstd": (lambda ev: b"\x28\xb5\x2f\xfd" + b"x" * 100, "damaged"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_input_is_refused_in_one_sentence(events, tmp_path, name):
    make, message = BAD_FILES[name]
    (tmp_path / "bad.jsonl").write_bytes(make(events))
    with pytest.raises(UserError, match=message) as info:
        load_trace(tmp_path / "bad.jsonl")
    assert "\n" not in str(info.value) and len(str(info.value)) < 300 + len(str(tmp_path))


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no trace"):
        load_trace(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is a directory"):
        load_trace(tmp_path)


def test_too_large_a_file_is_refused_without_reading_all_of_it(events, tmp_path, monkeypatch):
    bomb = header_line(events) + b"\n" + (file.encode(TextEmitted(request_id="r0", text=" " * 1000)) + b"\n") * 100_000
    (tmp_path / "bomb.zst").write_bytes(zstandard.compress(bomb.replace(b'"seq":-1', b'"seq":5'), 3))
    monkeypatch.setattr(file, "MAX_BYTES", 8 << 20)
    with pytest.raises(UserError, match="more than"):
        load_trace(tmp_path / "bomb.zst")


def test_an_endless_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "MAX_RECORD_BYTES", 1 << 16)
    (tmp_path / "x.jsonl").write_bytes(b" " * (4 << 20))
    with pytest.raises(UserError, match="no pagedlab trace"):
        load_trace(tmp_path / "x.jsonl")


def test_a_hundred_thousand_events_load_in_two_seconds(tmp_path):
    import time

    with recording("decisions") as many:
        trace.enter(new_core(9))
        for i in range(100_000):
            trace.emit(RequestConsidered(request_id=f"r{i % 50}", queue="running", num_computed_tokens=i,
                                         num_tokens_wanted=1, num_tokens_granted=1, budget_before=9, budget_after=8,
                                         outcome="scheduled", reason="all_tokens"))
    for name in ("t.jsonl", "t.jsonl.zst"):
        save_trace(many, tmp_path / name)
        start = time.perf_counter()
        assert len(load_trace(tmp_path / name)) == len(many)
        assert time.perf_counter() - start < 2


def test_text_that_utf8_cannot_carry_is_written_as_replacement_characters(events, tmp_path):
    odd = TextEmitted(request_id="r\udcff", text="a\ud800b")
    odd.seq = 1
    save_trace([events[0], odd], tmp_path / "t.jsonl")
    loaded = load_trace(tmp_path / "t.jsonl")[1]
    assert re.fullmatch("a\ufffd+b", loaded.text)


def test_minus_infinity_is_null(tmp_path, events):
    from pagedlab.trace.events import Candidate, TokensSampled

    sampled = TokensSampled(request_id="r0", row=0, token_id=1, kept=True, logprob=float("-inf"),
                            top=[Candidate(token_id=1, text=None, logprob=float("-inf"))])
    sampled.seq = 1
    save_trace([events[0], sampled], tmp_path / "t.jsonl")
    assert load_trace(tmp_path / "t.jsonl")[1].logprob is None


def test_nothing_is_written_when_the_run_is_refused_before_its_first_event(tmp_path):
    with TraceFile(tmp_path / "t.jsonl"):
        pass
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError, match="cannot write the trace"):
        TraceFile(tmp_path / "no" / "such" / "t.jsonl")
    with pytest.raises(UserError, match="it is a directory"):
        TraceFile(tmp_path)


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl.gz", "t.zst", "t", "jsonl"])
def test_a_name_that_promises_another_content_is_refused(events, tmp_path, name):
    sentence = re.escape(f"cannot write the trace {tmp_path / name}: let its name end in .jsonl or .jsonl.zst.")
    with pytest.raises(UserError, match=sentence):
        TraceFile(tmp_path / name)
    with pytest.raises(UserError, match=sentence):
        Trace(events).save(tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="needs links and /dev")
def test_a_link_is_judged_by_its_own_name_and_a_device_by_none(events, tmp_path):
    (tmp_path / "t.jsonl.zst").symlink_to("elsewhere")
    Trace(events).save(tmp_path / "t.jsonl.zst")
    assert load_trace(tmp_path / "elsewhere") == events
    assert (tmp_path / "elsewhere").read_bytes()[:4] == b"\x28\xb5\x2f\xfd"
    Trace(events).save("/dev/null")
    with TraceFile("/dev/null") as sink:
        sink.append(events[0])


def test_a_full_disk_is_one_sentence(events):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with pytest.raises(UserError, match="cannot write the trace"), TraceFile("/dev/full") as sink:
        sink.append(events[0])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_a_process_that_dies_leaves_a_trace_that_opens(tmp_path, name, how):
    """Ctrl-C loses nothing; a kill loses at most what was not flushed yet."""
    program = f"""
        import random, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_trace_fold import new_core, random_actions
        from pagedlab.engine.interrupt import Interrupts
        from pagedlab.trace.file import TraceFile
        from pagedlab.trace.tracer import trace
        core = new_core(9)
        with TraceFile({str(tmp_path / name)!r}) as sink:
            trace.start(sink, record="blocks")
            interrupts = Interrupts()  # as LLM does: Ctrl-C acts between steps, so no record is half on its way
            try:
                with interrupts:
                    for i, _ in enumerate(random_actions(random.Random(1), core, 10**9)):
                        if i == 2000:
                            print("going", flush=True)
                        interrupts.raise_if_came()
            finally:
                trace.stop()
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"going\n"
    process.send_signal(how)
    process.wait(20)
    loaded = Trace.load(tmp_path / name)
    assert max(loaded.steps) > 1000
    assert [e.seq for e in loaded] == list(range(len(loaded)))


@pytest.mark.parametrize("write", ["trace", "page", "picture"])
def test_a_pipe_and_a_link_stay_what_they_are(events, tmp_path, write):
    """As root, /dev/null would be replaced as well."""
    def write_to(path):
        if write == "trace":
            save_trace(events, path)
        elif write == "page":
            write_page(Trace(events), path)
        else:
            write_text(path, "<svg/>")

    os.mkfifo(tmp_path / "pipe.svg")
    reader = subprocess.Popen(["cat", tmp_path / "pipe.svg"], stdout=subprocess.PIPE)
    write_to(tmp_path / "pipe.svg")
    through_the_pipe = reader.communicate(timeout=60)[0]
    (tmp_path / "real.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    write_to(tmp_path / "link.jsonl")
    assert (tmp_path / "link.jsonl").is_symlink() and (tmp_path / "pipe.svg").is_fifo()
    assert len((tmp_path / "real.jsonl").read_bytes()) == len(through_the_pipe) > 3
    assert len(os.listdir(tmp_path)) == 3
