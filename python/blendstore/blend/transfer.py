"""Brings records into the working KV layer by layer, rotated to their new positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..plan import BlendPlan, Ints, Span, SpanKind
from .blocks import uninitialised
from .copies import CopyStream, sent
from .fused import attempt, usable
from .model import EngineModel, Geometry
from .rotary import RotaryTable

# Copies are started this many layers ahead of the layer that is asked for, of the first layers fewer: starting them
# takes the host a while, and until the first layer is there the device has nothing to compute.
_AHEAD = 8
# Layers of one copy: fewer calls against a later start.
_TOGETHER = 2


class RecordSource(Protocol):
    """The records of one plan's chunks."""

    def layer(self, chunk: int, index: int) -> tuple[Tensor, Tensor]:
        """K and V [ntokens, kv_heads, dim] of one layer of one chunk, as the engine wrote them."""

    def scores(self, chunk: int) -> Tensor | None:
        """Per-token scores [ntokens] float32 kept with the chunk, or None."""


@runtime_checkable
class WholeRecords(Protocol):
    """Records that lie in host memory as the engine wrote them, so that a device can copy them by itself."""

    def record(self, chunk: int) -> Tensor:
        """[layers, 2, ntokens, kv_heads, dim] in the engine's dtype, contiguous."""


class Loader(Protocol):
    """Fills the cached rows of the working KV."""

    def load(self, index: int) -> None:
        """Make layer ``index`` valid for what the caller's stream does next."""

    def close(self, *, wait: bool) -> None:
        """With ``wait`` the records may be released afterwards, otherwise when the copies are done."""


