"""Recordings in a worker process are bounded, are read back as written, and leave nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.config import EngineSpec, TraceSpec
from virnuc_core.report import messages
from virnuc_core.runfiles import read
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.trace import TABLE, TraceTable, trace


@pytest.mark.slow
def test_a_trace_that_is_too_large_is_not_kept_but_its_tables_are(
    tmp_path: Path, bench: Bench, engine: EngineSpec
) -> None:
    folder = tmp_path / "traces"
    spec = TraceSpec(folder=str(folder), max_trace_mb=0, shapes=True, operations=5)
    tables = trace(bench, engine, spec)
    [table] = tables
    assert table == read(folder / TABLE.format(table.device), TraceTable)
    assert table.trace is None
    assert table.trace_bytes > 16
    assert any(operation.shapes for operation in table.operations)
    assert [path.name for path in folder.iterdir()] == [TABLE.format(table.device)]
    assert messages.trace_extent(tables).endswith("batches of 1 shard on 1 device recorded")
