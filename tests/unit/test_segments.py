"""Cutting by separator: exact bounds on token ids, and what is learned from a tokenizer."""

from collections.abc import Sequence

import numpy as np
import pytest

from blendstore.segments import (
    Segment,
    Segmentation,
    SegmentationError,
    SeparatorSegmenter,
    WholePromptSegmenter,
    derive_separator_ids,
)
from tests.made_tokenizers import FAMILIES, made, with_special_token

BOS, SEP = 1, 9
SEGMENTER = SeparatorSegmenter([(SEP, SEP, 3), (SEP, SEP)], [BOS])


def cut(*tokens: int, segmenter: SeparatorSegmenter = SEGMENTER) -> Segmentation:
    return segmenter.segment(np.array(tokens, dtype=np.uint32))


def test_parts_between_separators_are_documents() -> None:
    assert cut(BOS, 20, 21, SEP, SEP, 30, SEP, SEP, 3, 40, 41, SEP, SEP, 50) == Segmentation(
        ntokens=14,
        lead=1,
        segments=(
            Segment(1, 3, "system"),
            Segment(5, 6, "document"),
            Segment(9, 11, "document"),
            Segment(13, 14, "query"),
        ),
        separators=((3, 5), (6, 9), (11, 13)),
    )


def test_without_separator_the_prompt_is_one_text() -> None:
    assert cut(BOS, BOS, 20, 21).segments == (Segment(2, 4, "text"),)
    assert cut(BOS, BOS, 20, 21).lead == 2
    assert cut(20, SEP, 21).segments == (Segment(0, 3, "text"),)


def test_empty_parts_make_no_segment_and_keep_the_others_kinds() -> None:
    assert cut(SEP, SEP, 30, SEP, SEP).segments == (Segment(2, 3, "document"),)
    assert cut(SEP, SEP, SEP, SEP, 30).segments == (Segment(4, 5, "query"),)
    assert cut(20, SEP, SEP).segments == (Segment(0, 1, "system"),)


def test_leftmost_then_longest_separator_wins() -> None:
    segmenter = SeparatorSegmenter([(4, 9), (9, 9), (9, 9, 3), (9,)])
    assert cut(20, 4, 9, 9, 3, 21, segmenter=segmenter).separators == ((1, 3), (3, 4))
    assert cut(20, 9, 9, 3, 21, segmenter=segmenter).separators == ((1, 4),)


def test_bos_at_the_edges_of_a_part_belongs_to_no_segment() -> None:
    made_of_parts = cut(BOS, 20, BOS, SEP, SEP, BOS, 30, 31)
    assert made_of_parts.segments == (Segment(1, 2, "system"), Segment(6, 8, "query"))


def test_bos_within_a_part_stays() -> None:
    assert cut(20, BOS, 21).segments == (Segment(0, 3, "text"),)


def test_bos_that_is_part_of_the_separator_is_not_lead() -> None:
    segmenter = SeparatorSegmenter([(BOS, SEP)], [BOS])
    assert cut(BOS, BOS, SEP, 5, segmenter=segmenter) == Segmentation(4, 1, (Segment(3, 4, "query"),), ((1, 3),))


def test_prompts_of_nothing_but_bos() -> None:
    assert cut() == Segmentation(0, 0, (), ())
    assert cut(BOS, BOS) == Segmentation(2, 2, (), ())


def test_bounds_are_what_the_store_takes() -> None:
    bounds = cut(20, 21, SEP, SEP, 30).bounds
    assert bounds.dtype == np.int64
    assert bounds.flags.c_contiguous
    assert bounds.tolist() == [[0, 2], [4, 5]]
    assert cut().bounds.shape == (0, 2)
    assert len(Segment(4, 9, "text")) == 5


def test_whole_prompt_is_one_segment_with_its_bos() -> None:
    """A head chain begins at position 0, BOS included: plain prefix caching."""
    whole = WholePromptSegmenter()
    assert whole.segment(np.array([BOS, 5, SEP, SEP, 6], dtype=np.uint32)).segments == (Segment(0, 5, "text"),)
    assert whole.segment(np.array([], dtype=np.uint32)).segments == ()


