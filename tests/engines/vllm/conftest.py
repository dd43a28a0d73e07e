"""One engine of each kind for all tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.vllm.engines import Engine
from tests.engines.vllm.models import folder_of


@pytest.fixture(scope="session")
def plain() -> Iterator[Engine]:
    """vLLM as it is."""
    engine = Engine(str(folder_of("llama")), blending=False)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def blending() -> Iterator[Engine]:
    """With blendstore: room for everything, prefill in steps of 512."""
    engine = Engine(str(folder_of("llama")), blending=True)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def tight() -> Iterator[Engine]:
    """With blendstore: blocks of 32 tokens, prefill in steps of 64, and a cache in which few requests fit."""
    flags: dict[str, Any] = {
        "block_size": 32,
        "num_gpu_blocks_override": 28,
        "max_num_batched_tokens": 64,
        "max_model_len": 768,
    }
    engine = Engine(str(folder_of("llama")), blending=True, **flags)
    yield engine
    engine.close()
