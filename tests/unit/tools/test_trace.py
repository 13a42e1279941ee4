"""Recordings in a worker process are bounded, are read back as written, and leave nothing else."""

from __future__ import annotations

import gzip
import json
import pickletools
from collections import Counter
from pathlib import Path

import pytest
import torch

from virnuc_core.config import Devices, EngineSpec, TraceSpec
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
    assert table.shard_numbers == (1,), "shard 0 warms up"
    extent = messages.trace_extent(tables)
    assert extent.endswith("batches of 1 shard (number 1) on 1 device recorded")


@pytest.mark.slow
def test_a_trace_for_tensorboard_marks_steps_forward_passes_and_lines_of_python(
    tmp_path: Path, bench: Bench, engine: EngineSpec
) -> None:
    """The names are those of VirNucPro's profiling, which TensorBoard's plugin looks for."""
    folder = tmp_path / "traces"
    spec = TraceSpec(folder=str(folder), tensorboard=True, stacks=True, memory_history=True)
    [table] = trace(bench, engine, spec)
    assert table.trace == f"{table.device}.pt.trace.json.gz"
    with gzip.open(folder / table.trace, "rt") as handle:
        events = json.load(handle)["traceEvents"]
    ranges = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    steps = sum(count for name, count in ranges.items() if name.startswith("ProfilerStep#"))
    assert ranges["model_forward"] == table.batches
    assert ranges["dnabert_s"] + ranges["esm2"] == table.batches
    assert ranges["dataloader_fetch"] >= table.batches
    assert steps == table.batches + 1, "the last step ends with the recording"
    assert any(event.get("cat") == "python_function" for event in events)
    shown = {row.name for row in table.operations}
    assert not [name for name in shown if name.startswith(("ProfilerStep", "model_forward"))]

    assert table.memory.history is None
    assert table.memory.history_reason == "not run: cpu-core-0 is no CUDA device"
    assert table.memory.peak_bytes is None
    assert not list(folder.glob("*.pickle"))
    assert "not run: cpu-core-0" in messages.profile_message([table], spec.folder)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_memory_history_of_a_gpu_holds_allocations_and_their_lines(
    tmp_path: Path, bench: Bench, engine: EngineSpec
) -> None:
    folder = tmp_path / "traces"
    on_gpu = Bench(bench.store, bench.models, Devices.parse("cuda:0"))
    spec = TraceSpec(folder=str(folder), memory_history=True)
    [table] = trace(on_gpu, engine, spec)
    assert table.memory.history == f"{table.device}.memory.pickle"
    path = folder / table.memory.history
    assert path.stat().st_size == table.memory.history_bytes
    # Read without running it: a pickle from a file is code.
    texts = {argument for _, argument, _ in pickletools.genops(path.read_bytes())}
    assert {"segments", "device_traces", "alloc"} <= texts
    assert any(str(text).endswith("engine/worker.py") for text in texts)
    assert table.memory.start_bytes
    assert table.memory.peak_bytes > table.memory.start_bytes
