"""blendstore in vLLM: a KV connector that blends in the unmodified server."""

from __future__ import annotations

from typing import Any

__all__ = ["BlendStoreConnector"]


def __getattr__(name: str) -> Any:
    # The plugin's entry point imports this package before vLLM can import its connectors.
    if name == "BlendStoreConnector":
        from .connector import BlendStoreConnector

        return BlendStoreConnector
    raise AttributeError(name)
