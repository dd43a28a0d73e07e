"""Cutting a prompt's token ids into segments: by separator, or as a whole.

The separator is text, prompts are token ids, and a tokenizer gives one text different ids in different places: alone
`` # # `` may be three tokens, within a sentence its last blank belongs to the word that follows, and a SentencePiece
tokenizer puts a blank of its own in front. So the ids are learned from the tokenizer when the engine starts
(`derive_separator_ids`), and the result is proved on probe prompts before it is used.

The rule at token level:

- The separator's *core* is its text without outer blanks. A separator is any run of tokens that has been seen to cover
  the core and, where they are tokens of their own, the blanks around it. Of several runs the leftmost wins, then the
  longest.
- A blank that merges with the neighbour stays with the neighbour: in ``sys # # A`` the document begins with the token
  `` A``, while joined from parts it begins with ``A``. Between the two ways of building a prompt a document's tokens
  may differ at its two edges and nowhere else. Such a document has different chunk keys, so build prompts in one way;
  what the keys miss the matcher finds.
- BOS tokens at the edges of a part belong to no segment, so a document has the same keys alone and within a template.
- A core whose outer blanks are missing in the text may cut as well. A cut too many costs a seam, never a wrong answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Segment",
    "Segmentation",
    "SegmentationError",
    "SeparatorSegmenter",
    "Tokenizer",
    "WholePromptSegmenter",
    "derive_separator_ids",
]

Kind = Literal["system", "document", "query", "text"]


class SegmentationError(ValueError):
    """A separator that can't be found reliably with this tokenizer; the message says why and what to do."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers fit."""

    @property
    def bos_token_id(self) -> int | None: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt tokens ``[start, stop)``, never empty."""

    start: int
    stop: int
    kind: Kind

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Segmentation:
    """A prompt's segments, left to right and disjoint; what lies between them is separators and inner BOS tokens."""

    ntokens: int
    lead: int
    """Leading BOS tokens, which are part of no segment."""
    segments: tuple[Segment, ...]
    separators: tuple[tuple[int, int], ...]
    """``(start, stop)`` of each separator."""

    @property
    def bounds(self) -> NDArray[np.int64]:
        """``int64[n, 2]``: (start, stop) of the segments, as the store takes them."""
        return np.array([(s.start, s.stop) for s in self.segments], dtype=np.int64).reshape(-1, 2)


class WholePromptSegmenter:
    """The whole prompt, BOS included, as one head segment: plain prefix caching."""

    def segment(self, tokens: NDArray[np.uint32]) -> Segmentation:
        """``tokens``: ``uint32[n]``."""
        segments = (Segment(0, tokens.size, "text"),) if tokens.size else ()
        return Segmentation(int(tokens.size), 0, segments, ())


