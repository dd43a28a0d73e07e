"""The pipeline over a real store, without torch: what is found, what is kept, and under which name it is kept."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendstore import ChunkMeta, Namespace, Store
from blendstore.config import Config
from blendstore.options import RequestOptions
from blendstore.pipeline import BLENDED, HEAD, IN_CONTEXT, LEAD_IN, Pipeline, Prepared, rank
from blendstore.plan import SpanKind
from blendstore.segments import SeparatorSegmenter
from tests.records import BYTES_PER_TOKEN, CHUNK, IDLE, Tokens, array, concatenate, idle, tenant, text

BOS, SEPARATOR = 7, text(900, 3)
SYSTEM, A, B, C, QUESTION = text(1, 5), text(2, 40), text(3, 37), text(4, 50), text(5, 14)
PREFIX, EXACT, REUSED, FRESH = SpanKind
OPTIONS = RequestOptions()


def pipeline(store: Store | None = None, *, separators: bool = True, **config: object) -> Pipeline:
    """Small chunks; runs of 8 tokens are worth reusing."""
    given = {"enable_blending": True, "chunk_size": CHUNK, "blend_min_tokens": 8, **config}
    store = store or Store(capacity_bytes=1 << 22, chunk_size=CHUNK)
    segmenter = SeparatorSegmenter([SEPARATOR.tolist()], [BOS]) if separators else None
    made = Config.load(env={}, overrides=given)
    return Pipeline(store, made, tenant, bytes_per_token=BYTES_PER_TOKEN, separators=segmenter)


def prompt(*parts: Tokens, bos: bool = False) -> Tokens:
    """Parts with the separator between."""
    joined: list[Tokens] = [np.array([BOS], dtype=np.uint32)] if bos else []
    for number, part in enumerate(parts):
        joined += [SEPARATOR, part] if number else [part]
    return concatenate(joined)


def serve(line: Pipeline, tokens: Tokens, *, engine_prefix: int = 0, prefix_exact: bool = True) -> Prepared:
    """Prepare and capture one prompt; payloads are the positions of the tokens."""
    with line.prepare(tokens, OPTIONS, engine_prefix=engine_prefix, prefix_exact=prefix_exact) as prepared:
        capture = line.capture(prepared)
        for chunk in capture.chunks():
            rows = array(chunk.reservation.buffer(chunk.index)).reshape(chunk.stop - chunk.start, -1)
            rows[:] = np.arange(chunk.start, chunk.stop)[:, None] % 251
        capture.commit()
    return prepared


def shape(prepared: Prepared) -> list[tuple[SpanKind, int, int]]:
    """Spans, with those of one kind that touch joined."""
    out: list[tuple[SpanKind, int, int]] = []
    for span in prepared.plan.spans:
        if out and out[-1][0] is span.kind:
            out[-1] = (span.kind, out[-1][1], span.stop)
        else:
            out.append((span.kind, span.start, span.stop))
    return out


def metas(line: Pipeline, document: Tokens, *, head: bool = False) -> list[ChunkMeta | None]:
    namespace = line.namespace(OPTIONS)
    with line._store.lookup(namespace.chain_keys(document, chunk_size=CHUNK, head=head)) as lease:
        return [lease.meta(index) for index in range(len(lease))]


def provenances(line: Pipeline, document: Tokens, *, head: bool = False) -> list[int | None]:
    return [None if meta is None else meta.provenance for meta in metas(line, document, head=head)]


def test_a_document_behind_the_same_tokens_is_exact_although_a_separator_is_computed_before_it() -> None:
    line = pipeline()
    serve(line, prompt(SYSTEM, A, QUESTION))
    found = serve(line, prompt(SYSTEM, A, B, QUESTION))
    assert shape(found) == [(EXACT, 0, 5), (FRESH, 5, 8), (EXACT, 8, 48), (FRESH, 48, len(found.tokens))]


def test_documents_are_reused_in_any_order_and_a_new_one_costs_only_itself() -> None:
    line = pipeline()
    serve(line, prompt(SYSTEM, A, B, QUESTION))
    found = serve(line, prompt(SYSTEM, B, C, A, QUESTION))
    assert (found.plan.reused, found.plan.exact) == (len(A) + len(B), len(SYSTEM))
    assert found.plan.fresh == len(C) + len(QUESTION) + 4 * len(SEPARATOR)
    again = serve(line, prompt(SYSTEM, C, QUESTION))
    assert (again.plan.reused, again.plan.exact) == (len(C), len(SYSTEM))


@pytest.mark.parametrize(("bos", "system"), [(False, HEAD), (True, LEAD_IN)])
def test_provenance_says_what_stood_before(bos: bool, system: int) -> None:
    """A system prompt at position 0 is bare, one behind BOS is a lead-in capture; so is the first document."""
    line = pipeline()
    serve(line, prompt(text(1, 20), A, B, QUESTION, bos=bos))
    assert provenances(line, text(1, 20), head=not bos)[0] == system
    assert provenances(line, A) == [LEAD_IN] * 3
    assert provenances(line, B) == [IN_CONTEXT] * 3


def test_later_chunks_of_a_long_system_prompt_stand_behind_its_first() -> None:
    line = pipeline()
    serve(line, prompt(text(1, 40), A, QUESTION))
    assert provenances(line, text(1, 40), head=True) == [HEAD, LEAD_IN, LEAD_IN]


def test_a_record_says_which_documents_stood_before_it() -> None:
    line = pipeline()
    serve(line, prompt(SYSTEM, A, B, C, QUESTION))
    ids = [line.namespace(OPTIONS).content_id(np.ascontiguousarray(document[:CHUNK])) for document in (A, B)]
    first = [metas(line, document)[0] for document in (A, B, C)]
    assert [meta.behind for meta in first if meta] == [b"", ids[0], ids[0] + ids[1]]
    assert [meta.behind_tokens for meta in first if meta] == [8, 51, 91]


def test_without_a_system_prompt_the_first_part_counts_as_a_document() -> None:
    """What stands behind another document must not pass for a lead-in capture."""
    for number, expected in ((1, LEAD_IN), (0, IN_CONTEXT)):
        line = pipeline(system_segments=number)
        serve(line, prompt(A, B, QUESTION))
        assert provenances(line, B) == [expected] * 3


def test_an_empty_system_part_is_counted() -> None:
    line = pipeline()
    serve(line, concatenate([SEPARATOR, A, SEPARATOR, B, SEPARATOR, QUESTION]))
    assert provenances(line, A) == [LEAD_IN] * 3
    assert provenances(line, B) == [IN_CONTEXT] * 3


def test_two_system_parts() -> None:
    line = pipeline(system_segments=2)
    serve(line, prompt(SYSTEM, A, B, C, QUESTION))
    assert [provenances(line, part)[0] for part in (A, B, C)] == [LEAD_IN, LEAD_IN, IN_CONTEXT]


def test_what_is_computed_behind_reused_tokens_is_blended_and_never_exact() -> None:
    line = pipeline()
    serve(line, prompt(SYSTEM, A, QUESTION))
    serve(line, prompt(SYSTEM, text(6, 12), A, B, QUESTION))
    assert provenances(line, B) == [BLENDED] * 3
    assert [meta.context for meta in metas(line, B) if meta] == [bytes(32)] * 3
    found = serve(line, prompt(SYSTEM, text(6, 12), A, B, QUESTION))
    assert (REUSED, 66, 103) in shape(found)


def test_chunks_behind_a_reused_run_of_their_own_document_are_blended() -> None:
    """A document that contains a known one: its first chunks are as a full prefill makes them, its last ones are not."""  # noqa: E501
    line = pipeline()
    serve(line, prompt(SYSTEM, A, QUESTION))
    mixed = concatenate([text(6, CHUNK), A[:CHUNK], text(8, CHUNK)])
    found = serve(line, prompt(SYSTEM, mixed, QUESTION))
    assert (REUSED, 24, 40) in shape(found)
    assert provenances(line, mixed) == [LEAD_IN, None, BLENDED]


def test_a_blended_engine_prefix_makes_nothing_exact_and_is_not_stored() -> None:
    line = pipeline()
    serve(line, prompt(SYSTEM, A, B, QUESTION), engine_prefix=48, prefix_exact=False)
    assert provenances(line, SYSTEM, head=True) == [None]
    assert provenances(line, A) == [None] * 3
    assert provenances(line, B) == [BLENDED] * 3
    line = pipeline()
    serve(line, prompt(SYSTEM, A, B, QUESTION), engine_prefix=48)
    assert provenances(line, A) == [LEAD_IN] * 3
    assert provenances(line, B) == [IN_CONTEXT] * 3


def test_whole_prompts_are_a_chain_whose_first_chunk_is_bare() -> None:
    line = pipeline(separators=False)
    tokens = concatenate([A, B])
    serve(line, tokens)
    assert provenances(line, tokens, head=True) == [HEAD] + [IN_CONTEXT] * 4
    assert shape(serve(line, tokens)) == [(EXACT, 0, 76), (FRESH, 76, 77)]


def test_known_runs_are_found_without_separators_at_any_offset() -> None:
    """Case s05 for prompts without separators: what is new in the middle becomes a document of its own."""
    line = pipeline(separators=False)
    serve(line, concatenate([text(7, CHUNK), A, B, QUESTION]))
    found = serve(line, concatenate([text(8, 11), B, C, A, text(9, 20)]))
    assert found.plan.reused == len(A) + len(B)
    assert provenances(line, C) == [BLENDED] * 4
    assert (REUSED, 20, 70) in shape(serve(line, concatenate([text(10, 20), C, text(11, 20)])))


def content_ids(line: Pipeline, *chunks: Tokens) -> bytes:
    return b"".join(line.namespace(OPTIONS).content_id(np.ascontiguousarray(chunk)) for chunk in chunks)


def chunked(tokens: Tokens) -> list[Tokens]:
    return [tokens[at : at + CHUNK] for at in range(0, len(tokens), CHUNK)]


def test_where_documents_are_unknown_a_record_lists_every_chunk_in_front_of_its_chain() -> None:
    """So that deleting any document drops what was computed behind it; within a chain the parents say so."""
    line = pipeline(separators=False)
    serve(line, concatenate([text(7, CHUNK), A, B, QUESTION]))
    # 20 new tokens, B but for its first 3, C new, A, and D new: C stands behind the new tokens and B, D behind all.
    front, part, D = text(8, 20), B[3:], text(9, 40)
    serve(line, concatenate([front, part, C, A, D]))
    kept = chunked(concatenate([text(7, CHUNK), A, B, QUESTION]))
    with_a, with_b = kept[1:4], kept[3:6]
    first = [*chunked(front), *with_b]
    for document, chunks in ((C, first), (D, [*first, *chunked(C), *with_a])):
        found = metas(line, document)
        assert [meta.provenance for meta in found if meta] == [BLENDED] * len(chunked(document))
        assert all(meta.behind == content_ids(line, *chunks) for meta in found if meta)


@pytest.mark.parametrize("count", [1024, 1025])
def test_what_stands_behind_more_documents_than_a_record_can_list_is_not_stored(count: int) -> None:
    """A record says all that it was computed behind, or it isn't kept; so a prompt of tiny documents costs linear
    work and memory."""
    line = pipeline()
    tiny = [np.array([1_000_000 + number], dtype=np.uint32) for number in range(count)]
    serve(line, prompt(SYSTEM, *tiny, A, B, QUESTION))
    first, second = metas(line, A)[0], metas(line, B)[0]
    assert second is None
    assert (first is not None) == (count == 1024)
    if first is not None:
        assert first.behind == content_ids(line, *tiny)


def test_what_an_engine_held_behind_reused_kv_is_listed_too() -> None:
    line = pipeline(separators=False)
    serve(line, concatenate([A, B, C]), engine_prefix=len(A), prefix_exact=False)
    found = metas(line, concatenate([B, C]))
    assert [meta.behind for meta in found if meta] == [content_ids(line, *chunked(A))] * 6


def test_only_the_exact_lead_is_used_where_blending_is_off() -> None:
    """An engine's own forward takes one prefix and nothing behind a hole."""
    line = pipeline()
    serve(line, prompt(SYSTEM, A, QUESTION))
    with line.prepare(prompt(SYSTEM, A, QUESTION), OPTIONS, blend=False) as prepared:
        assert shape(prepared) == [(EXACT, 0, 5), (FRESH, 5, 65)]
    with line.prepare(prompt(SYSTEM, A, QUESTION), OPTIONS, engine_prefix=8, blend=False) as prepared:
        assert shape(prepared) == [(PREFIX, 0, 8), (EXACT, 8, 48), (FRESH, 48, 65)]


