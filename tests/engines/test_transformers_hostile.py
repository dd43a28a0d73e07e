"""The embedded engine against wrong prompts, wrong options, poisoned records and look-alike models."""

import copy
from typing import Any

import pytest

from blendstore import Store
from tests.tiny_models import FAMILIES, assert_same, engine_of, ids, model_of

SYSTEM, A, B, QUESTION = ids(1, 40), ids(2, 64), ids(3, 64), ids(5, 20)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rms_norm_eps": 0.5}),
        ("llama", {"hidden_act": "relu"}),
        ("mistral-window", {"sliding_window": 8}),
        ("mixtral", {"num_experts_per_tok": 1}),
    ],
)
@pytest.mark.parametrize("blending", [True, False])
def test_case_s11_equal_weights_computed_with_otherwise_share_nothing(
    family: str, changes: dict[str, object], blending: bool
) -> None:
    store = Store(capacity_bytes=1 << 26, chunk_size=32)
    prompt = [*SYSTEM, *A, *QUESTION]
    changed = copy.deepcopy(FAMILIES[family])
    for name, value in changes.items():
        setattr(changed, name, value)
    first, other = model_of(FAMILIES[family]), model_of(changed)
    engine_of(first, store=store, enable_blending=blending).prefill(prompt)
    found = engine_of(other, store=store, enable_blending=blending).prefill(prompt)
    assert found.report.fresh == len(prompt)
    assert_same(other, found, prompt)


def test_the_name_and_place_of_a_model_are_no_part_of_its_identity() -> None:
    store = Store(capacity_bytes=1 << 26, chunk_size=32)
    prompt = [*SYSTEM, *A, *QUESTION]
    renamed: Any = copy.deepcopy(FAMILIES["llama"])
    renamed.name_or_path = "elsewhere"
    engine_of(model_of(FAMILIES["llama"]), store=store).prefill(prompt)
    assert engine_of(model_of(renamed), store=store).prefill(prompt).report.fresh == 1
