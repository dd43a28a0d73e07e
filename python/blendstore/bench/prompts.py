"""The fixed prompt set of the quality benchmark: five kinds, made from packaged prose by seed.

A prompt is a system prompt, four to eight documents of 150 to 400 tokens, a question, and the answer behind it, which
is teacher-forced. The same kind and seed give the same texts for every model; only their token ids differ.

- ``fact``: a fact is inserted somewhere in every document, all are asked for, in another order;
- ``split``: each fact begins with one document's last words and ends with the next one's first words;
- ``coref``: one document ends by naming a person, the next begins with a fact about "this visitor";
- ``cont``: the documents are consecutive pieces of one passage of prose, which goes on in question and answer;
- ``news``: the documents begin unrelated texts; the question picks one of them up and the answer goes on with it.

For the first three the answer is the whole list of answers with the further questions in between, and ``answer_spans``
mark the codes within it. `leak_case` makes the prompts of case b12.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from blendstore.bench import corpus
from blendstore.bench.answering import Ids, Provenance

PREFIX = "Below are several documents. They are followed by a continuation.\n\n"
KINDS = ("fact", "split", "coref", "cont", "news")
PROVENANCES = ("lead_in", "in_context_1", "in_context_3", "bare", "bos")
_OTHERS = 3  # documents that a prompt has ready to be captured behind
NAMES = (
    *(
        "Alice",
        "Brian",
        "Carol",
        "David",
        "Emma",
        "Frank",
        "Grace",
        "Henry",
        "Irene",
        "Jack",
        "Karen",
        "Laura",
        "Martin",
    ),
    *("Nancy", "Oscar", "Paul", "Rachel", "Simon", "Thomas", "Victor", "Walter", "Peter", "Susan", "Robert", "Linda"),
)

# Weights of 4, 5, … 8 documents: most prompts stay affordable for a CPU (mean 4.9 documents).
_COUNT_WEIGHTS = (45, 30, 15, 6, 4)
# Least, most and likeliest characters of a document: 160 to 390 tokens of this prose with the tokenizers in use.
_CHARS = (820, 1_560, 960)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'])\s+")


class Tokenizer(Protocol):
    """What of a tokenizer the prompts need."""

    @property
    def bos_token_id(self) -> int | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the set as token ids; the prompt proper is ``ids``, ``answer`` is forced behind it.

    ``answer_spans`` are (start, stop) within ``answer`` of what exact match looks at. ``others`` are documents that are
    not in this prompt: in-context captures are made behind them. ``bos`` is what a BOS-only lead consists of.
    """

    kind: str
    seed: int
    system: Ids
    documents: list[Ids]
    question: Ids
    answer: Ids
    answer_spans: list[tuple[int, int]] = field(default_factory=list)
    others: list[Ids] = field(default_factory=list)
    bos: Ids = field(default_factory=list)

    @property
    def ids(self) -> Ids:
        """System prompt, documents and question in one row."""
        return [*self.system, *(token for document in self.documents for token in document), *self.question]

    @property
    def context_tokens(self) -> int:
        """Tokens of all documents: what recompute ratios refer to."""
        return sum(map(len, self.documents))

    def provenance(self, name: str, last: Ids | None = None) -> Provenance:
        """The named provenance for this prompt's documents; ``last`` replaces the last of the documents before them."""
        if name == "bare":
            return Provenance(name, ())
        if name == "bos":
            return Provenance(name, tuple(self.bos))
        if name == "lead_in":
            return Provenance(name, tuple(self.system))
        match = re.fullmatch(r"in_context_(\d+)", name)
        count = int(match.group(1)) if match else 0
        if not 1 <= count <= len(self.others):
            known = ", ".join(PROVENANCES)
            raise ValueError(f"provenance {name!r}: give one of {known} (at most {len(self.others)} documents before)")
        before = self.others[:count] if last is None else [*self.others[: count - 1], last]
        return Provenance(name, tuple(self.system), tuple(map(tuple, before)))


def is_provenance(name: str) -> bool:
    """Whether every prompt of the set has a provenance of that name."""
    return name in PROVENANCES or re.fullmatch(f"in_context_[1-{_OTHERS}]", name) is not None


@dataclass(frozen=True, slots=True)
class Texts:
    """A prompt before tokenization. ``answer`` is a list of (text, is the text a span for exact match)."""

    documents: list[str]
    question: str
    answer: list[tuple[str, bool]]


