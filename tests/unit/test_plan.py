"""The plan: how candidates become spans, rule by rule, with exact numbers."""

import numpy as np
import pytest

from blendstore.plan import BlendPlan, Candidate, PlanError, Span, SpanKind, build_plan

PREFIX, EXACT, REUSED, FRESH = SpanKind.PREFIX, SpanKind.EXACT, SpanKind.REUSED, SpanKind.FRESH


def candidate(
    start: int, stop: int, chunk: int = 0, *, row: int = 0, source: int = 1000, exact: bool = False, group: int = 0
) -> Candidate:
    return Candidate(start, stop, chunk, row, start if exact else source, exact, group, start)


def shape(plan: BlendPlan) -> list[tuple[SpanKind, int, int]]:
    return [(span.kind, span.start, span.stop) for span in plan.spans]


def plan(ntokens: int, *candidates: Candidate, prefix: int = 0, min_tokens: int = 1, query: int = 16) -> BlendPlan:
    return build_plan(ntokens, engine_prefix=prefix, candidates=candidates, min_tokens=min_tokens, query_tokens=query)


def test_without_candidates_everything_behind_the_prefix_is_fresh() -> None:
    assert shape(plan(50)) == [(FRESH, 0, 50)]
    assert shape(plan(50, prefix=49)) == [(PREFIX, 0, 49), (FRESH, 49, 50)]
    assert plan(0).spans == ()


def test_holes_between_documents_are_fresh() -> None:
    """A new document in the middle costs only itself."""
    made = plan(400, candidate(10, 110, 1, group=1), candidate(200, 300, 2, group=2))
    assert shape(made) == [(FRESH, 0, 10), (REUSED, 10, 110), (FRESH, 110, 200), (REUSED, 200, 300), (FRESH, 300, 400)]
    assert (made.prefix, made.exact, made.reused, made.fresh, made.context) == (0, 0, 200, 200, 200)


def test_engine_prefix_trims_candidates_and_moves_row_and_source_along() -> None:
    made = plan(400, candidate(0, 256, 7, row=3, source=500), prefix=200)
    assert made.spans[:2] == (
        Span(PREFIX, 0, 200),
        Span(REUSED, 200, 256, chunk=7, row=203, source=700, group=0, group_start=0),
    )


def test_candidates_within_the_engine_prefix_vanish() -> None:
    assert shape(plan(100, candidate(0, 40), candidate(10, 50, exact=True), prefix=60)) == [
        (PREFIX, 0, 60),
        (FRESH, 60, 100),
    ]


def test_exact_stays_exact_behind_computed_and_reused_tokens() -> None:
    """The context digest speaks of the prompt's tokens, not of how the plan gets their KV."""
    made = plan(
        500,
        candidate(0, 100, 0, exact=True),
        candidate(103, 200, 1, exact=True, group=1),
        candidate(203, 300, 2, group=2),
        candidate(300, 400, 3, exact=True, group=3),
    )
    assert shape(made) == [
        (EXACT, 0, 100),
        (FRESH, 100, 103),
        (EXACT, 103, 200),
        (FRESH, 200, 203),
        (REUSED, 203, 300),
        (EXACT, 300, 400),
        (FRESH, 400, 500),
    ]
    assert (made.lead, made.exact, made.reused) == (100, 297, 97)


def test_lead_is_what_needs_no_computing_before_the_first_hole() -> None:
    assert plan(10).lead == 0
    assert plan(100, prefix=40).lead == 40
    assert plan(100, candidate(40, 60, exact=True), prefix=40).lead == 60
    assert plan(100, candidate(41, 60, exact=True), prefix=40).lead == 40
    assert plan(100, candidate(40, 80), prefix=40).lead == 40
    assert plan(0).lead == 0


def test_exact_continues_the_engine_prefix_and_reaches_the_last_token_but_one() -> None:
    made = plan(300, candidate(0, 256, 0, exact=True), candidate(256, 300, 1, exact=True), prefix=100)
    assert shape(made) == [(PREFIX, 0, 100), (EXACT, 100, 256), (EXACT, 256, 299), (FRESH, 299, 300)]
    assert made.spans[1].row == 100
    assert made.spans[1].source == 100


def test_exact_wins_over_longer_reused_candidates_and_among_exact_ones_the_longest() -> None:
    made = plan(
        1000,
        candidate(0, 900, 9, source=5, group=9),
        candidate(0, 100, 1, exact=True),
        candidate(0, 300, 2, exact=True),
        candidate(50, 200, 3, exact=True),
        candidate(290, 400, 4, exact=True),
        candidate(600, 640, 5, exact=True),
    )
    assert [(s.kind, s.start, s.stop, s.chunk, s.row) for s in made.spans] == [
        (EXACT, 0, 300, 2, 0),
        (EXACT, 300, 400, 4, 10),
        (REUSED, 400, 600, 9, 400),
        (EXACT, 600, 640, 5, 0),
        (REUSED, 640, 900, 9, 640),
        (FRESH, 900, 1000, -1, 0),
    ]


def test_reused_stays_out_of_the_question() -> None:
    assert shape(plan(100, candidate(0, 100), query=16)) == [(REUSED, 0, 84), (FRESH, 84, 100)]
    assert shape(plan(100, candidate(0, 100), query=0)) == [(REUSED, 0, 99), (FRESH, 99, 100)]
    assert shape(plan(10, candidate(0, 10), query=16)) == [(FRESH, 0, 10)]


