"""blendstore: the KV cache of every document, reused at any position of a later prompt.

This package needs numpy only. ``blendstore.blend`` and the engine adapters need torch and are imported on request.
"""

from blendstore._core import (
    ChunkMeta,
    Coder,
    Event,
    Lease,
    LeaseExpired,
    Match,
    Namespace,
    RecordBuffer,
    Reservation,
    Store,
    StoreError,
    Ticket,
    Tier,
    __version__,
)

__all__ = [
    "ChunkMeta",
    "Coder",
    "Event",
    "Lease",
    "LeaseExpired",
    "Match",
    "Namespace",
    "RecordBuffer",
    "Reservation",
    "Store",
    "StoreError",
    "Ticket",
    "Tier",
    "__version__",
]
