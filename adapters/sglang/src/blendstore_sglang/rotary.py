"""Rotary tables as SGLang's model applies them, layer by layer, and what of it can't be moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blendstore.blend.rotary import RotaryTable
from blendstore.decoders import cached_rotary


def rotary_tables(decoder: Any, layers: Sequence[Any], head_dim: int) -> tuple[RotaryTable | None, ...]:
    """One table for each distinct rotary module; None where a layer has none."""
    known: dict[int, RotaryTable] = {}
    out: list[RotaryTable | None] = []
    for index, layer in enumerate(layers):
        module = _module(decoder, layer)
        if module is None:
            out.append(None)
            continue
        if id(module) not in known:
            computed = hasattr(module, "inv_freq") and not hasattr(module, "cos_sin_cache")
            known[id(module)] = _by_call(module) if computed else cached_rotary(index, module)
        out.append(known[id(module)])
    return tuple(out)


def _module(decoder: Any, layer: Any) -> Any:
    """The rotary module that this layer's keys pass through on this device."""
    attention = getattr(layer, "self_attn", layer)
    local = getattr(decoder, "rotary_emb_local", None)
    if local is not None:  # the decoder computes cosines and sines for its layers, one kind for sliding ones
        return local if getattr(attention, "is_sliding", False) else decoder.rotary_emb
    return getattr(attention, "rotary_emb", None)


def _by_call(module: Any) -> RotaryTable:
    """Cosines and sines computed for each prompt, each value twice: dims j and j + dim/2 are a pair."""
    device = next(iter(module.buffers())).device

    def lookup(positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.zeros(1, 1, dtype=torch.float32, device=device)
        with torch.inference_mode():
            cos, sin = (t.float().cpu() for t in module(like, positions.to(device)[None]))
        half = cos.shape[-1] // 2
        return cos.reshape(-1, 2 * half)[:, :half], sin.reshape(-1, 2 * half)[:, :half]

    return RotaryTable(lookup, "half", lookup(torch.zeros(1, dtype=torch.int64))[0].shape[-1])
