"""The entry point of group ``sglang.srt.plugins``: registers ``--radix-cache-backend blendstore`` in every process.

Nothing here may raise: the engine would only log it and then say that the backend isn't registered. What is wrong is
kept until the backend is asked for.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

NAME = "blendstore"
log = logging.getLogger("blendstore.sglang")


def activate() -> None:
    """Register the backend."""
    try:
        from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends

        if NAME not in registered_radix_cache_backends():
            register_radix_cache_backend(NAME, make)
    except ImportError as error:
        log.error("this SGLang takes no radix cache backends, so blendstore can't be plugged in: %s", error)


def make(context: Any) -> Any:
    """The radix cache of this rank: blendstore's where this server can have it, SGLang's own otherwise.

    Raises what is wrong when the configuration can't be used, or when it says that blending is required."""
    from blendstore.config import Config

    logging.getLogger("blendstore").setLevel(logging.getLogger().getEffectiveLevel())
    config = Config.load()
    if config.origins["enable_blending"] == "default":
        config = Config.load(overrides={"enable_blending": True})
    try:
        from .versions import version_of

        version = version_of(metadata.version("sglang"))
        from .setup import set_up

        return set_up(context, config, version)
    except Exception as error:
        if config.require_blending:
            raise
        # As text: the frames behind the error hold the model.
        log.error("blendstore is off, plain SGLang goes on: %s", f"{type(error).__name__}: {error}")
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    return default_radix_cache_factory(context)
