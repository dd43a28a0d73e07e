"""The plan of one prompt: what the engine holds, what comes back exactly, what is reused and what is computed.

Candidates (runs of prompt tokens that equal rows of leased records) go in, a partition of the prompt into spans comes
out. Only numbers here: no tensors, no store, no engine.

How conflicts are settled, in this order:

1. Tokens of the engine's own prefix belong to the engine.
2. *Exact* candidates come before all others, wherever they stand: an equal context digest says that the record has
   what a full prefill of this very prompt computes, whatever the plan does with the tokens before it (separators that
   are computed, documents that are reused).
3. Every token belongs to the longest candidate of the better kind that covers it, then the leftmost, then the smallest
   in the remaining fields, so that the order of the candidates never matters. What is left of a candidate that lost
   some of its tokens stays usable: row and source position move along with the cut.
4. A run is what touches within one document. Reused runs below ``min_tokens`` are computed instead; exact tokens are
   kept at any length, because they cost nothing in quality.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlendPlan", "Candidate", "PlanError", "Span", "SpanKind", "build_plan"]

Ints = NDArray[np.int64]


class PlanError(ValueError):
    """Numbers that describe no prompt: a fault of the caller, never a miss."""


class SpanKind(enum.Enum):
    """Where the KV of a span's tokens comes from."""

    PREFIX = 0
    """Held by the engine already; never read or written."""
    EXACT = 1
    """Restored bit for bit: same tokens at the same position behind the same context."""
    REUSED = 2
    """Restored from another context, rotated to its new position; the selector may recompute some of it."""
    FRESH = 3
    """Computed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Prompt tokens ``[start, stop)`` equal rows ``[row, row + stop - start)`` of chunk ``chunk`` of the lease."""

    start: int
    stop: int
    chunk: int
    row: int
    source: int
    """Position at which row ``row`` was captured."""
    exact: bool
    """The record's context equals the prompt's, and ``source == start``."""
    group: int
    """The document within the prompt."""
    group_start: int
    """Prompt position at which that document starts; negative when its beginning is not part of the prompt."""


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt tokens ``[start, stop)`` of one kind; the other fields are those of `Candidate`, and unset elsewhere."""

    kind: SpanKind
    start: int
    stop: int
    chunk: int = -1
    row: int = 0
    source: int = 0
    group: int = -1
    group_start: int = 0

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """A partition of ``[0, ntokens)`` into spans, left to right.

    Holds by construction (`PlanError` otherwise): every token is in one span; a prefix only at the start; exact spans
    stand where they were captured; the last token is fresh.
    """

    ntokens: int
    spans: tuple[Span, ...]
    token_kinds: NDArray[np.uint8] = field(init=False, repr=False, compare=False)
    """``uint8[ntokens]``: each token's ``SpanKind.value``; read-only."""

    def __post_init__(self) -> None:
        starts, stops, kinds = _span_columns(self.spans)
        edges = np.concatenate(([0], stops))
        if edges[-1] != self.ntokens or not np.array_equal(starts, edges[:-1]) or not np.all(stops > starts):
            raise PlanError(
                f"the spans do not cover the {self.ntokens} prompt tokens once, in order: {self.spans[:4]}…"
            )
        if np.any(kinds[1:] == SpanKind.PREFIX.value):
            raise PlanError(
                f"the engine's prefix must be the first span and the only one of its kind: {self.spans[:4]}…"
            )
        moved = next((s for s in self.spans if s.kind is SpanKind.EXACT and s.source != s.start), None)
        if moved is not None:
            raise PlanError(f"an exact span must stand where it was captured: {moved}")
        if kinds.size and kinds[-1] != SpanKind.FRESH.value:
            raise PlanError(f"the last prompt token must be computed, but it is {self.spans[-1].kind.name}")
        token_kinds = np.repeat(kinds, stops - starts).astype(np.uint8)
        token_kinds.flags.writeable = False
        object.__setattr__(self, "token_kinds", token_kinds)

    def tokens(self, kind: SpanKind) -> int:
        """Number of tokens of one kind."""
        return int(np.count_nonzero(self.token_kinds == kind.value))

    def positions(self, *kinds: SpanKind) -> Ints:
        """``int64[n]``: ascending prompt positions of the tokens of these kinds."""
        wanted = np.zeros(len(SpanKind), dtype=np.bool_)
        wanted[[kind.value for kind in kinds]] = True
        return np.flatnonzero(wanted[self.token_kinds]).astype(np.int64, copy=False)

    @property
    def prefix(self) -> int:
        """Tokens held by the engine."""
        return self.tokens(SpanKind.PREFIX)

    @property
    def exact(self) -> int:
        """Tokens restored bit for bit."""
        return self.tokens(SpanKind.EXACT)

    @property
    def reused(self) -> int:
        """Tokens restored from another context."""
        return self.tokens(SpanKind.REUSED)

    @property
    def fresh(self) -> int:
        """Tokens that are computed whatever the selector says."""
        return self.tokens(SpanKind.FRESH)

    @property
    def lead(self) -> int:
        """Leading tokens that need no computing: the prefix, and the exact spans that continue it without a hole."""
        needed = self.token_kinds > SpanKind.EXACT.value
        return int(np.argmax(needed)) if np.any(needed) else self.ntokens

    @property
    def context(self) -> int:
        """Exact and reused tokens: what a recompute ratio is a share of."""
        return self.exact + self.reused


