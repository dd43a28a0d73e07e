"""Start-up of one worker: what this server is refused for, the proof of the geometry, and the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig

from blendstore.blend import Geometry, pin, warm_up, warm_up_formats
from blendstore.blend.selectors import SelectorSettings, make_selector
from blendstore.blend.selftest import Proof
from blendstore.config import Config, ConfigError
from blendstore.identity import ModelIdentity
from blendstore.startup import (
    Refused,
    announcement,
    calibrate,
    files_digest,
    guarded,
    loaded_digest,
    proven,
    separators,
)
from blendstore.tiers import Payload, open_store

from .layout import PagedKV
from .model import VLLMModel
from .proof import prove
from .serve import Serving
from .telemetry import Recorder
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
    metrics = Recorder()
    if config.enable_blending:
        make_selector(config.blend_selector, SelectorSettings(options=dict(config.blend_selector_options)))

    def make_model() -> VLLMModel:
        if vllm_config.lora_config is not None:
            raise Refused("LoRA is enabled, and layers wrapped for adapters need the engine's own batches")
        return VLLMModel(engine, vllm_config)

    def prove_model(model: VLLMModel) -> Proof:
        return prove(model, runner, vllm_config)

    name = type(engine).__name__
    found = proven(config, name, make_model, prove_model)
    model, proof, refusal = found
    model_config = vllm_config.model_config
    tokenizer, trust = model_config.tokenizer, model_config.trust_remote_code
    context = model_config.max_model_len
    config, given_up = guarded(config, model, tokenizer, context=context, trust_remote_code=trust, refusal=refusal)
    metrics.event("codec_fallback", given_up)
    if not config.enable_blending:
        model = None
    kv = model.kv if model is not None else PagedKV(_attentions(vllm_config, caches))
    geometry = (
        model.geometry
        if model is not None
        else Geometry.plain(layers=len(caches), kv_heads=kv.heads, head_dim=kv.dim, dtype=kv.dtype, device=kv.device)
    )
    store = open_store(config, payload=Payload.of(geometry))
    serving = Serving(
        config=config,
        geometry=geometry,
        kv=kv,
        block=vllm_config.cache_config.block_size,
        model=model,
        store=store,
        identity=ModelIdentity(
            weights_digest=files_digest(
                model_config.model, revision=model_config.revision, dummy=vllm_config.load_config.load_format == "dummy"
            )
            + loaded_digest(engine),
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            dtype=geometry.element,
            rotary_digest=repr(model_config.hf_text_config.to_dict().get("rope_parameters")).encode(),
            kept=config.kept,
        ),
        separators=separators(config, tokenizer, trust_remote_code=trust) if model is not None else None,
        metrics=metrics,
        pinned=pin(store, geometry.device),
    )
    warm_up_formats(geometry, config.local_format)
    if model is not None:
        _warm_up(model, serving)
    metrics.blending(model is not None)
    log.info("blendstore: %s", announcement(config, geometry, proof, refusal, name))
    for line in config.describe().splitlines():
        log.debug("%s", line)
    return serving


def _warm_up(model: VLLMModel, serving: Serving) -> None:
    """Compile what a blend needs and time two of nothing: the first one on a device takes a second and more."""
    warm_up(model.geometry, model.softcap)
    with model.entered(1024):
        calibrate(serving.budget, model, serving.store, serving.config)


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
