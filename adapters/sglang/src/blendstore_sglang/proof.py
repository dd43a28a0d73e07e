"""Invariant 7 on SGLang: the runner's loop against the engine's own decoder and attention, on its own pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor

from blendstore.blend.selftest import Proof, prove_geometry
from blendstore.startup import Refused

from .model import SGLangModel, make_batch

Prefill = Callable[[Tensor, int], list[tuple[Tensor, Tensor]]]


def prove(model: SGLangModel, runner: Any, params: Any) -> Proof:
    """Raises `GeometryError` when the runner doesn't reproduce the engine; needs 48 free slots for a moment."""
    with own_prefill(model, runner, params, 48) as prefill:
        return prove_geometry(model, prefill, vocabulary=model.vocabulary, tokens=48)


@contextmanager
def own_prefill(model: SGLangModel, runner: Any, params: Any, tokens: int) -> Iterator[Prefill]:
    """The engine's own prefill of up to ``tokens`` ids from a position on, as K and V of every layer. Takes slots of
    the pool and the last row of the request table meanwhile: for an engine without requests."""
    allocator, rows = params.token_to_kv_pool_allocator, params.req_to_token_pool.req_to_token
    taken = allocator.alloc(-(-tokens // params.page_size) * params.page_size)
    if taken is None:
        raise Refused(f"its KV pool has no room for {tokens} tokens")
    row = rows.shape[0] - 1
    before = rows[row].clone()

    def prefill(ids: Tensor, offset: int) -> list[tuple[Tensor, Tensor]]:
        slots = taken[: len(ids)].long()
        rows[row, : len(ids)] = slots.to(rows.dtype)
        positions = torch.arange(offset, offset + len(ids), device=ids.device)
        batch = make_batch(ids, positions, slots, row)
        with torch.inference_mode(), forward_context(ForwardContext(attn_backend=runner.attn_backend)):
            runner.attn_backend.init_forward_metadata(batch)
            model.decoder(ids, positions, batch)
        layers = range(model.geometry.layers)
        return [(model.pool.get_key_buffer(i)[slots], model.pool.get_value_buffer(i)[slots]) for i in layers]

    try:
        yield prefill
    finally:
        rows[row] = before
        allocator.free(taken)
