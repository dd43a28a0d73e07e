"""Cases from the field for keys and the store: s09, s10, s12, s13, f02, f03, f10."""

import os
import random
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from blendstore import LeaseExpired, Namespace, Store
from tests.records import (
    BYTES_PER_TOKEN,
    CHUNK,
    IDLE,
    Tokens,
    array,
    concatenate,
    contents,
    idle,
    look,
    put,
    reserve,
    small_store,
    store_of,
    tenant,
    text,
    wanted,
)

NS = tenant()
FULL = CHUNK * BYTES_PER_TOKEN

KEYS_PROGRAM = """
import array, sys
from blendstore import Namespace
namespace = Namespace([("model", "mödel/ü@%".encode()), ("layers", bytes([30]))], salt=b"tenant")
tokens = array.array("I", range(1000))
sys.stdout.write((namespace.digest + namespace.chain_keys(tokens) + namespace.content_id(tokens)).hex())
"""


def interpreters() -> list[str]:
    """This interpreter, and others of a version that can load the module, if the machine has them."""
    others = [shutil.which(f"python3.{minor}") for minor in (11, 12, 13, 14)]
    loads = "import numpy, blendstore"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    able = [
        path
        for path in others
        if path and subprocess.run([path, "-c", loads], env=environment, capture_output=True).returncode == 0
    ]
    return [sys.executable, *able]


def test_case_s09_keys_are_equal_across_processes_and_hash_seeds() -> None:
    """Keys never depend on Python's hash(): any two processes share records without PYTHONHASHSEED."""
    answers = set()
    for interpreter in interpreters():
        for seed in ("random", "1", None):
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            if seed is not None:
                environment["PYTHONHASHSEED"] = seed
            answers.add(
                subprocess.run(
                    [interpreter, "-c", KEYS_PROGRAM], env=environment, capture_output=True, check=True, text=True
                ).stdout
            )
    assert len(answers) == 1
    assert len(answers.pop()) == 2 * 32 * (1 + 4 + 1)


def test_case_s10_fields_are_framed_and_keys_have_one_length() -> None:
    """No two different identities share a namespace, however their fields are spelled."""
    spellings = [
        ([("ab", b"c")], b""),
        ([("a", b"bc")], b""),
        ([("abc", b"")], b""),
        ([("", b"abc")], b""),
        ([("a", b"b"), ("c", b"")], b""),
        ([("a", b""), ("b", b"c")], b""),
        ([("a", b"b")], b"c"),
        ([], b"abc"),
        ([], b""),
        ([("", b"")], b""),
        ([("", b""), ("", b"")], b""),
        # A salt that equals another tenant's LoRA name.
        ([("model", b"m"), ("lora", b"acme")], b""),
        ([("model", b"m"), ("lora", b"")], b"acme"),
        ([("model", b"m")], b"acme"),
        # Names with separators of other systems, and long ones.
        ([("model", b"org/model@rev%2F\xc3\xbc")], b""),
        ([("model", b"org/model@rev"), ("%2F\xc3\xbc", b"")], b""),
        ([("model", b"x" * 300)], b""),
        ([("model", b"x" * 301)], b""),
        ([("model", b"x" * 299 + b"\0")], b""),
    ]
    namespaces = [Namespace(fields, salt=salt) for fields, salt in spellings]
    tokens = text(1, 40)
    assert len({namespace.digest for namespace in namespaces}) == len(spellings)
    assert len({namespace.chain_keys(tokens) for namespace in namespaces}) == len(spellings)
    assert len({namespace.content_id(tokens) for namespace in namespaces}) == len(spellings)
    assert {len(namespace.digest) for namespace in namespaces} == {32}


def colliding(base: int, modulus: int, ntokens: int, at: int) -> tuple[Tokens, Tokens]:
    """Two token runs with equal polynomial hashes, by a small relation between neighbouring powers of ``base``."""
    plain = np.full(ntokens, 1 << 30, dtype=np.int64)
    remainder, previous, factor, earlier = base, modulus, 1, 0
    while remainder >= 1 << 30:
        quotient = previous // remainder
        previous, remainder = remainder, previous - quotient * remainder
        earlier, factor = factor, earlier - quotient * factor
    crafted = plain.copy()
    crafted[at] += factor
    crafted[at + 1] -= remainder
    return plain.astype(np.uint32), crafted.astype(np.uint32)


def polynomial(tokens: Tokens, base: int, modulus: int) -> int:
    value = 0
    for token in tokens.tolist():
        value = (value * base + token) % modulus
    return value


@pytest.mark.parametrize(
    ("base", "modulus"),
    [(31, 2**64), (257, 2**61 - 1), (1_000_003, 2**61 - 1), (0x1234_5678_9ABC_DEF, 2**61 - 1)],
)
def test_case_s12_crafted_collisions_are_never_equal(base: int, modulus: int) -> None:
    """Runs that collide under a polynomial hash with a known base are different to keys and to the matcher."""
    plain, crafted = colliding(base, modulus, 256, 10)
    assert polynomial(plain, base, modulus) == polynomial(crafted, base, modulus), "the attack is real"
    assert plain.tolist() != crafted.tolist()
    store = Store(capacity_bytes=1 << 20)
    put(store, NS, plain)
    assert NS.content_id(plain) != NS.content_id(crafted)
    assert look(store, NS, crafted).hits == b"\0"
    prompt = concatenate([text(1, 40), crafted, text(2, 40)])
    for match in store.match(NS, prompt, min_tokens=1):
        rows = slice(match.row, match.row + match.stop - match.start)
        assert plain[rows].tolist() == prompt[match.start : match.stop].tolist()
        assert not match.start <= 50 < match.stop, "the changed token is no part of a match"
    assert [(match.start, match.stop) for match in store.match(NS, concatenate([text(1, 9), plain]))] == [(9, 265)]


