"""The real ``vllm serve`` with a real small model, started as the baseline that blends is, scheduler and worker in
processes of their own: the seeds' benchmarks against it, options in the OpenAI body, the log, real prose."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from benches.vllm_baselines import command

from blendstore.bench import models
from blendstore.cli import main
from tests.engines.serving import await_health, free_port, logged_prompts

SERVED = "smollm2"


class Http:
    """A server process and its log."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        config = folder / "blend.yaml"
        config.write_text(
            'enable_blending: True\nmax_local_cpu_size: 2\nblend_special_str: " # # "\nchunk_size: 64\n'
            "blend_budget_ms: 0\n"  # or a busy machine would not blend
        )
        self.log = folder / "server.log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.sockets = folder / "sockets"
        self.sockets.mkdir()
        more = f"--served-model-name {SERVED} --dtype float32 --enforce-eager --max-model-len 4096"
        bounds = "--max-num-batched-tokens 1024 --max-num-seqs 8 --gpu-memory-utilization 0.3"
        flags = [*more.split(), *bounds.split()]
        started = command("blend", str(models.resolve(SERVED)), self.port, flags)
        env = {
            **os.environ, "BLENDSTORE_CONFIG_FILE": str(config), "TMPDIR": str(self.sockets),
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        with self.log.open("w") as out:
            self.process = subprocess.Popen(started, stdout=out, stderr=subprocess.STDOUT, env=env)
        await_health(self.process, self.url, self.log, 580)

    def requests(self) -> list[dict[str, int]]:
        """The lines of all prompts, in order."""
        return logged_prompts(self.log)

    def complete(self, ids: list[int], **body: Any) -> list[dict[str, int]]:
        """One completion; the log's new lines."""
        before = len(self.requests())
        body = {"model": SERVED, "prompt": ids, "max_tokens": 1, **body}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return self.requests()[before:]


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
    sockets = list(server.sockets.glob("blendstore-*/*.sock"))
    assert len(sockets) == 1, "look-ups cross processes here"


def test_multi_doc_qa_reuses_every_warmed_document_in_every_order(server: Http, tmp_path: Path) -> None:
    before = len(server.requests())
    flags = (
        f"--base-url {server.url}/v1 --model {SERVED} --num-total-documents 4 --document-length 100 --num-requests 4 "
        f"--num-docs-per-request 3 --output-len 2 --max-inflight-requests 4 --output {tmp_path / 'answers'} "
        f"--json {tmp_path / 'rows.json'}"
    )
    assert main(["bench", "multi-doc-qa", *flags.split()]) == 0
    query = [row for row in server.requests()[before:] if row["prompt"] > 300 and row["reused"] + row["exact"] > 0]
    assert len(query) >= 4
    for row in query[:4]:
        known = row["exact"] + row["reused"] + row["recomputed"]
        assert known >= 3 * 100, "all three documents, wherever they stand"
        assert row["recomputed"] <= 0.16 * known + 1


def test_shuffle_doc_qa_finds_documents_without_a_separator(server: Http, tmp_path: Path) -> None:
    before = len(server.requests())
    command = ["bench", "shuffle-doc-qa", "--num-documents", "4", "--document-length", "150", "--output-len", "2"]
    assert main([*command, "--base-url", f"{server.url}/v1", "--json", str(tmp_path / "rows.json")]) == 0
    later = server.requests()[before:]
    assert len(later) == 3
    for row in later[1:]:
        known = row["exact"] + row["reused"] + row["recomputed"]
        assert known >= 0.6 * row["prompt"], "documents in another order behind other labels"


def test_options_and_salts_come_with_the_openai_body(server: Http) -> None:
    """``kv_transfer_params`` and ``cache_salt`` (case s13 across processes)."""
    ids = [int(token) for token in np.random.default_rng(0).integers(1000, 20000, 130)]
    tail = [int(token) for token in np.random.default_rng(1).integers(1000, 20000, 20)]
    server.complete([5, 6, 7, *ids, *tail])
    asked = [9, 8, *ids, *tail]

    def options(**given: Any) -> dict[str, Any]:
        return {"kv_transfer_params": {"blendstore": {"store": False, **given}}}

    (off,) = server.complete(asked, **options(reuse=False))
    (zero,) = server.complete(asked, **options(ratio=0.0))
    (one,) = server.complete(asked, **options(ratio=1.0))
    (other,) = server.complete(asked, cache_salt="other", **options())
    assert off["fresh"] == other["fresh"] == len(asked)
    assert (zero["recomputed"], one["reused"]) == (0, 0)
    assert zero["reused"] == one["recomputed"] >= 60


def test_the_counters_reach_the_engines_metrics(server: Http) -> None:
    """The worker counts, the front end answers: the same series as with other engines."""
    ids = [int(token) for token in np.random.default_rng(2).integers(1000, 20000, 130)]
    server.complete([5, 6, 7, *ids, 8])
    server.complete([9, 8, *ids, 7])
    told = httpx.get(f"{server.url}/metrics", timeout=10).text
    found = {
        name + labels: float(value)
        for name, labels, value in re.findall(r"^(blendstore_\w+)(\{.*\})? (\S+)$", told, re.MULTILINE)
    }
    rows = server.requests()
    assert found['blendstore_prompts_total{outcome="blended",tp_rank="0"}'] == sum(
        row["reused"] + row["recomputed"] > 0 for row in rows
    )
    for kind in ("exact", "reused", "recomputed", "fresh"):
        series = f'blendstore_prompt_tokens_total{{kind="{kind}",tp_rank="0"}}'
        assert found[series] == sum(row[kind] for row in rows)
    assert found['blendstore_events_total{event="stored",tp_rank="0"}'] > 0
    assert found['blendstore_store{gauge="bytes_used",tp_rank="0"}'] > 0
    assert found['blendstore_blending{tp_rank="0"}'] == 1


DOCUMENTS = [
    "The lighthouse at Skerry Point was built in 1871 by two brothers who never spoke to each other again. " * 3,
    "Every spring the town paints its bridge blue, because the river spirits are said to dislike any other. " * 3,
    "The baker Osvald keeps a raven called Minutes, which steals coins and returns them on Sundays. " * 3,
]
LEAD, QUESTION = "You are a helpful assistant.", " # # What is the raven's name? It is called"


class Prose:
    """Prompts of real prose in several orders, asked of the server; each document was seen alone first."""

    def __init__(self, server: Http) -> None:
        from transformers import AutoTokenizer

        self.server, self._tokenizer = server, AutoTokenizer.from_pretrained(models.resolve(SERVED))
        for number in range(3):
            self.ask((number,))

    def ids(self, order: tuple[int, ...]) -> list[int]:
        """The prompt's tokens."""
        text = LEAD + "".join(f" # # {DOCUMENTS[number]}" for number in order) + QUESTION
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found

    def ask(self, order: tuple[int, ...], count: int = 0, **options: Any) -> dict[str, Any]:
        """Greedy tokens and their log-probabilities, with those of the ``count`` best ones at each place."""
        body = {
            "model": SERVED, "prompt": self.ids(order), "max_tokens": 12, "temperature": 0, "logprobs": count,
            "kv_transfer_params": {"blendstore": options},
        }  # fmt: skip
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=120)
        told: dict[str, Any] = answer.json()["choices"][0]["logprobs"]
        return told


