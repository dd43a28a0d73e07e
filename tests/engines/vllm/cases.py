"""Cases from the field on one worker's store and runner, within a real engine's process while it has no requests.

Each function is called there by `Engine.case` and returns plain values. Stores and counters are the case's own; the
model, its cache and the engine's attention are the engine's.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blendstore.codec.formats import FORMATS
from blendstore.config import Config
from blendstore.options import RequestOptions
from blendstore.startup import guarded
from blendstore.tiers import Payload, open_store
from blendstore_vllm.messages import Ask, Keep, Load
from blendstore_vllm.scheduling import first_sight
from blendstore_vllm.telemetry import Recorder
from tests.engines.vllm.engines import CONFIG
from tests.engines.vllm.models import SEPARATOR
from tests.engines.vllm.prompts import QUESTION, TAILED, A, B, C, D, prompt

KINDS = ("prefix", "exact", "reused", "recomputed", "fresh")


class Bench:
    """A store of its own behind the engine's model."""

    def __init__(self, **config: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from blendstore_vllm.connector import _runner_of

        self.connector: Any = get_kv_transfer_group()
        self.whole = self.connector._whole
        self.runner = _runner_of(self.whole)
        wanted = {**{key.lower(): value for key, value in CONFIG.items()}, "enable_blending": True, **config}
        self.config = Config.load(env={}, overrides=wanted)
        serving = self.connector._serving
        store = open_store(self.config, payload=Payload.of(serving.geometry))
        self.serving: Any = replace(serving, config=self.config, store=store, metrics=Recorder())
        self.kv = self.serving.kv
        self.layers = range(self.serving.geometry.layers)

    def blocks(self, count: int) -> list[int]:
        """The last blocks of the engine's cache, enough for ``count`` tokens."""
        size = self.serving.block
        end = self.kv.blocks * self.kv.block // size
        return list(range(end - -(-count // size), end))

    def own(self, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
        """K and V of every layer as the engine's own prefill writes them, at the first slots of `blocks`."""
        from blendstore_vllm.versions import attention_context, prefill_metadata

        slots = self.serving.slots(self.blocks(len(tokens)), len(tokens))
        metadata = prefill_metadata(self.runner, slots)
        with (
            torch.inference_mode(),
            attention_context(metadata, self.whole, len(tokens), dict.fromkeys(metadata, slots)),
        ):
            self.serving.model.decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), None)
            return self.read(slots)

    def read(self, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of every layer."""
        return [self.kv.read(index, slots) for index in self.layers]

    def ask(self, tokens: list[int], held: int = 0, lora: int = 0, name: str = "case", **options: Any) -> Ask:
        """As the scheduler's side asks for a request with these options."""
        adapter = SimpleNamespace(lora_name=f"adapter {lora}", lora_int_id=lora, lora_path=f"/adapters/{lora}")
        request = SimpleNamespace(
            request_id=name, prompt_token_ids=tokens, mm_features=[], prompt_embeds=None, pooling_params=None,
            skip_reading_prefix_cache=False, kv_transfer_params={"blendstore": options}, cache_salt=None,
            lora_request=adapter if lora else None,
        )  # fmt: skip
        return replace(first_sight(request).ask, held=held, limit=len(tokens) - 1)

    def keep(self, tokens: list[int], lora: int = 0, **options: Any) -> None:
        """As after a request that the engine has computed."""
        self.own(tokens)
        self.serving.keep(Keep(self.ask(tokens, lora=lora, **options), self.blocks(len(tokens)), loaded=False))

    def blend(self, tokens: list[int], held: int = 0, **options: Any) -> dict[str, Any]:
        """Fill a prompt of which the engine holds ``held`` tokens, in memory full of NaN; errors against its own KV."""
        wanted, blocks = self.own(tokens), self.blocks(len(tokens))
        before = dict(self.serving.metrics.counts)
        ask = self.ask(tokens, held, **options)
        found = self.serving.look(ask)
        while found.waiting:
            found = self.serving.look(ask)
        target = found.target
        whole = self.serving.slots(blocks, len(blocks) * self.serving.block)
        for index, pair in enumerate(wanted):
            nothing = torch.full((len(whole), *pair[0].shape[1:]), torch.nan)
            self.kv.write(index, whole, nothing, nothing)
            self.kv.write(index, whole[:held], *(part[:held] for part in pair))
        failed = self.serving.fill(Load(replace(ask, limit=target), blocks))
        got = self.read(whole[:target])
        for index, (k, _) in enumerate(wanted):  # the engine's own attention doesn't mask NaN behind a prompt's end
            self.kv.write(index, whole, torch.zeros(len(whole), *k.shape[1:]), torch.zeros(len(whole), *k.shape[1:]))
        pairs = [(x, y[:target]) for mine, own in zip(got, wanted, strict=True) for x, y in zip(mine, own, strict=True)]
        counts = self.serving.metrics.counts
        return {
            "target": target,
            "failed": failed,
            "kv": [(k.numpy(), v.numpy()) for k, v in got],
            "largest": float(torch.stack([(x - y).abs().max() for x, y in pairs]).max()),
            "sum": sum(float((x - y).square().sum()) for x, y in pairs),
            "held untouched": all(torch.equal(x[:held], y[:held]) for x, y in pairs),
            **{kind: counts[kind] - before.get(kind, 0) for kind in KINDS},
        }

    def provenances(self, document: list[int]) -> set[int | None]:
        """Of the document's records."""
        names = self.serving._pipeline("").namespace(RequestOptions())
        keys = names.chain_keys(np.array(document, dtype=np.uint32), chunk_size=self.config.chunk_size)
        with self.serving.store.lookup(keys) as lease:
            metas = [lease.meta(index) for index in range(len(lease))]
        return {None if meta is None else meta.provenance for meta in metas}


def several() -> dict[str, Any]:
    """Cases b03, b04, b07 and b09 on one store."""
    bench = Bench()
    for document in (A, B, D):
        bench.keep(prompt(document))
    asked = prompt(D, C, B, A)
    out: dict[str, Any] = {f"b03 {ratio}": bench.blend(asked, 200, ratio=ratio) for ratio in (0.15, 0.3, 0.6, 1.0)}
    for ratio in (0.0, 0.5, 1.0):
        out[f"b04 {ratio}"] = bench.blend(prompt(B, C, A), ratio=ratio)
    bench.keep(prompt(TAILED))
    out["tail"] = bench.blend(prompt(B, TAILED), ratio=1.0)
    for row in out.values():
        del row["kv"]
    for number in range(100):  # their requests are over without a word
        bench.serving.look(bench.ask(asked, name=f"late {number}"))
    names = [f"look {number}" for number in range(1000)]
    for name in names:  # b09: looked up, and never filled
        bench.serving.look(bench.ask(asked, name=name))
    waiting = len(bench.serving._looked)
    bench.serving.forget(names)
    stats = bench.serving.store.stats()
    out["b09"] = {
        "waiting": waiting, "left": len(bench.serving._looked), "pinned": stats["bytes_pinned"],
        "leases": stats["leases"],
    }  # fmt: skip
    out["errors"] = bench.serving.metrics.counts["store_error"] + bench.serving.metrics.counts["fallback"]
    return out


def refused() -> dict[str, Any]:
    """Case b06: a model that has no layers to run, and one that the runner does not reproduce."""
    from vllm.config import set_current_vllm_config

    from blendstore_vllm import model, setup

    bench = Bench()
    caches = {attention.layer_name: attention.kv_cache for attention in bench.serving.model.attentions}
    plain = bench.runner

    class Recurrent(nn.Module):
        """A model class without support."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    class Other:
        """The engine's runner with another model."""

        def __getattr__(self, name: str) -> Any:
            return Recurrent if name == "get_model" else getattr(plain, name)

    out: dict[str, Any] = {}

    def attempt(name: str, runner: Any) -> None:
        told: list[str] = []
        info, setup.log.info = setup.log.info, lambda text, *more: told.append(text % more)  # type: ignore[method-assign]
        try:
            with set_current_vllm_config(bench.whole):
                made = setup.set_up(bench.config, bench.whole, runner, caches)
        finally:
            setup.log.info = info  # type: ignore[method-assign]
        out[name] = {"blended": made.model is not None, "gauge": _gauge(made), "told": told[0]}
        try:
            with set_current_vllm_config(bench.whole):
                setup.set_up(replace(bench.config, require_blending=True), bench.whole, runner, caches)
        except Exception as error:
            out[name]["required"] = f"{type(error).__name__}: {error}"

    attempt("well", plain)
    attempt("no layers", Other())
    softcap, model._softcap = model._softcap, lambda attention: 0.5
    try:
        attempt("another computation", plain)
    finally:
        model._softcap = softcap
    return out


def _gauge(made: Any) -> int:
    """Of the series ``blendstore_blending``."""
    return int(made.metrics.take().data["blending"])


def provenance() -> list[set[int | None]]:
    """Case b11 both ways, and what a blend computed."""
    first, second, third = Bench(), Bench(), Bench()
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


def failing() -> list[Any]:
    """Case f01: a record that can't be read, one of the wrong length, and a store that is closed."""
    from blendstore.blend import records

    bench = Bench()
    bench.keep(prompt(A))
    bench.keep(prompt(B))
    module: Any = records.LeaseRecords
    view, out = records.LeaseRecords.kept, list[Any]()
    for kind in (OSError, ValueError):

        def broken(*_: Any, kind: type[Exception] = kind) -> Any:
            raise kind("broken")

        module.kept = broken
        try:
            row = bench.blend(prompt(B, A), ratio=1.0)
        finally:
            module.kept = view
        out.append((len(row["failed"]), bench.serving.metrics.counts["fallback"]))
    again = bench.blend(prompt(B, A), ratio=1.0)
    out.append((again["failed"], again["largest"]))
    out.append(bench.serving.store.stats()["bytes_pinned"])
    bench.serving.store.close()
    bench.keep(prompt(C))
    out.append(bench.serving.metrics.counts["store_error"])
    return out


def restarted(folder: str) -> dict[str, Any]:
    """What a second server finds in the directory of one that has ended, whose records were coded on their way down."""
    config = {"local_disk": folder, "max_local_disk_size": 0.1, "local_serde": "lossless"}
    first = Bench(**config)
    for document in (A, B):
        first.keep(prompt(document))
    first.serving.store.close()
    row = Bench(**config).blend(prompt(B, A), ratio=1.0)
    del row["kv"]
    return row


@torch.inference_mode()
def packed() -> dict[str, Any]:
    """A prompt that comes back in the order that it was kept in, in each format; a document with a value that is no
    number; and what the guard leaves of a format."""
    out: dict[str, Any] = {}
    for name in FORMATS:
        bench = Bench(local_format=name)
        bench.keep(prompt(A, B))
        used = bench.serving.store.stats()["bytes_used"]
        out[name] = {**bench.blend(prompt(A, B)), "bytes": used}
        del out[name]["kv"]
        if name == "raw":
            continue
        bench = Bench(local_format=name)
        tokens = prompt(D)
        own = bench.own(tokens)
        at = len(tokens) - len(QUESTION) - len(SEPARATOR) - 1
        slots = bench.serving.slots(bench.blocks(len(tokens)), len(tokens))
        own[-1][1][at, 0, 3] = torch.nan
        bench.kv.write(len(own) - 1, slots, *own[-1])
        bench.serving.keep(Keep(bench.ask(tokens), bench.blocks(len(tokens)), loaded=False))
        own[-1][1][at, 0, 3] = 0
        bench.kv.write(len(own) - 1, slots, *own[-1])
        keys = (
            bench.serving._pipeline("")
            .namespace(RequestOptions())
            .chain_keys(np.array(D, dtype=np.uint32), chunk_size=bench.config.chunk_size)
        )
        with bench.serving.store.lookup(keys) as lease:
            out[f"not a number, {name}"] = [lease.meta(at) is not None for at in range(len(lease))]
        out[f"errors, {name}"] = bench.serving.metrics.counts["store_error"]
    for bound in (0, 1e3):
        bench = Bench(local_format="int4", codec_max_kl=bound)
        tokenizer = bench.whole.model_config.tokenizer
        kept, given_up = guarded(bench.config, bench.serving.model, tokenizer, context=2048, trust_remote_code=False)
        out[f"guard {bound:g}"] = kept.local_format, given_up
    return out


def waiting() -> dict[str, Any]:
    """What is said of a prompt whose records a lower tier is slow to bring, and of one whose time to wait is over."""
    bench, out = Bench(tier_wait_ms=60_000), dict[str, Any]()
    bench.keep(prompt(A))
    pipeline = bench.serving._pipeline("")
    slow = SimpleNamespace(poll=lambda: False)
    pipeline.fetch = lambda tokens, options: slow
    ask = bench.ask(prompt(A), name="slow")
    out["first"] = bench.serving.look(ask)
    out["again"] = bench.serving.look(ask)
    slow.poll = lambda: True
    out["brought"] = bench.serving.look(ask)
    slow.poll = lambda: False
    bench.serving.config = replace(bench.config, tier_wait_ms=0)
    out["late"] = bench.serving.look(bench.ask(prompt(A), name="late"))
    out["left"] = slow in pipeline._late
    bench.serving.forget(["slow", "late"])
    out["remembered"] = len(bench.serving._coming)
    return out


def adapters() -> dict[str, int]:
    """What a prompt finds that was kept with an adapter, by who asks: tokens."""
    bench = Bench()
    tokens, moved = prompt(A, B), prompt(B, A)
    bench.keep(tokens, lora=1)
    asked = {
        "same": bench.ask(tokens, lora=1),
        "same, moved": bench.ask(moved, lora=1),
        "other": bench.ask(tokens, lora=2),
        "base": bench.ask(tokens),
        "base, moved": bench.ask(moved),
    }
    return {name: int(bench.serving.look(ask).target) for name, ask in asked.items()}


def against_the_embedded_engine(folder: str) -> dict[str, dict[str, Any]]:
    """The same prompts through this engine's cache and through the engine in transformers, by way of blending."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from blendstore_transformers import Engine as Embedded
    from blendstore_transformers.model import layers_of

    auto: Any = AutoModelForCausalLM
    out: dict[str, dict[str, Any]] = {}
    bench = Bench()
    tokenizer: Any = AutoTokenizer.from_pretrained(Path(folder))
    embedded = Embedded(auto.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer, bench.config)
    for document in (A, B, C, D):
        bench.keep(prompt(document))
        embedded.prefill(prompt(document))
    ways: dict[str, dict[str, Any]] = {
        "as configured": {},
        "deviation": {"selector": "deviation", "ratio": 0.3},
        "none": {"selector": "none", "ratio": 0.0},
    }
    for name, options in ways.items():
        tokens = prompt(D, B, A, C)
        mine = bench.blend(tokens, store=False, **options)
        found = embedded.prefill(tokens, RequestOptions(store=False, **options))
        pairs = [
            (torch.from_numpy(x), y[: mine["target"]])
            for ours, theirs in zip(mine["kv"], layers_of(found.cache), strict=True)
            for x, y in zip(ours, theirs, strict=True)
        ]
        out[name] = {
            "difference": float(torch.stack([(x - y).abs().max() for x, y in pairs]).max()),
            "error": mine["largest"],
            "recomputed": (mine["recomputed"], found.report.recomputed),
            "reused": (mine["reused"], found.report.reused),
        }
    return out
