"""The layer loop on a small engine: invariants 1 to 3, and what selectors are told."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blendstore.blend import BlendRunner, BlendSettings
from blendstore.blend.drift import DriftSettings
from blendstore.plan import BlendPlan, Span, SpanKind
from tests.fake_engine import FakeEngine, FakeRecords, Scene, dense, rope, scene, worst

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows and two bases": {"windows": (12, None), "ropes": (rope(8), rope(8, 500.0, "interleaved"))},
    "softcap, partial": {"softcap": 4.0, "ropes": (rope(4),)},
    "no rotary in one layer": {"ropes": (rope(8), None)},
}
NAMES = ("deviation", "query", "random", "head", "hybrid", "stored")


def blend(engine: FakeEngine, made: Scene, selector: str = "query", ratio: float = 0.2, **settings: Any) -> Any:
    settings = {"ratios": (ratio,), "drift": None, **settings}
    return BlendRunner(engine).run(made.ids, made.plan, made.records, BlendSettings(selector=selector, **settings))


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("selector", NAMES)
@pytest.mark.parametrize("kind", ENGINES)
def test_ratio_one_is_the_engines_own_prefill(kind: str, selector: str, prefix: bool) -> None:
    """Invariant 1, with holes, moved documents and an engine-held prefix; drift correction has nothing left to do."""
    engine = FakeEngine(**ENGINES[kind])
    made = scene(engine, prefix=prefix)
    result = blend(engine, made, selector, 1.0, drift=DriftSettings())
    assert worst(result.kv, engine.prefill(made.ids)) < 1e-5
    assert result.recomputed == made.plan.reused


@pytest.mark.parametrize("selector", NAMES)
def test_more_recompute_is_closer_to_prefill(selector: str) -> None:
    """And every token of the plan has valid K and V whatever the ratio (invariant 3)."""
    engine = FakeEngine()
    made = scene(engine)
    own = torch.stack([torch.stack(pair) for pair in engine.prefill(made.ids)])
    errors = []
    for ratio in (0.0, 0.3, 0.7, 1.0):
        result = blend(engine, made, selector, ratio)
        assert bool(result.kv.isfinite().all())
        assert result.recomputed == round(ratio * made.plan.context)
        errors.append(float((result.kv - own).square().mean()))
    assert errors[0] > errors[1] > errors[2] > errors[3]


def test_ratio_zero_computes_fresh_tokens_only() -> None:
    engine = FakeEngine()
    made = scene(engine)
    engine.rows_run.clear()
    for selector in ("query", "none"):
        result = blend(engine, made, selector, 0.0 if selector == "query" else 1.0)
        assert result.recomputed == 0
        assert set(engine.rows_run) == {made.plan.fresh, 1}


def test_rows_compute_what_attention_over_the_working_kv_gives() -> None:
    """Fresh rows over reused KV: the state that comes out is the dense reference's over the same keys (invariant 2)."""
    engine = FakeEngine(windows=(20, None))
    made = scene(engine)
    rows = torch.from_numpy(made.plan.positions(SpanKind.FRESH))
    result = BlendRunner(engine).run(made.ids, made.plan, made.records, BlendSettings("none"), outputs=len(rows))
    state = engine.embed(made.ids[rows])
    for index in range(engine.layers):
        distance = rows[:, None] - torch.arange(len(made.ids))
        seen = (distance >= 0) & (distance < (engine.geometry.windows[index] or 10_000))
        k, v = result.kv[index]

        def attend(q: torch.Tensor, fresh_k: torch.Tensor, fresh_v: torch.Tensor, *, scale: float,
                   softcap: float | None = None, k: Any = k, v: Any = v, seen: Any = seen) -> torch.Tensor:  # fmt: skip
            torch.testing.assert_close(k[rows], fresh_k, rtol=0, atol=1e-5)
            return dense(q, k, v, seen, scale, softcap)[0]

        state = engine.layer(index, state, rows, attend)
    torch.testing.assert_close(result.state, state, rtol=0, atol=1e-5)


def test_deviation_is_the_squared_difference_of_keys() -> None:
    """The tokens picked are those whose cached K is furthest from the prefill's at the check layer."""
    engine = FakeEngine()
    made = scene(engine)
    own = engine.prefill(made.ids)
    cached = blend(engine, made, "none").kv
    for layer in (1, 2):
        away = (own[layer][0] - cached[layer, 0]).square().sum((1, 2))
        away[made.plan.positions(SpanKind.FRESH)] = -1.0
        count = round(0.2 * made.plan.context)
        found = blend(engine, made, "deviation", 0.2, check_layers=(layer,)).selected
        assert found.tolist() == away.topk(count).indices.sort().values.tolist()


@pytest.mark.parametrize("layer", [0, 4])
def test_check_layers_outside_the_model_are_refused(layer: int) -> None:
    engine = FakeEngine()
    with pytest.raises(ValueError, match=rf"check layer {layer}: use 1\.\.3"):
        blend(engine, scene(engine), "deviation", check_layers=(layer,))


