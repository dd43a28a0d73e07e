"""Attention of rows with positions of their own, as Triton kernels over the working KV as it lies.

Flash style (Dao et al., arXiv 2205.14135): a block holds rows times the query heads of one KV head, so that each key is
read once for its whole group. Its key loop ends at the largest position of its rows, and only key blocks that some row
of it sees in part are masked. Where there are too few rows to fill the device, the keys are split between blocks whose
parts are put together afterwards. Scores of keys are a second pass over few rows, with the normaliser that the first
one has kept. All sums are float32 and in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

# A logit that is not seen: finite, so that differences of two such logits stay defined.
_UNSEEN = tl.constexpr(-1.0e30)
_MOST_SPLITS = 32


@triton.jit
def _logits(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Logits in base 2."""
    logits = tl.dot(q, k, input_precision=PRECISION) * scale
    if SOFTCAP:
        # softcap * tanh(x / softcap), by the sigmoid.
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits * 1.4426950408889634


@triton.jit
def _block(
    X, start, nkeys, stride, MASKED: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Rows ``start``.. of a head [BN, D]; zeros behind the last key, if masked."""
    row, lane = tl.arange(0, BN), tl.arange(0, D)
    at = X + tl.cast(start, tl.int64) * stride + row[:, None] * stride + lane[None, :]
    if MASKED:
        block = tl.load(at, mask=(start + row < nkeys)[:, None] & (lane < DIM)[None, :], other=0.0)
    elif D != DIM:
        block = tl.load(at, mask=(lane < DIM)[None, :], other=0.0)
    else:
        block = tl.load(at)
    return block


@triton.jit
def _weigh(products, top, total, base):
    """Weights of products that all rows see, times ``base`` logits in base 2: one fused multiplication a weight."""
    higher = tl.maximum(top, tl.max(products, 1) * base)
    weight = tl.exp2(products * base - higher[:, None])
    keep = tl.exp2(top - higher)
    return weight, keep, higher, total * keep + tl.sum(weight, 1)


@triton.jit
def _over_keys(
    out, top, total, q, position, K, V, HIDDEN, low, high, nkeys, stride_k, stride_v, scale, softcap, window,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, HIDES: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Take keys ``low``..``high``-1 into the running output, maximum and sum; ``low`` is a multiple of BN."""
    base = scale * 1.4426950408889634
    for start in range(low, high, BN):
        k = _block(K, start, nkeys, stride_k, MASKED, BN, D, DIM)
        if MASKED or HIDES or SOFTCAP:
            logits = _logits(q, tl.trans(k), scale, softcap, SOFTCAP, PRECISION)
            key = start + tl.arange(0, BN)
            if MASKED:
                seen = key[None, :] <= position[:, None]
                if WINDOWED:
                    seen = seen & (key[None, :] > position[:, None] - window)
                logits = tl.where(seen, logits, _UNSEEN)
            if HIDES:
                hidden = tl.load(HIDDEN + key, mask=key < nkeys, other=1)
                logits = tl.where((hidden == 0)[None, :], logits, _UNSEEN)
            # Multiplied before: where a row sees none of the keys, logit and maximum have to be the same to the bit.
            weight, keep, top, total = _weigh(logits, top, total, 1.0)
        else:
            products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weight, keep, top, total = _weigh(products, top, total, base)
        out = out * keep[:, None]
        v = _block(V, start, nkeys, stride_v, MASKED, BN, D, DIM)
        out = tl.dot(weight.to(v.dtype), v, out, input_precision=PRECISION)
    return out, top, total


@triton.jit(do_not_specialize=["n", "nkeys", "window", "splits"])
def _attend(
    Q, K, V, POSITION, HIDDEN, OUT, NORMALISER, PART, n, nkeys, splits, stride_qn, stride_qh, stride_kn, stride_kh,
    stride_vn, stride_vh, stride_on, stride_oh, scale, softcap, window, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WINDOWED: tl.constexpr, HIDES: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # The blocks with the most keys come first, of all heads, so that the last ones to run are short.
    kv_head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    packed = block * BM + tl.arange(0, BM)
    row = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    valid = row < n
    lane = tl.arange(0, D)
    # Rows behind the last one repeat it and aren't stored.
    position = tl.load(POSITION + tl.minimum(row, n - 1)).to(tl.int32)
    first = tl.load(POSITION + block * BM // GROUP).to(tl.int32)
    last = tl.load(POSITION + tl.minimum((block * BM + BM - 1) // GROUP, n - 1)).to(tl.int32)
    q_at = Q + row.to(tl.int64)[:, None] * stride_qn + head[:, None] * stride_qh + lane[None, :]
    q = tl.load(q_at, mask=valid[:, None] & (lane < DIM)[None, :], other=0.0)

    # Keys low..stop-1 are seen by some row, keys inner..outer-1 by all of them; all but stop are multiples of BN.
    low = 0
    stop = last + 1
    inner = 0
    outer = (first + 1) // BN * BN
    if WINDOWED:
        low = tl.maximum(first + 1 - window, 0) // BN * BN
        inner = tl.minimum(tl.cdiv(tl.maximum(last + 1 - window, 0), BN) * BN, tl.cdiv(stop, BN) * BN)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(stop - low, splits), BN) * BN
        low += tl.program_id(2) * share
        stop = tl.minimum(stop, low + share)
        inner = tl.minimum(tl.maximum(inner, low), tl.cdiv(tl.maximum(stop, low), BN) * BN)
        outer = tl.minimum(tl.maximum(outer, low), tl.maximum(stop, low) // BN * BN)

    K += kv_head * stride_kh
    V += kv_head * stride_vh
    out = tl.zeros([BM, D], tl.float32)
    top = tl.full([BM], _UNSEEN, tl.float32)
    total = tl.zeros([BM], tl.float32)
    if WINDOWED:
        out, top, total = _over_keys(
            out, top, total, q, position, K, V, HIDDEN, low, tl.minimum(inner, stop), nkeys, stride_kn,
            stride_vn, scale, softcap, window, True, WINDOWED, HIDES, SOFTCAP, PRECISION, BN, D, DIM,
        )  # fmt: skip
    out, top, total = _over_keys(
        out, top, total, q, position, K, V, HIDDEN, tl.maximum(inner, low), outer, nkeys, stride_kn, stride_vn, scale,
        softcap, window, False, WINDOWED, HIDES, SOFTCAP, PRECISION, BN, D, DIM,
    )  # fmt: skip
    out, top, total = _over_keys(
        out, top, total, q, position, K, V, HIDDEN, tl.maximum(inner, outer), stop, nkeys, stride_kn,
        stride_vn, scale, softcap, window, True, WINDOWED, HIDES, SOFTCAP, PRECISION, BN, D, DIM,
    )  # fmt: skip

    if SPLIT:
        # [splits, heads, n, D + 2]: output, maximum, sum.
        spot = ((tl.program_id(2) * HEADS + head) * n + row).to(tl.int64) * (D + 2)
        tl.store(PART + spot[:, None] + lane[None, :], out, mask=valid[:, None])
        tl.store(PART + spot + D, top, mask=valid)
        tl.store(PART + spot + D + 1, total, mask=valid)
    else:
        out = out / total[:, None]
        o_at = OUT + row.to(tl.int64)[:, None] * stride_on + head[:, None] * stride_oh + lane[None, :]
        tl.store(o_at, out.to(OUT.dtype.element_ty), mask=valid[:, None] & (lane < DIM)[None, :])
        tl.store(NORMALISER + head * n + row, top + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["n", "splits"])
def _join(
    PART, OUT, NORMALISER, n, splits, stride_on, stride_oh, HEADS: tl.constexpr, MOST: tl.constexpr, D: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Put the parts of one row's head together."""
    row, head = tl.program_id(0), tl.program_id(1)
    lane, split = tl.arange(0, D), tl.arange(0, MOST)
    spot = ((split * HEADS + head) * n + row).to(tl.int64) * (D + 2)
    real = split < splits
    top = tl.load(PART + spot + D, mask=real, other=_UNSEEN)
    total = tl.load(PART + spot + D + 1, mask=real, other=0.0)
    out = tl.load(PART + spot[:, None] + lane[None, :], mask=real[:, None], other=0.0)
    highest = tl.max(top, 0)
    keep = tl.exp2(top - highest)
    whole = tl.sum(total * keep, 0)
    joined = tl.sum(out * keep[:, None], 0) / whole
    o_at = OUT + row.to(tl.int64) * stride_on + head * stride_oh + lane
    tl.store(o_at, joined.to(OUT.dtype.element_ty), mask=lane < DIM)
    tl.store(NORMALISER + head * n + row, highest + tl.log2(whole))


@triton.jit(do_not_specialize=["n", "nkeys", "window"])
def _score(
    Q, K, POSITION, HIDDEN, NORMALISER, INTO, n, nkeys, stride_qn, stride_qh, stride_kn, stride_kh, scale, softcap,
    window, share, row_share, HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOWED: tl.constexpr, HIDES: tl.constexpr,
    SOFTCAP: tl.constexpr, MAXIMUM: tl.constexpr, SQUARE: tl.constexpr, PRECISION: tl.constexpr,
    MEMBERS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Add a block of keys' share of the attention: over the rows of a head the maximum or mean, then over the heads."""
    start = tl.program_id(0) * BN
    column, lane = tl.arange(0, BN), tl.arange(0, D)
    key = start + column
    # The rows of a KV head's first query head, then those of the next one; MEMBERS is GROUP, padded.
    member, line = tl.arange(0, MEMBERS * BM) // BM, tl.arange(0, MEMBERS * BM) % BM
    sum_of_heads = tl.zeros([BN], tl.float32)
    for kv_head in range(HEADS // GROUP):
        k_at = K + start.to(tl.int64) * stride_kn + kv_head * stride_kh + column[None, :] * stride_kn + lane[:, None]
        k = tl.load(k_at, mask=(key < nkeys)[None, :] & (lane < DIM)[:, None], other=0.0)
        head = kv_head * GROUP + member
        of_heads = tl.zeros([MEMBERS, BN], tl.float32)
        for first in range(0, n, BM):
            row = first + line
            valid = (row < n) & (member < GROUP)
            position = tl.load(POSITION + row, mask=valid, other=-1).to(tl.int32)
            q_at = Q + row.to(tl.int64)[:, None] * stride_qn + head[:, None] * stride_qh + lane[None, :]
            q = tl.load(q_at, mask=valid[:, None] & (lane < DIM)[None, :], other=0.0)
            normaliser = tl.load(NORMALISER + head * n + row, mask=valid, other=0.0)
            seen = key[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            logits = _logits(q, k, scale, softcap, SOFTCAP, PRECISION)
            weight = tl.where(seen, tl.exp2(logits - normaliser[:, None]), 0.0)
            weight = tl.reshape(weight, [MEMBERS, BM, BN])
            of_heads = tl.maximum(of_heads, tl.max(weight, 1)) if MAXIMUM else of_heads + tl.sum(weight, 1)
        of_heads *= row_share
        sum_of_heads += tl.sum(of_heads * of_heads if SQUARE else of_heads, 0)
    if HIDES:
        hidden = tl.load(HIDDEN + key, mask=key < nkeys, other=1)
        sum_of_heads = tl.where(hidden == 0, sum_of_heads, 0.0)
    before = tl.load(INTO + key, mask=key < nkeys, other=0.0)
    tl.store(INTO + key, before + sum_of_heads * share, mask=key < nkeys)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows times heads and keys of a block, warps, and stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int

    def shared_bytes(self, dim: int, width: int, itemsize: int) -> int:
        """Shared memory that the block needs, about: rows of ``dim``, and a pipeline of keys with what they bring."""
        return (self.rows * dim + self.keys * width * self.stages) * itemsize


# By padded head size up to which they are used, best first; the first that fits the device's shared memory is taken.
# Float32 has no tensor cores of full precision, so its tiles are sized for registers.
TILES: dict[int, list[Tile]] = {
    64: [Tile(128, 128, 8, 3), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)],
    128: [Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)],
    256: [Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 1)],
}
FLOAT32_TILES: dict[int, list[Tile]] = {128: [Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)], 256: [Tile(16, 16, 4, 1)]}


@cache
def _device(device: torch.device) -> tuple[int, int]:
    """Shared memory of a block in bytes, and multiprocessors; round figures under the interpreter."""
    if device.type != "cuda":
        return 1 << 16, 4
    found: Any = torch.cuda.get_device_properties(device)
    return found.shared_memory_per_block_optin, found.multi_processor_count


def fitting(tiles: dict[int, list[Tile]], dim: int, width: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The first of ``tiles`` for a padded head size whose blocks fit the device: rows of ``dim``, keys that bring
    ``width`` numbers each. Raises `ValueError` for a head size larger than all."""
    room = _device(device)[0]
    for most, known in tiles.items():
        if dim <= most:
            return next((t for t in known if t.shared_bytes(dim, width, dtype.itemsize) <= room), known[-1])
    raise ValueError(f"heads of {dim} dims: the kernels take up to {max(tiles)}")


def tile(dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile for a padded head size, at most 256. Raises `ValueError` for a larger one."""
    return fitting(FLOAT32_TILES if dtype == torch.float32 else TILES, dim, 2 * dim, dtype, device)


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float, window: int | None = None,
    softcap: float | None = None, hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of ``q`` [n, heads, dim] at ascending ``positions`` [n] over ``k``, ``v`` [nkeys, kv_heads, dim].

    ``hidden`` [nkeys] uint8 is not zero where no row may look. Returns [n, heads, dim] and the base-2 logarithm of each
    row's sum of exponentials [heads, n] float32."""
    n, heads, dim = q.shape
    nkeys, kv_heads, _ = k.shape
    out = torch.empty((n, heads, dim), dtype=q.dtype, device=q.device)
    normaliser = torch.empty((heads, n), dtype=torch.float32, device=q.device)
    if not n:
        return out, normaliser
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    padded = max(16, triton.next_power_of_2(dim))
    shape = tile(padded, q.dtype, q.device)
    blocks = triton.cdiv(n * (heads // kv_heads), shape.rows)
    splits = _splits(blocks * kv_heads, nkeys, shape.keys, q.device)
    part = torch.empty((splits, heads, n, padded + 2), dtype=torch.float32, device=q.device) if splits > 1 else None
    _attend[(kv_heads, blocks, splits)](
        q, k, v, positions, hidden, out, normaliser, part, n, nkeys, splits, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1), scale, softcap or 0.0,
        window or 0, HEADS=heads, GROUP=heads // kv_heads, WINDOWED=window is not None and window < nkeys,
        HIDES=hidden is not None, SOFTCAP=softcap is not None, SPLIT=splits > 1, PRECISION="ieee",
        BM=shape.rows, BN=shape.keys, D=padded, DIM=dim, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if splits > 1:
        _join[(n, heads)](
            part, out, normaliser, n, splits, out.stride(0), out.stride(1), HEADS=heads, MOST=_MOST_SPLITS, D=padded,
            DIM=dim, num_warps=4,
        )  # fmt: skip
    return out, normaliser


def _splits(blocks: int, nkeys: int, keys: int, device: torch.device) -> int:
    """Parts that the keys are cut in, with some key blocks each, so that there are blocks for the whole device."""
    return _best_splits(blocks, min(nkeys // (4 * keys), _MOST_SPLITS), _device(device)[1])


@cache
def _best_splits(blocks: int, most: int, processors: int) -> int:
    """The number that keeps the processors busiest, each with one block at a time; parts cost about 1 % each."""
    if blocks >= processors:
        return 1
    return min(range(1, max(1, most) + 1), key=lambda s: triton.cdiv(blocks * s, processors) / s * (1 + s / 100))


def add_scores(
    q: Tensor, k: Tensor, positions: Tensor, normaliser: Tensor, into: Tensor, *, scale: float,
    reduce: Literal["max", "mean"], square: bool = False, window: int | None = None, softcap: float | None = None,
    hidden: Tensor | None = None,
) -> None:  # fmt: skip
    """Add to ``into`` [nkeys] float32 the maximum or mean over the rows of the softmax weights, or its ``square``,
    averaged over heads."""
    n, heads, dim = q.shape
    nkeys, kv_heads, _ = k.shape
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    padded = max(16, triton.next_power_of_2(dim))
    members = triton.next_power_of_2(heads // kv_heads)
    slow = q.dtype == torch.float32 or padded > 128
    rows = max(1, (32 if slow else 128) // members)
    keys = 32 if slow else 64
    _score[(triton.cdiv(nkeys, keys),)](
        q, k, positions, hidden, normaliser, into, n, nkeys, q.stride(0), q.stride(1), k.stride(0), k.stride(1), scale,
        softcap or 0.0, window or 0, 1.0 / heads, 1.0 if reduce == "max" else 1.0 / n, HEADS=heads,
        GROUP=heads // kv_heads, WINDOWED=window is not None and window < nkeys, HIDES=hidden is not None,
        SOFTCAP=softcap is not None, MAXIMUM=reduce == "max", SQUARE=square, PRECISION="ieee",
        MEMBERS=members, BM=rows, BN=keys, D=padded, DIM=dim, num_warps=4 if slow else 8, num_stages=2,
    )  # fmt: skip


def warm_up(
    *, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, windows: Iterable[int | None],
    softcap: float | None = None,
) -> None:  # fmt: skip
    """Compile what such a model needs, and run it once."""
    # A window's length is no part of the code. Few keys aren't split between blocks, many are.
    for window in {None if window is None else 1 for window in windows}:
        for nkeys in (32, 2048):
            q = torch.zeros(1, heads, dim, dtype=dtype, device=device)
            k = torch.zeros(nkeys, kv_heads, dim, dtype=dtype, device=device)
            positions = torch.full((1,), nkeys - 1, device=device)
            into = torch.zeros(nkeys, device=device)
            for hidden in (None, torch.zeros(nkeys, dtype=torch.uint8, device=device)):
                seen: dict[str, Any] = {"scale": 1.0, "window": window, "softcap": softcap, "hidden": hidden}
                _, normaliser = attend(q, k, k, positions, **seen)
                for square in (False, True) if nkeys == 32 else ():
                    add_scores(q, k, positions, normaliser, into, reduce="max", square=square, **seen)
