"""Formats of records in memory: fewer bits an element, so that the same memory holds two to four times the documents.

A format keeps ``[layers, 2, tokens, kv_heads, dim]`` of the engine's dtype as ``[layers, 2, tokens, kv_heads, bytes]``,
the same number of bytes for every token, however many there are. So the store's arithmetic holds, and a kernel that
gathers rows of a token finds everything it needs to dequantise them:

- ``int8``: ``dim`` signed bytes and the head's scale (float16), for keys and for values: ``x = scale · q``;
- ``int4`` values: ``dim / 2`` bytes, element i in the lower and element ``i + dim/2`` in the upper half of byte i, then
  scale and minimum (float16) of every 32 elements: ``x = minimum + scale · q``;
- ``int4`` keys: the same bytes, but scale and minimum belong to a channel in a group of 32 tokens: token t of a group
  carries those of the channels ``t, t + 32, …``. The tokens behind the last whole group are kept like values.

Rows of values that aren't finite can't be kept so: `holds` tells, `checked` refuses them, and the record is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

GROUP = 32
"""Tokens whose keys share scales, in ``int4``."""
_SMALLEST = 16  # elements of a head, below which scales take more than they save
TINY, LARGEST = 6e-8, 65_000.0
"""The smallest scale, about the smallest float16 above zero, and the largest value: what rounding of scales adds to it
is still a float16."""
WRONG = "keys or values that aren't finite, or are too large for a float16 scale"


class FormatError(ValueError):
    """Values that a format can't hold, or bytes that aren't of the format."""


class Format(Protocol):
    """One way of keeping records."""

    @property
    def name(self) -> str:
        """As in the configuration, and in the namespace of records in this format."""

    def fits(self, dim: int) -> bool:
        """Whether heads of ``dim`` elements can be kept so. A format must differ from the others in size."""

    def head_bytes(self, dim: int, itemsize: int) -> int:
        """Bytes of one head's keys or values of one token, from elements of ``itemsize`` bytes."""

    def pack(self, kv: Tensor) -> Tensor:
        """``[layers, 2, tokens, kv_heads, dim]`` to uint8 ``[layers, 2, tokens, kv_heads, head_bytes]``, contiguous.
        Values that the format doesn't hold (`holds`) become any others."""

    def unpack(self, packed: Tensor, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Back to ``[…, rows, kv_heads, dim]`` in ``dtype``, of any number of layers."""


@dataclass(frozen=True, slots=True)
class Raw:
    """The engine's own elements."""

    name: str = "raw"

    def fits(self, dim: int) -> bool:
        return True

    def head_bytes(self, dim: int, itemsize: int) -> int:
        return dim * itemsize

    def pack(self, kv: Tensor) -> Tensor:
        return kv.contiguous().view(torch.uint8)

    def unpack(self, packed: Tensor, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        return packed.view(dtype)[..., rows, :, :]


@dataclass(frozen=True, slots=True)
class Int8:
    """A byte an element, a scale for each head of each token."""

    name: str = "int8"

    def fits(self, dim: int) -> bool:
        return dim >= _SMALLEST and dim % 2 == 0

    def head_bytes(self, dim: int, itemsize: int) -> int:
        return dim + 2

    def pack(self, kv: Tensor) -> Tensor:
        x = kv.float()
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(TINY).half()
        q = (x / scale.float()).round().clamp_(-127, 127).to(torch.int8)
        return torch.cat([q.view(torch.uint8), scale.view(torch.uint8)], -1)

    def unpack(self, packed: Tensor, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        packed = packed[..., rows, :, :]
        scale = packed[..., -2:].contiguous().view(torch.float16).float()
        return (packed[..., :-2].view(torch.int8).float() * scale).to(dtype)


@dataclass(frozen=True, slots=True)
class Int4:
    """Half a byte an element: keys by channel in groups of tokens, values by token."""

    name: str = "int4"

    def fits(self, dim: int) -> bool:
        # Behind the halves of bytes there are float16, which devices read at even addresses only.
        return dim >= _SMALLEST and dim % 4 == 0

    def head_bytes(self, dim: int, itemsize: int) -> int:
        return dim // 2 + 4 * _pairs(dim)

    def pack(self, kv: Tensor) -> Tensor:
        layers, _, tokens, heads, dim = kv.shape
        whole = tokens // GROUP * GROUP
        pairs = _pairs(dim)
        x: Any = kv.float()
        out = torch.zeros(layers, 2, tokens, heads, self.head_bytes(dim, 0), dtype=torch.uint8, device=kv.device)
        parts = [_quarter(part, -1) for part in x.split(GROUP, -1)]
        out[..., : dim // 2] = _halves(torch.cat([q for q, _, _ in parts], -1))
        ends = torch.cat([end for _, scale, low in parts for end in (scale, low)], -1)
        out[..., dim // 2 :] = ends.view(torch.uint8)
        if whole:
            keys = x[:, 0, :whole].unflatten(1, (-1, GROUP))  # [layers, groups, GROUP, heads, dim]
            q, scale, low = _quarter(keys, 2)
            out[:, 0, :whole, :, : dim // 2] = _halves(q).flatten(1, 2)
            ends = torch.stack([scale, low], -1)[:, :, 0]  # [layers, groups, heads, dim, 2]
            padded: Any = torch.zeros(*ends.shape[:3], GROUP * pairs, 2, dtype=torch.float16, device=kv.device)
            padded[..., :dim, :] = ends
            # Channel c is with token c mod GROUP of the group, as its pair number c / GROUP.
            spread = padded.unflatten(3, (pairs, GROUP)).permute(0, 1, 4, 2, 3, 5).flatten(1, 2).flatten(-2)
            out[:, 0, :whole, :, dim // 2 :] = spread.contiguous().view(torch.uint8)
        return out

    def unpack(self, packed: Tensor, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        tokens, size = packed.shape[-3], packed.shape[-1]
        dim = _dim_of(size)
        whole, pairs = tokens // GROUP * GROUP, _pairs(dim)
        keys, values = packed[..., 0, :, :, :], packed[..., 1, :, :, :]
        out = torch.empty(*packed.shape[:-1], dim, dtype=torch.float32, device=packed.device)
        out[..., 1, :, :, :] = _by_token(values, dim)
        out[..., 0, whole:, :, :] = _by_token(keys[..., whole:, :, :], dim)
        if whole:
            ends: Any = keys[..., :whole, :, dim // 2 :].contiguous().view(torch.float16)
            ends = ends.unflatten(-1, (pairs, 2)).unflatten(-4, (-1, GROUP))  # [.., groups, GROUP, heads, pairs, 2]
            ends = ends.movedim(-4, -2).flatten(-3, -2)[..., :dim, :].float()  # [.., groups, heads, dim, 2]
            q: Any = _bytes(keys[..., :whole, :, : dim // 2])
            q = q.unflatten(-3, (-1, GROUP))
            scale, low = ends[..., 0].unsqueeze(-3), ends[..., 1].unsqueeze(-3)
            out[..., 0, :whole, :, :] = (low + scale * q).flatten(-4, -3)
        return out[..., rows, :, :].to(dtype)


FORMATS: dict[str, Format] = {"raw": Raw(), "int8": Int8(), "int4": Int4()}
"""By name."""


def holds(packing: Format, kv: Tensor) -> Tensor:
    """Whether the format holds these values, as a bool [] on their device, for which the host doesn't wait: they must
    be finite, and not too large for a float16 scale."""
    if packing.name == "raw":
        return torch.ones((), dtype=torch.bool, device=kv.device)
    # No NaN is within the bounds.
    least, most = kv.aminmax()
    return (least >= -LARGEST) & (most <= LARGEST)


def checked(packing: Format, kv: Tensor) -> Tensor:
    """What `Format.pack` makes of it. Raises `FormatError` for values that the format doesn't hold."""
    if not bool(holds(packing, kv)):
        raise FormatError(WRONG)
    return packing.pack(kv)


def _pairs(dim: int) -> int:
    """Scales with minima that every token carries for its keys."""
    return -(-dim // GROUP)


def _dim_of(size: int) -> int:
    """The head dim whose rows take ``size`` bytes."""
    for dim in range(2 * size, 0, -2):
        if dim // 2 + 4 * _pairs(dim) == size:
            return dim
    raise FormatError(f"rows of {size} bytes are not int4")


def _quarter(x: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values 0 … 15 (uint8), scale and minimum (float16) along ``axis``."""
    low = x.amin(axis, keepdim=True).half()
    high = x.amax(axis, keepdim=True)
    scale = ((high - low.float()) / 15).clamp(TINY, 65_504).half()
    return ((x - low.float()) / scale.float()).round().clamp_(0, 15).to(torch.uint8), scale, low


def _halves(q: Tensor) -> Tensor:
    low, high = q.chunk(2, -1)
    return low | high << 4


def _bytes(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], -1).float()


def _by_token(rows: Tensor, dim: int) -> Tensor:
    ends: Any = rows[..., dim // 2 :].contiguous().view(torch.float16).float()
    values: Any = _bytes(rows[..., : dim // 2])
    parts = zip(values.split(GROUP, -1), ends.split(2, -1), strict=True)
    return torch.cat([end[..., 1:] + end[..., :1] * q for q, end in parts], -1)
