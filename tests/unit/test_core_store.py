"""The store from Python: what is stored, what is found, what is counted, and that other threads run meanwhile."""

import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

import blendstore
from blendstore import LeaseExpired, Store, StoreError
from tests.records import (
    BYTES_PER_TOKEN,
    CHUNK,
    IDLE,
    array,
    concatenate,
    contents,
    idle,
    keys_of,
    look,
    put,
    reserve,
    small_store,
    store_of,
    tenant,
    text,
    whole,
)

NS = tenant()
FULL = CHUNK * BYTES_PER_TOKEN


def test_a_document_is_found_chunk_by_chunk_with_what_was_said_of_it() -> None:
    store = small_store()
    document = text(1, 2 * CHUNK + 3)
    contexts, behind = bytes(range(32)) * 3, bytes(64)
    reservation = reserve(
        store,
        NS,
        document,
        source_position=100,
        provenance=2,
        rank=7,
        contexts=contexts,
        behind=behind,
        behind_tokens=90,
    )
    assert len(reservation) == 3
    assert [reservation.bounds(index) for index in range(3)] == [(0, 16), (16, 32), (32, 35)]
    assert reservation.keys == NS.chain_keys(document, chunk_size=CHUNK)
    assert look(store, NS, document).hits == b"\0\0\0", "nothing is found before it is complete"
    for index in range(3):
        array(reservation.buffer(index))[:] = index
    assert reservation.commit() == 3

    prompt = concatenate([text(5, 11), document])
    lease = store.lookup_segments(NS, prompt, np.array([[0, 11], [11, len(prompt)]]))
    assert len(lease) == 4
    assert lease.hits == b"\0\1\1\1"
    assert lease.nbytes == len(document) * BYTES_PER_TOKEN
    assert contents(lease) == [None, b"\0" * FULL, b"\1" * FULL, b"\2" * (3 * BYTES_PER_TOKEN)]
    meta = lease.meta(3)
    assert meta is not None
    assert meta.key == keys_of(reservation.keys)[2]
    assert (meta.source_position, meta.ntokens, meta.segment_offset) == (132, 3, 32)
    assert (meta.provenance, meta.rank, meta.behind_tokens) == (2, 7, 90)
    assert (meta.context, meta.behind, meta.nbytes) == (bytes(range(32)), behind, 3 * BYTES_PER_TOKEN)


def test_a_mask_publishes_some_chunks_and_aborts_the_others() -> None:
    store = small_store()
    document = text(1, 3 * CHUNK)
    reservation = reserve(store, NS, document)
    with pytest.raises(StoreError, match=r"mask = 1 bytes.*3 chunks"):
        reservation.commit(b"\1")
    assert reservation.commit(b"\1\0\1") == 2
    assert look(store, NS, document).hits == b"\1\0\1"
    assert store.stats()["aborted"] == 1


def test_a_tail_is_kept_only_when_asked_for() -> None:
    store = small_store()
    document = text(1, CHUNK + 3)
    assert reserve(store, NS, document, save_unfull_chunk=False).wanted == b"\1\0"
    assert reserve(store, NS, document).wanted == b"\1\1"


def test_a_record_is_replaced_only_by_one_of_higher_rank() -> None:
    """Captures of one document are compared by rank; whoever reads the old one meanwhile keeps it."""
    store = small_store()
    document = text(1, CHUNK)
    assert put(store, NS, document, 1, rank=3) == 1
    reader = look(store, NS, document).buffer(0)
    for rank in (0, 3):
        assert reserve(store, NS, document, rank=rank).wanted == b"\0"
    assert put(store, NS, document, 2, rank=4) == 1
    assert contents(look(store, NS, document)) == [b"\2" * FULL]
    assert bytes(reader) == b"\1" * FULL
    stats = store.stats()
    assert (stats["stored"], stats["replaced"], stats["chunks"]) == (1, 1, 1)
    assert [event.kind for event in store.events()[0]] == ["stored", "replaced"]


def test_a_chunk_that_is_being_written_is_not_wanted_twice() -> None:
    store = small_store()
    document = text(1, CHUNK)
    first = reserve(store, NS, document)
    assert reserve(store, NS, document).wanted == b"\0"
    first.abort()
    assert reserve(store, NS, document).wanted == b"\1"


