"""Drift correction against the formula written as a plain loop."""

import math
from dataclasses import replace

import torch

from blendstore.blend.drift import DriftCorrection, DriftSettings
from blendstore.plan import Span, SpanKind
from tests.fake_engine import Rope, rope

TOKENS, KV, DIM = 40, 2, 16
# Document 7 has two spans with a hole between; document 3 has one; nothing of document 9 is recomputed.
SPANS = [
    Span(SpanKind.REUSED, 4, 12, 0, 0, 50, 7, 4),
    Span(SpanKind.REUSED, 15, 20, 1, 0, 80, 7, 4),
    Span(SpanKind.REUSED, 20, 31, 2, 0, 9, 3, 20),
    Span(SpanKind.REUSED, 33, 38, 3, 0, 9, 9, 33),
]
NUMBERS = {7: 0, 3: 1, 9: 2}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(
    turn: Rope | None, settings: DriftSettings, k: torch.Tensor, v: torch.Tensor, chosen: list[int],
    fresh_k: torch.Tensor, fresh_v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Token by token, in float64."""

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        return x if turn is None else replace(turn, scaling=1.0).apply(x[None], torch.tensor([position]))[0]

    out_k, out_v = k.double(), v.double()
    group_of = {p: s.group for s in SPANS for p in range(s.start, s.stop)}
    for p, group in group_of.items():
        for head in range(KV):
            total = settings.prior * math.exp(-0.5 / settings.temperature)
            sum_k, sum_v = torch.zeros(1, DIM, dtype=torch.float64), torch.zeros(DIM, dtype=torch.float64)
            n, own = len(chosen), [group_of[s] == group for s in chosen]
            step = -(-n // settings.sample)
            sample = [i for i in range(step // 2, n, step) if not own[i]] if settings.elsewhere else []
            for i, s in enumerate(chosen):
                if not own[i] and i not in sample:
                    continue
                a, b = v[p, head].double(), v[s, head].double()
                weight = math.exp((float(a @ b / a.norm() / b.norm()) - 1) / settings.temperature)
                weight *= 1.0 if own[i] else settings.elsewhere * (n - sum(own)) / len(sample)
                total += weight
                sum_v += weight * (fresh_v[i, head] - v[s, head]).double()
                sum_k += weight * rotated((fresh_k[i, head] - k[s, head]).double()[None], -s)
            share = settings.strength / total if total else 0.0
            out_v[p, head] += share * sum_v
            out_k[p, head] += share * rotated(sum_k, p)[0]
    return out_k.float(), out_v.float()


def corrected(turn: Rope | None, settings: DriftSettings, chosen: list[int]) -> None:
    k, v = draw(TOKENS, KV, DIM, seed=1), draw(TOKENS, KV, DIM, seed=2)
    fresh_k, fresh_v = draw(len(chosen), KV, DIM, seed=3), draw(len(chosen), KV, DIM, seed=4)
    expected = by_hand(turn, settings, k, v, chosen, fresh_k, fresh_v)
    group = [NUMBERS[next(s.group for s in SPANS if s.start <= p < s.stop)] for p in chosen]
    correction = DriftCorrection(settings, SPANS, torch.tensor(chosen), torch.tensor(group), NUMBERS)
    table = None if turn is None else turn.table()
    for _ in range(2):  # the second layer of the same table uses what the first has worked out
        found_k, found_v = k.clone(), v.clone()
        correction.apply(table, found_k, found_v, fresh_k, fresh_v)
        torch.testing.assert_close(found_v, expected[1], rtol=0, atol=1e-6)
        torch.testing.assert_close(found_k, expected[0], rtol=0, atol=1e-5)
    outside = [p for p in range(TOKENS) if not any(s.start <= p < s.stop for s in SPANS)]
    untouched = [*outside, *(range(33, 38) if not settings.elsewhere else ())]
    assert torch.equal(found_k[untouched], k[untouched]) and torch.equal(found_v[untouched], v[untouched])
    assert not torch.equal(found_k[20:31], k[20:31])


def test_matches_the_formula_without_rotation() -> None:
    corrected(None, DriftSettings(), [4, 5, 11, 16, 22])


def test_matches_the_formula_with_rotation() -> None:
    """K's difference is averaged with the rotation taken out, and turned to where each token stands."""
    corrected(rope(8), DriftSettings(), [4, 5, 11, 16, 22])
    corrected(rope(4, 500.0, "interleaved", 1.25), DriftSettings(0.9, 0.3, 0.0, prior=2.0), [6, 19, 20, 21, 30])


def test_a_sample_stands_for_other_documents() -> None:
    corrected(rope(8), DriftSettings(sample=3), [4, 5, 9, 11, 16, 17, 22, 25, 30])


def test_without_temperature_it_is_the_documents_shrunk_mean() -> None:
    """The limit that the module describes: every recomputed token of the document counts the same."""
    chosen, settings = [4, 5, 11], DriftSettings(0.5, math.inf, 0.0, prior=8.0)
    k, v = draw(TOKENS, KV, DIM, seed=1), draw(TOKENS, KV, DIM, seed=2)
    fresh_k, fresh_v = draw(3, KV, DIM, seed=3), draw(3, KV, DIM, seed=4)
    before_k, before_v = k.clone(), v.clone()
    DriftCorrection(settings, SPANS, torch.tensor(chosen), torch.zeros(3, dtype=torch.int64), NUMBERS).apply(
        None, k, v, fresh_k, fresh_v
    )
    shrink = 0.5 * 3 / (3 + 8)
    torch.testing.assert_close(v[17], before_v[17] + shrink * (fresh_v - before_v[chosen]).mean(0))
    torch.testing.assert_close(k[17], before_k[17] + shrink * (fresh_k - before_k[chosen]).mean(0))


def test_nothing_recomputed_changes_nothing() -> None:
    none = torch.empty(0, dtype=torch.int64)
    correction = DriftCorrection(DriftSettings(), SPANS, none, none, NUMBERS)
    k, v = draw(TOKENS, KV, DIM, seed=1), draw(TOKENS, KV, DIM, seed=2)
    before = k.clone(), v.clone()
    correction.apply(rope(8).table(), k, v, torch.empty(0, KV, DIM), torch.empty(0, KV, DIM))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


def test_low_precision_caches_are_corrected_in_float32() -> None:
    k, v = draw(TOKENS, KV, DIM, seed=1).bfloat16(), draw(TOKENS, KV, DIM, seed=2).bfloat16()
    chosen, group = torch.tensor([20, 25]), torch.tensor([1, 1])
    fresh = draw(2, KV, DIM, seed=3).bfloat16()
    turn = rope(8)
    expected = by_hand(turn, DriftSettings(), k.float(), v.float(), [20, 25], fresh.float(), fresh.float())
    DriftCorrection(DriftSettings(), SPANS, chosen, group, NUMBERS).apply(turn.table(), k, v, fresh, fresh)
    torch.testing.assert_close(k.float(), expected[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(v.float(), expected[1], rtol=1e-2, atol=1e-2)
