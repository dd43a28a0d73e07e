"""Two embedded engines in processes of their own share documents through a real Redis, and answer alike."""

import subprocess
import sys
from pathlib import Path

import pytest

from blendstore import Store
from blendstore.config import Config
from blendstore.tiers import open_store
from blendstore_transformers import Engine
from tests.engines.test_transformers_restart import FIRST, SECOND, engine
from tests.servers import Redis
from tests.tiny_models import PLAIN

PROGRAM = """
import sys
sys.path[:0] = {path!r}
from tests.engines.test_transformers_remote import FIRST, over
over({url!r}).generate(FIRST, max_new_tokens=8)
"""


def over(url: str) -> Engine:
    given = {"remote_url": url, "remote_timeout_ms": 60_000, "max_local_cpu_size": 0.1, "chunk_size": 32}
    return engine(open_store(Config.load(env={}, overrides=given)))


@pytest.mark.timeout(600)
def test_documents_of_another_process_are_reused_with_equal_output(tmp_path: Path) -> None:
    """Case c02: records through Redis give a prompt what records in memory give it."""
    in_memory = engine(Store(capacity_bytes=1 << 26, chunk_size=32))
    in_memory.generate(FIRST, max_new_tokens=8)
    expected = in_memory.generate(SECOND, max_new_tokens=8)
    redis = Redis(tmp_path)
    try:
        program = PROGRAM.format(path=sys.path, url=redis.url)
        subprocess.run([sys.executable, "-c", program], check=True, timeout=500)
        other = over(redis.url)
        found = other.generate(SECOND, max_new_tokens=8)
        assert other.store.tier_stats()["redis"]["hits"] > 0
        assert found.ids == expected.ids
        assert found.report.exact + found.report.reused > 0
        assert found.ids == in_memory.generate(SECOND, max_new_tokens=8, options=PLAIN).ids
    finally:
        redis.stop()
