"""Records of the store as tensors: views of leased bytes, and the writing of reserved ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .._core import Lease, RecordBuffer
from ..codec.formats import checked
from ..plan import Span
from .fused import usable
from .kept import Kept, RecordError
from .model import Geometry
from .streamed import KeptRecords, Streamed
from .transfer import RecordSource


class LeaseRecords:
    """A `RecordSource` over leases: chunk number c is hit ``where[c]`` = (lease, index). Views are zero-copy."""

    def __init__(self, geometry: Geometry, where: Sequence[tuple[Lease, int]]) -> None:
        self._geometry, self._where = geometry, where
        self._kept: dict[int, Kept] = {}
        self._values: dict[int, Tensor] = {}

    def kept(self, chunk: int) -> Kept:
        """One chunk's record. Raises `LeaseExpired`, and `RecordError` for bytes of another shape."""
        found = self._kept.get(chunk)
        if found is None:
            lease, at = self._where[chunk]
            meta = lease.meta(at)
            if meta is None:
                raise RecordError(f"the record of chunk {chunk} has no bytes any more")
            found = self._kept[chunk] = Kept.of(self._geometry, lease.buffer(at), meta.ntokens)
        return found

    def layer(self, chunk: int, index: int) -> tuple[Tensor, Tensor]:
        """K and V [ntokens, kv_heads, dim] of one layer of one chunk, unpacked where it isn't kept raw. Raises as
        `kept`."""
        values = self._values.get(chunk)
        if values is None:
            values = self._values[chunk] = self.kept(chunk).values(self._geometry)
        return values[index, 0], values[index, 1]

    def scores(self, chunk: int) -> Tensor | None:
        """Per-token scores [ntokens] float32, or None."""
        lease, at = self._where[chunk]
        found = lease.scores(at)
        return None if found is None else torch.frombuffer(bytearray(found), dtype=torch.float32)


def write_record(
    geometry: Geometry, buffer: RecordBuffer, layers: Sequence[tuple[Tensor, Tensor]], start: int, stop: int
) -> None:
    """Copy tokens ``start``..``stop`` of every layer's K and V [tokens, kv_heads, dim] into a reserved record, in the
    format that its size asks for. Raises `FormatError` for values that the format can't hold."""
    record = Kept.of(geometry, buffer, stop - start)
    if not record.raw:
        kv = torch.stack([torch.stack([k[start:stop], v[start:stop]]) for k, v in layers])
        record.data.copy_(checked(record.packing, kv))
        return
    for target, (k, v) in zip(record.values(geometry), layers, strict=True):
        target[0].copy_(k[start:stop])
        target[1].copy_(v[start:stop])


@torch.inference_mode()
def restore(
    geometry: Geometry, records: RecordSource, spans: Sequence[Span], tokens: int, *, wait: bool = True
) -> Tensor:
    """New KV [layers, 2, tokens, kv_heads, dim] with the rows of ``spans`` copied from their records as they are; all
    other rows are uninitialised. Without ``wait`` the records are read until the device has done what the caller's
    stream holds on return."""
    shape = (geometry.layers, 2, tokens, geometry.kv_heads, geometry.head_dim)
    kv = torch.empty(shape, dtype=geometry.dtype, device=geometry.device)
    if usable(geometry.device) and isinstance(records, KeptRecords):
        still = [replace(span, source=span.start) for span in spans]
        packed = not all(records.kept(span.chunk).raw for span in spans)
        # Packed records are staged a few layers at a time, raw ones copied at once.
        streamed = Streamed(geometry, kv, still, records, layerwise=packed)
        streamed.bring(geometry.layers - 1)
        streamed.close(wait=wait)
        return kv
    for index in range(geometry.layers):
        for span in spans:
            for part, tensor in enumerate(records.layer(span.chunk, index)):
                kv[index, part, span.start : span.stop] = tensor[span.row : span.row + len(span)]
    return kv