def test_plain_caching_stores_head_records_only_and_no_unfull_chunk() -> None:
    line = pipeline(enable_blending=False)
    tokens = prompt(SYSTEM, A, QUESTION)
    serve(line, tokens)
    assert provenances(line, tokens, head=True) == [HEAD] * 4 + [None]
    assert shape(serve(line, tokens)) == [(EXACT, 0, 64), (FRESH, 64, 65)]


def test_options_turn_reuse_off() -> None:
    line = pipeline()
    serve(line, prompt(SYSTEM, A, QUESTION))
    with line.prepare(prompt(SYSTEM, A, QUESTION), RequestOptions(reuse=False)) as prepared:
        assert prepared.plan.fresh == 65


def test_isolated_neither_stores_nor_reuses_in_context_records() -> None:
    """Also those that an `in_context` process has left in a shared store; the same prompt still hits exactly."""
    store = Store(capacity_bytes=1 << 22, chunk_size=CHUNK)
    serve(pipeline(store), prompt(SYSTEM, A, B, QUESTION))
    line = pipeline(store, capture="isolated")
    found = serve(line, prompt(SYSTEM, C, B, A, QUESTION))
    assert (found.plan.reused, found.plan.exact) == (len(A), len(SYSTEM)), "A is a lead-in record, B is not"
    serve(line, prompt(SYSTEM, B, QUESTION))
    assert provenances(line, B) == [LEAD_IN] * 3, "and is replaced by a lead-in capture"


