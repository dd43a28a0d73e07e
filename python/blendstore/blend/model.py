"""What an adapter gives the blend core: the engine's geometry and its own modules, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the engine's KV cache on this rank.

    ``rotary[i]`` is the table of layer ``i`` (layers may share one), or None where a layer has no rotary embedding.
    ``windows[i]`` is the sliding window of layer ``i`` in tokens (a query sees itself and ``window - 1`` before it),
    or None.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    rotary: tuple[RotaryTable | None, ...]
    windows: tuple[int | None, ...]

    @classmethod
    def plain(cls, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Geometry:
        """Of a model that isn't blended: what plain caching needs, rotary and windows left out."""
        return cls(layers, kv_heads, kv_heads, head_dim, dtype, device, (None,) * layers, (None,) * layers)

    @property
    def element(self) -> str:
        """The dtype's name: ``bfloat16``, ``float16``, ``float32``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class Attend(Protocol):
    """The runner's attention, called by the engine's layer in place of its own.

    ``q``: [n, heads, dim], ``k`` and ``v``: [n, kv_heads, dim], rotated, for the rows that flow through the layer.
    Returns [n, heads, dim]. ``softcap`` bounds the logits as ``softcap * tanh(x / softcap)`` (Gemma-2)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /, *, scale: float, softcap: float | None = None) -> Tensor: ...


class EngineModel(Protocol):
    """The engine, seen from the runner. ``state`` is whatever flows between the engine's layers for n rows."""

    @property
    def geometry(self) -> Geometry: ...

    def embed(self, ids: Tensor) -> Any:
        """State at the input of layer 0 for token ids [n]."""

    def layer(self, index: int, state: Any, positions: Tensor, attend: Attend) -> Any:
        """Run decoder layer ``index`` with the engine's own modules; attention goes to ``attend``."""

    def rows(self, state: Any, index: Tensor) -> Any:
        """The state of the rows in ``index`` [m] (int64)."""

    def read_slots(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V [count, kv_heads, dim] of the first ``count`` prompt tokens, which the engine already holds."""

    def all_reduce(self, scores: Tensor) -> Tensor:
        """Sum over tensor-parallel ranks, so that every rank selects the same tokens; identity on one rank."""
