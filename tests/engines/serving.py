"""Real servers of an engine as both adapters' tests see them: when one is up, and what its log says of prompts."""

import contextlib
import random
import re
import socket
import subprocess
import time
from pathlib import Path

import httpx

LINE = re.compile(
    r"blendstore: request (\S+): prompt (\d+), device prefix (\d+), exact (\d+), reused (\d+), recomputed (\d+), "
    r"fresh (\d+)"
)
COUNTS = ("prompt", "prefix", "exact", "reused", "recomputed", "fresh")


def free_port() -> int:
    """One that nobody listens at now, low enough for the further ports that SGLang counts up from it."""
    for port in random.sample(range(20_000, 50_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port among a hundred")


def await_health(process: "subprocess.Popen[bytes]", url: str, log: Path, seconds: float) -> None:
    """Return once the server answers; an error with the end of its log when it ends before, or takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(log.read_text()[-5000:])
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not healthy: {log.read_text()[-5000:]}")


def logged_prompts(log: Path) -> list[dict[str, int]]:
    """The lines of prompts in a server's log, in order."""
    return [dict(zip(COUNTS, map(int, counts), strict=True)) for _, *counts in LINE.findall(log.read_text())]
