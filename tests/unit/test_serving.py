"""What serving adapters share: options out of a request's mapping, salts, the key of a kind of blend, the report."""

import pytest

from blendstore.config import Config
from blendstore.metrics import ServingMetrics
from blendstore.options import OptionError, RequestOptions
from blendstore.serving import Served, read_options, salted, settings, signature

CONFIG = Config.load(env={}, overrides={"enable_blending": True})


def test_options_are_read_from_their_key_alone() -> None:
    assert read_options(None) == RequestOptions()
    assert read_options({"other": 1}) == RequestOptions()
    assert read_options({"blendstore": {"ratio": 0.3}, "other": 1}).ratio == 0.3
    for wrong in (7, [0.3], "ratio"):
        with pytest.raises(OptionError, match="not a mapping"):
            read_options({"blendstore": wrong})
    with pytest.raises(OptionError, match="rati: no such option"):
        read_options({"blendstore": {"rati": 0.3}})


def test_a_kind_of_blend_is_known_by_all_that_changes_the_kv() -> None:
    def key(**options: object) -> str:
        return signature(settings(CONFIG, RequestOptions.parse(options)))

    assert key() == key() == key(selector=CONFIG.blend_selector)
    others = [
        key(ratio=0.3),
        key(selector="deviation"),
        key(selector_options={"rows": 8}),
        signature(settings(Config.load(env={}, overrides={"blend_drift_correction": False}), RequestOptions())),
    ]
    assert len({key(), *others}) == 5
    assert key(store=False) == key(tenant_salt="one") == key(), "these change who may use it, not what it is"


def test_salts_of_the_engine_and_of_the_options_are_told_apart() -> None:
    none = RequestOptions()
    assert salted(CONFIG, none, "", "") is none
    made = {
        salted(CONFIG, RequestOptions(tenant_salt=salt), *engine).tenant_salt
        for salt in (None, "a", "b")
        for engine in (("a",), ("b",), ("a", "b"), ("ab",), ('a", "b',))
    }
    assert len(made) == 15


def test_a_report_is_a_line_and_counts() -> None:
    metrics = ServingMetrics(prometheus=False)
    report = Served("r1", 100, 10, 20, 30, 5, 35, 12.34, "query 0.15", cut=3)
    metrics.served(report)
    metrics.event("cut", 2)
    metrics.event("cut", 0)
    assert report.line() == (
        "request r1: prompt 100, device prefix 10, exact 20, reused 30, recomputed 5, fresh 35, 3 behind the budget, "
        "12.3 ms (query 0.15)"
    )
    assert dict(metrics.counts) == {
        "prompts": 1, "blended": 1, "prefix": 10, "exact": 20, "reused": 30, "recomputed": 5, "fresh": 35, "cut": 2,
    }  # fmt: skip
