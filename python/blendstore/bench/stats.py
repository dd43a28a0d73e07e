"""Bootstrap over prompts for ratios of sums, with the same resamples for every method.

The headline number is a *share*: the sum over prompts of a method's KL divided by the sum of the KL that full reuse
leaves on the same prompts. Prompts are resampled with replacement; because all methods share the resamples, the
interval of a difference between two methods is a paired one, much narrower than two intervals side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A point estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def ci(self) -> list[float]:
        """``[low, high]``."""
        return [self.low, self.high]


class Bootstrap:
    """Resamples of ``prompts`` prompts, drawn once from ``seed``."""

    def __init__(self, prompts: int, *, resamples: int = 2_000, seed: int = 0) -> None:
        if prompts < 1:
            raise ValueError(f"{prompts} prompts: a bootstrap needs at least one")
        rng = np.random.default_rng(seed)
        # How often each prompt occurs in each resample, [resamples, prompts]: sums become matrix products.
        self._counts = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples).astype(np.float64)
        self._prompts = prompts

    def ratio(self, numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
        """Sum of ``numerator`` over sum of ``denominator``, each one value a prompt. NaN when the denominator is 0."""
        above, below = self._values(numerator), self._values(denominator)
        return _estimate(_divide(above.sum(), below.sum()), self._resampled(above, below))

    def difference(self, first: Sequence[float], second: Sequence[float], denominator: Sequence[float]) -> Estimate:
        """``ratio(first) - ratio(second)``, paired by prompt."""
        a, b, below = self._values(first), self._values(second), self._values(denominator)
        point = _divide(a.sum() - b.sum(), below.sum())
        return _estimate(point, self._resampled(a, below) - self._resampled(b, below))

    def mean(self, values: Sequence[float]) -> Estimate:
        """Mean over prompts."""
        return self.ratio(values, [1.0] * self._prompts)

    def _values(self, values: Sequence[float]) -> Values:
        array = np.asarray(values, dtype=np.float64)
        if array.shape != (self._prompts,):
            raise ValueError(f"{array.shape} values for {self._prompts} prompts: give one value for each prompt")
        return array

    def _resampled(self, above: Values, below: Values) -> Values:
        sums = self._counts @ below
        return np.divide(self._counts @ above, sums, out=np.full_like(sums, np.nan), where=sums > 0)


def kind_shares(kinds: Sequence[str], numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """The share within each kind of prompt, in order of first appearance."""
    shares = {}
    for kind in dict.fromkeys(kinds):
        mask = [k == kind for k in kinds]
        above = sum(v for v, m in zip(numerator, mask, strict=True) if m)
        below = sum(v for v, m in zip(denominator, mask, strict=True) if m)
        shares[kind] = _divide(above, below)
    return shares


def _divide(above: float, below: float) -> float:
    return float(above / below) if below > 0 else float("nan")


def _estimate(point: float, resampled: Values) -> Estimate:
    usable = resampled[~np.isnan(resampled)]
    if usable.size == 0:
        return Estimate(point, float("nan"), float("nan"))
    low, high = np.quantile(usable, [0.025, 0.975])
    return Estimate(point, float(low), float(high))