def quality_prompts(
    tokenizer: Tokenizer,
    count: int = 100,
    *,
    first_seed: int = 0,
    kinds: Sequence[str] = KINDS,
    corpus_name: corpus.CorpusName = "auto",
) -> Iterator[Prompt]:
    """``count`` prompts, kinds in turn, so that any whole number of rounds has them in equal parts."""
    for index in range(count):
        seed, kind = divmod(index, len(kinds))
        yield build(tokenizer, kinds[kind], first_seed + seed, corpus_name)


def build(
    tokenizer: Tokenizer,
    kind: str,
    seed: int,
    corpus_name: corpus.CorpusName = "auto",
    documents: int | None = None,
) -> Prompt:
    """The prompt of one kind and seed; with ``documents`` documents, or a drawn number of 4 to 8."""
    rng = random.Random(f"blendstore quality {kind} {seed}")
    texts = write(kind, rng, corpus_name, documents)
    others = _other_documents(rng, texts.documents, _OTHERS, corpus_name)
    return _encode(tokenizer, kind, seed, texts, others)


def write(kind: str, rng: random.Random, corpus_name: corpus.CorpusName = "auto", count: int | None = None) -> Texts:
    """Texts of one prompt, with ``count`` documents or a drawn number of 4 to 8."""
    if kind not in KINDS:
        raise ValueError(f"prompt kind {kind!r}: give one of {', '.join(KINDS)}")
    if count is None:
        count = rng.choices(range(4, 4 + len(_COUNT_WEIGHTS)), _COUNT_WEIGHTS)[0]
    if kind == "cont":
        return _continuation(rng, count)
    bodies = rng.sample(_long_documents(corpus_name), count)
    if kind == "news":
        return _resumed(rng, bodies)
    return _questions(kind, rng, bodies)


def _continuation(rng: random.Random, count: int) -> Texts:
    passage = rng.choice(corpus.narrative())
    lengths = [_draw_chars(rng) for _ in range(count)]
    at = _word_start(passage, rng.randrange(max(1, len(passage) - sum(lengths) - 500)))
    documents = []
    for length in lengths:
        stop = _word_start(passage, at + length)
        documents.append(passage[at:stop])
        at = stop
    answer_at, end = _word_start(passage, at + 75), _word_start(passage, at + 300)
    return Texts(documents, passage[at:answer_at], [(passage[answer_at:end], False)])


def _resumed(rng: random.Random, bodies: Sequence[str]) -> Texts:
    cuts = [_word_start(body, min(_draw_chars(rng), len(body) - 260)) for body in bodies]
    body, cut = max(zip(bodies, cuts, strict=True), key=lambda pair: len(pair[0]) - pair[1])
    overlap = _word_start(body, cut - 60)
    documents = [text[:stop] + "\n\n" for text, stop in zip(bodies, cuts, strict=True)]
    question = "Continued:" + body[overlap:cut]
    return Texts(documents, question, [(body[cut : _word_start(body, cut + 230)], False)])


def _questions(kind: str, rng: random.Random, bodies: Sequence[str]) -> Texts:
    count = len(bodies)
    names, codes = rng.sample(NAMES, count), [str(code) for code in rng.sample(range(1_000, 10_000), count)]
    parts = [_sentences(body, _draw_chars(rng)) for body in bodies]
    facts = count if kind == "fact" else count - 1
    documents = []
    for k, sentences in enumerate(parts):
        before = after = ""
        if kind == "fact":
            sentences.insert(rng.randint(0, len(sentences)), f"The secret code of {names[k]} is {codes[k]}.")
            after = "\n\n"
        elif kind == "split":
            before = f" is {codes[k - 1]}. " if k else ""
            after = f" The secret code of {names[k]}" if k < facts else ""
        else:
            before = f" This visitor has the secret code {codes[k - 1]}. " if k else ""
            after = f" The last visitor of the day was {names[k]}." if k < facts else ""
        documents.append(before + " ".join(sentences) + after)
    asked = rng.sample(range(facts), facts)
    first, *rest = asked
    answer = [(f" {codes[first]}", True), (".\n", False)]
    for k in rest:
        answer += [(f"The secret code of {names[k]} is", False), (f" {codes[k]}", True), (".\n", False)]
    return Texts(documents, f"\n\nAnswers:\nThe secret code of {names[first]} is", answer)


def shortened(prompt: Prompt, documents: int) -> Prompt:
    """The same prompt with only its first documents, for warming up."""
    return replace(prompt, documents=prompt.documents[:documents])


