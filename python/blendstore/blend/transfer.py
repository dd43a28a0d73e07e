"""Brings records into the working KV layer by layer, rotated to their new positions."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from ..plan import BlendPlan, Span, SpanKind
from .model import EngineModel
from .rotary import RotaryTable


class RecordSource(Protocol):
    """The records of one plan's chunks."""

    def layer(self, chunk: int, index: int) -> tuple[Tensor, Tensor]:
        """K and V [ntokens, kv_heads, dim] of one layer of one chunk, as the engine wrote them."""

    def scores(self, chunk: int) -> Tensor | None:
        """Per-token scores [ntokens] float32 kept with the chunk, or None."""


class WorkingKV:
    """K and V of every prompt token, [tokens, kv_heads, dim] a layer, in the engine's dtype on its device.

    Layer i's cached rows are filled on the first ``ready(i)``, and its fresh rows are zero until they are written: a
    masked key counts for nothing only while it is finite. With ``layerwise`` the rows of layer i+1 are brought in by
    a thread of its own while layer i computes.
    """

    def __init__(self, model: EngineModel, plan: BlendPlan, records: RecordSource, *, layerwise: bool) -> None:
        geometry = model.geometry
        self._model, self._records, self._geometry = model, records, geometry
        shape = (geometry.layers, 2, plan.ntokens, geometry.kv_heads, geometry.head_dim)
        self.data = torch.empty(shape, dtype=geometry.dtype, device=geometry.device)
        self._prefix = plan.prefix
        self._fresh = [slice(s.start, s.stop) for s in plan.spans if s.kind is SpanKind.FRESH]
        self._cached = [s for s in plan.spans if s.kind in (SpanKind.EXACT, SpanKind.REUSED)]
        self._rotations: dict[int, list[tuple[Span, Tensor, Tensor]]] = {}
        for table in {id(t): t for t in geometry.rotary if t is not None}.values():
            self._rotations[id(table)] = _rotations(table, self._cached, geometry.device)
        self._loaded = [False] * geometry.layers
        self._pool = ThreadPoolExecutor(1, "blendstore-load") if layerwise and self._cached else None
        self._next: tuple[int, Future[None]] | None = None

    def ready(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of layer ``index``, cached rows in place."""
        if not self._loaded[index]:
            if self._next is not None and self._next[0] == index:
                self._next[1].result()
            else:
                self._load(index)
            self._loaded[index] = True
            follower = index + 1
            if self._pool is not None and follower < self._geometry.layers and not self._loaded[follower]:
                self._next = (follower, self._pool.submit(self._load, follower))
        return self.data[index, 0], self.data[index, 1]

    def close(self) -> None:
        """Wait for the loading thread; the records may be released afterwards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _load(self, index: int) -> None:
        with torch.inference_mode():
            k, v = self.data[index, 0], self.data[index, 1]
            if self._prefix:
                k[: self._prefix], v[: self._prefix] = self._model.read_slots(index, self._prefix)
            for rows in self._fresh:
                self.data[index, :, rows].zero_()
            table = self._geometry.rotary[index]
            moved = self._rotations[id(table)] if table is not None else []
            turns = {span.start: (cos, sin) for span, cos, sin in moved}
            for span in self._cached:
                rows = slice(span.row, span.row + span.stop - span.start)
                source_k, source_v = (t[rows] for t in self._records.layer(span.chunk, index))
                v[span.start : span.stop].copy_(source_v)
                turn = turns.get(span.start)
                if turn is None or table is None:
                    k[span.start : span.stop].copy_(source_k)
                else:
                    cos, sin = turn
                    table.rotate(source_k.to(k.device), cos, sin, out=k[span.start : span.stop])


def _rotations(table: RotaryTable, spans: Sequence[Span], device: torch.device) -> list[tuple[Span, Tensor, Tensor]]:
    """(span, cos, sin) of every span that stands elsewhere than where it was captured."""
    moved = [span for span in spans if span.source != span.start]
    if not moved:
        return []
    source, target = (
        torch.cat([torch.arange(at, at + len(span)) for span, at in zip(moved, starts, strict=True)])
        for starts in ([span.source for span in moved], [span.start for span in moved])
    )
    cos, sin = (torch.split(t.to(device), [len(span) for span in moved]) for t in table.between(source, target))
    return list(zip(moved, cos, sin, strict=True))
