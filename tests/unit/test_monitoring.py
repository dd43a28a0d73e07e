"""The dashboard and the alerts ask for series that are exported, by labels and values that these have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from blendstore import metrics

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
ADDED = {"job", "instance", "le"}
"""Labels of Prometheus itself, and of histograms."""
EVENTS = {
    name
    for folder in ("python", "adapters")
    for path in (FOLDER.parents[1] / folder).rglob("*.py")
    for name in re.findall(r'event\("(\w+)"', path.read_text(encoding="utf-8"))
}
VALUES = {
    "kind": set(metrics.KINDS),
    "outcome": {"blended", "exact", "computed"},
    "gauge": {*metrics._STORE_GAUGES, *metrics._TIER_GAUGES},
    "event": {*EVENTS, *metrics._STORE_COUNTERS, "bytes_read", "error_timeout"},
}


def expressions() -> Iterator[Any]:
    board = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m")
            yield pytest.param(text, id=f"{panel['title']} {target['refId']}")
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
    for rule in rules["groups"][0]["rules"]:
        yield pytest.param(rule["expr"], id=rule["alert"])


def selected(expression: Any) -> Iterator[Any]:
    """The vector selectors in a parsed expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (part := getattr(expression, name, None)) is not None:
            yield from selected(part)
    for part in getattr(expression, "args", None) or []:
        yield from selected(part)


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Labels by the names that a scrape shows."""
    found: dict[str, set[str]] = {}
    for collector in metrics._registered().values():
        (family,) = collector.describe()
        ending = {"counter": "_total", "histogram": "_bucket", "gauge": ""}[family.type]
        found[family.name + ending] = set(collector._labelnames)
    return found


@pytest.mark.parametrize("text", list(expressions()))
def test_what_is_asked_for_is_exported(text: str, series: dict[str, set[str]]) -> None:
    chosen = list(selected(promql_parser.parse(text)))
    assert chosen
    for selector in chosen:
        assert selector.name in series
        for matcher in selector.matchers.matchers:
            assert matcher.name in series[selector.name] | ADDED
            for value in matcher.value.split("|") if matcher.name in VALUES else ():
                assert any(re.fullmatch(value, known) for known in VALUES[matcher.name]), value
    for by in re.findall(r"by \(([^)]*)\)", text):
        for label in by.split(", "):
            assert all(label in series[selector.name] | ADDED for selector in chosen)


def test_panels_have_places_and_words_of_their_own() -> None:
    board = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["description"] and panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
