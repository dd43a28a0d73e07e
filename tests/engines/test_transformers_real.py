"""The embedded engine on real weights, from text to greedy tokens. The models come with ``make models models-gemma``;
without them these tests fail and say so."""

import pytest

from blendstore.bench import models
from blendstore.config import Config
from blendstore.options import RequestOptions
from blendstore_transformers import Engine
from tests.tiny_models import FULL, continued, largest_error, own

TOPICS = ("the old harbour", "a glass workshop", "the night train", "an orchard in spring", "the city archive",
          "the mountain hut")  # fmt: skip
DOCUMENTS = [
    f"This is a report about {topic}. The visitor who came to {topic} on day {number} left the number "
    f"{number * 1371 + 412}. "
    + f"People say that {topic} has changed a lot since the last war, and few remember it. "
    * 6
    for number, topic in enumerate(TOPICS)
]
SYSTEM = "You are a helpful assistant."
QUESTION = "Question: Which number did the visitor to the night train leave? Answer: The number is"


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_ratio_one_is_the_models_own_prefill(name: str) -> None:
    """Invariant 1 with moved documents, and a prompt longer than Gemma's window of 512 tokens. Gemma's keys are up to
    111 in size, and its own KV of a prompt that is computed in two steps differs by 1.2e-4."""
    model, tokenizer = models.load(name)
    engine = Engine(
        model, tokenizer, Config.load(env={}, overrides={"enable_blending": True, "max_local_cpu_size": 0.5})
    )
    assert engine.refusal == ""
    for group in (DOCUMENTS[:2], DOCUMENTS[2:]):
        engine.prefill(engine.encode([SYSTEM, *group, QUESTION]))
    tokens = engine.encode([SYSTEM, *reversed(DOCUMENTS), QUESTION])
    windows = [window for window in engine.geometry.windows if window is not None]
    assert len(tokens) > 700
    assert set(windows) == ({512} if name.startswith("gemma") else set())
    plain = engine.generate(tokens, 8, RequestOptions(reuse=False, store=False))
    found = engine.prefill(tokens, FULL)
    assert found.report.fallback == ""
    assert found.report.recomputed > 600
    wanted, _ = own(model, tokens, steps=1)
    assert largest_error(found.cache, wanted) <= 1e-4
    assert continued(model, found.cache, found.logits, 8) == plain.ids
