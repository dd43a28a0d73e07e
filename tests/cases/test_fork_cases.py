"""A process that forks after its store was opened, as servers with workers do: the child harms no tier."""

import subprocess
import sys
from pathlib import Path

PARENT = """
import logging, os, sys
import numpy as np
from blendstore._core import Namespace, Store, StoreError, Tier

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
namespace = Namespace([("model", b"m")], salt=b"s")
directory = sys.argv[1]


def put(store, first):
    tokens = np.arange(first, first + 32, dtype=np.uint32)
    room = store.reserve(namespace, tokens, bytes_per_token=64, source_position=0, provenance=1, rank=1)
    for index in range(2):
        memoryview(room.buffer(index)).cast("B")[:] = bytes([first % 251]) * 1024
    room.commit()
    return room.keys


def opened():
    return Store(capacity_bytes=1 << 20, chunk_size=16, tiers=[Tier.disk([directory], capacity_bytes=8 << 20)])


store = opened()
first = put(store, 1)
assert store.flush(30)
child = os.fork()
if child == 0:
    assert list(store.lookup(first).hits) == [1, 1], "memory as it was"
    put(store, 500)
    ticket = store.prefetch(namespace, first + bytes(32))
    assert ticket.wait(0) and list(ticket.outcomes) == [1, 1, 3]
    assert not store.flush(30)
    assert set(store.tier_of(first)) == {0}
    store.clear()
    assert set(store.tier_of(first)) == {255}
    store.close()
    del store
    sys.exit(7)  # by way of the hooks at exit
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
try:
    Tier.disk([directory], capacity_bytes=8 << 20)
except StoreError as error:
    assert str(os.getpid()) in str(error)
else:
    raise AssertionError("the child has let the parent's directory go")
second = put(store, 1000)
assert store.flush(30)
os.kill(os.getpid(), 9) if sys.argv[2] == "killed" else store.close()
"""

LATER = (
    PARENT.split("store = opened()")[0]
    + """
store = Store(capacity_bytes=1 << 20, chunk_size=16, tiers=[Tier.disk([directory], capacity_bytes=8 << 20)])
for first in (1, 500, 1000):
    tokens = np.arange(first, first + 32, dtype=np.uint32)
    keys = namespace.segment_keys(tokens, np.array([[0, 32]], dtype=np.int64), chunk_size=16)
    ticket = store.prefetch(namespace, keys)
    assert ticket.wait(30)
    print(first, list(ticket.outcomes))
"""
)


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120)


def test_a_forked_child_leaves_its_parents_tiers_alone(tmp_path: Path) -> None:
    for end, status in (("closed", 0), ("killed", -9)):
        directory = str(tmp_path / end)
        ended = _run(PARENT, directory, end)
        assert ended.returncode == status, ended.stdout + ended.stderr
        assert ended.stderr == ""
        assert ended.stdout.count("forked") == 1
        later = _run(LATER, directory)
        assert later.stdout.splitlines() == ["1 [2, 2]", "500 [3, 3]", "1000 [2, 2]"], later.stderr