def build_plan(
    ntokens: int,
    *,
    engine_prefix: int,
    candidates: Sequence[Candidate],
    min_tokens: int,
    query_tokens: int = 16,
) -> BlendPlan:
    """Partition a prompt of ``ntokens`` tokens.

    ``engine_prefix`` tokens are the engine's; it must leave at least one token to compute. Reused runs shorter than
    ``min_tokens`` are computed. Reused spans end before the last ``query_tokens`` tokens, exact spans before the last
    token. Raises `PlanError` for numbers out of range and for candidates outside the prompt.
    """
    if ntokens < 0 or not 0 <= engine_prefix <= max(ntokens - 1, 0):
        raise PlanError(
            f"engine_prefix is {engine_prefix}, but a prompt of {ntokens} tokens needs 0 ≤ engine_prefix < ntokens: "
            "at least the last token is computed"
        )
    if min_tokens < 0 or query_tokens < 0:
        raise PlanError(f"min_tokens ({min_tokens}) and query_tokens ({query_tokens}) must not be negative")
    if ntokens == 0 and not candidates:
        return BlendPlan(0, ())

    start, stop, chunk, row, source, group, group_start, exact = _best_first(ntokens, candidates)
    reuse_stop = max(ntokens - max(query_tokens, 1), 0)
    limit = np.where(exact != 0, ntokens - 1, reuse_stop)

    # Each token's owner: paint the candidates worst first, so that the best one that covers a token stays.
    owner = np.full(ntokens, -1, dtype=np.int64)
    painted = zip(range(start.size), start.tolist(), np.minimum(stop, limit).tolist(), strict=True)
    for index, begin, end in reversed(list(painted)):
        owner[begin:end] = index
    owner[:engine_prefix] = -1

    # Pieces: maximal stretches of one owner.
    cuts = np.flatnonzero(np.diff(owner)) + 1
    cuts = np.union1d(np.concatenate(([0], cuts, [ntokens])), [engine_prefix]).astype(np.int64)
    piece_start, piece_stop = cuts[:-1], cuts[1:]
    piece_owner = owner[piece_start]
    is_exact = np.append(exact != 0, False)[piece_owner]  # what nobody owns is not exact
    long_enough = _run_lengths(piece_start, piece_stop, piece_owner, group) >= min_tokens
    keep = (piece_owner >= 0) & (is_exact | long_enough)

    spans: list[Span] = []
    fresh_from = engine_prefix
    if engine_prefix:
        spans.append(Span(SpanKind.PREFIX, 0, engine_prefix))
    kept, begins, ends = piece_owner[keep], piece_start[keep], piece_stop[keep]
    moved = begins - start[kept]
    columns = (
        exact[kept], begins, ends, chunk[kept], row[kept] + moved, source[kept] + moved, group[kept], group_start[kept]
    )  # fmt: skip
    for same, begin, end, *rest in zip(*(column.tolist() for column in columns), strict=True):
        if fresh_from < begin:
            spans.append(Span(SpanKind.FRESH, fresh_from, begin))
        span = Span(SpanKind.EXACT if same else SpanKind.REUSED, begin, end, *rest)
        if spans and _continues(spans[-1], span):
            previous = spans.pop()
            span = Span(
                span.kind, previous.start, end, span.chunk, previous.row, previous.source, span.group, span.group_start
            )
        spans.append(span)
        fresh_from = end
    spans.append(Span(SpanKind.FRESH, fresh_from, ntokens))  # the last token is nobody's
    return BlendPlan(ntokens, tuple(spans))


