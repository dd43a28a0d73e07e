"""A configuration that asks for more than the machine has is told so before memory ends."""

import logging
from pathlib import Path

import pytest

from blendstore import machine
from blendstore.cli import main
from blendstore.config import Config
from blendstore.tiers import open_store


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    whole = machine.memory_bytes(limit)
    assert whole > 0
    limit.write_text("max\n")
    assert machine.memory_bytes(limit) == whole
    limit.write_text("4096\n")
    assert machine.memory_bytes(limit) == 4096


def test_more_memory_than_there_is_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """In the log where a store is opened, and from ``config check``, once each; what fits is passed over."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: 3 << 29)
    file = tmp_path / "blend.yaml"
    for size, wanted in ((1, 0), (2, 1)):
        config = Config.load(env={}, overrides={"max_local_cpu_size": size})
        caplog.clear()
        with caplog.at_level(logging.WARNING, "blendstore"):
            open_store(config)
        assert caplog.text.count(f"max_local_cpu_size: {size} GiB (argument) is more than the 1.5 GiB") == wanted
        file.write_text(f"max_local_cpu_size: {size}\n")
        assert main(["config", "check", str(file)]) == 0
        assert capsys.readouterr().err.count("is more than the 1.5 GiB") == wanted
