"""The row kernels, and what the blend core does with them, against plain torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blendstore.blend import BlendRunner, BlendSettings, fused, streamed, triton_attention, triton_drift, triton_rows
from blendstore.blend.copies import CopyStream
from blendstore.blend.kept import Kept
from blendstore.blend.records import restore
from blendstore.blend.runner import BlendResult
from blendstore.blend.staged import Staged
from blendstore.blend.transfer import WorkingKV
from blendstore.codec.formats import FORMATS
from blendstore.plan import BlendPlan, Span, SpanKind
from tests.fake_engine import FakeEngine, FakeRecords, Rope, random_ids, rope, scene
from tests.kernels import DEVICE, DTYPES, INTERPRETED, TOLERANCE, draw
from tests.kernels.check_attention import TILES

ROPES = [rope(8), rope(4, 500.0, "interleaved", 1.25), rope(6, 300.0), rope(8, pairing="interleaved")]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if INTERPRETED:
        monkeypatch.setattr(triton_attention, "FLOAT32_TILES", TILES)
        monkeypatch.setattr(triton_drift, "FLOAT32_TILES", TILES)
    fused.fallbacks.clear()
    yield
    assert not fused.fallbacks


class Device(FakeEngine):
    """The engine on the kernels' device; scenes and records are made by its twin on the CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.embedding = self.embedding.to(DEVICE)
        self.weights = [tuple(w.to(DEVICE) for w in layer) for layer in self.weights]  # type: ignore[misc]
        self._ropes = [None if r is None else replace(r, frequencies=r.frequencies.to(DEVICE)) for r in self._ropes]
        self.geometry = replace(self.geometry, device=DEVICE)


@dataclass
class Records(FakeRecords):
    """Records as the store has them: one tensor a chunk in host memory."""

    formats: Sequence[str] = ("raw",)
    """Of the chunks, in turn."""

    def __post_init__(self) -> None:
        whole = [torch.stack([torch.stack(pair) for pair in chunk]).contiguous() for chunk in self.chunks]
        packings = [FORMATS[self.formats[at % len(self.formats)]] for at in range(len(whole))]
        self.whole = [Kept(packing, packing.pack(kv)) for packing, kv in zip(packings, whole, strict=True)]
        values = [kept.packing.unpack(kept.data, torch.float32) for kept in self.whole]
        self.chunks = [[(k, v) for k, v in kv] for kv in values]

    def kept(self, chunk: int) -> Kept:
        return self.whole[chunk]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turn", ROPES)
def test_keys_turn_to_their_new_positions(turn: Rope, dtype: torch.dtype) -> None:
    """The same bits as `RotaryTable.rotate`, but for the last one."""
    table = turn.table()
    k = draw(60, 2, 16, seed=1, dtype=dtype)
    rows = torch.tensor([*range(3, 30), 41, 42, 59], dtype=torch.int32, device=DEVICE)
    sources = (rows + 100) % 77
    cos, sin = (t.to(DEVICE) for t in table.between(sources.long().cpu(), rows.long().cpu()))
    wanted = k.clone()
    wanted[rows.long()] = table.rotate(k[rows.long()], cos, sin)
    triton_rows.turn(table, k, rows, sources, 100)
    torch.testing.assert_close(k, wanted, rtol=1e-3 if dtype != torch.float32 else 0, atol=TOLERANCE[dtype] / 4)


def test_copies_are_strided_on_both_sides() -> None:
    source = torch.arange(6 * 10 * 4, dtype=torch.int32).view(6, 10, 4)
    target = torch.full((6, 8, 4), -1, dtype=torch.int32, device=DEVICE)
    copies = CopyStream(DEVICE)
    copies.rows(target.data_ptr() + 2 * 16, 8 * 16, source.data_ptr() + 3 * 16, 10 * 16, 5 * 16, 6)
    copies.wait(copies.mark())
    assert torch.equal(target[:, 2:7].cpu(), source[:, 3:8])
    copies.finish()
    assert bool((target[:, :2] == -1).all()) and bool((target[:, 7:] == -1).all())


@pytest.mark.parametrize("formats", [("raw",), ("int8",), ("int4",), ("int4", "raw", "int8")], ids="-".join)
@pytest.mark.parametrize("layerwise", [False, True])
def test_streamed_rows_are_those_of_the_reference(layerwise: bool, formats: Sequence[str]) -> None:
    """Exact rows bit for bit, moved ones turned, fresh ones zero, the engine's own prefix from its slots; spans that
    begin inside their record, an uneven number of layers, and more of them than a staging buffer has room for."""
    layers = 15 if layerwise and len(formats) > 1 else 3
    shape: dict[str, Any] = {"layers": layers, "ropes": (rope(8), rope(4, 500.0, "interleaved"), None)}
    twin, engine = FakeEngine(**shape), Device(**shape)
    made = scene(twin, prefix=True, length=70)
    records = Records(made.records.chunks, formats=formats)
    engine.held = [(k.to(DEVICE), v.to(DEVICE)) for k, v in twin.held]
    plan = BlendPlan(made.ids.shape[0], tuple(
        Span(SpanKind.EXACT, s.start, s.stop, s.chunk, s.row, s.start, s.group, s.group_start) if s.chunk == 1 else s
        for s in made.plan.spans
    ))  # fmt: skip
    data = []
    for source in (records, FakeRecords(records.chunks)):
        kv = WorkingKV(engine, plan, source, layerwise=layerwise)
        for index in range(engine.layers):
            kv.ready(index)
        kv.close()
        data.append(kv.data)
    torch.testing.assert_close(data[0], data[1], rtol=0, atol=1e-6)
    exact = next(s for s in plan.spans if s.kind is SpanKind.EXACT)
    # Packed values are one rounded product and sum, which a device may round once.
    same = torch.equal if formats == ("raw",) else torch.allclose
    assert same(data[0][:, :, exact.start : exact.stop], data[1][:, :, exact.start : exact.stop])


