"""The numbers of every quality claim: divergence, agreement, exact match, shares and their paired intervals."""

import math

import pytest
import torch

from blendstore.bench.metrics import log_probability, measure, says
from blendstore.bench.stats import Bootstrap, kind_shares


def _logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_kl_is_from_full_to_method_and_averaged_over_positions() -> None:
    full = _logits([0.5, 0.5], [0.25, 0.75])
    method = _logits([0.9, 0.1], [0.25, 0.75])
    measured = measure(method, full, [0, 1])
    first = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)  # the second position has none
    assert measured.kl == pytest.approx(first / 2, rel=1e-5)
    assert measured.nll == pytest.approx(-(math.log(0.9) + math.log(0.75)) / 2, rel=1e-5)
    assert (measured.agree, measured.n) == (2, 2)


def test_equal_logits_have_no_divergence_even_with_impossible_tokens() -> None:
    full = torch.tensor([[0.0, -1e4, 3.0]])
    assert measure(full.clone(), full, [2]).kl == 0.0
    assert measure(full + 5.0, full, [2]).kl == pytest.approx(0.0, abs=1e-6)  # logits count up to a constant


def test_exact_match_wants_every_token_of_a_span() -> None:
    logits = torch.eye(5)[[1, 2, 3, 4]] * 9
    measured = measure(logits, logits, [1, 2, 3, 0], [(0, 2), (2, 4), (2, 3)])
    assert measured.exact == (True, False, True)
    assert says(logits, [1, 2, 3, 4]) and not says(logits, [1, 2, 3, 0])


def test_log_probability_is_that_of_the_whole_answer() -> None:
    assert log_probability(_logits([0.5, 0.5], [0.2, 0.8]), [0, 1]) == pytest.approx(math.log(0.5 * 0.8), rel=1e-5)


def test_logits_of_another_length_or_with_nan_are_refused() -> None:
    good = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="one row for each of the 3 answer tokens"):
        measure(good, good, [0, 1, 2])
    with pytest.raises(ValueError, match="not finite"):
        measure(torch.full((2, 3), float("nan")), good, [0, 1])


def test_share_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    estimate = Bootstrap(3).ratio([1.0, 0.0, 2.0], [2.0, 1.0, 9.0])
    assert estimate.value == pytest.approx(3 / 12)
    assert estimate.low < estimate.value < estimate.high


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(200):
        values = torch.rand(60, generator=generator).tolist()
        estimate = Bootstrap(60, resamples=400, seed=seed).mean(values)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 176 <= covered <= 199  # 95 % of 200, with room for chance


def test_paired_difference_is_narrower_than_the_two_intervals() -> None:
    boot = Bootstrap(40)
    hard = [1.0 + 10.0 * (i % 7 == 0) for i in range(40)]
    first, second = [0.5 * v for v in hard], [0.4 * v + 0.01 * (i % 2) for i, v in enumerate(hard)]
    ones = [1.0] * 40
    difference, alone = boot.difference(first, second, ones), boot.ratio(first, ones)
    assert difference.value == pytest.approx(boot.ratio(first, ones).value - boot.ratio(second, ones).value)
    assert difference.high - difference.low < 0.3 * (alone.high - alone.low)
    assert boot.difference(first, first, hard).ci == [0.0, 0.0]


def test_kind_shares_divide_within_each_kind() -> None:
    shares = kind_shares(["a", "b", "a"], [1.0, 3.0, 1.0], [4.0, 3.0, 0.0])
    assert shares == {"a": 0.5, "b": 1.0}
    assert math.isnan(kind_shares(["a"], [0.0], [0.0])["a"])
