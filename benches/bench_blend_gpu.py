"""Time to the end of prefill on a GPU: blending against the model's own full prefill, paired in one process.

``python benches/bench_blend_gpu.py [--json FILE] [--tokens N] [--tiny] [--only checks,kernels,blend]``. A model of
Llama-8B's shape with random weights, made on the GPU; a prompt of a system part, five documents that the store knows
from other prompts, and a question of 64 tokens; records in the real store, page-locked. First the kernels are checked
against plain torch, then every layer's KV at ratio 1.0 against the model's own prefill; then the times. Every
repetition measures each way once, one after the other; a speed-up is the median of the repetitions' own quotients.

It needs no network and no installation: ``PYTHONPATH=python:adapters/transformers/src:.`` and the built
``python/blendstore/_core.abi3.so`` are enough. ``--tiny`` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from blendstore import Lease, Namespace, Store, __version__
from blendstore.blend import BlendRunner, BlendSettings, fused, streamed
from blendstore.blend.drift import DriftSettings
from blendstore.blend.pinned import PinnedArena
from blendstore.blend.records import LeaseRecords, write_record
from blendstore.blend.transfer import WorkingKV
from blendstore.plan import BlendPlan, Candidate, build_plan
from blendstore_transformers.model import TransformersModel

Tokens = npt.NDArray[np.uint32]
ROOT = Path(__file__).parents[1]
SEPARATOR, LEAD = 2, 200


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of the model and of the prompt."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    documents: int
    length: int
    question: int
    chunk: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=131_072,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=False,
        )


LLAMA_8B = Size(32, 4096, 14336, 32, 8, 128_256, 5, 3000, 64, 256)
TINY = Size(4, 64, 128, 4, 2, 512, 2, 60, 16, 16)


@dataclass(frozen=True, slots=True)
class Way:
    """One way of prefilling the prompt; without settings it is the model's own prefill."""

    name: str
    settings: BlendSettings | None
    bar: float | None = None


DRIFT = DriftSettings()
WAYS = (
    Way("full prefill", None),
    Way("full reuse", BlendSettings("none", (0.0,))),
    Way("deviation 0.15", BlendSettings("deviation", (0.15,), drift=None), 4.0),
    Way("deviation 0.30", BlendSettings("deviation", (0.30,), drift=None)),
    Way("query 0.05", BlendSettings("query", (0.05,), drift=DRIFT)),
    Way("query 0.10", BlendSettings("query", (0.10,), drift=DRIFT), 4.0),
    Way("query 0.10, no drift", BlendSettings("query", (0.10,), drift=None)),
    Way("query 0.10, no scores", BlendSettings("query", (0.10,), drift=DRIFT, options={"first_layer": 10_000})),
    Way("query 0.15", BlendSettings("query", (0.15,), drift=DRIFT)),
)


@dataclass(slots=True)
class Scene:
    """A model, a prompt, and its plan over leased records."""

    engine: TransformersModel
    ids: Tensor
    plan: BlendPlan
    where: list[tuple[Lease, int]]

    @property
    def device(self) -> torch.device:
        return self.engine.geometry.device

    def records(self) -> LeaseRecords:
        return LeaseRecords(self.engine.geometry, self.where)

    def run(self, settings: BlendSettings) -> Tensor:
        """KV of the blended prompt."""
        return BlendRunner(self.engine).run(self.ids, self.plan, self.records(), settings).kv

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def make_model(size: Size, device: torch.device, dtype: torch.dtype) -> TransformersModel:
    """Random weights, made where they stay."""
    torch.manual_seed(2405)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = LlamaForCausalLM(size.config())  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
    return TransformersModel(model.eval())


def make_scene(size: Size, engine: TransformersModel, store: Store, tokens: int) -> Scene:
    """A prompt of ``tokens`` tokens: a system part that the store knows exactly, documents captured behind something
    else, a question."""
    make = np.random.default_rng(1)

    def draw(count: int) -> Tokens:
        return make.integers(0, size.vocabulary, count, dtype=np.uint32)

    system = draw(tokens - size.documents * (SEPARATOR + size.length) - size.question)
    documents = [draw(size.length) for _ in range(size.documents)]
    space = Namespace([("model", b"random")])
    keep(size, engine, store, space, np.empty(0, np.uint32), system)
    for document in documents:
        keep(size, engine, store, space, draw(LEAD), document)
    parts, at = [system], len(system)
    candidates: list[Candidate] = []
    where: list[tuple[Lease, int]] = []
    where += leased(store, space, system, 0, 0, exact=True, group=0, candidates=candidates, chunk=0)
    for number, document in enumerate(documents):
        at += SEPARATOR
        where += leased(
            store, space, document, at, LEAD, exact=False, group=number + 1, candidates=candidates, chunk=len(where)
        )
        parts += [draw(SEPARATOR), document]
        at += len(document)
    ids = np.concatenate([*parts, draw(size.question)])
    plan = build_plan(len(ids), engine_prefix=0, candidates=candidates, min_tokens=1)
    return Scene(engine, torch.from_numpy(ids.astype(np.int64)).to(engine.geometry.device), plan, where)


