"""Tiny random models of the families that the embedded engine serves, and what tests ask of them."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DynamicCache,
    Gemma3TextConfig,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from blendstore import Store
from blendstore.config import Config
from blendstore.options import RequestOptions
from blendstore_transformers import Engine, Prefill
from blendstore_transformers.model import layers_of

VOCABULARY = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_PHI3: Any = Phi3Config
_GLM: Any = GlmConfig
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-scaled": LlamaConfig(**SHAPE, rope_parameters=_LLAMA3),
    "llama-yarn": LlamaConfig(**SHAPE, rope_parameters=_YARN),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=24),
    "phi3-partial": _PHI3(**SHAPE, partial_rotary_factor=0.5),
    "cohere-interleaved": CohereConfig(**SHAPE),
    "glm-interleaved-partial": _GLM(**SHAPE, partial_rotary_factor=0.5),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
}

FULL = RequestOptions(ratio=1.0)
PLAIN = RequestOptions(reuse=False, store=False)
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def model_of(config: Any) -> Any:
    """Random weights, large enough that attention has preferences."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
    return model


def engine_of(model: Any, *, store: Store | None = None, **config: object) -> Engine:
    """Small chunks, documents found by the matcher unless told otherwise."""
    given = {"enable_blending": True, "segmenter": "matcher", "chunk_size": 32, "blend_min_tokens": 16, **config}
    store = store or Store(capacity_bytes=1 << 26, chunk_size=32)
    return Engine(model, None, Config.load(env={}, overrides=given), store=store)


def ids(seed: int, count: int) -> list[int]:
    """Random tokens; never a special one."""
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def own(model: Any, prompt: list[int], steps: int = 6) -> tuple[Layers, list[int]]:
    """The model's own prefill of ``prompt`` and its greedy continuation, without anything of ours but the container."""
    cache = DynamicCache()
    logits = model(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0, -1]
    layers = [(k.clone(), v.clone()) for k, v in layers_of(cache)]
    return layers, continued(model, cache, logits, steps)


@torch.inference_mode()
def continued(model: Any, cache: DynamicCache, logits: torch.Tensor, steps: int = 6) -> list[int]:
    """Greedy tokens behind a cache whose last logits are ``logits``."""
    out = [int(logits.argmax())]
    while len(out) < steps:
        step = model(input_ids=torch.tensor([out[-1:]]), past_key_values=cache, use_cache=True)
        out.append(int(step.logits[0, -1].argmax()))
    return out


def largest_error(found: DynamicCache, wanted: Layers) -> float:
    """Largest absolute difference of K or V over all layers and tokens; NaN when anything is NaN."""
    pairs = zip(layers_of(found), wanted, strict=True)
    errors = [(a - b).abs().max() for x, y in pairs for a, b in zip(x, y, strict=True)]
    return float(torch.stack(errors).max())


def assert_same(model: Any, found: Prefill, prompt: list[int], limit: float = 1e-4) -> None:
    """KV as the model's own in every layer, and the same greedy continuation."""
    layers, wanted = own(model, prompt)
    error = largest_error(found.cache, layers)
    assert error <= limit, error
    assert continued(model, found.cache, found.logits) == wanted
