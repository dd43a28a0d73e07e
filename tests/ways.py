"""Operations that Rust does on a CPU, tested as they are and by their reference in plain torch."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from blendstore.blend import fused

WAYS = ("in Rust", "plain")


def one_way(way: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fixture's body: everything in between holds for Rust and for the reference of ``module``, and none of it is a
    fallback."""
    monkeypatch.setattr(fused, "_broken", set())
    fused.fallbacks.clear()
    if way == "plain":
        monkeypatch.setattr(module, "readable", lambda x: False)
    yield way
    assert not fused.fallbacks
