"""The blend core's kernels one by one on a GPU, in the shapes of an 8B model, next to other ways of doing the same.

``python benches/bench_gpu_kernels.py [--tokens N] [--json FILE]``. Times are medians of single launches by CUDA events.
`bench_blend_gpu.py` runs this too, and says what the whole costs.

``--sweep attention`` times the tiles of `SWEEP` instead, on the rows of a blended prompt of 15,066 tokens, and is done
within 45 seconds: tiles are compiled and checked in processes of their own first, and one that fails, or isn't there in
time, is left out with the reason.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from blendstore.blend import triton_attention, triton_drift
from blendstore.blend.drift import Documents, DriftCorrection, DriftSettings
from blendstore.blend.packing import Packing
from blendstore.blend.rotary import RotaryTable
from blendstore.blend.triton_attention import Tile, add_scores, attend
from blendstore.blend.triton_formats import unpack
from blendstore.blend.triton_rows import turn
from blendstore.codec.formats import FORMATS, GROUP
from blendstore.plan import Span, SpanKind

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 32
DRIFT_TILES = (
    Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(128, 32, 8, 4), Tile(64, 64, 4, 2),
    Tile(64, 32, 4, 2), Tile(64, 32, 4, 3), Tile(64, 64, 8, 2),
)  # fmt: skip
SWEEP = (
    Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2), Tile(128, 32, 8, 4),
    Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 128, 4, 2),
    Tile(64, 32, 4, 4), Tile(64, 64, 8, 3),
)  # fmt: skip
SWEPT_TOKENS = 15_066
SWEEP_SECONDS, COMPILE_SECONDS = 45.0, 28.0
Row = dict[str, Any]


def milliseconds(call: Callable[[], object], repetitions: int = 15) -> float:
    """Median of single launches, after two that don't count."""
    times: list[float] = []
    for number in range(repetitions + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if number > 1:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


@triton.jit  # type: ignore[untyped-decorator]
def _read_host(SOURCE, TARGET, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + lane
        tl.store(TARGET + at, tl.load(SOURCE + at))


def attention_rows(tokens: int) -> list[Row]:
    """Pass 2 with different tiles; pass 1 with the keys split or not."""
    k, v = (torch.randn(tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows: list[Row] = []
    kept = dict(triton_attention.TILES), triton_attention._splits
    for n in (800, 1600, 2368):
        make = torch.Generator(device="cuda").manual_seed(n)
        positions = torch.randperm(tokens, generator=make, device="cuda")[:n].sort().values
        q = torch.randn(n, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        work = 4 * HEADS * DIM * int((positions + 1).sum())
        for tile in (
            Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2), Tile(128, 32, 8, 4), Tile(128, 64, 4, 2),
            Tile(64, 64, 4, 3), Tile(64, 128, 4, 2),
        ):  # fmt: skip
            triton_attention.TILES[DIM] = [tile]
            spent = milliseconds(partial(attend, q, k, v, positions, scale=DIM**-0.5))
            rows.append({"what": f"attention {n} rows {tile}", "ms": spent, "tflops": work / spent / 1e9})
    triton_attention.TILES[DIM] = kept[0][DIM]
    q = torch.randn(64, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(tokens - 64, tokens, device="cuda")
    for splits in (1, 4, 8, 16, 32):
        triton_attention._splits = lambda *_, splits=splits: splits
        spent = milliseconds(lambda: attend(q, k, v, positions, scale=DIM**-0.5))
        rows.append({"what": f"attention 64 rows, keys in {splits} parts", "ms": spent})
    triton_attention._splits = kept[1]
    whole = [torch.randn(1, h, tokens, DIM, device="cuda", dtype=torch.bfloat16) for h in (HEADS, KV_HEADS, KV_HEADS)]
    whole_q, whole_k, whole_v = whole
    spent = milliseconds(
        lambda: F.scaled_dot_product_attention(whole_q, whole_k, whole_v, is_causal=True, enable_gqa=True)
    )
    work = 2 * HEADS * DIM * tokens * tokens
    rows.append({"what": "attention of all rows, torch SDPA", "ms": spent, "tflops": work / spent / 1e9})
    q, positions = whole_q[0].transpose(0, 1), torch.arange(tokens, device="cuda")
    spent = milliseconds(lambda: attend(q, k, v, positions, scale=DIM**-0.5))
    rows.append({"what": "attention of all rows, ours", "ms": spent, "tflops": work / spent / 1e9})
    q, positions = q[-32:].contiguous(), positions[-32:].contiguous()
    normaliser, into = torch.zeros(HEADS, 32, device="cuda"), torch.zeros(tokens, device="cuda")
    spent = milliseconds(lambda: add_scores(q, k, positions, normaliser, into, scale=DIM**-0.5, reduce="max"))
    rows.append({"what": "scores of 32 rows", "ms": spent})
    return rows


def row_kernels(tokens: int) -> list[Row]:
    """One layer's rotation and drift correction, a tenth of the rows recomputed, in five documents."""
    frequencies = 5e5 ** (-torch.arange(DIM // 2).double() / (DIM // 2))

    def lookup(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[:, None].double() * frequencies
        return angle.cos().float(), angle.sin().float()

    table = RotaryTable(lookup, "half", DIM // 2)
    k, v = (torch.randn(tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    places = torch.arange(tokens, device="cuda", dtype=torch.int32)
    rows: list[Row] = []
    spent = milliseconds(lambda: turn(table, k, places, places, tokens))
    rows.append({"what": "rotation of all rows", "ms": spent, "gb_s": 2 * k.nbytes / spent / 1e6})
    positions = torch.randperm(tokens, device="cuda")[: tokens // 10].sort().values
    fresh_k, fresh_v = (
        torch.randn(len(positions), KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    edges = [tokens * at // 5 for at in range(6)]
    spans = [Span(SpanKind.REUSED, a, b, n, 0, 0, n, a) for n, (a, b) in enumerate(pairwise(edges))]
    documents = Documents.of(spans, {n: n for n in range(5)}, k.device)
    groups = torch.searchsorted(torch.tensor(edges[1:], device="cuda"), positions, right=True)
    kept = triton_drift.TILES[DIM]
    for settings in (DriftSettings(), DriftSettings(elsewhere=0.0), DriftSettings(sample=len(positions))):
        correction = DriftCorrection(settings, documents, positions, groups)
        what = f"elsewhere {settings.elsewhere}, sample {settings.sample}"
        rows.append({"what": f"weights of a prompt, {what}", "ms": milliseconds(partial(correction.weigh, [v] * 8))})
        for tile in DRIFT_TILES:
            triton_drift.TILES[DIM] = [tile]
            spent = milliseconds(partial(correction.apply, table, k, v, fresh_k, fresh_v))
            # Every row takes K and V from its document's recomputed rows and the sample.
            work = 4 * KV_HEADS * DIM * tokens * (len(positions) // 5 + len(settings.sampled(len(positions))))
            row = {"what": f"drift, {what}, {tile}", "ms": spent, "layers_ms": LAYERS * spent}
            rows.append({**row, "tflops": work / spent / 1e9})
    triton_drift.TILES[DIM] = kept
    spent = milliseconds(lambda: k.index_put_((positions,), fresh_k))
    rows.append({"what": f"index_put of {len(positions)} rows", "ms": spent})
    return rows


def formats(tokens: int) -> list[Row]:
    """One layer's K and V unpacked into the working KV, and a record of 256 tokens packed, by kernel and plainly."""
    rows: list[Row] = []
    places = torch.arange(tokens, device="cuda", dtype=torch.int32)
    groups = places // GROUP * GROUP
    kv = torch.empty(2, tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    record = torch.randn(LAYERS, 2, 256, KV_HEADS, DIM, device="cuda").bfloat16()
    for name in ("int8", "int4"):
        packing = FORMATS[name]
        staged = packing.pack(torch.randn(1, 2, tokens // GROUP * GROUP, KV_HEADS, DIM, device="cuda"))[0]
        n = staged.shape[1]
        where = torch.stack([places[:n], places[:n], groups[:n]])
        moved = staged.nbytes + kv[:, :n].nbytes
        spent = milliseconds(partial(unpack, name, staged, kv, where))
        rows.append({"what": f"{name}: a layer unpacked", "ms": spent, "gb_s": moved / spent / 1e6})
        spent = milliseconds(partial(packing.unpack, staged, torch.bfloat16), 5)
        rows.append({"what": f"{name}: a layer unpacked by torch", "ms": spent, "gb_s": moved / spent / 1e6})
        spent = milliseconds(partial(Packing[int](record.device).packed, 0, packing, record))
        rows.append({"what": f"{name}: a record packed", "ms": spent, "gb_s": record.nbytes / spent / 1e6})
        spent = milliseconds(partial(packing.pack, record), 5)
        rows.append({"what": f"{name}: a record packed by torch", "ms": spent, "gb_s": record.nbytes / spent / 1e6})
    return rows


def host_reads() -> list[Row]:
    """Page-locked memory to the GPU: the copy engine, and a kernel that reads it by itself with few blocks."""
    nbytes = 1 << 30
    source = torch.empty(nbytes // 4, dtype=torch.int32, pin_memory=True).fill_(7)
    target = torch.empty(nbytes // 4, dtype=torch.int32, device="cuda")
    spent = milliseconds(lambda: target.copy_(source, non_blocking=True), 5)
    rows: list[Row] = [{"what": "1 GiB from the host, copy engine", "ms": spent, "gb_s": nbytes / spent / 1e6}]
    for programs in (4, 8, 16, 32, 132):
        spent = milliseconds(
            lambda programs=programs: _read_host[(programs,)](source, target, nbytes // 4 // 4096, 4096, num_warps=8),  # type: ignore[misc]
            5,
        )
        assert int(target[-1]) == 7
        rows.append(
            {"what": f"1 GiB from the host, kernel of {programs} blocks", "ms": spent, "gb_s": nbytes / spent / 1e6}
        )
    return rows


def measure(tokens: int) -> list[Row]:
    """All rows."""
    return [*attention_rows(tokens), *row_kernels(tokens), *formats(tokens), *host_reads()]


def swept_shapes() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Queries and positions of the rows that a blended prompt attends with."""
    make = torch.Generator(device="cuda").manual_seed(5)

    def queries(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.randn(len(positions), HEADS, DIM, device="cuda", generator=make, dtype=torch.bfloat16)
        return q, positions

    picked = torch.randperm(SWEPT_TOKENS, generator=make, device="cuda")
    return {
        "2350 rows": queries(picked[:2350].sort().values),
        "1550 rows": queries(picked[:1550].sort().values),
        "last 64 rows": queries(torch.arange(SWEPT_TOKENS - 64, SWEPT_TOKENS, device="cuda")),
        "last row": queries(torch.arange(SWEPT_TOKENS - 1, SWEPT_TOKENS, device="cuda")),
        "all rows": queries(torch.arange(SWEPT_TOKENS, device="cuda")),
    }


def swept_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as they lie in the working KV."""
    make = torch.Generator(device="cuda").manual_seed(6)
    kv = torch.randn(2, SWEPT_TOKENS, KV_HEADS, DIM, device="cuda", generator=make, dtype=torch.bfloat16)
    return kv[0], kv[1]


def furthest(q: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> float:
    """The largest difference of a sample of the rows from attention in float32."""
    sample = torch.linspace(0, len(positions) - 1, 24, device="cuda").long()
    rows = q[sample].float().view(-1, KV_HEADS, HEADS // KV_HEADS, DIM)
    logits = torch.einsum("nkgd,tkd->nkgt", rows, k.float()) * DIM**-0.5
    unseen = torch.arange(len(k), device="cuda") > positions[sample, None]
    weights = logits.masked_fill_(unseen[:, None, None], -torch.inf).softmax(-1)
    wanted = torch.einsum("nkgt,tkd->nkgd", weights, v.float()).reshape(len(sample), HEADS, DIM)
    return float((out[sample].float() - wanted).abs().max())


def prepare(tile: Tile) -> str:
    """Compile and check a tile, in a process of its own. Returns what is wrong with it."""
    try:
        triton_attention.TILES[DIM] = [tile]
        k, v = swept_keys()
        shapes = swept_shapes()
        for what in ("2350 rows", "last 64 rows"):
            q, positions = shapes[what]
            far = furthest(q, positions, k, v, attend(q, k, v, positions, scale=DIM**-0.5)[0])
            if not far < 0.02:
                return f"{what}: {far} off"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def sweep_attention(save: Callable[[list[Row]], None]) -> list[Row]:
    """All tiles on all shapes; ``save`` gets what there is when the time is up, and the process ends then."""
    rows: list[Row] = []

    pool = ProcessPoolExecutor(len(SWEEP), mp_context=multiprocessing.get_context("spawn"))

    def stop_compiling() -> None:
        for process in list(pool._processes.values()):
            process.kill()

    def give_up() -> None:
        stop_compiling()
        save(rows)
        show(rows)
        os._exit(3)

    started = time.monotonic()
    alarm = threading.Timer(SWEEP_SECONDS, give_up)
    alarm.daemon = True
    alarm.start()
    states: list[Future[str]] = [pool.submit(prepare, tile) for tile in SWEEP]
    k, v = swept_keys()
    shapes = swept_shapes()
    whole_q, whole_k, whole_v = (t.transpose(0, 1)[None] for t in (shapes["all rows"][0], k, v))
    spent = milliseconds(
        lambda: F.scaled_dot_product_attention(whole_q, whole_k, whole_v, is_causal=True, enable_gqa=True), 5
    )
    work = 2 * HEADS * DIM * SWEPT_TOKENS**2
    rows.append({"what": "all rows: torch SDPA", "ms": spent, "tflops": work / spent / 1e9})
    for tile, state in zip(SWEEP, states, strict=True):
        try:
            wrong = state.result(max(0.1, started + COMPILE_SECONDS - time.monotonic()))
        except Exception as error:
            wrong = f"not compiled in time: {type(error).__name__}"
        if wrong:
            rows.append({"what": f"{tile}: {wrong}"})
    # Nothing is timed while another process is at work.
    stop_compiling()
    good = [tile for tile, state in zip(SWEEP, states, strict=True) if state.done() and not _failed(state)]
    for what, (q, positions) in shapes.items():
        work = 4 * HEADS * DIM * int((positions + 1).sum())
        for tile in good:
            triton_attention.TILES[DIM] = [tile]
            call = partial(attend, q, k, v, positions, scale=DIM**-0.5)
            far = furthest(q, positions, k, v, call()[0])
            spent = milliseconds(call, 5 if what == "all rows" else 15)
            text = f"{what}: {tile.rows}x{tile.keys} warps {tile.warps} stages {tile.stages}"
            rows.append({"what": text, "ms": spent, "off": far, "tflops": work / spent / 1e9})
    q, positions = (t[-32:].contiguous() for t in shapes["last 64 rows"])
    normaliser = attend(q, k, v, positions, scale=DIM**-0.5)[1]
    into = torch.zeros(SWEPT_TOKENS, device="cuda")
    spent = milliseconds(lambda: add_scores(q, k, positions, normaliser, into, scale=DIM**-0.5, reduce="max"))
    rows.append({"what": "scores of 32 rows", "ms": spent})
    alarm.cancel()
    return rows


def _failed(state: Future[str]) -> bool:
    return state.exception() is not None or bool(state.result())


def show(rows: list[Row]) -> None:
    """Print the table."""
    for row in rows:
        rate = "".join(
            f"{row[key]:8.0f} {unit}"
            for key, unit in (("layers_ms", "ms for all layers"), ("tflops", "TFLOP/s"), ("gb_s", "GB/s"))
            if key in row
        )
        spent = f"{row['ms']:10.3f} ms" if "ms" in row else "  left out"
        print(f"{row['what']:<76}{spent}{rate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=15_360)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--sweep", choices=("attention",), help="time the tiles of `SWEEP` only")
    args = parser.parse_args()

    def save(rows: list[Row]) -> None:
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n")

    rows = sweep_attention(save) if args.sweep else measure(args.tokens)
    save(rows)
    show(rows)


if __name__ == "__main__":
    main()
