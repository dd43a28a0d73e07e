"""The three ways to serve that are compared, one command each: the real ``vllm serve`` and a benchmark against it.

    python benches/vllm_baselines.py plain --model MODEL            # vLLM alone
    python benches/vllm_baselines.py cache --model MODEL            # exact prefixes kept in 60 GiB of memory
    python benches/vllm_baselines.py blend --model MODEL            # documents reused at any position

Flags behind ``--`` go to the benchmark: ``blendstore bench multi-doc-qa``, or shuffle-doc-qa with ``--bench``.
``--serve="…"`` takes more flags of ``vllm serve``. On a CPU, with a small model:

    VLLM_CPU_KVCACHE_SPACE=1 BLENDSTORE_MAX_LOCAL_CPU_SIZE=2 python benches/vllm_baselines.py blend --model FOLDER \\
      --serve="--dtype float32 --enforce-eager --max-model-len 4096" -- --num-requests 3
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from blendstore.cli import main as blendstore

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = {"plain": None, "cache": "plain_cache.yaml", "blend": "blending.yaml"}


def main() -> None:
    args, rest = _arguments()
    port = args.port or _free_port()
    log = Path(args.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    # Whoever ends this process ends the server too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with log.open("w") as out:
        server = subprocess.Popen(  # noqa: S603 - the command is built here
            command(args.way, args.model, port, shlex.split(args.serve)),
            stdout=out, stderr=subprocess.STDOUT, env=environment(args.way),
        )  # fmt: skip
    try:
        _wait(server, port, args.patience, log)
        print(f"{args.way}: vllm serve is up after {time.perf_counter() - began:.0f} s, log in {log}", flush=True)
        flags = ["--base-url", f"http://127.0.0.1:{port}/v1", "--model", args.model, *rest]
        code = blendstore(["bench", args.bench, *flags])
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
    sys.exit(code)


def command(way: str, model: str, port: int, more: list[str]) -> list[str]:
    """``vllm serve`` for one of the ways."""
    out = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    # Plain vLLM keeps its own prefix cache: what blending is compared with has everything that vLLM has.
    if way != "plain":
        transfer: dict[str, object] = {
            "kv_connector": "BlendStoreConnector",
            "kv_connector_module_path": "blendstore_vllm",
            "kv_role": "kv_both",
        }
        if way == "cache":
            transfer["kv_connector_extra_config"] = {"blendstore.enable_blending": False}
        out += ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer)]
    return [*out, *more]


def environment(way: str) -> dict[str, str]:
    """This process's, with the way's configuration where none is named."""
    config = CONFIGS[way]
    named = {} if config is None else {"BLENDSTORE_CONFIG_FILE": str(ROOT / "configs" / config)}
    return {**named, **os.environ}


def _wait(server: subprocess.Popen[bytes], port: int, patience: float, log: Path) -> None:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if server.poll() is not None:
            sys.exit(f"vllm serve ended with {server.returncode}; the end of {log}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    sys.exit(f"vllm serve isn't up after {patience:.0f} s: raise --patience, or see {log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("way", choices=CONFIGS)
    add("--model", required=True, help="folder of the model, which the benchmark takes its tokenizer from")
    add("--serve", default="", metavar="FLAGS", help="more flags of vllm serve, in one string")
    add("--bench", choices=["multi-doc-qa", "shuffle-doc-qa"], default="multi-doc-qa", help="(default: multi-doc-qa)")
    add("--port", type=int, default=0, help="default: a free one")
    add("--patience", type=float, default=600.0, help="seconds until the server must be up (default: 600)")
    add("--log", help="the server's (default: out/vllm-WAY.log)")
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:split])
    args.log = args.log or f"out/vllm-{args.way}.log"
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model}: no folder with a config.json")
    return args, given[split + 1 :]


if __name__ == "__main__":
    main()
