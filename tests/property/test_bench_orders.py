"""Derangements and bootstrap shares for any size."""

import random

from hypothesis import given
from hypothesis import strategies as st

from blendstore.bench.shuffle_doc_qa import derangements
from blendstore.bench.stats import Bootstrap, kind_shares


@given(st.integers(2, 60), st.integers(0, 2**32))
def test_derangements_are_distinct_permutations_without_fixed_points(n: int, seed: int) -> None:
    found = derangements(n, n - 1, random.Random(seed))
    assert len(set(found)) == n - 1
    for order in found:
        assert sorted(order) == list(range(n)) and all(order[i] != i for i in range(n))
    assert derangements(n, n - 1, random.Random(seed)) == found


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=30), st.floats(0.1, 10))
def test_shares_scale_with_the_method_and_intervals_hold_the_extremes(
    pairs: list[tuple[float, float]], factor: float
) -> None:
    above, below = [a for a, _ in pairs], [b for _, b in pairs]
    boot = Bootstrap(len(pairs), resamples=200)
    estimate, scaled = boot.ratio(above, below), boot.ratio([factor * a for a in above], below)
    slack = 1e-9 * (1 + factor) * (1 + estimate.high)
    assert abs(scaled.value - factor * estimate.value) <= slack and abs(scaled.high - factor * estimate.high) <= slack
    single = [a / b for a, b in pairs]
    assert min(single) - slack <= estimate.low <= estimate.high <= max(single) + slack
    shares = kind_shares([str(i) for i in range(len(pairs))], above, below)
    assert all(abs(shares[str(i)] - s) <= slack for i, s in enumerate(single))
