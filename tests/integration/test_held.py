"""A validation holds its directory: a second one that is started within is refused, and touches nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from virnuc_core.reads.simulate import SimulateSpec, simulate

from .processes import PATIENCE_S, VIRNUC, background, own_server, wait_for

pytestmark = pytest.mark.slow


def test_a_second_validation_with_other_reads_and_force_is_refused(
    tmp_path: Path, models: Path, database: Path
) -> None:
    out_dir, log = tmp_path / "proof", tmp_path / "first.log"
    first_words, second_words = (
        simulate(SimulateSpec(reads=n, seed=n), tmp_path / f"{n}.fasta").reads_file
        for n in (60, 30)
    )

    def words(reads: Path, *more: str) -> tuple[str, ...]:
        arguments = (
            "--reads",
            str(reads),
            "-o",
            str(out_dir),
            "--models",
            str(models),
            "--devices",
            "cpu:1",
        )
        return (*VIRNUC, "validate", *arguments, "--profile", "ci-smoke", *more)

    with background(words(first_words), own_server(tmp_path / "home", database), log) as first_run:
        wait_for((out_dir / "orfs.made.json").exists, "the reads to be staged")
        os.kill(first_run.pid, signal.SIGSTOP)  # between two of its steps
        bytes_before = (out_dir / "orfs.h5").read_bytes()
        environment = own_server(tmp_path / "home of the second", database)
        second = subprocess.run(
            words(second_words, "--force"),
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert second.returncode == 2, second.stderr
        assert f"process {first_run.pid} is working here" in second.stderr
        assert (out_dir / "orfs.h5").read_bytes() == bytes_before
        os.kill(first_run.pid, signal.SIGCONT)
        assert first_run.wait(2 * PATIENCE_S) == 0, log.read_text()
    report = json.loads((out_dir / "devices-1" / "summary.json").read_bytes())
    assert report["n_reads"] == 60
