"""History: like with like, worse in the metric's own direction, and old figures known as old."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.damage import edit_json
from virnuc.flows.cli import main
from virnuc_core.errors import ConfigError
from virnuc_core.profiles import Profile, Target
from virnuc_core.report.build import build_report, write_report
from virnuc_core.report.charts import all_charts
from virnuc_core.report.model import HistoryEntry, Report
from virnuc_core.report.regression import (
    HISTORY,
    REGRESSION,
    ApprovalLine,
    append_approval,
    append_history,
    entry_of,
    history_gaps,
    read_approvals,
    read_history,
    regression,
)
from virnuc_core.report.verify import verify_report
from virnuc_core.validation import ApprovalRecord

pytestmark = pytest.mark.usefixtures("telemetry_once")


def entry(created: str = "2026-03-02", **changes: object) -> HistoryEntry:
    values: dict[str, object] = {
        "created": created,
        "commit": "abc",
        "profile": "h200-1m",
        "devices": "2x NVIDIA H200",
        "precision": "fp16",
        "reads": "r",
        "weights": "w",
        "n_reads": 100,
        "tokens_per_s": 1000.0,
        "gpu_utilisation": 95.0,
        "packing_efficiency": 98.0,
        "total_s": 60.0,
        "criteria_met": 7,
    }
    return HistoryEntry.model_validate(values | changes)


OLD = entry("2026-03-01")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "pass"),
        ({"tokens_per_s": 905.0}, "pass"),
        ({"tokens_per_s": 895.0}, "fail"),
        ({"tokens_per_s": 2000.0}, "pass"),
        ({"total_s": 67.0}, "fail"),
        ({"total_s": 30.0}, "pass"),
        ({"gpu_utilisation": 80.0}, "fail"),
        ({"packing_efficiency": 85.0}, "fail"),
    ],
)
def test_ten_percent_worse_fails_in_each_metrics_own_direction(
    changes: dict[str, float], verdict: str
) -> None:
    result = regression([OLD], entry(**changes))
    assert result.verdict == verdict
    if verdict == "fail":
        assert next(iter(changes)) in result.reason
        assert regression([OLD], entry(**changes, regression_percent=60.0)).verdict == "pass", (
            "the profile's limit"
        )


@pytest.mark.parametrize("key", ["profile", "devices", "precision", "host"])
def test_another_series_is_not_compared(key: str) -> None:
    result = regression([entry("2026-03-01", **{key: "other"}, tokens_per_s=1.0)], entry())
    assert (result.verdict, result.stale) == ("not run", False)


def test_the_same_devices_on_nodes_of_a_cluster_are_another_series(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    local = entry_of(build_report(out_dir, profile))
    assert local is not None

    def on_nodes(count: int) -> HistoryEntry:
        def place(record: dict[str, Any]) -> None:
            for number, device in enumerate(record["devices"]):
                device["id"] = f"{device['id'].partition('@')[0]}@node{number % count}"

        edit_json(out_dir / "devices-2" / "run.json", place)
        history_entry = entry_of(build_report(out_dir, profile))
        assert history_entry is not None
        return history_entry.model_copy(update={"created": f"2026-04-0{count}"})

    one_node, two = on_nodes(1), on_nodes(2)
    assert local.devices == "2x NVIDIA GeForce RTX 4090"
    assert [one_node.devices, two.devices] == [
        f"{local.devices} (nodes: {count})" for count in (1, 2)
    ]
    assert (
        regression([local, one_node], two).reason
        == "no earlier run of this profile on these devices"
    )
    assert (
        regression([local, two], two.model_copy(update={"created": "2026-05-01"})).verdict == "pass"
    )


@pytest.mark.parametrize("key", ["reads", "weights"])
def test_other_reads_or_weights_make_the_baseline_stale(key: str) -> None:
    result = regression([entry("2026-03-01", **{key: "other"})], entry())
    assert (result.verdict, result.stale) == ("not run", True)
    assert "stale" in result.reason


def test_the_newest_like_run_counts_and_staleness_is_said() -> None:
    history = [entry("2026-01-01", total_s=10.0), OLD, entry("2026-03-01T12", weights="new")]
    result = regression(history, entry())
    assert result.against_created == "2026-03-01"
    assert result.verdict == "pass"
    assert result.stale


def test_a_later_run_is_not_an_earlier_one() -> None:
    assert regression([entry("2026-04-01")], entry()).verdict == "not run"


def test_a_metric_missing_on_either_side_is_not_run() -> None:
    result = regression([entry("2026-03-01", gpu_utilisation=None)], entry(tokens_per_s=None))
    verdicts = {metric.name: metric.verdict for metric in result.metrics}
    assert verdicts["gpu_utilisation"] == verdicts["tokens_per_s"] == "not run"
    assert result.verdict == "pass"
    nothing = dict.fromkeys(("tokens_per_s", "gpu_utilisation", "packing_efficiency", "total_s"))
    assert regression([OLD], entry(**nothing)).verdict == "not run", "all of nothing is no pass"


def test_history_is_lines_and_no_run_stands_twice(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    assert read_history(path) == ()
    assert append_history(path, OLD)
    assert append_history(path, entry())
    assert not append_history(path, entry())
    assert read_history(path) == (OLD, entry())


def test_a_figure_that_was_changed_later_is_no_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.jsonl"
    append_history(path, OLD)
    append_history(path, entry())
    # A flipped bit makes 1000.0 tokens/s 3000.0 in the first line, which is still valid JSON.
    path.write_bytes(path.read_bytes().replace(b"1000.0", b"3000.0", 1))
    assert read_history(path) == (entry(),)
    assert "history.jsonl:1: not a history entry (it was changed after" in caplog.text


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_a_line_that_was_edited_or_removed_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """Each line has the digest of the line before it, so a new checksum of the line is not enough."""
    path = tmp_path / "history.jsonl"
    for number in range(1, 5):
        append_history(path, entry(f"2026-03-0{number}"))
    assert history_gaps(path) == ()
    lines = path.read_bytes().splitlines(keepends=True)
    forged = tmp_path / "forged.jsonl"
    append_history(forged, entry("2026-03-02", tokens_per_s=1.0))
    if change == "edited":
        lines[1] = forged.read_bytes()  # a valid line with a checksum of its own
    else:
        del lines[1]
    path.write_bytes(b"".join(lines))
    number = 3 if change == "edited" else 2
    gaps = history_gaps(path)
    assert f"{path}:{number}: the line before it was edited or removed" in gaps
    assert gaps[-1] in caplog.text
    # What follows is still a chain, and a new line continues it.
    append_history(path, entry("2026-03-05"))
    assert len(history_gaps(path)) == len(gaps)


def test_a_history_that_a_record_names_lies_within_the_allowed_folders(
    copied: tuple[Path, Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run directory may come from a stranger, who could name any file in `run.json`."""
    out_dir, profile = copied
    edit_json(out_dir / "run.json", lambda body: body["spec"].update(history="/etc/passwd"))
    monkeypatch.setenv("VIRNUC_ROOTS", str(out_dir.parent))
    with pytest.raises(ConfigError, match=r"run\.json: history: /etc/passwd lies in none"):
        write_report(out_dir, profile)


