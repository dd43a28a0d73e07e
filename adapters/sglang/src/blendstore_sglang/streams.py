"""Order on the device: fills run on the engine's forward stream, copies out on one of their own, and what is finished
is noticed by polling. Without a device everything is finished when it returns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CUDA: Any = torch.cuda  # partly without types


class Streams:
    """``forward`` is the engine's forward stream, or None on a CPU."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self._side: Any = None if forward is None else _CUDA.Stream(forward.device)
        self._pending: deque[tuple[Any, Callable[[], None]]] = deque()

    @contextmanager
    def filling(self, done: Callable[[float], None]) -> Iterator[None]:
        """Run on the forward stream, behind what the scheduler has queued; the scheduler's own stream waits for it.
        ``done(milliseconds)`` is called when it has finished; if the body raises, it isn't, and nothing runs any
        more."""
        if self._forward is None:
            started = time.perf_counter()
            yield
            done((time.perf_counter() - started) * 1e3)
            return
        scheduler = torch.cuda.current_stream(self._forward.device)
        begin, end = (_CUDA.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._forward):
            self._forward.wait_stream(scheduler)
            begin.record()
            try:
                yield
            except BaseException:
                torch.cuda.synchronize(self._forward.device)
                raise
            finally:
                end.record()
                scheduler.wait_stream(self._forward)
        self._pending.append((end, lambda: done(begin.elapsed_time(end))))

    @contextmanager
    def copying(self, done: Callable[[], None]) -> Iterator[None]:
        """Run on the side stream, behind all that was queued so far. ``done()`` is called when it has finished; if the
        body raises, it isn't, and nothing runs any more."""
        if self._side is None:
            yield
            done()
            return
        self._side.wait_stream(torch.cuda.current_stream(self._forward.device))
        self._side.wait_stream(self._forward)
        end = _CUDA.Event()
        with torch.cuda.stream(self._side):
            try:
                yield
            except BaseException:
                self._side.synchronize()
                raise
            end.record()
        self._pending.append((end, done))

    @property
    def asynchronous(self) -> bool:
        """Whether something may be unfinished when a body has returned."""
        return self._forward is not None

    def poll(self, *, wait: bool = False) -> bool:
        """Call what is done; with ``wait``, for all that is pending. Returns whether anything was called."""
        called = False
        for _ in range(len(self._pending)):
            end, done = self._pending.popleft()
            if wait:
                end.synchronize()
            elif not end.query():
                self._pending.append((end, done))
                continue
            done()
            called = True
        return called
