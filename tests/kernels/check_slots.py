"""Rows of an engine's pool by the kernel and in plain torch: gathered into records, scattered from a blend's KV."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blendstore.blend import fused
from blendstore.blend.slots import SlotRows
from tests.kernels import DEVICE, DTYPES

LAYERS, SLOTS = 3, 40
SHAPES = [(2, 16), (3, 24), (1, 2048)]
"""KV heads and their size: a power of two, none, and more than one step of the kernel's columns."""


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    fused.fallbacks.clear()
    yield
    assert not fused.fallbacks


def pool_of(shape: tuple[int, int], dtype: torch.dtype, apart: bool = False) -> list[tuple[Tensor, Tensor]]:
    """With ``apart``, a head's K and V stand side by side."""
    heads, dim = shape
    both = torch.randn(LAYERS, SLOTS, heads, 2 * dim, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)
    if apart:
        return [(layer[..., :dim], layer[..., dim:]) for layer in both]
    return [(layer[..., :dim].contiguous(), layer[..., dim:].contiguous()) for layer in both]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_records_of_different_lengths_are_gathered_behind_one_another(
    shape: tuple[int, int], dtype: torch.dtype, apart: bool
) -> None:
    """Bit for bit, for slots in any order, one of them twice."""
    pool = pool_of(shape, dtype, apart)
    rows = SlotRows(pool)
    slots = torch.tensor([3, 9, 1, 22, 39, 0, 7, 12, 13, 3, 15], device=DEVICE)
    lengths = [4, 1, 6]
    out = torch.zeros(rows.numel(11), dtype=dtype, device=DEVICE)
    rows.gather(slots, lengths, out)
    records = torch.split(out, [rows.numel(length) for length in lengths])
    for record, taken in zip(records, torch.split(slots, lengths), strict=True):
        wanted = torch.stack([torch.stack([k[taken], v[taken]]) for k, v in pool])
        assert torch.equal(record.view(wanted.shape), wanted)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kv_is_scattered_to_its_slots_and_no_other(shape: tuple[int, int], dtype: torch.dtype, apart: bool) -> None:
    """From the middle of a blend's KV; no token at all is allowed."""
    pool = pool_of(shape, dtype, apart)
    wanted = [(k.contiguous().clone(), v.contiguous().clone()) for k, v in pool]
    kv = torch.randn(LAYERS, 2, 9, *shape).to(DEVICE, dtype)
    slots = torch.tensor([30, 2, 17, 4, 11], device=DEVICE)
    for index, (k, v) in enumerate(wanted):
        k[slots], v[slots] = kv[index, 0, 3:8], kv[index, 1, 3:8]
    rows = SlotRows(pool)
    rows.scatter(slots, kv, 3)
    rows.scatter(slots[:0], kv, 9)
    for pair, other in zip(pool, wanted, strict=True):
        assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])


def test_rows_are_copied_from_slot_to_slot() -> None:
    """And a warm-up changes nothing."""
    pool = pool_of((2, 16), torch.float32)
    rows, before = SlotRows(pool), [(k.clone(), v.clone()) for k, v in pool]
    rows.warm_up()
    assert all(
        torch.equal(a, b) for pair, old in zip(pool, before, strict=True) for a, b in zip(pair, old, strict=True)
    )
    source, target = torch.tensor([1, 2, 3], device=DEVICE), torch.tensor([20, 5, 9], device=DEVICE)
    rows.copy(source, target)
    for pair, old in zip(pool, before, strict=True):
        assert torch.equal(pair[0][target], old[0][source]) and torch.equal(pair[1][target], old[1][source])
