"""What every adapter does around the engine: cut the prompt, look its documents up, plan, and later keep new documents.

Only token ids and numbers here. The adapter copies bytes between `prepare` and `capture`, and may publish a capture
later, when its copies have finished.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from ._core import ChunkMeta, Lease, Match, Namespace, Reservation, Store, Ticket
from .config import Config
from .options import RequestOptions
from .plan import BlendPlan, Candidate, SpanKind, build_plan
from .segments import Segment, Segmentation, SeparatorSegmenter, WholePromptSegmenter

__all__ = ["BLENDED", "HEAD", "IN_CONTEXT", "LEAD_IN", "Capture", "Pipeline", "Prepared", "Writable", "rank"]

log = logging.getLogger("blendstore.pipeline")
HEAD, LEAD_IN, IN_CONTEXT, BLENDED = range(4)
_KEY = 32
# Documents that a record can list as standing before it: 32 KiB. What stands behind more is not stored.
_MOST_BEFORE = 1024
_NOWHERE = bytes(_KEY)
_LATE = 16
Tokens = NDArray[np.uint32]


def rank(provenance: int, capture: str = "in_context") -> int:
    """Which record of the same tokens stays: the one of higher rank, the older of equals.

    A capture in exact context beats a lead-in one, and both beat one that was computed behind reused KV (measured in
    docs/benchmarks.md). Where ``capture`` is ``isolated`` a lead-in capture beats everything, also what a process with
    the other policy left in a shared store."""
    if capture == "isolated" and provenance == LEAD_IN:
        return 4
    return (HEAD, BLENDED, LEAD_IN, IN_CONTEXT).index(provenance)


@dataclass(slots=True)
class Prepared:
    """One prompt, looked up and planned. ``where[c]`` is (lease, index) of chunk c of the plan. Release it."""

    tokens: Tokens
    namespace: Namespace
    segmentation: Segmentation
    plan: BlendPlan
    where: list[tuple[Lease, int]]
    leases: list[Lease]
    prefix_exact: bool
    """Nothing that the engine held was reused KV."""
    reused: list[tuple[int, bytes]] = field(default_factory=list)
    """(position, content id of the record) of each reused span, read while the lease is young."""
    matched: bytes = b""
    """Keys of the records that the matcher found, looked up by the second lease."""
    told: list[tuple[object, ...]] = field(default_factory=list)
    """What the records said of themselves, in the order of ``where``."""

    @property
    def clean(self) -> int:
        """Tokens before this position have the KV of a full prefill, whether computed, held or exact."""
        if self.plan.prefix and not self.prefix_exact:
            return 0
        reused = np.flatnonzero(self.plan.token_kinds == SpanKind.REUSED.value)
        return int(reused[0]) if reused.size else self.plan.ntokens

    def release(self) -> None:
        """Give the pins back."""
        for lease in self.leases:
            lease.release()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Writable:
    """A chunk that wants its bytes: tokens [start, stop) of the prompt go to ``reservation.buffer(index)``."""

    reservation: Reservation
    index: int
    start: int
    stop: int


@dataclass(slots=True)
class Capture:
    """Reserved room for a prompt's new documents. Fill every `chunks`, then `commit`; dropping it stores nothing."""

    reservations: list[tuple[Reservation, bytes, int]] = field(default_factory=list)

    def chunks(self) -> Iterator[Writable]:
        """The chunks to fill."""
        for reservation, mask, offset in self.reservations:
            for index, wanted in enumerate(mask):
                if wanted:
                    start, stop = reservation.bounds(index)
                    yield Writable(reservation, index, offset + start, offset + stop)

    def limit(self, stop: int) -> None:
        """Give up the chunks that reach behind token ``stop``: their KV isn't at hand."""
        self.reservations = [
            (
                reservation,
                bytes(bit and offset + reservation.bounds(index)[1] <= stop for index, bit in enumerate(mask)),
                offset,
            )
            for reservation, mask, offset in self.reservations
        ]

    def commit(self, without: Sequence[Writable] = ()) -> int:
        """Publish everything but the chunks ``without``, whose bytes are no record; returns the number of chunks."""
        missing = {(id(chunk.reservation), chunk.index) for chunk in without}
        return sum(
            reservation.commit(bytes(bit and (id(reservation), at) not in missing for at, bit in enumerate(mask)))
            for reservation, mask, _ in self.reservations
        )

    def abort(self) -> None:
        """Store nothing."""
        for reservation, _, _ in self.reservations:
            reservation.abort()


