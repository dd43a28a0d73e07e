"""Start-up on one rank: what this server is refused for, the proof of the geometry, the store, and the tree."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from blendstore import Store
from blendstore.blend import Geometry
from blendstore.blend.selectors import SelectorSettings, make_selector
from blendstore.blend.selftest import GeometryError, Proof, prove_geometry
from blendstore.config import Config
from blendstore.identity import ModelIdentity, weights_digest
from blendstore.metrics import ServingMetrics
from blendstore.segments import SegmentationError, SeparatorSegmenter, derive_separator_ids

from .cache import BlendingCache
from .model import SGLangModel, make_batch
from .rotary import Refused
from .serve import Serving
from .streams import Streams
from .versions import Version

log = logging.getLogger("blendstore.sglang")


def set_up(context: Any, config: Config, version: Version) -> Any:
    """The radix cache with blendstore in it. Raises `Refused` where nothing can be stored or restored."""
    arguments, runner = context.server_args, context.tp_worker.model_runner
    _refuse_server(context, arguments, runner)
    metrics = ServingMetrics(prometheus=bool(arguments.enable_metrics), rank=context.tp_rank)
    model, proof, refusal = None, None, ""
    if config.enable_blending:
        make_selector(config.blend_selector, SelectorSettings(options=dict(config.blend_selector_options)))
        try:
            _refuse_blending(arguments)
            model = SGLangModel(runner, context.tp_group, version)
            proof = prove(model, runner, context.params)
        except (Refused, GeometryError) as error:
            if config.require_blending:
                raise
            model, refusal = None, str(error)
            log.warning("blending is refused for %s, plain caching stays on: %s", type(runner.model).__name__, refusal)
    geometry = model.geometry if model is not None else _plain_geometry(runner)
    identity = ModelIdentity(
        weights_digest=_weights(arguments),
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=str(geometry.dtype).removeprefix("torch."),
        rotary_digest=repr(runner.model_config.hf_text_config.to_dict().get("rope_parameters")).encode(),
        tp_rank=context.tp_rank,
        tp_size=context.tp_size,
    )
    store = Store(capacity_bytes=config.max_local_cpu_bytes, chunk_size=config.chunk_size, policy=config.cache_policy)
    serving = Serving(
        config=config,
        geometry=geometry,
        model=model,
        pool=context.params.token_to_kv_pool_allocator.get_kvcache(),
        store=store,
        identity=identity,
        separators=_separators(arguments, config) if model is not None else None,
        metrics=metrics,
        page_size=context.params.page_size,
        streams=Streams(runner.forward_stream if geometry.device.type == "cuda" else None),
    )
    cache = version.make_cache(context, BlendingCache)
    cache.serving, cache.version = serving, version
    metrics.blending(model is not None)
    log.info("blendstore: %s", describe(config, geometry, proof, refusal, type(runner.model).__name__))
    for line in config.describe().splitlines():
        log.debug("%s", line)
    return cache


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


def prove(model: SGLangModel, runner: Any, params: Any) -> Proof:
    """The runner's loop against the engine's own decoder and attention on its own pools, in slots of the pool."""
    allocator, rows = params.token_to_kv_pool_allocator, params.req_to_token_pool.req_to_token
    tokens = 48
    page = params.page_size
    taken = allocator.alloc(-(-tokens // page) * page)
    if taken is None:
        raise Refused(f"its KV pool has no room for {tokens} tokens")
    row = rows.shape[0] - 1
    before = rows[row].clone()
    slots = taken[:tokens].long()

    def prefill(ids: Tensor, offset: int) -> list[tuple[Tensor, Tensor]]:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        rows[row, :tokens] = slots.to(rows.dtype)
        positions = torch.arange(offset, offset + tokens, device=ids.device)
        batch = make_batch(ids, positions, slots, row)
        with torch.inference_mode(), forward_context(ForwardContext(attn_backend=runner.attn_backend)):
            runner.attn_backend.init_forward_metadata(batch)
            model.decoder(ids, positions, batch)
        layers = range(model.geometry.layers)
        return [(model.pool.get_key_buffer(i)[slots], model.pool.get_value_buffer(i)[slots]) for i in layers]

    try:
        return prove_geometry(model, prefill, vocabulary=model.vocabulary, tokens=tokens)
    finally:
        rows[row] = before
        allocator.free(taken)


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
    """Shape of the pool of a model that isn't blended: what plain caching needs, rotary and windows left out."""
    pool = runner.token_to_kv_pool
    key = pool.get_key_buffer(0)
    layers, (_, kv_heads, head_dim) = pool.layer_num, key.shape
    return Geometry(
        layers=layers,
        heads=kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=key.dtype,
        device=key.device,
        rotary=(None,) * layers,
        windows=(None,) * layers,
    )


def _weights(arguments: Any) -> bytes:
    """Of the files at the model's path; dummy weights are equal for equal configurations and seeds."""
    if arguments.load_format == "dummy":
        config = Path(arguments.model_path) / "config.json"
        return b"dummy:" + (config.read_bytes() if config.is_file() else arguments.model_path.encode())
    path = Path(arguments.model_path)
    if not path.exists():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(arguments.model_path, revision=arguments.revision, local_files_only=True))
    return weights_digest(path)


def _separators(arguments: Any, config: Config) -> SeparatorSegmenter | None:
    if config.segmenter not in ("auto", "separator"):
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            arguments.tokenizer_path or arguments.model_path, trust_remote_code=arguments.trust_remote_code
        )
        bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
        return SeparatorSegmenter(derive_separator_ids(tokenizer, config.blend_special_str), bos)
    except (SegmentationError, OSError, ValueError) as error:
        if config.segmenter == "separator":
            raise
        log.warning("documents are found by the matcher alone: %s", error)
        return None
