"""The store from Python against its bars: lookups, records against memcpy, two readers, metadata, the matcher.

``python benches/bench_store.py [--json FILE] [--quick]``. Each row is the median of repeated runs with its quartiles.
Times against memcpy are taken alternately in the same process, so a noisy machine hits both alike.
"""

import argparse
import hashlib
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blendstore import Namespace, Store, __version__

CHUNK = 256
MIB = 1 << 20
NAMESPACE = Namespace([("model", b"bench")], salt=b"salt")

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number; ``bar`` is what it must reach (at least or at most, by ``bar_is``)."""

    what: str
    unit: str
    median: float
    low: float
    high: float
    runs: int
    bar: float | None = None
    bar_is: str = ""

    @property
    def met(self) -> bool | None:
        """None without a bar."""
        if self.bar is None:
            return None
        return self.median <= self.bar if self.bar_is == "at most" else self.median >= self.bar


def summary(
    what: str, unit: str, values: Sequence[float], *, at_most: float | None = None, at_least: float | None = None
) -> Row:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    bar, bar_is = (at_most, "at most") if at_most is not None else (at_least, "at least" if at_least else "")
    return Row(what, unit, median, low, high, len(values), bar, bar_is)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def document(seed: int, nchunks: int) -> Tokens:
    """Tokens of a document like no other."""
    return np.random.default_rng(seed).integers(0, 1 << 17, nchunks * CHUNK, dtype=np.uint32)


def fill(store: Store, seeds: range, nchunks: int, bytes_per_token: int = 1) -> None:
    for seed in seeds:
        store.reserve(
            NAMESPACE,
            document(seed, nchunks),
            bytes_per_token=bytes_per_token,
            source_position=0,
            provenance=1,
            rank=1,
        ).commit()


def bench_lookup(quick: bool) -> list[Row]:
    """A prompt of 128 chunks, all hits, keys built from the tokens in the same call."""
    ndocuments = 100 if quick else 800
    store = Store(capacity_bytes=ndocuments * 128 * 2048, max_chunks=ndocuments * 128 + 64)
    fill(store, range(ndocuments), 128)
    rows = []
    for name, bounds in (
        ("one segment", np.array([[0, 128 * CHUNK]])),
        ("16 documents", np.array([[start * CHUNK, (start + 8) * CHUNK] for start in range(0, 128, 8)])),
    ):
        prompts = [document(seed, 128) for seed in range(8)]
        if name == "16 documents":
            for prompt in prompts:
                for start, stop in bounds:
                    store.reserve(
                        NAMESPACE, prompt[start:stop], bytes_per_token=1, source_position=0, provenance=1, rank=1
                    ).commit()
        times = []
        for run in range(400 if quick else 4000):
            prompt = prompts[run % len(prompts)]
            start = time.perf_counter()
            lease = store.lookup_segments(NAMESPACE, prompt, bounds)
            times.append(1e6 * (time.perf_counter() - start))
            assert lease.hits.count(1) == 128
            lease.release()
        what = f"lookup of 128 chunks with key building, all hits, {name}, {ndocuments * 128:,} chunks resident"
        rows.append(summary(what, "µs", times, at_most=60.0))
    return rows


def bench_records(quick: bool) -> list[Row]:
    """Records of 1 MiB against memcpy of as many bytes, everything larger than the caches and touched before."""
    nrecords = 64 if quick else 256
    size = nrecords * MIB
    store = Store(capacity_bytes=size + nrecords * (MIB // 64))
    source = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    target = np.ones(size, dtype=np.uint8)
    payloads, targets = source.reshape(nrecords, MIB), target.reshape(nrecords, MIB)

    def write(seed: int) -> None:
        reservation = store.reserve(
            NAMESPACE, document(seed, nrecords), bytes_per_token=MIB // CHUNK, source_position=0, provenance=1, rank=1
        )
        for index in range(nrecords):
            np.copyto(np.frombuffer(memoryview(reservation.buffer(index)), dtype=np.uint8), payloads[index])
        assert reservation.commit() == nrecords

    def read(tokens: Tokens, bounds: npt.NDArray[np.int64]) -> None:
        with store.lookup_segments(NAMESPACE, tokens, bounds) as lease:
            for index in range(nrecords):
                lease.read_into(index, targets[index])

    def memcpy() -> None:
        for index in range(nrecords):
            np.copyto(targets[index], payloads[index])

    bounds = np.array([[0, nrecords * CHUNK]])
    write(0)
    write(1)
    speed: dict[str, list[float]] = {"write": [], "read": [], "memcpy": []}
    shares: dict[str, list[float]] = {"write": [], "read": []}
    for run in range(7 if quick else 15):
        tokens = document(run + 2, nrecords)
        times = {
            "write": seconds(lambda seed=run + 2: write(seed)),  # type: ignore[misc]
            "memcpy": seconds(memcpy),
            "read": seconds(lambda tokens=tokens: read(tokens, bounds)),  # type: ignore[misc]
        }
        for name, took in times.items():
            speed[name].append(size / took / 1e9)
        for name, values in shares.items():
            values.append(100 * times["memcpy"] / times[name])
    assert targets[-1].tobytes() == payloads[-1].tobytes()
    return [
        summary("memcpy of 1 MiB blocks", "GB/s", speed["memcpy"]),
        summary("reserve + write + commit of 1 MiB records, evicting", "GB/s", speed["write"]),
        summary("the same, share of memcpy", "%", shares["write"], at_least=80.0),
        summary("lookup + read of 1 MiB records", "GB/s", speed["read"]),
        summary("the same, share of memcpy", "%", shares["read"], at_least=80.0),
    ]


def scalings(works: dict[str, Callable[[int], object]], runs: int) -> dict[str, list[float]]:
    """How much more two threads do in the time of one, for each kind of work in turn; a thread is told its number."""

    def both(work: Callable[[int], object]) -> float:
        barrier = threading.Barrier(3)

        def one(number: int) -> None:
            barrier.wait()
            work(number)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    found: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + 1):
        for name, work in works.items():
            alone = seconds(lambda: [work(0), work(1)])  # noqa: B023, called at once
            together = both(work)
            if run:  # the first one warms up
                found[name].append(alone / together)
    return found


def bench_threads(quick: bool) -> list[Row]:
    """Two threads that read bytes, and two that look up, in turn with two that share nothing: memcpy and a hash show
    what the machine's memory and cores allow at the time."""
    nrecords = 32
    runs = 5 if quick else 15
    store = Store(capacity_bytes=2 * nrecords * (MIB + MIB // 64))
    fill(store, range(2), nrecords, MIB // CHUNK)
    prompts = [document(seed, nrecords) for seed in range(2)]
    bounds = np.array([[0, nrecords * CHUNK]])
    source = np.ones((2, nrecords, MIB), dtype=np.uint8)
    targets = np.ones((2, MIB), dtype=np.uint8)

    def read(number: int) -> None:
        for _ in range(8):
            with store.lookup_segments(NAMESPACE, prompts[number], bounds) as lease:
                for index in range(nrecords):
                    lease.read_into(index, targets[number])

    def memcpy(number: int) -> None:
        for _ in range(8):
            for index in range(nrecords):
                np.copyto(targets[number], source[number, index])

    long_store = Store(capacity_bytes=1 << 28)
    fill(long_store, range(2), 512)
    long_prompts = [document(seed, 512) for seed in range(2)]
    long_bounds = np.array([[0, 512 * CHUNK]])

    def look(number: int) -> None:
        for _ in range(200):
            long_store.lookup_segments(NAMESPACE, long_prompts[number], long_bounds).release()

    def hashing(number: int) -> None:
        for _ in range(8):
            hashlib.sha256(source[number]).digest()

    found = scalings({"read": read, "memcpy": memcpy, "look": look, "hashing": hashing}, runs)

    def share(name: str, of: str) -> list[float]:
        return [100 * a / b for a, b in zip(found[name], found[of], strict=True)]

    return [
        summary("two threads, lookup + read of 1 MiB records", "×", found["read"], at_least=1.8),
        summary("two threads that share nothing, memcpy of the same bytes", "×", found["memcpy"]),
        summary("the first, share of the second", "%", share("read", "memcpy")),
        summary("two threads, lookups of 512 chunks with key building", "×", found["look"], at_least=1.8),
        summary("two threads that share nothing, hashes", "×", found["hashing"]),
        summary("the first, share of the second", "%", share("look", "hashing")),
    ]


def bench_metadata(quick: bool) -> list[Row]:
    """Metadata of a full store, and what a chunk costs that evicts another, in a small and in a large store."""
    rows = []
    for nchunks in (10_000, 100_000 if quick else 1_000_000):
        store = Store(capacity_bytes=(nchunks + 512) * 1536, max_chunks=nchunks)
        fill(store, range(nchunks // 500), 500)
        stats = store.stats()
        each = stats["metadata_bytes"] / stats["chunks"]
        if nchunks >= 100_000:
            rows.append(summary(f"metadata with keys, {stats['chunks']:,.0f} chunks", "bytes/chunk", [each]))
            bar = 160.0
            rows.append(summary("metadata beyond the 32-byte keys", "bytes/chunk", [each - 32], at_most=bar))
        times = []
        for seed in range(50):
            tokens = document(10_000_000 + seed, 100)
            begin = time.perf_counter()
            store.reserve(NAMESPACE, tokens, bytes_per_token=1, source_position=0, provenance=1, rank=1).commit()
            times.append(1e6 * (time.perf_counter() - begin) / 100)
        assert store.stats()["evicted"] >= 4000
        rows.append(summary(f"evict + publish a chunk, {nchunks:,} chunks resident", "µs", times))
        store.close()
        del store
    return rows


def bench_matcher(quick: bool) -> list[Row]:
    """A prompt of 32,768 tokens at any offset: all known, and all unknown."""
    nchunks = 10_000 if quick else 100_000
    store = Store(capacity_bytes=(nchunks + 512) * 1536, max_chunks=nchunks)
    fill(store, range(nchunks // 8), 8)
    lead = document(77_777_777, 1)[:11]
    known = np.concatenate([lead, *(document(seed, 8) for seed in range(16))])
    unknown = document(88_888_888, 128)
    runs = 20 if quick else 100
    rows = []
    for name, prompt in (("known", known), ("unknown", unknown)):
        times = [1e6 * seconds(lambda prompt=prompt: store.match(NAMESPACE, prompt)) for _ in range(runs)]  # type: ignore[misc]
        rows.append(summary(f"match of 32,768 {name} tokens, {nchunks:,} chunks resident", "µs", times))
    assert sum(match.stop - match.start for match in store.match(NAMESPACE, known)) == 32_768
    return rows


BENCHES = {
    "lookup": bench_lookup,
    "records": bench_records,
    "threads": bench_threads,
    "metadata": bench_metadata,
    "matcher": bench_matcher,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("which", nargs="*", choices=[*BENCHES, []], help="benches to run (all without)")
    parser.add_argument("--json", type=Path, help="write {command, versions, rows} to this file")
    parser.add_argument("--quick", action="store_true", help="smaller stores and fewer runs")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in options.which or BENCHES:
        for row in BENCHES[name](options.quick):
            rows.append(row)
            bar = "" if row.bar is None else f"   {'met' if row.met else 'MISSED'}: {row.bar_is} {row.bar:g}"
            print(f"{row.median:10.2f} [{row.low:.2f}, {row.high:.2f}] {row.unit:12} {row.what}{bar}", flush=True)
    if options.json:
        report = {
            "command": ["bench_store.py", *(arguments if arguments is not None else sys.argv[1:])],
            "versions": {
                "blendstore": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "machine": platform.machine(),
            },
            "rows": [{**asdict(row), "met": row.met} for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
