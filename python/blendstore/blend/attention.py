"""Attention of rows that carry their own positions: each row sees exactly the keys at positions up to its own.

The keys of prompt position p are row p of ``k`` and ``v``, so a mask from positions replaces the bottom-right alignment
that contiguous attention kernels assume. What is written out here in plain torch is the reference. On a GPU the kernels
of `triton_attention` do the same, and on a CPU in float32 `blendstore._core.attend` for few rows, but for soft caps and
scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core import attend as attend_in_rust
from .fused import attempt, readable, tried, usable

# Rows of a block: smaller ones follow the causal triangle more closely, larger ones are fewer calls.
_BLOCK = 64
# The same where positions aren't known on the host: every block reads all keys.
_WIDE = 512
# Masks up to this many elements are kept from layer to layer; larger ones are made again, one block at a time.
_KEPT = 1 << 24


@dataclass(slots=True)
class RowAttention:
    """Attention of rows at ``positions`` [n] (int64, ascending) over keys 0..``nkeys``-1.

    ``hidden_keys`` [h] are positions that no row may see (tokens whose KV isn't there yet); their K and V must be
    finite. Rows are taken in blocks and a block only reads keys up to its last position, so the work follows the
    causal triangle. Positions are checked where they lie on a CPU; on a GPU that would make the host wait for it.
    """

    positions: Tensor
    nkeys: int
    hidden_keys: Tensor | None = None
    _causal: bool = field(init=False)
    _unseen: Tensor | None = field(init=False, default=None)
    _blocks: list[tuple[slice, int, int]] = field(init=False)
    _masks: dict[tuple[int, int, int, int, int | None, torch.dtype], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        n = self.positions.shape[0]
        self._causal = self.hidden_keys is None and n == self.nkeys
        if self.hidden_keys is not None:
            self._unseen = torch.zeros(self.nkeys, dtype=torch.uint8, device=self.positions.device)
            self._unseen.index_fill_(0, self.hidden_keys, 1)
        if self.positions.device.type != "cpu":
            self._blocks = [(slice(a, min(a + _WIDE, n)), 0, self.nkeys) for a in range(0, n, _WIDE)]
            return
        spots = self.positions.tolist()
        ascending = all(a < b for a, b in pairwise(spots))
        if not ascending or (n and not 0 <= spots[0] <= spots[-1] < self.nkeys):
            raise ValueError(f"rows must be ascending positions within 0..{self.nkeys - 1}")
        size = n if self._like_the_engine and n * self.nkeys <= _KEPT else _BLOCK
        stops = [min(a + size, n) for a in range(0, n, max(1, size))]
        bounds = zip(range(0, n, max(1, size)), stops, strict=True)
        self._blocks = [(slice(a, b), spots[a], spots[b - 1] + 1) for a, b in bounds]

    @property
    def _like_the_engine(self) -> bool:
        """Where most tokens are rows, torch takes all in one block, as in the engine's own prefill: its rounding is
        ours then, on which a model with large keys depends."""
        return 2 * self.positions.shape[0] > self.nkeys

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """``q`` [n, heads, dim] against ``k``, ``v`` [nkeys, kv_heads, dim]; returns [n, heads, dim]."""
        if self._causal and softcap is None and (window is None or window >= self.nkeys):
            return _sdpa(q, k, v, None, scale)

        def kernel() -> Tensor:
            from .triton_attention import attend

            seen = self._unseen
            return attend(q, k, v, self.positions, scale=scale, window=window, softcap=softcap, hidden=seen)[0]

        def plain() -> Tensor:
            return self._plain(q, k, v, scale, window, softcap)

        if softcap is None and not self._like_the_engine and not usable(q.device) and _rust_takes(q, k, v):
            return tried("attention in Rust", q.device, lambda: self._native(q, k, v, scale, window), plain)
        return attempt("attention", q.device, kernel, plain)

    def scored(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, reduce: Literal["max", "mean"], into: Tensor,
        square: bool = False, window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """The same, and ``into`` [nkeys] float32 grows by the maximum or mean over the rows of the softmax weight of
        each key, or its ``square``, averaged over the heads: for few rows."""

        def kernel() -> Tensor:
            from .triton_attention import add_scores, attend

            spots, hidden = self.positions, self._unseen
            out, normaliser = attend(q, k, v, spots, scale=scale, window=window, softcap=softcap, hidden=hidden)
            add_scores(
                q, k, spots, normaliser, into, scale=scale, reduce=reduce, square=square, window=window,
                softcap=softcap, hidden=hidden,
            )  # fmt: skip
            return out

        def plain() -> Tensor:
            out, weights = self.weighted(q, k, v, scale=scale, window=window, softcap=softcap)
            of_head = weights.amax(1) if reduce == "max" else weights.mean(1)
            into.add_((of_head.square() if square else of_head).mean(0))
            return out

        return attempt("scores", q.device, kernel, plain)

    def weighted(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same, and the softmax weights [heads, n, nkeys] float32, which are held in memory whole: for few rows."""
        mask = self._mask(slice(0, q.shape[0]), 0, self.nkeys, window, torch.float32)
        return _weighted(q, k, v, mask, scale, softcap)

    def _native(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        out = torch.empty(q.shape)
        attend_in_rust(
            *(t.numpy() for t in (q.contiguous(), k, v, self.positions, out)), scale=scale, window=window,
            hidden=None if self._unseen is None else self._unseen.numpy(), threads=torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _plain(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        out = torch.empty_like(q)
        for rows, first, stop in self._blocks:
            low = 0 if window is None else max(0, first + 1 - window)
            mask = self._mask(rows, low, stop, window, q.dtype)
            if softcap is None:
                out[rows] = _sdpa(q[rows], k[low:stop], v[low:stop], mask, scale)
            else:
                out[rows] = _weighted(q[rows], k[low:stop], v[low:stop], mask, scale, softcap)[0]
        return out

    def _mask(self, rows: slice, low: int, stop: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """What to add to the logits of ``rows`` [r] and keys ``low``..``stop``-1: zero, or -inf where a key isn't
        seen."""
        key = (rows.start, rows.stop, low, stop, window, dtype)
        found = self._masks.get(key)
        if found is not None:
            return found
        keys = torch.arange(low, stop, device=self.positions.device)
        distance = self.positions[rows, None] - keys
        unseen = distance < 0
        if window is not None:
            unseen |= distance >= window
        if self._unseen is not None:
            unseen |= self._unseen[low:stop].bool()
        mask = torch.zeros(unseen.shape, dtype=dtype, device=keys.device).masked_fill_(unseen, -torch.inf)
        if self.positions.shape[0] * self.nkeys <= _KEPT:
            self._masks[key] = mask
        return mask


def _rust_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    own = q.dtype == torch.float32 and not q.requires_grad and q.shape[-1] % 2 == 0
    return own and readable(k) and readable(v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


def _weighted(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output [n, heads, dim] and weights [heads, n, keys]; query heads of a KV head become rows: keys aren't
    repeated."""
    n, heads, dim = q.shape
    kv = k.shape[1]
    rows = (q * scale).view(n, kv, -1, dim).permute(1, 2, 0, 3).reshape(kv, -1, dim)
    logits = (rows @ k.permute(1, 2, 0)).float().view(heads, n, -1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = torch.softmax(logits.add_(mask), -1, out=logits)
    out = weights.to(v.dtype).view(kv, -1, k.shape[0]) @ v.transpose(0, 1)
    return out.view(heads, n, dim).transpose(0, 1), weights
