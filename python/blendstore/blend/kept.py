"""A record as it lies in memory, and which of the formats its size says it is in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._core import RecordBuffer
from ..codec.formats import FORMATS, Format
from .model import Geometry


class RecordError(RuntimeError):
    """A record that isn't this model's; says what it has and what it should have."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A record as it lies in memory: ``data`` is uint8 [layers, 2, ntokens, kv_heads, bytes of the format]."""

    packing: Format
    data: Tensor

    @classmethod
    def of(cls, geometry: Geometry, buffer: RecordBuffer, ntokens: int) -> Kept:
        """Of leased or reserved bytes, without a copy. Raises `RecordError` for bytes of no format."""
        flat: Tensor = torch.utils.dlpack.from_dlpack(buffer)
        packing = format_of(geometry, flat.numel(), ntokens)
        return cls(packing, flat.view(geometry.layers, 2, ntokens, geometry.kv_heads, -1))

    @property
    def raw(self) -> bool:
        """Whether these are the engine's own elements."""
        return self.packing.name == "raw"

    def values(self, geometry: Geometry) -> Tensor:
        """[layers, 2, ntokens, kv_heads, dim] in the engine's dtype: the same memory where it is `raw`, else a new
        tensor."""
        return self.packing.unpack(self.data, geometry.dtype)


def packed_bytes_per_token(geometry: Geometry, packing: Format) -> int:
    """Bytes of one token's K and V over all layers in a format. Raises `FormatError` for heads too small for it."""
    each = packing.head_bytes(geometry.head_dim, geometry.dtype.itemsize)
    return geometry.layers * 2 * geometry.kv_heads * each


def bytes_in_format(geometry: Geometry, name: str) -> int | None:
    """Bytes of one token in the format ``name``; None for heads too small for it."""
    packing = FORMATS[name]
    return packed_bytes_per_token(geometry, packing) if packing.fits(geometry.head_dim) else None


def format_of(geometry: Geometry, nbytes: int, ntokens: int) -> Format:
    """The format of a record: no two have the same number of bytes for a token. Raises `RecordError` if it is none."""
    for packing in FORMATS.values():
        if packing.fits(geometry.head_dim) and nbytes == ntokens * packed_bytes_per_token(geometry, packing):
            return packing
    each = geometry.bytes_per_token
    raise RecordError(f"a record has {nbytes} bytes for {ntokens} tokens, but a token of this model takes {each}")
