"""What blending gives in the real vLLM: time to the first token of multi-document prompts, against plain vLLM.

Two engines on the same GPU, one plain and one with blendstore, each in a process of its own, are asked by turns with
prompts of token ids: a system part, documents behind separators, a question. Then one prompt is computed by vLLM and
blended at ratio 1.0, and the KV is compared layer by layer, with a blend at ratio 0 as the control; prompts that share
nothing tell the overhead, pair by pair; and single blends are taken apart.

    python benches/bench_vllm_gpu.py --json out/bench-vllm.json           # H100/H200, vLLM 0.26, bf16, 8B shape, eager
    python benches/bench_vllm_gpu.py --compiled --json out/compiled.json  # as vLLM starts by default
    python benches/bench_vllm_gpu.py --shape tiny --device cpu --document-length 200 --rounds 2   # dry run

Weights are random: times and KV do not depend on them, answers do. Results are written after every stage. A stage that
fails is told with its error and the next one begins; what would begin after ``--limit`` seconds is left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What is measured is this checkout.
sys.path[:0] = [str(ROOT), str(ROOT / "python"), str(ROOT / "adapters/vllm/src")]

from benches.bench_sglang_gpu import HOW, NO_REUSE, Prompts, make_model  # noqa: E402

Options = Mapping[str, object]
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
TRANSFER = {
    "kv_connector": "WatchedConnector", "kv_connector_module_path": "watched_vllm", "kv_role": "kv_both",
}  # fmt: skip
BEGAN = time.perf_counter()


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        measured = Bench(args, Path(folder)).run()
    print(table(measured), flush=True)
    if failed := [name for name, found in measured.items() if isinstance(found, dict) and "error" in found]:
        sys.exit(f"not measured: {', '.join(failed)}")


def told(what: str) -> None:
    """A line of progress."""
    print(f"[{time.perf_counter() - BEGAN:5.0f} s] {what}", flush=True)


class Bench:
    """The stages, their results, and the two engines."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.prompts = args, folder, Prompts(args)
        self.measured: dict[str, Any] = {
            "shape": args.shape,
            "compiled": args.compiled,
            "control": args.control,
            "documents": args.documents,
            "document_length": args.document_length,
        }

    def run(self) -> dict[str, Any]:
        """Start both engines at once and measure."""
        model_of(self.args.shape, self.folder / "model")
        logs = self.args.logs or self.folder
        blending = Remote("blendstore", self.args, self.folder / "model", logs)
        plain = Remote("plain", self.args, self.folder / "model", logs)
        try:
            for engine in (blending, plain):
                self.measured[f"{engine.name} start_s"] = engine.ready()
                told(f"{engine.name} is ready")
            stages: dict[str, Callable[[Remote, Remote], Any]] = {
                "about": self.about,
                "query": self.queries,
                "kv": self.compare,
                "parts": self.parts,
                # Its new documents drive those of the other stages out of the store.
                "nothing shared": self.nothing_shared,
                "end": self.about,
            }
            for name, stage in stages.items():
                if self.args.control and name != "nothing shared":
                    continue
                self.measured[name] = self.tried(name, partial(stage, blending, plain))
                self._save()
            if not self.args.control:
                self.measured["proof"] = self.tried("proof", lambda: blending.tell("proof"))
                told(f"proof: {self.measured['proof']}")
            self._save()
        finally:
            blending.close()
            plain.close()
        return self.measured

    def in_time(self, share: float = 1.0) -> bool:
        """Whether this share of the time is not spent."""
        return bool(time.perf_counter() - BEGAN < self.args.limit * share)

    def tried(self, name: str, stage: Callable[[], Any]) -> Any:
        """What a stage or a check finds, or its error; no failure stops the others."""
        if not self.in_time():
            told(f"{name}: left out, the time is up")
            return {"error": "left out, the time is up"}
        try:
            return stage()
        except Exception as error:
            told(f"{name}: {error}")
            return {"error": str(error), "where": traceback.format_exc().splitlines()[-6:]}

    def _save(self) -> None:
        if self.args.json:
            self.args.json.parent.mkdir(parents=True, exist_ok=True)
            self.args.json.write_text(json.dumps(self.measured, indent=1) + "\n")

    def about(self, blending: Remote, plain: Remote) -> dict[str, Any]:
        """What runs, and what was counted."""
        del plain
        found: dict[str, Any] = blending.tell("about")
        told(f"{found}")
        return found

    def queries(self, blending: Remote, plain: Remote) -> dict[str, Any]:
        """Warm every document up, then the same number of prompts in every way, taking turns."""
        prompts, rounds = self.prompts, self.args.rounds
        warm = [blending.ask(prompts.of([document]))["ms"] for document in prompts.known]
        plain_warm = [plain.ask(prompts.of([prompts.new(self.args.document_length)]))["ms"] for _ in prompts.known]
        blending.tell("settle")
        ways: dict[str, list[float]] = {"plain vLLM": [], "no reuse": [], **{name: [] for name in HOW}}
        fills: dict[str, list[float]] = {name: [] for name in HOW}
        cached: dict[str, int] = {}
        for number in range(rounds + 2):  # the first two are not counted: kernels are compiled, clocks rise
            if number > 4 and not self.in_time(0.8):
                told(f"queries: {number - 2} rounds instead of {rounds}, the time is short")
                break
            for name in ways:
                if name in HOW:
                    answer = blending.ask(prompts.query(), HOW[name])
                elif name == "no reuse":
                    answer = blending.ask(prompts.unknown(), NO_REUSE)
                else:
                    answer = plain.ask(prompts.unknown())
                cached[name] = answer["cached"]
                if number >= 2:
                    ways[name].append(answer["ms"])
                    if name in HOW:
                        fills[name].append(answer["fill_ms"])
        base = statistics.median(ways["plain vLLM"])
        out: dict[str, Any] = {
            "one_document_ms": {"blendstore, stored": statistics.median(warm), "plain": statistics.median(plain_warm)},
            "prompt_tokens": len(prompts.query()),
        }
        for name, times in ways.items():
            out[name] = {
                "ttft_ms": statistics.median(times),
                "min_ms": min(times),
                "max_ms": max(times),
                "speedup": base / statistics.median(times),
                "cached_tokens": cached[name],
            }
            if fills.get(name):
                out[name]["blend_ms"] = statistics.median(fills[name])
            told(f"{name:>16}: {statistics.median(times):8.1f} ms  {out[name]['speedup']:5.2f}x  cached {cached[name]}")
        return out

    def compare(self, blending: Remote, plain: Remote) -> dict[str, Any]:
        """The largest relative difference of K or V per layer between blends of a prompt and vLLM's own prefill."""
        del plain
        prompt, out = self.prompts.query(), {}
        blending.ask(prompt, NO_REUSE, keep="own")
        for name, ratio, kernel in (
            ("ratio 1.0, vLLM's attention kernel", 1.0, True),
            ("ratio 1.0", 1.0, False),
            ("ratio 0, the control", 0.0, False),
        ):
            options = {"ratio": ratio, "store": False, "selector": "deviation"}

            def compared(options: Options = options, kernel: bool = kernel) -> dict[str, Any]:
                answer = blending.ask(prompt, options, keep="blend", engine_attention=kernel)
                return {"cached_tokens": answer["cached"], **blending.tell("difference")}

            row = out[name] = self.tried(f"KV at {name}", compared)
            if "error" not in row:
                told(f"KV at {name}: rms {max(row['rms_relative']):.2e}, max {max(row['max_relative']):.2e}")
        return out

    def nothing_shared(self, blending: Remote, plain: Remote) -> dict[str, Any]:
        """Time to the first token, and of each further one, of new prompts that both engines are asked in turn."""
        pairs: dict[str, list[tuple[float, float]]] = {"ttft": [], "token": [], "token, mean": []}
        slowest: dict[str, list[Any]] = {"plain": [], "blendstore": []}
        for number in range(self.args.pairs + 1):  # the first pair is not counted
            if number > 4 and not self.in_time(0.9):
                told(f"nothing shared: {number - 1} pairs instead of {self.args.pairs}, the time is short")
                break
            prompt = self.prompts.unknown()
            both = (plain, blending) if number % 2 else (blending, plain)
            found = {engine.name: engine.ask(prompt, tokens=self.args.tokens) for engine in both}
            again = self.prompts.unknown()
            first = {engine.name: engine.ask(again)["ms"] for engine in reversed(both)}
            if number:
                pairs["ttft"].append((found["plain"]["first_ms"], found["blendstore"]["first_ms"]))
                pairs["ttft"].append((first["plain"], first["blendstore"]))
                for name, key in (("token", "each_ms"), ("token, mean", "mean_ms")):
                    pairs[name].append((found["plain"][key], found["blendstore"][key]))
                for name, known in slowest.items():
                    known.append(found[name]["slowest"])
        out: dict[str, Any] = {"slowest": slowest}
        for name, values in pairs.items():
            out[name] = {
                "plain_ms": statistics.median(a for a, _ in values),
                "blendstore_ms": statistics.median(b for _, b in values),
                "ratio": statistics.median(b / a for a, b in values),
                "pairs": values,
            }
            told(f"nothing shared, {name}: {out[name]['plain_ms']:.2f} ms plain, ratio {out[name]['ratio']:.4f}")
        return out

    def parts(self, blending: Remote, plain: Remote) -> dict[str, Any]:
        """What the parts of a blend take on the host and on the device, outermost first; they contain each other."""
        del plain
        out: dict[str, Any] = {}
        for name in ("deviation 0.15", "query 0.10", "none"):
            rows = [blending.ask(self.prompts.query(), HOW[name], parts=True) for _ in range(3)]
            out[name] = {
                part: [statistics.median(row["parts"].get(part, (0, 0, 0))[i] for row in rows) for i in range(3)]
                for part in rows[0]["parts"]
            }
            out[name]["whole"] = [statistics.median(row["ms"] for row in rows), 0.0, 1]
            told(f"{name}: part [host ms, device ms, calls]")
            for part, values in out[name].items():
                told(f"    {part:<24} {values[0]:8.2f} {values[1]:8.2f} {values[2]:5.0f}")
        out["storing"] = blending.ask(self.prompts.unknown(), parts=True)["parts"]
        told(f"storing a new prompt: {out['storing']}")
        return out


