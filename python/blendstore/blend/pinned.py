"""Page-locks a store's arena, so that a GPU reads records by itself while the host goes on."""

from __future__ import annotations

import logging
import time
import weakref

import torch

from .._core import Store
from .copies import CudaError, call

log = logging.getLogger("blendstore.blend")

_FOR_ALL_DEVICES = 1


class PinError(RuntimeError):
    """The arena could not be page-locked; says how much was asked for."""


class PinnedArena:
    """Page-locks the whole arena of ``store`` for as long as this object lives, and keeps the store alive meanwhile.

    All of the store's capacity is committed at once, since a copy must lie in one registration. Without it everything
    works as well, but the host waits for each copy. Raises `PinError`."""

    def __init__(self, store: Store) -> None:
        address, self.nbytes = store.arena
        begin = time.perf_counter()
        try:
            call("cudaHostRegister", address, self.nbytes, _FOR_ALL_DEVICES)
        except CudaError as error:
            raise PinError(
                f"{self.nbytes} bytes of records can't be page-locked ({error}): give the store less memory, or the "
                "process a higher limit of locked memory (ulimit -l)"
            ) from error
        self._release = weakref.finalize(self, _unregister, address, store)
        log.info("page-locked %d MiB of records in %.1f s", self.nbytes >> 20, time.perf_counter() - begin)

    def close(self) -> None:
        """Give the pages back; no copy may be under way."""
        self._release()


def pin(store: Store, device: torch.device) -> PinnedArena | None:
    """Page-lock ``store`` for copies to ``device``, at start; None where there is nothing to gain, or, with a warning,
    where the system refuses it."""
    if device.type != "cuda":
        return None
    try:
        return PinnedArena(store)
    except PinError as error:
        log.warning("copies of records will hold up the host: %s", error)
        return None


def _unregister(address: int, store: Store) -> None:
    # The store is an argument so that it outlives this call: memory unmapped while it is registered stays locked.
    call("cudaHostUnregister", address)
