"""How much memory the machine has left."""

from __future__ import annotations

import os
from pathlib import Path


def free_ram_bytes() -> int:
    """What the system can give without swapping; half of all memory where it does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
