"""A small decoder in plain torch for tests of the blend core: random weights, rotary attention, and a dense prefill
of its own that shares no code with what it checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blendstore.blend import Attend, Geometry
from blendstore.blend.rotary import Pairing, RotaryTable
from blendstore.plan import BlendPlan, Span, SpanKind

VOCABULARY = 97


@dataclass
class Rope:
    """One rotary geometry: frequencies [pairs] and what cos and sin are multiplied with."""

    frequencies: Tensor
    pairing: Pairing = "half"
    scaling: float = 1.0

    def table(self) -> RotaryTable:
        def lookup(positions: Tensor) -> tuple[Tensor, Tensor]:
            angle = positions[:, None].double() * self.frequencies
            return (angle.cos() * self.scaling).float(), (angle.sin() * self.scaling).float()

        return RotaryTable(lookup, self.pairing, self.frequencies.shape[0])

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` [n, heads, dim] rotated at ``positions``, scaling included, by complex numbers in float64."""
        pairs = self.frequencies.shape[0]
        turned, rest = x[..., : 2 * pairs].double(), x[..., 2 * pairs :]
        if self.pairing == "half":
            numbers = torch.complex(turned[..., :pairs].contiguous(), turned[..., pairs:].contiguous())
        else:
            numbers = torch.view_as_complex(turned.reshape(*turned.shape[:-1], pairs, 2).contiguous())
        angle = (positions[:, None].double() * self.frequencies)[:, None]
        numbers = numbers * torch.polar(torch.full_like(angle, self.scaling), angle)
        parts = (numbers.real, numbers.imag)
        out = torch.cat(parts, -1) if self.pairing == "half" else torch.stack(parts, -1).flatten(-2)
        return torch.cat([out.to(x.dtype), rest], -1)


def rope(pairs: int, base: float = 10_000.0, pairing: Pairing = "half", scaling: float = 1.0) -> Rope:
    return Rope(base ** (-torch.arange(pairs).double() / pairs), pairing, scaling)


def dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Reference attention in float64: ``seen`` [n, keys] says which keys a row sees. Output [n, heads, dim], weights
    [heads, n, keys]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (k, v))
    logits = torch.einsum("nhd,mhd->hnm", q.double(), keys) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, values).to(q.dtype), weights


