"""How far a serving engine's answers move when what it holds of a prompt is coded: the codec guard's measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..codec.guard import FORCED, Measure, divergence
from .attention import RowAttention
from .model import Attend, EngineModel
from .selftest import run_fresh


class AnsweringModel(EngineModel, Protocol):
    """An engine whose answers can be had besides its KV."""

    def answers(self, ids: Tensor, positions: Tensor, attends: Callable[[int], Attend]) -> Tensor:
        """Logits [n, vocabulary] of token ids [n] at positions [n]: the engine's whole forward, with the attention of
        layer i by ``attends(i)``. On several ranks every rank has all of them."""


@torch.inference_mode()
def measure_of(model: AnsweringModel, ids: Sequence[int]) -> Measure:
    """Of the token ids but for the last `FORCED` the KV is coded, and those behind are asked for."""
    geometry = model.geometry
    tokens = torch.tensor(ids, dtype=torch.int64, device=geometry.device)
    before = len(ids) - FORCED
    positions = torch.arange(before, len(ids), device=geometry.device)
    own = run_fresh(model, tokens[:before]).kv

    @torch.inference_mode()
    def answered(kv: Tensor) -> Tensor:
        held = torch.cat([kv, kv.new_zeros(*kv.shape[:2], FORCED, *kv.shape[3:])], 2)
        rows = RowAttention(positions, len(ids))

        def attends(index: int) -> Attend:
            keys, values = held[index]

            def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
                keys.index_copy_(0, positions, k)
                values.index_copy_(0, positions, v)
                return rows(q, keys, values, scale=scale, window=geometry.windows[index], softcap=softcap)

            return attend

        return model.answers(tokens[before:], positions, attends)

    reference = answered(own)
    return lambda code: divergence(reference, answered(code(own)))
