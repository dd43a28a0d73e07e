"""``blendstore bench codec``: size against quality and speed, of every way in which records are kept or sent.

The KV of held-out prompts is kept as bfloat16 records of 256 tokens, coded, decoded, and put back under the model,
which is then asked for the answer, teacher-forced. Tables are trained on other prompts. Bits include everything that is
stored with a record, but not the tables, which are stored once. Speeds are of one thread, in bytes of the bfloat16
record by seconds of processor time; *in all* they are of all processors, by the clock. The interval of the KL is a 95 %
bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blendstore.bench import models, prompts, report
from blendstore.bench.progress import Progress
from blendstore.bench.stats import Bootstrap

_CHUNK = 256
_TRAINING_TOKENS = 8_000
_TRAINING_SEED = 500
COLUMNS = {
    "model": "model",
    "scheme": "scheme",
    "bits_per_element": "bits",
    "entropy_bits": "entropy",
    "ratio": "smaller by",
    "kl": "KL",
    "kl_low": "from",
    "kl_high": "to",
    "top1": "top-1",
    "encode_gb_s": "encode GB/s",
    "decode_gb_s": "decode GB/s",
    "decode_all_gb_s": "in all",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``blendstore bench codec``."""
    parser.add_argument("--models", default="smollm2,gemma3-270m", help="names or folders, by comma")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts (default: 8)")
    parser.add_argument("--training-prompts", type=int, default=10, help="prompts that tables learn from (default: 10)")
    parser.add_argument("--importance-prompts", type=int, default=3, help="of them, to measure importance (default: 3)")
    parser.add_argument("--levels", default="1,2,3,4,5", help="levels of cachegen (default: all)")
    parser.add_argument("--schemes", default="", help="only schemes whose name begins with one of these, by comma")
    parser.add_argument("--importance", default="", help="measure, or a JSON file {model: [[keys, values] of a layer]}")
    parser.add_argument("--threads", type=int, default=1, help="of the model (default: 1); codecs always use one")
    parser.add_argument("--write-tables", type=Path, metavar="FOLDER", help="write FOLDER/<model>.tables, see --max-kl")
    parser.add_argument("--max-kl", type=float, default=0.01, help="most that written tables may cost (default: 0.01)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot rate against divergence")


@dataclass(frozen=True, slots=True)
class Coded:
    """KV after a scheme, its bits in all, the seconds of encoding and decoding, its entropy in bits and the seconds of
    decoding on all processors, if known."""

    kv: Any
    bits: float
    encode_s: float
    decode_s: float
    entropy_bits: float | None = None
    decode_all_s: float | None = None


