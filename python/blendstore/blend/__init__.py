"""The blend core: runs a plan over an engine's own modules. Knows tensors, knows no engine; needs torch."""

from .fused import warm_up, warm_up_formats
from .model import Attend, EngineModel, Geometry
from .pinned import pin
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
    "pin",
    "register_selector",
    "selector_names",
    "warm_up",
    "warm_up_formats",
]
