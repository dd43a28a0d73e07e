"""Files that benches write: what can't be written is told before the run, and nothing but files is replaced."""

import json
import os
import threading
from pathlib import Path

import pytest

from blendstore.bench import report
from blendstore.bench.results import Results
from blendstore.cli import main


def test_what_cannot_be_written_is_told_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    report.check_target(tmp_path / "new" / "rows.json")
    assert not list((tmp_path / "new").iterdir())
    report.check_target(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    for path in (tmp_path, tmp_path / "file" / "rows.json", Path("/proc/rows.json"), Path("/proc/no/rows.json")):
        with pytest.raises(OSError, match=str(path)):
            report.check_target(path)
    for name in ("plot", "plot.json", "plot.xyz"):
        with pytest.raises(ValueError, match=rf"--plot .*{name}: give a file that ends"):
            report.check_target(tmp_path / name, plot=True)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As root, `--json /dev/null` would put a file in the place of the device."""
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    report.check_target(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    report.write_json(pipe, [{"kl": 0.5}])
    reader.join(30)
    assert json.loads(read[0])["rows"] == [{"kl": 0.5}]
    assert pipe.is_fifo()


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    report.write_json(tmp_path / "link", [])
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text())["rows"] == []


@pytest.mark.parametrize("flags", [["--set", "exponent=nan"], ["--set", "exponent=1e400"], ["--seed", "-1"]])
def test_eviction_refuses_numbers_that_no_trace_can_be_made_with(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "eviction", "--workloads", "rag", "--policies", "lru", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        "1",
        "{}",
        "not JSON",
        '{"settings": {"seed": 2}}',
        '{"settings": {"seed": 1}}\n{"x": 1}\n',
        '{"settings": {"seed": 1}}\n[]\n',
        '{"settings": {"seed": 1}}\n{"kind": "a", "seed": 1, "method": ["a"]}\n',
    ],
)
def test_another_files_lines_are_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"other\.jsonl"):
        Results.open(file, {"seed": 1})
    assert file.read_text() == content
