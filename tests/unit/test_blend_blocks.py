"""Working memory that is used again: never while anything still refers to it."""

import gc

import torch

from blendstore.blend import blocks
from blendstore.blend.blocks import uninitialised

CPU = torch.device("cpu")
SHAPE = (3, 2, 1 << 10, 3, 512)


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    blocks._free.clear()
    first = uninitialised(SHAPE, torch.float32, CPU)
    assert first.shape == SHAPE and first.dtype == torch.float32 and first.is_contiguous()
    where = first.data_ptr()
    view = first[1, 0, 5:9].fill_(7)
    del first
    gc.collect()
    other = uninitialised(SHAPE, torch.float32, CPU).zero_()
    assert other.data_ptr() != where and bool((view == 7).all()), "a view still holds it"
    del view
    gc.collect()
    assert uninitialised(SHAPE, torch.float32, CPU).data_ptr() == where


def test_shorter_prompts_fit_and_longer_ones_get_their_own() -> None:
    blocks._free.clear()
    first = uninitialised(SHAPE, torch.float32, CPU)
    del first
    gc.collect()
    longer = uninitialised((2, *SHAPE), torch.float32, CPU)
    assert longer.shape == (2, *SHAPE) and longer.zero_().numel() == 2 * 3 * 2 * 1024 * 3 * 512
    where = longer.data_ptr()
    del longer
    gc.collect()
    half = uninitialised(SHAPE, torch.bfloat16, CPU)
    assert half.data_ptr() == where and half.dtype == torch.bfloat16 and half.shape == SHAPE


def test_what_is_kept_is_bounded() -> None:
    blocks._free.clear()
    many = [uninitialised(SHAPE, torch.float32, CPU) for _ in range(5)]
    del many
    gc.collect()
    assert len(blocks._free) == 2
    huge = uninitialised((1 << 27,), torch.float32, CPU)
    small = uninitialised((16,), torch.float32, CPU)
    del huge, small
    gc.collect()
    assert len(blocks._free) == 2
