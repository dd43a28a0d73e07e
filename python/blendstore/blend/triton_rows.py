"""Kernels over rows of the working KV: keys turned to their new positions, and drift measured and added.

One launch each for all rows of a layer. Cosines and sines are those of `RotaryTable.kept`: [positions, pairs] float32.
Everything is computed in float32 and rounded once; sums are taken in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rotary import RotaryTable

_ROWS = 16
# Parts that a document's recomputed rows are summed in.
SPLITS = 8


@triton.jit(do_not_specialize=["count"])
def _turn(
    K, ROW, SOURCE, COS, SIN, count, stride_row, stride_head, KV_HEADS: tl.constexpr, PAIRS: tl.constexpr,
    PADDED: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PADDED)
    real = item < count
    row = tl.load(ROW + item, mask=real, other=0).to(tl.int64)
    source = tl.load(SOURCE + item, mask=real, other=0).to(tl.int64)
    mask = real[:, None] & (pair < PAIRS)[None, :]
    there, here = source[:, None] * PAIRS + pair[None, :], row[:, None] * PAIRS + pair[None, :]
    cos_s, sin_s = tl.load(COS + there, mask=mask, other=0.0), tl.load(SIN + there, mask=mask, other=0.0)
    cos_t, sin_t = tl.load(COS + here, mask=mask, other=0.0), tl.load(SIN + here, mask=mask, other=0.0)
    cos, sin = cos_t * cos_s + sin_t * sin_s, sin_t * cos_s - cos_t * sin_s
    for head in range(KV_HEADS):
        at = K + row[:, None] * stride_row + head * stride_head + pair[None, :] * STEP
        a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + GAP, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (a * cos - b * sin).to(K.dtype.element_ty), mask=mask)
        tl.store(at + GAP, (b * cos + a * sin).to(K.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["documents"])
def _difference(
    K, V, FRESH_K, FRESH_V, POSITION, ORDER, BOUND, COS, SIN, PART, documents, stride_row, stride_head, stride_fk,
    stride_fkh, stride_fv, stride_fvh, KV_HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    PADDED: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One part of the sum over a document's recomputed rows of fresh minus cached: V, and K with the rotation out."""
    document, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(BOUND + document), tl.load(BOUND + document + 1)
    lane, pair, line = tl.arange(0, D), tl.arange(0, PADDED), tl.arange(0, ROWS)
    sum_v = tl.zeros([D], tl.float32)
    sum_k = tl.zeros([D], tl.float32)
    sum_a = tl.zeros([PADDED], tl.float32)
    sum_b = tl.zeros([PADDED], tl.float32)
    for first in range(begin + split * ROWS, end, SPLIT * ROWS):
        real = first + line < end
        item = tl.load(ORDER + first + line, mask=real, other=0).to(tl.int64)
        row = tl.load(POSITION + item, mask=real, other=0).to(tl.int64)
        mask = real[:, None] & (lane < DIM)[None, :]
        old = (row * stride_row + head * stride_head)[:, None]
        new_v, new_k = (item * stride_fv + head * stride_fvh)[:, None], (item * stride_fk + head * stride_fkh)[:, None]
        cached = tl.load(V + old + lane[None, :], mask=mask, other=0.0).to(tl.float32)
        fresh = tl.load(FRESH_V + new_v + lane[None, :], mask=mask, other=0.0).to(tl.float32)
        sum_v += tl.sum(fresh - cached, 0)
        if 2 * PAIRS < DIM:
            still = mask & (lane >= 2 * PAIRS)[None, :]
            cached = tl.load(K + old + lane[None, :], mask=still, other=0.0).to(tl.float32)
            fresh = tl.load(FRESH_K + new_k + lane[None, :], mask=still, other=0.0).to(tl.float32)
            sum_k += tl.sum(fresh - cached, 0)
        if PAIRS > 0:
            turned = real[:, None] & (pair < PAIRS)[None, :]
            a_at, f_at = K + old + pair[None, :] * STEP, FRESH_K + new_k + pair[None, :] * STEP
            a = tl.load(f_at, mask=turned, other=0.0).to(tl.float32)
            a -= tl.load(a_at, mask=turned, other=0.0).to(tl.float32)
            b = tl.load(f_at + GAP, mask=turned, other=0.0).to(tl.float32)
            b -= tl.load(a_at + GAP, mask=turned, other=0.0).to(tl.float32)
            angle = row[:, None] * PAIRS + pair[None, :]
            cos, sin = tl.load(COS + angle, mask=turned, other=0.0), tl.load(SIN + angle, mask=turned, other=0.0)
            sum_a += tl.sum(a * cos + b * sin, 0)
            sum_b += tl.sum(b * cos - a * sin, 0)
    # [splits, K or V, documents, kv_heads, dim]
    k_at = PART + ((split * 2 * documents + document) * KV_HEADS + head) * DIM
    v_at = PART + (((split * 2 + 1) * documents + document) * KV_HEADS + head) * DIM
    tl.store(v_at + lane, sum_v, mask=lane < DIM)
    tl.store(k_at + lane, sum_k, mask=(lane < DIM) & (lane >= 2 * PAIRS))
    if PAIRS > 0:
        tl.store(k_at + pair * STEP, sum_a, mask=pair < PAIRS)
        tl.store(k_at + pair * STEP + GAP, sum_b, mask=pair < PAIRS)


