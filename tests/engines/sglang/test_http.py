"""The real HTTP server with a real small model: the seeds' benchmarks against it, the OpenAI API, metrics, logs."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from blendstore.bench import models
from blendstore.cli import main

LINE = re.compile(
    r"blendstore: request (\S+): prompt (\d+), device prefix (\d+), exact (\d+), reused (\d+), recomputed (\d+), "
    r"fresh (\d+)"
)
SERVED = "smollm2"


class Http:
    """A server process and its log."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = folder / "blend.yaml"
        config.write_text(
            'enable_blending: True\nmax_local_cpu_size: 2\nblend_special_str: " # # "\nchunk_size: 64\n'
            "blend_budget_ms: 0\n"  # or a busy machine would not blend
        )
        self.log = folder / "server.log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(models.resolve(SERVED))
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", self.model, "--served-model-name", SERVED,
            "--radix-cache-backend", "blendstore", "--port", str(self.port), "--host", "127.0.0.1", "--device", "cpu",
            "--attention-backend", "torch_native", "--dtype", "float32", "--grammar-backend", "none",
            "--max-total-tokens", "8192", "--disable-cuda-graph", "--enable-metrics", "--skip-server-warmup",
        ]  # fmt: skip
        env = {**os.environ, "BLENDSTORE_CONFIG_FILE": str(config)}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        for _ in range(480):
            if self.process.poll() is not None:
                raise AssertionError(self.log.read_text()[-5000:])
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"not healthy: {self.log.read_text()[-5000:]}")

    def requests(self) -> list[dict[str, int]]:
        """The lines of prompts that got KV, in order."""
        names = ("prompt", "prefix", "exact", "reused", "recomputed", "fresh")
        found = LINE.findall(self.log.read_text())
        return [dict(zip(names, map(int, numbers), strict=True)) for _, *numbers in found]

    def flush(self) -> None:
        """Empty the engine's own prefix cache once it is idle."""
        for _ in range(100):
            if httpx.post(f"{self.url}/flush_cache", timeout=10).status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError("the server never became idle")

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """One request; its answer."""
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        out: dict[str, Any] = answer.json()
        return out

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a counter's or gauge's series with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        chosen = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
        return float(sum(sample.value for sample in chosen))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    made = Http(tmp_path_factory.mktemp("http"))
    yield made
    made.process.terminate()
    try:
        made.process.wait(20)
    except subprocess.TimeoutExpired:
        made.process.kill()


def test_the_log_says_what_will_be_done_with_the_model(server: Http) -> None:
    told = server.log.read_text()
    assert "blendstore: blending by query at 0.15, documents by auto" in told
    assert "LlamaForCausalLM: 30 layers, 3 KV heads of 64" in told
    assert "geometry proven" in told
    assert server.metric("blendstore_blending") == 1


