"""Records reach their rows, rotated to where they stand now; layer by layer or not, the same bytes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from blendstore._core import StoreError, place_rows
from blendstore.blend import fused, transfer
from blendstore.blend.transfer import WorkingKV
from blendstore.plan import BlendPlan, Span, SpanKind
from tests.fake_engine import FakeEngine, FakeRecords, random_ids, rope, scene
from tests.ways import WAYS, one_way


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from one_way(request.param, transfer, monkeypatch)


def filled(engine: FakeEngine, plan: BlendPlan, records: FakeRecords, *, layerwise: bool) -> torch.Tensor:
    kv = WorkingKV(engine, plan, records, layerwise=layerwise)
    try:
        for index in range(engine.layers):
            kv.ready(index)
    finally:
        kv.close()
    return kv.data


@pytest.mark.parametrize("layerwise", [False, True])
def test_rows_and_offsets(layerwise: bool) -> None:
    """Layer 0 depends on token and position alone: there, moved rows equal the prompt's own prefill. Rows of a span
    begin at ``row`` of its record, V is copied bit for bit, fresh rows are zero."""
    engine = FakeEngine(ropes=(rope(8), rope(4, 500.0, "interleaved")))
    made = scene(engine)
    data = filled(engine, made.plan, made.records, layerwise=layerwise)
    own = engine.prefill(made.ids)
    for span in made.plan.spans:
        here = slice(span.start, span.stop)
        if span.kind is SpanKind.FRESH:
            assert not data[:, :, here].any()
            continue
        torch.testing.assert_close(data[0, 0, here], own[0][0][here], rtol=0, atol=1e-5)
        for index in range(engine.layers):
            k, v = made.records.layer(span.chunk, index)
            rows = slice(span.row, span.row + len(span))
            assert torch.equal(data[index, 1, here], v[rows])
            turn = engine.ropes[index % 2]
            assert turn is not None
            step = torch.full((len(span),), span.start - span.source)
            torch.testing.assert_close(data[index, 0, here], turn.apply(k[rows], step), rtol=0, atol=1e-5)


def test_layerwise_changes_no_bit() -> None:
    engine = FakeEngine(layers=7)
    made = scene(engine)
    assert torch.equal(*(filled(engine, made.plan, made.records, layerwise=on) for on in (False, True)))


def test_exact_rows_are_copied_bit_for_bit_and_layers_without_rotary_move_unrotated() -> None:
    engine = FakeEngine(ropes=(None, rope(8)))
    ids = random_ids(20, 1)
    chunk = engine.prefill(ids)
    plan = BlendPlan(31, (
        Span(SpanKind.EXACT, 0, 10, 0, 0, 0, 0, 0), Span(SpanKind.FRESH, 10, 13),
        Span(SpanKind.REUSED, 13, 23, 0, 10, 10, 0, 13), Span(SpanKind.FRESH, 23, 31),
    ))  # fmt: skip
    data = filled(engine, plan, FakeRecords([chunk]), layerwise=False)
    for index in range(engine.layers):
        for part in (0, 1):
            assert torch.equal(data[index, part, :10], chunk[index][part][:10])
    for index in (0, 2):
        assert torch.equal(data[index, 0, 13:23], chunk[index][0][10:])
    assert not torch.equal(data[1, 0, 13:23], chunk[1][0][10:])


def test_the_engines_prefix_is_read_from_its_slots() -> None:
    engine = FakeEngine()
    made = scene(engine, prefix=True)
    data = filled(engine, made.plan, made.records, layerwise=True)
    for index, (k, v) in enumerate(engine.held):
        assert torch.equal(data[index, 0, :6], k[:6])
        assert torch.equal(data[index, 1, :6], v[:6])


@pytest.mark.parametrize("layerwise", [False, True])
def test_an_error_of_the_store_reaches_the_caller(layerwise: bool) -> None:
    engine = FakeEngine()
    made = scene(engine)

    def on_layer(chunk: int, index: int) -> None:
        if index == 2:
            raise OSError("lease expired")

    made.records.on_layer = on_layer
    with pytest.raises(OSError, match="lease expired"):
        filled(engine, made.plan, made.records, layerwise=layerwise)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rust_turns_keys_as_torch_does(way: str, pairing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several threads too, with elements that don't turn, and V bit for bit; what Rust refuses torch does."""
    if way == "plain":
        return
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    engine = FakeEngine(ropes=(None, rope(6, pairing=pairing)))
    made = scene(engine)
    found = filled(engine, made.plan, made.records, layerwise=False)
    assert engine.geometry.head_dim > 6

    def broken(*_: object, **__: object) -> None:
        raise StoreError("no")

    monkeypatch.setattr(transfer, "place_rows", broken)
    expected = filled(engine, made.plan, made.records, layerwise=False)
    assert fused.fallbacks["copies of rows in Rust"] > 1
    fused.fallbacks.clear()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert torch.equal(found[:, 1], expected[:, 1])


def test_rust_refuses_rows_that_do_not_fit(way: str) -> None:
    """By name, and without reading or writing out of bounds."""
    if way == "plain":
        return
    rows, angles = np.ones((5, 2, 8), np.float32), np.ones((5, 3), np.float32)
    empty = np.zeros((2, 5, 2, 8), np.float32)
    whole = np.zeros((9, 2, 8), np.float32)
    good: dict[str, Any] = {"to_k": empty[0], "to_v": empty[1], "k": rows, "v": rows, "cos": angles, "sin": angles}
    for name, bad in (
        ("k", {"k": rows[0]}), ("v", {"v": rows[:4]}), ("v", {"v": rows[:, :1].copy()}), ("to_k", {"to_k": whole}),
        ("to_v", {"to_v": whole}), ("to_v", {"to_k": whole[:5], "to_v": whole[4:]}),
        ("k", {"k": whole[:5], "to_v": whole[4:]}), ("k", {"k": rows.astype(np.float64)}),
        ("cos, sin", {"cos": None}), ("cos, sin", {"cos": angles[:4]}),
        ("cos, sin", {"cos": angles[:4], "sin": angles[:4]}),
        ("cos, sin", {"cos": np.ones((5, 5), np.float32), "sin": np.ones((5, 5), np.float32)}),
    ):  # fmt: skip
        with pytest.raises(StoreError, match=rf"^{name} = "):
            place_rows(**{**good, **bad})
        assert not empty.any()
        assert not whole.any()
    place_rows(**good)
    assert empty.any()
