"""The notebook of the documentation does what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    cell_program = f"{code}\nprint(list(run.summary), vectors.shape, len(frames), len(batches))\n"
    process = subprocess.run(
        [sys.executable, "-c", cell_program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    assert "'viral'" in process.stdout
