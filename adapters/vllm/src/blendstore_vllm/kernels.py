"""The engine's own kernels for a layer's small operations, also where its compiled graph has code of its own instead.

A compiled server leaves norms, rotary embeddings and activations to the compiler, and its modules then run in plain
torch, several kernels each, when they are called from outside of the graph. For a loop of our own they are given the
kernels that an uncompiled server uses, and get their own back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from torch import nn


class EngineKernels:
    """Of the modules within ``decoder``."""

    def __init__(self, decoder: nn.Module) -> None:
        from vllm.model_executor.custom_op import CustomOp

        self._methods: list[tuple[Any, Any, Any]] = []
        for module in decoder.modules():
            if isinstance(module, CustomOp) and not (module._enforce_enable or module.enabled()):
                self._methods.append((module, module._forward_method, _uncompiled(module)))
        self._priority = _uncompiled_priority() if self._methods else None

    @property
    def replaced(self) -> int:
        """Modules that run other kernels than in the engine's graph."""
        return len(self._methods)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within, the modules run the engine's own kernels. Nothing of the engine's graph may run meanwhile."""
        if not self._methods:
            yield
            return
        with ExitStack() as stack:
            if self._priority is not None:
                from vllm.ir import enable_torch_wrap

                stack.enter_context(self._priority.set_priority())
                stack.enter_context(enable_torch_wrap(False))
            for module, _, own in self._methods:
                module._forward_method = own
            try:
                yield
            finally:
                for module, now, _ in self._methods:
                    module._forward_method = now


def _uncompiled(module: Any) -> Any:
    """What ``module`` runs on this platform where its operation is not left to the compiler."""
    forced, module._enforce_enable = module._enforce_enable, True
    try:
        return module.dispatch_forward(False)
    finally:
        module._enforce_enable = forced


def _uncompiled_priority() -> Any:
    """The platform's order of implementations for a server that compiles nothing; None where it has no such order."""
    from vllm.config.compilation import CompilationMode
    from vllm.platforms import current_platform

    choose = getattr(current_platform, "get_default_ir_op_priority", None)
    if choose is None:
        return None
    return choose(SimpleNamespace(compilation_config=SimpleNamespace(backend="eager", mode=CompilationMode.NONE)))