@pytest.mark.parametrize("combine", ["rms", "mean"])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_query_scores_are_the_questions_attention(reduce: str, combine: str) -> None:
    """Score by hand: dense attention of the last rows over the cached KV, other fresh tokens unseen."""
    engine = FakeEngine(windows=(30, None))
    made = scene(engine, question=6)
    options = {"rows": 4, "reduce": reduce, "combine": combine, "first_share": 0, "power": 0, "first_layer": 1}
    found = blend(engine, made, "query", 0.1, options=options).selected
    n = len(made.ids)
    rows = torch.arange(n - 4, n)
    cached = blend(engine, made, "none").kv.clone()
    unseen = torch.from_numpy(made.plan.positions(SpanKind.FRESH)[:-4])
    total = torch.zeros(n, dtype=torch.float64)
    state = engine.embed(made.ids[rows])
    for index in range(engine.layers):
        distance = rows[:, None] - torch.arange(n)
        seen = (distance >= 0) & (distance < (engine.geometry.windows[index] or n))
        seen[:, unseen] = False

        def attend(q: torch.Tensor, fresh_k: torch.Tensor, fresh_v: torch.Tensor, *, scale: float,
                   softcap: float | None = None, index: int = index, seen: Any = seen) -> torch.Tensor:  # fmt: skip
            k, v = cached[index]
            k[rows], v[rows] = fresh_k, fresh_v
            out, weights = dense(q, k, v, seen, scale, softcap)
            if index >= 1:
                of_head = weights.amax(1) if reduce == "max" else weights.mean(1)
                total.add_((of_head.square() if combine == "rms" else of_head).mean(0))
            return out

        state = engine.layer(index, state, rows, attend)
    total[made.plan.positions(SpanKind.FRESH)] = -1.0
    count = round(0.1 * made.plan.context)
    assert found.tolist() == total.topk(count).indices.sort().values.tolist()


def test_case_b07_memory_full_of_nan_reaches_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Working memory that held NaN before: keys that no row may see yet must not poison the scores or the rows."""
    engine = FakeEngine()
    made = scene(engine)
    expected = blend(engine, made, "query", 0.2)
    empty = torch.empty

    def poisoned(*args: Any, **how: Any) -> torch.Tensor:
        out = empty(*args, **how)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)
    found = blend(engine, made, "query", 0.2)
    assert torch.equal(found.selected, expected.selected)
    assert torch.equal(found.kv, expected.kv)


def test_layerwise_loading_changes_no_bit() -> None:
    engine = FakeEngine()
    made = scene(engine)
    for selector in ("query", "deviation"):
        on, off = (blend(engine, made, selector, layerwise=flag, drift=DriftSettings()) for flag in (True, False))
        assert torch.equal(on.kv, off.kv)
        assert torch.equal(on.selected, off.selected)


def test_drift_correction_moves_reused_tokens_only() -> None:
    """Layer 0 is exact after rotation and stays as it is; fresh and recomputed rows are the engine's own at every
    layer."""
    engine = FakeEngine()
    made = scene(engine)
    plain, moved = (blend(engine, made, "head", 0.3, drift=d) for d in (None, DriftSettings()))
    assert torch.equal(plain.selected, moved.selected)
    assert torch.equal(plain.kv[0], moved.kv[0])
    left = sorted(set(made.plan.positions(SpanKind.REUSED).tolist()) - set(plain.selected.tolist()))
    assert not torch.equal(plain.kv[1][:, left], moved.kv[1][:, left])
    rows = [*made.plan.positions(SpanKind.FRESH).tolist(), *plain.selected.tolist()]
    assert torch.equal(plain.kv[1][:, rows], moved.kv[1][:, rows])


def test_thresholds_and_several_check_layers_keep_every_row_valid() -> None:
    engine = FakeEngine(layers=5)
    made = scene(engine)
    settings: dict[str, Any] = {"check_layers": (1, 3), "ratios": (0.5, 0.2), "thresholds": (0.5, 1.0)}
    result = blend(engine, made, "deviation", 0.2, **settings)
    assert 0 < result.recomputed <= round(0.2 * made.plan.context)
    own = engine.prefill(made.ids)
    assert bool(result.kv.isfinite().all())
    first = made.plan.spans[0]
    torch.testing.assert_close(result.kv[-1, 0, : first.stop], own[-1][0][: first.stop], rtol=0, atol=1e-5)


def test_the_same_document_twice_and_no_context_at_all() -> None:
    engine = FakeEngine()
    made = scene(engine, documents=1)
    span = made.plan.spans[3]
    twice = torch.cat([made.ids[: span.stop], made.ids[span.start : span.stop], made.ids[span.stop :]])
    n = len(span)
    again = replace(span, start=span.stop, stop=span.stop + n, group=1, group_start=span.stop)
    plan = BlendPlan(len(twice), (*made.plan.spans[:4], again, Span(SpanKind.FRESH, again.stop, len(twice))))
    result = blend(engine, Scene(twice, plan, made.records), "query", 1.0)
    assert worst(result.kv, engine.prefill(twice)) < 1e-5
    bare = Scene(made.ids, BlendPlan(len(made.ids), (Span(SpanKind.FRESH, 0, len(made.ids)),)), FakeRecords([]))
    assert worst(blend(engine, bare).kv, engine.prefill(made.ids)) < 1e-5


def test_stored_scores_reach_the_selector() -> None:
    """Row 1 of a record is a span's first token: the score of another row would pick its neighbour."""
    engine = FakeEngine()
    made = scene(engine)
    scores = torch.zeros(40)
    scores[[1, 17, 39]] = 1.0
    made.records.stored[1] = scores
    span = next(s for s in made.plan.spans if s.chunk == 1)
    found = blend(engine, made, "stored", 3 / made.plan.context).selected
    assert found.tolist() == [span.start, span.start + 16, span.stop - 1]


def test_ids_must_fit_the_plan() -> None:
    engine = FakeEngine()
    made = scene(engine)
    with pytest.raises(ValueError, match=r"plan of 141 tokens, but ids have shape \(140,\)"):
        BlendRunner(engine).run(made.ids[1:], made.plan, made.records, BlendSettings())


class _Lost(FakeEngine):
    """Its layers never call the attention."""

    def layer(self, index: int, state: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        return state


def test_a_layer_that_skips_its_attention_is_an_error() -> None:
    made = scene(FakeEngine())
    with pytest.raises(RuntimeError, match="layer 1 of the engine never called the attention it was given"):
        blend(_Lost(), made, "deviation")
