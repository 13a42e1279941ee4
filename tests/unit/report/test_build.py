"""Parts of a validation that were made from other reads, weights or lengths are not held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.damage import edit_json
from virnuc_core.checked_files import with_own_digest
from virnuc_core.profiles import Profile
from virnuc_core.report.build import build_report, write_report
from virnuc_core.report.model import Criterion, Report

pytestmark = pytest.mark.usefixtures("telemetry_once")

PAIRS = {
    "baseline": {"speedup", "consensus"},
    "devices-2": {"speedup", "consensus", "scaling", "same_bytes"},
}


def by_id(report: Report) -> dict[str, Criterion]:
    return {criterion.id: criterion for criterion in (*report.criteria, *report.checks)}


def print_of(part: str, to: str) -> Any:
    return lambda body: body["fingerprints"].update({part: to})


CHANGES = {
    "reads": (print_of("reads", "beef" * 16), "reads (5eed5eed and beefbeef)"),
    "esm2": (print_of("esm2", "beef" * 16), "esm2 (e5e2e5e2 and beefbeef)"),
    "dnabert_s": (print_of("dnabert_s", "beef" * 16), "dnabert_s (d9a5d9a5 and beefbeef)"),
    "head": (print_of("head", "beef" * 16), "head (4ead4ead and beefbeef)"),
    "model length": (lambda body: body.update(model_length=300), "model length (500 and 300)"),
}


@pytest.mark.parametrize("part", PAIRS)
@pytest.mark.parametrize("field", CHANGES)
def test_what_differs_is_named_and_nothing_is_compared(
    copied: tuple[Path, Profile], judged: Report, part: str, field: str
) -> None:
    out_dir, profile = copied
    before_by_id = by_id(judged)
    assert all(
        before_by_id[name].verdict == "pass" or name == "scaling" for name in PAIRS["devices-2"]
    )
    change, message = CHANGES[field]
    edit_json(out_dir / part / "run.json", change)
    report = build_report(out_dir, profile)
    after_by_id = by_id(report)
    for name in PAIRS[part]:
        assert after_by_id[name].verdict == "not run"
        assert after_by_id[name].value is None
        assert all(
            value in after_by_id[name].reason
            for value in message.strip(")").split(" (")[1].split(" and ")
        ), name
        assert field in after_by_id[name].reason
        assert part in after_by_id[name].reason
    other_ids = before_by_id.keys() - PAIRS[part]
    assert {name: after_by_id[name].verdict for name in other_ids} == {
        name: before_by_id[name].verdict for name in other_ids
    }
    assert not any(
        {comparison.a, comparison.b} == {"baseline", "devices-2"}
        for comparison in report.comparisons
    )
    assert len(report.scaling) == 1 + (part == "baseline")
    assert any(line.startswith("Not compared: ") and field in line for line in report.warnings)


def test_several_fields_are_all_named(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    edit_json(
        out_dir / "baseline" / "run.json",
        lambda b: b.update(model_length=300, fingerprints={"reads": "x" * 64}),
    )
    reason = by_id(build_report(out_dir, profile))["speedup"].reason
    assert (
        reason
        == "baseline and devices-2 differ in reads (xxxxxxxx and 5eed5eed), model length (300 and 500)"
    )


def test_a_part_that_does_not_tell_what_it_was_made_from_is_no_evidence(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    (out_dir / "baseline" / "run.json").unlink()
    verdicts = by_id(build_report(out_dir, profile))
    for name in PAIRS["baseline"]:
        assert verdicts[name].verdict == "not run"
        assert (
            verdicts[name].reason
            == "baseline/run.json does not tell reads, esm2, dnabert_s, head, model length"
        )
    assert verdicts["same_bytes"].verdict == "pass"


def test_like_parts_give_no_warning(judged: Report) -> None:
    assert not any("Not compared" in line for line in judged.warnings)


def test_of_the_settings_only_the_name_of_the_sample_is_passed_on(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    signed_settings = {"sample": "night 7", "reads": ["https://example.org/r.fa?signature=secret"]}
    edit_json(out_dir / "run.json", lambda body: body.update(spec=signed_settings))
    report = build_report(out_dir, profile)
    assert report.provenance.spec == {"sample": "night 7"}
    assert "secret" not in report.model_dump_json()


def test_files_of_an_older_version_are_said_to_be_unchecked(
    copied: tuple[Path, Profile], caplog: pytest.LogCaptureFixture
) -> None:
    """One line for all of them. Files with a digest are not named."""
    out_dir, profile = copied
    caplog.clear()
    write_report(out_dir, profile)
    (line,) = [message for message in caplog.messages if "without digests" in message]
    assert "could not be checked for damage" in line
    assert "comparison.json" not in line
    for path in (
        out_dir / "run.json",
        *out_dir.glob("*/run.json"),
        *out_dir.glob("*/summary.json"),
    ):
        path.write_text(with_own_digest(path.read_text()))
    caplog.clear()
    write_report(out_dir, profile)
    lines = [message for message in caplog.messages if "without digests" in message]
    assert not any(".json" in line for line in lines)
