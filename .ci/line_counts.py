"""Prints how long the engine core is: what one person is meant to read in an afternoon."""

from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "pagedlab"
CORE = {
    "words": ["config.py", "sampling_params.py", "request.py", "trace/tracer.py"],
    "KV cache": ["kv"],
    "scheduling": ["sched"],
    "kernels": ["kernels"],
    "attention": ["attention"],
    "models": ["models"],
    "worker": ["worker"],
    "engine": ["engine"],
}


def count(path: Path) -> int:
    return len(path.read_text().splitlines())


total = 0
for floor, names in CORE.items():
    files = []
    for name in names:
        files += [SOURCE / name] if name.endswith(".py") else sorted((SOURCE / name).glob("*.py"))
    lines = {f: count(f) for f in files if count(f)}
    total += sum(lines.values())
    print(f"{floor:<12} {sum(lines.values()):>6} lines")
    for file, number in lines.items():
        print(f"    {file.relative_to(SOURCE)!s:<38} {number:>5}")
print(f"{'core':<12} {total:>6} lines")
