"""Drift correction: what recomputing some tokens says about the others.

In a new context the KV of tokens moves, and similar tokens move alike. Layer by layer and head by head, the difference
of fresh and cached V, and of fresh and cached K with the rotation taken out, at the recomputed tokens is carried over
to all other reused tokens: a kernel average (Nadaraya-Watson) over the recomputed tokens s, weighted for token t by
``exp((cosine of their cached V - 1) / temperature)``, times ``elsewhere`` where s is in another document. Of the other
documents' tokens an evenly spaced sample stands for all of them, so that the cost doesn't grow with their number.
``prior`` tokens of cosine 0.5 that did not move join the average, and the result is scaled by ``strength``. With an
infinite temperature and ``elsewhere`` 0 this is the document's mean difference times ``strength * n / (n + prior)``. It
helps on top of recomputing only; docs/quality.md has what it gives.

`DriftCorrection._plain` is the reference. A GPU has kernels for it, and a CPU in float32 `blendstore._core.Drift`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .._core import Drift
from ..plan import Span
from .copies import sent
from .fused import attempt, readable, tried, usable
from .rotary import RotaryTable

if TYPE_CHECKING:
    from .triton_drift import Recomputed


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """``strength`` is the share of the average that is applied, ``temperature`` is in units of cosine, ``elsewhere``
    the weight of other documents' tokens (0: none), of which about ``sample`` are used; ``prior`` is in tokens."""

    strength: float = 0.6
    temperature: float = 0.1
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


@dataclass(slots=True)
class DriftCorrection:
    """The correction of one prompt: ``spans`` are its reused spans, ``selected`` [n] int64 the recomputed positions
    (ascending), ``groups`` [n] int64 their documents, numbered 0, 1, … as in ``numbers`` (group → number).
    ``documents`` is `documents_of` the spans; the kernels want it, and make it themselves when it isn't given."""

    settings: DriftSettings
    spans: Sequence[Span]
    selected: Tensor
    groups: Tensor
    numbers: dict[int, int]
    documents: Tensor | None = None
    _recomputed: Recomputed | None = field(init=False, default=None)
    _carrying: Drift | None = field(init=False, default=None)
    _columns: tuple[Tensor, Tensor, list[int]] | None = field(init=False, default=None)

    def apply(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        """Correct one layer's working K and V [tokens, kv_heads, dim] in place, before the fresh rows are written.

        ``fresh_k``, ``fresh_v`` [n, kv_heads, dim] belong to ``selected``."""
        if not self.selected.shape[0]:
            return
        layer = (table, k, v, fresh_k, fresh_v)
        plain = partial(self._plain, *layer)
        if not usable(k.device) and all(readable(t) for t in layer[1:]):
            tried("drift correction in Rust", k.device, partial(self._native, *layer), plain)
        else:
            attempt("drift correction", k.device, partial(self._fused, *layer), plain)

    def _fused(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        from .triton_drift import Recomputed, carry

        if self._recomputed is None:
            if self.documents is None:
                self.documents = documents_of(self.spans, self.numbers, k.shape[0], k.device)
            self._recomputed = Recomputed.of(
                self.settings, self.selected, self.groups, len(self.numbers), self.documents
            )
        carry(self.settings, table, self._recomputed, k, v, fresh_k, fresh_v)

    def _native(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        if self._carrying is None:
            columns, bias, bounds = self._columns or self._averaged()
            spans = [(span.start, span.stop, self.numbers[span.group]) for span in self.spans]
            self._carrying = Drift(
                self.selected.numpy(), columns.numpy(), bias.numpy(), np.array(bounds, dtype=np.int64),
                np.array(spans, dtype=np.int64), strength=self.settings.strength, temperature=self.settings.temperature,
                still=self.settings.still,
            )  # fmt: skip
        kept = () if table is None else table.kept(k.shape[0], k.device)
        self._carrying.carry(
            *(t.numpy() for t in (k, v, fresh_k, fresh_v, *kept)),
            interleaved=table is not None and table.pairing == "interleaved", threads=torch.get_num_threads(),
        )  # fmt: skip

    def _plain(self, table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor) -> None:
        columns, bias, bounds = self._columns or self._averaged()
        cached, before = (t.index_select(0, self.selected).float() for t in (v, k))
        moved_k, moved_v = fresh_k.float() - before, fresh_v.float() - cached
        if table is not None:
            cos, sin = (angle[:, None] for angle in table.kept(max(span.stop for span in self.spans), k.device))
            moved_k = table.rotate(moved_k, cos[self.selected], -sin[self.selected])
        alike = F.normalize(cached, dim=-1).div_(self.settings.temperature)
        # [kv_heads, columns, dim], one document's columns after the other's
        alike, moved_k, moved_v = (
            x.index_select(0, columns).transpose(0, 1).contiguous() for x in (alike, moved_k, moved_v)
        )
        still = self.settings.still
        for span in self.spans:
            number = self.numbers[span.group]
            among = slice(bounds[number], bounds[number + 1])
            if among.start == among.stop:
                continue
            here = slice(span.start, span.stop)
            # Float32 is corrected where it lies.
            new_k, new_v = k[here].float(), v[here].float()
            mine = F.normalize(new_v, dim=-1).transpose(0, 1)
            weights = torch.baddbmm(bias[among], mine, alike[:, among].mT).exp_()
            # Where all weights are 0 nothing is added.
            total = weights.sum(-1, keepdim=True).add_(still).clamp_(min=torch.finfo(torch.float32).tiny)
            weights.mul_(self.settings.strength / total)
            drift_k = torch.bmm(weights, moved_k[:, among]).transpose(0, 1)
            for head in range(v.shape[1]):
                new_v[:, head].addmm_(weights[head], moved_v[head, among])
            if table is None:
                new_k += drift_k
            else:
                table.add(new_k, drift_k, cos[here], sin[here])
            if k.dtype != torch.float32:
                k[here], v[here] = new_k, new_v

    def _averaged(self) -> tuple[Tensor, Tensor, list[int]]:
        """What is averaged over in document d: indices into ``selected``, and the logarithm of a weight but its cosine,
        both from ``bounds[d]`` to ``bounds[d + 1]`` - 1."""
        settings, n = self.settings, self.selected.shape[0]
        groups, sampled = self.groups.tolist(), settings.sampled(n)
        columns: list[int] = []
        bias: list[float] = []
        bounds = [0]
        for number in range(len(self.numbers)):
            own = [i for i, group in enumerate(groups) if group == number]
            others = [i for i in sampled if groups[i] != number]
            # Each of the sample stands for its share of all tokens of other documents.
            share = settings.elsewhere * (n - len(own)) / max(1, len(others))
            bias += [0.0] * len(own) + [math.log(share) if share else -math.inf] * len(others)
            columns += own + others
            bounds.append(len(columns))
        device = self.selected.device
        spots = torch.tensor(columns, dtype=torch.int64, device=device)
        self._columns = spots, torch.tensor(bias, device=device) - 1.0 / settings.temperature, bounds
        return self._columns


def documents_of(spans: Sequence[Span], numbers: dict[int, int], tokens: int, device: torch.device) -> Tensor:
    """[tokens] int32: the number of the document that each token of a reused span belongs to, -1 for all others."""
    out = np.full(tokens, -1, dtype=np.int32)
    for span in spans:
        out[span.start : span.stop] = numbers[span.group]
    return sent(torch.from_numpy(out), device)
