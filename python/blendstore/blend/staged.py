"""Packed rows on a device: copied there as they are, a few layers at a time, and unpacked into the working KV.

Whole records are copied, also for spans of some of their rows: scales of ``int4`` keys are spread over groups of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..codec.formats import GROUP
from ..plan import Ints, Span
from .copies import CopyStream, sent
from .fused import attempt
from .kept import Kept
from .model import Geometry


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one record: addresses in layer 0 on both sides, bytes from K to V and on to the next layer, and bytes of
    the rows. The target has room for ``room`` layers, and layer i takes the place of layer i - room."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    room: int

    @classmethod
    def of(cls, target: Tensor, start: int, source: Tensor, row: int, count: int) -> Piece:
        """``count`` rows from ``row`` on of ``source``, to the rows from ``start`` on of ``target``; both are uint8
        [layers, 2, tokens, kv_heads, bytes]."""
        token = source.stride(2)
        return cls(
            target.data_ptr() + start * token,
            target.stride(1),
            source.data_ptr() + row * token,
            source.stride(1),
            count * token,
            target.shape[0],
        )

    def start(self, copies: CopyStream, first: int, count: int) -> None:
        """Start copying the rows of ``count`` layers from layer ``first`` on: one call, where they don't wrap."""
        while count:
            place = first % self.room
            now = min(count, self.room - place)
            target, source = self.target + 2 * place * self.target_pitch, self.source + 2 * first * self.source_pitch
            copies.rows(target, self.target_pitch, source, self.source_pitch, self.width, 2 * now)
            first, count = first + now, count - now


class Staged:
    """Spans of packed records of one format, with a staging buffer for ``room`` layers of them."""

    def __init__(self, geometry: Geometry, spans: Sequence[Span], held: Mapping[int, Kept], room: int) -> None:
        self._dtype, self._spans = geometry.dtype, spans
        records = {span.chunk: held[span.chunk] for span in spans}
        self._packing = next(iter(records.values())).packing
        self._begin: dict[int, int] = {}
        self._length = {chunk: record.data.shape[2] for chunk, record in records.items()}
        tokens = 0
        for chunk, length in self._length.items():
            self._begin[chunk] = tokens
            tokens += length
        each = next(iter(records.values())).data.shape[-1]
        shape = (room, 2, tokens, geometry.kv_heads, each)
        self._buffer = torch.empty(shape, dtype=torch.uint8, device=geometry.device)
        self._pieces = [
            Piece.of(self._buffer, self._begin[chunk], record.data, 0, self._length[chunk])
            for chunk, record in records.items()
        ]
        self._rows = sent(torch.from_numpy(self._placed().astype(np.int32)), geometry.device)

    def start(self, copies: CopyStream, first: int, count: int) -> None:
        """Start copying ``count`` layers from layer ``first`` on."""
        for piece in self._pieces:
            piece.start(copies, first, count)

    def unpack(self, index: int, kv: Tensor) -> None:
        """Fill the spans' rows of ``kv`` [2, tokens, kv_heads, dim], K and V of layer ``index``, on the caller's
        stream."""
        staged = self._buffer[index % self._buffer.shape[0]]

        def kernel() -> None:
            from .triton_formats import unpack

            unpack(self._packing.name, staged, kv, self._rows)

        def plain() -> None:
            for span in self._spans:
                begin = self._begin[span.chunk]
                record = staged[:, begin : begin + self._length[span.chunk]]
                rows = slice(span.row, span.row + len(span))
                kv[:, span.start : span.stop] = self._packing.unpack(record, self._dtype, rows)

        attempt("unpacking", kv.device, kernel, plain)

    def _placed(self) -> Ints:
        """[3, rows]: for each row of the spans its row in the working KV, its row in the buffer, and the first row
        there of the group that its keys share scales with, or -1."""
        spans = self._spans
        target, source, within = rows_of(
            spans, [s.start for s in spans], [self._begin[s.chunk] + s.row for s in spans], [s.row for s in spans]
        )
        whole = np.repeat([self._length[s.chunk] // GROUP * GROUP for s in spans], [len(s) for s in spans])
        group = np.where(within < whole, source - within % GROUP, -1)
        placed: Ints = np.stack([target, source, group])
        return placed


def rows_of(spans: Sequence[Span], *firsts: Sequence[int]) -> Ints:
    """``int64[len(firsts), rows]``: for the rows of all ``spans`` each of these numbers of their spans, counted up
    within the span. By numpy, because torch would wake its threads, which takes milliseconds on a busy host."""
    lengths = np.array([len(span) for span in spans], dtype=np.int64)
    within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    rows: Ints = np.repeat(np.array(firsts, dtype=np.int64), lengths, axis=1) + within
    return rows