def test_rank_orders_by_the_capture_policy() -> None:
    kinds = (HEAD, LEAD_IN, IN_CONTEXT, BLENDED)
    assert sorted(kinds, key=rank) == [HEAD, BLENDED, LEAD_IN, IN_CONTEXT]
    assert rank(LEAD_IN, "isolated") > max(map(rank, kinds))


def test_prompts_of_no_or_one_token_and_of_separators_only() -> None:
    line = pipeline()
    for tokens in (text(1, 0), text(1, 1), SEPARATOR, concatenate([SEPARATOR, SEPARATOR])):
        assert serve(line, tokens).plan.fresh == len(tokens)


def test_nothing_stays_pinned_or_reserved_when_a_capture_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    line = pipeline()
    prepared = line.prepare(prompt(SYSTEM, A, B, QUESTION), OPTIONS)
    calls = iter([False, True])
    real = Pipeline._reserve

    def failing(self: Pipeline, *args: object) -> None:
        if next(calls):
            raise OSError("no room")
        real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Pipeline, "_reserve", failing)
    with pytest.raises(OSError, match="no room"):
        line.capture(prepared)
    prepared.release()
    assert idle(line._store) == IDLE


def test_pins_are_released_when_planning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    line = pipeline()
    serve(line, prompt(SYSTEM, A, QUESTION))

    def failing(*args: object) -> list[bool]:
        raise OSError("broken")

    monkeypatch.setattr("blendstore.pipeline._exact", failing)
    with pytest.raises(OSError, match="broken"):
        line.prepare(prompt(SYSTEM, A, QUESTION), OPTIONS)
    assert idle(line._store) == IDLE


