"""Cases from the field on one rank's store, runner and pools, inside one real scheduler."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from blendstore.codec.formats import FORMATS
from blendstore.options import RequestOptions
from tests.engines.sglang.forked import in_scheduler
from tests.engines.sglang.models import SEPARATOR, folder_of
from tests.engines.sglang.test_models import prompt, words

CONFIG = {
    "enable_blending": True, "chunk_size": 32, "blend_min_tokens": 16, "max_local_cpu_size": 0.05,
    "require_blending": True, "blend_budget_ms": 0,
}  # fmt: skip
A, B, C, D = words(2, 100), words(3, 77), words(4, 50), words(6, 64)
SYSTEM = 15


class Bench:
    """What the cases need of the scheduler that they run in."""

    def __init__(self, context: Any, **config: Any) -> None:
        from importlib.metadata import version as installed

        from blendstore.config import Config
        from blendstore_sglang.setup import set_up
        from blendstore_sglang.versions import version_of

        self.context, self.params = context, context.params
        config = {**CONFIG, **config}
        self.cache = set_up(context, Config.load(env={}, overrides=config), version_of(installed("sglang")))
        self.serving = self.cache.serving
        self.model, self.pool = self.serving.model, self.serving.pool
        self.allocator = self.params.token_to_kv_pool_allocator
        self.layers = range(self.serving.geometry.layers)

    def own(self, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The engine's K and V of every layer."""
        from blendstore_sglang.proof import own_prefill

        with own_prefill(self.model, self.context.tp_worker.model_runner, self.params, len(tokens)) as prefill:
            return [(k.clone(), v.clone()) for k, v in prefill(torch.tensor(tokens), 0)]

    @contextmanager
    def slots(self, count: int) -> Iterator[torch.Tensor]:
        """Slots of the pool for a while."""
        page = self.params.page_size
        taken = self.allocator.alloc(-(-count // page) * page)
        yield taken[:count].long()
        self.allocator.free(taken)

    def keep(self, tokens: list[int], **options: Any) -> None:
        """As after a request that the engine has computed."""
        tenant = self.tenant(reuse=False, **options)
        array = np.array(tokens, dtype=np.uint32)
        done = self.serving.look(array, tenant, held=0, exact=True, limit=0, blend=False)
        with self.slots(len(tokens)) as slots:
            for index, (k, v) in enumerate(self.own(tokens)):
                self.pool.get_key_buffer(index)[slots], self.pool.get_value_buffer(index)[slots] = k, v
            self.serving.keep(done.prepared, tenant, slots, lambda: None)

    def tenant(self, **options: Any) -> Any:
        from blendstore_sglang.serve import Tenant

        return Tenant("test", RequestOptions(**options))

    def blend(self, tokens: list[int], held: int = 0, **options: Any) -> dict[str, Any]:
        """Fill a prompt of which the engine holds ``held`` tokens; errors against the engine's own KV."""
        tenant, wanted = self.tenant(**options), self.own(tokens)
        before = dict(self.serving.metrics.counts)
        array = np.array(tokens, dtype=np.uint32)
        outlook = self.serving.look(array, tenant, held=held, exact=True, limit=len(tokens) - 1, blend=True)
        with self.slots(outlook.target) as slots:
            for index, (k, v) in enumerate(wanted):
                for buffer, own in ((self.pool.get_key_buffer(index), k), (self.pool.get_value_buffer(index), v)):
                    buffer[slots] = torch.nan
                    buffer[slots[:held]] = own[:held]
            self.serving.fill(outlook, tenant, slots[:held], slots[held:], held)
            outlook.prepared.release()
            got = [(self.pool.get_key_buffer(i)[slots], self.pool.get_value_buffer(i)[slots]) for i in self.layers]
        pairs = [
            (x, y[: outlook.target])
            for pair, own in zip(got, wanted, strict=True)
            for x, y in zip(pair, own, strict=True)
        ]
        kept = all(torch.equal(x[:held], y[:held]) for x, y in pairs)
        counts = self.serving.metrics.counts
        return {
            "target": outlook.target,
            "largest": max(float((x - y).abs().max()) for x, y in pairs),
            "sum": sum(float((x - y).square().sum()) for x, y in pairs),
            "held untouched": kept,
            "cut": outlook.cut,
            **{
                kind: counts[kind] - before.get(kind, 0)
                for kind in ("prefix", "exact", "reused", "recomputed", "fresh")
            },
        }

    def provenances(self, document: list[int]) -> set[int | None]:
        """Of the document's records."""
        tokens = np.array(document, dtype=np.uint32)
        keys = self.serving.pipeline("").namespace(RequestOptions()).chain_keys(tokens, chunk_size=32)
        with self.serving.store.lookup(keys) as lease:
            metas = [lease.meta(index) for index in range(len(lease))]
        return {None if meta is None else meta.provenance for meta in metas}


def several(context: Any) -> dict[str, Any]:
    """All cases that share one store."""
    bench = Bench(context)
    for document in (A, B, D):
        bench.keep(prompt(document))
    asked = prompt(D, C, B, A)
    out: dict[str, Any] = {f"b03 {ratio}": bench.blend(asked, 60, ratio=ratio) for ratio in (0.15, 0.3, 0.6, 1.0)}
    for ratio in (0.0, 0.5, 1.0):
        out[f"b04 {ratio}"] = bench.blend(prompt(B, C, A), ratio=ratio)
    out["single token left"] = bench.blend(prompt(B, A), len(prompt(B, A)) - 2, ratio=1.0)
    tenant = bench.tenant()
    for _ in range(1000):  # b09: looked up, and never filled
        array = np.array(asked, dtype=np.uint32)
        outlook = bench.serving.look(array, tenant, held=0, exact=True, limit=len(asked) - 1, blend=True)
        outlook.prepared.release()
        del outlook
    out["b09"] = bench.serving.store.stats()
    out["errors"] = bench.serving.metrics.counts["store_error"] + bench.serving.metrics.counts["fallback"]
    return out


def provenance(context: Any) -> list[set[int | None]]:
    """Case b11 both ways, and what a blend computed."""
    first, second, third = Bench(context), Bench(context), Bench(context)
    first.keep(prompt(A, B))
    out = [first.provenances(B)]
    first.keep(prompt(B))
    out.append(first.provenances(B))
    second.keep(prompt(B))
    out.append(second.provenances(B))
    second.keep(prompt(A, B))
    out.append(second.provenances(B))
    third.keep([*A])
    out.append(third.provenances(A))
    return out


def failing(context: Any) -> list[Any]:
    """Case f01: a record that can't be read, of the wrong length, and a lease that has run out."""
    from blendstore.blend import records

    bench = Bench(context)
    bench.keep(prompt(A))
    bench.keep(prompt(B))
    out: list[Any] = []
    tenant, tokens = bench.tenant(ratio=1.0), prompt(B, A)
    array = np.array(tokens, dtype=np.uint32)

    def attempt() -> str:
        outlook = bench.serving.look(array, tenant, held=0, exact=True, limit=len(tokens) - 1, blend=True)
        try:
            with bench.slots(outlook.target) as slots:
                bench.serving.fill(outlook, tenant, slots[:0], slots, 0)
        except Exception as error:
            return str(error)
        finally:
            outlook.prepared.release()
        return "filled"

    view, module = records.LeaseRecords.kept, cast(Any, records).LeaseRecords
    for kind, told in ((OSError, "the medium is gone"), (ValueError, "wrong length")):

        def broken(*_: Any, kind: type[Exception] = kind, told: str = told) -> Any:
            raise kind(told)

        module.kept = broken
        out.append(attempt())
    module.kept = view
    looked = bench.serving.look(array, tenant, held=0, exact=True, limit=len(tokens) - 1, blend=True)
    looked.prepared.release()
    try:
        with bench.slots(looked.target) as slots:
            bench.serving.fill(looked, tenant, slots[:0], slots, 0)
    except Exception as error:
        out.append(str(error))
    out.append(attempt())
    out.append(bench.serving.store.stats()["bytes_pinned"])
    bench.serving.store.close()
    bench.keep(prompt(C))
    out.append(bench.serving.metrics.counts["store_error"])
    return out


def restarted(context: Any, folder: str) -> dict[str, Any]:
    """What a second server finds in the directory of one that has ended, whose records were coded on their way down."""
    config = {"local_disk": folder, "max_local_disk_size": 0.1, "local_serde": "lossless"}
    first = Bench(context, **config)
    for document in (A, B):
        first.keep(prompt(document))
    first.serving.store.close()
    return Bench(context, **config).blend(prompt(B, A), ratio=1.0)


def packed(context: Any) -> dict[str, Any]:
    """A prompt that comes back in the order that it was kept in, in each format; a document with a value that is no
    number; and what the guard leaves of a format."""
    out: dict[str, Any] = {}
    for name in FORMATS:
        bench = Bench(context, local_format=name, codec_max_kl=1e3)
        bench.keep(prompt(A, B))
        used = bench.serving.store.stats()["bytes_used"]
        out[name] = {**bench.blend(prompt(A, B)), "bytes": used}
        if name == "raw":
            continue
        bench = Bench(context, local_format=name, codec_max_kl=1e3)
        own = bench.own

        def broken(tokens: list[int], own: Any = own) -> list[tuple[torch.Tensor, torch.Tensor]]:
            layers: list[tuple[torch.Tensor, torch.Tensor]] = own(tokens)
            layers[-1][1][len(tokens) - QUESTION - SEPARATORS - 1, 0, 3] = torch.nan
            return layers

        cast(Any, bench).own = broken
        bench.keep(prompt(D))
        tokens = np.array(D, dtype=np.uint32)
        keys = bench.serving.pipeline("").namespace(RequestOptions()).chain_keys(tokens, chunk_size=32)
        with bench.serving.store.lookup(keys) as lease:
            out[f"not a number, {name}"] = [lease.meta(at) is not None for at in range(len(lease))]
        out[f"errors, {name}"] = bench.serving.metrics.counts["store_error"]
    plain = {"enable_blending": False, "require_blending": False, "local_format_exact": True}
    for bound, blending in ((0, True), (1e3, True), (0, False)):
        more = {} if blending else plain
        bench = Bench(context, local_format="int4", codec_max_kl=bound, **more)
        kept = bench.serving.config.local_format, bench.serving.metrics.counts["codec_fallback"]
        out[f"guard {bound:g} {blending}"] = kept
    return out


def read_later(context: Any) -> list[Any]:
    """Pinned bytes while a fill waits on the device behind the end of its leases, and when it has been done."""
    bench = Bench(context)
    bench.keep(prompt(A))
    bench.keep(prompt(B))
    tokens, tenant, waiting = prompt(B, A), bench.tenant(ratio=0.15), list[Any]()

    @contextmanager
    def filling(done: Any) -> Iterator[None]:
        yield
        waiting.append(done)

    bench.serving.streams.filling = filling
    array = np.array(tokens, dtype=np.uint32)
    outlook = bench.serving.look(array, tenant, held=0, exact=True, limit=len(tokens) - 1, blend=True)
    with bench.slots(outlook.target) as slots:
        bench.serving.fill(outlook, tenant, slots[:0], slots, 0)
    outlook.prepared.release()  # as when they time out
    out: list[Any] = [outlook.blended, bench.serving.store.stats()["bytes_pinned"]]
    waiting.pop()(1.0)
    return [*out, bench.serving.store.stats()["bytes_pinned"]]


def one_rank_differs(context: Any) -> dict[str, Any]:
    """Values that a format doesn't hold, and then a model that can't be proved, on the second rank only."""
    from blendstore.blend.selftest import GeometryError
    from blendstore_sglang import setup

    out: dict[str, Any] = {}
    bench = Bench(context, local_format="int8", codec_max_kl=1e3)
    own = bench.own

    def broken(tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        layers = own(tokens)
        if context.tp_rank == 1:
            layers[-1][1][len(tokens) - QUESTION - SEPARATORS - 1, 0, 3] = torch.nan
        return layers

    cast(Any, bench).own = broken
    bench.keep(prompt(D))
    out["refused"] = bench.serving.store.stats()["chunks"], bench.serving.epoch
    out["told"] = [bench.serving.metrics.counts[name] for name in ("store_error", "not_stored")]
    cast(Any, bench).own = own
    bench.keep(prompt(D))
    out["kept"] = bench.serving.store.stats()["chunks"] > 0
    out["speed"] = bench.serving.budget.estimate(1000)

    def prove(*given: Any) -> Any:
        proof = proving(*given)
        if context.tp_rank == 1:
            raise GeometryError("layer 1: it differs here")
        return proof

    module = cast(Any, setup)
    proving, module.prove = module.prove, prove
    bench = Bench(context, require_blending=False, local_format="int8")
    out["proved"] = bench.model is not None
    return out


def budgeted(context: Any) -> dict[str, Any]:
    """A budget that holds for a part of the prompt, and one that holds for nothing."""
    bench = Bench(context, blend_budget_ms=1000)
    for document in (A, B, C, D):
        bench.keep(prompt(document))
    asked = prompt(D, C, B, A)
    bench.serving.budget.calibrate((0.0, 0.0), (1.0, 1000 / 150))  # 150 rows a second
    cut = bench.blend(asked, ratio=0.5)
    bench.serving.budget.calibrate((0.0, 1e6), (1.0, 1e6))
    tenant = bench.tenant(ratio=0.5)
    array = np.array(asked, dtype=np.uint32)
    refused = bench.serving.look(array, tenant, held=0, exact=True, limit=len(asked) - 1, blend=True)
    refused.prepared.release()
    return {"cut": cut, "refused target": refused.target, "given up": refused.cut, "asked": len(asked)}


def adapters(context: Any) -> dict[str, Any]:
    """What requests of a LoRA adapter, of another one and of the base model find of a prompt that each has left."""
    from array import array

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.sampling.sampling_params import SamplingParams

    bench, tokens = Bench(context), prompt(A, B)
    cache, array_of = bench.cache, np.array(tokens, dtype=np.uint32)

    def request(number: int, lora: str | None) -> Any:
        made = Req(f"{number}", "", array("q", tokens), SamplingParams(max_new_tokens=1), lora_id=lora)
        key = cache.version.radix_key_of(made, array_of)
        return made, cache.match_prefix(MatchPrefixParams(key=key, req=made))

    def computed(made: Any) -> None:
        """As when the engine has computed it."""
        slots = bench.allocator.alloc(len(tokens))
        for index, (k, v) in enumerate(bench.own(tokens)):
            bench.pool.get_key_buffer(index)[slots], bench.pool.get_value_buffer(index)[slots] = k, v
        cache.insert(InsertParams(key=cache.version.radix_key_of(made, array_of), value=slots.long()))
        cache.prompt_complete(made)

    out: dict[str, Any] = {}
    for number, lora in enumerate(("one", "two", None)):
        made, match = request(number, lora)
        out[f"first {lora}"] = match.host_hit_length + cache.version.held(match)
        out[f"blended {lora}"] = made._blendstore.blend_key is not None
        made.cached_tokens = 0
        computed(made)
    cache.reset()
    bench.allocator.clear()
    for number, lora in enumerate(("one", "two", None, "three")):
        made, match = request(10 + number, lora)
        out[f"again {lora}"] = match.host_hit_length
    return out


@functools.cache
def answers() -> dict[str, Any]:
    (out,) = in_scheduler(several, str(folder_of("llama")))
    found: dict[str, Any] = out
    return found


SEPARATORS = len(SEPARATOR)
QUESTION = 20


def test_case_b03_error_falls_as_the_ratio_rises_behind_an_engine_held_prefix() -> None:
    rows = [answers()[f"b03 {ratio}"] for ratio in (0.15, 0.3, 0.6, 1.0)]
    sums = [row["sum"] for row in rows]
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] < 1e-6 * sums[0]
    assert all(row["held untouched"] and row["prefix"] == 60 for row in rows)


def test_case_b04_counters_tell_the_kinds_apart() -> None:
    fresh = len(C) + QUESTION + 4 * SEPARATORS
    for ratio in (0.0, 0.5, 1.0):
        row = answers()[f"b04 {ratio}"]
        context = row["exact"] + row["reused"] + row["recomputed"]
        assert context == SYSTEM + len(A) + len(B)
        assert row["recomputed"] == min(round(ratio * context), context - row["exact"])
        assert row["fresh"] == fresh
    assert answers()["b04 1.0"]["largest"] <= 2e-4
    assert answers()["b04 0.0"]["largest"] > 1e-2, "or this model would not notice"


def test_case_b07_memory_full_of_nan_reaches_no_output() -> None:
    """Every case here blends into slots that hold NaN."""
    rows = [row for name, row in answers().items() if name.startswith("b0") and "largest" in row]
    assert len(rows) == 7
    assert all(np.isfinite(row["largest"]) for row in rows)


def test_case_b09_a_thousand_look_ups_that_lead_to_nothing_pin_nothing() -> None:
    stats = answers()["b09"]
    assert (stats["bytes_pinned"], stats["leases"]) == (0, 0)
    assert answers()["errors"] == 0


def test_a_prompt_that_the_engine_holds_but_for_its_end() -> None:
    row = answers()["single token left"]
    assert row["target"] == len(prompt(B, A)) - 2
    assert row["held untouched"]


def test_case_b11_the_documented_record_stays_and_a_bare_one_is_never_reused() -> None:
    from blendstore.pipeline import IN_CONTEXT, LEAD_IN

    ((behind, still, lead_in, replaced, bare),) = in_scheduler(provenance, str(folder_of("llama")))
    assert (behind, still) == ({IN_CONTEXT}, {IN_CONTEXT})
    assert (lead_in, replaced) == ({LEAD_IN}, {IN_CONTEXT})
    assert bare == {None}, "what begins a prompt is no document"


def test_case_f01_a_failing_record_costs_speed_only() -> None:
    ((gone, wrong, expired, well, pinned, errors),) = in_scheduler(failing, str(folder_of("llama")))
    assert (gone, wrong, well) == ("OSError: the medium is gone", "ValueError: wrong length", "filled")
    assert expired.startswith("LeaseExpired")
    assert pinned == 0
    assert errors == 1, "a store that can't store is counted, and serving goes on"


def test_records_are_held_until_the_device_has_read_them() -> None:
    """Also when the leases end first: another record would lie where these are read."""
    ((blended, waiting, done),) = in_scheduler(read_later, str(folder_of("llama")))
    assert blended
    assert waiting > 0
    assert done == 0


def test_what_goes_wrong_on_one_rank_both_do_alike() -> None:
    """Or their stores would differ from then on, and one would wait for the other for ever."""
    one, two = in_scheduler(one_rank_differs, str(folder_of("llama")), ranks=2)
    assert one.pop("told") == [0, 4]
    assert two.pop("told") == [1, 0], "of its own values"
    assert one == two
    assert one["refused"] == (0, 1)
    assert one["kept"]
    assert not one["proved"]


def test_documents_outlive_the_server_on_a_disk(tmp_path: Path) -> None:
    (row,) = in_scheduler(functools.partial(restarted, folder=str(tmp_path)), str(folder_of("llama")))
    assert row["exact"] + row["recomputed"] == SYSTEM + len(A) + len(B)
    assert row["largest"] <= 2e-4


def test_documents_in_fewer_bits_come_back_within_their_steps_and_a_guard_watches_them() -> None:
    (found,) = in_scheduler(packed, str(folder_of("llama")))
    for name, least, most, share in (("raw", 0, 2e-4, 1), ("int8", 1e-4, 0.05, 0.65), ("int4", 1e-3, 0.6, 0.5)):
        row = found[name]
        assert row["exact"] == SYSTEM + len(A) + len(B) + QUESTION - 1, "the prompt stands as it was kept"
        assert least <= row["largest"] <= most, name
        assert row["bytes"] <= share * found["raw"]["bytes"]
    for name in ("int8", "int4"):
        assert found[f"not a number, {name}"] == [True, False], "the record that has it, and no other"
        assert found[f"errors, {name}"] == 1
    assert found["guard 0 True"] == found["guard 0 False"] == ("raw", 1)
    assert found["guard 1000 True"] == ("int4", 0)


def test_a_lora_adapter_finds_its_own_kv_and_no_other() -> None:
    """Part of case s11: records of an adapter, of another one and of the base model are told apart, and prompts of an
    adapter are restored, never blended."""
    (found,) = in_scheduler(adapters, str(folder_of("llama")))
    assert [found[f"first {lora}"] for lora in ("one", "two", None)] == [0, 0, 0]
    assert [found[f"blended {lora}"] for lora in ("one", "two", None)] == [False, False, True]
    whole = SYSTEM + len(A) + len(B) + QUESTION + 3 * SEPARATORS - 1
    assert [found[f"again {lora}"] for lora in ("one", "two", None, "three")] == [whole, whole, whole, 0]


@pytest.mark.parametrize("field", ["target"])
def test_a_blend_beyond_the_budget_is_cut_to_a_prefix_or_given_up(field: str) -> None:
    (found,) = in_scheduler(budgeted, str(folder_of("llama")))
    cut = found["cut"]
    assert 0 < cut[field] < found["asked"] - 1
    assert cut["cut"] > 0
    assert cut["reused"] + cut["recomputed"] > 0
    assert cut["exact"] + cut["reused"] + cut["recomputed"] + cut["fresh"] == found["asked"]
    assert np.isfinite(cut["largest"])
    assert found["refused target"] == 0
    assert found["given up"] > 0