@dataclass
class FakeEngine:
    """Implements `EngineModel`. ``windows`` repeat over the layers, as do ``ropes``."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 24
    windows: Sequence[int | None] = (None,)
    ropes: Sequence[Rope | None] = field(default_factory=lambda: (rope(8),))
    softcap: float | None = None
    seed: int = 0
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rows_run: list[int] = field(default_factory=list)
    """Number of rows of every call of `layer`."""

    def __post_init__(self) -> None:
        make = torch.Generator().manual_seed(self.seed)

        def weight(*shape: int) -> Tensor:
            drawn: Tensor = torch.randn(*shape, generator=make)
            return drawn / math.sqrt(shape[-1])

        wide = self.heads * self.head_dim
        narrow = self.kv_heads * self.head_dim
        self.embedding = torch.randn(VOCABULARY, self.hidden, generator=make)
        self.weights = [
            (
                weight(wide, self.hidden),
                weight(narrow, self.hidden),
                weight(narrow, self.hidden),
                weight(self.hidden, wide),
                weight(self.hidden, self.hidden),
            )
            for _ in range(self.layers)
        ]
        tables = {id(r): r.table() for r in self.ropes if r is not None}
        self._ropes = [self.ropes[i % len(self.ropes)] for i in range(self.layers)]
        self._windows = [self.windows[i % len(self.windows)] for i in range(self.layers)]
        self.geometry = Geometry(
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
            rotary=tuple(None if r is None else tables[id(r)] for r in self._ropes),
            windows=tuple(self._windows),
        )

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding[ids]

    def layer(self, index: int, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.rows_run.append(state.shape[0])
        wq, wk, wv, wo, wm = self.weights[index]
        normed = state / state.square().mean(-1, keepdim=True).sqrt()
        q = (normed @ wq.T).view(-1, self.heads, self.head_dim)
        k, v = ((normed @ w.T).view(-1, self.kv_heads, self.head_dim) for w in (wk, wv))
        turn = self._ropes[index]
        if turn is not None:
            q, k = turn.apply(q, positions), turn.apply(k, positions)
        out = attend(q, k, v, scale=self.head_dim**-0.5, softcap=self.softcap)
        state = state + self.sum_of_ranks(out.reshape(state.shape[0], -1) @ wo.T)
        return state + torch.tanh(state @ wm.T)

    def rows(self, state: Tensor, index: Tensor) -> Tensor:
        return state[index]

    def read_slots(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        k, v = self.held[index]
        return k[:count], v[:count]

    def all_reduce(self, scores: Tensor) -> Tensor:
        return self.sum_of_ranks(scores)

    def sum_of_ranks(self, part: Tensor) -> Tensor:
        """One rank holds all heads."""
        return part

    def prefill(self, ids: Tensor, offset: int = 0) -> list[tuple[Tensor, Tensor]]:
        """K and V [n, kv_heads, dim] of every layer: a whole prompt at positions offset, offset + 1, …"""
        out: list[tuple[Tensor, Tensor]] = []
        n = ids.shape[0]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        state = self.embed(ids)
        for index in range(self.layers):
            window = self._windows[index] or n
            seen = (distance >= 0) & (distance < window)

            def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None,
                       seen: Tensor = seen) -> Tensor:  # fmt: skip
                out.append((k, v))
                return dense(q, k, v, seen, scale, softcap)[0]

            state = self.layer(index, state, torch.arange(offset, offset + n), attend)
        return out


@dataclass
class FakeRecords:
    """A `RecordSource` over tensors: chunk c has ``chunks[c]`` = K and V of every layer."""

    chunks: list[list[tuple[Tensor, Tensor]]]
    stored: dict[int, Tensor] = field(default_factory=dict)
    on_layer: Callable[[int, int], None] | None = None

    def layer(self, chunk: int, index: int) -> tuple[Tensor, Tensor]:
        if self.on_layer is not None:
            self.on_layer(chunk, index)
        return self.chunks[chunk][index]

    def scores(self, chunk: int) -> Tensor | None:
        return self.stored.get(chunk)


def captured(engine: FakeEngine, lead: Tensor, document: Tensor, offset: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The document's KV, captured behind ``lead`` that starts at position ``offset``."""
    return [(k[lead.shape[0] :], v[lead.shape[0] :]) for k, v in engine.prefill(torch.cat([lead, document]), offset)]


def random_ids(count: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@dataclass
class Scene:
    """A prompt of a system part, documents out of ``records`` in turn with fresh separators between, and a question."""

    ids: Tensor
    plan: BlendPlan
    records: FakeRecords


def scene(
    engine: FakeEngine, *, documents: int = 3, length: int = 40, system: int = 6, question: int = 9, seed: int = 5,
    prefix: bool = False,
) -> Scene:  # fmt: skip
    """Every document was captured behind another lead of its own length, at another place than it has in the prompt."""
    ids, spans, chunks = [random_ids(system, seed)], [], []
    spans.append(Span(SpanKind.PREFIX if prefix else SpanKind.FRESH, 0, system))
    at = system
    for number in range(documents):
        document = random_ids(length, seed + 10 + number)
        lead = random_ids(11 + 7 * number, seed + 50 + number)
        chunks.append(captured(engine, lead, document))
        ids += [random_ids(2, seed + 90 + number), document]
        spans.append(Span(SpanKind.FRESH, at, at + 2))
        at += 2
        # Rows from 1 on, so that a span's first row isn't its record's.
        spans.append(Span(SpanKind.FRESH, at, at + 1))
        spans.append(Span(SpanKind.REUSED, at + 1, at + length, number, 1, lead.shape[0] + 1, number, at))
        at += length
    ids.append(random_ids(question, seed + 99))
    spans.append(Span(SpanKind.FRESH, at, at + question))
    whole = torch.cat(ids)
    if prefix:
        engine.held = engine.prefill(whole)
    return Scene(whole, BlendPlan(whole.shape[0], tuple(spans)), FakeRecords(chunks))


def worst(kv: Tensor, wanted: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Largest difference over all layers of ``kv`` [layers, 2, tokens, kv_heads, dim] to a prefill."""
    return max(float((kv[i, j] - pair[j]).abs().max()) for i, pair in enumerate(wanted) for j in (0, 1))
