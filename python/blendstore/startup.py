"""What adapters of serving engines do alike when they start: identity of the weights, separators, the budget, one line.

Needs torch (the blend core), and knows no engine.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ._core import Store
from .blend import EngineModel, Geometry
from .blend.answers import AnsweringModel, Answers
from .blend.selectors import SelectorSettings, make_selector
from .blend.selftest import GeometryError, Proof, run_fresh
from .budget import Budget
from .codec import guard
from .codec.guard import Code
from .config import Config
from .identity import weights_digest
from .options import RequestOptions
from .segments import SegmentationError, SeparatorSegmenter
from .serving import settings

log = logging.getLogger("blendstore.startup")

Together = Callable[[float], float]
"""Gives every rank the largest of their numbers, so that they decide alike: a call is a collective. Alone, `float`."""
T = TypeVar("T")
M = TypeVar("M")


class Refused(RuntimeError):
    """Blending, or blendstore as a whole, is refused for this model or server; the message says why."""


def said(error: Exception) -> str:
    """As text: what keeps an error keeps its frames, and what they hold."""
    ours = isinstance(error, Refused | GeometryError | guard.Unmeasured)
    return str(error) if ours else f"{type(error).__name__}: {error}"


def announcement(config: Config, geometry: Geometry, proof: Proof | None, refusal: str, name: str) -> str:
    """One line: what will be done with the model ``name``, or why not."""
    shape = f"{name}: {geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim}, {geometry.dtype}"
    form = f", {config.local_format}" if "local_format" in guard.lossy(config) else ""
    memory = f"{config.max_local_cpu_size:g} GiB of memory ({config.cache_policy}{form})"
    if not config.enable_blending:
        return f"plain caching in {memory}, {shape}"
    if proof is None:
        return f"plain caching in {memory}, blending refused: {refusal}; {shape}"
    return (
        f"blending by {config.blend_selector} at {', '.join(f'{r:g}' for r in config.blend_recompute_ratios)}, "
        f"documents by {config.segmenter}, {memory}, at most {config.blend_budget_ms:g} ms a blend; {shape}; "
        f"geometry proven (KV {proof.runner_error:.1e}, rotation {proof.rotation_error:.1e})"
    )


def prove_selector(config: Config, layers: int) -> None:
    """Raises `SelectorError` where a model of that many layers can't be blended as configured."""
    how = settings(config, RequestOptions())
    wanted = SelectorSettings(how.check_layers, how.ratios, how.thresholds, how.options, layers=layers)
    make_selector(how.selector, wanted)


def files_digest(model: str, *, revision: str | None, dummy: bool) -> bytes:
    """Of the weight files at the path or hub name ``model``; ``dummy`` weights are equal for equal configurations."""
    path = Path(model)
    if dummy:
        config = path / "config.json"
        return b"dummy:" + (config.read_bytes() if config.is_file() else model.encode())
    if not path.exists():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(model, revision=revision, local_files_only=True))
    return weights_digest(path)


