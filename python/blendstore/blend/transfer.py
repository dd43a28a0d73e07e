"""Brings records into the working KV layer by layer, rotated to their new positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .._core import place_rows
from ..plan import BlendPlan, Span, SpanKind
from .blocks import uninitialised
from .copies import sent
from .fused import readable, tried, usable
from .model import EngineModel, Geometry
from .rotary import RotaryTable
from .staged import rows_of
from .streamed import KeptRecords, Streamed, tables_of


class RecordSource(Protocol):
    """The records of one plan's chunks."""

    def layer(self, chunk: int, index: int) -> tuple[Tensor, Tensor]:
        """K and V [ntokens, kv_heads, dim] of one layer of one chunk, as the engine wrote them."""

    def scores(self, chunk: int) -> Tensor | None:
        """Per-token scores [ntokens] float32 kept with the chunk, or None."""


class Loader(Protocol):
    """Fills the cached rows of the working KV."""

    def bring(self, index: int) -> None:
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
        if usable(geometry.device) and isinstance(records, KeptRecords):
            self._loader = Streamed(geometry, self.data, cached, records, layerwise=layerwise)
        else:
            self._loader = _Direct(geometry, self.data, cached, records)
        self._ready = [False] * geometry.layers

    def ready(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of layer ``index``, cached rows in place."""
        k, v = self.data[index, 0], self.data[index, 1]
        if not self._ready[index]:
            self._loader.bring(index)
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
            for table in tables_of(geometry)
        }

    def bring(self, index: int) -> None:
        k, v = self._data[index, 0], self._data[index, 1]
        table = self._geometry.rotary[index]
        turns = {} if table is None else self._turns[id(table)]
        for span in self._cached:
            rows, here = slice(span.row, span.row + len(span)), slice(span.start, span.stop)
            source_k, source_v = (t[rows] for t in self._records.layer(span.chunk, index))
            moved = (k[here], v[here], source_k, source_v, table, turns.get(span.start))
            if all(readable(t) for t in moved[:4]):
                tried("copies of rows in Rust", k.device, partial(_place_in_rust, *moved), partial(_place, *moved))
            else:
                _place(*moved)

    def close(self, *, wait: bool) -> None:
        pass


Turn = tuple[Tensor, Tensor]
"""(cos, sin) [n, 1, pairs] float32 of a span that stands elsewhere than where it was captured."""


def _place(
    k: Tensor, v: Tensor, source_k: Tensor, source_v: Tensor, table: RotaryTable | None, turn: Turn | None
) -> None:
    v.copy_(source_v)
    if turn is None or table is None:
        k.copy_(source_k)
    else:
        table.rotate(source_k.to(k.device), *turn, out=k)


def _place_in_rust(
    k: Tensor, v: Tensor, source_k: Tensor, source_v: Tensor, table: RotaryTable | None, turn: Turn | None
) -> None:
    angles = () if turn is None else (angle[:, 0].numpy() for angle in turn)
    place_rows(
        *(t.numpy() for t in (k, v, source_k, source_v)), *angles,
        interleaved=table is not None and table.pairing == "interleaved", threads=torch.get_num_threads(),
    )  # fmt: skip


def _rotations(table: RotaryTable, spans: Sequence[Span], device: torch.device) -> list[tuple[Span, Tensor, Tensor]]:
    """(span, cos, sin) of every span that stands elsewhere than where it was captured."""
    moved = [span for span in spans if span.source != span.start]
    if not moved:
        return []
    target, source = torch.from_numpy(rows_of(moved, [span.start for span in moved], [span.source for span in moved]))
    cos, sin = (torch.split(t.to(device), [len(span) for span in moved]) for t in table.between(source, target))
    return list(zip(moved, cos, sin, strict=True))
