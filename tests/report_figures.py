"""Collect every figure that a validation shows, in all its forms, and compare those of one name.

A figure is a number with a name ("peak memory"), a subject (a run, a device, a stage, …) and the
step of its last digit. Texts, Markdown, HTML, JSON files and the artifacts of Prefect are read as a
user reads them: by their headings, labels and units. `NAMES` says which labels mean the same. A
label with a number that is not listed there is an error, so that a new figure is either one of
those that exist, and then is compared, or gets a name of its own.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

JUDGED = "devices-judged"  # stands for the run that is judged, in forms that do not name it
UNITS = {
    "": 1.0,
    "s": 1.0,
    "ms": 1e-3,
    "h": 3600.0,
    "hours": 3600.0,
    "%": 0.01,
    "x": 1.0,
    "GiB": float(1 << 30),
    "MiB": float(1 << 20),
    "GB": 1e9,
    "bytes": 1.0,
    "W": 1.0,
    "kWh": 1.0,
    "°C": 1.0,
    "tokens/s": 1.0,
}
NUMBER = re.compile(r"(?P<digits>-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)\s?(?P<unit>[A-Za-z%°/]*)")
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d\d(?:\.\d+)?)")


@dataclass(frozen=True)
class Figure:
    """One number that is shown somewhere, in its basic unit."""

    name: str
    subject: str
    value: float
    step: float  # of the last digit that is shown; 0: it is not rounded
    place: str

    def agrees_with(self, other: Figure) -> bool:
        """Return whether both may be one number: their difference is within the rounding."""
        rounding = (self.step + other.step) / 2
        return abs(self.value - other.value) <= rounding * 1.001 + 1e-9 * abs(self.value)


def parse_number(text: str, unit: str | None = None) -> tuple[float, float] | None:
    """Return the value of the first number of a text in its basic unit, and its step.

    Args:
        text: The text, such as `1:02:03`, `95.6%`, `12.11 h` or `7.81 GiB`.
        unit: The unit, where a heading names it. Otherwise it follows the number.

    Returns:
        None if the text does not begin with a number.
    """
    text = text.strip().strip("*`≈ ")
    clock = CLOCK.match(text)
    if clock:
        hours, minutes, seconds = clock.groups()
        # A clock shows whole seconds, cut off or rounded.
        return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds), 2.0
    match = NUMBER.match(text)
    if match is None:
        return None
    digits = match["digits"].replace(",", "")
    mantissa, _, exponent = digits.partition("e")
    step = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    factor = UNITS[match["unit"] if unit is None and match["unit"] in UNITS else unit or ""]
    return float(digits) * factor, step * factor


# --- Names ------------------------------------------------------------------------------------------

# What a label of a text or a column means: the name of the figure, and its unit if the label or its
# heading says it. `None`: the label has no figure of a measurement.
NAMES: dict[str, tuple[str, str | None] | None] = {
    # Runs
    "Total": ("total time", None),
    "Total runtime": ("total time", None),
    "Total wall time": ("total time", "s"),
    "total_s": ("total time", None),
    "total s": ("total time", "s"),
    "v2.0 result": ("total time", None),
    "Staging": ("staging time", None),
    "staging_s": ("staging time", None),
    "Rest": ("time without staging", None),
    "wall_s": ("time without staging", None),
    "Reads": ("reads", None),
    "reads": ("reads", None),
    "n_reads": ("reads", None),
    "reads that came in": ("reads", None),
    "sum of the fates": ("reads", None),
    "all reads": ("reads", None),
    "Total sequences": ("reads", None),
    "total_sequences": ("reads", None),
    "Rows": ("rows", None),
    "n_rows": ("rows", None),
    "Distinct": ("distinct frames", None),
    "n_uniques": ("distinct frames", None),
    "Restarts": ("restarts", None),
    "restarts": ("restarts", None),
    "Errors in logs": ("log errors", None),
    "log_errors": ("log errors", None),
    # Speed
    "Reads/s": ("sequences per second", None),
    "Sequences/sec": ("sequences per second", None),
    "Sequences/s": ("sequences per second", None),
    "Sequences/hour": ("sequences per hour", None),
    "sequences_per_hour": ("sequences per hour", None),
    "Tokens/sec": ("tokens per second", None),
    "Tokens/s, both encoders": ("tokens per second", None),
    "tokens/s": ("tokens per second", None),
    "tokens_per_s": ("tokens per second", None),
    "tokens_per_sec": ("tokens per second", None),
    "steady_tokens_per_s": ("steady tokens per second", None),
    "steady_tokens_per_sec": ("steady tokens per second", None),
    "once warm": ("steady tokens per second", None),
    "Distinct open frames/s while embedding": ("distinct frames per second", None),
    "rows_per_s": ("distinct frames per second", None),
    # In telemetry files only, where other tools look for this name; docs/report.md defines it.
    "sequences_per_sec": ("distinct frames per second", None),
    "Tokens/s of a device": ("tokens per second of a device", None),
    "Tokens/sec, slowest window": ("tokens per second of the slowest window", None),
    "Tokens/sec, fastest window": ("tokens per second of the fastest window", None),
    "device_tokens_per_sec": ("tokens per second of a device", None),
    "Seq/sec": ("sequences per second of a stage", None),
    "throughput_seq_per_sec": ("sequences per second of a stage", None),
    "projected": ("projected time", None),
    "hours_projected": ("projected time", "h"),
    # Scaling
    "Time": ("time on so many devices", None),
    "time_seconds": ("time on so many devices", None),
    "Speedup": ("speed-up by devices", None),
    "Efficiency": ("scaling efficiency", None),
    "Scaling efficiency": ("scaling efficiency", None),
    "efficiency": ("scaling efficiency", None),
    # Devices
    "Avg Util": ("mean utilisation", "%"),
    "on average": ("mean utilisation", "%"),
    "gpu_util_avg": ("mean utilisation", "%"),
    "ESM-2 %": ("utilisation while ESM-2 ran", "%"),
    "while ESM-2 ran": ("utilisation while ESM-2 ran", "%"),
    "esm2_percent": ("utilisation while ESM-2 ran", "%"),
    "DNABERT-S %": ("utilisation while DNABERT-S ran", "%"),
    "dnabert_s_percent": ("utilisation while DNABERT-S ran", "%"),
    "Peak Mem": ("peak memory", None),
    "peak mem": ("peak memory", None),
    "mem_used_peak": ("peak memory", "bytes"),
    "Allocated": ("allocated memory", None),
    "allocated_peak_bytes": ("allocated memory", "bytes"),
    "memory of all processes of the run": ("memory of the host", None),
    "rss_peak_bytes": ("memory of the host", "bytes"),
    "Power": ("power", None),
    "power_avg_w": ("power", "W"),
    "At power limit": ("share of time at the power limit", None),
    "power_limited": ("share of time at the power limit", None),
    "Max °C": ("temperature", "°C"),
    "temperature_max_c": ("temperature", "°C"),
    "kWh": ("energy", "kWh"),
    "energy_kwh": ("energy", "kWh"),
    "Samples": ("samples", None),
    "sample_count": ("samples", None),
    # Packing and loader
    "Packing": ("packing", None),
    "Average": ("packing", None),
    "packing_efficiency": ("packing", None),
    "avg_packing_efficiency": ("packing", None),
    "Minimum": ("lowest packing", None),
    "min_packing_efficiency": ("lowest packing", None),
    "Batches <80%": ("badly packed batches", None),
    "batches_below_threshold": ("badly packed batches", None),
    "Avg wait time": ("mean wait", None),
    "Waits: mean": ("mean wait", None),
    "avg_wait_ms": ("mean wait", "ms"),
    "avg_wait_time_ms": ("mean wait", "ms"),
    "P95 wait time": ("p95 wait", None),
    "p95": ("p95 wait", None),
    "p95_wait_ms": ("p95 wait", "ms"),
    "p95_wait_time_ms": ("p95 wait", "ms"),
    "max": ("longest wait", None),
    "max_wait_ms": ("longest wait", "ms"),
    "max_wait_time_ms": ("longest wait", "ms"),
    "Queue starved": ("starved share", None),
    "starved": ("starved share", None),
    "pct_starved": ("starved share", "%"),
    "full": ("full share", None),
    "pct_full": ("full share", "%"),
    "normal": ("normal share", None),
    "pct_normal": ("normal share", "%"),
    "Batches": ("batches", None),
    "batches": ("batches", None),
    "Tokens": ("tokens", None),
    "tokens": ("tokens", None),
    "Slots": ("slots", None),
    "slots": ("slots", None),
    # Cost
    "Core-hours per million reads": ("device hours per million reads", "h"),
    "GPU-hours per million reads": ("device hours per million reads", "h"),
    "device_hours_per_million": ("device hours per million reads", "h"),
    "device_hours_per_million_reads": ("device hours per million reads", "h"),
    "kWh per million reads": ("energy per million reads", "kWh"),
    "kwh_per_million": ("energy per million reads", "kWh"),
    "kwh_per_million_reads": ("energy per million reads", "kWh"),
    "J per million ESM-2 tokens": ("energy per million tokens", None),
    "joules_per_million_tokens": ("energy per million tokens", None),
    "Price per million reads": ("price per million reads", None),
    "price_per_million": ("price per million reads", None),
    "price_per_million_reads": ("price per million reads", None),
    "Checkpoint overhead": ("checkpoint overhead", None),
    "checkpoint_overhead": ("checkpoint overhead", None),
    # Agreement
    "Consensus label agreement": ("lowest consensus agreement", None),
    "Per-frame label agreement": ("lowest frame agreement", None),
    "In both": ("ids in both", None),
    "in_both": ("ids in both", None),
    "Agreement": ("agreement", None),
    "agreement": ("agreement", None),
    "Mean Δ": ("mean difference", None),
    "Median Δ": ("median difference", None),
    "p99 Δ": ("p99 difference", None),
    "Max Δ": ("largest difference", None),
    "Within tolerance": ("share within tolerance", None),
    # Criteria
    "criteria met": ("criteria met", None),
    "criteria_met": ("criteria met", None),
    "met": ("criteria met", None),
    "pass": ("criteria met", None),
    "criteria": ("criteria asked", None),
    # Losses
    "Saves at most": ("seconds of a loss", None),
    "saves_s": ("seconds of a loss", None),
    "Share of time": ("share of a loss", None),
}
# Labels with digits that are no measurement, or settings, or are compared in another place.
NO_FIGURES = {
    "Required",
    "Verdict",
    "Why",
    "Device",
    "ID",
    "Criterion",
    "Devices",
    "Precision",
    "Resumed",
    "Runs",
    "Run",
    "GPUs",
    "GPU",
    "Stage",
    "Encoder",
    "Pair",
    "What",
    "Part",
    "Loss",
    "Advice",
    "Min to max %",
    "Only A / B",
    "Same bytes",
    "allclose 1e-3",
    "Ceiling (tokens/s)",
    "Product",
    "Role",
    "Alone (tokens/s)",  # of the linear layers, measured before the run
    "Alone (J per million tokens)",
    "Alone (% at power limit)",
    "Bottleneck",
    "Of viral",
    "Of non-viral",
    "Of near threshold",
}
# Sections whose tables hold no measurements: definitions, versions, digests, and the comparison with
# an earlier run, whose figures are those of two runs.
OTHER_SECTIONS = (
    "How each is measured",
    "Provenance",
    "Raw files",
    "Regression",
    "Attempts",
    "Windows",  # of a part of the run each
    "Warnings",
    "PERF-02",  # the row of a criterion once more, without its id
)


class UnknownLabelError(AssertionError):
    """A label with a number is in no list of this module."""


def named(label: str) -> tuple[str, str | None] | None:
    """Return name and unit of a label, or None if it has no figure.

    A unit in parentheses at the end of the label counts: `Peak Mem (GiB)`.
    """
    label = label.strip()
    if label in NO_FIGURES:
        return None
    if label in NAMES:
        return NAMES[label]
    match = re.fullmatch(r"(.*?) (?:\((\S+)\)|(%))", label)
    if match and match[1] in NAMES and (unit := match[2] or match[3]) in UNITS:
        known = NAMES[match[1]]
        return None if known is None else (known[0], unit)
    if re.match(r"Projected [\d,]+", label):
        return "projected time", None
    raise UnknownLabelError(
        f"'{label}' has a number and no name in tests/report_figures.py. If it is a figure that "
        "exists, add the label there; if not, a name of its own"
    )


# --- Tables -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table under its heading."""

    section: str
    rows: list[dict[str, str]]


