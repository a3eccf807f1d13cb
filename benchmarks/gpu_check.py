"""Everything worth asking a GPU, in one run of under five minutes: right results, then speed.

    python benchmarks/gpu_check.py --out gpu_check.json

Each kernel against float64, whole runs against recorded tokens of transformers, bandwidth of the decode
kernel and of the cache writes against a device copy of the same run, decode throughput of a model of
Qwen3-0.6B's shape eagerly and with CUDA graphs, and the ratio to transformers' continuous batching.
``--quick`` shrinks all sizes, so that the script itself can be tried under Triton's interpreter on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedlab import LLM, SamplingParams
from pagedlab.bench.random_weights import random_checkpoint
from pagedlab.kernels.block_tables import gather_block_tables
from pagedlab.kernels.jit import How, PointerTable
from pagedlab.kernels.paged_attention import (
    QueryTiles,
    choose_num_splits,
    longest_block_m,
    paged_attention,
    paged_attention_reference,
)
from pagedlab.kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference
from pagedlab.kernels.slot_mapping import compute_slot_mapping, compute_slot_mapping_reference

CHECKPOINTS = Path(__file__).parent.parent / "tests" / "data" / "checkpoints"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}


class Check:
    """The device and the sizes of this run."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.how: How = "compiled" if device.type == "cuda" else "interpreted"
        self.num_processors = 1
        if device.type == "cuda":
            self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def seconds(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """Median of single runs, after two to compile and warm up.

        On a GPU a CUDA graph of ``repeats`` runs is replayed: the host would take longer to launch a run than the
        device to do it.
        """
        for _ in range(2):
            run()
        if self.device.type == "cpu":
            return _median([_timed(self, run) for _ in range(1 if self.quick else repeats)])
        graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                run()
        times = []
        for _ in range(6):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000 / repeats)
        return _median(times[1:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class AttentionCase:
    """Rows of (query_len, seq_len) over a cache in random block order."""

    def __init__(self, check: Check, rows: list[tuple[int, int]], *, block_size: int = 16, num_heads: int = 16,
                 num_kv_heads: int = 8, head_size: int = 128, dtype: torch.dtype = torch.bfloat16,
                 window: int | None = None, first_block: int = 1) -> None:  # fmt: skip
        device = check.device
        self.check, self.window, self.first_block = check, window, first_block
        self.query_lens, self.max_seq_len = [q for q, _ in rows], max(s for _, s in rows)
        widths = [-(-s // block_size) for _, s in rows]
        self.query = torch.randn(sum(self.query_lens), num_heads, head_size, device=device).to(dtype)
        shape = 2, first_block + sum(widths), block_size, num_kv_heads, head_size
        self.kv_cache = torch.randn(shape, device=device, dtype=dtype)
        ids = (torch.randperm(sum(widths)) + first_block).split(widths)
        table = [torch.nn.functional.pad(row, (0, max(widths) - len(row))) for row in ids]
        self.block_table = torch.stack(table).int().to(device)  # [R, K] int32
        self.seq_lens = torch.tensor([s for _, s in rows], dtype=torch.int32, device=device)
        self.query_start_loc = torch.tensor([0, *self.query_lens], device=device).cumsum(0).int()
        self.tiles = QueryTiles.cut(
            self.query_lens, num_heads // num_kv_heads, longest_block_m(head_size, dtype.itemsize), device
        )
        self.num_splits = choose_num_splits(
            len(self.tiles.batch_idx), num_kv_heads, max(self.query_lens), self.max_seq_len, check.num_processors
        )

    def run(self, num_splits: int | None = None) -> Tensor:
        output = torch.empty_like(self.query)
        paged_attention(
            self.query, self.kv_cache, output, self.tiles, self.query_start_loc, self.seq_lens, self.block_table,
            scale=self.query.shape[-1] ** -0.5, sliding_window=self.window,
            num_splits=num_splits or self.num_splits, how=self.check.how,
        )  # fmt: skip
        return output

    def error(self, num_splits: int | None = None) -> float:
        """Largest difference from the definition in float64, relative where the answer is above 1."""
        expected = paged_attention_reference(
            self.query.double(), self.kv_cache[:, self.first_block :].double(), self.query_start_loc, self.seq_lens,
            self.block_table - self.first_block, scale=self.query.shape[-1] ** -0.5, sliding_window=self.window,
        )  # fmt: skip
        return float(((self.run(num_splits).double() - expected).abs() / expected.abs().clamp(min=1)).max())


def check_attention(check: Check) -> list[dict[str, Any]]:
    """Prefill, chunk, prefix hit and decode in one launch, over head sizes, block sizes, windows and dtypes.

    Each is a kernel of its own, which takes Triton about a second; splits add their parts in float32 in any dtype.
    """
    rows = [(1, 700), (70, 70), (33, 500), (1, 1), (5, 260), (1, 33)] if not check.quick else [(1, 9), (5, 12)]
    cases = [{"head_size": size} for size in (32, 64, 80, 96, 128, 256)]
    cases += [{"block_size": size} for size in (1, 8, 64, 256)]
    cases += [{"window": 100}, {"num_heads": 24}, {"num_heads": 8}, {"num_heads": 32, "num_kv_heads": 2}]
    results = []
    for case in cases[:3] if check.quick else cases:
        for dtype in TOLERANCE:
            for splits in (1, 4) if dtype == torch.float32 else (1,):
                error = AttentionCase(check, rows, dtype=dtype, **case).error(splits)
                results.append({"what": f"paged_attention {_short(dtype)} {case} splits {splits}", "error": error,
                                "ok": error < TOLERANCE[dtype]})  # fmt: skip
    if not check.quick:
        for what, case in (
            ("blocks beyond 2**31 elements", AttentionCase(check, rows, first_block=2**17)),
            ("a decode of 32,768 tokens", AttentionCase(check, [(1, 32768)], dtype=torch.float32)),
        ):
            error, bound = case.error(), TOLERANCE[case.query.dtype]
            results.append({"what": f"paged_attention {what}", "error": error, "ok": error < bound})
    return results


def check_cache_writes(check: Check) -> list[dict[str, Any]]:
    """Bits equal to the twin's, with padding and keys cut out of a wider tensor."""
    results = []
    num_tokens = 8 if check.quick else 3000
    for dtype in TOLERANCE:
        kv = torch.randn(num_tokens, 3, 8, 128, device=check.device).to(dtype)
        caches = torch.zeros(2, 2, num_tokens // 16 + 9, 16, 8, 128, device=check.device, dtype=dtype)
        slots = torch.randperm(caches.shape[2] * 16, device=check.device)[:num_tokens]
        slots[::7] = -1
        reshape_and_cache(kv[:, 0], kv[:, 2], caches[0], slots, check.how)
        reshape_and_cache_reference(kv[:, 0], kv[:, 2], caches[1], slots)
        results.append({"what": f"reshape_and_cache {_short(dtype)}", "ok": torch.equal(caches[0], caches[1])})
    return results


def check_index_kernels(check: Check) -> list[dict[str, Any]]:
    """The gather and the slot mapping of two groups against their twins, integer for integer."""
    device, block_sizes, counts = check.device, [16, 32], [1, 9, 1, 40, 3]
    state = [torch.randint(1, 2**20, (8, 64), dtype=torch.int32, device=device) for _ in block_sizes]
    gathered = [torch.zeros_like(table) for table in state]
    num_blocks = torch.full((2, 8), 64, dtype=torch.int32, device=device)
    idx_mapping = torch.tensor([7, 2, 0, 5, 4], dtype=torch.int32, device=device)
    tables = PointerTable.of(gathered)
    gather_block_tables(PointerTable.of(state), tables, num_blocks, idx_mapping, check.how)
    gather_ok = all(torch.equal(g[:5], s[idx_mapping.long()]) for g, s in zip(gathered, state, strict=True))
    query_start_loc = torch.tensor([0, *counts], device=device).cumsum(0).int()
    positions = torch.cat([torch.arange(100 * i, 100 * i + n) for i, n in enumerate(counts)]).to(device)
    out = torch.empty(2, 80, dtype=torch.int64, device=device)
    valid = [num_blocks[0, :5]] * 2
    slots = compute_slot_mapping(
        tables, valid, query_start_loc, positions, torch.tensor(block_sizes, dtype=torch.int32, device=device), out,
        check.how,
    )  # fmt: skip
    slots_ok = all(
        torch.equal(slots[g], compute_slot_mapping_reference(gathered[g], valid[g], query_start_loc, positions, size))
        for g, size in enumerate(block_sizes)
    )
    padded_ok = bool((out[:, len(positions) :] == -1).all())
    return [{"what": "gather_block_tables", "ok": gather_ok},
            {"what": "compute_slot_mapping", "ok": slots_ok and padded_ok}]  # fmt: skip


def check_tokens(check: Check) -> list[dict[str, Any]]:
    """Whole runs in float32: the tokens that transformers produced, roomy, preempted, eager and as graphs."""
    results = []
    runs: list[tuple[str, dict[str, Any]]] = [
        ("graphs", {}), ("eager", {"enforce_eager": True}), ("state-table", {"runner": "state-table"}),
        ("torch backend", {"attention_backend": "torch"}),
        ("small pool", {"num_blocks": 40, "max_num_batched_tokens": 64}),
    ]  # fmt: skip
    for name in ("dense-tied-a", "dense-untied-a", "moe-a")[: 1 if check.quick else 3]:
        cases = json.loads((CHECKPOINTS / name / "expected.json").read_text())["cases"][: 2 if check.quick else None]
        for label, knobs in runs[-2:-1] if check.quick else runs:
            knobs = {"num_blocks": 300} | knobs
            llm = LLM(CHECKPOINTS / name / "checkpoint", device=check.device.type, dtype="float32", **knobs)
            length = [6 if check.quick else case["max_new_tokens"] for case in cases]
            outputs = llm.generate(
                [case["prompt_token_ids"] for case in cases],
                [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in length],
            )
            found = [list(output.outputs[0].token_ids) for output in outputs]
            same = sum(f == c["greedy_token_ids"][:n] for f, c, n in zip(found, cases, length, strict=True))
            row = {"what": f"tokens of {name}, {label}", "same": f"{same}/{len(cases)}", "ok": same == len(cases)}
            if label == "graphs" and not llm.model_config.num_experts:
                row["graphs"] = _captured(llm)
                row["ok"] = row["ok"] and bool(row["graphs"])
            results.append(row)
    return results


def _captured(llm: LLM) -> list[int]:
    """Sizes of the decode graphs in use; an engine that does not trust them goes on without."""
    graphs = llm.core.executor.runner.decode_graphs  # type: ignore[attr-defined]
    return graphs.captured if graphs is not None else []


def measure_bandwidth(check: Check) -> dict[str, Any]:
    """Bytes each kernel must move per second, beside a copy on the same device."""
    mib = 1 if check.quick else 1024
    source = torch.empty(mib * 2**20, dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / check.seconds(lambda: target.copy_(source))
    found = {"device copy": copy}
    for num_requests, seq_len in () if check.quick else ((64, 4096), (256, 1024), (1, 32768)):
        case = AttentionCase(check, [(1, seq_len)] * num_requests)
        num_bytes = num_requests * seq_len * 2 * 8 * 128 * 2  # keys and values, 8 heads of 128, bfloat16
        found[f"decode {num_requests} × {seq_len}"] = num_bytes / check.seconds(case.run)
    num_tokens = 4 if check.quick else 65536
    key, value = torch.randn(2, num_tokens, 8, 128, device=check.device).bfloat16()
    cache = torch.empty(2, num_tokens // 16 + 1, 16, 8, 128, device=check.device, dtype=torch.bfloat16)
    slots = torch.randperm(num_tokens, device=check.device)
    seconds = check.seconds(lambda: reshape_and_cache(key, value, cache, slots, check.how))
    found[f"reshape_and_cache {num_tokens} tokens"] = 4 * key.numel() * 2 / seconds
    return {name: {"GB/s": round(rate / 1e9, 1), "of the copy": round(rate / copy, 3)} for name, rate in found.items()}


def measure_decode(check: Check, model: Path | None) -> dict[str, Any]:
    """Tokens per second while all requests decode, 128 tokens in and 128 out."""
    results = {}
    in_len, out_len = (4, 4) if check.quick else (128, 128)
    for label, eager in (("eager", True), ("CUDA graphs", False)):
        dtype = "float32" if check.quick else "bfloat16"
        llm = LLM(model, device=check.device.type, dtype=dtype, enforce_eager=eager, max_model_len=in_len + out_len,
                  enable_prefix_caching=False, max_num_batched_tokens=8192)  # fmt: skip
        for num_requests in (1, 16, 256)[: 2 if check.quick else 3]:
            rates = [_decode_rate(check, llm, num_requests, in_len, out_len) for _ in range(1 if check.quick else 3)]
            results[f"{num_requests} requests, {label}"] = round(max(rates), 1)
        if not eager:
            results["graphs captured"] = _captured(llm)
        del llm
        _collect()
    return results


def _decode_rate(check: Check, llm: LLM, num_requests: int, in_len: int, out_len: int) -> float:
    rng = random.Random(0)
    for _ in range(num_requests):
        prompt = [rng.randrange(1, llm.model_config.vocab_size) for _ in range(in_len)]
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=out_len, ignore_eos=True), kind="final_only")
    requests = llm.core.scheduler.requests
    while any(request.num_output_tokens == 0 for request in requests.values()):  # prefills
        llm.step()
    num_tokens = num_requests * out_len - sum(request.num_output_tokens for request in requests.values())
    check.wait()
    start = time.perf_counter()
    while llm.has_unfinished_requests():
        llm.step()
    check.wait()
    return num_tokens / (time.perf_counter() - start)


def compare_continuous_batching(check: Check, model: Path | None) -> dict[str, Any]:
    """The same 256 requests, 128 tokens in and 128 out, through both engines; whole runs, the better of two.

    Their manager is kept, so that their second run finds everything set up, as ours does.
    """
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    num_requests, in_len, out_len = (2, 4, 4) if check.quick else (256, 128, 128)
    dtype = torch.float32 if check.quick else torch.bfloat16
    model = model or CHECKPOINTS / "dense-tied-a" / "checkpoint"
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 500 if check.quick else 150_000) for _ in range(in_len)] for _ in range(num_requests)]
    ours = _generate_seconds(check, model, prompts, out_len, _short(dtype))
    _collect()
    theirs_model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
    theirs_model.to(check.device).eval()
    config = GenerationConfig(max_new_tokens=out_len, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16) if check.quick else None

    def generate() -> None:
        outputs = theirs_model.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=sizes, persistent_manager=True
        )
        found = [len(output.generated_tokens) for output in outputs.values()]
        if found != [out_len] * num_requests:  # it logs its errors and returns what there is
            raise RuntimeError(f"transformers gave {sum(found)} of {num_requests * out_len} tokens")

    theirs = min(_timed(check, generate) for _ in range(2))
    num_tokens = num_requests * out_len
    return {"pagedlab tokens/s": round(num_tokens / ours, 1), "transformers tokens/s": round(num_tokens / theirs, 1),
            "ratio": round(theirs / ours, 2)}  # fmt: skip


def _generate_seconds(check: Check, model: Path, prompts: list[list[int]], out_len: int, dtype: str) -> float:
    llm = LLM(model, device=check.device.type, dtype=dtype, max_model_len=len(prompts[0]) + out_len,
              enable_prefix_caching=False, max_num_batched_tokens=8192)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=out_len, ignore_eos=True)
    return min(_timed(check, lambda: llm.generate(prompts, params)) for _ in range(2))