def test_a_chain_is_continued_behind_its_parent() -> None:
    """An answer that grows is stored piece by piece and found as one chain."""
    store = small_store()
    document = text(1, 2 * CHUNK + 5)
    put(store, NS, document[:CHUNK].copy(), 1)
    parent = NS.chain_keys(document[:CHUNK].copy(), chunk_size=CHUNK)
    put(store, NS, document[CHUNK:].copy(), 2, parent=parent, parent_offset=CHUNK, source_position=CHUNK)
    lease = look(store, NS, document)
    assert lease.hits == b"\1\1\1"
    metas = [lease.meta(index) for index in range(3)]
    assert [meta.segment_offset for meta in metas if meta] == [0, 16, 32]
    assert [meta.source_position for meta in metas if meta] == [0, 16, 32]


def test_head_chains_are_apart_from_documents() -> None:
    store = small_store()
    prompt = text(1, 64)
    put(store, NS, prompt, head=True, provenance=0)
    assert look(store, NS, prompt).hits == b"\0" * 4
    assert store.lookup_segments(NS, prompt, whole(prompt), head=True).hits == b"\1" * 4
    assert store.match(NS, prompt) == [], "a record that nothing stood before is not for reuse elsewhere"


def test_lookup_contains_touch_and_pin_take_packed_keys() -> None:
    store = small_store()
    document = text(1, 3 * CHUNK)
    put(store, NS, document[: 2 * CHUNK].copy())
    keys = NS.chain_keys(document, chunk_size=CHUNK)
    assert store.lookup(keys).hits == b"\1\1\0"
    assert store.lookup(np.frombuffer(keys, np.uint8).reshape(3, 32)).hits == b"\1\1\0"
    assert store.lookup(b"").hits == b""
    lookups = store.stats()["lookups"]
    assert store.contains(keys) == b"\1\1\0"
    store.touch(keys)
    assert store.stats()["lookups"] == lookups, "only lookups count as such"
    assert store.pin(keys) == 2
    assert store.stats()["bytes_pinned"] == 2 * FULL
    assert store.unpin(keys) == 2
    assert store.unpin(keys) == 0
    assert idle(store) == IDLE
    for call in (store.lookup, store.contains, store.touch, store.pin, store.unpin):
        with pytest.raises(StoreError, match=r"keys = 33 bytes.*32 bytes each"):
            call(bytes(33))
        with pytest.raises(StoreError, match="keys = a buffer of format 'I'"):
            call(np.zeros(8, np.uint32))


def test_a_pinned_chunk_is_not_evicted() -> None:
    store = store_of(2, reserve_wait_s=0.0)
    put(store, NS, text(1, CHUNK), 1)
    key = NS.chain_keys(text(1, CHUNK), chunk_size=CHUNK)
    assert store.pin(key) == 1
    for seed in range(2, 9):
        assert put(store, NS, text(seed, CHUNK), seed) == 1
    assert store.contains(key) == b"\1"
    assert store.unpin(key) == 1
    put(store, NS, text(20, 2 * CHUNK))
    assert store.contains(key) == b"\0"


def test_match_finds_documents_anywhere() -> None:
    """Rows say where in the record a run begins; runs of a chain follow each other to the unfull tail."""
    store = Store(capacity_bytes=1 << 22)
    document = text(1, 600)
    put(store, NS, document)
    prompt = concatenate([text(2, 33), document, text(3, 8), document[100:250].copy(), text(4, 9)])
    matches = store.match(NS, prompt)
    assert [(match.start, match.stop, match.row) for match in matches] == [
        (33, 289, 0),
        (289, 545, 0),
        (545, 633, 0),
        (641, 791, 100),
    ]
    keys = keys_of(NS.chain_keys(document))
    assert [match.key for match in matches] == [keys[0], keys[1], keys[2], keys[0]]
    assert [match.stop for match in store.match(NS, prompt, min_tokens=151)] == [289, 545, 633]
    assert store.match(tenant("other"), prompt) == []
    assert store.stats()["matches"] == 7
    store.clear()
    assert store.match(NS, prompt) == []