def test_separator_ids_must_hold_something() -> None:
    for wrong in ([], [()], [(1,), ()]):
        with pytest.raises(SegmentationError, match="separator_ids"):
            SeparatorSegmenter(wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_learned_forms_hold_the_separator_and_nothing_else(family: str) -> None:
    tokenizer = made(family)
    forms = derive_separator_ids(tokenizer, " # # ")
    assert [tokenizer.decode(form).strip() for form in forms] == ["# #"] * len(forms)
    assert [len(form) for form in forms] == sorted((len(form) for form in forms), reverse=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("blanks", [1, 2, 3, 7, 20])
def test_blanks_around_the_separator_do_not_hide_it(family: str, blanks: int) -> None:
    """SentencePiece tokenizers have tokens for runs of blanks, which swallow the separator's own."""
    tokenizer = made(family)
    segmenter = SeparatorSegmenter(derive_separator_ids(tokenizer, " # # "))
    text = "sys" + " " * blanks + " # # " + " " * blanks + "A cat"
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = segmenter.segment(np.array(ids, dtype=np.uint32)).segments
    assert [tokenizer.decode(ids[s.start : s.stop]).strip() for s in parts] == ["sys", "A cat"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_special_token_is_a_separator(family: str) -> None:
    tokenizer = with_special_token(family, "<|doc|>")
    (token,) = tokenizer.encode("<|doc|>", add_special_tokens=False)
    forms = derive_separator_ids(tokenizer, "<|doc|>")
    segmenter = SeparatorSegmenter(forms)
    ids = tokenizer.encode("a<|doc|>(b)<|doc|>\nc", add_special_tokens=False)
    assert ids.count(token) == 2
    assert len(segmenter.segment(np.array(ids, dtype=np.uint32)).segments) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_separator_whose_characters_are_several_tokens_each(family: str) -> None:
    """Byte-level tokens are parts of characters, which decode to nothing sensible."""
    tokenizer = made(family)
    segmenter = SeparatorSegmenter(derive_separator_ids(tokenizer, " 🔥§ "))
    ids = tokenizer.encode("one 🔥 🔥§ two 🔥§ three", add_special_tokens=False)
    parts = segmenter.segment(np.array(ids, dtype=np.uint32)).segments
    assert [tokenizer.decode(ids[s.start : s.stop]).strip() for s in parts] == ["one 🔥", "two", "three"]


def test_a_separator_of_several_lines() -> None:
    tokenizer = made("llama3")
    forms = derive_separator_ids(tokenizer, "\n---\n")
    ids = tokenizer.encode("one.\n---\ntwo\n---\n\nthree", add_special_tokens=False)
    parts = SeparatorSegmenter(forms).segment(np.array(ids, dtype=np.uint32)).segments
    assert [tokenizer.decode(ids[s.start : s.stop]).strip() for s in parts] == ["one.", "two", "three"]


@pytest.mark.parametrize("blank", ["", " ", "\n\n"])
def test_a_separator_without_visible_characters_is_refused(blank: str) -> None:
    with pytest.raises(SegmentationError, match=r"gpt2.*only blanks.*visible"):
        derive_separator_ids(made("gpt2"), blank)


class Letters:
    """A tokenizer of single characters, with pairs that always merge; its quirks are what the tests choose."""

    name_or_path = ""

    def __init__(self, *merged: str, lower: bool = False, squeeze: bool = False, end: bool = False) -> None:
        self.bos_token_id: int | None = None
        self._merged, self._lower, self._squeeze, self._end = merged, lower, squeeze, end
        self._pieces: list[str] = []

    def _id(self, piece: str) -> int:
        if piece not in self._pieces:
            self._pieces.append(piece)
        return self._pieces.index(piece)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = text.lower() if self._lower else text
        text = " ".join(text.split()) if self._squeeze else text
        ids: list[int] = []
        while text:
            piece = next((pair for pair in self._merged if text.startswith(pair)), text[0])
            ids.append(self._id(piece))
            text = text[len(piece) :]
        return [*ids, self._id("</s>")] if add_special_tokens and self._end else ids

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(self._pieces[token] for token in ids)


def test_a_separator_that_the_tokenizer_changes_is_refused() -> None:
    with pytest.raises(SegmentationError, match=r"Letters.*comes back as.*leaves as they are"):
        derive_separator_ids(Letters(lower=True), " SEP ")


def test_a_separator_that_merges_with_its_neighbour_is_refused() -> None:
    with pytest.raises(SegmentationError, match=r"merges with its neighbours.*blank on both sides"):
        derive_separator_ids(Letters("](", "]A"), "[SEP]")
    assert derive_separator_ids(Letters("](", "]A"), " [SEP] ")


def test_blanks_that_merge_with_other_characters_are_left_to_them() -> None:
    """``.`` and the separator's blank are one token: the core alone has to do, and the blank stays with the text."""
    tokenizer = Letters(". ")
    segmenter = SeparatorSegmenter(derive_separator_ids(tokenizer, " # # "))
    ids = tokenizer.encode("end. # # A", add_special_tokens=False)
    parts = segmenter.segment(np.array(ids, dtype=np.uint32)).segments
    assert [tokenizer.decode(ids[s.start : s.stop]) for s in parts] == ["end. ", "A"]


def test_a_cut_that_was_not_foreseen_is_found_by_the_proof() -> None:
    """``l.`` merges with the separator only behind a word that no probe of neighbours has."""
    with pytest.raises(SegmentationError, match=r"built as one string is cut into.*segmenter: matcher"):
        derive_separator_ids(Letters("l.##", "##"), "##")


@pytest.mark.parametrize("separator", ["-", " é ", "A"])
def test_a_separator_that_probes_contain_is_learned_from_the_others(separator: str) -> None:
    tokenizer = Letters()
    assert {tokenizer.decode(form) for form in derive_separator_ids(tokenizer, separator)} == {separator}


def test_a_tokenizer_that_squeezes_blanks_finds_a_wide_separator() -> None:
    tokenizer = Letters(squeeze=True)
    segmenter = SeparatorSegmenter(derive_separator_ids(tokenizer, "          #          "))
    ids = tokenizer.encode("a          #          b", add_special_tokens=False)
    assert len(segmenter.segment(np.array(ids, dtype=np.uint32)).segments) == 2


def test_what_a_tokenizer_puts_behind_a_text_does_not_matter() -> None:
    assert derive_separator_ids(Letters(end=True), " # # ")
