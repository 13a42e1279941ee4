"""What the tables of the tools show: sweeps, overheads and recordings."""

from __future__ import annotations

import pytest

from virnuc_core.config import EngineSpec
from virnuc_core.report.messages import profile_message, trace_extent
from virnuc_core.report.model import Bottleneck
from virnuc_core.report.profile_page import profile_markdown
from virnuc_core.report.views.tools import (
    candidate_rows,
    mark_rows,
    operation_rows,
    overhead_rows,
)
from virnuc_core.tools.memory_history import MemoryRecord
from virnuc_core.tools.trace import WAIT, Operation, TraceTable
from virnuc_core.tools.tune import Candidate
from virnuc_core.validation import OverheadPair

from ..markdown_pages import HOSTILE_TEXTS, shown_texts, structure


def operation(name: str, **changes: object) -> Operation:
    base = Operation(name=name, on="host", calls=4, host_ms=10.0, device_ms=40.0)
    return base.model_copy(update=changes)


def recording(kind: str = "cuda", **changes: object) -> TraceTable:
    """Return a recording of 100 ms: a wait, an encoder, a kernel and what launched it."""
    base = TraceTable(
        device="GPU-1",
        kind=kind,
        shards=1,
        batches=12,
        tokens=12_345,
        window_ms=100.0,
        marks=(operation(WAIT), operation("esm2")),
        operations=(operation("k" * 300, on="device"), operation("launch"), operation("copy")),
        trace="GPU-1.json.gz",
        trace_bytes=1 << 20,
    )
    return base.model_copy(update=changes)


def test_the_page_and_the_message_say_which_shards_were_recorded() -> None:
    tables = (recording(shard_numbers=(7,)), recording(device="GPU-2", shard_numbers=(3,)))
    assert "12 batches, 12,345 tokens" in profile_markdown(
        tables, stages=(), marks=(), operations=()
    )
    page = profile_markdown(tables, stages=(), marks=(), operations=())
    assert "1 shard (number 7 of the plan)" in page
    assert "1 shard (number 3 of the plan)" in page
    assert trace_extent(tables) == "24 batches of 2 shards (number 3, 7) on 2 devices recorded"
    older = recording()  # an older version did not say which
    assert trace_extent((older,)) == "12 batches of 1 shard on 1 device recorded"


def test_a_stage_counts_the_time_of_the_device_and_a_wait_that_of_the_host() -> None:
    wait, esm2 = mark_rows([recording()])
    assert (wait["stage"], wait["share of the recording"]) == ("(waiting for a batch)", "10.0 %")
    assert (esm2["stage"], esm2["share of the recording"]) == ("ESM-2", "40.0 %")


def test_on_a_cpu_there_is_no_time_of_the_device() -> None:
    _, esm2 = mark_rows([recording("cpu")])
    assert esm2["device ms"] is None
    assert esm2["share of the recording"] == "10.0 %"


def test_operations_are_cut_to_the_limit_and_long_names_to_a_width() -> None:
    kernel, launch = operation_rows([recording()], limit=2)
    assert kernel["operation"] == "k" * 90
    assert (kernel["ms"], kernel["ms a call"]) == (40.0, 10.0)
    assert (launch["ms"], launch["ms a call"]) == (10.0, 2.5)
    assert "shapes" not in kernel


def test_shapes_are_a_column_if_they_were_recorded() -> None:
    shaped_recording = recording(
        operations=(operation("matmul", shapes="[[4, 4]]"), operation("copy"))
    )
    matmul, copy = operation_rows([shaped_recording], limit=9)
    assert (matmul["shapes"], copy["shapes"]) == ("[[4, 4]]", "")


