"""An SGLang decoder as the blend core's `EngineModel`: the engine's own layers, their attention routed to the runner.

No model code is copied. A layer's arguments are those that the engine's own loop gives to its first layer, found by
letting that loop run up to there; the attention backend is swapped for one call through the engine's forward context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor, nn

from blendstore.blend import Attend, Geometry
from blendstore.decoders import decoder_of, refuse_unknown_arguments
from blendstore.startup import Refused

from .rotary import rotary_tables
from .versions import Version

_ROWWISE = ("position_embeddings_global", "position_embeddings_local")
_OWN = ("positions", "hidden_states", "forward_batch", "residual")


@dataclass(slots=True)
class State:
    """What flows between layers for n rows. Until the first layer runs only ``ids`` [n] are known."""

    ids: Tensor
    hidden: Tensor | None = None
    residual: Tensor | None = None
    given: dict[str, Any] = field(default_factory=dict)
    """Arguments that the engine's loop gives to every layer, besides those that change."""
    batched: bool = False
    """The engine's loop gives positions as [1, n]."""
    batch: Any = None
    """The engine's forward batch of these rows."""


class _Reached(Exception):
    """The engine's loop has reached its first layer; what comes after isn't wanted."""


class _Routed(AttentionBackend):  # type: ignore[misc]
    """An attention backend that hands q, k, v to the runner and writes nothing."""

    def __init__(self, attends: Callable[[int], Attend], pool: Any) -> None:
        """``attends(i)`` is the attention of layer i."""
        self._attends = attends
        self.token_to_kv_pool = pool

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        unknown = sorted(name for name, value in more.items() if value is not None)
        if unknown or k is None:
            raise Refused(f"layer {layer.layer_id}: its attention takes {unknown[0] if unknown else 'another layer'!r}")
        heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        out = self._attends(layer.layer_id)(
            q.reshape(-1, heads, dim),
            k.reshape(-1, kv_heads, dim),
            v.reshape(-1, kv_heads, dim),
            scale=float(layer.scaling),
            softcap=float(layer.logit_cap or 0) or None,
        )
        return out.reshape(-1, heads * dim)


class _NoPool:
    """What the routed backend shows as its pool: no kernel of the engine may write KV by itself meanwhile."""

    dtype = torch.uint8