def markdown_tables(text: str) -> Iterator[Table]:
    """Yield the tables of a Markdown text with the headings above them."""
    section = ""
    lines = text.splitlines()
    place = 0
    while place < len(lines):
        line = lines[place]
        if line.startswith("#"):
            section = line.lstrip("# ")
        if line.startswith("|") and place + 1 < len(lines) and set(lines[place + 1]) <= set("|- "):
            columns = cells_of(line)
            rows = []
            place += 2
            while place < len(lines) and lines[place].startswith("|"):
                rows.append(dict(zip(columns, cells_of(lines[place]), strict=True)))
                place += 1
            yield Table(section, rows)
            continue
        place += 1


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table."""
    cells = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return [re.sub(r"\\(.)", r"\1", cell.strip()) for cell in cells]


class _Html(HTMLParser):
    """Collects headings, tables and texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.section = ""
        self.tables: list[Table] = []
        self.texts: list[str] = []  # of preformatted blocks and paragraphs
        self._text = ""
        self._row: list[str] = []
        self._grid: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("h2", "h3", "td", "th", "pre", "p", "li"):
            self._text = ""
        elif tag == "tr":
            self._row = []
        elif tag == "table":
            self._grid = []

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        text = self._text.strip()
        if tag in ("h2", "h3"):
            self.section = " ".join(text.split())
        elif tag in ("td", "th"):
            self._row.append(" ".join(text.split()))
        elif tag == "tr":
            self._grid.append(self._row)
        elif tag == "table" and self._grid:
            columns, *rows = self._grid
            found = [dict(zip(columns, row, strict=True)) for row in rows]
            self.tables.append(Table(self.section, found))
        elif tag in ("pre", "p", "li"):
            self.texts.append(text)
        self._text = "" if tag not in ("b", "span", "strong", "a", "code") else self._text


