"""Rust core of blendstore: namespaces, the chunk store, leases, reservations and the matcher.

Token arrays are C-contiguous buffers of ``uint32`` (numpy ``uint32``); keys are packed ``bytes`` of 32 bytes each.
Buffers are read in place: don't write to them while a call has them. Every call that can take longer than about 5 µs
releases the GIL. A miss never raises; a wrong value raises ``StoreError``, an object of a wrong kind ``TypeError``.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Final, TypeAlias, final

from numpy.typing import NDArray
from typing_extensions import Buffer

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
    "Trace",
    "__version__",
    "attend",
    "place_rows",
    "redacted_url",
    "remote_url_fault",
]

__version__: Final[str]

# numpy's own stubs tell of the buffer protocol from Python 3.12 on only.
_Buffer: TypeAlias = Buffer | NDArray[Any]

class StoreError(Exception):
    """Base of the errors of this module: wrong use, never a miss."""

class LeaseExpired(StoreError):
    """The lease was released, or its time-out ran out, before its bytes were read."""

@final
class Namespace:
    """Identity of interchangeable KV bytes: length-framed fields keyed by the tenant salt (immutable)."""

    def __new__(cls, fields: Sequence[tuple[str, bytes]], *, salt: bytes = b"") -> Namespace: ...
    @property
    def digest(self) -> bytes:
        """32 bytes; equal for equal fields and salt on every machine, process and Python version."""
    def content_id(self, tokens: _Buffer) -> bytes:
        """32-byte content id of one chunk's tokens."""
    def chain_keys(
        self, tokens: _Buffer, *, chunk_size: int = 256, head: bool = False, parent: bytes | None = None
    ) -> bytes:
        """Packed chain keys of the chunks of one segment (the last chunk may be short); ``head`` picks the root."""
    def segment_keys(self, tokens: _Buffer, bounds: _Buffer, *, chunk_size: int = 256, head: bool = False) -> bytes:
        """Packed chain keys of all chunks of all segments; ``bounds`` is ``int64[n, 2]`` of (start, stop) in ``tokens``.

        With ``head`` a segment that starts at 0 is a head chain."""
    def context_digests(self, tokens: _Buffer, positions: _Buffer) -> bytes:
        """Packed context digests (32 bytes each) of the prefixes ``tokens[:p]``; ``positions`` is sorted ``int64[n]``."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class ChunkMeta:
    """What a record says about itself."""

    @property
    def key(self) -> bytes: ...
    @property
    def source_position(self) -> int:
        """Position in its prompt of the record's first token."""
    @property
    def ntokens(self) -> int: ...
    @property
    def provenance(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def context(self) -> bytes:
        """Context digest (32 bytes) of the first token; zeros when unknown or blended."""
    @property
    def behind(self) -> bytes:
        """Packed content ids of the documents' first chunks that stood before it (may be empty)."""
    @property
    def behind_tokens(self) -> int:
        """Tokens that stood before it when it was captured."""
    @property
    def nbytes(self) -> int:
        """KV payload bytes."""
    @property
    def segment_offset(self) -> int:
        """Tokens of the same chain that come before this chunk."""

def attend(
    q: _Buffer,
    k: _Buffer,
    v: _Buffer,
    positions: _Buffer,
    out: _Buffer,
    *,
    scale: float,
    window: int | None = None,
    hidden: _Buffer | None = None,
    threads: int = 1,
) -> None:
    """Write to ``out`` what rows ``q`` (both float32[n, heads, dim]) at ``positions`` (int64[n], rising) see of ``k`` and ``v``
    (float32[keys, kv_heads, dim]; key p is at position p), on up to ``threads`` threads.

    A row sees the keys at positions up to its own, the last ``window`` of them, without those whose ``hidden`` (uint8[keys])
    is not 0; a row that sees none is no number. ``v`` must be finite and ``dim`` even; all are C-contiguous. The bits of a row
    depend on nothing but the row and what it sees. Raises ``StoreError``, with nothing written, where shapes don't fit
    together, a position is none of a key, or memory overlaps with ``out``."""

def place_rows(
    to_k: _Buffer,
    to_v: _Buffer,
    k: _Buffer,
    v: _Buffer,
    cos: _Buffer | None = None,
    sin: _Buffer | None = None,
    *,
    interleaved: bool = False,
    threads: int = 1,
) -> None:
    """Copy rows ``v`` to ``to_v``, and rows ``k`` to ``to_k`` turned by ``cos``, ``sin`` float32[n, pairs] if they are given, on
    up to ``threads`` threads.

    The others are float32[n, kv_heads, dim], all are C-contiguous. Elements (2 j, 2 j + 1) turn together if ``interleaved``,
    otherwise (j, j + pairs); those from 2 pairs on don't. Raises ``StoreError``, with nothing written, where shapes don't fit
    together or memory overlaps with what is written to."""

@final
class Lease:
    """Pins on the chunks of one lookup. Released on ``release()``, ``with`` exit, drop or time-out."""

    def __len__(self) -> int: ...
    @property
    def hits(self) -> bytes:
        """One byte per looked-up key: 1 = hit, 0 = miss."""
    @property
    def nbytes(self) -> int:
        """KV payload bytes of the hits."""
    def meta(self, index: int) -> ChunkMeta | None: ...
    def buffer(self, index: int) -> RecordBuffer:
        """Read-only, zero-copy view of a hit's KV payload; keeps the pin alive. Raises ``LeaseExpired``."""
    def tokens(self, index: int) -> RecordBuffer:
        """Read-only ``uint32`` view of a hit's tokens."""
    def scores(self, index: int) -> RecordBuffer | None:
        """Read-only ``float32[ntokens]`` view of the per-token scores kept with the record, or None."""
    def read_into(self, index: int, destination: _Buffer) -> None:
        """Copy the KV payload into a writable buffer of exactly that many bytes, GIL released."""
    def release(self) -> None: ...
    def __enter__(self) -> Lease: ...
    def __exit__(self, *exc: object) -> None: ...

@final
class RecordBuffer:
    """Buffer-protocol and DLPack view of arena memory; holds a pin (or the reservation) while any view lives."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, view: memoryview, /) -> None: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Capsule of a 1-D CPU tensor without a copy. From DLPack 1.0 on a published record is marked read-only; older
        consumers are trusted not to write to it."""
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Reservation:
    """Room for the chunks of one segment. Aborted on drop; each chunk is published whole or not at all."""

    def __len__(self) -> int: ...
    @property
    def keys(self) -> bytes: ...
    @property
    def wanted(self) -> bytes:
        """One byte per chunk: 1 = write me, 0 = already resident at this rank or better, being written, or no room."""
    def bounds(self, index: int) -> tuple[int, int]:
        """(start, stop) token offsets of the chunk within the segment."""
    def buffer(self, index: int) -> RecordBuffer:
        """Writable view of a wanted chunk's KV payload, for writes before ``commit``; afterwards others read the bytes."""
    def set_scores(self, index: int, scores: _Buffer) -> None:
        """``float32[ntokens]`` to keep with the chunk; needs ``with_scores=True``."""
    def commit(self, mask: bytes | None = None) -> int:
        """Publish the wanted chunks (those with a non-zero byte in ``mask``, if given); abort the others. Returns how many."""
    def abort(self) -> None: ...
    def __enter__(self) -> Reservation: ...
    def __exit__(self, *exc: object) -> None:
        """Aborts what was not committed."""

@final
class Match:
    """A run of prompt tokens that equals rows of one known chunk."""

    @property
    def key(self) -> bytes: ...
    @property
    def start(self) -> int:
        """First prompt position."""
    @property
    def stop(self) -> int: ...
    @property
    def row(self) -> int:
        """Row of the record that holds ``start``."""

@final
class Event:
    """Something that happened to a chunk: ``kind`` is ``stored``, ``replaced``, ``evicted`` or ``cleared``."""

    @property
    def kind(self) -> str: ...
    @property
    def key(self) -> bytes: ...
    @property
    def sequence(self) -> int: ...

@final
class Tier:
    """A place for records below memory, to be given to one `Store`."""

    @staticmethod
    def disk(
        directories: Sequence[str | PathLike[str]], *, capacity_bytes: int, direct: bool = True, io_uring: bool = True
    ) -> Tier:
        """Append-only files in these directories, which are made if need be; one process at a time may use them.

        ``capacity_bytes`` is for all of them together. ``direct`` bypasses the page cache and ``io_uring`` is used where the
        system lets us. Raises ``StoreError`` when a directory can't be used."""
    def with_coder(self, coder: Coder) -> Tier:
        """The same place, whose records are coded on their way down and decoded on their way up."""
    @staticmethod
    def remote(url: str, *, timeout_ms: int = 1000) -> Tier:
        """What ``remote_url`` names: Redis or Valkey, an object store, a shared directory; docs/remote.md has the forms. A
        server that is not there yet is no error. ``timeout_ms`` bounds each call. Raises ``StoreError`` for another URL, and
        for files that it names and that can't be used; secrets are left out."""
    @property
    def name(self) -> str: ...

def redacted_url(url: str) -> str:
    """A URL of a remote tier, or what was meant as one, without its secrets."""

def remote_url_fault(url: str) -> str | None:
    """Why a text is no URL of a remote tier, without its secrets; ``None`` when it is one."""

@final
class Ticket:
    """Chunks on their way from lower tiers into memory. What was loaded stays there while the ticket lives; dropping it ends
    its interest in the rest."""

    def wait(self, timeout_s: float) -> bool:
        """Wait, GIL released, until nothing is pending; whether that is so."""
    def poll(self) -> bool:
        """Whether nothing is pending."""
    def fileno(self) -> int:
        """A file descriptor that becomes readable when nothing is pending, for ``select`` and ``loop.add_reader``. It is the
        ticket's own: don't read from it, don't close it."""
    @property
    def outcomes(self) -> bytes:
        """One byte per key: 0 pending, 1 was in memory, 2 loaded, 3 in no tier, 4 cancelled."""
    def cancel(self) -> None: ...
    def __enter__(self) -> Ticket: ...
    def __exit__(self, *exc: object) -> None:
        """Cancels what is pending."""

@final
class Store:
    """Chunk store in memory, with tiers below it. Thread safe; reads of memory never take a lock. Not for a child of
    ``fork``: a lock that another thread held at that moment stays locked there."""

    def __new__(
        cls,
        *,
        capacity_bytes: int,
        chunk_size: int = 256,
        policy: str = "adaptive",
        tenant_share: float = 1.0,
        max_chunks: int | None = None,
        lease_timeout_s: float = 60.0,
        reserve_wait_s: float = 0.05,
        events_capacity: int = 4096,
        prefill_tokens_per_s: float = 10000.0,
        tiers: Sequence[Tier] = (),
    ) -> Store:
        """``policy`` is ``adaptive``, ``lru``, ``lfu``, ``fifo``, ``s3-fifo`` or ``sieve`` (any case). ``tenant_share`` is the
        share of the capacity that the namespaces of one salt may take together. ``tiers`` are below memory, the fastest
        first: what is committed is written to each of them behind the commit. ``prefill_tokens_per_s`` is what the engine
        computes at the beginning of a prompt, which eviction compares loading from ``tiers`` with. Raises ``StoreError`` that names the
        argument, its value and the accepted form."""
    def lookup(self, keys: _Buffer) -> Lease:
        """Packed 32-byte keys."""
    def lookup_segments(self, namespace: Namespace, tokens: _Buffer, bounds: _Buffer, *, head: bool = False) -> Lease:
        """``lookup`` of ``namespace.segment_keys(...)`` in one call."""
    def set_prefill_speed(self, tokens_per_s: float) -> None:
        """Takes the place of ``prefill_tokens_per_s``, once it was measured. Raises ``StoreError`` unless above 0."""
    def contains(self, keys: _Buffer) -> bytes:
        """One byte per key, without pinning or touching."""
    def reserve(
        self,
        namespace: Namespace,
        tokens: _Buffer,
        *,
        bytes_per_token: int,
        source_position: int,
        provenance: int,
        rank: int,
        contexts: bytes | None = None,
        behind: bytes = b"",
        behind_tokens: int = 0,
        head: bool = False,
        parent: bytes | None = None,
        parent_offset: int = 0,
        with_scores: bool = False,
        save_unfull_chunk: bool = True,
    ) -> Reservation:
        """Room for every chunk of one segment. ``contexts`` is 32 bytes per chunk, or None for zeros.

        ``parent`` continues an existing chain, of which ``parent_offset`` tokens come before. When the store is full it
        evicts, waits at most ``reserve_wait_s``, and then marks the chunk as not wanted."""
    def match(self, namespace: Namespace, tokens: _Buffer, *, min_tokens: int = 32) -> list[Match]:
        """Every occurrence of known chunks at any offset, left to right without overlap (longest first on conflict).

        Candidates come from a keyed rolling fingerprint and are confirmed by the tokens themselves; a match is extended
        token by token to both sides along the chain, to the unfull tail. ``HEAD`` records are not matched."""
    def prefetch(self, namespace: Namespace, keys: _Buffer) -> Ticket:
        """Start loading the chunks that are not in memory from the tiers that have them. Keys that are on their way already
        are not loaded twice. Every record is proved to be the one that its key names."""
    def tier_of(self, keys: _Buffer) -> bytes:
        """Number of the fastest place of each key: 0 memory, 1 the first tier, …, 255 none that is known cheaply."""
    def flush(self, timeout_s: float) -> bool:
        """Wait, GIL released, until everything committed is written to the tiers; whether it is."""
    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, the fastest first."""
    def tier_stats(self) -> dict[str, dict[str, int]]:
        """Counters and gauges of each tier by its name (gets, hits, misses, puts, dropped, evicted, records, bytes_used,
        bytes_capacity, bytes_read, bytes_written, queued, queued_bytes, get_nanoseconds, put_nanoseconds, error_KIND), and of
        loading under ``loads`` (requested, loaded, missed, coalesced, cancelled, refused, in_flight)."""
    def touch(self, keys: _Buffer) -> None: ...
    def pin(self, keys: _Buffer) -> int:
        """Pin until ``unpin``; returns how many were found."""
    def unpin(self, keys: _Buffer) -> int: ...
    def clear(self, namespace: Namespace | None = None) -> int:
        """Drop every chunk (of one namespace), in the tiers too; returns how many there were in memory. Pinned bytes stay readable until released."""
    def events(self, limit: int = 1024) -> tuple[list[Event], int]:
        """Oldest events not yet read, and how many were lost because nobody read them in time."""
    @property
    def arena(self) -> tuple[int, int]:
        """Address and bytes of the memory that all records lie in, for registering it with a device; it stays where it is
        for as long as the store or anything made from it lives."""
    def stats(self) -> dict[str, int | float]:
        """Counters and gauges: chunks, bytes_used, bytes_capacity, bytes_pinned, leases, reservations, lookups, hits, misses,
        stored, replaced, evicted, aborted, rejected_full, expired_leases, matches, metadata_bytes."""
    def close(self) -> None:
        """Write what is queued for the tiers (for at most 5 s), close them, and drop every chunk in memory."""

@final
class Coder:
    """A coding of record payloads, as lower tiers keep them (immutable, thread-safe).

    ``raw`` copies; ``lossless`` codes exponents and is bit-exact; ``cachegen`` quantises with trained tables and states
    its error bound in what it writes. Bytes are the same on every machine.
    """

    @staticmethod
    def raw() -> Coder: ...
    @staticmethod
    def lossless(element: str | None, planes: int) -> Coder:
        """For payloads of ``planes`` equal parts (layers × 2) of ``bfloat16``, ``float16`` or ``float32`` elements, or
        of bytes (None)."""
    @staticmethod
    def cachegen(tables: _Buffer, *, threads: int = 1) -> Coder:
        """With a table file of ``blendstore.codec.train``; a record's chains are coded on up to ``threads`` threads.
        Raises ``ValueError`` for bytes that are no table file."""
    @property
    def name(self) -> str:
        """``raw``, ``lossless`` or ``cachegen``."""
    @property
    def table_id(self) -> bytes | None:
        """16 bytes that name the tables of ``cachegen``."""
    def encode(self, payload: _Buffer, ntokens: int, *, source_position: int = 0, format: int = 0) -> bytes:
        """The coded payload. ``source_position`` is where its first token stood when keys were rotated; ``format`` is
        the memory format: other than 0 nothing is quantised. Raises ``ValueError`` for what is better kept raw."""
    def decode(self, coded: _Buffer, nbytes: int, ntokens: int, *, source_position: int = 0, format: int = 0) -> bytes:
        """The payload of ``nbytes`` bytes. Raises ``ValueError`` for bytes that are no coded payload, or were coded with
        other tables."""
    def symbol_counts(self, payload: _Buffer, *, source_position: int = 0) -> list[list[int]]:
        """[classes][256]: how often ``cachegen`` meets each symbol in a payload. Raises ``ValueError`` elsewhere."""
    @staticmethod
    def error_bound(coded: _Buffer) -> tuple[float, float]:
        """Most that a key and a value element differ from what was encoded, as a ``cachegen`` payload states it."""

@final
class Trace:
    """Requests and the chunks that they ask for, for simulating what an eviction policy would have saved (immutable)."""

    def __new__(
        cls,
        *,
        times: _Buffer,
        starts: _Buffer,
        blocks: _Buffer,
        positions: _Buffer,
        parents: _Buffer,
        tokens: _Buffer,
    ) -> Trace:
        """``times`` int64[requests] in nanoseconds, not falling; ``starts`` int64[requests + 1] where each request begins in
        ``blocks`` uint32[accesses] (numbers of chunks, each right behind its parent) and ``positions`` uint32[accesses] (of
        its first token in that prompt); ``parents`` uint32[chunks] (2**32 - 1: none) and ``tokens`` uint32[chunks]. Raises
        ``StoreError`` where they don't fit together."""
    def simulate(
        self,
        policy: str,
        capacity_tokens: int,
        *,
        attention_tokens: float = 30000.0,
        lower_share: float = 0.0,
        lower_load: float = 0.0,
        lower_told: bool = True,
    ) -> dict[str, int | float]:
        """What that policy, or ``optimal``, which knows the future, would have found with room for that many tokens:
        accesses, hits (of chunks whose predecessors in the chain are there too), loads, tokens, hit_tokens, cost and saved
        (in times that a token at position 0 takes to compute; attention takes as much again at ``attention_tokens``),
        evicted, rejected.

        A tier below keeps a share ``lower_share`` (0 to 1) of what prompts bring, from which a token loads in ``lower_load``
        of those times; ``lower_told`` says whether the policy knows. The optimum has no such tier."""
