"""How far a serving engine's answers move when what it holds of a prompt is coded: the codec guard's measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..codec.guard import FORCED, divergence
from .attention import RowAttention
from .model import Attend, EngineModel
from .selftest import run_fresh


class AnsweringModel(EngineModel, Protocol):
    """An engine whose answers can be had besides its KV."""

    def answers(self, ids: Tensor, positions: Tensor, attends: Callable[[int], Attend]) -> Tensor:
        """Logits [n, vocabulary] of token ids [n] at positions [n]: the engine's whole forward, with the attention of
        layer i by ``attends(i)``. On several ranks every rank has all of them."""


class Answers:
    """What a model answers behind its own KV of a prompt, to compare with what it answers behind other KV."""

    @torch.inference_mode()
    def __init__(self, model: AnsweringModel, ids: Sequence[int]) -> None:
        """Of the token ids the last `FORCED` are what the model is asked for, behind the KV of all others."""
        self._model = model
        self._ids = torch.tensor(ids, dtype=torch.int64, device=model.geometry.device)
        self._before = len(ids) - FORCED
        self.own = run_fresh(model, self._ids[: self._before]).kv
        """[layers, 2, tokens, kv_heads, dim]."""
        self._reference = self._behind(self.own)

    def divergence(self, kv: Tensor) -> float:
        """Mean KL in nats of the answers behind ``kv``, of the shape of `own`, from those behind the model's own."""
        return divergence(self._reference, self._behind(kv))

    @torch.inference_mode()
    def _behind(self, kv: Tensor) -> Tensor:
        ids, geometry = self._ids, self._model.geometry
        held = torch.cat([kv, kv.new_zeros(*kv.shape[:2], FORCED, *kv.shape[3:])], 2)
        positions = torch.arange(self._before, len(ids), device=ids.device)
        rows = RowAttention(positions, len(ids))

        def attends(index: int) -> Attend:
            keys, values = held[index]

            def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
                keys.index_copy_(0, positions, k)
                values.index_copy_(0, positions, v)
                return rows(q, keys, values, scale=scale, window=geometry.windows[index], softcap=softcap)

            return attend

        return self._model.answers(ids[self._before :], positions, attends)
