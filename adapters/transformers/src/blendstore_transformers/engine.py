"""The embedded engine: a transformers model whose prompts reuse documents from the store, in process."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, DynamicLayer, PreTrainedModel

from blendstore._core import Store
from blendstore.blend import BlendRunner, BlendSettings, Geometry, pin, warm_up
from blendstore.blend.kept import bytes_in_format
from blendstore.blend.records import LeaseRecords, restore, write_record
from blendstore.blend.selectors import SelectorSettings, make_selector
from blendstore.blend.selftest import GeometryError, Proof, prove_geometry
from blendstore.codec import guard
from blendstore.codec.formats import WRONG, FormatError
from blendstore.config import Config
from blendstore.identity import namespace
from blendstore.options import RequestOptions
from blendstore.pipeline import Pipeline, Prepared, Tokens
from blendstore.plan import SpanKind
from blendstore.segments import SeparatorSegmenter
from blendstore.serving import settings
from blendstore.tiers import Payload, open_store

from .model import TransformersModel, UnsupportedModel, forward, layers_of, measure_of, plain_geometry, steady_length
from .weights import identity

log = logging.getLogger("blendstore.transformers")
BLENDING = Config.load(env={}, overrides={"enable_blending": True})


@dataclass(frozen=True, slots=True)
class Report:
    """Where one prompt's KV came from, in tokens, and how long it took until the first logits."""

    prompt: int
    prefix: int
    exact: int
    reused: int
    recomputed: int
    fresh: int
    milliseconds: float
    fallback: str = ""
    """Why the engine computed everything itself, when something failed."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt's KV as the engine's cache, the logits [vocabulary] float32 of its last token, and the report."""

    cache: DynamicCache
    logits: Tensor
    report: Report


@dataclass(frozen=True, slots=True)
class Generation:
    """A greedy continuation."""

    ids: list[int]
    text: str
    report: Report