def keep(size: Size, engine: TransformersModel, store: Store, space: Namespace, lead: Tokens, document: Tokens) -> None:
    """Prefill ``document`` behind ``lead`` and store its KV."""
    ids = torch.from_numpy(np.concatenate([lead, document]).astype(np.int64)).to(engine.geometry.device)
    layers = [(k[len(lead) :], v[len(lead) :]) for k, v in engine.prefill(ids)]
    with store.reserve(
        space, document, bytes_per_token=engine.geometry.bytes_per_token, source_position=len(lead), provenance=1,
        rank=1,
    ) as room:  # fmt: skip
        for index in range(len(room)):
            write_record(engine.geometry, room.buffer(index), layers, *room.bounds(index))
        assert room.commit() == len(room), "the store has no room for the prompt's records"


def leased(
    store: Store, space: Namespace, document: Tokens, at: int, source: int, *, exact: bool, group: int,
    candidates: list[Candidate], chunk: int,
) -> list[tuple[Lease, int]]:  # fmt: skip
    """Look a document up, and add its chunks to the candidates."""
    lease = store.lookup_segments(space, document, np.array([[0, len(document)]]))
    assert all(lease.hits), "a record is missing"
    start = 0
    for index in range(len(lease)):
        meta = lease.meta(index)
        assert meta is not None
        stop = start + meta.ntokens
        candidates.append(Candidate(at + start, at + stop, chunk + index, 0, source + start, exact, group, at))
        start = stop
    return [(lease, index) for index in range(len(lease))]


def differences(found: Tensor, wanted: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Of each layer, the largest difference of K or V relative to the largest value."""
    return [
        max(float((found[i, j].float() - pair[j].float()).abs().max() / pair[j].float().abs().max()) for j in (0, 1))
        for i, pair in enumerate(wanted)
    ]


def check(scene: Scene) -> dict[str, float]:
    """Every token recomputed: KV against the model's own prefill, and that prefill with another attention kernel."""
    wanted = scene.engine.prefill(scene.ids)
    out = {}
    for name in ("query", "deviation"):
        found = differences(scene.run(BlendSettings(name, (1.0,), drift=DRIFT)), wanted)
        out[f"{name} 1.0, layer 1"], out[f"{name} 1.0, worst layer"] = found[1], max(found)
    if scene.device.type == "cuda" and scene.engine.geometry.dtype != torch.float32:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.MATH):
            other = [(k.clone(), v.clone()) for k, v in scene.engine.prefill(scene.ids)]
        found = differences(torch.stack([torch.stack(pair) for pair in other]), wanted)
        out["the model with another kernel, layer 1"], out["the model with another kernel, worst layer"] = (
            found[1],
            max(found),
        )
    return out


