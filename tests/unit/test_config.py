"""Configuration: sources, their order, forced values, refusals, what is shown of it."""

import dataclasses
import json
import logging
import os
import pickle
from pathlib import Path

import pytest

from blendstore.config import Config, ConfigError
from blendstore.forms import shown

ROOT = Path(__file__).parents[2]


def write(folder: Path, content: str) -> Path:
    file = folder / "blendstore.yaml"
    file.write_text(content, encoding="utf-8")
    return file


def test_defaults_are_the_documented_ones() -> None:
    config = Config.load(env={})
    assert (config.chunk_size, config.local_cpu, config.max_local_cpu_size) == (256, True, 5.0)
    assert (config.cache_policy, config.save_unfull_chunk) == ("adaptive", False)
    assert (config.enable_blending, config.use_layerwise, config.blend_special_str) == (False, False, " # # ")
    assert (config.blend_check_layers, config.blend_recompute_ratios, config.blend_thresholds) == ((1,), (0.15,), None)
    assert (config.blend_min_tokens, config.blend_selector, config.blend_selector_options) == (32, "query", {})
    assert (config.blend_drift_correction, config.capture, config.segmenter) == (True, "in_context", "auto")
    assert (config.tenant_salt, config.warnings) == ("", ())
    assert set(config.origins.values()) == {"default"}


def test_sizes_are_binary_as_in_the_reference() -> None:
    assert Config(max_local_cpu_size=1.5).max_local_cpu_bytes == 3 * 2**29


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quick_start", {"chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 10.0}),
        ("plain_cache", {"max_local_cpu_size": 60.0, "enable_blending": False, "save_unfull_chunk": False}),
        ("blending", {"max_local_cpu_size": 60.0, "enable_blending": True, "blend_special_str": " # # "}),
    ],
)
def test_the_example_files_are_accepted_unchanged(name: str, expected: dict[str, object]) -> None:
    config = Config.load(ROOT / "configs" / f"{name}.yaml", env={})
    assert config.warnings == ()
    assert {key: getattr(config, key) for key in expected} == expected


def test_later_sources_win_and_each_value_knows_where_it_comes_from(tmp_path: Path) -> None:
    file = write(tmp_path, "chunk_size: 64\nblend_min_tokens: 40\ncapture: isolated\nblend_selector: head\n")
    env = {
        "BLENDSTORE_CONFIG_FILE": str(file),
        "LMCACHE_BLEND_MIN_TOKENS": "41",
        "LMCACHE_CAPTURE": "in_context",
        "BLENDSTORE_CAPTURE": "isolated",
        "BLENDSTORE_BLEND_SELECTOR": "stored",
    }
    config = Config.load(env=env, overrides={"blend_selector": "random"})
    assert (config.chunk_size, config.origins["chunk_size"]) == (64, f"file {file}")
    assert (config.blend_min_tokens, config.origins["blend_min_tokens"]) == (41, "env LMCACHE_BLEND_MIN_TOKENS")
    assert (config.capture, config.origins["capture"]) == ("isolated", "env BLENDSTORE_CAPTURE")
    assert (config.blend_selector, config.origins["blend_selector"]) == ("random", "argument")
    assert config.origins["max_local_cpu_size"] == "default"


def test_equal_values_from_two_sources_need_no_warning(tmp_path: Path) -> None:
    file = write(tmp_path, "blend_recompute_ratios: [0.1]\n")
    assert Config.load(file, env={"BLENDSTORE_BLEND_RECOMPUTE_RATIOS": "0.1"}).warnings == ()


def test_a_bad_value_is_an_error_even_where_another_source_wins(tmp_path: Path) -> None:
    file = write(tmp_path, "chunk_size: many\n")
    with pytest.raises(ConfigError, match=r"chunk_size: 'many' \(file .*blendstore.yaml\) is not a whole number"):
        Config.load(file, env={"BLENDSTORE_CHUNK_SIZE": "128"})


def test_the_file_of_blendstore_goes_before_that_of_lmcache(tmp_path: Path) -> None:
    file = write(tmp_path, "chunk_size: 64\n")
    other = tmp_path / "other.yaml"
    other.write_text("chunk_size: 32\n")
    env = {"LMCACHE_CONFIG_FILE": str(other)}
    assert Config.load(env=env).chunk_size == 32
    config = Config.load(env={**env, "BLENDSTORE_CONFIG_FILE": str(file)})
    assert config.chunk_size == 64
    assert "BLENDSTORE_CONFIG_FILE) wins over" in config.warnings[0]
    assert Config.load(other, env={"BLENDSTORE_CONFIG_FILE": "/not/read"}).chunk_size == 32


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("- a\n- b\n", "holds list"),
        ("just words\n", "holds str"),
        ("1: 2\n", "holds dict"),
        ("chunk_size: [1\n", "line 2"),
        ("chunk_size: 1\nchunk_size: 2\n", "line 2: key 'chunk_size' is given twice"),
        ("chunk_size: !!python/object/apply:os.getcwd []\n", "line 1"),
        ("\x00", "not YAML|special characters|unacceptable"),
    ],
)
def test_files_that_hold_no_configuration_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Config.load(write(tmp_path, content), env={})
    assert "configuration file" in str(caught.value)


