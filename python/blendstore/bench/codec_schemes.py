"""The schemes that ``blendstore bench codec`` compares: ours, the plain ones, and the reference product's quantiser as
described (per-token largest magnitude, 32 bins in the first third of the layers and 16 in the others)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendstore._core import Coder
from blendstore.bench.codec import Coded, Scheme, chunks, entropy, processors, timed
from blendstore.codec import formats
from blendstore.codec.tables import Floats, Shape
from blendstore.codec.train import Training, train


def schemes(shape: Shape, samples: Floats, levels: list[int], weights: Any) -> Iterator[tuple[str, Scheme, bytes]]:
    """Names, schemes, and the tables of those that have some; these are trained when their turn comes."""
    yield "raw bfloat16", _raw, b""
    lossless = Coder.lossless("bfloat16", 2 * shape.layers)
    yield "lossless", partial(_coder, lossless), b""
    for name in ("int8", "int4"):
        packing = formats.FORMATS[name]
        yield f"memory {name}", partial(_format, packing, None), b""
        yield f"memory {name} coded", partial(_format, packing, Coder.lossless(None, 2 * shape.layers)), b""
    yield "fp8 e4m3", _fp8, b""
    yield "reference bins 32/16/16", _reference, b""
    for block, chain, label in ((0, 8, "cachegen"), (shape.head_dim, 1, "cachegen-by-head")):
        for level in levels:
            tables = train(shape, samples, Training(level=level, chain=chain, block=block), weights)
            in_all = Coder.cachegen(tables, threads=processors())
            yield f"{label} {level}", partial(_coder, Coder.cachegen(tables), in_all=in_all), tables


def _payload(kv: Tensor) -> bytes:
    return kv.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def _back(payload: bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).view(like.shape).float()


def _raw(kv: Tensor) -> Coded:
    return Coded(kv.to(torch.bfloat16).float(), 16.0 * kv.numel(), 0.0, 0.0)


def _coder(coder: Coder, kv: Tensor, in_all: Coder | None = None) -> Coded:
    out, bits, spent, clock = [], 0, [0.0, 0.0], 0.0
    counts: Any = 0
    for position, chunk in chunks(kv):
        payload, tokens = _payload(chunk), chunk.shape[2]
        length = len(payload)
        try:
            coded, seconds = timed(partial(coder.encode, payload, tokens, source_position=position))
        except ValueError:  # a few tokens, kept raw
            bits += 8 * length
            out.append(_back(payload, chunk))
            continue
        spent[0] += seconds
        back, seconds = timed(partial(coder.decode, coded, length, tokens, source_position=position))
        spent[1] += seconds
        bits += 8 * len(coded)
        out.append(_back(back, chunk))
        if in_all is not None:
            start = time.perf_counter()
            in_all.decode(coded, length, tokens, source_position=position)
            clock += time.perf_counter() - start
        if coder.name == "cachegen":
            counts = counts + np.array(coder.symbol_counts(payload, source_position=position))
    known = entropy(counts) if coder.name == "cachegen" else None
    return Coded(torch.cat(out, 2), bits, spent[0], spent[1], known, clock if in_all is not None else None)


def _format(packing: formats.Format, coder: Coder | None, kv: Tensor) -> Coded:
    out, bits, spent = [], 0, [0.0, 0.0]
    for _, chunk in chunks(kv):
        packed, seconds = timed(partial(packing.pack, chunk.to(torch.bfloat16)))
        spent[0] += seconds
        back, seconds = timed(partial(packing.unpack, packed, torch.bfloat16))
        spent[1] += seconds
        kept = packed.numpy().tobytes()
        if coder is not None:
            with suppress(ValueError):  # a few tokens, kept as they are
                kept = coder.encode(kept, chunk.shape[2], format=1)
        bits += 8 * len(kept)
        out.append(back.float())
    return Coded(torch.cat(out, 2), bits, *spent)


def _fp8(kv: Tensor) -> Coded:
    return Coded(kv.to(torch.float8_e4m3fn).float(), 8.0 * kv.numel(), 0.0, 0.0)


def _reference(kv: Tensor) -> Coded:
    out, bits = [], 0.0
    layers, _, tokens, heads, dim = kv.shape
    for layer, both in enumerate(kv):
        half = (32 if layer < layers / 3 else 16) // 2 - 1
        rows = both.reshape(2, tokens, heads * dim)
        largest = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12)
        q = (rows / largest * half).round()
        for part in q:  # the tables are of channels, one each
            cells = (part + half).long() + (2 * half + 1) * torch.arange(heads * dim)
            counts = torch.bincount(cells.flatten(), minlength=heads * dim * (2 * half + 1))
            bits += entropy(counts.view(heads * dim, -1).numpy()) + 16 * tokens
        out.append((q / half * largest).view(both.shape))
    return Coded(torch.stack(out), bits, 0.0, 0.0)
