"""Invariant 7: a model that the runner doesn't reproduce, or whose keys don't move by a rotation, is refused by
layer."""

from typing import Any

import pytest
import torch

from blendstore.blend.selftest import GeometryError, prove_geometry, tolerance
from tests.fake_engine import VOCABULARY, FakeEngine, rope


def test_a_right_model_is_proved() -> None:
    engine = FakeEngine(windows=(12, None), ropes=(rope(8), rope(4, 500.0, "interleaved", 1.2)))
    proof = prove_geometry(engine, engine.prefill, vocabulary=VOCABULARY)
    assert proof.tokens == 48
    assert proof.runner_error < 1e-5
    assert proof.rotation_error < 1e-5


class WrongAttention(FakeEngine):
    """From layer 2 on its own prefill sees what the runner isn't told: a sliding window."""

    def prefill(self, ids: torch.Tensor, offset: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        other = FakeEngine(windows=(None, None, 5, 5))
        return other.prefill(ids, offset)


def test_wrong_attention_is_refused_at_the_layer_behind_it() -> None:
    engine = WrongAttention()
    with pytest.raises(
        GeometryError, match=r"layer 3: the runner's KV differs from the engine's by \S+ \(limit 0\.0001\)"
    ):
        prove_geometry(engine, engine.prefill, vocabulary=VOCABULARY)


@pytest.mark.parametrize(
    "wrong", [rope(8, 9_000.0), rope(8, pairing="interleaved"), rope(4)], ids=["base", "pairing", "too few pairs"]
)
def test_a_wrong_rotation_is_refused_at_its_layer(wrong: Any) -> None:
    engine = FakeEngine(ropes=(rope(8), rope(8)))
    tables = list(engine.geometry.rotary)
    tables[2] = wrong.table()
    object.__setattr__(engine.geometry, "rotary", tuple(tables))
    with pytest.raises(GeometryError, match=r"layer 2: K rotated from position 37 to 0 differs"):
        prove_geometry(engine, engine.prefill, vocabulary=VOCABULARY)


def test_nan_is_refused_too() -> None:
    """A comparison with NaN is false: it must not pass for a small error."""
    engine = FakeEngine()
    engine.weights[1][1][0] = torch.nan
    with pytest.raises(GeometryError, match="layer 1"):
        prove_geometry(engine, engine.prefill, vocabulary=VOCABULARY)


def test_half_precision_may_err_more_the_deeper_the_layer_but_never_as_much_as_a_wrong_rotation() -> None:
    """An 8B model in bfloat16 with weights that attend was seen to differ from itself by .066 in layer 24: rounding. A
    wrong base, pairing or number of rotated dims changes K by .3 and more."""
    assert tolerance(torch.bfloat16, 0) == 6e-2
    assert 0.1 < tolerance(torch.bfloat16, 24) < tolerance(torch.bfloat16, 79) < 0.3
    assert tolerance(torch.float32, 0) == tolerance(torch.float32, 79) == 1e-4
