"""Views of arena memory: no copies, and memory that stays what it was while anybody looks at it."""

import gc
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from blendstore import LeaseExpired, RecordBuffer, Reservation, Store, StoreError
from tests.records import (
    BYTES_PER_TOKEN,
    CHUNK,
    IDLE,
    array,
    contents,
    idle,
    look,
    put,
    reserve,
    small_store,
    store_of,
    tenant,
    text,
)

NS = tenant()
DOCUMENT = text(1, CHUNK + 5)


def stored(**options: object) -> Store:
    store = small_store(**options)
    reservation = reserve(store, NS, DOCUMENT, with_scores=True)
    for index in range(2):
        payload = array(reservation.buffer(index))
        payload[:] = np.arange(len(payload), dtype=np.uint8) + np.uint8(index)
        start, stop = reservation.bounds(index)
        reservation.set_scores(index, np.arange(start, stop, dtype=np.float32) / np.float32(2))
    assert reservation.commit() == 2
    return store


def test_every_way_to_read_sees_the_same_memory() -> None:
    """The buffer protocol, numpy and torch share one address: nothing is copied."""
    lease = look(stored(), NS, DOCUMENT)
    buffer = lease.buffer(0)
    payload = array(buffer)
    assert len(buffer) == len(payload) == CHUNK * BYTES_PER_TOKEN
    assert payload[:4].tolist() == [0, 1, 2, 3]
    address = payload.ctypes.data
    assert np.from_dlpack(buffer).ctypes.data == address  # type: ignore[arg-type]
    assert from_dlpack(buffer).data_ptr() == address
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        assert torch.frombuffer(buffer, dtype=torch.bfloat16).data_ptr() == address
    assert np.frombuffer(lease.buffer(0), np.uint8).ctypes.data == address  # type: ignore[call-overload]


def test_tokens_and_scores_have_their_types() -> None:
    lease = look(stored(), NS, DOCUMENT)
    view = memoryview(lease.tokens(1))
    assert (view.format, view.itemsize, view.shape, view.strides, view.readonly) == ("I", 4, (5,), (4,), True)
    assert np.asarray(lease.tokens(1)).tolist() == DOCUMENT[CHUNK:].tolist()
    assert from_dlpack(lease.tokens(0)).dtype == torch.uint32
    scores = lease.scores(1)
    assert scores is not None
    assert np.asarray(scores).dtype == np.float32
    assert from_dlpack(scores).tolist() == [8.0, 8.5, 9.0, 9.5, 10.0]
    other = small_store()
    put(other, NS, DOCUMENT)
    assert look(other, NS, DOCUMENT).scores(0) is None


def test_published_records_are_read_only() -> None:
    """No consumer that honours its protocol can write to what other requests read."""
    buffer = look(stored(), NS, DOCUMENT).buffer(0)
    assert memoryview(buffer).readonly
    assert not array(buffer).flags.writeable
    assert not np.from_dlpack(buffer).flags.writeable  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        memoryview(buffer)[0] = 1
    with pytest.raises(TypeError, match="read-write"):
        io.BytesIO(b"x" * len(buffer)).readinto(buffer)


def test_reservations_are_written_in_place_by_numpy_and_torch() -> None:
    store = small_store()
    reservation = reserve(store, NS, DOCUMENT)
    from_dlpack(reservation.buffer(0)).fill_(7)
    torch.frombuffer(reservation.buffer(1), dtype=torch.float16).fill_(2.0)
    memoryview(reservation.buffer(1))[0] = 9
    assert reservation.commit() == 2
    first, second = contents(look(store, NS, DOCUMENT))
    assert first == b"\7" * (CHUNK * BYTES_PER_TOKEN)
    assert second == b"\x09\x40" + b"\x00\x40" * (5 * BYTES_PER_TOKEN // 2 - 1)


def test_dlpack_speaks_both_versions_and_refuses_what_it_cannot_do() -> None:
    buffer = look(stored(), NS, DOCUMENT).buffer(0)
    assert buffer.__dlpack_device__() == (1, 0)
    assert '"dltensor"' in repr(buffer.__dlpack__())
    assert '"dltensor"' in repr(buffer.__dlpack__(max_version=(0, 8)))
    assert '"dltensor_versioned"' in repr(buffer.__dlpack__(max_version=(1, 1), dl_device=(1, 0), copy=False))
    with pytest.raises(BufferError, match="stream"):
        buffer.__dlpack__(stream=1)  # type: ignore[arg-type]
    with pytest.raises(BufferError, match="copy"):
        buffer.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="dl_device"):
        buffer.__dlpack__(dl_device=(2, 0))


def test_capsules_that_nobody_consumes_give_their_pin_back() -> None:
    store = stored()
    lease = look(store, NS, DOCUMENT)
    capsules = [lease.buffer(0).__dlpack__(max_version=version) for version in (None, (1, 0))]
    lease.release()
    assert idle(store)["bytes_pinned"] == CHUNK * BYTES_PER_TOKEN
    del capsules
    assert idle(store) == IDLE


