"""Host memory that is used again once nobody holds it.

A page that is touched for the first time costs more than what is copied into it.
"""

from __future__ import annotations

import math
import weakref
from collections import deque

import torch
from torch import Tensor

# Bytes: smaller ones stay with the process anyway, and larger ones are too much to sit idle.
_LEAST, _MOST = 1 << 23, 1 << 28
_KEPT = 2

_free: deque[Tensor] = deque(maxlen=_KEPT)


def uninitialised(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.empty``; on a CPU from a block that an earlier tensor has left, where one fits."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not _LEAST <= nbytes <= _MOST:
        return torch.empty(shape, dtype=dtype, device=device)
    block = _taken(nbytes)
    # The tensor and all of its views hold this array, and nothing else does.
    held = block.numpy()[:nbytes]
    weakref.finalize(held, _free.append, block).atexit = False
    return torch.from_numpy(held).view(dtype).view(shape)


def _taken(nbytes: int) -> Tensor:
    """A block of at least ``nbytes``; those that are too small go back to the system."""
    while True:
        try:
            block = _free.pop()
        except IndexError:
            return torch.empty(nbytes + nbytes // 8, dtype=torch.uint8)
        if block.numel() >= nbytes:
            return block
