"""Profiler traces of a run: recorded inside the workers, and read back as tables."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from prefect.artifacts import Artifact

from virnuc.flows.prefect_flows.profile import profile
from virnuc.tasks.artifacts import host_key
from virnuc_core.runfiles import read
from virnuc_core.tools.trace import TABLE, TraceTable

pytestmark = pytest.mark.usefixtures("prefect_backend")
SMALL = {"devices": "cpu:1", "shard_tokens": 4096, "token_budget": 1024, "dna_token_budget": 1024}


@pytest.mark.slow
def test_a_trace_holds_the_stages_and_the_run_is_left_alone(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    out_dir = tmp_path / "run"
    arguments = {
        "reads": [str(few_reads)],
        "out": out_dir,
        "models": models,
        "operations": 5,
        **SMALL,
    }
    state = profile(**arguments, return_state=True)
    assert state.is_completed(), state.message
    folder = out_dir / "telemetry" / "traces"
    [table] = state.result()
    assert table == read(folder / TABLE.format(table.device), TraceTable)
    marks = {mark.name: mark for mark in table.marks}
    assert set(marks) == {"dataloader_fetch", "dnabert_s", "esm2", "head"}
    assert marks["dnabert_s"].calls + marks["esm2"].calls == table.batches
    assert marks["head"].calls == table.shards == 1
    assert table.tokens <= 1024 * table.batches
    assert 0 < sum(mark.host_ms for mark in table.marks) <= table.window_ms * 1.01
    assert len(table.operations) == 5
    assert any(row.name.startswith("aten::") for row in table.operations)
    with gzip.open(folder / f"{table.device}.json.gz", "rt") as handle:
        events = json.load(handle)["traceEvents"]
    assert sum(event.get("name") == "esm2" for event in events) == marks["esm2"].calls

    assert (out_dir / "prediction_results.txt").is_file()
    text = (folder / "profile.md").read_text()
    assert "Stage 6: ESM-2" in text
    assert re.search(r"## Bottleneck\n\n\*\*[\w-]+\*\* \((expected|actionable)\): ", text)
    assert "Model Prediction" in text
    for key in ("operations-few-cpu-1", "marks-few-cpu-1", "profile-few-cpu-1"):
        assert Artifact.get(host_key(key)) is not None, key
    assert len(json.loads((out_dir / "run.json").read_text())["attempts"]) == 1, (
        "recording leaves the run alone"
    )
