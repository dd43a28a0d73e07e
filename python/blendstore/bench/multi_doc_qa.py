"""``blendstore bench multi-doc-qa``: what document reuse gives when prompts are made of documents seen before.

Three rounds: *warm-up* sends every document alone, *query* sends prompts of several sampled documents, *no reuse* sends
prompts of the same size made of documents that were never seen. Like for like is query against no reuse: that is the
speed-up that users get. Warm-up against query is the historical gain; it compares one document with several.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blendstore.bench import documents, models, report
from blendstore.bench.answering import Completion, Ids
from blendstore.bench.progress import Progress
from blendstore.bench.prompts import Tokenizer
from blendstore.flags import port, positive

SYSTEM_PROMPT = "You are a helpful assistant."
QUERY_PROMPT = "What's up? How are you recently?"
ROUNDS = ("warm-up", "query", "no reuse")
_SHOWN = {
    "warm-up": "warm-up: one document",
    "query": "query: documents seen",
    "no reuse": "no reuse: documents unseen",
}

Send = Callable[[Ids], Awaitable[Completion]]


@dataclass(frozen=True, slots=True)
class Round:
    """The measured times of one round; times in seconds. ``ttfts`` has no entry for answers without any text."""

    name: str
    prompts: int
    prompt_tokens: int
    ttfts: list[float]
    total_s: float

    @property
    def mean_ttft_s(self) -> float:
        """NaN when no answer had text."""
        return statistics.fmean(self.ttfts) if self.ttfts else float("nan")

    @property
    def time_per_prompt_s(self) -> float:
        """Wall time of the round by its prompts."""
        return self.total_s / self.prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``blendstore bench multi-doc-qa``."""
    add = parser.add_argument
    add("--num-total-documents", type=positive, default=100, help="documents made (default: 100)")
    add("--document-length", type=positive, default=3000, help="tokens of each document (default: 3000)")
    add("--output-len", type=positive, default=10, help="tokens to generate (default: 10)")
    add("--num-requests", type=positive, default=100, help="requests of the query round (default: 100)")
    add("--num-docs-per-request", type=positive, default=5, help="documents in each (default: 5)")
    add("--sampling-strategy", choices=["random"], default="random", help="how documents are drawn for a request")
    add("--random-seed", type=int, default=0)
    add("--blend-special-str", default=" # # ", help="separator; must equal the server's (default: ' # # ')")
    add("--port", type=port, default=8000, help="of a server on this machine (default: 8000)")
    add("--base-url", help="instead of --port: the address up to and with /v1")
    add("--model", help="served name, and where its tokenizer is: a folder, smollm2 or gemma3-270m")
    add("--max-inflight-requests", type=positive, default=20, help="requests under way at once (default: 20)")
    add("--sleep-time-after-warmup", type=float, default=0.0, metavar="SECONDS")
    add("--output", type=Path, metavar="FILE", help="write the answers' texts")
    add("--expected-ttft-gain", type=float, metavar="X", help="fail when warm-up TTFT / query TTFT is below")
    add("--expected-latency-gain", type=float, metavar="X", help="the same for the time per prompt")
    add("--corpus", choices=["prose", "repeat"], default="prose", help="text of the documents (default: prose)")
    add("--engine", choices=["openai", "transformers"], default="openai", help="a server, or this process")
    add("--json", type=Path, metavar="FILE", help="write the rows")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns 1 when a gain is below what was expected, 2 on wrong use."""
    from blendstore.bench.client import ServerError

    try:
        if args.num_docs_per_request > args.num_total_documents:
            raise ValueError(
                f"--num-docs-per-request {args.num_docs_per_request} is more than "
                f"--num-total-documents {args.num_total_documents}"
            )
        if args.model is None and args.engine == "openai":
            raise ValueError("--model is missing: give the served name or folder, its tokenizer makes the prompts")
        for path in (args.json, args.output):
            report.check_target(path)
        if args.engine == "transformers":
            models.check(args.model or "smollm2")
        rounds = _in_process(args) if args.engine == "transformers" else asyncio.run(_on_server(args))
    except (ValueError, LookupError, OSError, ServerError) as error:
        print(f"blendstore bench multi-doc-qa: {report.one_line(error)}", file=sys.stderr)
        return 2
    return _report(args, rounds)


def prompts_of(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, list[Ids]]:
    """The token ids of every round's prompts; the same flags give the same prompts."""
    rng = random.Random(args.random_seed)
    count, length = args.num_total_documents, args.document_length
    if args.corpus == "repeat":
        known = documents.repeated(tokenizer, count, length)
    else:
        known = documents.documents(tokenizer, documents.prose(rng), count, length)
    each = args.num_docs_per_request
    new = documents.unseen(tokenizer, args.num_requests * each, length, rng)
    build = PromptBuilder(tokenizer, args.blend_special_str)
    return {
        "warm-up": [build([document]) for document in known],
        "query": [build(rng.sample(known, each)) for _ in range(args.num_requests)],
        "no reuse": [build(new[i * each : (i + 1) * each]) for i in range(args.num_requests)],
    }


