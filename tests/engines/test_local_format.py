"""Documents that are kept in memory in fewer bits: reused all the same, close to what the engine computes."""

import zlib
from typing import Any

import pytest
import torch

from blendstore import Store
from blendstore.config import Config
from blendstore_transformers import Engine
from blendstore_transformers.model import layers_of
from tests.tiny_models import FAMILIES, VOCABULARY, engine_of, ids, largest_error, model_of, own


@pytest.mark.parametrize(("name", "most", "saved"), [("int8", 0.05, 1.6), ("int4", 0.6, 2.3)])
def test_documents_are_kept_smaller_and_reused(name: str, most: float, saved: float) -> None:
    """KV of reused rows is what the raw store gives, but for the format's steps; memory is what the format takes."""
    model = model_of(FAMILIES["llama"])
    first, second, lead = ids(1, 96), ids(2, 96), ids(3, 8)
    used, found = {}, {}
    for local_format in ("raw", name):
        engine = engine_of(model, local_format=local_format)
        engine.prefill([*lead, *first])
        engine.prefill([*lead, *second])
        before = engine.store.stats()["bytes_used"]
        engine.prefill([*lead, *ids(4, 160)])
        used[local_format] = float(engine.store.stats()["bytes_used"]) - float(before)
        prefill = engine.prefill([*lead, *second, *first, *ids(5, 9)])
        assert prefill.report.reused >= 32 and prefill.report.fresh <= 50, prefill.report
        found[local_format] = prefill.cache
    assert used["raw"] > saved * used[name]
    raw = list(layers_of(found["raw"]))
    assert 0 < largest_error(found[name], raw) < most


def test_what_serves_exact_prefixes_stays_raw_unless_asked() -> None:
    """Without blending every record is an exact prefix: restored bit for bit, until the user says otherwise."""
    model = model_of(FAMILIES["llama"])
    prompt = ids(7, 100)
    layers, _ = own(model, prompt)
    errors = {}
    for exact in (False, True):
        engine = engine_of(model, enable_blending=False, local_format="int8", local_format_exact=exact)
        engine.prefill(prompt)
        again = engine.prefill([*prompt, *ids(8, 5)])
        assert again.report.exact == 96
        head = [
            (
                float((k[:96] - found_k[:96]).abs().max()),
                float((v[:96] - found_v[:96]).abs().max()),
            )
            for (k, v), (found_k, found_v) in zip(layers, layers_of(again.cache), strict=True)
        ]
        errors[exact] = max(max(pair) for pair in head)
    assert errors[False] < 1e-5 < errors[True] < 0.05


def test_what_one_server_packed_is_not_exact_for_one_that_keeps_records_raw() -> None:
    """Nor for one that packs but for exact prefixes: in the same store each finds its own records."""
    model, store = model_of(FAMILIES["llama"]), Store(capacity_bytes=1 << 26, chunk_size=32)
    prompt = [*ids(7, 96), *ids(8, 5)]
    wanted, _ = own(model, prompt)
    ways: tuple[dict[str, Any], ...] = (
        {"local_format": "int4", "local_format_exact": True},
        {"local_format": "int4"},
        {"local_format": "int8", "local_format_exact": True},
        {},
    )
    for exact in (0, 96):
        for way in ways:
            engine = engine_of(model, store=store, enable_blending=False, **way)
            prefill = engine.prefill(prompt)
            assert prefill.report.exact == exact
            packed = bool(exact) and way.get("local_format_exact", False)
            assert (largest_error(prefill.cache, wanted) > 1e-4) == packed, way


class Few:
    """A tokenizer that the guard can't measure with."""

    def __init__(self, ids: list[int] | None) -> None:
        self.ids = ids

    def encode(self, text: str) -> list[int]:
        if self.ids is None:
            raise RuntimeError("no words")
        return self.ids


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([3] * 64, "room for 64 tokens of prose, 128 are needed"),
        ([10 * VOCABULARY] * 512, "Error"),
        (None, "RuntimeError: no words"),
    ],
    ids=["few", "beyond the vocabulary", "none"],
)
def test_what_can_not_be_measured_is_used_with_a_warning(
    given: list[int] | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.load(env={}, overrides={"local_format": "int8", "local_format_exact": True})
    engine = Engine(model_of(FAMILIES["llama"]), Few(given), config)
    assert engine.config.local_format == "int8" and engine.verdicts == []
    assert "local_format: not measured" in caplog.text and reason in caplog.text


class Words:
    """As much of a tokenizer as the guard needs."""

    def encode(self, text: str) -> list[int]:
        return [3 + zlib.crc32(word.encode()) % (VOCABULARY - 3) for word in text.split()]


@pytest.mark.parametrize("bound", [0.0, 1e3])
def test_a_format_that_changes_answers_too_much_is_not_used(bound: float) -> None:
    """Measured at start on prose: above the bound the engine keeps raw records and counts that it does."""
    given = {"local_format": "int4", "local_format_exact": True, "chunk_size": 32, "codec_max_kl": bound}
    model = model_of(FAMILIES["llama"])
    engine = Engine(model, Words(), Config.load(env={}, overrides=given))
    (verdict,) = engine.verdicts
    assert 1e-6 < verdict.kl < 5 and verdict.kept == (bound > 0)
    assert engine.config.local_format == ("int4" if bound else "raw")
    assert engine.counters["codec_fallbacks"] == (0 if bound else 1)
    prompt = ids(7, 100)
    engine.prefill(prompt)
    again = engine.prefill([*prompt, *ids(8, 5)])
    layers, _ = own(model, prompt)
    error = max(
        float((a[:96] - b[:96]).abs().max())
        for pair, found in zip(layers, layers_of(again.cache), strict=True)
        for a, b in zip(pair, found, strict=True)
    )
    assert (error > 1e-3) == (bound > 0)


def test_values_that_a_format_does_not_hold_cost_their_own_record_alone() -> None:
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model, enable_blending=False, local_format="int8", local_format_exact=True)
    large = torch.zeros(VOCABULARY, dtype=torch.bool)
    large[5] = True

    def outgrown(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.where(large[prompt][:, None], 1e6, out)

    prompt = ids(7, 100)
    prompt = [7 if token == 5 else token for token in prompt]
    prompt[40] = 5
    hook = model.model.layers[-1].self_attn.v_proj.register_forward_hook(outgrown)
    try:
        engine.prefill(prompt)
    finally:
        hook.remove()
    assert (engine.counters["stored"], engine.counters["store_errors"]) == (2, 1), "of three chunks"
