"""Small real tokenizers of the families that people serve, trained here, so that no test needs a download."""

import json
from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

TEXT = [
    "You are a helpful assistant. The cat sat on the mat, and a dog ran after the cat.",
    "Who ran after the cat? What's up? How are you recently? The visitor's code is 4711 (or 4712).",
    "System prompts are short; documents are long, and the question comes last.\n\nA new paragraph begins here.",
    "#include <stdio.h>\nint main(void) { return 0; }  // issue #42, see # # and ## and ### headings",
    "--- a/file\n+++ b/file\n[SEP] [CLS] \"quoted\" 'words' and a tab\there; ends with dots...",
    "Gefunden wurde über 3 % mehr; l'été est fini. 系统 文 中文 текст.",
    " # # The answer # # A question # # one # # two\n # # three. # # four",
] * 8

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class MadeTokenizer:
    """The calls that blendstore needs, as transformers has them."""

    def __init__(self, name: str, inner: Tokenizer, bos: str | None) -> None:
        self.name_or_path = name
        self.inner = inner
        self.bos_token_id: int | None = inner.token_to_id(bos) if bos else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], /) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=False)
        return text

    def one_string(self, parts: Sequence[str], separator: str, *, bos: bool = True) -> list[int]:
        """The parts joined as text and tokenized as a whole."""
        return self.encode(separator.join(parts), add_special_tokens=bos)

    def from_parts(self, parts: Sequence[str], separator: str, *, bos: bool = True) -> list[int]:
        """Each part tokenized apart, without BOS but for the first."""
        ids = self.encode(parts[0], add_special_tokens=bos)
        for part in parts[1:]:
            ids += self.encode(separator, add_special_tokens=False) + self.encode(part, add_special_tokens=False)
        return ids


def _with_bos(inner: Tokenizer, bos: str | None) -> Tokenizer:
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    return inner


def _byte_level(split: str | None, bos: str | None) -> Tokenizer:
    inner = Tokenizer(BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    inner.pre_tokenizer = (
        byte_level
        if split is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level])
    )
    inner.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[bos] if bos else [],
        show_progress=False,
    )
    inner.train_from_iterator(TEXT, trainer)
    return _with_bos(inner, bos)


def _sentencepiece(*, prefix_blank: bool, bos: str) -> Tokenizer:
    """BPE over text whose blanks are ``▁``, with one token for each run of 2, 4, 8 and 16 blanks, merged first."""
    inner = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>", bos, *(f"<0x{byte:02X}>" for byte in range(256))]
    inner.train_from_iterator(TEXT, BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    state = json.loads(inner.to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    runs = ["▁" * n for n in (2, 4, 8, 16)]
    for run in runs:
        vocab.setdefault(run, len(vocab))
    state["model"]["merges"] = [[run[: len(run) // 2]] * 2 for run in runs] + state["model"]["merges"]
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    inner = Tokenizer.from_str(json.dumps(state))
    blank = normalizers.Replace(" ", "▁")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank]) if prefix_blank else blank
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_blank else steps)
    return _with_bos(inner, bos)


@cache
def made(family: str) -> MadeTokenizer:
    """A tokenizer of one of `FAMILIES`."""
    bos = {"gpt2": None, "qwen": None, "llama3": "<|begin_of_text|>", "opt": "</s>", "llama2": "<s>", "gemma": "<bos>"}
    start = bos[family]
    if family in ("llama2", "gemma"):
        inner = _sentencepiece(prefix_blank=family == "llama2", bos=str(start))
    else:
        inner = _byte_level(_LLAMA3_SPLIT if family in ("llama3", "qwen") else None, start)
    return MadeTokenizer(family, inner, start)


def with_special_token(family: str, token: str) -> MadeTokenizer:
    """A tokenizer of a family to which ``token`` was added as a special token."""
    base = made(family)
    inner = Tokenizer.from_str(base.inner.to_str())
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    made_tokenizer = MadeTokenizer(f"{family}+{token}", inner, None)
    made_tokenizer.bos_token_id = base.bos_token_id
    return made_tokenizer


FAMILIES = ("gpt2", "qwen", "llama3", "opt", "llama2", "gemma")
