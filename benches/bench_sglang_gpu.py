"""What blending gives in the real SGLang: time to the first token of multi-document prompts, in one server.

Prompts are token ids: a system part, documents behind separators, a question. One server answers them all; requests
ask for no reuse, K deviation at 0.15 or the default selector at 0.10. The engine's own prefix cache is emptied before
each, so that every document comes from the store's memory or is computed. Where the time goes is told by stamps in the
scheduler. Then one prompt is computed by SGLang, blended at ratio 1.0, and for comparison at 0.15 and 0, each time into
slots whose former content was overwritten with NaN, and the KV is compared layer by layer. A second server without
blendstore runs beside the first: both answer prompts that share nothing, taking turns, for the overhead.

    python benches/bench_sglang_gpu.py --json out/bench-sglang.json          # H100/H200, SGLang 0.5.14, bf16, 8B shape
    python benches/bench_sglang_gpu.py --shape tiny --device cpu --document-length 200 --rounds 2   # dry run

Weights are random. The engine's own (``load_format=dummy``) are so small that no token's KV depends on another token:
they are drawn again, so that every layer moves the residual and attention picks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip
VOCABULARY = 32000
HOW: dict[str, Mapping[str, object]] = {
    "deviation 0.15": {"selector": "deviation", "ratio": 0.15, "store": False},
    "query 0.10": {"selector": "query", "ratio": 0.10, "store": False},
    "deviation 0.10": {"selector": "deviation", "ratio": 0.10, "store": False},
    "query 0.05": {"selector": "query", "ratio": 0.05, "store": False},
    "none": {"selector": "none", "ratio": 0.0, "store": False},
}
NO_REUSE: Mapping[str, object] = {"reuse": False, "store": False}


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="bench-sglang-") as folder:
        measured = run(args, Path(folder))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    report(measured)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the servers and measure."""
    make_model(folder / "model", args.shape)
    os.environ["BENCH_SGLANG_LOG"] = str(folder / "log.jsonl")
    os.environ.setdefault("BLENDSTORE_MAX_LOCAL_CPU_SIZE", str(args.store_gib))
    os.environ.setdefault("BLENDSTORE_BLEND_BUDGET_MS", "0")
    os.environ.setdefault("BLENDSTORE_LOCAL_FORMAT", args.local_format)
    # Weights are random: what the guard measures with them says nothing.
    os.environ.setdefault("BLENDSTORE_CODEC_MAX_KL", "100")
    plug_in(folder / "site")
    prompts, log = Prompts(args), Log(folder / "log.jsonl")
    measured: dict[str, Any] = {
        "shape": args.shape,
        "document_length": args.document_length,
        "documents": args.documents,
        "ranks": args.ranks,
        "local_format": args.local_format,
    }
    engines = [start(args, folder / "model", "blendstore-bench", 30000)]
    try:
        if args.plain:
            engines.append(start(args, folder / "model", "plain-bench", 31000))
        if args.only is None:
            measured["query"] = measure_queries(engines[0], prompts, args, log)
            measured["kv"] = compare_kv(engines[0], prompts, log, args.ranks)
            measured["synchronisations"] = find_waits(engines[0], prompts, log)
        if args.plain:
            measured["nothing shared"] = measure_nothing_shared(engines, prompts, args)
    finally:
        engines[0].shutdown()  # ends every child of this process
    return measured


class Log:
    """What the scheduler of the blending server wrote down."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self, what: str) -> dict[str, dict[str, Any]]:
        """The last row of that kind of each request."""
        rows = [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.is_file() else []
        return {row["request"]: row for row in rows if row["what"] == what}


class Prompts:
    """Token ids; the same arguments give the same prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._random = random.Random(args.seed)
        self._length, self._each = args.document_length, args.documents
        self.separator = [4 + ord(c) for c in " # # "]
        self.system, self.question = [1, *self.new(12)], self.new(24)
        self.known = [self.new(self._length) for _ in range(args.known)]

    def new(self, count: int) -> list[int]:
        """Tokens that are no bytes, so no separator can appear among them."""
        return [self._random.randrange(400, VOCABULARY) for _ in range(count)]

    def of(self, documents: list[list[int]]) -> list[int]:
        """System part, documents and question with separators between."""
        out = list(self.system)
        for part in (*documents, self.question):
            out += [*self.separator, *part]
        return out

    def query(self) -> list[int]:
        """Known documents."""
        return self.of(self._random.sample(self.known, self._each))

    def unknown(self) -> list[int]:
        """New documents of the same length."""
        return self.of([self.new(self._length) for _ in range(self._each)])


