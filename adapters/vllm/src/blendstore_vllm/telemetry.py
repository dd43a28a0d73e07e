"""Counters on their way from the worker to the process that answers ``/metrics``, by the engine's own channel.

The series there are those of `blendstore.metrics`, the same as with other engines; ``tp_rank`` is the engine's number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from blendstore import Store
from blendstore.metrics import ServingMetrics
from blendstore.serving import Served


def _nothing() -> dict[str, Any]:
    return {"served": [], "events": {}, "store": {}, "tiers": {}, "blending": None}


@dataclass
class Told(KVConnectorStats):  # type: ignore[misc]
    """What happened in one step: prompts as fields of `Served`, events by name, the latest of store and tiers."""

    data: dict[str, Any] = field(default_factory=_nothing)

    def reset(self) -> None:
        """Forget it."""
        self.data = _nothing()

    def is_empty(self) -> bool:
        """Nothing happened."""
        return self.data["blending"] is None and not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Take what ``other`` tells, which is later."""
        self.data["served"] += other.data["served"]
        self.data["events"] = dict(Counter(self.data["events"]) + Counter(other.data["events"]))
        for name in ("store", "tiers"):
            self.data[name] = other.data[name] or self.data[name]
        if other.data["blending"] is not None:
            self.data["blending"] = other.data["blending"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the engine's periodic line in the log."""
        served = [Served(**row) for row in self.data["served"]]
        filled = [one for one in served if one.exact + one.reused + one.recomputed]
        return {
            "prompts": len(served),
            "prompts from the store": len(filled),
            "tokens reused": sum(one.exact + one.reused for one in filled),
            "tokens recomputed": sum(one.recomputed for one in filled),
            "median ms": round(median(one.milliseconds for one in filled), 1) if filled else 0.0,
            **self.data["events"],
        }


class Recorder(ServingMetrics):
    """The worker's counters, which also keeps what wasn't sent yet. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(prometheus=False)
        self._told = Told()

    def served(self, report: Served) -> None:
        super().served(report)
        with self._lock:
            self._told.data["served"].append(asdict(report))

    def event(self, name: str, count: int = 1) -> None:
        super().event(name, count)
        if count:
            with self._lock:
                events = self._told.data["events"]
                events[name] = events.get(name, 0) + int(count)

    def blending(self, on: bool) -> None:
        with self._lock:
            self._told.data["blending"] = int(on)

    def store(self, store: Store) -> None:
        stats = {name: value for name, value in store.stats().items() if isinstance(value, int | float)}
        tiers = store.tier_stats() if store.tiers else {}
        with self._lock:
            self._told.data["store"], self._told.data["tiers"] = stats, tiers

    def take(self) -> Told | None:
        """What happened since the last call, if anything."""
        if self._told.is_empty():
            return None
        with self._lock:
            told, self._told = self._told, Told()
        return told


class Prometheus(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counts what arrives in the process that answers ``/metrics``."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._metrics: dict[int, ServingMetrics] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what engine number ``engine_idx`` told."""
        metrics = self._metrics.get(engine_idx)
        if metrics is None:
            metrics = self._metrics[engine_idx] = ServingMetrics(prometheus=True, rank=engine_idx)
        for row in transfer_stats_data["served"]:
            metrics.served(Served(**row))
        for name, count in transfer_stats_data["events"].items():
            metrics.event(name, count)
        if transfer_stats_data["store"]:
            metrics.stored(transfer_stats_data["store"], transfer_stats_data["tiers"])
        if transfer_stats_data["blending"] is not None:
            metrics.blending(bool(transfer_stats_data["blending"]))
