"""Whether what a lossy coding does to this model's answers stays within the user's bound; where not, records stay raw.

Measured at every start, on prose that is packaged with the product: a model's weights, or the tables, may have changed.
It takes one prefill of a few hundred tokens, and one short forward for each lossy setting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .formats import FORMATS, FormatError, checked

if TYPE_CHECKING:
    from ..config import Config

log = logging.getLogger("blendstore.codec")

TOKENS = 448
"""Of the prose, those whose KV is coded."""
FORCED = 64
"""Of the prose, those behind, which the model is asked for."""

Code = Callable[[Tensor], Tensor]
"""KV [layers, 2, tokens, kv_heads, dim] of a prompt from position 0 on, to what is left of it."""
Measure = Callable[[Code], float]
"""Mean KL in nats of the model's answers behind coded KV from those behind its own."""


class Unmeasured(RuntimeError):
    """What a setting does to this model's answers can't be found out; says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One lossy setting, and what it costs."""

    key: str
    value: str
    kl: float
    kept: bool


def prose(encode: Callable[[str], list[int]], context: int | None) -> list[int]:
    """`TOKENS` + `FORCED` token ids of packaged prose, fewer where the model takes ``context`` at most. Raises
    `Unmeasured` for too few to measure with."""
    from ..bench.corpus import narrative

    ids = encode(narrative()[0][: 12 * (TOKENS + FORCED)])[: TOKENS + FORCED][:context]
    if len(ids) < 2 * FORCED:
        raise Unmeasured(f"the tokenizer or the model has room for {len(ids)} tokens of prose, {2 * FORCED} are needed")
    return ids


def lossy(config: Config) -> list[str]:
    """Configuration keys whose values change records."""
    serdes = [key for key in ("local_serde", "remote_serde") if getattr(config, key) == "cachegen"]
    below = {"local_serde": config.local_disk, "remote_serde": config.remote_url}
    # Exact prefixes are raw unless it is said otherwise, and without blending there is nothing else.
    packed = config.local_format != "raw" and (config.enable_blending or config.local_format_exact)
    return [key for key in serdes if below[key] is not None] + ["local_format"] * packed


def codes(config: Config) -> dict[str, Code]:
    """What the lossy settings do, by their value. Raises `ConfigError` for tables that can't be read."""
    return {getattr(config, key): _code(config, key) for key in lossy(config)}


def guarded(config: Config, codes: Mapping[str, Code], measure: Measure) -> tuple[Config, list[Verdict]]:
    """``config`` with ``naive`` and ``raw`` in place of what costs more than ``codec_max_kl``, and what was found.
    ``codes`` are its `codes`. What can't be measured is used as it is configured, with a warning."""
    verdicts = []
    found: dict[str, float] = {}
    for key in lossy(config):
        value: str = getattr(config, key)
        try:
            kl = found[value] if value in found else measure(codes[value])
        except Exception as error:  # of a device that has no memory left, for one
            log.warning("%s: %s is not measured: %s", key, value, f"{type(error).__name__}: {error}")
            continue
        found[value] = kl
        # Not "kl > bound": what is not a number is not kept.
        verdicts.append(Verdict(key, value, kl, kept=kl <= config.codec_max_kl))
        if not verdicts[-1].kept:
            instead = "raw" if key == "local_format" else "naive"
            change: dict[str, Any] = {key: instead}
            config = replace(config, **change)
            told = "%s: %s changes this model's answers by a KL of %.3g, more than codec_max_kl %g: %s is used instead"
            log.warning(told, key, value, kl, config.codec_max_kl, instead)
    return config, verdicts


def divergence(reference: Tensor, found: Tensor) -> float:
    """Mean KL(reference ‖ found) in nats over the rows of logits."""
    p, q = reference.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def _code(config: Config, key: str) -> Code:
    if key == "local_format":
        return partial(_formatted, config.local_format, config.chunk_size)
    from ..tiers import coder_of

    return partial(_coded, coder_of(config, key, None), config.chunk_size)


def _formatted(name: str, chunk: int, kv: Any) -> Tensor:
    packing = FORMATS[name]
    if not packing.fits(kv.shape[-1]):
        whole: Tensor = kv
        return whole
    return torch.cat([_packed(packing, part) for part in kv.split(chunk, 2)], 2)


def _packed(packing: Any, part: Tensor) -> Tensor:
    try:
        back: Tensor = packing.unpack(checked(packing, part), part.dtype)
    except FormatError:  # such a record is not stored
        return part
    return back


def _coded(coder: Any, chunk: int, kv: Any) -> Tensor:
    out, position = [], 0
    for part in kv.split(chunk, 2):
        payload = part.contiguous().cpu().view(torch.uint8).numpy().tobytes()
        tokens = part.shape[2]
        try:
            coded = coder.encode(payload, tokens, source_position=position)
        except ValueError:  # such a record stays raw
            out.append(part)
        else:
            back = bytearray(coder.decode(coded, len(payload), tokens, source_position=position))
            out.append(torch.frombuffer(back, dtype=part.dtype).view(part.shape).to(part.device))
        position += tokens
    return torch.cat(out, 2)
