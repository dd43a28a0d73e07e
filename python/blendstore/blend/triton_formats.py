"""Formats of records (`codec.formats`) as kernels: rows unpacked into the working KV, K and V of a layer in one launch,
and a record packed in one.

Everything is computed in float32 and rounded once, as by `Format.unpack` and `Format.pack`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..codec.formats import FORMATS, GROUP, LARGEST, TINY

_ROWS = 16
_TINY, _LARGEST = tl.constexpr(TINY), tl.constexpr(LARGEST)


@triton.jit
def _half(address):
    """Where float16 lie among bytes, at even addresses."""
    return address.to(tl.pointer_type(tl.float16))


# Strides that depend on the number of tokens, and where a layer of the staging buffer begins, are no reason to compile
# once more while a prompt waits.
@triton.jit(do_not_specialize=["count", "staged_part"], do_not_specialize_on_alignment=["STAGED"])
def _unpack(
    STAGED, OUT, PLACE, count, staged_part, staged_row, out_part, out_row, DIM: tl.constexpr, EACH: tl.constexpr,
    LANES: tl.constexpr, INT4: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    item, part, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1), tl.program_id(2)
    real = item < count
    target = tl.load(PLACE + item, mask=real, other=0).to(tl.int64)
    source = tl.load(PLACE + count + item, mask=real, other=0).to(tl.int64)
    group = tl.load(PLACE + 2 * count + item, mask=real, other=-1).to(tl.int64)
    first = STAGED + part * staged_part + head * EACH
    here = (first + source * staged_row)[:, None]
    there = (OUT + part * out_part + target * out_row + head * DIM)[:, None]
    lane = tl.arange(0, LANES)
    if INT4:
        mask = real[:, None] & (lane < DIM // 2)[None, :]
        both = tl.load(here + lane[None, :], mask=mask, other=0)
        by_channel = (group >= 0) & (part == 0)
        for upper in tl.static_range(2):
            element = lane + upper * (DIM // 2)
            # Of keys in whole groups, channel c has its scale with token c mod GROUP of the group.
            holder = tl.where(by_channel[:, None], group[:, None] + (element % GROUPED)[None, :], source[:, None])
            ends = first + holder * staged_row + DIM // 2 + (element // GROUPED * 4)[None, :]
            scale = tl.load(_half(ends), mask=mask, other=0.0).to(tl.float32)
            low = tl.load(_half(ends + 2), mask=mask, other=0.0).to(tl.float32)
            q = (both >> 4 if upper else both & 15).to(tl.float32)
            tl.store(there + element[None, :], (low + scale * q).to(OUT.dtype.element_ty), mask=mask)
    else:
        mask = real[:, None] & (lane < DIM)[None, :]
        q = tl.load(here + lane[None, :], mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        scale = tl.load(_half(here + DIM), mask=real[:, None], other=0.0).to(tl.float32)
        tl.store(there + lane[None, :], (q * scale).to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _rounded(x):
    """To the nearest whole number, halves to the even one; for less than 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quarter(x, low, high):
    """What a group of 16 values is made of, from its bounds: scale and minimum as they are stored, and 0 … 15."""
    low = low.to(tl.float16)
    scale = tl.clamp((high - low.to(tl.float32)) / 15.0, _TINY, _LARGEST).to(tl.float16)
    q = _rounded((x - low.to(tl.float32)) / scale.to(tl.float32))
    return scale, low, tl.clamp(q, 0.0, 15.0).to(tl.uint8)


