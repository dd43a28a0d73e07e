"""Keys moved to another position equal keys that were rotated there directly (case b05)."""

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from blendstore.blend.rotary import RotaryError, RotaryTable
from tests.fake_engine import Rope, rope

SOURCE, TARGETS, DIM = 37, (0, 5, 9_000), 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256}


def run(start: int, count: int = 11) -> torch.Tensor:
    return torch.arange(start, start + count)


def engine_rotation(embedding: Any, k: torch.Tensor, positions: torch.Tensor, *layer_type: str) -> torch.Tensor:
    """``k`` [n, heads, dim] rotated by the engine's own function."""
    cos, sin = embedding(k[None], positions[None], *layer_type)
    turned: torch.Tensor = apply_rotary_pos_emb(k.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)[1]
    return turned[0].transpose(0, 1)


def engine_table(embedding: Any, *layer_type: str) -> RotaryTable:
    def lookup(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = embedding(torch.zeros(1), positions[None], *layer_type)
        return cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]

    return RotaryTable(lookup, "half", DIM // 2)


def moved(table: RotaryTable, k: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return table.rotate(k, *table.between(source, target))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("parameters", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_case_b05_scaled_frequencies(parameters: dict[str, Any], target: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=1024, rope_parameters=parameters
    )
    embedding = LlamaRotaryEmbedding(config)
    table = engine_table(embedding)
    assert (table.scaling != 1.0) == (parameters is YARN)
    k = torch.randn(11, 2, DIM, generator=torch.Generator().manual_seed(1))
    here, there = (engine_rotation(embedding, k, run(at)) for at in (SOURCE, target))
    torch.testing.assert_close(moved(table, here, run(SOURCE), run(target)), there, rtol=0, atol=1e-5)
    assert target == SOURCE or not torch.allclose(here, there, atol=1e-2)


@pytest.mark.parametrize("target", TARGETS)
def test_case_b05_two_bases(target: int) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        hidden_size=64, num_attention_heads=1, head_dim=DIM, num_hidden_layers=2, layer_types=kinds
    )
    embedding = Gemma3RotaryEmbedding(config)
    k = torch.randn(11, 1, DIM, generator=torch.Generator().manual_seed(1))
    tables = {kind: engine_table(embedding, kind) for kind in kinds}
    for kind, table in tables.items():
        here, there = (engine_rotation(embedding, k, run(at), kind) for at in (SOURCE, target))
        torch.testing.assert_close(moved(table, here, run(SOURCE), run(target)), there, rtol=0, atol=1e-5)
    one, other = (moved(table, k, run(SOURCE), run(target)) for table in tables.values())
    assert not torch.allclose(one, other, atol=1e-2), "the two bases must not be taken for each other"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "turn",
    [
        rope(16),
        rope(32, pairing="interleaved"),
        rope(16, pairing="interleaved", scaling=1.3),
        rope(32, 1e6, scaling=0.8),
    ],
    ids=["partial 0.5", "interleaved", "partial interleaved scaled", "scaled"],
)
def test_case_b05_partial_and_interleaved(turn: Rope, target: int) -> None:
    k = torch.randn(11, 3, DIM, generator=torch.Generator().manual_seed(1))
    here, there = (turn.apply(k, run(at)) for at in (SOURCE, target))
    found = moved(turn.table(), here, run(SOURCE), run(target))
    torch.testing.assert_close(found, there, rtol=0, atol=2e-5)
    assert torch.equal(found[..., 2 * turn.frequencies.shape[0] :], k[..., 2 * turn.frequencies.shape[0] :])


def test_low_precision_is_rounded_once() -> None:
    """bfloat16 keys: the result is the float32 rotation, rounded; ``out`` gets it too."""
    turn = rope(32)
    table = turn.table()
    k = torch.randn(11, 2, DIM, generator=torch.Generator().manual_seed(2)).bfloat16()
    angles = table.between(run(3), run(70))
    exact = table.rotate(k.float(), *angles)
    found = table.rotate(k, *angles)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.bfloat16(), rtol=0, atol=0)
    room = torch.zeros_like(k)
    assert table.rotate(k, *angles, out=room) is room
    assert torch.equal(room, found)


def test_wrong_tables_are_refused() -> None:
    ones = torch.ones(1, 8)
    with pytest.raises(RotaryError, match="expected 4 pairs"):
        RotaryTable(lambda p: (ones, ones * 0), "half", 4)
    with pytest.raises(RotaryError, match=r"sin\(0\) = 0"):
        RotaryTable(lambda p: (ones, ones), "half", 8)
    with pytest.raises(RotaryError, match="position 0 is not the origin"):
        RotaryTable(lambda p: (torch.linspace(1, 2, 8)[None], ones * 0), "half", 8)