_COLUMNS = attrgetter("start", "stop", "chunk", "row", "source", "group", "group_start", "exact")


def _best_first(ntokens: int, candidates: Sequence[Candidate]) -> Ints:
    """The candidates' fields in the order of `_COLUMNS`, ``int64[8, n]``, best candidate first, proved to be in range.

    All fields take part in the order, so equal priority means equal candidates.
    """
    table = np.array([_COLUMNS(c) for c in candidates], dtype=np.int64).reshape(len(candidates), 8).T
    start, stop, chunk, row, source, group, group_start, exact = table
    wrong = (start < 0) | (stop <= start) | (stop > ntokens) | (row < 0) | (source < 0) | (chunk < 0)
    wrong |= (group_start > start) | ((exact != 0) & (source != start))
    if np.any(wrong):
        raise PlanError(
            f"{candidates[int(np.argmax(wrong))]} does not fit a prompt of {ntokens} tokens: a candidate needs "
            "0 ≤ start < stop ≤ ntokens, chunk, row and source ≥ 0, group_start ≤ start, and source == start if exact"
        )
    order = np.lexsort((group_start, group, source, row, chunk, start, start - stop, -exact))
    return np.ascontiguousarray(table[:, order])


def _run_lengths(start: Ints, stop: Ints, owner: Ints, group: Ints) -> Ints:
    """Tokens of the run that each piece belongs to: touching pieces of one group. Pieces without an owner get 0."""
    owned = owner >= 0
    if not np.any(owned):
        return np.zeros_like(start)
    # Unowned pieces never join a run: they get a number that no neighbour has.
    groups = np.where(owned, group[owner], 0)
    new_run = np.ones(start.size, dtype=np.bool_)
    new_run[1:] = (groups[1:] != groups[:-1]) | ~owned[1:] | ~owned[:-1]
    run = np.cumsum(new_run) - 1
    lengths = np.bincount(run, weights=stop - start).astype(np.int64)
    return np.where(owned, lengths[run], 0)


def _continues(left: Span, right: Span) -> bool:
    """Whether two spans are one: the same record, rows and positions going on."""
    step = right.start - left.start
    return (
        left.kind is right.kind
        and left.stop == right.start
        and (left.chunk, left.group, left.group_start) == (right.chunk, right.group, right.group_start)
        and (left.row + step, left.source + step) == (right.row, right.source)
    )


def _span_columns(spans: Sequence[Span]) -> tuple[Ints, Ints, Ints]:
    table = np.array([(s.start, s.stop, s.kind.value) for s in spans], dtype=np.int64).reshape(len(spans), 3)
    return table[:, 0], table[:, 1], table[:, 2]
