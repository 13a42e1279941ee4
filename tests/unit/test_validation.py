"""What a validation writes down of itself, also where an earlier record is damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from virnuc_core.config import ClassifySpec
from virnuc_core.encoders.convert import init_random
from virnuc_core.errors import RunMismatchError
from virnuc_core.profiles import load_profile
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.runfiles import read
from virnuc_core.validation import ValidationRecord, record_validation


def test_a_damaged_record_is_set_aside_and_other_reads_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    init_random(tmp_path / "models", "tiny", "tiny", model_length=300, seed=3)
    profile, spec = load_profile("ci-smoke"), ClassifySpec(models=tmp_path / "models")
    staged_stores = []
    for name, bases in (("a", "ACGTC" * 30), ("b", "GGATC" * 30)):
        (tmp_path / f"{name}.fa").write_text(f">{name}\n{bases}\n")
        staged_stores.append(
            stage(StageSpec(reads=(str(tmp_path / f"{name}.fa"),)), tmp_path / f"{name}.h5")
        )
    out_dir = tmp_path / "out"
    record_validation(out_dir, spec, profile, staged_stores[0], ())
    with pytest.raises(RunMismatchError, match=r"reads .{12}… → "):
        record_validation(out_dir, spec, profile, staged_stores[1], ())
    for force in (False, True):
        (out_dir / "run.json").write_bytes(b"\x00\xff")
        with caplog.at_level(logging.WARNING):
            record_validation(
                out_dir, spec.model_copy(update={"force": force}), profile, staged_stores[0], ()
            )
        assert (out_dir / "run.json.damaged").read_bytes() == b"\x00\xff"
        assert (
            read(out_dir / "run.json", ValidationRecord).fingerprints["reads"]
            == staged_stores[0].fingerprint
        )
    assert (
        len([record for record in caplog.records if str(out_dir / "run.json") in record.message])
        == 2
    )
