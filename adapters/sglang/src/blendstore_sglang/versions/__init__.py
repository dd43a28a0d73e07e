"""What differs between the SGLang versions that are supported: one module each, chosen when the engine starts."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SUPPORTED = {"0.5.14": "v0_5_14", "0.5.23": "v0_5_23"}


class UnsupportedVersion(RuntimeError):
    """No adapter for this SGLang; names the versions that have one."""


class Version(Protocol):
    """One version's way of doing what every version does. Trees, nodes and requests are the engine's own objects."""

    def make_cache(self, context: Any, mixin: type) -> Any:
        """The engine's default tree for this context, with ``mixin`` in front of its class."""

    def radix_key(self, like: Any, extra_key: str | None) -> Any:
        """The tokens of another key under ``extra_key``."""

    def radix_key_of(self, request: Any, tokens: NDArray[np.uint32]) -> Any:
        """The key of these tokens as the request's own."""

    def salts(self, request: Any) -> tuple[str, ...]:
        """What separates the request's tenant from others, besides its extra key."""

    def held(self, match: Any) -> int:
        """Tokens on the device."""

    def slots(self, cache: Any, match: Any) -> Tensor:
        """Their slots, [held] int64."""

    def loaded(self, slots: Tensor) -> Any:
        """What ``init_load_back`` says of the slots it filled."""

    def enter_layer(self, layer: Any, hidden: Tensor | None, residual: Tensor | None, batch: Any) -> Any:
        """The input of ``layer`` from plain tensors."""

    def leave_layer(self, out: Any, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Plain tensors [n, hidden], with every sum over ranks done, from a layer's output."""


def version_of(installed: str) -> Version:
    """The module for an SGLang version. Raises `UnsupportedVersion`."""
    name = SUPPORTED.get(installed.split("+")[0])
    if name is None:
        raise UnsupportedVersion(
            f"SGLang {installed} is not supported: install one of {', '.join(SUPPORTED)}, "
            "or a blendstore-sglang that knows this version"
        )
    return cast(Version, import_module(f".{name}", __name__))
