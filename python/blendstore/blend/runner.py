"""Runs one plan over the engine's layers: cached KV comes in layer by layer, a selector picks tokens, and those, with
the fresh ones, go through the engine's own modules with position-exact attention.

Afterwards every layer holds valid K and V for every token of the plan. Nothing here waits for the host inside the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..plan import BlendPlan, SpanKind
from .attention import RowAttention
from .copies import sent
from .drift import Documents, DriftCorrection, DriftSettings
from .model import EngineModel
from .selectors import Candidates, Combine, OptionValue, Reduce, SelectorSettings, make_selector
from .staged import rows_of
from .transfer import RecordSource, WorkingKV


@dataclass(frozen=True, slots=True)
class BlendSettings:
    """How one prompt is blended. ``ratios`` are shares of the context; the last one is the final share."""

    selector: str = "query"
    ratios: tuple[float, ...] = (0.15,)
    check_layers: tuple[int, ...] = (1,)
    thresholds: tuple[float, ...] | None = None
    options: dict[str, OptionValue] = field(default_factory=dict)
    drift: DriftSettings | None = field(default_factory=DriftSettings)
    layerwise: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BlendResult:
    """``kv`` [layers, 2, tokens, kv_heads, dim]; ``state`` of the prompt's last tokens at the output of the last layer;
    ``selected`` [m] int64 positions that were recomputed though they were cached."""

    kv: Tensor
    state: Any
    selected: Tensor

    @property
    def recomputed(self) -> int:
        """Cached tokens that were recomputed."""
        return self.selected.shape[0]


class BlendRunner:
    """Blends prompts with one engine model. Thread-safe as far as the model is."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model

    @torch.inference_mode()
    def run(
        self,
        ids: Tensor,
        plan: BlendPlan,
        records: RecordSource,
        settings: BlendSettings,
        *,
        outputs: int = 1,
        wait: bool = True,
    ) -> BlendResult:
        """``ids`` [tokens] int64. The state of the last ``outputs`` of the fresh tokens comes back; of all others the
        last layer computes K and V only. Errors of records or model pass through: the caller falls back to the engine.

        Without ``wait`` the records are read until the device has done what the caller's stream holds on return."""
        if ids.shape != (plan.ntokens,):
            raise ValueError(f"plan of {plan.ntokens} tokens, but ids have shape {tuple(ids.shape)}")
        kv = WorkingKV(self._model, plan, records, layerwise=settings.layerwise)
        ran = False
        try:
            run = _Run(self._model, ids, plan, records, kv)
            selected = run.candidates.positions[:0]
            if len(run.candidates) and run.budget(settings.ratios[-1]):
                selector = make_selector(
                    settings.selector,
                    SelectorSettings(
                        settings.check_layers, settings.ratios, settings.thresholds, settings.options, settings.seed
                    ),
                )
                chosen = selector.select(run, settings.ratios[-1]).sort().values
                selected = run.candidates.positions[chosen]
                state = run.finish(chosen, settings.drift, outputs)
            else:
                state = run.finish(selected, None, outputs)
            ran = True
        finally:
            # The stream waits for the copies of every layer that it went through.
            kv.close(wait=wait or not ran)
        return BlendResult(kv.data, state, selected)


