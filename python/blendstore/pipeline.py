"""What every adapter does around the engine: cut the prompt, look its documents up, plan, and later keep new documents.

Only token ids and numbers here. The adapter copies bytes between `Prepare` and `Capture`, and may publish a capture later,
when its copies have finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ._core import ChunkMeta, Lease, Match, Namespace, Reservation, Store
from .config import Config
from .options import RequestOptions
from .plan import BlendPlan, Candidate, SpanKind, build_plan
from .segments import Segmentation, SeparatorSegmenter, WholePromptSegmenter

HEAD, LEAD_IN, IN_CONTEXT, BLENDED = range(4)
_KEY = 32
_NOWHERE = bytes(_KEY)
Tokens = NDArray[np.uint32]


def rank(provenance: int) -> int:
    """Which record of the same tokens stays: a capture in exact context beats a lead-in one, and both beat one that was
    computed behind reused KV (measured in docs/benchmarks.md)."""
    return {HEAD: 0, BLENDED: 1, LEAD_IN: 2, IN_CONTEXT: 3}[provenance]


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

    def commit(self) -> int:
        """Publish everything; returns the number of chunks."""
        return sum(reservation.commit(mask) for reservation, mask, _ in self.reservations)

    def abort(self) -> None:
        """Store nothing."""
        for reservation, _, _ in self.reservations:
            reservation.abort()


class Pipeline:
    """The path from token ids to a plan, and from computed KV back to the store."""

    def __init__(
        self,
        store: Store,
        config: Config,
        namespace: Callable[[str], Namespace],
        *,
        bytes_per_token: int,
        separators: SeparatorSegmenter | None = None,
    ) -> None:
        """``namespace(salt)`` gives a tenant's namespace. Without ``separators`` prompts are whole, and documents within
        them are found by the matcher."""
        self._store, self._config, self._make_namespace = store, config, namespace
        self._bytes_per_token, self._separators = bytes_per_token, separators
        self._namespaces: dict[str, Namespace] = {}

    def namespace(self, options: RequestOptions) -> Namespace:
        """The namespace of the request's tenant."""
        salt = options.tenant_salt or self._config.tenant_salt
        if salt not in self._namespaces:
            self._namespaces[salt] = self._make_namespace(salt)
        return self._namespaces[salt]

    def segment(self, tokens: Tokens) -> Segmentation:
        """The prompt's segments: by separator where it has some, else the whole prompt."""
        if self._separators is not None and self._config.enable_blending:
            found = self._separators.segment(tokens)
            if len(found.segments) > 1 or (found.lead and found.segments):
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
    ) -> Prepared:
        """Look up and plan. ``engine_prefix`` tokens are held by the engine; ``prefix_exact`` says that none of them was
        blended. With ``blend`` off only exact records count."""
        namespace, segmentation = self.namespace(options), self.segment(tokens)
        prepared = Prepared(tokens, namespace, segmentation, build_plan(
            len(tokens), engine_prefix=engine_prefix, candidates=[], min_tokens=1), [], [], prefix_exact)  # fmt: skip
        if not options.reuse or not len(tokens):
            return prepared
        blend = blend and self._config.enable_blending
        bounds = segmentation.bounds
        lease = self._store.lookup_segments(namespace, tokens, bounds, head=True)
        prepared.leases.append(lease)
        found = [
            (lease, at, meta, start, 0, group)
            for at, (start, group) in enumerate(_chunk_starts(bounds, self._config.chunk_size))
            if (meta := lease.meta(at)) is not None
        ]
        if blend and len(found) < len(lease) and self._config.segmenter in ("auto", "matcher"):
            matches = self._store.match(namespace, tokens, min_tokens=self._config.blend_min_tokens)
            if matches:
                second = self._store.lookup(b"".join(m.key for m in matches))
                prepared.leases.append(second)
                found += [
                    (second, at, meta, match.start, match.row, len(bounds) + group)
                    for at, (match, group) in enumerate(zip(matches, _runs(matches), strict=True))
                    if (meta := second.meta(at)) is not None
                ]
                lengths = {len(lease) + at: m.stop - m.start for at, m in enumerate(matches)}
            else:
                lengths = {}
        else:
            lengths = {}
        exact = self._exact(namespace, tokens, [(meta, start, row) for _, _, meta, start, row, _ in found])
        candidates: list[Candidate] = []
        starts: dict[int, int] = {}
        for (source, at, meta, start, row, group), same in zip(found, exact, strict=True):
            number = len(prepared.where)
            prepared.where.append((source, at))
            length = meta.ntokens if source is lease else lengths[len(lease) + at]
            begin = starts.setdefault(group, start)
            if group < len(bounds):
                begin = int(bounds[group, 0])
            if same or (blend and meta.provenance != HEAD):
                candidates.append(
                    Candidate(start, start + length, number, row, meta.source_position + row, same, group, begin)
                )
        prepared.plan = build_plan(
            len(tokens),
            engine_prefix=engine_prefix,
            candidates=candidates if blend else [c for c in candidates if c.exact],
            min_tokens=self._config.blend_min_tokens,
        )
        return prepared

    def capture(self, prepared: Prepared, *, system_segments: int = 1) -> Capture:
        """Reserve room for what this prompt computed and the store lacks.

        ``system_segments`` leading segments are the system prompt: a document behind them alone is a lead-in capture."""
        out = Capture()
        kinds = prepared.plan.token_kinds
        clean = _clean_until(prepared)
        documents: list[bytes] = []
        segments = prepared.segmentation.segments
        whole = len(segments) == 1 and segments[0].start == 0
        for number, segment in enumerate(segments):
            spans = [(segment.start, segment.stop)]
            if whole and clean < segment.stop:
                spans = [(0, clean), *_fresh_runs(kinds, clean, self._config.blend_min_tokens)]
            for start, stop in spans:
                if stop - start < (1 if start == 0 else self._config.blend_min_tokens):
                    continue
                provenance = self._provenance(prepared, number, start, start < clean, system_segments, whole)
                if provenance is None:
                    continue
                self._reserve(out, prepared, start, stop, provenance, documents, kinds)
            if number >= system_segments or segment.start:
                part = prepared.tokens[segment.start : min(segment.stop, segment.start + self._config.chunk_size)]
                documents.append(prepared.namespace.content_id(part))
        return out

    def _provenance(
        self, prepared: Prepared, number: int, start: int, clean: bool, system_segments: int, whole: bool
    ) -> int | None:
        isolated = self._config.capture == "isolated"
        if start == 0:
            # The chain from position 0 is plain prefix caching. Its first chunk is bare; the later ones stand behind it.
            return HEAD if isolated or not whole or not self._config.enable_blending else IN_CONTEXT
        if not clean:
            return None if isolated else BLENDED
        lead = prepared.segmentation.lead
        if not whole and number <= (system_segments if prepared.segmentation.segments[0].start == 0 or lead else 0):
            behind_documents = number - (1 if number and system_segments else 0)
            if behind_documents == 0:
                return LEAD_IN
        return None if isolated else IN_CONTEXT

    def _reserve(
        self,
        out: Capture,
        prepared: Prepared,
        start: int,
        stop: int,
        provenance: int,
        documents: list[bytes],
        kinds: NDArray[np.uint8],
    ) -> None:
        size = self._config.chunk_size
        starts = np.arange(start, stop, size, dtype=np.int64)
        contexts = None
        if provenance != BLENDED:
            contexts = prepared.namespace.context_digests(prepared.tokens.data, starts.data)
        # A head chain's first chunk has nothing before it; only the chunks behind it may be reused elsewhere.
        parts = [(start, stop, provenance, contexts)]
        if start == 0 and provenance == IN_CONTEXT:
            parts = [(0, min(size, stop), HEAD, None if contexts is None else contexts[:_KEY])]
            if stop > size and contexts is not None:
                parts.append((size, stop, IN_CONTEXT, contexts[_KEY:]))
        parent: bytes | None = None
        for first, last, kind, digests in parts:
            reservation = self._store.reserve(
                prepared.namespace,
                np.ascontiguousarray(prepared.tokens[first:last]).data,
                bytes_per_token=self._bytes_per_token,
                source_position=first,
                provenance=kind,
                rank=rank(kind),
                contexts=digests,
                behind=b"".join(documents),
                behind_tokens=first,
                head=start == 0,
                parent=parent,
                parent_offset=first - start,
                save_unfull_chunk=self._config.save_unfull_chunk,
            )
            if len(reservation):
                parent = reservation.keys[-_KEY:]
            mask = bytearray(reservation.wanted)
            for index in range(len(reservation)):
                a, b = reservation.bounds(index)
                # Reused rows may be corrected or come from elsewhere: they are never stored again.
                if np.any(kinds[first + a : first + b] == SpanKind.REUSED.value):
                    mask[index] = 0
            if any(mask):
                out.reservations.append((reservation, bytes(mask), first))
            else:
                reservation.abort()

    @staticmethod
    def _exact(namespace: Namespace, tokens: Tokens, found: list[tuple[ChunkMeta, int, int]]) -> list[bool]:
        """Whether each (record, prompt position, row) stands where it was captured, behind the same tokens."""
        same = [
            row == 0 and meta.source_position == start and meta.context != _NOWHERE for meta, start, row in found
        ]
        places = sorted({start for (_, start, _), yes in zip(found, same, strict=True) if yes})
        if not places:
            return same
        digests = namespace.context_digests(tokens.data, np.array(places, dtype=np.int64).data)
        at = {place: digests[i * _KEY : (i + 1) * _KEY] for i, place in enumerate(places)}
        return [yes and at[start] == meta.context for (meta, start, _), yes in zip(found, same, strict=True)]


def _chunk_starts(bounds: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    for group, (start, stop) in enumerate(bounds.tolist()):
        for at in range(start, stop, size):
            yield at, group


def _runs(matches: list[Match]) -> Iterator[int]:
    """Numbers matches so that those that touch share a number: they are one document."""
    group, reach = -1, -1
    for match in matches:
        if match.start != reach:
            group += 1
        reach = match.stop
        yield group


def _clean_until(prepared: Prepared) -> int:
    """First position whose KV is not what a full prefill computes: that of the first reused token."""
    if prepared.plan.prefix and not prepared.prefix_exact:
        return 0
    reused = np.flatnonzero(prepared.plan.token_kinds == SpanKind.REUSED.value)
    return int(reused[0]) if reused.size else len(prepared.tokens)


def _fresh_runs(kinds: NDArray[np.uint8], begin: int, least: int) -> list[tuple[int, int]]:
    """Runs of at least ``least`` fresh tokens from ``begin`` on."""
    fresh = np.concatenate(([False], kinds[begin:] == SpanKind.FRESH.value, [False]))
    edges = np.flatnonzero(np.diff(fresh.astype(np.int8))) + begin
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2) if b - a >= least]
