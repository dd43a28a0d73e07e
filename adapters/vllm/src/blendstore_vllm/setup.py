"""Start-up of one worker: what this server is refused for, the proof of the geometry, and the store."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from blendstore import Store
from blendstore.blend import Geometry
from blendstore.blend.selectors import SelectorSettings, make_selector
from blendstore.blend.selftest import GeometryError, Proof, run_fresh
from blendstore.config import Config, ConfigError
from blendstore.identity import ModelIdentity, weights_digest
from blendstore.metrics import ServingMetrics
from blendstore.segments import SegmentationError, SeparatorSegmenter, derive_separator_ids

from .layout import PagedKV
from .model import VLLMModel
from .proof import prove
from .refusal import Refused
from .serve import Serving
from .versions import check_version

log = logging.getLogger("blendstore.vllm")
_PREFIX = "blendstore."


def configuration(extra: Mapping[str, Any]) -> Config:
    """Of this process; keys ``blendstore.<key>`` of ``kv_connector_extra_config`` win. Blending is on unless it is said
    to be off."""
    overrides = {name.removeprefix(_PREFIX): value for name, value in extra.items() if name.startswith(_PREFIX)}
    config = Config.load(overrides=overrides)
    if config.origins["enable_blending"] == "default":
        config = Config.load(overrides={**overrides, "enable_blending": True})
    return config


def refuse_prefix_caching(config: Config, vllm_config: VllmConfig) -> None:
    """Blended KV would be found as if it were the true KV of its prefix. Raises `ConfigError`: nothing starts."""
    if config.enable_blending and vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "enable_blending: true, and vLLM's own prefix caching is on: it would give blended KV to other requests as "
            "their exact prefix. Start with --no-enable-prefix-caching (blendstore finds exact prefixes itself), or "
            "set enable_blending: false for plain caching"
        )


def set_up(config: Config, vllm_config: VllmConfig, runner: Any, caches: Mapping[str, Any]) -> Serving:
    """The store and the runner of this worker. Raises `Refused` where nothing can be stored or restored."""
    check_version()
    _refuse_server(vllm_config, runner)
    engine = runner.get_model()
    metrics = ServingMetrics(prometheus=False)
    model, proof, refusal = None, None, ""
    if config.enable_blending:
        make_selector(config.blend_selector, SelectorSettings(options=dict(config.blend_selector_options)))
        try:
            if vllm_config.lora_config is not None:
                raise Refused("LoRA is enabled, and layers wrapped for adapters need the engine's own batches")
            model = VLLMModel(engine, vllm_config)
            proof = prove(model, runner, vllm_config)
        except (Refused, GeometryError) as error:
            if config.require_blending:
                raise
            model, refusal = None, str(error)
            log.warning("blending is refused for %s, plain caching stays on: %s", type(engine).__name__, refusal)
    kv = model.kv if model is not None else PagedKV(_attentions(vllm_config, caches))
    geometry = model.geometry if model is not None else _plain_geometry(kv, len(caches))
    model_config = vllm_config.model_config
    serving = Serving(
        config=config,
        geometry=geometry,
        kv=kv,
        block=vllm_config.cache_config.block_size,
        model=model,
        store=Store(
            capacity_bytes=config.max_local_cpu_bytes, chunk_size=config.chunk_size, policy=config.cache_policy
        ),
        identity=ModelIdentity(
            weights_digest=_weights(vllm_config) + _loaded(engine),
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            dtype=str(geometry.dtype).removeprefix("torch."),
            rotary_digest=repr(model_config.hf_text_config.to_dict().get("rope_parameters")).encode(),
        ),
        separators=_separators(model_config, config) if model is not None else None,
        metrics=metrics,
    )
    if model is not None:
        _calibrate(serving, model)
    log.info("blendstore: %s", describe(config, geometry, proof, refusal, type(engine).__name__))
    for line in config.describe().splitlines():
        log.debug("%s", line)
    return serving


def describe(config: Config, geometry: Geometry, proof: Proof | None, refusal: str, name: str) -> str:
    """One line: what will be done with this model, or why not."""
    shape = f"{name}: {geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim}, {geometry.dtype}"
    memory = f"{config.max_local_cpu_size:g} GiB of memory ({config.cache_policy})"
    if not config.enable_blending:
        return f"plain caching in {memory}, {shape}"
    if proof is None:
        return f"plain caching in {memory}, blending refused: {refusal}; {shape}"
    return (
        f"blending by {config.blend_selector} at {', '.join(f'{r:g}' for r in config.blend_recompute_ratios)}, "
        f"documents by {config.segmenter}, {memory}, at most {config.blend_budget_ms:g} ms a blend; {shape}; "
        f"geometry proven (KV {proof.runner_error:.1e}, rotation {proof.rotation_error:.1e})"
    )


def _refuse_server(vllm_config: VllmConfig, runner: Any) -> None:
    """What leaves nothing to store or restore, or no place to do it."""
    parallel, groups = vllm_config.parallel_config, runner.kv_cache_config.kv_cache_groups
    for wrong, what in (
        (parallel.tensor_parallel_size > 1, "tensor parallel (--tensor-parallel-size) is not supported"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallel (--pipeline-parallel-size) is not supported"),
        (parallel.data_parallel_size > 1, "data parallel (--data-parallel-size) is not supported"),
        (len(groups) != 1, f"its KV cache has {len(groups)} groups: start with --disable-hybrid-kv-cache-manager"),
        (vllm_config.speculative_config is not None, "speculative decoding is not supported"),
    ):
        if wrong:
            raise Refused(what)


def _attentions(vllm_config: VllmConfig, caches: Mapping[str, Any]) -> list[Any]:
    """The modules that the registered caches belong to, in the order of the layers."""
    known: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    return [known[name] for name in caches]


def _plain_geometry(kv: PagedKV, layers: int) -> Geometry:
    """Of a model that isn't blended: what plain caching needs, rotary and windows left out."""
    return Geometry(
        layers=layers,
        heads=kv.heads,
        kv_heads=kv.heads,
        head_dim=kv.dim,
        dtype=kv.dtype,
        device=kv.device,
        rotary=(None,) * layers,
        windows=(None,) * layers,
    )


