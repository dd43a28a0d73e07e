"""Traces of what prompts ask of the store: made by seed, or read from a file of Mooncake's format.

A trace is requests in order of time; a request is *chains* of chunks, one for each document and one for what begins at
position 0 of the prompt (system prompt, conversation). Equal prefixes are equal chunks, as chain keys have it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["GENERATORS", "Trace", "TraceBuilder", "interleave", "make", "parameters", "read_mooncake"]

NO_PARENT = 0xFFFF_FFFF
"""Parent of a chain's first chunk."""
_MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests and the chunks that they ask for.

    ``times`` float64[requests] are seconds, not falling; ``starts`` int64[requests + 1] are the requests' ranges in
    ``blocks`` uint32[accesses] (a chunk's number) and ``positions`` uint32[accesses] (of its first token in that
    prompt). ``parents`` and ``tokens``, uint32[chunks], are the chain's previous chunk (``NO_PARENT`` without one) and
    the chunk's length. A chunk's accesses stand right behind its parent's, in every request.
    """

    name: str
    times: NDArray[np.float64]
    starts: NDArray[np.int64]
    blocks: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    parents: NDArray[np.uint32]
    tokens: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.times)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all chunks, each once: what a store that never evicts would hold."""
        return int(self.tokens.sum(dtype=np.int64))


class TraceBuilder:
    """Puts a trace together, document by document and request by request."""

    def __init__(self, name: str, chunk_size: int = 256) -> None:
        self._name, self._chunk_size = name, chunk_size
        self._times: list[float] = []
        self._starts: list[int] = [0]
        self._blocks: list[NDArray[np.uint32]] = []
        self._positions: list[NDArray[np.uint32]] = []
        self._parents: list[NDArray[np.uint32]] = []
        self._tokens: list[NDArray[np.uint32]] = []
        self._chunks = 0

    def chain(self, ntokens: int, before: NDArray[np.uint32] | None = None) -> NDArray[np.uint32]:
        """New chunks for ``ntokens`` tokens, the last one perhaps unfull; the chain goes on behind ``before``, whose
        chunks it begins with. Returns the numbers of all chunks of the chain."""
        size = self._chunk_size
        count = -(-ntokens // size)
        own = np.arange(self._chunks, self._chunks + count, dtype=np.uint32)
        tokens = np.full(count, size, dtype=np.uint32)
        parents = own - np.uint32(1)
        if count:
            tokens[-1] = ntokens - (count - 1) * size
            parents[0] = NO_PARENT if before is None or not len(before) else before[-1]
        self._chunks += count
        self._parents.append(parents)
        self._tokens.append(tokens)
        return own if before is None else np.concatenate((before, own))

    def request(self, time: float, parts: Iterable[tuple[NDArray[np.uint32], int]]) -> None:
        """A prompt at ``time`` (seconds) of (chain, position of its first token); chunks before the last are full."""
        total = self._starts[-1]
        for chain, position in parts:
            self._blocks.append(chain)
            self._positions.append((position + self._chunk_size * np.arange(len(chain))).astype(np.uint32))
            total += len(chain)
        self._times.append(time)
        self._starts.append(total)

    def build(self) -> Trace:
        """The trace, its requests in order of time."""
        times = np.array(self._times, dtype=np.float64)
        order = np.argsort(times, kind="stable")
        starts = np.array(self._starts, dtype=np.int64)
        blocks, positions = _joined(self._blocks), _joined(self._positions)
        lengths = np.diff(starts)[order]
        taken = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order] or [np.zeros(0, np.int64)])
        return Trace(
            self._name,
            times[order],
            np.concatenate(([0], np.cumsum(lengths))),
            blocks[taken],
            positions[taken],
            _joined(self._parents),
            _joined(self._tokens),
        )


def _joined(parts: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)


