"""The real HTTP server as a process, with a real small model."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from blendstore.bench import models
from tests.engines.serving import await_health, free_port, logged_prompts

SERVED = "smollm2"
CHUNK = 64


class Http:
    """A server process and its log."""

    def __init__(self, folder: Path, model: str = SERVED, *flags: str) -> None:
        self.port = free_port()
        config = folder / "blend.yaml"
        config.write_text(
            'enable_blending: True\nmax_local_cpu_size: 2\nblend_special_str: " # # "\n'
            f"chunk_size: {CHUNK}\n"
            "blend_budget_ms: 0\n"  # or a busy machine would not blend
        )
        self.log = folder / "server.log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(models.resolve(model))
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", self.model, "--served-model-name", model,
            "--radix-cache-backend", "blendstore", "--port", str(self.port), "--host", "127.0.0.1", "--device", "cpu",
            "--attention-backend", "torch_native", "--dtype", "float32", "--grammar-backend", "none",
            "--max-total-tokens", "8192", "--disable-cuda-graph", "--enable-metrics", "--skip-server-warmup",
            "--sleep-on-idle",
            *flags,
        ]  # fmt: skip
        env = {**os.environ, "BLENDSTORE_CONFIG_FILE": str(config)}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        await_health(self.process, self.url, self.log, 540)  # imports alone take minutes on a busy machine

    def requests(self) -> list[dict[str, int]]:
        """The lines of prompts that got KV, in order."""
        return logged_prompts(self.log)

    def flush(self) -> None:
        """Empty the engine's own prefix cache once it is idle."""
        for _ in range(100):
            if httpx.post(f"{self.url}/flush_cache", timeout=10).status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError("the server never became idle")

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """One request; its answer."""
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        out: dict[str, Any] = answer.json()
        return out

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a counter's or gauge's series with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        chosen = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
        return float(sum(sample.value for sample in chosen))

    def close(self) -> None:
        """Stop it."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
