"""Command lines: an unknown flag is the error of the command that it was given to, with the nearest name."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

__all__ = ["CommandParser", "port", "positive"]


class CommandParser(argparse.ArgumentParser):
    """A parser whose subcommands refuse unknown arguments themselves, instead of leaving them to the outermost parser,
    whose usage line says nothing of the subcommand's flags."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse has it, but nothing unknown comes back: it leaves by ``SystemExit(2)``."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # What stands behind an unknown flag is its value.
            flags = [argument for argument in unknown if argument.startswith("-")]
            self.error("; ".join(self._unknown(argument) for argument in flags or unknown))
        return found, unknown

    def _unknown(self, argument: str) -> str:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {argument}"
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        return f"no flag {name}; " + (f"did you mean {near[0]}?" if near else f"`{self.prog} --help` lists the flags")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def port(text: str) -> int:
    """A port of TCP."""
    value = positive(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{value} is not at most 65535")
    return value
