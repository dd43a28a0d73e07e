"""The in-process benches' engine: a transformers model whose documents are captured in any provenance, and blended.

Captures go through the real store, but past its capture policy: the quality bench shows what policies are for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from blendstore._core import Lease, Namespace, Store
from blendstore.blend import BlendRunner, BlendSettings
from blendstore.blend.drift import DriftSettings
from blendstore.blend.records import LeaseRecords, restore, write_record
from blendstore.config import Config
from blendstore.pipeline import LEAD_IN
from blendstore.plan import BlendPlan, Candidate, SpanKind, build_plan
from blendstore_transformers import Engine
from blendstore_transformers.engine import as_cache
from blendstore_transformers.model import TransformersModel, forward, layers_of

from . import models
from .answering import Answer, Completion, Ids, Options, Provenance

if TYPE_CHECKING:
    from .prompts import Prompt, Tokenizer

_CHUNK = 512
_DRIFT = {f"drift_{setting.name}" for setting in fields(DriftSettings)}


@dataclass(slots=True)
class Captured:
    """Documents of one prompt in the store: ``bounds`` int64 [segments, 2] in the prompt. The first ``exact`` segments
    stand where they were captured, the others were captured from position ``source`` on."""

    namespace: Namespace
    bounds: np.ndarray[Any, np.dtype[np.int64]]
    exact: int
    source: int
    prompt: Prompt
    scores: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Scored:
    """A `RecordSource` with the scores of a capture."""

    records: LeaseRecords
    found: Mapping[int, Tensor]

    def layer(self, chunk: int, index: int) -> tuple[Tensor, Tensor]:
        return self.records.layer(chunk, index)

    def scores(self, chunk: int) -> Tensor | None:
        return self.found.get(chunk)


class TransformersAnswering:
    """`Answering` over one transformers model."""

    def __init__(self, model: Any) -> None:
        self._engine, self._model = TransformersModel(model), model
        self._runner = BlendRunner(self._engine)
        self._geometry = self._engine.geometry
        self._store = Store(capacity_bytes=1 << 32, chunk_size=_CHUNK, policy="lru")
        self._captures = 0

    def full(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], question: int = 1) -> Answer:
        """The engine's own prefill."""
        begin = self._now()
        cache = DynamicCache()
        first = forward(self._model, cache, prompt_ids, 0, keep=question)
        spent = self._now() - begin
        return self._answer(cache, first, prompt_ids, answer_ids, spent, 0, 0, len(prompt_ids))

    def capture(self, prompt: Prompt, provenance: Provenance) -> Captured:
        """Prefill every document behind ``provenance.ids``, but system prompt and first document as they stand here."""
        self._store.clear()
        self._captures += 1
        namespace = Namespace([("capture", self._captures.to_bytes(8, "little"))])
        parts = [prompt.system, *prompt.documents]
        edges = np.cumsum([0, *map(len, parts)])
        bounds = np.stack([edges[:-1], edges[1:]], axis=1).astype(np.int64)
        captured = Captured(namespace, bounds, 2, len(provenance.ids), prompt)
        cache = DynamicCache()
        forward(self._model, cache, [*prompt.system, *prompt.documents[0]], 0, keep=1)
        layers = layers_of(cache)
        for part in (0, 1):
            self._keep(namespace, parts[part], layers, int(bounds[part, 0]))
        for document, layers in self._behind(provenance.ids, prompt.documents[1:]):
            self._keep(namespace, document, layers, captured.source)
        return captured

    def prefix_cached(self, prompt: Prompt, captured: Captured) -> Answer:
        """Exact prefix reuse: system prompt and first document come back, the rest is prefilled."""
        begin = self._now()
        tokens = np.asarray(prompt.ids, dtype=np.uint32)
        with self._store.lookup_segments(
            captured.namespace, tokens.data, captured.bounds[: captured.exact].data
        ) as lease:
            records = self._records(lease)
            lead = int(captured.bounds[captured.exact - 1, 1])
            plan = self._plan(captured, lease, len(tokens), captured.exact)
            exact = [span for span in plan.spans if span.kind is SpanKind.EXACT]
            kv = restore(self._geometry, records, exact, lead)
        cache = as_cache(kv)
        first = forward(self._model, cache, prompt.ids[lead:], lead, keep=1)
        spent = self._now() - begin
        return self._answer(cache, first, prompt.ids, prompt.answer, spent, lead, 0, len(prompt.ids) - lead)

    def blended(self, prompt: Prompt, captured: Captured, selector: str, ratio: float, options: Options) -> Answer:
        """System prompt and documents from the store, ``ratio`` of them recomputed."""
        rest = dict(options)
        given: dict[str, Any] = {key.removeprefix("drift_"): rest.pop(key) for key in _DRIFT & rest.keys()}
        drift = DriftSettings(**given) if rest.pop("drift_correction") else None
        seed = int(rest.pop("seed", 0))
        if (selector == "stored" or "stored_power" in rest) and not captured.scores:
            captured.scores = self._score(captured)
        settings = BlendSettings(
            selector,
            (ratio,),
            options={k: v for k, v in rest.items() if not isinstance(v, bool)},
            drift=drift,
            seed=seed,
        )
        begin = self._now()
        tokens = np.asarray(prompt.ids, dtype=np.uint32)
        with self._store.lookup_segments(captured.namespace, tokens.data, captured.bounds.data) as lease:
            plan = self._plan(captured, lease, len(tokens), len(captured.bounds))
            records = _Scored(self._records(lease), captured.scores)
            ids = torch.from_numpy(tokens.astype(np.int64)).to(self._geometry.device)
            result = self._runner.run(ids, plan, records, settings, outputs=len(prompt.question))
        with torch.inference_mode():
            first = self._engine.logits(result.state)
        cache = as_cache(result.kv)
        spent = self._now() - begin
        kept = plan.context - result.recomputed
        return self._answer(cache, first, prompt.ids, prompt.answer, spent, kept, result.recomputed, plan.fresh)

    def _plan(self, captured: Captured, lease: Lease, ntokens: int, segments: int) -> BlendPlan:
        """The plan of a prompt whose first ``segments`` segments come from the store."""
        candidates = self._candidates(captured, lease, segments)
        return build_plan(ntokens, engine_prefix=0, candidates=candidates, min_tokens=1, query_tokens=1)

    def _candidates(self, captured: Captured, lease: Lease, segments: int) -> list[Candidate]:
        out: list[Candidate] = []
        for group, (start, stop) in enumerate(captured.bounds[:segments].tolist()):
            for at in range(start, stop, _CHUNK):
                end, exact = min(at + _CHUNK, stop), group < captured.exact
                source = at if exact else captured.source + at - start
                out.append(Candidate(at, end, len(out), 0, source, exact, group, start))
        if lease.hits.count(1) != len(out):
            raise RuntimeError(f"{len(out)} chunks were captured, {lease.hits.count(1)} found: the store is too small")
        return out

    def _keep(self, namespace: Namespace, ids: Ids, layers: Sequence[tuple[Tensor, Tensor]], position: int) -> None:
        """Store ``ids``, which stand at ``position`` of ``layers``."""
        tokens = np.asarray(ids, dtype=np.uint32)
        with self._store.reserve(
            namespace, tokens.data, bytes_per_token=self._geometry.bytes_per_token, source_position=position,
            provenance=LEAD_IN, rank=1,
        ) as room:  # fmt: skip
            for index, wanted in enumerate(room.wanted):
                if wanted:
                    start, stop = room.bounds(index)
                    write_record(self._geometry, room.buffer(index), layers, position + start, position + stop)
            room.commit()

    def _behind(self, lead: Ids, documents: Sequence[Ids]) -> list[tuple[Ids, list[tuple[Tensor, Tensor]]]]:
        """(document, layers) with ``document`` at position len(lead) of every layer's K and V."""
        cache = DynamicCache()
        if lead:
            forward(self._model, cache, lead, 0, keep=1)
        base = layers_of(cache) if lead else None
        out = []
        for document in documents:
            own = DynamicCache() if base is None else as_cache(
                torch.stack([torch.stack([k, v]) for k, v in base])
            )  # fmt: skip
            forward(self._model, own, document, len(lead), keep=1)
            out.append((document, layers_of(own)))
        return out

    def _score(self, captured: Captured) -> dict[int, Tensor]:
        """V difference between this capture and one behind another document, relative, mean over layers; by chunk."""
        prompt = captured.prompt
        lead = [*prompt.system, *prompt.others[-1]]
        found: dict[int, Tensor] = {}
        chunk = sum(-(-int(stop - start) // _CHUNK) for start, stop in captured.bounds[: captured.exact])
        tokens = np.asarray(prompt.ids, dtype=np.uint32)
        with self._store.lookup_segments(captured.namespace, tokens.data, captured.bounds.data) as lease:
            records = self._records(lease)
            for document, layers in self._behind(lead, prompt.documents[captured.exact - 1 :]):
                for start in range(0, len(document), _CHUNK):
                    stop = min(start + _CHUNK, len(document))
                    total = torch.zeros(stop - start, device=self._geometry.device)
                    for index in range(1, self._geometry.layers):
                        cached = records.layer(chunk, index)[1].to(self._geometry.device).float()
                        other = layers[index][1][len(lead) + start : len(lead) + stop].float()
                        total += ((other - cached).square().sum((1, 2)) / cached.square().sum((1, 2)).mean()).sqrt()
                    found[chunk] = total / (self._geometry.layers - 1)
                    chunk += 1
        return found

    def _records(self, lease: Lease) -> LeaseRecords:
        return LeaseRecords(self._geometry, [(lease, at) for at in range(len(lease))])

    def _answer(
        self, cache: DynamicCache, first: Tensor, prompt_ids: Sequence[int], answer_ids: Sequence[int], spent: float,
        reused: int, recomputed: int, fresh: int,
    ) -> Answer:  # fmt: skip
        rows = [first[-1:]]
        if len(answer_ids) > 1:
            rows.append(forward(self._model, cache, answer_ids[:-1], len(prompt_ids), keep=0))
        return Answer(torch.cat(rows), spent, reused, recomputed, fresh, first[:-1] if len(first) > 1 else None)

    def _now(self) -> float:
        if self._geometry.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class TransformersGenerating:
    """`Generating` over the embedded engine, as a server would use it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        """Greedy; new documents are kept."""
        begin = time.perf_counter()
        done = self._engine.generate(prompt_ids, max_tokens)
        return Completion(done.report.milliseconds / 1e3, time.perf_counter() - begin, done.text)


def open_answering(model: str, *, dtype: str, device: str) -> tuple[TransformersAnswering, Tokenizer]:
    """The engine and the tokenizer of a model named as for `models.load`."""
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    return TransformersAnswering(loaded), tokenizer


def open_generating(model: str, *, separator: str, dtype: str, device: str) -> tuple[TransformersGenerating, Tokenizer]:
    """The embedded engine with blending on, documents cut by ``separator``."""
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    config = Config.load(overrides={"enable_blending": True, "blend_special_str": separator})
    return TransformersGenerating(Engine(loaded, tokenizer, config)), tokenizer
