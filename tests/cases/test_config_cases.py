"""Cases o01 and o02 from the field: what people write into a configuration."""

from pathlib import Path

import pytest

from blendstore.config import Config, ConfigError, redact
from blendstore.forms import Rejected, local_path

SECRET_URL = "rediss://user:p%40ss@host:6380/0"


@pytest.mark.parametrize("source", ["file", "env", "argument"])
@pytest.mark.parametrize(
    ("written", "meant"),
    [(word, True) for word in ("true", "True", "TRUE", "1", "yes", "on")]
    + [(word, False) for word in ("false", "False", "0", "no", "off")],
)
def test_case_o01_booleans_mean_the_same_everywhere(tmp_path: Path, source: str, written: str, meant: bool) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"enable_blending: {written}\n" if source == "file" else "")
    config = Config.load(
        file,
        env={"BLENDSTORE_ENABLE_BLENDING": written} if source == "env" else {},
        overrides={"enable_blending": written} if source == "argument" else {},
    )
    assert config.enable_blending is meant


@pytest.mark.parametrize("junk", ["maybe", "2", "", "tru", "None", "yes please", "-1", "1.0"])
@pytest.mark.parametrize("source", ["file", "env"])
def test_case_o01_junk_booleans_are_errors(tmp_path: Path, source: str, junk: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"enable_blending: {junk}\n" if source == "file" else "")
    with pytest.raises(ConfigError, match=r"^enable_blending: .* is not true or false"):
        Config.load(file, env={"LMCACHE_ENABLE_BLENDING": junk} if source == "env" else {})


@pytest.mark.parametrize(
    ("written", "ratios"),
    [
        ("0.15", (0.15,)),
        ('"0.15"', (0.15,)),
        ("[0.15]", (0.15,)),
        ('"0.15,0.1"', (0.15, 0.1)),
        ("0.15,0.1", (0.15, 0.1)),
        ('["0.15", 0.1]', (0.15, 0.1)),
        ("0", (0.0,)),
        ("1", (1.0,)),
    ],
)
def test_case_o01_ratios_as_number_list_or_comma_string(
    tmp_path: Path, written: str, ratios: tuple[float, ...]
) -> None:
    file = tmp_path / "c.yaml"
    layers = list(range(1, len(ratios) + 1))
    file.write_text(f"blend_recompute_ratios: {written}\nblend_check_layers: {layers}\n")
    assert Config.load(file, env={}).blend_recompute_ratios == ratios


@pytest.mark.parametrize("written", ["1,4", "[1, 4]", '"1, 4"', '["1", 4]'])
def test_case_o01_check_layers_as_list_or_comma_string(tmp_path: Path, written: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"blend_check_layers: {written}\n")
    assert Config.load(file, env={}).blend_check_layers == (1, 4)
    assert Config.load(env={"LMCACHE_BLEND_CHECK_LAYERS": "1,4"}).blend_check_layers == (1, 4)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("chunk_sise", "did you mean chunk_size?"),
        ("blend_recompute_ratio", "did you mean blend_recompute_ratios?"),
        ("max_local_cpu", "did you mean max_local_cpu_size?"),
        ("zzz", "`blendstore config show` lists the keys"),
    ],
)
def test_case_o01_unknown_keys_are_errors_with_the_nearest_name(tmp_path: Path, wrong: str, near: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"{wrong}: 7\n")
    with pytest.raises(ConfigError) as caught:
        Config.load(file, env={})
    assert str(caught.value) == f"{wrong}: 7 (file {file}): no such key; {near}"


