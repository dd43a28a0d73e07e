"""A transformers decoder as the blend core's `EngineModel`, discovered by running it, and refused where unproven."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from blendstore.blend import Attend, Geometry
from blendstore.blend.rotary import Pairing, RotaryTable
from blendstore.blend.selftest import run_fresh
from blendstore.codec import guard

from .routing import install, routed


class UnsupportedModel(RuntimeError):
    """Blending is refused for this model; the message names what is missing. Plain caching is not affected."""


_MOVING_ROTARY = {
    "dynamic": "its base changes with the prompt's length (dynamic NTK)",
    "longrope": "its frequencies switch at the original context length (LongRoPE)",
}
_KNOWN_ARGUMENTS = {"dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "use_cache",
                    "position_embeddings", "cache_position", "output_attentions"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one layer's attention was called with."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None


class TransformersModel:
    """The blend core's view of ``model``. Raises `UnsupportedModel` with the reason."""

    def __init__(self, model: PreTrainedModel) -> None:
        install(model)
        self.model = model
        self._decoder = _decoder(model)
        self._layers: Sequence[nn.Module] = list(self._decoder.layers)
        typed = "layer_type" in inspect.signature(self._decoder.rotary_emb.forward).parameters
        self.rotary_kinds: list[str | None] = (
            list(model.config.layer_types)[: len(self._layers)] if typed else [None] * len(self._layers)
        )
        """What each layer's rotary table goes by, or None where the model has one for all."""
        self._held: DynamicCache | None = None
        # Cosines and sines of the positions seen last, by kind: all layers of a pass share them.
        self._turned: tuple[Tensor | None, dict[str | None, Any]] = (None, {})
        _refuse_moving_rotary(model)
        parameter = next(model.parameters())
        seen = self._probe()
        shapes = {(s.heads, s.kv_heads, s.head_dim) for s in seen}
        if len(shapes) != 1:
            raise UnsupportedModel(f"its layers differ in heads or head size: {sorted(shapes)}")
        heads, kv_heads, head_dim = shapes.pop()
        self.softcap = seen[0].softcap
        """What the attention's logits are capped at, if at all."""
        self._geometry = Geometry(
            layers=len(self._layers),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=parameter.dtype,
            device=parameter.device,
            rotary=_rotary_tables(self, head_dim),
            windows=tuple(s.window for s in seen),
        )

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.num_embeddings)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states [n, hidden] at the input of layer 0 for ids [n]."""
        embedded: Tensor = self._decoder.embed_tokens(ids)
        return embedded

    def layer(self, index: int, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Decoder layer ``index`` on ``state`` [n, hidden] at ``positions`` [n]."""

        def route(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
            rows = [t[0].transpose(0, 1) for t in (q, k, v)]
            out = attend(*rows, scale=float(arguments["scaling"]), softcap=arguments.get("softcap"))
            return out[None]

        if self._turned[0] is not positions:
            self._turned = (positions, {})
        kind, known = self.rotary_kinds[index], self._turned[1]
        if kind not in known:
            known[kind] = self.rotary(index, positions, state)
        with routed(route):
            out = self._layers[index](
                state[None],
                attention_mask=None,
                position_ids=positions[None],
                past_key_values=None,
                use_cache=False,
                position_embeddings=known[kind],
            )
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden[0]

    def logits(self, state: Tensor) -> Tensor:
        """Float32 logits [n, vocabulary] of states [n, hidden] at the output of the last layer."""
        model: Any = self.model
        out: Tensor = model.get_output_embeddings()(self._decoder.norm(state)).float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        scale = getattr(self.model.config, "logit_scale", None)
        out = out if scale is None else out * scale
        return out if cap is None else cap * torch.tanh(out / cap)

    def prove_logits(self) -> None:
        """Raises `UnsupportedModel` when `logits` isn't what the engine says."""
        ids = torch.arange(7, device=self._geometry.device) % self.vocabulary
        with torch.inference_mode():
            wanted = self.model(input_ids=ids[None], use_cache=False).logits[0, -1].float()
            found = self.logits(run_fresh(self, ids).state[-1:])[0]
        if not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max())):
            raise UnsupportedModel("its logits are not its output embeddings of the normed last state")

    def rows(self, state: Tensor, index: Tensor) -> Tensor:
        """The rows of ``state`` at ``index``."""
        return state[index]

    def hold(self, cache: DynamicCache | None) -> None:
        """Make ``cache`` the engine-held prefix that `read_slots` reads."""
        self._held = cache

    def read_slots(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V [count, kv_heads, dim] of the held prefix."""
        if self._held is None:
            raise RuntimeError("the plan has an engine prefix but the engine holds none")
        k, v = layers_of(self._held)[index]
        return k[:count], v[:count]

    def all_reduce(self, scores: Tensor) -> Tensor:
        """One rank: the scores as they are."""
        return scores

    def rotary(self, index: int, positions: Tensor, like: Tensor) -> Any:
        """The engine's own (cos, sin) of layer ``index`` at ``positions`` [n]."""
        kind = self.rotary_kinds[index]
        return self._decoder.rotary_emb(like[None], positions[None], *(() if kind is None else (kind,)))

    def prefill(self, ids: Tensor, offset: int = 0) -> list[tuple[Tensor, Tensor]]:
        """The engine's own K and V [n, kv_heads, dim] of every layer for ids [n] at positions offset, offset + 1, …"""
        cache = DynamicCache()
        positions = torch.arange(offset, offset + ids.shape[0], device=ids.device)
        with torch.inference_mode():
            self._decoder(input_ids=ids[None], position_ids=positions[None], past_key_values=cache, use_cache=True)
        return layers_of(cache)

    @torch.inference_mode()
    def _probe(self) -> list[_Seen]:
        seen: list[_Seen] = []

        def route(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
            unknown = sorted(n for n, value in arguments.items() if value is not None and n not in _KNOWN_ARGUMENTS)
            if unknown:
                raise UnsupportedModel(f"its attention takes {unknown[0]!r}, which blending doesn't know")
            if k.shape[-1] != v.shape[-1]:
                raise UnsupportedModel(f"its keys have {k.shape[-1]} dims and its values {v.shape[-1]}")
            window, softcap = arguments.get("sliding_window"), arguments.get("softcap")
            seen.append(_Seen(q.shape[1], k.shape[1], k.shape[-1], window, softcap))
            return torch.zeros_like(q).transpose(1, 2)

        ids = torch.zeros(1, 2, dtype=torch.int64, device=next(self.model.parameters()).device)
        with routed(route):
            self._decoder(input_ids=ids, use_cache=False)
        if len(seen) != len(self._layers):
            raise UnsupportedModel(
                f"{len(seen)} of its {len(self._layers)} layers call the registered attention: recurrent or hybrid?"
            )
        return seen


@torch.inference_mode()
def forward(
    loaded: PreTrainedModel, cache: DynamicCache, ids: Sequence[int], position: int, *, keep: int = 1
) -> Tensor:
    """The engine's own forward of ``ids`` behind ``cache`` at ``position``…; float32 logits [keep, vocabulary] of the
    last ``keep`` tokens (0: all)."""
    model: Any = loaded
    positions = torch.arange(position, position + len(ids), device=loaded.device)
    out = model(
        input_ids=torch.tensor([list(ids)], device=loaded.device),
        position_ids=positions[None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    )
    logits: Tensor = out.logits[0].float()
    return logits


def layers_of(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """K and V [tokens, kv_heads, dim] of every layer of a cache of one sequence, without a copy."""
    entries: list[Any] = list(cache.layers)
    return [(entry.keys[0].transpose(0, 1), entry.values[0].transpose(0, 1)) for entry in entries]


@torch.inference_mode()
def measure_of(loaded: PreTrainedModel, ids: Sequence[int]) -> guard.Measure:
    """How far answers move when the KV of ``ids`` but for the last `guard.FORCED` is coded: the guard's measure."""
    before, forced = ids[: -guard.FORCED], ids[-guard.FORCED :]
    cache = DynamicCache()
    forward(loaded, cache, before, 0)
    kv = torch.stack([torch.stack(pair) for pair in layers_of(cache)])

    @torch.inference_mode()
    def answered(kv: Tensor) -> Tensor:
        cache = DynamicCache()
        for index, (keys, values) in enumerate(kv):
            cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], index)
        return forward(loaded, cache, forced, len(before), keep=0)

    reference = answered(kv)
    return lambda code: guard.divergence(reference, answered(code(kv)))


@torch.inference_mode()
def plain_geometry(loaded: PreTrainedModel) -> Geometry:
    """Shape of the KV cache of a model that isn't blended: what plain caching needs, rotary and windows left out.

    Proves that a prompt computed in two steps has the logits that the engine gives for the whole. Raises
    `UnsupportedModel` when it hasn't, or when not every layer keeps K and V of every token in one shape."""
    model: Any = loaded
    name = type(model).__name__
    parameter = next(loaded.parameters())
    ids = torch.arange(3, 12, device=parameter.device) % int(model.get_input_embeddings().num_embeddings)
    cache = DynamicCache()
    try:
        forward(loaded, cache, ids[:5].tolist(), 0)
        found = forward(loaded, cache, ids[5:].tolist(), 5)[-1]
        wanted = model(input_ids=ids[None], use_cache=False).logits[0, -1].float()
        shapes = [(tuple(k.shape), tuple(v.shape)) for k, v in layers_of(cache)]
    except Exception as error:  # whatever a model says about a plain cache is the reason
        raise UnsupportedModel(
            f"{name} does not run with a plain cache of K and V ({type(error).__name__}: {error}): "
            "serve it without blendstore"
        ) from error
    if len(set(shapes)) != 1 or shapes[0] != (shapes[0][0],) * 2 or shapes[0][0][0] != len(ids):
        latent = any(k != v for k, v in shapes)
        why = "keys and values differ, as in multi-head latent attention" if latent else "there is nothing to store"
        raise UnsupportedModel(
            f"{name} has no K and V of every token in one shape, but {sorted(set(shapes))} for {len(ids)} tokens: "
            f"{why}; serve it without blendstore"
        )
    if not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max())):
        raise UnsupportedModel(
            f"{name} computes other logits for a prompt in two steps than for the whole: its positions don't begin at "
            "0 or its tokens see later ones; serve it without blendstore"
        )
    _, kv_heads, head_dim = shapes[0][0]
    return Geometry.plain(
        layers=len(shapes),
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=layers_of(cache)[0][0].dtype,
        device=parameter.device,
    )


