"""Each selector picks the right tokens on hand-made scores; the registry takes others and refuses mistakes by name."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import torch

from blendstore.blend import selectors
from blendstore.blend.selectors import (
    Candidates,
    SelectorError,
    SelectorSettings,
    make_selector,
    register_selector,
    selector_names,
    top,
)

NAN = float("nan")


@dataclass
class HandMade:
    """A `SelectionRun` with given scores. Two documents of five tokens at positions 10… and 20…."""

    attended: list[float] = field(default_factory=lambda: [0.0] * 10)
    deviations: dict[int, list[float]] = field(default_factory=dict)
    stored: list[float] | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    layers: int = 6

    def __post_init__(self) -> None:
        positions = torch.cat([torch.arange(10, 15), torch.arange(20, 25)])
        group = torch.arange(10) // 5
        stored = None if self.stored is None else torch.tensor(self.stored)
        self.candidates = Candidates(positions, torch.arange(10) % 5, group, stored)
        self._left = torch.arange(10)

    def budget(self, ratio: float) -> int:
        return min(len(self.candidates), round(ratio * 10))

    def attention(self, **how: Any) -> torch.Tensor:
        self.asked.append(how)
        return torch.tensor(self.attended)

    def deviation(self, layer: int) -> torch.Tensor:
        return torch.tensor(self.deviations[layer])[self._left]

    def keep(self, index: torch.Tensor) -> None:
        index = index.sort().values
        self.candidates, self._left = self.candidates.subset(index), self._left[index]

    def picked(self, name: str, ratio: float, **settings: Any) -> list[int]:
        """Numbers 0..9 of the tokens that the selector chose."""
        index = make_selector(name, SelectorSettings(ratios=settings.pop("ratios", (ratio,)), **settings)).select(
            self, ratio
        )
        return sorted(self._left[index].tolist())


SCORES = [1.0, 9.0, 2.0, 8.0, 0.0, 3.0, 7.0, 4.0, 6.0, 5.0]


def test_top_prefers_the_earlier_token_on_ties() -> None:
    assert top(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 2).tolist() == [1, 2]


def test_none_picks_nothing() -> None:
    assert HandMade().picked("none", 1.0) == []


def test_head_picks_the_first_tokens_of_each_document() -> None:
    assert HandMade().picked("head", 0.4) == [0, 1, 5, 6]


def test_random_depends_on_its_seed_only_and_picks_each_token_once() -> None:
    first = HandMade().picked("random", 0.5, seed=3)
    assert len(set(first)) == 5
    assert first == HandMade().picked("random", 0.5, seed=3)
    assert len({tuple(HandMade().picked("random", 0.5, seed=s)) for s in range(8)}) > 1


def test_deviation_picks_the_largest() -> None:
    assert HandMade(deviations={1: SCORES}).picked("deviation", 0.3) == [1, 3, 6]


def test_deviation_narrows_over_check_layers() -> None:
    """Token 9 leads at layer 3 but fell out at layer 1."""
    later = [5.0, 1.0, 0.0, 6.0, 0.0, 0.0, 0.0, 0.0, 7.0, 99.0]
    run = HandMade(deviations={1: [*SCORES[:9], 0.0], 3: later})
    assert run.picked("deviation", 0.2, ratios=(0.5, 0.2), check_layers=(1, 3)) == [3, 8]
    run = HandMade(deviations={1: [*SCORES[:9], 0.0], 3: later})
    assert run.picked("deviation", 0.2, check_layers=(1, 3)) == [1, 3], "one ratio serves all check layers"


def test_thresholds_drop_what_does_not_stand_out() -> None:
    run = HandMade(deviations={1: SCORES})  # mean 4.5
    assert run.picked("deviation", 0.5, thresholds=(1.7,)) == [1, 3]
    run = HandMade(deviations={1: SCORES})
    assert len(run.picked("deviation", 1.0, thresholds=(1.7,))) == 10, "ratio 1.0 recomputes everything"


def test_hybrid_takes_half_by_place_and_half_by_deviation() -> None:
    assert HandMade(deviations={1: SCORES}).picked("hybrid", 0.4) == [0, 1, 3, 5]


def test_query_divides_attention_by_the_distance() -> None:
    """Equal attention: nearer to the document's start wins; with power 0 the attention alone counts."""
    run = HandMade([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.8, 0.0, 0.0, 0.0])
    plain = {"first_share": 0}
    assert run.picked("query", 0.1, options=plain) == [6]  # 0.8 / 2 ** .5 = .566 > 1 / 5 ** .5 = .447
    assert run.picked("query", 0.1, options={**plain, "power": 0}) == [4]


def test_query_gives_a_share_of_the_budget_to_the_first_tokens_of_all_documents() -> None:
    """Evenly: of equally early ones the one with the larger score comes first; the rest goes by score."""
    run = HandMade([0.0, 0.1, 0.5, 0.5, 1.0, 0.05, 0.0, 0.0, 0.0, 0.9])
    third, most = {"first_share": 0.34, "power": 0}, {"first_share": 0.75, "power": 0}
    assert run.picked("query", 0.2, options=third) == [4, 9], "a third of two tokens is none"
    assert run.picked("query", 0.3, options=third) == [4, 5, 9]
    assert run.picked("query", 0.6, options=third) == [0, 2, 3, 4, 5, 9]
    assert run.picked("query", 0.4, options=most) == [0, 1, 4, 5], "both documents' first, then the better second"