class SeparatorSegmenter:
    """Cuts at every occurrence of one of ``separator_ids``.

    With a separator in the prompt, the part before the first one is the system segment, the part behind the last one is
    the query, and the parts between are documents; without one, the prompt is a single segment of kind ``text``. Empty
    parts make no segment.
    """

    __slots__ = ("_bos", "_forms", "bos_ids", "separator_ids")

    def __init__(self, separator_ids: Iterable[Sequence[int]], bos_ids: Iterable[int] = ()) -> None:
        """``separator_ids``: the alternatives, each a non-empty run of token ids, in any order."""
        self.separator_ids = tuple(tuple(form) for form in separator_ids)
        self.bos_ids = tuple(bos_ids)
        if not self.separator_ids or not all(self.separator_ids):
            raise SegmentationError(
                f"separator_ids is {self.separator_ids!r}: give at least one run of token ids, and no empty one"
            )
        # Longest first, so that a stable sort by start leaves the longest of those that start together in front.
        self._forms = [
            np.array(form, dtype=np.uint32) for form in sorted(set(self.separator_ids), key=lambda f: (-len(f), f))
        ]
        self._bos = np.array(self.bos_ids, dtype=np.uint32)

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, separator: str) -> Self:
        """Cuts where ``separator`` stands in texts of that tokenizer. Raises `SegmentationError` as
        `derive_separator_ids`."""
        bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
        return cls(derive_separator_ids(tokenizer, separator), bos)

    def segment(self, tokens: NDArray[np.uint32]) -> Segmentation:
        """``tokens``: ``uint32[n]``; any length, none included."""
        ntokens = int(tokens.size)
        is_bos = np.isin(tokens, self._bos)
        lead = ntokens if bool(is_bos.all()) else int(np.argmin(is_bos))
        separators = tuple(self._separators(tokens))
        if separators and lead > separators[0][0]:
            lead = separators[0][0]
        starts = [lead, *(stop for _, stop in separators)]
        stops = [*(start for start, _ in separators), ntokens]
        segments: list[Segment] = []
        for part, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            while start < stop and is_bos[start]:
                start += 1
            while start < stop and is_bos[stop - 1]:
                stop -= 1
            if start < stop:
                segments.append(Segment(start, stop, _part_kind(part, len(separators))))
        return Segmentation(ntokens, lead, tuple(segments), separators)

    def _separators(self, tokens: NDArray[np.uint32]) -> Iterator[tuple[int, int]]:
        """Occurrences left to right without overlap, leftmost first, then longest."""
        found: list[tuple[int, int]] = []
        for form in self._forms:
            places = tokens.size - form.size + 1
            if places <= 0:
                continue
            starts = np.flatnonzero(tokens[:places] == form[0])
            for offset in range(1, form.size):
                starts = starts[tokens[starts + offset] == form[offset]]
            found.extend((start, start + form.size) for start in starts.tolist())
        found.sort(key=lambda bounds: bounds[0])
        behind = 0
        for start, stop in found:
            if start >= behind:
                yield start, stop
                behind = stop


def _part_kind(part: int, separators: int) -> Kind:
    if not separators:
        return "text"
    return "system" if part == 0 else "query" if part == separators else "document"


# What may stand before and behind a separator. Runs of blanks, because some tokenizers have one token for each length.
_LEFT = (
    "sys",
    "end.",
    "(end)",
    "12",
    "line\n",
    "para\n\n",
    "tab\t",
    "é",
    "文",
    *("sys" + " " * n for n in range(1, 33)),
)
_RIGHT = ("A", "the", "7", "(a)", '"q"', "-", "\n", "\n\nA", "\tA", "é", "文", *(" " * n + "A" for n in range(1, 9)))
_PARTS = (
    ("You are helpful.", "The cat sat.", "A dog ran", "Who ran?"),
    ("sys", "A", "B", "q"),
    ("System\n", "(one) issue #42\n", '"two" --- #include <x>', "\nq"),
    ("系统", "é 1.", "2 文", "3"),
)


def derive_separator_ids(tokenizer: Tokenizer, special_str: str) -> tuple[tuple[int, ...], ...]:
    """Every run of token ids that the separator takes with this tokenizer, longest first; takes some milliseconds.

    Raises `SegmentationError` when ``special_str`` has no core, when the tokenizer changes it or merges it with
    characters next to it, or when a probe prompt isn't cut into its parts.
    """
    core = special_str.strip()
    if not core:
        raise _error(tokenizer, special_str, "it has only blanks", 'take one with visible characters, like " # # "')
    forms: set[tuple[int, ...]] = set()
    for left, right in {*product(_LEFT, ("A", " A", "\nA")), *product(("sys", "end. "), _RIGHT)}:
        if core not in left and core not in right:
            forms.add(_covering(tokenizer, special_str, left + special_str + right))
    for special in (False, True):
        alone = _without_bos(tokenizer, tokenizer.encode(special_str, add_special_tokens=special))
        if tokenizer.decode(alone).strip() == core:
            forms.add(tuple(alone))
    ordered = tuple(sorted(forms, key=lambda form: (-len(form), form)))
    _prove(tokenizer, special_str, ordered)
    return ordered


