"""From answers to a report's columns: one result for each prompt and method, one row for each method."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from blendstore.bench.answering import Answer
from blendstore.bench.metrics import divergence, measure
from blendstore.bench.prompts import Prompt
from blendstore.bench.stats import Bootstrap, kind_shares


def record(answer: Answer, full: Answer, prompt: Prompt) -> dict[str, Any]:
    """One result: metrics against the full prefill, time to first token, token counts.

    Raises ``ValueError`` when the counts do not cover the prompt, or the logits do not fit the answer.
    """
    measured = measure(answer.logits, full.logits, prompt.answer, prompt.answer_spans)
    counts = {"reused": answer.reused, "recomputed": answer.recomputed, "fresh": answer.fresh}
    if sum(counts.values()) != len(prompt.ids):
        raise ValueError(
            f"{prompt.kind} {prompt.seed}: {counts} do not add up to the prompt's {len(prompt.ids)} tokens"
        )
    suffix_kl = measured.kl
    if answer.question is not None and full.question is not None:
        asked = divergence(answer.question, full.question)
        rows = len(asked) + measured.n
        suffix_kl = max(0.0, float(asked.sum()) + measured.kl * measured.n) / rows
    return {**asdict(measured), "suffix_kl": suffix_kl, "ttft_ms": 1e3 * answer.ttft_s, **counts}


def method_columns(
    results: Sequence[Mapping[str, Any]],
    kinds: Sequence[str],
    reuse: Sequence[Mapping[str, Any]],
    full_ttft_ms: float,
    bootstrap: Bootstrap,
) -> dict[str, Any]:
    """The measured columns of one method's row, from its results in the order of the prompts.

    ``reuse`` are the results of full reuse of lead-in documents, whose KL is the measure of ``kl_share_left``.
    ``suffix_kl`` and its share count the rows of the question too. Token counts are means over the prompts.
    """
    reuse_kl = [result["kl"] for result in reuse]
    suffix = bootstrap.ratio([r["suffix_kl"] for r in results], [r["suffix_kl"] for r in reuse])
    kl = [result["kl"] for result in results]
    share = bootstrap.ratio(kl, reuse_kl)
    spans = [hit for result in results for hit in result["exact"]]
    ttft = statistics.median(result["ttft_ms"] for result in results)
    return {
        "kl": statistics.fmean(kl),
        "kl_share_left": share.value,
        "kl_share_left_ci": share.ci,
        "suffix_kl_share_left": suffix.value,
        "suffix_kl_share_left_ci": suffix.ci,
        "top1": sum(result["agree"] for result in results) / sum(result["n"] for result in results),
        "exact_match": statistics.fmean(spans) if spans else None,
        "ttft_ms_median": ttft,
        "speedup": full_ttft_ms / ttft,
        **{name: statistics.fmean(r[name] for r in results) for name in ("reused", "recomputed", "fresh")},
        "n": len(results),
        "kind_shares": kind_shares(kinds, kl, reuse_kl),
    }
