"""Cases from the field about segments and blending, end to end: a tiny random model, the engine, the store.

Cases b05 (each rotary geometry), b06, b07, b08 and f01 are in ``tests/engines``; b12's numbers come with the quality
report.
"""

import itertools
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from blendstore import ChunkMeta, Store
from blendstore.options import RequestOptions
from blendstore.pipeline import HEAD, IN_CONTEXT, LEAD_IN
from blendstore.segments import SeparatorSegmenter
from blendstore_transformers import Engine, Prefill
from blendstore_transformers.model import layers_of
from tests.tiny_models import FAMILIES, FULL, assert_same, continued, engine_of, ids, largest_error, model_of, own

SEPARATOR = [3, 4, 5]
SYSTEM, QUESTION = ids(1, 15), ids(5, 20)
A, B, C, D = ids(2, 100), ids(3, 77), ids(4, 50), ids(6, 64)


@cache
def model() -> Any:
    return model_of(FAMILIES["llama"])


def separated(*, store: Store | None = None, **config: object) -> Engine:
    """An engine that cuts prompts at `SEPARATOR`."""
    engine = engine_of(model(), store=store, segmenter="auto", **config)
    engine.pipeline._separators = SeparatorSegmenter([SEPARATOR])
    return engine


def prompt(*documents: list[int], system: list[int] = SYSTEM, question: list[int] = QUESTION) -> list[int]:
    parts = [system, *documents, question]
    return [token for number, part in enumerate(parts) for token in [*(SEPARATOR if number else []), *part]]


def metas(engine: Engine, document: list[int]) -> list[ChunkMeta | None]:
    tokens = np.array(document, dtype=np.uint32)
    chunk_size = engine.config.chunk_size
    keys = engine.pipeline.namespace(RequestOptions()).chain_keys(tokens, chunk_size=chunk_size)
    with engine.store.lookup(keys) as lease:
        return [lease.meta(index) for index in range(len(lease))]


def kinds(engine: Engine, document: list[int]) -> set[int | None]:
    return {None if meta is None else meta.provenance for meta in metas(engine, document)}


def counts(found: Prefill) -> tuple[int, int, int, int]:
    r = found.report
    assert r.fallback == ""
    assert r.prefix + r.exact + r.reused + r.recomputed + r.fresh == r.prompt
    return r.exact, r.reused, r.recomputed, r.fresh


def test_case_b01_every_segment_cached_then_the_identical_prompt_again() -> None:
    """No crash, at least the last token computed, the same answer both times; at ratio 1 the model's own."""
    for options in (FULL, RequestOptions()):
        engine = separated()
        for document in (A, B, C):
            engine.prefill(prompt(document))
        tokens = prompt(B, A, C)
        answers = []
        for _ in range(2):
            found = engine.prefill(tokens, options)
            assert found.report.fresh >= 1
            assert found.report.reused + found.report.recomputed + found.report.exact >= len(A) + len(B) + len(C)
            answers.append(continued(model(), found.cache, found.logits))
        assert answers[0] == answers[1]
        if options is FULL:
            assert answers[0] == own(model(), tokens)[1]


def test_case_b02_thirty_documents_in_ten_random_orders() -> None:
    engine = separated()
    documents = [ids(100 + number, 32 + number) for number in range(30)]
    for start in range(0, 30, 10):
        engine.prefill(prompt(*documents[start : start + 10]))
    shuffle = random.Random(0)
    for _ in range(10):
        shuffle.shuffle(documents)
        tokens = prompt(*documents)
        found = engine.prefill(tokens, FULL)
        assert found.report.fresh == len(QUESTION) + 31 * len(SEPARATOR), "every document hits"
        assert_same(model(), found, tokens)


def test_case_b03_error_falls_as_the_ratio_rises_behind_an_engine_held_prefix() -> None:
    engine = separated()
    engine.prefill(prompt(A, B, C, D))
    tokens = prompt(ids(7, 180), D, C, B, A)
    held = DynamicCache()
    with torch.inference_mode():
        engine.extend(held, tokens[:200], 0)
    before = [(k.clone(), v.clone()) for k, v in layers_of(held)]
    wanted, _ = own(model(), tokens)
    sums = []
    for ratio in (0.15, 0.3, 0.6, 1.0):
        found = engine.prefill(tokens, RequestOptions(ratio=ratio, store=False), held=held)
        assert (found.report.prefix, found.report.fallback) == (200, "")
        pairs = zip(layers_of(found.cache), wanted, strict=True)
        sums.append(sum(float((a - b).square().sum()) for x, y in pairs for a, b in zip(x, y, strict=True)))
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] < 1e-6 * sums[0]
    for mine, old in zip(layers_of(held), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, old, strict=True))


