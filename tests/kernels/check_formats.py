"""Packed records by kernel, against `Format.pack` and `Format.unpack` in plain torch."""

from collections.abc import Iterator

import pytest
import torch

from blendstore.blend import fused
from blendstore.blend.packing import Packing
from blendstore.codec.formats import FORMATS, Format
from tests.kernels import DEVICE, DTYPES, draw

PACKED = [FORMATS["int8"], FORMATS["int4"]]


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    fused.fallbacks.clear()
    yield
    assert not fused.fallbacks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packing", PACKED, ids=lambda packing: packing.name)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 16), (32, 40), (70, 64), (33, 80), (64, 128)])
def test_a_record_packed_by_kernel_comes_back_as_one_packed_plainly(
    packing: Format, dtype: torch.dtype, tokens: int, dim: int
) -> None:
    """Some of a larger gather's rows, so strides differ. At a tie of two steps the device may choose the other one: one
    step of difference in few elements, the same scales."""
    wide = torch.logspace(-1, 1, dim, device=DEVICE, dtype=torch.float32)
    kv = (draw(3, 2, tokens + 9, 2, dim, seed=tokens).float() * wide).to(dtype)[:, :, 4 : 4 + tokens]
    packs: Packing[str] = Packing(DEVICE)
    found = packs.packed("record", packing, kv)
    packs.tell()
    wanted = packing.pack(kv.contiguous())
    assert found.shape == wanted.shape and found.dtype == torch.uint8 and packs.refused() == []
    scales = slice(dim if packing.name == "int8" else dim // 2, None)
    assert torch.equal(found[..., scales], wanted[..., scales])
    values = [packing.unpack(t, torch.float32) for t in (found, wanted)]
    assert float((values[0] != values[1]).float().mean()) < 1e-3
    step = (kv.float().abs().amax() / 7).item()
    torch.testing.assert_close(*values, rtol=0, atol=step)


@pytest.mark.parametrize("packing", PACKED, ids=lambda packing: packing.name)
@pytest.mark.parametrize("part", [0, 1])
def test_what_a_format_does_not_hold_is_told_of_its_record_alone(packing: Format, part: int) -> None:
    packs: Packing[int] = Packing(DEVICE)
    for key, value in enumerate((1.0, float("nan"), float("-inf"), 1e5, 2.0)):
        kv = draw(2, 2, 40, 2, 32, seed=key)
        kv[1, part, 35, 1, 31] = value
        packs.packed(key, packing, kv)
    packs.tell()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert packs.refused() == [1, 2, 3]
