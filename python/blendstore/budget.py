"""How long a blend may hold an engine's scheduler: an estimate from past blends, and plans cut to fit.

Only numbers here: no tensors, no store, no engine.
"""

from __future__ import annotations

from dataclasses import replace

from .plan import BlendPlan, Span, SpanKind

TAIL = 32
"""Fresh tokens that a cut plan keeps behind its last cached one: selectors need rows that ask."""
_CACHED = (SpanKind.EXACT, SpanKind.REUSED)


def head(plan: BlendPlan, stop: int) -> BlendPlan:
    """The plan of the first ``stop`` tokens; what is cached in the last one is computed."""
    return BlendPlan(stop, tuple(_upto(plan, stop, stop - 1)))


def computed_from(plan: BlendPlan, start: int) -> BlendPlan:
    """The same prompt with everything from token ``start`` on computed."""
    return BlendPlan(plan.ntokens, tuple(_upto(plan, plan.ntokens, start)))


def rows(plan: BlendPlan, ratio: float, *, whole_layers: float = 0.0) -> float:
    """Rows that a blend sends through the model: fresh ones and recomputed ones, and all others through the share
    ``whole_layers`` of its layers (what a selector by deviation needs)."""
    recomputed = ratio * plan.context
    return plan.fresh + recomputed + whole_layers * max(plan.context - recomputed, 0.0)


class Budget:
    """Milliseconds that one blend may take, and what blends were seen to take: a fixed part and a part for each row."""

    def __init__(self, milliseconds: float) -> None:
        """0 is no limit."""
        self._limit = milliseconds
        self._fixed, self._each = 0.0, 0.0

    def calibrate(self, few: tuple[float, float], many: tuple[float, float]) -> None:
        """From two measurements (rows, milliseconds)."""
        self._each = max((many[1] - few[1]) / (many[0] - few[0]), 0.0)
        self._fixed = max(few[1] - self._each * few[0], 0.0)

    def observe(self, rows: float, milliseconds: float) -> None:
        """Follow the measurements slowly: a single slow blend moves the estimate by a fifth."""
        expected = self.estimate(rows)
        if expected <= 0:
            self._each = milliseconds / max(rows, 1.0)
            return
        scale = 1.0 + 0.2 * (milliseconds / expected - 1.0)
        self._fixed, self._each = self._fixed * scale, self._each * scale

    def estimate(self, rows: float) -> float:
        """Milliseconds; 0 as long as nothing was measured."""
        return self._fixed + self._each * rows

    def fit(self, plan: BlendPlan, ratio: float, *, whole_layers: float = 0.0) -> int:
        """How many leading tokens of ``plan`` may be blended: all of them, or up to `TAIL` tokens behind the last
        cached span that fits, or 0."""

        def fits(part: BlendPlan) -> bool:
            return not self._limit or self.estimate(rows(part, ratio, whole_layers=whole_layers)) <= self._limit

        if fits(plan):
            return plan.ntokens
        ends = [span.stop for span in plan.spans if span.kind in _CACHED]
        low, high = 0, len(ends)  # the first `low` ends fit
        while low < high:
            middle = (low + high + 1) // 2
            if fits(head(plan, min(ends[middle - 1] + TAIL, plan.ntokens))):
                low = middle
            else:
                high = middle - 1
        return min(ends[low - 1] + TAIL, plan.ntokens) if low else 0


def _upto(plan: BlendPlan, ntokens: int, start: int) -> list[Span]:
    """Spans of ``ntokens`` tokens, everything from ``start`` on fresh."""
    out = [replace(span, stop=min(span.stop, start)) for span in plan.spans if span.start < start]
    if out and out[-1].kind is SpanKind.FRESH:
        start = out.pop().start
    if start < ntokens:
        out.append(Span(SpanKind.FRESH, start, ntokens))
    return out
