"""Records of the store as tensors: views of leased bytes, and the writing of reserved ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core import Lease, RecordBuffer
from ..codec.formats import FORMATS, Format
from ..plan import Span
from .copies import CopyStream
from .fused import usable
from .model import Geometry
from .transfer import Piece, RecordSource, WholeRecords


class RecordError(RuntimeError):
    """A record that isn't this model's; says what it has and what it should have."""


class LeaseRecords:
    """A `RecordSource` over leases: chunk number c is hit ``where[c]`` = (lease, index). Views are zero-copy."""

    def __init__(self, geometry: Geometry, where: Sequence[tuple[Lease, int]]) -> None:
        self._geometry, self._where = geometry, where
        self._views: dict[int, Tensor] = {}

    def record(self, chunk: int) -> Tensor:
        """[layers, 2, ntokens, kv_heads, dim] of one chunk, unpacked where it isn't kept raw. Raises `LeaseExpired`,
        and `RecordError` for bytes of another shape."""
        view = self._views.get(chunk)
        if view is None:
            lease, at = self._where[chunk]
            meta = lease.meta(at)
            if meta is None:
                raise RecordError(f"the record of chunk {chunk} has no bytes any more")
            packing = format_of(self._geometry, meta.nbytes, meta.ntokens)
            view = self._views[chunk] = record_view(self._geometry, lease.buffer(at), packing)
        return view

    def layer(self, chunk: int, index: int) -> tuple[Tensor, Tensor]:
        """K and V [ntokens, kv_heads, dim] of one layer of one chunk. Raises `LeaseExpired`."""
        view = self.record(chunk)
        return view[index, 0], view[index, 1]

    def scores(self, chunk: int) -> Tensor | None:
        """Per-token scores [ntokens] float32, or None."""
        lease, at = self._where[chunk]
        found = lease.scores(at)
        return None if found is None else torch.frombuffer(bytearray(found), dtype=torch.float32)


def packed_bytes_per_token(geometry: Geometry, packing: Format) -> int:
    """Bytes of one token's K and V over all layers in a format. Raises `FormatError` for heads too small for it."""
    each = packing.head_bytes(geometry.head_dim, geometry.dtype.itemsize)
    return geometry.layers * 2 * geometry.kv_heads * each


def format_of(geometry: Geometry, nbytes: int, ntokens: int) -> Format:
    """The format of a record: no two have the same number of bytes for a token. Raises `RecordError` if it is none."""
    for packing in FORMATS.values():
        if packing.fits(geometry.head_dim) and nbytes == ntokens * packed_bytes_per_token(geometry, packing):
            return packing
    each = geometry.bytes_per_token
    raise RecordError(f"a record has {nbytes} bytes for {ntokens} tokens, but a token of this model takes {each}")


def record_view(geometry: Geometry, buffer: RecordBuffer, packing: Format | None = None) -> Tensor:
    """``[layers, 2, tokens, kv_heads, dim]`` in the engine's dtype over a record's bytes, without a copy; a new tensor
    for a record that is packed."""
    flat: Tensor = torch.utils.dlpack.from_dlpack(buffer)
    if packing is None or packing.name == "raw":
        return flat.view(geometry.dtype).view(geometry.layers, 2, -1, geometry.kv_heads, geometry.head_dim)
    each = packing.head_bytes(geometry.head_dim, geometry.dtype.itemsize)
    return packing.unpack(flat.view(geometry.layers, 2, -1, geometry.kv_heads, each), geometry.dtype)


def write_record(
    geometry: Geometry, buffer: RecordBuffer, layers: Sequence[tuple[Tensor, Tensor]], start: int, stop: int
) -> None:
    """Copy tokens ``start``..``stop`` of every layer's K and V [tokens, kv_heads, dim] into a reserved record, in the
    format that its size asks for. Raises `FormatError` for values that the format can't hold."""
    flat: Tensor = torch.utils.dlpack.from_dlpack(buffer)
    packing = format_of(geometry, flat.numel(), stop - start)
    if packing.name != "raw":
        kv = torch.stack([torch.stack([k[start:stop], v[start:stop]]) for k, v in layers])
        flat.copy_(packing.pack(kv).flatten())
        return
    target = record_view(geometry, buffer)
    for index, (k, v) in enumerate(layers):
        target[index, 0].copy_(k[start:stop])
        target[index, 1].copy_(v[start:stop])


@torch.inference_mode()
def restore(
    geometry: Geometry, records: RecordSource, spans: Sequence[Span], tokens: int, *, wait: bool = True
) -> Tensor:
    """New KV [layers, 2, tokens, kv_heads, dim] with the rows of ``spans`` copied from their records as they are; all
    other rows are uninitialised. Without ``wait`` the records are read until the device has done what the caller's
    stream holds on return."""
    shape = (geometry.layers, 2, tokens, geometry.kv_heads, geometry.head_dim)
    kv = torch.empty(shape, dtype=geometry.dtype, device=geometry.device)
    if usable(geometry.device) and isinstance(records, WholeRecords):
        copies = CopyStream(geometry.device)
        for span in spans:
            Piece.of(kv, span, records.record(span.chunk)).start(copies, 0, geometry.layers)
        copies.wait(copies.mark())
        if wait:
            copies.finish()
        return kv
    for index in range(geometry.layers):
        for span in spans:
            for part, tensor in enumerate(records.layer(span.chunk, index)):
                kv[index, part, span.start : span.stop] = tensor[span.row : span.row + len(span)]
    return kv
