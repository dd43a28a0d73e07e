"""Every supported model class in a real scheduler: proven at start, and at ratio 1.0 blended to the engine's KV."""

from typing import Any

import numpy as np
import pytest
import torch

from blendstore.options import RequestOptions
from tests.engines.sglang.forked import in_scheduler
from tests.engines.sglang.models import SEPARATOR, SERVED, WORDS, folder_of

CONFIG = {
    "enable_blending": True, "chunk_size": 32, "blend_min_tokens": 16, "max_local_cpu_size": 0.05,
    "require_blending": True,
}  # fmt: skip


def words(seed: int, count: int) -> list[int]:
    drawn = torch.randint(WORDS.start, WORDS.stop, (count,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


def prompt(*documents: list[int]) -> list[int]:
    out = words(1, 15)
    for part in (*documents, words(5, 20)):
        out += [*SEPARATOR, *part]
    return out


def blended(context: Any) -> dict[str, Any]:
    """Documents A and B kept one by one, then a prompt with a new one between them, in several ways."""
    from importlib.metadata import version as installed

    from blendstore.config import Config
    from blendstore_sglang.proof import own_prefill
    from blendstore_sglang.serve import Tenant
    from blendstore_sglang.setup import set_up
    from blendstore_sglang.versions import version_of

    cache = set_up(context, Config.load(env={}, overrides=CONFIG), version_of(installed("sglang")))
    serving, runner, params = cache.serving, context.tp_worker.model_runner, context.params
    model, allocator = serving.model, params.token_to_kv_pool_allocator
    device = serving.geometry.device
    a, b, new = words(2, 70), words(3, 50), words(4, 40)

    def kept(tokens: list[int]) -> None:
        tenant = Tenant("keep", RequestOptions(reuse=False))
        slots = allocator.alloc(-(-len(tokens) // params.page_size) * params.page_size)[: len(tokens)].long()
        for index, (k, v) in enumerate(own(tokens)):
            model.pool.get_key_buffer(index)[slots], model.pool.get_value_buffer(index)[slots] = k, v
        done = serving.look(np.array(tokens, dtype=np.uint32), tenant, held=0, exact=True, limit=0, blend=False)
        serving.keep(done.prepared, tenant, slots, lambda: None)

    with own_prefill(model, runner, params, 256) as prefill:

        def own(tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(k.clone(), v.clone()) for k, v in prefill(torch.tensor(tokens, device=device), 0)]

        kept(prompt(a))
        kept(prompt(b))
        asked = prompt(b, new, a)
        wanted = own(asked)
        out: dict[str, Any] = {
            "stored": serving.metrics.counts["stored"],
            "errors": serving.metrics.counts["store_error"],
        }
        for name, options in (
            ("full", RequestOptions(ratio=1.0)),
            ("query", RequestOptions(ratio=0.2)),
            ("deviation", RequestOptions(ratio=0.2, selector="deviation")),
            ("none", RequestOptions(ratio=0.0)),
        ):
            tenant = Tenant(name, options)
            tokens = np.array(asked, dtype=np.uint32)
            outlook = serving.look(tokens, tenant, held=0, exact=True, limit=len(asked) - 1, blend=True)
            target = outlook.target
            slots = allocator.alloc(-(-target // params.page_size) * params.page_size)[:target].long()
            serving.fill(outlook, tenant, slots[:0], slots, 0)
            errors = []
            for index, (k, v) in enumerate(wanted):
                got = (model.pool.get_key_buffer(index)[slots], model.pool.get_value_buffer(index)[slots])
                errors += [float((x - y[:target]).abs().max()) for x, y in zip(got, (k, v), strict=True)]
            out[name] = max(errors)
            outlook.prepared.release()
        counts = serving.metrics.counts
        out["reused"], out["recomputed"] = counts["reused"], counts["recomputed"]
    assert serving.store.stats()["bytes_pinned"] == 0
    return out


@pytest.mark.parametrize("name", SERVED)
def test_blended_at_ratio_one_is_the_engines_own_prefill(name: str) -> None:
    (found,) = in_scheduler(blended, str(folder_of(name)))
    assert found["errors"] == 0
    assert found["stored"] >= 6, "both documents, and what stands around them"
    assert found["full"] <= 2e-4
    assert found["none"] > 1e-2, "or this model wouldn't notice"
    assert max(found["query"], found["deviation"]) <= 1.5 * found["none"]
    assert found["reused"] > 0
    assert found["recomputed"] >= 120


@pytest.mark.parametrize("name", ["llama"])
def test_two_ranks_blend_as_one(name: str) -> None:
    """Each has half of the heads and a store of its own; both take part in every choice."""
    one, two = in_scheduler(blended, str(folder_of(name)), ranks=2)
    (alone,) = in_scheduler(blended, str(folder_of(name)))
    for rank in (one, two):
        assert rank["full"] <= 2e-4
        assert {key: rank[key] for key in ("stored", "errors", "reused", "recomputed")} == {
            key: alone[key] for key in ("stored", "errors", "reused", "recomputed")
        }
        assert max(one["query"], two["query"]) <= 1.01 * alone["query"] + 1e-4, "the same tokens as one rank picks"


def started(context: Any) -> tuple[str, str]:
    """Class of the radix cache that the plugin makes, and what was logged of it."""
    import logging

    from blendstore_sglang import plugin

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("blendstore").addHandler(handler)
    return type(plugin.make(context)).__name__, "\n".join(told)


def test_case_b06_a_model_that_is_not_reproduced_is_refused_by_name_and_cached_plainly() -> None:
    ((kind, told),) = in_scheduler(started, str(folder_of("gemma2-softcap")))
    assert kind == "BlendRadixCache"
    assert "blending is refused for Gemma2ForCausalLM" in told
    assert "layer 1: the runner's KV differs from the engine's" in told


def test_case_b06_a_refused_model_ends_the_start_where_blending_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDSTORE_REQUIRE_BLENDING", "true")
    with pytest.raises(AssertionError, match="GeometryError: layer 1"):
        in_scheduler(started, str(folder_of("gemma2-softcap")))


def test_case_b05_rotation_that_depends_on_the_length_is_refused_by_name() -> None:
    ((kind, told),) = in_scheduler(started, str(folder_of("phi3-longrope")))
    assert kind == "BlendRadixCache"
    assert "blending is refused for Phi3ForCausalLM, plain caching stays on: layer 0:" in told
    assert "switches frequencies with the prompt's length: cached keys can't be moved" in told


def test_a_check_layer_that_the_model_has_not_got_is_told_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDSTORE_BLEND_SELECTOR", "deviation")
    monkeypatch.setenv("BLENDSTORE_BLEND_CHECK_LAYERS", "4")
    ((kind, told),) = in_scheduler(started, str(folder_of("llama")))
    assert kind != "BlendRadixCache"
    assert "SelectorError: check layer 4: use 1..3, the model's layers" in told


def test_a_server_without_a_plain_pool_goes_on_as_plain_sglang() -> None:
    ((kind, told),) = in_scheduler(started, str(folder_of("llama")), disable_radix_cache=True)
    assert kind != "BlendRadixCache"
    assert "blendstore is off, plain SGLang goes on: Refused: LlamaForCausalLM: the radix cache is disabled" in told


def test_an_unknown_version_of_the_engine_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.6.1" if name == "sglang" else known(name))
    ((kind, told),) = in_scheduler(started, str(folder_of("llama")))
    assert kind != "BlendRadixCache"
    assert "SGLang 0.6.1 is not supported: install one of 0.5.14, 0.5.23" in told
