"""Invariants of the segmenter, over random token ids and over prompts built from texts."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blendstore.segments import SeparatorSegmenter, derive_separator_ids
from tests.made_tokenizers import FAMILIES, made

FORMS = [(7, 7, 3), (7, 7), (3, 7, 7)]
SEGMENTER = SeparatorSegmenter(FORMS, [1])
WORDS = st.lists(
    st.sampled_from(["The", "cat", "sat.", "issue #42", "---", "#include <x>", "[SEP]", "ends", "über", "文"]),
    min_size=1,
    max_size=12,
).map(" ".join)


@given(st.lists(st.sampled_from([1, 3, 5, 6, 7]), max_size=60))
def test_every_token_is_in_one_segment_one_separator_or_is_bos(tokens: list[int]) -> None:
    array = np.array(tokens, dtype=np.uint32)
    cut = SEGMENTER.segment(array)
    owned = np.zeros(len(tokens), dtype=int)
    for start, stop in cut.separators:
        assert tuple(tokens[start:stop]) in FORMS
        owned[start:stop] += 1
    for segment in cut.segments:
        assert segment.start < segment.stop
        assert tokens[segment.start] != 1
        assert tokens[segment.stop - 1] != 1
        owned[segment.start : segment.stop] += 1
    assert owned.max(initial=0) <= 1
    assert all(tokens[t] == 1 for t in np.flatnonzero(owned == 0))
    assert all(token == 1 for token in tokens[: cut.lead])
    assert len(cut.segments) <= len(cut.separators) + 1


@given(st.lists(st.sampled_from([1, 3, 5, 6, 7]), max_size=60))
def test_no_separator_is_left_within_a_segment(tokens: list[int]) -> None:
    """Never one silent segment: a document that still holds a separator would be reused as one piece."""
    for segment in SEGMENTER.segment(np.array(tokens, dtype=np.uint32)).segments:
        piece = tokens[segment.start : segment.stop]
        assert (7, 7) not in pairwise(piece)


@given(st.lists(st.lists(st.integers(10, 20), min_size=1, max_size=8), min_size=2, max_size=6), st.booleans())
def test_documents_joined_by_separators_come_back(parts: list[list[int]], bos: bool) -> None:
    tokens = [1] if bos else []
    for number, part in enumerate(parts):
        tokens += ([7, 7, 3] if number else []) + part
    cut = SEGMENTER.segment(np.array(tokens, dtype=np.uint32))
    assert [tokens[s.start : s.stop] for s in cut.segments] == parts
    assert [s.kind for s in cut.segments] == ["system", *["document"] * (len(parts) - 2), "query"]


@settings(max_examples=60)
@given(st.sampled_from(FAMILIES), st.lists(WORDS, min_size=2, max_size=5))
def test_one_string_and_parts_give_the_same_segments_but_for_their_edges(family: str, texts: list[str]) -> None:
    """The documented rule: between the two ways of building a prompt only a segment's outer tokens may differ."""
    tokenizer = made(family)
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    segmenter = SeparatorSegmenter(derive_separator_ids(tokenizer, " # # "), bos)
    cuts = []
    for ids in (tokenizer.one_string(texts, " # # "), tokenizer.from_parts(texts, " # # ")):
        parts = segmenter.segment(np.array(ids, dtype=np.uint32)).segments
        assert [tokenizer.decode(ids[s.start : s.stop]).strip() for s in parts] == texts
        cuts.append([ids[s.start : s.stop] for s in parts])
    for left, right, text in zip(*cuts, texts, strict=True):
        # Text is cut into tokens from left to right, word by word: beyond the first word nothing may differ.
        words = len(tokenizer.encode(text.split(" ")[0], add_special_tokens=False)) + 1
        behind = min(len(left), len(right)) - words
        assert behind <= 0 or left[-behind:] == right[-behind:]