def html_forms(text: str) -> tuple[list[Table], str]:
    """Return the tables and the texts of an HTML page."""
    page = _Html()
    page.feed(text)
    return page.tables, "\n".join(page.texts)


@dataclass(frozen=True)
class Validation:
    """What the forms of one validation are about."""

    judged: str  # the name of the judged run, such as "devices-2"
    run_of_label: Mapping[str, str]  # "2x RTX 4090" → "devices-2"
    titles: Mapping[str, str]  # title of a criterion → its id
    projected: frozenset[str]  # ids of criteria whose values are no measurements

    def table_figures(self, table: Table, place: str) -> Iterator[Figure]:
        """Yield the figures of a table. Its first column names the subject, unless it is known."""
        if any(table.section.startswith(other) for other in OTHER_SECTIONS):
            return
        for row in table.rows:
            if "Criterion" in row:
                yield from self.criterion_figures(row["Criterion"], row.get("Measured", ""), place)
            elif "What" in row and ("Value" in row or "Count" in row):
                yield from self._fact_figures(row, place)
            elif "Stage" in row and "Seq/sec" not in row and "Bottleneck" not in row:
                yield from self._stage_figures(row, place)
            else:
                yield from self._row_figures(row, place)

    def criterion_figures(self, title: str, value: str, place: str) -> Iterator[Figure]:
        """Yield the figure of a criterion under its id; a projected one says so."""
        parsed = parse_number(value)
        if parsed is None:
            return
        name = self.titles[title]
        if title.startswith("Scaling on "):  # further numbers of devices
            name = title
        is_marked = "projected" in value
        assert is_marked == (name in self.projected), f"{place}: {title}: {value}"
        yield Figure(f"criterion {name}", self.judged, *parsed, place)

    def _fact_figures(self, row: Mapping[str, str], place: str) -> Iterator[Figure]:
        """Yield the figures of a row with a title and a value or count."""
        title = row["What"]
        value = row.get("Value", row.get("Count", ""))
        parsed = parse_number(str(value))
        if parsed is None or title.startswith(("reads:", "records", "files")):
            return
        if title in FATES:
            yield Figure("reads with a fate", title, *parsed, place)
            return
        known = named(title)
        if known is not None:
            number = parse_number(str(value), known[1])
            assert number is not None
            yield Figure(known[0], self.judged, *number, place)

    def _stage_figures(self, row: Mapping[str, str], place: str) -> Iterator[Figure]:
        """Yield time and share of a stage, of each run that has a column."""
        stage = re.sub(r"^Stage \d: ", "", row["Stage"])
        for label, text in row.items():
            if label == "Stage":
                continue
            run = self.run_of_label.get(label, label)
            yield from stage_figures(run, stage, text, place)

    def _row_figures(self, row: Mapping[str, str], place: str) -> Iterator[Figure]:
        """Yield the figures of a row whose first columns name the subject."""
        first = next(iter(row.values()))
        subject = f"{self.judged} {first}"
        if "Run" in row:
            subject = row["Run"]
        elif "Pair" in row:
            subject = f"{row['Pair']} {row.get('What', row.get('Part', ''))}"
        elif "GPUs" in row:
            subject = f"{row['GPUs']} devices"
        elif "Encoder" in row:
            subject = f"{self.judged} {ENCODER_IDS[row['Encoder']]}"
        elif "Loss" in row:
            subject = row["Loss"]
        for label, text in row.items():
            is_detail = "GPUs" in row and label in ENCODER_IDS  # scaling of an encoder
            if parse_number(str(text)) is None or is_detail or text == first:
                continue
            if "Bottleneck" in row:  # of benchmark_*.md: shares of stages
                if label == "Time":
                    yield Figure("share of a stage", f"{self.judged} {first}", *num(text), place)
                continue
            if "Seq/sec" in row and label == "Time (s)":
                yield Figure("time of a stage", f"{self.judged} {first}", *num(text), place)
                continue
            known = named(label)
            if known is None:
                continue
            parsed = parse_number(str(text), known[1])
            assert parsed is not None
            yield Figure(known[0], subject, *parsed, place)


