"""Checks of the Triton kernels against plain torch: on a GPU where there is one, else under Triton's interpreter.

pytest doesn't collect them by itself: `tests/unit/test_blend_triton.py` runs them under the interpreter, which has to
be chosen before Triton is imported. On a GPU: ``python -m pytest tests/kernels/check_*.py``.
"""

import os
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Differences that the rounding of inputs of about 1 explains.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal random numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


if INTERPRETED:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patched(tensor: Any, scope: Any) -> None:
        # Triton 3.6's interpreter makes loop bounds of arrays with one item, which numpy 2.4 doesn't convert.
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patched
