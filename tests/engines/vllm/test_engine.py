"""The unmodified engine with the connector: its answers equal the plain engine's at ratio 1.0, whatever fails."""

import itertools
import random
from typing import Any

import pytest

from tests.engines.vllm.engines import Answer, Engine
from tests.engines.vllm.models import SEPARATOR, folder_of
from tests.engines.vllm.prompts import QUESTION, SYSTEM, A, B, C, D, prompt, words

FULL: dict[str, Any] = {"ratio": 1.0}


def assert_same(found: Answer, wanted: Answer) -> None:
    assert found.ids == wanted.ids
    assert max(abs(a - b) for a, b in zip(found.logprobs, wanted.logprobs, strict=True)) <= 1e-3


class Traffic:
    """Random multi-document prompts: known and new documents, repeated ones, with and without separators."""

    def __init__(self, seed: int, longest: int, documents: int) -> None:
        self.random, self.documents = random.Random(seed), documents
        self.known = [words(seed * 1000 + number, self.random.randrange(20, longest)) for number in range(12)]
        self.fresh = seed * 1000 + 500

    def new(self) -> list[int]:
        self.fresh += 1
        return words(self.fresh, self.random.randrange(17, 60))

    def prompt(self) -> list[int]:
        documents = [
            self.new() if self.random.random() < 0.2 else self.random.choice(self.known)
            for _ in range(self.random.randrange(1, self.documents + 1))
        ]
        question = words(self.random.randrange(1 << 30), self.random.randrange(1, 30))
        if self.random.random() < 0.3:  # no separators: found by the matcher
            return [*SYSTEM, *(token for document in documents for token in document), *question]
        return prompt(*documents, question=question)


@pytest.mark.parametrize(("kind", "count", "longest"), [("blending", 200, 200), ("tight", 60, 70)])
def test_case_b08_random_traffic_at_ratio_one_equals_the_plain_engine(
    kind: str, count: int, longest: int, plain: Engine, request: pytest.FixtureRequest
) -> None:
    """Mixed hits, chunked prefill, aborts, concurrency 8; the tight engine preempts too, so that this is case b10: in
    the middle and resumed, with the same output."""
    engine: Engine = request.getfixturevalue(kind)
    traffic, drawn = Traffic(7 if kind == "blending" else 8, longest, 7 if kind == "blending" else 4), random.Random(3)
    prompts = [traffic.prompt() for _ in range(count)]
    doomed = {number: drawn.randrange(1, 60) for number in range(count) if drawn.random() < 0.1}
    found = engine.ask_all([(tokens, FULL) for tokens in prompts], 24, doomed=doomed)
    assert set(found) == set(range(count)) - set(doomed)
    wanted = plain.ask_all([(prompts[number], {}) for number in found], 24)
    for at, number in enumerate(found):
        assert_same(found[number], wanted[at])
    assert engine.tell("pinned") == 0
    counts = engine.tell("counts")
    assert counts["blended"] >= count / 3
    assert counts.get("fallback", 0) == 0
    if kind == "tight":
        assert engine.tell("preemptions") > 0


def test_case_b01_every_segment_cached_then_the_identical_prompt_again(blending: Engine, plain: Engine) -> None:
    system = words(20, 15)
    for document in (A, B, C):
        blending.ask(prompt(document, system=system))
    tokens = prompt(B, A, C, system=system)
    first = blending.ask(tokens, **FULL)
    again = blending.ask(tokens, **FULL)
    assert first.cached == again.cached == len(tokens) - 1, "one token is computed besides those of the blend"
    assert first.ids == again.ids
    assert_same(first, plain.ask(tokens))
    assert blending.ask(tokens) == blending.ask(tokens)


def test_case_b02_thirty_documents_in_ten_random_orders(blending: Engine, plain: Engine) -> None:
    documents = [words(100 + number, 32 + number) for number in range(30)]
    for start in range(0, 30, 10):
        blending.ask(prompt(*documents[start : start + 10]))
    shuffle = random.Random(0)
    for _ in range(10):
        shuffle.shuffle(documents)
        tokens = prompt(*documents)
        found = blending.ask(tokens, **FULL)
        assert found.cached == len(tokens) - 1
        assert_same(found, plain.ask(tokens))


def test_case_s03_a_document_behind_another_lead_in_is_found(blending: Engine, plain: Engine) -> None:
    document = words(61, 90)
    blending.ask(prompt(document, system=[1]))
    tokens = prompt(document, system=words(60, 40))
    found = blending.ask(tokens, **FULL)
    assert found.cached == len(tokens) - 1
    assert_same(found, plain.ask(tokens))


def test_case_s04_documents_of_unequal_length_hit_in_every_order(blending: Engine) -> None:
    """No token is lost at a seam: all of the prompt but its last token is there before the engine computes."""
    system = words(30, 15)
    documents = [words(31, 90), words(32, 133), words(33, 63)]
    for document in documents:
        blending.ask(prompt(document, system=system))
    for order in itertools.permutations(documents):
        tokens = prompt(*order, system=system)
        assert blending.ask(tokens).cached == len(tokens) - 1


def test_case_s05_a_new_document_in_the_middle_costs_itself_and_is_stored(blending: Engine, plain: Engine) -> None:
    system = words(40, 15)
    first, new, third = words(41, 80), words(42, 60), words(43, 70)
    blending.ask(prompt(first, system=system))
    blending.ask(prompt(third, system=system))
    tokens = prompt(first, new, third, system=system)
    assert_same(blending.ask(tokens, **FULL), plain.ask(tokens))
    before = blending.tell("counts")
    moved = prompt(new, first, system=system)
    assert blending.ask(moved, ratio=0.0, store=False).cached == len(moved) - 1
    after = blending.tell("counts")
    assert after["reused"] - before["reused"] >= len(new) + len(first), "the new document's KV was reused"