def test_unreadable_files_are_refused_and_empty_ones_are_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        Config.load(tmp_path / "missing.yaml", env={})
    (tmp_path / "latin.yaml").write_bytes(b"capture: \xff\n")
    with pytest.raises(ConfigError, match="can't be read"):
        Config.load(tmp_path / "latin.yaml", env={})
    assert Config.load(write(tmp_path, "# nothing\n"), env={}) == Config.load(env={})


def test_blending_forces_what_it_needs(caplog: pytest.LogCaptureFixture) -> None:
    config = Config.load(env={}, overrides={"enable_blending": True})
    assert config.use_layerwise
    assert config.save_unfull_chunk
    assert config.origins["use_layerwise"] == config.origins["save_unfull_chunk"] == "forced by enable_blending"
    assert config.warnings == ()
    with caplog.at_level(logging.WARNING, logger="blendstore.config"):
        forced = Config.load(env={"BLENDSTORE_SAVE_UNFULL_CHUNK": "no"}, overrides={"enable_blending": True})
    assert forced.save_unfull_chunk
    assert forced.warnings == (
        "save_unfull_chunk: true, forced by enable_blending, wins over false (env BLENDSTORE_SAVE_UNFULL_CHUNK)",
    )
    assert forced.warnings[0] in caplog.text


def test_direct_construction_is_checked_the_same_way() -> None:
    config = Config(enable_blending=True, chunk_size=64, blend_recompute_ratios="0.3")  # type: ignore[arg-type]
    assert config.blend_recompute_ratios == (0.3,)
    assert config.save_unfull_chunk
    assert config.origins["chunk_size"] == "argument"
    assert dataclasses.replace(config, chunk_size=32).chunk_size == 32
    with pytest.raises(ConfigError, match="chunk_size"):
        Config(chunk_size=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.chunk_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"chunk_size": 0}, "whole number from 1"),
        ({"chunk_size": -256}, "whole number from 1"),
        ({"chunk_size": True}, "whole number"),
        ({"chunk_size": 2.5}, "whole number"),
        ({"max_local_cpu_size": -1}, "number above 0"),
        ({"max_local_cpu_size": 0}, "number above 0"),
        ({"max_local_cpu_size": "nan"}, "number above 0"),
        ({"max_local_cpu_size": float("inf")}, "number above 0"),
        ({"max_local_cpu_size": [5]}, "number above 0"),
        ({"max_local_cpu_size": None}, "number above 0"),
        ({"cache_policy": "mru"}, "one of adaptive, fifo, lfu, lru, s3-fifo, sieve"),
        ({"cache_policy": ["lru"]}, "one of"),
        ({"pre_caching_hash_algorithm": "md5"}, "one of blake3"),
        ({"blend_recompute_ratios": 1.5}, "from 0 to 1"),
        ({"blend_recompute_ratios": -0.1}, "from 0 to 1"),
        ({"blend_recompute_ratios": []}, "a number, a list or a comma string"),
        ({"blend_check_layers": 0}, "from 1 to"),
        ({"blend_check_layers": [1.5]}, "whole number"),
        ({"blend_thresholds": -1}, "at least 0"),
        ({"blend_min_tokens": 0}, "from 1 to"),
        ({"blend_special_str": 7}, "a text"),
        ({"blend_selector_options": [1]}, "a mapping"),
        ({"blend_selector_options": {"rows": None}}, "a mapping"),
        ({"blend_selector_options": {1: 2}}, "a mapping"),
        ({"blend_selector_options": "rows"}, "a mapping"),
        ({"blend_selector_options": "{rows"}, "a mapping"),
        ({"capture": "always"}, "one of in_context, isolated"),
        ({"segmenter": "none"}, "one of auto"),
        ({"p2p_init_ports": 70000}, "from 1 to 65535"),
    ],
)
def test_wrong_values_are_refused_with_the_accepted_form(given: dict[str, object], accepted: str) -> None:
    with pytest.raises(ConfigError, match=accepted) as caught:
        Config.load(env={}, overrides=given)
    assert str(caught.value).startswith(next(iter(given)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"local_cpu": False}, "leaves nowhere to store.*local_disk"),
        ({"blend_check_layers": [1, 4, 8], "blend_recompute_ratios": [0.3, 0.2]}, "has 2 values.*has 3"),
        ({"blend_check_layers": [4, 1]}, "must ascend"),
        ({"blend_check_layers": [1, 1]}, "must ascend"),
        ({"blend_check_layers": [1, 4], "blend_recompute_ratios": [0.1, 0.3]}, "grows"),
        ({"blend_thresholds": [1, 2, 3]}, "blend_thresholds.*has 3 values"),
        ({"segmenter": "separator", "blend_special_str": ""}, "no visible character"),
        ({"segmenter": "separator", "blend_special_str": " \n"}, "no visible character"),
        ({"enable_blending": True, "blend_special_str": ""}, "no visible character.*segmenter: matcher"),
        ({"enable_blending": True, "segmenter": "whole"}, "nothing to reuse"),
        ({"blend_selector": " "}, "no name"),
        ({"enable_p2p": True, "enable_pd": True}, "exclude each other"),
    ],
)
def test_impossible_combinations_are_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Config.load(env={}, overrides=given)


