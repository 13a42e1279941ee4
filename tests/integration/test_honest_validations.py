"""`virnuc verify` is silent on honest validations of all kinds: none of them is called forged.

Further kinds are verified where they are made: ended at the time limit and continued, tuned, with a recorded
baseline, without any open reading frame (test_validate_flow.py), on a cluster (test_cluster_flows.py), on four
devices, with repetitions and after a regression (test_gates.py), with a reviewer's answer (test_approval_report.py), with
the cost of commits (test_tune.py), and without Prefect (tests/unit/report/test_forgeries.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process_lookup import family_of, kill_all, running_with
from virnuc.flows.cli import main
from virnuc.flows.prefect_flows.validate import validate
from virnuc_core.checked_files import OWN_DIGEST_FIELD
from virnuc_core.profiles import load_profile
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.report.build import write_report
from virnuc_core.report.regression import HISTORY
from virnuc_core.report.verify import verify_report

from .processes import PATIENCE_S, VIRNUC, background, committed, wait_for

pytestmark = [pytest.mark.usefixtures("prefect_backend", "forked_workers"), pytest.mark.slow]
PROFILE = "ci-smoke"


def assert_silent(out: Path, *remarks: str) -> None:
    """Verify a validation: nothing differs, and only these remarks are made, given by their beginnings."""
    verification = verify_report(out)
    assert verification.differences == []
    assert verification.figures > 500
    assert len(verification.remarks) == len(remarks), verification.remarks
    for remark, beginning in zip(verification.remarks, remarks, strict=True):
        assert remark.startswith(beginning)


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, few_reads: Path, models: Path, prefect_backend: Path
) -> Path:
    """A validation on two cores, in a folder with its reads and its history. To be copied."""
    folder = tmp_path_factory.mktemp("honest")
    shutil.copy(few_reads, folder / "few.fastq.gz")
    validate(
        reads=[str(folder / "few.fastq.gz")],
        out=folder / "out",
        models=models,
        devices="cpu:2",
        profile=PROFILE,
    )
    return folder


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished validation, beside a copy of its history."""
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy" / "out"


# What people do with a finished validation


def moved(out: Path) -> Path:
    return out.rename(out.parent / "nightly of Monday")


def reached_through_a_link(out: Path) -> Path:
    link = out.parent / "latest"
    link.symlink_to(out)
    return link


def rendered_again(out: Path) -> Path:
    assert main(["report", str(out)]) == 0
    return out


def judged_by_another_profile(out: Path) -> Path:
    assert main(["report", str(out), "--profile", "phase10-1m"]) == 0
    return out


def judged_again_by_its_own_profile(out: Path) -> Path:
    assert main(["report", str(out), "--profile", PROFILE]) == 0
    return out


def without_its_logs(out: Path) -> Path:
    for folder in out.glob("*/logs"):
        shutil.rmtree(folder)
    return out


def with_notes_of_a_person(out: Path) -> Path:
    (out / "notes.txt").write_text("looked good")
    (out / "devices-2" / "plot.png").write_bytes(b"PNG")
    return out


def with_a_longer_history(out: Path) -> Path:
    """A validation of another day was added since."""
    history = out.parent / HISTORY
    later = out.parent / "later"
    shutil.copytree(out, later)
    write_report(later, load_profile(PROFILE).model_copy(update={"name": "other"}), history)
    assert len(history.read_text(encoding="utf-8").splitlines()) == 2
    return out


def of_an_older_version(out: Path) -> Path:
    """Its files carry no digests of their own, and do not list those of others."""
    for path in out.rglob("*.json"):
        body = json.loads(path.read_text(encoding="utf-8"))
        body.pop(OWN_DIGEST_FIELD, None)
        body.pop("measurements", None)
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    history = out.parent / HISTORY
    lines = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        del line["sha256"], line["previous"]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    write_report(out, load_profile(PROFILE))
    return out


@pytest.mark.parametrize(
    "change",
    [
        moved,
        reached_through_a_link,
        rendered_again,
        judged_by_another_profile,
        judged_again_by_its_own_profile,
        without_its_logs,
        with_notes_of_a_person,
        with_a_longer_history,
        of_an_older_version,
    ],
)
def test_a_finished_validation_stays_honest(out: Path, change: Callable[[Path], Path]) -> None:
    assert_silent(out)
    assert_silent(change(out))


def test_what_was_tidied_up_is_a_remark(out: Path) -> None:
    """Reads, history and store need not be kept. What cannot be computed again then is said."""
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    (out.parent / HISTORY).unlink()
    assert_silent(out, "regression.json was not held against the history")
    (out / "orfs.h5").unlink()
    no_tables = [
        f"{name}: its result files were not made again" for name in ("devices-1", "devices-2")
    ]
    assert_silent(out, "regression.json was not held", *no_tables)
    assert Path(record["staging"]["files"][0]).is_file()


# Validations of further kinds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="int8 needs a CUDA device")
def test_int8_is_silent(tmp_path: Path, reads: Path, models: Path) -> None:
    calibrated = tmp_path / "models"
    shutil.copytree(models, calibrated)
    arguments: dict[str, Any] = {"models": calibrated, "devices": "cuda:0", "profile": PROFILE}
    arguments |= {"reads": [str(reads)], "out": tmp_path / "out", "precision": "int8"}
    assert main(["models", "quantize", str(calibrated), str(reads), "--device", "cuda:0"]) == 0
    validate(**arguments)
    assert_silent(tmp_path / "out")