FATES = ("viral", "others", "no_open_frame", "empty", "failed", "uncertain")
ENCODER_IDS = {"ESM-2": "esm2", "DNABERT-S": "dnabert_s"}


def num(text: str) -> tuple[float, float]:
    """Return value and step of a text that is a number."""
    parsed = parse_number(text)
    assert parsed is not None
    return parsed


def stage_figures(run: str, stage: str, text: str, place: str) -> Iterator[Figure]:
    """Yield time and share of a stage, from a text like `502s (15.7%)`."""
    match = re.match(r"-?([\d.]+)s \(([\d.]+)%\)", text)
    if match is None:  # fused into another, or not measured
        return
    seconds = parse_number(f"{match[1]} s")
    share = parse_number(f"{match[2]}%")
    assert seconds is not None
    assert share is not None
    if stage == "Total":
        yield Figure("total time", run, *seconds, place)
    else:
        yield Figure("time of a stage", f"{run} {stage}", *seconds, place)
        yield Figure("share of a stage", f"{run} {stage}", *share, place)


# --- Texts ------------------------------------------------------------------------------------------

LINE = re.compile(r"^  (?P<label>[A-Za-z0-9][^:]*?):\s+(?P<value>\S.*)$")
DEVICE = re.compile(r"Device \d+ \((?P<device>\S+)\)$")