def test_clear_drops_one_namespace_or_all() -> None:
    store = small_store()
    other = tenant("other")
    put(store, NS, text(1, 3 * CHUNK))
    put(store, other, text(1, 2 * CHUNK))
    view = look(store, NS, text(1, CHUNK)).buffer(0)
    assert store.clear(NS) == 3
    assert look(store, NS, text(1, 3 * CHUNK)).hits == b"\0\0\0"
    assert look(store, other, text(1, 2 * CHUNK)).hits == b"\1\1"
    assert bytes(view) == b"\1" * FULL
    assert store.clear() == 2
    assert store.stats()["chunks"] == 0
    assert [event.kind for event in store.events()[0]][-5:] == ["cleared"] * 5


def test_events_are_read_once_in_order_and_losses_are_counted() -> None:
    store = small_store(events_capacity=4)
    for seed in range(6):
        put(store, NS, text(seed + 1, CHUNK))
    events, lost = store.events(limit=3)
    assert ([event.sequence for event in events], lost) == ([2, 3, 4], 2)
    assert events[0].kind == "stored"
    assert events[0].key == NS.chain_keys(text(3, CHUNK), chunk_size=CHUNK)
    events, lost = store.events()
    assert ([event.sequence for event in events], lost) == ([5], 0)


def test_stats_count_what_happened() -> None:
    store = store_of(2, reserve_wait_s=0.0)
    put(store, NS, text(1, CHUNK))
    put(store, NS, text(2, CHUNK))
    lease = store.lookup(NS.chain_keys(text(1, CHUNK), chunk_size=CHUNK) + bytes(64))
    stats = store.stats()
    assert (stats["lookups"], stats["hits"], stats["misses"]) == (3, 1, 2)
    assert (stats["chunks"], stats["stored"], stats["leases"]) == (2, 2, 1)
    assert (stats["bytes_pinned"], stats["bytes_used"]) == (FULL, stats["bytes_capacity"])
    put(store, NS, text(3, CHUNK))
    lease.release()
    reservation = reserve(store, NS, text(4, 3 * CHUNK))
    assert store.stats()["reservations"] == 1
    reservation.abort()
    stats = store.stats()
    assert stats["evicted"] >= 2
    assert stats["rejected_full"] == 1
    assert stats["aborted"] == 2
    assert stats["metadata_bytes"] > 0
    assert idle(store) == IDLE
    assert set(stats) == {
        "chunks",
        "bytes_used",
        "bytes_capacity",
        "bytes_pinned",
        "leases",
        "reservations",
        "lookups",
        "hits",
        "misses",
        "stored",
        "replaced",
        "evicted",
        "aborted",
        "rejected_full",
        "expired_leases",
        "matches",
        "metadata_bytes",
    }


@pytest.mark.parametrize("policy", ["adaptive", "lru", "lfu", "fifo", "s3-fifo", "sieve", "LRU", "S3-FIFO"])
def test_every_policy_makes_room(policy: str) -> None:
    store = store_of(3, policy=policy)
    for seed in range(1, 20):
        assert put(store, NS, text(seed, CHUNK), seed) == 1
        assert contents(look(store, NS, text(seed, CHUNK))) == [bytes([seed]) * FULL]
    stats = store.stats()
    assert (stats["chunks"], stats["evicted"]) == (3, 16)


def test_a_tenant_keeps_to_its_share() -> None:
    """All namespaces of one salt are one tenant; its own chunks make room for its new ones."""
    store = store_of(8, tenant_share=0.5)
    other = blendstore.Namespace([("model", b"other")], salt=b"b")
    same = blendstore.Namespace([("model", b"another")], salt=b"b")
    put(store, NS, text(1, 4 * CHUNK))
    for seed in range(2, 9):
        assert put(store, other if seed % 2 else same, text(seed, CHUNK), seed) == 1
    assert look(store, NS, text(1, 4 * CHUNK)).hits == b"\1" * 4
    left = [look(store, other if seed % 2 else same, text(seed, CHUNK)).hits for seed in range(2, 9)]
    assert left == [b"\0"] * 3 + [b"\1"] * 4


