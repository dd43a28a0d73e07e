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
from typing import Any

import numpy as np
import torch

from ._core import Store
from .blend import EngineModel, Geometry
from .blend.answers import AnsweringModel, measure_of
from .blend.selectors import SelectorSettings, make_selector
from .blend.selftest import Proof, run_fresh
from .budget import Budget
from .codec import guard
from .codec.guard import Code, Measure
from .config import Config
from .identity import weights_digest
from .options import RequestOptions
from .segments import SegmentationError, SeparatorSegmenter
from .serving import settings

log = logging.getLogger("blendstore.startup")


class Refused(RuntimeError):
    """Blending, or blendstore as a whole, is refused for this model or server; the message says why."""


def announcement(config: Config, geometry: Geometry, proof: Proof | None, refusal: str, name: str) -> str:
    """One line: what will be done with the model ``name``, or why not."""
    shape = f"{name}: {geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim}, {geometry.dtype}"
    form = "" if config.local_format == "raw" else f", {config.local_format}"
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


def calibrate(budget: Budget, model: EngineModel, store: Store, config: Config) -> None:
    """Two small blends of nothing, each run twice: what a blend's fixed part and each of its rows take here. The store
    learns from it what computing costs, unless the configuration says it."""
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
        measured.append((float(count), spent))
    budget.calibrate(*measured)
    each = budget.estimate(1) - budget.estimate(0)
    if each > 0 and config.origins["prefill_tokens_per_s"] == "default":
        store.set_prefill_speed(1e3 / each)


def guarded(
    config: Config,
    model: AnsweringModel | None,
    tokenizer: str,
    *,
    trust_remote_code: bool,
    together: Callable[[float], float] = float,
) -> tuple[Config, int]:
    """``config`` without what changes this model's answers by more than ``codec_max_kl``, and how many settings that
    were. ``together`` gives all ranks the largest of their numbers, so that they decide alike. What can't be measured
    is used as it is configured, with a warning."""
    keys = guard.lossy(config)
    if not keys:
        return config, 0
    ids: list[int] = []
    measure: Measure | None = None
    reason = "blending can't be proved for this model" if model is None else "another rank can't"
    # What fails on one rank is agreed on before the ranks compute together.
    try:
        if model is not None:
            ids = guard.prose(_tokenizer(tokenizer, trust_remote_code).encode)
    except Exception as error:  # whatever a tokenizer says is the reason
        reason = f"{type(error).__name__}: {error}"
    if together(float(not ids)) == 0 and model is not None:
        try:
            measure = measure_of(model, ids)
        except Exception as error:  # as above, of a model
            reason = f"{type(error).__name__}: {error}"
    # The vote first: a rank that can't measure takes part in it too.
    if together(float(measure is None)) or measure is None:
        log.warning("%s: not measured: %s", ", ".join(keys), reason)
        return config, 0

    def measured(code: Code, measure: Measure = measure) -> float:
        kl = measure(code)
        return together(math.inf if math.isnan(kl) else kl)

    config, verdicts = guard.guarded(config, measured)
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
