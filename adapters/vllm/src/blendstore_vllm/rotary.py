"""Rotary tables as vLLM's model applies them, layer by layer, and what of it can't be moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blendstore.blend.rotary import RotaryTable
from blendstore.decoders import cached_rotary
from blendstore.startup import Refused


def rotary_tables(layers: Sequence[Any]) -> tuple[RotaryTable | None, ...]:
    """One table for each distinct rotary module; None where a layer has none."""
    known: dict[int, RotaryTable] = {}
    out: list[RotaryTable | None] = []
    for index, layer in enumerate(layers):
        found = {id(module): module for module in layer.modules() if "RotaryEmbedding" in type(module).__name__}
        if len(found) > 1:
            raise Refused(f"layer {index} has {len(found)} rotary embeddings: cached keys can't be moved")
        for number, module in found.items():
            if number not in known:
                known[number] = cached_rotary(index, module)
        out.append(known[next(iter(found))] if found else None)
    return tuple(out)