def test_case_o01_key_in_file_and_environment_warns_and_names_the_winner(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("chunk_size: 256\n")
    config = Config.load(file, env={"BLENDSTORE_CHUNK_SIZE": "128", "LMCACHE_CHUNK_SIZE": "64"})
    assert config.chunk_size == 128
    assert config.warnings == (
        f"chunk_size: 64 (env LMCACHE_CHUNK_SIZE) wins over 256 (file {file})",
        "chunk_size: 128 (env BLENDSTORE_CHUNK_SIZE) wins over 64 (env LMCACHE_CHUNK_SIZE)",
    )


HOME = {"HOME": "/home/ada", "DATA": "/data/50% full", "EMPTY": ""}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("/x", "/x"),
        ("file:///x", "/x"),
        ("file:///x%20y", "/x y"),
        ("/x%20y", "/x%20y"),
        ("~/x", "/home/ada/x"),
        ("~", "/home/ada"),
        ("$HOME/x", "/home/ada/x"),
        ("${HOME}/x", "/home/ada/x"),
        ("file://$HOME/x", "/home/ada/x"),
        ("file://$DATA", "/data/50% full"),
        ("$DATA", "/data/50% full"),
    ],
)
def test_case_o02_each_way_of_writing_a_path_has_one_meaning(written: str, meant: str) -> None:
    assert local_path(HOME).read(written) == Path(meant)
    assert local_path(HOME).read(Path(meant)) == Path(meant)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("file://x", "'x' stands where a host does"),
        ("file://~/x", "'~' stands where a host does"),
        ("file://localhost/x", "'localhost' stands where a host does"),
        ("x/y", "relative"),
        ("./x", "relative"),
        ("~bob/x", "relative"),
        ("", "relative"),
        ("$NOWHERE/x", "NOWHERE is not set"),
        ("$EMPTY/x", "EMPTY is not set"),
    ],
)
def test_case_o02_paths_with_two_meanings_are_errors(written: str, reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        local_path(HOME).read(written)


@pytest.mark.parametrize("wrong", [7, "/x\0y"])
def test_case_o02_what_is_no_path_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        local_path(HOME).read(wrong)


def test_case_o02_the_reason_reaches_the_user() -> None:
    with pytest.raises(ConfigError, match=r"local_disk: 'x/y' \(argument\) is not an absolute directory.*relative"):
        Config.load(env={}, overrides={"local_disk": "x/y"})
    size = {"max_local_disk_size": 1}
    several = Config.load(env={"HOME": "/home/u"}, overrides={"local_disk": "file:///x, /y", **size})
    assert several.local_disk == (Path("/x"), Path("/y"))
    with pytest.raises(ConfigError, match=r"local_disk: 'file://x' .*host.*three slashes"):
        Config.load(env={}, overrides={"local_disk": "file://x", **size})
    with pytest.raises(ConfigError, match="names a directory twice"):
        Config.load(env={}, overrides={"local_disk": ["/x", "file:///x"], **size})
    with pytest.raises(ConfigError, match=r"max_local_disk_size: 0\.0 GiB is no room for local_disk /x"):
        Config.load(env={}, overrides={"local_disk": "/x"})


def test_case_o02_passwords_in_urls_are_redacted_in_every_error(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for content in (
        f"remote_url: {SECRET_URL}/x\n",
        f"remote_uri: {SECRET_URL}\n",
        f"chunk_size: {SECRET_URL}\n",
        f"remote_url: {SECRET_URL}\nbroken: [\n",
        f"extra_config:\n  nested: [{SECRET_URL}]\n",
        f"external_lookup_client: {SECRET_URL}\n",
        f"{SECRET_URL}: 1\n{SECRET_URL}: 2\n",
        f"'{SECRET_URL}': 1\n",
        f"tenant_sald: {SECRET_URL}\n",
    ):
        file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            Config.load(file, env={})
        assert "p%40ss" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"rediss://user:\*\*\*@host:6380/0"):
        Config.load(env={"LMCACHE_REMOTE_URL": SECRET_URL + "/x"})


@pytest.mark.parametrize(
    "mistyped",
    [
        "redis://SECRET@host",
        "redis//:SECRET@host",
        "redis:/u:SECRET@host",
        "u:SECRET@host:6379",
        "redis://u:SEC RET@host",
        "redis://host?pasword=SECRET",
        "redis://u:SECRET?x@host",
        "redis://u:SECREThost:6379",
    ],
)
def test_case_o02_a_mistyped_url_shows_no_secret(mistyped: str) -> None:
    for key in ("remote_url", "remote_ur", "lookup_url", "audit_actual_remote_url"):
        with pytest.raises(ConfigError) as caught:
            Config.load(env={}, overrides={key: mistyped})
        assert "SEC" not in str(caught.value)
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (SECRET_URL, "rediss://user:***@host:6380/0"),
        ("redis://:pass@host:1", "redis://:***@host:1"),
        ("redis://u:p@ss/w@host", "redis://u:***@host"),
        ("redis://host:6379", "redis://host:6379"),
        ("redis://secret@host", "redis://:***@host"),
        ("s3://b/k?token=abc&x=1", "s3://b/k?token=***&x=1"),
        ("http://h/?API_KEY=abc", "http://h/?API_KEY=***"),
        ("redis://:pass-host:6379/0", "redis://:***/0"),
        ("['redis://u:passhost']", "['redis://u:***']"),
        ("redis-cluster://a:1,b:2/", "redis-cluster://a:1,b:2/"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("plain text", "plain text"),
    ],
)
def test_case_o02_redaction(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_a_character_beyond_unicode_is_told_of_its_file(tmp_path: Path) -> None:
    """YAML's escapes have room for numbers that no character has."""
    file = tmp_path / "c.yaml"
    file.write_text('chunk_size: "\\UFFFFFFFF"\n')
    with pytest.raises(ConfigError, match="can't be read as YAML"):
        Config.load(file, env={})
