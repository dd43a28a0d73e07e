"""Rotary tables as vLLM's model applies them, layer by layer, and what of it can't be moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blendstore.blend.rotary import RotaryTable

from .refusal import Refused


def rotary_tables(layers: Sequence[Any]) -> tuple[RotaryTable | None, ...]:
    """One table for each distinct rotary module; None where a layer has none."""
    known: dict[int, RotaryTable] = {}
    out: list[RotaryTable | None] = []
    for index, layer in enumerate(layers):
        found = {id(module): module for module in layer.modules() if hasattr(module, "cos_sin_cache")}
        if len(found) > 1:
            raise Refused(f"layer {index} has {len(found)} rotary embeddings: cached keys can't be moved")
        for number, module in found.items():
            if number not in known:
                known[number] = _table(index, module)
        out.append(known[next(iter(found))] if found else None)
    return tuple(out)


def _table(index: int, module: Any) -> RotaryTable:
    name = type(module).__name__
    if hasattr(module, "long_short_cos_sin_cache") or "LongRoPE" in name:
        raise Refused(
            f"layer {index}: {name} switches frequencies with the prompt's length: cached keys can't be moved"
        )
    if getattr(module, "mrope_section", None):
        raise Refused(f"layer {index}: {name} has several axes (mrope_section): cached keys can't be moved")
    # On the host, so that no look-up waits for the device.
    host = module.cos_sin_cache.float().cpu()

    def lookup(positions: Tensor) -> tuple[Tensor, Tensor]:
        # Callers may look ahead of the longest prompt; what stands there is never used.
        cos, sin = host[positions.cpu().clamp(max=host.shape[0] - 1)].chunk(2, -1)
        return cos, sin

    return RotaryTable(lookup, "half" if module.is_neox_style else "interleaved", host.shape[-1] // 2)
