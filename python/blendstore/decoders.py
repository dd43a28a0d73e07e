"""What the model code of serving engines has in common, and what of it can't be blended.

Needs torch (the blend core), and knows no engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any

from torch import Tensor

from .blend.rotary import RotaryTable
from .startup import Refused


def decoder_of(model: Any) -> Any:
    """The module that holds the embeddings and the layers."""
    for path in ("model", "language_model.model", "language_model"):
        found = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if hasattr(found, "layers") and hasattr(found, "embed_tokens"):
            return found
    raise Refused(f"{type(model).__name__} has no decoder with embed_tokens and layers")


def refuse_unknown_arguments(layer: Any, known: Container[str]) -> None:
    """Raises `Refused` when ``layer`` can't be called with the arguments in ``known`` alone."""
    for name, parameter in inspect.signature(layer.forward).parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and name not in known:
            raise Refused(f"{type(layer).__name__} needs {name!r}, which blending doesn't know")


def cached_rotary(index: int, module: Any) -> RotaryTable:
    """The table of layer ``index``'s rotary ``module``, which keeps cosines and sines in ``cos_sin_cache``."""
    name = type(module).__name__
    if hasattr(module, "long_short_cos_sin_cache") or "LongRoPE" in name:
        raise Refused(
            f"layer {index}: {name} switches frequencies with the prompt's length: cached keys can't be moved"
        )
    if getattr(module, "mrope_section", None):
        raise Refused(f"layer {index}: {name} has several axes (mrope_section): cached keys can't be moved")
    if not hasattr(module, "cos_sin_cache"):
        raise Refused(f"layer {index}: {name} keeps no cosines and sines, so cached keys can't be moved")
    # On the host, so that no look-up waits for the device; the engine may lengthen its table.
    host = module.cos_sin_cache.float().cpu()

    def lookup(positions: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal host
        if host.shape[0] != module.cos_sin_cache.shape[0]:
            host = module.cos_sin_cache.float().cpu()
        # Callers may look ahead of the longest prompt; what stands there is never used.
        cos, sin = host[positions.cpu().clamp(max=host.shape[0] - 1)].chunk(2, -1)
        return cos, sin

    return RotaryTable(lookup, "half" if module.is_neox_style else "interleaved", host.shape[-1] // 2)
