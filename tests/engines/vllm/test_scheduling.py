"""The scheduler's side alone: what is promised, when it waits, and when a prompt is kept."""

from types import SimpleNamespace
from typing import Any

import pytest

from blendstore_vllm.messages import Ask, Found
from blendstore_vllm.scheduling import Scheduling


class Knows:
    """A worker that can fill ``target`` tokens in ``milliseconds``."""

    def __init__(self, target: int, milliseconds: float = 0.0) -> None:
        self.found, self.asked = Found(target, milliseconds), list[Ask]()

    def look(self, ask: Ask) -> Found:
        self.asked.append(ask)
        return self.found


def request(name: str, count: int = 100, **more: Any) -> Any:
    given: dict[str, Any] = {
        "request_id": name, "prompt_token_ids": list(range(count)), "mm_features": [], "prompt_embeds": None,
        "pooling_params": None, "skip_reading_prefix_cache": False, "kv_transfer_params": None, "lora_request": None,
        "cache_salt": None,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **more})


def step(
    new: dict[str, tuple[int, int]] | None = None, going: dict[str, tuple[int, int, list[int] | None]] | None = None
) -> Any:
    """Requests with the tokens that they have and get; those that go on also with their new blocks."""
    new, going = new or {}, going or {}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=has) for name, (has, _) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(going),
            num_computed_tokens=[has for has, _, _ in going.values()],
            new_block_ids=[None if added is None else (added,) for _, _, added in going.values()],
        ),
        num_scheduled_tokens={name: row[1] for name, row in {**new, **going}.items()},
    )


def test_what_is_promised_is_loaded_when_blocks_are_there() -> None:
    side = Scheduling(Knows(80), budget_ms=0)
    asked = request("a")
    assert side.matched(asked, 0) == 80
    side.allocated(asked, [4, 5], 80)
    loads, keeps = side.step(step(new={"a": (80, 10)}))
    assert [(load.ask.name, load.ask.limit, load.blocks) for load in loads] == [("a", 80, [4, 5])]
    assert keeps == [], "ten tokens are missing"
    loads, keeps = side.step(step(going={"a": (90, 10, [9])}))
    assert loads == []
    assert [(keep.blocks, keep.loaded) for keep in keeps] == [([4, 5, 9], True)]
    assert side.step(step(going={"a": (100, 1, None)})) == ([], []), "kept once"


def test_a_prompt_waits_while_lower_tiers_bring_its_records() -> None:
    link = Knows(0)
    side, asked = Scheduling(link, budget_ms=0), request("a")
    link.found = Found(0, 0.0, waiting=True)
    assert [side.matched(asked, 0) for _ in range(3)] == [None] * 3
    link.found = Found(80, 0.0)
    assert side.matched(asked, 0) == 80


def test_at_most_all_tokens_but_the_last_are_asked_for() -> None:
    link = Knows(0)
    assert Scheduling(link, budget_ms=0).matched(request("a"), 0) == 0
    assert link.asked[0].limit == 99
    assert Scheduling(link, budget_ms=0).matched(request("a"), 99) == 0
    assert len(link.asked) == 1, "nothing is left to fill"


def test_blends_of_one_step_together_stay_within_the_budget() -> None:
    """The first one is let in whatever it takes; the next one waits for the next step and is let in there."""
    side = Scheduling(Knows(80, milliseconds=70.0), budget_ms=100)
    first, second = request("a"), request("b")
    assert side.matched(first, 0) == 80
    side.allocated(first, [1], 80)
    assert side.matched(second, 0) is None
    side.step(step(new={"a": (80, 20)}))
    assert side.matched(second, 0) == 80


def test_a_look_up_whose_request_got_no_blocks_costs_no_budget() -> None:
    side = Scheduling(Knows(80, milliseconds=70.0), budget_ms=100)
    assert side.matched(request("a"), 0) == 80
    assert side.matched(request("b"), 0) == 80


def test_a_preempted_request_is_looked_up_again_and_has_its_new_blocks_alone() -> None:
    side = Scheduling(Knows(80), budget_ms=0)
    asked = request("a")
    side.matched(asked, 0)
    side.allocated(asked, [1, 2], 80)
    side.step(step(new={"a": (80, 10)}))
    assert side.matched(asked, 0) == 80
    side.allocated(asked, [7, 8], 80)
    loads, keeps = side.step(step(going={"a": (80, 20, [7, 8])}))
    assert [load.blocks for load in loads] == [[7, 8]]
    assert [keep.blocks for keep in keeps] == [[7, 8]]


@pytest.mark.parametrize(
    "more",
    [
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"pooling_params": object()},
        {"skip_reading_prefix_cache": True},
        {"resumable": True},
        {"prompt_token_ids": None},
        {"kv_transfer_params": {"blendstore": {"ratio": 7}}},
        {"kv_transfer_params": {"blendstore": "on"}},
    ],
)
def test_prompts_that_are_more_than_their_tokens_are_left_alone(more: dict[str, Any]) -> None:
    link = Knows(80)
    side = Scheduling(link, budget_ms=0)
    asked = request("a", **more)
    assert side.matched(asked, 0) == 0
    side.allocated(asked, [1], 0)
    assert side.step(step(new={"a": (0, 100)})) == ([], [])
    assert link.asked == []


def test_requests_that_are_over_are_forgotten() -> None:
    side = Scheduling(Knows(80), budget_ms=0)
    side.matched(request("a"), 0)
    side.finished("a")
    assert side.step(step(new={"a": (0, 100)})) == ([], [])
    side.finished("never seen")


def test_without_a_store_nothing_is_promised() -> None:
    side = Scheduling(None, budget_ms=0)
    assert side.matched(request("a"), 0) == 0
    side.allocated(request("a"), [1], 0)
    assert side.step(step(new={"a": (0, 100)})) == ([], [])
