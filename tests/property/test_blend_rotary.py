"""Rotations compose: going there by any stops is going there."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_engine import rope

positions = st.integers(0, 20_000)


@settings(max_examples=60, deadline=None)
@given(
    positions,
    positions,
    positions,
    st.sampled_from(["half", "interleaved"]),
    st.sampled_from([0.7, 1.0, 1.4]),
    st.integers(1, 8),
)
def test_moving_in_two_steps_is_moving_once(a: int, b: int, c: int, pairing: str, scaling: float, pairs: int) -> None:
    table = rope(pairs, pairing=pairing, scaling=scaling).table()  # type: ignore[arg-type]
    k = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(a))
    at = [torch.tensor([p]) for p in (a, b, c)]
    once = table.rotate(k, *table.between(at[0], at[2]))
    twice = table.rotate(table.rotate(k, *table.between(at[0], at[1])), *table.between(at[1], at[2]))
    torch.testing.assert_close(twice, once, rtol=0, atol=5e-6)
    back = table.rotate(once, *table.between(at[2], at[0]))
    torch.testing.assert_close(back, k, rtol=0, atol=5e-6)
    torch.testing.assert_close(once.norm(), k.norm(), rtol=1e-5, atol=0)
