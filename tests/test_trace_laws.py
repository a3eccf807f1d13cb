"""The laws of the trace beside law 1 (test_trace_fold.py), each with a counterpart that must fail."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import pagedlab
from pagedlab.engine.core import EngineCore
from pagedlab.errors import UserError
from pagedlab.trace.events import KINDS, LEVELS, Event, RequestAdded, TextEmitted
from pagedlab.trace.file import TraceFile, encode, load_trace
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import trace
from standin import StandInExecutor, make_request, make_scheduler
from test_trace_fold import CONFIGS, new_core, random_actions, recording, renumbered

SOURCE = Path(pagedlab.__file__).parent
CLASSES = {cls.__name__: cls for cls in KINDS.values()}


# ------------------------------------------------------------------ 2 Honest: tracing changes nothing


class Recorder(StandInExecutor):
    """Keeps every message of the scheduler, as text."""

    def __init__(self, disturb=False):
        super().__init__()
        self.messages, self.disturb = [], disturb

    def execute_model(self, output):
        self.messages.append(repr(output))
        result = super().execute_model(output)
        if self.disturb and trace.on:  # an engine that reads the trace
            result.sampled_token_ids = {r: [6] if ids else [] for r, ids in result.sampled_token_ids.items()}
        return result


def messages(level, config, disturb=False, sink=None):
    recorder = Recorder(disturb)
    core = EngineCore(make_scheduler(**config), recorder, about={"model": {}, "config": {}, "tokenizer": {}})
    if level:
        trace.start(sink if sink is not None else [], record=level)
    try:
        for _ in random_actions(random.Random(7), core, 60):
            pass
    finally:
        if level:
            trace.stop()
    return recorder.messages


@pytest.mark.parametrize("config", CONFIGS)
def test_decisions_and_tokens_are_the_same_with_tracing_off_and_at_every_level(config):
    untraced = messages(None, config)
    for level in LEVELS:
        assert messages(level, config) == untraced, level


def test_an_engine_that_reads_the_trace_is_found_out():
    assert messages("blocks", CONFIGS[0], disturb=True) != messages(None, CONFIGS[0], disturb=True)


# ------------------------------------------------------------------ 3 Free when off: every site is guarded


def emit_sites(tree, makers):
    """(call, names of the event classes it may emit, guards around it) of every ``trace.emit(…)`` in a module."""
    sites = []

    def visit(node, guards, loops):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            guards = ()  # a guard around a definition does not guard its calls
        if isinstance(node, ast.If):
            inner = (*guards, *guards_of(node.test))
            visit(node.test, guards, loops)
            for child in node.body:
                visit(child, inner, loops)
            for child in node.orelse:
                visit(child, guards, loops)
            return
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            loops = {**loops, node.target.id: node.iter}  # for event in helper(…): trace.emit(event)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "trace.emit":
            argument = node.args[0]
            if isinstance(argument, ast.Name):
                argument = loops.get(argument.id, argument)
            sites.append((node, event_classes(argument, makers), guards))
        for child in ast.iter_child_nodes(node):
            visit(child, guards, loops)

    visit(tree, (), {})
    return sites


def guards_of(test):
    """Names of the trace's switches that must be on for the branch to be taken."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return tuple(g for part in test.values for g in guards_of(part))
    if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name) and test.value.id == "trace":
        return (test.attr,)
    return ()


def event_classes(argument, makers):
    """Of ``Event(…)``, ``Event.from_x(…)`` or a helper that makes events."""
    if not isinstance(argument, ast.Call):
        return set()
    function = argument.func
    if isinstance(function, ast.Name):
        return {function.id} if function.id in CLASSES else makers.get(function.id, set())
    if isinstance(function, ast.Attribute):
        if isinstance(function.value, ast.Name) and function.value.id in CLASSES:
            return {function.value.id}
        return makers.get(function.attr, set())
    return set()


def makers_in(tree):
    """Function -> the event classes it constructs, itself or through functions of its module."""
    called = {
        function.name: {n.func.id for n in ast.walk(function)
                        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)
    }
    for _ in called:
        called = {name: names.union(*(called.get(n, ()) for n in names)) for name, names in called.items()}
    return {name: made for name, names in called.items() if (made := names & CLASSES.keys())}


