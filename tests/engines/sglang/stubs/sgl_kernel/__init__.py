"""Stands in for sgl_kernel, whose wheel wants CUDA: SGLang 0.5.23 imports names of it on a CPU and calls none here."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name}: this environment has no sgl_kernel")

    return unavailable
