"""Forms of a configuration value: how text, YAML and Python values become one type, or are rejected.

A form reads the same value from every source: ``"0.15"`` from the environment and ``0.15`` from YAML are one number.
None of them guesses: what is not clearly meant is rejected with the accepted form.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote, unquote

from blendstore._core import remote_url_fault

__all__ = [
    "Form",
    "Rejected",
    "float_list",
    "int_list",
    "local_path",
    "local_paths",
    "mapping",
    "number",
    "one_of",
    "optional",
    "remote_place",
    "scalar_mapping",
    "shown",
    "switch",
    "text",
    "text_list",
    "whole",
]

T = TypeVar("T")


class Rejected(ValueError):
    """A value that a form doesn't take, with a reason worth telling beyond the accepted form."""


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """How one kind of value is read; ``accepted`` completes the sentence "… is not"."""

    accepted: str
    reader: Callable[[object], T]

    def read(self, raw: object) -> T:
        """The value in its type. Raises ``ValueError`` for every other value, whatever Python itself makes of it: a
        number beyond floats, JSON nested too deeply."""
        try:
            return self.reader(raw)
        except Rejected:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise ValueError from None


_LONGEST = 200


def shown(value: object) -> str:
    """``value`` for a message: what ``repr`` says, at most 200 characters of it; never raises."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a value within itself
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def switch() -> Form[bool]:
    """A boolean, in any case: true, yes, on, 1, false, no, off, 0."""

    def read(raw: object) -> bool:
        return raw if isinstance(raw, bool) else _SWITCH[_word(raw)]

    return Form("true or false (or yes, no, on, off, 1, 0)", _keyed(read))


def whole(low: int, high: int | None = None) -> Form[int]:
    """A whole number of at least ``low`` and at most ``high``."""

    def read(raw: object) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError
        return _within(int(_digits(raw)), low, high)

    return Form(f"a whole number {_range(low, high)}", read)


def number(low: float, high: float | None = None, *, above: bool = False) -> Form[float]:
    """A finite number of at least ``low`` (more than it with ``above``) and at most ``high``."""

    def read(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError
        value = float(_digits(raw))
        if not math.isfinite(value) or (above and value <= low):
            raise ValueError
        return _within(value, low, high)

    accepted = f"above {low}" if above else _range(low, high)
    return Form(f"a number {accepted}{f' and at most {high}' if above and high is not None else ''}", read)


def float_list(low: float, high: float | None = None) -> Form[tuple[float, ...]]:
    """One number or several: ``0.15``, ``[0.15, 0.1]`` or ``"0.15, 0.1"``."""
    return _several(number(low, high), f"a number, a list or a comma string of numbers {_range(low, high)}")


def int_list(low: int, high: int | None = None) -> Form[tuple[int, ...]]:
    """One whole number or several."""
    return _several(whole(low, high), f"a whole number, a list or a comma string of them, {_range(low, high)}")


def text_list() -> Form[tuple[str, ...]]:
    """One word or several."""
    return _several(text(), "a text, a list or a comma string of texts")


def text() -> Form[str]:
    """A text as it is, outer blanks included. Half of a surrogate pair, which no encoding can write, is no text."""

    def read(raw: object) -> str:
        if not isinstance(raw, str):
            raise ValueError
        raw.encode()
        return raw

    return Form("a text (in quotes, if it looks like a number or a boolean)", read)


def one_of(choices: Mapping[str, Any]) -> Form[Any]:
    """One of the names, in any case, given as the value it stands for."""
    named = sorted(set(choices.values()))
    return Form(f"one of {', '.join(named)}", _keyed(lambda raw: choices[_word(raw)]))


def optional(form: Form[T]) -> Form[T | None]:
    """``form``, or nothing: null in YAML, an empty text, ``none`` or ``null`` in the environment."""

    def read(raw: object) -> T | None:
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in ("", "none", "null")):
            return None
        return form.read(raw)

    return Form(f"{form.accepted}, or null", read)


def mapping() -> Form[Mapping[str, Any]]:
    """A mapping, or the JSON text of one."""

    def read(raw: object) -> Mapping[str, Any]:
        value = json.loads(raw) if isinstance(raw, str) else raw
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError
        return dict(value)

    return Form("a mapping from names to values, or its JSON", read)


def scalar_mapping() -> Form[Mapping[str, float | int | str]]:
    """A mapping from names to finite numbers or texts, its JSON, or a comma string like ``rows=32, power=0.25``."""

    def scalar(item: object) -> float | int | str:
        if isinstance(item, bool) or not isinstance(item, int | float):
            return text().read(item)
        if not math.isfinite(item):
            raise ValueError
        return item

    def read(raw: object) -> Mapping[str, float | int | str]:
        if isinstance(raw, str) and not raw.lstrip().startswith("{"):
            pairs = [pair.partition("=") for pair in raw.split(",") if pair.strip()]
            if not all(name.strip() and equals and value.strip() for name, equals, value in pairs):
                raise ValueError
            return {name.strip(): scalar(_scalar(value.strip())) for name, _, value in pairs}
        return {name: scalar(item) for name, item in mapping().read(raw).items()}

    return Form('a mapping from names to numbers or texts, its JSON, or a text like "rows=32, power=0.25"', read)


def local_path(env: Mapping[str, str] | None = None, what: str = "directory") -> Form[Path]:
    """An absolute directory, with one meaning for each way of writing it.

    ``/x`` is itself, ``file:///x`` is ``/x`` (percent signs decoded), ``~/x`` is below the home directory, ``$NAME``
    and ``${NAME}`` are variables. Rejected: ``file://x`` (x would be a host), ``~user``, an unset variable, and a
    relative path, whose meaning would depend on where the process was started.
    """

    def read(raw: object) -> Path:
        variables = os.environ if env is None else env
        if isinstance(raw, Path):
            raw = str(raw)
        if not isinstance(raw, str):
            raise ValueError
        value = raw.strip()
        is_url = value.startswith("file://")
        value = value.removeprefix("file://")
        if not is_url and (value == "~" or value.startswith("~/")):
            value = "$HOME" + value[1:]

        def variable(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            if not variables.get(name):
                raise Rejected(f"variable {name} is not set")
            return quote(variables[name]) if is_url else variables[name]

        value = re.sub(r"\$(?:(\w+)|\{(\w+)\})", variable, value)
        value = unquote(value) if is_url else value
        if is_url and not value.startswith("/"):
            host = value.split("/", 1)[0]
            raise Rejected(f"{host!r} stands where a host does; write file:/// with three slashes")
        if not value.startswith("/"):
            raise Rejected("it is relative to wherever the process was started")
        if "\0" in value:
            raise ValueError
        return Path(value)

    return Form(f"an absolute {what}: /x, file:///x, ~/x or $NAME/x", read)


def local_paths(env: Mapping[str, str] | None = None) -> Form[tuple[Path, ...]]:
    """One directory or several, each as `local_path` reads it."""
    one = local_path(env)
    several = _several(one, "")

    def read(raw: object) -> tuple[Path, ...]:
        return several.read([raw] if isinstance(raw, Path) else raw)

    return Form(f"{one.accepted}; or a list or a comma string of them", read)


def remote_place() -> Form[str]:
    """A URL of the remote tier, checked as the tier itself reads it. Reasons name no secrets."""

    def read(raw: object) -> str:
        if not isinstance(raw, str):
            raise ValueError
        raw.encode()
        fault = remote_url_fault(raw)
        if fault is not None:
            raise Rejected(fault)
        return raw

    forms = "redis://, rediss://, redis-cluster://, redis-sentinel://, unix://, s3:// or file:///"
    return Form(f"a URL of a remote tier ({forms})", read)


def _word(raw: object) -> str:
    return str(raw).strip().lower() if isinstance(raw, str | int) else ""


def _keyed(read: Callable[[object], T]) -> Callable[[object], T]:
    """``read``, with a missing key as a wrong value."""

    def wrapped(raw: object) -> T:
        try:
            return read(raw)
        except KeyError:
            raise ValueError from None

    return wrapped


def _several(form: Form[T], accepted: str) -> Form[tuple[T, ...]]:
    def read(raw: object) -> tuple[T, ...]:
        items = raw.split(",") if isinstance(raw, str) else raw if isinstance(raw, list | tuple) else [raw]
        if not items:
            raise ValueError
        return tuple(form.read(item.strip() if isinstance(item, str) else item) for item in items)

    return Form(accepted, read)


N = TypeVar("N", int, float)


def _digits(raw: N | str) -> N | str:
    """``raw``, unless it is a text that Python reads and people don't: ``1_0``, digits of other scripts."""
    if isinstance(raw, str) and ("_" in raw or not raw.isascii()):
        raise ValueError
    return raw


def _within(value: N, low: float, high: float | None) -> N:
    if value < low or (high is not None and value > high):
        raise ValueError
    return value


def _range(low: float, high: float | None) -> str:
    return f"of at least {low}" if high is None else f"from {low} to {high}"


def _scalar(word: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
