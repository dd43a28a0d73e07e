"""Counters of a serving adapter, and the same for Prometheus where the engine exports it.

In Prometheus every number is a series of this process; engines that gather several processes sum the counters.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._core import Store

if TYPE_CHECKING:
    from .serving import Served

KINDS = ("prefix", "exact", "reused", "recomputed", "fresh")
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_STORE_GAUGES = ("bytes_used", "bytes_capacity", "bytes_pinned", "chunks")
_TIER_GAUGES = ("records", "bytes_used", "bytes_capacity", "queued", "queued_bytes", "in_flight")
_STORE_COUNTERS = ("lookups", "hits", "stored", "evicted", "rejected_full")


class ServingMetrics:
    """Counts by name; thread-safe. With ``prometheus`` they are registered there too, once a process."""

    def __init__(self, *, prometheus: bool, rank: int = 0) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """``prompts``, ``blended``, tokens by kind, and events by name."""
        self._seen: Counter[str] = Counter()
        self._rank = str(rank)
        self._exported: dict[str, Any] = _registered() if prometheus else {}

    def served(self, report: Served) -> None:
        """One prompt whose KV is in place."""
        with self._lock:
            self.counts["prompts"] += 1
            self.counts["blended"] += bool(report.reused + report.recomputed)
            for kind in KINDS:
                self.counts[kind] += getattr(report, kind)
        if self._exported:
            outcome = "blended" if report.reused + report.recomputed else "exact" if report.exact else "computed"
            self._exported["prompts"].labels(self._rank, outcome).inc()
            for kind in KINDS:
                self._exported["tokens"].labels(self._rank, kind).inc(getattr(report, kind))
            if outcome != "computed":
                self._exported["seconds"].labels(self._rank, outcome).observe(report.milliseconds / 1e3)

    def event(self, name: str, count: int = 1) -> None:
        """Something that happened, like ``fallback``, ``cut`` or ``store_error``."""
        if not count:
            return
        with self._lock:
            self.counts[name] += count
        if self._exported:
            self._exported["events"].labels(self._rank, name).inc(count)

    def blending(self, on: bool) -> None:
        """Whether this model is blended at all."""
        if self._exported:
            self._exported["blending"].labels(self._rank).set(int(on))

    def store(self, store: Store) -> None:
        """Take over the store's own counters and gauges."""
        if self._exported:
            self.stored(store.stats(), store.tier_stats())

    def stored(self, stats: Mapping[str, float], tiers: Mapping[str, Mapping[str, int]] | None = None) -> None:
        """The same from `Store.stats` and `Store.tier_stats`, perhaps of another process."""
        if not self._exported:
            return
        for name in _STORE_GAUGES:
            self._exported["store"].labels(self._rank, name).set(stats[name])
        for name in _STORE_COUNTERS:
            grown = int(stats[name]) - self._seen[name]
            if grown > 0:
                self._seen[name] += grown
                self._exported["store_events"].labels(self._rank, name).inc(grown)
        for tier, counts in (tiers or {}).items():
            for name, count in counts.items():
                self._tier(tier, name, count)

    def _tier(self, tier: str, name: str, count: int) -> None:
        if name in _TIER_GAUGES:
            self._exported["tier"].labels(self._rank, tier, name).set(count)
            return
        seen = f"{tier} {name}"
        grown = count - self._seen[seen]
        if grown <= 0:
            return
        self._seen[seen] += grown
        operation = name.removesuffix("_nanoseconds")
        if operation != name:
            self._exported["tier_seconds"].labels(self._rank, tier, operation).inc(grown / 1e9)
        else:
            self._exported["tier_events"].labels(self._rank, tier, name).inc(grown)


_exported: dict[str, Any] = {}


def _registered() -> dict[str, Any]:
    """The series; made late, because prometheus_client decides at its import where several processes meet."""
    if not _exported:
        from prometheus_client import Counter as Count
        from prometheus_client import Gauge, Histogram

        rank = ["tp_rank"]
        _exported.update(
            prompts=Count("blendstore_prompts", "Prompts by where their KV came from.", [*rank, "outcome"]),
            tokens=Count("blendstore_prompt_tokens", "Prompt tokens by where their KV came from.", [*rank, "kind"]),
            events=Count("blendstore_events", "Fallbacks, cuts, refusals and errors by name.", [*rank, "event"]),
            seconds=Histogram(
                "blendstore_restore_seconds",
                "Time to put a prompt's KV in place: restoring, recomputing, computing between.",
                [*rank, "outcome"],
                buckets=_BUCKETS,
            ),
            blending=Gauge(
                "blendstore_blending", "1 where this model is blended.", rank, multiprocess_mode="mostrecent"
            ),
            store=Gauge(
                "blendstore_store", "Gauges of the store by name.", [*rank, "gauge"], multiprocess_mode="mostrecent"
            ),
            store_events=Count("blendstore_store_events", "Counters of the store by name.", [*rank, "event"]),
            tier=Gauge(
                "blendstore_tier",
                "Gauges of the tiers below memory by name.",
                [*rank, "tier", "gauge"],
                multiprocess_mode="mostrecent",
            ),
            tier_events=Count(
                "blendstore_tier_events", "Counters of the tiers below memory by name.", [*rank, "tier", "event"]
            ),
            tier_seconds=Count(
                "blendstore_tier_seconds", "Time in reads and writes of a tier.", [*rank, "tier", "operation"]
            ),
        )
    return _exported
