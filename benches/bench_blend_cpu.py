"""Time to the first token on a CPU: blending against the engine's own full prefill, paired in one process.

``python benches/bench_blend_cpu.py [--json FILE] [--model smollm2] [--repetitions N] [--profile]``. One prompt of
about 2,100 tokens: system prompt, eight documents that the store knows from other prompts, a question; at most 5 % is
new. Every repetition measures each way once, one after the other, so that a noisy machine hits all alike; the
speed-up is the median of the repetitions' own quotients.
"""

import argparse
import json
import platform
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from blendstore import __version__
from blendstore.bench import models
from blendstore.bench.documents import documents, prose
from blendstore.options import RequestOptions
from blendstore_transformers import Engine, Prefill

SYSTEM = "You are a helpful assistant."
QUESTION = "Which of the documents says something about the weather, and what does it say about it?"


@dataclass(frozen=True, slots=True)
class Way:
    """One way of answering the prompt; ``bar`` is the least speed-up over no reuse, where there is one."""

    name: str
    options: RequestOptions
    bar: float | None = None
    drift: bool = True

    def answer(self, engine: Engine, prompt: list[int]) -> Prefill:
        """The prompt's prefill, answered this way."""
        engine.config = replace(engine.config, blend_drift_correction=self.drift)
        return engine.prefill(prompt, self.options)


# K deviation as published, without drift correction.
WAYS = (
    Way("no reuse", RequestOptions(reuse=False, store=False)),
    Way("full reuse", RequestOptions(selector="none", store=False)),
    Way(
        "deviation 0.15", RequestOptions(selector="deviation", ratio=0.15, store=False), 3.7, drift=False
    ),  # as published
    Way("query 0.10", RequestOptions(selector="query", ratio=0.10, store=False), 4.5),
    Way("query 0.05", RequestOptions(selector="query", ratio=0.05, store=False)),
)


def prepared(engine: Engine, count: int, length: int) -> list[int]:
    """A prompt whose ``count`` documents of ``length`` tokens were captured elsewhere."""
    tokenizer = engine.tokenizer
    separator, system, question = (
        tokenizer.encode(text, add_special_tokens=False) for text in (engine.config.blend_special_str, SYSTEM, QUESTION)
    )
    made = documents(tokenizer, prose(random.Random(0)), count, length)
    for document in made:
        engine.prefill([*system, *separator, *document, *separator, *question])
    random.Random(1).shuffle(made)
    return [*system, *(token for document in made for token in [*separator, *document]), *separator, *question]


def measure(engine: Engine, prompt: list[int], repetitions: int) -> list[dict[str, Any]]:
    """One row for each way."""
    first: dict[str, Prefill] = {way.name: way.answer(engine, prompt) for way in WAYS}
    times: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for _ in range(repetitions):
        for way in WAYS:
            times[way.name].append(way.answer(engine, prompt).report.milliseconds)
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        spent, report = times[way.name], first[way.name].report
        if report.fallback:
            raise SystemExit(f"{way.name}: the engine computed the prompt itself: {report.fallback}")
        gains = [a / b for a, b in zip(times["no reuse"], spent, strict=True)]
        low, median, high = quartiles(spent)
        slowest, gain, fastest = quartiles(gains)
        rows.append(
            {
                "way": way.name,
                "prompt": report.prompt,
                "exact": report.exact,
                "reused": report.reused,
                "recomputed": report.recomputed,
                "fresh": report.fresh,
                "ttft_ms_median": median,
                "ttft_ms_quartiles": [low, high],
                "speedup": gain,
                "speedup_quartiles": [slowest, fastest],
                "bar": way.bar,
                "repetitions": repetitions,
            }
        )
    return rows


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def profile(call: Callable[[], object]) -> str:
    """Where one call spends its time, by operator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        call()
    return str(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=40))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--model", default="smollm2", help="a known model's name or a folder")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--document-length", type=int, default=256, help="tokens")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also print each way's costliest operators")
    args = parser.parse_args()
    model, tokenizer = models.load(args.model)
    engine = Engine(model, tokenizer)
    prompt = prepared(engine, args.documents, args.document_length)
    rows = measure(engine, prompt, args.repetitions)
    print(f"{'way':<16}{'reused':>8}{'again':>7}{'fresh':>7}{'TTFT ms':>10}{'quartiles':>18}{'speed-up':>10}{'bar':>6}")
    for row in rows:
        low, high = row["ttft_ms_quartiles"]
        print(
            f"{row['way']:<16}{row['reused']:>8}{row['recomputed']:>7}{row['fresh']:>7}{row['ttft_ms_median']:>10.1f}"
            f"{f'{low:.1f}-{high:.1f}':>18}{row['speedup']:>9.2f}x{row['bar'] or '':>6}"
        )
    if args.profile:
        for way in WAYS:
            print(f"\n{way.name}\n{profile(lambda way=way: engine.prefill(prompt, way.options))}")  # type: ignore[misc]
    if args.json:
        versions = {"blendstore": __version__, "torch": torch.__version__, "python": platform.python_version()}
        result = {
            "command": sys.argv,
            "versions": versions,
            "threads": torch.get_num_threads(),
            "model": args.model,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
