"""Prompts of documents behind separators, as token ids."""

import random

from tests.engines.vllm.models import SEPARATOR, WORDS


def words(seed: int, count: int) -> list[int]:
    """Tokens that are no bytes."""
    drawn = random.Random(seed)
    return [drawn.randrange(WORDS.start, WORDS.stop) for _ in range(count)]


SYSTEM, QUESTION = words(1, 15), words(5, 20)
A, B, C, D = words(2, 100), words(3, 77), words(4, 50), words(6, 64)
TAILED = words(7, 39)
"""A chunk of 32 and a tail of 7."""


def prompt(*documents: list[int], system: list[int] = SYSTEM, question: list[int] = QUESTION) -> list[int]:
    """System part, documents and question with separators between."""
    out = list(system)
    for part in (*documents, question):
        out += [*SEPARATOR, *part]
    return out