def timed(scene: Scene, call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds until the work is done, and until the host had handed it over."""
    scene.settle()
    begin = time.perf_counter()
    made = call()
    handed = time.perf_counter()
    scene.settle()
    done = time.perf_counter()
    del made
    return (done - begin) * 1e3, (handed - begin) * 1e3


def measure(scene: Scene, repetitions: int) -> list[dict[str, Any]]:
    """One row for each way."""

    def call(way: Way) -> Callable[[], object]:
        if way.settings is None:
            return lambda: scene.engine.prefill(scene.ids)
        return lambda: scene.run(way.settings)  # type: ignore[arg-type]

    memory: dict[str, float] = {}
    for way in WAYS:
        timed(scene, call(way))
        if scene.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            timed(scene, call(way))
            memory[way.name] = (torch.cuda.max_memory_allocated() - held) / 2**30
    times: dict[str, list[tuple[float, float]]] = {way.name: [] for way in WAYS}
    for _ in range(repetitions):
        for way in WAYS:
            times[way.name].append(timed(scene, call(way)))
    rows = []
    for way in WAYS:
        spent = [done for done, _ in times[way.name]]
        gains = [full[0] / done for full, done in zip(times["full prefill"], spent, strict=True)]
        rows.append(
            {
                "way": way.name,
                "ms": statistics.median(spent),
                "ms_lowest": min(spent),
                "ms_highest": max(spent),
                "host_ms": statistics.median(handed for _, handed in times[way.name]),
                "speedup": statistics.median(gains),
                "bar": way.bar,
                "peak_gib": memory.get(way.name),
            }
        )
    return rows


def loading(scene: Scene, repetitions: int) -> list[dict[str, Any]]:
    """Bringing in all layers and nothing else, with different numbers of layers to a copy."""
    rows = []
    before = streamed._TOGETHER

    @torch.inference_mode()
    def load() -> None:
        kv = WorkingKV(scene.engine, scene.plan, scene.records(), layerwise=True)
        for index in range(scene.engine.geometry.layers):
            kv.ready(index)
        kv.close()

    for together in (1, 2, 4, 8):
        streamed._TOGETHER = together
        found = [timed(scene, load) for _ in range(repetitions + 1)][1:]
        cached = (scene.plan.exact + scene.plan.reused) * scene.engine.geometry.bytes_per_token
        spent = statistics.median(done for done, _ in found)
        rows.append({"way": f"loading, {together} layers a copy", "ms": spent, "gb_s": cached / spent / 1e6})
    streamed._TOGETHER = before
    return rows


def profile(scene: Scene, settings: BlendSettings) -> str:
    """Where a run spends the GPU's time, by kernel."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        scene.run(settings)
        scene.settle()
    by = "self_cuda_time_total" if scene.device.type == "cuda" else "self_cpu_time_total"
    return str(found.key_averages().table(sort_by=by, row_limit=16, max_name_column_width=60))


def check_kernels() -> bool:
    """The checks of ``tests/kernels`` on this machine's GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    command += ["-n", "12"] if importlib.util.find_spec("xdist") else []
    files = [str(ROOT / "tests/kernels" / name) for name in ("check_attention.py", "check_drift.py", "check_rows.py")]
    return subprocess.run([*command, *files], cwd=ROOT, check=False).returncode == 0  # noqa: S603 - our own files


def small_check(size: Size, device: torch.device) -> dict[str, float]:
    """The check in float32, where it is exact: four layers of the same width, a short prompt."""
    small = replace(size, layers=min(4, size.layers), length=min(300, size.length), vocabulary=512)
    engine = make_model(small, device, torch.float32)
    store = Store(capacity_bytes=1 << 28, chunk_size=size.chunk, lease_timeout_s=3600.0)
    tokens = small.documents * (SEPARATOR + small.length) + small.question + 40
    return check(make_scene(small, engine, store, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--tokens", type=int, default=15_360)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--only", default="checks,kernels,blend", help="parts to run")
    parser.add_argument("--profile", action="store_true", help="also print the costliest kernels of two ways")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try the script")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    parts = args.only.split(",")
    device = torch.device("cpu" if args.tiny else "cuda")
    size, dtype = (TINY, torch.float32) if args.tiny else (LLAMA_8B, torch.bfloat16)
    tokens = size.documents * (SEPARATOR + size.length) + size.question + 30 if args.tiny else args.tokens
    versions = {"blendstore": __version__, "torch": torch.__version__, "python": platform.python_version()}
    result: dict[str, Any] = {"command": sys.argv, "versions": versions, "tokens": tokens, "dtype": str(dtype)}
    result["device"] = "CPU" if args.tiny else torch.cuda.get_device_name()
    good = True
    if "checks" in parts:
        if not args.tiny:
            good = check_kernels()
            result["kernels_right"] = good
        result["float32_error"] = small_check(size, device)
        good &= max(result["float32_error"].values()) < 1e-4
        print("float32, relative error of KV at ratio 1.0:", result["float32_error"], flush=True)
    if "kernels" in parts and not args.tiny:
        from benches import bench_gpu_kernels

        result["kernels"] = bench_gpu_kernels.measure(tokens)
        bench_gpu_kernels.show(result["kernels"])
    rows: list[dict[str, Any]] = []
    if "blend" in parts:
        engine = make_model(size, device, dtype)
        store = Store(
            capacity_bytes=int(tokens * engine.geometry.bytes_per_token * 1.2) + (1 << 24),
            chunk_size=size.chunk,
            lease_timeout_s=3600.0,
        )
        pinned = None if args.tiny else PinnedArena(store)
        begin = time.perf_counter()
        fused.warm_up(engine.geometry)
        result["warm_up_s"] = time.perf_counter() - begin
        scene = make_scene(size, engine, store, tokens)
        plan = scene.plan
        print(f"exact {plan.exact}, reused {plan.reused}, fresh {plan.fresh}, chunks {len(scene.where)}", flush=True)
        result["error"] = check(scene)
        print("relative error of KV at ratio 1.0:", result["error"], flush=True)
        result["loading"] = loading(scene, args.repetitions)
        rows = result["blend"] = measure(scene, args.repetitions)
        if args.profile:
            for way in WAYS:
                if way.name in ("deviation 0.15", "query 0.10"):
                    print(f"\n{way.name}\n{profile(scene, way.settings)}")  # type: ignore[arg-type]
        del scene
        if pinned is not None:
            pinned.close()
    result["fallbacks"] = dict(fused.fallbacks)
    good &= not result["fallbacks"]
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    for row in result.get("loading", []):
        print(f"{row['way']:<26}{row['ms']:>9.1f} ms{row['gb_s']:>9.1f} GB/s")
    if rows:
        print(f"{'way':<26}{'ms':>9}{'from':>9}{'to':>9}{'host ms':>9}{'speed-up':>10}{'bar':>6}{'peak GiB':>10}")
    for row in rows:
        print(
            f"{row['way']:<26}{row['ms']:>9.1f}{row['ms_lowest']:>9.1f}{row['ms_highest']:>9.1f}{row['host_ms']:>9.1f}"
            f"{row['speedup']:>9.2f}x{row['bar'] or '':>6}{row['peak_gib'] or 0:>10.2f}"
        )
    if result["fallbacks"]:
        print(f"ran in plain torch: {result['fallbacks']}")
    if not good:
        raise SystemExit("NOT RIGHT: see the checks above")


if __name__ == "__main__":
    main()
