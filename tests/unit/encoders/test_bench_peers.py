"""The comparison with other packages, on two small layers: it runs to the end and names what is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_peers.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Load the script as a module."""
    spec = importlib.util.spec_from_file_location("bench_peers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_peers", module)
    spec.loader.exec_module(module)
    yield module
    torch._dynamo.reset()


def table_rows(lines: list[str]) -> dict[str, list[str]]:
    """Return the cells of each row by its first cell."""
    rows = {}
    for line in lines:
        name, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        rows[name] = cells
    return rows


@pytest.mark.slow
def test_engines_agree_and_missing_ones_are_named(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this worker need no compiler, and it takes long to import.
    from torch._dynamo.utils import counters

    monkeypatch.setitem(sys.modules, "transformers", None)  # as where they are not installed
    monkeypatch.setitem(sys.modules, "esme", None)
    counters.clear()
    assert bench.main(["--tiny", "--repeats", "1", "--compile-mode", "eager"]) == 0
    description, engines, leads, notes = capsys.readouterr().out.strip().split("\n\n")
    assert "CPU" in description
    rows = table_rows(engines.splitlines()[2:])
    strong = f"{bench.STRONG}fp32"
    assert len(rows) == 9
    for name in ("virnuc, fp32", strong, "v1.0's method, fp32", "the original's method, fp32"):
        worst = float(rows[name][-1].split(";")[0])
        assert worst > 0.9999, (name, rows[name])
    assert float(rows["virnuc, int8"][-1].split(";")[0]) > 0.99
    for name in ("transformers, SDPA, fp32", "esm-efficient, fp32", "faesm, fp32"):
        assert rows[name][0].startswith("not run: ModuleNotFoundError")
    assert list(table_rows(leads.splitlines()[2:])) == ["virnuc, fp32", "virnuc, int8"]
    assert notes.startswith(f"{strong}: compiled in mode eager in ")
    assert counters["stats"]["unique_graphs"] == 2, "each function is compiled once"


def test_a_lead_is_the_median_of_neighbouring_runs(bench: ModuleType) -> None:
    # the clock of the card falls from run to run, the ratio stays
    assert bench.lead([200.0, 150.0, 110.0], [100.0, 75.0, 50.0]) == (2.0, 2.0, 2.2)


def test_compilation_ends_at_its_limit_although_the_compiler_catches_exceptions(
    bench: ModuleType,
) -> None:
    def compile_everything() -> None:
        """Go on after an error, as a compiler does with its next kernel."""
        while time.monotonic() - began < 20:
            with contextlib.suppress(Exception):
                time.sleep(20)

    began = time.monotonic()
    with pytest.raises(bench.CompileTimeout), bench.compile_limit(0.05):
        compile_everything()
    assert time.monotonic() - began < 10
