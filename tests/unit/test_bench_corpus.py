"""The texts and the prompt set: real prose, the promised sizes, the same for every model."""

import itertools
import random
from collections.abc import Iterator

import pytest

from blendstore.bench import corpus, documents, prompts
from tests.bench_fakes import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.fixture
def without_news(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    corpus.documents.cache_clear()
    monkeypatch.setattr(corpus, "_news_file", lambda: None)
    yield
    corpus.documents.cache_clear()


def test_passages_are_long_and_clean_prose() -> None:
    passages = corpus.narrative()
    assert len(passages) >= 5
    for passage in passages:
        assert len(passage) >= 13_000
        for paragraph in passage.split("\n\n"):
            assert paragraph[-1] in ".!?\"')" and "\n" not in paragraph and "  " not in paragraph
            assert not set("{}│─\N{NO-BREAK SPACE}") & set(paragraph)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["   :gonk: /gonk/, vi.,n."], None),  # headword
        (["   cruft together"], None),  # entry of an index
        (
            ["      if (x) { y(); }", "      else z(); /* and so on, for more than eighty characters of a listing. */"],
            None,
        ),
        (["│ 1 │ " + "a table row that is long enough to be taken for prose. " * 3], None),
        (
            [
                "   1. [Usenet] To be brief /breef/ about a {kluge} is not easy, and",
                "   takes practice, “as they say”.",
            ],
            'To be brief about a kluge is not easy, and takes practice, "as they say".',
        ),
    ],
)
def test_only_prose_is_kept_and_its_marks_removed(lines: list[str], expected: str | None) -> None:
    plain = [line.translate(corpus._PLAIN) for line in lines]
    assert corpus.clean_paragraph(plain, 60) == expected


def test_without_news_documents_come_from_the_lexicon(without_news: None) -> None:
    assert corpus.corpus_in_use() == "jargon"
    texts = corpus.documents()
    assert len(texts) > 300 and min(map(len, texts)) >= 2_000 and len(set(texts)) == len(texts)
    with pytest.raises(corpus.CorpusNotFound, match="pip install"):
        corpus.documents("news")


@pytest.mark.parametrize("kind", prompts.KINDS)
def test_prompts_have_the_promised_shape_and_depend_on_kind_and_seed_only(kind: str) -> None:
    prompt, again = (prompts.build(TOKENIZER, kind, 3, "jargon") for _ in range(2))
    assert prompt == again
    assert prompt != prompts.build(TOKENIZER, kind, 4, "jargon")
    assert 4 <= len(prompt.documents) <= 8
    assert prompt.ids == [*prompt.system, *itertools.chain(*prompt.documents), *prompt.question]
    assert prompt.system == TOKENIZER.encode(prompts.PREFIX)
    assert all(1 not in part for part in (*prompt.documents, prompt.question, prompt.answer, *prompt.others))
    assert len(prompt.others) == 3


@pytest.mark.parametrize(("kind", "missing"), [("fact", 0), ("split", 1), ("coref", 1)])
def test_every_question_can_be_answered_from_the_documents(kind: str, missing: int) -> None:
    for seed in range(5):
        prompt = prompts.build(TOKENIZER, kind, seed, "jargon")
        text = TOKENIZER.decode(prompt.ids)
        said = TOKENIZER.decode([*prompt.question, *prompt.answer])
        assert len(prompt.answer_spans) == len(prompt.documents) - missing
        for start, stop in prompt.answer_spans:
            code = TOKENIZER.decode(prompt.answer[start:stop])
            assert code[0] == " " and code[1:].isdigit() and len(code) == 5
            name = said[: len(TOKENIZER.decode(prompt.question)) + start].rsplit("The secret code of ", 1)[1][:-3]
            if kind == "coref":
                assert f"The last visitor of the day was {name}. This visitor has the secret code{code}." in text
            else:
                assert f"The secret code of {name} is{code}." in text


def test_split_facts_lie_across_two_documents() -> None:
    prompt = prompts.build(TOKENIZER, "split", 0, "jargon")
    for start, stop in prompt.answer_spans:
        code = TOKENIZER.decode(prompt.answer[start:stop])
        holders = [k for k, d in enumerate(prompt.documents) if TOKENIZER.decode(d).startswith(f" is{code}")]
        assert len(holders) == 1
        before = TOKENIZER.decode(prompt.documents[holders[0] - 1])
        assert before.split()[-5:-1] == ["The", "secret", "code", "of"]