def test_eviction_takes_the_end_of_a_chain_first() -> None:
    store = store_of(4, policy="lru")
    document = text(1, 4 * CHUNK)
    put(store, NS, document)
    for nleft, seed in ((3, 2), (2, 3), (1, 4)):
        put(store, NS, text(seed, CHUNK))
        hits = store.contains(NS.chain_keys(document, chunk_size=CHUNK))
        assert hits.rstrip(b"\0") == b"\1" * len(hits.rstrip(b"\0")), "never a hole"
        assert len(hits.rstrip(b"\0")) == nleft


def test_a_lease_times_out() -> None:
    """A request that never comes back does not keep its chunks pinned."""
    store = store_of(2, lease_timeout_s=0.0)
    put(store, NS, text(1, 2 * CHUNK), 1)
    lease = look(store, NS, text(1, 2 * CHUNK))
    assert lease.hits == b"\1\1"
    assert put(store, NS, text(2, 2 * CHUNK), 2) == 2, "the time-out gave the room"
    with pytest.raises(LeaseExpired, match="lease_timeout_s"):
        lease.buffer(0)
    assert store.stats()["expired_leases"] == 2
    lease.release()
    assert idle(store) == IDLE


def test_a_closed_store_misses_and_takes_nothing() -> None:
    store = small_store()
    put(store, NS, text(1, CHUNK))
    store.close()
    store.close()
    assert look(store, NS, text(1, CHUNK)).hits == b"\0"
    assert store.match(NS, text(1, CHUNK)) == []
    with pytest.raises(StoreError, match="closed"):
        reserve(store, NS, text(1, CHUNK))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes = 0"),
        ({"capacity_bytes": -5}, "capacity_bytes = -5"),
        ({"chunk_size": 0}, "chunk_size = 0"),
        ({"max_chunks": 0}, "max_chunks = 0"),
        ({"policy": "best"}, 'policy = "best".*s3-fifo'),
        ({"tenant_share": 0.0}, "tenant_share = 0"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s = 0"),
        ({"tenant_share": 1.5}, "tenant_share = 1.5"),
        ({"lease_timeout_s": -1.0}, "lease_timeout_s = -1"),
        ({"lease_timeout_s": float("nan")}, "lease_timeout_s = NaN"),
        ({"reserve_wait_s": -0.5}, "reserve_wait_s = -0.5"),
        ({"events_capacity": -1}, "events_capacity = -1"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, object], told: str) -> None:
    with pytest.raises(StoreError, match=told):
        small_store(**options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bytes_per_token": 0}, "bytes_per_token = 0"),
        ({"source_position": -1}, "source_position = -1"),
        ({"source_position": 1 << 40}, "source_position = "),
        ({"provenance": 4}, "provenance = 4.*3 BLENDED"),
        ({"provenance": 256}, "provenance = 256"),
        ({"rank": -1}, "rank = -1"),
        ({"rank": 256}, "rank = 256"),
        ({"contexts": bytes(31)}, "contexts = 31 bytes"),
        ({"contexts": bytes(64)}, "contexts = 2 digests.*1 chunks"),
        ({"behind": bytes(5)}, "behind = 5 bytes"),
        ({"parent": bytes(31)}, "parent = 31 bytes"),
        ({"parent": bytes(32), "head": True}, "head = true"),
    ],
)
def test_requests_that_cannot_be_are_refused_by_name(options: dict[str, object], told: str) -> None:
    store = small_store()
    with pytest.raises(StoreError, match=told):
        reserve(store, NS, text(1, CHUNK), **options)  # type: ignore[arg-type]
    assert idle(store) == IDLE


def test_unbounded_leases_and_the_version() -> None:
    store = small_store(lease_timeout_s=float("inf"))
    put(store, NS, text(1, CHUNK))
    assert contents(look(store, NS, text(1, CHUNK))) == [b"\1" * FULL]
    assert blendstore.__version__.count(".") == 2


