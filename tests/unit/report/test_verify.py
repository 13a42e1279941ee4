"""Whatever figure is changed, in the report or under it, `verify_report` names it."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify import verify_report
from virnuc_core.report.verify_store import MAX_PROCESSES, count_processes
from virnuc_core.runfiles import digest

from .validate_directory import Recipe, build

pytestmark = pytest.mark.usefixtures("telemetry_once")

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


@dataclass(frozen=True)
class Falsification:
    """A change of one file, and the beginning of the line of the verification that names it."""

    change: Change
    named_as: str


def _report_json(*keys: str | int, to: object, named_as: str) -> Falsification:
    return Falsification(_json("report/report.json", _set(*keys, to=to)), named_as)


SUMMARY_2 = "devices-2/summary.json"
TELEMETRY_2 = "devices-2/telemetry/telemetry_20260301_120000"
COMPARISON = "comparison.json"

# Each falsification of a group is named although the others are there, too: one verification for
# all of them. What would hide another is in another group.
REPORT_DATA = {
    "criterion value": _report_json(
        "criteria", 0, "value", to=12.0, named_as="criteria[0].value: says 12.0, "
    ),
    "verdict": _report_json(
        "criteria", 2, "verdict", to="pass", named_as='criteria[2].verdict: says "pass", '
    ),
    "samples": _report_json(
        "criteria", 5, "samples", to=10_000, named_as="criteria[5].samples: says 10000, "
    ),
    "utilisation of one device": _report_json(
        *("run", "telemetry", "devices", 0, "esm2_percent"),
        to=99.0,
        named_as="run.telemetry.devices[0].esm2_percent: says 99.0, ",
    ),
    "stage": _report_json(
        "run", "stages", "DNABERT-S", to=1.0, named_as="run.stages.DNABERT-S: says 1.0, "
    ),
    "a fate": _report_json(
        "run", "fates", "no_open_frame", to=0, named_as="run.fates.no_open_frame: says 0, "
    ),
    "a note left out": _report_json("notes", to=[], named_as="notes: says [], "),
    "a point of a chart": _report_json(
        "charts", "throughput", "y", 3, to=1e9, named_as="charts.throughput.y[3]: says 1000000000.0"
    ),
    "digest of a raw file": _report_json(
        "evidence", "run.json", "sha256", to="0" * 64, named_as='evidence.run.json.sha256: says "00'
    ),
}
REPORTED: dict[str, dict[str, Falsification]] = {
    "its data": REPORT_DATA,
    "its target": {
        "target": _report_json(
            *("profile", "targets", "scaling", "value"),
            to=1.5,
            named_as="profile.targets.scaling.value: says 1.5, ",
        ),
    },
    "its pages": {
        "the printed verdict": Falsification(
            _text("report/report.txt", r"6 of 7 CRITERIA MET", "ALL CRITERIA MET"),
            "report/report.txt: ",
        ),
        "a number in the Markdown": Falsification(
            _text("report/report.md", r"\| 144 batches", "| 944 batches"), "report/report.md: "
        ),
        "a number on the page": Falsification(
            _text("report/report.html", r"<b>1\.82x</b>", "<b>1.98x</b>"), "report/report.html: "
        ),
        "the benchmark": Falsification(
            _text("report/benchmark_*.md", r"1\.82x", "1.99x"),
            "report/benchmark_20260301_120000.md: ",
        ),
        "the benchmark for machines": Falsification(
            _text("report/benchmark_*.json", r'"speedup": 1\.8\d+', '"speedup": 1.99'),
            "report/benchmark_20260301_120000.json: ",
        ),
    },
    "a time and a chart on its pages": {
        "the printed time": Falsification(
            _text("report/report.txt", r"00:44", "00:24"), "report/report.txt: "
        ),
        "a chart on the page": Falsification(
            _text("report/report.html", r"base64,PD94", "base64,PD95"), "report/report.html: "
        ),
    },
}
RAW = {
    "wall time": Falsification(
        _json(SUMMARY_2, _set("wall_s", to=20.0)), "run.wall_s: says 39.0, "
    ),
    "a utilisation sample": Falsification(
        _h5("devices-2/telemetry/*.h5", "samples/utilisation", 30, 12.0),
        f"{TELEMETRY_2}.h5: is not as the run left it",
    ),
    "a wait": Falsification(
        _h5("devices-1/telemetry/*.h5", "wait_ms", 5, 90.0),
        "devices-1/telemetry/telemetry_20260301_120000.h5: is not as the run left it",
    ),
    "a score": Falsification(
        _text("devices-2/prediction_results.txt", r"\t0\.\d+$", "\t0.5000001"),
        "devices-2/prediction_results.txt: is not as the run left it",
    ),
    "a device's name": Falsification(
        _json("devices-2/run.json", _set("devices", 0, "name", to="NVIDIA H200")),
        'devices-2/run.json: devices[0].name: says "NVIDIA H200", ',
    ),
    "the earlier run": Falsification(
        _json("regression.json", _set("entry", "tokens_per_s", to=1.0)),
        "regression.json: entry.tokens_per_s: says 1.0, ",
    ),
}
# Changed before the report was made: the report is true to its summaries, which are false.
LAUNDERED: dict[str, dict[str, Falsification]] = {
    "results and their counts": {
        "reads": Falsification(
            _json("devices-1/summary.json", _set("n_reads", to=301)),
            "devices-1/summary.json: n_reads: says 301, ",
        ),
        "a stage": Falsification(
            _json(SUMMARY_2, _set("stages", "ESM-2", to=2.0)),
            f"{SUMMARY_2}: total_s says 44.000, its stages add up to",
        ),
        "a fate": Falsification(
            _json(SUMMARY_2, _set("fates", "failed", to=3)),
            f"{SUMMARY_2}: n_reads: says 300, the raw files give 303",
        ),
        "baseline's time": Falsification(
            _json("baseline/summary.json", _set("measured_s", to=4000.0)),
            "baseline/summary.json: wall_s: says 900.0, the raw files give 4000.0",
        ),
        "a comparison left out": Falsification(
            _json(COMPARISON, lambda body: body["comparisons"].pop()), f"{COMPARISON}: pairs: says "
        ),
        "tokens of a batch": Falsification(
            _h5("devices-2/telemetry/*.h5", "tokens", 5, 9_000),
            f"{TELEMETRY_2}.h5: is not as the run left it",
        ),
        "a consensus label": Falsification(
            _text("devices-1/prediction_results_highestscore.csv", r"\tTrue\t", "\tFalse\t"),
            "devices-1/prediction_results_highestscore.csv, which summary.json lists",
        ),
        "a read's fate": Falsification(
            _text("devices-2/reads.tsv", r"no_open_frame", "others"),
            "devices-2/reads.tsv, which summary.json lists",
        ),
        "weights": Falsification(
            _json("devices-2/run.json", _set("fingerprints", "head", to="beef")),
            'devices-2/run.json: head: says "beef", ',
        ),
    },
    "measurements and comparisons": {
        "shards computed": Falsification(
            _json(SUMMARY_2, _set("shards_computed", to=99)),
            f"{TELEMETRY_2}.h5: summary.json: shards_computed: says 99, ",
        ),
        "the telemetry's summary": Falsification(
            _json(f"{TELEMETRY_2}.json", _set("summary", "throughput", "tokens_per_sec", to=1e6)),
            f"{TELEMETRY_2}.json.summary.throughput.tokens_per_sec: says 1000000.0, ",
        ),
        "a window": Falsification(
            _json(f"{TELEMETRY_2}.json", _set("windows", 0, "tokens", to=1)),
            f"{TELEMETRY_2}.json.windows[0].tokens: says 1, ",
        ),
        "agreement": Falsification(
            _json(COMPARISON, _set("comparisons", 0, "consensus", "agreement", to=0.5)),
            f"{COMPARISON}: baseline and devices-1.consensus.agreement: says 0.5, ",
        ),
        "sameness": Falsification(
            _json(COMPARISON, _set("comparisons", 2, "bitwise", "files_compared", to=40)),
            f"{COMPARISON}: devices-1 and devices-2.bitwise.files_compared: says 40, ",
        ),
    },
    "how runs were compared": {
        "a looser tolerance": Falsification(
            _json(COMPARISON, _set("comparisons", 0, "tolerance", to=0.5)),
            f"{COMPARISON}: pairs[0][2]: says 0.5, ",
        ),
        "sameness left out": Falsification(
            _json(COMPARISON, lambda body: body["comparisons"][2].pop("bitwise")),
            f"{COMPARISON}: devices-1 and devices-2.bitwise: says null, ",
        ),
    },
}


def _apply(falsifications: dict[str, Falsification], out: Path) -> None:
    for falsification in falsifications.values():
        falsification.change(out)


def _assert_each_is_named(
    falsifications: dict[str, Falsification], verification: Verification
) -> None:
    """Fail with the names of the falsifications that no line of the verification names."""
    unnamed = [
        name
        for name, falsification in falsifications.items()
        if not any(line.startswith(falsification.named_as) for line in verification.differences)
    ]
    assert unnamed == [], "\n".join(verification.differences)


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


@pytest.mark.parametrize("group", REPORTED)
def test_whatever_is_changed_in_a_report_is_named(copied: tuple[Path, Profile], group: str) -> None:
    out_dir, _ = copied
    _apply(REPORTED[group], out_dir)
    _assert_each_is_named(REPORTED[group], verify_report(out_dir))


def test_whatever_is_changed_in_a_report_is_named_when_its_forms_agree(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, _ = copied
    _apply(REPORT_DATA, out_dir)
    rerender(out_dir)
    _assert_each_is_named(REPORT_DATA, verify_report(out_dir))


def test_whatever_is_changed_in_a_raw_file_is_named(copied: tuple[Path, Profile]) -> None:
    out_dir, _ = copied
    _apply(RAW, out_dir)
    _assert_each_is_named(RAW, verify_report(out_dir))


@pytest.mark.parametrize("group", LAUNDERED)
def test_whatever_is_changed_in_raw_files_before_reporting_is_named(
    copied: tuple[Path, Profile], group: str
) -> None:
    out_dir, profile = copied
    _apply(LAUNDERED[group], out_dir)
    shutil.rmtree(out_dir / "report")
    write_report(out_dir, profile)
    verification = verify_report(out_dir)
    _assert_each_is_named(LAUNDERED[group], verification)
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


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_a_difference(
    content: bytes, copied: tuple[Path, Profile]
) -> None:
    out_dir, _ = copied
    names = ("regression.json", "devices-1/reads.tsv", SUMMARY_2, COMPARISON)
    for name in names:
        assert (out_dir / name).is_file()
        (out_dir / name).write_bytes(content)
    differences = verify_report(out_dir).differences
    for name in names:
        assert any(name in line and len(line) < 400 for line in differences), name


# One process verifies once for each file, since its start takes longer than all verifications.
VERIFY = """
import os, sys
from virnuc.flows.cli import main
from virnuc_core import system_errors
system_errors.RETRY_PAUSES_S = (0.01,)
out_dir, *names = sys.argv[1:]
for name in names:
    os.environ["FAIL_PATH"] = name  # the preloaded library reads it at each call
    code = main(["verify", out_dir])
    print(f"{name}: exit code {code}", file=sys.stderr)
"""


def test_a_file_that_the_system_cannot_read_is_neither_a_difference_nor_verified(
    finished: tuple[Path, Profile],
) -> None:
    out_dir, _ = finished
    names = ["regression.json", COMPARISON, SUMMARY_2, "devices-2/embeddings.h5"]
    child = subprocess.run(
        [sys.executable, "-c", VERIFY, str(out_dir), *names],
        env=failing_calls("set by the process itself", errno.ESTALE, OPEN),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    lines = child.stderr.splitlines()
    for name in names:
        error_line = lines[lines.index(f"{name}: exit code 1") - 1]
        assert f"{name}: cannot be read: Stale file handle; " in error_line
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


def test_the_processes_of_verify_do_not_load_torch() -> None:
    """Each process would hold it in memory, twice as much as all else, and nothing computes."""
    code = "import sys, virnuc_core.report.verify; print('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout == "False\n"


def test_a_large_machine_does_not_start_a_process_on_each_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for n_cores, n_processes in ((1, 1), (2, 2), (64, MAX_PROCESSES)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=n_cores: set(range(n)))
        assert count_processes() == n_processes
