"""View of the reads: what became of each one."""

from virnuc_core.report.model import Report
from virnuc_core.report.sections import Row, Section, Table
from virnuc_core.report.text import percent


def fates_section(report: Report) -> Section:
    """Return the section on the fates of the reads of the judged run."""
    return Section("Every read has a fate", tables=[Table(fate_rows(report))])


def fate_rows(report: Report) -> list[Row]:
    """Return table rows with the numbers of reads by fate and remark, and of skipped records.

    The fate says what became of a read, such as "viral" or "empty". Each read has one. Remarks,
    such as "ambiguous", may apply to any read. A record that was skipped never became a read.

    Returns:
        The rows; none if the reads were not counted.
    """
    accounting = report.accounting
    if accounting is None:
        return []
    counts: list[tuple[str, int | None]] = list(accounting.fates.items())
    total_title = "sum of the fates"
    if not accounting.adds_up:
        total_title += ": does NOT add up"
    counts.append((total_title, sum(accounting.fates.values())))
    counts.append(("reads that came in", None if report.run is None else report.run.n_reads))
    counts += [(f"reads: {flag}", count) for flag, count in accounting.flags.items()]

    rows: list[Row] = []
    for title, count in counts:
        rows.append({"What": title, "Count": count, "Share": percent(accounting.share(count))})

    staging = accounting.staging
    ignored_files = None if staging.ignored_files is None else len(staging.ignored_files)
    for title, count in (("records skipped", staging.skipped), ("files ignored", ignored_files)):
        shown = "not recorded" if count is None else count
        rows.append({"What": title, "Count": shown, "Share": None})
    return rows