class Remote:
    """An engine in a process of its own. Its log is ``NAME.log`` in ``logs``."""

    def __init__(self, name: str, args: argparse.Namespace, model: Path, logs: Path) -> None:
        context = multiprocessing.get_context("spawn")
        logs.mkdir(parents=True, exist_ok=True)
        self.name, self._log, self._began = name, logs / f"{name}.log", time.perf_counter()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, args, model, self._log), daemon=True)
        self._process.start()

    def ready(self) -> float:
        """Seconds until it was ready."""
        self._receive()
        return time.perf_counter() - self._began

    def ask(self, prompt: list[int], options: Options | None = None, **more: Any) -> dict[str, Any]:
        """One prompt, see `Worker.ask`."""
        answer: dict[str, Any] = self.tell("ask", prompt, None if options is None else dict(options), **more)
        return answer

    def tell(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of its `Worker`."""
        self._pipe.send((what, arguments, named))
        return self._receive()

    def close(self) -> None:
        """Stop it."""
        if self._process.is_alive():
            with suppress(OSError):
                self._pipe.send(None)
            self._process.join(20)
            self._process.kill()

    def _receive(self, longest: float = 300.0) -> Any:
        until = time.perf_counter() + longest
        while not self._pipe.poll(0.5):
            if not self._process.is_alive():
                break
            if time.perf_counter() > until:
                self._process.kill()
        else:
            found = self._pipe.recv()
            if not isinstance(found, Exception):
                return found
            print(self._tail(), file=sys.stderr, flush=True)
            raise found
        print(self._tail(), file=sys.stderr, flush=True)
        raise RuntimeError(f"the engine {self.name!r} has ended with {self._process.exitcode}")

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-60:])


def serve(pipe: Any, name: str, args: argparse.Namespace, model: Path, log: Path) -> None:
    """What an engine's process runs."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("BLENDSTORE_MAX_LOCAL_CPU_SIZE", str(args.store_gib))
    os.environ.setdefault("BLENDSTORE_BLEND_BUDGET_MS", "0")
    os.environ.setdefault("BLENDSTORE_LOCAL_FORMAT", args.local_format)
    # Weights are random: what the guard measures with them says nothing.
    os.environ.setdefault("BLENDSTORE_CODEC_MAX_KL", "100")
    os.environ["BLENDSTORE_REQUIRE_BLENDING"] = "true"
    # The connector's module and this one must be the same in this process, whatever it is called here.
    sys.modules["watched_vllm"] = sys.modules[__name__]
    try:
        worker = Worker(name, args, model)
    except Exception as error:
        pipe.send(RuntimeError(f"{name}: {type(error).__name__}: {error}"))
        return
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        what, arguments, named = job
        try:
            pipe.send(getattr(worker, what)(*arguments, **named))
        except Exception as error:
            traceback.print_exc()
            where = " < ".join(
                f"{Path(frame.filename).name}:{frame.lineno}"
                for frame in traceback.extract_tb(error.__traceback__)[-4:]
            )
            pipe.send(RuntimeError(f"{name}: {what}: {type(error).__name__}: {error} ({where})"))
    os._exit(0)  # the engine's threads would be waited for


class Worker:
    """The engine within its process."""

    def __init__(self, name: str, args: argparse.Namespace, model: Path) -> None:
        from vllm import LLM

        self.cuda = args.device == "cuda"
        self.watched = name == "blendstore" and not args.control
        longest = args.documents * (args.document_length + 64) + 256
        longest = 32768 if self.cuda and longest <= 32768 else longest
        flags: dict[str, Any] = {
            "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False,
            "max_model_len": longest, "max_num_batched_tokens": longest, "enforce_eager": not args.compiled,
            "disable_log_stats": True,
        }  # fmt: skip
        if self.cuda:
            flags |= {"dtype": "bfloat16", "max_num_seqs": 32, "gpu_memory_utilization": 0.4}
            flags |= {"kv_cache_memory_bytes": int(args.cache_gib * 2**30)}
        else:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            flags |= {"dtype": "float32", "max_num_seqs": 4, "gpu_memory_utilization": 0.15}
        if self.watched:
            flags["kv_transfer_config"] = TRANSFER
        self.llm = LLM(**flags)
        self.llm.apply_model(scaled)

    def ask(
        self,
        prompt: list[int],
        options: dict[str, object] | None = None,
        tokens: int = 1,
        keep: str = "",
        engine_attention: bool = False,
        parts: bool = False,
    ) -> dict[str, Any]:
        """``ms`` until the answer of ``tokens`` tokens is here, ``first_ms`` until the first is, ``each_ms`` of those
        after it (median; also ``mean_ms``, and the ``slowest`` with their places), and the tokens that were ``cached``.
        ``keep`` names the prompt's KV for `difference`."""
        from vllm import SamplingParams

        extra = {} if options is None else {"extra_args": {"kv_transfer_params": {"blendstore": options}}}
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, **extra)
        engine, out = self.llm.llm_engine, None
        WATCH.update(keep=keep, fill_ms=0.0)
        with (
            _engine_attention(engine_attention and self.cuda),
            _timed_parts(parts and self.watched, self.cuda) as told_parts,
        ):
            begin = time.perf_counter()
            times: list[float] = []
            engine.add_request(str(begin), {"prompt_token_ids": prompt}, sampling)
            try:
                while engine.has_unfinished_requests():
                    for done in engine.step():
                        times.append(time.perf_counter())
                        out = done if done.finished else out
            except Exception:
                engine.abort_request([str(begin)])
                raise
            finally:
                WATCH["keep"] = ""
            end = time.perf_counter()
        steps = [b - a for a, b in pairwise(times)] or [0.0]
        if self.watched:
            self.settle()
        return {
            "ms": (end - begin) * 1e3,
            "first_ms": (times[0] - begin) * 1e3,
            "each_ms": statistics.median(steps) * 1e3,
            "mean_ms": statistics.fmean(steps) * 1e3,
            "slowest": sorted(((step * 1e3, at) for at, step in enumerate(steps)), reverse=True)[:6],
            "cached": int(getattr(out, "num_cached_tokens", 0) or 0),
            "fill_ms": WATCH["fill_ms"],
            "parts": told_parts(),
        }

    def settle(self) -> None:
        """Everything that is being copied is published."""
        WATCH["connector"]._serving.settle(wait=True)

    def difference(self) -> dict[str, list[float]]:
        """Per layer, between the kept KV ``blend`` and ``own``."""
        worst, mean = [], []
        for mine, own in zip(KEPT.pop("blend"), KEPT["own"], strict=True):
            pairs = [(a.float(), b.float()) for a, b in zip(mine, own, strict=True)]
            worst.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
            mean.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))
        return {"max_relative": worst, "rms_relative": mean}

    def about(self) -> dict[str, Any]:
        """Versions, what runs, and what was counted."""
        import torch
        import vllm
        from vllm.platforms import current_platform

        from blendstore.blend.fused import fallbacks

        out: dict[str, Any] = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": current_platform.get_device_name() if self.cuda else "cpu",
        }
        connector = WATCH["connector"]
        serving = connector._serving
        out |= {
            "runner": type(connector.runner()).__module__,
            "attention": type(serving.model.attentions[0].impl).__name__,
            "cache": [*serving.kv._caches[0].shape, *serving.kv._caches[0].stride()],
            "kernels_replaced": serving.model.kernels.replaced,
            "page_locked": serving.pinned is not None,
            "counts": dict(serving.metrics.counts),
            "fallbacks": dict(fallbacks),
        }
        if self.cuda:
            out["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return out

    def proof(self) -> dict[str, float]:
        """The errors of the start-up check, run again with the weights that are measured."""
        from blendstore_vllm.proof import prove

        connector = WATCH["connector"]
        found = prove(connector._serving.model, connector.runner(), connector._whole)
        return {"runner_error": found.runner_error, "rotation_error": found.rotation_error}


WATCH: dict[str, Any] = {"keep": "", "fill_ms": 0.0}
KEPT: dict[str, list[tuple[Any, Any]]] = {}


def __getattr__(name: str) -> Any:
    """`WatchedConnector`, made when the engine asks for it."""
    if name != "WatchedConnector":
        raise AttributeError(name)
    from blendstore_vllm import connector as module

    class WatchedConnector(module.BlendStoreConnector):
        """blendstore with a look at the KV of prompts."""

        def runner(self) -> Any:
            """The engine's model runner."""
            return module._runner_of(self._whole)

        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            super().register_kv_caches(kv_caches)
            WATCH["connector"] = self
            serving: Any = self._serving
            inner = serving._report

            def report(served: Any) -> None:
                WATCH["fill_ms"] = served.milliseconds
                inner(served)

            type(serving)._report = staticmethod(report)

        def wait_for_save(self) -> None:
            super().wait_for_save()
            if not WATCH["keep"]:
                return
            serving: Any = self._serving
            for keep in self._get_connector_metadata().keeps:
                slots = serving.slots(keep.blocks, len(keep.ask.tokens) // 4)
                KEPT[WATCH["keep"]] = [serving.kv.read(i, slots) for i in range(serving.geometry.layers)]

    globals()[name] = WatchedConnector
    return WatchedConnector


def scaled(model: Any) -> int:
    """Weights of a realistic scale instead of the dummy ones, equal in every engine."""
    import torch

    first = next(model.parameters())
    generator = torch.Generator(device=first.device).manual_seed(0)
    layers = len(model.model.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            parameter.normal_(0, 0.02, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * layers) ** -0.5)
    return 0


@contextmanager
def _engine_attention(on: bool) -> Any:
    """Within, rows that are the end of a prompt attend through vLLM's FlashAttention 3, as its own prefill does."""
    if not on:
        yield
        return
    import torch
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    from blendstore.blend.attention import RowAttention

    rows: Any = RowAttention
    plain = rows.__call__

    def kernel(self: Any, q: Any, k: Any, v: Any, *, scale: float, **how: Any) -> Any:
        n, nkeys = q.shape[0], k.shape[0]
        if int(self.positions[0]) != nkeys - n or self.hidden_keys is not None:
            return plain(self, q, k, v, scale=scale, **how)
        asking, keys = (torch.tensor([0, count], device=q.device, dtype=torch.int32) for count in (n, nkeys))
        return flash_attn_varlen_func(
            q, k, v, n, asking, nkeys, keys, causal=True, softmax_scale=scale, fa_version=3
        )  # fmt: skip

    rows.__call__ = kernel
    try:
        yield
    finally:
        rows.__call__ = plain


@contextmanager
def _timed_parts(on: bool, cuda: bool) -> Any:
    """Within, the parts of what blendstore does are timed; yields what tells {part: [host ms, device ms, calls]}."""
    if not on:
        yield lambda: {}
        return
    import torch

    from blendstore.blend import runner as blend_runner
    from blendstore.blend import transfer
    from blendstore.blend.attention import RowAttention
    from blendstore_vllm import layout, model, outgoing, serve

    runner: Any = blend_runner
    new_event: Any = torch.cuda.Event
    spent: dict[str, list[tuple[float, Any, Any]]] = {}

    def timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begin, end = (new_event(enable_timing=True) for _ in range(2)) if cuda else (None, None)
            if begin is not None:
                begin.record()
            started = time.perf_counter()
            out = inner(*given, **named)
            host = time.perf_counter() - started
            if end is not None:
                end.record()
            spent.setdefault(name, []).append((host * 1e3, begin, end))
            return out

        return call

    def made(*given: Any) -> Any:
        return SimpleNamespace(select=timed("select", maker(*given).select))

    maker = runner.make_selector
    places: list[tuple[str, Any, str]] = [
        ("look up, plan", serve.Serving, "_outlook"),
        ("fill", serve.Serving, "fill"),
        ("fill: run", runner.BlendRunner, "run"),
        ("finish", runner._Run, "finish"),
        ("layer", model.VLLMModel, "layer"),
        ("embed", model.VLLMModel, "_enter"),
        ("rows arrive, are turned", transfer.WorkingKV, "ready"),
        ("attention", RowAttention, "__call__"),
        ("attention with scores", RowAttention, "scored"),
        ("write to the cache", layout.PagedKV, "write"),
        ("keep", serve.Serving, "keep"),
        ("keep: gather, start", outgoing.Outgoing, "send"),
    ]
    places = [place for place in places if hasattr(*place[1:])]
    before = [(owner, name, getattr(owner, name)) for _, owner, name in places]
    for part, owner, name in places:
        setattr(owner, name, timed(part, getattr(owner, name)))
    runner.make_selector = made

    def tell() -> dict[str, list[float]]:
        if cuda:
            torch.cuda.synchronize()
        return {
            part: [
                sum(host for host, _, _ in calls),
                sum(begin.elapsed_time(end) for _, begin, end in calls) if cuda else 0.0,
                len(calls),
            ]
            for part, calls in spent.items()
        }

    try:
        yield tell
    finally:
        runner.make_selector = maker
        for owner, name, inner in before:
            setattr(owner, name, inner)


def model_of(shape: str, folder: Path) -> None:
    """A Llama configuration and a tokenizer with one token for each byte."""
    make_model(folder, "8b")
    if shape == "tiny":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **TINY}))


