"""The remote tier end to end: engines that share documents through a real Redis, and what faults cost them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blendstore import Namespace, Store
from blendstore._core import StoreError, Tier
from blendstore.config import Config, ConfigError
from blendstore.tiers import open_store
from tests.records import BYTES_PER_TOKEN, CHUNK, contents, keys_of, look, put, tenant, text
from tests.servers import Redis, eventually

NS = tenant()
TOKENS = text(1, 2 * CHUNK + 5)
RESIDENT, LOADED, MISSED = b"\1\1\1", b"\2\2\2", b"\3\3\3"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.stop()


def opened(url: str, *, timeout_ms: int = 20_000) -> Store:
    return Store(capacity_bytes=1 << 20, chunk_size=CHUNK, tiers=[Tier.remote(url, timeout_ms=timeout_ms)])


def keys(namespace: Namespace = NS) -> bytes:
    return namespace.chain_keys(TOKENS, chunk_size=CHUNK)


def stored(store: Store, namespace: Namespace = NS) -> None:
    put(store, namespace, TOKENS, fill=7)
    assert store.flush(30)


def loaded(store: Store, namespace: Namespace = NS, wait: float = 60) -> bytes:
    with store.prefetch(namespace, keys(namespace)) as ticket:
        ticket.wait(wait)
        return ticket.outcomes


def test_two_stores_share_records_through_redis(redis: Redis) -> None:
    one, two = opened(redis.url), opened(redis.url)
    stored(one)
    ticket = two.prefetch(NS, keys())
    assert ticket.wait(60)
    assert ticket.outcomes == LOADED
    with look(two, NS, TOKENS) as lease:
        assert contents(lease) == [bytes([7]) * BYTES_PER_TOKEN * count for count in (CHUNK, CHUNK, 5)]
    eventually(lambda: two.tier_stats()["redis"]["hits"] == 3)
    one.close()
    two.close()


def test_case_s13_tenants_share_nothing_through_redis(redis: Redis) -> None:
    one, two = opened(redis.url), opened(redis.url)
    stored(one, tenant("a"))
    assert loaded(two, tenant("b")) == MISSED
    assert loaded(two, tenant("a")) == LOADED
    # Even where somebody with the server's password puts a record under the other tenant's name.
    for theirs, ours in zip(keys_of(keys(tenant("a"))), keys_of(keys(tenant("b"))), strict=True):
        assert redis.say("COPY", f"blendstore:1:{theirs.hex()}", f"blendstore:1:{ours.hex()}") == b":1\r\n"
    assert loaded(two, tenant("b")) == MISSED
    eventually(lambda: two.tier_stats()["redis"].get("error_identity") == 3)


def test_case_f08_a_paused_or_restarted_redis_costs_bounded_time_and_needs_no_help(redis: Redis) -> None:
    one, two = opened(redis.url), opened(redis.url, timeout_ms=300)
    stored(one)
    redis.signal(signal.SIGSTOP)
    since = time.monotonic()
    assert loaded(two) == MISSED
    assert time.monotonic() - since < 10, "a call of the tier ends by its time-out"
    redis.signal(signal.SIGCONT)
    eventually(lambda: loaded(two) == LOADED)
    redis.stop()
    assert loaded(opened(redis.url, timeout_ms=300)) == MISSED
    redis.start()
    two.clear()

    def shared_again() -> bool:
        one.clear(tenant("again"))
        stored(one, tenant("again"))
        return loaded(two, tenant("again")) == LOADED

    eventually(shared_again)
    assert sum(count for name, count in two.tier_stats()["redis"].items() if name.startswith("error_")) > 0


def test_case_f08_an_engine_waits_no_longer_than_it_wants_to(redis: Redis) -> None:
    store = opened(redis.url, timeout_ms=60_000)
    redis.signal(signal.SIGSTOP)
    since = time.monotonic()
    assert loaded(store, wait=0.05) == b"\0\0\0"
    assert time.monotonic() - since < 10
    redis.signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis:/host", "begins with none of"),
        ("lm://host:1", "its scheme is none of"),
        ("rediss://user:s3cret@host:0", "1 to 65535"),
        ("redis://user:s3/cret@host", "%40"),
        ("file://host/s3cret", "three slashes"),
        ("redis-sentinel://h/m?sentinel_password=s3cret&x=1", "no option x"),
    ],
)
def test_case_o02_a_wrong_url_is_refused_at_start_and_its_secret_stays_one(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(env={"BLENDSTORE_REMOTE_URL": url})
    text = str(caught.value)
    assert text.startswith("remote_url: ")
    assert says in text
    assert "s3cret" not in text.replace("host/s3cret", "")
    with pytest.raises(StoreError, match="remote_url") as refused:
        Tier.remote(url)
    assert says in str(refused.value)
    assert "s3cret" not in str(refused.value).replace("host/s3cret", "")


def test_case_o02_passwords_are_shown_nowhere(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    url = f"redis://user:p%40ss@127.0.0.1:{redis.port}/0"
    config = Config(remote_url=url, remote_timeout_ms=500, max_local_cpu_size=0.01, chunk_size=CHUNK)
    store = open_store(config)
    stored(store)
    assert loaded(store) == RESIDENT
    eventually(lambda: store.tier_stats()["redis"].get("error_login", 0) > 0)
    told = [config.describe(), repr(config), str(config.as_dict()), repr(store), repr(Tier.remote(url)), caplog.text]
    assert all("p%40ss" not in text and "p@ss" not in text for text in told)
    assert "user:***@" in told[0]
    store.close()


def test_missing_tls_files_are_told_at_start() -> None:
    config = Config(remote_url="rediss://:s3cret@localhost?ca=/nowhere/ca.pem", max_local_cpu_size=0.01)
    with pytest.raises(ConfigError, match=r"option ca: /nowhere/ca\.pem") as caught:
        open_store(config)
    assert "s3cret" not in str(caught.value)


def test_case_o05_no_connection_but_to_the_named_host(redis: Redis, tmp_path: Path) -> None:
    """Every connect of a process with a remote tier, traced from inside: proxies and credentials services of the
    environment are not asked."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        place = f"http://127.0.0.1:{elsewhere.getsockname()[1]}"
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy", "AWS_ENDPOINT_URL")
        environment = (
            os.environ
            | dict.fromkeys(names, place)
            | {
                "AWS_ACCESS_KEY_ID": "id",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": place,
            }
        )
        code = (
            f"import sys; sys.path[:0] = {sys.path!r}\n"
            "from tests.records import tenant\n"
            "from tests.cases.test_remote_cases import loaded, opened, stored\n"
            f"store = opened('redis://127.0.0.1:{redis.port}'); stored(store); store.close()\n"
            "store = opened('s3://bucket?endpoint=http://127.0.0.1:1', timeout_ms=500); stored(store)\n"
            "assert loaded(store, tenant('other')) == b'\\3\\3\\3'\n"
            "assert store.tier_stats()['s3']['error_connect'] > 0\n"
        )
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
        with pytest.raises(TimeoutError):
            elsewhere.accept()
