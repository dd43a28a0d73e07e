"""The store that a configuration asks for: memory, and the tiers below it."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import machine
from ._core import Coder, Store, StoreError, Tier
from .codec.tables import shape_of
from .config import Config, ConfigError

if TYPE_CHECKING:
    from .blend import Geometry

__all__ = ["Payload", "coder_of", "open_store"]

log = logging.getLogger("blendstore.tiers")
_THREADS = 8
"""Most that one record's chains are coded on."""
_ELEMENTS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Payload:
    """What an engine's records consist of: what a coder needs to know."""

    element: str
    """``bfloat16``, ``float16`` or ``float32``; others are coded as bytes."""
    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, geometry: Geometry) -> Payload:
        """Records of an engine with this KV cache."""
        return cls(geometry.element, geometry.layers, geometry.kv_heads, geometry.head_dim)

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.kv_heads} KV heads of {self.head_dim} {self.element}"


def coder_of(config: Config, key: str, payload: Payload | None) -> Coder | None:
    """The coder that the value of ``key`` (``local_serde`` or ``remote_serde``) asks for, or None for records as they
    are. Raises `ConfigError` for tables that can't be read, or that are of other records than ``payload``."""
    serde = getattr(config, key)
    if serde == "naive":
        return None
    if serde == "cachegen":
        try:
            if config.codec_tables is not None and config.codec_tables.exists() and not config.codec_tables.is_file():
                raise ValueError("it is no file")
            tables = config.codec_tables.read_bytes() if config.codec_tables else b""
            coder = Coder.cachegen(tables, threads=min(_THREADS, len(os.sched_getaffinity(0))))
            trained = Payload(*shape_of(tables))
            if payload is not None and payload != trained:
                raise ValueError(f"they are of {trained}, this model has {payload}")
            return coder
        except (OSError, ValueError) as error:
            origin = config.origins["codec_tables"]
            raise ConfigError(f"codec_tables: {config.codec_tables} ({origin}) can't be used: {error}") from error
    if payload is None:
        log.warning("%s: what the records hold is not known, so they are kept as they are", key)
        return None
    return Coder.lossless(payload.element if payload.element in _ELEMENTS else None, 2 * payload.layers)


def open_store(config: Config, *, rank: int = 0, payload: Payload | None = None) -> Store:
    """Memory and tiers as configured, for this process. Each rank of an engine has directories of its own; ``payload``
    says what is in its records, for their coding.

    What is still queued for the tiers when the interpreter exits is written first, for at most 5 s. Raises
    `ConfigError` when a tier can't be opened: its directory is not writable, or another process uses it, or a file that
    its URL names can't be read. A remote that is not there yet is no error."""
    for warning in machine.too_large(config):
        log.warning(warning)
    tiers: list[Tier] = []
    if config.local_disk is not None:
        directories = [directory / f"rank-{rank}" if rank else directory for directory in config.local_disk]
        try:
            disk = Tier.disk(directories, capacity_bytes=config.max_local_disk_bytes)
        except StoreError as error:
            named = ", ".join(map(str, directories))
            origin = config.origins["local_disk"]
            raise ConfigError(f"local_disk: {named} ({origin}) can't be used: {error}") from error
        coder = coder_of(config, "local_serde", payload)
        tiers.append(disk if coder is None else disk.with_coder(coder))
    if config.remote_url is not None:
        try:
            remote = Tier.remote(config.remote_url, timeout_ms=config.remote_timeout_ms)
        except StoreError as error:
            raise ConfigError(f"{error} ({config.origins['remote_url']})") from None
        coder = coder_of(config, "remote_serde", payload)
        tiers.append(remote if coder is None else remote.with_coder(coder))
    store = Store(
        capacity_bytes=config.max_local_cpu_bytes,
        chunk_size=config.chunk_size,
        policy=config.cache_policy,
        tenant_share=config.tenant_share,
        prefill_tokens_per_s=config.prefill_tokens_per_s,
        tiers=tiers,
    )
    if tiers:
        atexit.register(_close, weakref.ref(store))
    return store


def _close(reference: weakref.ref[Store]) -> None:
    store = reference()
    if store is not None:
        store.close()
