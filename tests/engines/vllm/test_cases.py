"""Cases from the field in the real engine: on its worker's store and runner, and with a store that fails under load."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendstore.pipeline import IN_CONTEXT, LEAD_IN
from tests.engines.vllm.engines import Answer, Engine
from tests.engines.vllm.models import SEPARATOR, folder_of
from tests.engines.vllm.prompts import QUESTION, SYSTEM, TAILED, A, B, C, prompt, words
from tests.engines.vllm.test_engine import FULL, assert_same


@pytest.fixture(scope="module")
def answers(blending: Engine) -> dict[str, Any]:
    """The cases that share one store."""
    found: dict[str, Any] = blending.case("several")
    return found


def test_case_b03_error_falls_as_the_ratio_rises_behind_an_engine_held_prefix(answers: dict[str, Any]) -> None:
    rows = [answers[f"b03 {ratio}"] for ratio in (0.15, 0.3, 0.6, 1.0)]
    sums = [row["sum"] for row in rows]
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] < 1e-6 * sums[0]
    assert all(row["held untouched"] and row["prefix"] == 200 for row in rows)


def test_case_b04_counters_tell_the_kinds_apart(answers: dict[str, Any]) -> None:
    for ratio in (0.0, 0.5, 1.0):
        row = answers[f"b04 {ratio}"]
        context = row["exact"] + row["reused"] + row["recomputed"]
        assert context == len(SYSTEM) + len(A) + len(B)
        assert row["recomputed"] == min(round(ratio * context), context - row["exact"])
        assert row["fresh"] == len(C) + len(QUESTION) + 4 * len(SEPARATOR)
    assert answers["b04 1.0"]["largest"] <= 2e-4
    assert answers["b04 0.0"]["largest"] > 1e-2, "or this model would not notice"


def test_case_b06_what_cannot_be_blended_is_refused_by_name_and_cached_plainly(blending: Engine) -> None:
    found = blending.case("refused")
    well, without, other = found["well"], found["no layers"], found["another computation"]
    assert (well["blended"], well["gauge"], "required" in well) == (True, 1, False)
    for row in (without, other):
        assert (row["blended"], row["gauge"]) == (False, 0)
        assert "plain caching in" in row["told"]
        assert "blending refused" in row["told"]
    assert "Recurrent has no decoder with embed_tokens and layers" in without["told"]
    assert without["required"].startswith("Refused: Recurrent has no decoder")
    assert "the runner's KV differs from the engine's" in other["told"]
    assert other["required"].startswith("GeometryError: layer 1")


def test_case_b07_memory_full_of_nan_reaches_no_output(answers: dict[str, Any]) -> None:
    """Every case here blends into slots that hold NaN; one of the documents ends with a chunk of 7 tokens."""
    rows = [row for row in answers.values() if isinstance(row, dict) and "largest" in row]
    assert len(rows) == 8
    assert all(np.isfinite(row["largest"]) for row in rows)
    tail = answers["tail"]
    assert tail["exact"] + tail["reused"] + tail["recomputed"] == len(SYSTEM) + len(B) + len(TAILED)
    assert tail["largest"] <= 2e-4


def test_case_b09_a_thousand_look_ups_that_lead_to_nothing_pin_nothing(answers: dict[str, Any]) -> None:
    """Aborted between look-up and load. Of those whose end is never told the latest are remembered, 1,024 in all."""
    assert answers["b09"] == {"waiting": 1024, "left": 24, "pinned": 0, "leases": 0}
    assert answers["errors"] == 0


def test_case_b11_the_documented_record_stays_and_a_bare_one_is_never_reused(blending: Engine) -> None:
    behind, still, lead_in, replaced, bare = blending.case("provenance")
    assert (behind, still) == ({IN_CONTEXT}, {IN_CONTEXT})
    assert (lead_in, replaced) == ({LEAD_IN}, {IN_CONTEXT})
    assert bare == {None}, "what begins a prompt is no document"


def test_case_f01_a_failing_record_costs_speed_only(blending: Engine) -> None:
    """The blocks are the engine's to compute, whatever was wrong, and nothing stays pinned."""
    gone, wrong, well, pinned, errors = blending.case("failing")
    assert (gone[0] > 0, gone[1]) == (True, 1)
    assert (wrong[0] > 0, wrong[1]) == (True, 2)
    assert well[0] == []
    assert well[1] <= 2e-4
    assert pinned == 0
    assert errors == 1, "a store that can't store is counted, and serving goes on"


def test_documents_outlive_the_server_on_a_disk(blending: Engine, tmp_path: Path) -> None:
    row = blending.case("restarted", str(tmp_path))
    assert row["exact"] + row["recomputed"] == len(SYSTEM) + len(A) + len(B)
    assert row["largest"] <= 2e-4


