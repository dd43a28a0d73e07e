"""The drift correction in Rust against the one in plain torch, on random prompts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blendstore import _core
from blendstore.blend import fused
from blendstore.blend.drift import DriftCorrection, DriftSettings
from blendstore.plan import Span, SpanKind
from tests.fake_engine import rope

RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70), st.integers(0, 3)), min_size=1, max_size=6)
SETTINGS = st.builds(
    DriftSettings,
    strength=st.floats(0.1, 1.0),
    temperature=st.sampled_from([0.01, 0.1, 0.5, 1e6, math.inf]),
    elsewhere=st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    sample=st.integers(1, 40),
    prior=st.sampled_from([0.0, 1.0, 8.0]),
)


def layer(tokens: int, n: int, kv_heads: int, dim: int, seed: int) -> list[Tensor]:
    """K, V, fresh K, fresh V, with rows that are alike to different degrees and one of length 0."""
    draw = torch.Generator().manual_seed(seed)
    k, v, *fresh = (torch.randn(rows, kv_heads, dim, generator=draw) for rows in (tokens, tokens, n, n))
    v[::3] = v[0] + 0.3 * v[::3]
    v[tokens // 2] = 0
    return [k, v, *fresh]


@settings(max_examples=150, deadline=None)
@given(
    runs=RUNS,
    drift=SETTINGS,
    kv_heads=st.integers(1, 4),
    dim=st.sampled_from([8, 16, 24, 40, 64, 72, 128]),
    pairs=st.integers(0, 64),
    pairing=st.sampled_from(["half", "interleaved"]),
    share=st.floats(0, 1),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_rust_equals_plain_torch_to_rounding(runs, drift, kv_heads, dim, pairs, pairing, share, threads, seed) -> None:  # type: ignore[no-untyped-def]
    spans, at = [], 1
    for gap, length, group in runs:
        spans.append(Span(SpanKind.REUSED, at + gap, at + gap + length, 0, 0, 5, group, at))
        at += gap + length
    numbers = {group: number for number, group in enumerate({span.group: None for span in spans})}
    chance = torch.rand(at, generator=torch.Generator().manual_seed(seed))
    # Documents of group 3 have nothing recomputed.
    chosen = [p for s in spans if s.group != 3 for p in range(s.start, s.stop) if chance[p] < share]
    groups = [numbers[next(s.group for s in spans if s.start <= p < s.stop)] for p in chosen]
    selected, documents = (torch.tensor(x, dtype=torch.int64) for x in (chosen, groups))
    table = rope(min(pairs, dim // 2), pairing=pairing).table() if pairs else None
    k, v, *fresh = layer(at + 2, len(chosen), kv_heads, dim, seed)
    wanted, found, again = ([k.clone(), v.clone()] for _ in range(3))
    correction = DriftCorrection(drift, spans, selected, documents, numbers)
    before, kept = fused.fallbacks.total(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        correction.apply(table, *found, *fresh)
        correction.apply(table, *again, *fresh)
    finally:
        torch.set_num_threads(kept)
    assert fused.fallbacks.total() == before
    if chosen:
        correction._plain(table, *wanted, *fresh)
    # A cosine is rounded to some 1e-7, which the temperature divides.
    near = 1e-5 + 1e-6 / drift.temperature
    for one, two, three in zip(found, wanted, again, strict=True):
        torch.testing.assert_close(one, two, rtol=near, atol=near)
        assert torch.equal(one, three), "the same bits every time"


def arguments() -> tuple[_core.Drift, dict[str, object]]:
    """A correction of tokens 2 to 7 by tokens 3 and 5, and a layer for it."""
    k, v, fresh_k, fresh_v = (t.numpy() for t in layer(9, 2, 2, 8, 1))
    cos = np.ones((9, 4), dtype=np.float32)
    return made(), {"k": k, "v": v, "fresh_k": fresh_k, "fresh_v": fresh_v, "cos": cos, "sin": cos * 0}


def made(**change: object) -> _core.Drift:
    whole = {
        "selected": np.array([3, 5]), "columns": np.array([0, 1]), "bias": np.zeros(2, dtype=np.float32),
        "bounds": np.array([0, 2]), "spans": np.array([[2, 8, 0]]), "strength": 0.5, "temperature": 0.1, "still": 0.0,
    }  # fmt: skip
    return _core.Drift(**{**whole, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"selected": np.array([3, -1])}, "selected"),
        ({"selected": np.array([3, 5], dtype=np.int32)}, "selected"),
        ({"columns": np.array([0, 2])}, "columns"),
        ({"columns": np.array([0, 1, 1])}, "bias"),
        ({"bounds": np.array([0, 3])}, "bounds"),
        ({"bounds": np.array([2, 0])}, "bounds"),
        ({"spans": np.array([[2, 8, 1]])}, "spans"),
        ({"spans": np.array([[8, 2, 0]])}, "spans"),
        ({"spans": np.array([[2, 8, 0], [7, 9, 0]])}, "spans"),
        ({"spans": np.array([2, 8])}, "spans"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
    ],
)
def test_indices_that_lead_nowhere_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(_core.StoreError, match=named):
        made(**change)


@pytest.mark.parametrize("name", ["k", "v", "fresh_k", "fresh_v", "cos", "sin"])
@pytest.mark.parametrize("fault", ["short", "wide", "flat", "float64", "strided", "empty"])
def test_layers_that_do_not_fit_are_refused_and_nothing_changes(name: str, fault: str) -> None:
    drift, given = arguments()
    array = given[name]
    assert isinstance(array, np.ndarray)
    broken = {
        "short": array[:1].copy(),
        "wide": np.repeat(array, 2, axis=-1),
        "flat": array.reshape(-1),
        "float64": array.astype(np.float64),
        "strided": np.repeat(array, 2, axis=0)[::2],
        "empty": array[:0],
    }[fault]
    k, v = (np.array(given[x]) for x in ("k", "v"))
    with pytest.raises(_core.StoreError, match=rf"\b{name}\b"):
        drift.carry(**{**given, name: broken})  # type: ignore[arg-type]
    assert np.array_equal(k, given["k"]) and np.array_equal(v, given["v"])  # type: ignore[arg-type]


def test_memory_that_overlaps_or_is_read_only_is_refused() -> None:
    drift, given = arguments()
    k, v = given["k"], given["v"]
    assert isinstance(k, np.ndarray) and isinstance(v, np.ndarray)
    both = np.zeros((10, 2, 8), dtype=np.float32)
    locked = v.copy()
    locked.flags.writeable = False
    for change in (
        {"v": k}, {"k": both[:9], "v": both[1:]}, {"fresh_k": k[3:5]}, {"fresh_v": v[:2]},
        {"v": locked}, {"cos": None}, {"sin": None}, {"cos": k.reshape(-1, 4)[:9]},
    ):  # fmt: skip
        with pytest.raises(_core.StoreError):
            drift.carry(**{**given, **change})  # type: ignore[arg-type]


def test_what_rust_refuses_runs_in_plain_torch_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans in falling order are none for Rust: the answer is the same, and once told of."""
    monkeypatch.setattr(fused, "_broken", set())
    spans = [Span(SpanKind.REUSED, start, start + 4, 0, 0, 5, 0, start) for start in (5, 1)]
    correction = DriftCorrection(
        DriftSettings(), spans, torch.tensor([2, 6]), torch.zeros(2, dtype=torch.int64), {0: 0}
    )
    k, v, *fresh = layer(10, 2, 2, 8, 3)
    found, wanted = [k.clone(), v.clone()], [k.clone(), v.clone()]
    before = fused.fallbacks["drift correction in Rust"]
    correction.apply(None, *found, *fresh)
    correction.apply(None, k.clone(), v.clone(), *fresh)
    correction._plain(None, *wanted, *fresh)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert fused.fallbacks["drift correction in Rust"] == before + 2


@pytest.mark.parametrize("kind", ["strided", "bfloat16"])
def test_what_is_not_contiguous_float32_goes_the_plain_way_without_a_count(kind: str) -> None:
    spans = [Span(SpanKind.REUSED, 1, 9, 0, 0, 5, 0, 1)]
    correction = DriftCorrection(
        DriftSettings(), spans, torch.tensor([2, 6]), torch.zeros(2, dtype=torch.int64), {0: 0}
    )
    tensors = layer(10, 2, 2, 8, 3)
    tensors = [t.repeat(1, 1, 2)[..., ::2] if kind == "strided" else t.bfloat16() for t in tensors]
    wanted = [tensors[0].clone(), tensors[1].clone()]
    before = fused.fallbacks.total()
    correction.apply(None, *tensors)
    correction._plain(None, *wanted, *tensors[2:])
    assert fused.fallbacks.total() == before
    torch.testing.assert_close(tensors[:2], wanted)