def _zipf(count: int, exponent: float) -> NDArray[np.float64]:
    """Cumulated shares of ``count`` things whose popularity falls as rank ** -exponent."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return np.cumsum(weights / weights.sum())


def _draw(rng: np.random.Generator, shares: NDArray[np.float64], count: int) -> list[int]:
    """``count`` different ranks."""
    picked: list[int] = []
    while len(picked) < min(count, len(shares)):
        rank = min(int(np.searchsorted(shares, rng.random())), len(shares) - 1)
        if rank not in picked:
            picked.append(rank)
    return picked


def _lengths(rng: np.random.Generator, mean: float, sigma: float, count: int) -> NDArray[np.int64]:
    """Log-normal token counts with that mean, 1 at least."""
    return np.maximum(1, rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, count).astype(np.int64))


def rag(
    seed: int,
    *,
    requests: int = 6000,
    documents: int = 3000,
    exponent: float = 0.9,
    document_tokens: float = 1500,
    spread: float = 0.7,
    per_prompt: tuple[int, int] = (3, 8),
    fresh: float = 0.1,
    rate: float = 2.0,
) -> Trace:
    """Retrieval: a shared system prompt, documents by Zipf in any order, a question of its own. A share ``fresh`` of
    the documents is seen only once."""
    rng = np.random.default_rng(seed)
    build = TraceBuilder("rag")
    system = build.chain(300)
    lengths = _lengths(rng, document_tokens, spread, documents)
    known: dict[int, NDArray[np.uint32]] = {}
    shares = _zipf(documents, exponent)
    time = 0.0
    for _ in range(requests):
        time += rng.exponential(1 / rate)
        parts, position = [(system, 0)], 300
        for rank in _draw(rng, shares, int(rng.integers(per_prompt[0], per_prompt[1] + 1))):
            if rng.random() < fresh:
                length = int(_lengths(rng, document_tokens, spread, 1)[0])
                parts.append((build.chain(length), position))
            else:
                length = int(lengths[rank])
                if rank not in known:
                    known[rank] = build.chain(length)
                parts.append((known[rank], position))
            position += length
        parts.append((build.chain(int(rng.integers(40, 120))), position))
        build.request(time, parts)
    return build.build()


def scans(
    seed: int,
    *,
    requests: int = 6000,
    documents: int = 2000,
    exponent: float = 0.9,
    document_tokens: float = 1500,
    spread: float = 0.7,
    per_prompt: tuple[int, int] = (3, 8),
    every: int = 600,
    length: int = 150,
    rate: float = 2.0,
) -> Trace:
    """Retrieval with sweeps in between: every ``every`` prompts, ``length`` prompts read documents that come once."""
    rng = np.random.default_rng(seed)
    build = TraceBuilder("scans")
    lengths = _lengths(rng, document_tokens, spread, documents)
    known: dict[int, NDArray[np.uint32]] = {}
    shares = _zipf(documents, exponent)
    time = 0.0
    for number in range(requests):
        time += rng.exponential(1 / rate)
        parts: list[tuple[NDArray[np.uint32], int]] = []
        position = 0
        count = int(rng.integers(per_prompt[0], per_prompt[1] + 1))
        if number % every >= every - length:
            for size in _lengths(rng, document_tokens, spread, count).tolist():
                parts.append((build.chain(size), position))
                position += size
        else:
            for rank in _draw(rng, shares, count):
                if rank not in known:
                    known[rank] = build.chain(int(lengths[rank]))
                parts.append((known[rank], position))
                position += int(lengths[rank])
        build.request(time, parts)
    return build.build()


def system_prompts(
    seed: int,
    *,
    requests: int = 12000,
    prompts: int = 400,
    exponent: float = 1.0,
    prompt_tokens: float = 3000,
    spread: float = 0.8,
    user_tokens: float = 900,
    rate: float = 4.0,
) -> Trace:
    """Agents: one of many long system prompts by Zipf, then a text that comes once, all one chain."""
    rng = np.random.default_rng(seed)
    build = TraceBuilder("system")
    # Whole chunks, so that what follows does not change the last one.
    lengths = np.maximum(1, _lengths(rng, prompt_tokens, spread, prompts) // 256) * 256
    known: dict[int, NDArray[np.uint32]] = {}
    shares = _zipf(prompts, exponent)
    time = 0.0
    for user in _lengths(rng, user_tokens, 1.0, requests).tolist():
        time += rng.exponential(1 / rate)
        rank = _draw(rng, shares, 1)[0]
        if rank not in known:
            known[rank] = build.chain(int(lengths[rank]))
        build.request(time, [(build.chain(user, known[rank]), 0)])
    return build.build()


def conversations(
    seed: int,
    *,
    conversations: int = 5000,
    goes_on: float = 0.6,
    think: float = 90.0,
    think_spread: float = 0.8,
    first_tokens: float = 4000,
    turn_tokens: float = 900,
    spread: float = 1.0,
    rate: float = 1.5,
) -> Trace:
    """Chats: every turn repeats all before it. With chance ``goes_on`` another turn follows, about ``think`` seconds
    later (log-normal)."""
    rng = np.random.default_rng(seed)
    build = TraceBuilder("conversations")
    system = build.chain(512)
    begin = 0.0
    for _ in range(conversations):
        begin += rng.exponential(1 / rate)
        time, chain = begin, system
        new = int(_lengths(rng, first_tokens, spread, 1)[0])
        while True:
            full = build.chain(new // 256 * 256, chain)
            asked = build.chain(new % 256, full)
            build.request(time, [(asked, 0)])
            if rng.random() >= goes_on:
                break
            time += float(rng.lognormal(np.log(think), think_spread))
            chain, new = full, new % 256 + int(_lengths(rng, turn_tokens, spread, 1)[0])
    return build.build()


GENERATORS: Mapping[str, Callable[..., Trace]] = {
    "rag": rag,
    "scans": scans,
    "system": system_prompts,
    "conversations": conversations,
}
"""Makers of traces by seed."""


def parameters(name: str) -> Mapping[str, Any]:
    """Parameters of a generator that are numbers, with their defaults."""
    made = inspect.signature(GENERATORS[name]).parameters.values()
    return {each.name: each.default for each in made if isinstance(each.default, int | float)}


def make(name: str, seed: int, settings: Mapping[str, float]) -> Trace:
    """The generator's trace with those of the settings that it takes."""
    known = parameters(name)
    return GENERATORS[name](seed, **{key: type(known[key])(value) for key, value in settings.items() if key in known})


