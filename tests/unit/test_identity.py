"""Model identity: what is required, how it is laid out, and what the weights digest sees."""

import dataclasses
from pathlib import Path

import pytest

from blendstore import identity as module
from blendstore.identity import IdentityError, ModelIdentity, namespace, weights_digest

IDENTITY = ModelIdentity(
    weights_digest=b"w" * 32, layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", rotary_digest=b"r" * 32
)


def test_every_field_takes_part() -> None:
    """A field that is added to the identity and forgotten in the namespace would share bytes that differ."""
    named = {name for name, _ in IDENTITY.fields()}
    assert named == {"schema", *(f.name for f in dataclasses.fields(ModelIdentity))}
    assert dict(IDENTITY.fields())["layers"] == (30).to_bytes(8, "little")


def test_namespaces_are_stable_and_salts_may_be_text_or_bytes() -> None:
    assert namespace(IDENTITY, "ü").digest == namespace(IDENTITY, "ü".encode()).digest
    assert namespace(IDENTITY).digest == namespace(IDENTITY, b"").digest != namespace(IDENTITY, "x").digest


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"tp_size": 0}, "tp_size is 0"),
        ({"tp_rank": 1}, "tp_rank is 1"),
        ({"tp_rank": -1}, "tp_rank is -1"),
        ({"weights_digest": b""}, "weights_digest is empty"),
        ({"rotary_digest": b""}, "rotary_digest is empty"),
        ({"dtype": ""}, "dtype is empty"),
        ({"lora": "style"}, "lora is 'style' without lora_version"),
    ],
)
def test_identities_that_tell_too_little_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(IdentityError, match=reason):
        dataclasses.replace(IDENTITY, **changes)  # type: ignore[arg-type]


def model(folder: Path, config: bytes = b"{}", **files: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes(config)
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    return folder


def test_weights_digest_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    one = weights_digest(model(tmp_path / "one", a=b"abc", b=b"d"))
    assert len(one) == 32
    same = model(tmp_path / "same", a=b"abc", b=b"d")
    (same / "tokenizer.json").write_bytes(b"does not matter")
    assert weights_digest(same) == one
    others = [
        weights_digest(model(tmp_path / "config", b"{ }", a=b"abc", b=b"d")),
        weights_digest(model(tmp_path / "content", a=b"abd", b=b"d")),
        weights_digest(model(tmp_path / "frame", a=b"ab", b=b"cd")),
        weights_digest(model(tmp_path / "name", a=b"abc", c=b"d")),
        weights_digest(model(tmp_path / "fewer", a=b"abc")),
    ]
    assert len({one, *others}) == 6


def test_weights_digest_of_one_file_and_of_an_adapter(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    before = weights_digest(file)
    file.write_bytes(b"weightz")
    assert weights_digest(file) != before
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_bytes(b"{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"x")
    assert len(weights_digest(adapter)) == 32


def test_big_files_are_sampled_at_both_ends_and_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of 4 bytes and 8 of them over 100 bytes, each sampled byte counts and the others do not."""
    monkeypatch.setattr(module, "_WHOLE", 100)
    monkeypatch.setattr(module, "_BLOCK", 4)
    monkeypatch.setattr(module, "_BLOCKS", 8)
    file = tmp_path / "big.bin"
    sampled = {start + offset for start in ((100 - 4) * n // 7 for n in range(8)) for offset in range(4)}
    file.write_bytes(bytes(100))
    clean = weights_digest(file)
    for place in range(100):
        content = bytearray(100)
        content[place] = 1
        file.write_bytes(content)
        assert (weights_digest(file) != clean) == (place in sampled)
    assert {0, 99} <= sampled
    file.write_bytes(bytes(101))
    assert weights_digest(file) != clean
    file.write_bytes(bytes(99))
    whole = weights_digest(file)
    file.write_bytes(bytes(50) + b"\1" + bytes(48))
    assert weights_digest(file) != whole


def test_places_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no file or directory"):
        weights_digest(tmp_path / "missing")
    with pytest.raises(IdentityError, match="no weight files"):
        weights_digest(model(tmp_path / "empty"))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "a.safetensors").write_bytes(b"x")
    with pytest.raises(IdentityError, match=r"no config\.json"):
        weights_digest(bare)
