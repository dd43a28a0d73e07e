"""Invariant 7 on vLLM: the runner's loop against the engine's own decoder and attention, on its own cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blendstore.blend.selftest import Proof, prove_geometry

from .model import VLLMModel
from .versions import attention_context, prefill_metadata

_TOKENS = 48


def prove(model: VLLMModel, runner: Any, config: Any) -> Proof:
    """Raises `GeometryError` when the runner doesn't reproduce the engine. Uses the last blocks of the cache meanwhile:
    for an engine without requests."""
    slots = model.kv.scratch(_TOKENS)
    layers = range(model.geometry.layers)
    before = [model.kv.read(index, slots) for index in layers]

    def prefill(ids: Tensor, offset: int) -> list[tuple[Tensor, Tensor]]:
        positions = torch.arange(offset, offset + len(ids), device=ids.device)
        metadata = prefill_metadata(runner, slots)
        with (
            torch.inference_mode(),
            attention_context(metadata, config, len(ids), dict.fromkeys(metadata, slots)),
        ):
            model.decoder.forward(ids, positions, None)
        return [model.kv.read(index, slots) for index in layers]

    try:
        return prove_geometry(model, prefill, vocabulary=model.vocabulary, tokens=_TOKENS)
    finally:
        for index, (k, v) in zip(layers, before, strict=True):
            model.kv.write(index, slots, k, v)
