"""Every read accounted for: fates and remarks counted in reads.tsv, and what never became a read."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd

from virnuc_core.report.files import RECORD, SUMMARY, RawFolder, count, mapping, texts
from virnuc_core.report.model import Accounting, RunMetrics
from virnuc_core.rundir import RunDir

FATES: Final = ("viral", "others", "no_open_frame", "empty", "failed")
FLAGS: Final = ("short_for_model", "ambiguous", "duplicate_of")
SKIPPED_LIST: Final = "skipped.tsv"
# under either name, whoever wrote the record
SKIPPED: Final = ("skipped_records", "skipped", "n_skipped")
IGNORED: Final = ("ignored_files", "ignored", "n_ignored")


def accounting(raw: RawFolder, run: RunMetrics | None) -> Accounting | None:
    """Count the reads of a run by fate and by remark; `None` when its reads.tsv is missing or cannot be read."""
    if run is None:
        return None
    path = RunDir(raw.root / run.name).reads_table
    if not path.is_file():
        return None
    raw.use(path)
    try:
        table = pd.read_csv(
            path,
            sep="\t",
            usecols=["fate", "flags"],
            dtype="str",
            quoting=3,
            keep_default_na=False,
            encoding_errors="surrogateescape",
        )
    except (ValueError, pd.errors.ParserError) as error:
        raw.problems.append(f"{run.name}/{path.name} cannot be read: {error}")
        return None
    fates = {str(name): int(n) for name, n in table["fate"].value_counts(sort=False).items()}
    fates = {**dict.fromkeys(FATES, 0), **fates}
    said = {name: n for name, n in run.fates.items() if n}
    return Accounting(
        reads=len(table),
        fates=fates,
        flags=_flags(table["flags"]),
        adds_up=len(table) == run.n_reads and said == {name: n for name, n in fates.items() if n},
        skipped_records=_skipped(raw, run),
        ignored_files=_first(_staging(raw, run), IGNORED),
        input_warnings=texts(mapping(raw.json(RECORD), "staging"), "warnings"),
    )


def _flags(column: pd.Series[str]) -> dict[str, int]:
    """Reads by remark; the id that `duplicate_of=` names stands last and may hold commas."""
    found = dict.fromkeys(FLAGS, 0)
    kinds = column.str.replace(r"duplicate_of=.*$", "duplicate_of", regex=True).value_counts(sort=False)
    for remarks, n in kinds.items():
        for name in filter(None, str(remarks).split(",")):
            found[name] = found.get(name, 0) + int(n)
    return found


def _staging(raw: RawFolder, run: RunMetrics) -> list[dict[str, Any]]:
    """What records say of reading the input, wherever they say it."""
    bodies = [raw.json(RECORD), raw.json(run.name, RECORD), raw.json(run.name, SUMMARY)]
    return [part for body in bodies for part in (mapping(body, "staging"), body) if part]


def _first(bodies: list[dict[str, Any]], names: tuple[str, ...]) -> int | None:
    """The first number under one of `names`; the length where a list stands there."""
    for body in bodies:
        for name in names:
            if isinstance(body.get(name), list):
                return len(body[name])
            if (value := count(body, name)) is not None:
                return value
    return None


def _skipped(raw: RawFolder, run: RunMetrics) -> int | None:
    """Broken records left out: as recorded, else as listed; none where the first would have stopped the run."""
    recorded = _first(_staging(raw, run), SKIPPED)
    if recorded is not None:
        return recorded
    listing = raw.root / SKIPPED_LIST
    if listing.is_file():
        raw.use(listing)
        return max(0, len(listing.read_bytes().splitlines()) - 1)
    return 0 if mapping(raw.json(RECORD), "spec").get("on_error") == "stop" else None