def test_possible_combinations_are_accepted() -> None:
    many = Config(blend_check_layers=(1, 4), blend_recompute_ratios=(0.3, 0.15), blend_thresholds=(2.0,))
    assert many.blend_check_layers == (1, 4)
    assert Config(blend_check_layers=(1, 4)).blend_recompute_ratios == (0.15,)
    assert Config(enable_blending=True, segmenter="matcher", blend_special_str="").blend_special_str == ""


def test_selector_options_in_every_way_of_writing_them() -> None:
    for written in ({"rows": 32, "power": 0.25, "reduce": "max"}, "rows=32, power=0.25, reduce=max"):
        config = Config.load(env={}, overrides={"blend_selector_options": written})
        assert config.blend_selector_options == {"rows": 32, "power": 0.25, "reduce": "max"}
    config = Config.load(env={"BLENDSTORE_BLEND_SELECTOR_OPTIONS": '{"rows": 8}'})
    assert config.blend_selector_options == {"rows": 8}


@pytest.mark.parametrize(
    ("policy", "read"),
    [
        ("Adaptive", "adaptive"),
        ("LRU", "lru"),
        ("LFU", "lfu"),
        ("FIFO", "fifo"),
        ("S3FIFO", "s3-fifo"),
        ("Sieve", "sieve"),
    ],
)
def test_policies_keep_the_references_names(policy: str, read: str) -> None:
    assert Config(cache_policy=policy).cache_policy == read


ON = {
    "save_decode_cache": True,
    "enable_p2p": True,
    "p2p_host": "10.0.0.1",
    "p2p_init_ports": [8200],
    "p2p_lookup_ports": [8201],
    "lookup_url": "localhost:8100",
    "distributed_url": "localhost:8200",
    "transfer_channel": "nixl",
    "nixl_backends": ["UCX"],
    "enable_pd": True,
    "pd_role": "sender",
    "pd_buffer_size": 1073741824,
    "pd_buffer_device": "cuda",
    "numa_mode": "auto",
    "extra_config": {"gpu_to_numa_mapping": {"0": 0}},
    "internal_api_server_enabled": True,
    "internal_api_server_port_start": 7000,
    "enable_controller": True,
    "gds_path": "/mnt/gds",
    "use_gds": False,
    "lookup_timeout_ms": 10,
    "enable_async_loading": "yes",
}


@pytest.mark.parametrize("name", ON)
def test_features_that_are_not_built_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="not available in this version") as caught:
        Config.load(env={}, overrides={name: ON[name]})
    assert str(caught.value).startswith(f"{name}: ")


def test_features_that_are_not_built_are_accepted_switched_off(tmp_path: Path) -> None:
    lines = [
        "save_decode_cache: False",
        "local_disk: null",
        "max_local_disk_size: 0",
        "enable_p2p: off",
        "enable_pd: False",
        "numa_mode:",
        "extra_config:",
        "internal_api_server_enabled: no",
        "internal_api_server_port_start: 6999",
        "enable_controller: False",
        "gds_path: null",
        "use_gds: True",
        "lookup_timeout_ms: 3000",
    ]
    config = Config.load(write(tmp_path, "\n".join(lines)), env={"LMCACHE_ENABLE_ASYNC_LOADING": "0"})
    assert config == Config.load(env={})
    assert config.warnings == ()