def test_every_answer_of_a_reviewer_stays_in_the_history(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_history(path, OLD)
    answers = [
        ApprovalRecord(
            when=f"2026-03-0{day}T10:00:00+00:00", verdict=verdict, reviewer="A. Reviewer"
        )
        for day, verdict in ((2, "rejected"), (3, "approved"))
    ]
    lines = [
        ApprovalLine(created=OLD.created, profile=OLD.profile, host=OLD.host, approval=answer)
        for answer in answers
    ]
    for line in lines:
        assert append_approval(path, line)
    assert not append_approval(path, lines[0])
    append_history(path, entry())
    assert read_approvals(path) == tuple(lines)
    assert read_history(path) == (OLD, entry())
    assert history_gaps(path) == ()


@pytest.mark.parametrize("change", ["removed", "emptied"])
def test_a_regression_is_not_erased_with_its_file(
    copied: tuple[Path, Profile], change: str
) -> None:
    """The history is the source: a report that is made again fails again, and verify names the rest."""
    out_dir, profile = copied
    history = out_dir.parent / HISTORY
    own_entry = entry_of(build_report(out_dir, profile))
    assert own_entry is not None
    older = {"created": "2026-02-01T00:00:00+00:00", "total_s": 20.0}
    append_history(history, own_entry.model_copy(update=older))
    failed_report = write_report(out_dir, profile, history)
    assert failed_report.regression is not None
    assert failed_report.regression.verdict == "fail"
    assert verify_report(out_dir).differences == []

    if change == "removed":
        (out_dir / REGRESSION).unlink()
    else:
        edit_json(out_dir / REGRESSION, lambda body: body.update(history=[]))
    differences = "\n".join(verify_report(out_dir).differences)
    assert f"{REGRESSION}: the earlier runs in {HISTORY}" in differences

    again = write_report(out_dir, profile)
    assert again.regression == failed_report.regression
    assert again.outcome == "failed"
    assert verify_report(out_dir).differences == []


def test_lines_of_older_versions_have_no_checksum_and_count(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f"{OLD.model_dump_json()}\n")
    assert append_history(path, entry())
    assert read_history(path) == (OLD, entry())


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"

    def write(writer: int) -> None:
        for number in range(20):
            append_history(path, entry(f"2026-{writer:02d}-{number:02d}"))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({e.created for e in read_history(path)}) == 40


@pytest.mark.parametrize(
    "line", [b'{"created": 3}\n', b"\xff\xfe\n", b"[]", b'{"created": "2026-0']
)
def test_a_broken_line_is_named_and_costs_no_other(
    line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.jsonl"
    append_history(path, OLD)
    with path.open("ab") as handle:
        handle.write(line)
    assert read_history(path) == (OLD,)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"{path}:2: not a history entry")
    caplog.clear()
    assert append_history(path, entry())
    assert read_history(path) == (OLD, entry()), "a line that was cut off does not swallow the next"
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"{path}:2: not a history entry")
    assert message.endswith("kept in history.jsonl.damaged")
    assert (tmp_path / "history.jsonl.damaged").read_bytes().strip() == line.strip(), (
        "nothing is thrown away"
    )
    assert path.read_bytes().count(b"\n") == 2


