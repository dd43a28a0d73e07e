"""The drift correction on random prompts: columns as a device has them, padded, say what those of a CPU say."""

import math
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blendstore.blend import drift as module
from blendstore.blend.drift import Documents, DriftCorrection, DriftSettings
from blendstore.plan import Span, SpanKind
from tests.fake_engine import rope

RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 3)), min_size=1, max_size=6)
SETTINGS = st.builds(
    DriftSettings,
    strength=st.floats(0.1, 1.0),
    temperature=st.sampled_from([0.01, 0.12, 0.5, 1e6, math.inf]),
    elsewhere=st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    sample=st.integers(1, 90),
    prior=st.sampled_from([0.0, 1.0, 8.0]),
)
CPU = torch.device("cpu")


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
    pairs=st.integers(0, 8),
    share=st.floats(0, 1),
    seed=st.integers(0, 1 << 30),
)
def test_padded_columns_say_what_the_others_say(
    runs: list[tuple[int, int, int]], drift: DriftSettings, kv_heads: int, pairs: int, share: float, seed: int
) -> None:
    """Documents in several spans, with others between, of different lengths, and such that have nothing recomputed.
    What is added never exceeds the strength's share, tokens outside of spans stay as they are, and bits repeat."""
    spans, at = [], 1
    for gap, length, group in runs:
        spans.append(Span(SpanKind.REUSED, at + gap, at + gap + length, 0, 0, 5, group, at))
        at += gap + length
    numbers = {group: number for number, group in enumerate({span.group: None for span in spans})}
    chance = torch.rand(at, generator=torch.Generator().manual_seed(seed))
    # Documents of group 3 have nothing recomputed.
    chosen = [p for s in spans if s.group != 3 for p in range(s.start, s.stop) if chance[p] < share]
    if not chosen:
        return
    groups = torch.tensor([numbers[next(s.group for s in spans if s.start <= p < s.stop)] for p in chosen])
    selected, documents = torch.tensor(chosen), Documents.of(spans, numbers, CPU)
    table = rope(pairs).table() if pairs else None
    k, v, *fresh = layer(at + 2, len(chosen), kv_heads, 16, seed)
    values = [v, layer(at + 2, 1, kv_heads, 16, seed + 1)[1]]

    def corrected(padded: bool) -> tuple[Tensor, Tensor, Tensor]:
        with mock.patch.object(module, "usable", lambda device: padded):
            made = DriftCorrection(drift, documents, selected, groups)
        made.weigh(values)
        found_k, found_v = k.clone(), v.clone()
        made._plain(table, found_k, found_v, *fresh)
        return found_k, found_v, made.weights

    plain, padded, again = corrected(False), corrected(True), corrected(True)
    assert padded[2].shape[2] % module.PADDING == 0
    # A cosine is rounded to some 1e-7, which the temperature divides.
    near = 1e-5 + 2e-6 / drift.temperature
    for one, two, three in zip(plain[:2], padded[:2], again[:2], strict=True):
        torch.testing.assert_close(one, two, rtol=near, atol=near)
        assert torch.equal(two, three)
    for weights in (plain[2], padded[2]):
        assert bool((weights >= 0).all()) and float(weights.sum(-1).max()) <= drift.strength * (1 + 1e-5)
    outside = torch.ones(at + 2, dtype=torch.bool)
    for span in spans:
        outside[span.start : span.stop] = False
    assert torch.equal(plain[0][outside], k[outside]) and torch.equal(plain[1][outside], v[outside])
