"""What this machine has that the engine can use."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import struct
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from pagedlab.models.resolve import EMBEDDED_DIR
from pagedlab.version import __version__
from pagedlab.wording import plural


def examine() -> dict[str, str]:
    """One line per thing, in words; nothing here fails because something is missing."""
    return {
        "pagedlab": f"{__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        "processor": f"{plural(os.cpu_count() or 1, 'core')}, {_memory()} of memory",
        **_torch_and_gpu(),
        "triton": _triton(),
        "transformers": _version("transformers") or "not installed (only tests and bench --compare use it)",
        "graphviz": _graphviz(),
        "embedded model": _embedded_model(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return "an unknown amount"


def _torch_and_gpu() -> dict[str, str]:
    try:
        import torch
    except Exception as e:  # a broken install raises whatever its libraries raise
        return {"torch": f"cannot be imported ({e}): no engine runs, traces can be read", "gpu": "unknown"}
    found = {"torch": f"{torch.__version__}, {plural(torch.get_num_threads(), 'thread')}"}
    if not torch.cuda.is_available():
        return found | {"gpu": "none that torch sees: the engine runs on the CPU"}
    names = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        names.append(f"{properties.name} with {properties.total_memory / 2**30:.0f} GiB")
    return found | {"gpu": "; ".join(names)}


def _triton() -> str:
    installed = _version("triton") or _version("pytorch-triton")
    if installed is None or find_spec("triton") is None:
        return "not installed: attention runs in plain torch, index maps in their torch twins"
    return f"{installed}, compiles for a GPU, interprets on a CPU"


def _graphviz() -> str:
    if find_spec("pygraphviz") is not None:
        return f"pygraphviz {_version('pygraphviz')}"
    return shutil.which("dot") or "not found (only figures made with it need it)"


def _embedded_model() -> str:
    weights = EMBEDDED_DIR / "model.safetensors"
    if not weights.is_file():
        return f"missing: {weights}"
    parameters = sum(math.prod(shape) for shape in _shapes(weights))
    size = sum(f.stat().st_size for f in EMBEDDED_DIR.iterdir() if f.is_file())
    return f"{parameters / 1e6:.1f} M parameters, {size / 1e6:.1f} MB in {EMBEDDED_DIR}"


def _shapes(path: Path) -> list[list[int]]:
    """From the header of a safetensors file: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
