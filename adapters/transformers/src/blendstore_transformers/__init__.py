"""blendstore inside Hugging Face transformers, in process."""

from .model import TransformersModel, UnsupportedModel

__all__ = ["TransformersModel", "UnsupportedModel"]
