"""KV caches of transformers models as numbers: captured, changed, put back, and asked what the answer is then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendstore.codec.tables import Element, Floats, Rotary, Shape


@dataclass(frozen=True, slots=True)
class Captured:
    """One prompt's KV [layers, 2, tokens, kv_heads, dim] float32 as the engine wrote it (keys rotated), the ids that
    are forced behind it, and what the model says of them, [len(tail), vocab]."""

    kv: Tensor
    tail: list[int]
    logits: Tensor


@torch.inference_mode()
def capture(model: Any, ids: Sequence[int], answer: Sequence[int]) -> Captured:
    """Prefill ``ids`` but for the last one, then force it and ``answer`` behind."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    model(torch.tensor([list(ids[:-1])]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2) for layer in cache.layers]).float()
    tail = [ids[-1], *answer][:-1]
    return Captured(kv, tail, answer_logits(model, kv, tail))


@torch.inference_mode()
def answer_logits(model: Any, kv: Tensor, tail: Sequence[int]) -> Tensor:
    """Logits [len(tail), vocab] of ``tail`` forced behind ``kv``."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, (keys, values) in enumerate(kv.float()):
        cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], index)
    logits: Tensor = model(torch.tensor([list(tail)]), past_key_values=cache, use_cache=True).logits[0].float()
    return logits


def divergence(reference: Tensor, found: Tensor) -> tuple[float, float]:
    """Mean KL(reference ‖ found) in nats over the rows, and the share of rows with the same most likely token."""
    p, q = reference.log_softmax(-1), found.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return float(kl), float((p.argmax(-1) == q.argmax(-1)).float().mean())


def shape_of(model: Any, element: Element = "bfloat16") -> Shape:
    """Shape of a model's records; the rotary frequencies are read off its own table."""
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = list(getattr(config, "layer_types", None) or ["all"] * layers)
    names = sorted(set(kinds))
    embedding, one = model.model.rotary_emb, torch.ones(1, 1, dtype=torch.int64)
    frequencies = []
    for name in names:
        cos, sin = embedding(torch.zeros(1, 1), one, name) if len(names) > 1 else embedding(torch.zeros(1, 1), one)
        # No frequency is above one turn of 1 radian a position, so the angle at position 1 is the frequency.
        angle = torch.atan2(sin[0, 0].double(), cos[0, 0].double())
        frequencies.append(angle[: dim // 2].float().numpy())
    rotary = Rotary("halves", tuple(frequencies), tuple(names.index(kind) for kind in kinds))
    return Shape(layers, heads, dim, element, rotary)


def samples_of(shape: Shape, kv: Tensor) -> Floats:
    """KV [layers, 2, tokens, kv_heads, dim] from position 0 on as training samples [layers, tokens, width]: keys turned
    back to position 0, then values."""
    layers, _, tokens = kv.shape[:3]
    out = kv.double().clone()
    for layer, chosen in enumerate(shape.rotary.set_of_layer):
        if chosen < 0:
            continue
        angles = torch.arange(tokens)[:, None] * torch.from_numpy(shape.rotary.frequencies[chosen]).double()
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        pairs = shape.rotary.elements // 2
        a, b = out[layer, 0, ..., :pairs].clone(), out[layer, 0, ..., pairs : 2 * pairs].clone()
        out[layer, 0, ..., :pairs], out[layer, 0, ..., pairs : 2 * pairs] = a * cos + b * sin, b * cos - a * sin
    flat: Floats = out.transpose(1, 2).reshape(layers, tokens, shape.width).float().numpy()
    return flat


def importance(
    model: Any, prompts: Sequence[Captured], told: Callable[[], None] = lambda: None, noise: float = 0.02
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[layers, 2]: KL for each unit of error, when white noise of ``noise`` times the variance is added to the keys or
    the values of one layer. Takes ``2 × layers`` answers for each prompt; ``told`` is called after each."""
    generator = torch.Generator().manual_seed(1)
    layers = prompts[0].kv.shape[0]
    out = np.zeros((layers, 2))
    for prompt in prompts:
        for layer in range(layers):
            for part in range(2):
                kv = prompt.kv.clone()
                variance = noise * float(kv[layer, part].flatten(1).var(0).mean())
                kv[layer, part] += variance**0.5 * torch.randn(kv[layer, part].shape, generator=generator)
                kl, _ = divergence(prompt.logits, answer_logits(model, kv, prompt.tail))
                out[layer, part] += max(kl, 1e-7) / variance / len(prompts)
                told()
    return out
