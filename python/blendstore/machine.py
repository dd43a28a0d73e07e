"""What this machine has, as far as a configuration should fit it."""

from __future__ import annotations

import os
from pathlib import Path

from .config import Config

_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(limit: Path = _LIMIT) -> int:
    """Bytes of memory that may be used here: the machine's, or less where ``limit`` (a control group's) says so."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, int(limit.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return whole


def too_large(config: Config) -> list[str]:
    """What the configuration asks for and this machine hasn't, for a warning: other machines may have it."""
    there, asked = memory_bytes(), config.max_local_cpu_bytes
    if asked <= there:
        return []
    origin = config.origins["max_local_cpu_size"]
    return [
        f"max_local_cpu_size: {config.max_local_cpu_size:g} GiB ({origin}) is more than the {there / 2**30:.1f} GiB of "
        "memory here: the system ends processes when it fills; give what the machine can spare"
    ]