def test_exact_behind_a_hole_reaches_into_the_question() -> None:
    assert shape(plan(100, candidate(1, 100, exact=True), query=16)) == [
        (FRESH, 0, 1),
        (EXACT, 1, 99),
        (FRESH, 99, 100),
    ]


def test_short_runs_are_computed_but_a_documents_short_tail_is_kept() -> None:
    """Case s04's condition: tails hit. The run is the document, not the chunk."""
    made = plan(
        1000,
        candidate(0, 256, 1, group=1),
        candidate(256, 261, 2, group=1),
        candidate(400, 431, 3, group=2),
        min_tokens=32,
    )
    assert shape(made) == [(REUSED, 0, 256), (REUSED, 256, 261), (FRESH, 261, 1000)]


def test_touching_runs_of_different_documents_do_not_help_each_other() -> None:
    made = plan(1000, candidate(0, 20, 1, group=1), candidate(20, 40, 2, group=2), min_tokens=32)
    assert made.reused == 0


def test_exact_tokens_are_kept_at_any_length() -> None:
    made = plan(1000, candidate(0, 15, 1, exact=True), candidate(400, 405, 2, exact=True, group=1), min_tokens=32)
    assert [(s.start, s.stop) for s in made.spans if s.kind is EXACT] == [(0, 15), (400, 405)]


def test_overlaps_go_to_the_longest_then_the_leftmost_and_the_rest_stays_usable() -> None:
    made = plan(
        1000,
        candidate(100, 300, 1, source=0, group=1),
        candidate(250, 400, 2, source=0, group=2),
        candidate(390, 540, 3, source=0, group=3),
    )
    assert [(s.start, s.stop, s.chunk, s.row, s.source) for s in made.spans if s.kind is REUSED] == [
        (100, 300, 1, 0, 0),
        (300, 400, 2, 50, 50),
        (400, 540, 3, 10, 10),
    ]


def test_the_same_rows_offered_twice_become_one_span() -> None:
    made = plan(1000, candidate(100, 300, 1, row=0, source=0), Candidate(200, 350, 1, 100, 100, False, 0, 100))
    assert [(s.start, s.stop, s.row) for s in made.spans if s.kind is REUSED] == [(100, 350, 0)]


def test_repeated_documents_are_reused_in_both_places() -> None:
    made = plan(1000, candidate(100, 300, 1, group=1), candidate(500, 700, 1, group=2))
    assert [(s.start, s.chunk, s.group) for s in made.spans if s.kind is REUSED] == [(100, 1, 1), (500, 1, 2)]


def test_positions_are_sorted_and_of_the_kinds_asked_for() -> None:
    made = plan(60, candidate(10, 30), prefix=5, query=20)
    positions = made.positions(PREFIX, FRESH)
    assert positions.dtype == np.int64
    assert positions.tolist() == [*range(10), *range(30, 60)]
    assert made.positions(REUSED).tolist() == list(range(10, 30))
    assert made.positions().size == 0
    assert len(made.spans[2]) == 20


@pytest.mark.parametrize(
    "wrong",
    [
        candidate(-1, 10),
        candidate(10, 10),
        candidate(50, 101),
        candidate(0, 10, row=-1),
        candidate(0, 10, source=-1),
        candidate(0, 10, -1),
        Candidate(0, 10, 0, 0, 5, True, 0, 0),
        Candidate(0, 10, 0, 0, 0, False, 0, 1),
    ],
)
def test_candidates_that_fit_no_prompt_are_refused(wrong: Candidate) -> None:
    with pytest.raises(PlanError, match="does not fit a prompt of 100 tokens"):
        plan(100, candidate(0, 50), wrong)


def test_numbers_out_of_range_are_refused() -> None:
    for prefix in (-1, 100):
        with pytest.raises(PlanError, match="engine_prefix"):
            plan(100, prefix=prefix)
    with pytest.raises(PlanError, match="min_tokens"):
        plan(100, min_tokens=-1)
    with pytest.raises(PlanError, match="query_tokens"):
        plan(100, query=-1)
    with pytest.raises(PlanError, match="does not fit a prompt of 0"):
        plan(0, candidate(0, 1))


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ((Span(FRESH, 0, 9),), "cover"),
        ((Span(FRESH, 0, 5), Span(FRESH, 6, 10)), "cover"),
        ((Span(FRESH, 5, 10), Span(FRESH, 0, 5)), "cover"),
        ((Span(FRESH, 0, 0), Span(FRESH, 0, 10)), "cover"),
        ((), "cover"),
        ((Span(FRESH, 0, 5), Span(EXACT, 5, 9, 0, 0, 4), Span(FRESH, 9, 10)), "captured"),
        ((Span(EXACT, 0, 5), Span(PREFIX, 5, 9), Span(FRESH, 9, 10)), "first"),
        ((Span(FRESH, 0, 5), Span(REUSED, 5, 10)), "last prompt token"),
    ],
)
def test_a_plan_that_breaks_an_invariant_can_not_be_made(spans: tuple[Span, ...], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        BlendPlan(10, spans)