LIBRARY = [text(20 + number, length) for number, length in enumerate((8, 15, 16, 17, 33, 48, 70))]


@st.composite
def conversations(draw: st.DrawFn) -> list[list[int]]:
    """Prompts as lists of documents."""
    documents = st.lists(st.integers(0, len(LIBRARY) - 1), min_size=1, max_size=5)
    return draw(st.lists(documents, min_size=1, max_size=4))


def of(numbers: Sequence[int], *, separated: bool, seed: int) -> Tokens:
    parts = [LIBRARY[number] for number in numbers]
    if separated:
        return prompt(SYSTEM, *parts, QUESTION)
    return concatenate([text(100 + seed, 17), *parts, QUESTION])


@given(conversations())
@settings(max_examples=60, deadline=None)
def test_every_fresh_document_is_stored_and_hits_the_next_time(prompts: list[list[int]]) -> None:
    """Whatever came before, with separators: after a prompt all its documents are known, in every place (case s06)."""
    line = pipeline()
    for numbers in prompts:
        serve(line, of(numbers, separated=True, seed=0))
        moved = prompt(text(99, 11), *(LIBRARY[number] for number in reversed(numbers)), QUESTION)
        with line.prepare(moved, OPTIONS) as prepared:
            assert prepared.plan.reused + prepared.plan.exact == sum(len(LIBRARY[number]) for number in numbers)
    assert idle(line._store) == IDLE