@pytest.mark.parametrize("kind", ["cont", "news"])
def test_continuations_go_on_with_the_text_of_the_documents(kind: str) -> None:
    prompt = prompts.build(TOKENIZER, kind, 1, "jargon")
    answer = TOKENIZER.decode(prompt.answer)
    source = corpus.narrative() if kind == "cont" else corpus.documents("jargon")
    question = TOKENIZER.decode(prompt.question).removeprefix("Continued:")
    assert any(question + answer in text for text in source)
    holders = [d for d in prompt.documents if question.strip() in TOKENIZER.decode(d)]
    assert len(holders) == (kind == "news") and answer not in TOKENIZER.decode(prompt.ids)


def test_kinds_come_in_equal_parts_and_most_prompts_have_four_or_five_documents() -> None:
    made = list(prompts.quality_prompts(TOKENIZER, 100, corpus_name="jargon"))
    assert {kind: sum(p.kind == kind for p in made) for kind in prompts.KINDS} == dict.fromkeys(prompts.KINDS, 20)
    counts = [len(p.documents) for p in made]
    assert set(counts) == {4, 5, 6, 7, 8} and sum(n <= 5 for n in counts) > 65
    # One byte a token here: 4 to 5.2 bytes are a token of a real tokenizer.
    sizes = [len(document) for prompt in made for document in prompt.documents]
    assert min(sizes) > 150 * 4.2 and max(sizes) < 400 * 4.4


def test_provenances_put_other_documents_before_and_unknown_ones_are_refused() -> None:
    prompt = prompts.build(TOKENIZER, "fact", 0, "jargon")
    assert prompt.provenance("bare").ids == []
    assert prompt.provenance("bos").ids == [1]
    assert prompt.provenance("lead_in").ids == prompt.system
    assert prompt.provenance("in_context_1").ids == prompt.system + prompt.others[0]
    assert prompt.provenance("in_context_3").ids == [*prompt.system, *itertools.chain(*prompt.others)]
    inside = TOKENIZER.decode(prompt.ids)
    assert not any(TOKENIZER.decode(other)[100:160] in inside for other in prompt.others)
    for name in ("in_context_0", "in_context_4", "in_context", "organic"):
        with pytest.raises(ValueError, match=name):
            prompt.provenance(name)


def test_case_b12_prompt_never_holds_the_secret_and_control_differs_only_in_the_code() -> None:
    for seed in range(5):
        case = prompts.leak_case(TOKENIZER, seed, "jargon")
        code = TOKENIZER.decode(case.prompt.answer)
        assert code not in TOKENIZER.decode(case.prompt.ids)
        assert TOKENIZER.decode(case.secret).count(code) == 1 and code not in TOKENIZER.decode(case.control)
        different = [i for i, (a, b) in enumerate(zip(case.secret, case.control, strict=True)) if a != b]
        at = len(TOKENIZER.encode(TOKENIZER.decode(case.secret).split(code)[0], add_special_tokens=False)) + 1
        assert different == list(range(at, at + 4))
        with_secret, with_control = case.provenances("in_context_3")
        assert with_secret.before[-1] == tuple(case.secret) and with_control.before[-1] == tuple(case.control)
        assert with_secret.before[:-1] == with_control.before[:-1] and len(with_secret.before) == 3
        assert case.provenances("lead_in")[0] == case.provenances("lead_in")[1]


def test_load_documents_have_exact_lengths_and_unseen_ones_share_no_run_with_known_ones() -> None:
    rng = random.Random(0)
    known = documents.documents(TOKENIZER, documents.prose(rng), 20, 700)
    unseen = documents.unseen(TOKENIZER, 20, 700, rng)
    assert {len(document) for document in known + unseen} == {700}
    runs = {tuple(d[i : i + 60]) for d in known for i in range(len(d) - 60)}
    assert not any(tuple(d[i : i + 60]) in runs for d in unseen for i in range(len(d) - 60))
    repeated = documents.repeated(TOKENIZER, 3, 50)
    assert [len(d) for d in repeated] == [50] * 3 and len({tuple(d) for d in repeated}) == 3


def test_prose_does_not_run_out() -> None:
    sentences = documents.prose(random.Random(1))
    total = sum(len(next(sentences)) for _ in range(40_000))
    assert total > 2_000_000