def test_query_hands_its_options_over_and_skips_the_pass_when_all_are_wanted() -> None:
    run = HandMade()
    run.picked("query", 0.1, options={"rows": 7, "reduce": "mean", "combine": "mean", "first_layer": 2})
    assert run.asked == [{"rows": 7, "reduce": "mean", "combine": "mean", "first_layer": 2}]
    assert HandMade().picked("query", 1.0) == list(range(10))
    run = HandMade()
    assert run.picked("query", 1.0) == list(range(10))
    assert run.asked == []


def test_query_uses_the_stored_score_when_asked() -> None:
    """A token without a score counts with the mean of those that have one."""
    run = HandMade([1.0] * 10, stored=[1.0] * 8 + [9.0, NAN])
    assert run.picked("query", 0.1, options={"first_share": 0, "power": 0, "stored_power": 1}) == [8]
    assert run.picked("query", 0.2, options={"first_share": 0, "power": 0, "stored_power": 1}) == [8, 9]


def test_stored_ranks_by_the_kept_score() -> None:
    assert HandMade(stored=SCORES).picked("stored", 0.3) == [1, 3, 6]


def test_stored_puts_tokens_without_a_score_below_the_median() -> None:
    scores = [4.0, 9.0, 4.0, 8.0, 4.0, NAN, NAN, NAN, NAN, NAN]
    assert HandMade(stored=scores).picked("stored", 0.2) == [1, 3]
    assert HandMade(stored=scores).picked("stored", 0.6) == [0, 1, 2, 3, 4, 5]


def test_stored_without_any_score_takes_first_tokens() -> None:
    assert HandMade().picked("stored", 0.4) == [0, 1, 5, 6]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "nearest",
            {},
            r"selector 'nearest' is unknown: use one of deviation, head, hybrid, none, query, random, stored",
        ),
        ("query", {"row": 3}, r"selector 'query' has no option 'row': accepted are combine, first_layer, first_share"),
        ("head", {"rows": 3}, r"selector 'head' has no option 'rows': accepted are none"),
        ("query", {"reduce": "median"}, r"option reduce = 'median': use one of max, mean"),
        ("query", {"combine": "sum"}, r"option combine = 'sum': use one of mean, rms"),
        ("query", {"first_share": -1}, r"option first_share = -1: use a number from 0 to 1"),
        ("query", {"rows": 0}, r"option rows = 0: use a whole number from 1 to "),
        ("query", {"rows": "abc"}, r"option rows = 'abc': use a whole number from 1 to "),
        ("query", {"rows": 1.5}, r"option rows = 1.5: use a whole number from 1 to "),
        ("query", {"rows": 2**70}, r"option rows = \d+: use a whole number from 1 to "),
        ("query", {"first_share": 2**70}, r"option first_share = \d+: use a number from 0 to 1"),
        ("query", {"first_layer": -1}, r"option first_layer = -1: use a whole number from 0 to "),
        ("query", {"power": float("nan")}, r"option power = nan: use a number from -16 to 16"),
        ("query", {"power": "steep"}, r"option power = 'steep': use a number from -16 to 16"),
        ("query", {"stored_power": -1}, r"option stored_power = -1: use a number from 0 to 16"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SelectorError, match=message):
        make_selector(name, SelectorSettings(options=options))


@pytest.mark.parametrize("name", ["deviation", "hybrid"])
def test_layers_that_the_model_has_not_are_named(name: str) -> None:
    """At start, and not as a fallback of every prompt."""
    with pytest.raises(SelectorError, match=r"check layer 4: use 1\.\.3"):
        make_selector(name, SelectorSettings(check_layers=(4,), layers=4))
    make_selector(name, SelectorSettings(check_layers=(3,), layers=4))
    make_selector("query", SelectorSettings(check_layers=(4,), layers=4))
    make_selector("query", SelectorSettings(layers=1))
    with pytest.raises(SelectorError, match="first_layer = 4: use a whole number from 0 to 3"):
        make_selector("query", SelectorSettings(options={"first_layer": 4}, layers=4))


class Last:
    """A third party's selector: the last tokens, ``skip`` of them left out."""

    def __init__(self, settings: SelectorSettings) -> None:
        self._skip = int(settings.options.get("skip", 0))

    def select(self, run: Any, ratio: float) -> torch.Tensor:
        stop = len(run.candidates) - self._skip
        return torch.arange(stop - run.budget(ratio), stop)


@pytest.fixture
def registry() -> Iterator[None]:
    factories, options = dict(selectors._REGISTRY), dict(selectors._OPTIONS)
    yield
    selectors._REGISTRY.clear()
    selectors._OPTIONS.clear()
    selectors._REGISTRY.update(factories)
    selectors._OPTIONS.update(options)


@pytest.mark.usefixtures("registry")
def test_others_can_register_selectors() -> None:
    register_selector("last", Last, options=frozenset({"skip"}))
    assert "last" in selector_names()
    assert HandMade().picked("last", 0.2, options={"skip": 1}) == [7, 8]
    with pytest.raises(SelectorError, match="'last' has no option 'keep': accepted are skip"):
        make_selector("last", SelectorSettings(options={"keep": 1}))
    with pytest.raises(SelectorError, match="'last' is already registered"):
        register_selector("last", Last)


def test_selectors_are_found_as_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("final", f"{__name__}:Last", "blendstore.selectors")

    def entry_points(**wanted: Any) -> EntryPoints:
        return EntryPoints([point]).select(**wanted)

    monkeypatch.setattr(selectors, "entry_points", entry_points)
    assert "final" in selector_names()
    assert HandMade().picked("final", 0.2) == [8, 9]
