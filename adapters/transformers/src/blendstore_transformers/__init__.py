"""blendstore inside Hugging Face transformers, in process."""

from .engine import Engine, Generation, Prefill, Report
from .model import TransformersModel, UnsupportedModel

__all__ = ["Engine", "Generation", "Prefill", "Report", "TransformersModel", "UnsupportedModel"]