VIEWS: dict[str, Callable[[RecordBuffer], Any]] = {
    "buffer": lambda buffer: buffer,
    "memoryview": lambda buffer: memoryview(buffer),
    "numpy": lambda buffer: array(buffer),
    "torch": lambda buffer: from_dlpack(buffer),
    "torch_legacy": lambda buffer: from_dlpack(buffer.__dlpack__()),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_outlives_its_lease_and_pins_its_memory(kind: str) -> None:
    """A view made before the lease ended keeps the bytes, though the chunk is evicted and its room is wanted."""
    store = store_of(2)
    put(store, NS, text(1, CHUNK), 11)
    lease = look(store, NS, text(1, CHUNK))
    buffer = lease.buffer(0)
    view = VIEWS[kind](buffer)
    lease.release()
    del lease, buffer
    gc.collect()
    for seed in range(2, 12):
        put(store, NS, text(seed, CHUNK), seed)
    assert np.asarray(view).tobytes() == b"\x0b" * (CHUNK * BYTES_PER_TOKEN)
    assert idle(store)["bytes_pinned"] == CHUNK * BYTES_PER_TOKEN
    del view
    assert idle(store) == IDLE
    assert put(store, NS, text(20, 2 * CHUNK), 20) == 2, "the memory is used again when the last view is gone"


def test_views_outlive_the_store() -> None:
    store = stored()
    lease = look(store, NS, DOCUMENT)
    payload = array(lease.buffer(0))
    reservation = reserve(store, NS, text(2, CHUNK))
    writable = array(reservation.buffer(0))
    store.close()
    del store, lease
    gc.collect()
    assert payload[:4].tolist() == [0, 1, 2, 3]
    writable[:] = 5
    assert reservation.commit() == 0, "nothing is published in a closed store"
    assert writable[0] == 5


def test_writable_views_of_an_aborted_reservation_hit_nobody() -> None:
    """Room that somebody can still write to is not given to another chunk."""
    store = store_of(2)
    reservation = reserve(store, NS, text(1, CHUNK))
    late = array(reservation.buffer(0))
    reservation.abort()
    for seed in range(2, 6):
        put(store, NS, text(seed, CHUNK), seed)
        late[:] = 255
        assert contents(look(store, NS, text(seed, CHUNK))) == [bytes([seed]) * (CHUNK * BYTES_PER_TOKEN)]
    del late
    assert idle(store) == IDLE


def test_read_into_copies_into_any_writable_buffer_of_the_size() -> None:
    lease = look(stored(), NS, DOCUMENT)
    size = CHUNK * BYTES_PER_TOKEN
    for destination in (bytearray(size), np.empty(size, np.uint8), np.empty((CHUNK, BYTES_PER_TOKEN // 2), np.uint16)):
        lease.read_into(0, destination)
        assert bytes(destination) == bytes(lease.buffer(0))
    lease.read_into(0, torch.empty(size, dtype=torch.uint8).numpy())
    with pytest.raises(StoreError, match=rf"destination = {size - 1} bytes.*exactly {size} bytes"):
        lease.read_into(0, bytearray(size - 1))
    with pytest.raises(StoreError, match="destination = a read-only buffer"):
        lease.read_into(0, bytes(size))
    with pytest.raises(StoreError, match="destination = a buffer with strides"):
        lease.read_into(0, np.empty(2 * size, np.uint8)[::2])
    with pytest.raises(TypeError, match="destination: list"):
        lease.read_into(0, [0] * size)  # type: ignore[arg-type]


def test_what_a_lease_has_not_is_an_error() -> None:
    store = stored()
    lease = look(store, NS, text(9, 3 * CHUNK))
    assert lease.hits == b"\0\0\0"
    assert lease.meta(0) is None
    with pytest.raises(StoreError, match=r"index = 0 is not accepted.*miss"):
        lease.buffer(0)
    for index in (3, -1):
        with pytest.raises(StoreError, match=f"index = {index}"):
            lease.meta(index)
    with pytest.raises(StoreError, match="index = 2"):
        reserve(store, NS, DOCUMENT).bounds(2)


def test_a_released_lease_says_so() -> None:
    store = stored()
    with look(store, NS, DOCUMENT) as lease:
        assert idle(store)["leases"] == 1
        assert lease.nbytes == len(DOCUMENT) * BYTES_PER_TOKEN
    assert idle(store) == IDLE
    for read in (lease.buffer, lease.tokens, lease.scores, lease.meta, lambda i: lease.read_into(i, bytearray(1))):
        with pytest.raises(LeaseExpired):
            read(0)
    lease.release()
    assert idle(store) == IDLE


def test_a_reservation_is_used_up_by_commit_and_abort() -> None:
    store = small_store()
    with reserve(store, NS, DOCUMENT) as reservation:
        assert idle(store)["reservations"] == 1
    assert idle(store) == IDLE
    assert store.stats()["aborted"] == 2
    assert look(store, NS, DOCUMENT).hits == b"\0\0"
    with pytest.raises(StoreError, match="before commit or abort"):
        reservation.buffer(0)
    assert reservation.commit() == 0

    dropped: Reservation | None = reserve(store, NS, DOCUMENT)
    assert dropped is not None
    assert dropped.wanted == b"\1\1"
    dropped = None
    assert idle(store) == IDLE


def test_set_scores_checks_its_values() -> None:
    reservation = reserve(small_store(), NS, DOCUMENT, with_scores=True)
    with pytest.raises(StoreError, match=r"scores = 3 values.*5 tokens"):
        reservation.set_scores(1, np.zeros(3, np.float32))
    with pytest.raises(StoreError, match=r"scores = a buffer of format 'd'.*float32"):
        reservation.set_scores(1, np.zeros(5))
    without = reserve(small_store(), NS, DOCUMENT)
    with pytest.raises(StoreError, match="scores"):
        without.set_scores(1, np.zeros(5, np.float32))