@pytest.mark.parametrize("formats", [("raw",), ("int8", "int4"), ("raw", "int4")], ids="-".join)
def test_restored_rows_are_those_of_the_records(formats: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more layers than are staged at a time."""
    rooms = []

    class Watched(Staged):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            rooms.append(given[-1])

    monkeypatch.setattr(streamed, "Staged", Watched)
    engine, made = Device(layers=15), scene(FakeEngine(layers=15))
    spans = [s for s in made.plan.spans if s.kind is SpanKind.REUSED]
    records = Records(made.records.chunks, formats=formats)
    made.records.chunks = records.chunks
    kv = restore(engine.geometry, records, spans, made.ids.shape[0])
    for span in spans:
        for index in range(engine.layers):
            for part, tensor in enumerate(made.records.layer(span.chunk, index)):
                rows = tensor[span.row : span.row + len(span)]
                torch.testing.assert_close(kv[index, part, span.start : span.stop].cpu(), rows, rtol=0, atol=1e-6)
    assert rooms == [12] * sum(name != "raw" for name in formats)


def test_a_kernel_that_finds_no_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch, which takes more, isn't tried in its place, and the next call has the kernel."""
    monkeypatch.setattr(fused, "_broken", set())

    def full() -> str:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        fused.attempt("this", DEVICE, full, lambda: "plain")
    assert fused.attempt("this", DEVICE, lambda: "kernel", lambda: "plain") == "kernel"


def run(
    engine: FakeEngine, selector: str, ratio: float, records: FakeRecords, ids: Tensor, plan: BlendPlan
) -> BlendResult:
    return BlendRunner(engine).run(ids.to(DEVICE), plan, records, BlendSettings(selector, (ratio,)))


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("selector", ["query", "deviation"])
def test_whole_runs_pick_and_compute_the_same(
    selector: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of a whole run, windows and holes included: the same tokens are recomputed, and the KV is the same."""
    shape: dict[str, Any] = {
        "layers": 3, "windows": (None, 30), "ropes": (rope(8), rope(8, 300.0)), "softcap": softcap, "heads": 2,
        "kv_heads": 1,
    }  # fmt: skip
    engine, made = Device(**shape), scene(FakeEngine(**shape), documents=2, length=20)
    found = run(engine, selector, 0.2, Records(made.records.chunks), made.ids, made.plan)
    monkeypatch.setattr(fused, "usable", lambda device: False)
    monkeypatch.setattr("blendstore.blend.transfer.usable", lambda device: False)
    wanted = run(engine, selector, 0.2, made.records, made.ids, made.plan)
    assert torch.equal(found.selected, wanted.selected)
    assert found.recomputed
    # On a GPU torch's own float32 attention is the less exact of the two.
    for a, b in ((found.kv, wanted.kv), (found.state, wanted.state)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 if INTERPRETED else 2e-4)


def test_what_a_model_needs_is_compiled_at_start() -> None:
    engine = Device(heads=2, kv_heads=1, windows=(None, 9), ropes=(rope(8), None))
    fused.warm_up(engine.geometry)


def test_a_kernel_that_fails_is_replaced_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused, "_broken", set())
    calls = []

    def kernel() -> int:
        calls.append(1)
        raise RuntimeError("no C compiler")

    assert [fused.attempt("turning", DEVICE, kernel, lambda: 7) for _ in range(3)] == [7, 7, 7]
    assert len(calls) == 1 and fused.fallbacks["turning"] == 3
    assert [r.message for r in caplog.records if "no C compiler" in r.message] != []
    assert len(caplog.records) == 1
    fused.fallbacks.clear()


def test_records_of_another_kind_go_the_plain_way() -> None:
    twin, engine = FakeEngine(), Device()
    ids = random_ids(20, 1)
    plan = BlendPlan(28, (Span(SpanKind.REUSED, 0, 20, 0, 0, 3, 0, 0), Span(SpanKind.FRESH, 20, 28)))
    kv = WorkingKV(engine, plan, FakeRecords([twin.prefill(ids, 3)]), layerwise=True)
    k, _ = kv.ready(0)
    kv.close()
    torch.testing.assert_close(k[:20].cpu(), twin.prefill(ids)[0][0], rtol=0, atol=1e-5)
