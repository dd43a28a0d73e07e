"""Whatever a configuration says, it is taken or refused by name; `BLENDSTORE_FUZZ_SECONDS` looks longer than usual."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendstore.config import Config, ConfigError

SECRET = "hunter2hunter2"
KEYS = sorted({field.name for field in fields(Config) if field.init} - {"origins"})
LITTLE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.binary(max_size=6), st.dates()
)
URLS = [
    f"redis://:{SECRET}@127.0.0.1:6379/0",
    f"redis://u:{SECRET}@[::1]:99999",
    f"s3://u:{SECRET}@bucket",
    f"s3:/u:{SECRET}@bucket",
]
TELLING = st.sampled_from(
    [
        *URLS,
        "",
        "0",
        "-1",
        "1e400",
        "nan",
        "~",
        "~root",
        "$HOME/x",
        "${NO_SUCH}",
        "file://x",
        "file:///x%00",
        "unix:///x",
        "127.0.0.1:65536",
        "query, deviation",
        "[1, 2",
        "{a: 1}",
        "rows=32",
        "x" * 300,
        "1_000",
        "0x10",
        "٣",
    ]
)
VALUES = st.recursive(
    st.one_of(LITTLE, TELLING),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(KEYS) | st.text(max_size=12) | st.sampled_from([key.upper() for key in KEYS])


def told(secret: str | None = SECRET, **given: object) -> None:
    """Loads it; a refusal names a key or the file, and tells no ``secret``."""
    try:
        Config.load(**given)  # type: ignore[arg-type]
    except ConfigError as error:
        assert str(error).strip()
        assert secret is None or secret not in str(error)


def look(found: Callable[[], None]) -> None:
    """``found`` once, or as often as fits the time that is asked for."""
    end = time.monotonic() + float(os.environ.get("BLENDSTORE_FUZZ_SECONDS", "0"))
    found()
    while time.monotonic() < end:
        found()


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def any_overrides(content: dict[str, object]) -> None:
    told(env={}, overrides=content)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(NAMES, st.text(max_size=20) | TELLING, max_size=4))
def any_environment(content: dict[str, str]) -> None:
    told(env={f"BLENDSTORE_{key.upper()}": value for key, value in content.items()})


def test_any_value_of_any_key_is_taken_or_refused() -> None:
    look(any_overrides)


def test_any_environment_is_taken_or_refused() -> None:
    look(any_environment)


def test_any_file_is_taken_or_refused(tmp_path: Path) -> None:
    """YAML of such values, with bytes changed and left out."""
    file = tmp_path / "blend.yaml"

    @settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(
        st.dictionaries(NAMES, VALUES, max_size=4),
        st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255), st.booleans()), max_size=4),
    )
    def any_file(content: dict[str, object], changes: list[tuple[int, int, bool]]) -> None:
        written = bytearray(b"")
        with contextlib.suppress(yaml.YAMLError):
            written = bytearray(yaml.safe_dump(content, allow_unicode=True).encode("utf-8", "surrogatepass"))
        for at, byte, replaced in changes:
            if replaced:
                written[at : at + 1] = bytes([byte])
            else:
                del written[at : at + 3]
        file.write_bytes(written)
        # What is left of a URL that has lost any of its bytes may be no URL: nobody can tell what in it is a password.
        rest = bytes(written)
        for url in URLS:
            rest = rest.replace(url.encode(), b"")
        told(None if SECRET.encode() in rest else SECRET, env={"BLENDSTORE_CONFIG_FILE": str(file)})

    look(any_file)


@pytest.mark.parametrize("name", KEYS)
def test_every_key_refuses_what_no_key_takes(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.load(env={}, overrides={name: object()})
