"""Drift correction: what recomputing some of a document's tokens says about the others.

In a new context the KV of a document's tokens moves partly together. Layer by layer, the mean difference of fresh and
cached V, and of fresh and cached K with the rotation taken out, over a document's n recomputed tokens is added to its
other tokens, shrunk by ``strength * n / (n + prior)``. Measured in docs/benchmarks.md; it helps on top of recomputing
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plan import Span
from .fused import attempt
from .rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """``strength`` is the share of the mean difference that is applied; ``prior`` is in tokens."""

    strength: float = 0.5
    prior: float = 8.0


@dataclass(slots=True)
class DriftCorrection:
    """The correction of one prompt: ``spans`` are its reused spans, ``selected`` [n] int64 the recomputed positions
    (ascending), ``groups`` [n] int64 their documents, numbered 0..``documents``-1 as in ``numbers`` (group →
    number). ``documents`` [tokens] int32 has every token's document, or -1 where it isn't reused; the kernels want it,
    and make it themselves when it isn't given."""

    settings: DriftSettings
    spans: Sequence[Span]
    selected: Tensor
    groups: Tensor
    numbers: dict[int, int]
    documents: Tensor | None = None
    _rows: tuple[Tensor, Tensor] | None = field(init=False, default=None)
    _weights: Tensor = field(init=False)
    _angles: dict[int, tuple[tuple[Tensor, Tensor], list[tuple[Tensor, Tensor]]]] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        counts = torch.zeros(len(self.numbers), device=self.selected.device)
        counts.index_add_(0, self.groups, torch.ones_like(self.groups, dtype=torch.float32))
        shrink = self.settings.strength * counts / (counts + self.settings.prior)
        self._weights = (shrink / counts.clamp(min=1.0))[:, None, None]

    def apply(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        """Correct one layer's working K and V [tokens, kv_heads, dim] in place, before the fresh rows are written.

        ``fresh_k``, ``fresh_v`` [n, kv_heads, dim] belong to ``selected``."""
        if not self.selected.shape[0]:
            return
        attempt(
            "drift correction",
            k.device,
            lambda: self._fused(table, k, v, fresh_k, fresh_v),
            lambda: self._plain(table, k, v, fresh_k, fresh_v),
        )

    def _fused(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        from .triton_rows import add, difference

        if self._rows is None:
            order = self.groups.sort(stable=True)
            edges = torch.arange(len(self.numbers) + 1, device=k.device)
            self._rows = order.indices, torch.searchsorted(order.values, edges)
        if self.documents is None:
            self.documents = documents_of(self.spans, self.numbers, k.shape[0], k.device)
        total = difference(table, k, v, fresh_k, fresh_v, self.selected, *self._rows, k.shape[0])
        add(table, k, v, self.documents, total * self._weights)

    def _plain(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        drift_v = self._mean((fresh_v - v[self.selected]).float())
        drift_k = (fresh_k - k[self.selected]).float()
        if table is not None:
            (cos, sin), _ = self._turns(table)
            drift_k = table.rotate(drift_k, cos, -sin)
        drift_k = self._mean(drift_k)
        for place, span in enumerate(self.spans):
            number = self.numbers[span.group]
            v[span.start : span.stop] += drift_v[number].to(v.dtype)
            moved = drift_k[number][None]
            if table is not None:
                cos, sin = self._turns(table)[1][place]
                room = moved.new_empty(len(span), *moved.shape[1:])
                moved = table.rotate(moved.expand_as(room), cos, sin, out=room)
            k[span.start : span.stop] += moved.to(k.dtype)

    def _mean(self, difference: Tensor) -> Tensor:
        total = difference.new_zeros(len(self.numbers), *difference.shape[1:])
        return total.index_add_(0, self.groups, difference) * self._weights

    def _turns(self, table: RotaryTable) -> tuple[tuple[Tensor, Tensor], list[tuple[Tensor, Tensor]]]:
        found = self._angles.get(id(table))
        if found is None:
            device = self.selected.device
            stop = max(span.stop for span in self.spans)
            cos, sin = (t.to(device) for t in table.angles(torch.arange(stop)))
            spans = [(cos[s.start : s.stop], sin[s.start : s.stop]) for s in self.spans]
            found = self._angles[id(table)] = ((cos[self.selected], sin[self.selected]), spans)
        return found


def documents_of(spans: Sequence[Span], numbers: dict[int, int], tokens: int, device: torch.device) -> Tensor:
    """[tokens] int32: the number of the document that each token of a reused span belongs to, -1 for all others."""
    out = torch.full((tokens,), -1, dtype=torch.int32)
    for span in spans:
        out[span.start : span.stop] = numbers[span.group]
    return out.to(device)
