"""Records on their way to a device, which copies them by itself several layers ahead of what computes.

Raw rows go straight to their places in the working KV. Packed ones go to a staging buffer as they are, and are unpacked
into their places in one launch a layer; keys are turned where they lie in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..plan import Span
from .copies import CopyStream, sent
from .fused import attempt
from .kept import Kept
from .model import Geometry
from .rotary import RotaryTable
from .staged import Piece, Staged, rows_of

# Copies are started this many layers ahead of the layer that is asked for, of the first layers fewer: starting them
# takes the host a while, and until the first layer is there the device has nothing to compute.
_AHEAD = 8
# Layers of one copy: fewer calls against a later start.
_TOGETHER = 2
# Layers that staging buffers have room for. No copy waits for a layer that isn't brought yet, and none is cut in two.
_STAGED = _AHEAD + 2 * _TOGETHER


@runtime_checkable
class KeptRecords(Protocol):
    """Records that lie in host memory, so that a device can copy them by itself."""

    def kept(self, chunk: int) -> Kept:
        """One chunk's record."""


class Streamed:
    """Copies that the device makes by itself, several layers ahead; keys are turned where they lie, in one launch a
    layer. Layers are brought in their order."""

    def __init__(
        self, geometry: Geometry, data: Tensor, cached: Sequence[Span], records: KeptRecords, *, layerwise: bool
    ) -> None:
        self._geometry, self._data = geometry, data
        self._layerwise = layerwise
        self._held = {chunk: records.kept(chunk) for chunk in {span.chunk for span in cached}}
        raw = [span for span in cached if self._held[span.chunk].raw]
        rows = data.view(torch.uint8)
        self._pieces = [Piece.of(rows, span.start, self._held[span.chunk].data, span.row, len(span)) for span in raw]
        # One format but for records of another configuration, from a tier below.
        by_format: dict[str, list[Span]] = {}
        for span in cached:
            if not self._held[span.chunk].raw:
                by_format.setdefault(self._held[span.chunk].packing.name, []).append(span)
        layers = min(geometry.layers, _STAGED) if layerwise else geometry.layers
        self._staged = [Staged(geometry, spans, self._held, layers) for spans in by_format.values()]
        self._room = layers if self._staged else geometry.layers
        moved = [span for span in cached if span.source != span.start]
        places = rows_of(moved, [span.start for span in moved], [span.source for span in moved])
        self._stop = int(places.max()) + 1 if moved else 0
        self._rows, self._sources = sent(torch.from_numpy(places.astype(np.int32)), geometry.device)
        for table in tables_of(geometry):
            table.kept(max(self._stop, data.shape[2]), geometry.device)
        self._copies = CopyStream(geometry.device)
        self._marks: list[torch.cuda.Event | None] = []
        self._read: list[torch.cuda.Event | None] = []
        """When each layer that was brought has left the staging buffers."""

    def bring(self, index: int) -> None:
        ahead = min(2 * index, _AHEAD) if self._layerwise else self._geometry.layers
        while len(self._read) <= index:
            layer = len(self._read)
            self._start(min(layer + 1 + ahead, self._geometry.layers))
            self._copies.wait(self._marks[layer if self._layerwise else -1])
            for staged in self._staged:
                staged.unpack(layer, self._data[layer])
            self._read.append(self._copies.now() if self._staged else None)
            table = self._geometry.rotary[layer]
            if table is not None and self._stop:
                k = self._data[layer, 0]
                attempt("rotation", k.device, partial(self._turn, table, k), partial(self._turn_plainly, table, k))

    def close(self, *, wait: bool) -> None:
        if wait:
            self._copies.finish()
        self._held.clear()

    def _start(self, stop: int) -> None:
        """Start the copies of all layers below ``stop``."""
        layers = self._geometry.layers
        while (first := len(self._marks)) < stop:
            count = min(_TOGETHER if self._layerwise else layers, layers - first)
            for piece in self._pieces:
                piece.start(self._copies, first, count)
            if first + count > self._room:
                self._copies.after(self._read[first + count - self._room - 1])
            for staged in self._staged:
                staged.start(self._copies, first, count)
            self._marks += [self._copies.mark()] * count

    def _turn(self, table: RotaryTable, k: Tensor) -> None:
        from .triton_rows import turn

        turn(table, k, self._rows, self._sources, self._stop)

    def _turn_plainly(self, table: RotaryTable, k: Tensor) -> None:
        rows, sources = self._rows.long(), self._sources.long()
        cos, sin = (t.to(k.device) for t in table.between(sources, rows))
        k[rows] = table.rotate(k[rows], cos, sin)


def tables_of(geometry: Geometry) -> list[RotaryTable]:
    """The tables of all layers, each once."""
    return list({id(t): t for t in geometry.rotary if t is not None}.values())