def test_pairs_with_strange_names_are_silent(tmp_path: Path, models: Path) -> None:
    names = []
    for mate in (1, 2):
        path = tmp_path / f"Probe (β) = 100% 'Ω', _R{mate}.fastq"
        simulate(SimulateSpec(reads=40, seed=mate), path)
        lines = path.read_text(encoding="utf-8").split("\n")
        strange = [f"r{number} <b>&amp; ünï|pipe" for number in range(len(lines) // 4)]
        strange[3] = strange[2]  # two reads of one name
        for number, name in enumerate(strange):
            lines[4 * number] = f"@{name.replace(' ', '_')}"
        path.write_text("\n".join(lines), encoding="utf-8")
        names.append(str(path))
    out = tmp_path / "out"
    validate(
        mates_1=[names[0]],
        mates_2=[names[1]],
        out=out,
        models=models,
        devices="cpu:2",
        profile=PROFILE,
    )
    assert (out / "devices-2" / "pairs.tsv").is_file()
    assert_silent(out)


def test_a_baseline_of_a_part_of_the_reads_is_silent(
    tmp_path: Path, reads: Path, models: Path
) -> None:
    profile = tmp_path / "part.toml"
    profile.write_text(
        'name = "part"\ntitle = "Of a test"\ndevice_names = [""]\n[baseline]\nname = "vanilla"\nreads = 40\n'
        '[targets]\nspeedup = { op = ">", value = 0 }\n'
    )
    out = tmp_path / "out"
    validate(reads=[str(reads)], out=out, models=models, devices="cpu:1", profile=str(profile))
    assert json.loads((out / "baseline" / "summary.json").read_text())["subset"]["reads"] == 40
    assert_silent(out)


def test_a_validation_that_goes_on_elsewhere_is_silent(
    tmp_path: Path, few_reads: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine made the run on one device, the second machine the other."""
    out = tmp_path / "out"
    arguments: dict[str, Any] = {"reads": [str(few_reads)], "out": out, "models": models}
    arguments |= {"profile": PROFILE}
    monkeypatch.setenv("VIRNUC_HOST", "first")
    validate(**arguments, devices="cpu:1")
    assert_silent(out)
    monkeypatch.setenv("VIRNUC_HOST", "second")
    validate(**arguments, devices="cpu:2")
    hosts = [
        json.loads((out / name / "run.json").read_text())["host"]
        for name in ("devices-1", "devices-2")
    ]
    assert hosts == ["first", "second"]
    assert_silent(out)


def test_a_repaired_result_file_is_silent(finished: Path, out: Path, models: Path) -> None:
    """A second start writes the damaged file again, and computes nothing."""
    reads = str(finished / "few.fastq.gz")
    table = out / "devices-2" / "reads.tsv"
    table.write_text(table.read_text(encoding="utf-8") + "one more line\n", encoding="utf-8")
    assert verify_report(out).differences
    validate(reads=[reads], out=out, models=models, devices="cpu:2", profile=PROFILE)
    assert_silent(out)


def test_a_computed_shard_that_was_lost_is_silent_after_the_next_start(
    finished: Path, out: Path, models: Path
) -> None:
    """The run is resumed: it has two attempts then."""
    reads = str(finished / "few.fastq.gz")
    (out / "devices-2" / "shards" / "00000.h5").unlink()
    validate(reads=[reads], out=out, models=models, devices="cpu:2", profile=PROFILE)
    assert len(json.loads((out / "devices-2" / "summary.json").read_text())["attempts"]) == 2
    assert_silent(out)


def test_a_killed_validation_that_was_started_again_is_silent(
    tmp_path: Path, some_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    words = ["validate", str(some_reads), "--out", out, "--models", models, "--devices", "cpu:1"]
    words += ["--profile", PROFILE, "--shard-tokens", "8192", "--token-budget", "2048"]
    command = (*VIRNUC, *map(str, words))
    with background(command, child_environment, tmp_path / "log") as process:
        run = out / "devices-1"
        wait_for(lambda: committed(run) >= 2 or process.poll() is not None, "two shards")
        assert process.poll() is None, (tmp_path / "log").read_text()
        kill_all(family_of(process.pid))
        process.wait(PATIENCE_S)
    ended = subprocess.run(
        command,
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads((run / "summary.json").read_text())["attempts"]) == 2
    assert_silent(out)


def test_a_run_whose_worker_died_is_silent(
    tmp_path: Path, some_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    words = ["validate", str(some_reads), "--out", out, "--models", models, "--devices", "cpu:1"]
    words += ["--profile", PROFILE, "--shard-tokens", "8192", "--token-budget", "2048"]
    with background((*VIRNUC, *map(str, words)), child_environment, tmp_path / "log") as process:
        run = out / "devices-1"
        wait_for(lambda: committed(run) >= 2 or process.poll() is not None, "two shards")
        assert process.poll() is None, (tmp_path / "log").read_text()
        workers = running_with("virnuc_core.engine.worker", family_of(process.pid))
        kill_all(workers[:1])
        process.wait(PATIENCE_S)
    assert json.loads((run / "summary.json").read_text())["restarts"] == 1
    assert_silent(out)


def test_newest_of_kept_runs_and_another_history_are_silent(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    history = tmp_path / "histories" / "nightly.jsonl"
    history.parent.mkdir()
    arguments: dict[str, Any] = {"reads": [str(few_reads)], "models": models, "devices": "cpu:1"}
    validate(**arguments, out=tmp_path / "out", profile=PROFILE, history=history, keep=2)
    assert history.is_file()
    newest = Path(os.path.realpath(tmp_path / "out" / "latest"))
    assert_silent(newest)
