"""``blendstore bench shuffle-doc-qa``: the same documents in other orders, as chat messages without any separator.

The label in front of a document names its place ("Here is the first document"), so it changes when the document moves.
Every request is a derangement: no document stays where it was at first. Only a store that finds known text at any
offset answers the later requests faster.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blendstore.bench import documents, report
from blendstore.bench.progress import Progress
from blendstore.flags import port, positive

_ENUMERATED = 8
_ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh"),
    *("twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth"),
    "twentieth",
)
QUESTION = "What do these documents have in common?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``blendstore bench shuffle-doc-qa``."""
    add = parser.add_argument
    add("--num-documents", type=positive, required=True, help="documents in every request; at least 2")
    add("--document-length", type=int, required=True, help="words of each document")
    add("--output-len", type=int, required=True, help="tokens to generate")
    add(
        "--port",
        type=port,
        default=os.environ.get("SERVICE_PORT") or "10001",
        help="default: SERVICE_PORT or 10001",
    )
    add("--base-url", help="instead of --port: the address up to and with /v1")
    add("--model", help="default: the first that the server lists")
    add("--random-seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write the rows")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit status."""
    from blendstore.bench.client import ServerError

    try:
        for flag in ("document_length", "output_len"):
            if getattr(args, flag) < 1:
                raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not at least 1")
        report.check_target(args.json)
        rng = random.Random(args.random_seed)
        texts = documents.words(documents.prose(rng), args.num_documents, args.document_length)
        orders = derangements(args.num_documents, args.num_documents - 1, rng)
        rows = asyncio.run(_measure(args, texts, orders))
    except (ValueError, OSError, ServerError) as error:
        print(f"blendstore bench shuffle-doc-qa: {report.one_line(error)}", file=sys.stderr)
        return 2
    later = [row["ttft_ms"] for row in rows[1:] if row["ttft_ms"] is not None]
    if later:
        print(f"median TTFT after the first request: {statistics.median(later):.1f} ms")
    if args.json:
        report.write_json(args.json, rows)
    return 0


async def _measure(
    args: argparse.Namespace, texts: Sequence[str], orders: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    from blendstore.bench.client import OpenAIClient

    rows: list[dict[str, Any]] = []
    async with OpenAIClient(args.base_url or f"http://localhost:{args.port}/v1") as client:
        model = args.model or await client.first_model()
        with Progress() as progress:
            progress.start("shuffled requests", len(orders), by_tenths=False)  # a line each goes to stdout
            for number, order in enumerate(orders, start=1):
                answer = await client.chat(model, messages([texts[i] for i in order]), args.output_len)
                ttft = None if answer.ttft_s is None else 1e3 * answer.ttft_s
                rows.append({"model": model, "request": number, "order": list(order), "ttft_ms": ttft})
                progress.advance()
                print(f"request {number}: TTFT {report.shown(ttft)} ms, order {' '.join(map(str, order))}", flush=True)
    return rows


def messages(texts: Sequence[str]) -> list[dict[str, str]]:
    """One user message: every document behind the name of its place, nothing in between, then the question."""
    parts = [f"Here is the {ordinal(place)} document: {text}\n" for place, text in enumerate(texts, start=1)]
    return [{"role": "user", "content": "".join([*parts, QUESTION])}]


def ordinal(place: int) -> str:
    """``first``, ``second``, …, ``twentieth``, ``21st``, …"""
    if place <= len(_ORDINALS):
        return _ORDINALS[place - 1]
    suffix = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{suffix}"


def derangements(n: int, count: int, rng: random.Random) -> list[tuple[int, ...]]:
    """``count`` distinct permutations of ``n`` items that leave no item in its place, in random order.

    All are listed for n ≤ 8; above, random permutations are drawn and those with a fixed point or drawn before thrown
    away. Raises ``ValueError`` when there are not that many.
    """
    if n < 2:
        raise ValueError(f"--num-documents {n}: documents can't change places; give at least 2")
    existing = subfactorial(n)
    if count > existing:
        raise ValueError(f"{n} items have {existing} derangements, not {count}")
    if n <= _ENUMERATED:
        every = [p for p in itertools.permutations(range(n)) if all(p[i] != i for i in range(n))]
        return rng.sample(every, count)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:  # more than a third of all permutations qualify
        drawn = tuple(rng.sample(range(n), n))
        if all(drawn[i] != i for i in range(n)):
            found[drawn] = None
    return list(found)


def subfactorial(n: int) -> int:
    """Number of derangements of ``n`` items."""
    before, current = 1, 0
    for k in range(2, n + 1):
        before, current = current, (k - 1) * (before + current)
    return current if n else 1
