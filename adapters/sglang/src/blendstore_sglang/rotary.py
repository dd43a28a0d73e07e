"""Rotary tables as SGLang's model applies them, layer by layer, and what of it can't be moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blendstore.blend.rotary import RotaryTable


class Refused(RuntimeError):
    """Blending is refused for this model or this server; the message says why. SGLang goes on without it."""


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
            known[id(module)] = _by_cache(index, module) if hasattr(module, "cos_sin_cache") else _by_call(module)
        out.append(known[id(module)])
    return tuple(out)


def _module(decoder: Any, layer: Any) -> Any:
    """The rotary module that this layer's keys pass through on this device."""
    attention = getattr(layer, "self_attn", layer)
    local = getattr(decoder, "rotary_emb_local", None)
    if local is not None:  # the decoder computes cosines and sines for its layers, one kind for sliding ones
        return local if getattr(attention, "is_sliding", False) else decoder.rotary_emb
    return getattr(attention, "rotary_emb", None)


def _by_cache(index: int, module: Any) -> RotaryTable:
    name = type(module).__name__
    if hasattr(module, "long_short_cos_sin_cache") or "LongRoPE" in name:
        raise Refused(
            f"layer {index}: {name} switches frequencies with the prompt's length: cached keys can't be moved"
        )
    if getattr(module, "mrope_section", None):
        raise Refused(f"layer {index}: {name} has several axes (mrope_section): cached keys can't be moved")
    pairs = module.cos_sin_cache.shape[-1] // 2
    # On the host, so that no look-up waits for the device; the engine may lengthen its table.
    host = module.cos_sin_cache.float().cpu()

    def lookup(positions: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal host
        if host.shape[0] != module.cos_sin_cache.shape[0]:
            host = module.cos_sin_cache.float().cpu()
        # Callers may look ahead of the longest prompt; what stands there is never used.
        cos, sin = host[positions.cpu().clamp(max=host.shape[0] - 1)].chunk(2, -1)
        return cos, sin

    return RotaryTable(lookup, "half" if module.is_neox_style else "interleaved", pairs)


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