def test_a_report_is_held_against_the_last_one(
    copied: tuple[Path, Profile], tmp_path: Path
) -> None:
    out_dir, profile = copied
    history = tmp_path / "history.jsonl"
    first_entry = entry_of(build_report(out_dir, profile))
    assert first_entry is not None
    faster = first_entry.model_copy(
        update={"created": "2026-02-01T00:00:00+00:00", "total_s": 20.0}
    )
    append_history(history, faster)
    report = write_report(out_dir, profile, history)
    assert report.regression is not None
    assert report.regression.verdict == "fail"
    assert "total_s" in report.regression.reason
    assert [point.total_s for point in report.history] == [20.0, 44.0]
    assert len(read_history(history)) == 2
    assert report.outcome == "failed"
    assert any("regression (over 10 % worse in " in message for message in report.failures)
    page = (out_dir / "report" / "report.txt").read_text(encoding="utf-8")
    assert "Further failures:                regression (over 10 % worse in" in page
    assert "[FAIL] over 10 % worse in" in page
    edit_json(out_dir / "devices-2" / "summary.json", lambda b: b.update(resumed=True))
    assert write_report(out_dir, profile, history).regression is None, (
        "what was compared then is not this run"
    )


def test_a_run_that_is_judged_again_is_not_held_against_itself(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    history, start = (
        out_dir.parent / HISTORY,
        {"started": "2026-03-01T12:00:01+00:00", "devices": []},
    )

    def began(body: dict[str, Any]) -> None:
        body["attempts"] = [
            start | {"wall_s": body["wall_s"], "shards": 1, "telemetry": body["telemetry"]}
        ]

    edit_json(out_dir / "devices-2" / "summary.json", began)
    assert write_report(out_dir, profile, history).num_met == 6
    # The time was lost, say, and the version that judges is a newer one.
    newer = {"created": "2026-03-02T09:00:00+00:00", "git_commit": "f" * 40}
    edit_json(out_dir / "run.json", lambda body: body.update(newer))
    stricter = profile.model_copy(
        update={"targets": profile.targets | {"speedup": Target(op=">", value=1e6)}}
    )
    edit_json(
        out_dir / "run.json", lambda body: body.update(profile=stricter.model_dump(mode="json"))
    )
    report = write_report(out_dir, stricter, history)
    assert report.num_met == 5
    assert report.regression is not None
    assert report.regression.verdict == "not run"
    assert [(run_entry.created, run_entry.criteria_met) for run_entry in read_history(history)] == [
        (start["started"], 6)
    ]
    assert verify_report(out_dir).differences == []


def test_a_commit_in_the_history_that_made_neither_run_nor_report_is_named(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    history = out_dir.parent / HISTORY
    write_report(out_dir, profile, history)
    assert verify_report(out_dir).differences == []
    (line,) = read_history(history)
    history.unlink()
    append_history(history, line.model_copy(update={"commit": "e" * 40}))  # with a valid checksum
    assert "commit" in "".join(verify_report(out_dir).differences)


@pytest.mark.parametrize(
    "told", [{"resumed": True}, {"n_rows": 0}], ids=["resumed", "nothing to embed"]
)
def test_a_run_that_says_nothing_of_speed_is_no_history(
    copied: tuple[Path, Profile], told: dict[str, object]
) -> None:
    out_dir, profile = copied
    assert entry_of(build_report(out_dir, profile)) is not None
    edit_json(out_dir / "devices-2" / "summary.json", lambda b: b.update(told))
    assert entry_of(build_report(out_dir, profile)) is None


def test_the_trend_as_a_chart(judged: Report) -> None:
    trend = (entry("2026-02-01", commit="<script>"), OLD, entry())
    charts = all_charts(judged.model_copy(update={"history": trend}))
    (svg,) = [chart.svg for chart in charts if chart.title == "History"]
    assert svg.startswith("<?xml")
    assert "<script>" not in svg
    for short_trend in (trend[:1], (OLD, entry(total_s=None))):
        charts = all_charts(judged.model_copy(update={"history": short_trend}))
        assert "History" not in [chart.title for chart in charts]


def test_the_command_shows_each_run_against_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    history = tmp_path / "history.jsonl"
    for history_entry in (
        OLD,
        entry("2026-03-03", total_s=90.0, tokens_per_s=0.5 * (OLD.tokens_per_s or 0)),
    ):
        append_history(history, history_entry)
    assert main(["history", str(history)]) == 5
    output = capsys.readouterr().out
    assert "-50.0 %" in output
    assert "fail: over 10 % worse in tokens_per_s" in output
    append_history(history, entry("2026-03-04", total_s=90.0))
    assert main(["history", str(history)]) == 0, "the newest is what counts"
    assert main(["history", str(history), "--profile", "ci-smoke"]) == 2, (
        "of nothing it cannot be said"
    )
    history.write_text("no history\n")
    assert main(["history", str(history)]) == 2


def test_the_check_for_ci_tells_pass_regression_and_nothing_to_compare_with_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    history = tmp_path / "history.jsonl"
    append_history(history, OLD)
    assert main(["history", str(history), "--check"]) == 7
    assert "not run: no earlier run of this profile" in capsys.readouterr().out
    append_history(history, entry("2026-03-03"))
    assert main(["history", str(history), "--check"]) == 0
    assert f"against the run of {OLD.created}: pass" in capsys.readouterr().out
    append_history(history, entry("2026-03-04", tokens_per_s=0.85 * (OLD.tokens_per_s or 0)))
    assert main(["history", str(history), "--check"]) == 5
    assert "-15.0 %" in capsys.readouterr().out
    append_history(history, entry("2026-03-05", weights="new"))
    assert main(["history", str(history), "--check"]) == 7, "stale is no pass"


@pytest.mark.parametrize("damage", ["edited", "removed"])
def test_the_check_for_ci_refuses_a_history_with_an_edited_or_removed_line(
    tmp_path: Path, damage: str
) -> None:
    history = tmp_path / "history.jsonl"
    for day in ("2026-03-02", "2026-03-03", "2026-03-04"):
        append_history(history, entry(day))
    lines = history.read_text().splitlines(keepends=True)
    if damage == "removed":
        del lines[1]
    else:
        lines[1] = lines[1].replace('"criteria_met": ', '"criteria_met": 1')
    history.write_text("".join(lines))
    assert main(["history", str(history)]) in (0, 5), "listing is possible"
    assert main(["history", str(history), "--check"]) == 2
