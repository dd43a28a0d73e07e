"""What blendstore costs prompts that share nothing: the same server with and without it, asked in turns.

    .venv-sglang-0.5.23/bin/python benches/bench_serving_overhead.py sglang --pairs 40 --json out/overhead-sglang.json
    .venv-vllm-0.32.0/bin/python benches/bench_serving_overhead.py vllm --pairs 40 --json out/overhead-vllm.json

Both servers run side by side. A pair is one prompt of random words, new to both, to each of them, in random order. Of
every pair three quotients are taken, blendstore's server over the plain one: time to the first token, time between
later tokens, and the processor time that the server's processes used from the request until they were idle again
(what is stored after the answer included). The medians come with a 95 % bootstrap interval. ``--null`` compares the
plain server with another plain one: what this machine can tell apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch

from blendstore.bench import models, report
from blendstore.bench.progress import Progress

TICK = os.sysconf("SC_CLK_TCK")
SGLANG_CPU = (
    "--device cpu --attention-backend torch_native --dtype float32 --grammar-backend none --disable-cuda-graph "
    "--skip-server-warmup --sleep-on-idle"
)
VLLM_CPU = "--dtype float32 --enforce-eager --gpu-memory-utilization 0.3"
CONNECTOR = {"kv_connector": "BlendStoreConnector", "kv_connector_module_path": "blendstore_vllm", "kv_role": "kv_both"}


@dataclass(frozen=True)
class Sample:
    """One answer: seconds to the first token and between later ones, and of processor time."""

    ttft: float
    step: float
    cpu: float


class Server:
    """A server's processes, which are one session of the system's."""

    def __init__(self, args: argparse.Namespace, name: str, *, blending: bool) -> None:
        port = random.SystemRandom().randrange(20_000, 50_000)  # SGLang adds 10,000 for another one
        self.url = f"http://127.0.0.1:{port}"
        self.log = Path(args.logs) / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if torch.cuda.is_available():
            del env["SGLANG_USE_CPU_ENGINE"]
        env |= {"BLENDSTORE_ENABLE_BLENDING": "True", "BLENDSTORE_MAX_LOCAL_CPU_SIZE": str(args.store_gib)}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(  # noqa: S603 - the command is built here
                self._command(args, port, blending), stdout=out, stderr=subprocess.STDOUT, env=env,
                start_new_session=True,
            )  # fmt: skip
        self.name = name

    @staticmethod
    def _command(args: argparse.Namespace, port: int, blending: bool) -> list[str]:
        model, gpu = str(models.resolve(args.model)), torch.cuda.is_available()
        if args.engine == "sglang":
            command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
            own, more = ["--radix-cache-backend", "blendstore"], "" if gpu else SGLANG_CPU
        else:
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--no-enable-prefix-caching"]
            own, more = ["--kv-transfer-config", json.dumps(CONNECTOR)], "" if gpu else VLLM_CPU
        command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
        return [*command, *shlex.split(more), *shlex.split(args.serve), *(own if blending else [])]

    def wait(self, seconds: float) -> None:
        """Until it answers. Raises `SystemExit` with its log's name when it doesn't."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise SystemExit(f"the {self.name} server is not up after {seconds:.0f} s: see {self.log}")

    def cpu(self) -> float:
        """Processor time of its processes so far, seconds."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICK

    def answer(self, prompt: list[int], tokens: int, settle: float) -> Sample:
        """One streamed completion of exactly ``tokens`` tokens."""
        body = {
            "model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        used, sent, times = self.cpu(), time.perf_counter(), []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=600) as response:
            response.raise_for_status()
            times = [time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")]
        time.sleep(settle)
        return Sample(times[0] - sent, (times[-1] - times[0]) / (tokens - 1), self.cpu() - used)

    def close(self) -> None:
        """Stop it."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def measure(servers: tuple[Server, Server], args: argparse.Namespace) -> list[tuple[Sample, Sample]]:
    """Pairs of blendstore's answer and the plain one's."""
    drawn = random.Random(args.seed)
    pairs = []
    with Progress() as progress:
        progress.start("pairs", args.pairs + 2)
        for number in range(args.pairs + 2):
            prompt = [drawn.randrange(1000, 20000) for _ in range(args.prompt_tokens)]
            order = drawn.sample((0, 1), 2)
            found = {at: servers[at].answer(prompt, args.tokens, args.settle) for at in order}
            if number >= 2:  # the first ones pay for lazy set-up
                pairs.append((found[0], found[1]))
            progress.advance()
    return pairs


def row(name: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians of both and of their quotient, with its interval."""
    ratios = [a / b for a, b in pairs]
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "what": name,
        "blendstore": statistics.median(a for a, _ in pairs),
        "plain": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_ci": [medians[50], medians[-51]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("--model", default="smollm2", help="a known model's name or a folder")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument(
        "--settle", type=float, default=1.0, help="seconds in which a server may finish, for its CPU time"
    )
    parser.add_argument("--store-gib", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", default="", help="more flags of both servers")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for a server")
    parser.add_argument("--logs", default="out/overhead", help="folder of the servers' logs")
    parser.add_argument("--null", action="store_true", help="compare two plain servers")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    report.check_target(args.json)
    servers: list[Server] = []
    try:
        servers.append(Server(args, "blendstore", blending=not args.null))
        servers.append(Server(args, "plain", blending=False))
        for server in servers:
            server.wait(args.patience)
        pairs = measure((servers[0], servers[1]), args)
    finally:
        for server in servers:
            server.close()
    rows = [
        row("ttft_s", [(a.ttft, b.ttft) for a, b in pairs]),
        row("seconds_per_token", [(a.step, b.step) for a, b in pairs]),
        row("cpu_s", [(a.cpu, b.cpu) for a, b in pairs]),
    ]
    print(f"{'':<20}{'blendstore':>12}{'plain':>10}{'ratio':>8}   95 % interval")
    for line in rows:
        low, high = line["ratio_ci"]
        print(
            f"{line['what']:<20}{line['blendstore']:>12.4f}{line['plain']:>10.4f}{line['ratio']:>8.3f}   "
            f"{low:.3f}-{high:.3f}"
        )
    if args.json:
        report.write_json(args.json, rows, pairs=len(pairs), **{args.engine: version(args.engine)})


if __name__ == "__main__":
    main()
