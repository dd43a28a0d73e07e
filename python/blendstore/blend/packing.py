"""Values of a device on their way into packed records."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..codec.formats import Format, holds
from .fused import attempt

K = TypeVar("K")


class Packing(Generic[K]):
    """Packs records where their values are; which values a format doesn't hold is known when the device has come that
    far, so that the host waits for nothing. Records go by keys of the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keys: list[K] = []
        self._well: list[Tensor] = []
        self._told: Tensor | None = None

    def packed(self, key: K, packing: Format, kv: Tensor) -> Tensor:
        """``kv`` [layers, 2, tokens, kv_heads, dim] as uint8 [layers, 2, tokens, kv_heads, bytes], contiguous, on the
        caller's stream. The last two dimensions of ``kv`` are contiguous."""

        def kernel() -> tuple[Tensor, Tensor]:
            from .triton_formats import pack

            each = packing.head_bytes(kv.shape[-1], kv.element_size())
            out = torch.empty((*kv.shape[:-1], each), dtype=torch.uint8, device=kv.device)
            well = torch.ones(1, dtype=torch.int32, device=kv.device)
            pack(packing.name, kv, out, well)
            return out, well[0].bool()

        out, well = attempt("packing", kv.device, kernel, lambda: (packing.pack(kv), holds(packing, kv)))
        self._keys.append(key)
        self._well.append(well)
        return out

    def tell(self) -> None:
        """Have the verdicts brought to the host, on the caller's stream, behind what was packed."""
        if self._well:
            self._told = torch.empty(len(self._well), dtype=torch.bool, pin_memory=self._device.type == "cuda")
            self._told.copy_(torch.stack(self._well), non_blocking=True)

    def refused(self) -> list[K]:
        """The keys of records that hold nothing useful; once the device has done what the stream of `tell` held."""
        if self._told is None:
            return []
        return [key for key, well in zip(self._keys, self._told.tolist(), strict=True) if not well]
