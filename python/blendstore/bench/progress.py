"""How far a bench is: a bar on a terminal, plain lines anywhere else, so that a log shows that it goes on."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

# A line each time that another of these parts is done.
_LINES = 10


class Progress:
    """Progress of several tasks, one after the other, on stderr. Use as a context manager."""

    def __init__(self) -> None:
        self._bar: Any = _bar() if sys.stderr.isatty() else None
        self._task: Any = None
        self._name, self._total, self._done, self._told, self._by_tenths = "", 0, 0, 0, True

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, name: str, total: int, *, by_tenths: bool = True) -> None:
        """Begin a task of ``total`` steps. Without a terminal it says a line at about every tenth of them, unless
        ``by_tenths`` is false because the bench says lines of its own."""
        self._name, self._total, self._done, self._told, self._by_tenths = name, total, 0, 0, by_tenths
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=total)

    def advance(self, steps: int = 1) -> None:
        """``steps`` more are done."""
        self._done += steps
        if self._bar is not None:
            self._bar.advance(self._task, steps)
            return
        tenth = self._done * _LINES // max(1, self._total)
        if self._by_tenths and tenth > self._told:
            self._told = tenth
            self.say(f"{self._name}: {self._done:,} of {self._total:,} ({100 * self._done // self._total} %)")

    def describe(self, text: str) -> None:
        """What is under way, beside the bar."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def say(self, line: str) -> None:
        """A line for those who see no bar."""
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bar(*columns, console=Console(stderr=True))
