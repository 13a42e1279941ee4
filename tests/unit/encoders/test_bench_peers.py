"""The comparison with other packages, on two small layers: it runs to the end and names what is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_peers.py"


@pytest.mark.slow
def test_engines_agree_and_missing_ones_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("bench_peers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_peers", bench)
    spec.loader.exec_module(bench)
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where they are not installed
    monkeypatch.setitem(sys.modules, "esme", None)
    assert bench.main(["--tiny"]) == 0
    description, _, _, _, *lines = capsys.readouterr().out.splitlines()
    assert "CPU" in description
    rows = {
        (cells := [cell.strip() for cell in line.split("|")[1:-1]])[0]: cells[1:]
        for line in lines
        if line
    }
    assert len(rows) == 8
    for name in ("virnuc, fp32", "v1.0's method, fp32", "the original's method, fp32"):
        worst = float(rows[name][-1].split(";")[0])
        assert worst > 0.9999, (name, rows[name])
    assert float(rows["virnuc, int8"][-1].split(";")[0]) > 0.99
    for name in ("transformers, SDPA, fp32", "esm-efficient, fp32", "faesm, fp32"):
        assert rows[name][0].startswith("not run: ModuleNotFoundError")