class PromptBuilder:
    """System ids, then separator and document for each document, then separator and query; tokenized apart."""

    def __init__(self, tokenizer: Tokenizer, separator: str) -> None:
        self._system = tokenizer.encode(SYSTEM_PROMPT)  # with the tokenizer's BOS, if it has one
        self._separator = tokenizer.encode(separator, add_special_tokens=False)
        self._query = tokenizer.encode(QUERY_PROMPT, add_special_tokens=False)

    def __call__(self, parts: Sequence[Ids]) -> Ids:
        body = [token for part in parts for token in (*self._separator, *part)]
        return [*self._system, *body, *self._separator, *self._query]


async def _on_server(args: argparse.Namespace) -> list[tuple[Round, list[str]]]:
    from blendstore.bench.client import OpenAIClient

    prompts = prompts_of(args, models.load_tokenizer(args.model))
    base_url = args.base_url or f"http://localhost:{args.port}/v1"
    async with OpenAIClient(base_url, max_inflight=args.max_inflight_requests) as client:

        async def send(prompt: Ids) -> Completion:
            return await client.complete(args.model, prompt, args.output_len)

        return await run_rounds(prompts, send, args.sleep_time_after_warmup)


def _in_process(args: argparse.Namespace) -> list[tuple[Round, list[str]]]:
    from blendstore.bench.inprocess import open_generating

    engine, tokenizer = open_generating(
        args.model or "smollm2", separator=args.blend_special_str, dtype="float32", device="cpu"
    )

    async def send(prompt: Ids) -> Completion:  # one at a time: the engine is this process
        completion: Completion = engine.generate(prompt, args.output_len)
        return completion

    return asyncio.run(run_rounds(prompts_of(args, tokenizer), send, args.sleep_time_after_warmup))


async def run_rounds(
    prompts: dict[str, list[Ids]], send: Send, sleep_after_warmup_s: float
) -> list[tuple[Round, list[str]]]:
    """Send the rounds one after the other; returns each with its answers' texts in the order of the prompts."""
    out = []
    with Progress() as progress:
        for name in ROUNDS:
            progress.start(name, len(prompts[name]))

            async def one(prompt: Ids) -> Completion:
                completion = await send(prompt)
                progress.advance()
                return completion

            started = time.perf_counter()
            answers = await asyncio.gather(*(one(prompt) for prompt in prompts[name]))
            total = time.perf_counter() - started
            ttfts = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
            tokens = sum(map(len, prompts[name]))
            out.append((Round(name, len(answers), tokens, ttfts, total), [answer.text for answer in answers]))
            if name == "warm-up" and sleep_after_warmup_s > 0:
                await asyncio.sleep(sleep_after_warmup_s)
    return out


def _report(args: argparse.Namespace, rounds: Sequence[tuple[Round, list[str]]]) -> int:
    if args.output:
        lines = [f"[{r.name} {i}] {text}" for r, texts in rounds for i, text in enumerate(texts)]
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    warm_up, query, no_reuse = (r for r, _ in rounds)
    gains = {
        "ttft_gain": warm_up.mean_ttft_s / query.mean_ttft_s,
        "latency_gain": warm_up.time_per_prompt_s / query.time_per_prompt_s,
        "speedup": no_reuse.mean_ttft_s / query.mean_ttft_s,
    }
    rows = []
    for r, _ in rounds:
        rows.append(
            {
                "model": args.model,
                "round": r.name,
                "prompts": r.prompts,
                "prompt_tokens": r.prompt_tokens,
                "tokens_per_prompt": r.prompt_tokens / r.prompts,
                "ttft_ms_mean": 1e3 * r.mean_ttft_s,
                "ttft_ms_median": 1e3 * statistics.median(r.ttfts) if r.ttfts else None,
                "total_s": r.total_s,
                "s_per_prompt": r.time_per_prompt_s,
                "empty_answers": r.prompts - len(r.ttfts),
                **(gains if r is query else {}),
            }
        )
    columns = {
        "shown": "round",
        "ttft_ms_mean": "mean TTFT, ms",
        "ttft_ms_median": "median, ms",
        "total_s": "total time, s",
        "prompts": "prompts",
        "tokens_per_prompt": "tokens per prompt",
        "empty_answers": "without text",
    }
    report.print_table("multi-doc QA", [{**row, "shown": _SHOWN[row["round"]]} for row in rows], columns)
    print(
        f"TTFT speed-up: {gains['speedup']:.2f} against prompts of the same size with unseen documents "
        f"({1e3 * no_reuse.mean_ttft_s:,.1f} ms / {1e3 * query.mean_ttft_s:,.1f} ms)"
    )
    print(f"TTFT gain (warm-up / query, one document against {args.num_docs_per_request}): {gains['ttft_gain']:.2f}")
    print(f"Time per prompt gain (warm-up / query): {gains['latency_gain']:.2f}")
    if args.json:
        report.write_json(args.json, rows, corpus=args.corpus, engine=args.engine)
    missed = [
        f"{name} gain {gain:.2f} is below the expected {expected:g}"
        for name, gain, expected in (
            ("TTFT", gains["ttft_gain"], args.expected_ttft_gain),
            ("latency", gains["latency_gain"], args.expected_latency_gain),
        )
        if expected is not None and not gain >= expected  # NaN fails too
    ]
    for message in missed:
        print(f"blendstore bench multi-doc-qa: {message}", file=sys.stderr)
    return 1 if missed else 0
