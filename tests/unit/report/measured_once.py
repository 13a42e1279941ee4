"""Telemetry that is read and summarised once for each content, for tests that judge it anew."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pandas as pd

from virnuc_core.report import metrics, raw_files
from virnuc_core.report.model import TelemetryMetrics
from virnuc_core.report.raw_files import NamedTelemetry
from virnuc_core.runfiles import Device, ModelFlops
from virnuc_core.telemetry.log import Telemetry

read_telemetry = raw_files.read_telemetry
telemetry_metrics = metrics.telemetry_metrics


class MeasuredOnce:
    """Remembers what the product read from a telemetry file of some content, and its metrics.

    Half of the time of a report is for its telemetry, and most tests change other files of the
    same few runs. A file with other bytes is read and summarised by the product, and so is a file
    that is no plain file of its folder.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._telemetry_of_content: dict[str, Telemetry] = {}
        self._table_digests: dict[str, list[str]] = {}
        self._metrics: dict[Hashable, TelemetryMetrics] = {}

    @contextmanager
    def in_reports(self) -> Iterator[None]:
        """Let reports take what is remembered, and check in the end that no report changed it."""
        with (
            patch.object(raw_files, "read_telemetry", self.read),
            patch.object(metrics, "telemetry_metrics", self.summarise),
        ):
            yield
        for content, telemetry in self._telemetry_of_content.items():
            assert table_digests(telemetry) == self._table_digests[content]

    def read(self, path: Path, root: Path | None = None) -> Telemetry:
        """Return what `read_telemetry` returns for these arguments."""
        if path.resolve() != path.absolute() or not path.is_file():
            return read_telemetry(path, root)
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        if content not in self._telemetry_of_content:
            telemetry = read_telemetry(path, root)
            self._telemetry_of_content[content] = telemetry
            self._table_digests[content] = table_digests(telemetry)
        return self._telemetry_of_content[content]

    def summarise(
        self,
        file: NamedTelemetry,
        devices: Sequence[Device],
        flops: ModelFlops,
        precision: str,
        window_s: float,
    ) -> TelemetryMetrics:
        """Return what `telemetry_metrics` returns for these arguments."""
        if not any(file.content is known for known in self._telemetry_of_content.values()):
            return telemetry_metrics(file, devices, flops, precision, window_s)
        records = (*devices, flops)
        fields = [record.model_dump_json() for record in records]
        key = (id(file.content), file.name, *fields, precision, window_s)
        if key not in self._metrics:
            self._metrics[key] = telemetry_metrics(file, devices, flops, precision, window_s)
        return self._metrics[key]


def table_digests(telemetry: Telemetry) -> list[str]:
    """Return a digest of each table."""
    digests = []
    for table in (telemetry.batches, telemetry.samples, telemetry.host, telemetry.shards):
        row_hashes = pd.util.hash_pandas_object(table).to_numpy()
        columns = ",".join(map(str, table.columns))
        digests.append(hashlib.sha256(columns.encode() + row_hashes.tobytes()).hexdigest())
    return digests
