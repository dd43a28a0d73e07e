"""Cutting plans to a budget keeps them plans: every token once, the last one computed."""

import pytest

from blendstore.budget import TAIL, Budget, computed_from, head, rows
from blendstore.plan import BlendPlan, Span, SpanKind


def plan() -> BlendPlan:
    """Prefix 10, then exact 20, fresh 5, reused 100, fresh 7, reused 50, fresh 40."""
    return BlendPlan(
        232,
        (
            Span(SpanKind.PREFIX, 0, 10),
            Span(SpanKind.EXACT, 10, 30, 0, 0, 10, 0, 10),
            Span(SpanKind.FRESH, 30, 35),
            Span(SpanKind.REUSED, 35, 135, 1, 3, 70, 1, 32),
            Span(SpanKind.FRESH, 135, 142),
            Span(SpanKind.REUSED, 142, 192, 2, 0, 0, 2, 142),
            Span(SpanKind.FRESH, 192, 232),
        ),
    )


@pytest.mark.parametrize("stop", range(11, 233, 7))
def test_a_head_is_a_plan_of_its_own(stop: int) -> None:
    part = head(plan(), stop)
    assert part.ntokens == stop
    assert (part.token_kinds[: stop - 1] == plan().token_kinds[: stop - 1]).all()
    assert part.token_kinds[-1] == SpanKind.FRESH.value


@pytest.mark.parametrize("start", range(10, 232, 7))
def test_what_is_computed_from_a_token_on_keeps_what_is_before(start: int) -> None:
    part = computed_from(plan(), start)
    assert part.ntokens == 232
    assert (part.token_kinds[:start] == plan().token_kinds[:start]).all()
    assert (part.token_kinds[start:] == SpanKind.FRESH.value).all()


def test_rows_count_what_goes_through_the_model() -> None:
    assert rows(plan(), 0.1) == pytest.approx(52 + 17)
    assert rows(plan(), 0.1, whole_layers=0.5) == pytest.approx(52 + 17 + 0.5 * 153)


def test_a_plan_fits_whole_in_part_or_not_at_all() -> None:
    budget = Budget(100.0)
    assert budget.fit(plan(), 0.1) == 232, "nothing measured yet"
    budget.calibrate((0.0, 0.0), (100.0, 100.0))  # a row a millisecond
    assert budget.fit(plan(), 0.1) == 232
    assert budget.fit(plan(), 1.0) == 30 + TAIL, "behind the exact span: 20 recomputed and the tail"
    budget.calibrate((0.0, 1000.0), (100.0, 1000.0))
    assert budget.fit(plan(), 0.1) == 0
    assert Budget(0.0).fit(plan(), 1.0) == 232, "no limit"


def test_the_estimate_follows_what_is_seen() -> None:
    budget = Budget(100.0)
    budget.observe(50, 100.0)
    assert budget.estimate(50) == pytest.approx(100.0)
    for _ in range(40):
        budget.observe(50, 200.0)
    assert budget.estimate(50) == pytest.approx(200.0, rel=1e-2)
