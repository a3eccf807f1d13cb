"""The command line of an engine: trace, generate, bench, doctor; what it imports and what it refuses."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pagedlab import Trace, cli
from pagedlab.errors import UserError
from pagedlab.models.resolve import EMBEDDED_DIR

TRACE = ["trace", "It is a truth", "--max-tokens", "3"]


@pytest.fixture
def pagedlab(monkeypatch, capsys):
    """Run a command in this process; gives status, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pagedlab", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return run


def spawn(*arguments: str, **kwargs) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "pagedlab", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs,
    )  # fmt: skip


# ------------------------------------------------------------------ results


def test_trace_shows_and_saves_the_same_run(pagedlab, tmp_path):
    status, out, err = pagedlab(*TRACE, "--out", str(tmp_path / "t.jsonl.zst"))
    assert status == 0 and "step 0" in out and "slot" in out
    assert err.count("\n") == 1 and err.startswith("pagedlab: notice: the trace is in ")
    trace = Trace.load(tmp_path / "t.jsonl.zst")
    assert trace.header.record == "tensors" and list(trace.filter("slots_mapped"))
    assert trace.header.config["num_blocks"] == 64


def test_trace_writes_the_page_of_the_run(pagedlab, tmp_path):
    status, _, err = pagedlab(*TRACE, "--html", str(tmp_path / "t.html"))
    assert status == 0 and err.startswith("pagedlab: notice: the page is ")
    assert (tmp_path / "t.html").read_text().startswith("<!doctype html>") and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "record"),
    [((), "tensors"), (("--record", "decisions"), "decisions"), (("--detail", "kernels"), "kernels"),
     (("--record", "steps", "--detail", "blocks"), "blocks"), (("--detail", "steps"), "tensors")],
)  # fmt: skip
def test_what_is_recorded_is_never_less_than_what_is_shown(pagedlab, tmp_path, options, record):
    file = tmp_path / "t.jsonl"
    assert pagedlab(*TRACE, "--out", str(file), *options)[0] == 0
    assert Trace.load(file).header.record == record


def test_only_the_wanted_layers_are_traced(pagedlab, tmp_path):
    file = tmp_path / "t.jsonl"
    assert pagedlab(*TRACE, "--out", str(file), "--record", "kernels", "--layers", "0,2")[0] == 0
    written = {event.layer for event in Trace.load(file).filter("kv_written")}
    assert written == {f"model.layers.{i}.self_attn.attn" for i in (0, 2)}


def test_several_prompts_run_together(pagedlab, tmp_path):
    file = tmp_path / "t.jsonl"
    assert pagedlab("trace", "It is", "She was", "--n", "2", "--max-tokens", "2", "--out", str(file))[0] == 0
    assert set(Trace.load(file).requests) == {"0_r0", "1_r0", "0_r1", "1_r1"}


def test_generate_prints_plain_text_and_json(pagedlab):
    status, text, _ = pagedlab("generate", "It is a truth", "--max-tokens", "5", "--ignore-eos")
    _, as_json, _ = pagedlab("generate", "It is a truth", "--max-tokens", "5", "--ignore-eos", "--json")
    (output,) = json.loads(as_json)
    assert status == 0 and text == output["outputs"][0]["text"] + "\n" and len(output["outputs"][0]["token_ids"]) == 5


def test_doctor_names_what_there_is(pagedlab):
    status, out, _ = pagedlab("doctor", "--json")
    assert status == 0 and {"torch", "gpu", "triton", "graphviz", "embedded model"} <= set(json.loads(out))


def test_bench_counts_tokens_and_shares_the_time_among_stages(pagedlab):
    arguments = ["--num-prompts", "3", "--input-len", "4-8", "--output-len", "2-4", "--rounds", "1"]
    status, out, _ = pagedlab("bench", *arguments, "--json")
    report = json.loads(out)
    assert status == 0 and 12 <= report["num_input_tokens"] <= 24 and 6 <= report["num_output_tokens"] <= 12
    stages = report["stage_seconds"]
    assert 0 < stages["forward"] < stages["execute_model"] < report["seconds"]
    status, out, _ = pagedlab("bench", *arguments)
    assert status == 0 and "output tokens per second" in out