def test_documents_in_fewer_bits_come_back_within_their_steps_and_a_guard_watches_them(blending: Engine) -> None:
    found = blending.case("packed")
    for name, least, most, share in (("raw", 0, 2e-4, 1), ("int8", 1e-4, 0.05, 0.65), ("int4", 1e-3, 0.6, 0.5)):
        row = found[name]
        assert row["exact"] == len([*SYSTEM, *A, *B, *QUESTION]) - 1, "the prompt stands as it was kept"
        assert least <= row["largest"] <= most, name
        assert row["bytes"] <= share * found["raw"]["bytes"]
    for name in ("int8", "int4"):
        *others, last = found[f"not a number, {name}"]
        assert all(others) and not last, "the record that has it, and no other"
        assert found[f"errors, {name}"] == 1
    assert (found["guard 0"], found["guard 1000"]) == (("raw", 1), ("int4", 0))


def test_a_prompt_waits_for_lower_tiers_outside_of_the_engines_steps_and_not_for_ever(blending: Engine) -> None:
    found, whole = blending.case("waiting"), len(prompt(A)) - 1
    assert [found[name].waiting for name in ("first", "again", "brought", "late")] == [True, True, False, False]
    assert [found[name].target for name in ("first", "again", "brought", "late")] == [0, 0, whole, whole]
    assert found["left"], "what it brings is for a later prompt"
    assert found["remembered"] == 0


def test_case_s11_adapters_share_nothing(blending: Engine) -> None:
    """With each other, with the base, and nothing is blended for them."""
    found = blending.case("adapters")
    assert found["same"] >= len(SYSTEM) + len(A) + len(B)
    assert found["same, moved"] <= len(SYSTEM) + len(SEPARATOR), "no more than the exact prefix"
    assert (found["other"], found["base"], found["base, moved"]) == (0, 0, 0)


def test_blends_are_those_of_the_engine_in_process(blending: Engine) -> None:
    """With the configured selector and ratio too: quality is a matter of the blend, and the blend is the same."""
    for name, row in blending.case("against_the_embedded_engine", str(folder_of("llama"))).items():
        assert row["recomputed"][0] == row["recomputed"][1], name
        assert row["reused"][0] == row["reused"][1], name
        assert row["difference"] <= 2e-4, name
        assert row["error"] > 1e-2, "or this prompt could not tell"


class Load:
    """Prompts of documents that are known, all under way at once, and the plain engine's answers."""

    def __init__(self, blending: Engine, plain: Engine) -> None:
        system = words(400, 15)
        documents = [words(401 + number, 90) for number in range(3)]
        for document in documents:
            blending.ask(prompt(document, system=system))
        self.prompts = [
            prompt(*documents[number % 3 :], *documents[: number % 3], system=words(410 + number, 20))
            for number in range(16)
        ]
        self.wanted = plain.ask_all([(tokens, {}) for tokens in self.prompts])

    def run(self, engine: Engine) -> dict[int, Answer]:
        """Ask for all of them."""
        return engine.ask_all([(tokens, {**FULL, "store": False}) for tokens in self.prompts])


@pytest.fixture(scope="module")
def load(blending: Engine, plain: Engine) -> Load:
    return Load(blending, plain)


@pytest.mark.parametrize(
    ("kind", "hits", "reached"),
    [("answers", (16, 16), (16, 16)), ("hangs", (0, 0), (1, 8)), ("dies", (4, 4), (5, 5)), ("fails", (0, 0), (16, 16))],
)
def test_a_store_that_is_killed_or_wedged_under_load_costs_reuse_and_no_answer(
    kind: str, hits: tuple[int, int], reached: tuple[int, int], load: Load, blending: Engine, tmp_path: Path
) -> None:
    """Over a real socket. Each look-up that hangs delays the scheduler by half a second at most, and only those do that
    reach the store: with pauses that double they are few, however many prompts come."""
    before, failures = blending.tell("unanswered"), blending.tell("counts").get("fallback", 0)
    blending.tell("link", kind, str(tmp_path))
    try:
        found = load.run(blending)
    finally:
        told = blending.tell("link", "back")
    for number, wanted in load.wanted.items():
        assert_same(found[number], wanted)
    cached = sum(answer.cached > 200 for answer in found.values())
    assert hits[0] <= cached <= hits[1]
    assert reached[0] <= told <= reached[1]
    missed = blending.tell("unanswered") - before
    assert missed == (0 if kind in ("answers", "fails") else 16 - cached)
    assert blending.tell("pinned") == 0
    assert blending.tell("counts").get("fallback", 0) == failures
    assert all(answer.cached > 200 for answer in load.run(blending).values()), "it goes on afterwards"
