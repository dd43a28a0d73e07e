"""The embedded engine against the plain model, on tiny random models: what blending may not change."""

import threading
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, Gemma2Config, GptOssConfig, LlamaConfig, MambaConfig

from blendstore import LeaseExpired, Store
from blendstore.blend.records import LeaseRecords
from blendstore.options import RequestOptions
from blendstore.pipeline import Pipeline
from blendstore_transformers import Engine, Prefill, UnsupportedModel
from blendstore_transformers.model import layers_of
from tests.records import IDLE, idle
from tests.tiny_models import (
    FAMILIES,
    FULL,
    PLAIN,
    SHAPE,
    assert_same,
    continued,
    engine_of,
    ids,
    model_of,
    own,
)

SYSTEM, A, B, NEW, QUESTION = ids(1, 40), ids(2, 100), ids(3, 77), ids(4, 50), ids(5, 20)
UNSTORED = RequestOptions(ratio=1.0, store=False)


@cache
def shared(family: str) -> tuple[Any, Engine]:
    """A model and an engine that knows A and B; tests that use it store nothing."""
    model = model_of(FAMILIES[family])
    engine = engine_of(model)
    assert engine.refusal == ""
    engine.prefill([*SYSTEM, *A, *B, *QUESTION])
    return model, engine


def held(model: Any, prompt: list[int]) -> DynamicCache:
    kept = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt]), past_key_values=kept, use_cache=True)
    return kept


