"""Moves rotated keys to another position.

A key rotated at position p becomes the key at p' by the rotation through p' - p (Su et al., RoFormer, arXiv
2104.09864). Cosines and sines come from the engine's own table, looked up at both positions and composed (cos(a-b) =
cos a cos b + sin a sin b), so its frequency scaling and its rounding are undone exactly as they were applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Pairing = Literal["half", "interleaved"]


class RotaryError(ValueError):
    """The engine's rotary embedding can't be moved; the message says why."""


@dataclass(slots=True)
class RotaryTable:
    """Cosines and sines of one rotary geometry.

    ``lookup(positions [n] int64)`` gives the engine's own (cos, sin), each [n, pairs] float32, one value a pair, with
    any attention scaling still in. ``pairing`` says which dims form a pair: ``half`` is (j, j + dim/2), as NeoX and
    Llama; ``interleaved`` is (2j, 2j + 1), as GPT-J. Dims from ``2 * pairs`` on are not rotated.
    """

    lookup: Callable[[Tensor], tuple[Tensor, Tensor]]
    pairing: Pairing
    pairs: int
    scaling: float = field(init=False)
    _kept: dict[torch.device, tuple[Tensor, Tensor]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        cos, sin = self.lookup(torch.zeros(1, dtype=torch.int64))
        if cos.shape[-1] != self.pairs or not bool((sin.abs() < 1e-6).all()):
            raise RotaryError(
                f"rotary table: expected {self.pairs} pairs with sin(0) = 0, got shape {tuple(cos.shape)}"
            )
        scale = float(cos[0, 0])
        if not bool(torch.allclose(cos, torch.full_like(cos, scale), rtol=1e-5)) or scale <= 0:
            raise RotaryError("rotary table: cos(0) differs between frequencies, so position 0 is not the origin")
        self.scaling = scale

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [n, 1, pairs] float32 of the pure rotation at ``positions``, without the attention scaling."""
        cos, sin = self.lookup(positions)
        return (cos / self.scaling)[:, None], (sin / self.scaling)[:, None]

    def kept(self, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin) [at least ``stop``, pairs] float32 of `angles` at positions 0, 1, … on ``device``; worked out
        once, and again only for a longer prompt."""
        found = self._kept.get(device)
        if found is None or found[0].shape[0] < stop:
            positions = torch.arange(1 << max(stop - 1, 4095).bit_length())
            cos, sin = (t[:, 0].to(device, torch.float32).contiguous() for t in self.angles(positions))
            found = self._kept[device] = (cos, sin)
        return found

    def between(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [n, 1, pairs] float32 of the rotation from ``source`` to ``target`` positions [n]."""
        cos_s, sin_s = self.angles(source)
        cos_t, sin_t = self.angles(target)
        return cos_t * cos_s + sin_t * sin_s, sin_t * cos_s - cos_t * sin_s

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
        """Rotate ``x`` [n, heads, dim] by (cos, sin) [n, 1, pairs]; computed in float32, rounded once to ``x.dtype``.

        ``out`` may not alias ``x``."""
        if out is None:
            out = torch.empty_like(x)
        work = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        a, b = (half.float() for half in self._halves(x))
        first, second = self._halves(work)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
        if 2 * self.pairs < x.shape[-1]:
            work[..., 2 * self.pairs :].copy_(x[..., 2 * self.pairs :])
        return out if work is out else out.copy_(work)

    def add(self, out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Add to float32 ``out`` [n, heads, dim], in place, what `rotate` makes of float32 ``x``."""
        a, b = self._halves(x)
        first, second = self._halves(out)
        first.addcmul_(a, cos).addcmul_(b, sin, value=-1)
        second.addcmul_(b, cos).addcmul_(a, sin)
        if 2 * self.pairs < x.shape[-1]:
            out[..., 2 * self.pairs :] += x[..., 2 * self.pairs :]

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rotated = x[..., : 2 * self.pairs]
        if self.pairing == "half":
            return rotated[..., : self.pairs], rotated[..., self.pairs :]
        return rotated[..., 0::2], rotated[..., 1::2]
