"""Rows with positions of their own see exactly the keys up to their position: against a dense float64 reference."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from blendstore._core import StoreError, attend
from blendstore.blend import attention, fused
from blendstore.blend.attention import RowAttention
from tests.fake_engine import dense
from tests.ways import WAYS, one_way


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from one_way(request.param, attention, monkeypatch)


def draw(n: int, nkeys: int, heads: int, kv_heads: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(seed)
    positions = torch.randperm(nkeys, generator=make)[:n].sort().values
    q, k, v = (torch.randn(m, h, dim, generator=make) for m, h in ((n, heads), (nkeys, kv_heads), (nkeys, kv_heads)))
    return positions, q, k, v


def seen(positions: torch.Tensor, nkeys: int, window: int | None, hidden: torch.Tensor | None) -> torch.Tensor:
    distance = positions[:, None] - torch.arange(nkeys)
    out = (distance >= 0) & (distance < (window or nkeys))
    if hidden is not None:
        out[:, hidden] = False
    return out


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 7, 1000])
@pytest.mark.parametrize(("n", "heads", "kv_heads"), [(1, 4, 4), (37, 9, 3), (300, 4, 1)])
def test_matches_a_dense_reference(
    n: int, heads: int, kv_heads: int, window: int | None, softcap: float | None, hide: bool
) -> None:
    nkeys = 400
    positions, q, k, v = draw(n, nkeys, heads, kv_heads, 16)
    hidden = None
    if hide:  # never a row itself: a row always has its own key
        others = torch.ones(nkeys, dtype=torch.bool)
        others[positions] = False
        hidden = others.nonzero()[:, 0][::5]
    rows = RowAttention(positions, nkeys, hidden)
    out, weights = dense(q, k, v, seen(positions, nkeys, window, hidden), 0.3, softcap)
    for _ in range(2):  # the second time with kept masks
        found = rows(q, k, v, scale=0.3, window=window, softcap=softcap)
        torch.testing.assert_close(found, out, rtol=0, atol=2e-5)
        found, shares = rows.weighted(q, k, v, scale=0.3, window=window, softcap=softcap)
        torch.testing.assert_close(found, out, rtol=0, atol=2e-5)
        torch.testing.assert_close(shares.double(), weights, rtol=0, atol=2e-5)


def test_one_object_serves_layers_with_different_windows() -> None:
    """Masks are kept by window: a layer must never get another layer's."""
    positions, q, k, v = draw(90, 100, 2, 2, 8)
    rows = RowAttention(positions, 100)
    for window in (None, 9, None, 30, 9):
        for call in (rows, lambda *t, **how: rows.weighted(*t, **how)[0]):
            found = call(q, k, v, scale=1.0, window=window)
            expected = dense(q, k, v, seen(positions, 100, window, None), 1.0)[0]
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_masks_too_large_to_keep_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_KEPT", 10)
    monkeypatch.setattr(attention, "readable", lambda x: False)
    positions, q, k, v = draw(200, 300, 2, 1, 8)
    rows = RowAttention(positions, 300)
    found = rows(q, k, v, scale=1.0)
    assert not rows._masks
    torch.testing.assert_close(found, dense(q, k, v, seen(positions, 300, None, None), 1.0)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("count", [40, 300])
def test_whole_prompt_in_order_is_plain_causal_attention(count: int) -> None:
    _, q, k, v = draw(count, count, 4, 2, 16)
    rows = RowAttention(torch.arange(count), count)
    for window in (None, 5):
        found = rows(q, k, v, scale=0.25, window=window)
        expected = dense(q, k, v, seen(torch.arange(count), count, window, None), 0.25)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("window", [None, 50])
def test_later_keys_never_change_a_row(window: int | None, softcap: float | None) -> None:
    """Invariant 2, bit for bit: other keys behind a row's position leave its output as it is."""
    positions, q, k, v = draw(150, 400, 6, 2, 16)
    rows = RowAttention(positions, 400)
    before = rows(q, k, v, scale=0.25, window=window, softcap=softcap)
    for row in (0, 70, 149):
        stop = int(positions[row]) + 1
        other_k, other_v = k.clone(), v.clone()
        other_k[stop:], other_v[stop:] = 50.0, -70.0
        after = rows(q, other_k, other_v, scale=0.25, window=window, softcap=softcap)
        assert torch.equal(after[: row + 1], before[: row + 1])
        assert row == 149 or not torch.equal(after[row + 1 :], before[row + 1 :])


@pytest.mark.parametrize("positions", [[3, 3], [4, 2], [-1, 2], [0, 10]])
def test_refuses_rows_that_are_no_ascending_positions(positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"ascending positions within 0\.\.9"):
        RowAttention(torch.tensor(positions), 10)


def test_no_rows_is_fine() -> None:
    rows = RowAttention(torch.empty(0, dtype=torch.int64), 10)
    assert rows(torch.empty(0, 2, 4), torch.ones(10, 1, 4), torch.ones(10, 1, 4), scale=1.0).shape == (0, 2, 4)


def test_rust_takes_over_what_it_can_and_nothing_else(way: str) -> None:
    """Keys with strides, other types, odd dimensions stay in torch; rows may have strides, as engines give them."""
    positions, q, k, v = draw(20, 60, 4, 2, 8)
    rows = RowAttention(positions, 60)
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    found = rows(strided, k, v, scale=0.5)
    assert bool(rows._masks) == (way == "plain")
    expected = rows._plain(q, k, v, 0.5, None, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    apart = k.repeat_interleave(2, 0)[::2]
    torch.testing.assert_close(rows(q, apart, v, scale=0.5), expected, rtol=0, atol=2e-6)
    assert rows(q.double(), k.double(), v.double(), scale=0.5).dtype == torch.float64
    odd = (q[..., :7], k[..., :7].contiguous(), v[..., :7].contiguous())
    torch.testing.assert_close(rows(*odd, scale=0.5), rows._plain(*odd, 0.5, None, None), rtol=0, atol=2e-6)


def test_the_number_of_threads_changes_no_bit() -> None:
    positions, q, k, v = draw(90, 300, 6, 2, 16)
    one, three = np.empty(q.shape, np.float32), np.empty(q.shape, np.float32)
    for out, threads in ((one, 1), (three, 3)):
        attend(q.numpy(), k.numpy(), v.numpy(), positions.numpy(), out, scale=0.3, threads=threads)
    assert np.array_equal(one, three)


def test_rust_refuses_what_does_not_fit() -> None:
    """By name, and without reading or writing out of bounds."""
    positions, q, k, v = (t.numpy() for t in draw(5, 20, 4, 2, 8))
    hidden = np.zeros(20, np.uint8)
    good: dict[str, Any] = {"q": q, "k": k, "v": v, "positions": positions, "out": np.zeros_like(q), "hidden": hidden}
    whole = np.zeros(2 * q.size, np.float32)
    halves = whole[: q.size].reshape(q.shape), whole[q.size - 8 : -8].reshape(q.shape)
    for name, bad in (
        ("q", {"q": q[0]}), ("q", {"q": q[:4]}), ("k", {"k": k[..., 0]}), ("k", {"k": k[..., :4].copy()}),
        ("k, v", {"v": v[:19]}), ("v", {"v": v[:, :1].copy()}), ("out", {"out": np.zeros((5, 2, 8), np.float32)}),
        ("out", {"out": np.zeros_like(q)[:4]}), ("q", {"q": q.astype(np.float64)}), ("hidden", {"hidden": hidden[:19]}),
        ("heads, kv_heads", {"k": np.zeros((20, 3, 8), np.float32), "v": np.zeros((20, 3, 8), np.float32)}),
        ("q", {"positions": positions[:4]}), ("positions", {"positions": positions[::-1].copy()}),
        ("positions", {"positions": positions + 20}), ("positions", {"positions": positions - 20}),
        ("q", {"q": halves[0], "out": halves[1]}), ("window", {"window": 0}),
    ):  # fmt: skip
        with pytest.raises(StoreError, match=rf"^{name} = "):
            attend(**{**good, **bad}, scale=1.0)
        assert not good["out"].any()
    attend(**good, scale=1.0)
    assert good["out"].all()


def test_without_rust_torch_does_the_same(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A call that Rust refuses is done in torch, is counted, and Rust isn't asked again."""
    if way == "plain":
        return
    positions, q, k, v = draw(20, 60, 4, 2, 8)
    rows = RowAttention(positions, 60)
    expected = rows(q, k, v, scale=0.5)

    def broken(*_: object, **__: object) -> None:
        raise StoreError("no")

    monkeypatch.setattr(attention, "attend_in_rust", broken)
    for count in (1, 2):
        torch.testing.assert_close(rows(q, k, v, scale=0.5), expected, rtol=0, atol=2e-6)
        assert fused.fallbacks["attention in Rust"] == count
    fused.fallbacks.clear()