def unguarded(source, makers=None):
    """What is wrong with the emit sites of one module, in words."""
    tree, wrong = ast.parse(source), []
    for call, names, guards in emit_sites(tree, {**(makers or {}), **makers_in(tree)}):
        if not names:
            wrong.append(f"line {call.lineno}: cannot tell which event {ast.unparse(call.args[0])[:60]} is")
        for name in names:
            switch = "on" if CLASSES[name].level == "steps" else CLASSES[name].level
            if switch not in guards:
                wrong.append(f"line {call.lineno}: {name} needs `if trace.{switch}`, its guards are {guards}")
    return wrong


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text("utf-8")
        if path.relative_to(SOURCE).as_posix() != "trace/tracer.py" and "trace" in text:
            yield path, text


def test_every_emit_site_is_inside_the_guard_of_its_events_level():
    makers = {name: made for _, text in modules() for name, made in makers_in(ast.parse(text)).items()}
    wrong = [f"{path.relative_to(SOURCE)}: {says}" for path, text in modules() for says in unguarded(text, makers)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("body", [
    "trace.emit(StepStarted(num_waiting=0))",
    "if trace.on or verbose:\n    trace.emit(StepStarted(num_waiting=0))",
    "if trace.on:\n    pass\nelse:\n    trace.emit(StepStarted(num_waiting=0))",
    "if trace.on:\n    trace.emit(BlockCached(block_id=1))",
    "if trace.on:\n    later = lambda: trace.emit(StepStarted(num_waiting=0))",
    "if other.on:\n    trace.emit(StepStarted(num_waiting=0))",
    "for event in made():\n    if trace.on:\n        trace.emit(event)\ndef made():\n    yield BlockCached(block_id=1)",
    "event = make()\nif trace.on:\n    trace.emit(event)",
    "if trace.on:\n    trace.emit(f())\ndef f():\n    return g()\ndef g():\n    return BlockCached(block_id=1)",
])  # fmt: skip
def test_a_site_without_its_guard_is_found(body):
    assert unguarded(body)
    assert not unguarded("if trace.on and more:\n    trace.emit(StepStarted(num_waiting=0))")


def test_nothing_reads_the_trace_but_guards():
    """Outside trace/, an attribute of the tracer is a guard, or a call inside one."""
    allowed = {"on", "decisions", "blocks", "tensors", "kernels", "emit", "enter", "begin_step", "traces_layer"}
    starters = {"start", "stop"}  # who begins and ends a recording
    for path, text in modules():
        where = path.relative_to(SOURCE).as_posix()
        if where.startswith("trace/") or "from pagedlab.trace.tracer import trace" not in text:
            continue
        used = {n.attr for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)
                and isinstance(n.value, ast.Name) and n.value.id == "trace"}
        extra = used - allowed - (starters if where.startswith(("commands/", "cli", "conformance/", "simulate/",
                                                                "bench")) else set())
        assert not extra, f"{where}: {extra}"


# ------------------------------------------------------------------ 4 Bounded: cost follows who is looked at


def num_events_of_a_step(num_waiting):
    core = new_core(40, max_num_seqs=2)
    with recording("decisions", snapshot_every=10**9) as events:
        for i in range(num_waiting + 2):
            core.add_request(make_request(core.scheduler, f"r{i}", [1, 2, 3], 30))
        core.step()
        before = len(events)
        core.step()
        return len(events) - before


def test_the_number_of_events_of_a_step_does_not_grow_with_the_waiting_queue():
    assert num_events_of_a_step(3) == num_events_of_a_step(3000)


# ------------------------------------------------------------------ 5 Safe: a stranger's data is only text


def test_nothing_in_the_source_can_run_what_a_trace_says():
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("eval", "exec", "pickle.load", "pickle.loads", "marshal.loads",
                                                      "yaml.load", "os.system"), f"{path}, line {node.lineno}"


HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\u202eevil\x00</script>\x9b31m"


def hostile(events):
    """The same run with a stranger's request id, prompt and reason."""
    text = b"\n".join(encode(e) for e in events)
    text = text.replace(b'"r1"', json.dumps(HOSTILE).encode()).replace(b'"all_tokens"', json.dumps(HOSTILE).encode())
    return text.replace(b'"prompt":null', b'"prompt":' + json.dumps(HOSTILE).encode()) + b"\n"