def _timed(check: Check, run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    check.wait()
    return time.perf_counter() - start


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _print_table(title: str, rows: list[dict[str, Any]] | dict[str, Any]) -> None:
    print(f"\n{title}", flush=True)
    for row in rows if isinstance(rows, list) else [{"what": k, "value": v} for k, v in rows.items()]:
        rest = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("what", "ok"))
        print(f"  {row['what']:60} {rest} {'' if row.get('ok', True) else '  WRONG'}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script on a CPU")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA GPU here; --device cpu --quick tries the script itself", file=sys.stderr)
        return 2
    check = Check(torch.device(options.device), options.quick)
    torch.manual_seed(0)
    start = time.perf_counter()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    results: dict[str, Any] = {"device": name, "torch": torch.__version__}
    model = None if check.quick else random_checkpoint("qwen3-0.6b")
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("index kernels", lambda: check_index_kernels(check)),
        ("cache writes", lambda: check_cache_writes(check)),
        ("attention against float64", lambda: check_attention(check)),
        ("tokens of transformers", lambda: check_tokens(check)),
        ("bandwidth", lambda: measure_bandwidth(check)),
        ("decode tokens per second", lambda: measure_decode(check, model)),
        ("transformers' continuous batching", lambda: compare_continuous_batching(check, model)),
    ]
    for title, part in parts:
        try:
            results[title] = part()
        except Exception as error:  # a lent GPU is short: what follows shall still run
            results[title] = [{"what": f"{type(error).__name__}: {error}"[:300], "ok": False}]
        _print_table(title, results[title])
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{time.perf_counter() - start:.0f} s on {name}")
    wrong = [row for rows in results.values() if isinstance(rows, list) for row in rows if not row["ok"]]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
