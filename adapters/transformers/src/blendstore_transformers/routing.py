"""The attention function that transformers calls: the runner's while it runs, PyTorch's own otherwise.

transformers hands rotated q, k and v to whatever is registered under the model's attention name, so no model code is
copied and a new model family needs no new code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "blendstore"

Route = Callable[[torch.nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]
"""``(module, q, k, v, arguments)``: q [1, heads, n, dim], k and v [1, kv_heads, n, dim]; returns [1, n, heads, dim]."""

_ACTIVE = threading.local()


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """Send this thread's attention calls to ``route``."""
    previous = getattr(_ACTIVE, "route", None)
    _ACTIVE.route = route
    try:
        yield
    finally:
        _ACTIVE.route = previous


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    route: Route | None = getattr(_ACTIVE, "route", None)
    if route is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    return route(module, query, key, value, arguments), None


def install(model: torch.nn.Module) -> None:
    """Register the function and select it in ``model``; its results stay those of ``sdpa``."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
