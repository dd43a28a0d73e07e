"""Copies of rows between host memory and the device, on a stream of their own: started here, waited for where needed.

A copy is strided on both sides, so that the same rows of many layers are one call to the driver and no work for the
multiprocessors. From page-locked memory the host doesn't wait for it; from other memory it does, with the same result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# cudaMemcpyDefault: the addresses say which side is the host's.
_EITHER_WAY = 4
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_ARGUMENTS = {
    "cudaMemcpy2DAsync": [_ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _SIZE, ctypes.c_int, _ADDRESS],
    "cudaHostRegister": [_ADDRESS, _SIZE, ctypes.c_uint],
    "cudaHostUnregister": [_ADDRESS],
    "cudaGetLastError": [],
}


class CudaError(RuntimeError):
    """The CUDA runtime refused a call; names it and the error's number."""


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, which lies in host memory, on ``device`` for what the caller's stream does next. The host doesn't
    wait: an ordinary copy would, for everything that the stream was given before."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class CopyStream:
    """Copies to or from one device, in order, beside the caller's stream; on a CPU they are done at once."""

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
        stream = self._stream.cuda_stream
        call("cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, width, height, _EITHER_WAY, stream)

    def mark(self) -> torch.cuda.Event | None:
        """A point in the order of the copies, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Make the caller's stream wait for the copies before ``mark``; the host goes on."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def now(self) -> torch.cuda.Event | None:
        """A point in the order of the caller's stream, for `after`."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def after(self, point: torch.cuda.Event | None) -> None:
        """Make later copies wait for what the caller's stream held at ``point``."""
        if self._stream is not None and point is not None:
            self._stream.wait_event(point)

    def finish(self) -> None:
        """Wait on the host until all copies are done: their sources may change afterwards."""
        if self._stream is not None:
            self._stream.synchronize()


def call(name: str, *arguments: int) -> None:
    """Call a function of the CUDA runtime that torch has loaded, one of `_ARGUMENTS`. Raises `CudaError`."""
    error = _functions()[name](*arguments)
    if error:
        # Or else torch would take it for an error of whatever it does next.
        _functions()["cudaGetLastError"]()
        raise CudaError(f"{name}: CUDA error {error}")


@cache
def _functions() -> dict[str, Callable[..., int]]:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    runtime = f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}"
    functions: dict[str, Callable[..., int]] = {}
    for name, arguments in _ARGUMENTS.items():
        # Starting a copy takes microseconds; to hand the interpreter to another thread meanwhile can cost thousands.
        library = ctypes.PyDLL(runtime) if name == "cudaMemcpy2DAsync" else ctypes.CDLL(runtime)
        function = getattr(library, name)
        function.argtypes = arguments
        functions[name] = function
    return functions
