"""What the scheduler's side tells the worker's: plain values that travel as msgpack, or pickled by the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: whose prompt it is and how much of it may be filled."""

    name: str
    tokens: bytes
    """Prompt token ids, uint32 in this machine's byte order."""
    options: dict[str, str | float | int | bool | dict[str, str | float | int | bool] | None]
    """Fields of `RequestOptions`."""
    salt: str
    """What the engine separates tenants by."""
    lora: str
    """Name, number and path of the loaded adapter, or nothing."""
    held: int = 0
    """Leading tokens whose KV the engine has."""
    limit: int = 0
    """Tokens that may be filled at most."""


@dataclass(frozen=True, slots=True)
class Found:
    """What could be done for an `Ask` now."""

    target: int
    """KV of the tokens before this one can be there before the engine computes."""
    milliseconds: float
    """What that is expected to take."""
    waiting: bool = False
    """Lower tiers are bringing records of this prompt: ask again in a later step. There is an end to it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Fill tokens [``ask.held``, ``ask.limit``) of a request that lie in ``blocks``."""

    ask: Ask
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Keep:
    """The KV of the whole prompt lies in ``blocks`` when this step is over; ``loaded`` says that some was filled."""

    ask: Ask
    blocks: list[int]
    loaded: bool
