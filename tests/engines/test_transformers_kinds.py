"""Case b06 for the kinds of model that transformers offers: each is blended, or refused by name with its KV cached
plainly, or an error at start; never an error while serving, never another answer than the model's own."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from blendstore_transformers import UnsupportedModel
from tests.tiny_models import FULL, SHAPE, assert_same, engine_of, ids, model_of

SYSTEM, A, QUESTION = ids(1, 40), ids(2, 100), ids(5, 20)
SMALL = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
GPT = {"vocab_size": 512, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
DEEPSEEK = {**SMALL, **LATENT, **EXPERTS, "num_key_value_heads": 4}
HYBRID = {**SHAPE, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}

BLENDED: dict[str, dict[str, Any]] = {
    "gemma2": {**SHAPE, "sliding_window": 16},
    "granite": SHAPE,
    "olmo2": SHAPE,
    "qwen3_moe": {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "stablelm": SHAPE,
    "starcoder2": SHAPE,
}
CACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("no 'layers'", {"vocab_size": 512, "hidden_size": 64, "n_layer": 4, "n_head": 4}),
    "gpt2": ("no 'layers'", GPT),
    "gptj": ("no 'layers'", {**GPT, "rotary_dim": 8}),
    "opt": ("no 'rotary_emb'", {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "smollm3": ("not a plain rotation", {**SHAPE, "no_rope_layers": [1, 1, 1, 0]}),
}
UNUSABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("see later ones", SMALL),
    "deepseek_v2": ("latent attention", DEEPSEEK),
    "deepseek_v3": ("latent attention", DEEPSEEK),
    "mamba": ("nothing to store", {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}),
    "qwen3_next": ("plain cache", HYBRID),
    "roberta": ("positions", SMALL),
}


def made(kind: str, given: dict[str, Any]) -> Any:
    config: Any = CONFIG_MAPPING[kind]
    return model_of(config(**given))


@pytest.mark.parametrize("kind", BLENDED)
def test_blended(kind: str) -> None:
    model = made(kind, BLENDED[kind])
    engine = engine_of(model)
    assert engine.refusal == ""
    engine.prefill([*SYSTEM, *A, *QUESTION])
    prompt = [*ids(6, 17), *A, *QUESTION]
    found = engine.prefill(prompt, FULL)
    assert (found.report.fallback, found.report.recomputed > 60) == ("", True)
    assert_same(model, found, prompt)


@pytest.mark.parametrize("kind", CACHED)
def test_case_b06_refused_by_name_and_cached_plainly(kind: str) -> None:
    reason, given = CACHED[kind]
    model = made(kind, given)
    engine = engine_of(model)
    assert reason in engine.refusal
    prompt = [*SYSTEM, *A, *QUESTION]
    for reused in (0, len(prompt) - 1):
        found = engine.prefill(prompt)
        assert (found.report.fallback, found.report.exact) == ("", reused)
        assert_same(model, found, prompt)
    assert engine.counters["store_errors"] == 0


@pytest.mark.parametrize("kind", UNUSABLE)
def test_case_b06_an_error_at_start_that_says_why(kind: str) -> None:
    """MLA, recurrent and hybrid models, and models whose KV of a prefix isn't what a longer prompt needs."""
    reason, given = UNUSABLE[kind]
    model = made(kind, given)
    for blending in (True, False):
        with pytest.raises(UnsupportedModel, match=reason) as caught:
            engine_of(model, enable_blending=blending)
        assert type(model).__name__ in str(caught.value)
    assert bool(torch.isfinite(model(input_ids=torch.tensor([QUESTION]), use_cache=False).logits).all())
