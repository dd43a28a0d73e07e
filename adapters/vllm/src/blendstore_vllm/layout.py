"""Reading and writing tokens of the engine's paged KV cache, whatever order its bytes have.

Reading is proven: either K and V are the two halves of a token's row (strides honoured), or the order within a block is
found by writing every element's number with the engine's writer and looking where it went (CPU kernels pack by
instruction set). A round trip of random values over several blocks decides; nothing is assumed. Writing is the engine's
own, or where tokens follow each other at one distance a kernel for all layers at once, once the same values have come
back from what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blendstore.blend.slots import SlotRows
from blendstore.startup import Refused

_DIGIT = 64  # exact in every dtype that a cache may have
_PLAIN = (torch.float32, torch.float16, torch.bfloat16)
Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class PagedKV:
    """The caches of ``attentions`` (vLLM's `Attention` modules in the order of the layers). Raises `Refused`."""

    def __init__(self, attentions: Sequence[Any]) -> None:
        self._attentions = list(attentions)
        self._caches: list[Tensor] = [attention.kv_cache for attention in attentions]
        first = self._caches[0]
        heads, dim = attentions[0].num_kv_heads, attentions[0].head_size
        for index, cache in enumerate(self._caches):
            if not isinstance(cache, Tensor) or cache.dim() != 4:
                raise Refused(f"layer {index}: its KV cache is no tensor [blocks, KV heads, block, 2 head size]")
            if cache.shape != first.shape or cache.dtype != first.dtype or cache.shape[1::2] != (heads, 2 * dim):
                raise Refused(f"layer {index}: its KV cache has shape {tuple(cache.shape)} and {cache.dtype}")
        if first.dtype not in _PLAIN:
            raise Refused(f"its KV cache holds {first.dtype}, and quantised caches are not supported")
        self.blocks, self.heads, self.block, self.dim = first.shape[0], heads, first.shape[2], dim
        self.dtype, self.device = first.dtype, first.device
        self._rows: SlotRows | None = None
        self._read = self._proven()

    def write(self, index: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put ``k`` and ``v`` [n, KV heads, dim] of layer ``index`` to ``slots`` [n] int64."""
        attention, cache = self._attentions[index], self._caches[index]
        attention.impl.do_kv_cache_update(attention, k.contiguous(), v.contiguous(), cache, slots)

    def read(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [n, KV heads, dim] of layer ``index`` at ``slots`` [n] int64: copies."""
        return self._read(self._caches[index], slots)

    def fill(self, slots: Tensor, kv: Tensor, start: int) -> None:
        """Put every layer of ``kv`` [layers, 2, tokens, KV heads, dim] (contiguous), the tokens from ``start`` on, to
        ``slots`` [n] int64."""
        if self._rows is not None:
            self._rows.scatter(slots, kv, start)
            return
        for index, part in enumerate(kv[:, :, start : start + len(slots)]):
            self.write(index, slots, part[0], part[1])

    def copy_out(self, slots: Tensor, out: Tensor) -> None:
        """Every layer's K and V at ``slots`` [n] int64 into ``out`` [layers, 2, n, KV heads, dim] (contiguous)."""
        if self._rows is not None:
            self._rows.gather(slots, [len(slots)], out.view(-1))
            return
        for index, target in enumerate(out):
            k, v = self.read(index, slots)
            target[0].copy_(k)
            target[1].copy_(v)

    def scratch(self, tokens: int) -> Tensor:
        """The last ``tokens`` slots of the cache, from the start of a block on: for an engine without requests."""
        blocks = -(-tokens // self.block)
        start = (self.blocks - blocks) * self.block
        return torch.arange(start, start + tokens, device=self.device)

    def _proven(self) -> Read:
        slots = self.scratch(2 * self.block)
        kept = self.blocks - 2
        if kept < 1:
            raise Refused(f"its KV cache has only {self.blocks} blocks")
        before = [cache[kept:].clone() for cache in self._caches]
        try:
            if self._round_trips(_halves, slots):
                self._rows = self._at_one_distance(slots)
                return _halves
            packed = _packed(self._order(slots[: self.block]), self.block, self.dim)
            if self._round_trips(packed, slots):
                return packed
        finally:
            for cache, content in zip(self._caches, before, strict=True):
                cache[kept:] = content
        raise Refused(
            f"what its {type(self._attentions[0].impl).__name__} writes to a KV cache "
            f"{tuple(self._caches[0].shape)} can't be read back: the order of its bytes is unknown"
        )

    def _round_trips(self, read: Read, slots: Tensor) -> bool:
        """Whether ``read`` gives back, bit for bit, what the engine writes to ``slots``, in every layer."""
        generator = torch.Generator().manual_seed(7)
        slots = slots[torch.randperm(len(slots), generator=generator).to(slots.device)]
        shape = (2, len(slots), self.heads, self.dim)
        for index, cache in enumerate(self._caches):
            k, v = torch.randn(shape, generator=generator).to(self.device, self.dtype)
            self.write(index, slots, k, v)
            found = read(cache, slots)
            if not (torch.equal(found[0], k) and torch.equal(found[1], v)):
                return False
        return True

    def _at_one_distance(self, slots: Tensor) -> SlotRows | None:
        """The caches as rows of slots, if every slot is as far from the one before, and reading finds what was written
        through them."""
        pairs = []
        for cache in self._caches:
            if cache.stride(0) != self.block * cache.stride(2):
                return None
            rows = cache.transpose(1, 2).flatten(0, 1)
            pairs.append((rows[..., : self.dim], rows[..., self.dim :]))
        found = SlotRows(pairs)
        generator = torch.Generator().manual_seed(8)
        shape = (len(pairs), 2, len(slots), self.heads, self.dim)
        kv = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        out = torch.empty_like(kv)
        found.scatter(slots, kv, 0)
        found.gather(slots, [len(slots)], out.view(-1))
        read = torch.stack([torch.stack(_halves(cache, slots)) for cache in self._caches])
        return found if torch.equal(read, kv) and torch.equal(out, kv) else None

    def _order(self, slots: Tensor) -> Tensor:
        """[2, block, dim] int64: where in a head's part of a block each element of K and of V lies."""
        count = 2 * self.block * self.dim
        numbers = torch.arange(count, device=self.device)
        found = torch.zeros(self.heads, count, dtype=torch.int64, device=self.device)
        weight = 1
        while weight < count:
            digits = (numbers // weight % _DIGIT).view(2, self.block, 1, self.dim).expand(-1, -1, self.heads, -1)
            k, v = digits.to(self.dtype)
            self.write(0, slots, k, v)
            raw = self._caches[0][int(slots[0]) // self.block].reshape(self.heads, count)
            found += raw.round().long() * weight
            weight *= _DIGIT
        order = found[0].argsort()
        if not (torch.equal(found[0][order], numbers) and bool((found == found[0]).all())):
            raise Refused("the elements of a block of its KV cache are no permutation of K and V")
        return order.view(2, self.block, self.dim)


def _halves(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    block = cache.shape[2]
    rows = cache[slots // block, :, slots % block]
    k, v = rows.chunk(2, -1)
    return k, v


def _packed(order: Tensor, block: int, dim: int) -> Read:
    flat = order.reshape(-1)

    def read(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        blocks, which = torch.unique(slots // block, return_inverse=True)
        raw = cache[blocks].flatten(2)[:, :, flat].view(len(blocks), cache.shape[1], 2, block, dim)
        rows = raw[which, :, :, slots % block]
        return rows[:, :, 0], rows[:, :, 1]

    return read
