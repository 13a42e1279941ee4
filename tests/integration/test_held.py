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
    out, log = tmp_path / "proof", tmp_path / "first.log"
    one, other = (
        simulate(SimulateSpec(reads=n, seed=n), tmp_path / f"{n}.fasta").reads_file
        for n in (60, 30)
    )

    def words(reads: Path, *more: str) -> tuple[str, ...]:
        given = (
            "--reads",
            str(reads),
            "-o",
            str(out),
            "--models",
            str(models),
            "--devices",
            "cpu:1",
        )
        return (*VIRNUC, "validate", *given, "--profile", "ci-smoke", *more)

    with background(words(one), own_server(tmp_path / "home", database), log) as first:
        wait_for((out / "orfs.made.json").exists, "the reads to be staged")
        os.kill(first.pid, signal.SIGSTOP)  # between two of its steps
        before = (out / "orfs.h5").read_bytes()
        environment = own_server(tmp_path / "home of the second", database)
        second = subprocess.run(
            words(other, "--force"),
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert second.returncode == 2, second.stderr
        assert f"process {first.pid} is working here" in second.stderr
        assert (out / "orfs.h5").read_bytes() == before
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(2 * PATIENCE_S) == 0, log.read_text()
    report = json.loads((out / "devices-1" / "summary.json").read_bytes())
    assert report["n_reads"] == 60
