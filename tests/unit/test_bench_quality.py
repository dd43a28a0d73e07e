"""The quality benchmark's harness, on an engine whose answers are known."""

import argparse
import itertools
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blendstore.bench import demo, inprocess, models, prompts, quality, report
from blendstore.bench.answering import Provenance
from blendstore.bench.results import Results
from tests.bench_fakes import ByteTokenizer, FakeEngine

ROW_KEYS = {
    *("model", "selector", "ratio", "provenance", "format", "kl", "kl_share_left", "kl_share_left_ci", "top1"),
    *("suffix_kl_share_left", "suffix_kl_share_left_ci"),
    *("exact_match", "ttft_ms_median", "speedup", "reused", "recomputed", "fresh", "n", "kind_shares"),
    *("leak_nats", "leak_nats_ci", "leak_said", "leak_n"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(inprocess, "open_answering", lambda model, *, dtype, device: (fake, ByteTokenizer()))
    monkeypatch.setattr(models, "check", lambda name: None)
    return fake


def _arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quality.add_arguments(parser)
    return parser.parse_args([*given, "--corpus", "jargon"])


def _run(tmp_path: Path, *given: str) -> list[dict[str, Any]]:
    file = tmp_path / "rows.json"
    assert quality.run(_arguments("--json", str(file), *given)) == 0
    content = json.loads(file.read_text())
    assert set(content) == {"command", "versions", "rows"} and content["versions"]["corpus"] == "jargon"
    rows: list[dict[str, Any]] = content["rows"]
    return rows


def test_rows_have_the_agreed_columns_and_right_values(engine: FakeEngine, tmp_path: Path) -> None:
    rows = _run(tmp_path, "--prompts", "5", "--selectors", "random,query", "--ratios", "0.1", "--leak-prompts", "0")
    assert [(row["selector"], row["ratio"]) for row in rows] == [
        *(("full", None), ("none", 0.0), ("random", 0.1), ("query", 0.1)),
    ]
    assert all(set(row) == ROW_KEYS and row["n"] == 5 for row in rows)
    full, reuse, random, query = rows
    assert full["kl"] == 0.0 and full["speedup"] == 1.0 and full["ttft_ms_median"] == pytest.approx(400)
    assert reuse["kl_share_left"] == 1.0 and reuse["kl_share_left_ci"] == [1.0, 1.0] and reuse["recomputed"] == 0
    assert 0 < query["kl"] < random["kl"] < reuse["kl"]
    assert query["speedup"] == pytest.approx(0.4 / 0.11) and query["top1"] == 1.0 and query["exact_match"] == 1.0
    assert set(query["kind_shares"]) == set(prompts.KINDS) and query["leak_nats"] is None
    lengths = [len(p.ids) for p in prompts.quality_prompts(ByteTokenizer(), 5, corpus_name="jargon")]
    assert query["reused"] + query["recomputed"] + query["fresh"] == pytest.approx(sum(lengths) / 5)


def test_options_reach_the_selector_and_drift_correction_is_the_defaults_alone(
    engine: FakeEngine, tmp_path: Path
) -> None:
    selectors = "deviation,query,query:drift_correction=false:rows=16:reduce=mean,random"
    _run(tmp_path, "--prompts", "1", "--selectors", selectors, "--ratios", "0.1", "--leak-prompts", "0")
    options = {(call[1], tuple(sorted(call[3].items()))) for call in engine.calls if call[0] == "blended"}
    assert options == {
        ("none", (("drift_correction", False),)),
        ("deviation", (("drift_correction", False),)),
        ("query", (("drift_correction", True),)),
        ("query", (("drift_correction", False), ("reduce", "mean"), ("rows", 16))),
        ("random", (("drift_correction", False), ("seed", 0))),
    }


def test_all_methods_see_identical_prompts_and_each_provenance_is_captured_once(
    engine: FakeEngine, tmp_path: Path
) -> None:
    flags = ("--prompts", "4", "--kinds", "fact,split", "--selectors", "head,query", "--leak-prompts", "0")
    rows = _run(tmp_path, *flags, "--provenances", "lead_in,bare,in_context_3")
    assert len(rows) == 2 + 3 * 2 * 3
    seen: dict[Any, set[Any]] = {}
    for call in engine.calls:
        if call[0] == "blended":
            seen.setdefault((call[4], call[5]), set()).add((call[1], call[2], call[6].name))
    assert seen == {(k, s): next(iter(seen.values())) for k in ("fact", "split") for s in (0, 1)}
    captures = [call for call in engine.calls if call[0] == "capture"]
    assert len(captures) == 3 * (4 + 1)  # and once each to warm up
    share = {
        row["provenance"]: row["kl_share_left"] for row in rows if (row["selector"], row["ratio"]) == ("head", 0.1)
    }
    assert share["bare"] > share["lead_in"]


def test_an_interrupted_run_goes_on_where_it_stopped(engine: FakeEngine, tmp_path: Path) -> None:
    log = tmp_path / "results.jsonl"
    flags = ("--selectors", "query", "--ratios", "0.1", "--provenances", "in_context_1", "--leak-prompts", "2")
    complete = _run(tmp_path, "--prompts", "6", *flags, "--resume", str(log))
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:9]) + lines[9][:25])  # cut off in the middle of a line
    engine.calls.clear()
    assert _run(tmp_path, "--prompts", "6", *flags, "--resume", str(log)) == complete
    blended = [call for call in engine.calls if call[0] == "blended"]
    assert ("fact", 0) not in {(call[4], call[5]) for call in blended[2:]}  # two warmed up
    engine.calls.clear()
    assert _run(tmp_path, "--prompts", "6", *flags, "--resume", str(log)) == complete
    assert engine.calls == []


