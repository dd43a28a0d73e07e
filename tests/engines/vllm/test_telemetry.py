"""Counters travel from the worker to the front end as plain values, and add up there."""

from blendstore import Store
from blendstore.serving import Served
from blendstore_vllm.telemetry import Recorder, Told


def report(name: str, reused: int, milliseconds: float) -> Served:
    return Served(name, reused + 10, 0, 0, reused, 0, 10, milliseconds, how="query 0.1")


def test_each_thing_is_told_once_and_nothing_is_told_of_nothing() -> None:
    metrics = Recorder()
    assert metrics.take() is None
    metrics.served(report("a", 90, 5.0))
    metrics.event("stored", 3)
    metrics.event("fallback", 0)
    told = metrics.take()
    assert told is not None
    assert [Served(**row) for row in told.data["served"]] == [report("a", 90, 5.0)]
    assert told.data["events"] == {"stored": 3}
    assert metrics.take() is None
    metrics.blending(False)
    told = metrics.take()
    assert told is not None
    assert told.data["blending"] == 0
    assert metrics.counts["stored"] == 3, "the worker keeps its own"


def test_steps_add_up() -> None:
    metrics, total = Recorder(), Told()
    store = Store(capacity_bytes=1 << 20, chunk_size=16, policy="lru")
    for step in range(3):
        metrics.served(report(f"r{step}", 100, 2.0 + step))
        metrics.event("stored", 2)
        metrics.store(store)
        told = metrics.take()
        assert told is not None
        assert total.aggregate(Told(data=told.data)) is total
    assert total.reduce() == {
        "prompts": 3,
        "prompts from the store": 3,
        "tokens reused": 300,
        "tokens recomputed": 0,
        "median ms": 3.0,
        "stored": 6,
    }
    assert total.data["store"]["bytes_capacity"] == 1 << 20
    total.reset()
    assert total.is_empty()