Scheme = Callable[[Any], Coded]


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit status: 0, or 2 on wrong use."""
    names = args.models.split(",")
    try:
        levels = [int(level) for level in args.levels.split(",") if level]
        for name in names:
            models.check(name)
        report.check_target(args.json)
        report.check_target(args.plot, plot=True)
    except (LookupError, OSError, ValueError) as error:
        print(f"blendstore bench codec: {report.one_line(error)}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        for name in names:
            for row in measure(name, args, levels, progress):
                rows.append(row)
                progress.say(json.dumps(row))
    report.print_table("codec", rows, COLUMNS)
    if args.json:
        report.write_json(args.json, rows)
    if args.plot:
        plot(args.plot, rows)
    return 0


def measure(name: str, args: argparse.Namespace, levels: list[int], progress: Progress) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    import torch

    from blendstore.bench import codec_schemes, kv

    torch.set_num_threads(args.threads)
    model, tokenizer = models.load(name)
    shape = kv.shape_of(model)

    def captured(what: str, count: int, first_seed: int) -> list[kv.Captured]:
        progress.start(f"{name}: {what}", count)
        found = []
        for prompt in prompts.quality_prompts(tokenizer, count, first_seed=first_seed):
            found.append(kv.capture(model, prompt.ids, prompt.answer))
            progress.advance()
        return found

    training = captured("prompts to learn from", args.training_prompts, _TRAINING_SEED)
    samples = np.concatenate([kv.samples_of(shape, c.kv)[:, 1:] for c in training], 1)
    samples = np.ascontiguousarray(samples[:, :: max(1, samples.shape[1] // _TRAINING_TOKENS)])
    weights = None
    if args.importance == "measure":
        chosen = training[: args.importance_prompts]
        progress.start(f"{name}: importance of layers", 2 * shape.layers * len(chosen))
        weights = kv.importance(model, chosen, progress.advance)
    elif args.importance:
        weights = np.array(json.loads(Path(args.importance).read_text())[name])
    del training
    test = captured("held-out prompts", args.prompts, 0)
    bootstrap = Bootstrap(len(test))
    wanted = tuple(args.schemes.split(",")) if args.schemes else ("",)
    least = math.inf
    for scheme, code, tables in codec_schemes.schemes(shape, samples, levels, weights):
        if not scheme.startswith(wanted):
            continue
        coded, results = [], []
        progress.start(f"{name}: {scheme}", len(test), by_tenths=False)
        for prompt in test:
            one = code(prompt.kv)
            coded.append(one)
            results.append(kv.divergence(prompt.logits, kv.answer_logits(model, one.kv, prompt.tail)))
            progress.advance()
        elements = sum(prompt.kv.numel() for prompt in test)
        bits = sum(one.bits for one in coded) / elements
        entropies = [one.entropy_bits for one in coded if one.entropy_bits is not None]
        divergence = bootstrap.mean([kl for kl, _ in results])
        kl = divergence.value
        if tables and args.write_tables and kl <= args.max_kl and bits < least:
            least = bits
            args.write_tables.mkdir(parents=True, exist_ok=True)
            (args.write_tables / f"{Path(name).name}.tables").write_bytes(tables)
        in_all = [one.decode_all_s for one in coded if one.decode_all_s is not None]
        encode, decode = sum(one.encode_s for one in coded), sum(one.decode_s for one in coded)
        yield {
            "model": name,
            "scheme": scheme,
            "bits_per_element": round(bits, 3),
            "entropy_bits": round(sum(entropies) / elements, 3) if entropies else None,
            "ratio": round(16 / bits, 2),
            "kl": float(f"{kl:.3g}"),
            "kl_low": float(f"{divergence.low:.3g}"),
            "kl_high": float(f"{divergence.high:.3g}"),
            "prompts": len(test),
            "top1": round(float(np.mean([top for _, top in results])), 4),
            "encode_gb_s": round(2e-9 * elements / encode, 3) if encode else None,
            "decode_gb_s": round(2e-9 * elements / decode, 3) if decode else None,
            "decode_all_gb_s": round(2e-9 * elements / sum(in_all), 3) if in_all else None,
        }

    if args.write_tables and least == math.inf:
        wanted_kl = f"no tables for {name} were written: none of the levels stays within a KL of {args.max_kl}"
        print(f"blendstore bench codec: {wanted_kl}; keep lossless or raw", file=sys.stderr)


def chunks(kv: Any) -> Iterator[tuple[int, Any]]:
    """(position, [layers, 2, up to 256 tokens, kv_heads, dim]) of a prompt's KV."""
    for start in range(0, kv.shape[2], _CHUNK):
        yield start, kv[:, :, start : start + _CHUNK]


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the seconds of processor time that it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def entropy(counts: Any) -> float:
    """Bits of symbols with these counts [tables, symbols], each table on its own."""
    counts = np.asarray(counts, np.float64)
    total = counts.sum(-1, keepdims=True)
    return float(-(counts * np.log2(np.where(counts > 0, counts / np.maximum(total, 1), 1))).sum())


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Bits an element against KL, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(6 * len(names), 4.5), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        those = [row for row in rows if row["model"] == name and row["kl"] > 0 and math.isfinite(row["kl"])]
        for family in dict.fromkeys(row["scheme"].split(" ")[0] for row in those):
            line = sorted((r["bits_per_element"], r["kl"]) for r in those if r["scheme"].split(" ")[0] == family)
            axis.plot([x for x, _ in line], [y for _, y in line], "o-", label=family)
        axis.set(title=name, xlabel="bits per element", ylabel="KL, nats", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
