"""SGLang 0.5.14: matches carry slots, requests are cached by two methods, a layer returns its residual."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.environ import envs
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from torch import Tensor


def make_cache(context: Any, mixin: type) -> Any:
    if envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE.get():
        from sglang.srt.mem_cache.unified_cache_components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        context.params.tree_components = (ComponentType.FULL,)
        base: type = UnifiedRadixCache
    else:
        base = RadixCache
    return type("BlendRadixCache", (_Hooks, mixin, base), {})(context.params)


class _Hooks:
    """When a request's prompt is complete in this version."""

    def cache_unfinished_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        out = super().cache_unfinished_req(req, *args, **kwargs)  # type: ignore[misc]
        if len(req.get_fill_ids()) >= len(req.origin_input_ids):
            self.prompt_complete(req)  # type: ignore[attr-defined]
        return out

    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> Any:
        complete = is_insert and req.kv_committed_len >= len(req.origin_input_ids)
        out = super().cache_finished_req(req, is_insert=is_insert, **kwargs)  # type: ignore[misc]
        if complete:
            self.prompt_complete(req)  # type: ignore[attr-defined]
        return out


def radix_key(like: Any, extra_key: str | None) -> Any:
    return RadixKey(like.token_ids, extra_key, limit=like.limit)


def radix_key_of(request: Any, tokens: NDArray[np.uint32]) -> Any:
    return RadixKey(array("q", tokens.tolist()), request.extra_key)


def salts(request: Any) -> tuple[str, ...]:
    return ()  # the engine has put the request's cache_salt in front of its extra key


def held(match: Any) -> int:
    return len(match.device_indices)


def slots(cache: Any, match: Any) -> Tensor:
    indices: Tensor = match.device_indices
    return indices


def loaded(slots: Tensor) -> Any:
    return slots


def enter_layer(layer: Any, hidden: Tensor | None, residual: Tensor | None, batch: Any) -> Any:
    return hidden


def leave_layer(out: Any, batch: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(out, Tensor):
        return out, None
    return out[0], out[1] if len(out) > 1 else None
