"""The error of everything that this adapter won't do."""

from __future__ import annotations


class Refused(RuntimeError):
    """Blending, or blendstore as a whole, is refused for this model or server; the message says why."""