def measure_queries(engine: Any, prompts: Prompts, args: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Warm every document up, then the same number of prompts in every way, taking turns."""
    warm = [ask(engine, prompts.of([document]))[0] for document in prompts.known]
    ways: dict[str, list[tuple[str, float, float]]] = {"no reuse": [], **{name: [] for name in HOW}}
    cached: dict[str, int] = {}
    for number in range(args.rounds + 2):  # the first two are not counted: kernels are compiled, clocks rise
        for name, options in (("no reuse", NO_REUSE), *HOW.items()):
            prompt = prompts.unknown() if options is NO_REUSE else prompts.query()
            flush(engine)  # every document comes from the store's memory
            request, begin = f"{name} #{number}", time.perf_counter()
            spent, cached[name] = ask(engine, prompt, options, request=request)
            if number >= 2:
                ways[name].append((request, begin, spent))
    out: dict[str, Any] = {"warm_up_ms": statistics.median(warm), "prompt_tokens": len(prompts.query())}
    flush(engine)  # and what was blended last is told
    base = statistics.median(spent for _, _, spent in ways["no reuse"])
    for name, asked in ways.items():
        times = [spent for _, _, spent in asked]
        out[name] = {
            "ttft_ms": statistics.median(times),
            "min_ms": min(times),
            "max_ms": max(times),
            "speedup": base / statistics.median(times),
            "cached_tokens": cached[name],
            "parts_ms": parts(asked, log),
        }
    return out


def parts(asked: list[tuple[str, float, float]], log: Log) -> dict[str, float]:
    """Medians of where the time went; ``blend on the device`` runs beside the host's parts."""
    stamps, blends = log.rows("stamps"), log.rows("served")
    told: dict[str, list[float]] = {}
    for request, begin, spent in asked:
        if request not in stamps:
            continue
        at = stamps[request]["at"]
        answered = begin + spent / 1e3
        edges = [("until matched", begin, at["match"])]
        if "load" in at:
            edges += [
                ("match to load", at["match"], at["load"]),
                ("load, before fill", at["load"], at["fill"]),
                ("fill on the host", at["fill"], at["filled"]),
                ("load, after fill", at["filled"], at["loaded"]),
                ("load to complete", at["loaded"], at["complete"]),
            ]
        else:
            edges.append(("match to complete", at["match"], at["complete"]))
        edges += [("complete", at["complete"], at["completed"]), ("answer", at["completed"], answered)]
        for name, first, last in edges:
            told.setdefault(name, []).append((last - first) * 1e3)
        if request in blends:
            told.setdefault("blend on the device", []).append(blends[request]["milliseconds"])
    return {name: statistics.median(values) for name, values in told.items()}


def compare_kv(engine: Any, prompts: Prompts, log: Log, ranks: int) -> dict[str, Any]:
    """One prompt computed by SGLang, and blended in several ways: differences per layer."""
    prompt = prompts.query()
    flush(engine)
    ask(engine, prompt, NO_REUSE, request="check own")
    ways: dict[str, dict[str, object]] = {
        "1.0": {"ratio": 1.0},
        "0.15": {"ratio": 0.15},
        "0": {"selector": "none", "ratio": 0.0},
    }
    for name, options in ways.items():
        flush(engine)  # or the engine's own prefix cache would answer
        ask(engine, prompt, {**options, "store": False}, request=f"check {name}")
    flush(engine)
    compared, served, memory = log.rows("kv"), log.rows("served"), log.rows("memory")
    others = [(log.rows(f"kv of rank {rank}"), log.rows(f"served of rank {rank}")) for rank in range(1, ranks)]
    return {
        name: {
            **compared.get(f"check {name}", {}),
            "served": served.get(f"check {name}"),
            **memory.get(f"check {name}", {}),
            "other ranks": [
                {**kv.get(f"check {name}", {}), "served": told.get(f"check {name}")} for kv, told in others
            ],
        }
        for name in ways
    }


def find_waits(engine: Any, prompts: Prompts, log: Log) -> dict[str, Any]:
    """Places that make the host wait for the device during a blend of each kind."""
    for name, options in HOW.items():
        flush(engine)
        ask(engine, prompts.query(), options, request=f"waits {name}")
    return {name: log.rows("waits").get(f"waits {name}", {}).get("places") for name in HOW}


def measure_nothing_shared(engines: list[Any], prompts: Prompts, args: argparse.Namespace) -> dict[str, Any]:
    """Time to the first token of new prompts, and of each further one of the same answer: pairs of the two servers, of
    which one is asked at a time and then the other, each first in every second pair."""
    first: list[list[float]] = [[], []]
    each: list[list[float]] = [[], []]
    for number in range(args.rounds + 2):
        if number >= 5 and time.perf_counter() - args.begun > args.seconds:
            break
        for which in (0, 1) if number % 2 else (1, 0):
            at = stream(engines[which], prompts.unknown(), args.tokens if number >= 2 else 9)
            if number >= 2:
                first[which].append(at[0])
                each[which].append((at[-1] - at[0]) / (len(at) - 1))
    out: dict[str, Any] = {"pairs": len(first[0]), "tokens": args.tokens}
    for name, (blend, plain) in (("ttft", first), ("token", each)):
        pairs = sorted(b / p for b, p in zip(blend, plain, strict=True))
        out[name] = {
            "plain_ms": statistics.median(plain),
            "blendstore_ms": statistics.median(blend),
            "ratio": statistics.median(blend) / statistics.median(plain),
            "median_of_pairs": statistics.median(pairs),
            "pairs": pairs,
            "all_plain_ms": plain,
            "all_blendstore_ms": blend,
        }
    return out


def report(measured: Mapping[str, Any]) -> None:
    """A short table, last of all."""
    if "query" in measured:
        report_queries(measured)
    for name in ("ttft", "token") if "nothing shared" in measured else ():
        row = measured["nothing shared"][name]
        print(
            f"nothing shared, {name}: plain {row['plain_ms']:.2f} ms, blendstore {row['blendstore_ms']:.2f} ms, "
            f"ratio {row['ratio']:.4f}, median of pairs {row['median_of_pairs']:.4f} "
            f"[{row['pairs'][0]:.4f}, {row['pairs'][-1]:.4f}]"
        )


def report_queries(measured: Mapping[str, Any]) -> None:
    """What is about documents that are known."""
    query = measured["query"]
    ways = ["no reuse", *HOW]
    print(f"\n{query['prompt_tokens']} tokens; medians in ms; TTFT, and against no reuse")
    for name in ways:
        row = query[name]
        print(f"{name:>16} {row['ttft_ms']:8.1f} [{row['min_ms']:.1f}, {row['max_ms']:.1f}] {row['speedup']:6.2f}x")
    print("\nwhere it goes")
    for name in ways:
        print(f"{name:>16} " + ", ".join(f"{part} {ms:.1f}" for part, ms in query[name]["parts_ms"].items()))
    print(
        "\nKV against SGLang's own prefill: relative error (rms) of K and V in some layers, largest difference anywhere"
    )
    for name, row in measured["kv"].items():
        if not row.get("k_rms"):
            print(f"      ratio {name}: not compared")
            continue
        last = len(row["k_rms"]) - 1
        some = sorted({0, 1, last // 2, last})
        shown = ", ".join(f"layer {i} {row['k_rms'][i]:.2e} / {row['v_rms'][i]:.2e}" for i in some)
        print(f"      ratio {name}: {shown}; max abs {max(row['k_max'] + row['v_max']):.3g}; {row.get('served')}")
        for rank, other in enumerate(row["other ranks"], 1):
            worst = {part: f"{max(other.get(f'{part}_rms', [float('nan')])):.2e}" for part in "kv"}
            print(f"      ratio {name}, rank {rank}: worst layer {worst}; {other['served']}")
    print("\nwaits of the host in a blend: " + json.dumps(measured["synchronisations"]))


def flush(engine: Any) -> None:
    """Empty the engine's own prefix cache, as soon as it is idle."""
    while not engine.flush_cache().success:
        time.sleep(0.02)


def ask(
    engine: Any,
    prompt: list[int],
    options: Mapping[str, object] | None = None,
    request: str | None = None,
) -> tuple[float, int]:
    """(milliseconds until the answer of one token is here, tokens that the engine calls cached)."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    if options is not None:
        sampling["custom_params"] = {"blendstore": dict(options)}
    begin = time.perf_counter()
    answer = engine.generate(input_ids=prompt, sampling_params=sampling, **({"rid": request} if request else {}))
    return (time.perf_counter() - begin) * 1e3, int(answer["meta_info"]["cached_tokens"])


def stream(engine: Any, prompt: list[int], tokens: int) -> list[float]:
    """Milliseconds after which each of ``tokens`` tokens was here."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    begin = time.perf_counter()
    chunks = engine.generate(input_ids=prompt, sampling_params=sampling, stream=True)
    return [(time.perf_counter() - begin) * 1e3 for _ in chunks]


def start(args: argparse.Namespace, model: Path, backend: str, port: int) -> Any:
    """The engine with the flags that are measured."""
    from sglang.srt.entrypoints.engine import Engine

    tokens = 6 * (args.documents + 1) * (args.document_length + 64)
    flags: dict[str, Any] = {
        "model_path": str(model), "load_format": "dummy", "grammar_backend": "none",
        "skip_tokenizer_init": True, "max_total_tokens": tokens, "context_length": 65536, "log_level": "info",
        "sampling_backend": "pytorch", "chunked_prefill_size": 32768, "max_prefill_tokens": 65536, "port": port,
        "radix_cache_backend": backend,
        # Answers come one at a time: one graph is all that decoding them needs.
        **({"cuda_graph_bs_decode": [1]} if args.decode_graphs else {"disable_cuda_graph": True}),
        "disable_prefill_cuda_graph": True,
    }  # fmt: skip
    if args.ranks > 1:
        # NCCL's reduction works between any two GPUs, SGLang's own only where they reach each other's memory.
        flags |= {"tp_size": args.ranks, "disable_custom_all_reduce": True}
    if args.device == "cpu":
        flags |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "mem_fraction_static": 0.5}
    else:
        flags |= {"attention_backend": args.attention_backend, "dtype": "bfloat16"}
    begin = time.perf_counter()
    engine = Engine(**flags)
    print(f"started {backend} in {time.perf_counter() - begin:.0f} s", flush=True)
    return engine


def make_model(folder: Path, shape: str) -> None:
    """A Llama configuration and a tokenizer with one token for each byte."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
        "max_position_embeddings": 65536, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "attention_bias": False, "mlp_bias": False, "rope_scaling": None, **SHAPES[shape],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """A tokenizer with one token for each byte, 4 + byte, and four special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
    others = [byte for byte in range(256) if byte not in kept]
    byte_of = {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, **{c: 4 + byte for c, byte in byte_of.items()}}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def plug_in(folder: Path) -> None:
    """Make this checkout's plugin and this file's backend known to the engine's processes."""
    points = ["bench = bench_sglang_gpu:activate"]
    if not entry_points(group="sglang.srt.plugins", name="blendstore"):
        points.append("blendstore = blendstore_sglang:activate")
    about = folder / "blendstore_bench_sglang-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: blendstore-bench-sglang\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\n" + "\n".join(points) + "\n")
    paths = [str(folder), str(ROOT / "benches"), str(ROOT / "python"), str(ROOT / "adapters/sglang/src")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def activate() -> None:
    """Runs in the engine's processes: both backends, with the weights drawn again."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends

    if "blendstore-bench" not in registered_radix_cache_backends():
        register_radix_cache_backend("blendstore-bench", _watched)
        register_radix_cache_backend("plain-bench", _plain)


def _plain(context: Any) -> Any:
    """SGLang's own tree."""
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    _draw(context.tp_worker.model_runner.model, context.tp_rank)
    return default_radix_cache_factory(context)


def _draw(model: Any, rank: int) -> None:
    """Norms of 1, embeddings of unit variance, and matrices that keep variance; queries and keys are larger, so that
    attention isn't even. Every rank's share is another."""
    import torch

    with torch.inference_mode():
        for number, (name, weight) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator(weight.device).manual_seed(number + 10_000 * rank)
            if weight.dim() == 1:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            spread = 1.0 if "embed" in name else (1.5 if "qkv" in name else 1.0) / weight.shape[1] ** 0.5
            weight.normal_(0.0, spread, generator=generator)


def _watched(context: Any) -> Any:
    """blendstore with stamps, and a look at the KV, the memory and the waits of some requests."""
    from blendstore_sglang.plugin import make
    from blendstore_sglang.serve import Serving

    _draw(context.tp_worker.model_runner.model, context.tp_rank)
    watched: Any = Serving
    cache = make(context)
    watch = Watch(cache, Path(os.environ["BENCH_SGLANG_LOG"]), context.tp_rank)
    cache.match_prefix = watch.around(cache.match_prefix, "match", None)
    cache.init_load_back = watch.around(cache.init_load_back, "load", "loaded")
    cache.prompt_complete = watch.completing(cache.prompt_complete)
    fill, told = watched.fill, watched.report

    def filled(serving: Any, outlook: Any, tenant: Any, *rest: Any) -> None:
        watch.stamp(tenant.name, "fill")
        with watch.looking(tenant.name):
            fill(serving, outlook, tenant, *rest)
        watch.stamp(tenant.name, "filled")

    def reported(serving: Any, served: Any) -> None:
        told(serving, served)
        watch.tell("served", served.request, **{k: v for k, v in asdict(served).items() if k != "request"})

    watched.fill, watched.report = filled, reported
    return cache


class Watch:
    """Writes down what happens to each request, in the scheduler's process."""

    def __init__(self, cache: Any, log: Path, rank: int) -> None:
        self._cache, self._log = cache, log
        self._suffix = f" of rank {rank}" if rank else ""
        self._at: dict[str, dict[str, float]] = {}
        self._own: list[Any] = []

    def tell(self, what: str, request: str, **row: Any) -> None:
        with self._log.open("a") as out:
            out.write(json.dumps({**row, "what": what + self._suffix, "request": request}) + "\n")

    def stamp(self, request: str, name: str) -> None:
        """The first time counts: all processes of a machine share this clock."""
        self._at.setdefault(request, {}).setdefault(name, time.perf_counter())

    def around(self, inner: Any, before: str, after: str | None) -> Any:
        def outer(params: Any) -> Any:
            if params.req is None:
                return inner(params)
            self.stamp(params.req.rid, before)
            out = inner(params)
            if after:
                self.stamp(params.req.rid, after)
            return out

        return outer

    def completing(self, inner: Any) -> Any:
        def outer(request: Any) -> None:
            self.stamp(request.rid, "complete")
            inner(request)
            self.stamp(request.rid, "completed")
            at = self._at.pop(request.rid)
            if "completed" in at and "match" in at:
                self.tell("stamps", request.rid, at=at)
            if request.rid.startswith("check"):
                self._compare(request)

        return outer

    @contextmanager
    def looking(self, request: str) -> Iterator[None]:
        """Memory and waits of the requests that are made for it."""
        import torch

        cuda = self._cache.serving.geometry.device.type == "cuda"
        if cuda and request.startswith("check"):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            yield
            torch.cuda.synchronize()
            self.tell("memory", request, extra_peak_mib=(torch.cuda.max_memory_allocated() - before) / 2**20)
        elif cuda and request.startswith("waits"):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
            places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
            self.tell("waits", request, places=dict(places))
        else:
            yield

    def _compare(self, request: Any) -> None:
        """Keep SGLang's own KV, or compare with it; then make what is there unusable."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        cache, pool = self._cache, self._cache.serving.pool
        layers = range(cache.serving.geometry.layers)
        key = cache.version.radix_key_of(request, request._blendstore.tokens)
        slots = cache.version.slots(cache, type(cache).match_prefix(cache, MatchPrefixParams(key=key))).long()
        now = [(pool.get_key_buffer(i)[slots], pool.get_value_buffer(i)[slots]) for i in layers]
        for index in layers:  # the prompt is answered; whoever takes these slots next has to write them
            pool.get_key_buffer(index)[slots] = float("nan")
            pool.get_value_buffer(index)[slots] = float("nan")
        if request.rid == "check own":
            self._own = now
            return
        row: dict[str, list[float]] = {"k_max": [], "v_max": [], "k_rms": [], "v_rms": []}
        for pair, own in zip(now, self._own, strict=True):
            for part, mine, theirs in zip("kv", pair, own, strict=True):
                n = min(len(mine), len(theirs))
                a, b = mine[:n].float(), theirs[:n].float()
                row[f"{part}_max"].append(float((a - b).abs().max()))
                row[f"{part}_rms"].append(float((a - b).norm() / b.norm()))
        self.tell("kv", request.rid, tokens=len(slots), **row)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="8b")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--attention-backend", default="triton", help="SGLang's, on a GPU (default: triton)")
    add("--documents", type=int, default=5, help="in each prompt (default: 5)")
    add("--document-length", type=int, default=3000, help="tokens (default: 3000)")
    add("--known", type=int, default=10, help="documents that are warmed up (default: 10)")
    add("--rounds", type=int, default=8, help="prompts of each kind (default: 8)")
    add("--tokens", type=int, default=257, help="of each answer when nothing is shared (default: 257)")
    add("--only", choices=["nothing-shared"], help="measure no more than that")
    add("--ranks", type=int, default=1, help="tensor parallel, a GPU each (default: 1)")
    add("--decode-graphs", action="store_true", help="decode by CUDA graphs (default: eager)")
    add("--local-format", choices=["raw", "int8", "int4"], default="raw", help="of the records (default: raw)")
    add("--store-gib", type=float, default=16.0, help="memory of the store (default: 16)")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=255.0, help="no new pair of servers' prompts after that (default: 255)")
    add("--no-plain", dest="plain", action="store_false", help="leave out the server without blendstore")
    add("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.begun = time.perf_counter()
    return args


if __name__ == "__main__":
    main()
