"""Page-locks a store's arena, so that a GPU reads records by itself while the host goes on."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import torch

from .._core import Store

log = logging.getLogger("blendstore.blend")


class PinError(RuntimeError):
    """The arena could not be page-locked; says how much was asked for."""


class PinnedArena:
    """Page-locks the whole arena of ``store`` for as long as this object lives, and keeps the store alive meanwhile.

    All of the store's capacity is committed at once (about half a second a GiB), since a copy must lie in one
    registration. Without it everything works as well, but the host waits for each copy. Raises `PinError`."""

    def __init__(self, store: Store) -> None:
        address, self.nbytes = store.arena
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        begin = time.perf_counter()
        error = int(runtime.cudaHostRegister(address, self.nbytes, 0))
        if error:
            raise PinError(
                f"cudaHostRegister of {self.nbytes} bytes: error {error}; give the store less memory or the process a "
                "higher limit of locked memory (ulimit -l)"
            )
        self._release = weakref.finalize(self, _unregister, runtime, address, store)
        log.info("page-locked %d MiB of records in %.1f s", self.nbytes >> 20, time.perf_counter() - begin)

    def close(self) -> None:
        """Give the pages back; no copy may be under way."""
        self._release()


def _unregister(runtime: Any, address: int, store: Store) -> None:
    # Before the store can go: memory that is unmapped while it is registered stays locked.
    runtime.cudaHostUnregister(address)
