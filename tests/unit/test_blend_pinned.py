"""The arena's page lock: the right range, given back before the memory goes. The CUDA runtime is replaced by a list."""

import gc
import sys

import pytest
import torch

from blendstore.blend import pin, pinned
from blendstore.blend.copies import CudaError
from blendstore.blend.pinned import PinError, PinnedArena
from tests.records import look, put, small_store, tenant, text

CUDA = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(pinned, "call", lambda *arguments: made.append(arguments))
    return made


def test_every_record_lies_in_the_arena() -> None:
    store = small_store()
    put(store, tenant(), text(1, 100))
    start, nbytes = store.arena
    lease = look(store, tenant(), text(1, 100))
    assert nbytes >= store.stats()["bytes_capacity"]
    for index in range(len(lease)):
        record = torch.utils.dlpack.from_dlpack(lease.buffer(index))
        assert start <= record.data_ptr() <= start + nbytes - record.nbytes


def test_locks_the_whole_arena_and_gives_it_back_once(calls: list[tuple[object, ...]]) -> None:
    store = small_store()
    start, nbytes = store.arena
    arena = PinnedArena(store)
    assert calls == [("cudaHostRegister", start, nbytes, 1)]
    arena.close()
    arena.close()
    del arena
    gc.collect()
    assert calls[1:] == [("cudaHostUnregister", start)]


def test_the_store_outlives_its_lock(calls: list[tuple[object, ...]]) -> None:
    """Memory that is unmapped while the driver has it locked is lost to both: the lock itself holds the store."""
    store = small_store()
    arena = PinnedArena(store)
    held = sys.getrefcount(store)
    arena.close()
    assert sys.getrefcount(store) == held - 1


def test_a_refused_lock_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(name: str, *arguments: object) -> None:
        raise CudaError(f"{name}: CUDA error 2")

    monkeypatch.setattr(pinned, "call", refuse)
    store = small_store()
    with pytest.raises(PinError, match=r"1048576 bytes of records .*ulimit -l"):
        PinnedArena(store)
    assert pin(store, CUDA) is None
    assert "hold up the host" in caplog.text


def test_nothing_is_locked_for_a_cpu(calls: list[tuple[object, ...]]) -> None:
    assert pin(small_store(), torch.device("cpu")) is None
    assert not calls