def equal(mine: DynamicCache, other: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Bit for bit."""
    pairs = zip(layers_of(mine), other, strict=True)
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_one_is_the_engines_own_prefill(family: str) -> None:
    """Invariant 1, with moved documents, a new one in a hole, and one that comes twice."""
    model, engine = shared(family)
    prompt = [*ids(6, 17), *B, *NEW, *A, *B, *QUESTION]
    found = engine.prefill(prompt, UNSTORED)
    assert found.report.fallback == ""
    assert found.report.recomputed >= len(A) + 2 * len(B), "documents were not reused at all"
    assert_same(model, found, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_one_behind_an_engine_held_prefix(family: str) -> None:
    """The held cache is read, never written, and may end within a document."""
    model, engine = shared(family)
    prompt = [*ids(6, 17), *B, *NEW, *A, *QUESTION]
    kept = held(model, prompt[:60])
    before = [(k.clone(), v.clone()) for k, v in layers_of(kept)]
    found = engine.prefill(prompt, UNSTORED, held=kept)
    assert (found.report.prefix, found.report.fallback) == (60, "")
    assert found.report.recomputed > len(A)
    assert_same(model, found, prompt)
    assert equal(kept, before)


@pytest.mark.parametrize(
    ("family", "pairing", "pairs"),
    [("llama", "half", 8), ("phi3-partial", "half", 4), ("cohere-interleaved", "interleaved", 8),
     ("glm-interleaved-partial", "interleaved", 4)],
)  # fmt: skip
def test_case_b05_which_dims_turn_together_is_found_by_running_the_model(family: str, pairing: str, pairs: int) -> None:
    tables = shared(family)[1].geometry.rotary
    assert {(table.pairing, table.pairs) for table in tables if table} == {(pairing, pairs)}
    assert None not in tables


@given(
    offset=st.integers(0, 900),
    order=st.lists(st.sampled_from([A, B, NEW]), min_size=1, max_size=4),
    family=st.sampled_from(["llama", "llama-yarn", "gemma3", "phi3-partial", "glm-interleaved-partial"]),
    prefix=st.integers(0, 60),
)
@settings(max_examples=12, deadline=None)
def test_documents_moved_by_any_offset_in_any_order(
    offset: int, order: list[list[int]], family: str, prefix: int
) -> None:
    model, engine = shared(family)
    prompt = [*ids(offset, offset), *(token for document in order for token in document), *QUESTION]
    kept = held(model, prompt[:prefix]) if prefix else None
    found = engine.prefill(prompt, UNSTORED, held=kept)
    assert found.report.fallback == ""
    assert_same(model, found, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_order_and_positions_equal_plain_prefix_reuse_bit_for_bit(family: str) -> None:
    """Invariant 1: with every record exact, blending is plain caching; restored rows are the bytes that were stored."""
    model = model_of(FAMILIES[family])
    prompt = [*SYSTEM, *A, *B, *QUESTION]
    results: list[Prefill] = []
    for blending in (True, False):
        engine = engine_of(model, enable_blending=blending, save_unfull_chunk=True)
        first = engine.prefill(prompt)
        again = engine.prefill(prompt)
        assert (again.report.exact, again.report.fresh) == (len(prompt) - 1, 1)
        for mine, old in zip(layers_of(again.cache), layers_of(first.cache), strict=True):
            assert all(torch.equal(a[:-1], b[:-1]) for a, b in zip(mine, old, strict=True))
        results.append(again)
    blended, plain = results
    assert torch.equal(blended.logits, plain.logits)
    assert equal(blended.cache, layers_of(plain.cache))


def test_exact_records_behind_a_computed_hole_are_used_and_right() -> None:
    """Nothing is reused from another context here, so the answer is a full prefill's although most isn't computed."""
    model = model_of(FAMILIES["llama"])
    first, second = engine_of(model), engine_of(model)
    prompt = [*SYSTEM, *A, *B, *QUESTION]
    first.prefill(prompt)
    copy_all_but(first, second, prompt, left_out=2)
    found = second.prefill(prompt, RequestOptions(store=False))
    assert (found.report.exact, found.report.reused, found.report.recomputed) == (len(prompt) - 1 - 32, 0, 0)
    assert_same(model, found, prompt)


def copy_all_but(source: Engine, target: Engine, prompt: list[int], left_out: int) -> None:
    """Stores every chunk of the prompt but one."""
    tokens = torch.tensor(prompt, dtype=torch.uint32).numpy()
    namespace = source.pipeline.namespace(RequestOptions())
    keys = namespace.chain_keys(tokens, chunk_size=32, head=True)
    with source.store.lookup(keys) as lease, target.pipeline.prepare(tokens, RequestOptions()) as prepared:
        capture = target.pipeline.capture(prepared)
        for chunk in capture.chunks():
            memoryview(chunk.reservation.buffer(chunk.index))[:] = bytes(lease.buffer(chunk.start // 32))
        for at, (reservation, mask, offset) in enumerate(capture.reservations):
            kept = bytes(flag and offset // 32 + index != left_out for index, flag in enumerate(mask))
            capture.reservations[at] = (reservation, kept, offset)
        capture.commit()


@pytest.mark.parametrize("error", [OSError, LeaseExpired, TimeoutError])
@pytest.mark.parametrize("place", ["lookup", "match", "read", "reserve", "commit"])
def test_case_f01_a_failing_store_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, place: str, error: type[Exception]
) -> None:
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model)
    engine.prefill([*SYSTEM, *A, *B, *QUESTION])
    prompt = [*B, *NEW, *A, *QUESTION]

    def broken(*_: Any, **__: Any) -> Any:
        raise error("broken")

    if place == "read":
        monkeypatch.setattr(LeaseRecords, "layer", broken)
    else:
        monkeypatch.setattr(engine.pipeline, "_store", Broken(engine.store, place, error))
    found = engine.prefill(prompt, FULL)
    assert_same(model, found, prompt)
    while_storing = place in ("reserve", "commit")
    assert (engine.counters["fallbacks"], engine.counters["store_errors"]) == (not while_storing, while_storing)
    assert found.report.fallback == ("" if while_storing else f"{error.__name__}: broken")
    monkeypatch.undo()
    assert idle(engine.store) == IDLE
    again = engine.prefill(prompt, FULL).report
    if while_storing:
        assert again.recomputed > 0, "and works again afterwards"
    else:
        assert again.exact > len(prompt) - 32, "what the engine computed itself was stored"


class Broken:
    """A store of which one call fails."""

    def __init__(self, store: Store, place: str, error: type[Exception]) -> None:
        self.store, self.place, self.error = store, place, error

    def __getattr__(self, name: str) -> Any:
        if self.place == "commit" and name == "reserve":
            return lambda *a, **k: BrokenCommit(self.store.reserve(*a, **k), self.error)
        if name.startswith(self.place):
            raise self.error("broken")
        return getattr(self.store, name)


class BrokenCommit:
    """A reservation that can't be published."""

    def __init__(self, inner: Any, error: type[Exception]) -> None:
        self.inner, self.error = inner, error

    def commit(self, mask: bytes | None = None) -> int:
        raise self.error("broken")

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_case_f01_a_record_of_wrong_length_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of several is bad: the prompt is computed, bytes of something else are never taken for KV."""
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model)
    engine.prefill([*SYSTEM, *A, *B, *QUESTION])
    prompt = [*B, *NEW, *A, *QUESTION]
    real = LeaseRecords.layer

    def short(self: LeaseRecords, chunk: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = real(self, chunk, index)
        return (k[:-1], v[:-1]) if chunk == 1 else (k, v)

    monkeypatch.setattr(LeaseRecords, "layer", short)
    assert_same(model, engine.prefill(prompt, FULL), prompt)
    assert engine.counters["fallbacks"] == 1


def test_a_store_that_fails_altogether_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up fails, and so does storing what the engine computed instead."""
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model)
    prompt = [*B, *NEW, *A, *QUESTION]
    for early in (False, True):
        with monkeypatch.context() as patch:
            if early:
                patch.setattr(engine.pipeline, "segment", raise_os_error)
            patch.setattr(engine.pipeline, "_store", Broken(engine.store, "", OSError))
            found = engine.prefill(prompt)
        assert found.report.fallback == "OSError: broken"
        assert_same(model, found, prompt)
    assert (engine.counters["fallbacks"], engine.counters["store_errors"], engine.counters["stored"]) == (2, 2, 0)
    assert engine.prefill(prompt).report.fresh == len(prompt)