def text_figures(text: str, validation: Validation, place: str) -> Iterator[Figure]:
    """Yield the figures of the printed report and of the performance summary."""
    judged = validation.judged
    for line in text.splitlines():
        if stage := re.match(r"  Stage \d: (.*?) \.+\s+(.*)$", line):
            yield from stage_figures(judged, stage[1], stage[2], place)
            continue
        match = LINE.match(line)
        if match is None:
            continue
        label, value = match["label"], match["value"]
        if device := DEVICE.match(label):
            yield from _device_line_figures(f"{judged} {device['device']}", value, place)
        elif label.split(" (")[0] in PRINTED_CRITERIA or label in validation.run_of_label:
            yield from _criterion_line_figures(label, value, validation, place)
        elif label.startswith("v2.0 result"):
            yield Figure("total time", judged, *num(value), place)
        elif label.startswith(("PERF-", "Stage")) or label in OTHER_LINES:
            continue
        elif parse_number(value) is not None and " baseline (" not in label:
            if label in validation.titles:  # a further check
                yield from validation.criterion_figures(label, value.split(" (target")[0], place)
            else:
                known = named(label)
                if known is not None:
                    number = parse_number(value, known[1])
                    assert number is not None
                    yield Figure(known[0], judged, *number, place)
    yield from _sentence_figures(text, judged, place)


# Lines of facts that are no measurements, or that are read elsewhere
OTHER_LINES = (
    "Further failures",
    "Why not met",
    "Regression",
    "Sample, host",
    "Driver, CUDA, torch",
    "Approval",
    "Score tolerance",
    "ESM-2 scaling",
    "DNABERT-S scaling",
    "Same bytes on all devices",
    "MFU of ESM-2",
    "MFU of DNABERT-S",
)
PRINTED_CRITERIA = {
    "Multi-GPU speedup": "scaling",
    "Speedup": "speedup",
    "Consensus label agreement": "consensus",
    "GPU utilization": "gpu_utilisation",
    "Packing efficiency": "packing",
}
# `PERF-01 (time <30 min):   33:45  [FAIL]`
REQUIREMENT = re.compile(r"^  PERF-\d+ \((\w+)[^)]*\):\s+(.*?)\s+\[[A-Z ]+\]", re.MULTILINE)
REQUIREMENTS = {"time": "two_device_time", "GPU": "gpu_utilisation", "packing": "packing"}
SENTENCES = {
    "tokens per second": r"Tokens/s, both encoders: (\S+) while embedding",
    "steady tokens per second": r"while embedding, (\S+) once warm",
    "distinct frames per second": r"Distinct open frames/s while embedding: ([\d,.]*\d)",
    "sequences per second": r"(?<!frames/s)(?:Sequences|Reads)/s(?:ec)?: +([\d,.]*\d)",
    "mean wait": r"Waits: mean (\S+ ms)",
    "p95 wait": r"Waits: .*?p95 (\S+ ms)",
    "longest wait": r"Waits: .*?max (\S+ ms)",
    "full share": r"Queue: full (\S+ %)",
    "normal share": r"normal (\S+ %), starved",
    "starved share": r"normal \S+ %, starved (\S+ %)",
    "memory of the host": r"memory of all processes of the run (\S+ \w+) at most",
    "criteria met": r"(\d+) pass ·",
}
COUNTS = re.compile(r"\b(\d+) of (\d+) (?:asked criteria met|CRITERIA MET)")


def _sentence_figures(text: str, judged: str, place: str) -> Iterator[Figure]:
    """Yield the figures that stand in sentences, and the counts of the criteria."""
    for name, pattern in SENTENCES.items():
        for match in re.finditer(pattern, text):
            parsed = parse_number(match[1])
            if parsed is not None:
                yield Figure(name, judged, *parsed, f"{place}: {match[0]}")
    for match in COUNTS.finditer(text):
        yield Figure("criteria met", judged, float(match[1]), 0.0, place)
        yield Figure("criteria asked", judged, float(match[2]), 0.0, place)
    for match in REQUIREMENT.finditer(text):
        parsed = parse_number(match[2])
        if parsed is not None:
            name = f"criterion {REQUIREMENTS[match[1]]}"
            yield Figure(name, judged, *parsed, f"{place}: {match[0]}")


def _device_line_figures(device: str, value: str, place: str) -> Iterator[Figure]:
    """Yield the figures of a device in the performance summary, by the words beside them.

    Args:
        device: The run and the device.
        value: The line after the name of the device.
        place: Where the line stands.
    """
    patterns = {"while ESM-2 ran": r"(\S+ %) while ESM-2 ran", "on average": r"(\S+ %) on average"}
    patterns["peak mem"] = r"peak mem: (\S+ \w+)"
    for label, pattern in patterns.items():
        match = re.search(pattern, value)
        parsed = None if match is None else parse_number(match[1])
        if parsed is not None:
            known = named(label)
            assert known is not None
            yield Figure(known[0], device, *parsed, place)


