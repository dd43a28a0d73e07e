"""The command line: exit codes, output for people and machines, benchmarks loaded only when asked for."""

import argparse
import json
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from blendstore import cli


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BLENDSTORE_CONFIG_FILE", "LMCACHE_CONFIG_FILE", "BLENDSTORE_CHUNK_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_config_show_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("chunk_size: 64\ntenant_salt: s3cret\n")
    assert cli.main(["config", "show", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"file {file}" in out
    assert "s3cret" not in out


def test_config_show_json_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("chunk_size: 64\ntenant_salt: s3cret\n")
    monkeypatch.setenv("BLENDSTORE_CONFIG_FILE", str(file))
    monkeypatch.setenv("BLENDSTORE_CHUNK_SIZE", "32")
    assert cli.main(["config", "show", "--json"]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out)
    assert shown["config"]["chunk_size"] == 32
    assert shown["origins"]["chunk_size"] == "env BLENDSTORE_CHUNK_SIZE"
    assert "wins over 64" in shown["warnings"][0]
    assert shown["config"].keys() == shown["origins"].keys()
    assert "s3cret" not in out


def test_config_check_accepts_with_warnings_and_refuses_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("chunk_size: 64\n")
    monkeypatch.setenv("BLENDSTORE_CHUNK_SIZE", "32")
    assert cli.main(["config", "check", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{file}: accepted\n"
    assert "wins over 64" in captured.err
    assert cli.main(["config", "check"]) == 0
    assert capsys.readouterr().out == "configuration: accepted\n"
    file.write_text("chunk_sise: 64\n")
    assert cli.main(["config", "check", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("blendstore: chunk_sise: 64")
    assert "did you mean chunk_size?" in captured.err


def test_config_check_lists_every_fault_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run shows all that is to be mended; combinations with a key whose value isn't known are no fault."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "chunk_sise: 3\nchunk_size: 0\nenable_controller: true\nlocal_disk: /x\nlocal_cpu: false\n"
        "blend_check_layers: [a]\nblend_recompute_ratios: [0.2, 0.1]\nblend_thresholds: [1, 2]\n"
    )
    assert cli.main(["config", "check", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("blendstore: ") for line in lines)
    named = [line.removeprefix("blendstore: ").split(":")[0].split()[0] for line in lines]
    assert named == ["chunk_sise", "chunk_size", "enable_controller", "blend_check_layers", "max_local_disk_size"]
    assert cli.main(["config", "check", "--json", str(file)]) == 2
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert (told["accepted"], told["warnings"], captured.err) == (False, [], "")
    assert told["faults"] == [line.removeprefix("blendstore: ") for line in lines]


@pytest.mark.parametrize("content", [None, b"no tables"])
def test_config_check_reads_the_tables_that_a_start_would(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing, or not of tables: told by the check, not by a server that has loaded a model before."""
    tables, file = tmp_path / "made.tables", tmp_path / "c.yaml"
    if content is not None:
        tables.write_bytes(content)
    file.write_text(
        f"local_disk: {tmp_path}/d\nmax_local_disk_size: 1\nlocal_serde: cachegen\ncodec_tables: {tables}\n"
    )
    assert cli.main(["config", "check", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"blendstore: codec_tables: {tables} (")


def test_config_check_for_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("chunk_size: 64\n")
    monkeypatch.setenv("BLENDSTORE_CHUNK_SIZE", "32")
    assert cli.main(["config", "check", "--json", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["accepted"], told["faults"]) == (True, [])
    assert "wins over 64" in told["warnings"][0]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("enable_blending: true\nblend_selector: quary", "selector 'quary' is unknown: use one of broken, deviation"),
        ("blend_selector: quary", "'quary' is unknown"),  # engines blend unless a file says that they shall not
        ("enable_blending: true\nblend_selector_options: {rows: 0}", "rows = 0"),
        ("enable_blending: true\nblend_selector_options: {row: 8}", "no option 'row'"),
        ("enable_blending: true\nblend_selector: head\nblend_selector_options: {rows: 8}", "no option 'rows'"),
        ("enable_blending: true\nblend_selector: broken", "no such wheel"),
    ],
)
def test_config_check_refuses_the_selectors_that_an_engine_would(
    written: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry_point(monkeypatch)
    file = tmp_path / "c.yaml"
    file.write_text(written)
    assert cli.main(["config", "check", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("blendstore: blend_selector") and str(file) in line and said in line


@pytest.mark.parametrize(
    "written",
    [
        "enable_blending: true\nblend_selector: deviation",
        "enable_blending: true\nblend_selector: theirs\nblend_selector_options: {anything: 1}",
        "blend_selector_options: {rows: 8, power: 0.25}",
        "enable_blending: false\nblend_selector: quary",
    ],
)
def test_config_check_accepts_selectors_that_are_there_or_not_used(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point(monkeypatch)
    file = tmp_path / "c.yaml"
    file.write_text(written)
    assert cli.main(["config", "check", str(file)]) == 0


def entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's selectors: `theirs`, and `broken`, whose module is missing a part."""
    from blendstore.blend import selectors

    def broken(settings: object) -> None:
        raise ImportError("no such wheel")

    factories = {"theirs": lambda settings: selectors.NoSelector(), "broken": broken}

    def entry_points(*, group: str, name: str | None = None) -> Any:
        named = [n for n in factories if name in (None, n)]
        points = [types.SimpleNamespace(name=n, load=lambda n=n: factories[n]) for n in named]
        return points if name else types.SimpleNamespace(names=set(factories))

    monkeypatch.setattr(selectors, "entry_points", entry_points)


def test_config_check_without_torch_says_what_it_did_not_check(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("enable_blending: true\nblend_selector: quary\n")
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from blendstore.cli import main\n"
        f"sys.exit(main(['config', 'check', {str(file)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{file}: accepted\n")
    assert done.stderr == "warning: blend_selector: not checked, because the package torch is not installed\n"


def test_version_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"blendstore {metadata.version('blendstore')}\n"


@pytest.mark.parametrize(
    ("arguments", "command", "said"),
    [
        (["bench", "quality", "--selectrs", "x"], "bench quality", "no flag --selectrs; did you mean --selectors?"),
        (["bench", "quality", "--selectrs=x", "--promts=1"], "bench quality", "--promts; did you mean --prompts?"),
        (["config", "check", "--jsn", "x"], "config check", "no flag --jsn; did you mean --json?"),
        (["config", "show", "a", "b"], "config show", "unexpected argument b"),
        (["version", "--zzz"], "version", "no flag --zzz; `blendstore version --help` lists the flags"),
        (["bench", "--zzz", "quality"], "bench", "no flag --zzz"),
        (["--versoin", "version"], "", "no flag --versoin; did you mean --version?"),
    ],
)
def test_unknown_flags_are_the_error_of_their_own_command(
    arguments: list[str], command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usage that is shown is the one that lists what may be given there."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    name = f"blendstore {command}".strip()
    assert err.startswith(f"usage: {name} [")
    assert f"{name}: error: " in err.splitlines()[-1] and said in err


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    fake_bench(monkeypatch, 0)
    monkeypatch.setattr(sys.modules["fake_bench"], "run", interrupted)
    assert cli.main(["bench", "quality"]) == 130
    assert capsys.readouterr().err == "blendstore: interrupted\n"


def test_version_for_people_and_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("python 3.")
    assert any(line.startswith("numpy ") for line in lines)
    assert cli.main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["python"].startswith("3.")


def test_versions_of_missing_packages_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_PACKAGES", ("numpy", "surely-not-installed"))
    assert cli.main(["version", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"python", "numpy"}


@pytest.mark.parametrize(
    "arguments", [[], ["config"], ["bench"], ["bench", "nope"], ["config", "show", "--nope"], ["nope"]]
)
def test_wrong_use_leaves_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: blendstore" in capsys.readouterr().err


def test_bench_names_are_listed_without_loading_any(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("multi-doc-qa", "shuffle-doc-qa", "quality"))


def fake_bench(monkeypatch: pytest.MonkeyPatch, code: int) -> list[argparse.Namespace]:
    seen: list[argparse.Namespace] = []
    bench = types.ModuleType("fake_bench")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", type=Path)
        parser.add_argument("--port", type=int, default=8000)

    def run(args: argparse.Namespace) -> int:
        seen.append(args)
        return code

    bench.__dict__.update(add_arguments=add_arguments, run=run)
    monkeypatch.setitem(sys.modules, "fake_bench", bench)
    monkeypatch.setattr(cli, "_BENCHES", {"quality": ("fake_bench", "help"), "broken": ("not_installed_x.y", "help")})
    return seen


@pytest.mark.parametrize("code", [0, 1])
def test_bench_gets_its_flags_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    seen = fake_bench(monkeypatch, code)
    assert cli.main(["bench", "quality", "--json", "out.json", "--port", "1"]) == code
    assert (seen[0].json, seen[0].port) == (Path("out.json"), 1)


def test_bench_that_lacks_a_package_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_bench(monkeypatch, 0)
    assert cli.main(["bench", "broken"]) == 2
    assert "needs the package not_installed_x; install it with" in capsys.readouterr().err


def test_a_module_of_ours_that_is_missing_is_no_users_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_BENCHES", {"quality": ("blendstore.bench.not_there", "help")})
    with pytest.raises(ModuleNotFoundError):
        cli.main(["bench", "quality"])


def test_command_line_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install blendstore` gives the command without the blend core's dependencies."""
    code = (
        "import sys\n"
        "from blendstore.cli import main\n"
        "code = main(['config', 'show']) or main(['version'])\n"
        "sys.exit(code or ('torch' in sys.modules) * 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_arguments_come_from_the_process_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["blendstore", "version"])
    assert cli.main() == 0
    assert "numpy" in capsys.readouterr().out


MAIN = "import sys; from blendstore.cli import main; sys.exit(main())"
TABLE = """
import sys, types
from blendstore import cli
bench = types.ModuleType("bench")
bench.add_arguments = lambda parser: None
def run(args):
    from blendstore.bench.report import print_table
    print_table("t", [{"n": n} for n in range(2_000)], {"n": "n"})
    return 0
bench.run = run
sys.modules["bench"] = bench
cli._BENCHES = {"quality": ("bench", "help")}
sys.exit(cli.main(["bench", "quality"]))
"""


@pytest.mark.parametrize(
    "arguments",
    ["config show", "config show --json", "version", "--help", "config check", pytest.param(TABLE, id="table")],
)
def test_a_reader_that_has_gone_is_no_error(arguments: str) -> None:
    """``blendstore config show | head -1``: no traceback, and what the shell says of a program ended by SIGPIPE."""
    command = ["-c", TABLE] if arguments == TABLE else ["-c", MAIN, *arguments.split()]
    unread, output = os.pipe()
    os.close(unread)
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # else argparse meets the error itself, and passes over it
    done = subprocess.run(
        [sys.executable, *command], check=False, stdout=output, stderr=subprocess.PIPE, text=True, env=buffered
    )
    os.close(output)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_pipe_on_stderr_and_closed_streams_are_no_traceback() -> None:
    unread, output = os.pipe()
    os.close(unread)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "config", "show", "/nowhere"], check=False, stdout=subprocess.PIPE, stderr=output
    )
    os.close(output)
    assert (done.returncode, done.stdout) == (141, b"")
    shut = ["sh", "-c", 'exec "$0" "$@" >&-', sys.executable, "-c", MAIN, "version"]
    done = subprocess.run(shut, check=False, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
