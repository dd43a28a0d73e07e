"""Formats of records in memory: what comes back is close, the bytes are the same for every token, and the store holds
more documents."""

import pytest
import torch

from blendstore.blend.kept import RecordError, format_of, packed_bytes_per_token
from blendstore.blend.model import Geometry
from blendstore.blend.records import LeaseRecords, write_record
from blendstore.codec.formats import FORMATS, GROUP, Format, FormatError, checked, holds
from tests.records import reserve, small_store, tenant, text

PACKED = [FORMATS["int8"], FORMATS["int4"]]


def kv_of(tokens: int, dim: int, heads: int = 2, layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random KV whose channels differ in width, as keys' do."""
    generator = torch.Generator().manual_seed(tokens * dim)
    width = torch.logspace(-1, 1, dim)
    return (torch.randn(layers, 2, tokens, heads, dim, generator=generator) * width).to(dtype)


@pytest.mark.parametrize("packing", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 256])
@pytest.mark.parametrize("dim", [16, 40, 64, 96, 128])
def test_case_c01_every_shape_comes_back_within_its_step(packing: Format, tokens: int, dim: int) -> None:
    """The error of an element is at most half the step of the group that it shares a scale with."""
    kv = kv_of(tokens, dim)
    packed = packing.pack(kv)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, tokens, 2, packing.head_bytes(dim, 2))
    back = packing.unpack(packed, torch.float32 if packing.name != "raw" else torch.bfloat16)
    error = (back.float() - kv.float()).abs()
    exact = kv.float()
    if packing.name == "raw":
        step = torch.zeros_like(exact)
    elif packing.name == "int8":
        step = (exact.abs().amax(-1, keepdim=True) / 127).expand_as(exact)
    else:
        step = torch.empty_like(exact)
        for first in range(0, dim, GROUP):
            part = exact[..., first : first + GROUP]
            step[..., first : first + GROUP] = (part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True)) / 15
        for first in range(0, tokens // GROUP * GROUP, GROUP):
            rows = exact[:, 0, first : first + GROUP]
            step[:, 0, first : first + GROUP] = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / 15
    assert (error <= 0.51 * step + 2e-3 * exact.abs().amax()).all()


@pytest.mark.parametrize("packing", PACKED, ids=lambda packing: packing.name)
def test_rows_of_some_layers_are_rows_of_all(packing: Format) -> None:
    """A loader unpacks layer by layer, and only the rows of a span."""
    packed = packing.pack(kv_of(70, 64))
    whole = packing.unpack(packed, torch.bfloat16)
    assert torch.equal(packing.unpack(packed[1], torch.bfloat16), whole[1])
    assert torch.equal(packing.unpack(packed, torch.bfloat16, slice(30, 50)), whole[:, :, 30:50])


@pytest.mark.parametrize("packing", PACKED, ids=lambda packing: packing.name)
def test_case_c01_constant_values_come_back_and_what_is_not_finite_is_refused(packing: Format) -> None:
    for value in (0.0, 3.0, -1e-30):
        back = packing.unpack(packing.pack(torch.full((1, 2, 40, 1, 32), value)), torch.float32)
        assert torch.allclose(back, torch.tensor(value), rtol=2e-3, atol=1e-6)
    for value in (float("nan"), float("inf"), 1e6):
        kv = kv_of(40, 32)
        kv[1, 0, 7, 1, 3] = value
        with pytest.raises(FormatError, match="finite"):
            checked(packing, kv)


def geometry(dim: int = 64) -> Geometry:
    return Geometry.plain(layers=3, kv_heads=2, head_dim=dim, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize("packing", FORMATS.values(), ids=FORMATS)
def test_case_c02_a_record_says_which_format_it_has(packing: Format) -> None:
    """Records of all formats lie in one store, and whoever reads one knows its format from its size."""
    shape, store, tokens = geometry(), small_store(), text(3, 16)
    kv = kv_of(16, 64)
    each = packed_bytes_per_token(shape, packing)
    reservation = reserve(store, tenant(), tokens, bytes_per_token=each)
    write_record(shape, reservation.buffer(0), [(k, v) for k, v in kv], 0, 16)
    assert reservation.commit() == 1
    lease = store.lookup(reservation.keys)
    meta = lease.meta(0)
    assert meta is not None and format_of(shape, meta.nbytes, meta.ntokens) is packing
    expected = packing.unpack(packing.pack(kv), torch.bfloat16)
    assert torch.equal(LeaseRecords(shape, [(lease, 0)]).kept(0).values(shape), expected)


def test_formats_differ_in_size_and_other_sizes_are_no_record() -> None:
    for dim in range(16, 257, 2):
        sizes = [packing.head_bytes(dim, 2) for packing in FORMATS.values()]
        assert len(set(sizes)) == len(sizes), dim
    with pytest.raises(RecordError, match="bytes for 16 tokens"):
        format_of(geometry(), 16 * 100, 16)
    assert not FORMATS["int4"].fits(8) and not FORMATS["int8"].fits(17)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_largest_values_that_a_format_holds_come_back_finite(name: str) -> None:
    """Also in float16, whose end is near: a scale that is rounded up makes more of them."""
    packing = FORMATS[name]
    for value in (64_992.0, 65_504.0):
        kv = torch.zeros(1, 2, 40, 2, 32, dtype=torch.float16)
        kv[..., ::2], kv[..., 1] = value, -value
        if bool(holds(packing, kv)):
            assert bool(packing.unpack(packing.pack(kv), torch.float16).isfinite().all()), value
        else:
            assert value == 65_504.0


def test_scales_lie_at_even_addresses() -> None:
    """A device reads float16 nowhere else: an odd address ends its context."""
    for dim in range(2, 257):
        for name, element in (("int8", 1.0), ("int4", 0.5)):
            packing = FORMATS[name]
            if packing.fits(dim):
                assert dim * element % 2 == 0 and packing.head_bytes(dim, 2) % 2 == 0, (name, dim)
    assert not FORMATS["int4"].fits(18) and FORMATS["int8"].fits(18) and FORMATS["int4"].fits(20)


@pytest.mark.parametrize(("name", "times"), [("int8", 1.9), ("int4", 3.0)])
def test_the_same_memory_holds_more_documents(name: str, times: float) -> None:
    shape = geometry(128)
    raw, packed = (packed_bytes_per_token(shape, FORMATS[n]) for n in ("raw", name))
    assert raw / packed > times
