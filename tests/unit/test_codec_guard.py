"""The quality guard: what costs more than the bound is not used, and what it measures is what the coders do."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from blendstore._core import Coder
from blendstore.codec import guard
from blendstore.codec.formats import FORMATS
from blendstore.codec.train import Training, train
from blendstore.config import Config
from tests.unit.test_codec_tables import LAYERS, SAMPLES, SHAPE, made, payload


def config(folder: Path, **more: object) -> Config:
    (folder / "small.tables").write_bytes(train(SHAPE, SAMPLES, Training(level=2, chain=3)))
    given = {
        "local_disk": str(folder / "disk"),
        "max_local_disk_size": 0.05,
        "codec_tables": str(folder / "small.tables"),
        "chunk_size": 32,
        **more,
    }
    return Config.load(env={}, overrides=given)


def kv(tokens: int) -> Any:
    _, raw = payload(made(tokens, 9), 0)
    shape = (LAYERS, 2, tokens, SHAPE.kv_heads, SHAPE.head_dim)
    return torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(shape)


def test_only_what_changes_records_is_measured(tmp_path: Path) -> None:
    """Tiers that are not there, lossless codings and raw memory cost nothing at start."""
    assert guard.lossy(config(tmp_path, local_serde="lossless", remote_serde="cachegen")) == []
    assert guard.lossy(config(tmp_path, local_format="int4")) == [], "exact prefixes stay raw"
    both = config(tmp_path, local_serde="cachegen", local_format="int4", enable_blending=True)
    assert guard.lossy(both) == ["local_serde", "local_format"]


@pytest.mark.parametrize(("kl", "kept"), [(0.049, True), (0.051, False), (float("nan"), False)])
def test_above_the_bound_records_are_raw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kl: float, kept: bool
) -> None:
    """One line says what, how much, the bound and what is used instead; a KL that is no number is above every bound."""
    given = config(tmp_path, local_serde="cachegen", local_format="int8", local_format_exact=True)
    with caplog.at_level(logging.WARNING, logger="blendstore.codec"):
        found, verdicts = guard.guarded(given, guard.codes(given), lambda code: kl)
    assert (found.local_serde, found.local_format) == (("cachegen", "int8") if kept else ("naive", "raw"))
    assert [verdict.kept for verdict in verdicts] == [kept, kept]
    assert len(caplog.records) == (0 if kept else 2)
    if not kept:
        assert "local_serde: cachegen" in caplog.text and "codec_max_kl 0.05: naive" in caplog.text
    assert found.max_local_disk_size == given.max_local_disk_size and found.origins == given.origins


def test_what_is_measured_is_what_the_coders_do(tmp_path: Path) -> None:
    """Chunk by chunk, each at its own position, with the shorter one at the end."""
    given = config(tmp_path, local_serde="cachegen", local_format="int8", enable_blending=True)
    whole = kv(80)
    seen: list[torch.Tensor] = []

    def measure(code: guard.Code) -> float:
        seen.append(code(whole))
        return 0.0

    guard.guarded(given, guard.codes(given), measure)
    coder = Coder.cachegen((tmp_path / "small.tables").read_bytes())
    parts = []
    for position, part in ((0, whole[:, :, :32]), (32, whole[:, :, 32:64]), (64, whole[:, :, 64:])):
        raw = part.contiguous().view(torch.uint8).numpy().tobytes()
        coded = coder.encode(raw, part.shape[2], source_position=position)
        back = coder.decode(coded, len(raw), part.shape[2], source_position=position)
        parts.append(torch.frombuffer(bytearray(back), dtype=torch.bfloat16).view(part.shape))
    assert torch.equal(seen[0], torch.cat(parts, 2)) and not torch.equal(seen[0], whole)
    int8 = FORMATS["int8"]
    wanted = [int8.unpack(int8.pack(part), torch.bfloat16) for part in whole.split(32, 2)]
    assert torch.equal(seen[1], torch.cat(wanted, 2))


def test_what_can_not_be_measured_is_used_and_the_rest_is_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = config(tmp_path, local_serde="cachegen", local_format="int8", enable_blending=True)
    calls: list[guard.Code] = []

    def measure(code: guard.Code) -> float:
        calls.append(code)
        if len(calls) == 1:
            raise RuntimeError("no memory is left")
        return 1.0

    found, verdicts = guard.guarded(given, guard.codes(given), measure)
    assert (found.local_serde, found.local_format) == ("cachegen", "raw")
    assert [verdict.key for verdict in verdicts] == ["local_format"]
    assert "local_serde: cachegen is not measured: RuntimeError: no memory is left" in caplog.text


def test_divergence_is_kullback_and_leibler_s() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    wanted = (0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log()) / 2
    assert guard.divergence(p.log(), q.log()) == pytest.approx(float(wanted), rel=1e-5)
    assert guard.divergence(p.log(), p.log()) == 0
