"""Start-up on one rank: what this server is refused for, the proof of the geometry, the store, and the tree."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from blendstore import Store
from blendstore.blend import Geometry, pin, warm_up
from blendstore.blend.selectors import SelectorSettings, make_selector
from blendstore.blend.selftest import GeometryError, Proof, run_fresh
from blendstore.config import Config
from blendstore.identity import ModelIdentity, weights_digest
from blendstore.metrics import ServingMetrics
from blendstore.segments import SegmentationError, SeparatorSegmenter, derive_separator_ids

from .cache import BlendingCache
from .model import SGLangModel
from .proof import prove
from .ranks import Ranks
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
    files = _weights(arguments)

    def identity() -> ModelIdentity:
        return ModelIdentity(
            weights_digest=files + _loaded(runner.model),
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
        pinned=pin(store, geometry.device),
        ranks=Ranks(context.params.tp_cache_group if context.tp_size > 1 else None),
    )
    if model is not None:
        warm_up(geometry, model.softcap)
        _calibrate(serving, model)
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


@torch.inference_mode()
def _loaded(model: Any) -> bytes:
    """32 bytes over up to 1,024 evenly spaced elements of every parameter in memory: weights that were updated in place
    are told from those of the files."""
    samples = []
    for _, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        if flat.numel():
            samples.append(flat[:: -(-flat.numel() // 1024)].float())
    everything = torch.cat(samples).cpu().numpy() if samples else np.zeros(0, np.float32)
    return hashlib.blake2b(everything.tobytes(), digest_size=32).digest()


def _calibrate(serving: Serving, model: SGLangModel) -> None:
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


def _separators(arguments: Any, config: Config) -> SeparatorSegmenter | None:
    if config.segmenter not in ("auto", "separator"):
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(
            arguments.tokenizer_path or arguments.model_path, trust_remote_code=arguments.trust_remote_code
        )
        bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
        return SeparatorSegmenter(derive_separator_ids(tokenizer, config.blend_special_str), bos)
    except (SegmentationError, OSError, ValueError) as error:
        if config.segmenter == "separator":
            raise
        log.warning("documents are found by the matcher alone: %s", error)
        return None