def test_after_a_fallback_nothing_is_stored_unless_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model_of(FAMILIES["llama"]))
    with monkeypatch.context() as patch:
        patch.setattr(engine.pipeline, "_store", Broken(engine.store, "lookup", OSError))
        engine.prefill([*SYSTEM, *A], RequestOptions(store=False))
    assert (engine.counters["fallbacks"], engine.counters["stored"]) == (1, 0)


def raise_os_error(*_: Any) -> Any:
    raise OSError("broken")


def test_case_f01_an_expired_lease_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = shared("llama")
    prompt = [*B, *NEW, *A, *QUESTION]
    prepare = Pipeline.prepare

    def released(self: Pipeline, *a: Any, **k: Any) -> Any:
        prepared = prepare(self, *a, **k)
        prepared.release()
        return prepared

    monkeypatch.setattr(Pipeline, "prepare", released)
    found = engine.prefill(prompt, UNSTORED)
    assert "LeaseExpired" in found.report.fallback
    assert_same(model, found, prompt)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_case_b07_working_memory_full_of_nan_is_never_read(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Whatever a pool held before, also in a tail chunk's unused rows, outputs are finite and right."""
    model, engine = shared(family)
    real = torch.empty

    def poisoned(*a: Any, **k: Any) -> torch.Tensor:
        out = real(*a, **k)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    prompt = [*ids(6, 17), *B, *NEW, *A[:39], *QUESTION]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        found = [engine.prefill(prompt, RequestOptions(ratio=ratio, store=False)) for ratio in (1.0, 0.15, 0.0)]
    assert [prefill.report.fallback for prefill in found] == [""] * 3
    assert all(bool(torch.isfinite(part).all()) for one in found for kv in layers_of(one.cache) for part in kv)
    assert_same(model, found[0], prompt)


def test_case_b08_concurrent_prompts_answer_as_alone() -> None:
    """16 blended prompts at once on one engine, then 64 equal ones with a pool of a few chunks."""
    model, engine = shared("llama")
    prompts = [[*ids(number, number), *B, *NEW, *A, *QUESTION] for number in range(16)]
    wanted = [own(model, prompt)[1] for prompt in prompts]
    assert concurrently(model, engine, prompts, UNSTORED) == wanted
    tiny = engine_of(model, store=Store(capacity_bytes=1 << 17, chunk_size=32, reserve_wait_s=0.0))
    same = [*SYSTEM, *A, *QUESTION]
    assert concurrently(model, tiny, [same] * 64, FULL) == [own(model, same)[1]] * 64
    assert tiny.counters["prompts"] == 64
    assert idle(tiny.store) == IDLE


def concurrently(model: Any, engine: Engine, prompts: list[list[int]], options: RequestOptions) -> list[list[int]]:
    """Greedy continuations of prompts that are prefilled at once."""
    found: dict[int, Prefill] = {}

    def serve(number: int) -> None:
        found[number] = engine.prefill(prompts[number], options)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [continued(model, found[number].cache, found[number].logits) for number in range(len(prompts))]


REFUSED = {
    "dynamic NTK": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "LongRoPE": LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 256},
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "factor": 4.0,
            "original_max_position_embeddings": 100,
        },
    ),
    "several axes": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    ),
    "s_aux": GptOssConfig(**{**SHAPE, "intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_case_b06_unsupported_models_are_refused_by_name_and_cached_plainly(reason: str) -> None:
    """Case b05's moving rotary too: prompts on either side of LongRoPE's switch never share KV."""
    model = model_of(REFUSED[reason])
    before = model.config._attn_implementation
    engine = engine_of(model)
    assert reason in engine.refusal
    assert engine.proof is None
    assert "refused" in engine.describe()
    assert model.config._attn_implementation == before
    for length in (80, 80, 130, 130, 80):
        prompt = [*SYSTEM, *ids(9, length - 60), *QUESTION]
        found = engine.prefill(prompt)
        assert found.report.fallback == ""
        assert (found.report.reused, found.report.recomputed) == (0, 0)
        assert_same(model, found, prompt)
    assert engine.counters["exact"] > 0


def test_case_b06_a_model_without_kv_is_an_error_at_start() -> None:
    config: Any = MambaConfig
    with pytest.raises(UnsupportedModel, match="Mamba"):
        engine_of(model_of(config(vocab_size=512, hidden_size=64, num_hidden_layers=2)))


def test_a_model_that_fails_the_proof_is_not_blended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: here keys depend on more than their own position."""
    model = model_of(FAMILIES["llama"])
    with monkeypatch.context() as patch:
        patch.setattr("blendstore_transformers.model.TransformersModel.prefill", off_by_one)
        engine = engine_of(model)
    assert "layer 0" in engine.refusal
    prompt = [*SYSTEM, *A, *QUESTION]
    assert_same(model, engine.prefill(prompt), prompt)
    again = engine.prefill(prompt)
    assert again.report.exact == len(prompt) - 1
    assert_same(model, again, prompt)


def off_by_one(self: Any, tokens: torch.Tensor, offset: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    kept = DynamicCache()
    positions = torch.arange(offset, offset + tokens.shape[0]) + (offset > 0)
    with torch.inference_mode():
        self.model(input_ids=tokens[None], position_ids=positions[None], past_key_values=kept, use_cache=True)
    return layers_of(kept)


def test_a_held_prefix_as_long_as_the_prompt_leaves_the_last_token_to_compute() -> None:
    model, engine = shared("llama")
    prompt = [*SYSTEM, *A]
    found = engine.prefill(prompt, RequestOptions(store=False), held=held(model, prompt))
    assert (found.report.prefix, found.report.fresh, found.report.fallback) == (len(prompt) - 1, 1, "")
    assert_same(model, found, prompt)


def test_what_stands_behind_a_blended_held_prefix_is_not_taken_for_exact() -> None:
    """Its KV is a blend's, and must not come back as a full prefill's."""
    model = model_of(FAMILIES["llama"])
    engine = engine_of(model)
    engine.prefill([*SYSTEM, *A, *QUESTION])
    turn = [*ids(6, 17), *A, *QUESTION]
    first = engine.prefill(turn, RequestOptions(ratio=0.0, store=False))
    assert first.report.reused >= len(A)
    prompt = [*turn, *NEW, *ids(7, 20)]
    engine.prefill(prompt, held=first.cache, held_exact=False)
    found = engine.prefill(prompt, FULL)
    assert found.report.exact == 0
    assert_same(model, found, prompt)


def test_an_empty_prompt_is_an_error_and_one_token_is_not() -> None:
    model, engine = shared("llama")
    with pytest.raises(ValueError, match="empty"):
        engine.prefill([])
    assert_same(model, engine.prefill([7], RequestOptions(store=False)), [7])


def test_case_s11_other_weights_or_rotary_share_nothing() -> None:
    store = Store(capacity_bytes=1 << 26, chunk_size=32)
    prompt = [*SYSTEM, *A, *QUESTION]
    first = engine_of(model_of(FAMILIES["llama"]), store=store)
    first.prefill(prompt)
    changed = model_of(FAMILIES["llama"])
    with torch.no_grad():
        changed.model.layers[3].mlp.down_proj.weight[0, 0] += 1
    for other in (changed, model_of(FAMILIES["llama-scaled"]), model_of(REFUSED["dynamic NTK"])):
        assert engine_of(other, store=store).prefill(prompt, RequestOptions(store=False)).report.fresh == len(prompt)
    assert first.prefill(prompt, RequestOptions(store=False)).report.fresh == 1
    assert first.prefill(prompt, PLAIN).report.fresh == len(prompt)


def test_case_s13_tenants_share_nothing() -> None:
    """On the exact path, on the blended one, and through the matcher."""
    engine = engine_of(model_of(FAMILIES["llama"]))
    one, two = RequestOptions(tenant_salt="one"), RequestOptions(tenant_salt="two", store=False)
    engine.prefill([*SYSTEM, *A, *QUESTION], one)
    for prompt in ([*SYSTEM, *A, *QUESTION], [*NEW, *A, *QUESTION]):
        other = engine.prefill(prompt, two).report
        assert (other.exact, other.reused, other.recomputed, other.fresh) == (0, 0, 0, len(prompt))
        same = engine.prefill(prompt, one).report
        assert same.exact + same.reused + same.recomputed >= len(A) - 16


def test_a_gpu_is_made_ready_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is page-locked for as long as the engine lives, and the kernels that this model needs are compiled
    before its first prompt; where blending is off there are none."""
    calls: list[tuple[object, ...]] = []
    lock = object()

    def pin(*arguments: object) -> object:
        calls.append(("pin", *arguments))
        return lock

    monkeypatch.setattr("blendstore_transformers.engine.pin", pin)
    monkeypatch.setattr("blendstore_transformers.engine.warm_up", lambda *given: calls.append(("warm up", *given)))
    for config, softcap in ((FAMILIES["llama"], None), (Gemma2Config(**SHAPE, attn_logit_softcapping=30.0), 30.0)):
        calls.clear()
        engine = engine_of(model_of(config))
        assert engine.refusal == "" and engine._pinned is lock
        assert calls == [
            ("pin", engine.store, engine.geometry.device),
            ("warm up", engine.geometry, softcap),
        ]
    calls.clear()
    engine = engine_of(model_of(FAMILIES["llama"]), enable_blending=False)
    assert calls == [("pin", engine.store, engine.geometry.device)]
