"""blendstore in SGLang: ``--radix-cache-backend blendstore`` on an unmodified engine."""

from .plugin import activate

__all__ = ["activate"]
