"""Making and reading records in tests of the core: tokens, payloads that tell their writer, stores of a known size."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blendstore import Lease, Namespace, RecordBuffer, Reservation, Store

Tokens = npt.NDArray[np.uint32]

CHUNK = 16
BYTES_PER_TOKEN = 24


def tenant(salt: str = "tenant", **fields: str) -> Namespace:
    """A namespace of a small model."""
    named = {"model": "small", **fields}
    return Namespace([(name, value.encode()) for name, value in named.items()], salt=salt.encode())


def text(seed: int, ntokens: int) -> Tokens:
    """Tokens without repetition; texts of different seeds share none."""
    return (np.arange(ntokens, dtype=np.uint32) * np.uint32(3) + np.uint32(seed << 20)).astype(np.uint32)


def small_store(**options: object) -> Store:
    """A store of small chunks with room for hundreds of records, unless told otherwise."""
    given: dict[str, object] = {"capacity_bytes": 1 << 20, "chunk_size": CHUNK, **options}
    return Store(**given)  # type: ignore[arg-type]


def store_of(nchunks: int, **options: object) -> Store:
    """A store with room for exactly ``nchunks`` full chunks of `put`."""
    probe = small_store()
    put(probe, tenant(), text(1, CHUNK))
    return small_store(capacity_bytes=int(probe.stats()["bytes_used"]) * nchunks, **options)


def reserve(store: Store, namespace: Namespace, tokens: Tokens, *, rank: int = 1, **options: object) -> Reservation:
    """Room for a segment that stands behind a lead-in."""
    given: dict[str, object] = {
        "bytes_per_token": BYTES_PER_TOKEN,
        "source_position": 0,
        "provenance": 1,
        "rank": rank,
        **options,
    }
    return store.reserve(namespace, tokens, **given)  # type: ignore[arg-type]


def put(store: Store, namespace: Namespace, tokens: Tokens, fill: int = 1, **options: object) -> int:
    """Stores a segment whose payload bytes are all ``fill``; returns how many chunks were published."""
    reservation = reserve(store, namespace, tokens, **options)  # type: ignore[arg-type]
    for index in wanted(reservation):
        array(reservation.buffer(index))[:] = fill
    return reservation.commit()


def array(buffer: RecordBuffer) -> npt.NDArray[np.uint8]:
    """The bytes of a view, in place."""
    return np.frombuffer(memoryview(buffer), dtype=np.uint8)


def wanted(reservation: Reservation) -> list[int]:
    """Indices of the chunks to write."""
    return [index for index, flag in enumerate(reservation.wanted) if flag]


def whole(tokens: Tokens) -> npt.NDArray[np.int64]:
    """Bounds of one segment that is the whole text."""
    return np.array([[0, len(tokens)]], dtype=np.int64)


def look(store: Store, namespace: Namespace, tokens: Tokens) -> Lease:
    """Lookup of the text as one segment."""
    return store.lookup_segments(namespace, tokens, whole(tokens))


def contents(lease: Lease) -> list[bytes | None]:
    """Payload of each chunk, None for a miss."""
    return [bytes(lease.buffer(index)) if hit else None for index, hit in enumerate(lease.hits)]


def keys_of(packed: bytes) -> list[bytes]:
    """Single keys of packed ones."""
    return [packed[start : start + 32] for start in range(0, len(packed), 32)]


def idle(store: Store) -> dict[str, int | float]:
    """The gauges that are zero when nobody uses the store."""
    stats = store.stats()
    return {name: stats[name] for name in ("bytes_pinned", "leases", "reservations")}


def settled(store: Store, seconds: float = 20.0) -> dict[str, int | float]:
    """`idle` once the threads below memory have let go of what they held, for which nobody waits but this."""
    until = time.monotonic() + seconds
    while idle(store) != IDLE and time.monotonic() < until:
        time.sleep(0.01)
    return idle(store)


IDLE: dict[str, int | float] = {"bytes_pinned": 0, "leases": 0, "reservations": 0}


def concatenate(parts: Sequence[Tokens]) -> Tokens:
    """One text of several."""
    return np.concatenate([np.asarray(part, dtype=np.uint32) for part in parts])