def test_case_b04_ratio_zero_computes_fresh_tokens_only_and_counters_tell_the_kinds_apart() -> None:
    engine = separated()
    engine.prefill(prompt(A, B))
    tokens = prompt(B, C, A)
    fresh = len(C) + len(QUESTION) + 4 * len(SEPARATOR)
    none = engine.prefill(tokens, RequestOptions(ratio=0.0, store=False))
    assert counts(none) == (len(SYSTEM), len(A) + len(B), 0, fresh)
    some = engine.prefill(tokens, RequestOptions(ratio=0.5, store=False))
    half = round(0.5 * (len(SYSTEM) + len(A) + len(B)))
    assert counts(some) == (len(SYSTEM), len(A) + len(B) - half, half, fresh)
    full = engine.prefill(tokens, RequestOptions(ratio=1.0, store=False))
    assert counts(full) == (len(SYSTEM), 0, len(A) + len(B), fresh)
    assert_same(model(), full, tokens)
    wanted, _ = own(model(), tokens)
    assert largest_error(none.cache, wanted) > 1e-2, "or this model wouldn't notice"
    totals = {kind: engine.counters[kind] for kind in ("exact", "reused", "recomputed", "fresh")}
    first = len(prompt(A, B))
    assert totals["exact"] == 3 * len(SYSTEM)
    assert totals["reused"] == 2 * (len(A) + len(B)) - half
    assert totals["recomputed"] == len(A) + len(B) + half
    assert totals["fresh"] == first + 3 * fresh


def test_case_b05_a_document_captured_at_37_is_right_at_0_5_and_9000() -> None:
    """Through the engine, where the record's keys were rotated twice; geometries one by one are in unit tests."""
    config: Any = FAMILIES["llama-scaled"]
    far = model_of(config)
    engine = engine_of(far)
    engine.prefill([*ids(8, 37), *A, *QUESTION])
    for target in (0, 5, 9000):
        tokens = [*ids(9, target), *A, *QUESTION]
        found = engine.prefill(tokens, RequestOptions(ratio=0.0, store=False))
        assert found.report.reused >= len(A)
        k, _ = layers_of(found.cache)[0]
        wanted, _ = own(far, tokens)
        assert (k - wanted[0][0]).abs().max() <= 1e-4, "layer 0 depends on the token and its position alone"
        full = engine.prefill(tokens, RequestOptions(ratio=1.0, store=False))
        assert_same(far, full, tokens)


def test_case_b11_a_lead_in_record_gives_way_to_an_in_context_one_and_not_the_other_way_round() -> None:
    """One record of the same tokens stays, by the documented rank, and says what it is."""
    first = separated()
    first.prefill(prompt(A, B))
    assert kinds(first, B) == {IN_CONTEXT}
    first.prefill(prompt(B), RequestOptions(reuse=False))
    assert kinds(first, B) == {IN_CONTEXT}, "better quality, so it stays"
    second = separated()
    second.prefill(prompt(B))
    assert kinds(second, B) == {LEAD_IN}
    second.prefill(prompt(A, B), RequestOptions(reuse=False))
    assert kinds(second, B) == {IN_CONTEXT}
    meta = metas(second, B)[0]
    assert meta is not None
    content = second.pipeline.namespace(RequestOptions()).content_id(np.array(A[:32], dtype=np.uint32))
    assert (meta.behind, meta.behind_tokens) == (content, len(SYSTEM) + len(A) + 2 * len(SEPARATOR))


def test_case_b11_a_record_computed_bare_is_never_reused_elsewhere() -> None:
    """Its first chunk is kept for prompts that begin with the same tokens, where it is exact."""
    engine = engine_of(model(), chunk_size=256, blend_min_tokens=16, store=Store(capacity_bytes=1 << 26))
    engine.prefill(A)
    moved = engine.prefill([*SYSTEM, *A, *QUESTION], RequestOptions(store=False))
    assert counts(moved) == (0, 0, 0, len(SYSTEM) + len(A) + len(QUESTION))
    assert counts(engine.prefill(A))[0] == len(A) - 1
    tokens = np.array(A, dtype=np.uint32)
    with engine.store.lookup(engine.pipeline.namespace(RequestOptions()).chain_keys(tokens, head=True)) as lease:
        meta = lease.meta(0)
        assert meta is not None
        assert meta.provenance == HEAD


