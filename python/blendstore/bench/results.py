"""Results of a long run, kept as JSON lines so that nothing measured is lost when it is interrupted.

The first line holds the run's settings; a file of other settings is refused, because its numbers could not be compared.
Every further line is one result. A line that was cut off by a crash is ignored and measured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

Key = tuple[str, float, str]


class Results:
    """Results by (kind, seed, method); appended to a file if there is one. Use as a context manager."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = dict(settings)
        self._found: dict[tuple[str, int, Key], dict[str, Any]] = {}
        self._file: IO[str] | None = None

    @classmethod
    def open(cls, path: Path | None, settings: Mapping[str, Any]) -> Results:
        """Results with what ``path`` holds already. Raises ``ValueError`` when it belongs to other settings."""
        results = cls(path, settings)
        if path is not None and path.is_file():
            results._read(path)
        return results

    def _read(self, path: Path) -> None:
        for number, line in enumerate(path.read_text().splitlines()):
            try:
                content = json.loads(line)
            except ValueError:
                if number == 0:
                    raise ValueError(f"{path} is not a results file: its first line is not JSON") from None
                continue
            if number == 0:
                if not isinstance(content, dict) or "settings" not in content:
                    raise ValueError(f"{path} is not a results file: it begins with no settings; give another file")
                if content["settings"] != self._settings:
                    raise ValueError(
                        f"{path} belongs to another run: it has {content['settings']}, this run {self._settings}; "
                        "give another file or the same settings"
                    )
                continue
            try:
                selector, ratio, provenance = content["method"]
                self._found[content["kind"], content["seed"], (selector, ratio, provenance)] = content["result"]
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}, line {number + 1}, is no result of this bench: give another file") from None

    def __enter__(self) -> Results:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = not self._path.is_file() or self._path.stat().st_size == 0
            broken = not fresh and not self._path.read_bytes().endswith(b"\n")
            self._file = self._path.open("a")
            if fresh:
                self._write({"settings": self._settings})
            elif broken:
                self._file.write("\n")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def has(self, kind: str, seed: int, method: Key) -> bool:
        """Whether this was measured."""
        return (kind, seed, method) in self._found

    def get(self, kind: str, seed: int, method: Key) -> dict[str, Any]:
        """A result; ``KeyError`` when it was not measured."""
        return self._found[kind, seed, method]

    def add(self, kind: str, seed: int, method: Key, result: Mapping[str, Any]) -> None:
        """Keep a result, on disk before the call returns."""
        self._found[kind, seed, method] = dict(result)
        self._write({"kind": kind, "seed": seed, "method": method, "result": result})

    def _write(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(content) + "\n")
            self._file.flush()