def test_case_s06_the_same_document_twice_in_one_prompt(blending: Engine, plain: Engine) -> None:
    system, document = words(50, 15), words(51, 90)
    blending.ask(prompt(document, system=system))
    tokens = prompt(document, document, system=system)
    found = blending.ask(tokens, **FULL)
    assert found.cached == len(tokens) - 1
    assert_same(found, plain.ask(tokens))


def test_case_s08_a_document_cut_by_chunked_prefill_is_stored_whole(tight: Engine, plain: Engine) -> None:
    """150 tokens, steps of 64."""
    system, document = words(70, 15), words(71, 150)
    tight.ask(prompt(document, system=system))
    tokens = prompt(words(72, 30), document, system=system)
    found = tight.ask(tokens, **FULL)
    assert found.cached == len(tokens) - 1
    assert_same(found, plain.ask(tokens))


def test_exact_prefixes_come_back_bit_for_bit(blending: Engine) -> None:
    """Without anything reused from elsewhere the store is a prefix cache, and the answer doesn't change at all."""
    tokens = prompt(words(75, 90), words(76, 64), system=words(77, 15))
    first, again = blending.ask(tokens), blending.ask(tokens)
    assert (first.cached, again.cached) == (0, len(tokens) - len(QUESTION) - len(SEPARATOR)) or again.cached > 64
    assert again.ids == first.ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-4)


def test_requests_that_opt_out_are_the_plain_engines(blending: Engine, plain: Engine) -> None:
    """By ``kv_transfer_params``; and a ratio is the request's own."""
    system = words(80, 15)
    for document in (A, B, C):
        blending.ask(prompt(document, system=system))
    tokens = prompt(B, C, A, system=system)
    none, wanted = blending.ask(tokens, ratio=0.0, store=False), plain.ask(tokens)
    assert none.logprobs != pytest.approx(wanted.logprobs, abs=1e-3), "or this prompt could not tell"
    out = blending.ask(tokens, reuse=False, store=False)
    assert out.cached == 0
    assert_same(out, wanted)
    assert_same(blending.ask(tokens, **FULL), wanted)


def test_wrong_options_are_told_and_the_request_is_served_plainly(blending: Engine, plain: Engine) -> None:
    tokens = prompt(D, A)
    assert_same(blending.ask(tokens, ratio=7), plain.ask(tokens))
    assert_same(blending.ask(tokens, rubbish=1), plain.ask(tokens))


def test_case_s13_tenants_share_nothing(blending: Engine) -> None:
    """By vLLM's ``cache_salt`` and by blendstore's own option, on the exact and on the blended path."""
    document = words(90, 120)
    first, moved = prompt(document, system=words(91, 15)), prompt(document, system=words(92, 24))
    assert blending.ask(first, salt="one").cached == 0
    assert blending.ask(first, salt="two").cached == 0
    assert blending.ask(first, salt="one").cached > len(document)
    assert blending.ask(moved, salt="one").cached > len(document), "blended for the tenant"
    assert blending.ask(moved, salt="three").cached == 0
    assert blending.ask(moved, tenant_salt="one").cached == 0
    assert blending.ask(moved).cached == 0


def test_prompt_log_probabilities_are_computed_by_the_engine(blending: Engine, plain: Engine) -> None:
    tokens = prompt(A, B)
    blending.ask(tokens)
    found, wanted = (e.ask_all([(tokens, {})], prompt_logprobs=True)[0] for e in (blending, plain))
    assert found.cached == 0
    assert found.prompt_logprobs == pytest.approx(wanted.prompt_logprobs, abs=1e-3)


@pytest.mark.parametrize("kind", ["_fill", "_outlook", "_copy_out"])
def test_case_f01_a_store_that_fails_costs_time_and_no_answer(kind: str, blending: Engine, plain: Engine) -> None:
    """The blocks of a failed load are computed again; so is a prompt whose look-up fails, and one that isn't kept."""
    system = words(200, 15)
    document = words(201, 130)
    blending.ask(prompt(document, system=system))
    tokens = [prompt(words(210 + n, 20), document, system=system) for n in range(4)]
    blending.tell("break", kind, 3)
    found = blending.ask_all([(ids, FULL) for ids in tokens])
    wanted = plain.ask_all([(ids, {}) for ids in tokens])
    for number in wanted:
        assert_same(found[number], wanted[number])
    assert blending.tell("pinned") == 0
    again = blending.ask(tokens[0], **FULL)
    assert again.cached == len(tokens[0]) - 1, "it goes on afterwards"


def test_prefix_caching_of_the_engine_and_blending_exclude_each_other() -> None:
    """Blended blocks would be hashed as true prefixes: refused at start, with the reason and the way out."""
    with pytest.raises(RuntimeError, match=r"prefix caching is on.*--no-enable-prefix-caching"):
        Engine(str(folder_of("llama")), blending=True, enable_prefix_caching=True).ready()


def test_plain_caching_works_beside_the_engines_prefix_caching(plain: Engine) -> None:
    engine = Engine(
        str(folder_of("llama")), blending=True, config={"ENABLE_BLENDING": "false"}, enable_prefix_caching=True
    )
    try:
        shared = words(300, 200)
        for tail in range(4):
            tokens = [*shared, *words(310 + tail, 40)]
            assert_same(engine.ask(tokens), plain.ask(tokens))
        assert engine.tell("counts").get("blended", 0) == 0
    finally:
        engine.close()
