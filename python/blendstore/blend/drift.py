"""Drift correction: what recomputing some tokens says about the others.

In a new context the KV of tokens moves, and similar tokens move alike. Layer by layer and head by head, the difference
of fresh and cached V, and of fresh and cached K with the rotation taken out, at the recomputed tokens is carried over
to all other reused tokens: a kernel average (Nadaraya-Watson) over the recomputed tokens s, weighted for token t by
``exp((likeness - 1) / temperature)``, times ``elsewhere`` where s is in another document. Of the other documents'
tokens an evenly spaced sample stands for all of them, and where a document has more than `OWN` itself, so many of its
own: the cost doesn't grow with their number. ``prior`` tokens of likeness 0.5 that did not move join the average, and
the result is scaled by ``strength``.

The likeness of two tokens is the mean cosine of their cached V over all heads of the second half of the layers, or of
eight to fifteen of those, evenly spaced: late layers know best what kind of token it is, and one set of weights serves
every layer. Where the layers come one after the other, every fourth one's own V says it for four. With an infinite
temperature and ``elsewhere`` 0 this is the document's mean difference times ``strength * n / (n + prior)``. It helps on
top of recomputing only; docs/quality.md has what it gives.

`DriftCorrection._plain` is the reference, and what a CPU uses; a GPU has kernels for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..plan import Span
from .copies import sent
from .fused import attempt, usable
from .rotary import RotaryTable

PADDING = 64
"""The kernels' blocks of columns: for them own and sampled columns are padded to a multiple."""
OWN = 512
"""Own columns of a document at most."""


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """``strength`` is the share of the average that is applied, ``temperature`` is in units of cosine, ``elsewhere``
    the weight of other documents' tokens (0: none), of which about ``sample`` are used; ``prior`` is in tokens."""

    strength: float = 0.6
    temperature: float = 0.12
    elsewhere: float = 0.3
    sample: int = 64
    prior: float = 1.0

    @property
    def still(self) -> float:
        """The weight of the tokens that did not move."""
        return self.prior * math.exp(-0.5 / self.temperature)

    def sampled(self, n: int) -> range:
        """Which of ``n`` recomputed tokens stand for all of them in other documents."""
        step = max(1, -(-n // max(1, self.sample)))
        return range(step // 2, n, step) if self.elsewhere else range(0)


@dataclass(frozen=True, slots=True)
class Documents:
    """The reused spans of a prompt by document: ``spans``, and ``places`` with each one's document (0, 1, …) and its
    first row in it; ``rows`` [documents, most] int32 are the documents' positions, -1 behind the last of its
    ``lengths``."""

    spans: Sequence[Span]
    places: Sequence[tuple[int, int]]
    lengths: Sequence[int]
    rows: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], numbers: dict[int, int], device: torch.device) -> Documents:
        """``numbers``: group → number."""
        lengths = [0] * len(numbers)
        places = []
        for span in spans:
            number = numbers[span.group]
            places.append((number, lengths[number]))
            lengths[number] += len(span)
        rows = np.full((len(numbers), max(lengths, default=0)), -1, dtype=np.int32)
        for span, (number, begin) in zip(spans, places, strict=True):
            rows[number, begin : begin + len(span)] = np.arange(span.start, span.stop)
        return cls(spans, places, lengths, sent(torch.from_numpy(rows), device))


@dataclass(frozen=True, slots=True)
class Columns:
    """What is averaged over in each document: ``index`` [documents, columns] int64 into the recomputed tokens, the own
    ones in the first ``own`` columns and the sample behind; ``bias`` float32, alike, is the logarithm of a weight but
    for its likeness, -inf for none. ``counts`` [documents] int32: own ones."""

    index: Tensor
    bias: Tensor
    counts: Tensor
    own: int

    @classmethod
    def of(cls, settings: DriftSettings, groups: Tensor, documents: Documents) -> Columns:
        """``groups`` [n] int64 are the recomputed tokens' documents. On a device this waits for nothing."""
        n, device = groups.shape[0], groups.device
        number = torch.arange(documents.rows.shape[0] + 1, device=device)
        ordered = groups.sort(stable=True)
        bounds = torch.searchsorted(ordered.values, number)
        counts = bounds.diff()
        number = number[:-1, None]
        if usable(device):
            own, padding = -(-min(n, documents.rows.shape[1], OWN) // PADDING) * PADDING, PADDING
        else:
            own, padding = min(int(counts.max()), OWN), 1
        most = min(own, OWN)
        mine = torch.arange(own, device=device)
        spread = torch.where(counts[:, None] > most, mine * counts[:, None] // most, mine)
        picked = settings.sampled(n)
        room = -(-len(picked) // padding) * padding
        sample = torch.arange(picked.start, picked.start + room * picked.step, picked.step, device=device)
        real, sample = sample < n, sample.clamp(max=n - 1)
        others = (groups[sample] != number) & real
        # Each of the sample stands for its share of all tokens of other documents.
        share = settings.elsewhere * (n - counts[:, None]) / others.sum(1, keepdim=True).clamp(min=1)
        each = counts[:, None].clamp(min=most) / most
        own_bias = each.log().expand(-1, own).masked_fill(mine >= counts[:, None].clamp(max=most), -torch.inf)
        index = torch.cat(
            [
                ordered.indices[(bounds[:-1, None] + spread).clamp(max=n - 1)],
                sample.expand(documents.rows.shape[0], -1),
            ],
            1,
        )
        bias = torch.cat([own_bias, share.log().expand_as(others).masked_fill(~others, -torch.inf)], 1)
        return cls(index, bias, counts.clamp(max=most).int(), own)


def likeness(
    values: Iterable[Tensor],
    documents: Documents,
    columns: Tensor,
    reduce: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Mean cosine of V over ``values``, layers of [tokens, kv_heads, dim], and all heads: [documents, rows, columns]
    float32 between the documents' rows and the tokens at ``columns`` [documents, columns], which are positions.
    ``reduce`` sums over ranks, each of which has some of the heads."""
    rows = documents.rows.clamp(min=0)
    total = torch.zeros(rows.shape[0], rows.shape[1], columns.shape[1], device=rows.device)
    # Few launches where documents are alike in length, no work for what isn't there where they are not.
    alike_in_length = rows.numel() <= 2 * sum(documents.lengths)
    heads = 0
    for v in values:
        alike = F.normalize(v.float(), dim=-1).flatten(1)
        # On a device products of the cache's dtype are many times as fast, and as good: a thousand terms each.
        alike = alike.to(v.dtype) if v.is_cuda else alike
        heads += v.shape[1]
        if alike_in_length:
            total += alike[rows] @ alike[columns].mT
            continue
        for number, length in enumerate(documents.lengths):
            total[number, :length] += alike[rows[number, :length]] @ alike[columns[number]].mT
    return reduce(total).div_(reduce(total.new_full((1,), heads)))


@dataclass(slots=True)
class DriftCorrection:
    """The correction of one prompt. ``selected`` [n] int64 are the recomputed positions (ascending), at least one, and
    ``groups`` [n] int64 their documents; ``reduce`` as in `likeness`."""

    settings: DriftSettings
    documents: Documents
    selected: Tensor
    groups: InitVar[Tensor]
    reduce: Callable[[Tensor], Tensor] = lambda x: x
    columns: Columns = field(init=False)
    weights: Tensor = field(init=False)
    """[documents, rows, columns] float32 with the strength in them, once `weigh` has been called."""
    _narrow: Tensor | None = field(init=False, default=None)

    def __post_init__(self, groups: Tensor) -> None:
        self.columns = Columns.of(self.settings, groups, self.documents)

    def weigh(self, values: Iterable[Tensor]) -> None:
        """Weights for the layers to come, from cached V as in `likeness`."""
        alike = likeness(values, self.documents, self.selected[self.columns.index], self.reduce)
        weights = alike.sub_(1).div_(self.settings.temperature).add_(self.columns.bias[:, None]).exp_()
        # Where all weights are 0 nothing is added.
        total = weights.sum(-1, keepdim=True).add_(self.settings.still).clamp_(min=torch.finfo(torch.float32).tiny)
        self.weights, self._narrow = weights.mul_(self.settings.strength / total), None

    def apply(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        """Correct one layer's working K and V [tokens, kv_heads, dim] in place, before the fresh rows are written.

        ``fresh_k``, ``fresh_v`` [n, kv_heads, dim] belong to ``selected``."""
        layer = (table, k, v, fresh_k, fresh_v)
        attempt("drift correction", k.device, partial(self._fused, *layer), partial(self._plain, *layer))

    def _fused(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        from .triton_drift import carry

        if self._narrow is None:
            self._narrow = self.weights.to(v.dtype)
        carry(table, self._narrow, self.documents.rows, self.columns, self.selected, k, v, fresh_k, fresh_v)

    def _plain(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        before_k, before_v = (cached.index_select(0, self.selected).float() for cached in (k, v))
        moved_k, moved_v = fresh_k.float() - before_k, fresh_v.float() - before_v
        if table is not None:
            cos, sin = (angle[:, None] for angle in table.kept(k.shape[0], k.device))
            moved_k = table.rotate(moved_k, cos[self.selected], -sin[self.selected])
        moved = torch.cat([moved_k.flatten(1), moved_v.flatten(1)], 1)
        said = [moved.index_select(0, index) for index in self.columns.index]
        for span, (number, begin) in zip(self.documents.spans, self.documents.places, strict=True):
            here = slice(span.start, span.stop)
            drift = self.weights[number, begin : begin + len(span)] @ said[number]
            drift_k, drift_v = (part.view(len(span), *k.shape[1:]) for part in drift.chunk(2, 1))
            v[here] = v[here].float().add_(drift_v)
            new_k = k[here].float()
            if table is None:
                new_k += drift_k
            else:
                table.add(new_k, drift_k, cos[here], sin[here])
            if k.dtype != torch.float32:  # or it was corrected where it lies
                k[here] = new_k
