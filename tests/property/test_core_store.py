"""The store against a plain dict: any order of reserving, writing, reading, pinning, clearing and forgetting."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from blendstore import Lease, Namespace, Reservation, Store
from tests.records import (
    BYTES_PER_TOKEN,
    CHUNK,
    Tokens,
    array,
    contents,
    idle,
    keys_of,
    look,
    reserve,
    small_store,
    store_of,
    tenant,
    text,
    wanted,
)

TENANTS = (tenant("a"), tenant("b"))


def documents() -> st.SearchStrategy[Tokens]:
    """Documents of up to four chunks whose chains share parents: one of three texts, cut anywhere."""
    return st.builds(lambda seed, ntokens: text(seed, ntokens), st.integers(1, 3), st.integers(0, 4 * CHUNK))


@dataclass
class Kept:
    namespace: Namespace
    rank: int
    payload: bytes


@dataclass
class Open:
    namespace: Namespace
    reservation: Reservation
    rank: int


class StoreMachine(RuleBasedStateMachine):
    """What both machines do; they differ in whether chunks may be evicted."""

    make: Callable[[], Store]
    leases = Bundle("leases")
    reservations = Bundle("reservations")
    views = Bundle("views")

    @initialize()
    def open(self) -> None:
        self.store = type(self).make()
        self.model: dict[bytes, Kept] = {}
        self.fill = 0

    def is_there(self, key: bytes, hit: int) -> bool:
        raise NotImplementedError

    def check_wanted(self, reservation: Reservation, rank: int) -> None:
        raise NotImplementedError

    @rule(target=reservations, namespace=st.sampled_from(TENANTS), document=documents(), rank=st.integers(0, 3))
    def reserve(self, namespace: Namespace, document: Tokens, rank: int) -> Open:
        reservation = reserve(self.store, namespace, document, rank=rank)
        assert reservation.keys == namespace.chain_keys(document, chunk_size=CHUNK)
        self.check_wanted(reservation, rank)
        return Open(namespace, reservation, rank)

    @rule(opened=consumes(reservations), commit=st.booleans(), masked=st.sets(st.integers(0, 3)))
    def finish(self, opened: Open, commit: bool, masked: set[int]) -> None:
        reservation, keys = opened.reservation, keys_of(opened.reservation.keys)
        if not commit:
            reservation.abort()
            return
        payloads = {}
        for index in wanted(reservation):
            self.fill = self.fill % 255 + 1
            start, stop = reservation.bounds(index)
            payloads[index] = bytes([self.fill]) * ((stop - start) * BYTES_PER_TOKEN)
            array(reservation.buffer(index))[:] = np.frombuffer(payloads[index], np.uint8)
        mask = bytes(index not in masked for index in range(len(reservation)))
        published = {index: payload for index, payload in payloads.items() if mask[index]}
        assert reservation.commit(mask) == len(published)
        for index, payload in published.items():
            self.model[keys[index]] = Kept(opened.namespace, opened.rank, payload)

    @rule(target=leases, namespace=st.sampled_from(TENANTS), document=documents())
    def lookup(self, namespace: Namespace, document: Tokens) -> Lease:
        lease = look(self.store, namespace, document)
        keys = keys_of(namespace.chain_keys(document, chunk_size=CHUNK))
        assert len(lease) == len(keys)
        for key, hit, payload in zip(keys, lease.hits, contents(lease), strict=True):
            if self.is_there(key, hit):
                assert payload == self.model[key].payload
        return lease

    @rule(target=views, lease=leases)
    def view(self, lease: Lease) -> object:
        hits = [index for index, hit in enumerate(lease.hits) if hit]
        assume(hits)
        view = memoryview(lease.buffer(hits[-1]))
        return (view, bytes(view))

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        lease.release()

    @rule(view=views)
    def look_again(self, view: tuple[memoryview, bytes]) -> None:
        assert bytes(view[0]) == view[1], "bytes do not change below a view"

    @rule(target=views, view=consumes(views))
    def forget(self, view: tuple[memoryview, bytes]) -> object:
        view[0].release()
        return multiple()

    @rule(namespace=st.sampled_from(TENANTS))
    def clear(self, namespace: Namespace) -> None:
        resident = self.store.stats()["chunks"]
        cleared = self.store.clear(namespace)
        assert self.store.stats()["chunks"] == resident - cleared
        self.model = {key: kept for key, kept in self.model.items() if kept.namespace != namespace}

    @invariant()
    def counts_add_up(self) -> None:
        stats = self.store.stats()
        assert stats["hits"] + stats["misses"] == stats["lookups"]
        assert 0 <= stats["bytes_used"] <= stats["bytes_capacity"]
        assert 0 <= stats["bytes_pinned"] <= stats["bytes_capacity"]
        assert stats["chunks"] <= len(self.model)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.close()
        stats = self.store.stats()
        assert stats["chunks"] == 0


class RoomyMachine(StoreMachine):
    """Room for everything: the store is the dict."""

    make = staticmethod(small_store)

    def is_there(self, key: bytes, hit: int) -> bool:
        assert bool(hit) == (key in self.model)
        return bool(hit)

    def check_wanted(self, reservation: Reservation, rank: int) -> None:
        for key, flag in zip(keys_of(reservation.keys), reservation.wanted, strict=True):
            if key in self.model and self.model[key].rank >= rank:
                assert not flag, "resident at this rank or better"

    @invariant()
    def everything_is_there(self) -> None:
        keys = b"".join(self.model)
        assert self.store.contains(keys) == b"\1" * len(self.model)
        assert self.store.stats()["chunks"] == len(self.model)


class TightMachine(StoreMachine):
    """Room for five full chunks: whatever is found is right."""

    make = staticmethod(lambda: store_of(5, reserve_wait_s=0.0))

    def is_there(self, key: bytes, hit: int) -> bool:
        assert key in self.model or not hit
        return bool(hit)

    def check_wanted(self, reservation: Reservation, rank: int) -> None:
        assert len(reservation.wanted) == len(reservation)


RoomyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TightMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRoomyStore = RoomyMachine.TestCase
TestTightStore = TightMachine.TestCase


def test_the_gauges_are_zero_after_every_owner_is_gone() -> None:
    """The machines leave leases and views to the garbage collector; so does a careless adapter."""
    store = store_of(3)
    for seed in range(1, 6):
        reservation = reserve(store, TENANTS[0], text(seed, 2 * CHUNK))
        views = [reservation.buffer(index) for index in wanted(reservation)]
        del reservation, views
        lease = look(store, TENANTS[0], text(seed, 2 * CHUNK))
        del lease
    assert set(idle(store).values()) == {0}
