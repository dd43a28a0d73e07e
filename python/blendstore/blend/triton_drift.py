"""The drift correction as kernels: a matrix product of every document's weights with what its columns have to say.

One launch a layer works out what the recomputed rows say, head by head: the fresh minus cached difference of V, and of
K with the rotation taken out. A second one takes each block of a document's rows over the document's own columns and
the sample, and adds what they say to V, and to K turned to where each row stands. Matrix products are in the cache's
dtype with float32 sums in a fixed order; the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .drift import PADDING, Columns
from .rotary import RotaryTable
from .triton_attention import Tile, fitting
from .triton_rows import pairs_of

_ROWS = 16


@triton.jit(do_not_specialize=["count"])
def _differ(
    K, V, FRESH_K, FRESH_V, POSITION, COS, SIN, OUT, count, stride_row, stride_head, stride_fk, stride_fkh, stride_fv,
    stride_fvh, DIM: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr,
    GAP: tl.constexpr, STILL: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Recomputed rows: [drift of V | of K's pairs, first and second halves | of K's other dims], each part padded with
    zeros."""
    item, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    real = item < count
    row = tl.load(POSITION + item, mask=real, other=0).to(tl.int64)
    old = (row * stride_row + head * stride_head)[:, None]
    new_v, new_k = (item * stride_fv + head * stride_fvh)[:, None], (item * stride_fk + head * stride_fkh)[:, None]
    out = OUT + (tl.cast(head, tl.int64) * count + item)[:, None] * WIDTH
    lane = tl.arange(0, D)
    mask = real[:, None] & (lane < DIM)[None, :]
    moved = tl.load(FRESH_V + new_v + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    moved -= tl.load(V + old + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + lane[None, :], moved.to(OUT.dtype.element_ty), mask=real[:, None])
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
        at = out + D + pair[None, :]
        tl.store(at, (a * cos + b * sin).to(OUT.dtype.element_ty), mask=real[:, None])
        tl.store(at + PADDED, (b * cos - a * sin).to(OUT.dtype.element_ty), mask=real[:, None])
    if STILL > 0:
        rest = tl.arange(0, STILL)
        other = real[:, None] & (rest < DIM - 2 * PAIRS)[None, :]
        at = 2 * PAIRS + rest[None, :]
        still = tl.load(FRESH_K + new_k + at, mask=other, other=0.0).to(tl.float32)
        still -= tl.load(K + old + at, mask=other, other=0.0).to(tl.float32)
        tl.store(out + WIDTH - STILL + rest[None, :], still.to(OUT.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["count", "most"])
def _carry(
    K, V, WEIGHT, ROW, INDEX, OWN, MOVED, COS, SIN, count, most, own, columns, stride_row, stride_head,
    DIM: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr,
    GAP: tl.constexpr, STILL: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Add to a block of a document's rows what its columns say: those of its own that it has, and from column ``own``
    on the sample."""
    item, document, head = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1), tl.program_id(2)
    column, lane, pair = tl.arange(0, BN), tl.arange(0, D), tl.arange(0, PADDED)
    row = tl.load(ROW + document * most + item, mask=item < most, other=-1).to(tl.int64)
    real = row >= 0
    row = tl.maximum(row, 0)
    near = tl.cdiv(tl.load(OWN + document), BN)
    far = (columns - own) // BN
    weights = WEIGHT + (tl.cast(document, tl.int64) * most + item)[:, None] * columns + column[None, :]
    out_v = tl.zeros([BM, D], tl.float32)
    if PAIRS > 0:
        out_a, out_b = tl.zeros([BM, PADDED], tl.float32), tl.zeros([BM, PADDED], tl.float32)
    if STILL > 0:
        rest = tl.arange(0, STILL)
        out_r = tl.zeros([BM, STILL], tl.float32)
    # Blocks of rows behind the document's last have nothing to do.
    for block in range(0, tl.where(tl.max(real.to(tl.int32), 0) > 0, near + far, 0)):
        start = tl.where(block < near, block * BN, own + (block - near) * BN)
        weight = tl.load(weights + start, mask=real[:, None], other=0.0)
        at = tl.load(INDEX + document * columns + start + column)
        said = MOVED + (tl.cast(head, tl.int64) * count + at)[:, None] * WIDTH
        out_v = tl.dot(weight, tl.load(said + lane[None, :]), out_v, input_precision=PRECISION)
        if PAIRS > 0:
            turned = said + D + pair[None, :]
            out_a = tl.dot(weight, tl.load(turned), out_a, input_precision=PRECISION)
            out_b = tl.dot(weight, tl.load(turned + PADDED), out_b, input_precision=PRECISION)
        if STILL > 0:
            out_r = tl.dot(weight, tl.load(said + WIDTH - STILL + rest[None, :]), out_r, input_precision=PRECISION)

    here = (row * stride_row + head * stride_head)[:, None]
    mask = real[:, None] & (lane < DIM)[None, :]
    v_at = V + here + lane[None, :]
    tl.store(v_at, (tl.load(v_at, mask=mask, other=0.0).to(tl.float32) + out_v).to(V.dtype.element_ty), mask=mask)
    if PAIRS > 0:
        turned = real[:, None] & (pair < PAIRS)[None, :]
        angle = row[:, None] * PAIRS + pair[None, :]
        cos, sin = tl.load(COS + angle, mask=turned, other=0.0), tl.load(SIN + angle, mask=turned, other=0.0)
        a_at = K + here + pair[None, :] * STEP
        a = tl.load(a_at, mask=turned, other=0.0).to(tl.float32) + (out_a * cos - out_b * sin)
        b = tl.load(a_at + GAP, mask=turned, other=0.0).to(tl.float32) + (out_b * cos + out_a * sin)
        tl.store(a_at, a.to(K.dtype.element_ty), mask=turned)
        tl.store(a_at + GAP, b.to(K.dtype.element_ty), mask=turned)
    if STILL > 0:
        still = real[:, None] & (rest < DIM - 2 * PAIRS)[None, :]
        k_at = K + here + 2 * PAIRS + rest[None, :]
        k = tl.load(k_at, mask=still, other=0.0).to(tl.float32) + out_r
        tl.store(k_at, k.to(K.dtype.element_ty), mask=still)


# As `triton_attention.TILES`: by padded head size, best first. A row's results are twice a head. Keys divide `PADDING`.
TILES: dict[int, list[Tile]] = {
    64: [Tile(64, 64, 8, 2), Tile(64, 32, 4, 2)],
    128: [Tile(64, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)],
    256: [Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)],
}
FLOAT32_TILES: dict[int, list[Tile]] = {128: [Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)], 256: [Tile(16, 16, 4, 1)]}


def carry(
    table: RotaryTable | None, weights: Tensor, rows: Tensor, columns: Columns, selected: Tensor, k: Tensor, v: Tensor,
    fresh_k: Tensor, fresh_v: Tensor,
) -> None:  # fmt: skip
    """Correct ``k`` and ``v`` [tokens, kv_heads, dim] in place, as `DriftCorrection.apply`: ``weights`` [documents,
    rows, columns] in their dtype, and ``rows`` [documents, rows] int32, the documents' positions or -1. Nothing has
    changed when it raises."""
    fresh_k, fresh_v = (t if t.stride(-1) == 1 else t.contiguous() for t in (fresh_k, fresh_v))
    tokens, kv_heads, dim = k.shape
    count = selected.shape[0]
    documents, most, width = weights.shape
    shape = _shape(table, dim)
    tiles = FLOAT32_TILES if v.dtype == torch.float32 else TILES
    tile = fitting(tiles, shape["D"], shape["WIDTH"], v.dtype, v.device)
    moved = torch.empty((kv_heads, count, shape["WIDTH"]), dtype=v.dtype, device=v.device)
    cos, sin = (None, None) if table is None else table.kept(tokens, k.device)
    _differ[(triton.cdiv(count, _ROWS), kv_heads)](
        k, v, fresh_k, fresh_v, selected, cos, sin, moved, count, k.stride(0), k.stride(1), fresh_k.stride(0),
        fresh_k.stride(1), fresh_v.stride(0), fresh_v.stride(1), ROWS=_ROWS, **shape, num_warps=4,
    )  # fmt: skip
    _carry[(triton.cdiv(most, tile.rows), documents, kv_heads)](
        k, v, weights, rows, columns.index, columns.counts, moved, cos, sin, count, most, columns.own, width,
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
    width = padded + (2 * turned if pairs["PAIRS"] else 0) + still
    return {**pairs, "PADDED": turned, "DIM": dim, "D": padded, "STILL": still, "WIDTH": width}


def warm_up(
    *, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, tables: Iterable[RotaryTable | None]
) -> None:
    """Compile what such a model needs, and run it once."""
    k, v = (torch.zeros(16, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
    selected = torch.arange(2, device=device)
    rows = torch.arange(16, dtype=torch.int32, device=device)[None]
    index = torch.zeros(1, 2 * PADDING, dtype=torch.int64, device=device)
    columns = Columns(index, index.float(), torch.full((1,), 2, dtype=torch.int32, device=device), PADDING)
    weights = torch.zeros(1, 16, 2 * PADDING, dtype=dtype, device=device)
    for table in tables:
        carry(table, weights, rows, columns, selected, k, v, k[:2].clone(), v[:2].clone())
