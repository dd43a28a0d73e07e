"""A process that forks, as servers with workers do, after its store was opened: the child harms no tier. After it has
computed: the child doesn't wait for threads that only its parent has."""

import os
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


COMPUTING = """
import os, time
from pathlib import Path
import numpy as np, torch
from blendstore._core import attend

make = np.random.default_rng(0)
q, k, v = (make.standard_normal((n, 4, 32), np.float32) for n in (300, 600, 600))
positions = np.arange(0, 600, 2)


def found(threads):
    out = np.empty_like(q)
    attend(q, k, v, positions, out, scale=0.2, threads=threads)
    return out


def ran():  # nanoseconds of every other thread
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}


one = found(1)
torch.set_num_threads(3)
torch.ones(1 << 20).exp()
time.sleep(1)  # other threads that torch starts spin for a while
before = ran()
assert np.array_equal(found(3), one)
after = ran()
print(sum(after[name] > ns for name, ns in before.items()), len(after) - len(before))
child = os.fork()
if child == 0:
    assert np.array_equal(found(3), one)
    os._exit(7)  # torch itself doesn't come through its hooks at exit
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert np.array_equal(found(3), one)
"""


def _run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_a_forked_child_leaves_its_parents_tiers_alone(tmp_path: Path) -> None:
    for end, status in (("closed", 0), ("killed", -9)):
        directory = str(tmp_path / end)
        ended = _run(PARENT, directory, end)
        assert ended.returncode == status, ended.stdout + ended.stderr
        assert ended.stderr == ""
        assert ended.stdout.count("forked") == 1
        later = _run(LATER, directory)
        assert later.stdout.splitlines() == ["1 [2, 2]", "500 [3, 3]", "1000 [2, 2]"], later.stderr


def test_rust_computes_with_the_threads_of_torch_and_a_forked_child_with_its_own() -> None:
    """Both of torch's threads beside the main one do a part, and there is no other; the child has neither."""
    ended = _run(COMPUTING, OMP_WAIT_POLICY="passive")
    assert (ended.returncode, ended.stdout.split()) == (0, ["2", "0"]), ended.stdout + ended.stderr
