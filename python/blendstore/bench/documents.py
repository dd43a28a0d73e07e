"""Documents of an exact length for load tests, from real prose.

Repeated words would measure nothing: a store finds the same bytes over and over, and attention has nothing to do. Where
more text is needed than there is, and where documents must be new to a store that matches known text at any offset, the
words of real sentences are put in another order.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from blendstore.bench import corpus
from blendstore.bench.answering import Ids
from blendstore.bench.prompts import Tokenizer


def prose(rng: random.Random) -> Iterator[str]:
    """Sentences of real prose, each once in a document order drawn from ``rng``; after that with shuffled words."""
    texts = [*corpus.narrative(), *corpus.documents("jargon")]
    if corpus.corpus_in_use() == "news":
        texts += corpus.documents("news")
    rng.shuffle(texts)
    sentences = [sentence for text in texts for sentence in re.split(r"(?<=[.!?])\s+", text)]
    yield from sentences
    while True:
        rng.shuffle(sentences)
        for sentence in sentences:
            yield reordered(sentence, rng)


def reordered(sentence: str, rng: random.Random) -> str:
    """The same words in another order: as much work for a model, but unknown to every cache."""
    words = sentence.split()
    rng.shuffle(words)
    return " ".join(words)


def documents(tokenizer: Tokenizer, sentences: Iterator[str], count: int, length: int) -> list[Ids]:
    """``count`` documents of exactly ``length`` tokens each, made from consecutive sentences."""
    out = []
    for _ in range(count):
        ids: Ids = []
        while len(ids) < length:
            ids += tokenizer.encode((" " if ids else "") + next(sentences), add_special_tokens=False)
        out.append(ids[:length])
    return out


def unseen(tokenizer: Tokenizer, count: int, length: int, rng: random.Random) -> list[Ids]:
    """Documents whose text was never sent before: sentences of prose with their words in an order of their own."""
    shuffled = (reordered(sentence, rng) for sentence in prose(rng))
    return documents(tokenizer, shuffled, count, length)


def repeated(tokenizer: Tokenizer, count: int, length: int) -> list[Ids]:
    """The historical text of this kind of bench: a number, then one word over and over."""
    out = []
    for number in range(count):
        ids = tokenizer.encode(f"{number}", add_special_tokens=False)
        word = tokenizer.encode(" hi", add_special_tokens=False)
        out.append((ids + word * length)[:length])
    return out


def words(sentences: Iterator[str], count: int, length: int) -> list[str]:
    """``count`` documents of exactly ``length`` words each, for servers whose tokenizer is unknown."""
    out = []
    for _ in range(count):
        found: list[str] = []
        while len(found) < length:
            found += next(sentences).split()
        out.append(" ".join(found[:length]))
    return out