@pytest.mark.parametrize("arguments", [["check"], ["why", HOSTILE.replace("\x00", "")], ["why", "r0"],
                                       ["why", "r2", "--step", "1"], ["diff", "OTHER"], ["replay"]])
def test_no_control_character_of_a_trace_reaches_the_terminal(arguments, tmp_path):
    with recording() as events:
        for _ in random_actions(random.Random(1), new_core(9), 12):
            pass
    path, other = tmp_path / "t.jsonl", tmp_path / "o.jsonl"
    path.write_bytes(hostile(events).replace(b"\\u0000", b""))
    Trace(events).save(other)
    command, *rest = arguments
    rest = [str(other) if a == "OTHER" else a for a in rest]
    done = subprocess.run([sys.executable, "-c", "from pagedlab.cli import main; main()", command, str(path), *rest],
                          capture_output=True, env={"NO_COLOR": "1", "PATH": ""}, timeout=60)
    assert b"Traceback" not in done.stderr
    for output in (done.stdout.decode(), done.stderr.decode()):
        assert not [c for c in output if not c.isprintable() and c != "\n" and c != "\u200e"], output[:400]


@pytest.mark.parametrize("line", [
    b'{"kind":"\\u001b[2J","seq":1}',
    b'{"kind":"queue_not_reached","seq":1,"queue":"\\u001b[2J","count":1,"first_request_id":"r","reason":"x"}',
])
def test_messages_about_a_bad_record_are_printable(line, tmp_path, capsys):
    with recording() as events:
        next(random_actions(random.Random(1), new_core(9), 1))
    (tmp_path / "t.jsonl").write_bytes(b"\n".join([encode(events[0]), line, *map(encode, events[1:])]))
    try:
        load_trace(tmp_path / "t.jsonl")
    except UserError as error:
        assert str(error).isprintable()
    assert capsys.readouterr().err.replace("\n", "").isprintable()


# ------------------------------------------------------------------ 6 Alive: every event is emitted and described


def test_every_event_class_has_an_emit_site_and_a_sentence():
    """That each occurs in a built-in scenario is held by test_scenarios.py."""
    constructed = set()
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).split(".")[0]
                constructed.add(name)
    missing = set(CLASSES) - constructed
    assert not missing, missing
    without = [name for name, cls in CLASSES.items() if not (cls.__doc__ or "").strip()]
    assert not without, without


def test_an_event_that_nobody_emits_would_be_found():
    class NeverEmitted(Event, kw_only=True, tag="never_emitted"):
        """Nobody says this."""

    assert not any("NeverEmitted(" in text for _, text in modules())


# ------------------------------------------------------------------ 7 Comparable: see also test_trace_diff.py


def test_an_event_is_stamped_by_the_tracer_alone(tmp_path):
    """seq has no gap, engine and step say whose and when, and all sinks get the same."""
    core, in_memory = new_core(9), []
    with TraceFile(tmp_path / "t.jsonl") as sink:
        trace.start(in_memory, sink, record="blocks")
        for _ in random_actions(random.Random(1), core, 10):
            pass
        trace.stop()
    assert [e.seq for e in in_memory] == list(range(len(in_memory)))
    assert {e.engine for e in in_memory[1:]} == {core.engine_id}
    times = [e.t_ns for e in in_memory]
    assert times == sorted(times)
    assert load_trace(tmp_path / "t.jsonl") == in_memory
    added = [e for e in in_memory if type(e) is RequestAdded]
    assert all(e.kind == "request_added" and e.step >= -1 for e in added)
    assert renumbered(in_memory) == in_memory
    with pytest.raises(TypeError):
        msgspec.structs.replace(TextEmitted(request_id="r0", text=""), no_such_field=1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_sink_that_fails_does_not_leave_tracing_on(tmp_path):
    with pytest.raises(UserError, match="No space left"), pagedlab.tracing("steps", "all", TraceFile("/dev/full")):
        pass
    assert not (trace.on or trace.kernels)


@pytest.mark.parametrize("layers", ["first", [-1], [1.0], 3, None])
def test_layers_are_all_or_a_list_of_numbers(layers):
    with pytest.raises(UserError, match="layers is"), pagedlab.tracing(layers=layers):
        pass
    assert not trace.on
