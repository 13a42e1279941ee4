"""`run.json` of a measured baseline, so that it can be told which reads, weights and model length it was of."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from virnuc_core import provenance
from virnuc_core.config import BaselineSpec
from virnuc_core.encoders.checkpoint import fingerprint
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import BaselineSummary, write


def record(run: RunDir, summary: BaselineSummary, *, store: Path, models: Path, spec: BaselineSpec) -> None:
    """`run.json`: the reads, weights and model length of a measured baseline; a time out of the profile has none.

    The record of the very same baseline is left as it is, so that judging a validation again changes no file.
    """
    if summary.source == "recorded":
        run.record.unlink(missing_ok=True)
        return
    orfs = OrfStore.open(store)
    fresh = provenance.new_record(
        spec=spec.model_dump(mode="json"),
        model_length=orfs.model_length,
        fingerprints={"reads": orfs.fingerprint, **asdict(fingerprint(models))},
        resolved={},
        devices=[device.model_dump() for device in summary.devices],
        store=os.path.relpath(store, run.root),
    )
    if not run.record.exists() or provenance.differences(provenance.read_record(run), fresh):
        write(run.record, fresh)
