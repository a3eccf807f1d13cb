"""Who imports whom, read off the syntax trees: imports inside functions and under TYPE_CHECKING included."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pagedlab

PACKAGE = Path(pagedlab.__file__).parent
HEAVY = {"torch", "triton", "transformers", "safetensors", "flash_attn"}

# Plain words that everybody may use, and that use nothing but each other.
WORDS = ("errors", "version", "wording", "memory", "config", "sampling_params", "request", "kv.specs", "sched.output")
TEXT = ("engine.tokenizer", "engine.detokenizer", "engine.input_processor", "engine.output_processor")
CONTROL = ("kv", "sched", "engine.core", "engine.guards")
EVERYTHING = ("",)

# Module or package (the longest name that fits counts) -> what it may import besides WORDS and itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(WORDS, ()),
    "trace": (),
    # ---- control plane, no torch
    "kv": ("trace",),
    "sched": ("trace", "kv"),
    "engine.core": ("trace", "kv", "sched", "engine.guards"),
    "engine.guards": ("trace", "sched"),
    **dict.fromkeys(TEXT, ("trace", *TEXT)),
    "engine": (),
    "engine.interrupt": (),
    "engine.arguments": TEXT,
    # ---- device half
    "kernels": ("trace",),
    "worker.input_batch": (),
    "attention": ("trace", "kernels", "worker.input_batch"),
    "models": ("attention", "kernels"),
    "models.config": (),
    "models.resolve": (),
    "worker": ("trace", "kernels", "attention", "models"),
    # ---- the whole engine
    "engine.build": ("trace", *CONTROL, "engine.tokenizer", "models.config", "models.resolve", "worker"),
    "engine.llm": ("trace", *CONTROL, *TEXT, "engine.arguments", "engine.interrupt", "engine.build"),
    # ---- beside it
    "scenarios": ("trace", *CONTROL),
    "simulate": ("trace", *CONTROL, "scenarios", "engine.tokenizer", "models.resolve"),
    "conformance": ("trace", *CONTROL, "scenarios"),
    "conformance.worker": ("trace", *CONTROL, "conformance", "worker", "kernels", "models"),
    "conformance.checkpoint": ("trace", *CONTROL, "conformance", "worker", "models"),
    "conformance.single_engine": ("trace", *CONTROL, "worker", "models"),
    "conformance.worked_examples": ("trace", *CONTROL, "conformance", "worker", "kernels"),
    "viz": ("trace",),
    "viewer": ("trace",),
    "figures": ("trace", "viz", "scenarios", "engine.llm"),
    "display": ("trace", "viz.text", "viewer.pack"),
    # ---- the outside
    "doctor": ("models.resolve",),
    "bench": EVERYTHING,
    "commands": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": ("cli",),
    "__init__": (),
}  # fmt: skip

# (importer, imported): single places that a rule would forbid, each for a reason.
EXCEPTIONS = {
    ("trace.trace", "viewer.widget"),        # what leads from a trace to its pictures: one lazy line each
    ("trace.trace", "display.block_table"),
    ("trace.trace", "display.tables"),
    ("trace.trace", "display.charts"),
}

TORCH_HALF = (
    "worker", "kernels", "attention", "models", "engine.build", "engine.llm", "bench",
    "conformance.worker", "conformance.checkpoint", "conformance.single_engine", "conformance.worked_examples",
)  # fmt: skip
TORCH_FREE_IN_IT = ("models.config", "models.resolve", "bench.__init__", "bench.startup", "bench.throughput")
ASKS_FOR_TORCH_INSIDE = ("doctor", "commands.bench", "bench.startup")  # in a function, to measure or to describe it
STARTS_THE_ENGINE = ("commands", "cli", "__main__", "figures", *ASKS_FOR_TORCH_INSIDE, "bench")


def is_below(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(prefix == "" or name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name] = path
    return found


@cache
def imports(name: str) -> dict[str, bool]:
    """What a module imports, without ``pagedlab.`` -> whether on its top level, when it is itself imported."""
    tree = ast.parse(modules()[name].read_text())
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        at_top = node in tree.body
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.name] = found.get(alias.name, False) or at_top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: relative import"
            for alias in node.names:  # from pagedlab.conformance import worker: a module, not a name
                whole = f"{node.module}.{alias.name}"
                target = whole if whole.removeprefix("pagedlab.") in modules() else node.module
                found[target] = found.get(target, False) or at_top
    return {n.removeprefix("pagedlab."): top for n, top in found.items()}


def own(name: str) -> list[str]:
    return [n for n in imports(name) if n in modules() or f"{n}.__init__" in modules()]


def reach(name: str, *, at_top_only: bool) -> set[str]:
    """Every name imported by a module, by what it imports, and so on."""
    reached, ahead = set(), [name]
    while ahead:
        for target, at_top in imports(ahead.pop()).items():
            if (at_top or not at_top_only) and target not in reached:
                reached.add(target)
                if target in modules():
                    ahead.append(target)
    return reached


def rule_of(name: str) -> str | None:
    return max((rule for rule in ALLOWED if is_below(name.removesuffix(".__init__"), (rule,))), key=len, default=None)


def forbidden_imports(name: str) -> list[str]:
    rule = rule_of(name)
    allowed = (rule, *WORDS, *ALLOWED[rule])
    return [n for n in own(name) if not is_below(n, allowed) and (name, n) not in EXCEPTIONS]


def test_the_walk_sees_the_whole_package():
    assert len(modules()) > 60 and "torch" in imports("worker.worker")
    assert imports("trace.events")["request"] is False, "an import under TYPE_CHECKING is seen, and is not at the top"
    assert "engine.llm" in own("commands.generate"), "an import inside a function is seen"
    assert "conformance.scheduler" in own("commands.conformance")


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_only_what_its_floor_may(name):
    assert rule_of(name) is not None, f"{name} has no place in the house: add it to ALLOWED"
    assert forbidden_imports(name) == []


def test_an_exception_that_is_no_longer_needed_is_noticed():
    assert all(target in imports(importer) for importer, target in EXCEPTIONS)


def test_words_use_only_words():
    for name in WORDS:
        assert all(is_below(n, WORDS) for n in own(name)), name


@pytest.mark.parametrize("name", [
    n for n in modules()
    if (not is_below(n, TORCH_HALF) or is_below(n, TORCH_FREE_IN_IT)) and not is_below(n, ASKS_FOR_TORCH_INSIDE)
])
def test_the_torch_free_half_names_no_heavy_library(name):
    assert not {n.split(".")[0] for n in imports(name)} & HEAVY


@pytest.mark.parametrize("name", [
    n for n in modules() if not is_below(n, TORCH_HALF) and not is_below(n, STARTS_THE_ENGINE)
])
def test_the_torch_free_half_never_reaches_torch_not_even_lazily(name):
    if name.startswith("conformance."):  # the command asks for the worker's half by kind
        assert not {n for n in reach(name, at_top_only=True) if n.split(".")[0] in HEAVY}
        return
    assert not {n for n in reach(name, at_top_only=False) if n.split(".")[0] in HEAVY}


@pytest.mark.parametrize("name", ["commands", "cli", "__main__", "doctor", "figures", "bench.startup"])
def test_the_command_line_imports_torch_only_when_it_needs_an_engine(name):
    for module in (n for n in modules() if is_below(n, (name,))):
        assert not {n for n in reach(module, at_top_only=True) if n.split(".")[0] in HEAVY}, module


def test_transformers_is_named_in_the_comparison_only():
    assert [n for n in modules() if any(i.split(".")[0] == "transformers" for i in imports(n))] == ["bench.padded"]


def test_no_module_imports_itself_through_others():
    for name in modules():
        assert name not in reach(name, at_top_only=True), name


@pytest.mark.parametrize("importer, imported", [
    ("kv.block", "sched.scheduler"), ("kv.manager", "worker.runner"), ("sched.scheduler", "engine.core"),
    ("trace.trace", "sched.scheduler"), ("viz.terminal", "engine.core"), ("engine.core", "worker.worker"),
    ("kernels.slot_mapping", "models.layers"), ("simulate.paged", "engine.llm"),
])
def test_an_import_from_a_higher_floor_is_found(monkeypatch, importer, imported):
    right = imports.__wrapped__
    monkeypatch.setitem(globals(), "imports", lambda n: right(n) | ({imported: False} if n == importer else {}))
    assert forbidden_imports(importer) == [imported]


# ------------------------------------------------------------------ what is really loaded


def loaded_after(code: str, *, without: tuple[str, ...] = ()) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """The heavy modules in sys.modules after ``code`` has run in a fresh interpreter."""
    script = "\n".join([
        f"import json, sys\nsys.modules.update(dict.fromkeys({without!r}))\ntry:",
        *(f"    {line}" for line in code.splitlines()),
        "finally:",
        f"    loaded = {HEAVY!r} & {{name for name, module in sys.modules.items() if module}}",
        "    print(json.dumps(sorted(loaded)), file=sys.stderr)",
    ])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return set(json.loads(done.stderr.splitlines()[-1])), done


def command(*arguments: str) -> str:
    return f"sys.argv = {['pagedlab', *arguments]!r}\nfrom pagedlab.cli import main\nmain()"


def test_importing_pagedlab_loads_nothing_heavy_and_gives_its_light_names():
    names = ("SamplingParams", "EngineConfig", "Trace", "tracing", "UserError", "__version__")
    code = "import pagedlab\ndir(pagedlab)\n" + "\n".join(f"pagedlab.{name}" for name in names)
    loaded, done = loaded_after(code)
    assert (done.returncode, loaded) == (0, set())


@pytest.mark.parametrize("arguments", [
    ("--help",), ("--version",), ("trace", "--help"), ("simulate", "--help"), ("scenarios",),
], ids=" ".join)
def test_asking_for_help_loads_nothing_heavy(arguments):
    loaded, done = loaded_after(command(*arguments))
    assert (done.returncode, loaded) == (0, set()) and done.stdout


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    from engines import Shape
    from pagedlab.trace.file import TraceFile
    from pagedlab.trace.tracer import trace

    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    shape = Shape()
    core, file = shape.engine_core(), TraceFile(path)
    trace.start(file, record="blocks")
    core.add_request(shape.request("r0", [1, 2, 3, 4, 5], 3))
    while core.has_unfinished_requests():
        core.step()
    trace.stop()
    file.close()
    return path


def test_loading_a_trace_loads_nothing_heavy(trace_file):
    loaded, done = loaded_after(f"from pagedlab import Trace\nassert len(list(Trace.load({str(trace_file)!r}))) > 20")
    assert (done.returncode, loaded) == (0, set()), done.stderr


@pytest.mark.parametrize("name", ["replay", "why", "check", "view", "diff"])
def test_reading_a_trace_loads_nothing_heavy(trace_file, tmp_path, name):
    path = str(trace_file)
    arguments = {"why": [path, "r0"], "view": [path, "-o", str(tmp_path / "t.html")], "diff": [path, path]}
    loaded, done = loaded_after(command(name, *arguments.get(name, [path])))
    assert (done.returncode, loaded) == (0, set()), done.stderr


def test_kernel_files_import_without_triton():
    names = [n for n in modules() if n.startswith("kernels.")]
    code = "".join(f"import pagedlab.{n}\n" for n in names)
    loaded, done = loaded_after(code, without=("triton", "triton.language"))
    assert done.returncode == 0, done.stderr
    assert "triton" not in loaded
