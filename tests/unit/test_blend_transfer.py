"""Records reach their rows, rotated to where they stand now; layer by layer or not, the same bytes."""

import pytest
import torch

from blendstore.blend.transfer import WorkingKV
from blendstore.plan import BlendPlan, Span, SpanKind
from tests.fake_engine import FakeEngine, FakeRecords, random_ids, rope, scene


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
