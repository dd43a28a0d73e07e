"""The store that a configuration asks for: memory, and the tiers below it."""

from __future__ import annotations

import atexit
import weakref

from ._core import Store, StoreError, Tier
from .config import Config, ConfigError

__all__ = ["open_store"]


def open_store(config: Config, *, rank: int = 0) -> Store:
    """Memory and tiers as configured, for this process. Each rank of an engine has directories of its own.

    What is still queued for the tiers when the interpreter exits is written first, for at most 5 s. Raises
    `ConfigError` when a tier can't be opened: its directory is not writable, or another process uses it."""
    tiers: list[Tier] = []
    if config.local_disk is not None:
        directories = [directory / f"rank-{rank}" if rank else directory for directory in config.local_disk]
        try:
            tiers.append(Tier.disk(directories, capacity_bytes=config.max_local_disk_bytes))
        except StoreError as error:
            named = ", ".join(map(str, directories))
            origin = config.origins["local_disk"]
            raise ConfigError(f"local_disk: {named} ({origin}) can't be used: {error}") from error
    store = Store(
        capacity_bytes=config.max_local_cpu_bytes,
        chunk_size=config.chunk_size,
        policy=config.cache_policy,
        tiers=tiers,
    )
    if tiers:
        atexit.register(_close, weakref.ref(store))
    return store


def _close(reference: weakref.ref[Store]) -> None:
    store = reference()
    if store is not None:
        store.close()