@dataclass(frozen=True, slots=True)
class _Chain:
    """Prompt tokens [start, stop), stored as one chain; ``provenance`` is theirs while nothing before is reused."""

    start: int
    stop: int
    provenance: int


class Pipeline:
    """The path from token ids to a plan, and from computed KV back to the store."""

    def __init__(
        self,
        store: Store,
        config: Config,
        namespace: Callable[[str], Namespace],
        *,
        bytes_per_token: int,
        packed_bytes_per_token: int | None = None,
        separators: SeparatorSegmenter | None = None,
    ) -> None:
        """``namespace(salt)`` gives a tenant's namespace. ``packed_bytes_per_token`` is what a token takes in the
        configured ``local_format``, from an engine that can write it. Without ``separators`` prompts are whole, and
        documents within them are found by the matcher."""
        self._store, self._config = store, config
        self._namespace_of = lru_cache(maxsize=1024)(namespace)
        self._bytes_per_token, self._separators = bytes_per_token, separators
        if config.local_format != "raw" and packed_bytes_per_token is None:
            log.warning("local_format: %s is not for this engine, which keeps records raw", config.local_format)
        self._packed = packed_bytes_per_token or bytes_per_token
        self._late: deque[Ticket] = deque(maxlen=_LATE)
        """Loads that took longer than their prompt could wait: a later prompt finds what they bring."""

    def namespace(self, options: RequestOptions) -> Namespace:
        """The namespace of the request's tenant."""
        return self._namespace_of(options.tenant_salt or self._config.tenant_salt)

    def segment(self, tokens: Tokens) -> Segmentation:
        """The prompt's segments: by separator where it has some, else the whole prompt."""
        if self._separators is not None and self._config.enable_blending:
            found = self._separators.segment(tokens)
            if found.separators and found.segments:
                return found
        return WholePromptSegmenter().segment(tokens)

    def prepare(
        self,
        tokens: Tokens,
        options: RequestOptions,
        *,
        engine_prefix: int = 0,
        prefix_exact: bool = True,
        blend: bool = True,
        fetch: bool = True,
    ) -> Prepared:
        """Look up and plan. The engine holds ``engine_prefix`` tokens; ``prefix_exact`` says that none of them was
        blended. With ``blend`` off only exact records that continue the prefix without a hole are used. Unless
        ``fetch`` is off this waits for lower tiers, for ``tier_wait_ms`` at most."""
        namespace, segmentation = self.namespace(options), self.segment(tokens)
        least = self._config.blend_min_tokens
        plan = build_plan(len(tokens), engine_prefix=engine_prefix, candidates=[], min_tokens=least)
        prepared = Prepared(tokens, namespace, segmentation, plan, [], [], prefix_exact)
        if not options.reuse or not len(tokens):
            return prepared
        blend = blend and self._config.enable_blending
        try:
            ticket = self._fetch(namespace, tokens, segmentation.bounds) if fetch else None
            if ticket is not None:
                ticket.wait(self._config.tier_wait_ms / 1e3)
                self.leave(ticket)
            found = self._look_up(prepared, matching=blend and self._config.segmenter in ("auto", "matcher"))
            candidates = [c for c, provenance in found if c.exact or (blend and self._reusable(provenance))]
            if not blend:
                candidates = _leading(candidates, engine_prefix)
            prepared.plan = build_plan(
                len(tokens), engine_prefix=engine_prefix, candidates=candidates, min_tokens=least
            )
            for span in prepared.plan.spans:
                if span.kind is SpanKind.REUSED:
                    lease, index = prepared.where[span.chunk]
                    prepared.reused.append((span.start, namespace.content_id(lease.tokens(index))))
        except BaseException:
            prepared.release()
            raise
        return prepared

    def fetch(self, tokens: Tokens, options: RequestOptions) -> Ticket | None:
        """Have lower tiers begin to bring what memory lacks of the prompt's records, which stay in memory while the
        ticket lives; None where nothing lies below memory, or nothing is wanted."""
        if not options.reuse or not len(tokens):
            return None
        return self._fetch(self.namespace(options), tokens, self.segment(tokens).bounds)

    def _fetch(self, namespace: Namespace, tokens: Tokens, bounds: NDArray[np.int64]) -> Ticket | None:
        if not self._store.tiers:
            return None
        keys = namespace.segment_keys(tokens, bounds, chunk_size=self._config.chunk_size, head=True)
        return self._store.prefetch(namespace, keys)

    def leave(self, ticket: Ticket) -> None:
        """Wait for it no longer. What it still has to bring is there for a later prompt."""
        if not ticket.poll():
            self._late.append(ticket)

    def renew(self, prepared: Prepared) -> bool:
        """Lease the records of a released prompt again; False, with nothing leased, when they aren't the same."""
        leases = [
            self._store.lookup_segments(prepared.namespace, prepared.tokens, prepared.segmentation.bounds, head=True)
        ]
        if prepared.matched:
            leases.append(self._store.lookup(prepared.matched))
        number = {id(lease): at for at, lease in enumerate(prepared.leases)}
        where = [(leases[number[id(lease)]], index) for lease, index in prepared.where]
        if [_told(lease.meta(index)) for lease, index in where] != prepared.told:
            for lease in leases:
                lease.release()
            return False
        prepared.where, prepared.leases = where, leases
        return True

    def _look_up(self, prepared: Prepared, *, matching: bool) -> list[tuple[Candidate, int]]:
        """(candidate, provenance) of each record of the prompt's segments and, with ``matching``, of other places."""
        bounds = prepared.segmentation.bounds
        lease = self._store.lookup_segments(prepared.namespace, prepared.tokens, bounds, head=True)
        prepared.leases.append(lease)
        hits: list[_Hit] = []
        for at, (start, group) in enumerate(_chunk_starts(bounds, self._config.chunk_size)):
            meta = lease.meta(at)
            if meta is not None:
                hits.append(_Hit(lease, at, meta, start, meta.ntokens, 0, group, int(bounds[group, 0])))
        if matching and len(hits) < len(lease):
            matches = self._store.match(prepared.namespace, prepared.tokens, min_tokens=self._config.blend_min_tokens)
            prepared.matched = b"".join(match.key for match in matches)
            lease = self._store.lookup(prepared.matched)
            prepared.leases.append(lease)
            for at, (match, (run, begin)) in enumerate(zip(matches, _runs(matches), strict=True)):
                meta = lease.meta(at)
                if meta is not None:
                    length = match.stop - match.start
                    hits.append(_Hit(lease, at, meta, match.start, length, match.row, len(bounds) + run, begin))
        prepared.where = [(hit.lease, hit.index) for hit in hits]
        prepared.told = [_told(hit.meta) for hit in hits]
        exact = _exact(prepared.namespace, prepared.tokens, hits)
        return [(hit.candidate(chunk, exact[chunk]), hit.meta.provenance) for chunk, hit in enumerate(hits)]

    def _reusable(self, provenance: int) -> bool:
        """Whether such records may be reused behind another context."""
        return provenance == LEAD_IN or (provenance in (IN_CONTEXT, BLENDED) and self._config.capture == "in_context")

    def capture(self, prepared: Prepared) -> Capture:
        """Reserve room for what this prompt computed and the store lacks.

        A prompt cut by separators is stored segment by segment. A whole prompt is one chain from its first token to its
        first reused one, and each later run of new tokens is a document of its own."""
        out = Capture()
        try:
            before = self._documents(prepared)
            places, listed = [place for place, _ in before], b"".join(key for _, key in before)
            chains = [chain for chain in self._chains(prepared) if bisect_left(places, chain.start) <= _MOST_BEFORE]
            written = _Written.of(prepared, chains, self._config.chunk_size)
            for chain in chains:
                self._reserve(out, prepared, chain, written, listed[: _KEY * bisect_left(places, chain.start)])
        except BaseException:
            out.abort()
            raise
        return out

    def _chains(self, prepared: Prepared) -> Iterator[_Chain]:
        least = self._config.blend_min_tokens
        if _is_whole(prepared.segmentation):
            if prepared.clean:
                yield _Chain(0, prepared.clean, IN_CONTEXT)
            for start, stop in _fresh_runs(prepared.plan.token_kinds, prepared.clean, least):
                yield _Chain(start, stop, BLENDED)
            return
        documents = 0
        for segment, system in self._parts(prepared.segmentation):
            if segment.start == 0 or len(segment) >= least:
                yield _Chain(segment.start, segment.stop, IN_CONTEXT if documents else LEAD_IN)
            documents += not system

    def _parts(self, segmentation: Segmentation) -> Iterator[tuple[Segment, bool]]:
        """Segments, and whether each is one of the leading parts that are no documents. A part may be empty."""
        ends = [stop for _, stop in segmentation.separators]
        for segment in segmentation.segments:
            yield segment, bisect_right(ends, segment.start) < self._config.system_segments

    def _documents(self, prepared: Prepared) -> list[tuple[int, bytes]]:
        """(position, content id) of what later chains stand behind, in order: the first chunk of each document, or
        every chunk where the documents are unknown. One more than `_MOST_BEFORE` are as good as all."""
        tokens, size = prepared.tokens, self._config.chunk_size
        if not _is_whole(prepared.segmentation):
            parts = [(part.start, part.stop) for part, system in self._parts(prepared.segmentation) if not system]
            chunks = [(start, min(start + size, stop)) for start, stop in parts]
            known = []
        else:
            parts = [(chain.start, chain.stop) for chain in self._chains(prepared)]
            if not prepared.clean:
                parts.append((0, prepared.plan.prefix))
            chunks = [(at, min(at + size, stop)) for start, stop in parts for at in range(start, stop, size)]
            known = prepared.reused
        first = sorted([*((a, tokens[a:b]) for a, b in chunks), *known], key=itemgetter(0))[: _MOST_BEFORE + 1]
        make = prepared.namespace.content_id
        return [(at, it if isinstance(it, bytes) else make(np.ascontiguousarray(it))) for at, it in first]

    def _provenance(self, chain: _Chain, start: int, stop: int, clean: int) -> int | None:
        """Provenance of chunk [start, stop) of ``chain``, or None when it must not be stored."""
        isolated = self._config.capture == "isolated"
        if stop > clean:
            return None if isolated or not self._config.enable_blending else BLENDED
        if start == 0 or not self._config.enable_blending:
            return HEAD
        if isolated and chain.provenance == IN_CONTEXT:
            # A chain from position 0 is plain prefix caching: who finds it has sent every token before it.
            return HEAD if chain.start == 0 else None
        return chain.provenance

    def _reserve(self, out: Capture, prepared: Prepared, chain: _Chain, written: _Written, behind: bytes) -> None:
        size, clean = self._config.chunk_size, written.clean
        chunks = [(start, min(start + size, chain.stop)) for start in range(chain.start, chain.stop, size)]
        parent: bytes | None = None
        for kind, group in groupby(chunks, key=lambda chunk: self._provenance(chain, chunk[0], chunk[1], clean)):
            if kind is None:  # and so are those behind it
                break
            part = list(group)
            starts, first, last = [start for start, _ in part], part[0][0], part[-1][1]
            raw = kind == HEAD and not self._config.local_format_exact
            contexts = None if kind == BLENDED else b"".join(written.contexts[start] for start in starts)
            reservation = self._store.reserve(
                prepared.namespace,
                np.ascontiguousarray(prepared.tokens[first:last]),
                bytes_per_token=self._bytes_per_token if raw else self._packed,
                source_position=first,
                provenance=kind,
                rank=rank(kind, self._config.capture),
                contexts=contexts,
                behind=behind,
                behind_tokens=first,
                head=chain.start == 0 and parent is None,
                parent=parent,
                parent_offset=first - chain.start,
                save_unfull_chunk=self._config.save_unfull_chunk,
            )
            mask = bytes(
                wanted and not written.stale[start:stop].any()
                for wanted, (start, stop) in zip(reservation.wanted, part, strict=False)
            )
            if any(mask):
                out.reservations.append((reservation, mask, first))
            else:
                reservation.abort()
            parent = reservation.keys[-_KEY:] or None


