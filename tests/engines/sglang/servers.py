"""Real engines for the tests, each started once, and what the tests ask of them."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.engines.sglang.forked import ENGINE
from tests.engines.sglang.models import folder_of

CONFIG = {"CHUNK_SIZE": "32", "BLEND_MIN_TOKENS": "16", "MAX_LOCAL_CPU_SIZE": "0.1", "BLEND_BUDGET_MS": "0"}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their log-probabilities, and how many prompt tokens the engine didn't compute."""

    ids: list[int]
    logprobs: list[float]
    cached: int


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """What the engine's processes are started with."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Server:
    """An engine, asked by token ids."""

    def __init__(self, *, blending: bool, model: str = "llama", config: dict[str, str] | None = None, **flags: Any):
        import sglang

        own = {f"BLENDSTORE_{key}": value for key, value in {**CONFIG, **(config or {})}.items()}
        strict = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
        flags = {**ENGINE, "model_path": str(folder_of(model)), "log_level": "info", **flags}
        if blending:
            flags["radix_cache_backend"] = "blendstore"
        with environment(**own, **strict):
            self.engine: Any = sglang.Engine(**flags)

    def ask(self, prompt: Sequence[int], tokens: int = 8, **options: Any) -> Answer:
        """One prompt; ``options`` are blendstore's."""
        return self.ask_all([(prompt, options)], tokens)[0]

    def ask_all(
        self, asked: Sequence[tuple[Sequence[int], dict[str, Any]]], tokens: int = 8, *, at_once: int = 1
    ) -> list[Answer]:
        """Many prompts, ``at_once`` under way."""

        async def run() -> list[Answer]:
            gate = asyncio.Semaphore(at_once)

            async def one(prompt: Sequence[int], options: dict[str, Any]) -> Answer:
                async with gate:
                    return await self.answer(prompt, tokens, options)

            return await asyncio.gather(*(one(prompt, options) for prompt, options in asked))

        answers: list[Answer] = self.engine.loop.run_until_complete(run())
        return answers

    async def answer(
        self, prompt: Sequence[int], tokens: int, options: dict[str, Any], *, rid: str | None = None, **more: Any
    ) -> Answer:
        """One prompt from within the engine's event loop."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        if options:
            sampling["custom_params"] = {"blendstore": options}
        out = await self.engine.async_generate(
            input_ids=list(prompt), sampling_params=sampling, return_logprob=True, rid=rid, **more
        )
        meta = out["meta_info"]  # of an aborted request without most of its fields
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs", [])]
        return Answer(list(out["output_ids"]), logprobs, meta.get("cached_tokens", 0))

    def flush(self) -> None:
        """Empty the engine's own prefix cache; it refuses while anything runs."""
        for _ in range(200):
            if self.engine.flush_cache().success:
                return
            self.engine.loop.run_until_complete(asyncio.sleep(0.05))
        raise AssertionError("the engine never became idle")

    def close(self) -> None:
        """Stop it."""
        self.engine.shutdown()
