"""What the in-process benches ask of an engine: answer a prompt by full prefill, or by blending captured documents.

The benches are written against the `Answering` protocol only; `inprocess.py` satisfies it with the transformers engine,
the tests with a fake. Everything is teacher-forced: the engine prefills the prompt, notes the time to the first logits,
and then runs the given answer tokens behind it, whatever it would have said itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from blendstore.bench.prompts import Prompt, Tokenizer

Ids = list[int]
Options = Mapping[str, bool | int | float | str]
CapturedT = TypeVar("CapturedT")


@dataclass(frozen=True, slots=True)
class Answer:
    """One teacher-forced answer.

    ``logits`` is float32 ``[len(answer), vocab]`` on any device: row i predicts answer token i, so row 0 comes from the
    prompt's last position. ``ttft_s`` is seconds from the token ids to row 0, without the answer's own tokens.
    ``question``, where the engine gives it, is float32 ``[len(question) - 1, vocab]``: what the rows of the question
    before the last say of the question's own next token. ``reused``, ``recomputed`` and ``fresh`` count the prompt's
    tokens; they add up to its length (exact prefix tokens are ``reused``; for a full prefill everything is ``fresh``).
    """

    logits: torch.Tensor
    ttft_s: float
    reused: int
    recomputed: int
    fresh: int
    question: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """How the documents' KV came to be: each document is prefilled on its own behind ``lead`` and ``before``.

    ``lead`` are the system prompt's ids, one BOS, or nothing (``bare``); ``before`` are other documents, in order, that
    are not part of the prompt in which the KV is reused.
    """

    name: str
    lead: tuple[int, ...]
    before: tuple[tuple[int, ...], ...] = ()

    @property
    def ids(self) -> Ids:
        """All tokens that stand before each captured document."""
        return [*self.lead, *(token for document in self.before for token in document)]


class Answering(Protocol[CapturedT]):
    """An engine under measurement. All ids are plain token ids; nothing is added to them (no BOS, no template)."""

    def full(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], question: int = 1) -> Answer:
        """The engine's own prefill of everything: the reference of every metric. The question is the prompt's last
        ``question`` tokens."""
        ...

    def capture(self, prompt: Prompt, provenance: Provenance) -> CapturedT:
        """The KV of ``prompt.documents``, each captured behind ``provenance.ids`` (and rotated from there when used).

        The first document, together with the system prompt, is always captured as it stands in this prompt: it is an
        exact prefix, as in serving, and never counts as damaged. A ``bare`` provenance must work here although the
        store refuses it in production: the bench shows why. Everything captured earlier may be forgotten.
        """
        ...

    def prefix_cached(self, prompt: Prompt, captured: CapturedT) -> Answer:
        """What plain prefix caching gives: the exact prefix is reused, all other tokens are prefilled."""
        ...

    def blended(self, prompt: Prompt, captured: CapturedT, selector: str, ratio: float, options: Options) -> Answer:
        """System prompt and documents from ``captured``, ``ratio`` of the context recomputed, the question fresh.

        ``options`` always holds ``drift_correction`` (bool); the rest are the selector's own options. ``seed`` may be
        among them for ``random``. The selector sees the question, never the answer.
        """
        ...


class OpenAnswering(Protocol):
    """``inprocess.open_answering``: the engine of a model named as for `models.load`, and its tokenizer."""

    def __call__(self, model: str, *, dtype: str, device: str) -> tuple[Answering[Any], Tokenizer]: ...


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer that was really generated; seconds from sending. ``ttft_s`` is None when no text came at all."""

    ttft_s: float | None
    total_s: float
    text: str


class Generating(Protocol):
    """An engine that serves: it reuses and keeps documents on its own, as the same engine would behind a server.

    ``inprocess.py`` offers `OpenGenerating` as ``open_generating``.
    """

    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        """Greedy continuation of at most ``max_tokens`` tokens; the prompt's documents are kept for later prompts."""
        ...


class OpenGenerating(Protocol):
    """Opens an engine whose documents are cut by ``separator``, and its tokenizer."""

    def __call__(self, model: str, *, separator: str, dtype: str, device: str) -> tuple[Generating, Tokenizer]: ...
