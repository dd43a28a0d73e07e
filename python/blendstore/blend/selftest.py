"""Proof of the geometry at start: a short random prompt through the engine and through the runner, layer by layer.

Proved are that the runner's own loop writes the engine's K and V, and that keys captured at one position and rotated to
another equal the keys that the engine computes there. What can't be proved isn't blended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import build_plan
from .model import EngineModel
from .records import LeaseRecords
from .runner import BlendResult, BlendRunner, BlendSettings

Prefill = Callable[[Tensor, int], Sequence[tuple[Tensor, Tensor]]]
"""``prefill(ids [n], offset)``: the engine's own K and V [n, kv_heads, dim] of each layer, token i at position offset
+ i."""

_SHIFT = 37
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_ROUNDED = (torch.float16, torch.bfloat16)


class GeometryError(RuntimeError):
    """The runner does not reproduce the engine: blending is refused with this reason."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Largest error over all layers, relative to the largest K or V of the layer."""

    tokens: int
    runner_error: float
    rotation_error: float


def run_fresh(model: EngineModel, ids: Tensor) -> BlendResult:
    """The runner's own full prefill of ids [n]: nothing held, nothing cached."""
    plan = build_plan(len(ids), engine_prefix=0, candidates=[], min_tokens=1)
    return BlendRunner(model).run(ids, plan, LeaseRecords(model.geometry, []), BlendSettings(layerwise=False))


def prove_geometry(model: EngineModel, prefill: Prefill, *, vocabulary: int, tokens: int = 48) -> Proof:
    """Run the proof with ``tokens`` random ids below ``vocabulary``. Raises `GeometryError` that names the layer."""
    geometry = model.geometry
    generator = torch.Generator().manual_seed(2405)
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator).to(geometry.device)
    own = prefill(ids, 0)
    ran = run_fresh(model, ids).kv
    shifted = prefill(ids, _SHIFT)
    here, there = torch.arange(tokens), torch.arange(tokens) + _SHIFT
    runner_error = rotation_error = 0.0
    for index in range(geometry.layers):
        limit = tolerance(geometry.dtype, index)
        k, v = own[index]
        error = max(_relative(ran[index, 0], k), _relative(ran[index, 1], v))
        runner_error = max(runner_error, error)
        if not error <= limit:
            raise GeometryError(
                f"layer {index}: the runner's KV differs from the engine's by {error:.2g} (limit {limit:.2g})"
            )
        table = geometry.rotary[index]
        moved = shifted[index][0]
        if table is not None:
            cos, sin = (t.to(geometry.device) for t in table.between(there, here))
            moved = table.rotate(moved, cos, sin)
        error = max(_relative(moved, k), _relative(shifted[index][1], v))
        rotation_error = max(rotation_error, error)
        if not error <= limit:
            raise GeometryError(
                f"layer {index}: K rotated from position {_SHIFT} to 0 differs from the engine's by {error:.2g} "
                f"(limit {limit:.2g}), so its positions are not a plain rotation"
            )
    return Proof(tokens, runner_error, rotation_error)


def tolerance(dtype: torch.dtype, layer: int) -> float:
    """Largest error, relative to the layer's largest K or V, that still counts as rounding.

    Half-precision residuals are rounded in every layer, so that errors add up like a random walk; what a wrong rotation
    does is many times as much.
    """
    grown = (1 + layer / 8) ** 0.5 if dtype in _ROUNDED else 1.0
    return _TOLERANCE.get(dtype, 6e-2) * grown


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-9))