class WorkingKV:
    """K and V of every prompt token, [tokens, kv_heads, dim] a layer, in the engine's dtype on its device.

    Layer i's cached rows are valid from the first ``ready(i)`` on, and its fresh rows are zero until they are written:
    a masked key counts for nothing only while it is finite. Where the device copies by itself, ``layerwise`` brings
    later layers in while earlier ones compute; otherwise all are there before the first.
    """

    def __init__(self, model: EngineModel, plan: BlendPlan, records: RecordSource, *, layerwise: bool) -> None:
        geometry = model.geometry
        self._model, self._prefix = model, plan.prefix
        shape = (geometry.layers, 2, plan.ntokens, geometry.kv_heads, geometry.head_dim)
        self.data = uninitialised(shape, geometry.dtype, geometry.device)
        fresh = sent(torch.from_numpy(plan.positions(SpanKind.FRESH)), geometry.device)
        self.data.index_fill_(2, fresh, 0)
        cached = [s for s in plan.spans if s.kind in (SpanKind.EXACT, SpanKind.REUSED)]
        self._loader: Loader
        if usable(geometry.device) and isinstance(records, WholeRecords):
            self._loader = _Streamed(geometry, self.data, cached, records, layerwise=layerwise)
        else:
            self._loader = _Direct(geometry, self.data, cached, records)
        self._ready = [False] * geometry.layers

    def ready(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of layer ``index``, cached rows in place."""
        k, v = self.data[index, 0], self.data[index, 1]
        if not self._ready[index]:
            self._loader.load(index)
            if self._prefix:
                k[: self._prefix], v[: self._prefix] = self._model.read_slots(index, self._prefix)
            self._ready[index] = True
        return k, v

    def close(self, *, wait: bool = True) -> None:
        """Wait for what is under way: the records may be released afterwards. Without ``wait`` they may be when the
        copies are done, which the caller's stream waits for where it was given the layers."""
        self._loader.close(wait=wait)


class _Direct:
    """Rows of one layer after the other, by the caller's stream: the reference, and what a CPU uses."""

    def __init__(self, geometry: Geometry, data: Tensor, cached: Sequence[Span], records: RecordSource) -> None:
        self._geometry, self._data, self._cached, self._records = geometry, data, cached, records
        self._turns = {
            id(table): {span.start: (cos, sin) for span, cos, sin in _rotations(table, cached, geometry.device)}
            for table in _tables(geometry)
        }

    def load(self, index: int) -> None:
        k, v = self._data[index, 0], self._data[index, 1]
        table = self._geometry.rotary[index]
        turns = {} if table is None else self._turns[id(table)]
        for span in self._cached:
            rows = slice(span.row, span.row + len(span))
            source_k, source_v = (t[rows] for t in self._records.layer(span.chunk, index))
            v[span.start : span.stop].copy_(source_v)
            turn = turns.get(span.start)
            if turn is None or table is None:
                k[span.start : span.stop].copy_(source_k)
            else:
                table.rotate(source_k.to(k.device), *turn, out=k[span.start : span.stop])

    def close(self, *, wait: bool) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one span: addresses in layer 0 of the working KV and of the record, bytes from K to V and on to the next
    layer on both sides, and bytes of the rows."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int

    @classmethod
    def of(cls, data: Tensor, span: Span, record: Tensor) -> Piece:
        """Of ``data`` [layers, 2, tokens, kv_heads, dim] and ``record`` [layers, 2, ntokens, kv_heads, dim]."""
        token, size = data.stride(2) * data.element_size(), data.element_size()
        return cls(
            data.data_ptr() + span.start * token,
            data.stride(1) * size,
            record.data_ptr() + span.row * token,
            record.stride(1) * size,
            len(span) * token,
        )

    def start(self, copies: CopyStream, first: int, count: int) -> None:
        """Start copying the rows of ``count`` layers from layer ``first`` on: one call."""
        target, source = self.target + 2 * first * self.target_pitch, self.source + 2 * first * self.source_pitch
        copies.rows(target, self.target_pitch, source, self.source_pitch, self.width, 2 * count)


class _Streamed:
    """Copies that the device makes by itself, several layers ahead; keys are turned where they lie, in one launch a
    layer."""

    def __init__(
        self, geometry: Geometry, data: Tensor, cached: Sequence[Span], records: WholeRecords, *, layerwise: bool
    ) -> None:
        self._geometry, self._data = geometry, data
        self._layerwise = layerwise
        self._held = {chunk: records.record(chunk) for chunk in {span.chunk for span in cached}}
        self._pieces = [Piece.of(data, span, self._held[span.chunk]) for span in cached]
        moved = [span for span in cached if span.source != span.start]
        places = rows_of(moved, [span.start for span in moved], [span.source for span in moved])
        self._stop = int(places.max()) + 1 if moved else 0
        self._rows, self._sources = sent(torch.from_numpy(places.astype(np.int32)), geometry.device)
        for table in _tables(geometry):
            table.kept(max(self._stop, data.shape[2]), geometry.device)
        self._copies = CopyStream(geometry.device)
        self._marks: list[torch.cuda.Event | None] = []
        self._started = 0

    def load(self, index: int) -> None:
        ahead = min(2 * index, _AHEAD) if self._layerwise else self._geometry.layers
        self._start(min(index + 1 + ahead, self._geometry.layers))
        self._copies.wait(self._marks[index if self._layerwise else -1])
        table = self._geometry.rotary[index]
        if table is not None and self._stop:
            k = self._data[index, 0]
            attempt("rotation", k.device, lambda: self._turn(table, k), lambda: self._turn_plainly(table, k))

    def close(self, *, wait: bool) -> None:
        if wait:
            self._copies.finish()
        self._held.clear()

    def _start(self, stop: int) -> None:
        """Start the copies of all layers below ``stop``."""
        while self._started < stop:
            first, count = self._started, min(_TOGETHER, self._geometry.layers - self._started)
            for piece in self._pieces:
                piece.start(self._copies, first, count)
            self._marks += [self._copies.mark()] * count
            self._started += count

    def _turn(self, table: RotaryTable, k: Tensor) -> None:
        from .triton_rows import turn

        turn(table, k, self._rows, self._sources, self._stop)

    def _turn_plainly(self, table: RotaryTable, k: Tensor) -> None:
        rows, sources = self._rows.long(), self._sources.long()
        cos, sin = (t.to(k.device) for t in table.between(sources, rows))
        k[rows] = table.rotate(k[rows], cos, sin)


def _tables(geometry: Geometry) -> list[RotaryTable]:
    return list({id(t): t for t in geometry.rotary if t is not None}.values())


def _rotations(table: RotaryTable, spans: Sequence[Span], device: torch.device) -> list[tuple[Span, Tensor, Tensor]]:
    """(span, cos, sin) of every span that stands elsewhere than where it was captured."""
    moved = [span for span in spans if span.source != span.start]
    if not moved:
        return []
    target, source = torch.from_numpy(rows_of(moved, [span.start for span in moved], [span.source for span in moved]))
    cos, sin = (torch.split(t.to(device), [len(span) for span in moved]) for t in table.between(source, target))
    return list(zip(moved, cos, sin, strict=True))


def rows_of(spans: Sequence[Span], *firsts: Sequence[int]) -> Ints:
    """``int64[len(firsts), rows]``: for the rows of all ``spans`` each of these numbers of their spans, counted up
    within the span. By numpy, because torch would wake its threads, which takes milliseconds on a busy host."""
    lengths = np.array([len(span) for span in spans], dtype=np.int64)
    within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    rows: Ints = np.repeat(np.array(firsts, dtype=np.int64), lengths, axis=1) + within
    return rows
