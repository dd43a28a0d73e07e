"""The drift correction as kernels: attention of all reused rows over the recomputed ones, with their drift as values.

One launch a layer gathers what the recomputed rows have to say, document by document and then the sample once more:
their cached V, which other rows are compared to, and the fresh minus cached difference of V and of K with the rotation
taken out. A second one takes each block of rows over its documents' gathered rows and the sample, and adds what they
say to V, and to K turned to where each row stands. Cosines bound the weights, so no running maximum is needed. They are
of the cached values as they are: the norms are divided out in float32. Matrix products are in the cache's dtype with
float32 sums in a fixed order; the result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rotary import RotaryTable
from .triton_attention import Tile, fitting
from .triton_rows import pairs_of

if TYPE_CHECKING:
    from .drift import DriftSettings

# A multiple of every tile's keys.
_PADDING = 128
_ROWS = 16
_LOG2_E = math.log2(math.e)


@triton.jit
def _gather(
    K, V, FRESH_K, FRESH_V, POSITION, ORDER, COS, SIN, OUT, INVERSE, room, sharpness, stride_row, stride_head,
    stride_fk, stride_fkh, stride_fv, stride_fvh, DIM: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    PADDED: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr, STILL: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Recomputed rows in their order: [cached V | drift of V | of K's pairs, first and second halves | of K's other
    dims], each part padded with zeros, and ``sharpness`` over the norm of cached V."""
    item, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    place = tl.load(ORDER + item)
    real = place >= 0
    place = tl.maximum(place, 0)
    row = tl.load(POSITION + place, mask=real, other=0).to(tl.int64)
    old = (row * stride_row + head * stride_head)[:, None]
    new_v, new_k = (place * stride_fv + head * stride_fvh)[:, None], (place * stride_fk + head * stride_fkh)[:, None]
    spot = tl.cast(head, tl.int64) * room + item
    out = OUT + spot[:, None] * WIDTH
    lane = tl.arange(0, D)
    mask = real[:, None] & (lane < DIM)[None, :]
    kept = tl.load(V + old + lane[None, :], mask=mask, other=0.0)
    cached = kept.to(tl.float32)
    fresh = tl.load(FRESH_V + new_v + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + lane[None, :], kept)
    tl.store(out + D + lane[None, :], (fresh - cached).to(OUT.dtype.element_ty))
    tl.store(INVERSE + spot, sharpness / tl.maximum(tl.sqrt(tl.sum(cached * cached, 1)), 1e-12))
    if PAIRS > 0:
        pair = tl.arange(0, PADDED)
        turned = real[:, None] & (pair < PAIRS)[None, :]
        a_at, f_at = K + old + pair[None, :] * STEP, FRESH_K + new_k + pair[None, :] * STEP
        a = tl.load(f_at, mask=turned, other=0.0).to(tl.float32)
        a -= tl.load(a_at, mask=turned, other=0.0).to(tl.float32)
        b = tl.load(f_at + GAP, mask=turned, other=0.0).to(tl.float32)
        b -= tl.load(a_at + GAP, mask=turned, other=0.0).to(tl.float32)
        angle = row[:, None] * PAIRS + pair[None, :]
        cos, sin = tl.load(COS + angle, mask=turned, other=0.0), tl.load(SIN + angle, mask=turned, other=0.0)
        at = out + 2 * D + pair[None, :]
        tl.store(at, (a * cos + b * sin).to(OUT.dtype.element_ty))
        tl.store(at + PADDED, (b * cos - a * sin).to(OUT.dtype.element_ty))
    if STILL > 0:
        rest = tl.arange(0, STILL)
        other = real[:, None] & (rest < DIM - 2 * PAIRS)[None, :]
        at = 2 * PAIRS + rest[None, :]
        moved = tl.load(FRESH_K + new_k + at, mask=other, other=0.0).to(tl.float32)
        moved -= tl.load(K + old + at, mask=other, other=0.0).to(tl.float32)
        tl.store(out + WIDTH - STILL + rest[None, :], moved.to(OUT.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens", "sampled"])
def _carry(
    K, V, DOCUMENT, OF, BOUND, ELSEWHERE, GATHERED, INVERSE, COS, SIN, tokens, split, sampled, room, same, prior,
    strength, stride_row, stride_head, DIM: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr,
    STEP: tl.constexpr, GAP: tl.constexpr, STILL: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add to a block of rows what the gathered rows say: those of their documents, and from ``split`` on the sample.
    ``same`` is the base-2 logarithm of the weight at a cosine of 0; ELSEWHERE is added to it in other documents."""
    row, head = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    column, lane, pair = tl.arange(0, BN), tl.arange(0, D), tl.arange(0, PADDED)
    document = tl.load(DOCUMENT + row, mask=row < tokens, other=-1)
    real = document >= 0
    mask = real[:, None] & (lane < DIM)[None, :]
    at = (row.to(tl.int64) * stride_row + head * stride_head)[:, None]
    q = tl.load(V + at + lane[None, :], mask=mask, other=0.0)
    wide = q.to(tl.float32)
    inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-12)

    # Documents' gathered rows lie side by side. Blocks of rows that belong to none have nothing to do.
    last = tl.max(document, 0)
    first = tl.maximum(tl.min(tl.where(real, document, last), 0), 0)
    low, high = tl.load(BOUND + first), tl.load(BOUND + last + 1)
    elsewhere = same + tl.load(ELSEWHERE + document, mask=real, other=0.0)
    near = tl.cdiv(tl.maximum(high - low, 0), BN)
    far = tl.where(last >= 0, tl.cdiv(sampled, BN), 0)

    out_v = tl.zeros([BM, D], tl.float32)
    total = tl.zeros([BM], tl.float32)
    if PAIRS > 0:
        out_a, out_b = tl.zeros([BM, PADDED], tl.float32), tl.zeros([BM, PADDED], tl.float32)
    if STILL > 0:
        rest = tl.arange(0, STILL)
        out_r = tl.zeros([BM, STILL], tl.float32)
    for block in range(0, near + far):
        own = block < near
        start = tl.where(own, low + block * BN, split + (block - near) * BN)
        stop = tl.where(own, high, split + sampled)
        spot = tl.cast(head, tl.int64) * room + start
        said = GATHERED + spot * WIDTH + column[:, None] * WIDTH
        cached = tl.load(GATHERED + spot * WIDTH + column[None, :] * WIDTH + lane[:, None])
        cosine = tl.dot(q, cached, input_precision=PRECISION) * inverse[:, None]
        of = tl.load(OF + start + column)
        counts = ((document[:, None] == of[None, :]) == own) & (start + column < stop)[None, :]
        bias = tl.where(counts, tl.where(own, same, elsewhere)[:, None], float("-inf"))
        weight = tl.exp2(cosine * tl.load(INVERSE + spot + column)[None, :] + bias)
        total += tl.sum(weight, 1)
        share = weight.to(V.dtype.element_ty)
        out_v = tl.dot(share, tl.load(said + D + lane[None, :]), out_v, input_precision=PRECISION)
        if PAIRS > 0:
            turned = said + 2 * D + pair[None, :]
            out_a = tl.dot(share, tl.load(turned), out_a, input_precision=PRECISION)
            out_b = tl.dot(share, tl.load(turned + PADDED), out_b, input_precision=PRECISION)
        if STILL > 0:
            out_r = tl.dot(share, tl.load(said + WIDTH - STILL + rest[None, :]), out_r, input_precision=PRECISION)

    # Where all weights are 0 nothing is added; the smallest normal number.
    scale = (strength / tl.maximum(total + prior, 1.1754943508222875e-38))[:, None]
    v_at = V + at + lane[None, :]
    v = tl.load(v_at, mask=mask, other=0.0).to(tl.float32) + out_v * scale
    tl.store(v_at, v.to(V.dtype.element_ty), mask=mask)
    if PAIRS > 0:
        turned = real[:, None] & (pair < PAIRS)[None, :]
        angle = row.to(tl.int64)[:, None] * PAIRS + pair[None, :]
        cos, sin = tl.load(COS + angle, mask=turned, other=0.0), tl.load(SIN + angle, mask=turned, other=0.0)
        a_at = K + at + pair[None, :] * STEP
        a = tl.load(a_at, mask=turned, other=0.0).to(tl.float32) + (out_a * cos - out_b * sin) * scale
        b = tl.load(a_at + GAP, mask=turned, other=0.0).to(tl.float32) + (out_b * cos + out_a * sin) * scale
        tl.store(a_at, a.to(K.dtype.element_ty), mask=turned)
        tl.store(a_at + GAP, b.to(K.dtype.element_ty), mask=turned)
    if STILL > 0:
        still = real[:, None] & (rest < DIM - 2 * PAIRS)[None, :]
        k_at = K + at + 2 * PAIRS + rest[None, :]
        k = tl.load(k_at, mask=still, other=0.0).to(tl.float32) + out_r * scale
        tl.store(k_at, k.to(K.dtype.element_ty), mask=still)


# As `triton_attention.TILES`: by padded head size, best first. A row's results are twice a head.
TILES: dict[int, list[Tile]] = {
    64: [Tile(128, 64, 8, 3), Tile(64, 32, 4, 2)],
    128: [Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)],
    256: [Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)],
}
FLOAT32_TILES: dict[int, list[Tile]] = {128: [Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)], 256: [Tile(16, 16, 4, 1)]}


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The recomputed rows of a prompt, for all of its layers: ``positions`` [n] int64, and ``order`` [room] int64 of
    what is gathered, -1 for nothing. Document d's rows are ``bounds[d]``..``bounds[d + 1]`` - 1 of it, the ``sampled``
    ones begin at ``split``. ``documents`` [room] int32 are theirs, ``elsewhere`` [documents] float32 is the base-2
    logarithm of the weight of the sample for the rows of each, and ``rows`` [tokens] int32 is the document of every
    token, or -1 where nothing is added."""

    positions: Tensor
    order: Tensor
    documents: Tensor
    bounds: Tensor
    elsewhere: Tensor
    rows: Tensor
    split: int
    sampled: int
    most: float
    """At least the largest weight."""

    @classmethod
    def of(cls, settings: DriftSettings, positions: Tensor, groups: Tensor, documents: int, rows: Tensor) -> Recomputed:
        """``groups`` [n] int64 are the rows' documents, 0..``documents``-1. Waits for nothing."""
        n, device = positions.shape[0], positions.device
        sample = settings.sampled(n)
        ordered = groups.sort(stable=True)
        picked = torch.arange(sample.start, sample.stop, sample.step, device=device)
        # A block may begin at any row of a document and must end within the room: the sample has some even if empty.
        split = -(-n // _PADDING) * _PADDING
        room = split + max(1, -(-len(sample) // _PADDING)) * _PADDING
        order = torch.full((room,), -1, dtype=torch.int64, device=device)
        order[:n] = ordered.indices
        order[split : split + len(sample)] = picked
        edges = torch.arange(documents + 1, device=device)
        bounds = torch.searchsorted(ordered.values, edges, out_int32=True)
        others = len(sample) - (groups[picked] == edges[:-1, None]).sum(1)
        # Each of the sample stands for its share of all rows of other documents.
        share = settings.elsewhere * (n - bounds.diff()) / others.clamp(min=1)
        return cls(
            positions, order, groups[order.clamp(min=0)].int(), bounds, share.log2(), rows, split, len(sample),
            max(1.0, settings.elsewhere * 2 * sample.step),
        )  # fmt: skip


def carry(
    settings: DriftSettings, table: RotaryTable | None, recomputed: Recomputed, k: Tensor, v: Tensor, fresh_k: Tensor,
    fresh_v: Tensor,
) -> None:  # fmt: skip
    """Correct ``k`` and ``v`` [tokens, kv_heads, dim] in place, as `DriftCorrection.apply`; ``fresh_k``, ``fresh_v``
    [n, kv_heads, dim] belong to the recomputed positions. Nothing has changed when it raises."""
    fresh_k, fresh_v = (t if t.stride(-1) == 1 else t.contiguous() for t in (fresh_k, fresh_v))
    tokens, kv_heads, dim = k.shape
    room = recomputed.order.shape[0]
    shape = _shape(table, dim)
    tiles = FLOAT32_TILES if v.dtype == torch.float32 else TILES
    tile = fitting(tiles, shape["D"], shape["WIDTH"], v.dtype, v.device)
    gathered = torch.empty((kv_heads, room, shape["WIDTH"]), dtype=v.dtype, device=v.device)
    inverse = torch.empty((kv_heads, room), dtype=torch.float32, device=v.device)
    cos, sin = (None, None) if table is None else table.kept(tokens, k.device)
    sharpness = _LOG2_E / settings.temperature
    # Half precision has no room for small weights: they are scaled so that the largest just fits.
    unit = 15.0 - math.ceil(math.log2(recomputed.most)) if v.dtype == torch.float16 else 0.0
    prior = settings.still * 2.0**unit
    _gather[(room // _ROWS, kv_heads)](
        k, v, fresh_k, fresh_v, recomputed.positions, recomputed.order, cos, sin, gathered, inverse, room, sharpness,
        k.stride(0), k.stride(1), fresh_k.stride(0), fresh_k.stride(1), fresh_v.stride(0), fresh_v.stride(1),
        ROWS=_ROWS, **shape, num_warps=4,
    )  # fmt: skip
    _carry[(triton.cdiv(tokens, tile.rows), kv_heads)](
        k, v, recomputed.rows, recomputed.documents, recomputed.bounds, recomputed.elsewhere, gathered, inverse, cos,
        sin, tokens, recomputed.split, recomputed.sampled, room, unit - sharpness, prior, settings.strength,
        k.stride(0), k.stride(1), PRECISION="ieee", BM=tile.rows, BN=tile.keys, **shape, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def _shape(table: RotaryTable | None, dim: int) -> dict[str, int]:
    """How a head's dims form pairs, and how wide a gathered row is."""
    pairs = pairs_of(table)
    padded = max(16, triton.next_power_of_2(dim))
    turned = max(16, pairs["PADDED"])
    rest = dim - 2 * pairs["PAIRS"]
    still = max(16, triton.next_power_of_2(rest)) if rest else 0
    width = 2 * padded + (2 * turned if pairs["PAIRS"] else 0) + still
    return {**pairs, "PADDED": turned, "DIM": dim, "D": padded, "STILL": still, "WIDTH": width}


def warm_up(
    *, settings: DriftSettings, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device,
    tables: Iterable[RotaryTable | None],
) -> None:  # fmt: skip
    """Compile what such a model needs, and run it once."""
    k, v = (torch.zeros(16, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
    where = torch.arange(2, device=device)
    rows = torch.zeros(16, dtype=torch.int32, device=device)
    recomputed = Recomputed.of(settings, where, torch.zeros_like(where), 1, rows)
    for table in tables:
        carry(settings, table, recomputed, k, v, k[:2].clone(), v[:2].clone())