def _criterion_line_figures(
    label: str, value: str, validation: Validation, place: str
) -> Iterator[Figure]:
    """Yield the figure of a criterion in the printed report."""
    name = PRINTED_CRITERIA.get(label.split(" (", maxsplit=1)[0])
    if name is None:  # "1x RTX 4090": the time on one device, or on two
        name = "one_device_time" if label.startswith("1x") else "two_device_time"
    # The first is the criterion. Scaling on further numbers of devices has the same id.
    title = next(title for title, known in validation.titles.items() if known == name)
    yield from validation.criterion_figures(title, value.split(" (target", maxsplit=1)[0], place)


# --- JSON -------------------------------------------------------------------------------------------

KEYED_BY = ("stages", "gpu_stats", "gpus", "encoders", "mfu", "fates", "throughput", "scaling")
IDENTITIES = ("device", "encoder", "stage", "part", "id", "kind", "name")


def json_figures(
    content: Any, subject: str, place: str, path: tuple[str, ...] = ()
) -> Iterator[Figure]:
    """Yield the numbers of a JSON document that have a name, with the subject of their place.

    A number under a key that `NAMES` does not list is no figure that other forms show under this
    key. Its name is the key itself, so that the same key of the same subject is compared between
    the documents.
    """
    if isinstance(content, dict):
        for key, value in content.items():
            if isinstance(value, dict | list):
                yield from json_figures(value, subject, place, (*path, key))
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield json_figure(key, float(value), subject, place, path)
    elif isinstance(content, list):
        for place_in_list, item in enumerate(content):
            inner = (*path, identity_of(item) or str(place_in_list))
            yield from json_figures(item, subject, place, inner)


def identity_of(item: Any) -> str:
    """Return what an item of a list is about, or an empty text."""
    if not isinstance(item, dict):
        return ""
    if "num_gpus" in item:
        return f"{item['num_gpus']} devices"
    if "a" in item and "b" in item:
        return f"{item['a']} / {item['b']}"
    return next((str(item[key]) for key in IDENTITIES if item.get(key)), "")


def json_figure(key: str, value: float, subject: str, place: str, path: Sequence[str]) -> Figure:
    """Return a number of a JSON document as a figure."""
    where = f"{place}: {'.'.join((*path, key))}"
    parents = list(path)
    if "stages" in parents or (parents and parents[-1] == "stages"):
        return Figure("time of a stage", f"{subject} {key}", value, 0.0, where)
    if parents and parents[-1] == "fates":
        return Figure("reads with a fate", key, value, 0.0, where)
    # The innermost identity on the way is the subject: a device, an encoder, a pair, a stage.
    inner = [part for part in parents if not re.fullmatch(r"[a-z_]+", part) or part in ENCODERS]
    known = NAMES.get(key)
    if known is None:
        name = ".".join([*[part for part in parents if part not in inner][-1:], key])
        return Figure(f"json {name}", " ".join((subject, *inner)), value, 0.0, where)
    name, unit = known
    about = f"{subject} {inner[-1]}" if inner else subject
    return Figure(name, about, value * UNITS[unit or ""], 0.0, where)


ENCODERS = ("esm2", "dnabert_s")


# --- One validation ---------------------------------------------------------------------------------


def figures_of(out: Path, artifacts: Mapping[str, Any]) -> list[Figure]:
    """Return all figures of a validation.

    Args:
        out: Its directory.
        artifacts: Artifacts of its flow run by key: the rows of a table, or a text in Markdown.
    """
    report = json.loads((out / "report" / "report.json").read_text())
    validation = validation_of(report)
    figures = list(report_json_figures(report, validation))
    for run in report["runs"]:
        figures += run_file_figures(out, run)
    for path in sorted((out / "report").iterdir()):
        text = path.read_text() if path.suffix in (".txt", ".md", ".html", ".json") else ""
        place = path.name
        tables: Iterable[Table] = ()
        if path.name.startswith("benchmark_") and path.suffix == ".json":
            figures += benchmark_figures(json.loads(text), validation, place)
        elif path.suffix == ".md":
            tables = markdown_tables(text)
            figures += benchmark_units(text_figures(text, validation, place), text)
        elif path.suffix == ".html":
            tables, page_text = html_forms(text)
            figures += text_figures(page_text, validation, place)
            figures += tile_figures(text, validation, place)
        elif path.suffix == ".txt":
            figures += text_figures(text, validation, place)
        for table in tables:
            figures += benchmark_units(validation.table_figures(table, place), text)
    for key, data in artifacts.items():
        figures += artifact_figures(key, data, validation)
    return figures


