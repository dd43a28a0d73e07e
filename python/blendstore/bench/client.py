"""Streaming client for any OpenAI-compatible server, with the times that the benches need."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from blendstore.bench.answering import Completion


class ServerError(RuntimeError):
    """The server can't be reached, or answered with an error; the message says which URL, status and body."""


class OpenAIClient:
    """Streams completions, at most ``max_inflight`` at once; the time that a request waits for its turn is not counted.

    Use as an asynchronous context manager.
    """

    def __init__(self, base_url: str, *, max_inflight: int = 1, timeout_s: float = 600.0) -> None:
        try:
            address = urlsplit(base_url)
            if address.scheme not in ("http", "https") or not address.hostname or address.port == 0:
                raise ValueError("no http:// or https:// address")
        except ValueError as error:
            raise ServerError(f"{base_url}: {error}; give an address like http://localhost:8000/v1") from None
        self._base_url = base_url.rstrip("/")
        self._turns = asyncio.Semaphore(max_inflight)
        limits = httpx.Limits(max_connections=max_inflight, max_keepalive_connections=max_inflight)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=10.0), limits=limits)

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """Name of the first model that the server lists."""
        url = f"{self._base_url}/models"
        try:
            response = await self._http.get(url)
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, LookupError, ValueError) as error:
            raise ServerError(
                f"{url}: no list of models ({error}); is the server running, is the address right?"
            ) from error

    async def complete(self, model: str, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Completion of token ids."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        return await self._stream("completions", body, lambda choice: choice.get("text"))

    async def chat(self, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Completion:
        """Answer to chat messages."""
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        return await self._stream("chat/completions", body, lambda choice: (choice.get("delta") or {}).get("content"))

    async def _stream(
        self, path: str, body: Mapping[str, Any], text_of: Callable[[dict[str, Any]], str | None]
    ) -> Completion:
        url = f"{self._base_url}/{path}"
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        async with self._turns:
            sent = time.perf_counter()
            first: float | None = None
            pieces: list[str] = []
            try:
                async with self._http.stream("POST", url, content=content, headers=headers) as response:
                    if response.status_code != 200:
                        answer = (await response.aread()).decode(errors="replace")
                        raise ServerError(f"{url}: status {response.status_code}: {answer[:300]}")
                    async for line in response.aiter_lines():
                        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                        if not data or data == "[DONE]":
                            continue
                        event = json.loads(data)
                        if "error" in event:
                            raise ServerError(f"{url}: {event['error']}")
                        text = "".join(text_of(choice) or "" for choice in event.get("choices", []))
                        if text:
                            first = first if first is not None else time.perf_counter() - sent
                            pieces.append(text)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                hint = "; is the server running, is the address right?" if isinstance(error, httpx.ConnectError) else ""
                raise ServerError(f"{url}: {type(error).__name__}: {error}{hint}") from error
            return Completion(first, time.perf_counter() - sent, "".join(pieces))
