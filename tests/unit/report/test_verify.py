"""Whatever figure is changed, in the report or under it, `verify_report` names it."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from tests.damage import edit_json
from tests.failing_files import OPEN, failing_calls
from virnuc.flows.cli import main
from virnuc_core.errors import InputError
from virnuc_core.profiles import Profile
from virnuc_core.report.build import rerender, write_report
from virnuc_core.report.compare import compare_runs
from virnuc_core.report.verify import verify_report
from virnuc_core.runfiles import digest

from .validate_directory import Recipe, build

Change = Callable[[Path], None]


def _json(relative: str, change: Callable[[dict], None]) -> Change:
    return lambda out: edit_json(out / relative, change)


def _text(relative: str, pattern: str, replacement: str) -> Change:
    def change(out: Path) -> None:
        (path,) = out.glob(relative)
        text_before = path.read_text(encoding="utf-8")
        text_after = re.sub(pattern, replacement, text_before, count=1, flags=re.MULTILINE)
        assert text_after != text_before, f"{pattern} is not in {path.name}"
        path.write_text(text_after, encoding="utf-8")

    return change


def _h5(relative: str, dataset: str, place: int, value: float) -> Change:
    def change(out: Path) -> None:
        (path,) = out.glob(relative)
        with h5py.File(path, "r+") as file:
            values = file[dataset][:]
            assert values[place] != value
            values[place] = value
            file[dataset][...] = values

    return change


def _set(*keys: str | int, to: object) -> Callable[[dict], None]:
    def change(body: dict) -> None:
        for key in keys[:-1]:
            body = body[key]
        assert body[keys[-1]] != to
        body[keys[-1]] = to

    return change


REPORTED: dict[str, Change] = {
    "criterion value": _json("report/report.json", _set("criteria", 0, "value", to=12.0)),
    "verdict": _json("report/report.json", _set("criteria", 2, "verdict", to="pass")),
    "target": _json("report/report.json", _set("profile", "targets", "scaling", "value", to=1.5)),
    "samples": _json("report/report.json", _set("criteria", 5, "samples", to=10_000)),
    "utilisation of one device": _json(
        "report/report.json", _set("run", "telemetry", "devices", 0, "esm2_percent", to=99.0)
    ),
    "stage": _json("report/report.json", _set("run", "stages", "DNABERT-S", to=1.0)),
    "a fate": _json("report/report.json", _set("run", "fates", "no_open_frame", to=0)),
    "a note left out": _json("report/report.json", _set("notes", to=[])),
    "a point of a chart": _json("report/report.json", _set("charts", "throughput", "y", 3, to=1e9)),
    "digest of a raw file": _json(
        "report/report.json", _set("evidence", "run.json", "sha256", to="0" * 64)
    ),
    "the printed verdict": _text("report/report.txt", r"6 of 7 CRITERIA MET", "ALL CRITERIA MET"),
    "the printed time": _text("report/report.txt", r"00:44", "00:24"),
    "a number in the Markdown": _text("report/report.md", r"\| 144 batches", "| 944 batches"),
    "a number on the page": _text("report/report.html", r"<b>1\.82x</b>", "<b>1.98x</b>"),
    "a chart on the page": _text("report/report.html", r"base64,PD94", "base64,PD95"),
    "the benchmark": _text("report/benchmark_*.md", r"1\.82x", "1.99x"),
    "the benchmark for machines": _text(
        "report/benchmark_*.json", r'"speedup": 1\.8\d+', '"speedup": 1.99'
    ),
}
RAW: dict[str, Change] = {
    "wall time": _json("devices-2/summary.json", _set("wall_s", to=20.0)),
    "reads": _json("devices-1/summary.json", _set("n_reads", to=301)),
    "a stage": _json("devices-2/summary.json", _set("stages", "ESM-2", to=2.0)),
    "a fate": _json("devices-2/summary.json", _set("fates", "failed", to=3)),
    "shards computed": _json("devices-2/summary.json", _set("shards_computed", to=99)),
    "baseline's time": _json("baseline/summary.json", _set("measured_s", to=4000.0)),
    "agreement": _json("comparison.json", _set("comparisons", 0, "consensus", "agreement", to=0.5)),
    "sameness": _json(
        "comparison.json", _set("comparisons", 2, "bitwise", "files_compared", to=40)
    ),
    "a comparison left out": _json("comparison.json", lambda body: body["comparisons"].pop()),
    "sameness left out": _json(
        "comparison.json", lambda body: body["comparisons"][2].pop("bitwise")
    ),
    "a looser tolerance": _json("comparison.json", _set("comparisons", 0, "tolerance", to=0.5)),
    "a utilisation sample": _h5("devices-2/telemetry/*.h5", "samples/utilisation", 30, 12.0),
    "tokens of a batch": _h5("devices-2/telemetry/*.h5", "tokens", 5, 9_000),
    "a wait": _h5("devices-2/telemetry/*.h5", "wait_ms", 5, 90.0),
    "a score": _text("devices-2/prediction_results.txt", r"\t0\.\d+$", "\t0.5000001"),
    "a consensus label": _text(
        "devices-1/prediction_results_highestscore.csv", r"\tTrue\t", "\tFalse\t"
    ),
    "a read's fate": _text("devices-2/reads.tsv", r"no_open_frame", "others"),
    "a device's name": _json("devices-2/run.json", _set("devices", 0, "name", to="NVIDIA H200")),
    "weights": _json("devices-2/run.json", _set("fingerprints", "head", to="beef")),
    "the telemetry's summary": _json(
        "devices-2/telemetry/telemetry_20260301_120000.json",
        _set("summary", "throughput", "tokens_per_sec", to=1e6),
    ),
    "a window": _json(
        "devices-2/telemetry/telemetry_20260301_120000.json", _set("windows", 0, "tokens", to=1)
    ),
    "the earlier run": _json("regression.json", _set("entry", "tokens_per_s", to=1.0)),
}
# Changed before the report was made: the report is true to its summaries, which are false.
LAUNDERED: dict[str, Change] = {
    name: RAW[name]
    for name in (
        "reads",
        "a stage",
        "a fate",
        "shards computed",
        "baseline's time",
        "agreement",
        "sameness",
        "a comparison left out",
        "sameness left out",
        "a looser tolerance",
        "tokens of a batch",
        "a consensus label",
        "a read's fate",
        "weights",
        "the telemetry's summary",
        "a window",
    )
}


def test_an_untouched_report_is_verified(
    finished: tuple[Path, Profile], capsys: pytest.CaptureFixture[str]
) -> None:
    verification = verify_report(finished[0])
    assert verification.differences == []
    assert verification.ok
    assert verification.figures > 1_000
    assert main(["verify", str(finished[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{verification.figures:,} figures computed again, all as reported"
    assert lines[:-1] == verification.remarks


@pytest.mark.parametrize("name", REPORTED)
def test_a_changed_report_is_caught(copied: tuple[Path, Profile], name: str) -> None:
    out_dir, _ = copied
    REPORTED[name](out_dir)
    verification = verify_report(out_dir)
    assert not verification.ok
    assert any("report" in line or ":" in line for line in verification.differences)


@pytest.mark.parametrize(
    "name", ["criterion value", "verdict", "stage", "a fate", "a note left out"]
)
def test_a_changed_report_is_caught_when_its_forms_agree(
    copied: tuple[Path, Profile], name: str
) -> None:
    out_dir, _ = copied
    REPORTED[name](out_dir)
    rerender(out_dir)
    assert not verify_report(out_dir).ok


@pytest.mark.parametrize("name", sorted(RAW.keys() - LAUNDERED.keys()))
def test_a_changed_raw_file_is_caught(copied: tuple[Path, Profile], name: str) -> None:
    out_dir, _ = copied
    RAW[name](out_dir)
    assert not verify_report(out_dir).ok


@pytest.mark.parametrize("name", LAUNDERED)
def test_a_raw_figure_changed_before_reporting_is_caught(
    copied: tuple[Path, Profile], name: str
) -> None:
    out_dir, profile = copied
    LAUNDERED[name](out_dir)
    shutil.rmtree(out_dir / "report")
    write_report(out_dir, profile)
    verification = verify_report(out_dir)
    assert not verification.ok
    assert not any(line.startswith("evidence") for line in verification.differences), (
        "caught by more than a digest"
    )


def test_a_missed_comparison_that_is_left_out_is_named(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    (out_dir / "regression.json").unlink()
    path = out_dir / "devices-1" / "prediction_results_highestscore.csv"
    path.write_text(
        path.read_text(encoding="utf-8").replace("\tTrue\t", "\tFalse\t"), encoding="utf-8"
    )
    edit_json(
        path.parent / "summary.json",
        lambda body: body["files"].update({path.name: digest(path).model_dump()}),
    )
    compare_runs(out_dir, ("devices-1", "devices-2"), tolerance=0.01, subset=False)
    assert {"same_bytes", "consensus"} <= {
        check.id for check in write_report(out_dir, profile).failed_criteria
    }
    assert verify_report(out_dir).ok
    edit_json(
        out_dir / "comparison.json", lambda body: body.update(comparisons=body["comparisons"][1:2])
    )
    assert {"same_bytes", "consensus"}.isdisjoint(
        check.id for check in write_report(out_dir, profile).failed_criteria
    )
    assert any(
        line.startswith("comparison.json: pairs: says")
        for line in verify_report(out_dir).differences
    )


def test_a_softer_profile_is_caught(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    softer = profile.model_copy(update={"score_tolerance": 0.5})
    write_report(out_dir, softer)
    assert any("score_tolerance" in line for line in verify_report(out_dir).differences)


def test_a_changed_shipped_profile_is_caught(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(devices=1, shards=2, reads=40))
    edit_json(tmp_path / "run.json", lambda body: body.pop("profile"))
    write_report(tmp_path, profile)  # its name is a shipped one, its numbers are not
    assert any(line.startswith("profile.min_reads") for line in verify_report(tmp_path).differences)


def test_a_missing_form_is_named(
    copied: tuple[Path, Profile], capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir, _ = copied
    (out_dir / "report" / "report.md").unlink()
    assert main(["verify", str(out_dir)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "report/report.md: missing"
    assert lines[-1].startswith("1 of ")


@pytest.mark.parametrize(
    "name", ["regression.json", "devices-2/reads.tsv", "devices-2/summary.json", "comparison.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_a_difference(
    name: str, content: bytes, copied: tuple[Path, Profile]
) -> None:
    out_dir, _ = copied
    assert (out_dir / name).is_file()
    (out_dir / name).write_bytes(content)
    assert any(name in line and len(line) < 400 for line in verify_report(out_dir).differences)


VERIFY = """
import sys
from virnuc.flows.cli import main
from virnuc_core import system_errors
system_errors.RETRY_PAUSES_S = (0.01,)
sys.exit(main(["verify", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    "name",
    ["regression.json", "comparison.json", "devices-2/summary.json", "devices-2/embeddings.h5"],
)
def test_a_file_that_the_system_cannot_read_is_neither_a_difference_nor_verified(
    name: str, copied: tuple[Path, Profile]
) -> None:
    out_dir, _ = copied
    child = subprocess.run(
        [sys.executable, "-c", VERIFY, str(out_dir)],
        env=failing_calls(name, errno.ESTALE, OPEN),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert child.returncode == 1, child.stdout
    last_line = child.stderr.splitlines()[-1]
    assert f"{name}: cannot be read: Stale file handle; " in last_line
    assert "as reported" not in child.stdout


def test_without_a_report_there_is_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="virnuc report DIR"):
        verify_report(tmp_path)


def test_a_report_of_another_kind_is_refused(copied: tuple[Path, Profile]) -> None:
    out_dir, _ = copied
    (out_dir / "report" / "report.json").write_text(
        json.dumps({"schema_version": 1}), encoding="utf-8"
    )
    with pytest.raises(InputError, match="not a report of this version"):
        verify_report(out_dir)


def test_a_scaled_baseline_is_verified(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(reads=200, baseline_reads=80))
    write_report(tmp_path, profile)
    assert verify_report(tmp_path).differences == []
    edit_json(tmp_path / "baseline" / "summary.json", lambda body: body.update(wall_s=5000.0))
    write_report(tmp_path, profile)
    assert any(
        "is not what its stages add up to" in line for line in verify_report(tmp_path).differences
    )
    edit_json(tmp_path / "baseline" / "summary.json", lambda body: body["subset"].update(reads=120))
    assert any("subset.reads: says 120" in line for line in verify_report(tmp_path).differences)


def test_the_page_of_another_drawing_library_is_compared_without_its_charts(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, _ = copied
    page = out_dir / "report" / "report.html"
    text = page.read_text(encoding="utf-8")
    older = re.sub(r"matplotlib [0-9.]+", "matplotlib 3.9.0", text).replace(
        "base64,PD94", "base64,AAAA"
    )
    page.write_text(older, encoding="utf-8")
    assert verify_report(out_dir).ok
    page.write_text(older.replace("<b>1.82x</b>", "<b>1.98x</b>"), encoding="utf-8")
    assert not verify_report(out_dir).ok
