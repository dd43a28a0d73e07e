"""Real servers for the tests of the remote tier, on free ports of this machine; `make services` puts them there."""

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SERVER = Path(__file__).parents[1] / ".services" / "bin" / "redis-server"


class Redis:
    """A real server on a free port of this machine."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._directory = directory
        self.start()

    @property
    def url(self) -> str:
        """For ``remote_url``."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """On the same port each time, empty."""
        assert SERVER.exists(), f"{SERVER} is missing: run `make services`"
        command = [
            str(SERVER),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(self._directory),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(lambda: self.say("PING") == b"+PONG\r\n")

    def say(self, *parts: str) -> bytes:
        """One command and its short answer; nothing where no server answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as stream:
                words = b"".join(b"$%d\r\n%s\r\n" % (len(part), part.encode()) for part in parts)
                stream.sendall(b"*%d\r\n" % len(parts) + words)
                return stream.recv(4096)
        except OSError:
            return b""

    def signal(self, number: int) -> None:
        """Pauses it, or lets it go on."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """At once, as a crash does."""
        self._process.kill()
        self._process.wait()


def eventually(happens: Callable[[], bool]) -> None:
    """Waits for what happens by itself, far longer than any pause of the tier."""
    end = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end, "not within a minute"
        time.sleep(0.02)
