"""The unmodified engine with ``--radix-cache-backend blendstore``: answers equal the plain engine's at ratio 1.0, under
load, and no slot of the pool is lost (the engine checks its pools itself, idle and busy, and stops when one leaks)."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import pytest

from tests.engines.sglang.conftest import PAGE
from tests.engines.sglang.models import SEPARATOR, WORDS
from tests.engines.sglang.servers import Answer, Server

FULL: dict[str, Any] = {"ratio": 1.0}
LOST = 2 if version("sglang") == "0.5.14" else 0


def words(seed: int, count: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(WORDS.start, WORDS.stop) for _ in range(count)]


SYSTEM, QUESTION = words(1, 15), words(5, 20)
A, B, C, D = words(2, 100), words(3, 77), words(4, 50), words(6, 64)


def prompt(*documents: list[int], system: list[int] = SYSTEM, question: list[int] = QUESTION) -> list[int]:
    out = list(system)
    for part in (*documents, question):
        out += [*SEPARATOR, *part]
    return out


def assert_same(found: Answer, wanted: Answer, *, lost: int = 0) -> None:
    """``lost`` log-probabilities may be missing in between: SGLang 0.5.14 drops one of some requests that it retracts,
    with its own tree too."""
    assert found.ids == wanted.ids
    assert len(wanted.logprobs) - lost <= len(found.logprobs)
    left = iter(wanted.logprobs)
    assert all(any(abs(a - b) <= 1e-3 for b in left) for a in found.logprobs), (found.logprobs, wanted.logprobs)


class Traffic:
    """Random multi-document prompts: known and new documents, repeated ones, with and without separators."""

    def __init__(self, seed: int, longest: int) -> None:
        self.random = random.Random(seed)
        self.known = [words(seed * 1000 + number, self.random.randrange(20, longest)) for number in range(12)]
        self.fresh = seed * 1000 + 500

    def new(self) -> list[int]:
        self.fresh += 1
        return words(self.fresh, self.random.randrange(17, 60))

    def prompt(self) -> list[int]:
        documents = [
            self.new() if self.random.random() < 0.2 else self.random.choice(self.known)
            for _ in range(self.random.randrange(1, 5))
        ]
        question = words(self.random.randrange(1 << 30), self.random.randrange(1, 30))
        if self.random.random() < 0.3:  # no separators: found by the matcher
            return [*SYSTEM, *(token for document in documents for token in document), *question]
        return prompt(*documents, question=question)


def under_load(server: Server, prompts: Sequence[list[int]], *, abort: float, seed: int) -> dict[int, Answer]:
    """All prompts, eight at once; a share of them is aborted at a random moment. Answers of the others by number."""
    chosen = random.Random(seed)
    doomed = {number for number in range(len(prompts)) if chosen.random() < abort}

    async def run() -> dict[int, Answer]:
        gate, out = asyncio.Semaphore(8), {}

        async def one(number: int, ids: list[int]) -> None:
            async with gate:
                rid = f"{seed}-{number}"
                task = asyncio.ensure_future(server.answer(ids, 8, FULL, rid=rid))
                if number in doomed:
                    await asyncio.sleep(chosen.random() * 0.15)
                    server.engine.tokenizer_manager.abort_request(rid)
                answer = await task
                if number not in doomed:
                    out[number] = answer

        await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts)))
        return out

    answers: dict[int, Answer] = server.engine.loop.run_until_complete(run())
    return answers


@pytest.mark.parametrize(("kind", "count", "longest"), [("blending", 200, 120), ("tight", 40, 70)])
def test_case_b08_random_traffic_at_ratio_one_equals_the_plain_engine(
    kind: str, count: int, longest: int, plain: Server, request: pytest.FixtureRequest
) -> None:
    """Mixed hits, aborts, concurrency 8; the tight server retracts, chunks its prefills and evicts all the time, so
    that this is case b10 too: preempted in the middle and resumed, with the same output."""
    server: Server = request.getfixturevalue(kind)
    traffic = Traffic(7 if kind == "blending" else 8, longest)
    prompts = [traffic.prompt() for _ in range(count)]
    found = under_load(server, prompts, abort=0.1, seed=3)
    assert len(found) >= 0.8 * count
    wanted = plain.ask_all([(prompts[number], {}) for number in found], at_once=8)
    for number, answer in zip(found, wanted, strict=True):
        assert_same(found[number], answer, lost=LOST if kind == "tight" else 0)
    server.engine.loop.run_until_complete(asyncio.sleep(1.5))  # its idle check runs
    assert_same(server.ask(prompts[0], **FULL), plain.ask(prompts[0]))


def test_case_b08_identical_requests_in_a_tiny_pool_equal_the_plain_engine(tight: Server, plain: Server) -> None:
    """64 of them, 16 at once, each blended or found in the tree, and retracted in between."""
    system, documents = words(10, 15), [words(11, 70), words(12, 60)]
    for document in documents:
        tight.ask(prompt(document, system=system))
    tokens = prompt(*reversed(documents), system=system)
    wanted = plain.ask(tokens)
    for found in tight.ask_all([(tokens, FULL)] * 64, at_once=16):
        assert_same(found, wanted, lost=LOST)


def test_case_b01_every_segment_cached_then_the_identical_prompt_again(blending: Server, plain: Server) -> None:
    system = words(20, 15)
    for document in (A, B, C):
        blending.ask(prompt(document, system=system))
    tokens = prompt(B, A, C, system=system)
    blending.flush()
    first = blending.ask(tokens, **FULL)
    again = blending.ask(tokens, **FULL)
    assert first.cached == again.cached == len(tokens) - 1, "one token is computed besides those of the blend"
    assert first.ids == again.ids
    assert_same(first, plain.ask(tokens))
    default = [blending.ask(tokens) for _ in range(2)]
    assert default[0] == default[1]


def test_case_b02_thirty_documents_in_ten_random_orders(blending: Server, plain: Server) -> None:
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


def test_case_s04_documents_of_unequal_length_hit_in_every_order(blending: Server) -> None:
    """No token is lost at a seam: all of the prompt but its last token is there before the engine computes."""
    system = words(30, 15)
    documents = [words(31, 90), words(32, 133), words(33, 63)]
    for document in documents:
        blending.ask(prompt(document, system=system))
    for order in itertools.permutations(documents):
        blending.flush()
        tokens = prompt(*order, system=system)
        assert blending.ask(tokens).cached == len(tokens) - 1


def test_case_s05_a_new_document_in_the_middle_costs_itself_and_is_stored(blending: Server, plain: Server) -> None:
    system = words(40, 15)
    first, new, third = words(41, 80), words(42, 60), words(43, 70)
    blending.ask(prompt(first, system=system))
    blending.ask(prompt(third, system=system))
    blending.flush()
    tokens = prompt(first, new, third, system=system)
    assert_same(blending.ask(tokens, **FULL), plain.ask(tokens))
    blending.flush()
    moved = prompt(new, first, system=system)
    answer = blending.ask(moved, ratio=0.0, store=False)
    assert answer.cached == len(moved) - 1
    assert answer != blending.ask(moved, reuse=False, store=False), "the new document's KV was reused"


def test_case_s06_the_same_document_twice_in_one_prompt(blending: Server, plain: Server) -> None:
    system = words(50, 15)
    document = words(51, 90)
    blending.ask(prompt(document, system=system))
    tokens = prompt(document, document, system=system)
    found = blending.ask(tokens, **FULL)
    assert found.cached == len(tokens) - 1
    assert_same(found, plain.ask(tokens))


def test_case_s03_a_document_behind_another_lead_in_is_found(blending: Server, plain: Server) -> None:
    document = words(61, 90)
    blending.ask(prompt(document, system=[1]))
    tokens = prompt(document, system=words(60, 40))
    found = blending.ask(tokens, **FULL)
    assert found.cached == len(tokens) - 1
    assert_same(found, plain.ask(tokens))


def test_case_s08_a_document_cut_by_chunked_prefill_is_stored_whole(tight: Server, plain: Server) -> None:
    """150 tokens, steps of 64."""
    system, document = words(70, 15), words(71, 150)
    tight.ask(prompt(document, system=system))
    tight.flush()
    tokens = prompt(words(72, 30), document, system=system)
    found = tight.ask(tokens, **FULL)
    assert found.cached == (len(tokens) - 1) // PAGE * PAGE
    assert_same(found, plain.ask(tokens))


def test_blended_kv_is_found_by_requests_that_ask_for_the_same_and_by_no_others(
    blending: Server, plain: Server
) -> None:
    """Issue 3.3: the tree never gives a blend to a request that opted out or asked for another ratio or selector."""
    system = words(80, 15)
    for document in (A, B):
        blending.ask(prompt(document, system=system))
    tokens = prompt(B, C, A, system=system)
    none = blending.ask(tokens, ratio=0.0)
    assert blending.ask(tokens, ratio=0.0) == none
    wanted = plain.ask(tokens)
    assert none.logprobs != pytest.approx(wanted.logprobs, abs=1e-3), "or this prompt could not tell"
    assert_same(blending.ask(tokens, **FULL), wanted)
    random_one = blending.ask(tokens, selector="random", ratio=0.3)
    assert random_one.logprobs != pytest.approx(none.logprobs, abs=1e-4)
    out = blending.ask(tokens, reuse=False)
    assert_same(out, wanted)
    assert blending.ask(tokens, reuse=False).cached == len(tokens) - 1, "exact prefixes are shared among those"


def test_wrong_options_are_told_and_the_request_is_served_plainly(blending: Server, plain: Server) -> None:
    tokens = prompt(D, A)
    assert_same(blending.ask(tokens, ratio=7), plain.ask(tokens))
    assert_same(blending.ask(tokens, rubbish=1), plain.ask(tokens))


def test_case_s13_tenants_share_nothing(blending: Server) -> None:
    """Neither the tree nor the store answers another tenant, on the exact or on the blended path."""
    document = words(90, 120)

    async def ask(system: list[int], options: dict[str, Any], **more: Any) -> int:
        answer = await blending.answer(prompt(document, system=system), 2, options, **more)
        return answer.cached

    run = blending.engine.loop.run_until_complete
    one, two = {"tenant_salt": "one"}, {"tenant_salt": "two"}
    first, moved = words(91, 15), words(92, 24)
    assert run(ask(first, one)) == 0
    assert run(ask(first, two)) == 0
    assert run(ask(first, one)) > len(document)
    assert run(ask(moved, one)) > len(document), "blended for the tenant"
    assert run(ask(words(93, 24), {"tenant_salt": "three"})) == 0
    assert run(ask(words(93, 24), {})) == 0


def test_prompt_log_probabilities_are_computed_by_the_engine(blending: Server, plain: Server) -> None:
    """A request for them limits what may be reused, and gets the same numbers."""
    tokens = prompt(A, B)

    async def ask(server: Server) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": 2, "custom_params": {"blendstore": FULL}}
        out = await server.engine.async_generate(
            input_ids=tokens, sampling_params=sampling, return_logprob=True, logprob_start_len=40
        )
        return [entry[0] for entry in out["meta_info"]["input_token_logprobs"][1:]]

    found, wanted = (server.engine.loop.run_until_complete(ask(server)) for server in (blending, plain))
    assert len(found) == len(wanted) == len(tokens) - 41
    assert found == pytest.approx(wanted, abs=1e-3)