def interleave(name: str, first: Trace, second: Trace) -> Trace:
    """Both at the same time: the second is stretched or squeezed to the first's duration. They share no chunk."""
    span = first.times[-1] / max(second.times[-1], 1e-9) if len(first) and len(second) else 1.0
    times = np.concatenate((first.times, second.times * span))
    order = np.argsort(times, kind="stable")
    chunks = np.uint32(len(first.tokens))
    parents = np.where(second.parents == NO_PARENT, second.parents, second.parents + chunks).astype(np.uint32)
    blocks = np.concatenate((first.blocks, second.blocks + chunks))
    positions = np.concatenate((first.positions, second.positions))
    begins = np.concatenate((first.starts[:-1], second.starts[:-1] + first.starts[-1]))
    lengths = np.concatenate((np.diff(first.starts), np.diff(second.starts)))
    taken = np.concatenate([np.arange(begins[i], begins[i] + lengths[i]) for i in order])
    return Trace(
        name,
        times[order],
        np.concatenate(([0], np.cumsum(lengths[order]))),
        blocks[taken],
        positions[taken],
        np.concatenate((first.parents, parents)),
        np.concatenate((first.tokens, second.tokens)),
    )


def read_mooncake(path: Path, block_tokens: int = _MOONCAKE_BLOCK) -> Trace:
    """Reads JSON lines with ``timestamp`` (milliseconds), ``input_length`` (tokens) and ``hash_ids`` (of blocks of
    ``block_tokens`` tokens, of which the last may be unfull; equal ids have equal prefixes).

    Raises ``ValueError`` that names the line for anything else.
    """
    times: list[float] = []
    starts = [0]
    blocks: list[int] = []
    positions: list[int] = []
    numbers: dict[int, int] = {}
    parents: list[int] = []
    tokens: list[int] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                time, length, ids = _mooncake_request(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error}; give lines with timestamp, input_length and hash_ids"
                ) from None
            if times and time < times[-1]:
                raise ValueError(f"{path}, line {number}: timestamp {time * 1e3:.0f} is before the line above; sort it")
            parent = NO_PARENT
            for at, name in enumerate(ids):
                block = numbers.setdefault(name, len(numbers))
                if block == len(tokens):
                    parents.append(parent)
                    tokens.append(max(1, min(block_tokens, length - at * block_tokens)))
                elif parents[block] != parent:
                    raise ValueError(f"{path}, line {number}: hash id {name} stands behind another block than before")
                blocks.append(block)
                positions.append(at * block_tokens)
                parent = block
            times.append(time)
            starts.append(len(blocks))
    if not times:
        raise ValueError(f"{path}: no requests; give lines with timestamp, input_length and hash_ids")
    return Trace(
        path.stem,
        np.array(times, dtype=np.float64),
        np.array(starts, dtype=np.int64),
        np.array(blocks, dtype=np.uint32),
        np.array(positions, dtype=np.uint32),
        np.array(parents, dtype=np.uint32),
        np.array(tokens, dtype=np.uint32),
    )


def _mooncake_request(row: Any) -> tuple[float, int, list[int]]:
    """(seconds, tokens, ids)."""
    time, length, ids = float(row["timestamp"]) / 1e3, int(row["input_length"]), row["hash_ids"]
    if not isinstance(ids, list) or not all(isinstance(name, int) for name in ids):
        raise ValueError(f"hash_ids: {ids!r:.80} is no list of whole numbers")
    if length < 0 or time < 0:
        raise ValueError(f"timestamp {time}, input_length {length}: below 0")
    return time, length, ids
