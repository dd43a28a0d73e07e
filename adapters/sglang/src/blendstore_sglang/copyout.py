"""Copies of new documents out of the engine's KV pool into reserved records, beside what the engine computes.

One launch gathers some records' rows of all layers into a staging buffer, which each record leaves in one copy, packed
before where its format isn't the engine's own. On a device the copy is to page-locked memory, and all of it is in order
on the side stream, so the next launch waits for the copies there and the host for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendstore.blend import Geometry
from blendstore.blend.copies import sent
from blendstore.blend.kept import Kept
from blendstore.blend.packing import Packing
from blendstore.blend.slots import SlotRows
from blendstore.pipeline import Writable

# Of the device's memory, or one record if that takes more.
STAGING = 128 << 20


class CopyOut:
    """``limit`` bytes may be under way at a time."""

    def __init__(self, geometry: Geometry, pool: Any, limit: int) -> None:
        self._geometry, self._limit = geometry, limit
        buffers = [(pool.get_key_buffer(i), pool.get_value_buffer(i)) for i in range(geometry.layers)]
        self.rows = SlotRows(buffers)
        self._staging: Tensor | None = None
        self._under_way = 0

    def admit(self, chunks: Sequence[Writable]) -> int | None:
        """The bytes of ``chunks``, counted until `finished` says them again; None when too much is under way."""
        nbytes = sum(chunk.stop - chunk.start for chunk in chunks) * self._geometry.bytes_per_token
        if self._under_way and self._under_way + nbytes > self._limit:
            return None
        self._under_way += nbytes
        return nbytes

    def finished(self, nbytes: int) -> None:
        """What `admit` counted has been copied."""
        self._under_way -= nbytes

    def start(self, chunks: Sequence[Writable], slots: Tensor) -> Packing[Writable]:
        """Copy on the caller's stream; ``slots`` [n] int64 are those of the prompt's first n tokens. The result says
        afterwards which records are refused."""
        records = [Kept.of(self._geometry, c.reservation.buffer(c.index), c.stop - c.start) for c in chunks]
        picked = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        slots = slots[sent(torch.from_numpy(picked), slots.device)]
        packing: Packing[Writable] = Packing(slots.device)
        begin = 0
        for part in self._parts(chunks):
            lengths = [chunk.stop - chunk.start for chunk in part]
            taken = slots[begin : begin + sum(lengths)]
            begin += sum(lengths)
            staging = self._room(self.rows.numel(sum(lengths)))
            self.rows.gather(taken, lengths, staging)
            staged = torch.split(staging, [self.rows.numel(length) for length in lengths])
            for chunk, record, source in zip(part, records[: len(part)], staged, strict=True):
                values = source.view((*record.data.shape[:-1], self._geometry.head_dim))
                packed = values.view(torch.uint8) if record.raw else packing.packed(chunk, record.packing, values)
                record.data.copy_(packed, non_blocking=True)
            del records[: len(part)]
        packing.tell()
        return packing

    def _parts(self, chunks: Sequence[Writable]) -> Iterator[list[Writable]]:
        """Chunks whose rows fit the staging buffer together."""
        part: list[Writable] = []
        tokens = 0
        for chunk in chunks:
            length = chunk.stop - chunk.start
            if part and (tokens + length) * self._geometry.bytes_per_token > STAGING:
                yield part
                part, tokens = [], 0
            part.append(chunk)
            tokens += length
        if part:
            yield part

    def _room(self, numel: int) -> Tensor:
        if self._staging is None or self._staging.shape[0] < numel:
            least = STAGING // self._geometry.dtype.itemsize
            self._staging = torch.empty(max(numel, least), dtype=self._geometry.dtype, device=self._geometry.device)
        return self._staging[:numel]
