"""What blending gives in the real SGLang: time to the first token of multi-document prompts, in one server.

Prompts are token ids: a system part, documents behind separators, a question. One server answers them all; requests
ask for no reuse, K deviation at 0.15 or the default selector at 0.10. The engine's own prefix cache is emptied before
each, so that every document comes from the store's memory or is computed. Afterwards one prompt is computed by SGLang
and blended at ratio 1.0, and the KV is compared layer by layer; and a server without blendstore answers prompts that
share nothing, for the overhead.

    python benches/bench_sglang_gpu.py --json out/bench-sglang.json          # H100/H200, SGLang 0.5.14, bf16, 8B shape
    python benches/bench_sglang_gpu.py --shape tiny --device cpu --document-length 200 --rounds 2   # dry run

Weights are random (``load_format=dummy``): times and KV do not depend on them, answers do.
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
from collections.abc import Mapping
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
    print(json.dumps(measured, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(measured, indent=1) + "\n")


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the servers and measure."""
    make_model(folder / "model", args.shape)
    os.environ["BENCH_SGLANG_LOG"] = str(folder / "log.jsonl")
    os.environ.setdefault("BLENDSTORE_MAX_LOCAL_CPU_SIZE", str(args.store_gib))
    os.environ.setdefault("BLENDSTORE_BLEND_BUDGET_MS", "0")
    plug_in(folder / "site")
    prompts = Prompts(args)
    measured: dict[str, Any] = {
        "shape": args.shape,
        "document_length": args.document_length,
        "documents": args.documents,
    }
    engine = start(args, folder / "model", "blendstore-bench")
    try:
        measured["query"] = measure_queries(engine, prompts, args)
        measured["kv"] = compare_kv(engine, prompts, folder / "log.jsonl")
        blend = measure_nothing_shared(engine, prompts, args)
    finally:
        engine.shutdown()
    if args.plain:
        engine = start(args, folder / "model", None)
        try:
            plain = measure_nothing_shared(engine, prompts, args)
        finally:
            engine.shutdown()
        measured["nothing shared"] = {
            name: {"plain_ms": plain[name], "blendstore_ms": blend[name], "ratio": blend[name] / plain[name]}
            for name in plain
        }
    return measured


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


def measure_queries(engine: Any, prompts: Prompts, args: argparse.Namespace) -> dict[str, Any]:
    """Warm every document up, then the same number of prompts in every way, taking turns."""
    warm = [ask(engine, prompts.of([document]))[0] for document in prompts.known]
    ways: dict[str, list[float]] = {"no reuse": [], **{name: [] for name in HOW}}
    cached: dict[str, int] = {}
    for number in range(args.rounds + 2):  # the first two are not counted: kernels are compiled, clocks rise
        for name, options in (("no reuse", NO_REUSE), *HOW.items()):
            prompt = prompts.unknown() if options is NO_REUSE else prompts.query()
            flush(engine)  # every document comes from the store's memory
            spent, cached[name] = ask(engine, prompt, options)
            if number >= 2:
                ways[name].append(spent)
    out: dict[str, Any] = {"warm_up_ms": statistics.median(warm), "prompt_tokens": len(prompts.query())}
    base = statistics.median(ways["no reuse"])
    for name, times in ways.items():
        out[name] = {
            "ttft_ms": statistics.median(times),
            "min_ms": min(times),
            "max_ms": max(times),
            "speedup": base / statistics.median(times),
            "cached_tokens": cached[name],
        }
        print(f"{name:>16}: {statistics.median(times):8.1f} ms  {base / statistics.median(times):5.2f}x", flush=True)
    return out


def compare_kv(engine: Any, prompts: Prompts, log: Path) -> dict[str, Any]:
    """One prompt computed by SGLang and blended at ratio 1.0: the largest relative difference per layer."""
    prompt = prompts.query()
    ask(engine, prompt, NO_REUSE, request="check-own")
    flush(engine)  # or the engine's own prefix cache would answer the second one
    ask(engine, prompt, {"ratio": 1.0, "store": False}, request="check-blend")
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    return {row.pop("what"): row for row in rows}


def measure_nothing_shared(engine: Any, prompts: Prompts, args: argparse.Namespace) -> dict[str, float]:
    """Median time to the first token, and of each further one, of new prompts asked one by one."""
    first, each = [], []
    for number in range(args.rounds + 2):
        prompt = prompts.unknown()
        one, _ = ask(engine, prompt)
        many, _ = ask(engine, prompts.unknown(), tokens=65)
        if number >= 2:
            first.append(one)
            each.append((many - one) / 64)
    return {"ttft": statistics.median(first), "token": statistics.median(each)}


