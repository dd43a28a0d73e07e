"""Training of ``cachegen``'s tables: what a namespace's records have in common, learnt from a few thousand tokens.

Layer by layer the keys (turned back to position 0) and values of the samples are predicted from what a decoder will
have of the layer before (ridge regression), what remains is turned into its principal components, and the components
are quantised with one step for all. One step for all components is what reverse water-filling asks for (Cover and
Thomas, Elements of Information Theory, 10.3): components narrower than the step cost nothing. How much an error matters
differs by layer, and between keys and values: channels are scaled by ``importance`` before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .tables import ZERO, ClassTables, Floats, LayerTables, Shape, write

LEVELS = {1: 0.12, 2: 0.2, 3: 0.35, 4: 0.6, 5: 1.0}
"""Step of each level, relative to how wide channels are on average (geometric mean). Level 1 is the finest."""

_CLASSES_PER_OCTAVE = 4
_NARROWEST = -5  # octaves of width / step of class 0
_CLASSES = 60
_LARGEST = 127
_WIDEST_BLOCK = 1024
_SELDOM = 1e-4  # a class with fewer values than this is coded as zeros


@dataclass(frozen=True, slots=True)
class Training:
    """Choices of a training.

    ``chain`` layers are predicted one from the other (1: none is); ``block`` channels are turned together (0: all of a
    layer, or one head where a layer has more than 1024); rows at the first ``raw_positions`` of a prompt stay as they
    are, as what attention sinks hold is unlike everything else.
    """

    level: int = 3
    chain: int = 8
    block: int = 0
    raw_positions: int = 1
    dead_zone: float = 0.15
    ridge: float = 1e-3


def train(
    shape: Shape, samples: Floats, training: Training | None = None, importance: NDArray[np.float64] | None = None
) -> bytes:
    """The table file for records of ``shape``.

    ``samples`` is float32 [layers, tokens, width]: keys not rotated, then values, without the rows at raw positions.
    ``importance`` [layers, 2] says what an error of a key or value element costs, in any unit; without it an error
    counts by its size in relation to how wide the channels of its layer are, half-way in logarithms.
    Raises ``ValueError`` for samples of another shape, too few or not finite.
    """
    training = training or Training()
    _check(shape, samples, training)
    width, half, tokens = shape.width, shape.width // 2, samples.shape[1]
    scale = _scale(samples, importance)
    deviation = np.maximum(samples.std(1), 1e-9) * scale
    step = LEVELS[training.level] * float(np.exp(np.log(deviation).mean()))
    block = training.block or (width if width <= _WIDEST_BLOCK else shape.head_dim)
    if width % block or (half % block and block != width):
        raise ValueError(f"block {block}: {width} channels can't be cut into such blocks")
    chain = min(training.chain, shape.layers) if block == width else 1
    counts, sums = np.zeros((_CLASSES, 256)), np.zeros((_CLASSES, 256))
    layers = []
    before = np.zeros((tokens, width), np.float32)
    for index in range(shape.layers):
        mean, prediction, residual = _predicted(samples[index], before if index % chain else None, training.ridge)
        scaled = residual * scale[index]
        basis, spread = _principal(scaled, block)
        classes = np.rint((np.log2(np.maximum(spread, 1e-9) / step) - _NARROWEST) * _CLASSES_PER_OCTAVE)
        classes = classes.clip(0, _CLASSES - 1).astype(np.uint8)
        components = _turned(scaled, basis) / step
        levels = np.clip(np.floor(np.abs(components) + 0.5 - training.dead_zone), 0, _LARGEST) * np.sign(components)
        symbols = levels.astype(np.int64) + ZERO
        cells = (classes.astype(np.int64) * 256 + symbols).ravel()
        counts += np.bincount(cells, minlength=_CLASSES * 256).reshape(_CLASSES, 256)
        sums += np.bincount(cells, np.abs(components).ravel(), _CLASSES * 256).reshape(_CLASSES, 256)
        layers.append(LayerTables(mean, scale[index], classes, basis, prediction))
        error = _turned_back(((levels - components) * step).astype(np.float32), basis) / scale[index]
        before = samples[index] + error
    tables = [_class(c, s) for c, s in zip(counts, sums, strict=True)]
    return write(
        shape,
        layers,
        tables,
        chain=chain,
        step=step,
        dead_zone=training.dead_zone,
        raw_positions=training.raw_positions,
    )


def _check(shape: Shape, samples: Floats, training: Training) -> None:
    if training.level not in LEVELS:
        raise ValueError(f"level {training.level}: give one of {', '.join(map(str, LEVELS))}")
    if samples.ndim != 3 or (samples.shape[0], samples.shape[2]) != (shape.layers, shape.width):
        raise ValueError(f"samples {list(samples.shape)}: they should be [{shape.layers}, tokens, {shape.width}]")
    if samples.shape[1] < 2 * shape.width:
        raise ValueError(f"{samples.shape[1]} tokens of samples: give at least {2 * shape.width}")
    if not np.isfinite(samples).all():
        raise ValueError("samples that are not finite numbers")


def _scale(samples: Floats, importance: NDArray[np.float64] | None) -> Floats:
    """[layers, width]: the square root of what an error costs, tempered, as samples of it are noisy and the cost of
    large errors grows more slowly."""
    half = samples.shape[2] // 2
    if importance is None:
        variance = np.stack([part.var(1).mean(1) for part in (samples[..., :half], samples[..., half:])], 1)
        cost = np.maximum(variance, 1e-18) ** -0.5
    else:
        if importance.shape != (samples.shape[0], 2) or not (importance > 0).all():
            raise ValueError(f"importance {list(importance.shape)}: give numbers above 0, [{samples.shape[0]}, 2]")
        cost = importance**0.75 * np.array([2.0, 1.0])
    root = np.sqrt(cost / np.exp(np.log(cost).mean()))
    return np.repeat(root, half, 1).astype(np.float32)


def _predicted(now: Floats, before: Floats | None, ridge: float) -> tuple[Floats, Floats | None, Floats]:
    """Mean, prediction and what remains of ``now`` [tokens, width]."""
    mean = now.mean(0)
    if before is None:
        return mean, None, now - mean
    centre = before.mean(0)
    given = before - centre
    square = given.T @ given / len(given)
    square[np.diag_indices_from(square)] += ridge * float(np.diag(square).mean()) + 1e-12
    prediction = np.linalg.solve(square, given.T @ (now - mean) / len(given)).astype(np.float32)
    prediction = prediction.astype(np.float16).astype(np.float32)  # as the file has it
    mean = (mean - centre @ prediction).astype(np.float32)
    return mean, prediction, now - mean - before @ prediction


def _principal(scaled: Floats, block: int) -> tuple[Floats, Floats]:
    """Basis [blocks, channels, components], widest first, and root mean square of each component [width]."""
    bases, spreads = [], []
    for first in range(0, scaled.shape[1], block):
        part = scaled[:, first : first + block]
        values, vectors = np.linalg.eigh((part.T @ part / len(part)).astype(np.float64))
        bases.append(vectors[:, ::-1].astype(np.float16).astype(np.float32))
        spreads.append(np.sqrt(np.maximum(values[::-1], 0)))
    return np.stack(bases), np.concatenate(spreads).astype(np.float32)


def _turned(rows: Floats, basis: Floats) -> Floats:
    blocks, block, _ = basis.shape
    turned: Floats = np.einsum("tbc,bcd->tbd", rows.reshape(-1, blocks, block), basis, optimize=True)
    return turned.reshape(len(rows), -1)


def _turned_back(rows: Floats, basis: Floats) -> Floats:
    return _turned(rows, basis.transpose(0, 2, 1))


def _class(counts: NDArray[np.float64], sums: NDArray[np.float64]) -> ClassTables:
    total, zeros = counts.sum(), counts[ZERO]
    if total - zeros <= _SELDOM * total:
        return ClassTables(np.zeros(256), (0.0, 0.0, 0.0))
    sizes = np.abs(np.arange(256) - ZERO)
    shifts = []
    for size in (1, 2, 3):
        those = sizes == size if size < 3 else (sizes >= 3) & (sizes < _LARGEST)
        count = counts[those].sum()
        shift = float((sizes[those] * counts[those] - sums[those]).sum() / count) if count >= 20 else 0.0
        shifts.append(min(0.4, max(-0.4, shift)))
    # Symbols a little beyond those that were seen are possible; farther ones escape.
    seen = int(sizes[counts > 0].max())
    possible = (sizes <= min(seen + 2, _LARGEST)).astype(np.float64)
    symmetric = (counts + counts[(2 * ZERO - np.arange(256)) % 256]) / 2
    smoothed = np.where(possible > 0, symmetric + 0.25, 0.0)
    smoothed[0] = max(0.5, 1e-5 * total)
    return ClassTables(smoothed, (shifts[0], shifts[1], shifts[2]))