@triton.jit(do_not_specialize=["count", "out_layer", "out_part"])
def _pack(
    KV, OUT, WELL, count, kv_layer, kv_part, kv_row, out_layer, out_part, out_row, DIM: tl.constexpr,
    EACH: tl.constexpr, LANES: tl.constexpr, INT4: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    layer, part, head = tl.program_id(1) // 2, tl.program_id(1) % 2, tl.program_id(2)
    item = tl.program_id(0) * GROUPED + tl.arange(0, GROUPED)
    real = item < count
    lane = tl.arange(0, LANES)
    source = KV + layer.to(tl.int64) * kv_layer + part * kv_part + head * DIM + item.to(tl.int64)[:, None] * kv_row
    first = OUT + layer.to(tl.int64) * out_layer + part * out_part + head * EACH
    target = (first + item.to(tl.int64) * out_row)[:, None]
    if INT4:
        PAIRS: tl.constexpr = (DIM + GROUPED - 1) // GROUPED
        here = real[:, None] & (lane < DIM // 2)[None, :]
        a = tl.load(source + lane[None, :], mask=here, other=0.0).to(tl.float32)
        b = tl.load(source + DIM // 2 + lane[None, :], mask=here, other=0.0).to(tl.float32)
        # Each by itself: the larger of a number and none is the number.
        well = (tl.abs(a) <= _LARGEST) & (tl.abs(b) <= _LARGEST)
        both = lane + DIM // 2
        if (part == 0) & ((tl.program_id(0) + 1) * GROUPED <= count):
            # Channel c of a whole group of keys leaves scale and minimum with token c mod GROUPED.
            scale, low, qa = _quarter(a, tl.min(a, 0)[None, :], tl.max(a, 0)[None, :])
            begin = first + tl.program_id(0).to(tl.int64) * GROUPED * out_row + DIM // 2
            holder = begin + (lane % GROUPED) * out_row + lane // GROUPED * 4
            tl.store(_half(holder)[None, :], scale, mask=(lane < DIM // 2)[None, :])
            tl.store(_half(holder + 2)[None, :], low, mask=(lane < DIM // 2)[None, :])
            scale, low, qb = _quarter(b, tl.min(b, 0)[None, :], tl.max(b, 0)[None, :])
            # Room for channels that the head doesn't have holds zeros.
            holder = begin + (both % GROUPED) * out_row + both // GROUPED * 4
            exists, inside = (both < DIM)[None, :], (both < PAIRS * GROUPED)[None, :]
            tl.store(_half(holder)[None, :], tl.where(exists, scale, 0.0), mask=inside)
            tl.store(_half(holder + 2)[None, :], tl.where(exists, low, 0.0), mask=inside)
        else:
            qa, qb = tl.zeros_like(a).to(tl.uint8), tl.zeros_like(b).to(tl.uint8)
            for group in tl.static_range(PAIRS):
                in_a = ((lane // GROUPED == group) & (lane < DIM // 2))[None, :]
                in_b = ((both // GROUPED == group) & (both < DIM))[None, :]
                bottom = tl.minimum(
                    tl.min(tl.where(in_a, a, float("inf")), 1), tl.min(tl.where(in_b, b, float("inf")), 1)
                )
                top = tl.maximum(
                    tl.max(tl.where(in_a, a, float("-inf")), 1), tl.max(tl.where(in_b, b, float("-inf")), 1)
                )
                step, least, q = _quarter(a, bottom[:, None], top[:, None])
                qa = tl.where(in_a, q, qa)
                _, _, q = _quarter(b, bottom[:, None], top[:, None])
                qb = tl.where(in_b, q, qb)
                ends = target + DIM // 2 + 4 * group
                tl.store(_half(ends), step, mask=real[:, None])
                tl.store(_half(ends + 2), least, mask=real[:, None])
        tl.store(target + lane[None, :], qa | qb << 4, mask=here)
    else:
        here = real[:, None] & (lane < DIM)[None, :]
        x = tl.load(source + lane[None, :], mask=here, other=0.0).to(tl.float32)
        well = tl.abs(x) <= _LARGEST
        scale = tl.maximum(tl.max(tl.abs(x), 1) / 127.0, _TINY).to(tl.float16)[:, None]
        q = tl.clamp(_rounded(x / scale.to(tl.float32)), -127.0, 127.0).to(tl.int8)
        tl.store(target + lane[None, :], q.to(tl.uint8, bitcast=True), mask=here)
        tl.store(_half(target + DIM), scale, mask=real[:, None])
    tl.store(WELL, 0, mask=tl.min(well.to(tl.int32)) == 0)


def unpack(name: str, staged: Tensor, kv: Tensor, places: Tensor) -> None:
    """Rows of ``staged`` uint8 [2, rows, kv_heads, bytes] in format ``name`` to rows of ``kv`` [2, tokens, kv_heads,
    dim], both contiguous but for the first two dimensions. ``places`` int32 [3, n] are the rows in ``kv``, the rows in
    ``staged``, and the first row there of each one's group of keys, or -1."""
    heads, dim, n = kv.shape[2], kv.shape[3], places.shape[1]
    lanes = triton.next_power_of_2(dim // 2 if name == "int4" else dim)
    _unpack[(triton.cdiv(n, _ROWS), 2, heads)](
        staged, kv, places, n, staged.stride(0), staged.stride(1), kv.stride(0), kv.stride(1), DIM=dim,
        EACH=staged.shape[3], LANES=lanes, INT4=name == "int4", GROUPED=GROUP, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip


def pack(name: str, kv: Tensor, out: Tensor, well: Tensor) -> None:
    """``kv`` [layers, 2, tokens, kv_heads, dim], the last two dimensions contiguous, in format ``name`` to ``out``,
    uint8 [layers, 2, tokens, kv_heads, bytes] and contiguous. ``well`` int32 [1] becomes 0 where the format doesn't
    hold a value."""
    layers, _, tokens, heads, dim = kv.shape
    pairs = -(-dim // GROUP)
    lanes = triton.next_power_of_2(max(dim // 2, pairs * GROUP - dim // 2) if name == "int4" else dim)
    _pack[(triton.cdiv(tokens, GROUP), 2 * layers, heads)](
        kv, out, well, tokens, *kv.stride()[:3], *out.stride()[:3], DIM=dim, EACH=out.shape[4], LANES=lanes,
        INT4=name == "int4", GROUPED=GROUP, num_warps=4,
    )  # fmt: skip


def warm_up(*, name: str, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what records in this format need, and run it once."""
    kv = torch.zeros(2, _ROWS, kv_heads, dim, dtype=dtype, device=device)
    each = FORMATS[name].head_bytes(dim, dtype.itemsize)
    staged = torch.zeros(2, _ROWS, kv_heads, each, dtype=torch.uint8, device=device)
    rows = torch.arange(_ROWS, dtype=torch.int32, device=device)
    unpack(name, staged, kv, torch.stack([rows, rows, torch.full_like(rows, -1)]))
    out, well = torch.empty_like(staged)[None], torch.ones(1, dtype=torch.int32, device=device)
    pack(name, kv[None], out, well)