def flush(engine: Any) -> None:
    """Empty the engine's own prefix cache, as soon as it is idle."""
    while not engine.flush_cache().success:
        time.sleep(0.02)


def ask(
    engine: Any,
    prompt: list[int],
    options: Mapping[str, object] | None = None,
    tokens: int = 1,
    request: str | None = None,
) -> tuple[float, int]:
    """(milliseconds until the answer of ``tokens`` tokens is here, tokens that the engine calls cached)."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if options is not None:
        sampling["custom_params"] = {"blendstore": dict(options)}
    begin = time.perf_counter()
    answer = engine.generate(input_ids=prompt, sampling_params=sampling, **({"rid": request} if request else {}))
    return (time.perf_counter() - begin) * 1e3, int(answer["meta_info"]["cached_tokens"])


def start(args: argparse.Namespace, model: Path, backend: str | None) -> Any:
    """The engine with the flags that are measured."""
    from sglang.srt.entrypoints.engine import Engine

    tokens = 20 * (args.documents + 1) * (args.document_length + 64)
    flags: dict[str, Any] = {
        "model_path": str(model), "load_format": "dummy", "grammar_backend": "none", "disable_cuda_graph": True,
        "skip_tokenizer_init": True, "max_total_tokens": tokens, "context_length": 65536, "log_level": "info",
        "sampling_backend": "pytorch", "chunked_prefill_size": 32768, "max_prefill_tokens": 65536,
    }  # fmt: skip
    if args.device == "cpu":
        flags |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "mem_fraction_static": 0.5}
    else:
        flags |= {"attention_backend": args.attention_backend, "dtype": "bfloat16"}
    if backend:
        flags["radix_cache_backend"] = backend
    begin = time.perf_counter()
    engine = Engine(**flags)
    print(f"started {backend or 'plain SGLang'} in {time.perf_counter() - begin:.0f} s", flush=True)
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
    """Runs in the engine's processes: blendstore with a look at KV and memory of requests ``check-…``."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends

    if "blendstore-bench" not in registered_radix_cache_backends():
        register_radix_cache_backend("blendstore-bench", _watched)


def _watched(context: Any) -> Any:
    import torch

    from blendstore_sglang.plugin import make

    cache = make(context)
    serving, kept, log = cache.serving, {}, Path(os.environ["BENCH_SGLANG_LOG"])
    cuda = serving.geometry.device.type == "cuda"

    def tell(row: dict[str, Any]) -> None:
        with log.open("a") as out:
            out.write(json.dumps(row) + "\n")

    inner_fill, inner_complete = serving.fill, cache.prompt_complete

    def filled(outlook: Any, tenant: Any, *rest: Any) -> None:
        if not tenant.name.startswith("check-") or not cuda:
            inner_fill(outlook, tenant, *rest)
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        inner_fill(outlook, tenant, *rest)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        tell({"what": "memory", "extra_peak_mib": peak / 2**20, "tokens": len(outlook.prepared.tokens)})

    def complete(request: Any) -> None:
        progress = request._blendstore
        inner_complete(request)
        if not request.rid.startswith("check-"):
            return
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        key = cache.version.radix_key_of(request, progress.tokens)
        slots = cache.version.slots(cache, cache.match_prefix(MatchPrefixParams(key=key))).long()
        pool, layers = serving.pool, range(serving.geometry.layers)
        now = [(pool.get_key_buffer(i)[slots], pool.get_value_buffer(i)[slots]) for i in layers]
        if request.rid == "check-own":
            kept["own"] = now
            return
        worst, mean = [], []
        for (k, v), (own_k, own_v) in zip(now, kept.pop("own"), strict=True):
            n = min(len(k), len(own_k))
            pairs = [(a[:n].float(), b[:n].float()) for a, b in ((k, own_k), (v, own_v))]
            worst.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
            mean.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))
        tell({"what": "ratio 1.0", "tokens": len(slots), "max_relative": worst, "rms_relative": mean})

    object.__setattr__(cache, "prompt_complete", complete)
    cache.serving = _Proxy(serving, fill=filled)
    return cache


class _Proxy:
    """``inner`` with some of its methods replaced."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


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
    add("--store-gib", type=float, default=16.0, help="memory of the store (default: 16)")
    add("--seed", type=int, default=0)
    add("--no-plain", dest="plain", action="store_false", help="leave out the server without blendstore")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
