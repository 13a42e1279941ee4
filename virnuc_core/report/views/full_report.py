"""All sections of a report in their order."""

from virnuc_core.report.model import Report
from virnuc_core.report.sections import Row, Section, Table
from virnuc_core.report.text import Cell
from virnuc_core.report.views.correctness import correctness_section
from virnuc_core.report.views.criteria import (
    approval_section,
    criteria_section,
    definitions_section,
    regression_section,
)
from virnuc_core.report.views.devices import (
    packing_section,
    products_section,
    utilisation_section,
    windows_section,
)
from virnuc_core.report.views.losses import bottleneck_sentence, loss_rows
from virnuc_core.report.views.reads import fates_section
from virnuc_core.report.views.speed import (
    efficiency_rows,
    runs_section,
    scaling_rows,
    stage_time_rows,
)
from virnuc_core.runfiles import FileDigest, RunRecord


def report_sections(report: Report) -> list[Section]:
    """Return the sections of `report.md` and `report.html` in order. Empty ones are left out."""
    sections = [
        Section("Warnings", sentences=report.warnings),
        Section("What to know before reading the figures", sentences=report.notes),
    ]
    if report.approval is not None:
        sections.append(approval_section(report.approval))
    sections += [
        criteria_section(report),
        runs_section(report),
        Section("Stages", tables=[Table(stage_time_rows(report.runs))]),
        Section("GPU Scaling", tables=[Table(scaling_rows(report))]),
    ]
    telemetry = None if report.run is None else report.run.telemetry
    if report.run is not None and telemetry is not None:
        criterion = report.criterion("gpu_utilisation")
        sections += [
            utilisation_section(telemetry, criterion),
            packing_section(telemetry),
            products_section(report.run.products),
            windows_section(telemetry),
        ]
    sections += [
        Section("Efficiency and cost", tables=[Table(efficiency_rows(report))]),
        correctness_section(report.comparisons),
        bottleneck_section(report),
    ]
    if report.regression is not None:
        sections.append(regression_section(report.regression))
    sections += [
        fates_section(report),
        definitions_section(report),
        Section("Provenance", tables=[Table(provenance_rows(report.provenance))]),
        evidence_section(report.evidence),
    ]
    return [section for section in sections if not section.is_empty]


def bottleneck_section(report: Report) -> Section:
    """Return the section on the losses of time, which begins with the largest one."""
    return Section(
        "Bottleneck",
        lead=report.losses[0].kind,  # without a measured loss there is one that only says why
        sentences=[bottleneck_sentence(report.losses), *report.findings],
        tables=[Table(loss_rows(report.losses))],
    )


def provenance_rows(record: RunRecord) -> list[Row]:
    """Return table rows on the origin of the report: machine, reads, software and settings."""
    facts: list[tuple[str, Cell]] = [
        ("created", record.created),
        ("host", record.host),
        ("sample", record.spec.get("sample", "")),
    ]
    for file in record.inputs:
        reads = f"{file.reads:,}"
        content = f"{reads}, {file.content}" if file.content is not None else reads
        facts.append((f"reads: {file.file}", content))
    facts.append(("virnuc", record.virnuc_version))
    facts.append(("version of the results", str(record.results_version)))
    facts.append(("commit", record.git_commit))
    facts.append(("model length", str(record.model_length) if record.model_length else None))
    for part, digest in record.fingerprints.items():
        facts.append((f"fingerprint of {part}", digest))
    for part, seed in record.seeds.items():
        facts.append((f"seed of {part}", str(seed)))
    facts += record.versions.items()
    for setting, value in record.resolved.items():
        facts.append((setting, str(value)))
    return [{"What": what, "Value": value} for what, value in facts]


def evidence_section(files: dict[str, FileDigest]) -> Section:
    """Return the section that lists the raw files."""
    sentence = "Every figure above is computed from these files; virnuc verify computes them again."
    rows: list[Row] = [
        {"File": name, "Bytes": file.size, "SHA-256": file.sha256} for name, file in files.items()
    ]
    return Section("Raw files", sentences=[sentence] if files else [], tables=[Table(rows)])
