"""Prompts of the quality set through the real server: at the default ratio the answers' distributions are those of the
embedded engine, which the figures of the quality benchmark were made with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blendstore.bench import models, prompts
from blendstore.config import Config
from blendstore.options import RequestOptions
from blendstore_transformers import Engine
from tests.engines.sglang.http_server import CHUNK, SERVED, Http

TOP = 50
"""Most likely tokens that are compared at each position."""
TENANT = {"tenant_salt": "quality"}
"""Of these prompts alone: other tests' prompts leave records of the same texts, captured behind other documents."""


@pytest.fixture
def gemma(tmp_path: Path) -> Iterator[Http]:
    """The same for Gemma-3-270M: sliding windows, two rotary bases, heads of 256."""
    made = Http(tmp_path, "gemma3-270m", "--disable-hybrid-swa-memory")
    yield made
    made.close()


def sampling_of(**options: Any) -> dict[str, Any]:
    """Parameters of a request for one token with blendstore's ``options``."""
    custom = {"blendstore": {**TENANT, **options}}
    return {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True, "custom_params": custom}


def forced(server: Http, ids: list[int], answer: list[int], **options: Any) -> tuple[list[dict[int, float]], int]:
    """Log-probabilities of the `TOP` likeliest tokens at each position of ``answer`` behind the prompt ``ids``, whose
    KV the server has made before, and how many of the prompt's tokens it had."""
    sampling = sampling_of(**options)
    server.flush()
    server.post("/generate", input_ids=ids, sampling_params=sampling)
    out = server.post(
        "/generate",
        input_ids=[*ids, *answer],
        sampling_params=sampling,
        return_logprob=True,
        logprob_start_len=len(ids) - 1,
        top_logprobs_num=TOP,
    )["meta_info"]
    rows = out["input_top_logprobs"][1:]  # nothing predicts the first
    return [{token: score for score, token, *_ in row} for row in rows], out["cached_tokens"]


@pytest.mark.real_model
@pytest.mark.parametrize(("name", "kinds"), [(SERVED, ("fact", "news")), ("gemma3-270m", ("fact",))])
def test_answers_at_the_default_ratio_are_distributed_as_in_process(
    name: str, kinds: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """Teacher-forced over the answer, documents captured behind the system prompt. KL to full prefill and top-1
    agreement with it are functions of what is compared here: the distributions of full prefill and of the blend."""
    server: Http = request.getfixturevalue("http" if name == SERVED else "gemma")
    assert "geometry proven" in server.log.read_text()
    model, tokenizer = models.load(name)
    config = Config.load(env={}, overrides={"enable_blending": True, "chunk_size": CHUNK, "max_local_cpu_size": 1})
    engine = Engine(model, tokenizer, config)
    separator = tokenizer.encode(config.blend_special_str, add_special_tokens=False)

    def joined(prompt: prompts.Prompt, *documents: list[int]) -> list[int]:
        parts = (*documents, prompt.question)
        return [*prompt.system, *(token for part in parts for token in (*separator, *part))]

    for kind in kinds:
        prompt = prompts.build(tokenizer, kind, 0, documents=3)
        for document in prompt.documents:
            engine.prefill(joined(prompt, document))
            server.post("/generate", input_ids=joined(prompt, document), sampling_params=sampling_of())
        ids, answer, said = joined(prompt, *prompt.documents), prompt.answer[:24], []
        for options in ({"reuse": False, "store": False}, {"store": False}):
            found, cached = forced(server, ids, answer, **options)
            assert cached == len(ids) - 1
            first = engine.prefill(ids, RequestOptions.parse(options))
            logits = [first.logits[None], engine.extend(first.cache, answer[:-1], len(ids), keep=0)]
            wanted = torch.cat(logits).log_softmax(-1)
            for row, own in zip(found, wanted, strict=True):
                assert max(abs(score - float(own[token])) for token, score in row.items()) <= 1e-3
                assert max(row, key=lambda token: row[token]) == int(own.argmax())
            said.append((wanted, first.report))
        (full, _), (blended, report) = said
        assert report.recomputed > 0
        told = [row for row in server.requests() if row["prompt"] == len(ids)][-1]
        assert (told["exact"], told["reused"], told["recomputed"]) == (report.exact, report.reused, report.recomputed)
        assert float((full - blended).abs().max()) > 1e-2, "or this prompt couldn't tell"
