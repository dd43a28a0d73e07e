"""The entry point of group ``vllm.general_plugins``: makes ``"kv_connector": "BlendStoreConnector"`` known by its name.

Without it the connector is still found by ``"kv_connector_module_path": "blendstore_vllm"``.
"""

from __future__ import annotations

import logging

NAME = "BlendStoreConnector"
log = logging.getLogger("blendstore.vllm")


def activate() -> None:
    """Register the connector; called in every process of the engine, perhaps more than once."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(NAME, "blendstore_vllm.connector", NAME)
    except ImportError as error:
        log.error("this vLLM takes no KV connectors, so blendstore can't be plugged in: %s", error)
    except ValueError:
        pass  # registered before
