"""Look-ups across processes: frames that are bounded, versioned and timed out, on a socket that is the user's alone."""

import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from blendstore_vllm import wire
from blendstore_vllm.messages import Ask, Found
from blendstore_vllm.wire import LIMIT, VERSION, Client, Server, WireError, receive, send

ASK = Ask("r1", np.arange(100, dtype=np.uint32).tobytes(), {"ratio": 0.5, "reuse": True}, "salt", "", 3, 99)


def nothing() -> None:
    """Nobody counts."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own" / "a.sock"


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    made = Server(path, lambda ask: Found(ask.limit, float(len(ask.tokens))))
    yield made
    made.close()


def test_an_answer_is_the_workers(server: Server, path: Path) -> None:
    client = Client(path, nothing)
    assert client.look(ASK) == Found(99, 400.0)
    assert client.look(ASK) == Found(99, 400.0), "the connection is kept"
    client.close()


def test_the_socket_is_the_users_alone_and_goes_with_its_server(server: Server, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server.close()
    assert not path.exists()


def test_engines_have_paths_of_their_own() -> None:
    assert wire.path_of("a") == wire.path_of("a") != wire.path_of("b")
    assert len(str(wire.path_of("x" * 1000))) < 100, "a socket's path is short"


def test_a_directory_that_is_no_directory_is_refused(path: Path) -> None:
    path.parent.symlink_to(path.parent.parent)
    with pytest.raises(WireError, match="not a directory of this user"):
        Server(path, lambda ask: Found(0, 0.0))


@pytest.mark.parametrize("body", [struct.pack(">BI", VERSION + 1, 0), struct.pack(">BI", VERSION, LIMIT + 1), b"\x01"])
def test_foreign_frames_end_the_connection_and_nothing_else(server: Server, path: Path, body: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        peer.sendall(body)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(5)
        assert peer.recv(1) == b""
    assert Client(path, nothing).look(ASK).target == 99


def test_a_body_that_is_no_question_ends_the_connection(server: Server, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        peer.settimeout(5)
        send(peer, msgspec.msgpack.encode({"name": 3}))
        assert peer.recv(1) == b""
    assert Client(path, nothing).look(ASK).target == 99


def test_a_frame_over_the_limit_is_never_sent() -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(WireError, match="is the limit"):
        send(here, bytes(LIMIT + 1))


def test_a_late_frame_is_given_up() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(struct.pack(">BI", VERSION, 8) + b"half")
        with pytest.raises(TimeoutError):
            receive(there, within=0.05)


def test_a_failing_look_up_is_a_miss(path: Path) -> None:
    def fails(ask: Ask) -> Found:
        raise OSError("broken")

    server = Server(path, fails)
    assert Client(path, nothing).look(ASK) == Found(3, 0.0)
    server.close()


def test_a_wedged_worker_delays_the_scheduler_once(path: Path) -> None:
    """The first look-up waits for its time-out; those right after it are misses at once."""
    release, reached = threading.Event(), list[Ask]()

    def wedged(ask: Ask) -> Found:
        reached.append(ask)
        release.wait(30)
        return Found(ask.limit, 0.0)

    server, client = Server(path, wedged), Client(path, nothing)
    assert client.look(ASK) == Found(3, 0.0)
    answers = [client.look(ASK) for _ in range(100)]
    assert answers == [Found(3, 0.0)] * 100
    assert len(reached) <= 5, "each that is reached is waited for: a hundred would be 50 s"
    release.set()
    server.close()


def test_a_worker_that_never_answers_is_asked_ever_less_and_every_miss_is_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left alone for 20 ms, 40 ms, and so on: asked at most 7 times in 1.3 s, where equal pauses would be 32."""
    monkeypatch.setattr(wire, "_PATIENCE", 0.02)
    release, reached, missed = threading.Event(), list[Ask](), list[None]()

    def wedged(ask: Ask) -> Found:
        reached.append(ask)
        release.wait(30)
        return Found(ask.limit, 0.0)

    server, client = Server(path, wedged), Client(path, lambda: missed.append(None))
    asked, end = 0, time.monotonic() + 1.3
    while time.monotonic() < end:
        assert client.look(ASK) == Found(3, 0.0)
        asked += 1
        time.sleep(0.002)
    assert 2 <= len(reached) <= 7
    assert len(missed) == asked
    release.set()
    server.close()


def test_a_worker_that_has_gone_is_a_miss_and_one_that_is_back_is_found(path: Path) -> None:
    server, client = Server(path, lambda ask: Found(7, 0.0)), Client(path, nothing)
    assert client.look(ASK).target == 7
    client.close()
    server.close()
    assert client.look(ASK) == Found(3, 0.0)
    again = Server(path, lambda ask: Found(8, 0.0))
    deadline = time.monotonic() + 10
    while client.look(ASK).target != 8:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again.close()
