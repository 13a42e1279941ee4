"""The printed report: the layout of the published one, and no number looks better than it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.profiles import Target, load_profile
from virnuc_core.report.build import build_report
from virnuc_core.report.model import Regression, Report
from virnuc_core.report.raw_files import COMPARISON
from virnuc_core.report.render import criteria_text, report_text
from virnuc_core.report.text import round_beside_target, target_text
from virnuc_core.runfiles import write
from virnuc_core.telemetry.log import write_telemetry
from virnuc_core.telemetry.statistics import record_table
from virnuc_core.telemetry.tables import STAGES, BatchRecord, DeviceSample, HostSample, ShardDone
from virnuc_core.validation import Comparison, ComparisonFile

from ..telemetry.measurements import telemetry_of
from .validate_directory import ORIGIN_S, PRINTS, STARTED, Recipe, agreement_of, build, write_json

DATA = Path(__file__).resolve().parents[2] / "data"


def published(out: Path) -> Report:
    """The published measurements, laid down as the raw files of a validation, and gathered."""
    numbers = json.loads((DATA / "report_rtx4090_published.json").read_text(encoding="utf-8"))
    for place, count in enumerate((1, 2)):
        _published_run(out / f"devices-{count}", numbers, place, count)
    rows, chunks = numbers["n_rows"], numbers["n_chunks"]
    frames = agreement_of(rows, round(rows * (1 - numbers["frame_agreement"])))
    consensus = agreement_of(chunks, numbers["consensus_differing"])
    comparisons = []
    for name in ("devices-1", "devices-2"):
        comparisons.append(
            Comparison(a="baseline", b=name, tolerance=0.01, frames=frames, consensus=consensus)
        )
    write(out / COMPARISON, ComparisonFile(comparisons=tuple(comparisons)))
    profile = load_profile("phase10-1m")
    return build_report(
        out,
        profile.model_copy(
            update={"baseline": profile.baseline.model_copy(update={"source": "recorded"})}
        ),
    )


def _published_run(folder: Path, numbers: dict[str, Any], place: int, count: int) -> None:
    stages = {name: seconds[place] for name, seconds in numbers["stages"].items()}
    devices = [{"id": f"GPU-{i}", "name": numbers["device"], "kind": "cuda"} for i in range(count)]
    write_json(
        folder / "run.json",
        {
            "devices": devices,
            "fingerprints": PRINTS,
            "model_length": 500,
            "host": "the published machine",
        },
    )
    summary = {
        "wall_s": sum(stages.values()),
        "staging_s": 0.0,
        "stages": stages,
        "n_reads": numbers["n_reads"],
    }
    write_json(
        folder / "summary.json",
        {**summary, "n_rows": numbers["n_rows"], "n_chunks": numbers["n_chunks"]},
    )
    shards = []
    slots = 1000
    tokens = round(slots * numbers["packing_efficiency"])
    for device in devices:
        moments = [ORIGIN_S + index for index in range(20)]
        batches = [
            BatchRecord(device["id"], "esm2", 0, 0, 9, tokens, slots, 0.1, s, s, 1e3)
            for s in moments
        ]
        counts = (180, 20 * tokens, 0)
        shards.append(
            ShardDone(
                device["id"],
                0,
                *counts,
                moments[0],
                moments[-1],
                0.0,
                20.0,
                0.0,
                0.0,
                tuple(batches),
            )
        )
    samples = [
        DeviceSample(
            ORIGIN_S + tick, device["id"], numbers["utilisation_percent"][i], None, None, None
        )
        for i, device in enumerate(devices)
        for tick in range(20)
    ]
    telemetry = telemetry_of(
        shards,
        record_table(DeviceSample, samples),
        record_table(HostSample, []),
        (),
        origin_s=ORIGIN_S,
        started=STARTED,
    )
    write_telemetry(
        folder / "telemetry", telemetry, n_reads=numbers["n_reads"], wall_s=summary["wall_s"]
    )


def test_the_published_numbers_give_the_golden_report(tmp_path: Path) -> None:
    report = published(tmp_path)
    assert criteria_text(report) == (DATA / "report_rtx4090.txt").read_text(encoding="utf-8")


def test_the_honest_verdict_on_the_published_numbers_is_three_of_seven(tmp_path: Path) -> None:
    verdicts = {criterion.id: criterion.verdict for criterion in published(tmp_path).criteria}
    assert verdicts == {
        "one_device_time": "pass",
        "two_device_time": "fail",
        "scaling": "fail",
        "speedup": "pass",
        "consensus": "pass",
        "gpu_utilisation": "fail",
        "packing": "fail",
    }


def test_every_line_of_the_layout_stands_whatever_was_measured(tmp_path: Path) -> None:
    """With nothing measured at all, the sections, their order and the rulers are the same."""
    golden = (DATA / "report_rtx4090.txt").read_text(encoding="utf-8").splitlines()
    empty = criteria_text(build_report(tmp_path, load_profile("phase10-1m"))).splitlines()
    heads = [line for line in golden if line and not line.startswith((" ", "OVERALL", "PER-STAGE"))]
    assert [line for line in empty if line in heads] == heads
    assert (
        sum("[NOT RUN: there " in line for line in empty) == 8
    )  # scaling and its efficiency are one criterion
    assert "OVERALL: 0 of 7 CRITERIA MET" in empty
    assert "[PASS]" not in "\n".join(empty)


def test_nine_stage_lines_with_dotted_leaders(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(shards=2, reads=30))
    lines = criteria_text(build_report(tmp_path, profile)).splitlines()
    stages = [line for line in lines if line.startswith("  Stage ")]
    assert [line.split(": ")[1].split(" .")[0] for line in stages] == list(STAGES)
    assert all(line.index("..  ") > 30 for line in stages)
    assert sum("0s (fused)" in line for line in stages) == 3


def test_all_met_is_said_only_when_all_are(tmp_path: Path) -> None:
    report = published(tmp_path)
    passing = tuple(c.model_copy(update={"verdict": "pass"}) for c in report.criteria)
    passing_report = report.model_copy(update={"criteria": passing, "scaling": ()})
    assert "OVERALL: ALL CRITERIA MET\n" in criteria_text(passing_report)
    worse = Regression(verdict="fail", reason="over 10 % worse in total_s", stale=False)
    regressed_report = passing_report.model_copy(update={"regression": worse})
    page = report_text(regressed_report)
    assert "OVERALL: 7 of 7 CRITERIA MET\n" in page
    assert re.search(r"Further failures: +regression \(over 10 % worse in total_s\)\n", page)
    assert report.model_copy(update={"criteria": (), "scaling": ()}).outcome == "not judged"


@pytest.mark.parametrize(
    ("value", "op", "target", "shown"),
    [
        (89.96, ">", 90, "89.96"),
        (90.04, ">", 90, "90.04"),
        (90.0, ">=", 90, "90.0"),
        (1.8999, ">=", 1.9, "1.8999"),
        (93.2, ">", 90, "93.2"),
        (98.999999999, ">=", 99, "98.999999999"),
    ],
)
def test_a_figure_is_shown_on_its_own_side_of_the_target(
    value: float, op: str, target: float, shown: str
) -> None:
    assert round_beside_target(value, 1, Target(op=op, value=target)) == shown


@given(st.floats(0, 1e4), st.sampled_from(("<", "<=", ">", ">=")), st.integers(0, 100))
def test_what_is_printed_meets_the_target_exactly_when_the_value_does(
    value: float, op: str, limit: int
) -> None:
    target = Target(op=op, value=limit)
    assert target.met(float(round_beside_target(value, 1, target))) == target.met(value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3600, "<1 hour"),
        (36_000, "<10 hours"),
        (1800, "<30 min"),
        (5400, "<90 min"),
        (45, "<45 s"),
        (90.5, "<90.5 s"),
        (0, "<0 s"),
    ],
)
def test_limits_of_time_are_written_as_people_say_them(seconds: float, text: str) -> None:
    assert target_text(Target(op="<", value=seconds), "s") == text