def test_results_of_another_run_are_refused(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "results.jsonl"
    flags = ("--prompts", "1", "--selectors", "none", "--leak-prompts", "0", "--resume", str(log))
    assert quality.run(_arguments(*flags)) == 0
    assert quality.run(_arguments(*flags, "--model", "other")) == 2
    assert "belongs to another run" in capsys.readouterr().err
    log.write_text("not json\n")
    assert quality.run(_arguments(*flags)) == 2


def test_case_b12_leak_is_the_shift_by_the_secret_and_zero_without_a_document_before(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--prompts", "1", "--selectors", "query", "--ratios", "0.1", "--leak-prompts", "4")
    rows = _run(tmp_path, *flags, "--provenances", "lead_in,in_context_1")
    by_provenance = {row["provenance"]: row for row in rows if row["selector"] in ("query", "full")}
    assert [by_provenance["lead_in"][f"leak_{name}"] for name in ("nats", "said", "n")] == [0.0, 0, 0]
    leak, most = by_provenance["in_context_1"], by_provenance[None]
    assert leak["leak_n"] == most["leak_n"] == 4 and leak["leak_said"] == most["leak_said"] == 4
    assert leak["leak_nats"] != 0.0 and leak["leak_nats_ci"][0] <= leak["leak_nats"] <= leak["leak_nats_ci"][1]
    assert "leak, nats" in capsys.readouterr().out
    captured: list[Provenance] = [call[6] for call in engine.calls if call[0] == "blended" and call[4] == "leak"]
    assert {len(provenance.before) for provenance in captured} == {1}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--selectors", "query:rows"), "name:option=value"),
        (("--ratios", "0.1,1.5"), "1.5"),
        (("--ratios", "0"), "selector none"),
        (("--provenances", "lead_in,naked"), "naked"),
        (("--kinds", "fact,poem"), "poem"),
        (("--prompts", "0"), "at least 1"),
        (("--selectors", "query,quary"), "'quary' is unknown"),
        (("--selectors", "query:rows=0"), "rows = 0"),
        (("--selectors", "query:rows=true"), "rows = 'true'"),
        (("--selectors", "deviation:rows=3"), "no option 'rows'"),
        (("--selectors", "query:drift_correction=0"), "drift_correction=0"),
        (("--selectors", "query:drift_strength=x"), "drift_strength=x"),
        (("--selectors", "random:seed=x"), "seed=x"),
        (("--ratios", "a"), "'a' is no number"),
        (("--ratios", "nan"), "no number"),
        (("--provenances", "in_context_4"), "in_context_4"),
        (("--baseline", "deviation@x"), "--baseline deviation@x"),
        (("--device", "toaster"), "--device toaster"),
        (("--device", "meta"), "--device meta"),
        (("--device", "cuda:99"), "--device cuda:99"),
        (("--json", "/"), "/ is a folder"),
        (("--plot", "/"), "/ is a folder"),
    ],
)
def test_wrong_flags_are_refused_before_a_model_is_loaded(
    flags: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quality.run(_arguments(*flags)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("blendstore bench quality: ") and message in line


def test_models_and_types_that_are_not_there_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(model: str, *, dtype: str, device: str) -> None:
        raise OSError("no weights\nin this folder")

    assert quality.run(_arguments("--model", str(tmp_path / "none"))) == 2
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(inprocess, "open_answering", broken)
    assert quality.run(_arguments("--model", str(tmp_path))) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "give one of smollm2" in first and second == "blendstore bench quality: no weights in this folder"
    with pytest.raises(SystemExit) as caught:
        _arguments("--dtype", "int8")
    assert caught.value.code == 2


class InterruptedEngine(FakeEngine):
    """SIGINT comes with the given call of `blended`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def blended(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return super().blended(*arguments)


def test_an_interrupted_run_reports_the_prompts_that_are_complete(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--prompts", "5", "--selectors", "query", "--ratios", "0.1", "--leak-prompts", "0")
    files = ("--json", str(tmp_path / "rows.json"), "--resume", str(tmp_path / "log.jsonl"))
    stopping = InterruptedEngine(2 + 2 * 2 + 1)  # warm-up, two prompts, half of the third
    monkeypatch.setattr(inprocess, "open_answering", lambda model, *, dtype, device: (stopping, ByteTokenizer()))
    assert quality.run(_arguments(*flags, *files)) == 130
    assert "interrupted; 2 of 5 prompts were answered by every method" in capsys.readouterr().err
    assert [row["n"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [2, 2, 2]
    stopping = InterruptedEngine(0)
    (tmp_path / "log.jsonl").unlink()
    assert quality.run(_arguments(*flags, *files)) == 130
    assert "0 of 5" in capsys.readouterr().err


def test_progress_is_a_line_for_each_tenth_where_there_is_no_terminal(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log shows that a run of hours goes on, and isn't filled by it."""
    _run(tmp_path, "--prompts", "20", "--selectors", "query", "--ratios", "0.1", "--leak-prompts", "0")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"quality: {6 * i} of 60 ({10 * i} %)" for i in range(1, 11)]


def test_paired_comparison_of_two_methods(engine: FakeEngine) -> None:
    todo = list(prompts.quality_prompts(ByteTokenizer(), 10, corpus_name="jargon"))
    methods = quality.methods_of("deviation,query", "0.1", "lead_in")
    results = Results(None, {})
    quality.measure_all(engine, todo, [], methods, results)
    _, deviation, query = methods
    difference = quality.compare(results, todo, query, deviation)
    assert difference.low <= difference.value <= difference.high < 0


def test_plots_and_strict_json_survive_missing_numbers(tmp_path: Path) -> None:
    row = {
        **{"selector": "query", "provenance": "lead_in", "ttft_ms_median": 90.0, "kl_share_left_ci": [0.1, 0.3]},
        "kl_share_left": 0.2,
    }
    rows = [{**row, "ratio": 0.1}, {**row, "ratio": 0.2}, {**row, "ratio": None, "kl_share_left": float("nan")}]
    report.plot_quality(tmp_path / "a.png", rows, title="t")
    report.plot_rates(tmp_path / "b.png", rows, title="t")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))
    report.write_json(tmp_path / "rows.json", rows)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][2]["kl_share_left"] is None


