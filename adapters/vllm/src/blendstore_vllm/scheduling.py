"""The scheduler's side: which requests are filled, and which prompts are complete and can be kept. No tensors."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from blendstore.options import OptionError, RequestOptions
from blendstore.serving import read_options

from .messages import Ask, Found, Keep, Load
from .wire import Link

log = logging.getLogger("blendstore.vllm")
_NOTHING = RequestOptions(reuse=False, store=False)


@dataclass(slots=True)
class Tracked:
    """One request from its first look-up to its end."""

    ask: Ask
    passive: bool
    """The prompt is more than its tokens, its KV isn't wanted as it is, or its options are wrong: leave it alone."""
    prompt: int
    found: Found | None = None
    """What was promised to the scheduler, until blocks are there."""
    blocks: list[int] = field(default_factory=list)
    loaded: bool = False
    kept: bool = False


class Scheduling:
    """What the connector does in the scheduler's process. ``link`` is None where the worker has no store."""

    def __init__(self, link: Link | None, *, budget_ms: float) -> None:
        """``budget_ms`` bounds the blends of one step together; 0 is no limit."""
        self._link, self._budget = link, budget_ms
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._spent = 0.0
        self._placed: set[str] = set()

    def matched(self, request: Any, held: int) -> int | None:
        """Tokens behind the first ``held`` that can be filled; None: ask again in the next step."""
        if self._link is None:
            return 0
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = first_sight(request)
        tracked.found = None
        limit = tracked.prompt - 1
        if tracked.passive or held >= limit or not tracked.ask.options["reuse"]:
            return 0
        ask = replace(tracked.ask, held=held, limit=limit)
        found = self._link.look(ask)
        if found.waiting:
            return None
        if found.target <= held:
            return 0
        if self._budget and self._spent and self._spent + found.milliseconds > self._budget:
            return None
        tracked.found = found
        tracked.ask = replace(ask, limit=found.target)
        return found.target - held

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """The scheduler takes the request into this step; ``blocks`` are all it has."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.passive:
            return
        tracked.blocks = list(blocks)
        self._placed.add(request.request_id)
        found, tracked.found = tracked.found, None
        tracked.loaded = bool(external and found is not None)
        if found is None or not external:
            return
        self._spent += found.milliseconds
        self._loads.append(Load(tracked.ask, tracked.blocks[:]))

    def step(self, output: Any) -> tuple[list[Load], list[Keep]]:
        """What the worker has to do before and after the forward of this step."""
        loads, self._loads = self._loads, []
        placed, self._placed = self._placed, set()
        self._spent = 0.0
        keeps: list[Keep] = []
        for new in output.scheduled_new_reqs:
            self._advance(new.req_id, int(new.num_computed_tokens), output, keeps)
        cached = output.scheduled_cached_reqs
        for name, added, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            tracked = self._tracked.get(name)
            if tracked is not None and added is not None and name not in placed:
                tracked.blocks.extend(added[0])
            self._advance(name, int(computed), output, keeps)
        return loads, keeps

    def finished(self, name: str) -> None:
        """The request is over, or was aborted."""
        self._tracked.pop(name, None)

    def _advance(self, name: str, computed: int, output: Any, keeps: list[Keep]) -> None:
        tracked = self._tracked.get(name)
        if tracked is None or tracked.passive or tracked.kept:
            return
        if computed + output.num_scheduled_tokens.get(name, 0) >= tracked.prompt:
            tracked.kept = True
            keeps.append(Keep(tracked.ask, tracked.blocks[:], tracked.loaded))


def first_sight(request: Any) -> Tracked:
    """What a request asks for."""
    tokens = np.asarray(request.prompt_token_ids or [], dtype=np.int64).astype(np.uint32)
    passive = (
        not len(tokens)
        or bool(request.mm_features)
        or request.prompt_embeds is not None
        or request.pooling_params is not None
        or bool(request.skip_reading_prefix_cache)
        or bool(getattr(request, "resumable", False))
    )
    try:
        options = read_options(request.kv_transfer_params)
    except OptionError as error:
        log.warning("blendstore: request %s is served without blendstore: %s", request.request_id, error)
        options, passive = _NOTHING, True
    lora = request.lora_request
    ask = Ask(
        name=request.request_id,
        tokens=tokens.tobytes(),
        options={part.name: _plain(getattr(options, part.name)) for part in fields(options)},
        salt=request.cache_salt or "",
        lora="" if lora is None else f"{lora.lora_name}\x1f{lora.lora_int_id}\x1f{lora.lora_path}",
    )
    return Tracked(ask, passive, len(tokens))


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "items") else value
