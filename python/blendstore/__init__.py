"""blendstore: the KV cache of every document, reused at any position of a later prompt.

This package needs numpy only. ``blendstore.blend`` and the engine adapters need torch and are imported on request.
"""

from blendstore._core import (
    ChunkMeta,
    Event,
    Lease,
    LeaseExpired,
    Match,
    Namespace,
    RecordBuffer,
    Reservation,
    Store,
    StoreError,
    __version__,
)

__all__ = [
    "ChunkMeta",
    "Event",
    "Lease",
    "LeaseExpired",
    "Match",
    "Namespace",
    "RecordBuffer",
    "Reservation",
    "Store",
    "StoreError",
    "__version__",
]
