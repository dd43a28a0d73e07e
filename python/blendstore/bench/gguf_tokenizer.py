"""A fast tokenizer built from the vocabulary inside a GGUF file.

transformers' own reading of GGUF vocabularies is not good enough for measurements: it gives Gemma's BPE vocabulary to a
Unigram model (" code" becomes " c" + "ode"), and drops SmolLM2's rule that every digit stands alone. Here the two kinds
of vocabulary are built as their models were trained:

- ``gpt2``: byte-level BPE with the file's merges; every digit is a piece of its own (pre-tokenizer ``smollm``);
- ``llama`` with scores: SentencePiece BPE. A merge's rank is the score of the piece it makes; user-defined pieces (runs
  of blanks and newlines) are matched whole before any merge; unknown characters fall back to bytes.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Token types of the GGUF format.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


class UnsupportedVocabulary(ValueError):
    """The GGUF file's vocabulary is of a kind that has no faithful fast tokenizer here."""


def read_tokenizer(path: Path) -> Any:
    """A `PreTrainedTokenizerFast`; it adds a BOS where the file ``path`` says so, and decodes without clean-up."""
    from gguf import GGUFReader
    from tokenizers import processors

    reader = GGUFReader(path)

    def value(name: str, default: Any = None) -> Any:
        field = reader.fields.get(f"tokenizer.{name}")
        return default if field is None else field.contents()

    kind, pre = value("ggml.model"), value("ggml.pre", "default")
    pieces, types = value("ggml.tokens"), value("ggml.token_type")
    if kind == "gpt2" and pre == "smollm":
        backend = _byte_level(pieces, value("ggml.merges"))
    elif kind == "llama" and not value("ggml.add_space_prefix", True):
        backend = _sentencepiece(pieces, types, value("ggml.scores"), pieces[value("ggml.unknown_token_id")])
    else:
        raise UnsupportedVocabulary(f"{path}: no tokenizer for GGUF vocabulary {kind!r} with pre-tokenizer {pre!r}")
    _add_special_pieces(backend, pieces, types)
    if value("ggml.add_bos_token", False):
        bos = value("ggml.bos_token_id")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{pieces[bos]} $A", pair=f"{pieces[bos]} $A $B", special_tokens=[(pieces[bos], bos)]
        )
    named = {
        f"{name}_token": pieces[value(f"ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if value(f"ggml.{key}_token_id") is not None
    }
    transformers: Any = importlib.import_module("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=value("chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(1e9),
        **named,
    )


def _byte_level(pieces: list[str], merges: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(pieces: list[str], types: list[int], scores: list[float], unknown: str) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for index, piece in enumerate(pieces):
        if types[index] in (_CONTROL, _USER_DEFINED, _BYTE):
            continue
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for *_, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _add_special_pieces(backend: Tokenizer, pieces: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    control = [piece for piece, kind in zip(pieces, types, strict=True) if kind == _CONTROL and "unused" not in piece]
    backend.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    # Blanks are written as ▁ in the vocabulary, so runs of them are looked for in the normalized text.
    defined = [piece for piece, kind in zip(pieces, types, strict=True) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(piece, normalized="▁" in piece, special=False) for piece in defined])
