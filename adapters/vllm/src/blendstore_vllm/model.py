"""A vLLM decoder as the blend core's `EngineModel`: the engine's own layers, their attention routed to the runner.

No model code is copied. A layer's arguments are those that the engine's own loop gives to its first layer, found by
letting that loop run up to there (uncompiled); the forward of a layer's attention module is replaced for one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention

from blendstore.blend import Attend, Geometry
from blendstore.decoders import decoder_of, refuse_unknown_arguments
from blendstore.startup import Refused

from .kernels import EngineKernels
from .layout import PagedKV
from .rotary import rotary_tables
from .versions import attention_context

_OWN = ("positions", "hidden_states", "residual")


@dataclass(slots=True)
class State:
    """What flows between layers for n rows. Until the first layer runs only ``ids`` [n] are known."""

    ids: Tensor
    hidden: Tensor | None = None
    residual: Tensor | None = None


class _Reached(Exception):
    """The engine's loop has reached its first layer; what comes after isn't wanted."""


class VLLMModel:
    """The blend core's view of the model of one worker. Raises `Refused` with the reason."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self._model, self._config = model, vllm_config
        self.decoder = decoder_of(model)
        self._layers: list[Any] = list(self.decoder.layers)
        self.attentions = [_attention(index, layer) for index, layer in enumerate(self._layers)]
        self._signature = inspect.signature(self._layers[0].forward)
        for layer in self._layers:
            refuse_unknown_arguments(layer, _OWN)
        first = self.attentions[0]
        shapes = {(a.num_heads, a.num_kv_heads, a.head_size) for a in self.attentions}
        if len(shapes) != 1:
            raise Refused(f"its layers differ in heads or head size: {sorted(shapes)}")
        self.kv = PagedKV(self.attentions)
        self.kernels = EngineKernels(self.decoder)
        self._entered = False
        self._held = torch.empty(0, dtype=torch.int64, device=self.kv.device)
        self._geometry = Geometry(
            layers=len(self._layers),
            heads=first.num_heads,
            kv_heads=first.num_kv_heads,
            head_dim=first.head_size,
            dtype=self.kv.dtype,
            device=self.kv.device,
            rotary=rotary_tables(self._layers),
            windows=tuple(a.sliding_window for a in self.attentions),
        )

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self._config.model_config.get_vocab_size())

    @property
    def softcap(self) -> float | None:
        """Bound of the attention's logits, if they have one."""
        return _softcap(self.attentions[0])

    @contextmanager
    def entered(self, rows: int) -> Iterator[None]:
        """Prepare for calls of `layer` with up to ``rows`` rows: once for a whole run, where each would do it alone."""
        with attention_context(None, self._config, rows), self.kernels.on():
            self._entered = True
            try:
                yield
            finally:
                self._entered = False

    def hold(self, slots: Tensor) -> None:
        """Make the KV at ``slots`` [n] int64 the engine-held prefix that `read_slots` reads."""
        self._held = slots

    def embed(self, ids: Tensor) -> State:
        return State(ids)

    def layer(self, index: int, state: State, positions: Tensor, attend: Attend) -> State:
        ready: AbstractContextManager[None] = nullcontext() if self._entered else self.entered(state.ids.shape[0])
        with ready, _routed(self.attentions[index], attend):
            hidden = self._enter(state.ids, positions) if state.hidden is None else state.hidden
            # The engine's fused norms write into their input, and the runner may run one state twice.
            given: dict[str, Tensor | None] = {"positions": positions, "hidden_states": hidden.clone()}
            if "residual" in self._signature.parameters:
                given["residual"] = None if state.residual is None else state.residual.clone()
            out = self._layers[index](**given)
        hidden, residual = out if isinstance(out, tuple) else (out, None)
        return replace(state, hidden=hidden, residual=residual)

    def rows(self, state: State, index: Tensor) -> State:
        return State(
            state.ids[index],
            None if state.hidden is None else state.hidden[index],
            None if state.residual is None else state.residual[index],
        )

    def read_slots(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        return self.kv.read(index, self._held[:count])

    def all_reduce(self, scores: Tensor) -> Tensor:
        return scores

    def answers(self, ids: Tensor, positions: Tensor, attends: Callable[[int], Attend]) -> Tensor:
        with ExitStack() as routes:
            routes.enter_context(self.entered(ids.shape[0]))
            for index, attention in enumerate(self.attentions):
                routes.enter_context(_routed(attention, attends(index)))
            # Not through __call__, which may be a compiled graph of the whole model.
            hidden = self.decoder.forward(ids, positions, None)
        logits: Tensor = self._model.compute_logits(hidden[0] if isinstance(hidden, tuple) else hidden)
        return logits

    def _enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run the engine's loop up to its first layer: embeddings and their scaling."""
        caught: dict[str, Any] = {}

        def reached(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.update(self._signature.bind(*args, **kwargs).arguments)
            raise _Reached

        hook = self._layers[0].register_forward_pre_hook(reached, with_kwargs=True)
        try:
            # Not through __call__, which may be a compiled graph of the whole model.
            self.decoder.forward(ids, positions, None)
        except _Reached:
            pass
        finally:
            hook.remove()
        more = caught.pop("kwargs", {})
        unknown = sorted(k for k, v in {**caught, **more}.items() if k not in _OWN and v is not None)
        if unknown:
            raise Refused(f"its layers are given {unknown[0]!r}, which blending doesn't know")
        hidden: Tensor = caught["hidden_states"]
        return hidden


def _softcap(attention: Any) -> float | None:
    return float(getattr(attention.impl, "logits_soft_cap", None) or 0) or None


@contextmanager
def _routed(attention: Any, attend: Attend) -> Iterator[None]:
    """Within, ``attention`` hands q, k, v to the runner and writes nothing."""
    softcap = _softcap(attention)

    def forward(query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Tensor:
        if key is None or any(item is not None for item in (*more, *named.values())):
            raise Refused(f"{attention.layer_name}: its attention takes arguments that blending doesn't know")
        out = attend(
            query.reshape(-1, attention.num_heads, attention.head_size),
            key.reshape(-1, attention.num_kv_heads, attention.head_size),
            value.reshape(-1, attention.num_kv_heads, attention.head_size),
            scale=float(attention.impl.scale),
            softcap=softcap,
        )
        return out.reshape(-1, attention.num_heads * attention.head_size)

    attention.forward = forward
    try:
        yield
    finally:
        del attention.forward


def _attention(index: int, layer: Any) -> Any:
    found = [module for module in layer.modules() if isinstance(module, Attention)]
    if len(found) != 1:
        raise Refused(
            f"layer {index} ({type(layer).__name__}) has {len(found)} attention modules: recurrent, MLA or hybrid?"
        )
    attention = found[0]
    for wrong, what in (
        (type(attention) is not Attention, f"its attention is a {type(attention).__name__}"),
        (attention.kv_sharing_target_layer_name is not None, "it shares the KV of another layer"),
        (attention.head_size_v != attention.head_size, "keys and values differ in size (MLA)"),
        (attention.attn_type != "decoder", f"its attention is of type {attention.attn_type}"),
        (getattr(attention, "has_sink", False), "its attention has sinks"),
        (getattr(attention.impl, "alibi_slopes", None) is not None, "its attention has slopes (ALiBi)"),
        (attention.query_quant is not None, "its queries are quantised"),
        (not hasattr(attention.impl, "do_kv_cache_update"), "its backend has no way to write KV from outside"),
    ):
        if wrong:
            raise Refused(f"layer {index}: {what}")
    return attention
