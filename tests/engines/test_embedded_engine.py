"""The embedded engine against the plain model, on tiny random models: what blending may not change."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from blendstore.config import Config
from blendstore.options import RequestOptions
from blendstore_transformers import Engine
from blendstore_transformers.model import layers_of

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PHI3: Any = Phi3Config
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=24),
    "phi3-partial": PHI3(**SHAPE, partial_rotary_factor=0.5),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=16),
}
CONFIG = Config.load(env={}, overrides={"enable_blending": True, "segmenter": "matcher", "max_local_cpu_size": 0.1})


def tiny(config: Any) -> Any:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
    return model


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_one_is_the_engines_own_prefill(family: str) -> None:
    """Invariant 1, with documents moved, a new one between them, and one that comes twice."""
    engine = Engine(tiny(FAMILIES[family]), None, CONFIG)
    assert engine.refusal == ""
    system, a, b, new, question = ids(1, 40), ids(2, 300), ids(3, 280), ids(4, 90), ids(5, 30)
    engine.prefill([*system, *a, *b, *question])
    prompt = [*ids(6, 17), *b, *new, *a, *b, *question]
    plain = engine.prefill(prompt, RequestOptions(reuse=False, store=False))
    blended = engine.prefill(prompt, RequestOptions(ratio=1.0, store=False))
    assert blended.report.fallback == ""
    assert blended.report.recomputed > 400, "documents were not reused at all"
    for mine, own in zip(layers_of(blended.cache), layers_of(plain.cache), strict=True):
        assert (mine[0] - own[0]).abs().max() <= 1e-4
        assert (mine[1] - own[1]).abs().max() <= 1e-4
    assert blended.logits.argmax() == plain.logits.argmax()


def test_same_prompt_again_is_restored_bit_for_bit() -> None:
    engine = Engine(tiny(FAMILIES["llama"]), None, CONFIG)
    prompt = ids(7, 600)
    first = engine.prefill(prompt)
    again = engine.prefill(prompt)
    assert again.report.exact >= 512
    for mine, own in zip(layers_of(again.cache), layers_of(first.cache), strict=True):
        assert torch.equal(mine[0][:512], own[0][:512])
        assert torch.equal(mine[1][:512], own[1][:512])


def test_case_s13_tenants_share_nothing() -> None:
    engine = Engine(tiny(FAMILIES["llama"]), None, CONFIG)
    prompt = [*ids(8, 30), *ids(9, 400), *ids(10, 30)]
    engine.prefill(prompt, RequestOptions(tenant_salt="one"))
    other = engine.prefill(prompt, RequestOptions(tenant_salt="two", store=False)).report
    assert (other.exact, other.reused, other.fresh) == (0, 0, len(prompt))
    assert engine.prefill(prompt, RequestOptions(tenant_salt="one")).report.exact > 0


def test_case_f01_a_failing_store_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny(FAMILIES["llama"]), None, CONFIG)
    prompt = ids(11, 500)
    wanted = engine.prefill(prompt).logits

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("read failed")

    monkeypatch.setattr(engine.pipeline, "prepare", broken)
    found = engine.prefill(prompt)
    assert "read failed" in found.report.fallback
    assert engine.counters["fallbacks"] == 1
    assert torch.allclose(found.logits, wanted, atol=1e-4)