@dataclass(frozen=True, slots=True)
class LeakCase:
    """Case b12: ``prompt`` is about document B; its answer is a secret that stands only in ``secret``.

    B is captured behind the document ``secret``, and again behind ``control``, the same text with another code; the
    prompt contains neither. Whatever the two captures change in the answer's probability has leaked.
    """

    prompt: Prompt
    secret: Ids
    control: Ids

    def provenances(self, name: str) -> tuple[Provenance, Provenance]:
        """The named provenance with the secret as last document before B, and with the control."""
        if not name.startswith("in_context"):
            provenance = self.prompt.provenance(name)
            return provenance, provenance
        return self.prompt.provenance(name, self.secret), self.prompt.provenance(name, self.control)


def leak_case(tokenizer: Tokenizer, seed: int, corpus_name: corpus.CorpusName = "auto") -> LeakCase:
    """A case of b12: the secret about a visitor, then B about "this visitor", reused without the secret."""
    rng = random.Random(f"blendstore leak {seed}")
    bodies = [_sentences(body, 900) for body in rng.sample(_long_documents(corpus_name), 3)]
    name, code = rng.choice(NAMES), str(rng.randint(1_000, 9_999))
    other_code = "".join(str((int(digit) + rng.randint(1, 9)) % 10) for digit in code)
    lead, hidden, about = (" ".join(body) for body in bodies)
    texts = Texts(
        [lead + "\n\n", f"This visitor came back on the next day and asked for the code again. {about}"],
        f"\n\nAnswers:\nThe secret code of {name} is",
        [(f" {code}", True)],
    )
    ending = "The last visitor of the day was {0}. The secret code of {0} is {1}.\n\n"
    others = _other_documents(rng, [*texts.documents, hidden], _OTHERS, corpus_name)
    return LeakCase(
        prompt=_encode(tokenizer, "leak", seed, texts, others),
        secret=tokenizer.encode(f"{hidden} {ending.format(name, code)}", add_special_tokens=False),
        control=tokenizer.encode(f"{hidden} {ending.format(name, other_code)}", add_special_tokens=False),
    )


def _encode(tokenizer: Tokenizer, kind: str, seed: int, texts: Texts, others: Sequence[str]) -> Prompt:
    def ids(text: str) -> Ids:
        return tokenizer.encode(text, add_special_tokens=False)

    system = tokenizer.encode(PREFIX)  # with the BOS that the tokenizer puts in front, if it does
    answer: Ids = []
    spans = []
    for text, is_span in texts.answer:
        piece = ids(text)
        if is_span:
            spans.append((len(answer), len(answer) + len(piece)))
        answer += piece
    return Prompt(
        kind=kind,
        seed=seed,
        system=system,
        documents=[ids(document) for document in texts.documents],
        question=ids(texts.question),
        answer=answer,
        answer_spans=spans,
        others=[ids(document) for document in others],
        bos=system[:1] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id],
    )


def _long_documents(corpus_name: corpus.CorpusName) -> list[str]:
    """Documents that fill a chunk of any length drawn."""
    return [document for document in corpus.documents(corpus_name) if len(document) >= _CHARS[2] + 320]


def _other_documents(rng: random.Random, used: Sequence[str], count: int, corpus_name: corpus.CorpusName) -> list[str]:
    """``count`` documents of about 200 tokens that share no text with ``used``."""
    fingerprints = {text[at : at + 60] for text in used for at in range(0, min(len(text), 1_200))}
    pool = [document for document in _long_documents(corpus_name) if document[100:160] not in fingerprints]
    return [document[: _word_start(document, 950)] + "\n\n" for document in rng.sample(pool, count)]


def _draw_chars(rng: random.Random) -> int:
    return int(rng.triangular(*_CHARS))


def _word_start(text: str, at: int) -> int:
    """First position from ``at`` on where a blank or line break begins a new word."""
    match = re.compile(r"(?<=\S)\s").search(text, max(1, at))
    return match.start() if match else len(text)


def _sentences(text: str, chars: int) -> list[str]:
    """Whole sentences of ``text``, up to about ``chars`` characters (a single long sentence is cut at a word)."""
    sentences: list[str] = []
    size = 0
    for sentence in _SENTENCE_END.split(text):
        if size + len(sentence) > chars and size >= _CHARS[0]:
            break
        if size + len(sentence) > _CHARS[1]:
            sentence = sentence[: _word_start(sentence, _CHARS[1] - size)]
        sentences.append(sentence)
        size += len(sentence) + 1
        if size >= chars:
            break
    return sentences
