"""Cases from the field for tiers below memory: f01, f04, f05, f06, s13, c02, and how Python uses them."""

from __future__ import annotations

import asyncio
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blendstore import Namespace, Store
from blendstore._core import StoreError, Tier
from blendstore.config import Config, ConfigError
from blendstore.metrics import ServingMetrics
from blendstore.options import RequestOptions
from blendstore.pipeline import Pipeline
from blendstore.tiers import open_store
from tests.records import (
    BYTES_PER_TOKEN,
    CHUNK,
    IDLE,
    array,
    contents,
    look,
    put,
    reserve,
    settled,
    tenant,
    text,
    wanted,
)

NS = tenant()
LONG = 60.0
PENDING, RESIDENT, LOADED, MISSED, CANCELLED = range(5)


def over(directory: Path, *, memory: int = 1 << 20) -> Store:
    """A small store above a disk tier of 64 MiB."""
    tier = Tier.disk([directory], capacity_bytes=64 << 20)
    return Store(capacity_bytes=memory, chunk_size=CHUNK, tiers=[tier])


def refilled(directory: Path, *documents: int) -> Store:
    """A store whose documents of 4 chunks lie on disk only."""
    with_them = over(directory)
    for seed in documents:
        put(with_them, NS, text(seed, 4 * CHUNK), fill=seed)
    with_them.close()
    return over(directory)


def keys(seed: int, namespace: Namespace = NS) -> bytes:
    return namespace.chain_keys(text(seed, 4 * CHUNK), chunk_size=CHUNK)


def outcomes(store: Store, packed: bytes, namespace: Namespace = NS) -> list[int]:
    ticket = store.prefetch(namespace, packed)
    assert ticket.wait(LONG)
    return list(ticket.outcomes)


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "blendstore-v1").glob("*.seg"))


