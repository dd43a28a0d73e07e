"""Stands in for torchvision, whose wheel wants CUDA: SGLang imports it for images, which no test here has."""

from typing import Any

__version__ = "0.26.0"


class _Name:
    """Whatever is imported by name: it can be named, its attributes too, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name}: this environment has no torchvision")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name)
