"""``python -m blendstore.bench.demo`` (``make demo``): the main job on a real model, in a few minutes on a laptop.

Multi-document questions over real prose: nine documents with facts hidden in them, within one document or over two, and
one question. The documents' KV is in the store; every way of answering gets the same prompts, teacher-forced: time and
quality stand side by side.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blendstore.bench import models, prompts, report
from blendstore.bench.answering import Answer, Answering, Options
from blendstore.bench.progress import Progress
from blendstore.bench.rows import method_columns, record
from blendstore.bench.stats import Bootstrap
from blendstore.flags import CommandParser, positive

DOCUMENTS = 9
KINDS = ("fact", "split", "coref")
LEAST_TOKENS = 2_000
INTERRUPTED = 128 + 2  # what a shell reports for a program that SIGINT ended


@dataclass(frozen=True, slots=True)
class Way:
    """One way of answering. ``selector`` None: no reuse (ratio 1) or only the exact prefix (ratio 0)."""

    name: str
    selector: str | None
    ratio: float
    drift_correction: bool = False

    @property
    def options(self) -> Options:
        """What goes to the engine."""
        return {"drift_correction": self.drift_correction}


NO_REUSE = Way("no reuse", None, 1.0)
PREFIX_CACHE = Way("prefix cache", None, 0.0)
FULL_REUSE = Way("full reuse, nothing recomputed", "none", 0.0)
BLENDS = (
    Way("blend, K deviation", "deviation", 0.15),
    Way("blend, default", "query", 0.15, drift_correction=True),
    Way("blend, default", "query", 0.10, drift_correction=True),
)
WAYS = (NO_REUSE, PREFIX_CACHE, FULL_REUSE, *BLENDS)
SHOWN = BLENDS[-1]
COLUMNS = {
    "method": "way of answering",
    "ratio": "ratio",
    "ttft_ms_median": "TTFT ms",
    "ttft_ms_quartiles": "quartiles",
    "speedup": "speed-up",
    "reused": "reused",
    "recomputed": "recomputed",
    "fresh": "fresh",
    "kl": "KL",
    "kl_share_left": "share of KL left",
    "top1": "top-1",
    "exact_match": "exact match",
}


@dataclass(slots=True)
class Measured:
    """What the demo found: results by way, in the order of the prompts, and one prompt with two answers to show.

    ``stopped`` says why fewer prompts than asked for were answered; it is empty when none is missing."""

    answered: list[prompts.Prompt]
    results: dict[Way, list[dict[str, Any]]]
    example: tuple[prompts.Prompt, Answer, Answer] | None
    stopped: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the demo."""
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m or a folder (default: smollm2)")
    parser.add_argument(
        "--prompts", type=positive, default=12, help=f"prompts of at least {LEAST_TOKENS:,} tokens (default: 12)"
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=200.0,
        metavar="SECONDS",
        help="no prompt is begun that would probably end later, warm-up included, except the first (default: 200)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path("demo.json"))
    parser.add_argument("--plot", type=Path, metavar="FILE.png", default=Path("demo.png"))


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit status: 0, 2 on wrong use, 130 when it was interrupted."""
    try:
        models.check(args.model)
        report.check_target(args.json)
        report.check_target(args.plot, plot=True)
        from blendstore.bench.inprocess import open_answering

        print(f"Loading {args.model} …", file=sys.stderr, flush=True)
        engine, tokenizer = open_answering(args.model, dtype="float32", device="cpu")
    except (LookupError, OSError, ValueError) as error:
        print(f"blendstore demo: {report.one_line(error)}", file=sys.stderr)
        return 2
    todo = questions(tokenizer, args.prompts, 1_000 * args.seed)
    measured = measure_all(engine, todo, args.time_limit)
    if measured.example is None:
        print("blendstore demo: interrupted before the first prompt was answered in every way", file=sys.stderr)
        return INTERRUPTED
    rows = summarise(measured, args.model)
    tokens = statistics.fmean(len(prompt.ids) for prompt in measured.answered)
    show_example(measured.example, tokenizer.decode)
    count = f"{len(measured.answered)} prompts"
    if measured.stopped:
        count = f"{len(measured.answered)} of {len(todo)} prompts ({measured.stopped})"
    report.print_table(
        f"{args.model} on CPU: {count} of {DOCUMENTS} documents, {tokens:,.0f} tokens on "
        "average; KL, top-1 and share against full prefill",
        rows,
        COLUMNS,
    )
    report.write_json(args.json, rows)
    report.plot_quality(
        args.plot,
        rows,
        title=f"{args.model}: {DOCUMENTS} documents, {tokens:,.0f} tokens, CPU",
        y="kl",
        y_label="KL to full prefill, nats (lower is better)",
    )
    print(f"Written: {args.json}, {args.plot}")
    return INTERRUPTED if measured.stopped == "interrupted" else 0


def questions(tokenizer: prompts.Tokenizer, count: int, first_seed: int) -> list[prompts.Prompt]:
    """Prompts of nine documents, one question each, kinds in turn; drawn texts that are too short are passed over."""
    drawn = (
        prompts.build(tokenizer, kind, seed, documents=DOCUMENTS)
        for seed in itertools.count(first_seed)
        for kind in KINDS
    )
    return list(itertools.islice((_first_question(p) for p in drawn if len(p.ids) >= LEAST_TOKENS), count))


def _first_question(prompt: prompts.Prompt) -> prompts.Prompt:
    """The prompt's answer goes on with further questions, which would not be among the rows that a selector sees."""
    first = prompt.answer_spans[:1]
    return replace(prompt, answer=prompt.answer[: first[0][1]], answer_spans=first)


def measure_all(engine: Answering[Any], todo: Sequence[prompts.Prompt], time_limit_s: float) -> Measured:
    """Answer the prompts in every way; the order of the ways turns from prompt to prompt, so that none is favoured.

    The first prompt is answered whatever the time; each further one only if it would end within ``time_limit_s``
    (warm-up included), were it to take as long as the slowest so far. SIGINT ends the run with the prompts that were
    answered in every way."""
    measured = Measured([], {way: [] for way in WAYS}, None)
    started = time.perf_counter()
    slowest = 0.0
    with Progress() as progress:
        try:
            progress.start("warming up", len(todo) * (len(WAYS) + 1), by_tenths=False)
            progress.say("warming up")
            _warm_up(engine, todo[0])
            for number, prompt in enumerate(todo):
                begin = time.perf_counter()
                if number and begin + slowest - started > time_limit_s:
                    measured.stopped = f"the time limit of {time_limit_s:g} s"
                    break
                answers = _answer_all(engine, prompt, number, progress)
                for way in WAYS:
                    measured.results[way].append(record(answers[way], answers[NO_REUSE], prompt))
                measured.example = measured.example or (prompt, answers[NO_REUSE], answers[SHOWN])
                measured.answered.append(prompt)
                took = time.perf_counter() - begin
                slowest = max(slowest, took)
                full, shown = (1e3 * answers[way].ttft_s for way in (NO_REUSE, SHOWN))
                progress.say(
                    f"prompt {number + 1} of {len(todo)}: {took:.1f} s; first token after {full:,.0f} ms without "
                    f"reuse, {shown:,.0f} ms blended"
                )
        except KeyboardInterrupt:
            measured.stopped = "interrupted"
    answered = len(measured.answered)
    for results in measured.results.values():  # the interrupt may have come between two ways' results
        del results[answered:]
    return measured


def _answer_all(engine: Answering[Any], prompt: prompts.Prompt, number: int, progress: Progress) -> dict[Way, Answer]:
    """The prompt in every way, beginning with another one at each ``number``."""
    progress.describe("storing the documents")
    captured = engine.capture(prompt, prompt.provenance("lead_in"))
    progress.advance()
    answers = {}
    for way in (*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]):
        progress.describe(way.name)
        answers[way] = answer(engine, prompt, captured, way)
        progress.advance()
    return answers