def test_demo_compares_all_ways_on_the_same_prompts(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"json": tmp_path / "demo.json", "plot": tmp_path / "demo.png"}
    assert demo.main(["--prompts", "5", *(f"--{name}={path}" for name, path in files.items())]) == 0
    rows = json.loads(files["json"].read_text())["rows"]
    assert [(row["method"], row["ratio"]) for row in rows] == [
        ("no reuse", None),
        ("prefix cache", None),
        ("full reuse, nothing recomputed", 0.0),
        ("blend, K deviation", 0.15),
        ("blend, default", 0.15),
        ("blend, default", 0.1),
    ]
    assert rows[0]["kl"] == rows[1]["kl"] == 0.0 and rows[2]["kl_share_left"] == 1.0
    assert rows[5]["speedup"] == pytest.approx(0.4 / 0.11) and rows[5]["ttft_ms_quartiles"] == pytest.approx([110, 110])
    assert all(row["n"] == 5 for row in rows)
    drift = {(c[1], c[2]): c[3]["drift_correction"] for c in engine.calls if c[0] == "blended"}
    assert drift == {("none", 0.0): False, ("deviation", 0.15): False, ("query", 0.15): True, ("query", 0.1): True}
    printed = capsys.readouterr().out
    assert "no reuse: " in printed and "✓" in printed and "right: " in printed
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