def _covering(tokenizer: Tokenizer, special_str: str, text: str) -> tuple[int, ...]:
    """The tokens that cover the separator in ``text``, in which it stands once.

    The blanks before the core belong to them; those behind only as a token of their own. Where the blanks before have
    merged with other characters, the core alone has to do.
    """
    core = special_str.strip()
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = tokenizer.decode(ids)
    core_start = shown.find(core)
    if core_start < 0:
        raise _error(
            tokenizer,
            special_str,
            f"{text!r} comes back as {shown!r}",
            "take a separator of characters that the tokenizer leaves as they are",
        )
    core_stop = core_start + len(core)
    # Positions in `shown` at which a token begins. Within a character there is none: a part of one decodes to garbage.
    edges = {0: 0}
    for count in range(1, len(ids) + 1):
        head = tokenizer.decode(ids[:count])
        if shown.startswith(head):
            edges[count] = len(head)
    blanks_before = len(special_str) - len(special_str.lstrip())
    blanks_behind = special_str[len(special_str.rstrip()) :]
    last = min(count for count, edge in edges.items() if edge >= core_stop)
    for start in (max(core_start - blanks_before, 0), core_start):
        first = max(count for count, edge in edges.items() if edge <= start)
        if shown[edges[first] : edges[last]].strip() == core:
            follower = shown[edges[last] : edges.get(last + 1, 0)]
            last += bool(follower) and not follower.strip(blanks_behind or core)
            return tuple(ids[first:last])
    raise _error(
        tokenizer,
        special_str,
        f"in {text!r} it merges with its neighbours into {tokenizer.decode(ids[first:last])!r}",
        "put a blank on both sides of it, or add it to the tokenizer as a special token",
    )


def _prove(tokenizer: Tokenizer, special_str: str, forms: tuple[tuple[int, ...], ...]) -> None:
    """Cut probe prompts in every way of building them; each must fall into its parts."""
    bos = tokenizer.bos_token_id
    segmenter = SeparatorSegmenter(forms, () if bos is None else (bos,))
    plain, decorated = (tokenizer.encode("A", add_special_tokens=special) for special in (False, True))
    # A tokenizer that puts more than BOS around a text is proved without what it adds.
    ways = (False, True) if _without_bos(tokenizer, decorated) == plain else (False,)
    for texts in _PARTS:
        parts = [text.replace(special_str.strip(), "") or "text" for text in texts]
        for special in ways:
            built = {
                "one string": tokenizer.encode(special_str.join(parts), add_special_tokens=special),
                "parts": _joined(tokenizer, special_str, parts, special),
            }
            for way, ids in built.items():
                cut = segmenter.segment(np.array(ids, dtype=np.uint32))
                found = [tokenizer.decode(ids[s.start : s.stop]).strip() for s in cut.segments]
                wanted = [tokenizer.decode(tokenizer.encode(part, add_special_tokens=False)).strip() for part in parts]
                if found != wanted:
                    raise _error(
                        tokenizer,
                        special_str,
                        f"{special_str.join(parts)!r} built as {way} is cut into {found!r}",
                        "take another separator, or segmenter: matcher",
                    )


def _joined(tokenizer: Tokenizer, special_str: str, parts: Sequence[str], special: bool) -> list[int]:
    ids: list[int] = []
    separator = _without_bos(tokenizer, tokenizer.encode(special_str, add_special_tokens=special))
    for number, part in enumerate(parts):
        ids += separator if number else []
        ids += tokenizer.encode(part, add_special_tokens=special)
    return ids


def _without_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    first = next((index for index, token in enumerate(ids) if token != bos), len(ids))
    return ids[first:]


def _error(tokenizer: Tokenizer, special_str: str, what: str, way_out: str) -> SegmentationError:
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return SegmentationError(
        f"blend_special_str {special_str!r} can't be found reliably with tokenizer {name}: {what}; {way_out}"
    )
