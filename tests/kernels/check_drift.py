"""The drift kernels against the formula in plain torch."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blendstore.blend import fused, triton_drift
from blendstore.blend.drift import Documents, DriftCorrection, DriftSettings
from blendstore.blend.triton_attention import Tile
from blendstore.plan import Span, SpanKind
from tests.fake_engine import Rope, rope
from tests.kernels import DEVICE, DTYPES, INTERPRETED, TOLERANCE, draw

TOKENS, KV = 150, 2
# Rows of document 7 stand on both sides of document 3's; nothing of document 9 is recomputed, and all of document 4.
SPANS = [
    Span(SpanKind.REUSED, 4, 44, 0, 0, 50, 7, 4),
    Span(SpanKind.REUSED, 50, 85, 1, 0, 9, 3, 50),
    Span(SpanKind.REUSED, 85, 110, 2, 0, 80, 7, 4),
    Span(SpanKind.REUSED, 112, 122, 3, 0, 9, 9, 112),
    Span(SpanKind.REUSED, 140, 142, 4, 0, 9, 4, 140),
]
NUMBERS = {7: 2, 3: 0, 9: 3, 4: 1}
SELECTED = [*range(5, 40), 52, 55, *range(60, 84), 90, 95, 96, 109, 140, 141]
ROPES = [rope(8), rope(4, 500.0, "interleaved", 1.25), rope(6, 300.0), rope(8, pairing="interleaved")]
SHARP = DriftSettings(temperature=0.05, prior=0.0)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under the interpreter, tiles that a small prompt has several of."""
    if INTERPRETED:
        monkeypatch.setattr(triton_drift, "TILES", {256: [Tile(32, 16, 4, 1)]})
        monkeypatch.setattr(triton_drift, "FLOAT32_TILES", {256: [Tile(32, 16, 4, 1)]})
    fused.fallbacks.clear()
    yield
    assert not fused.fallbacks


def correction(settings: DriftSettings, v: Tensor, selected: list[int] = SELECTED) -> DriftCorrection:
    groups = [NUMBERS[next(s.group for s in SPANS if s.start <= p < s.stop)] for p in selected]
    positions, numbers = torch.tensor(selected).to(DEVICE), torch.tensor(groups).to(DEVICE)
    made = DriftCorrection(settings, Documents.of(SPANS, NUMBERS, DEVICE), positions, numbers)
    made.weigh([v, v.flip(2)])
    return made


def layer(dim: int, dtype: torch.dtype, count: int = len(SELECTED)) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """K and V, and fresh ones, of rows that are alike to different degrees."""
    k, v = draw(TOKENS, KV, dim, seed=1, dtype=dtype), draw(TOKENS, KV, dim, seed=2, dtype=dtype)
    v[::3] = v[0] + 0.3 * v[::3]
    v[7] = 0
    return (k, v), [draw(count, KV, dim, seed=s, dtype=dtype) for s in (3, 4)]


def check(settings: DriftSettings, turn: Rope | None, dim: int, dtype: torch.dtype) -> None:
    kv, fresh = layer(dim, dtype)
    made = correction(settings, kv[1])
    table = None if turn is None else turn.table()
    wanted = kv[0].to(torch.float32, copy=True), kv[1].to(torch.float32, copy=True)
    made._plain(table, *wanted, *(t.float() for t in fresh))
    # The second layer uses what the first one has worked out.
    for _ in range(1 if INTERPRETED else 2):
        found = kv[0].clone(), kv[1].clone()
        made.apply(table, *found, *fresh)
        for a, b, before in zip(found, wanted, kv, strict=True):
            # The result's own rounding, and the weights' and differences', which changes what is added by a little.
            eps, added = torch.finfo(dtype).eps, (b - before.float()).abs().max()
            beyond = (a.float() - b).abs() - eps / 2 * b.abs()
            assert float(beyond.max()) <= eps * float(added) + TOLERANCE[torch.float32]
    untouched = [*range(4), *range(44, 50), 110, 111, *range(122, 140), *range(142, 150)]
    for a, before in zip(found, kv, strict=True):
        assert torch.equal(a[untouched], before[untouched])
        assert not torch.equal(a[112:122], before[112:122]) or not settings.elsewhere
        assert not torch.equal(a[85:110], before[85:110])


@pytest.mark.parametrize("turn", [None, *ROPES])
def test_rotary_layouts(turn: Rope | None) -> None:
    """No rotation, all dims or some of them, both ways of pairing: what isn't rotated is carried as it is."""
    check(DriftSettings(), turn, 16, torch.float32)


@pytest.mark.parametrize(("dim", "pairs"), [(24, 12), (40, 20), (80, 16), (256, 128)])
def test_head_sizes(dim: int, pairs: int) -> None:
    check(DriftSettings(), rope(pairs), dim, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        DriftSettings(elsewhere=0.0),
        DriftSettings(sample=3),
        DriftSettings(sample=1, elsewhere=5.0),
        DriftSettings(0.5, math.inf, 0.0, prior=8.0),
        SHARP,
    ],
)
def test_settings(settings: DriftSettings, dtype: torch.dtype) -> None:
    """Own documents only, a sample of few, of one that stands for many, the mean of a document, and weights that are
    far apart."""
    check(settings, rope(8), 16, dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_low_precision_is_within_one_rounding(dtype: torch.dtype) -> None:
    check(DriftSettings(), rope(32), 64, dtype)


@pytest.mark.parametrize("selected", [[5], [109], [60, 61]])
def test_few_recomputed_rows(selected: list[int]) -> None:
    (k, v), fresh = layer(16, torch.float32, len(selected))
    made = correction(DriftSettings(), v, selected)
    wanted = k.clone(), v.clone()
    made._plain(None, *wanted, *fresh)
    made.apply(None, k, v, *fresh)
    torch.testing.assert_close(k, wanted[0], rtol=0, atol=TOLERANCE[torch.float32])
    torch.testing.assert_close(v, wanted[1], rtol=0, atol=TOLERANCE[torch.float32])


def test_without_any_weight_nothing_is_added() -> None:
    """A document of which nothing was recomputed, no other documents, no prior: a sum of no weights."""
    settings = DriftSettings(elsewhere=0.0, prior=0.0)
    for way in ("apply", "_plain"):
        (k, v), fresh = layer(16, torch.float32)
        before = k.clone(), v.clone()
        getattr(correction(settings, v), way)(None, k, v, *fresh)
        assert torch.equal(k[112:122], before[0][112:122]) and torch.equal(v[112:122], before[1][112:122])
        assert bool(k.isfinite().all()) and bool(v.isfinite().all())


def test_the_same_input_gives_the_same_bits() -> None:
    results = []
    for _ in range(2):
        (k, v), fresh = layer(64, DTYPES[-1])
        correction(DriftSettings(), v).apply(rope(32).table(), k, v, *fresh)
        results.append((k, v))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_failing_kernel_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain formula takes over from the very same K and V."""
    monkeypatch.setattr(fused, "_broken", set())
    (k, v), fresh = layer(16, torch.float32)
    wanted = k.clone(), v.clone()
    made = correction(DriftSettings(), v)
    made._plain(None, *wanted, *fresh)

    class Broken:
        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("out of shared memory")

    monkeypatch.setattr(triton_drift, "_carry", Broken())
    made.apply(None, k, v, *fresh)
    assert torch.equal(k, wanted[0]) and torch.equal(v, wanted[1])
    assert fused.fallbacks.pop("drift correction") == 1
