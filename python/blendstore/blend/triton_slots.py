"""A kernel over rows of an engine's KV pool: all layers' K and V to or from one tensor, in one launch.

The pool is one buffer for each layer and part, given by its address; the heads of a row may stand apart, as where K
and V of a head lie side by side. A dense tensor of n tokens is [layers, 2, n, kv_heads, dim]. Where a token's rows
stand in it is a place in part 0 and a pitch from one part to the next, both in rows, so that several records of
different lengths can lie behind one another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 8, 1024


@triton.jit(do_not_specialize=["count"])
def _move(
    ADDRESS, SLOT, PLACE, PITCH, DENSE, count, stride_slot, WIDTH: tl.constexpr, HEAD: tl.constexpr,
    APART: tl.constexpr, GATHERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    item, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    pool = tl.load(ADDRESS + part).to(tl.pointer_type(DENSE.dtype.element_ty))
    pool = tl.multiple_of(pool, 16)
    real = item < count
    slot = tl.load(SLOT + item, mask=real, other=0).to(tl.int64) * stride_slot
    place = tl.load(PLACE + item, mask=real, other=0).to(tl.int64)
    place = (place + part * tl.load(PITCH + item, mask=real, other=0).to(tl.int64)) * WIDTH
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = real[:, None] & (column < WIDTH)[None, :]
        inside = column // HEAD * APART + column % HEAD
        there, here = pool + slot[:, None] + inside[None, :], DENSE + place[:, None] + column[None, :]
        if GATHERS:
            tl.store(here, tl.load(there, mask=mask), mask=mask)
        else:
            tl.store(there, tl.load(here, mask=mask), mask=mask)


def move(
    addresses: Tensor, slots: Tensor, places: Tensor, pitches: Tensor, dense: Tensor, *, width: int, stride: int,
    head: int, apart: int, gathers: bool,
) -> None:  # fmt: skip
    """Between ``dense`` (any shape, contiguous) and rows ``slots`` [n] of the buffers at ``addresses`` [parts] int64,
    rows of ``width`` elements ``stride`` apart, in each of them heads of ``head`` elements ``apart`` from one another.
    ``places`` and ``pitches`` [n] are in rows of ``dense``."""
    n = slots.shape[0]
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    _move[(triton.cdiv(n, _ROWS), addresses.shape[0])](
        addresses, slots, places, pitches, dense, n, stride, WIDTH=width, HEAD=head, APART=apart, GATHERS=gathers,
        ROWS=_ROWS, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
