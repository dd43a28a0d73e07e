"""KV is read from the engine's cache whatever order its bytes have, or not at all."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blendstore.startup import Refused
from blendstore_vllm.layout import PagedKV

BLOCKS, HEADS, BLOCK, DIM = 6, 2, 32, 32


class Halves:
    """K and V side by side in a token's row, as GPU kernels have them."""

    def do_kv_cache_update(self, layer: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache[slots // BLOCK, :, slots % BLOCK] = torch.cat([k, v], -1)


class Shuffled:
    """Every head's part of a block in an order of its own kind."""

    def __init__(self) -> None:
        self.order = torch.randperm(2 * BLOCK * DIM, generator=torch.Generator().manual_seed(3))

    def do_kv_cache_update(self, layer: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        flat = cache.view(BLOCKS, HEADS, -1)
        for part, rows in enumerate((k, v)):
            for row, slot in zip(rows, slots.tolist(), strict=True):
                first = (part * BLOCK + slot % BLOCK) * DIM
                flat[slot // BLOCK, :, self.order[first : first + DIM]] = row


class Lossy(Halves):
    """Loses precision, as a quantised cache does."""

    def do_kv_cache_update(self, layer: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        super().do_kv_cache_update(layer, k * 0.5, v, cache, slots)


class Native:
    """vLLM's own kernel for CPUs, by instruction set."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def do_kv_cache_update(self, layer: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        from vllm import _custom_ops as ops

        keys, values = cache.view(BLOCKS, HEADS, BLOCK * 2, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, self.isa)


def attentions(impl: Any, dtype: torch.dtype = torch.float32, layers: int = 2) -> list[Any]:
    return [
        SimpleNamespace(
            impl=impl,
            num_kv_heads=HEADS,
            head_size=DIM,
            kv_cache=torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=dtype),
        )
        for _ in range(layers)
    ]


def assert_reads_what_was_written(made: list[Any]) -> None:
    kv = PagedKV(made)
    assert all(not attention.kv_cache.any() for attention in made), "the proof leaves nothing behind"
    slots = torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(5))[:77]
    k, v = torch.randn(2, 77, HEADS, DIM).to(kv.dtype)
    kv.write(1, slots, k, v)
    found = kv.read(1, slots.flip(0))
    assert torch.equal(found[0], k.flip(0))
    assert torch.equal(found[1], v.flip(0))
    whole = torch.randn(len(made), 2, 80, HEADS, DIM).to(kv.dtype)
    kv.fill(slots, whole, 3)
    out = torch.empty(len(made), 2, 77, HEADS, DIM, dtype=kv.dtype)
    kv.copy_out(slots, out)
    assert torch.equal(out, whole[:, :, 3:])
    left = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    left[slots] = False
    assert not any(part.any() for part in kv.read(0, left.nonzero()[:, 0])), "no other slot is written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("impl", [Halves(), Shuffled()])
def test_the_order_is_found(impl: Any, dtype: torch.dtype) -> None:
    assert_reads_what_was_written(attentions(impl, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_the_order_of_vllms_kernels_is_found(isa: str, dtype: torch.dtype) -> None:
    assert_reads_what_was_written(attentions(Native(isa), dtype))


def test_a_strided_cache_is_read_where_it_lies() -> None:
    """Blocks whose tokens come before their heads."""
    made = attentions(Halves())
    for attention in made:
        attention.kv_cache = torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2)
    assert_reads_what_was_written(made)


def test_tokens_at_one_distance_are_moved_for_all_layers_at_once() -> None:
    """As they lie on a GPU; where tokens lie otherwise, layer by layer."""
    made = attentions(Halves())
    assert PagedKV(made)._rows is None
    for attention in made:
        attention.kv_cache = torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2)
    assert PagedKV(made)._rows is not None


def test_what_does_not_come_back_is_refused() -> None:
    with pytest.raises(Refused, match=r"no permutation|can't be read back"):
        PagedKV(attentions(Lossy()))


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (torch.zeros(BLOCKS, HEADS, BLOCK, DIM), "has shape"),
        (torch.zeros(BLOCKS, BLOCK, 2 * DIM), "is no tensor"),
        (torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.uint8), "quantised"),
    ],
)
def test_other_caches_are_refused_by_name(cache: Tensor, reason: str) -> None:
    made = attentions(Halves(), layers=1)
    made[0].kv_cache = cache
    with pytest.raises(Refused, match=reason):
        PagedKV(made)