def _weights(vllm_config: VllmConfig) -> bytes:
    """Of the files at the model's path; dummy weights are equal for equal configurations and seeds."""
    model = vllm_config.model_config
    path = Path(model.model)
    if vllm_config.load_config.load_format == "dummy":
        config = path / "config.json"
        return b"dummy:" + (config.read_bytes() if config.is_file() else model.model.encode())
    if not path.exists():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    return weights_digest(path)


@torch.inference_mode()
def _loaded(model: Any) -> bytes:
    """32 bytes over up to 1,024 evenly spaced elements of every parameter in memory."""
    samples = []
    for _, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        if flat.numel():
            samples.append(flat[:: -(-flat.numel() // 1024)].float())
    everything = torch.cat(samples).cpu().numpy() if samples else np.zeros(0, np.float32)
    return hashlib.blake2b(everything.tobytes(), digest_size=32).digest()


def _calibrate(serving: Serving, model: VLLMModel) -> None:
    """Two small blends of nothing, each run twice: what a blend's fixed part and each of its rows take here."""
    if not serving.config.blend_budget_ms:
        return
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
    serving.budget.calibrate(*measured)


def _separators(model_config: Any, config: Config) -> SeparatorSegmenter | None:
    if config.segmenter not in ("auto", "separator"):
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_config.tokenizer, trust_remote_code=model_config.trust_remote_code
        )
        bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
        return SeparatorSegmenter(derive_separator_ids(tokenizer, config.blend_special_str), bos)
    except (SegmentationError, OSError, ValueError) as error:
        if config.segmenter == "separator":
            raise
        log.warning("documents are found by the matcher alone: %s", error)
        return None
