"""Real prose for the benches: the Jargon File (packaged, public domain) and, where gensim is installed, news articles.

`narrative()` gives long continuous passages (the Jargon File's chapters and appendices), `documents()` many short texts
about different things. News articles come from a data file of gensim's wheel (299 articles of an Australian
broadcaster), which is read where it lies and never copied; without it the documents are groups of lexicon entries.
"""

from __future__ import annotations

import importlib.util
import lzma
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

CorpusName = Literal["auto", "news", "jargon"]

# 2,500 tokens of this prose, at no more than 5.2 characters a token.
_PASSAGE_CHARS = 13_000
_DOCUMENT_CHARS = 2_000

_SECTION = re.compile(r"^(Chapter \d+\.|Appendix [A-Z]\.|Glossary$|Bibliography$)")
_HEADWORD = re.compile(r"^:[^:]+:")
_PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\N{NO-BREAK SPACE}": " "})


class CorpusNotFound(LookupError):
    """A corpus was asked for by name and is not installed."""


@cache
def narrative() -> tuple[str, ...]:
    """Continuous passages of at least 2,500 tokens, each the paragraphs of one chapter or appendix, in order."""
    sections = [(title, paragraphs) for title, paragraphs in _jargon_sections() if title[:7] in ("Chapter", "Appendi")]
    passages: list[str] = []
    pending: list[str] = []
    for _, paragraphs in sections:  # short neighbouring chapters are read on as one
        pending += paragraphs
        if sum(map(len, pending)) >= _PASSAGE_CHARS:
            passages.append("\n\n".join(pending))
            pending = []
    if pending:
        passages[-1] += "\n\n" + "\n\n".join(pending)
    return tuple(passages)


@cache
def documents(name: CorpusName = "auto") -> tuple[str, ...]:
    """Short documents (at least 600 characters of prose on one line) about different things.

    ``auto`` takes news articles where they are installed. Raises `CorpusNotFound` when ``news`` is not.
    """
    path = _news_file()
    if name == "news" and path is None:
        raise CorpusNotFound("corpus 'news' needs gensim's data files: run `pip install --no-deps gensim==4.4.0`")
    if name == "jargon" or path is None:
        return _lexicon_documents()
    lines = path.read_text(errors="replace").splitlines()
    return tuple(" ".join(line.split()) for line in lines if len(line) > 600)


def corpus_in_use(name: CorpusName = "auto") -> str:
    """``news`` or ``jargon``: what `documents` returns, for reports."""
    return "news" if name != "jargon" and _news_file() is not None else "jargon"


def _news_file() -> Path | None:
    spec = importlib.util.find_spec("gensim")
    for folder in [] if spec is None else list(spec.submodule_search_locations or []):
        path = Path(folder) / "test" / "test_data" / "lee_background.cor"
        if path.is_file():
            return path
    return None


@cache
def _lexicon_documents() -> tuple[str, ...]:
    paragraphs = [p for title, section in _jargon_sections() if title == "Glossary" for p in section]
    out: list[str] = []
    group: list[str] = []
    for paragraph in paragraphs:
        group.append(paragraph)
        if sum(map(len, group)) >= _DOCUMENT_CHARS:
            out.append(" ".join(group))
            group = []
    return tuple(out)


@cache
def _jargon_sections() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(title, paragraphs of prose) of each section, in the file's order."""
    packed = (resources.files("blendstore.bench") / "data" / "jargon-4.4.7.txt.xz").read_bytes()
    sections: list[tuple[str, list[str]]] = [("", [])]
    for block in lzma.decompress(packed).decode().translate(_PLAIN).split("\n\n"):
        lines = block.strip("\n").split("\n")
        if heading := _SECTION.match(lines[0]):
            sections.append((heading.group(1).rstrip("."), []))
        elif paragraph := clean_paragraph(lines, 160 if sections[-1][0] == "Glossary" else 80):
            sections[-1][1].append(paragraph)
    return tuple((title, tuple(paragraphs)) for title, paragraphs in sections)


def clean_paragraph(lines: list[str], min_chars: int) -> str | None:
    """The lines of one block as a paragraph of prose, or None for headwords, index entries, tables and listings."""
    if any(line[:3].strip() or line[3:4] in ("", " ") for line in lines):  # prose is indented by exactly three blanks
        return None
    text = " ".join(line.strip() for line in lines)
    if _HEADWORD.match(text) or re.search(r"[─-╿]", text):
        return None
    text = re.sub(r"\{([^{}]*)\}", r"\1", text)  # cross references
    text = re.sub(r"^\d+\. ", "", text)  # number of a sense
    text = re.sub(r"^\[[^\]]*\] ?", "", text)  # etymology
    text = re.sub(r"(?<!\S)/[^\s/]{2,}(?: [^\s/]+)*/,? ?", "", text)  # pronunciations
    text = re.sub(r"\s+", " ", text).strip()
    letters = sum(character.isalpha() or character == " " for character in text)
    looks_like_prose = len(text) >= min_chars and letters >= 0.9 * len(text) and re.search(r"[.!?][\"')]*$", text)
    return text if looks_like_prose else None
