"""SGLang 0.5.23: matches carry a length, requests are checkpointed, a layer's residual lives in the forward batch."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from torch import Tensor


def make_cache(context: Any, mixin: type) -> Any:
    made = type("BlendRadixCache", (_Hooks, mixin, UnifiedRadixCache), {})
    return create_unified_radix_cache(context, cache_class=made)


class _Hooks:
    """When a request's prompt is complete in this version."""

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint(req, up_to=up_to, **kwargs)  # type: ignore[misc]
        if up_to >= len(req.origin_input_ids):
            self.prompt_complete(req)  # type: ignore[attr-defined]


def radix_key(like: Any, extra_key: str | None) -> Any:
    return RadixKey(like.token_ids, extra_key, limit=like.limit, cache_salt=like.cache_salt)


def radix_key_of(request: Any, tokens: NDArray[np.uint32]) -> Any:
    return RadixKey(array("q", tokens.tolist()), request.extra_key, cache_salt=request.cache_salt)


def salts(request: Any) -> tuple[str, ...]:
    return (request.cache_salt,) if request.cache_salt else ()


def held(match: Any) -> int:
    return int(match.device_prefix_len)


def slots(cache: Any, match: Any) -> Tensor:
    path: Tensor = cache.path_device_indices(match.last_device_node)
    return path[: match.device_prefix_len]


def loaded(slots: Tensor) -> Any:
    return len(slots)


def enter_layer(layer: Any, hidden: Tensor | None, residual: Tensor | None, batch: Any) -> Any:
    boundary = getattr(layer, "attn_boundary", None)
    if boundary is None:
        return hidden
    if residual is None:
        residual_batch.start(batch)
        return hidden
    return boundary.from_pp(PPProxyTensors({"hidden_states": hidden, "residual": residual}), batch)


def leave_layer(out: Any, batch: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(out, tuple):
        return out[0], out[1] if len(out) > 1 else None
    if getattr(batch, "residual_stream", None) is None:
        return out, None
    tensors = residual_batch.to_pp(out, batch).tensors
    return tensors["hidden_states"], tensors.get("residual")
