"""Other ways from an engine's scheduler to its store: a real socket whose far end answers, hangs, dies or fails."""

import threading
from pathlib import Path
from typing import Any

from blendstore_vllm import wire
from blendstore_vllm.messages import Ask, Found

_put: dict[str, Any] = {}


def put(scheduling: Any, kind: str, folder: str = "") -> int:
    """Ask over a socket in ``folder`` from now on, or directly again (``back``). Returns how many look-ups have reached
    the store over the socket that was there before."""
    reached = list[str]()
    if _put:
        _put["release"].set()
        _put["server"].close()
        scheduling._link.close()
        scheduling._link, reached = _put["direct"], _put["reached"]
        _put.clear()
    if kind == "back":
        return len(reached)
    direct, release, new = scheduling._link, threading.Event(), list[str]()

    def look(ask: Ask) -> Found:
        new.append(ask.name)
        if kind == "fails":
            raise OSError("the store is broken")
        if kind == "hangs":
            release.wait(120)
            raise OSError("too late")
        if kind == "dies" and len(new) > 4:
            server.close()
            raise SystemExit  # of this thread: the connection ends in the middle of a question
        found: Found = direct._look(ask)
        return found

    server = wire.Server(Path(folder) / kind / "a.sock", look)
    _put.update(server=server, direct=direct, release=release, reached=new)
    scheduling._link = wire.Client(Path(folder) / kind / "a.sock", direct._missed)
    return len(reached)
