"""The connector that vLLM makes twice, once for the scheduler and once for the worker."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from blendstore.config import Config

from . import wire
from .messages import Keep, Load
from .scheduling import Scheduling
from .serve import Serving
from .setup import configuration, refuse_prefix_caching, set_up
from .telemetry import Prometheus, Recorder, Told

log = logging.getLogger("blendstore.vllm")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker does around one forward."""

    loads: list[Load] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)


class BlendStoreConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """``--kv-transfer-config '{"kv_connector": "BlendStoreConnector", "kv_role": "kv_both"}'``."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_like_the_engine()
        transfer = vllm_config.kv_transfer_config
        self._config: Config = configuration(transfer.kv_connector_extra_config)
        refuse_prefix_caching(self._config, vllm_config)
        self._whole, self._engine = vllm_config, str(transfer.engine_id)
        self._serving: Serving | None = None
        self._server: wire.Server | None = None
        self._errors: set[int] = set()
        self._recorder = Recorder()
        if role == KVConnectorRole.WORKER:
            _remember_runners()
            return
        link = wire.link(self._engine, lambda: self._recorder.event("unanswered"))
        self._scheduling = Scheduling(link, budget_ms=self._config.blend_budget_ms)
        if link is not None and transfer.kv_load_failure_policy != "recompute":
            # vLLM's default fails the request; a failed restore must only cost time.
            transfer.kv_load_failure_policy = "recompute"

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Prove that this model and its cache can be served, and make the store."""
        try:
            runner = _runner_of(self._whole)
            self._serving = set_up(self._config, self._whole, runner, kv_caches)
        except Exception as error:
            if self._config.require_blending:
                raise
            # As text: the frames behind the error hold the model.
            log.error("blendstore is off, plain vLLM goes on: %s", f"{type(error).__name__}: {error}")
            return
        separate = self._whole.parallel_config.distributed_executor_backend != "uni"
        self._server = wire.publish(self._engine, self._serving.look, separate=separate)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill what the scheduler was promised."""
        metadata = self._get_connector_metadata()
        if self._serving is None or not isinstance(metadata, StepMetadata):
            return
        for load in metadata.loads:
            self._errors.update(self._serving.fill(load))

    def has_connector_metadata(self) -> bool:
        """No, to who asks: the engine would call the next two hooks for every layer of every step."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there before the first one runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole prompts are kept when they are complete."""

    def wait_for_save(self) -> None:
        """Keep the documents of the prompts that this step completed."""
        metadata = self._get_connector_metadata()
        if self._serving is None or not isinstance(metadata, StepMetadata):
            return
        for keep in metadata.keeps:
            self._serving.keep(keep)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No request's blocks are needed when a step is over: what is still being copied was taken out of them."""
        if self._serving is not None:
            self._serving.settle()
            if finished_req_ids:
                self._serving.forget(list(finished_req_ids))
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose tokens the engine has to compute."""
        errors, self._errors = self._errors, set()
        return errors

    def get_kv_connector_stats(self) -> Told | None:
        """What happened since the last step; it goes to the process that answers ``/metrics``."""
        return (self._recorder if self._serving is None else self._serving.metrics).take()

    def shutdown(self) -> None:
        """Stop answering look-ups; what is being copied is waited for."""
        wire.withdraw(self._engine)
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._serving is not None:
            self._serving.settle(wait=True)

    # The side of the process that answers requests.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Told:
        """`get_kv_connector_stats` as it arrives there."""
        return Told(data=data) if data else Told()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Prometheus:
        """What counts it there."""
        return Prometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's side.

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for a request's KV when it has gone."""
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A look-up without loading."""
        return self._scheduling.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request's blocks are there."""
        self._scheduling.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the worker does in this step."""
        return StepMetadata(*self._scheduling.step(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The blocks may be freed: nothing is read from them later."""
        self._scheduling.finished(request.request_id)
        return False, None


_runners: list[Any] = []


def _remember_runners() -> None:
    """Connectors are shown caches but no model: note the model runner whose caches are made after this."""
    import importlib

    for name in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        try:
            runner = importlib.import_module(name).GPUModelRunner
        except (ImportError, AttributeError):
            continue
        plain = runner.initialize_kv_cache
        if getattr(plain, "_blendstore", False):
            continue

        def noted(self: Any, *args: Any, __plain: Any = plain, **kwargs: Any) -> Any:
            _runners[:] = [weakref.ref(self)]
            return __plain(self, *args, **kwargs)

        noted._blendstore = True  # type: ignore[attr-defined]
        runner.initialize_kv_cache = noted


def _runner_of(vllm_config: VllmConfig) -> Any:
    runner = _runners[-1]() if _runners else None
    if runner is None:
        raise RuntimeError("no model runner of this vLLM has made its caches through initialize_kv_cache")
    return runner


def _log_like_the_engine() -> None:
    """vLLM configures its own loggers only: ours write where those do."""
    ours, engine = logging.getLogger("blendstore"), logging.getLogger("vllm")
    if not ours.handlers and engine.handlers:
        ours.handlers, ours.propagate = list(engine.handlers), False
        ours.setLevel(engine.getEffectiveLevel())
