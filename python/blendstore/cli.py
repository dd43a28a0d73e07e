"""The command ``blendstore``: show and check the configuration, run the benchmarks, tell the versions.

Exit codes: 0 done, 1 a benchmark missed what was expected of it, 2 wrong use or wrong configuration, and what a shell
reports for a program that a signal ended: 130 interrupted (SIGINT), 141 the reader of the output has gone (SIGPIPE,
``| head``).
"""

import argparse
import importlib
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from blendstore import machine
from blendstore.config import Config, ConfigError
from blendstore.flags import CommandParser
from blendstore.tiers import coder_of

__all__ = ["main"]

# Name → module and one line of help. A benchmark's module is imported only when that benchmark is asked for, because
# some need torch or an HTTP client.
_BENCHES: Mapping[str, tuple[str, str]] = {
    "multi-doc-qa": ("blendstore.bench.multi_doc_qa", "prompts of several sampled documents: TTFT and its gain"),
    "shuffle-doc-qa": ("blendstore.bench.shuffle_doc_qa", "the same documents in other orders, without separators"),
    "eviction": ("blendstore.bench.eviction", "what each eviction policy saves on traces, beside the optimum"),
    "quality": ("blendstore.bench.quality", "what each way of reuse costs in quality"),
    "codec": ("blendstore.bench.codec", "size against quality and speed of the ways in which records are kept"),
}
_PACKAGES = (
    "blendstore", "blendstore-transformers", "blendstore-sglang", "blendstore-vllm", "numpy", "torch", "transformers",
    "sglang", "vllm",
)  # fmt: skip
_INTERRUPTED = 128 + 2  # SIGINT
_READER_GONE = 128 + 13  # SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; wrong flags leave by ``SystemExit(2)``, as argparse has it."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            _flush()
    except (BrokenPipeError, SystemExit) as error:
        # rich turns a broken pipe into SystemExit(1), which would pass for a benchmark's verdict.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _discard_output()
        return _READER_GONE


def _flush() -> None:
    """Write what is buffered now: at the interpreter's exit it would be too late to say why it failed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _discard_output() -> None:
    """Whatever is still buffered, or written by the interpreter on its way out, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            os.dup2(nowhere, stream.fileno())


def _run(arguments: Sequence[str]) -> int:
    try:
        args = _parser(_wanted_bench(arguments)).parse_args(arguments)
        code: int = args.run(args)
    except ConfigError as error:
        for fault in error.faults:
            print(f"blendstore: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("blendstore: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "blendstore":
            raise
        print(
            f"blendstore: this command needs the package {error.name}; install it with "
            "`pip install 'blendstore[bench,transformers]'`",
            file=sys.stderr,
        )
        return 2
    return code


def _wanted_bench(arguments: Sequence[str]) -> str | None:
    words = [word for word in arguments if not word.startswith("-")][:2]
    return words[1] if len(words) == 2 and words[0] == "bench" and words[1] in _BENCHES else None


def _parser(bench: str | None) -> argparse.ArgumentParser:
    parser = CommandParser(prog="blendstore", description="KV-cache reuse for LLM serving.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print blendstore's version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    config = commands.add_parser("config", help="show or check the configuration")
    actions = config.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print every key with its value and where it comes from")
    show.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: what the environment names")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)
    check = actions.add_parser("check", help="exit with 2 and every reason if it would be refused")
    check.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: what the environment names")
    check.add_argument("--json", action="store_true", help="print JSON: accepted, faults, warnings")
    check.set_defaults(run=_check)

    benches = commands.add_parser("bench", help="run a benchmark").add_subparsers(metavar="BENCHMARK", required=True)
    for name, (module, help_text) in _BENCHES.items():
        chosen = benches.add_parser(name, help=help_text, description=help_text)
        if name == bench:
            loaded = importlib.import_module(module)
            loaded.add_arguments(chosen)
            chosen.set_defaults(run=loaded.run)

    version = commands.add_parser("version", help="print the versions that matter")
    version.add_argument("--json", action="store_true", help="print JSON")
    version.set_defaults(run=_version)
    return parser


def _loaded(file: Path | None) -> Config:
    """The configuration, whose warnings are the command's to tell."""
    logging.getLogger("blendstore.config").addHandler(logging.NullHandler())
    return Config.load(file)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _show(args: argparse.Namespace) -> int:
    config = _loaded(args.file)
    if args.json:
        content = {
            "config": config.as_dict(),
            "origins": dict(config.origins),
            "warnings": list(config.warnings),
        }
        print(json.dumps(content, indent=2))
    else:
        _warn(config.warnings)
        print(config.describe())
    return 0


def _check(args: argparse.Namespace) -> int:
    faults: list[str] = []
    warnings: list[str] = []
    try:
        config = _loaded(args.file)
        warnings += [*config.warnings, *machine.too_large(config)]
        faults += _selector_faults(config, warnings)
        faults += _table_faults(config)
    except ConfigError as error:
        faults += error.faults
    if args.json:
        print(json.dumps({"accepted": not faults, "faults": faults, "warnings": warnings}, indent=2))
        return 2 if faults else 0
    _warn(warnings)
    if faults:
        raise ConfigError(*faults)
    print(f"{args.file or 'configuration'}: accepted")
    return 0


def _selector_faults(config: Config, warnings: list[str]) -> list[str]:
    """What an engine would refuse about the selector. Selectors are tensor code: torch is imported, but only where one
    is named or given options, and blending is not switched off."""
    origins = config.origins
    named = [key for key in ("blend_selector", "blend_selector_options") if origins[key] != "default"]
    if not named or (not config.enable_blending and origins["enable_blending"] != "default"):
        return []
    try:
        from blendstore.blend.selectors import SelectorSettings, make_selector
    except ModuleNotFoundError as error:
        warnings.append(f"{named[0]}: not checked, because the package {error.name} is not installed")
        return []
    settings = SelectorSettings(
        config.blend_check_layers,
        config.blend_recompute_ratios,
        config.blend_thresholds,
        dict(config.blend_selector_options),
    )
    try:
        make_selector(config.blend_selector, settings)
    except Exception as error:  # an entry point of another package may raise anything
        given = "; ".join(f"{key}: {config.as_dict()[key]!r} ({origins[key]})" for key in named)
        return [f"{given}: {error}"]
    return []


def _table_faults(config: Config) -> list[str]:
    """What a start would refuse about the tables of lossy codings."""
    key = next((key for key in ("local_serde", "remote_serde") if getattr(config, key) == "cachegen"), None)
    try:
        if key is not None:
            coder_of(config, key, None)
    except ConfigError as error:
        return list(error.faults)
    return []


class _PrintVersion(argparse.Action):
    """Like argparse's own action, but the installed version is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"blendstore {_own_version()}")
        parser.exit()


def _own_version() -> str:
    try:
        return metadata.version("blendstore")
    except metadata.PackageNotFoundError:
        return "(not installed as a package)"


def _version(args: argparse.Namespace) -> int:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if args.json:
        print(json.dumps(versions, indent=2))
    else:
        print("\n".join(f"{name} {version}" for name, version in versions.items()))
    return 0
