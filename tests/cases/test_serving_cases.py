"""Hostile requests to serving adapters: salts that read like others', and options that are none."""

from itertools import combinations

import pytest

from blendstore.config import Config
from blendstore.options import OptionError, RequestOptions
from blendstore.serving import read_options, salted

CONFIG = Config.load(env={})


def salt_of(salt: str | None, *engine: str) -> str | None:
    return salted(CONFIG, RequestOptions(tenant_salt=salt), *engine).tenant_salt


def test_case_s10_no_salt_of_a_request_reads_as_another_tenants_or_adapters() -> None:
    """A request that names another's combined salt as its own would write its KV where the other one reads."""
    others = [salt_of("a", "lora"), salt_of(None, "lora"), salt_of("a", "x", "y"), salt_of("[1]"), salt_of('["a"]')]
    forged = [salt_of(salt) for salt in others]
    plain = [salt_of("a"), salt_of("lora"), salt_of(None), salt_of("a", "", "lora")]
    for one, other in combinations([*others, *forged, *plain], 2):
        assert one != other


def test_the_configured_salt_of_a_deployment_is_framed_alike() -> None:
    config = Config.load(env={}, overrides={"tenant_salt": "[deployment]"})
    named = salted(CONFIG, RequestOptions(tenant_salt="[deployment]"))
    assert salted(config, RequestOptions()).tenant_salt == named.tenant_salt


@pytest.mark.parametrize("given", [5, "x" * 100_000, [1]])
def test_options_that_are_no_mapping_are_refused_in_few_words(given: object) -> None:
    with pytest.raises(OptionError) as caught:
        read_options({"blendstore": given})
    assert len(str(caught.value)) < 500
