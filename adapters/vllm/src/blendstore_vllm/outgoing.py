"""Copies of new documents out of the engine's cache into reserved records, beside what the engine computes.

They are gathered into staging memory, and packed where the records want it, by the engine's own stream, so that the
blocks may be written again by whatever comes next, and leave from there on a stream of their own. The host waits for
nothing; where too much is staged the engine's stream waits for the oldest copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from blendstore.blend import Geometry
from blendstore.blend.copies import CopyStream
from blendstore.blend.kept import Kept
from blendstore.blend.packing import Packing
from blendstore.blend.staged import Piece
from blendstore.pipeline import Writable

from .layout import PagedKV

STAGED = 2 << 30
"""Bytes of the device's memory that may wait to be copied; what is gathered at once is a quarter of it at most."""


class Outgoing:
    """The copies of one worker."""

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        self._geometry, self._kv = geometry, kv
        self._staged: deque[tuple[Any, int, list[Tensor]]] = deque()
        """What is being copied until each event, and the bytes that are held for it."""

    def send(self, chunks: Sequence[Writable], slots: Tensor) -> tuple[Any, Packing[Writable]]:
        """Start copying; ``slots`` [n] int64 are those of the prompt's first n tokens. Returns the event after which
        the chunks are filled, or None when they are, and what says then which of them are refused. If it raises,
        nothing is written to them any more."""
        records = [Kept.of(self._geometry, c.reservation.buffer(c.index), c.stop - c.start) for c in chunks]
        packing: Packing[Writable] = Packing(slots.device)
        copies = CopyStream(slots.device)
        try:
            for part in self._parts(chunks):
                self._start(part, records[: len(part)], slots, packing, copies)
                del records[: len(part)]
            packing.tell()
            copies.after(copies.now())
            event = copies.mark()
        except BaseException:
            if self._geometry.device.type == "cuda":
                torch.cuda.synchronize(self._geometry.device)
            raise
        return event, packing

    def _start(
        self,
        chunks: Sequence[Writable],
        records: Sequence[Kept],
        slots: Tensor,
        packing: Packing[Writable],
        copies: CopyStream,
    ) -> None:
        """Start copying ``chunks`` to their ``records`` through staging memory."""
        geometry = self._geometry
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        count = sum(lengths)
        self._make_room(count * geometry.bytes_per_token)
        staged = torch.empty(
            (geometry.layers, 2, count, geometry.kv_heads, geometry.head_dim), dtype=geometry.dtype, device=slots.device
        )
        self._kv.copy_out(torch.cat([slots[chunk.start : chunk.stop] for chunk in chunks]), staged)
        sources = [
            values.view(torch.uint8) if record.raw else packing.packed(chunk, record.packing, values)
            for chunk, record, values in zip(chunks, records, torch.split(staged, lengths, 2), strict=True)
        ]
        copies.after(copies.now())
        for length, record, source in zip(lengths, records, sources, strict=True):
            Piece.of(record.data, 0, source, 0, length).start(copies, 0, geometry.layers)
        event = copies.mark()
        if event is not None:
            # Raw sources are parts of what was gathered; what was packed of it has left it on this stream.
            storages = {source.untyped_storage().data_ptr(): source.untyped_storage().nbytes() for source in sources}
            self._staged.append((event, sum(storages.values()), sources))

    def _make_room(self, nbytes: int) -> None:
        held = sum(each for _, each, _ in self._staged)
        while self._staged:
            event, each, _ = self._staged[0]
            if not event.query():
                if held + nbytes <= STAGED:
                    return
                torch.cuda.current_stream(self._geometry.device).wait_event(event)
            held -= each
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
