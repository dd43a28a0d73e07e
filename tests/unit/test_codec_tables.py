"""Training of tables and the coders behind them, on made KV whose layers resemble each other as a model's do."""

from typing import Any

import numpy as np
import pytest
import torch

from blendstore._core import Coder
from blendstore.codec.tables import ZERO, Rotary, Shape, frequencies
from blendstore.codec.train import LEVELS, Training, train

LAYERS, HEADS, DIM = 6, 2, 32
ANGLES = (1e4 ** (-np.arange(DIM // 2) / (DIM // 2))).astype(np.float32)
SHAPE = Shape(LAYERS, HEADS, DIM, "bfloat16", Rotary("halves", (ANGLES,), (0,) * LAYERS))


def made(tokens: int, seed: int = 0) -> Any:
    """Samples [layers, tokens, width]: a state that drifts from layer to layer, seen through each layer's weights."""
    weights, noise = np.random.default_rng(7), np.random.default_rng(seed)
    state = noise.standard_normal((tokens, 40))
    out = []
    for _ in range(LAYERS):
        state = state + 0.3 * noise.standard_normal(state.shape)
        out.append(state @ weights.standard_normal((40, SHAPE.width)) / 6 + weights.standard_normal(SHAPE.width))
    return np.array(out, np.float32)


def payload(samples: Any, position: int) -> tuple[torch.Tensor, bytes]:
    """What an engine would have written at a position, as [layers, 2, tokens, heads, dim] and as bytes."""
    half = SHAPE.width // 2
    angle = np.arange(position, position + samples.shape[1])[:, None] * ANGLES.astype(np.float64)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    keys = samples[..., :half].reshape(LAYERS, -1, HEADS, DIM).astype(np.float64)
    a, b = keys[..., : DIM // 2], keys[..., DIM // 2 :]
    keys = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    kv = torch.tensor(np.stack([keys, samples[..., half:].reshape(keys.shape)], 1)).bfloat16()
    return kv, kv.contiguous().view(torch.uint8).numpy().tobytes()


SAMPLES = made(1200)


@pytest.mark.parametrize("block", [0, DIM])
@pytest.mark.parametrize(("position", "tokens"), [(0, 256), (777, 256), (5, 9), (5, 37)])
def test_records_come_back_within_the_bound_that_they_state(block: int, position: int, tokens: int) -> None:
    coder = Coder.cachegen(train(SHAPE, SAMPLES, Training(level=3, chain=3, block=block)))
    kv, raw = payload(made(tokens, 9), position)
    coded = coder.encode(raw, tokens, source_position=position)
    back = torch.frombuffer(bytearray(coder.decode(coded, len(raw), tokens, source_position=position)), dtype=kv.dtype)
    error = (back.view(kv.shape).float() - kv.float()).abs()
    keys, values = Coder.error_bound(coded)
    assert error[:, 0].max() <= keys and error[:, 1].max() <= values
    assert error.pow(2).mean().sqrt() < 0.1 * kv.float().std()
    if position == 0:
        assert torch.equal(back.view(kv.shape)[:, :, 0], kv[:, :, 0]), "the first row is kept as it is"


def test_levels_trade_size_for_error_and_prediction_pays() -> None:
    _, raw = payload(made(256, 9), 40)
    sizes = []
    for level in LEVELS:
        coder = Coder.cachegen(train(SHAPE, SAMPLES, Training(level=level, chain=3)))
        sizes.append(len(coder.encode(raw, 256, source_position=40)))
    assert sizes == sorted(sizes, reverse=True)
    alone = Coder.cachegen(train(SHAPE, SAMPLES, Training(level=3, chain=1)))
    assert len(alone.encode(raw, 256, source_position=40)) > 1.2 * sizes[2]
    assert sizes[2] < len(raw) / 8


def test_size_is_the_entropy_of_the_symbols() -> None:
    """Or less: a component may be coded as another class than it had in training."""
    coder = Coder.cachegen(train(SHAPE, SAMPLES, Training(level=2, chain=6)))
    _, raw = payload(made(2000, 9), 40)
    counts = np.array(coder.symbol_counts(raw, source_position=40), np.float64)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    bits = -(counts * np.log2(np.where(counts > 0, share, 1))).sum()
    assert 0.9 * bits < 8 * len(coder.encode(raw, 2000, source_position=40)) <= 1.02 * bits


def test_importance_spends_bits_where_they_matter() -> None:
    kv, raw = payload(made(256, 9), 40)

    def errors(importance: Any) -> Any:
        coder = Coder.cachegen(train(SHAPE, SAMPLES, Training(level=3), importance))
        back = coder.decode(coder.encode(raw, 256, source_position=40), len(raw), 256, source_position=40)
        return (torch.frombuffer(bytearray(back), dtype=kv.dtype).view(kv.shape) - kv).float().pow(2).mean((2, 3, 4))

    plain, weighted = np.ones((LAYERS, 2)), np.ones((LAYERS, 2))
    weighted[4, 1] = 100.0
    assert errors(weighted)[4, 1] < 0.3 * errors(plain)[4, 1]


def test_samples_are_checked() -> None:
    with pytest.raises(ValueError, match="they should be"):
        train(SHAPE, SAMPLES[:2])
    with pytest.raises(ValueError, match="at least 256"):
        train(SHAPE, SAMPLES[:, :100])
    broken = SAMPLES.copy()
    broken[1, 2, 3] = np.nan
    with pytest.raises(ValueError, match="finite"):
        train(SHAPE, broken)
    with pytest.raises(ValueError, match="level 9"):
        train(SHAPE, SAMPLES, Training(level=9))


def test_frequencies_add_up_and_leave_none_out() -> None:
    counts = np.zeros(256)
    assert frequencies(counts)[ZERO] == 4096
    counts[[0, 128, 129]] = 1e-3, 1e9, 5.0
    found = frequencies(counts)
    assert found.sum() == 4096 and (found[[0, 129]] == 1).all() and np.count_nonzero(found) == 3


def test_lossless_gives_every_bit_back() -> None:
    _, raw = payload(made(300, 9), 40)
    coder = Coder.lossless("bfloat16", 2 * LAYERS)
    coded = coder.encode(raw, 300)
    assert coder.decode(coded, len(raw), 300) == raw
    assert len(raw) / len(coded) > 1.35


def test_case_c03_hostile_bytes_are_an_error() -> None:
    tables = train(SHAPE, SAMPLES, Training(level=3, chain=3))
    coder = Coder.cachegen(tables)
    _, raw = payload(made(64, 9), 40)
    coded = coder.encode(raw, 64, source_position=40)
    other = Coder.cachegen(train(SHAPE, SAMPLES, Training(level=2, chain=3)))
    assert other.table_id != coder.table_id
    with pytest.raises(ValueError, match="other tables"):
        other.decode(coded, len(raw), 64, source_position=40)
    pickled = b"\x80\x04\x95" + bytes(60)
    for bad in (b"", coded[:100], coded + b"\0", pickled, b"\x01\x01" + b"\xff" * 200):
        with pytest.raises(ValueError, match=r"payload|chain|stream|tables|rows"):
            coder.decode(bad, len(raw), 64, source_position=40)
    for bad in (b"", tables[:-1], tables + b"\0", pickled, tables[:16] + b"\xff" * 8 + tables[24:]):
        with pytest.raises(ValueError, match="codec table"):
            Coder.cachegen(bad)
