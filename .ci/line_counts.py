"""Prints how long the engine core is: what one person is meant to read in an afternoon.

The core is the way of one token through the default design. Beside it stand the second runner, the
other models and backends, start-up, the text side, and how events are filled in.
"""

from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "pagedlab"
CORE = {
    "words": ["config", "sampling_params", "request", "trace/tracer"],
    "engine": ["engine/core"],
    "scheduling": ["sched/output", "sched/waiting_queue", "sched/policy", "sched/scheduler"],
    "KV cache": ["kv/specs", "kv/block", "kv/hashing", "kv/block_pool", "kv/group", "kv/prefix", "kv/manager"],
    "worker": ["worker/requests", "worker/input_batch", "worker/block_table", "worker/flat_indices",
               "worker/persistent_batch", "worker/runner", "worker/sampler"],
    "kernels": ["kernels/slot_mapping", "kernels/reshape_and_cache", "kernels/paged_attention"],
    "attention": ["attention/metadata", "attention/forward_context", "attention/layer", "attention/torch_backend"],
    "model": ["models/layers", "models/qwen3"],
}  # fmt: skip
BESIDE = ["engine", "sched", "kv", "worker", "kernels", "attention", "models"]


def count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


core = set()
for floor, names in CORE.items():
    lines = {name: count(SOURCE / f"{name}.py") for name in names}
    core |= set(lines)
    print(f"{floor:<12}{sum(lines.values()):>6} lines")
    for name, number in lines.items():
        print(f"    {name:<32}{number:>6}")
total = sum(count(SOURCE / f"{name}.py") for name in core)
files = [f for folder in BESIDE for f in (SOURCE / folder).glob("*.py") if f.name != "__init__.py"]
beside = sum(count(f) for f in files if str(f.relative_to(SOURCE).with_suffix("")) not in core)
print(f"{'core':<12}{total:>6} lines, and {beside} beside it on the same floors")
