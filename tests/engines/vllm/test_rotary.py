"""Keys turned by tables that are read from vLLM's own rotary modules are those that vLLM writes at the new place."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from blendstore.startup import Refused
from blendstore_vllm.rotary import rotary_tables

DIM, SOURCE, TOKENS = 32, 37, 11
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"rope_type": "default", "rope_theta": 1e4}, True),
    "another base": ({"rope_type": "default", "rope_theta": 1e6}, True),
    "partial": ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, True),
    "interleaved": ({"rope_type": "default", "rope_theta": 1e4}, False),
    "llama3": (
        {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        True,
    ),
    "yarn": (
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096},
        True,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


class Layer(nn.Module):
    """One that turns its keys by ``rotary``."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary


def turned(rotary: Any, k: torch.Tensor, first: int) -> torch.Tensor:
    """Keys ``k`` [n, heads, dim] as the engine writes them at positions from ``first`` on."""
    at = torch.arange(first, first + len(k))
    flat = k.reshape(len(k), -1).clone()
    keys: torch.Tensor = rotary.forward_native(at, flat.clone(), flat)[1]
    return keys.view_as(k)


@pytest.mark.parametrize("target", [0, 5, 9000])
@pytest.mark.parametrize("kind", KINDS)
def test_case_b05_a_key_written_at_37_is_right_at_0_5_and_9000(kind: str, target: int) -> None:
    parameters, halves = KINDS[kind]
    rotary = get_rope(DIM, 16384, is_neox_style=halves, rope_parameters=parameters, dtype=torch.float32)
    (table,) = rotary_tables([Layer(rotary)])
    assert table is not None
    k = torch.randn(TOKENS, 2, DIM, generator=torch.Generator().manual_seed(1))
    here, there = turned(rotary, k, SOURCE), turned(rotary, k, target)
    angles = table.between(torch.arange(SOURCE, SOURCE + TOKENS), torch.arange(target, target + TOKENS))
    torch.testing.assert_close(table.rotate(here, *angles), there, rtol=0, atol=2e-5)
    assert not torch.allclose(here, there, atol=1e-2)


def test_case_b05_long_rope_is_refused_by_name() -> None:
    """Its frequencies switch with the prompt's length."""
    parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * (DIM // 2), "long_factor": [4.0] * (DIM // 2),
    }  # fmt: skip
    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=256)
    with set_current_vllm_config(config):
        rotary = get_rope(DIM, 256, rope_parameters=parameters, dtype=torch.float32)
    with pytest.raises(Refused, match=r"layer 0: .*LongRoPE.* switches frequencies"):
        rotary_tables([Layer(rotary)])


def test_layers_without_rotary_embeddings_have_no_table() -> None:
    assert rotary_tables([Layer(nn.Linear(2, 2))]) == (None,)