@torch.inference_mode()
def loaded_digest(model: Any) -> bytes:
    """32 bytes over up to 1,024 evenly spaced elements of every parameter in memory: weights that were updated in place
    are told from those of the files."""
    samples = []
    for _, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        if flat.numel():
            samples.append(flat[:: -(-flat.numel() // 1024)].float())
    everything = torch.cat(samples).cpu().numpy() if samples else np.zeros(0, np.float32)
    return hashlib.blake2b(everything.tobytes(), digest_size=32).digest()


def calibrate(budget: Budget, model: EngineModel, store: Store, config: Config, *, together: Together = float) -> None:
    """Two small blends of nothing, each run twice: what a blend's fixed part and each of its rows take on the slowest
    rank. The store learns from it what computing costs, unless the configuration says it."""
    device = model.geometry.device
    measured = []
    for count in (64, 1024) if device.type == "cuda" else (16, 128):
        ids = torch.full((count,), 7, dtype=torch.int64, device=device)
        for _ in range(2):
            begin = time.perf_counter()
            run_fresh(model, ids)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            spent = (time.perf_counter() - begin) * 1e3
        measured.append((float(count), together(spent)))
    budget.calibrate(*measured)
    each = budget.estimate(1) - budget.estimate(0)
    if each > 0 and config.origins["prefill_tokens_per_s"] == "default":
        store.set_prefill_speed(1e3 / each)


def on_every_rank(make: Callable[[], T], together: Together) -> T:
    """``make()``, where it succeeds on every rank: all raise where one does, that one what it raised."""
    made: T | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    if together(float(failure is not None)):
        raise failure or Refused("it failed on another rank, which says why")
    return cast(T, made)


def proven(
    config: Config, name: str, make: Callable[[], M], prove: Callable[[M], Proof], *, together: Together = float
) -> tuple[M | None, Proof | None, str]:
    """The model called ``name`` and its proof, where ``config`` needs them, or None and why blending is refused.

    Raises what ``make`` or ``prove`` raised where blending is required. What ranks compute together is ``prove``'s."""
    if not (config.enable_blending or guard.lossy(config)):
        return None, None, ""
    try:
        model = on_every_rank(make, together)
        return model, on_every_rank(lambda: prove(model), together), ""
    except Exception as error:  # whatever keeps this model from being proved
        if config.enable_blending and config.require_blending:
            raise
        refusal = said(error)
    if config.enable_blending:
        log.warning("blending is refused for %s, plain caching stays on: %s", name, refusal)
    return None, None, refusal


def guarded(
    config: Config,
    model: AnsweringModel | None,
    tokenizer: str,
    *,
    context: int,
    trust_remote_code: bool,
    refusal: str = "",
    together: Together = float,
) -> tuple[Config, int]:
    """``config`` without what changes this model's answers by more than ``codec_max_kl``, and how many settings that
    were. The model takes ``context`` tokens at most. What can't be measured, or for want of a model (``refusal`` says
    why), is used as it is configured, with a warning. Raises `ConfigError` for tables that can't be read."""
    keys = guard.lossy(config)
    if not keys:
        return config, 0
    codes = on_every_rank(lambda: guard.codes(config), together)

    def ids_of() -> list[int]:
        if model is None:
            raise guard.Unmeasured(refusal)
        return guard.prose(_tokenizer(tokenizer, trust_remote_code).encode, context)

    # What fails on one rank is agreed on before the ranks compute together.
    try:
        ids = on_every_rank(ids_of, together)
        answers = on_every_rank(lambda: Answers(cast(AnsweringModel, model), ids), together)
    except Exception as error:  # whatever a tokenizer or a model says is the reason
        log.warning("%s: not measured: %s", ", ".join(keys), said(error))
        return config, 0

    def measured(code: Code) -> float:
        coded = on_every_rank(lambda: code(answers.own), together)
        kl = on_every_rank(lambda: answers.divergence(coded), together)
        return together(math.inf if math.isnan(kl) else kl)

    config, verdicts = guard.guarded(config, codes, measured)
    for verdict in verdicts:
        log.info("%s: %s changes answers by a KL of %.3g", verdict.key, verdict.value, verdict.kl)
    return config, sum(not verdict.kept for verdict in verdicts)


def separators(config: Config, tokenizer: str, *, trust_remote_code: bool) -> SeparatorSegmenter | None:
    """The segmenter by separators for the tokenizer at that path, or None where the matcher finds documents alone.

    Raises what is wrong with the separator when the configuration asks for separators by name."""
    if config.segmenter not in ("auto", "separator"):
        return None
    try:
        return SeparatorSegmenter.of_tokenizer(_tokenizer(tokenizer, trust_remote_code), config.blend_special_str)
    except (SegmentationError, OSError, ValueError) as error:
        if config.segmenter == "separator":
            raise
        log.warning("documents are found by the matcher alone: %s", error)
        return None


def _tokenizer(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    return loader.from_pretrained(path, trust_remote_code=trust_remote_code)
