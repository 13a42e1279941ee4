"""Every read has a fate: what became of the reads, and what went otherwise than it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.damage import edit_json, list_again
from virnuc_core.profiles import Profile
from virnuc_core.report.build import build_report
from virnuc_core.report.model import Report
from virnuc_core.report.render import further_text, render
from virnuc_core.report.views.reads import fate_rows

pytestmark = pytest.mark.usefixtures("telemetry_once")


def test_fates_and_remarks_are_counted_in_reads_tsv(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    table = out_dir / "devices-2" / "reads.tsv"
    header, first_row, second, *other_rows = table.read_text(encoding="utf-8").splitlines()
    # the id holds commas, and words that are remarks
    first_row += "short_for_model,duplicate_of=odd,ambiguous,id"
    second += "ambiguous"
    table.write_text("\n".join([header, first_row, second, *other_rows]) + "\n", encoding="utf-8")
    list_again(out_dir / "devices-2")
    edit_json(out_dir / "run.json", lambda body: body.update(staging={"skipped": 1}))
    report = build_report(out_dir, profile)
    accounting = report.accounting
    assert accounting is not None
    assert accounting.flags == {"short_for_model": 1, "ambiguous": 1, "duplicate_of": 1}
    assert accounting.adds_up
    assert sum(accounting.fates.values()) == accounting.reads == 300
    assert accounting.staging.skipped == 1
    assert accounting.staging.ignored_files is None
    assert report.warnings == (
        "Input: broken records that were skipped (skipped.tsv): 1.",
        "Input: reads with the id of an earlier read (told apart by a number): 1.",
    )
    forms = render(report)
    for form in ("report.md", "report.html"):
        for words in (
            "reads: duplicate_of",
            "records skipped",
            "reads that came in",
            "not recorded",
        ):
            assert words in forms[form]


def test_counts_of_staging_are_taken_from_the_record(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    staging = {
        "skipped": 7,
        "ignored_files": ["a", "b"],
        "warnings": ["x.fa: 7 broken records left out"],
    }
    edit_json(out_dir / "run.json", lambda body: body.update(staging=staging))
    report = build_report(out_dir, profile)
    assert report.accounting is not None
    assert report.accounting.staging.skipped == 7
    assert report.accounting.staging.ignored_files == ("a", "b")
    assert report.warnings == ("Input: x.fa: 7 broken records left out.",)


def test_reads_that_do_not_add_up_are_a_warning(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    table = out_dir / "devices-2" / "reads.tsv"
    lines = table.read_text(encoding="utf-8").splitlines()
    table.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    list_again(out_dir / "devices-2")
    report = build_report(out_dir, profile)
    assert report.accounting is not None
    assert not report.accounting.adds_up
    assert any("reads.tsv lists 299" in warning for warning in report.warnings)
    assert "does NOT add up" in further_text(report)


def test_the_table_of_fates_ends_with_what_never_became_a_read(judged: Report) -> None:
    assert judged.accounting is not None
    counts = {row["What"]: row["Count"] for row in fate_rows(judged)}
    assert counts["sum of the fates"] == judged.accounting.reads
    assert counts["records skipped"] == "not recorded"
    assert list(counts)[-2:] == ["records skipped", "files ignored"]


def test_the_table_of_fates_says_if_it_does_not_add_up(judged: Report) -> None:
    assert judged.accounting is not None
    doubtful = judged.accounting.model_copy(update={"adds_up": False})
    rows = fate_rows(judged.model_copy(update={"accounting": doubtful}))
    assert any("does NOT add up" in str(row["What"]) for row in rows)


def test_without_a_table_of_reads_there_are_no_fates(judged: Report) -> None:
    assert fate_rows(judged.model_copy(update={"accounting": None})) == []


def test_how_the_run_went_is_warned_of(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    counts = {
        "rows_set_aside": 2,
        "restarts": 1,
        "damaged": ["shard 3"],
        "reduced_budgets": {"4": 2},
    }
    edit_json(out_dir / "devices-2" / "summary.json", lambda body: body.update(counts))
    warnings = "\n".join(build_report(out_dir, profile).warnings)
    for words in (
        "or were not finite (failed.tsv): 2",
        "started again: 1",
        "damaged and computed again: 1",
        "device memory: 1",
    ):
        assert words in warnings


def test_rows_repeated_in_fp16_are_noted_beside_the_rates_that_they_lower(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    assert "in fp16" not in render(build_report(out_dir, profile))["report.md"]
    edit_json(
        out_dir / "devices-2" / "summary.json", lambda body: body.update(rows_repeated=39_977)
    )
    assert (
        "Repeated in fp16: 39,977 sequences" in render(build_report(out_dir, profile))["report.md"]
    )
