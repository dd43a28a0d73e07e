"""The embedded engine over a disk tier: what one process stored is reused by the next, with the same answer."""

import subprocess
import sys
from pathlib import Path

import pytest

from blendstore import Store
from blendstore.config import Config
from blendstore.tiers import open_store
from blendstore_transformers import Engine
from tests.tiny_models import FAMILIES, PLAIN, engine_of, ids, model_of

SYSTEM, A, B = ids(1, 20), ids(2, 100), ids(3, 72)
FIRST, SECOND = [*SYSTEM, *A, *B, *ids(4, 12)], [*SYSTEM, *A, *B, *ids(5, 15)]
PROGRAM = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from tests.engines.test_transformers_restart import FIRST, over
over(Path({directory!r})).generate(FIRST, max_new_tokens=8)
"""


def engine(store: Store) -> Engine:
    return engine_of(model_of(FAMILIES["llama"]), store=store, tier_wait_ms=60_000)


def over(directory: Path) -> Engine:
    given = {"local_disk": str(directory), "max_local_disk_size": 0.1, "max_local_cpu_size": 0.1, "chunk_size": 32}
    return engine(open_store(Config.load(env={}, overrides=given)))


@pytest.mark.timeout(600)
def test_documents_of_an_earlier_process_are_reused_with_equal_output(tmp_path: Path) -> None:
    """Case c02 across a restart: records through the disk give the prompt what records in memory give it."""
    in_memory = engine(Store(capacity_bytes=1 << 26, chunk_size=32))
    in_memory.generate(FIRST, max_new_tokens=8)
    expected = in_memory.generate(SECOND, max_new_tokens=8)
    program = PROGRAM.format(path=sys.path, directory=str(tmp_path))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=500)
    again = over(tmp_path)
    found = again.generate(SECOND, max_new_tokens=8)
    assert again.store.tier_stats()["loads"]["loaded"] == 6
    assert (found.report.exact, found.report.fallback) == (192, "")
    assert found.ids == expected.ids
    assert found.report.exact == expected.report.exact - len(set(SECOND[192:200]) & set(FIRST[192:200]))
    assert found.ids == in_memory.generate(SECOND, max_new_tokens=8, options=PLAIN).ids