@triton.jit(do_not_specialize=["tokens"])
def _add(
    K, V, DOCUMENT, DRIFT_K, DRIFT_V, COS, SIN, tokens, stride_row, stride_head, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr,
    GAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add each token's document's drift: to V as it is, to K turned to where the token stands."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane, pair = tl.arange(0, D), tl.arange(0, PADDED)
    document = tl.load(DOCUMENT + row, mask=row < tokens, other=-1).to(tl.int64)
    real = document >= 0
    mask = real[:, None] & (lane < DIM)[None, :]
    turned = real[:, None] & (pair < PAIRS)[None, :]
    angle = row.to(tl.int64)[:, None] * PAIRS + pair[None, :]
    if PAIRS > 0:
        cos, sin = tl.load(COS + angle, mask=turned, other=0.0), tl.load(SIN + angle, mask=turned, other=0.0)
    for head in range(KV_HEADS):
        at = (row.to(tl.int64) * stride_row + head * stride_head)[:, None]
        of = ((document * KV_HEADS + head) * DIM)[:, None]
        v_at = V + at + lane[None, :]
        v = tl.load(v_at, mask=mask, other=0.0).to(tl.float32)
        v += tl.load(DRIFT_V + of + lane[None, :], mask=mask, other=0.0)
        tl.store(v_at, v.to(V.dtype.element_ty), mask=mask)
        if 2 * PAIRS < DIM:
            still = mask & (lane >= 2 * PAIRS)[None, :]
            k_at = K + at + lane[None, :]
            k = tl.load(k_at, mask=still, other=0.0).to(tl.float32)
            k += tl.load(DRIFT_K + of + lane[None, :], mask=still, other=0.0)
            tl.store(k_at, k.to(K.dtype.element_ty), mask=still)
        if PAIRS > 0:
            a_at, d_at = K + at + pair[None, :] * STEP, DRIFT_K + of + pair[None, :] * STEP
            da, db = tl.load(d_at, mask=turned, other=0.0), tl.load(d_at + GAP, mask=turned, other=0.0)
            a = tl.load(a_at, mask=turned, other=0.0).to(tl.float32) + da * cos - db * sin
            b = tl.load(a_at + GAP, mask=turned, other=0.0).to(tl.float32) + db * cos + da * sin
            tl.store(a_at, a.to(K.dtype.element_ty), mask=turned)
            tl.store(a_at + GAP, b.to(K.dtype.element_ty), mask=turned)


def _pairs(table: RotaryTable | None) -> dict[str, int]:
    """How a head's dims form pairs; no table, no pairs."""
    pairs = 0 if table is None else table.pairs
    step, gap = (2, 1) if table is not None and table.pairing == "interleaved" else (1, pairs)
    return {"PAIRS": pairs, "PADDED": triton.next_power_of_2(max(pairs, 2)), "STEP": step, "GAP": gap}


def turn(table: RotaryTable, k: Tensor, rows: Tensor, source: Tensor, stop: int) -> None:
    """Rotate ``k[rows]`` in place from the positions ``source`` to the positions ``rows`` (int32 [m], all below
    ``stop``); ``k`` is [tokens, kv_heads, dim]."""
    cos, sin = table.kept(stop, k.device)
    _turn[(triton.cdiv(rows.shape[0], _ROWS),)](
        k, rows, source, cos, sin, rows.shape[0], k.stride(0), k.stride(1), KV_HEADS=k.shape[1], ROWS=_ROWS,
        **_pairs(table), num_warps=4,
    )  # fmt: skip


def difference(
    table: RotaryTable | None, k: Tensor, v: Tensor, fresh_k: Tensor, fresh_v: Tensor, positions: Tensor,
    order: Tensor, bounds: Tensor, stop: int,
) -> Tensor:  # fmt: skip
    """[2, documents, kv_heads, dim] float32: for K, with the rotation taken out, and V the sum of fresh minus cached
    over each document's rows.

    ``fresh_k``, ``fresh_v`` [n, kv_heads, dim] belong to ``positions`` [n]; document d has the rows ``order[bounds[d] :
    bounds[d + 1]]`` of them. ``positions`` are below ``stop``."""
    fresh_k, fresh_v = (t if t.stride(-1) == 1 else t.contiguous() for t in (fresh_k, fresh_v))
    documents, (_, kv_heads, dim) = bounds.shape[0] - 1, k.shape
    part = torch.empty((SPLITS, 2, documents, kv_heads, dim), dtype=torch.float32, device=k.device)
    cos, sin = (None, None) if table is None else table.kept(stop, k.device)
    _difference[(documents, kv_heads, SPLITS)](
        k, v, fresh_k, fresh_v, positions, order, bounds, cos, sin, part, documents, k.stride(0), k.stride(1),
        fresh_k.stride(0), fresh_k.stride(1), fresh_v.stride(0), fresh_v.stride(1), KV_HEADS=kv_heads, DIM=dim,
        D=triton.next_power_of_2(dim), SPLIT=SPLITS, ROWS=_ROWS, **_pairs(table), num_warps=4,
    )  # fmt: skip
    return part.sum(0)


def add(table: RotaryTable | None, k: Tensor, v: Tensor, documents: Tensor, drift: Tensor) -> None:
    """Add ``drift`` [2, documents, kv_heads, dim] float32 to the rows of K, turned to each row's position, and V.

    ``documents`` [tokens] int32 is each row's document, or -1 where nothing is added."""
    tokens, kv_heads, dim = k.shape
    cos, sin = (None, None) if table is None else table.kept(tokens, k.device)
    _add[(triton.cdiv(tokens, _ROWS),)](
        k, v, documents, drift[0], drift[1], cos, sin, tokens, k.stride(0), k.stride(1), KV_HEADS=kv_heads, DIM=dim,
        D=triton.next_power_of_2(dim), ROWS=_ROWS, **_pairs(table), num_warps=4,
    )  # fmt: skip


def warm_up(
    *, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, tables: Iterable[RotaryTable | None]
) -> None:
    """Compile what such a model needs, and run it once."""
    k = torch.zeros(16, kv_heads, dim, dtype=dtype, device=device)
    rows, where = torch.arange(16, dtype=torch.int32, device=device), torch.arange(16, device=device)
    bounds = torch.tensor([0, 16], device=device)
    for table in tables:
        if table is not None:
            turn(table, k, rows, rows, 16)
        drift = difference(table, k, k.clone(), k, k, where, where, bounds, 16)
        add(table, k, k.clone(), torch.zeros_like(rows), drift)
