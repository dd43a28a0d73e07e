"""What a worker does for a prompt: look up, plan, restore or blend into the request's blocks, keep new documents.

Knows tokens, slots of the engine's cache, the pipeline and the runner; knows neither schedulers nor requests. `look`
may run on another thread than the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blendstore import Namespace, Store, Ticket
from blendstore.blend import BlendRunner, BlendSettings, Geometry
from blendstore.blend.copies import sent
from blendstore.blend.kept import bytes_in_format
from blendstore.blend.records import LeaseRecords, restore
from blendstore.budget import Budget, computed_from, head, rows
from blendstore.codec.formats import WRONG, FormatError
from blendstore.config import Config
from blendstore.identity import ModelIdentity, namespace
from blendstore.options import RequestOptions
from blendstore.pipeline import Pipeline, Prepared
from blendstore.plan import BlendPlan, SpanKind
from blendstore.segments import SeparatorSegmenter
from blendstore.serving import Served, describe, salted, settings, whole_layers, without_question

from .layout import PagedKV
from .messages import Ask, Found, Keep, Load
from .model import VLLMModel
from .outgoing import Outgoing
from .pending import Pending
from .telemetry import Recorder

log = logging.getLogger("blendstore.vllm")
# Look-ups whose plans wait to be used. An answer that comes when its request is over would stay forever.
_REMEMBERED = 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a prompt would get now. The leases of ``prepared`` are the holder's to release."""

    prepared: Prepared
    """The whole prompt; its plan says what is cached and used."""
    run: BlendPlan | None
    """The leading part that goes through the runner, or None: exact records are copied and nothing is computed."""
    target: int
    cut: int = 0
    """Cached tokens that are given up to stay within the budget."""


