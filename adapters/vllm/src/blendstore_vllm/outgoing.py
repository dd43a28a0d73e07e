"""Copies of new documents out of the engine's cache into reserved records, beside what the engine computes.

On a device they are gathered into staging memory by the engine's own stream, so that the blocks may be written again by
whatever comes next, and leave from there on a stream of their own. The host waits for nothing; where too much is staged
the engine's stream waits for the oldest copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from blendstore.blend import Geometry
from blendstore.blend.copies import CopyStream
from blendstore.blend.records import record_view
from blendstore.pipeline import Writable

from .layout import PagedKV

STAGED = 2 << 30
"""Bytes of the device's memory that may wait to be copied; what is gathered at once is a quarter of it at most."""


class Outgoing:
    """The copies of one worker."""

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        self._geometry, self._kv = geometry, kv
        self._staged: deque[tuple[Any, Tensor]] = deque()

    def send(self, chunks: Sequence[Writable], slots: Tensor) -> Any:
        """Start copying; ``slots`` [n] int64 are those of the prompt's first n tokens. Returns the event after which
        the chunks are filled, or None when they are. If it raises, nothing is written to them any more."""
        records = [record_view(self._geometry, chunk.reservation.buffer(chunk.index)) for chunk in chunks]
        if self._geometry.device.type != "cuda":
            for chunk, record in zip(chunks, records, strict=True):
                self._kv.copy_out(slots[chunk.start : chunk.stop], record)
            return None
        event = None
        try:
            for part in self._parts(chunks):
                event = self.gathered(part, records[: len(part)], slots)
                del records[: len(part)]
        except BaseException:
            torch.cuda.synchronize(self._geometry.device)
            raise
        return event

    def gathered(self, chunks: Sequence[Writable], records: Sequence[Tensor], slots: Tensor) -> Any:
        """Copy ``chunks`` to their ``records`` through staging memory; returns the event, or None on a CPU."""
        geometry = self._geometry
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        count, row = sum(lengths), geometry.kv_heads * geometry.head_dim * geometry.dtype.itemsize
        self._make_room(count * geometry.bytes_per_token)
        staged = torch.empty(
            (geometry.layers, 2, count, geometry.kv_heads, geometry.head_dim), dtype=geometry.dtype, device=slots.device
        )
        self._kv.copy_out(torch.cat([slots[chunk.start : chunk.stop] for chunk in chunks]), staged)
        copies = CopyStream(slots.device)
        at = staged.data_ptr()
        for length, record in zip(lengths, records, strict=True):
            width = length * row
            copies.rows(record.data_ptr(), width, at, count * row, width, 2 * geometry.layers)
            at += width
        event = copies.mark()
        if event is not None:
            self._staged.append((event, staged))
        return event

    def _make_room(self, nbytes: int) -> None:
        held = sum(staged.nbytes for _, staged in self._staged)
        while self._staged:
            event, staged = self._staged[0]
            if not event.query():
                if held + nbytes <= STAGED:
                    return
                torch.cuda.current_stream(staged.device).wait_event(event)
            held -= staged.nbytes
            self._staged.popleft()

    def _parts(self, chunks: Sequence[Writable]) -> Iterator[list[Writable]]:
        """Chunks that are gathered together."""
        part: list[Writable] = []
        tokens = 0
        for chunk in chunks:
            length = chunk.stop - chunk.start
            if part and (tokens + length) * self._geometry.bytes_per_token > STAGED // 4:
                yield part
                part, tokens = [], 0
            part.append(chunk)
            tokens += length
        if part:
            yield part
