"""What one rank does for a prompt between the engine's tree and the store: look up, plan, restore or blend, keep.

Knows tokens, slots of the engine's KV pool, the pipeline and the runner; knows neither trees nor requests. Everything
here runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blendstore import Namespace, Store
from blendstore.blend import BlendRunner, BlendSettings, Geometry
from blendstore.blend.copies import sent
from blendstore.blend.kept import bytes_in_format
from blendstore.blend.packing import Packing
from blendstore.blend.records import LeaseRecords, restore
from blendstore.budget import TAIL, Budget, computed_from, head, rows
from blendstore.codec.formats import WRONG, FormatError
from blendstore.config import Config
from blendstore.identity import ModelIdentity, namespace
from blendstore.metrics import ServingMetrics
from blendstore.options import RequestOptions
from blendstore.pipeline import Pipeline, Prepared, Writable
from blendstore.plan import BlendPlan, SpanKind
from blendstore.segments import SeparatorSegmenter
from blendstore.serving import Served, describe, settings, whole_layers, without_question

from .copyout import CopyOut
from .model import SGLangModel
from .ranks import Ranks
from .streams import Streams

log = logging.getLogger("blendstore.sglang")
Tokens = NDArray[np.uint32]


class Unreadable(RuntimeError):
    """A record that was found can't be read any more: the engine computes its tokens."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose prompt it is and what it asked for; fixed for a request."""

    name: str
    options: RequestOptions
    lora: str = ""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a prompt would get now: KV of the tokens up to ``target``."""

    prepared: Prepared
    """The whole prompt; its plan says what is cached and used."""
    run: BlendPlan | None
    """The leading part that goes through the runner, or None: exact records are copied and nothing is computed."""
    target: int
    blended: bool
    """Some of that KV was captured in another context."""
    cut: int = 0
    """Cached tokens that are given up to stay within the budget."""


@dataclass(slots=True)
class Serving:
    """One rank's store and runner."""

    config: Config
    geometry: Geometry
    model: SGLangModel | None
    """None where blending is off or refused."""
    pool: Any
    store: Store
    identity: Callable[[], ModelIdentity]
    """Identity of the weights that are loaded now."""
    separators: SeparatorSegmenter | None
    metrics: ServingMetrics
    page_size: int
    streams: Streams
    ranks: Ranks = field(default_factory=Ranks)
    pinned: Any = None
    """Keeps the store's memory page-locked."""
    epoch: int = 0
    """Grows when records were published: what was planned before may be out of date."""
    budget: Budget = field(init=False)
    copies: CopyOut = field(init=False)
    _identity: ModelIdentity = field(init=False)
    _pipelines: dict[str, Pipeline] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = Budget(self.config.blend_budget_ms)
        # Records that are reserved and not yet filled can't be evicted: other prompts need room meanwhile.
        self.copies = CopyOut(self.geometry, self.pool, self.config.max_local_cpu_bytes // 4)
        self._identity = self.identity()

    def renew(self) -> None:
        """Look at the weights again: what other weights computed is not found any more."""
        identity = self.identity()
        if identity != self._identity:
            log.info("the weights have changed: records of the old ones are not used any more")
            self._identity = identity
            self._pipelines.clear()
            self.epoch += 1

    def pipeline(self, lora: str) -> Pipeline:
        """The pipeline of the base model ("") or of one loaded adapter."""
        found = self._pipelines.get(lora)
        if found is None:
            # The engine gives an adapter another id each time it is loaded.
            identity = replace(self._identity, lora=lora, lora_version=lora)

            def made(salt: str) -> Namespace:
                return namespace(identity, salt)

            found = self._pipelines[lora] = Pipeline(
                self.store,
                self.config,
                made,
                bytes_per_token=self.geometry.bytes_per_token,
                packed_bytes_per_token=bytes_in_format(self.geometry, self.config.local_format),
                # What isn't blended is restored as one chain, which separators would cut.
                separators=None if lora else self.separators,
            )
        return found

    def settings(self, tenant: Tenant) -> BlendSettings:
        """How this tenant's prompts are blended."""
        return settings(self.config, tenant.options)

    def settle(self, *, wait: bool = False) -> None:
        """Publish what has been copied. Several ranks wait for it, so that it happens in the same call on all."""
        self.streams.poll(wait=wait or self.ranks.size > 1)

    def peek(self) -> None:
        """Publish what has been copied, where no other rank has to do the same in the same call."""
        if self.ranks.size == 1:
            self.streams.poll()

    def blends(self, tenant: Tenant) -> bool:
        """Whether this tenant's prompts may be blended. Adapters change the layers, and the runner has the base's."""
        return self.model is not None and tenant.options.reuse and not tenant.lora

    def look(
        self, tokens: Tokens, tenant: Tenant, *, held: int, exact: bool, limit: int, blend: bool
    ) -> Outlook | None:
        """Plan a prompt of which the engine holds ``held`` tokens (``exact``: none of them blended) and of which at
        most ``limit`` may be filled; None when it can't be planned. The leases are the caller's to release."""
        blend = blend and self.blends(tenant)
        prepared, run, fitting = None, None, 0
        try:
            prepared = self.pipeline(tenant.lora).prepare(
                tokens, tenant.options, engine_prefix=held, prefix_exact=exact, blend=blend
            )
            cached = prepared.plan.positions(SpanKind.EXACT, SpanKind.REUSED)
            if blend and cached.size and cached[-1] >= prepared.plan.lead:
                run = head(prepared.plan, min(len(tokens), limit + self.page_size + TAIL))
                wanted = self.settings(tenant)
                whole = whole_layers(wanted, self.geometry.layers)
                fitting = self.budget.fit(run, wanted.ratios[-1], whole_layers=whole)
        except Exception as error:
            self.metrics.event("fallback")
            log.warning("looking a prompt up failed: %s", f"{type(error).__name__}: {error}")
        agreed = self.ranks.agreed(None if prepared is None else prepared.plan, fitting)
        if prepared is None:
            return None
        if agreed is None:
            self.metrics.event("ranks_differ")
            prepared.plan = computed_from(prepared.plan, held)
            return Outlook(prepared, None, held, False)
        if run is None:
            target = min(prepared.plan.lead, limit) // self.page_size * self.page_size
            return Outlook(prepared, None, max(target, held), False)
        before = run.context
        if agreed < run.ntokens:
            run = head(run, agreed) if agreed else computed_from(run, held)
        prepared.plan = computed_from(prepared.plan, run.ntokens)
        target = min(run.ntokens - 1, limit) // self.page_size * self.page_size if run.context else held
        return Outlook(prepared, run, max(target, held), run.reused > 0, before - run.context)

    def again(self, outlook: Outlook, tenant: Tenant, *, held: int, exact: bool) -> bool:
        """Whether what `look` said, and whose leases were released, still holds for this prefix; it is leased again."""
        prepared = outlook.prepared
        well = prepared.plan.prefix == held and prepared.prefix_exact == exact
        try:
            well = well and self.pipeline(tenant.lora).renew(prepared)
        except Exception as error:
            well = False
            log.warning("leasing records failed: %s", f"{type(error).__name__}: {error}")
        if self.ranks.all(well):
            return True
        if well:
            prepared.release()
        return False

    def fill(self, outlook: Outlook, tenant: Tenant, held: Tensor, slots: Tensor, start: int) -> None:
        """Put KV of tokens [start, target) into ``slots`` int64. ``held`` int64 are the slots of the engine-held
        prefix, which may reach behind ``start``: those tokens are copied. The outlook's leases are released when its
        records are no longer read, or here if this raises."""
        try:
            self._fill(outlook, tenant, held, slots, start)
        except BaseException:
            outlook.prepared.release()
            raise

    def _fill(self, outlook: Outlook, tenant: Tenant, held: Tensor, slots: Tensor, start: int) -> None:
        prepared, run = outlook.prepared, outlook.run
        plan, how, recomputed = run or prepared.plan, "", 0
        records = LeaseRecords(self.geometry, prepared.where)
        self._open(records, plan)

        def done(milliseconds: float, read: LeaseRecords = records) -> None:
            del read  # held until now: the device has read them
            prepared.release()
            if run is not None:
                self.budget.observe(self._rows(run, tenant), milliseconds)
            rest = prepared.plan.ntokens - plan.ntokens
            self.report(
                Served(
                    request=tenant.name,
                    prompt=prepared.plan.ntokens,
                    prefix=plan.prefix,
                    exact=plan.exact,
                    reused=plan.reused - recomputed,
                    recomputed=recomputed,
                    fresh=plan.fresh + rest,
                    milliseconds=milliseconds,
                    how=how,
                    cut=outlook.cut,
                )
            )

        with self.streams.filling(done), torch.inference_mode():
            if run is not None and self.model is not None:
                wanted = self.settings(tenant)
                if outlook.cut:
                    wanted = without_question(wanted)
                how = describe(wanted)
                self.model.hold(held)
                ids = sent(torch.from_numpy(prepared.tokens[: run.ntokens].astype(np.int64)), self.geometry.device)
                result = BlendRunner(self.model).run(ids, run, records, wanted, wait=False)
                kv, recomputed = result.kv, result.recomputed
            else:
                spans = [span for span in plan.spans if span.kind is SpanKind.EXACT and span.stop <= plan.lead]
                kv = restore(self.geometry, records, spans, plan.lead, wait=False)
            carried = plan.prefix - start
            if carried:
                self.copies.rows.copy(held[start:], slots[:carried])
            self.copies.rows.scatter(slots[carried:], kv, plan.prefix)

    def _open(self, records: LeaseRecords, plan: BlendPlan) -> None:
        """Hold the bytes of every record before anything runs: a rank that fails later keeps the others waiting."""
        failure = ""
        try:
            for chunk in {span.chunk for span in plan.spans if span.kind in (SpanKind.EXACT, SpanKind.REUSED)}:
                records.kept(chunk)
        except Exception as error:
            # As text: the error's frames would hold the records' pins.
            failure = f"{type(error).__name__}: {error}"
        if not self.ranks.all(not failure):
            raise Unreadable(failure or "a record of another rank can't be read")

    def keep(self, prepared: Prepared, tenant: Tenant, slots: Tensor, done: Callable[[], None]) -> None:
        """Copy what this prompt computed and the store lacks out of ``slots`` [n], the KV of its first n tokens, and
        publish it when the copies have finished. ``done()`` is called when the slots are no longer read.

        Ranks that pack records wait for the copies here: what a format doesn't hold on one of them none stores, or the
        ranks would not find the same records any more."""
        voting = self.ranks if self.config.local_format != "raw" else Ranks()
        if self.ranks.size > 1:
            # Whatever each of them has to store: what was looked up is looked up again by all or by none.
            self.epoch += 1
        try:
            capture = self.pipeline(tenant.lora).capture(prepared)
            capture.limit(len(slots))
            chunks = list(capture.chunks())
        except Exception as error:
            voting.all(False)
            self._not_stored(error)
            done()
            return
        nbytes = self.copies.admit(chunks)
        if not chunks or nbytes is None:
            voting.all(not chunks)
            capture.abort()
            self.metrics.event("not_stored", len(chunks))
            done()
            return

        packing: Packing[Writable] | None = None

        def publish(read: Tensor = slots) -> None:
            del read  # held until now: the copies have read it on another stream than its own
            self.copies.finished(nbytes)
            if self.ranks.size == 1:
                self.epoch += 1
            wrong = [] if packing is None else packing.refused()
            refused = wrong if voting.size == 1 or voting.all(not wrong) else chunks
            try:
                self.metrics.event("stored", capture.commit(without=refused))
                if wrong:
                    self._not_stored(FormatError(WRONG))
                elif refused:
                    self.metrics.event("not_stored", len(chunks))
            except Exception as error:
                capture.abort()
                self._not_stored(error)
            done()

        try:
            with self.streams.copying(publish), torch.inference_mode():
                packing = self.copies.start(chunks, slots)
        except Exception as error:
            voting.all(False)
            self.copies.finished(nbytes)
            capture.abort()
            self._not_stored(error)
            done()
            return
        if voting.size > 1:
            self.streams.poll(wait=True)

    def report(self, served: Served) -> None:
        """Count one prompt and log it."""
        self.metrics.served(served)
        self.metrics.event("cut", bool(served.cut))
        log.info("blendstore: %s", served.line())

    def _rows(self, run: BlendPlan, tenant: Tenant) -> float:
        wanted = self.settings(tenant)
        return rows(run, wanted.ratios[-1], whole_layers=whole_layers(wanted, self.geometry.layers))

    def _not_stored(self, error: Exception) -> None:
        self.metrics.event("store_error")
        # As text: a handler that keeps records would keep the error, its frames and the pins in them.
        log.warning("documents were not stored: %s", f"{type(error).__name__}: {error}")