def test_case_s13_tenants_never_share() -> None:
    """The same document of another tenant is a miss by key, by content and to the matcher."""
    store = Store(capacity_bytes=1 << 22)
    ours, theirs = tenant("ours"), tenant("theirs")
    document = text(1, 600)
    prompt = concatenate([text(2, 50), document])
    bounds = np.array([[50, 650]])
    put(store, ours, document)
    assert store.lookup_segments(ours, prompt, bounds).hits == b"\1\1\1"
    assert len(store.match(ours, prompt)) == 3
    assert store.lookup_segments(theirs, prompt, bounds).hits == b"\0\0\0"
    assert store.match(theirs, prompt) == []
    assert reserve(store, theirs, document).wanted == b"\1\1\1", "not even that it is known can be seen"

    put(store, theirs, document, 2)
    assert {payload[:1] for payload in contents(store.lookup_segments(ours, prompt, bounds)) if payload} == {b"\1"}
    assert {payload[:1] for payload in contents(store.lookup_segments(theirs, prompt, bounds)) if payload} == {b"\2"}
    assert {match.key for match in store.match(ours, prompt)}.isdisjoint(
        match.key for match in store.match(theirs, prompt)
    )
    assert store.clear(ours) == 3
    assert len(store.match(theirs, prompt)) == 3


def test_case_f02_a_slow_reader_sees_old_bytes_or_a_miss() -> None:
    """While chunks are evicted and their memory is used again, a view keeps its bytes and an expired lease says so."""
    store = store_of(3, reserve_wait_s=0.0, lease_timeout_s=0.002)
    stop = threading.Event()
    views, expired = [0, 0], [0, 0]
    wrong: list[tuple[int, bytes]] = []

    def read(reader: int, seed: int) -> None:
        rounds = 0
        while not stop.is_set():
            lease = look(store, NS, text(seed, CHUNK))
            if not lease.hits[0]:
                time.sleep(0)
                continue
            rounds += 1
            if rounds % 4 == 0:
                time.sleep(0.004)
            try:
                view = memoryview(lease.buffer(0))
            except LeaseExpired:
                expired[reader] += 1
                continue
            lease.release()
            for _ in range(3):
                time.sleep(0)
                if bytes(view) != bytes([seed]) * FULL:
                    wrong.append((seed, bytes(view)))
            views[reader] += 1

    readers = [threading.Thread(target=read, args=(reader, seed)) for reader, seed in enumerate((1, 2))]
    for thread in readers:
        thread.start()
    choices = random.Random(0)
    for _ in range(200_000):
        seed = choices.randint(1, 6)
        put(store, NS, text(seed, CHUNK), seed)
        if min(views) >= 100 and min(expired) >= 5:
            break
    stop.set()
    for thread in readers:
        thread.join()
    assert wrong == []
    assert min(views) >= 100
    assert min(expired) >= 5
    assert store.stats()["evicted"] > 0
    assert idle(store) == IDLE


def test_case_f03_three_chunks_wanted_of_room_for_two() -> None:
    """A bounded wait, then a miss; nothing stays pinned when the second of a batch fails."""
    store = store_of(2, reserve_wait_s=0.01)
    reservation = reserve(store, NS, text(1, 3 * CHUNK))
    assert wanted(reservation) == [0, 1]
    for index in wanted(reservation):
        array(reservation.buffer(index))[:] = 1
    assert reservation.commit() == 2
    assert look(store, NS, text(1, 3 * CHUNK)).hits == b"\1\1\0"

    readers = look(store, NS, text(1, 2 * CHUNK))
    full = reserve(store, NS, text(2, 3 * CHUNK))
    assert full.wanted == b"\0\0\0"
    assert full.commit() == 0
    assert store.stats()["rejected_full"] == 1 + 3
    readers.release()
    assert idle(store) == IDLE

    # Room for the first of two: the batch fails at its second item and unwinds.
    holder = look(store, NS, text(1, CHUNK))
    with reserve(store, NS, text(3, 2 * CHUNK)) as half:
        assert half.wanted == b"\1\0"
    holder.release()
    assert idle(store) == IDLE
    assert put(store, NS, text(4, 2 * CHUNK), 4) == 2, "all of the room is there again"


def test_case_f10_eight_threads_on_one_key() -> None:
    """Put, get, delete of one key from eight threads, 10,000 times each: whole records; counts are 0 when idle."""
    store = small_store(capacity_bytes=1 << 16, reserve_wait_s=0.0)
    document = text(1, CHUNK)
    wrong: list[bytes] = []
    published = [0] * 8
    cleared = [0] * 8

    def work(thread: int) -> None:
        choices = random.Random(thread)
        for _ in range(10_000):
            action = choices.random()
            if action < 0.4:
                published[thread] += put(store, NS, document, thread + 1, rank=choices.randint(0, 255))
            elif action < 0.8:
                payload = contents(look(store, NS, document))[0]
                if payload is not None and (len(payload) != FULL or len(set(payload)) != 1):
                    wrong.append(payload)
            else:
                cleared[thread] += store.clear(NS)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert idle(store) == IDLE
    stats = store.stats()
    assert sum(published) > 0
    assert stats["stored"] + stats["replaced"] == sum(published)
    assert stats["stored"] - sum(cleared) == stats["chunks"]
    store.clear()
    assert (store.stats()["chunks"], store.stats()["bytes_used"]) == (0, 0)
