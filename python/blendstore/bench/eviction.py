"""``blendstore bench eviction``: what each eviction policy saves on traces, beside an optimum that knows the future.

The store's own policies run over traces made by seed (:mod:`blendstore.bench.workloads`) or read from a file, with room
for a share of all distinct tokens. A chunk counts as hit only if every chunk before it in its chain does. Saved prefill
time weighs a chunk of L tokens at position p with L · (1 + (p + L/2) / p0): attention takes longer the further back.

With ``--lower-tier-share`` a tier below keeps part of the chunks: what is not in memory but there is loaded, in
``--lower-tier-load`` of the time that a token at position 0 takes to compute. ``adaptive`` then runs twice, told of the
copies and not.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blendstore import _core
from blendstore.bench import report, workloads
from blendstore.bench.progress import Progress
from blendstore.flags import positive

POLICIES = ("adaptive", "lru", "lfu", "fifo", "s3-fifo", "sieve")
OPTIMAL = "optimal"
UNTOLD = "adaptive, not told"
COLUMNS = {
    "trace": "trace",
    "capacity_percent": "capacity %",
    "policy": "policy",
    "token_hit_ratio": "token hits",
    "load_ratio": "chunks loaded",
    "saved_share": "time saved",
    "against_lru": "saved, − LRU %",
    "hits_against_lru": "hits, − LRU %",
    "of_optimal": "saved, of optimal",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``blendstore bench eviction``."""
    names = ",".join(workloads.GENERATORS)
    add = parser.add_argument
    add("--workloads", default=names, help=f"traces made by seed, of {names}; empty: none (default: all)")
    add(
        "--trace", type=Path, action="append", default=[], metavar="FILE", help="Mooncake's JSON lines; may be repeated"
    )
    add("--block-tokens", type=positive, default=512, help="tokens of a block in --trace files (default: 512)")
    add("--mix", action="store_true", help="also every two traces at the same time, RAG against chats")
    add("--capacities", default="1,5,10,20,40", help="percent of the distinct tokens (default: 1,5,10,20,40)")
    add("--policies", default=",".join(POLICIES), help=f"of {','.join(POLICIES)} (default: all)")
    add("--seed", type=int, default=0, help="another seed, other traces")
    add(
        "--lower-tier-share",
        type=float,
        default=0.0,
        help="share of the prompts whose chunks lie below too (default: 0)",
    )
    add("--lower-tier-load", type=float, default=0.25, help="time to load a token, in computed ones (default: 0.25)")
    add("--p0", type=float, default=30_000.0, help="position at which attention is half of the work (default: 30000)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="a parameter of the generators, as exponent=1.1",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows")
    add("--plot", type=Path, metavar="FILE.png", help="plot the saved time against capacity")


def run(args: argparse.Namespace) -> int:
    """Simulate, print, write; returns the exit status: 0, or 2 on wrong use."""
    try:
        report.check_target(args.json)
        report.check_target(args.plot, plot=True)
        capacities, policies = _numbers(args.capacities), _policies(args.policies)
        if not args.p0 > 0:
            raise ValueError(f"--p0 {args.p0}: give a position above 0")
        if args.seed < 0:
            raise ValueError(f"--seed {args.seed}: give a number of at least 0")
        if not 0 <= args.lower_tier_share <= 1:
            raise ValueError(f"--lower-tier-share {args.lower_tier_share}: give a share from 0 to 1")
        if not args.lower_tier_load >= 0:
            raise ValueError(f"--lower-tier-load {args.lower_tier_load}: give a time of at least 0")
        lower = Lower(args.lower_tier_share, args.lower_tier_load)
        traces = _traces(args)
        with Progress() as progress:
            progress.start("simulations", len(traces) * len(capacities) * len(lower.runs(policies)))
            rows = [row for trace in traces for row in simulate(trace, capacities, policies, args.p0, progress, lower)]
    except (OSError, ValueError, TypeError) as error:
        print(f"blendstore bench eviction: {report.one_line(error)}", file=sys.stderr)
        return 2
    report.print_table("what a policy saves", rows, COLUMNS)
    report.print_table("means over capacities", means(rows), MEAN_COLUMNS)
    if args.json:
        report.write_json(args.json, rows, seed=args.seed, lower_share=lower.share, lower_load=lower.load)
    if args.plot:
        _plot(args.plot, rows)
    return 0


@dataclass(frozen=True, slots=True)
class Lower:
    """A tier below memory."""

    share: float = 0.0
    """Of the prompts whose chunks it keeps."""
    load: float = 0.25
    """Time to load a token, in times of computing one at position 0."""

    def runs(self, policies: Sequence[str]) -> list[str]:
        """What is simulated: an optimum is known without the tier only; with it ``adaptive`` runs both ways."""
        if not self.share:
            return [*policies, OPTIMAL]
        return [run for policy in policies for run in ((policy, UNTOLD) if policy == "adaptive" else (policy,))]


