"""What is under way on the device, and what to do when it has finished: noticed by polling, never waited for in a step.

Without a device everything has finished when it returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CUDA: Any = torch.cuda  # partly without types


class Pending:
    """Work of one device in the order of the caller's stream. Any thread may poll."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: deque[tuple[Any, Callable[[], None]]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, done: Callable[[float], None]) -> Iterator[None]:
        """The body's work on the caller's stream; ``done(milliseconds)`` is called when it has finished. If the body
        raises, it isn't, and nothing of it runs any more."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            done((time.perf_counter() - started) * 1e3)
            return
        begin, end = (_CUDA.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        except BaseException:
            torch.cuda.synchronize(self._device)
            raise
        end.record()
        self.add(end, lambda: done(begin.elapsed_time(end)))

    def add(self, event: Any, done: Callable[[], None]) -> None:
        """Call ``done`` when ``event`` has happened; at once where it is None."""
        if event is None:
            done()
            return
        self._queue.append((event, done))

    def poll(self, *, wait: bool = False) -> None:
        """Call what is due; with ``wait``, everything when it has happened."""
        if not self._queue or not self._lock.acquire(blocking=wait):
            return
        try:
            for _ in range(len(self._queue)):
                event, done = self._queue.popleft()
                if wait:
                    event.synchronize()
                elif not event.query():
                    self._queue.append((event, done))
                    continue
                done()
        finally:
            self._lock.release()
