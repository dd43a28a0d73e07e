"""What runs beside the engine: documents on their way out, and what is done when something has finished."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendstore.blend import Geometry
from blendstore.codec.formats import FORMATS
from blendstore_vllm import outgoing
from blendstore_vllm.layout import PagedKV
from blendstore_vllm.outgoing import Outgoing
from blendstore_vllm.pending import Pending
from tests.engines.vllm.test_layout import BLOCK, BLOCKS, DIM, HEADS, Halves, attentions

CPU = torch.device("cpu")


class Event:
    """An event of the device that happens when it is told to."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


def test_what_is_due_is_done_once_and_nothing_before_its_event() -> None:
    pending, first, second = Pending(CPU), Event(), Event()
    done: list[int] = []
    pending.add(first, lambda: done.append(1))
    pending.add(second, lambda: done.append(2))
    pending.add(None, lambda: done.append(0))
    assert done == [0]
    pending.poll()
    assert done == [0]
    second.happened = True
    pending.poll()
    pending.poll()
    assert done == [0, 2]
    pending.poll(wait=True)
    assert done == [0, 2, 1]
    pending.poll(wait=True)
    assert done == [0, 2, 1]


def test_a_body_that_fails_is_not_reported_as_done() -> None:
    took: list[float] = []
    pending = Pending(CPU)
    with pytest.raises(ValueError, match="no"), pending.timed(took.append):
        raise ValueError("no")
    assert took == []
    with pending.timed(took.append):
        pass
    assert len(took) == 1
    assert took[0] >= 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("staged", [1 << 20, 1])
def test_records_through_staging_memory_are_those_that_are_copied_at_once(
    staged: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of unequal length, from blocks in any order, in one piece and one by one; what a format doesn't hold is
    told of the one record that has it."""
    monkeypatch.setattr(outgoing, "STAGED", staged)
    kv = PagedKV(attentions(Halves(), layers=3))
    generator = torch.Generator().manual_seed(5)
    slots = torch.randperm(BLOCKS * BLOCK, generator=generator)[:150]
    written = torch.randn(3, 2, 150, HEADS, DIM, generator=generator)
    for index in range(3):
        kv.write(index, slots, written[index, 0], written[index, 1])
    geometry = Geometry.plain(layers=3, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32, device=CPU)
    written[1, 0, 95, 0, 3] = torch.nan
    kv.write(1, slots, written[1, 0], written[1, 1])
    packing = FORMATS[name]
    each = packing.head_bytes(DIM, 4)
    spans = [(0, 64), (70, 71), (90, 150)]
    records = [torch.full((3, 2, stop - start, HEADS, each), 255, dtype=torch.uint8) for start, stop in spans]
    chunks: list[Any] = [
        SimpleNamespace(
            start=a, stop=b, index=at, reservation=SimpleNamespace(buffer=lambda at: records[at].flatten(0))
        )
        for at, (a, b) in enumerate(spans)
    ]
    out = Outgoing(geometry, kv)
    assert len(list(out._parts(chunks))) == (1 if staged > 1 else 3)
    event, packs = out.send(chunks, slots)
    assert event is None and packs.refused() == ([] if name == "raw" else chunks[2:])
    for chunk, record in zip(chunks[:2], records, strict=False):
        assert torch.equal(record, packing.pack(written[:, :, chunk.start : chunk.stop].contiguous()))
