"""The real HTTP server with a real small model: the seeds' benchmarks against it, the OpenAI API, metrics, logs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from blendstore.cli import main
from tests.engines.sglang.http_server import SERVED, Http


def test_the_log_says_what_will_be_done_with_the_model(http: Http) -> None:
    told = http.log.read_text()
    assert "blendstore: blending by query at 0.15, documents by auto" in told
    assert "LlamaForCausalLM: 30 layers, 3 KV heads of 64" in told
    assert "geometry proven" in told
    assert http.metric("blendstore_blending") == 1


def test_multi_doc_qa_reuses_every_warmed_document_in_every_order(http: Http, tmp_path: Path) -> None:
    before = len(http.requests())
    flags = (
        f"--base-url {http.url}/v1 --model {SERVED} --num-total-documents 4 --document-length 100 --num-requests 4 "
        f"--num-docs-per-request 3 --output-len 2 --max-inflight-requests 4 --output {tmp_path / 'answers'} "
        f"--json {tmp_path / 'rows.json'}"
    )
    status = main(["bench", "multi-doc-qa", *flags.split()])
    assert status == 0
    query = [row for row in http.requests()[before:] if row["prompt"] > 300 and row["reused"] + row["exact"] > 0]
    assert len(query) >= 4
    for row in query[:4]:
        known = row["prefix"] + row["exact"] + row["reused"] + row["recomputed"]
        assert known >= 3 * 100, "all three documents, wherever they stand"
        assert row["recomputed"] <= 0.16 * (row["exact"] + row["reused"] + row["recomputed"]) + 1
    rows = {row["round"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["query"]["empty_answers"] <= 1


def test_shuffle_doc_qa_finds_documents_without_a_separator(http: Http, tmp_path: Path) -> None:
    before = len(http.requests())
    rows = tmp_path / "rows.json"
    command = ["bench", "shuffle-doc-qa", "--num-documents", "4", "--document-length", "150", "--output-len", "2"]
    assert main([*command, "--base-url", f"{http.url}/v1", "--json", str(rows)]) == 0
    later = http.requests()[before:]
    assert len(later) >= 2, "every request but the first"
    for row in later[-2:]:
        known = row["prefix"] + row["exact"] + row["reused"] + row["recomputed"]
        assert known >= 0.6 * row["prompt"], "documents in another order behind other labels"


def test_options_reach_the_scheduler_from_both_apis(http: Http) -> None:
    """``custom_params`` of the OpenAI body and of the native sampling parameters."""
    ids = [int(token) for token in np.random.default_rng(0).integers(1000, 20000, 130)]
    tail = [int(token) for token in np.random.default_rng(1).integers(1000, 20000, 20)]
    http.post("/v1/completions", model=SERVED, prompt=[5, 6, 7, *ids, *tail], max_tokens=1)
    asked = [9, 8, *ids, *tail]
    before = len(http.requests())
    off = {"blendstore": {"reuse": False, "store": False}}
    http.post("/v1/completions", model=SERVED, prompt=asked, max_tokens=1, custom_params=off)
    greeting = [{"role": "user", "content": "Hi"}]
    http.post("/v1/chat/completions", model=SERVED, messages=greeting, max_tokens=1, custom_params=off)
    http.post("/generate", input_ids=asked, sampling_params={"max_new_tokens": 1, "custom_params": off})
    assert len(http.requests()) == before
    http.flush()
    none = {"blendstore": {"ratio": 0.0}}
    http.post("/generate", input_ids=asked, sampling_params={"max_new_tokens": 1, "custom_params": none})
    http.flush()
    full = {"blendstore": {"ratio": 1.0}}
    http.post("/v1/completions", model=SERVED, prompt=asked, max_tokens=1, custom_params=full)
    zero, one = http.requests()[before:]
    assert (zero["recomputed"], one["reused"]) == (0, 0)
    assert zero["reused"] == one["recomputed"] >= 60


def test_a_tenants_salt_is_the_openai_cache_salt(http: Http) -> None:
    """Case s13 through the OpenAI API: a document is found by the tenant that sent it."""
    ids = [int(token) for token in np.random.default_rng(2).integers(1000, 20000, 150)]
    reused = []
    for salt, lead in (("one", 3), ("two", 9), ("one", 14)):
        before = len(http.requests())
        http.post(
            "/v1/completions", model=SERVED, prompt=[*range(100, 100 + lead), *ids], max_tokens=1, cache_salt=salt
        )
        reused.append(sum(row["reused"] + row["recomputed"] for row in http.requests()[before:]))
    assert reused[:2] == [0, 0]
    assert reused[2] > 0


def test_the_counters_are_those_of_the_log(http: Http) -> None:
    rows = http.requests()
    for kind in ("exact", "reused", "recomputed"):
        assert http.metric("blendstore_prompt_tokens_total", kind=kind) == sum(row[kind] for row in rows)
    assert http.metric("blendstore_prompts_total", outcome="blended") >= 4
    assert http.metric("blendstore_restore_seconds_count") >= 4
    assert http.metric("blendstore_store", gauge="bytes_used") > 0
    assert http.metric("blendstore_store", gauge="bytes_pinned") == 0
    assert http.metric("blendstore_events_total", event="fallback") == 0


def test_answers_stream(http: Http) -> None:
    from blendstore.bench.client import OpenAIClient

    async def run() -> Any:
        async with OpenAIClient(f"{http.url}/v1") as client:
            return await client.complete(SERVED, list(range(200, 260)), 5)

    answer = asyncio.run(run())
    assert answer.ttft_s is None or answer.ttft_s > 0