TILE = re.compile(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span></div>')
TILE_CRITERIA = {
    "scaling": "scaling",
    "consensus agreement": "consensus",
    "GPU utilisation, lowest": "gpu_utilisation",
    "packing efficiency": "packing",
}


def tile_figures(page: str, validation: Validation, place: str) -> Iterator[Figure]:
    """Yield the large numbers at the top of the HTML page."""
    judged = validation.judged
    for value, words in TILE.findall(page):
        parsed = parse_number(value)
        if parsed is None:
            continue
        where = f"{place}: tile {words}"
        if words.startswith("total time, "):
            label = words.removeprefix("total time, ")
            yield Figure("total time", validation.run_of_label[label], *parsed, where)
        elif words in TILE_CRITERIA or words.startswith("speed-up over"):
            name = TILE_CRITERIA.get(words, "speedup")
            assert ("projected" in value) == (name in validation.projected), where
            yield Figure(f"criterion {name}", judged, *parsed, where)
        else:
            known = named(words)
            assert known is not None, where
            yield Figure(known[0], judged, *parsed, where)


def benchmark_units(figures: Iterable[Figure], text: str) -> Iterator[Figure]:
    """Yield the figures of a form, and those of VirNucPro's heading `Peak Mem (GB)` as GiB.

    Its benchmark files divide by 2^30. Ours say so below the table; without that sentence the
    heading means what it says.
    """
    is_explained = 'GiB (2^30 bytes). The heading "Peak Mem (GB)"' in text
    for figure in figures:
        if figure.name == "peak memory" and is_explained:
            factor = UNITS["GiB"] / UNITS["GB"]
            yield Figure(
                figure.name,
                figure.subject,
                figure.value * factor,
                figure.step * factor,
                figure.place,
            )
        else:
            yield figure


def validation_of(report: Mapping[str, Any]) -> Validation:
    """Return what the forms of a report are about."""
    criteria = [*report["criteria"], *report["checks"]]
    for figure in report["scaling"]:
        if figure["judged"] is not None and figure["judged"] not in criteria:
            criteria.append(figure["judged"])
    return Validation(
        judged=report["run"]["name"],
        run_of_label={run["label"]: run["name"] for run in report["runs"]},
        titles={criterion["title"]: criterion["id"] for criterion in criteria},
        projected=frozenset(c["id"] for c in criteria if c["verdict"] == "projected"),
    )


def report_json_figures(report: Mapping[str, Any], validation: Validation) -> Iterator[Figure]:
    """Yield the figures of `report.json`, and those that other forms derive from it."""
    judged = validation.judged
    asked = [
        c
        for c in (*report["criteria"], *report["checks"])
        if c["target"] is not None and c["id"] != "same_bytes"
    ]
    n_met = sum(criterion["verdict"] == "pass" for criterion in asked)
    yield Figure("criteria met", judged, n_met, 0.0, "report.json: criteria")
    yield Figure("criteria asked", judged, len(asked), 0.0, "report.json: criteria")
    for criterion in (*report["criteria"], *report["checks"]):
        if criterion["value"] is not None:
            value = criterion["value"] * UNITS[criterion["unit"]]
            yield Figure(f"criterion {criterion['id']}", judged, value, 0.0, "report.json")
        if criterion["verdict"] == "fail":
            assert criterion["reason"], f"{criterion['title']} failed without a reason"
    for run in report["runs"]:
        counts = {key: value for key, value in run.items() if key not in ("times_s", "attempts")}
        yield from json_figures(counts, run["name"], "report.json")
        if run["sequences_per_hour"] is not None:
            per_second = run["sequences_per_hour"] / 3600
            name = "sequences per second"
            yield Figure(name, run["name"], per_second, 0.0, "report.json: sequences_per_hour")
        for stage, seconds in run["stages"].items():
            if seconds is not None and run["total_s"]:
                share = seconds / run["total_s"]
                yield Figure(
                    "share of a stage", f"{run['name']} {stage}", share, 0.0, "report.json"
                )
    for figure in report["scaling"]:
        subject = f"{figure['num_gpus']} devices"
        yield Figure("time on so many devices", subject, figure["time_seconds"], 0.0, "report.json")
        yield Figure("speed-up by devices", subject, figure["speedup"], 0.0, "report.json")
        yield Figure("scaling efficiency", subject, figure["efficiency"], 0.0, "report.json")
        # The criterion of scaling is judged on one of the numbers of devices.
        if figure["judged"] is not None and figure["judged"] in report["criteria"]:
            value = figure["efficiency"]
            yield Figure("scaling efficiency", judged, value, 0.0, "report.json: scaling")
    for loss in report["losses"]:
        if loss["share"] is not None:
            kind = loss["kind"]
            yield Figure("seconds of a loss", kind, loss["saves_s"], 0.0, "report.json: losses")
            yield Figure("share of a loss", kind, loss["share"], 0.0, "report.json: losses")
    yield from comparison_figures(report["comparisons"])


def comparison_figures(comparisons: Iterable[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield the agreements of `report.json`."""
    for pair in comparisons:
        for kind in ("frames", "consensus"):
            labels = pair[kind]
            if labels is None:
                continue
            subject = f"{pair['a']} / {pair['b']} {kind}"
            yield Figure("ids in both", subject, labels["in_both"], 0.0, "report.json")
            if labels["agreement"] is not None:
                yield Figure("agreement", subject, labels["agreement"], 0.0, "report.json")
            score = labels["score"]
            if score is not None:
                for key, name in (
                    ("mean", "mean difference"),
                    ("median", "median difference"),
                    ("p99", "p99 difference"),
                    ("max", "largest difference"),
                    ("share_within_tolerance", "share within tolerance"),
                ):
                    yield Figure(name, subject, score[key], 0.0, "report.json")


def run_file_figures(out: Path, run: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the figures of a run's `summary.json` and of its telemetry."""
    name = run["name"]
    summary = json.loads((out / name / "summary.json").read_text())
    counts = {key: value for key, value in summary.items() if key in run and key != "attempts"}
    yield from json_figures(counts, name, f"{name}/summary.json")
    if run["telemetry"] is not None:
        path = out / Path(run["telemetry"]["file"]).with_suffix(".json")
        if path.exists():
            telemetry = json.loads(path.read_text())["summary"]
            yield from json_figures(telemetry, name, f"{name}/telemetry")


def benchmark_figures(
    content: Mapping[str, Any], validation: Validation, place: str
) -> Iterator[Figure]:
    """Yield the figures of `benchmark_*.json`."""
    results = content["results"]
    for part in ("gpu_stats", "efficiency"):
        yield from json_figures(results[part], validation.judged, place, (part,))
    for figure in results["scaling_list"]:
        subject = f"{figure['num_gpus']} devices"
        yield Figure("time on so many devices", subject, figure["time_seconds"], 0.0, place)
        yield Figure("speed-up by devices", subject, figure["speedup"], 0.0, place)
        yield Figure("scaling efficiency", subject, figure["efficiency"], 0.0, place)
    for stage, speed in results["throughput"].items():
        subject = f"{validation.judged} {stage}"
        yield Figure("time of a stage", subject, speed["total_time_seconds"], 0.0, place)
        if speed["share_of_time"] is not None:
            yield Figure("share of a stage", subject, speed["share_of_time"], 0.0, place)
        rate = speed["throughput_seq_per_sec"]
        if rate is not None:
            yield Figure("sequences per second of a stage", subject, rate, 0.0, place)


def artifact_figures(key: str, data: Any, validation: Validation) -> Iterator[Figure]:
    """Yield the figures of an artifact: of a table, or of a text in Markdown."""
    place = f"artifact {key}"
    if isinstance(data, str):
        yield from text_figures(data, validation, place)
        for table in markdown_tables(data):
            yield from validation.table_figures(table, place)
        return
    rows = [{column: plain(value) for column, value in row.items()} for row in data]
    if rows and "seconds" in rows[0]:  # the stages of one run, whose devices the key names
        devices = re.search(r"-cpu-(\d+)(?:-|$)", key)
        run = validation.judged if devices is None else f"devices-{devices[1]}"
        for row in rows:
            yield from _artifact_stage_figures(row, run, place)
    elif rows and "fate" in rows[0]:
        for row in rows:
            if row["fate"] in FATES:
                yield Figure("reads with a fate", row["fate"], *num(row["reads"]), place)
    elif rows and "when" in rows[0]:
        newest = rows[0]
        for label in ("met", "total s", "tokens/s", "reads"):
            known = named(label)
            parsed = parse_number(newest[label], known[1] if known else None)
            if known is not None and parsed is not None:
                yield Figure(known[0], validation.judged, *parsed, place)
    else:
        yield from validation.table_figures(Table(key, rows), place)


def plain(value: Any) -> str:
    """Return a cell of an artifact's table as text."""
    return "" if value is None else str(value).strip("*")


def _artifact_stage_figures(row: Mapping[str, str], run: str, place: str) -> Iterator[Figure]:
    """Yield time and share of a stage from a row of the artifact of the stages."""
    stage = re.sub(r"^Stage \d+: ", "", row["stage"])
    seconds = parse_number(row["seconds"].lstrip("-"))
    if seconds is None:
        return
    if stage == "Total wall time":
        yield Figure("total time", run, *seconds, place)
        return
    yield Figure("time of a stage", f"{run} {stage}", *seconds, place)
    share = parse_number(row["share"])
    if share is not None:
        yield Figure("share of a stage", f"{run} {stage}", *share, place)


def disagreements(figures: Iterable[Figure]) -> list[str]:
    """Return a sentence for each two figures of one name and subject that are not one number."""
    figures_of_name = defaultdict(list)
    for figure in figures:
        figures_of_name[figure.name, figure.subject].append(figure)
    sentences = []
    for (name, subject), same in figures_of_name.items():
        exact = min(same, key=lambda figure: figure.step)
        for figure in same:
            if not figure.agrees_with(exact):
                sentences.append(
                    f"{name} of {subject}: {figure.value:g} in {figure.place}, "
                    f"{exact.value:g} in {exact.place}"
                )
    return sentences
