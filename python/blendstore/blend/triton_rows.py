"""A kernel over rows of the working KV: keys turned to their new positions, in one launch for all rows of a layer.

Cosines and sines are those of `RotaryTable.kept`: [positions, pairs] float32. Everything is computed in float32 and
rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rotary import RotaryTable

_ROWS = 16


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


def pairs_of(table: RotaryTable | None) -> dict[str, int]:
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
        **pairs_of(table), num_warps=4,
    )  # fmt: skip


def warm_up(
    *, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, tables: Iterable[RotaryTable | None]
) -> None:
    """Compile what such a model needs, and run it once."""
    k = torch.zeros(16, kv_heads, dim, dtype=dtype, device=device)
    rows = torch.arange(16, dtype=torch.int32, device=device)
    for table in tables:
        if table is not None:
            turn(table, k, rows, rows, 16)