def test_the_page_of_a_recording_names_its_traces() -> None:
    tables = [recording(), recording(trace=None, shards=2_000)]
    text = profile_markdown(
        tables,
        stages=[{"stage": "all", "seconds": "1.0"}],
        marks=mark_rows(tables),
        operations=operation_rows(tables, limit=1),
    )
    assert "- `GPU-1.json.gz`: 1 shard, 12 batches, 12,345 tokens in 0.10 s\n" in text
    assert "- `not kept: too large`: 2,000 shards, 12 batches, 12,345 tokens in 0.10 s\n" in text
    assert "| ESM-2 | 4 | 10.0 | 40.0 | 40.0 % |" in text


def test_the_page_of_a_recording_tells_memory_history_and_bottleneck() -> None:
    memory = MemoryRecord(
        start_bytes=1 << 30, peak_bytes=3 << 30, end_bytes=1 << 30, history="GPU-1.memory.pickle"
    )
    cpu_memory = MemoryRecord(history_reason="not run: cpu-core-0 is no CUDA device")
    tables = [
        recording(memory=memory),
        recording("cpu", device="cpu-core-0", memory=cpu_memory),
    ]
    losses = (
        Bottleneck(kind="loader", detail="Waiting 4 s", advice="more", saves_s=4.0, share=0.4),
    )
    text = profile_markdown(tables, stages=[], marks=[], operations=[], losses=losses)
    assert "| GPU-1 | 1.00 | 3.00 | 1.00 |" in text
    assert "- GPU-1: GPU-1.memory.pickle\n- cpu-core-0: not run: cpu-core-0 is no CUDA" in text
    assert "**loader** (actionable): Waiting 4 s; removing it would save 4.0 s at most" in text
    message = profile_message(tables, "traces", losses)
    assert "; bottleneck: loader, at most 40.0 % of the time; memory history of GPU-1" in message


def test_the_page_of_a_recording_says_nothing_of_what_was_not_asked_for() -> None:
    text = profile_markdown([recording()], stages=[], marks=[], operations=[])
    assert "Memory history" not in text
    assert "Bottleneck" not in text


def recording_page(name: str) -> str:
    """Return the page of a recording in which everything that comes from files has this name."""
    tables = [
        recording(device=name, trace=name, operations=(operation(name, on="device", shapes=name),))
    ]
    return profile_markdown(
        tables,
        stages=[{name: name, "seconds": "1.0"}],
        marks=mark_rows(tables),
        operations=operation_rows(tables, limit=9),
    )


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_names_are_shown_as_they_are_on_the_page_of_a_recording(name: str) -> None:
    page = recording_page(name)
    assert structure(page) == structure(recording_page("name"))
    assert " ".join(name.split()) in shown_texts(page)


def test_a_pair_of_runs_shows_what_is_lost() -> None:
    pair = OverheadPair(
        with_run="a",
        without_run="b",
        with_tokens_per_s=98.4,
        without_tokens_per_s=100.0,
        seconds=20.0,
        restarts=0,
    )
    (row,) = overhead_rows([pair])
    assert (row["tokens/s with"], row["tokens/s without"], row["overhead"]) == (98, 100, "1.6 %")


@pytest.mark.parametrize(
    ("refused", "dropped", "reason"),
    [("no memory", True, "no memory"), ("", True, "slower, dropped by halving"), ("", False, "")],
)
def test_a_candidate_says_why_it_is_out(refused: str, dropped: bool, reason: str) -> None:
    engine = EngineSpec(num_workers=0, prefetch_factor=4)
    candidate = Candidate(1, {"num_workers": 0}, engine, refusal_reason=refused, is_dropped=dropped)
    base = Candidate(0, {}, EngineSpec())
    (row,) = candidate_rows([candidate], chosen=base, recommended="yes", tolerance=0.01)
    assert row["why"] == reason
    assert row["verdict"] == "cannot run", "nothing was measured of it"
    assert row["queue depth"] == 4, "without workers the loop itself keeps batches ready"


def test_the_chosen_candidate_is_marked() -> None:
    base = Candidate(0, {}, EngineSpec())
    (row,) = candidate_rows([base], chosen=base, recommended="**yes**", tolerance=0.01)
    assert (row["settings"], row["verdict"]) == ("base", "**yes**")