def steady_length(model: PreTrainedModel) -> int | None:
    """Prompts of at least this many tokens are rotated otherwise than shorter ones, so their KV is not interchangeable;
    None when a token's rotation depends on its position alone."""
    lengths = [
        int(entry.get("original_max_position_embeddings") or model.config.max_position_embeddings)
        for entry in _rotary_parameters(model)
        if entry.get("rope_type") in _MOVING_ROTARY
    ]
    return min(lengths) if lengths else None


def _rotary_parameters(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The model's rotary parameters, one entry a layer type."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _decoder(loaded: PreTrainedModel) -> Any:
    model: Any = loaded
    decoder = model.get_decoder()
    for name in ("layers", "embed_tokens", "rotary_emb", "norm"):
        if not hasattr(decoder, name):
            raise UnsupportedModel(f"{type(decoder).__name__} has no {name!r}")
    return decoder


def _refuse_moving_rotary(model: PreTrainedModel) -> None:
    for entry in _rotary_parameters(model):
        kind = entry.get("rope_type", "default")
        if kind in _MOVING_ROTARY:
            reason = _MOVING_ROTARY[kind]
            raise UnsupportedModel(f"its rotary embedding is {kind!r}: {reason}, so cached keys can't be moved")
        if "mrope_section" in entry:
            raise UnsupportedModel("its rotary embedding has several axes (mrope_section): cached keys can't be moved")


def _rotary_tables(model: TransformersModel, head_dim: int) -> tuple[RotaryTable | None, ...]:
    """One table for each distinct rotary geometry; which dims form a pair is found by trying."""
    tables: dict[str | None, RotaryTable] = {}
    for index, kind in enumerate(model.rotary_kinds):
        if kind not in tables:
            tables[kind] = _table(model, index, head_dim)
    return tuple(tables[kind] for kind in model.rotary_kinds)


def _table(model: TransformersModel, index: int, head_dim: int) -> RotaryTable:
    device = next(model.model.parameters()).device
    like = torch.zeros(1, 1, dtype=torch.float32, device=device)

    def raw(positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = model.rotary(index, positions.to(device), like)
        return cos[0].float().cpu(), sin[0].float().cpu()

    cos, sin = raw(torch.arange(3, 12))
    width = cos.shape[-1]
    pairing: Pairing
    layouts: list[tuple[Pairing, Callable[[Tensor], Tensor], int]] = []
    if width % 2 == 0 and torch.equal(cos[:, : width // 2], cos[:, width // 2 :]):
        pairings: tuple[Pairing, ...] = ("half", "interleaved")
        layouts += [(pairing, lambda t: t[:, : width // 2], width // 2) for pairing in pairings]
    if width % 2 == 0 and torch.equal(cos[:, 0::2], cos[:, 1::2]):
        layouts.append(("interleaved", lambda t: t[:, 0::2], width // 2))
    if 2 * width <= head_dim:
        layouts += [("half", lambda t: t, width), ("interleaved", lambda t: t, width)]
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, model.vocabulary, (6,), generator=generator).to(device)
    here, there = torch.arange(6), torch.arange(6) + 29
    near, far = (_keys(model, index, ids, p.to(device)) for p in (here, there))
    errors: list[str] = []
    for pairing, pick, pairs in layouts:
        with suppress(ValueError):
            table = RotaryTable(lambda p, pick=pick: tuple(pick(t) for t in raw(p)), pairing, pairs)  # type: ignore[misc]
            cos, sin = (t.to(device) for t in table.between(here, there))
            error = float((table.rotate(near, cos, sin) - far).abs().max() / far.abs().max())
            if error < 1e-2:
                return table
            errors.append(f"{pairing} over {2 * pairs} dims: {error:.2g}")
    tried = "; ".join(errors) or f"table width {width}"
    raise UnsupportedModel(f"layer {index}: no known rotary layout moves its keys ({tried})")


@torch.inference_mode()
def _keys(model: TransformersModel, index: int, ids: Tensor, positions: Tensor) -> Tensor:
    """K [n, kv_heads, dim] that layer ``index`` makes of plain embeddings at ``positions``."""
    found: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        found.append(k.float())
        return torch.zeros_like(q)

    model.layer(index, model.embed(ids), positions, attend)
    return found[0]
