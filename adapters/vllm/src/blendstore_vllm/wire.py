"""Look-ups across processes: the scheduler asks, the worker answers, over a Unix socket.

A frame is the protocol's version (1 byte), the length of its body (4 bytes, big-endian) and the body, msgpack of one
`Ask` or `Found`. Frames over `LIMIT` are refused before anything is read. The socket's path is unique to the engine, in
a directory that only its user enters, and the socket is the user's alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from .messages import Ask, Found

log = logging.getLogger("blendstore.vllm")
VERSION = 1
LIMIT = 16 << 20
"""Bytes of a frame's body: four million tokens."""
_HEADER = struct.Struct(">BI")
_PATIENCE = 0.5
"""Seconds that an answer may take, and that a worker that failed is left alone the first time; then twice as long."""
_LONGEST = 30.0
"""Seconds that it is left alone at most: a worker that never answers again costs a sixtieth of the time."""
Look = Callable[[Ask], Found]


class WireError(RuntimeError):
    """The other side speaks no protocol of ours, or has gone."""


class Link(Protocol):
    """The scheduler's way to its worker's store."""

    def look(self, ask: Ask) -> Found:
        """Never raises; what can't be asked has no hits."""


_here: dict[str, Look] = {}


def publish(engine: str, look: Look, *, separate: bool) -> Server | None:
    """Answer the scheduler of ``engine`` in this process and, when it is a ``separate`` one, over a socket."""
    _here[engine] = look
    return Server(path_of(engine), look) if separate else None


def withdraw(engine: str) -> None:
    """Stop answering within this process."""
    _here.pop(engine, None)


def link(engine: str, missed: Callable[[], None]) -> Link | None:
    """The worker of ``engine``; None when it has no store. ``missed`` is called for each look-up without an answer."""
    if engine in _here:
        return _Direct(_here[engine], missed)
    path = path_of(engine)
    return Client(path, missed) if path.is_socket() else None


def path_of(engine: str) -> Path:
    """Where the worker of ``engine`` listens."""
    name = hashlib.blake2b(engine.encode(), digest_size=12).hexdigest()
    return Path(tempfile.gettempdir()) / f"blendstore-{os.getuid()}" / f"{name}.sock"


class _Direct:
    def __init__(self, look: Look, missed: Callable[[], None]) -> None:
        self._look, self._missed = look, missed

    def look(self, ask: Ask) -> Found:
        try:
            return self._look(ask)
        except Exception as error:
            self._missed()
            log.warning("looking a prompt up failed: %s", f"{type(error).__name__}: {error}")
            return Found(ask.held, 0.0)


class Server:
    """Answers on a thread of its own, one connection after the other."""

    def __init__(self, path: Path, look: Look) -> None:
        _private(path.parent)
        path.unlink(missing_ok=True)
        self._path, self._look = path, look
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(before)
        self._socket.listen(4)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="blendstore-lookups", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; the path is free again."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), name="blendstore-lookup", daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        decoder = msgspec.msgpack.Decoder(Ask)
        with peer:
            try:
                while True:
                    ask = decoder.decode(receive(peer))
                    try:
                        found = self._look(ask)
                    except Exception as error:
                        log.warning("looking a prompt up failed: %s", f"{type(error).__name__}: {error}")
                        found = Found(ask.held, 0.0)
                    send(peer, msgspec.msgpack.encode(found))
            except (WireError, OSError, msgspec.MsgspecError) as error:
                log.debug("a connection for look-ups ended: %s", error)


class Client:
    """Asks one worker. A failure or a late answer is a miss, and nothing is asked again for a while, which doubles as
    long as nothing is answered."""

    def __init__(self, path: Path, missed: Callable[[], None]) -> None:
        self._path, self._missed = path, missed
        self._socket: socket.socket | None = None
        self._rest, self._pause = 0.0, _PATIENCE
        self._decoder = msgspec.msgpack.Decoder(Found)

    def look(self, ask: Ask) -> Found:
        miss = Found(ask.held, 0.0)
        if time.monotonic() < self._rest:
            self._missed()
            return miss
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(_PATIENCE)
                self._socket.connect(str(self._path))
            send(self._socket, msgspec.msgpack.encode(ask))
            found: Found = self._decoder.decode(receive(self._socket, within=_PATIENCE))
            self._pause = _PATIENCE
            return found
        except (WireError, OSError, msgspec.MsgspecError) as error:
            self.close()
            self._missed()
            log.warning(
                "the worker's store didn't answer, prompts are computed for %g s: %s",
                self._pause,
                f"{type(error).__name__}: {error}",
            )
            self._rest = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST)
            return miss

    def close(self) -> None:
        """Drop the connection; a late answer must not be taken for the next one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def send(peer: socket.socket, body: bytes) -> None:
    """One frame. Raises `WireError` when ``body`` is too long."""
    if len(body) > LIMIT:
        raise WireError(f"a frame of {len(body)} bytes, and {LIMIT} is the limit")
    peer.sendall(_HEADER.pack(VERSION, len(body)) + body)


def receive(peer: socket.socket, *, within: float | None = None) -> bytes:
    """The body of one frame, all of it ``within`` seconds. Raises `WireError` or what the socket raises."""
    end = None if within is None else time.monotonic() + within
    version, length = _HEADER.unpack(_exactly(peer, _HEADER.size, end))
    if version != VERSION:
        raise WireError(f"protocol version {version}, and this side speaks {VERSION}")
    if length > LIMIT:
        raise WireError(f"a frame of {length} bytes, and {LIMIT} is the limit")
    return _exactly(peer, length, end)


def _exactly(peer: socket.socket, count: int, end: float | None) -> bytes:
    parts, missing = [], count
    while missing:
        if end is not None:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{missing} of {count} bytes are late")
            peer.settimeout(left)
        part = peer.recv(min(missing, 1 << 20))
        if not part:
            raise WireError(f"the connection ended {missing} bytes before the end of a frame")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _private(directory: Path) -> None:
    """Make ``directory`` one that only this user enters. Raises `WireError` when it is somebody else's."""
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise WireError(f"{directory} is not a directory of this user: remove it")
    directory.chmod(0o700)
