"""The table file of ``cachegen``, written from numpy arrays; `rust/codec/src/tables.rs` has its format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Element = Literal["bfloat16", "float16", "float32"]

_ELEMENTS: dict[str, int] = {"bfloat16": 1, "float16": 2, "float32": 3}
_STYLES: dict[str, int] = {"none": 0, "halves": 1, "interleaved": 2}
_TOTAL = 4096
ZERO = 128
"""Symbol of the value 0; value v is symbol ``ZERO + v``, and symbol 0 announces a value that follows apart."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """How keys were rotated: pairs ``halves`` (i, i + n/2) or ``interleaved`` (2i, 2i + 1).

    ``frequencies`` are sets of n/2 angles per position; ``set_of_layer`` is -1 for a layer without rotation.
    """

    style: Literal["none", "halves", "interleaved"] = "none"
    frequencies: tuple[Floats, ...] = ()
    set_of_layer: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Elements of a head that are rotated."""
        return 2 * len(self.frequencies[0]) if self.frequencies else 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What records look like: ``[layers][K|V][token][kv_heads][head_dim]`` of ``element``."""

    layers: int
    kv_heads: int
    head_dim: int
    element: Element
    rotary: Rotary = field(default_factory=Rotary)

    @property
    def width(self) -> int:
        """Channels of one layer, keys and values."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerTables:
    """One layer: ``mean`` and ``scale`` [width], ``component_class`` [width] uint8, ``basis`` [blocks, block channels,
    block components], ``prediction`` [width before, width] or None."""

    mean: Floats
    scale: Floats
    component_class: NDArray[np.uint8]
    basis: Floats
    prediction: Floats | None


@dataclass(frozen=True, slots=True)
class ClassTables:
    """One class: ``counts`` [256] of its symbols, and by how many steps the means of 1, 2 and 3.. lie nearer to 0."""

    counts: NDArray[np.float64]
    shifts: tuple[float, float, float]


def write(
    shape: Shape,
    layers: Sequence[LayerTables],
    classes: Sequence[ClassTables],
    *,
    chain: int,
    step: float,
    dead_zone: float,
    raw_positions: int,
) -> bytes:
    """The bytes of a table file."""
    rotary = shape.rotary
    block = layers[0].basis.shape[1]
    out = [
        struct.pack("<8sHBB4x", b"blendtbl", 1, _ELEMENTS[shape.element], _STYLES[rotary.style]),
        struct.pack("<5I", shape.layers, shape.kv_heads, shape.head_dim, rotary.elements, len(rotary.frequencies)),
        struct.pack("<2I4x2I2f", block, chain, raw_positions, len(classes), step, dead_zone),
        np.array(rotary.set_of_layer or [-1] * shape.layers, "<i4").tobytes(),
        *(np.asarray(f, "<f4").tobytes() for f in rotary.frequencies),
    ]
    for c in classes:
        out += [frequencies(c.counts).astype("<u2").tobytes(), struct.pack("<3f", *c.shifts)]
    for layer in layers:
        out += [layer.mean.astype("<f4").tobytes(), layer.scale.astype("<f4").tobytes()]
        out += [layer.component_class.astype("u1").tobytes(), layer.basis.astype("<f2").tobytes()]
        if layer.prediction is not None:
            out.append(layer.prediction.astype("<f2").tobytes())
    return b"".join(out)


def shape_of(tables: bytes) -> tuple[str, int, int, int]:
    """Element, layers, KV heads and head size of the records that a table file is for, which `Coder` has accepted."""
    _, _, element, _ = struct.unpack_from("<8sHBB4x", tables)
    layers, kv_heads, head_dim, _, _ = struct.unpack_from("<5I", tables, 16)
    return next(name for name, code in _ELEMENTS.items() if code == element), layers, kv_heads, head_dim


def frequencies(counts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Frequencies [256] in 4096ths, at least 1 where ``counts`` is above 0; all of it for 0 where nothing is."""
    result = np.zeros(256, np.int64)
    used = counts > 0
    if not used.any():
        result[ZERO] = _TOTAL
        return result
    share = counts / counts.sum() * _TOTAL
    result[used] = np.maximum(1, np.floor(share[used]))
    while (left := _TOTAL - int(result.sum())) != 0:
        # Bits saved by one more, or lost by one less, of each symbol's frequency.
        step = 1 if left > 0 else -1
        able = used & (result + step > 0)
        gain = np.full(256, -np.inf)
        gain[able] = counts[able] * np.log((result[able] + step) / result[able])
        result[int(gain.argmax())] += step
    return result
