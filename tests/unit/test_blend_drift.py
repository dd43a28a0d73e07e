"""Drift correction against the formula written as a plain loop."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from blendstore.blend import drift as module
from blendstore.blend.drift import Documents, DriftCorrection, DriftSettings
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


GROUP_OF = {p: s.group for s in SPANS for p in range(s.start, s.stop)}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def alike(values: list[torch.Tensor], p: int, s: int) -> float:
    """Mean cosine over layers and heads, in float64."""
    pairs = [(v[p, head].double(), v[s, head].double()) for v in values for head in range(KV)]
    return sum(float(a @ b / a.norm() / b.norm()) for a, b in pairs) / len(pairs)


def sum_of(chosen: list[int]) -> Callable[[int], int]:
    """How many of ``chosen`` a group has."""
    return lambda group: sum(GROUP_OF[s] == group for s in chosen)


def by_hand(
    turn: Rope | None, settings: DriftSettings, values: list[torch.Tensor], k: torch.Tensor, v: torch.Tensor,
    chosen: list[int], fresh_k: torch.Tensor, fresh_v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Token by token, in float64."""

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        return x if turn is None else replace(turn, scaling=1.0).apply(x, torch.tensor([position]))

    out_k, out_v = k.double(), v.double()
    for p, group in GROUP_OF.items():
        total = settings.prior * math.exp(-0.5 / settings.temperature)
        sum_k, sum_v = (torch.zeros(KV, DIM, dtype=torch.float64) for _ in range(2))
        n, own = len(chosen), [GROUP_OF[s] == group for s in chosen]
        mine, most = [i for i in range(n) if own[i]], min(max(map(sum_of(chosen), NUMBERS)), module.OWN)
        kept = [mine[j * len(mine) // most] for j in range(most)] if len(mine) > most else mine
        step = -(-n // settings.sample)
        sample = [i for i in range(step // 2, n, step) if not own[i]] if settings.elsewhere else []
        for i, s in enumerate(chosen):
            if i not in (kept if own[i] else sample):
                continue
            weight = math.exp((alike(values, p, s) - 1) / settings.temperature)
            weight *= len(mine) / len(kept) if own[i] else settings.elsewhere * (n - sum(own)) / len(sample)
            total += weight
            sum_v += weight * (fresh_v[i] - v[s]).double()
            sum_k += weight * rotated((fresh_k[i] - k[s]).double()[None], -s)[0]
        share = settings.strength / total if total else 0.0
        out_v[p] += share * sum_v
        out_k[p] += share * rotated(sum_k[None], p)[0]
    return out_k.float(), out_v.float()


def correction(
    settings: DriftSettings,
    chosen: list[int],
    values: list[torch.Tensor],
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> DriftCorrection:
    groups = torch.tensor([NUMBERS[GROUP_OF[p]] for p in chosen])
    documents = Documents.of(SPANS, NUMBERS, torch.device("cpu"))
    made = DriftCorrection(settings, documents, torch.tensor(chosen), groups, reduce)
    made.weigh(values)
    return made


def corrected(turn: Rope | None, settings: DriftSettings, chosen: list[int]) -> None:
    k, v = draw(TOKENS, KV, DIM, seed=1), draw(TOKENS, KV, DIM, seed=2)
    fresh_k, fresh_v = draw(len(chosen), KV, DIM, seed=3), draw(len(chosen), KV, DIM, seed=4)
    values = [draw(TOKENS, KV, DIM, seed=seed) for seed in (5, 6, 7)]
    expected = by_hand(turn, settings, values, k, v, chosen, fresh_k, fresh_v)
    made = correction(settings, chosen, values)
    table = None if turn is None else turn.table()
    found_k, found_v = k.clone(), v.clone()
    made.apply(table, found_k, found_v, fresh_k, fresh_v)
    torch.testing.assert_close(found_v, expected[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(found_k, expected[0], rtol=0, atol=1e-5)
    outside = [p for p in range(TOKENS) if p not in GROUP_OF]
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


def test_of_many_own_tokens_some_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OWN", 3)
    corrected(rope(8), DriftSettings(), [4, 5, 9, 11, 16, 17, 22, 25, 30])
    corrected(rope(8), DriftSettings(), [4, 5, 9, 11, 16, 22, 25])


def test_without_temperature_it_is_the_documents_shrunk_mean() -> None:
    """The limit that the module describes: every recomputed token of the document counts the same."""
    chosen, settings = [4, 5, 11], DriftSettings(0.5, math.inf, 0.0, prior=8.0)
    k, v = draw(TOKENS, KV, DIM, seed=1), draw(TOKENS, KV, DIM, seed=2)
    fresh_k, fresh_v = draw(3, KV, DIM, seed=3), draw(3, KV, DIM, seed=4)
    before_k, before_v = k.clone(), v.clone()
    correction(settings, chosen, [v]).apply(None, k, v, fresh_k, fresh_v)
    shrink = 0.5 * 3 / (3 + 8)
    torch.testing.assert_close(v[17], before_v[17] + shrink * (fresh_v - before_v[chosen]).mean(0))
    torch.testing.assert_close(k[17], before_k[17] + shrink * (fresh_k - before_k[chosen]).mean(0))


def test_without_any_weight_nothing_is_added() -> None:
    """A document of which nothing was recomputed, no other documents, no prior: a sum of no weights."""
    k, v = draw(TOKENS, KV, DIM, seed=1), draw(TOKENS, KV, DIM, seed=2)
    before_k, before_v, fresh = k.clone(), v.clone(), draw(2, KV, DIM, seed=3)
    correction(DriftSettings(elsewhere=0.0, prior=0.0), [20, 25], [v]).apply(None, k, v, fresh, fresh)
    assert torch.equal(k[4:20], before_k[4:20]) and torch.equal(v[4:20], before_v[4:20])
    assert bool(k.isfinite().all()) and bool(v.isfinite().all())


def test_low_precision_caches_are_corrected_in_float32() -> None:
    k, v = draw(TOKENS, KV, DIM, seed=1).bfloat16(), draw(TOKENS, KV, DIM, seed=2).bfloat16()
    chosen, fresh, turn = [20, 25], draw(2, KV, DIM, seed=3).bfloat16(), rope(8)
    wide = fresh.float()
    expected = by_hand(turn, DriftSettings(), [v.float()], k.float(), v.float(), chosen, wide, wide)
    correction(DriftSettings(), chosen, [v]).apply(turn.table(), k, v, fresh, fresh)
    torch.testing.assert_close(k.float(), expected[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(v.float(), expected[1], rtol=1e-2, atol=1e-2)


def test_ranks_with_some_of_the_heads_each_weigh_as_one_with_all() -> None:
    """Invariant 4: `reduce` sums what ranks found, and their heads may differ in number."""
    v, chosen = draw(TOKENS, KV, DIM, seed=2), [4, 5, 11, 16, 22]
    sums: list[torch.Tensor] = []

    def told(x: torch.Tensor) -> torch.Tensor:
        sums.append(x.clone())
        return x

    for head in range(KV):
        correction(DriftSettings(), chosen, [v[:, head : head + 1]], told)
    whole = iter((sums[0] + sums[2], sums[1] + sums[3]))  # cosines, and how many heads they are of
    found = correction(DriftSettings(), chosen, [v[:, :1]], lambda x: next(whole))
    torch.testing.assert_close(found.weights, correction(DriftSettings(), chosen, [v]).weights)
