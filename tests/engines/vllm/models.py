"""Tiny random models as folders that vLLM loads: its attention for CPUs wants heads of 32."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benches.bench_sglang_gpu import save_tokenizer
from transformers import LlamaConfig, Qwen3Config

from tests.tiny_models import SHAPE, VOCABULARY, model_of

_SHAPE: dict[str, Any] = {**SHAPE, "head_dim": 32}
SERVED: dict[str, Any] = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE),
}


@cache
def folder_of(name: str) -> Path:
    """The model and a tokenizer of bytes, so that the separator can be found."""
    folder = Path(mkdtemp(prefix=f"vllm-{name}-"))
    model_of(SERVED[name]).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


SEPARATOR = [4 + byte for byte in b" # # "]
WORDS = range(4 + 256, VOCABULARY)
"""Tokens that are no bytes, so that no separator appears among them."""
