"""Tiny random models as folders that SGLang loads."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benches.bench_sglang_gpu import save_tokenizer
from transformers import Gemma2Config, Phi3Config, Qwen3MoeConfig

from tests.tiny_models import FAMILIES, SHAPE, VOCABULARY, model_of

_GEMMA2: Any = Gemma2Config
_QWEN3_MOE: Any = Qwen3MoeConfig
SERVED: dict[str, Any] = {
    name: FAMILIES[name]
    for name in ("llama", "llama-scaled", "llama-yarn", "mistral-window", "qwen2", "qwen3", "mixtral", "gemma3")
} | {
    "gemma2": _GEMMA2(
        **SHAPE,
        hidden_act="gelu_pytorch_tanh",
        sliding_window=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=0.0,
        final_logit_softcapping=30.0,
    ),
    "qwen3-moe": _QWEN3_MOE(
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}

_PHI3: Any = Phi3Config
# SGLang's attention for CPUs leaves the soft cap out, so what it computes isn't what the model says; LongRoPE rotates
# by the length of the prompt.
UNPROVEN: dict[str, Any] = {
    "phi3-longrope": _PHI3(
        **SHAPE,
        original_max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    ),
    "gemma2-softcap": _GEMMA2(
        **SHAPE, hidden_act="gelu_pytorch_tanh", sliding_window=16, query_pre_attn_scalar=16, attn_logit_softcapping=1.0
    ),
}


@cache
def folder_of(name: str) -> Path:
    """The model and a tokenizer of bytes, so that the separator can be found."""
    folder = Path(mkdtemp(prefix=f"sglang-{name}-"))
    model_of((SERVED | UNPROVEN)[name]).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


SEPARATOR = [4 + byte for byte in b" # # "]
WORDS = range(4 + 256, VOCABULARY)
"""Tokens that are no bytes, so that no separator appears among them."""