@given(conversations(), st.booleans(), st.sampled_from(["in_context", "isolated"]), st.integers(0, 60))
@settings(max_examples=80, deadline=None)
def test_what_is_restored_are_the_prompts_own_tokens_and_exact_is_what_a_full_prefill_computes(
    prompts: list[list[int]], separated: bool, capture: str, held: int
) -> None:
    """Invariant 3 (all tokens in one span, restored rows are of these tokens) and the meaning of exact."""
    line = pipeline(separators=separated, capture=capture)
    clean: dict[bytes, set[bytes]] = {}
    for seed, numbers in enumerate(prompts):
        tokens = of(numbers, separated=separated, seed=seed % 2)
        with line.prepare(tokens, OPTIONS, engine_prefix=min(held, len(tokens) - 1)) as prepared:
            for span in prepared.plan.spans:
                if span.kind in (EXACT, REUSED):
                    lease, index = prepared.where[span.chunk]
                    rows = np.frombuffer(memoryview(lease.tokens(index)), dtype=np.uint32)
                    assert np.array_equal(rows[span.row : span.row + len(span)], tokens[span.start : span.stop])
                    meta = lease.meta(index)
                    assert meta is not None
                    assert span.source == meta.source_position + span.row
                    assert span.kind is EXACT or meta.provenance != HEAD
                    assert span.kind is EXACT or capture == "in_context" or meta.provenance == LEAD_IN
                    if span.kind is EXACT:
                        begin = span.start - span.row
                        assert tokens[:begin].tobytes() in clean[meta.key]
            room = line.capture(prepared)
            for chunk in room.chunks():
                kinds = prepared.plan.token_kinds[: chunk.stop]
                assert not np.any(kinds[chunk.start :] == REUSED.value)
                if not np.any(kinds == REUSED.value):
                    key = chunk.reservation.keys[chunk.index * 32 : chunk.index * 32 + 32]
                    clean.setdefault(key, set()).add(tokens[: chunk.start].tobytes())
            room.commit()


@given(conversations(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_tenants_never_see_each_others_records(prompts: list[list[int]], separated: bool) -> None:
    """Invariant 5, on the exact path, on the blended path and through the matcher (case s13)."""
    line = pipeline(separators=separated)
    for numbers in prompts:
        tokens = of(numbers, separated=separated, seed=0)
        serve(line, tokens)
        for salt in ("other", "tenan", "tenant2"):
            with line.prepare(tokens, RequestOptions(tenant_salt=salt)) as prepared:
                assert prepared.plan.fresh == len(tokens)
        with line.prepare(tokens, OPTIONS) as prepared:
            assert prepared.plan.context > 0


def test_the_namespace_of_a_tenant_is_made_once() -> None:
    made: list[str] = []

    def make(salt: str) -> Namespace:
        made.append(salt)
        return tenant(salt)

    config = Config.load(env={}, overrides={"enable_blending": True, "tenant_salt": "house"})
    line = Pipeline(Store(capacity_bytes=1 << 20), config, make, bytes_per_token=4)
    names = {line.namespace(RequestOptions(tenant_salt=salt)) for salt in (None, "guest", None, "guest", "house")}
    assert (len(names), made) == (2, ["house", "guest"])


@pytest.mark.parametrize("separators", [True, False])
def test_a_released_prompt_is_leased_again_while_its_records_are_the_same(separators: bool) -> None:
    """Adapters plan when a prompt is looked at and read when it is let in; records may go or change in between."""
    store = Store(capacity_bytes=1 << 22, chunk_size=CHUNK)
    line = pipeline(store, separators=separators)
    for document in (A, B):
        serve(line, prompt(SYSTEM, document, QUESTION))
    asked = line.prepare(prompt(SYSTEM, B, A, QUESTION), OPTIONS)
    before = [(lease.meta(index), array(lease.buffer(index)).copy()) for lease, index in asked.where]
    asked.release()
    assert store.stats()["bytes_pinned"] == 0 and len(before) > 2
    assert line.renew(asked)
    assert store.stats()["bytes_pinned"] > 0
    for (lease, index), (meta, payload) in zip(asked.where, before, strict=True):
        again = lease.meta(index)
        assert meta is not None and again is not None and again.key == meta.key
        assert np.array_equal(array(lease.buffer(index)), payload)
    asked.release()
    store.clear()
    assert not line.renew(asked)
    assert store.stats()["bytes_pinned"] == 0
