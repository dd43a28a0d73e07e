"""Attention of rows that carry their own positions: each row sees exactly the keys at positions up to its own.

This is the reference in plain torch, and what a CPU uses. The keys of prompt position p are row p of ``k`` and ``v``, so a
mask from positions replaces the bottom-right alignment that contiguous attention kernels assume.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 96


@dataclass(slots=True)
class RowAttention:
    """Attention of rows at ``positions`` [n] (int64, ascending) over keys 0..``nkeys``-1.

    ``hidden_keys`` [h] are positions that no row may see (tokens whose KV isn't there yet). Rows are taken in blocks and a
    block only reads keys up to its last position, so the work follows the causal triangle. Masks are made once and serve
    every layer with the same window.
    """

    positions: Tensor
    nkeys: int
    hidden_keys: Tensor | None = None
    _causal: bool = field(init=False)
    _blocks: list[tuple[int, int, int, int]] = field(init=False)
    _masks: dict[tuple[int, int | None], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        n = self.positions.shape[0]
        spots = self.positions.tolist()
        if any(b <= a for a, b in zip(spots, spots[1:], strict=False)) or (n and not 0 <= spots[0] <= spots[-1] < self.nkeys):
            raise ValueError(f"rows must be ascending positions within 0..{self.nkeys - 1}")
        self._causal = self.hidden_keys is None and n == self.nkeys
        step = _BLOCK if self.positions.device.type == "cpu" else max(n, 1)
        self._blocks = [
            (a, min(a + step, n), spots[a], spots[min(a + step, n) - 1] + 1) for a in range(0, n, step)
        ]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """``q`` [n, heads, dim] against ``k``, ``v`` [nkeys, kv_heads, dim]; returns [n, heads, dim]."""
        if self._causal and softcap is None and (window is None or window >= self.nkeys):
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
            return out[0].transpose(0, 1)
        out = torch.empty_like(q)
        for number, (a, b, first, stop) in enumerate(self._blocks):
            low = 0 if window is None else max(0, first + 1 - window)
            mask = self._mask(number, window)
            out[a:b] = _grouped(q[a:b], k[low:stop], v[low:stop], mask, scale, softcap)
        return out

    def weights(self, q: Tensor, k: Tensor, rows: int, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """Softmax attention of the last ``rows`` rows: [heads, rows, nkeys] float32."""
        kv = k.shape[1]
        tail = self.positions[-rows:]
        grouped = q[-rows:].transpose(0, 1).reshape(kv, -1, q.shape[-1])
        logits = (grouped @ k.permute(1, 2, 0)).float().mul_(scale).view(q.shape[1], -1, self.nkeys)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits.masked_fill_(~self._visible(tail, 0, self.nkeys, window), -torch.inf).softmax(-1)

    def _mask(self, number: int, window: int | None) -> Tensor:
        key = (number, window)
        if key not in self._masks:
            a, b, first, stop = self._blocks[number]
            low = 0 if window is None else max(0, first + 1 - window)
            self._masks[key] = self._visible(self.positions[a:b], low, stop, window)
        return self._masks[key]

    def _visible(self, rows: Tensor, low: int, stop: int, window: int | None) -> Tensor:
        keys = torch.arange(low, stop, device=rows.device)
        distance = rows[:, None] - keys[None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        if self.hidden_keys is not None:
            hidden = self.hidden_keys[(self.hidden_keys >= low) & (self.hidden_keys < stop)]
            visible[:, hidden - low] = False
        return visible


def _grouped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Tensor:
    """One block; the query heads of a KV head become rows, so keys are never repeated."""
    n, heads, dim = q.shape
    kv = k.shape[1]
    group = heads // kv
    rows = q.view(n, kv, group, dim).permute(1, 2, 0, 3).reshape(kv, group * n, dim)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    mask = visible.repeat(group, 1)
    if softcap is None:
        out = F.scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    else:
        logits = softcap * torch.tanh((rows @ keys.transpose(1, 2)).float() * (scale / softcap))
        out = logits.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ values
    return out.view(kv, group, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)