def test_multi_doc_qa_reuses_every_warmed_document_in_every_order(server: Http, tmp_path: Path) -> None:
    before = len(server.requests())
    flags = (
        f"--base-url {server.url}/v1 --model {SERVED} --num-total-documents 4 --document-length 100 --num-requests 4 "
        f"--num-docs-per-request 3 --output-len 2 --max-inflight-requests 4 --output {tmp_path / 'answers'} "
        f"--json {tmp_path / 'rows.json'}"
    )
    status = main(["bench", "multi-doc-qa", *flags.split()])
    assert status == 0
    query = [row for row in server.requests()[before:] if row["prompt"] > 300 and row["reused"] + row["exact"] > 0]
    assert len(query) >= 4
    for row in query[:4]:
        known = row["prefix"] + row["exact"] + row["reused"] + row["recomputed"]
        assert known >= 3 * 100, "all three documents, wherever they stand"
        assert row["recomputed"] <= 0.16 * (row["exact"] + row["reused"] + row["recomputed"]) + 1
    rows = {row["round"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["query"]["empty_answers"] <= 1


def test_shuffle_doc_qa_finds_documents_without_a_separator(server: Http, tmp_path: Path) -> None:
    before = len(server.requests())
    rows = tmp_path / "rows.json"
    command = ["bench", "shuffle-doc-qa", "--num-documents", "4", "--document-length", "150", "--output-len", "2"]
    assert main([*command, "--base-url", f"{server.url}/v1", "--json", str(rows)]) == 0
    later = server.requests()[before:]
    assert len(later) >= 2, "every request but the first"
    for row in later[-2:]:
        known = row["prefix"] + row["exact"] + row["reused"] + row["recomputed"]
        assert known >= 0.6 * row["prompt"], "documents in another order behind other labels"


def test_options_reach_the_scheduler_from_both_apis(server: Http) -> None:
    """``custom_params`` of the OpenAI body and of the native sampling parameters."""
    ids = [int(token) for token in np.random.default_rng(0).integers(1000, 20000, 130)]
    tail = [int(token) for token in np.random.default_rng(1).integers(1000, 20000, 20)]
    server.post("/v1/completions", model=SERVED, prompt=[5, 6, 7, *ids, *tail], max_tokens=1)
    asked = [9, 8, *ids, *tail]
    before = len(server.requests())
    off = {"blendstore": {"reuse": False, "store": False}}
    server.post("/v1/completions", model=SERVED, prompt=asked, max_tokens=1, custom_params=off)
    server.post("/v1/chat/completions", model=SERVED, messages=[{"role": "user", "content": "Hi"}], custom_params=off)
    server.post("/generate", input_ids=asked, sampling_params={"max_new_tokens": 1, "custom_params": off})
    assert len(server.requests()) == before
    server.flush()
    none = {"blendstore": {"ratio": 0.0}}
    server.post("/generate", input_ids=asked, sampling_params={"max_new_tokens": 1, "custom_params": none})
    server.flush()
    full = {"blendstore": {"ratio": 1.0}}
    server.post("/v1/completions", model=SERVED, prompt=asked, max_tokens=1, custom_params=full)
    zero, one = server.requests()[before:]
    assert (zero["recomputed"], one["reused"]) == (0, 0)
    assert zero["reused"] == one["recomputed"] >= 60


def test_a_tenants_salt_is_the_openai_cache_salt(server: Http) -> None:
    """Case s13 through the OpenAI API: a document is found by the tenant that sent it."""
    ids = [int(token) for token in np.random.default_rng(2).integers(1000, 20000, 150)]
    reused = []
    for salt, lead in (("one", 3), ("two", 9), ("one", 14)):
        before = len(server.requests())
        server.post(
            "/v1/completions", model=SERVED, prompt=[*range(100, 100 + lead), *ids], max_tokens=1, cache_salt=salt
        )
        reused.append(sum(row["reused"] + row["recomputed"] for row in server.requests()[before:]))
    assert reused[:2] == [0, 0]
    assert reused[2] > 0


def test_the_counters_are_those_of_the_log(server: Http) -> None:
    rows = server.requests()
    for kind in ("exact", "reused", "recomputed"):
        assert server.metric("blendstore_prompt_tokens_total", kind=kind) == sum(row[kind] for row in rows)
    assert server.metric("blendstore_prompts_total", outcome="blended") >= 4
    assert server.metric("blendstore_restore_seconds_count") >= 4
    assert server.metric("blendstore_store", gauge="bytes_used") > 0
    assert server.metric("blendstore_store", gauge="bytes_pinned") == 0
    assert server.metric("blendstore_events_total", event="fallback") == 0


def test_blended_answers_equal_those_of_the_embedded_engine(server: Http) -> None:
    """At the default ratio, with the same records: the same tokens with the same log-probabilities."""
    from blendstore.config import Config
    from blendstore_transformers import Engine

    model, tokenizer = models.load(SERVED)
    config = Config.load(env={}, overrides={"enable_blending": True, "chunk_size": 64, "max_local_cpu_size": 1})
    engine = Engine(model, tokenizer, config)
    documents = [
        "The lighthouse at Skerry Point was built in 1871 by two brothers who never spoke to each other again. " * 3,
        "Every spring the town paints its bridge blue, because the river spirits are said to dislike any other. " * 3,
        "The baker Osvald keeps a raven called Minutes, which steals coins and returns them on Sundays. " * 3,
    ]
    system, question = "You are a helpful assistant.", "What is the raven's name?"
    for document in documents:
        ids = engine.encode([system, document, question])
        engine.prefill(ids)
        server.post("/generate", input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 0})
    for order in ((2, 0, 1), (1, 2, 0)):
        ids = engine.encode([system, *(documents[number] for number in order), question])
        server.flush()
        out = server.post(
            "/generate",
            input_ids=ids,
            sampling_params={"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
            return_logprob=True,
        )
        found = out["meta_info"]["output_token_logprobs"]
        first = engine.prefill(ids)
        report = first.report
        row = server.requests()[-1]
        assert (row["exact"], row["reused"], row["recomputed"]) == (report.exact, report.reused, report.recomputed)
        logits, position, wanted = first.logits, len(ids), []
        for _ in range(12):
            scores = logits.log_softmax(-1)
            token = int(scores.argmax())
            wanted.append((float(scores[token]), token))
            logits = engine.extend(first.cache, [token], position)[-1]
            position += 1
        assert [entry[1] for entry in found] == [token for _, token in wanted]
        assert [entry[0] for entry in found] == pytest.approx([score for score, _ in wanted], abs=5e-3)


def test_answers_stream(server: Http) -> None:
    from blendstore.bench.client import OpenAIClient

    async def run() -> Any:
        async with OpenAIClient(f"{server.url}/v1") as client:
            return await client.complete(SERVED, list(range(200, 260)), 5)

    answer = asyncio.run(run())
    assert answer.ttft_s is None or answer.ttft_s > 0