def test_case_b12_isolated_refuses_in_context_records_and_nothing_of_the_other_document_remains() -> None:
    """B captured behind A and asked for without A: exactly the KV of a prompt that never had A."""
    secret, other = prompt(A, B), prompt(B)
    isolated, clean = separated(capture="isolated"), separated(capture="isolated")
    isolated.prefill(secret)
    assert kinds(isolated, A) == {LEAD_IN}
    assert kinds(isolated, B) == {None}
    found, wanted = isolated.prefill(other), clean.prefill(other)
    assert counts(found)[1:3] == (0, 0)
    shift = (found.logits.log_softmax(-1) - wanted.logits.log_softmax(-1)).abs().max()
    assert shift <= 1e-5
    again = isolated.prefill(prompt(C, B), RequestOptions(ratio=0.0, store=False))
    same = clean.prefill(prompt(C, B), RequestOptions(ratio=0.0, store=False))
    assert counts(again) == counts(same)
    assert (again.logits.log_softmax(-1) - same.logits.log_softmax(-1)).abs().max() <= 1e-5
    leaky, honest = separated(), separated()
    leaky.prefill(secret)
    honest.prefill(other)
    shown, kept = (e.prefill(prompt(C, B), RequestOptions(ratio=0.0, store=False)).logits for e in (leaky, honest))
    assert not torch.allclose(shown, kept, atol=1e-4), "in_context does shift it, or this test could not fail"


def test_case_s04_documents_of_unequal_length_hit_in_every_order_tails_included() -> None:
    """15 system tokens, chunks of 256, documents of 300, 517 and 255 tokens, six orders: no token is lost at a seam."""
    engine = separated(store=Store(capacity_bytes=1 << 27), chunk_size=256, blend_min_tokens=32)
    documents = [ids(20, 300), ids(21, 517), ids(22, 255)]
    for document in documents:
        engine.prefill(prompt(document))
    for order in itertools.permutations(documents):
        found = engine.prefill(prompt(*order), RequestOptions(ratio=0.0, store=False))
        exact, reused, _, fresh = counts(found)
        assert exact + reused == len(SYSTEM) + sum(map(len, documents))
        assert fresh == len(QUESTION) + 4 * len(SEPARATOR)


@pytest.mark.parametrize("with_separators", [True, False])
def test_case_s05_a_new_document_between_two_known_ones(with_separators: bool) -> None:
    """C1 and C3 are reused, C2 is computed and stored; the next prompt with C2 hits it."""
    engine = separated() if with_separators else engine_of(model())
    join = prompt if with_separators else joined
    engine.prefill(join(A, C))
    tokens = join(A, B, C)
    found = engine.prefill(tokens, FULL)
    cached = found.report.exact + found.report.recomputed
    assert cached >= len(A) + len(C), "known documents cost nothing"
    assert found.report.fresh >= len(B)
    assert_same(model(), found, tokens)
    tokens = join(D, B)
    found = engine.prefill(tokens, FULL)
    assert found.report.recomputed >= len(B)
    assert_same(model(), found, tokens)


def joined(*documents: list[int]) -> list[int]:
    """No separator, and a head of its own, as prompts of other users have one."""
    return [*ids(30 + len(documents[0]), 32), *(token for document in documents for token in document), *QUESTION]


@pytest.mark.parametrize("with_separators", [True, False])
def test_case_s06_the_same_document_twice_in_one_prompt(with_separators: bool) -> None:
    engine = separated() if with_separators else engine_of(model())
    join = prompt if with_separators else joined
    engine.prefill(join(C, A))
    tokens = join(A, B, A)
    found = engine.prefill(tokens, FULL)
    assert found.report.recomputed >= 2 * len(A)
    assert_same(model(), found, tokens)
    zero = engine.prefill(join(A, D, A), RequestOptions(ratio=0.0, store=False))
    assert zero.report.reused + zero.report.exact >= 2 * len(A)


def test_case_s08_a_document_cut_by_a_chunked_prefill_step_is_stored_once_and_whole() -> None:
    """The engine computes 512 tokens, then the rest: no partial chunk under a whole chunk's key."""
    engine = separated(store=Store(capacity_bytes=1 << 27), chunk_size=256, blend_min_tokens=32)
    document = ids(23, 550)
    tokens = prompt(document)
    step = engine.prefill(tokens[:512], RequestOptions(store=False))
    found = engine.prefill(tokens, held=step.cache)
    assert found.report.prefix == 512
    stored = metas(engine, document)
    assert [meta.ntokens for meta in stored if meta] == [256, 256, 38]
    before = engine.store.stats()["chunks"]
    engine.prefill(tokens)
    assert engine.store.stats()["chunks"] == before
    moved = prompt(D, document)
    again = engine.prefill(moved, FULL)
    assert again.report.recomputed == len(document)
    assert_same(model(), again, moved)
