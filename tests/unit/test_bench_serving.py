"""The two load benches against a small OpenAI-compatible server in this process: what they send, time and conclude."""

import argparse
import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blendstore.bench import inprocess, models, multi_doc_qa, shuffle_doc_qa
from blendstore.bench.answering import Completion
from blendstore.bench.client import OpenAIClient, ServerError
from tests.bench_fakes import ByteTokenizer, openai_server

TOKENIZER = ByteTokenizer()


@pytest.fixture(autouse=True)
def byte_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load_tokenizer", lambda name: TOKENIZER)


def _multi(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    multi_doc_qa.add_arguments(parser)
    sizes = ("--num-total-documents", "6", "--document-length", "90", "--num-requests", "4")
    return parser.parse_args(["--model", "m", *sizes, "--num-docs-per-request", "3", *given])


def _shuffle(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    shuffle_doc_qa.add_arguments(parser)
    return parser.parse_args(["--num-documents", "4", "--document-length", "12", "--output-len", "5", *given])


def test_multi_doc_flags_have_the_documented_defaults() -> None:
    parser = argparse.ArgumentParser()
    multi_doc_qa.add_arguments(parser)
    assert vars(parser.parse_args([])) == {
        "num_total_documents": 100,
        "document_length": 3000,
        "output_len": 10,
        "num_requests": 100,
        "num_docs_per_request": 5,
        "sampling_strategy": "random",
        "random_seed": 0,
        "blend_special_str": " # # ",
        "port": 8000,
        "base_url": None,
        "model": None,
        "max_inflight_requests": 20,
        "sleep_time_after_warmup": 0.0,
        "output": None,
        "expected_ttft_gain": None,
        "expected_latency_gain": None,
        "corpus": "prose",
        "engine": "openai",
        "json": None,
    }


def test_multi_doc_prompts_are_parts_tokenized_apart_in_three_rounds() -> None:
    rounds = multi_doc_qa.prompts_of(_multi(), TOKENIZER)
    assert {name: len(prompts) for name, prompts in rounds.items()} == {"warm-up": 6, "query": 4, "no reuse": 4}
    head = [1, *TOKENIZER.encode("You are a helpful assistant.", add_special_tokens=False)]
    separator = TOKENIZER.encode(" # # ", add_special_tokens=False)
    tail = separator + TOKENIZER.encode("What's up? How are you recently?", add_special_tokens=False)

    def documents_of(prompt: Sequence[int], count: int) -> list[tuple[int, ...]]:
        assert prompt[: len(head)] == head and prompt[-len(tail) :] == tail
        body = prompt[len(head) : -len(tail)]
        assert len(body) == count * (len(separator) + 90)
        blocks = [body[i : i + len(separator) + 90] for i in range(0, len(body), len(separator) + 90)]
        assert all(block[: len(separator)] == separator for block in blocks)
        return [tuple(block[len(separator) :]) for block in blocks]

    known = [documents_of(prompt, 1)[0] for prompt in rounds["warm-up"]]
    assert len(set(known)) == 6
    for prompt in rounds["query"]:
        sampled = documents_of(prompt, 3)
        assert len(set(sampled)) == 3 and set(sampled) <= set(known)
    new = [document for prompt in rounds["no reuse"] for document in documents_of(prompt, 3)]
    assert len(set(new)) == 12 and not set(new) & set(known)
    assert multi_doc_qa.prompts_of(_multi(), TOKENIZER) == rounds
    assert multi_doc_qa.prompts_of(_multi("--random-seed", "1"), TOKENIZER) != rounds


def test_multi_doc_sends_the_rounds_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, responses = tmp_path / "rows.json", tmp_path / "out.txt"
    with openai_server(delay_s=0.03) as (url, seen):
        flags = ("--base-url", url, "--json", str(file), "--output", str(responses), "--max-inflight-requests", "2")
        assert multi_doc_qa.run(_multi(*flags, "--output-len", "7")) == 0
    assert [path for path, _ in seen.requests] == ["/v1/completions"] * 14
    assert seen.most_at_once == 2
    fixed = {"model": "m", "max_tokens": 7, "temperature": 0.0, "stream": True}
    assert all({**body, "prompt": None} == {**fixed, "prompt": None} for _, body in seen.requests)
    sent = [body["prompt"] for _, body in seen.requests]
    rounds = multi_doc_qa.prompts_of(_multi(), TOKENIZER)
    for name, part in (("warm-up", sent[:6]), ("query", sent[6:10]), ("no reuse", sent[10:])):
        assert sorted(part) == sorted(rounds[name])
    rows = json.loads(file.read_text())["rows"]
    assert [row["round"] for row in rows] == ["warm-up", "query", "no reuse"]
    assert all(row["ttft_ms_mean"] >= 30 and row["empty_answers"] == 0 for row in rows)
    assert rows[1]["ttft_gain"] == pytest.approx(rows[0]["ttft_ms_mean"] / rows[1]["ttft_ms_mean"])
    assert rows[1]["speedup"] == pytest.approx(rows[2]["ttft_ms_mean"] / rows[1]["ttft_ms_mean"])
    assert rows[1]["latency_gain"] == pytest.approx(rows[0]["s_per_prompt"] / rows[1]["s_per_prompt"])
    assert responses.read_text().count("] ab") == 14
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    said = next(i for i, line in enumerate(lines) if line.startswith("TTFT"))
    like_for_like = f"TTFT speed-up: {rows[1]['speedup']:.2f} against prompts of the same size with unseen documents"
    assert lines[said].startswith(like_for_like), "what users get comes before the historical gains"
    assert [row["tokens_per_prompt"] for row in rows] == [row["prompt_tokens"] / row["prompts"] for row in rows]
    assert rows[1]["tokens_per_prompt"] == rows[2]["tokens_per_prompt"] > rows[0]["tokens_per_prompt"]
    assert "tokens per prompt" in captured.out and "] ab" not in captured.out
    assert "query: 2 of 4 (50 %)" in captured.err


@pytest.mark.parametrize(
    ("flag", "value", "status"),
    [
        ("--expected-ttft-gain", "0.001", 0),
        ("--expected-ttft-gain", "1000", 1),
        ("--expected-latency-gain", "0.001", 0),
        ("--expected-latency-gain", "1000", 1),
    ],
)
def test_multi_doc_fails_when_a_gain_is_below_what_was_expected(flag: str, value: str, status: int) -> None:
    with openai_server() as (url, _):
        assert multi_doc_qa.run(_multi("--base-url", url, flag, value)) == status


def test_multi_doc_gain_is_missed_when_no_answer_has_text() -> None:
    with openai_server(["", ""]) as (url, _):
        assert multi_doc_qa.run(_multi("--base-url", url, "--expected-ttft-gain", "0.001")) == 1


def test_multi_doc_runs_in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent = []

    class Engine:
        def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
            sent.append((list(prompt_ids), max_tokens))
            return Completion(0.2 if len(sent) <= 6 else 0.1, 0.3, "x")

    def open_generating(model: str, *, separator: str, dtype: str, device: str) -> Any:
        assert (model, separator) == ("m", " ## ")
        return Engine(), TOKENIZER

    monkeypatch.setattr(inprocess, "open_generating", open_generating)
    monkeypatch.setattr(models, "check", lambda name: None)
    file = tmp_path / "rows.json"
    arguments = _multi("--engine", "transformers", "--json", str(file), "--blend-special-str", " ## ")
    assert multi_doc_qa.run(arguments) == 0
    assert [prompt for prompt, _ in sent] == [
        prompt for prompts in multi_doc_qa.prompts_of(arguments, TOKENIZER).values() for prompt in prompts
    ]
    assert json.loads(file.read_text())["rows"][1]["ttft_gain"] == pytest.approx(2.0)


def test_wrong_use_and_server_errors_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert multi_doc_qa.run(_multi("--num-docs-per-request", "7")) == 2
    assert "--num-total-documents 6" in capsys.readouterr().err
    without_model = _multi()
    without_model.model = None
    assert multi_doc_qa.run(without_model) == 2
    assert "--model is missing" in capsys.readouterr().err
    with openai_server(status=404) as (url, _):
        assert multi_doc_qa.run(_multi("--base-url", url)) == 2
    assert "status 404: no such model" in capsys.readouterr().err
    assert multi_doc_qa.run(_multi("--base-url", "http://127.0.0.1:9/v1")) == 2
    assert "http://127.0.0.1:9/v1/completions" in capsys.readouterr().err


def test_answers_go_nowhere_without_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Hundreds of answers would push the figures off the screen."""
    with openai_server(["zebra"]) as (url, _):
        assert multi_doc_qa.run(_multi("--base-url", url)) == 0
    assert "zebra" not in capsys.readouterr().out


@pytest.mark.parametrize("address", ["foo", "http://localhost:99999/v1", "http://", "ftp://localhost/v1", "http://[1"])
def test_an_address_that_cannot_be_is_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert multi_doc_qa.run(_multi("--base-url", address)) == 2
    assert shuffle_doc_qa.run(_shuffle("--base-url", address)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(address in line and "give an address like" in line for line in lines)


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_ports_that_cannot_be_are_refused(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SERVICE_PORT", port)
    for parse, given in ((_multi, ("--port", port)), (_shuffle, ())):
        with pytest.raises(SystemExit) as caught:
            parse(*given)
        assert caught.value.code == 2 and f"--port: {port} is" in capsys.readouterr().err


def test_files_that_cannot_be_written_and_models_that_are_not_there_are_refused_before_any_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert multi_doc_qa.run(_multi("--output", str(tmp_path))) == 2
    assert shuffle_doc_qa.run(_shuffle("--json", str(tmp_path))) == 2
    assert capsys.readouterr().err.count("is a folder: give the name of a file") == 2
    assert multi_doc_qa.run(_multi("--engine", "transformers", "--model", str(tmp_path / "none"))) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "give one of smollm2" in line


def test_time_to_first_token_ends_with_the_first_text_not_with_the_first_chunk() -> None:
    async def ask(url: str) -> Completion:
        async with OpenAIClient(url) as client:
            return await client.complete("m", [1, 2], 3)

    with openai_server(["", "", "late"]) as (url, _):
        completion = asyncio.run(ask(url))
    assert completion.text == "late" and completion.ttft_s is not None and completion.ttft_s <= completion.total_s
    with openai_server(["", ""]) as (url, _):
        assert asyncio.run(ask(url)).ttft_s is None
    with openai_server(status=500) as (url, _), pytest.raises(ServerError, match="status 500"):
        asyncio.run(ask(url))


def test_shuffle_sends_derangements_without_separator_and_with_moving_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    with openai_server() as (url, seen):
        assert shuffle_doc_qa.run(_shuffle("--base-url", url, "--json", str(file))) == 0
    assert [path for path, _ in seen.requests] == ["/v1/chat/completions"] * 3
    rows = json.loads(file.read_text())["rows"]
    assert len({tuple(row["order"]) for row in rows}) == 3
    by_document: dict[int, set[str]] = {}
    for row, (_, body) in zip(rows, seen.requests, strict=True):
        assert (body["model"], body["max_tokens"], body["stream"]) == ("served-model", 5, True)
        [message] = body["messages"]
        assert message["role"] == "user" and "#" not in message["content"]
        lines = message["content"].split("\n")
        assert len(lines) == 5
        for place, (document, line) in enumerate(zip(row["order"], lines, strict=False), start=1):
            assert document != place - 1
            label, text = line.split(": ", 1)
            assert label == f"Here is the {shuffle_doc_qa.ordinal(place)} document" and len(text.split()) == 12
            by_document.setdefault(document, set()).add(text)
    assert all(len(texts) == 1 for texts in by_document.values()) and len(by_document) == 4
    printed = capsys.readouterr().out
    assert printed.count("TTFT") == 4 and "request 3: TTFT" in printed


def test_shuffle_port_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVICE_PORT", raising=False)
    assert _shuffle().port == 10001
    monkeypatch.setenv("SERVICE_PORT", "4242")
    assert _shuffle().port == 4242
    assert _shuffle("--port", "1").port == 1


def test_shuffle_refuses_what_cannot_be_shuffled(capsys: pytest.CaptureFixture[str]) -> None:
    assert shuffle_doc_qa.run(_shuffle("--num-documents", "1")) == 2
    assert "at least 2" in capsys.readouterr().err
    assert shuffle_doc_qa.run(_shuffle("--output-len", "0")) == 2
    assert "--output-len 0" in capsys.readouterr().err
    with pytest.raises(ValueError, match="4 items have 9 derangements, not 10"):
        shuffle_doc_qa.derangements(4, 10, random.Random(0))


def test_all_derangements_are_reachable_and_counted() -> None:
    for n in range(2, 8):
        every = {p for p in itertools.permutations(range(n)) if all(p[i] != i for i in range(n))}
        assert shuffle_doc_qa.subfactorial(n) == len(every)
        assert set(shuffle_doc_qa.derangements(n, len(every), random.Random(0))) == every


def test_ordinals() -> None:
    shown = [shuffle_doc_qa.ordinal(n) for n in (1, 20, 21, 22, 23, 24, 111, 112, 113, 121)]
    assert shown == ["first", "twentieth", "21st", "22nd", "23rd", "24th", "111th", "112th", "113th", "121st"]