def test_bench_traces_one_more_run_if_asked(pagedlab, tmp_path):
    arguments = ["--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--rounds", "1"]
    status, out, _ = pagedlab("bench", *arguments, "--out", str(tmp_path / "b.jsonl"))
    assert status == 0 and "traced at decisions" in out
    trace = Trace.load(tmp_path / "b.jsonl")
    assert trace.header.record == "decisions" and len(trace.filter("request_finished")) == 2


def test_bench_compares_with_transformers_on_the_same_work(pagedlab):
    pytest.importorskip("transformers")
    arguments = ["--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--rounds", "1"]
    status, out, _ = pagedlab("bench", *arguments, "--compare", "transformers", "--json")
    assert status == 0 and json.loads(out)["transformers"]["ratio"] > 0


def test_random_weights_have_the_shape_that_was_asked_for(tmp_path, monkeypatch):
    from pagedlab.bench import random_weights

    small = random_weights.SHAPES["qwen3-0.6b"] | {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    monkeypatch.setitem(random_weights.SHAPES, "small", small)
    folder = random_weights.random_checkpoint("small", tmp_path)
    from pagedlab import LLM, SamplingParams

    (output,) = LLM(folder, num_blocks=4).generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2 and output.outputs[0].text == ""
    assert random_weights.random_checkpoint("small", tmp_path) == folder


@pytest.mark.parametrize("largest", [0, 1_000])
def test_random_weights_on_a_full_disk_are_one_sentence_and_no_half_a_checkpoint(
    tmp_path, monkeypatch, capsys, largest  # capsys: the notice is not a file either
):
    from pagedlab.bench import random_weights

    small = random_weights.SHAPES["qwen3-0.6b"] | {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    monkeypatch.setitem(random_weights.SHAPES, "small", small)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        with pytest.raises(UserError, match=f"cannot write {tmp_path}/small-random: .*(full|large|No space)"):
            random_weights.random_checkpoint("small", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "small-random").iterdir()) == []


# ------------------------------------------------------------------ bad input


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    """Folders with one mistake each."""
    root = tmp_path_factory.mktemp("broken")

    def copy(name: str) -> Path:
        shutil.copytree(EMBEDDED_DIR, root / name)
        return root / name

    config = json.loads((EMBEDDED_DIR / "config.json").read_text())
    (copy("llama") / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    (copy("not-json") / "config.json").write_text("{")
    (copy("no-config") / "config.json").unlink()
    (copy("no-weights") / "model.safetensors").unlink()
    weights = copy("truncated") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 20])
    (copy("other-shape") / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    shard = copy("missing-shard")
    tensors = load_file(shard / "model.safetensors")
    name = next(iter(tensors))
    save_file({name: tensors[name]}, shard / "model-00001-of-00002.safetensors")
    (shard / "model.safetensors").unlink()
    files = {n: f"model-0000{1 if n == name else 2}-of-00002.safetensors" for n in tensors}
    (shard / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (copy("bad-tokenizer") / "tokenizer.json").write_text("{}")
    (root / "trace.jsonl").write_text("not a trace\n")
    return root


LONG = "truth " * 200
BAD_INPUT = [
    ("empty prompt", [""], "the prompt is empty"),
    ("one of several empty", ["a", ""], "prompt 2 is empty"),
    ("no prompt", [], "no prompt"),
    ("not UTF-8", ["\udcff"], "not valid UTF-8"),
    ("prompt and scenario", ["a", "--scenario", "twins"], "not both"),
    ("bad knob for a scenario", ["--scenario", "seats", "--block-size", "0"], "block_size is 0"),
    ("unknown scenario", ["--scenario", "nowhere"], "nowhere"),
    ("too long for the model", [LONG * 6, "--num-blocks", "4000"], "max_model_len"),
    ("too long for the pool", [LONG, "--num-blocks", "4", "--max-model-len", "1024"], "3 usable blocks"),
    ("too long for the pool that trace takes", [LONG * 6], "63 usable blocks"),
    ("unknown directory", ["a", "--model", "./nowhere"], "no directory"),
    ("not Qwen3", ["a", "--model", "{broken}/llama"], "llama"),
    ("config not JSON", ["a", "--model", "{broken}/not-json"], "config.json"),
    ("no config", ["a", "--model", "{broken}/no-config"], "config.json"),
    ("no weights", ["a", "--model", "{broken}/no-weights"], "model.safetensors"),
    ("truncated weights", ["a", "--model", "{broken}/truncated"], "model.safetensors"),
    ("missing shard", ["a", "--model", "{broken}/missing-shard"], "model-00002-of-00002.safetensors"),
    ("wrong shapes", ["a", "--model", "{broken}/other-shape"], "shape"),
    ("bad tokenizer", ["a", "--model", "{broken}/bad-tokenizer"], "tokenizer"),
    ("no chat template", ["a", "--chat"], "chat template"),
    ("unknown dtype", ["a", "--dtype", "int4"], "dtype is 'int4'"),
    ("unknown device", ["a", "--device", "tpu"], "device is 'tpu'"),
    ("unknown detail", ["a", "--detail", "all"], "--detail is 'all'"),
    ("unknown record", ["a", "--record", "all"], "--record is 'all'"),
    ("a page of decisions", ["a", "--html", "t.html", "--record", "decisions"], "--html needs"),
    ("a page nowhere", ["a", "--html", "no/such/t.html"], "cannot write the page"),
    ("bad layers", ["a", "--layers", "x"], "--layers is 'x'"),
    ("unknown option", ["a", "--blocksize", "4"], "--blocksize"),
    ("not a number", ["a", "--block-size", "big"], "--block-size"),
    ("one block", ["a", "--num-blocks", "1"], "null block"),
    ("too many blocks", ["a", "--num-blocks", "2000000000"], "GiB"),
    ("too many seats", ["a", "--max-num-seqs", "2000000000"], "machine can give: lower max_num_seqs"),
    ("too many seats, persistent", ["a", "--max-num-seqs", "2000000000", "--runner", "persistent"],
     "lower max_num_seqs or max_model_len"),
    ("beyond the model's length", ["a", "--max-model-len", "99999"], "model's own limit"),
    ("does not fit the memory", ["a", "--kv-cache-memory", "100000"], "blocks"),
    ("one file for two things", ["a", "--html", "t.jsonl"], "the same file"),
    ("a layer behind the last", ["a", "--layers", "0,6"], "layer 6, but the model's layers are 0 to 5"),
    ("a layer before the first", ["a", "--layers", "-1"], "--layers is '-1'"),
    ("out of nowhere", ["a", "--out", "{broken}/no/such/folder/t.jsonl"], "no directory"),
    ("a trace that is no text", ["a", "--out", "t.txt"], "cannot write the trace t.txt: let its name end in"),
    ("a trace that is no gzip", ["a", "--out", "t.jsonl.gz"], "let its name end in .jsonl or .jsonl.zst"),
    *((f"zero {k}", ["a", f"--{k}", "0"], k.replace("-", "_")) for k in (
        "block-size", "num-blocks", "kv-cache-memory", "max-model-len", "max-num-seqs", "max-num-batched-tokens",
        "gpu-memory-utilization", "max-tokens", "top-p", "n")),
    *((f"negative {k}", ["a", f"--{k}", "-2"], k.replace("-", "_")) for k in (
        "block-size", "num-blocks", "long-prefill-token-threshold", "min-tokens", "temperature", "top-k", "min-p",
        "seed")),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), [row[1:] for row in BAD_INPUT], ids=[row[0] for row in BAD_INPUT])
def test_bad_input_is_one_sentence_and_status_2_and_nothing_is_written(
    pagedlab, broken, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    arguments = [a.replace("{broken}", str(broken)) for a in arguments]
    out_file = [] if "--out" in arguments else ["--out", "t.jsonl"]
    status, out, err = pagedlab("trace", *out_file, *arguments)
    assert (status, out) == (2, ""), err
    *notices, error = err.splitlines()
    assert error.startswith("pagedlab: ") and message in error
    assert all(line.startswith("pagedlab: notice: ") for line in notices)
    assert list(tmp_path.iterdir()) == []


def test_every_command_that_writes_a_file_spells_it_alike(pagedlab, tmp_path):
    trace, story, decisions, page = (str(tmp_path / name) for name in ("t.jsonl", "s.json", "d.jsonl", "p.html"))
    measured = str(tmp_path / "b.jsonl")
    bench = ["--num-prompts", "1", "--input-len", "4", "--output-len", "2", "--rounds", "1"]
    for spelling in ("-o", "--out"):
        assert pagedlab(*TRACE, spelling, trace)[0] == 0
        assert pagedlab("scenario-from", trace, spelling, story)[0] == 0
        assert pagedlab("simulate", story, spelling, decisions)[0] == 0
        assert pagedlab("view", trace, spelling, page)[0] == 0
        assert pagedlab("bench", *bench, spelling, measured)[0] == 0
        for path in (trace, story, decisions, page, measured):
            assert Path(path).stat().st_size
            Path(path).unlink()


@pytest.mark.parametrize("command", [
    ["replay"], ["check"], ["conformance"], ["simulate"], ["trace", "--scenario"], ["trace", "a", "--model"],
    ["trace", "a", "--out"], ["trace", "a", "--html"], ["figures"], ["figures", "--check"],
], ids=" ".join)  # fmt: skip
def test_a_name_that_no_file_can_have_is_one_sentence(pagedlab, command):
    status, out, err = pagedlab(*command, "x" * 5000 + ".jsonl")
    assert (status, out, err.count("\n")) == (2, "", 1) and "File name too long" in err


@pytest.mark.parametrize("command", ["replay", "view", "check", "scenario-from"])
@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_folder_is_no_trace(pagedlab, command, name):
    status, out, err = pagedlab(command, name)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("pagedlab: ")


def test_a_trace_that_lost_a_request_is_no_page_and_one_sentence(pagedlab, tmp_path):
    trace, damaged = tmp_path / "t.jsonl", tmp_path / "damaged.jsonl"
    assert pagedlab(*TRACE, "--out", str(trace))[0] == 0
    records = trace.read_text().splitlines(keepends=True)
    damaged.write_text("".join(r for r in records if '"kind":"request_added"' not in r))
    status, out, err = pagedlab("view", str(damaged))
    lacking, error = err.splitlines()
    assert (status, out) == (2, "") and "notice" in lacking and "it lacks 1 record before" in lacking
    assert error.startswith("pagedlab: ") and "does not fit the state before it" in error
    assert not damaged.with_suffix(".html").exists()


def test_a_name_that_is_no_text_may_be_that_of_a_page(pagedlab, tmp_path):
    trace = tmp_path / os.fsdecode(b"a\xff.jsonl")
    assert pagedlab(*TRACE, "--out", str(trace))[0] == 0
    assert pagedlab("view", str(trace))[0] == 0
    assert "<title>pagedlab: a\ufffd</title>" in trace.with_suffix(".html").read_text("utf-8")


def test_figures_of_a_folder_that_is_not_there_are_not_checked(pagedlab, tmp_path):
    status, out, err = pagedlab("figures", str(tmp_path / "nowhere"), "--check")
    assert (status, out) == (2, "") and "is no folder" in err


def test_a_place_that_cannot_be_written_is_found_out_before_the_run(pagedlab, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for command in (TRACE, [*TRACE, "--html", str(tmp_path / "p.html")], ["bench"], ["simulate"]):
        status, out, err = pagedlab(*command, "--out", str(tmp_path / "t.jsonl"))
        assert (status, out, err.count("\n")) == (2, "", 1) and "Permission denied" in err


def test_nothing_is_written_over_what_it_is_made_from(pagedlab, tmp_path):
    trace, story = tmp_path / "t.jsonl", tmp_path / "s.jsonl"
    assert pagedlab(*TRACE, "-o", str(trace))[0] == 0
    assert pagedlab("scenario-from", str(trace), "-o", str(tmp_path / "s.json"))[0] == 0
    story.write_text('{"arrival_step": 0, "num_prompt_tokens": 4, "num_output_tokens": 1}\n')
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "s.json")
    for command in (
        ["view", trace, "-o", trace], ["scenario-from", trace, "-o", trace], ["simulate", story, "-o", story],
        ["trace", "--scenario", tmp_path / "s.json", "-o", link],
        ["trace", "--scenario", tmp_path / "s.json", "--html", tmp_path / "s.json"],
    ):  # fmt: skip
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        status, out, err = pagedlab(*map(str, command))
        assert (status, out, err.count("\n")) == (2, "", 1) and "would overwrite what it is made from" in err
        assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("prompts", [["Dear sir, I"], ["Dear sir, I", "Hi"]])
def test_generate_says_why_a_text_ended_too_early(pagedlab, prompts):
    tight = ["--num-blocks", "3", "--block-size", "4", "--max-model-len", "100", "--ignore-eos"]
    status, out, err = pagedlab("generate", *prompts, *tight)
    assert status == 0 and out and err.count("pagedlab: notice: ") == 1 + len(prompts)
    assert "request r0 made no progress in 100 steps" in err


def test_no_command_shows_the_help_and_says_so(pagedlab):
    status, out, err = pagedlab()
    assert status == 2 and "scenarios" in out and err == "pagedlab: no command given. See pagedlab --help.\n"


def test_a_misspelled_command_is_answered_with_the_right_one(pagedlab):
    status, _, err = pagedlab("trce", "x")
    assert status == 2 and err == "pagedlab: No such command 'trce'. Did you mean 'trace'? See pagedlab --help.\n"


def test_why_answers_about_a_slot_and_without_a_request_names_them(pagedlab, tmp_path):
    file = str(tmp_path / "t.jsonl")
    pagedlab(*TRACE, "--out", file)
    status, out, _ = pagedlab("why", file, "--slot", "18")
    assert status == 0 and "written with position 2 of r0, ' a'" in out
    assert json.loads(pagedlab("why", file, "--slot", "18", "--json")[1])["writes"][0]["step"] == 0
    status, _, err = pagedlab("why", file)
    assert status == 2 and err == "pagedlab: name a request, or a slot with --slot: this trace has 1 request, r0.\n"
    assert pagedlab("why", file, "r0", "--slot", "18")[0] == 2


def test_steps_of_a_page_that_end_before_they_begin_are_refused(pagedlab, tmp_path):
    file = str(tmp_path / "t.jsonl")
    pagedlab(*TRACE, "--out", file)
    assert pagedlab("view", file, "--steps", "2:1") == (
        2, "", "pagedlab: --steps is '2:1': the first step comes after the last.\n"
    )  # fmt: skip


def test_a_trace_that_cannot_be_written_is_not_said_to_be_anywhere(pagedlab, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    status, _, err = pagedlab(*TRACE, "--out", str(tmp_path / "loop"))
    assert status == 2 and err.count("\n") == 1 and "cannot write the trace" in err


def test_a_terminal_of_no_columns_shows_something(pagedlab, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    status, out, _ = pagedlab("scenarios")
    assert status == 0 and "preemption" in out


def test_a_closed_standard_input_is_no_prompt(pagedlab, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert pagedlab("generate") == (2, "", "pagedlab: no prompt: give one or more in quotes.\n")


def test_an_ascii_locale_takes_and_gives_any_text(tmp_path):
    code = "import sys; from pagedlab.commands.prompts import read_prompts as r; print(ascii([r(sys.argv[1:]), r([])]))"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    run = subprocess.run([sys.executable, "-c", code, "é你"], input="é你".encode(), capture_output=True, env=ascii_only)
    assert run.stdout.decode() == "[['\\xe9\\u4f60'], ['\\xe9\\u4f60']]\n", run.stderr
    code = "import typer; from pagedlab import cli; cli.app = lambda **_: print(chr(233)); cli.main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=ascii_only)
    assert (run.returncode, run.stdout.decode()) == (0, "\\xe9\n"), run.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-m", "pagedlab", "scenarios"], stdout=full, stderr=subprocess.PIPE)
    assert (run.returncode, run.stderr.decode()) == (2, "pagedlab: the disk that takes the output is full.\n")


def test_no_cuda_where_it_is_asked_for_is_one_sentence(pagedlab, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = pagedlab("generate", "a", "--device", "cuda")
    assert (status, out, err.count("\n")) == (2, "", 1) and "device is 'cuda'" in err


@pytest.mark.parametrize("command", ["replay", "check"])
def test_an_unreadable_trace_is_one_sentence(pagedlab, broken, command):
    for name in ("trace.jsonl", "nowhere.jsonl"):
        status, out, err = pagedlab(command, str(broken / name))
        assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("pagedlab: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--input-len", "9-3"], "--input-len is '9-3'"),
        (["--output-len", "many"], "--output-len is 'many'"),
        (["--record", "all"], "--record is 'all'"),
        (["--compare", "vllm"], "--compare is 'vllm'"),
        (["--random-weights", "gpt-5"], "--random-weights is 'gpt-5'"),
        (["--num-prompts", "1000000000"], "--num-prompts is 1000000000"),
        (["--startup", "--compare", "transformers"], "leave out --compare"),
        (["--max-tokens", "3"], "No such option: --max-tokens"),  # --output-len says it
        (["--input-len", "600", "--num-blocks", "8"], "max_model_len is 112"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(pagedlab, arguments, message):
    status, out, err = pagedlab("bench", *arguments)
    assert (status, out) == (2, "") and message in err


# ------------------------------------------------------------------ signals, pipes


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.parametrize("module", ["pagedlab.cli", "typer", "pagedlab.viz.text"])
def test_ctrl_c_while_the_command_line_is_still_being_imported_ends_quietly(module):
    code = (
        "import signal, sys\n"
        "class PressedHere:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, PressedHere)\n"
        "from pagedlab.__main__ import run\n"
        "run()"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments, status", [(["--version"], 0), (["check", "missing.jsonl"], 2)])
def test_ctrl_c_while_python_leaves_shows_nothing(arguments, status):
    code = (
        "import atexit, signal\n"
        "from pagedlab.__main__ import run\n"
        "atexit.register(lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])\n"
        "run()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == status and "Traceback" not in done.stderr


def test_the_installed_command_and_python_m_begin_alike():
    scripts = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"pagedlab": "pagedlab.__main__:run"}
    process = spawn("--version")
    assert process.communicate() == (f"pagedlab {cli.__version__}\n", "") and process.returncode == 0


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_ends_with_130_and_the_trace_saved(tmp_path):
    file = tmp_path / "t.jsonl.zst"
    process = spawn("trace", "It is a truth", "--max-tokens", "900", "--ignore-eos", "--out", str(file))
    for line in process.stdout:
        if "step 3" in line:
            process.send_signal(signal.SIGINT)
            break
    message = process.stderr.readline()
    process.send_signal(signal.SIGINT)  # once more, while it leaves
    err = message + process.communicate(timeout=60)[1]
    assert process.returncode == 130 and err.count("\n") == 1 and "interrupted" in err
    trace = Trace.load(file)
    assert 3 <= max(trace.steps) < 890 and trace.requests["r0"].finished.finish_reason == "abort"


@pytest.mark.parametrize("arguments", [TRACE, ["generate", "It is", "--max-tokens", "200"], ["--help"]])
def test_a_pipe_that_closes_early_ends_quietly(arguments):
    process = spawn(*arguments)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=60) == 0


# ------------------------------------------------------------------ imports and start-up


def modules_after(*arguments: str) -> set[str]:
    """Top-level modules that a command has imported when it is done."""
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('\\nMODULES', *{m.partition('.')[0] for m in sys.modules}, file=sys.stderr))\n"
        "from pagedlab.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    return set(done.stderr.rpartition("MODULES")[2].split())


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "t.jsonl"
    process = spawn(*TRACE, "--out", str(file))
    process.communicate(timeout=60)
    return file


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["trace", "--help"], ["bench", "--help"], ["replay", "{trace}"], ["check", "{trace}"],
     ["why", "{trace}", "r0"], ["diff", "{trace}", "{trace}"], ["scenarios"],
     ["trace", "--scenario", "self-preemption"]],
    ids=" ".join,
)  # fmt: skip
def test_commands_without_an_engine_never_import_torch(trace_file, arguments):
    modules = modules_after(*(a.replace("{trace}", str(trace_file)) for a in arguments))
    assert "pagedlab" in modules and not modules & {"torch", "transformers", "tokenizers", "safetensors"}


def test_trace_never_imports_transformers_nor_the_hub():
    modules = modules_after(*TRACE)
    assert "torch" in modules and not modules & {"transformers", "huggingface_hub", "jinja2"}


def test_startup_prints_its_parts_and_only_torch_may_be_slow():
    process = spawn("bench", "--startup", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert {"import torch", "import the engine", "load the weights", "first token"} <= set(report["parts"])
    assert report["total"] == pytest.approx(sum(report["parts"].values()))
    assert report["without_torch"] == pytest.approx(report["total"] - report["parts"]["import torch"])
