"""Start-up on one rank: what this server is refused for, the proof of the geometry, the store, and the tree."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from blendstore.blend import Geometry, pin, warm_up, warm_up_formats
from blendstore.blend.selftest import Proof
from blendstore.config import Config
from blendstore.identity import ModelIdentity
from blendstore.metrics import ServingMetrics
from blendstore.startup import (
    Refused,
    announcement,
    calibrate,
    files_digest,
    guarded,
    loaded_digest,
    on_every_rank,
    prove_selector,
    proven,
    separators,
)
from blendstore.tiers import Payload, open_store

from .cache import BlendingCache
from .model import SGLangModel
from .proof import prove
from .ranks import Ranks
from .serve import Serving
from .streams import Streams
from .versions import Version

log = logging.getLogger("blendstore.sglang")


def set_up(context: Any, config: Config, version: Version) -> Any:
    """The radix cache with blendstore in it. Raises `Refused` where nothing can be stored or restored."""
    arguments, runner = context.server_args, context.tp_worker.model_runner
    _refuse_server(context, arguments, runner)
    metrics = ServingMetrics(prometheus=bool(arguments.enable_metrics), rank=context.tp_rank)
    ranks = Ranks(context.params.tp_cache_group if context.tp_size > 1 else None)
    if config.enable_blending:
        prove_selector(config, runner.token_to_kv_pool.layer_num)

    def make_model() -> SGLangModel:
        _refuse_blending(arguments)
        return SGLangModel(runner, context.tp_group, version)

    def prove_model(model: SGLangModel) -> Proof:
        return prove(model, runner, context.params)

    name = type(runner.model).__name__
    found = proven(config, name, make_model, prove_model, together=ranks.largest)
    model, proof, refusal = found
    tokenizer, trust = arguments.tokenizer_path or arguments.model_path, arguments.trust_remote_code
    config, given_up = guarded(
        config,
        model,
        tokenizer,
        context=runner.model_config.context_len,
        trust_remote_code=trust,
        refusal=refusal,
        together=ranks.largest,
    )
    metrics.event("codec_fallback", given_up)
    if not config.enable_blending:
        model = None
    geometry = model.geometry if model is not None else _plain_geometry(runner)
    dummy = arguments.load_format == "dummy"
    files = on_every_rank(
        lambda: files_digest(arguments.model_path, revision=arguments.revision, dummy=dummy), ranks.largest
    )

    def identity() -> ModelIdentity:
        return ModelIdentity(
            weights_digest=files + loaded_digest(runner.model),
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            dtype=geometry.element,
            rotary_digest=repr(runner.model_config.hf_text_config.to_dict().get("rope_parameters")).encode(),
            tp_rank=context.tp_rank,
            tp_size=context.tp_size,
            kept=config.kept,
        )

    def made() -> Serving:
        store = open_store(config, rank=context.tp_rank, payload=Payload.of(geometry))
        serving = Serving(
            config=config,
            geometry=geometry,
            model=model,
            pool=context.params.token_to_kv_pool_allocator.get_kvcache(),
            store=store,
            identity=identity,
            separators=separators(config, tokenizer, trust_remote_code=trust) if model is not None else None,
            metrics=metrics,
            page_size=context.params.page_size,
            streams=Streams(runner.forward_stream if geometry.device.type == "cuda" else None),
            pinned=pin(store, geometry.device),
            ranks=ranks,
        )
        if geometry.device.type == "cuda":
            serving.copies.rows.warm_up()
            warm_up_formats(geometry, config.local_format)
        if model is not None:
            warm_up(geometry, model.softcap)
        return serving

    serving = on_every_rank(made, ranks.largest)
    if model is not None:
        calibrate(serving.budget, model, serving.store, config, together=ranks.largest)
    cache = version.make_cache(context, BlendingCache)
    cache.serving, cache.version = serving, version
    metrics.blending(model is not None)
    log.info("blendstore: %s", announcement(config, geometry, proof, refusal, name))
    for line in config.describe().splitlines():
        log.debug("%s", line)
    return cache


def _refuse_server(context: Any, arguments: Any, runner: Any) -> None:
    """What leaves nothing to store or restore, or no place to do it."""
    pool = context.params.token_to_kv_pool_allocator.get_kvcache()
    for wrong, what in (
        (context.is_hybrid_ssm, "its layers are recurrent, which is not supported"),
        (context.is_hybrid_swa, "its pool is split for sliding windows: start with --disable-hybrid-swa-memory"),
        (
            type(pool) is not MHATokenToKVPool,
            f"its KV pool is a {type(pool).__name__} (MLA, hybrid or quantised), not a plain MHATokenToKVPool",
        ),
        (
            getattr(pool, "store_dtype", None) != getattr(pool, "dtype", None) or pool.dtype.itemsize < 2,
            f"its KV pool holds {getattr(pool, 'dtype', '?')}, and quantised pools are not supported",
        ),
        (context.disable_radix_cache, "the radix cache is disabled (--disable-radix-cache)"),
        (context.enable_hierarchical_cache, "HiCache is on (--enable-hierarchical-cache); blendstore takes its place"),
        (context.params.is_eagle, "speculative decoding keys the tree by pairs of tokens (EAGLE)"),
        (context.params.pp_size > 1, "pipeline parallel (--pp-size) is not supported"),
        (context.params.attn_cp_size > 1, "context parallel is not supported"),
        (getattr(arguments, "enable_dp_attention", False), "data-parallel attention is not supported"),
        (
            getattr(arguments, "disaggregation_mode", "null") not in ("null", None),
            "prefill/decode separation is not supported",
        ),
    ):
        if wrong:
            raise Refused(f"{type(runner.model).__name__}: {what}")


def _refuse_blending(arguments: Any) -> None:
    if getattr(arguments, "enable_lora", False):
        raise Refused("LoRA is enabled, and layers wrapped for adapters need the engine's own batches")


def _plain_geometry(runner: Any) -> Geometry:
    """Shape of the pool of a model that isn't blended."""
    pool = runner.token_to_kv_pool
    key = pool.get_key_buffer(0)
    _, kv_heads, head_dim = key.shape
    return Geometry.plain(
        layers=pool.layer_num, kv_heads=kv_heads, head_dim=head_dim, dtype=key.dtype, device=key.device
    )