class SGLangModel:
    """The blend core's view of the model of one rank. Raises `Refused` with the reason."""

    def __init__(self, runner: Any, group: Any, version: Version) -> None:
        """``group`` is the engine's group of the ranks that the heads are spread over."""
        self._runner, self._group, self._version = runner, group, version
        self.pool: Any = runner.token_to_kv_pool
        self.decoder = decoder_of(runner.model)
        self._layers: list[Any] = list(self.decoder.layers)
        attentions = [_attention(index, layer) for index, layer in enumerate(self._layers)]
        for layer in self._layers:
            refuse_unknown_arguments(layer, (*_OWN, *_ROWWISE))
        self._explicit_residual = "residual" in inspect.signature(self._layers[0].forward).parameters
        first = attentions[0]
        shapes = {(a.tp_q_head_num, a.tp_k_head_num, a.head_dim) for a in attentions}
        if len(shapes) != 1:
            raise Refused(f"its layers differ in heads or head size: {sorted(shapes)}")
        key = self.pool.get_key_buffer(0)
        if key.shape[1:] != (first.tp_k_head_num, first.head_dim):
            raise Refused(f"its KV pool holds {tuple(key.shape)}, not [slots, KV heads, head size]")
        self.softcap = float(first.logit_cap or 0) or None
        self._prefix = torch.empty(0, dtype=torch.int64, device=key.device)
        self._geometry = Geometry(
            layers=len(self._layers),
            heads=first.tp_q_head_num,
            kv_heads=first.tp_k_head_num,
            head_dim=first.head_dim,
            dtype=key.dtype,
            device=key.device,
            rotary=rotary_tables(self.decoder, self._layers, first.head_dim),
            # The engine counts the tokens before the query, the runner those in the window.
            windows=tuple(None if a.sliding_window_size < 0 else a.sliding_window_size + 1 for a in attentions),
        )

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self._runner.model_config.vocab_size)

    def hold(self, slots: Tensor) -> None:
        """Make the KV at ``slots`` [n] int64 the engine-held prefix that `read_slots` reads."""
        self._prefix = slots

    def embed(self, ids: Tensor) -> State:
        return State(ids)

    def layer(self, index: int, state: State, positions: Tensor, attend: Attend) -> State:
        batch = state.batch
        if batch is None:
            batch = make_batch(state.ids, positions)
        with forward_context(ForwardContext(attn_backend=_Routed(lambda _: attend, _NoPool()))):
            if state.hidden is None:
                state = self._enter(state, positions, batch)
            # The engine's fused norms write into their input, and the runner may run one state twice.
            hidden = None if state.hidden is None else state.hidden.clone()
            residual = None if state.residual is None else state.residual.clone()
            given = dict(state.given)
            given["positions"] = positions[None] if state.batched else positions
            given["hidden_states"] = self._version.enter_layer(self._layers[index], hidden, residual, batch)
            given["forward_batch"] = batch
            if self._explicit_residual:
                given["residual"] = residual
            out = self._layers[index](**given)
        hidden, residual = self._version.leave_layer(out, batch)
        return replace(state, hidden=hidden, residual=residual, batch=batch)

    def rows(self, state: State, index: Tensor) -> State:
        if state.hidden is None:
            return State(state.ids[index])
        return replace(
            state,
            ids=state.ids[index],
            batch=None,
            hidden=state.hidden[index],
            residual=None if state.residual is None else state.residual[index],
            given={name: _narrowed(value, index) for name, value in state.given.items()},
        )

    def read_slots(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        slots = self._prefix[:count]
        return self.pool.get_key_buffer(index)[slots], self.pool.get_value_buffer(index)[slots]

    def all_reduce(self, scores: Tensor) -> Tensor:
        if self._group.world_size == 1:
            return scores
        summed: Tensor = self._group.all_reduce(scores.contiguous())
        return summed

    def answers(self, ids: Tensor, positions: Tensor, attends: Callable[[int], Attend]) -> Tensor:
        """Each row as a sequence of its own that is at its next token: so the engine gives the logits of all rows."""
        batch = replace(
            make_batch(ids, positions),
            forward_mode=ForwardMode.DECODE,
            batch_size=len(ids),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with forward_context(ForwardContext(attn_backend=_Routed(attends, _NoPool()))):
            logits: Tensor = self._runner.model.forward(ids, positions, batch).next_token_logits
        return logits

    def _enter(self, state: State, positions: Tensor, batch: Any) -> State:
        """Run the engine's loop up to its first layer: embeddings, their scaling, and what all layers are given."""
        caught: dict[str, Any] = {}
        signature = inspect.signature(self._layers[0].forward)

        def reached(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.update(signature.bind(*args, **kwargs).arguments)
            raise _Reached

        hook = self._layers[0].register_forward_pre_hook(reached, with_kwargs=True)
        try:
            self.decoder(state.ids, positions, batch)
        except _Reached:
            pass
        finally:
            hook.remove()
        given = {name: value for name, value in caught.items() if name not in _OWN and value is not None}
        more = given.pop("kwargs", {})
        unknown = sorted(name for name in {**given, **more} if name not in _ROWWISE)
        if unknown:
            raise Refused(f"its layers are given {unknown[0]!r}, which blending doesn't know")
        given = {name: caught[name] for name in _ROWWISE if name in caught}
        return replace(state, hidden=caught["hidden_states"], given=given, batched=caught["positions"].dim() == 2)


def make_batch(ids: Tensor, positions: Tensor, slots: Tensor | None = None, row: int = 0) -> Any:
    """A forward batch of one new sequence of n tokens, whose KV goes to ``slots`` [n] if it is the engine that attends.

    ``positions`` are where the tokens say they stand; nothing is held before them."""
    n, device = ids.shape[0], ids.device

    def one(value: int, dtype: torch.dtype = torch.int64, where: Any = device) -> Tensor:
        # Filled there: a value that is copied there makes the host wait for all that the device was given before.
        return torch.full((1,), value, dtype=dtype, device=where)

    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=one(row),
        seq_lens=one(n),
        out_cache_loc=torch.zeros(n, dtype=torch.int64, device=device) if slots is None else slots,
        seq_lens_sum=n,
        seq_lens_cpu=one(n, where="cpu"),
        positions=positions,
        extend_num_tokens=n,
        extend_seq_lens=one(n, torch.int32),
        extend_prefix_lens=one(0, torch.int32),
        extend_start_loc=one(0, torch.int32),
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[n],
    )


def _attention(index: int, layer: Any) -> Any:
    found = [module for module in layer.modules() if isinstance(module, RadixAttention)]
    if len(found) != 1:
        raise Refused(
            f"layer {index} ({type(layer).__name__}) has {len(found)} attention modules: recurrent or hybrid?"
        )
    attention = found[0]
    for wrong, what in (
        (attention.layer_id != index, f"its attention is number {attention.layer_id}: layers share KV"),
        (attention.v_head_dim != attention.qk_head_dim, "keys and values differ in size (MLA)"),
        (attention.is_cross_attention, "it attends to an encoder"),
        (attention.attn_type is AttentionType.ENCODER_ONLY, "its attention isn't causal"),
        (attention.use_irope, "its attention is chunked (iRoPE)"),
        (attention.xai_temperature_len > 0, "its attention's temperature depends on the position"),
    ):
        if wrong:
            raise Refused(f"layer {index}: {what}")
    return attention


def _narrowed(value: Any, index: Tensor) -> Any:
    """Rotary cosines and sines [..., n, dim] of the rows in ``index``; None stays None."""
    if isinstance(value, tuple):
        return tuple(_narrowed(part, index) for part in value)
    return value.index_select(-2, index) if isinstance(value, Tensor) else value
