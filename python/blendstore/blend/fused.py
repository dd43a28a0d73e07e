"""Where the fused kernels run, and what happens where they can't: plain torch, one warning, a count.

Everything that the kernels do has a reference in plain torch, which is what a CPU uses, but for what Rust does there
(`tried`). The kernels (``triton_*.py``) are imported only where they run, so neither Triton nor a GPU is needed to
import the blend core.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

from .model import Geometry

log = logging.getLogger("blendstore.blend")
T = TypeVar("T")

fallbacks: Counter[str] = Counter()
"""How often each operation ran in plain torch on a device that the kernels are for."""

_broken: set[str] = set()


def usable(device: torch.device) -> bool:
    """Whether kernels run on ``device``: a CUDA device with Triton installed, or any device under its interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and _installed()


def readable(x: torch.Tensor) -> bool:
    """Whether Rust can work on it in place: float32 on a CPU."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and not x.requires_grad


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def attempt(what: str, device: torch.device, kernel: Callable[[], T], plain: Callable[[], T]) -> T:
    """``kernel()`` where kernels are usable, otherwise ``plain()``; as `tried`."""
    return tried(what, device, kernel, plain) if usable(device) else plain()


def tried(what: str, device: torch.device, kernel: Callable[[], T], plain: Callable[[], T]) -> T:
    """``kernel()``, or ``plain()`` once it has failed.

    A kernel that can't be compiled or launched is not tried again in this process: one warning, and a count in
    `fallbacks` for every call since. It must not have changed anything before it fails. For want of memory it may fail
    once and not the next time, and plain torch needs more: that is raised."""
    if what not in _broken:
        try:
            return kernel()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _broken.add(what)
            log.warning(
                "%s runs in plain torch, its kernel failed on %s: %s", what, device, f"{type(error).__name__}: {error}"
            )
    fallbacks[what] += 1
    return plain()


def warm_up_formats(geometry: Geometry, name: str) -> None:
    """Compile at start what records in the format ``name`` need."""
    if name == "raw" or not usable(geometry.device):
        return

    def compiled() -> None:
        from . import triton_formats

        triton_formats.warm_up(
            name=name, kv_heads=geometry.kv_heads, dim=geometry.head_dim, dtype=geometry.dtype, device=geometry.device
        )

    _warmed("warm-up of formats", geometry, compiled)


def warm_up(geometry: Geometry, softcap: float | None = None) -> None:
    """Compile at start what a model of this geometry needs: some seconds a kernel, which its first prompt would wait
    for."""
    if not usable(geometry.device):
        return

    def compiled() -> None:
        from . import triton_attention, triton_drift, triton_rows

        kv_heads, dim, dtype, device = geometry.kv_heads, geometry.head_dim, geometry.dtype, geometry.device
        triton_attention.warm_up(
            heads=geometry.heads, kv_heads=kv_heads, dim=dim, dtype=dtype, device=device, windows=geometry.windows,
            softcap=softcap,
        )  # fmt: skip
        tables = list({id(table): table for table in geometry.rotary}.values())
        triton_rows.warm_up(kv_heads=kv_heads, dim=dim, dtype=dtype, device=device, tables=tables)
        triton_drift.warm_up(kv_heads=kv_heads, dim=dim, dtype=dtype, device=device, tables=tables)

    _warmed("warm-up", geometry, compiled)


def _warmed(what: str, geometry: Geometry, compiled: Callable[[], None]) -> None:
    try:
        attempt(what, geometry.device, compiled, lambda: None)
    except torch.OutOfMemoryError as error:
        log.warning("%s: the first prompt compiles: %s", what, error)
