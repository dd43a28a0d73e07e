"""Records that are coded on their way to disk come back as they were, also after a restart."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blendstore.codec.train import Training, train
from blendstore.config import Config, ConfigError
from blendstore.tiers import Payload, open_store
from tests.records import CHUNK, array, reserve, tenant, text
from tests.unit.test_codec_tables import LAYERS, SAMPLES, SHAPE, made, payload

BYTES = LAYERS * SHAPE.width * 2


PAYLOAD = Payload("bfloat16", LAYERS, SHAPE.kv_heads, SHAPE.head_dim)


def config(folder: Path, **more: object) -> Config:
    given = {
        "local_disk": str(folder / "disk"),
        "max_local_disk_size": 0.05,
        "max_local_cpu_size": 0.01,
        "chunk_size": CHUNK,
        **more,
    }
    return Config.load(env={}, overrides=given)


def through_a_restart(settings: Config, raw: bytes) -> bytes:
    """Stores one record, closes the store, opens another and loads the record from its disk."""
    store = open_store(settings, payload=PAYLOAD)
    reservation = reserve(store, tenant(), text(3, CHUNK), bytes_per_token=BYTES, source_position=40)
    array(reservation.buffer(0))[:] = np.frombuffer(raw, np.uint8)
    assert reservation.commit() == 1
    keys = reservation.keys
    store.close()
    store = open_store(settings, payload=PAYLOAD)
    ticket = store.prefetch(tenant(), keys)
    assert ticket.wait(20.0)
    assert ticket.outcomes == b"\x02"
    back = array(store.lookup(keys).buffer(0))[: len(raw)].tobytes()
    store.close()
    return back


@pytest.mark.parametrize("serde", ["naive", "lossless"])
def test_case_c02_bit_for_bit_through_disk_and_restart(tmp_path: Path, serde: str) -> None:
    _, raw = payload(made(CHUNK, 9), 40)
    assert through_a_restart(config(tmp_path, local_serde=serde), raw) == raw


@pytest.mark.parametrize(
    "other",
    [
        replace(PAYLOAD, element="float16"),
        replace(PAYLOAD, layers=LAYERS + 1),
        replace(PAYLOAD, kv_heads=2 * SHAPE.kv_heads, head_dim=SHAPE.head_dim // 2),
    ],
    ids=["element", "layers", "heads"],
)
def test_tables_of_other_records_are_refused(tmp_path: Path, other: Payload) -> None:
    """Also where a token has as many bytes: what comes back would be other KV."""
    (tmp_path / "small.tables").write_bytes(train(SHAPE, SAMPLES, Training(level=2, chain=3)))
    settings = config(tmp_path, local_serde="cachegen", codec_tables=str(tmp_path / "small.tables"))
    with pytest.raises(ConfigError, match=f"codec_tables: .* they are of {PAYLOAD}, this model has {other}"):
        open_store(settings, payload=other)
    open_store(settings, payload=PAYLOAD).close()


def test_tables_that_are_no_file_are_refused(tmp_path: Path) -> None:
    """A pipe would be waited for, and some devices have no end."""
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/zero"):
        settings = config(tmp_path, local_serde="cachegen", codec_tables=str(place))
        with pytest.raises(ConfigError, match=r"codec_tables: .* it is no file"):
            open_store(settings, payload=PAYLOAD)


def test_case_c02_cachegen_through_disk_and_restart(tmp_path: Path) -> None:
    """What comes back is what the coder itself gives, which states its error bound."""
    tables = train(SHAPE, SAMPLES, Training(level=2, chain=3))
    (tmp_path / "small.tables").write_bytes(tables)
    settings = config(tmp_path, local_serde="cachegen", codec_tables=str(tmp_path / "small.tables"))
    _, raw = payload(made(CHUNK, 9), 40)
    from blendstore._core import Coder

    coder = Coder.cachegen(tables)
    wanted = coder.decode(coder.encode(raw, CHUNK, source_position=40), len(raw), CHUNK, source_position=40)
    assert wanted != raw
    assert through_a_restart(settings, raw) == wanted


def test_tables_are_checked_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs codec_tables"):
        config(tmp_path, local_serde="cachegen")
    (tmp_path / "broken").write_bytes(b"\x80\x04 a pickle")
    settings = config(tmp_path, local_serde="cachegen", codec_tables=str(tmp_path / "broken"))
    with pytest.raises(ConfigError, match="codec_tables"):
        open_store(settings)