def simulate(
    trace: workloads.Trace,
    capacities: Sequence[float],
    policies: Sequence[str],
    p0: float,
    progress: Progress | None = None,
    lower: Lower | None = None,
) -> list[dict[str, Any]]:
    """One row for each capacity (percent of the distinct tokens) and policy, the optimum last."""
    lower = lower or Lower()
    core = _core.Trace(
        times=(trace.times * 1e9).astype(np.int64),
        starts=trace.starts,
        blocks=trace.blocks,
        positions=trace.positions,
        parents=trace.parents,
        tokens=trace.tokens,
    )
    rows: list[dict[str, Any]] = []
    for percent in capacities:
        capacity = int(trace.distinct_tokens * percent / 100)
        found: dict[str, dict[str, int | float]] = {}
        for policy in lower.runs(policies):
            found[policy] = core.simulate(
                "adaptive" if policy == UNTOLD else policy,
                capacity,
                attention_tokens=p0,
                lower_share=lower.share,
                lower_load=lower.load,
                lower_told=policy != UNTOLD,
            )
            if progress is not None:
                progress.advance()
        best, lru = found.get(OPTIMAL), found.get("lru")
        for policy, outcome in found.items():
            row = {
                "trace": trace.name,
                "capacity_percent": percent,
                "capacity_tokens": capacity,
                "policy": policy,
                "token_hit_ratio": outcome["hit_tokens"] / max(1, outcome["tokens"]),
                "chunk_hit_ratio": outcome["hits"] / max(1, outcome["accesses"]),
                "load_ratio": outcome["loads"] / max(1, outcome["accesses"]),
                "saved_share": outcome["saved"] / max(1, outcome["cost"]),
                "against_lru": _gain(outcome, lru, "saved"),
                "hits_against_lru": _gain(outcome, lru, "hit_tokens"),
                "of_optimal": outcome["saved"] / best["saved"] if best and best["saved"] else None,
                "requests": len(trace),
                "evicted": outcome["evicted"],
            }
            rows.append(row)
    return rows


MEAN_COLUMNS = {
    "trace": "trace",
    "policy": "policy",
    "saved_share": "time saved",
    "small": "saved, − LRU %, up to 10 %",
    "all": "saved, − LRU %, all",
    "least": "least of all",
    "least_hits": "least, hits",
}


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each trace and policy: mean saved share, mean gain on LRU (percent) over capacities up to 10 % and
    over all, and the least gain in time and in hits."""
    out: list[dict[str, Any]] = []
    for trace, policy in dict.fromkeys((row["trace"], row["policy"]) for row in rows):
        own = [row for row in rows if row["trace"] == trace and row["policy"] == policy]
        gains = [row["against_lru"] for row in own if row["against_lru"] is not None]
        small = [row["against_lru"] for row in own if row["against_lru"] is not None and row["capacity_percent"] <= 10]
        hits = [row["hits_against_lru"] for row in own if row["hits_against_lru"] is not None]
        out.append(
            {
                "trace": trace,
                "policy": policy,
                "saved_share": sum(row["saved_share"] for row in own) / len(own),
                "small": sum(small) / len(small) if small else None,
                "all": sum(gains) / len(gains) if gains else None,
                "least": min(gains, default=None),
                "least_hits": min(hits, default=None),
            }
        )
    return out


def _gain(outcome: dict[str, int | float], lru: dict[str, int | float] | None, what: str) -> float | None:
    """Percent more than LRU."""
    return 100 * (outcome[what] / lru[what] - 1) if lru and lru[what] else None


def _numbers(text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value <= 100 for value in values):
        raise ValueError(f"--capacities {text}: give percents above 0 and at most 100, as 1,5,10")
    return values


def _policies(text: str) -> list[str]:
    names = [word.strip().lower() for word in text.split(",") if word.strip()]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise ValueError(f"--policies {text}: give some of {', '.join(POLICIES)}")
    return names


def _traces(args: argparse.Namespace) -> list[workloads.Trace]:
    names = [word.strip() for word in args.workloads.split(",") if word.strip()]
    unknown = [name for name in names if name not in workloads.GENERATORS]
    if unknown:
        raise ValueError(f"--workloads {unknown[0]}: give some of {', '.join(workloads.GENERATORS)}")
    settings = dict(_setting(text) for text in args.set)
    made = {name: workloads.make(name, args.seed, settings) for name in names}
    unused = set(settings) - {key for name in names for key in workloads.parameters(name)}
    if unused:
        raise ValueError(f"--set {sorted(unused)[0]}: no parameter of {', '.join(names) or 'any workload'}")
    read = [workloads.read_mooncake(path, args.block_tokens) for path in args.trace]
    traces = [*made.values(), *read]
    if args.mix:
        chats = [trace for trace in traces if trace in read or trace.name == "conversations"]
        documents = [trace for name, trace in made.items() if name in ("rag", "scans")]
        traces += [workloads.interleave(f"{a.name} + {b.name}", a, b) for a in chats for b in documents]
    if not traces:
        raise ValueError("no traces: give --workloads or --trace")
    return traces


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"--set {text}: give NAME=NUMBER, as exponent=1.1")
    return name.strip(), number


def _plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Saved time against capacity, one panel a trace, the optimum as a dashed line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["trace"] for row in rows))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns, 3.6 * lines), dpi=130, layout="constrained", squeeze=False
    )
    for panel, name in zip(axes.flat, names, strict=False):
        for index, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
            own = [row for row in rows if row["trace"] == name and row["policy"] == policy]
            style = {"color": "0.3", "linestyle": "--"} if policy == OPTIMAL else {"color": f"C{index}", "marker": "o"}
            width = 2.2 if policy == "adaptive" else 1.2
            xs, ys = [r["capacity_percent"] for r in own], [100 * r["saved_share"] for r in own]
            panel.plot(xs, ys, label=policy, linewidth=width, markersize=3.5, **style)
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xscale("log")
        panel.set_xticks(sorted({row["capacity_percent"] for row in rows}))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.92")
    for panel in axes.flat[len(names) :]:
        panel.axis("off")
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.supxlabel("capacity, % of the distinct tokens", fontsize=10)
    figure.supylabel("prefill time saved, %", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
