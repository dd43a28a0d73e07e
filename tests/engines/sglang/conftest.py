"""One server of each kind for all tests."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from tests.engines.sglang.http_server import Http
from tests.engines.sglang.servers import Server, environment


@pytest.fixture(scope="session")
def plain() -> Iterator[Server]:
    """SGLang as it is."""
    server = Server(blending=False)
    yield server
    server.close()


@pytest.fixture(scope="session")
def blending() -> Iterator[Server]:
    """With blendstore: pages of one token, room for everything."""
    server = Server(blending=True)
    yield server
    server.close()


# The paged allocator of 0.5.14 is a Triton kernel, which no CPU runs.
PAGE = 1 if version("sglang") == "0.5.14" else 16


@pytest.fixture(scope="session")
def tight() -> Iterator[Server]:
    """With blendstore: pages of several tokens, prefill in steps of 64, a pool in which few requests fit, and every
    third step retracts some of them."""
    flags: dict[str, Any] = {"chunked_prefill_size": 64, "max_total_tokens": 1536, "schedule_conservativeness": 0.1}
    with environment(SGLANG_TEST_RETRACT="1"):
        server = Server(blending=True, page_size=PAGE, **flags)
    yield server
    server.close()


@pytest.fixture(scope="session")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    """An HTTP server with SmolLM2 and blendstore."""
    made = Http(tmp_path_factory.mktemp("http"))
    yield made
    made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The embedded engine computes in this process, and a process forked after that may wait for its threads for ever:
    tests that fork come first. Among those, the ones that need no server, whose memory and processes come later."""
    order = ("test_models.py", "test_serving.py", "test_engine.py", "test_http.py", "test_quality.py")
    items.sort(key=lambda item: order.index(item.path.name))