ORDERS = [(2, 0, 1), (1, 2, 0), (2, 1, 0), (0, 2, 2, 1)]


@pytest.fixture(scope="module")
def prose(server: Http) -> Prose:
    return Prose(server)


@pytest.mark.parametrize("order", ORDERS)
def test_at_ratio_one_a_real_model_answers_as_without_reuse(prose: Prose, order: tuple[int, ...]) -> None:
    """The same tokens, log-probabilities to 1e-2."""
    computed = prose.ask(order, reuse=False, store=False)
    blended = prose.ask(order, ratio=1.0, store=False)
    assert prose.server.requests()[-1]["recomputed"] >= 100
    assert blended["tokens"] == computed["tokens"]
    assert blended["token_logprobs"] == pytest.approx(computed["token_logprobs"], abs=1e-2)


def test_at_the_configured_ratio_a_real_model_answers_as_in_process(prose: Prose) -> None:
    """So what is measured of the quality in process holds for the server: the five best tokens after every prompt, and
    how many tokens are reused and recomputed, are those of the engine in transformers with the same documents."""
    import torch

    from blendstore.config import Config
    from blendstore.options import RequestOptions
    from blendstore_transformers import Engine

    config = Config.load(
        env={}, overrides={"enable_blending": True, "max_local_cpu_size": 0.5, "chunk_size": 64}
    )  # fmt: skip
    embedded = Engine.from_pretrained(models.resolve(SERVED), config)
    for number in range(3):
        embedded.prefill(prose.ids((number,)))
    differs = []
    for order in ORDERS:
        found = prose.ask(order, 5, store=False)["top_logprobs"][0]
        row = prose.server.requests()[-1]
        wanted = embedded.prefill(prose.ids(order), RequestOptions(store=False))
        report = wanted.report
        assert (row["reused"], row["recomputed"]) == (report.reused, report.recomputed)
        assert report.recomputed > 0
        best = torch.log_softmax(wanted.logits, -1).topk(5).values.tolist()
        assert sorted(found.values(), reverse=True)[:5] == pytest.approx(best, abs=2e-2)
        computed = embedded.prefill(prose.ids(order), RequestOptions(reuse=False, store=False))
        differs.append(float((computed.logits - wanted.logits).abs().max()))
    assert max(differs) > 0.1, "or these prompts could not tell"
