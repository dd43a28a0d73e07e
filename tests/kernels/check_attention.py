"""The attention and score kernels against a dense float64 reference."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from blendstore.blend import fused, triton_attention
from blendstore.blend.attention import RowAttention
from blendstore.blend.triton_attention import Tile
from tests.fake_engine import dense
from tests.kernels import DEVICE, DTYPES, INTERPRETED, TOLERANCE, draw


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int


LAYOUTS = [Heads(2, 2, 64), Heads(6, 2, 16), Heads(4, 1, 128), Heads(7, 1, 80), Heads(2, 1, 256)]
TILES = {256: [Tile(32, 32, 4, 1)]}
SCORES: list[tuple[Literal["max", "mean"], bool]] = [("max", False), ("max", True), ("mean", False), ("mean", True)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, tiles that a small prompt has many of."""
    if INTERPRETED:
        monkeypatch.setattr(triton_attention, "TILES", TILES)
        monkeypatch.setattr(triton_attention, "FLOAT32_TILES", TILES)


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    fused.fallbacks.clear()
    yield
    assert not fused.fallbacks


def rows_of(n: int, nkeys: int, seed: int = 0) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randperm(nkeys, generator=make)[:n].sort().values


def seen_by(positions: torch.Tensor, nkeys: int, window: int | None, hidden: torch.Tensor | None) -> torch.Tensor:
    distance = positions[:, None] - torch.arange(nkeys)
    out = (distance >= 0) & (distance < (window or nkeys))
    if hidden is not None:
        out[:, hidden] = False
    return out


def holes(positions: torch.Tensor, nkeys: int) -> torch.Tensor:
    """Keys to hide: never a row itself."""
    others = torch.ones(nkeys, dtype=torch.bool)
    others[positions] = False
    return others.nonzero()[:, 0][::5]


def check(
    heads: Heads, n: int, nkeys: int, dtype: torch.dtype, *, window: int | None = None, softcap: float | None = None,
    hide: bool = False, positions: torch.Tensor | None = None,
) -> None:  # fmt: skip
    positions = rows_of(n, nkeys) if positions is None else positions
    hidden = holes(positions, nkeys) if hide else None
    q = draw(n, heads.query, heads.dim, seed=1, dtype=dtype)
    k, v = (draw(nkeys, heads.kv, heads.dim, seed=s, dtype=dtype) for s in (2, 3))
    scale = heads.dim**-0.5
    seen = seen_by(positions, nkeys, window, hidden)
    wanted, weights = dense(q.cpu().float(), k.cpu().float(), v.cpu().float(), seen, scale, softcap)
    rows = RowAttention(positions.to(DEVICE), nkeys, None if hidden is None else hidden.to(DEVICE))
    # q as engines hand it over: heads outside, rows inside.
    outside = q.transpose(0, 1).contiguous().transpose(0, 1)
    found = rows(outside, k, v, scale=scale, window=window, softcap=softcap)
    torch.testing.assert_close(found.cpu().float(), wanted, rtol=0, atol=TOLERANCE[dtype])
    for reduce, square in SCORES if n < 30 else ():
        into = torch.ones(nkeys, device=DEVICE)
        found = rows.scored(
            q, k, v, scale=scale, window=window, softcap=softcap, reduce=reduce, square=square, into=into
        )
        torch.testing.assert_close(found.cpu().float(), wanted, rtol=0, atol=TOLERANCE[dtype])
        of_head = weights.amax(1) if reduce == "max" else weights.mean(1)
        share = (of_head.square() if square else of_head).mean(0)
        torch.testing.assert_close(into.cpu().double(), 1 + share, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        *((heads, torch.float32) for heads in LAYOUTS),
        *((heads, dtype) for heads in LAYOUTS[2:4] for dtype in DTYPES[1:]),
    ],
)
def test_head_layouts(heads: Heads, dtype: torch.dtype) -> None:
    """One head or seven to a KV head, head sizes that are no power of two."""
    check(heads, 13, 70, dtype)


@pytest.mark.parametrize(
    ("window", "softcap", "hide"),
    [(1, None, True), (1, 3.0, False), (33, None, False), (33, 3.0, True), (69, None, True), (70, None, False),
     (1000, 3.0, True)],
)  # fmt: skip
def test_windows_softcap_and_hidden_keys(window: int, softcap: float | None, hide: bool) -> None:
    check(Heads(3, 1, 16), 13, 70, torch.float32, window=window, softcap=softcap, hide=hide)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("hide", [False, True])
def test_softcap_and_hidden_keys_without_a_window(softcap: float | None, hide: bool) -> None:
    check(Heads(2, 1, 32), 13, 70, torch.float32, softcap=softcap, hide=hide)


@pytest.mark.parametrize(("n", "nkeys"), [(1, 1), (1, 100), (3, 100), (39, 40), (70, 81)])
@pytest.mark.parametrize("window", [None, 20])
def test_row_counts(n: int, nkeys: int, window: int | None) -> None:
    """From one row over many keys, which are split between blocks, to nearly all rows."""
    check(Heads(2, 1, 16), n, nkeys, torch.float32, window=window)


@pytest.mark.parametrize("window", [None, 25])
def test_keys_split_between_blocks(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows of a prompt, where each block takes a part of the keys, and parts may hold none that is seen."""
    monkeypatch.setattr(triton_attention, "_splits", lambda *_: 4)
    for n in (1, 5):
        check(Heads(2, 1, 16), n, 120, torch.float32, window=window, hide=True, positions=torch.arange(120 - n, 120))
    check(Heads(2, 1, 16), 2, 40, torch.float32, window=window, positions=torch.tensor([0, 39]))


def test_later_keys_never_change_a_row() -> None:
    """Invariant 2, bit for bit: other keys behind a row's position leave its output as it is."""
    nkeys, n = 80, 20
    positions = rows_of(n, nkeys)
    q, k, v = draw(n, 2, 32, seed=1), draw(nkeys, 1, 32, seed=2), draw(nkeys, 1, 32, seed=3)
    rows = RowAttention(positions.to(DEVICE), nkeys)
    for window, softcap in ((None, None), (30, None), (None, 4.0)):
        before = rows(q, k, v, scale=0.2, window=window, softcap=softcap)
        for row in (0, 9, n - 1):
            stop = int(positions[row]) + 1
            other_k, other_v = k.clone(), v.clone()
            other_k[stop:], other_v[stop:] = 50.0, -70.0
            after = rows(q, other_k, other_v, scale=0.2, window=window, softcap=softcap)
            assert torch.equal(after[: row + 1], before[: row + 1])
            assert row == n - 1 or not torch.equal(after[row + 1 :], before[row + 1 :])


def test_the_same_input_gives_the_same_bits() -> None:
    """Scores that differ in the last bit would pick other tokens on the next run, or on the next rank."""
    q, k, v = draw(16, 4, 64, seed=1), draw(140, 1, 64, seed=2), draw(140, 1, 64, seed=3)
    rows = RowAttention(torch.arange(124, 140, device=DEVICE), 140)
    results = []
    for _ in range(2):
        into = torch.zeros(140, device=DEVICE)
        results.append((rows.scored(q, k, v, scale=0.125, reduce="max", into=into), into))
    for out, into in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(into, results[0][1])


def test_no_rows() -> None:
    rows = RowAttention(torch.empty(0, dtype=torch.int64, device=DEVICE), 10)
    k = draw(10, 1, 16, seed=1)
    assert rows(k.new_empty(0, 2, 16), k, k, scale=1.0).shape == (0, 2, 16)