def test_demo_asks_one_question_a_prompt() -> None:
    """A selector looks at the rows of the question: further questions within the answer would not be among them."""
    asked = demo.questions(ByteTokenizer(), 6, 0)
    assert [prompt.kind for prompt in asked] == ["fact", "split", "coref"] * 2
    for prompt in asked:
        assert len(prompt.documents) == 9 and len(prompt.ids) >= 2_000
        ((start, stop),) = prompt.answer_spans
        assert (start, stop) == (0, len(prompt.answer))
        assert ByteTokenizer().decode(prompt.answer).strip().isdigit()


def _demo(tmp_path: Path, *given: str) -> tuple[int, list[dict[str, Any]]]:
    file = tmp_path / "demo.json"
    status = demo.main([*given, f"--json={file}", f"--plot={tmp_path / 'demo.png'}"])
    return status, json.loads(file.read_text())["rows"] if file.exists() else []


@pytest.mark.parametrize(("limit", "answered"), [(0.0, 1), (35.0, 3), (1e9, 5)])
def test_demo_begins_no_prompt_that_would_end_behind_the_limit(
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    limit: float,
    answered: int,
) -> None:
    """A slow machine ends too: one prompt is answered whatever the time, further ones as far as the limit goes."""
    # The demo reads the clock at the start and at both ends of each prompt; a prompt takes 10 s.
    readings = (10.0 * (reading // 2) for reading in itertools.count())
    clock = types.SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr(demo, "time", clock)
    status, rows = _demo(tmp_path, "--prompts", "5", "--time-limit", str(limit))
    assert status == 0 and {row["n"] for row in rows} == {answered}
    captured = capsys.readouterr()
    assert ("the time limit of" in captured.out) == (answered < 5)
    lines = captured.err.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("prompt")] == [
        f"prompt {i} of 5" for i in range(1, answered + 1)
    ]


def test_demo_reports_what_was_done_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_interrupted(at: int) -> None:
        pair = (InterruptedEngine(at), ByteTokenizer())
        monkeypatch.setattr(inprocess, "open_answering", lambda model, *, dtype, device: pair)

    monkeypatch.setattr(models, "check", lambda name: None)
    open_interrupted(4 + 4 * 2 + 1)  # warm-up, two prompts, a part of the third
    status, rows = _demo(tmp_path, "--prompts", "5")
    assert status == 130 and {row["n"] for row in rows} == {2}
    assert "2 of 5 prompts (interrupted)" in capsys.readouterr().out
    (tmp_path / "demo.json").unlink()
    open_interrupted(5)
    assert _demo(tmp_path, "--prompts", "5") == (130, [])
    assert "interrupted before the first prompt" in capsys.readouterr().err


def test_demo_refuses_wrong_flags_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", str(tmp_path / "none")]) == 2
    assert demo.main(["--json", str(tmp_path)]) == 2
    assert [line.startswith("blendstore demo: ") for line in capsys.readouterr().err.splitlines()] == [True, True]
    for flags in (["--prompts", "0"], ["--time-limit", "-1"], ["--time-limit", "nan"], ["--promts", "3"]):
        with pytest.raises(SystemExit) as caught:
            demo.main(flags)
        assert caught.value.code == 2
    assert "did you mean --prompts?" in capsys.readouterr().err