def test_a_variable_that_looks_like_a_misspelt_key_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = Config.load(env={"BLENDSTORE_CHUNK_SIZ": "64", "BLENDSTORE_BENCH_HOME": "/x", "LMCACHE_LOG_LEVEL": "INFO"})
    assert len(config.warnings) == 1
    assert "BLENDSTORE_CHUNK_SIZ names no key" in config.warnings[0]
    assert "did you mean BLENDSTORE_CHUNK_SIZE?" in caplog.text


def test_description_shows_every_key_with_its_origin() -> None:
    config = Config.load(env={"BLENDSTORE_CHUNK_SIZE": "64"}, overrides={"enable_blending": "on"})
    lines = config.describe().splitlines()
    assert lines[0].split() == ["key", "value", "origin"]
    by_key = {line.split()[0]: line for line in lines[1:]}
    assert set(by_key) == set(config.as_dict()) == set(config.origins)
    assert by_key["chunk_size"].split() == ["chunk_size", "64", "env", "BLENDSTORE_CHUNK_SIZE"]
    assert by_key["use_layerwise"].endswith("forced by enable_blending")
    assert "  ' # # '  " in by_key["blend_special_str"]
    assert json.loads(json.dumps(config.as_dict()))["blend_recompute_ratios"] == [0.15]
    assert repr(config) == "Config(chunk_size=64, save_unfull_chunk=true, enable_blending=true, use_layerwise=true)"


def test_the_salt_is_shown_nowhere() -> None:
    config = Config.load(env={"BLENDSTORE_TENANT_SALT": "s3cret", "LMCACHE_TENANT_SALT": "other-s3cret"})
    assert config.tenant_salt == "s3cret"
    shown = [config.describe(), repr(config), str(config), json.dumps(config.as_dict()), *config.warnings]
    assert not any("s3cret" in text for text in shown)
    assert config.as_dict(redact=False)["tenant_salt"] == "s3cret"
    with pytest.raises(ConfigError) as caught:
        Config(tenant_salt=12345)  # type: ignore[arg-type]
    assert "12345" not in str(caught.value)


def test_configurations_travel_to_other_processes() -> None:
    config = Config.load(env={"BLENDSTORE_CHUNK_SIZE": "64"})
    copy = pickle.loads(pickle.dumps(config))  # noqa: S301 - our own bytes
    assert copy == config
    assert copy.origins == config.origins


@pytest.mark.parametrize(
    "content",
    [
        "chunk_size: 2020-13-45",
        "chunk_size: !!int ''",
        "chunk_size: !!bool x",
        "chunk_size: !!timestamp x",
        "chunk_size: 0x" + "f" * 10_000,
        "chunk_size: " + "9" * 5_000,
        "mp_port: 0x" + "f" * 10_000,
        "? [a]\n: b",
        "- " * 3_000 + "x",
        "extra_config: &a {b: *a}",
        "extra_config: {a: &a [1, 1], b: [*a, *a]}",
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, content: str) -> None:
    """Values that the YAML library itself stumbles over, and aliases, with which a few lines stand for gigabytes."""
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        Config.load(file, env={})
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("name", list(Config.load(env={}).origins))
@pytest.mark.parametrize("value", [10**5000, "\ud800", '{"a":' * 50_000, "x" * 100_000], ids=shown)
def test_hostile_values_are_refused_by_name_in_few_words(name: str, value: object) -> None:
    try:
        config = Config.load(env={}, overrides={name: value})
    except ConfigError as error:
        assert name in str(error)
        assert len(str(error)) < 1_000
    else:  # a text of any length is a text
        assert isinstance(getattr(config, name), str)
        assert len(config.describe()) < 20_000


@pytest.mark.parametrize(
    "given",
    [
        {"max_local_cpu_size": 1e308},
        {"max_local_cpu_size": 10**400},
        {"max_local_cpu_size": 1e-12},
        {"blend_min_tokens": 10**30},
        {"blend_check_layers": 10**30},
        {"system_segments": 10**5000},
        {"blend_selector_options": "power=nan"},
        {"max_local_disk_size": 1e300, "local_disk": "/x"},
        {"tier_wait_ms": 1e308},
        {"chunk_size": "2_56"},
        {"chunk_size": "\u0663"},
        {"blend_recompute_ratios": "0.1_5"},
    ],
    ids=shown,
)
def test_numbers_that_nothing_can_run_with_are_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        Config.load(env={}, overrides=given)


@pytest.mark.parametrize("file", ["~nobody-of-that-name/c.yaml", "a\0b"])
def test_impossible_places_of_the_file_are_refused(file: str) -> None:
    with pytest.raises(ConfigError, match="configuration file"):
        Config.load(file, env={})


def test_a_configuration_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A pipe would be waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path):
        with pytest.raises(ConfigError, match="is no file"):
            Config.load(env={"BLENDSTORE_CONFIG_FILE": str(place)})