def answer(engine: Answering[Any], prompt: prompts.Prompt, captured: Any, way: Way) -> Answer:
    """One prompt in one way."""
    if way is NO_REUSE:
        return engine.full(prompt.ids, prompt.answer, len(prompt.question))
    if way is PREFIX_CACHE:
        return engine.prefix_cached(prompt, captured)
    if way.selector is None:
        raise ValueError(f"{way.name}: a selector is missing")
    return engine.blended(prompt, captured, way.selector, way.ratio, way.options)


def summarise(measured: Measured, model: str) -> list[dict[str, Any]]:
    """One row a way of answering."""
    boot = Bootstrap(len(measured.answered))
    kinds = [prompt.kind for prompt in measured.answered]
    reuse = measured.results[FULL_REUSE]
    full_ttft = statistics.median(result["ttft_ms"] for result in measured.results[NO_REUSE])
    rows = []
    for way, results in measured.results.items():
        blending = way.selector is not None
        ttfts = [result["ttft_ms"] for result in results]
        # Of few prompts the inclusive method gives nothing beyond what was measured; of one, two points are needed.
        low, _, high = statistics.quantiles(ttfts * (1 + (len(ttfts) == 1)), n=4, method="inclusive")
        columns = method_columns(results, kinds, reuse, full_ttft, boot)
        rows.append(
            {
                "method": way.name,
                "model": model,
                "selector": way.selector or way.name,
                "ratio": way.ratio if blending else None,
                "provenance": "lead_in" if blending else None,
                "format": "float32" if blending else None,
                **columns,
                "ttft_ms_quartiles": [low, high],
            }
        )
    return rows


def show_example(example: tuple[prompts.Prompt, Answer, Answer], decode: Callable[[Sequence[int]], str]) -> None:
    """Print one prompt's questions with what full prefill and the blend would say to each."""
    prompt, full, blended = example
    said = {"no reuse": full.logits.argmax(-1).tolist(), "blend": blended.logits.argmax(-1).tolist()}
    print(f"\nOne of the prompts ({len(prompt.ids):,} tokens, {len(prompt.documents)} documents), its first document:")
    print(f"  {decode(prompt.documents[0]).strip()[:400]} …\n")
    asked = decode(prompt.question)
    before = 0
    for start, stop in prompt.answer_spans:
        asked = (asked + decode(prompt.answer[before:start])).strip().splitlines()[-1]
        right = decode(prompt.answer[start:stop]).strip()
        replies = []
        for name, tokens in said.items():
            reply = decode(tokens[start:stop]).strip()
            replies.append(f"{name}: {reply:6} {'✓' if reply == right else '✗'}")
        print(f"  {asked:34} {'   '.join(replies)}   (right: {right})")
        before, asked = stop, ""
    print(
        f"  Time to first token: {1e3 * full.ttft_s:,.0f} ms without reuse, {1e3 * blended.ttft_s:,.0f} ms blended.\n"
    )


def _warm_up(engine: Answering[Any], prompt: prompts.Prompt) -> None:
    """Every way once, untimed: the first call of each pays for lazy set-up."""
    short = prompts.shortened(prompt, 2)
    captured = engine.capture(short, short.provenance("lead_in"))
    for way in WAYS:
        answer(engine, short, captured, way)


def _seconds(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program."""
    parser = CommandParser(prog="blendstore-demo", description="Multi-document QA with and without reuse.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