def table(measured: dict[str, Any]) -> str:
    """What was measured, in short."""
    about = measured.get("about", {})
    mode = "compiled" if measured["compiled"] else "eager"
    lines = [f"vLLM {about.get('vllm')}, {mode}, {about.get('device')}, {about.get('attention')}"]
    query = measured.get("query", {})
    for name in ("plain vLLM", "no reuse", *HOW):
        if name in query:
            row = query[name]
            blend = f"  blend {row['blend_ms']:7.1f} ms" if "blend_ms" in row else ""
            lines.append(f"{name:>16} {row['ttft_ms']:8.1f} ms {row['speedup']:6.2f}x{blend}")
    for name, found in measured.items():
        if isinstance(found, dict) and "error" in found:
            lines.append(f"{name}: {found['error']}")
    for name, row in measured.get("kv", {}).items():
        if not isinstance(row, dict) or "rms_relative" not in row:
            lines.append(f"KV, {name}: {row}")
            continue
        lines.append(f"KV, {name}: rms {max(row['rms_relative']):.1e}, max {max(row['max_relative']):.1e}")
    for name, row in measured.get("nothing shared", {}).items():
        if not isinstance(row, dict) or "ratio" not in row:
            continue
        times = f"{row['plain_ms']:.2f} -> {row['blendstore_ms']:.2f} ms"
        lines.append(f"nothing shared, {name}: {times}, ratio {row['ratio']:.4f}")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=["8b", "tiny"], default="8b")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--compiled", action="store_true", help="vLLM's default mode instead of eager")
    add("--control", action="store_true", help="two plain engines: how far pairs differ that should not")
    add("--documents", type=int, default=5, help="in each prompt (default: 5)")
    add("--document-length", type=int, default=3000, help="tokens (default: 3000)")
    add("--known", type=int, default=10, help="documents that are warmed up (default: 10)")
    add("--rounds", type=int, default=8, help="prompts of each kind (default: 8)")
    add("--pairs", type=int, default=8, help="pairs of prompts that share nothing (default: 8)")
    add("--tokens", type=int, default=257, help="of each answer whose decoding is timed (default: 257)")
    add("--local-format", choices=["raw", "int8", "int4"], default="raw", help="of the records (default: raw)")
    add("--store-gib", type=float, default=12.0, help="memory of the store (default: 12)")
    add("--cache-gib", type=float, default=8.0, help="memory of each engine's KV cache (default: 8)")
    add("--limit", type=float, default=240.0, help="seconds after which nothing begins (default: 240)")
    add("--seed", type=int, default=0)
    add("--logs", type=Path, metavar="FOLDER", help="where the engines' logs stay")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
