"""Options of one request: parsing, errors that name the field, and what the configuration fills in."""

from typing import Any

import pytest

from blendstore.config import Config
from blendstore.forms import shown
from blendstore.options import OptionError, RequestOptions

CONFIG = Config(
    blend_selector="query",
    blend_selector_options={"rows": 32, "power": 0.25},
    blend_check_layers=(1, 4),
    blend_recompute_ratios=(0.3, 0.15),
    tenant_salt="house",
)


def test_nothing_given_means_the_configuration() -> None:
    for options in (RequestOptions.parse(None), RequestOptions.parse({}), RequestOptions()):
        assert (options.reuse, options.store) == (True, True)
        assert options.ratios(CONFIG) == (0.3, 0.15)
        resolved = options.resolved(CONFIG)
        assert resolved.selector == "query"
        assert resolved.selector_options == {"rows": 32, "power": 0.25}
        assert resolved.tenant_salt == "house"
    assert RequestOptions().resolved(Config()).tenant_salt is None


def test_everything_given_is_taken() -> None:
    options = RequestOptions.parse(
        {
            "ratio": "0.1",
            "selector": "query",
            "selector_options": "rows=8",
            "reuse": "no",
            "store": 0,
            "tenant_salt": "alice",
        }
    )
    assert options == RequestOptions(
        ratio=0.1, selector="query", selector_options={"rows": 8}, reuse=False, store=False, tenant_salt="alice"
    )
    resolved = options.resolved(CONFIG)
    assert resolved.selector_options == {"rows": 8, "power": 0.25}
    assert resolved.tenant_salt == "alice"
    assert options.ratios(CONFIG) == (0.1,)


def test_ratio_zero_is_a_ratio() -> None:
    assert RequestOptions(ratio=0).ratios(CONFIG) == (0.0,)


def test_options_of_the_configured_selector_do_not_reach_another() -> None:
    assert RequestOptions(selector="head").resolved(CONFIG).selector_options == {}
    assert RequestOptions(selector="head", selector_options={"n": 1}).resolved(CONFIG).selector_options == {"n": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ratio": 1.01}, "ratio: 1.01 is not a number from 0 to 1"),
        ({"ratio": "most"}, "ratio: 'most' is not a number from 0 to 1"),
        ({"ratio": True}, "ratio: True is not a number from 0 to 1"),
        ({"selector": 3}, "selector: 3 is not a text"),
        ({"selector": ""}, "selector: '' is no name"),
        ({"selector_options": 3}, "selector_options: 3 is not a mapping"),
        ({"reuse": "maybe"}, "reuse: 'maybe' is not true or false"),
        ({"reuse": None}, "reuse: None is not true or false"),
        ({"store": 7}, "store: 7 is not true or false"),
        ({"tenant_salt": ""}, "tenant_salt: '' would share with everybody"),
        ({"ration": 1}, "ration: no such option; the options are ratio, selector, selector_options, reuse, store, "),
        ({7: 1}, "7: no such option"),
    ],
)
def test_errors_name_the_field(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        RequestOptions.parse(given)
    assert str(caught.value).startswith(message)


def test_the_salt_is_shown_nowhere() -> None:
    assert "alice" not in repr(RequestOptions(tenant_salt="alice"))
    with pytest.raises(OptionError) as caught:
        RequestOptions.parse({"tenant_salt": ["alice"]})
    assert "alice" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratio", 10**400),
        ("ratio", 10**5000),
        ("reuse", 10**5000),
        ("store", "x" * 1_000_000),
        ("selector", "\ud800"),
        ("tenant_salt", "\ud800 alice"),
        ("selector_options", '{"a":' * 50_000),
        ("selector_options", {"power": float("nan")}),
        ("selector_options", '{"power": NaN}'),
        ("selector_options", "power=inf"),
        ("selector_options", {"power": 10**400}),
        ("selector_options", {"rows": True}),
        ("selector_options", {"reduce": "\ud800"}),
    ],
    ids=shown,
)
def test_hostile_values_are_refused_by_name_in_few_words(name: str, value: object) -> None:
    """Whatever a request's JSON can hold ends as an `OptionError`: anything else would end a serving engine."""
    with pytest.raises(OptionError) as caught:
        RequestOptions.parse({name: value})
    assert str(caught.value).startswith(f"{name}: ")
    assert len(str(caught.value)) < 500
    assert "alice" not in str(caught.value)


@pytest.mark.parametrize("given", [5, "ratio", ["ratio"], {"x" * 100_000: 1}, {10**5000: 1}], ids=shown)
def test_what_is_no_mapping_of_options_is_refused(given: Any) -> None:
    with pytest.raises(OptionError) as caught:
        RequestOptions.parse(given)
    assert len(str(caught.value)) < 500
