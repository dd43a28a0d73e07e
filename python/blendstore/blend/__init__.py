"""The blend core: runs a plan over an engine's own modules. Knows tensors, knows no engine; needs torch."""

from .model import Attend, EngineModel, Geometry
from .runner import BlendResult, BlendRunner, BlendSettings
from .selectors import SelectionRun, Selector, register_selector, selector_names

__all__ = [
    "Attend",
    "BlendResult",
    "BlendRunner",
    "BlendSettings",
    "EngineModel",
    "Geometry",
    "SelectionRun",
    "Selector",
    "register_selector",
    "selector_names",
]