@dataclass(frozen=True, slots=True)
class _Written:
    """What all chains of one capture share, worked out once."""

    clean: int
    stale: NDArray[np.bool_]
    """Reused rows may have been corrected and belong to another context: they are never stored again."""
    contexts: dict[int, bytes]
    """Context digests of the chunks that begin where the KV is still that of a full prefill."""

    @classmethod
    def of(cls, prepared: Prepared, chains: Sequence[_Chain], size: int) -> _Written:
        clean, kinds = prepared.clean, prepared.plan.token_kinds
        stale = kinds == SpanKind.REUSED.value
        if not prepared.prefix_exact:
            stale = stale | (kinds == SpanKind.PREFIX.value)
        starts = [at for chain in chains for at in range(chain.start, min(chain.stop, clean), size)]
        digests = (
            prepared.namespace.context_digests(prepared.tokens, np.array(starts, dtype=np.int64)) if starts else b""
        )
        contexts = {at: digests[i * _KEY : (i + 1) * _KEY] for i, at in enumerate(starts)}
        return cls(clean, stale, contexts)


@dataclass(frozen=True, slots=True)
class _Hit:
    """Prompt tokens [start, start + length) are rows [row, row + length) of a leased record."""

    lease: Lease
    index: int
    meta: ChunkMeta
    start: int
    length: int
    row: int
    group: int
    group_start: int

    @property
    def unmoved(self) -> bool:
        """The record's first row stands where it was captured, in a context that is known."""
        return self.row == 0 and self.meta.source_position == self.start and self.meta.context != _NOWHERE

    def candidate(self, chunk: int, exact: bool) -> Candidate:
        source = self.meta.source_position + self.row
        stop = self.start + self.length
        return Candidate(self.start, stop, chunk, self.row, source, exact, self.group, self.group_start)


