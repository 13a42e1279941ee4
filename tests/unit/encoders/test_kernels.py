"""The Triton kernels without a GPU: by Triton's interpreter, in a process of its own (the choice is made at import)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def obstacle() -> str | None:
    """Why the interpreter cannot run here."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    version = importlib.metadata.version("triton")
    old = tuple(int(part) for part in version.split(".")[:2]) < (3, 7)
    return (
        f"the interpreter of triton {version} does not run with numpy 2.4; 3.7 does"
        if old
        else None
    )


pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kernels"), [("float16", 8), ("float32", 5)])
def test_every_kernel_equals_plain_torch_in_the_interpreter(dtype: str, kernels: int) -> None:
    script = Path(__file__).with_name("kernel_checks.py")
    root = Path(__file__).resolve().parents[3]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    process = subprocess.run(
        [sys.executable, str(script), dtype],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.count(" ok\n") == kernels
