"""Invariants of the plan, over random prompts and candidates (overlapping, repeated, exact and not)."""

import random

from hypothesis import given
from hypothesis import strategies as st

from blendstore.plan import BlendPlan, Candidate, SpanKind, build_plan


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, list[Candidate]]:
    """(ntokens, engine prefix, candidates)."""
    ntokens = draw(st.integers(1, 300))
    candidates = []
    for _ in range(draw(st.integers(0, 12))):
        start = draw(st.integers(0, ntokens - 1))
        stop = draw(st.integers(start + 1, ntokens))
        exact = draw(st.booleans())
        candidates.append(
            Candidate(
                start,
                stop,
                chunk=draw(st.integers(0, 3)),
                row=draw(st.integers(0, 5)),
                source=start if exact else draw(st.integers(0, 20)),
                exact=exact,
                group=draw(st.integers(0, 3)),
                group_start=start - draw(st.integers(0, 9)),
            )
        )
    return ntokens, draw(st.integers(0, ntokens - 1)), candidates


def built(prompt: tuple[int, int, list[Candidate]], min_tokens: int = 1, query_tokens: int = 16) -> BlendPlan:
    ntokens, engine_prefix, candidates = prompt
    return build_plan(
        ntokens,
        engine_prefix=engine_prefix,
        candidates=candidates,
        min_tokens=min_tokens,
        query_tokens=query_tokens,
    )


@given(prompts(), st.integers(0, 40), st.integers(0, 40))
def test_every_token_is_covered_once_in_causal_order_and_the_engines_are_left_alone(
    prompt: tuple[int, int, list[Candidate]], min_tokens: int, query_tokens: int
) -> None:
    ntokens, engine_prefix, _ = prompt
    plan = built(prompt, min_tokens, query_tokens)
    assert [t for span in plan.spans for t in range(span.start, span.stop)] == list(range(ntokens))
    assert plan.positions(SpanKind.PREFIX).tolist() == list(range(engine_prefix))
    assert plan.spans[-1].kind is SpanKind.FRESH
    assert all(s.start >= engine_prefix for s in plan.spans if s.kind is not SpanKind.PREFIX)
    assert plan.prefix + plan.exact + plan.reused + plan.fresh == ntokens
    reused = plan.positions(SpanKind.REUSED)
    assert reused.size == 0 or reused[-1] < ntokens - max(query_tokens, 1)


@given(prompts(), st.integers(0, 40))
def test_every_restored_token_is_the_row_that_a_candidate_promised(
    prompt: tuple[int, int, list[Candidate]], min_tokens: int
) -> None:
    """A cut moves row and source position along; nothing is restored that nobody offered, exact only what was exact."""
    _, _, candidates = prompt
    offered = {
        (t, c.chunk, c.row + t - c.start, c.source + t - c.start, c.group, c.group_start): c.exact for c in candidates
        for t in range(c.start, c.stop)
    }  # fmt: skip
    exact_offers = {(t, c.chunk, c.row + t - c.start) for c in candidates if c.exact for t in range(c.start, c.stop)}
    for span in built(prompt, min_tokens).spans:
        if span.kind in (SpanKind.EXACT, SpanKind.REUSED):
            for t in range(span.start, span.stop):
                step = t - span.start
                token = (t, span.chunk, span.row + step, span.source + step, span.group, span.group_start)
                assert token in offered
                if span.kind is SpanKind.EXACT:
                    assert span.source + step == t
                    assert (t, span.chunk, span.row + step) in exact_offers


@given(prompts(), st.randoms(use_true_random=False), st.integers(0, 40))
def test_the_order_of_the_candidates_does_not_matter(
    prompt: tuple[int, int, list[Candidate]], shuffle: random.Random, min_tokens: int
) -> None:
    """Ranks of one engine may see the hits in different orders; they must agree."""
    ntokens, engine_prefix, candidates = prompt
    shuffled = list(candidates)
    shuffle.shuffle(shuffled)
    assert built(prompt, min_tokens) == built((ntokens, engine_prefix, shuffled), min_tokens)


@given(prompts(), st.integers(0, 40), st.integers(0, 40))
def test_every_exact_token_is_exact_but_for_the_last_one(
    prompt: tuple[int, int, list[Candidate]], min_tokens: int, query_tokens: int
) -> None:
    """What a full prefill would compute is never given up for something worse."""
    ntokens, engine_prefix, candidates = prompt
    offered = {t for c in candidates if c.exact for t in range(c.start, c.stop)} - {*range(engine_prefix), ntokens - 1}
    assert built(prompt, min_tokens, query_tokens).positions(SpanKind.EXACT).tolist() == sorted(offered)


@given(prompts())
def test_nothing_that_could_be_reused_is_left_out(prompt: tuple[int, int, list[Candidate]]) -> None:
    """With no shortest run, a token is fresh only if no candidate covers it or the question protects it."""
    ntokens, _, candidates = prompt
    covered = {t for c in candidates for t in range(c.start, c.stop)}
    plan = built(prompt)
    for t in plan.positions(SpanKind.FRESH).tolist():
        assert t not in covered or t >= ntokens - 16


@given(prompts(), st.integers(0, 60))
def test_runs_are_long_enough(prompt: tuple[int, int, list[Candidate]], min_tokens: int) -> None:
    spans = built(prompt, min_tokens).spans
    run: list[int] = []
    runs: list[tuple[bool, int]] = []
    for before, span in zip((None, *spans), spans, strict=False):
        if span.kind not in (SpanKind.EXACT, SpanKind.REUSED):
            continue
        if not run or before is None or before.chunk < 0 or before.group != span.group:
            run = [0]
            runs.append((False, 0))
        runs[-1] = (runs[-1][0] or span.kind is SpanKind.REUSED, runs[-1][1] + len(span))
    assert all(length >= min_tokens for has_reused, length in runs if has_reused)


@given(st.integers(1, 5), st.integers(32, 80), st.data())
def test_a_document_given_several_times_is_reused_everywhere(times: int, length: int, data: st.DataObject) -> None:
    gaps = [data.draw(st.integers(0, 10)) for _ in range(times)]
    starts = [sum(gaps[: n + 1]) + n * length for n in range(times)]
    candidates = [Candidate(s, s + length, 0, 0, 7, False, n, s) for n, s in enumerate(starts)]
    plan = built((starts[-1] + length + 16, 0, candidates), min_tokens=32)
    assert plan.reused == times * length