def test_the_package_imports_without_torch() -> None:
    """The store is useful to processes that have no torch: a router, a cache server, the command line."""
    program = (
        "import sys; sys.modules['torch'] = None; import blendstore; "
        "print(blendstore.Store(capacity_bytes=1 << 20).stats()['chunks'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


CALLS: dict[str, Callable[[Store], object]] = {
    "content_id": lambda _: NS.content_id(text(1, 64)),
    "chain_keys": lambda _: NS.chain_keys(text(1, 64), chunk_size=CHUNK),
    "segment_keys": lambda _: NS.segment_keys(text(1, 64), whole(text(1, 64)), chunk_size=CHUNK),
    "context_digests": lambda _: NS.context_digests(text(1, 64), np.array([3, 60])),
    "lookup": lambda store: store.lookup(bytes(32)),
    "lookup_segments": lambda store: look(store, NS, text(1, 64)),
    "contains": lambda store: store.contains(bytes(32)),
    "reserve": lambda store: reserve(store, NS, text(9, CHUNK), save_unfull_chunk=False).wanted,
    "commit": lambda store: reserve(store, NS, text(1, CHUNK)).commit(),
    "read_into": lambda store: look(store, NS, text(1, CHUNK)).read_into(0, bytearray(FULL)),
    "release": lambda store: look(store, NS, text(1, CHUNK)).release(),
    "match": lambda store: store.match(NS, text(1, 64)),
    "touch": lambda store: store.touch(bytes(32)),
    "pin": lambda store: store.pin(bytes(32)),
    "unpin": lambda store: store.unpin(bytes(32)),
    "clear": lambda store: store.clear(tenant("nobody")),
    "events": lambda store: store.events(1),
    "stats": lambda store: store.stats(),
    "open": lambda _: small_store(),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_threads_run_while_a_call_does(name: str) -> None:
    """With preemption switched off another thread runs only if the call itself lets go of the GIL."""
    store = small_store()
    put(store, NS, text(1, CHUNK))
    gate, ran = threading.Lock(), threading.Event()

    def other() -> None:
        gate.acquire()
        ran.set()

    gate.acquire()
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10_000.0)
    try:
        gate.release()
        for _ in range(20_000):
            CALLS[name](store)
            if ran.is_set():
                break
    finally:
        sys.setswitchinterval(interval)
    assert ran.is_set()
    thread.join()


def test_a_writer_waits_for_room_that_another_thread_frees() -> None:
    """`reserve` waits without the GIL, so the thread that has the room can give it back."""
    store = store_of(1, reserve_wait_s=30.0)
    put(store, NS, text(1, CHUNK), 1)
    lease = look(store, NS, text(1, CHUNK))
    outcome: list[int] = []
    writer = threading.Thread(target=lambda: outcome.append(put(store, NS, text(2, CHUNK), 2)))
    writer.start()
    while store.stats()["reservations"] == 0:
        pass
    lease.release()
    writer.join(timeout=25.0)
    assert outcome == [1]
    assert contents(look(store, NS, text(2, CHUNK))) == [b"\2" * FULL]


def test_matching_while_chunks_come_and_go() -> None:
    """The matcher reads chunks that are evicted under it: what it says was true, and it leaves no pins behind."""
    store = small_store(capacity_bytes=48 << 10, chunk_size=64, reserve_wait_s=0.0)
    documents = [text(seed, 200) for seed in range(1, 9)]
    prompt = concatenate(documents)
    rows = {
        key: document[64 * index : 64 * (index + 1)]
        for document in documents
        for index, key in enumerate(keys_of(NS.chain_keys(document, chunk_size=64)))
    }
    stop, wrong, found = threading.Event(), list[str](), [0, 0]

    def match(thread: int) -> None:
        while not stop.is_set():
            for hit in store.match(NS, prompt):
                known = rows[hit.key][hit.row : hit.row + hit.stop - hit.start]
                found[thread] += 1
                if known.tolist() != prompt[hit.start : hit.stop].tolist():
                    wrong.append(repr(hit))

    threads = [threading.Thread(target=match, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(100_000):
        put(store, NS, documents[turn % 8])
        if turn % 50 == 0:
            store.clear(NS)
        if turn >= 2000 and min(found) > 100:
            break
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert min(found) > 100
    assert store.stats()["evicted"] > 0
    assert idle(store) == IDLE
    store.clear()
    assert store.stats()["bytes_used"] == 0


def test_a_measured_prefill_speed_is_taken_and_a_wrong_one_is_named() -> None:
    store = store_of(8)
    store.set_prefill_speed(12_345.6)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(StoreError, match=r"prefill_tokens_per_s.*above 0"):
            store.set_prefill_speed(wrong)
