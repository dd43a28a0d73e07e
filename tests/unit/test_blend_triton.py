"""The Triton kernels against plain torch, under Triton's interpreter, so that no GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "checks", ["check_attention.py", "check_drift.py", "check_formats.py", "check_rows.py", "check_slots.py"]
)
def test_kernels_under_tritons_interpreter(checks: str) -> None:
    """In a process of its own: Triton decides on its import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/kernels" / checks)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