def _told(meta: ChunkMeta | None) -> tuple[object, ...]:
    """What a plan depends on."""
    if meta is None:
        return ()
    return meta.ntokens, meta.nbytes, meta.source_position, meta.provenance, meta.context


def _exact(namespace: Namespace, tokens: Tokens, hits: Sequence[_Hit]) -> list[bool]:
    """Whether each hit stands where it was captured, behind the same tokens."""
    places = sorted({hit.start for hit in hits if hit.unmoved})
    digests = namespace.context_digests(tokens, np.array(places, dtype=np.int64)) if places else b""
    at = {place: digests[i * _KEY : (i + 1) * _KEY] for i, place in enumerate(places)}
    return [hit.unmoved and at[hit.start] == hit.meta.context for hit in hits]


def _leading(exact: Iterable[Candidate], reach: int) -> list[Candidate]:
    """Those that continue the first ``reach`` tokens without a hole."""
    out: list[Candidate] = []
    for candidate in sorted(exact, key=lambda c: c.start):
        if candidate.start > reach:
            break
        out.append(candidate)
        reach = max(reach, candidate.stop)
    return out


def _is_whole(segmentation: Segmentation) -> bool:
    """The prompt is one segment from its first token on: nothing is known about the documents in it."""
    return len(segmentation.segments) == 1 and segmentation.segments[0].start == 0 and not segmentation.separators


def _chunk_starts(bounds: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    for group, (start, stop) in enumerate(bounds.tolist()):
        for at in range(start, stop, size):
            yield at, group


def _runs(matches: Sequence[Match]) -> Iterator[tuple[int, int]]:
    """(number, start) of each match's run: matches that touch are one document."""
    run, reach, begin = -1, -1, 0
    for match in matches:
        if match.start != reach:
            run, begin = run + 1, match.start
        reach = match.stop
        yield run, begin


def _fresh_runs(kinds: NDArray[np.uint8], begin: int, least: int) -> list[tuple[int, int]]:
    """Runs of at least ``least`` fresh tokens from ``begin`` on."""
    fresh = np.concatenate(([False], kinds[begin:] == SpanKind.FRESH.value, [False]))
    edges = np.flatnonzero(np.diff(fresh.astype(np.int8))) + begin
    return [(a, b) for a, b in edges.reshape(-1, 2).tolist() if b - a >= least]