def test_case_f06_a_restart_finds_every_record(tmp_path: Path) -> None:
    """What was stored before the process ended is there for the next one, bytes and facts alike."""
    first = over(tmp_path)
    put(first, NS, text(1, 4 * CHUNK + 5), fill=7, source_position=40, behind=bytes(range(32)), behind_tokens=9)
    with look(first, NS, text(1, 4 * CHUNK + 5)) as lease:
        told = [lease.meta(index) for index in range(len(lease))]
    assert first.flush(LONG)
    first.close()
    second = over(tmp_path)
    packed = NS.chain_keys(text(1, 4 * CHUNK + 5), chunk_size=CHUNK)
    assert list(second.tier_of(packed + bytes(32))) == [1] * 5 + [255]
    assert outcomes(second, packed) == [LOADED] * 5
    assert list(second.tier_of(packed)) == [0] * 5
    with look(second, NS, text(1, 4 * CHUNK + 5)) as lease:
        assert [bytes(view) if view else None for view in contents(lease)] == [
            bytes([7]) * BYTES_PER_TOKEN * count for count in (16, 16, 16, 16, 5)
        ]
        for index, before in enumerate(told):
            after = lease.meta(index)
            assert before is not None
            assert after is not None
            for name in ("key", "source_position", "ntokens", "provenance", "rank", "context", "behind",
                         "behind_tokens", "nbytes", "segment_offset"):  # fmt: skip
                assert getattr(after, name) == getattr(before, name)
    assert settled(second) == IDLE


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    for at in range(4096, len(content), 512):
        content[at] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": lambda file: file.unlink(),
    "truncated": lambda file: file.open("r+b").truncate(5000),
    "flipped": _flip,
    "a pickle": lambda file: file.write_bytes(b"\x80\x04\x95" + bytes(8000)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_case_f05_damaged_files_are_misses(tmp_path: Path, damage: str) -> None:
    """Whatever happens to the files costs records, never wrong bytes, and the store works on."""
    for file in segments_of_two_documents(tmp_path):
        DAMAGE[damage](file)
    store = over(tmp_path)
    assert set(outcomes(store, keys(1) + keys(2))) <= {LOADED, MISSED}
    for seed in (1, 2):
        with look(store, NS, text(seed, 4 * CHUNK)) as lease:
            for content in contents(lease):
                assert content in (None, bytes([seed]) * CHUNK * BYTES_PER_TOKEN)
    put(store, NS, text(3, 4 * CHUNK), fill=3)
    assert store.flush(LONG)
    store.close()
    assert outcomes(over(tmp_path), keys(3)) == [LOADED] * 4


def segments_of_two_documents(directory: Path) -> list[Path]:
    refilled(directory, 1, 2).close()
    found = segments(directory)
    assert found
    return found


def test_case_f01_a_read_that_fails_is_a_miss_and_counted(tmp_path: Path) -> None:
    store = refilled(tmp_path, 1, 2)
    _flip(segments(tmp_path)[0])
    assert outcomes(store, keys(1)) == [MISSED] * 4
    stats = store.tier_stats()
    assert stats["disk"]["error_damaged"] == 4
    assert (stats["loads"]["missed"], stats["loads"]["in_flight"]) == (4, 0)


def test_case_s13_tenants_share_nothing_on_disk(tmp_path: Path) -> None:
    """Another tenant finds nothing by its own keys, nothing by stolen ones, and clears only its own."""
    other = tenant("another")
    store = refilled(tmp_path, 1)
    put(store, other, text(1, 4 * CHUNK), fill=2)
    assert store.flush(LONG)
    assert outcomes(store, keys(1), other) == [MISSED] * 4
    store.clear(other)
    assert list(store.tier_of(keys(1, other))) == [255] * 4
    assert outcomes(store, keys(1)) == [LOADED] * 4
    store.close()
    again = over(tmp_path)
    assert list(again.tier_of(keys(1, other) + keys(1))) == [255] * 4 + [1] * 4
    for file in segments(tmp_path):
        assert NS.digest not in file.read_bytes(), "the digest, from which keys are made, stays in the process"


def test_a_ticket_is_waited_for_without_a_thread(tmp_path: Path) -> None:
    """Its descriptor works with select and with asyncio, whether the load has ended before or not."""
    store = refilled(tmp_path, 1, 2)
    ticket = store.prefetch(NS, keys(1))
    assert select.select([ticket], [], [], LONG)[0] == [ticket]
    assert ticket.poll()
    assert list(ticket.outcomes) == [LOADED] * 4

    async def load() -> bytes:
        ended = asyncio.Event()
        with store.prefetch(NS, keys(2) + bytes(32)) as ticket:
            loop = asyncio.get_running_loop()
            loop.add_reader(ticket.fileno(), ended.set)
            await asyncio.wait_for(ended.wait(), LONG)
            loop.remove_reader(ticket.fileno())
            return ticket.outcomes

    assert list(asyncio.run(load())) == [LOADED] * 4 + [MISSED]
    assert store.prefetch(NS, keys(1)).outcomes == bytes([RESIDENT]) * 4


def test_a_ticket_keeps_what_it_brought(tmp_path: Path) -> None:
    """Between the load and the lookup nothing else may push the records out; afterwards it may."""
    refilled(tmp_path, 1).close()
    store = over(tmp_path, memory=8 << 10)
    ticket = store.prefetch(NS, keys(1))
    assert ticket.wait(LONG)
    for seed in range(2, 12):
        put(store, NS, text(seed, 4 * CHUNK))
    assert store.contains(keys(1)) == bytes([1]) * 4
    del ticket
    for seed in range(12, 22):
        put(store, NS, text(seed, 4 * CHUNK))
    assert store.contains(keys(1)) == bytes(4)


def test_a_directory_in_use_is_refused_with_the_owner(tmp_path: Path) -> None:
    store = over(tmp_path)
    with pytest.raises(StoreError, match="in use by process"):
        over(tmp_path)
    config = Config.load(env={}, overrides={"local_disk": str(tmp_path), "max_local_disk_size": 0.1})
    with pytest.raises(ConfigError, match=r"local_disk: .* \(argument\) can't be used: .* in use by process"):
        open_store(config)
    del store
    again = open_store(config)
    assert again.tiers == ("disk",)
    assert open_store(config, rank=1).tiers == ("disk",), "each rank has its own"
    assert open_store(Config.load(env={})).tiers == ()


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from blendstore.config import Config
from blendstore.tiers import open_store
from tests.records import CHUNK, put, tenant, text
given = {{"local_disk": {directory!r}, "max_local_disk_size": 0.1, "chunk_size": CHUNK}}
config = Config.load(env={{}}, overrides=given)
store = open_store(config)
for seed in range(50):
    put(store, tenant(), text(seed, 4 * CHUNK), fill=seed)
"""


def test_a_process_that_ends_has_written_what_it_stored(tmp_path: Path) -> None:
    """The end of the interpreter is waited for by the queue, and hangs nowhere."""
    program = PROGRAM.format(path=sys.path, directory=str(tmp_path))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    store = over(tmp_path)
    assert outcomes(store, b"".join(keys(seed) for seed in range(50))) == [LOADED] * 200


def serve(line: Pipeline, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> int:
    """One prompt; returns how many of its tokens came from the store."""
    with line.prepare(tokens, RequestOptions()) as prepared:
        capture = line.capture(prepared)
        for chunk in capture.chunks():
            array(chunk.reservation.buffer(chunk.index))[:] = 5
        capture.commit()
        return int(np.count_nonzero(prepared.plan.token_kinds == 1))


def test_a_prompt_finds_what_an_earlier_process_computed(tmp_path: Path) -> None:
    """The pipeline waits for lower tiers within the configured time; what is late is there for the next."""
    tokens = text(1, 4 * CHUNK)
    given = {"chunk_size": CHUNK, "save_unfull_chunk": True}
    patient = Config.load(env={}, overrides={**given, "tier_wait_ms": LONG * 1e3})
    hasty = Config.load(env={}, overrides={**given, "tier_wait_ms": 0})

    def line(store: Store, config: Config) -> Pipeline:
        return Pipeline(store, config, tenant, bytes_per_token=BYTES_PER_TOKEN)

    first = over(tmp_path)
    assert serve(line(first, patient), tokens) == 0
    first.close()
    second = over(tmp_path)
    assert serve(line(second, patient), np.concatenate([tokens, text(9, 20)])) == len(tokens)
    assert second.flush(LONG), "what waits to be written is pinned"
    assert settled(second) == IDLE
    second.close()
    third = over(tmp_path)
    hurried = line(third, hasty)
    found = serve(hurried, tokens)
    assert found in {*range(0, len(tokens), CHUNK), len(tokens) - 1}, (
        "what has come by then; the last token is computed"
    )
    assert third.prefetch(tenant(""), NS.chain_keys(tokens, chunk_size=CHUNK, head=True)).wait(LONG)
    for ticket in hurried._late:
        assert ticket.wait(LONG)
    assert serve(hurried, tokens) == len(tokens) - 1


def test_what_has_no_room_in_the_queue_is_written_later(tmp_path: Path) -> None:
    """A burst larger than the queue reaches the disk while memory has it."""
    store = over(tmp_path, memory=1 << 21)
    for seed in range(100):
        put(store, NS, text(seed, 4 * CHUNK), fill=seed)
    assert store.flush(LONG)
    stats = store.tier_stats()["disk"]
    assert (stats["queued"], stats["queued_bytes"], stats["dropped"]) == (0, 0, 0)
    assert stats["puts"] == 400


def test_scores_survive_the_disk(tmp_path: Path) -> None:
    first = over(tmp_path)
    reservation = reserve(first, NS, text(1, CHUNK), with_scores=True)
    for index in wanted(reservation):
        array(reservation.buffer(index))[:] = 1
        reservation.set_scores(index, np.arange(CHUNK, dtype=np.float32))
    reservation.commit()
    first.close()
    second = over(tmp_path)
    assert outcomes(second, NS.chain_keys(text(1, CHUNK), chunk_size=CHUNK)) == [LOADED]
    with look(second, NS, text(1, CHUNK)) as lease:
        scores = lease.scores(0)
        assert scores is not None
        assert np.frombuffer(memoryview(scores), dtype=np.float32).tolist() == list(range(CHUNK))


class Series:
    """What a test needs of a series of Prometheus."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, ...]] = Counter()
        self._at: tuple[str, ...] = ()

    def labels(self, *at: str) -> Series:
        self._at = at
        return self

    def set(self, value: float) -> None:
        self.values[self._at] = value  # type: ignore[assignment]

    def inc(self, value: float) -> None:
        self.values[self._at] += value  # type: ignore[assignment]


def test_tiers_are_told_to_prometheus_once(tmp_path: Path) -> None:
    """Gauges are what they are, counters grow by what was added since the last look."""
    metrics = ServingMetrics(prometheus=False)
    series = {name: Series() for name in ("store", "store_events", "tier", "tier_events", "tier_seconds")}
    metrics._exported = series
    store = over(tmp_path)
    put(store, NS, text(1, 4 * CHUNK))
    assert store.flush(LONG)
    outcomes(store, keys(1) + keys(2))
    for _ in range(2):
        metrics.store(store)
    assert series["tier"].values["0", "disk", "records"] == 4
    events = series["tier_events"].values
    assert (events["0", "disk", "puts"], events["0", "disk", "misses"], events["0", "loads", "missed"]) == (4, 4, 4)
    assert 0 < series["tier_seconds"].values["0", "disk", "put"] < LONG