@dataclass(slots=True)
class Serving:
    """One worker's store and runner."""

    config: Config
    geometry: Geometry
    kv: PagedKV
    block: int
    """Tokens of one of the engine's blocks. Its kernels' may be smaller; slots are numbered alike."""
    model: VLLMModel | None
    """None where blending is off or refused."""
    store: Store
    identity: ModelIdentity
    separators: SeparatorSegmenter | None
    metrics: Recorder
    pinned: Any = None
    """Keeps the store's memory page-locked."""
    pending: Pending = field(init=False)
    outgoing: Outgoing = field(init=False)
    budget: Budget = field(init=False)
    _pipelines: dict[str, Pipeline] = field(init=False, default_factory=dict)
    _looked: dict[str, Outlook] = field(init=False, default_factory=dict)
    """What was said of prompts that aren't filled yet, by request; without pins."""
    _done: dict[str, Prepared] = field(init=False, default_factory=dict)
    """What the filled prompts that aren't kept yet are made of, by request; without pins."""
    _failed: set[str] = field(init=False, default_factory=set)
    """Requests whose blocks hold nothing useful until the engine has computed them again."""
    _coming: dict[str, tuple[Ticket | None, float]] = field(init=False, default_factory=dict)
    """Loads from lower tiers that prompts wait for, by request, and when that ends (seconds of the monotonic clock)."""
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.budget = Budget(self.config.blend_budget_ms)
        self.pending = Pending(self.geometry.device)
        self.outgoing = Outgoing(self.geometry, self.kv)

    def look(self, ask: Ask) -> Found:
        """How far this prompt could be filled now. Nothing stays pinned but what lower tiers bring for it while
        it waits: ``tier_wait_ms`` at most."""
        self.pending.poll()
        ticket, end = self._coming.get(ask.name) or self._fetch(ask)
        if ticket is not None and not ticket.poll() and time.monotonic() < end:
            return Found(ask.held, 0.0, waiting=True)
        outlook = self._outlook(ask)
        outlook.prepared.release()
        self._let_go(ask)
        self.metrics.event("over_budget", outlook.cut > 0 and outlook.target <= ask.held)
        if outlook.target > ask.held:
            _remember(self._looked, ask.name, outlook)
        expected = 0.0 if outlook.run is None else self.budget.estimate(self._rows(outlook.run, ask))
        return Found(outlook.target, expected)

    def _fetch(self, ask: Ask) -> tuple[Ticket | None, float]:
        """Have lower tiers begin to bring what memory lacks of this prompt's records; how long that is waited for."""
        ticket = self._pipeline(ask.lora).fetch(_tokens(ask), self._options(ask))
        coming = (ticket, time.monotonic() + self.config.tier_wait_ms / 1e3)
        if ticket is not None:
            _remember(self._coming, ask.name, coming)
        return coming

    def _let_go(self, ask: Ask) -> None:
        """What was brought is found, and what wasn't is for later prompts."""
        ticket, _ = self._coming.get(ask.name, (None, 0.0))
        if ticket is not None:
            self._pipeline(ask.lora).leave(ticket)
            self._coming[ask.name] = (None, 0.0)

    def fill(self, load: Load) -> list[int]:
        """Put the promised KV into the request's blocks. Returns the blocks that could not be filled: the engine has
        to compute their tokens."""
        ask = load.ask
        self._done.pop(ask.name, None)
        self._failed.discard(ask.name)
        outlook: Outlook | None = None
        try:
            outlook = self._again(ask) or self._outlook(ask, admitted=True)
            if outlook.target != ask.limit:
                raise LookupError(f"of {ask.limit} tokens {outlook.target} are left")
            self._fill(outlook, ask, self.slots(load.blocks, ask.limit))
        except Exception as error:
            if outlook is not None:
                outlook.prepared.release()
            self.metrics.event("fallback")
            # As text: a handler that keeps records would keep the error, its frames and the pins in them.
            log.warning(
                "request %s: reuse failed, the engine computes: %s", ask.name, f"{type(error).__name__}: {error}"
            )
            self._failed.add(ask.name)
            return load.blocks[ask.held // self.block : -(-ask.limit // self.block)]
        self._done[ask.name] = replace(outlook.prepared, where=[], leases=[])
        return []

    def keep(self, keep: Keep) -> None:
        """Copy what this prompt computed and the store lacks out of its blocks."""
        ask = keep.ask
        done = self._done.pop(ask.name, None) if keep.loaded else None
        if ask.name in self._failed:
            return
        options, tokens = self._options(ask), _tokens(ask)
        try:
            pipeline = self._pipeline(ask.lora)
            if done is None:
                done = pipeline.prepare(
                    tokens, replace(options, reuse=False), engine_prefix=min(ask.held, len(tokens) - 1)
                )
                self._report(Served(ask.name, len(tokens), ask.held, 0, 0, 0, len(tokens) - ask.held, 0.0))
            if options.store:
                self._copy_out(pipeline, done, self.slots(keep.blocks, len(tokens)))
        except Exception as error:
            self._not_stored(error)

    def settle(self, *, wait: bool = False) -> None:
        """Publish what has been copied; with ``wait``, everything that is being copied."""
        self.pending.poll(wait=wait)

    def forget(self, names: Sequence[str]) -> None:
        """These requests are over."""
        for name in names:
            self._looked.pop(name, None)
            self._coming.pop(name, None)
            self._done.pop(name, None)
            self._failed.discard(name)

    def slots(self, blocks: Sequence[int], count: int) -> Tensor:
        """[count] int64: where the first ``count`` tokens of a request with these blocks lie."""
        starts = sent(torch.tensor(blocks, dtype=torch.int64), self.geometry.device) * self.block
        within = torch.arange(self.block, device=self.geometry.device)
        return (starts[:, None] + within).view(-1)[:count]

    def _pipeline(self, lora: str) -> Pipeline:
        with self._lock:
            found = self._pipelines.get(lora)
            if found is None:
                identity = replace(self.identity, lora=lora, lora_version=lora)

                def made(salt: str) -> Namespace:
                    return namespace(identity, salt)

                # With an adapter nothing is blended: whole prompts are kept, for an exact prefix ends where nothing is.
                found = self._pipelines[lora] = Pipeline(
                    self.store,
                    replace(self.config, enable_blending=False) if lora else self.config,
                    made,
                    bytes_per_token=self.geometry.bytes_per_token,
                    packed_bytes_per_token=bytes_in_format(self.geometry, self.config.local_format),
                    separators=None if lora else self.separators,
                )
            return found

    def _options(self, ask: Ask) -> RequestOptions:
        return salted(self.config, RequestOptions(**ask.options), ask.salt)  # type: ignore[arg-type]

    def _settings(self, ask: Ask) -> BlendSettings:
        return settings(self.config, self._options(ask))

    def _outlook(self, ask: Ask, *, admitted: bool = False) -> Outlook:
        """Plan a prompt; one that was ``admitted`` is not cut again."""
        # Adapters change the layers, and the runner has the base's.
        blend = self.model is not None and not ask.lora
        prepared = self._pipeline(ask.lora).prepare(
            _tokens(ask), self._options(ask), engine_prefix=ask.held, blend=blend, fetch=False
        )
        try:
            return self._limited(prepared, ask, blend=blend, admitted=admitted)
        except BaseException:
            prepared.release()
            raise

    def _again(self, ask: Ask) -> Outlook | None:
        """What `look` said of this prompt, leased again; None when that no longer holds."""
        outlook = self._looked.pop(ask.name, None)
        if outlook is None or outlook.target != ask.limit or outlook.prepared.plan.prefix != ask.held:
            return None
        return outlook if self._pipeline(ask.lora).renew(outlook.prepared) else None

    def _limited(self, prepared: Prepared, ask: Ask, *, blend: bool, admitted: bool) -> Outlook:
        plan = prepared.plan
        cached = plan.positions(SpanKind.EXACT, SpanKind.REUSED)
        if not blend or not cached.size or cached[-1] < plan.lead:
            return Outlook(prepared, None, max(min(plan.lead, ask.limit), ask.held))
        whole = head(plan, min(plan.ntokens, ask.limit + 1))
        fitting = whole.ntokens if admitted else self._fitting(whole, ask)
        run = whole if fitting == whole.ntokens else head(whole, fitting) if fitting else computed_from(whole, ask.held)
        prepared.plan = computed_from(plan, run.ntokens)
        target = min(run.ntokens - 1, ask.limit) if run.context else ask.held
        return Outlook(prepared, run, max(target, ask.held), whole.context - run.context)

    def _fitting(self, run: BlendPlan, ask: Ask) -> int:
        wanted = self._settings(ask)
        return self.budget.fit(run, wanted.ratios[-1], whole_layers=whole_layers(wanted, self.geometry.layers))

    def _rows(self, run: BlendPlan, ask: Ask) -> float:
        wanted = self._settings(ask)
        return rows(run, wanted.ratios[-1], whole_layers=whole_layers(wanted, self.geometry.layers))

    @torch.inference_mode()
    def _fill(self, outlook: Outlook, ask: Ask, slots: Tensor) -> None:
        """Tokens [held, target) into their ``slots``, those of the first ``target`` tokens. The leases are released
        when the records have been read, unless this raises."""
        prepared, run = outlook.prepared, outlook.run
        plan, how, recomputed = run or prepared.plan, "", 0
        records = LeaseRecords(self.geometry, prepared.where)

        def done(milliseconds: float, read: LeaseRecords = records) -> None:
            del read  # held until now: the device has read them
            prepared.release()
            if run is not None:
                self.budget.observe(self._rows(run, ask), milliseconds)
            cut = len(prepared.tokens) - plan.ntokens
            self._report(
                Served(
                    request=ask.name,
                    prompt=len(prepared.tokens),
                    prefix=plan.prefix,
                    exact=plan.exact,
                    reused=plan.reused - recomputed,
                    recomputed=recomputed,
                    fresh=plan.fresh + cut,
                    milliseconds=milliseconds,
                    how=how,
                    cut=cut,
                )
            )

        with self.pending.timed(done):
            if run is not None and self.model is not None:
                wanted = self._settings(ask)
                if run.ntokens < len(prepared.tokens):
                    wanted = without_question(wanted)
                how = describe(wanted)
                self.model.hold(slots[: plan.prefix])
                ids = sent(torch.from_numpy(prepared.tokens[: run.ntokens].astype(np.int64)), self.geometry.device)
                with self.model.entered(run.ntokens):
                    result = BlendRunner(self.model).run(ids, run, records, wanted, wait=False)
                kv, recomputed = result.kv, result.recomputed
            else:
                spans = [span for span in plan.spans if span.kind is SpanKind.EXACT and span.stop <= plan.lead]
                kv = restore(self.geometry, records, spans, plan.lead, wait=False)
            self.kv.fill(slots[ask.held : outlook.target], kv, ask.held)

    @torch.inference_mode()
    def _copy_out(self, pipeline: Pipeline, done: Prepared, slots: Tensor) -> None:
        """Publish the documents when they have been copied."""
        capture = pipeline.capture(done)
        try:
            chunks = list(capture.chunks())
            if not chunks:
                return
            event, packing = self.outgoing.send(chunks, slots)
        except BaseException:
            capture.abort()
            raise

        def publish() -> None:
            try:
                refused = packing.refused()
                self.metrics.event("stored", capture.commit(without=refused))
                if refused:
                    self._not_stored(FormatError(WRONG))
            except Exception as error:
                capture.abort()
                self._not_stored(error)

        self.pending.add(event, publish)

    def _not_stored(self, error: Exception) -> None:
        self.metrics.event("store_error")
        # As text: a handler that keeps records would keep the error, its frames and the pins in them.
        log.warning("documents were not stored: %s", f"{type(error).__name__}: {error}")

    def _report(self, served: Served) -> None:
        self.metrics.served(served)
        self.metrics.event("cut", bool(served.cut))
        self.metrics.store(self.store)
        log.info("blendstore: %s", served.line())


def _remember(known: dict[str, T], name: str, value: T) -> None:
    """The latest ones, up to a limit."""
    known[name] = value
    while len(known) > _REMEMBERED:
        known.pop(next(iter(known)), None)


def _tokens(ask: Ask) -> NDArray[np.uint32]:
    return np.frombuffer(ask.tokens, dtype=np.uint32)
