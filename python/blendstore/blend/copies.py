"""Copies of rows from host memory to the device, on a stream of their own: started here, waited for where needed.

A copy is strided on both sides, so that the same rows of many layers are one call to the driver and no work for the
multiprocessors. From page-locked memory the host doesn't wait for it; from other memory it does, with the same result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

_HOST_TO_DEVICE = 1


class CopyError(RuntimeError):
    """The CUDA runtime refused a copy."""


class CopyStream:
    """Copies to one device, in order, beside the work of the caller's stream. On a CPU they are done at once."""

    def __init__(self, device: torch.device) -> None:
        """Copies start after what the caller's stream holds now: memory that it hands over may still be in use."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int) -> None:
        """Copy ``height`` pieces of ``width`` bytes; addresses and the bytes from one piece to the next."""
        if self._stream is None:
            for piece in range(height):
                ctypes.memmove(target + piece * target_pitch, source + piece * source_pitch, width)
            return
        error = _runtime()(
            target, target_pitch, source, source_pitch, width, height, _HOST_TO_DEVICE, self._stream.cuda_stream
        )
        if error:
            raise CopyError(f"cudaMemcpy2DAsync of {height} times {width} bytes to {target:#x}: error {error}")

    def mark(self) -> torch.cuda.Event | None:
        """A point in the order of the copies, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Make the caller's stream wait for the copies before ``mark``; the host goes on."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def finish(self) -> None:
        """Wait on the host until all copies are done: their sources may change afterwards."""
        if self._stream is not None:
            self._stream.synchronize()


@cache
def _runtime() -> Callable[..., int]:
    """``cudaMemcpy2DAsync`` of the CUDA runtime that torch has loaded."""
    version = (torch.version.cuda or "").split(".")[0]
    copy = ctypes.CDLL(f"libcudart.so.{version}").cudaMemcpy2DAsync
    copy.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t,
        ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    copy.restype = ctypes.c_int
    return copy