Before = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``before(k, v, fresh_k, fresh_v)`` runs ahead of the writing of fresh rows."""


class _Enough(Exception):
    """Leaves a layer once what was wanted of it is known."""


class _Flow:
    """Rows on their way through the layers: ``state`` is at the input of layer ``layer``."""

    def __init__(self, model: EngineModel, ids: Tensor, positions: Tensor, hidden_keys: Tensor | None = None) -> None:
        self.model, self.positions, self.layer = model, positions, 0
        self.state = model.embed(ids[positions])
        self._nkeys, self._hidden = ids.shape[0], hidden_keys
        self.attention = RowAttention(positions, self._nkeys, hidden_keys)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows (ascending indices) only."""
        self.positions, self.state = self.positions[rows], self.model.rows(self.state, rows)
        self.attention = RowAttention(self.positions, self._nkeys, self._hidden)

    def step(
        self,
        kv: WorkingKV,
        before: Before | None = None,
        attention: Callable[..., Tensor] | None = None,
    ) -> None:
        """One layer: fresh K and V of the rows are written to ``kv``, then they attend. ``attention`` takes the place
        of `RowAttention.__call__`."""
        index = self.layer
        k, v = kv.ready(index)
        window = self.model.geometry.windows[index]

        def attend(
            q: Tensor, fresh_k: Tensor, fresh_v: Tensor, *, scale: float, softcap: float | None = None
        ) -> Tensor:
            if before is not None:
                before(k, v, fresh_k, fresh_v)
            k.index_copy_(0, self.positions, fresh_k)
            v.index_copy_(0, self.positions, fresh_v)
            return (attention or self.attention)(q, k, v, scale=scale, window=window, softcap=softcap)

        self.state = self.model.layer(index, self.state, self.positions, attend)
        self.layer += 1

    def last(self, kv: WorkingKV, before: Before | None, outputs: int) -> None:
        """The last layer: K and V of all rows as in `step`, the state of the last ``outputs`` ones only."""
        n = self.positions.shape[0]
        if outputs < n:
            k, v = kv.ready(self.layer)
            fresh_k, fresh_v = self.fresh()
            if before is not None:
                before(k, v, fresh_k, fresh_v)
            k.index_copy_(0, self.positions, fresh_k)
            v.index_copy_(0, self.positions, fresh_v)
            self.keep(torch.arange(n - outputs, n, device=self.positions.device))
            before = None
        self.step(kv, before)

    def fresh(self) -> tuple[Tensor, Tensor]:
        """Fresh K and V [n, kv_heads, dim] of the rows at the current layer, without running it."""
        seen: list[tuple[Tensor, Tensor]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
            seen.append((k, v))
            raise _Enough

        try:
            self.model.layer(self.layer, self.state, self.positions, attend)
        except _Enough:
            return seen[0]
        raise RuntimeError(f"layer {self.layer} of the engine never called the attention it was given")


class _Run:
    """State of one prompt; what selectors see of it is `SelectionRun`."""

    def __init__(self, model: EngineModel, ids: Tensor, plan: BlendPlan, records: RecordSource, kv: WorkingKV) -> None:
        self._model, self._ids, self._plan, self._kv = model, ids, plan, kv
        self._device = model.geometry.device
        self._fresh = sent(torch.from_numpy(plan.positions(SpanKind.FRESH)), self._device)
        self._spans = [s for s in plan.spans if s.kind is SpanKind.REUSED]
        self._flow: _Flow | None = None
        self._whole = False
        """Every layer's cached rows are there: the selector has looked at them."""
        self.candidates = self._gather(records)

    @property
    def layers(self) -> int:
        return self._model.geometry.layers

    def budget(self, ratio: float) -> int:
        return min(len(self.candidates), round(ratio * self._plan.context))

    def attention(self, *, rows: int, reduce: Reduce, combine: Combine, first_layer: int) -> Tensor:
        query, hidden = self._question(rows)
        flow = _Flow(self._model, self._ids, query, hidden if hidden.shape[0] else None)
        total = torch.zeros(self._plan.ntokens, device=self._device)
        scored = partial(flow.attention.scored, reduce=reduce, square=combine == "rms", into=total)

        def enough(*qkv: Tensor, **how: Any) -> Tensor:
            scored(*qkv, **how)
            raise _Enough

        with suppress(_Enough):
            while flow.layer < self.layers:
                wanted = enough if flow.layer == self.layers - 1 else scored
                flow.step(self._kv, attention=wanted if flow.layer >= first_layer else None)
        self._whole = True
        scores = self._model.all_reduce(total[self.candidates.positions] / max(1, self.layers - first_layer))
        return scores.sqrt() if combine == "rms" else scores

    def deviation(self, layer: int) -> Tensor:
        if not 1 <= layer < self.layers:
            raise ValueError(f"check layer {layer}: use 1..{self.layers - 1}")
        if self._flow is None:
            rows = torch.cat([self.candidates.positions, self._fresh]).sort().values
            self._flow = _Flow(self._model, self._ids, rows)
        flow = self._flow
        while flow.layer < layer:
            flow.step(self._kv)
        fresh = flow.fresh()[0][torch.searchsorted(flow.positions, self.candidates.positions)]
        cached, _ = self._kv.ready(layer)
        difference = fresh.float() - cached[self.candidates.positions].float()
        return self._model.all_reduce(difference.square().sum((1, 2)))

    def keep(self, index: Tensor) -> None:
        index = index.sort().values
        self.candidates = self.candidates.subset(index)
        if self._flow is not None:
            rows = torch.cat([self.candidates.positions, self._fresh]).sort().values
            self._flow.keep(torch.searchsorted(self._flow.positions, rows))

    def finish(self, chosen: Tensor, drift: DriftSettings | None, outputs: int) -> Any:
        """Run the chosen candidates (ascending indices) and the fresh rows through the remaining layers; the state of
        the last ``outputs`` rows."""
        self.keep(chosen)
        selected = self.candidates.positions
        if self._flow is None:
            self._flow = _Flow(self._model, self._ids, torch.cat([selected, self._fresh]).sort().values)
        flow = self._flow
        correction = None
        if drift is not None and chosen.shape[0]:
            correction = self._correction(drift, selected)
            where, first = torch.searchsorted(flow.positions, selected), max(flow.layer, 1)

        while flow.layer < self.layers:
            before = None
            # Layer 0 depends on the token and its position alone: rotated KV is exact there.
            if correction is not None and flow.layer > 0:
                table = self._model.geometry.rotary[flow.layer]
                renew = not self._whole and (flow.layer - first) % 4 == 0

                def before(
                    k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor, table: Any = table, renew: bool = renew
                ) -> None:
                    if renew:
                        correction.weigh([v])
                    correction.apply(table, k, v, fresh_k.index_select(0, where), fresh_v.index_select(0, where))

            if flow.layer == self.layers - 1:
                flow.last(self._kv, before, outputs)
            else:
                flow.step(self._kv, before)
        return flow.state

    def _correction(self, drift: DriftSettings, selected: Tensor) -> DriftCorrection:
        known = sorted({span.group for span in self._spans})
        documents = Documents.of(self._spans, {group: at for at, group in enumerate(known)}, self._device)
        groups = torch.searchsorted(sent(torch.tensor(known), self._device), self.candidates.group)
        correction = DriftCorrection(drift, documents, selected, groups, self._model.all_reduce)
        if self._whole:
            late = range(self.layers // 2, self.layers)
            correction.weigh(self._kv.ready(index)[1] for index in late[:: max(1, len(late) // 8)])
        return correction

    def _question(self, rows: int) -> tuple[Tensor, Tensor]:
        """Positions of the last ``rows`` tokens of the fresh tail, and of the fresh tokens that are not among them."""
        tail = self._plan.spans[-1]
        start = max(tail.start, tail.stop - rows)
        query = torch.arange(start, tail.stop, device=self._device)
        return query, self._fresh[: self._fresh.shape[0] - query.shape[0]]

    def _gather(self, records: RecordSource) -> Candidates:
        if not self._spans:
            empty = torch.empty(0, dtype=torch.int64, device=self._device)
            return Candidates(empty, empty, empty, None)
        positions, distance = rows_of(
            self._spans, [span.start for span in self._spans], [span.start - span.group_start for span in self._spans]
        )
        group = np.repeat([span.group for span in self._spans], [len(span) for span in self._spans])
        cat = sent(torch.from_numpy(np.stack([positions, distance, group])), self._device)
        # Each rank's records have the scores of its own heads; all ranks must select by the same ones.
        stored = self._stored(records)
        kept = None if stored is None else self._model.all_reduce(sent(stored, self._device))
        return Candidates(cat[0], cat[1], cat[2], kept)

    def _stored(self, records: RecordSource) -> Tensor | None:
        """Scores kept with the records, [candidates] float32 with NaN where a record has none; None where none has."""
        found = {span.chunk: records.scores(span.chunk) for span in self._spans}
        if all(scores is None for scores in found.values()):
            return None
        parts = []
        for span in self._spans:
            scores = found[span.chunk]
            rows = slice(span.row, span.row + len(span))
            parts.append(torch.full((len(span),), torch.nan) if scores is None else scores[rows].float().cpu())
        return torch.cat(parts)
