"""Stand-ins for the benches' tests: an engine with known logits, a byte tokenizer, an OpenAI-compatible server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from blendstore.bench.answering import Answer, Options, Provenance
from blendstore.bench.prompts import Prompt


class ByteTokenizer:
    """One token a byte; BOS is id 1."""

    bos_token_id: int | None = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [2 + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int], /) -> str:
        return bytes(i - 2 for i in ids if i >= 2).decode(errors="replace")


@dataclass
class FakeEngine:
    """Full prefill is sure of the answer; blending is less so the less it recomputes, and worse without a lead."""

    vocabulary: int = 300
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def full(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], question: int = 1) -> Answer:
        self.calls.append(("full", len(prompt_ids)))
        asked = self._logits(prompt_ids[len(prompt_ids) - question + 1 :], 8.0)
        return Answer(self._logits(answer_ids, 8.0), 0.4, 0, 0, len(prompt_ids), asked)

    def capture(self, prompt: Prompt, provenance: Provenance) -> Provenance:
        self.calls.append(("capture", prompt.kind, prompt.seed, provenance.name))
        return provenance

    def prefix_cached(self, prompt: Prompt, captured: Provenance) -> Answer:
        reused = len(prompt.system) + len(prompt.documents[0])
        return Answer(self._logits(prompt.answer, 8.0), 0.35, reused, 0, len(prompt.ids) - reused)

    def blended(self, prompt: Prompt, captured: Provenance, selector: str, ratio: float, options: Options) -> Answer:
        self.calls.append(("blended", selector, ratio, dict(options), prompt.kind, prompt.seed, captured))
        recomputed = round(ratio * prompt.context_tokens)
        fresh = len(prompt.question)
        sure = 4.0 + 20 * ratio + (1.0 if selector == "query" else 0.0) - (2.0 if not captured.lead else 0.0)
        # What stood before the document shows a little, as it would in real KV.
        sure += 0.01 * sum(captured.ids[-8:]) / 8 if captured.before else 0.0
        logits = self._logits(prompt.answer, sure)
        asked = self._logits(prompt.question[1:], sure + 1.0)
        return Answer(logits, 0.1 + ratio / 10, len(prompt.ids) - recomputed - fresh, recomputed, fresh, asked)

    def _logits(self, answer: Sequence[int], sure: float) -> torch.Tensor:
        logits = torch.zeros(len(answer), self.vocabulary)
        logits[torch.arange(len(answer)), torch.tensor(answer, dtype=torch.int64)] = sure
        return logits


@dataclass
class Seen:
    """What the server was sent, and how many requests it ever had at once."""

    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def openai_server(
    pieces: Sequence[str] = ("", "a", "b"), *, status: int = 200, delay_s: float = 0.0
) -> Iterator[tuple[str, Seen]]:
    """Server that streams ``pieces``; gives its base URL and what it saw."""
    seen = Seen()
    lock = threading.Lock()
    current = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "served-model"}]}).encode(), "application/json", 200)

        def do_POST(self) -> None:
            nonlocal current
            with lock:
                current += 1
                seen.most_at_once = max(seen.most_at_once, current)
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                seen.requests.append((self.path, body))
            threading.Event().wait(delay_s)
            chat = self.path.endswith("/chat/completions")
            key = (lambda text: {"delta": {"content": text}}) if chat else (lambda text: {"text": text})
            events = [json.dumps({"choices": [{"index": 0, **key(text)}]}) for text in pieces]
            lines = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
            with lock:
                current -= 1
            self._send(lines.encode() if status == 200 else b"no such model", "text/event-stream", status)

        def _send(self, content: bytes, kind: str, code: int) -> None:
            self.send_response(code)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
