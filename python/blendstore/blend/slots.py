"""The rows of an engine's KV pool that belong to some slots: gathered into records, scattered from a blend's KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from .copies import sent
from .fused import attempt, usable


class SlotRows:
    """K and V of every layer of a pool, each [slots, kv_heads, dim], which stay where they are. They may be views, as
    long as a head's elements lie side by side; the kernel takes them if all have the same strides."""

    def __init__(self, buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._parts = [part for pair in buffers for part in pair]
        first = self._parts[0]
        self.layers, self.device, self.dtype = len(buffers), first.device, first.dtype
        self._row = first.shape[1:]
        self._width = first[0].numel()
        alike = all(
            t.dtype == first.dtype and t.stride() == first.stride() and t.stride(2) == 1 and t.data_ptr() % 16 == 0
            for t in self._parts
        )
        self._addresses: Tensor | None = None
        if alike and usable(first.device):
            addresses = torch.tensor([t.data_ptr() for t in self._parts], dtype=torch.int64)
            self._addresses = addresses.to(first.device)

    def numel(self, tokens: int) -> int:
        """Elements of the K and V of ``tokens`` tokens."""
        return len(self._parts) * tokens * self._width

    def gather(self, slots: Tensor, lengths: Sequence[int], out: Tensor) -> None:
        """Records of ``lengths`` tokens, one behind the other in ``out`` (flat, contiguous), each [layers, 2, tokens,
        kv_heads, dim]; ``slots`` [sum of lengths] int64 are their tokens'."""
        counts = np.array(lengths, dtype=np.int64)
        starts, pitches = counts.cumsum() - counts, np.repeat(counts, counts)
        places = np.arange(counts.sum()) + np.repeat(starts * (len(self._parts) - 1), counts)
        table = sent(torch.from_numpy(np.stack([places, pitches])), self.device)

        def plain() -> None:
            at = 0
            for slot, tokens in zip(torch.split(slots, list(lengths)), lengths, strict=True):
                record = out[at : at + self.numel(tokens)].view(len(self._parts), tokens, *self._row)
                for part, target in zip(self._parts, record, strict=True):
                    torch.index_select(part, 0, slot, out=target)
                at += self.numel(tokens)

        self._move(slots, table[0], table[1], out, plain, gathers=True)

    def scatter(self, slots: Tensor, kv: Tensor, start: int) -> None:
        """Put ``kv`` [layers, 2, tokens, kv_heads, dim] (contiguous) of the tokens from ``start`` on into ``slots`` [n]
        int64."""
        n, tokens = slots.shape[0], kv.shape[2]

        def plain() -> None:
            for part, source in zip(self._parts, kv.flatten(0, 1), strict=True):
                part.index_copy_(0, slots, source[start : start + n])

        places = torch.arange(start, start + n, device=self.device)
        self._move(slots, places, torch.full_like(places, tokens), kv, plain, gathers=False)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """The rows of slots ``source`` [n] int64 to slots ``target`` [n]."""
        n = source.shape[0]
        held = torch.empty(self.numel(n), dtype=self.dtype, device=self.device)
        self.gather(source, [n], held)
        self.scatter(target, held.view(self.layers, 2, n, *self._row), 0)

    def warm_up(self) -> None:
        """Compile what is needed: slot 0 is put back where it is."""
        slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.copy(slot, slot)

    def _move(
        self, slots: Tensor, places: Tensor, pitches: Tensor, dense: Tensor, plain: Callable[[], None], *, gathers: bool
    ) -> None:
        addresses = self._addresses
        if not slots.shape[0]:
            return
        if addresses is None or not dense.is_contiguous():
            plain()
            return

        def kernel() -> None:
            from .triton_slots import move

            row = self._parts[0]
            move(
                addresses, slots, places, pitches, dense, width=self._width, stride=row.stride(0), head=row.shape[2],
                apart=row.stride(1), gathers=gathers,
            )  # fmt: skip

        attempt("slots", self.device, kernel, plain)