class Engine:
    """Serves one model with one store, from any number of threads; forwards of the model take turns."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, config: Config = BLENDING, *, store: Store | None = None
    ) -> None:
        """``tokenizer`` is needed for separators and for text. Where blending can't be proved for this model it is
        refused with a warning that says why, and plain caching stays on: see `refusal`. Raises `UnsupportedModel` for a
        model that keeps no K and V to store."""
        self.config, self.tokenizer, self.counters = config, tokenizer, Counter[str]()
        self._model, self._lock = model, threading.Lock()
        self.refusal = ""
        """Why this model isn't blended; empty when it is."""
        self.proof: Proof | None = None
        self.verdicts: list[guard.Verdict] = []
        """What the lossy settings of the configuration cost, as measured at start."""
        self._engine: TransformersModel | None = None
        if config.enable_blending:
            make_selector(config.blend_selector, SelectorSettings(options=dict(config.blend_selector_options)))
            self._prove()
        self.geometry: Geometry = self._engine.geometry if self._engine is not None else plain_geometry(model)
        if self._engine is not None:
            self._prove_selector(self.settings(RequestOptions()))
        embedding: Any = model.get_input_embeddings()
        self._vocabulary = int(embedding.num_embeddings)
        self._steady = steady_length(model)
        config = self.config = self._guarded(config)
        self.store = store or open_store(config, payload=Payload.of(self.geometry))
        # Both do nothing on a CPU. The arena is page-locked for as long as this is held.
        self._pinned = pin(self.store, self.geometry.device)
        if self._engine is not None:
            warm_up(self.geometry, self._engine.softcap)
        made = replace(identity(model, self.geometry), kept=config.kept)
        separators = None
        if config.enable_blending and config.segmenter in ("auto", "separator") and tokenizer is not None:
            separators = SeparatorSegmenter.of_tokenizer(tokenizer, config.blend_special_str)
        self.pipeline = Pipeline(
            self.store,
            config,
            partial(namespace, made),
            bytes_per_token=self.geometry.bytes_per_token,
            packed_bytes_per_token=bytes_in_format(self.geometry, config.local_format),
            separators=separators,
        )
        log.info("blendstore: %s", self.describe())

    @classmethod
    def from_pretrained(
        cls, path: str | Path, config: Config = BLENDING, *, dtype: str = "float32", device: str = "cpu"
    ) -> Engine:
        """Load a local model folder and its tokenizer."""
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        model = model.to(device).eval()
        return cls(model, AutoTokenizer.from_pretrained(path), config)

    def _guarded(self, config: Config) -> Config:
        """``config`` without what changes this model's answers by more than ``codec_max_kl``."""
        keys = guard.lossy(config)
        if not keys:
            return config
        if self.tokenizer is None:
            log.warning("%s: not measured, as there is no tokenizer for the guard's prose", ", ".join(keys))
            return config
        codes = guard.codes(config)
        try:
            context = getattr(self._model.config, "max_position_embeddings", None)
            measure = measure_of(self._model, guard.prose(self.tokenizer.encode, context))
        except Exception as error:  # whatever the tokenizer or the model says is the reason
            log.warning("%s: not measured: %s", ", ".join(keys), f"{type(error).__name__}: {error}")
            return config
        config, self.verdicts = guard.guarded(config, codes, measure)
        self.counters["codec_fallbacks"] += sum(not verdict.kept for verdict in self.verdicts)
        return config

    def describe(self) -> str:
        """One line: what this engine does with this model, or why not."""
        g = self.geometry
        shape = f"{g.layers} layers, {g.kv_heads} KV heads of {g.head_dim}, {g.dtype}"
        if not self.config.enable_blending:
            return f"plain caching ({shape})"
        if self.refusal:
            return f"plain caching, blending refused: {self.refusal} ({shape})"
        return f"blending by {self.config.blend_selector} at {self.config.blend_recompute_ratios} ({shape})"

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Token ids of parts (system prompt, documents, question), each tokenized apart, with the separator between."""
        separator = self.tokenizer.encode(self.config.blend_special_str, add_special_tokens=False)
        ids: list[int] = []
        for number, part in enumerate(parts):
            ids += (separator if number else []) + self.tokenizer.encode(part, add_special_tokens=False)
        return ids

    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[int],
        max_new_tokens: int = 64,
        options: RequestOptions | None = None,
    ) -> Generation:
        """Greedy continuation of a text, of parts, or of token ids; stops at the end-of-text token."""
        if isinstance(prompt, str):
            ids = list(self.tokenizer.encode(prompt))
        elif len(prompt) and isinstance(prompt[0], str):
            ids = self.encode([str(part) for part in prompt])
        else:
            ids = cast(list[int], prompt)
        prefill = self.prefill(ids, options)
        out: list[int] = []
        logits, position = prefill.logits, len(ids)
        ends = getattr(self._model.generation_config, "eos_token_id", None)
        ends = set(ends if isinstance(ends, list) else [ends])
        while len(out) < max_new_tokens:
            out.append(int(logits.argmax()))
            if out[-1] in ends or len(out) == max_new_tokens:
                break
            with self._lock:
                logits = self.extend(prefill.cache, out[-1:], position)[-1]
            position += 1
        text = self.tokenizer.decode(out, skip_special_tokens=True) if self.tokenizer is not None else ""
        return Generation(out, text, prefill.report)

    def extend(self, cache: DynamicCache, ids: Sequence[int], position: int, *, keep: int = 1) -> Tensor:
        """The engine's own forward of ``ids`` behind ``cache`` at ``position``…; float32 logits [keep, vocabulary] of
        the last ``keep`` tokens (0: all)."""
        return forward(self._model, cache, ids, position, keep=keep)

    def prefill(
        self,
        ids: Sequence[int],
        options: RequestOptions | None = None,
        *,
        held: DynamicCache | None = None,
        held_exact: bool = True,
    ) -> Prefill:
        """KV and last logits of a prompt, and new documents kept.

        ``held`` is KV that the engine has for the first tokens; it isn't changed. Say ``held_exact=False`` when some of
        it was reused from another context: what is computed behind it isn't stored as exact then. An error in store or
        blend costs speed only: the engine computes the tokens itself. Raises ``ValueError`` for a prompt that is none
        of this model, and its subclass `SelectorError` for a selector or options of it that don't exist."""
        options = options or RequestOptions()
        begin = time.perf_counter()
        tokens = self._checked(ids)
        if self._engine is not None:
            self._prove_selector(self.settings(options))
        if self._steady is not None and len(tokens) >= self._steady:
            options = replace(options, reuse=False, store=False)
        prefix = 0 if held is None else min(held.get_seq_length(), len(tokens) - 1)
        try:
            with self.pipeline.prepare(
                tokens, options, engine_prefix=prefix, prefix_exact=held_exact, blend=self._engine is not None
            ) as prepared:
                with self._lock:
                    out = self._run(tokens, prepared, options, held, begin)
                if options.store:
                    self._capture(prepared, out)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            self._count(out.report)
            return out
        # Outside of the handler: the error is gone, and with it its frames with their pins and tensors.
        return self._fall_back(tokens, options, begin, reason)

    def _checked(self, ids: Sequence[int]) -> Tokens:
        """``ids`` as the store takes them. A wrong id must not turn into another one on the way."""
        given = np.asarray(ids)
        if not given.size:
            raise ValueError("the prompt is empty: give at least one token")
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise ValueError(
                f"the prompt is an array of {given.dtype} of {given.ndim} dimensions: give a flat sequence of token ids"
            )
        wrong = (given < 0) | (given >= self._vocabulary)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(
                f"token {at} of the prompt is {given[at]}: this model's ids are 0 to {self._vocabulary - 1}"
            )
        return given.astype(np.uint32)

    def _prove_selector(self, how: BlendSettings) -> None:
        """Raises `SelectorError` where this model can't be blended so."""
        wanted = SelectorSettings(
            how.check_layers, how.ratios, how.thresholds, how.options, layers=self.geometry.layers
        )
        make_selector(how.selector, wanted)

    def _count(self, report: Report) -> None:
        with self._lock:
            self.counters["prompts"] += 1
            for kind in ("prefix", "exact", "reused", "recomputed", "fresh"):
                self.counters[kind] += getattr(report, kind)
            self.counters["fallbacks"] += bool(report.fallback)
        log.info("%s", report)

    def _run(
        self,
        tokens: Tokens,
        prepared: Prepared,
        options: RequestOptions,
        held: DynamicCache | None,
        begin: float,
    ) -> Prefill:
        plan = prepared.plan
        records = LeaseRecords(self.geometry, prepared.where)
        # The engine's own forward takes one prefix; whatever is cached behind a hole goes through the runner.
        if self._engine is not None and plan.ntokens - plan.fresh > plan.lead:
            self._engine.hold(held)
            ids = torch.from_numpy(tokens.astype(np.int64)).to(self.geometry.device)
            try:
                result = BlendRunner(self._engine).run(ids, plan, records, self.settings(options))
            finally:
                self._engine.hold(None)
            with torch.inference_mode():
                logits = self._engine.logits(result.state[-1:])[0]
            cache, recomputed = as_cache(result.kv), result.recomputed
        else:
            cache, recomputed = self._restored(prepared, records, held), 0
            logits = self.extend(cache, tokens[plan.lead :].tolist(), plan.lead)[-1]
        if plan.fresh < plan.ntokens and not _are_numbers(logits):
            raise ArithmeticError("the logits behind cached KV are no finite numbers, so the engine computes them")
        spent = (time.perf_counter() - begin) * 1e3
        report = Report(plan.ntokens, plan.prefix, plan.exact, plan.reused - recomputed, recomputed, plan.fresh, spent)
        return Prefill(cache, logits, report)

    def settings(self, options: RequestOptions) -> BlendSettings:
        """The blend settings of one request."""
        return settings(self.config, options)

    @torch.inference_mode()
    def _restored(self, prepared: Prepared, records: LeaseRecords, held: DynamicCache | None) -> DynamicCache:
        """Engine-held and exact KV up to the first hole, as a cache of its own."""
        plan = prepared.plan
        if not plan.lead:
            return DynamicCache()
        exact = [span for span in plan.spans if span.kind is SpanKind.EXACT and span.stop <= plan.lead]
        kv = restore(self.geometry, records, exact, plan.lead)
        for index, pair in enumerate(layers_of(held) if held is not None and plan.prefix else ()):
            for part, tensor in enumerate(pair):
                kv[index, part, : plan.prefix] = tensor[: plan.prefix]
        return as_cache(kv)

    def _capture(self, prepared: Prepared, computed: Prefill) -> None:
        capture = None
        try:
            if not _are_numbers(computed.logits):
                raise ArithmeticError("the model's logits are no finite numbers, so its KV isn't kept")
            capture = self.pipeline.capture(prepared)
            layers = layers_of(computed.cache)
            refused = []
            for chunk in capture.chunks():
                buffer = chunk.reservation.buffer(chunk.index)
                try:
                    write_record(self.geometry, buffer, layers, chunk.start, chunk.stop)
                except FormatError:
                    refused.append(chunk)
            published = capture.commit(without=refused)
            with self._lock:
                self.counters["stored"] += published
            if refused:
                self._not_stored(FormatError(WRONG))
        except Exception as error:
            if capture is not None:
                capture.abort()
            self._not_stored(error)

    def _not_stored(self, error: Exception) -> None:
        with self._lock:
            self.counters["store_errors"] += 1
        # As text: a handler that keeps records would keep the error, its frames and the pins in them.
        log.warning("documents were not stored: %s", f"{type(error).__name__}: {error}")

    def _fall_back(self, tokens: Tokens, options: RequestOptions, begin: float, reason: str) -> Prefill:
        """The engine computes the whole prompt, whose documents are stored like those of any other."""
        log.warning("reuse failed, the engine computes the prompt: %s", reason)
        cache = DynamicCache()
        with self._lock:
            logits = self.extend(cache, tokens.tolist(), 0)[-1]
        spent = (time.perf_counter() - begin) * 1e3
        report = Report(len(tokens), 0, 0, 0, 0, len(tokens), spent, reason)
        out = Prefill(cache, logits, report)
        if options.store:
            try:
                with self.pipeline.prepare(tokens, replace(options, reuse=False)) as prepared:
                    self._capture(prepared, out)
            except Exception as error:
                self._not_stored(error)
        self._count(report)
        return out

    def _prove(self) -> None:
        """Sets `_engine` and `proof`, or `refusal`. Whatever goes wrong here is a reason not to blend."""
        attention = self._model.config._attn_implementation
        try:
            engine = TransformersModel(self._model)
            engine.prove_logits()
            self.proof = prove_geometry(engine, engine.prefill, vocabulary=engine.vocabulary)
            self._engine = engine
        except Exception as error:
            self._model.set_attn_implementation(attention)
            known = isinstance(error, GeometryError | UnsupportedModel)
            self.refusal = str(error) if known else f"{type(error).__name__}: {error}"
            name = type(self._model).__name__
            log.warning("blending is refused for %s, plain caching stays on: %s", name, self.refusal)


def _are_numbers(logits: Tensor) -> bool:
    """Whether the largest of them is finite: NaN in any key or value that the last token sees ends up here, and so does
    infinity. A model may mask tokens with minus infinity."""
    return bool(logits.max().isfinite())


def as_cache(kv: Tensor) -> DynamicCache:
    """``kv`` [layers, 2, tokens, kv_heads, dim] as the engine's cache, without a copy."""
    make: Any = DynamicLayer
    cache = DynamicCache()
    for k, v in kv:
        layer: Any = make()
        keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache
