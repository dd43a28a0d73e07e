"""The embedded engine against wrong prompts, wrong options, poisoned records and look-alike models."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from blendstore import Store
from blendstore.blend.selectors import SelectorError
from blendstore.options import RequestOptions
from blendstore_transformers import Engine
from tests.records import IDLE, idle
from tests.tiny_models import FAMILIES, assert_same, engine_of, ids, model_of, own

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


def put(engine: Engine, tokens: list[int], fill: float, *, bytes_per_token: int | None = None) -> int:
    """Records of the tokens, every number in them ``fill``, that outrank any other."""
    reservation = engine.store.reserve(
        engine.pipeline.namespace(RequestOptions()),
        np.array(tokens, dtype=np.uint32),
        bytes_per_token=bytes_per_token or engine.geometry.bytes_per_token,
        source_position=0,
        provenance=1,
        rank=200,
    )
    for index in range(len(reservation)):
        np.frombuffer(memoryview(reservation.buffer(index)), dtype=np.uint8).view(np.float32)[:] = fill
    return reservation.commit()


@pytest.mark.parametrize("share", [0.5, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_case_f01_a_record_of_another_geometry_under_the_right_key_is_not_used(share: float, ratio: float) -> None:
    """Twice the bytes read as twice the tokens: every row would be another token's."""
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model)
    assert put(engine, A, 1.0, bytes_per_token=int(engine.geometry.bytes_per_token * share)) == 2
    prompt = [*SYSTEM, *A, *QUESTION]
    found = engine.prefill(prompt, RequestOptions(ratio=ratio, store=False))
    assert "RecordError" in found.report.fallback
    assert engine.counters["fallbacks"] == 1
    assert_same(model, found, prompt)
    assert idle(engine.store) == IDLE


@pytest.mark.parametrize("selector", ["query", "deviation", "head", "hybrid", "stored", "none"])
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_records_that_are_no_numbers_cost_speed_only(
    caplog: pytest.LogCaptureFixture, selector: str, fill: float
) -> None:
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model)
    put(engine, A, fill)
    prompt = [*SYSTEM, *A, *QUESTION]
    found = engine.prefill(prompt, RequestOptions(ratio=0.1, selector=selector))
    assert engine.counters["fallbacks"] == 1
    assert [r.levelname for r in caplog.records if r.levelname == "WARNING"] == ["WARNING"]
    assert_same(model, found, prompt)
    assert idle(engine.store) == IDLE


def test_exact_records_that_are_no_numbers_cost_speed_only() -> None:
    """Restored ahead of the engine's own forward, which no selector sees."""
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model)
    prompt = [*SYSTEM, *A, *QUESTION]
    engine.prefill(prompt)
    lease = engine.pipeline.prepare(np.array(prompt, dtype=np.uint32), RequestOptions())
    with lease as prepared:
        holder, at = prepared.where[0]
        view = torch.utils.dlpack.from_dlpack(holder.buffer(at)).view(torch.float32)
        view.fill_(torch.nan)
    found = engine.prefill(prompt)
    assert "no finite numbers" in found.report.fallback
    assert_same(model, found, prompt)


def test_what_a_broken_model_computes_is_not_kept() -> None:
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    assert engine.prefill([*SYSTEM, *A, *QUESTION]).logits.isnan().all()
    assert engine.store.stats()["chunks"] == 0
    assert engine.counters["store_errors"] == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([3, 512], "token 1 of the prompt is 512: this model's ids are 0 to 511"),
        ([*A, 9999, 3], "token 64 of the prompt is 9999"),
        ([-1], "token 0 of the prompt is -1"),
        ([2**32 + 5], "token 0 of the prompt is 4294967301"),
        (np.array([2**32 + 5]), "token 0 of the prompt is 4294967301"),
        (np.array([-1]), "token 0 of the prompt is -1"),
        ([2**70], "an array of object"),
        ([3.5, 4.0], "an array of float64"),
        ([True], "an array of bool"),
        (np.array([[3, 4], [5, 6]]), "of 2 dimensions"),
        ({3, 4}, "of 0 dimensions"),
    ],
    ids=str,
)
def test_what_is_no_prompt_of_this_model_is_refused_by_name(prompt: Any, message: str) -> None:
    """Ids that wrap around, or are cut to whole numbers, would be answered as another prompt."""
    engine = engine_of(model_of(FAMILIES["llama"]))
    engine.prefill([*SYSTEM, *A, *QUESTION])
    with pytest.raises(ValueError, match=message):
        engine.prefill(prompt)
    if not isinstance(prompt, set):
        with pytest.raises(ValueError, match=message):
            engine.generate(prompt, 1)
    assert engine.counters["fallbacks"] == 0
    assert idle(engine.store) == IDLE


def test_arrays_and_tensors_of_ids_are_prompts() -> None:
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model)
    prompts: list[Any] = [np.array(A, dtype=np.int32), np.array(A, dtype=np.uint64), torch.tensor(A)]
    for prompt in prompts:
        assert engine.generate(prompt, 3).ids == own(model, A, 3)[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"selector": "nearest"}, "selector 'nearest' is unknown"),
        ({"selector": "head", "selector_options": {"rows": 3}}, "'head' has no option 'rows'"),
        ({"selector_options": {"rows": "abc"}}, "rows = 'abc'"),
        ({"selector_options": {"first_layer": 4}}, "first_layer = 4: use a whole number from 0 to 3"),
    ],
)
def test_wrong_options_are_refused_whatever_the_store_holds(given: dict[str, Any], message: str) -> None:
    """Not accepted while nothing is reused, and a silent fallback from then on."""
    engine = engine_of(model_of(FAMILIES["llama"]))
    with pytest.raises(SelectorError, match=message):
        engine.prefill([*SYSTEM, *A, *QUESTION], RequestOptions.parse(given))


def test_check_layers_that_the_model_has_not_are_refused_at_start() -> None:
    with pytest.raises(SelectorError, match=r"check layer 9: use 1\.\.3"):
        engine_of(model_of(FAMILIES["llama"]), blend_selector="deviation", blend_check_layers=9)
