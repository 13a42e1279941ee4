"""A run directory from a stranger: it shows no private file, blocks no command and fills no memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.damage import edit_json
from virnuc.flows import cli
from virnuc_core.config import RunSpec
from virnuc_core.engine import shards
from virnuc_core.errors import UnsafeFileError
from virnuc_core.pipeline import predict
from virnuc_core.profiles import Profile
from virnuc_core.reads import store
from virnuc_core.report.build import rerender, write_report
from virnuc_core.report.compare import compare
from virnuc_core.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]
SECRET = b"ssh-private-key-of-the-victim" * 40
ROWS_OF_A_LIE = 8 * 10**9


@pytest.fixture(scope="module")
def finished_spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """The settings of a small run that is finished, with random weights."""
    folder = tmp_path_factory.mktemp("finished")
    models = folder / "models"
    assert cli.main(["models", "init-random", str(models), "--head", "300", "--seed", "5"]) == 0
    dice = np.random.default_rng(1)
    records = []
    for number in range(20):
        bases = "".join(dice.choice(list("ACGT"), 700))
        records.append(f">read{number}\n{bases}\n")
    reads = folder / "reads.fasta"
    reads.write_text("".join(records))
    spec = RunSpec(reads=(str(reads),), models=models, devices="cpu:1", out=folder / "run")
    predict(spec)
    return spec


@pytest.fixture
def run(tmp_path: Path, finished_spec: RunSpec) -> RunDir:
    """A copy of the run, as a stranger could send it."""
    return RunDir(Path(shutil.copytree(finished_spec.out, tmp_path / "run")))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that only the user may read."""
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


def rescore(run: RunDir) -> int:
    """Rescore a run, and return the exit code of the command."""
    return cli.main(["rescore", str(run.root), "-o", f"{run.root}-new", "--threshold", "0.4"])


def export(run: RunDir) -> int:
    """Export a run, and return the exit code of the command."""
    return cli.main(["export", str(run.root), "-o", f"{run.root}-exports"])


def require_refusal(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    """Check that one line was printed to standard error, that it names a file, and no secret."""
    output = capsys.readouterr()
    lines = output.err.strip().splitlines()
    assert len(lines) == 1, output.err
    assert str(path) in lines[0]
    assert SECRET.decode() not in output.out + output.err


def require_no_secret(folder: Path) -> None:
    """Check that no file below a folder has a part of the secret."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "secret":
            assert SECRET[:12] not in path.read_bytes()


def test_a_store_that_shows_another_file_is_refused(
    run: RunDir, secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """HDF5's external storage puts the bytes of any file into a dataset."""
    with h5py.File(run.store, "r+") as file:
        n_bytes = len(file["read_id_bytes"])
        assert n_bytes < len(SECRET)
        del file["read_id_bytes"]
        file.create_dataset(
            "read_id_bytes", (n_bytes,), np.uint8, external=[(str(secret), 0, n_bytes)]
        )
    store.seal(run.store)
    capsys.readouterr()
    for command in (rescore, export):
        assert command(run) == 2
        require_refusal(capsys, run.store)
    require_no_secret(run.root.parent)


def external_scores(file: h5py.File, secret: Path) -> None:
    """Let the scores of a shard be the bytes of another file."""
    shape = file["scores"].shape
    del file["scores"]
    n_bytes = shape[0] * shape[1] * 4
    file.create_dataset("scores", shape, np.float32, external=[(str(secret), 0, n_bytes)])


def virtual_scores(file: h5py.File, secret: Path) -> None:
    """Let the scores of a shard be those of a file elsewhere."""
    other = secret.with_name("other.h5")
    shape = file["scores"].shape
    with h5py.File(other, "w") as other_file:
        other_file["x"] = np.zeros(shape, np.float32)
    del file["scores"]
    layout = h5py.VirtualLayout(shape, np.float32)
    layout[:] = h5py.VirtualSource(other, "x", shape)
    file.create_virtual_dataset("scores", layout)


def linked_scores(file: h5py.File, secret: Path) -> None:
    """Let the scores of a shard be a link into another file."""
    del file["scores"]
    file["scores"] = h5py.ExternalLink(str(secret.with_name("other.h5")), "/x")


def endless_scores(file: h5py.File, secret: Path) -> None:
    """Let a shard claim more scores than a machine has memory."""
    del file["scores"]
    file.create_dataset("scores", (ROWS_OF_A_LIE, 2), np.float32)


def endless_compressed_scores(file: h5py.File, secret: Path) -> None:
    """Let a shard claim more scores than a machine has memory, in chunks that are not there."""
    del file["scores"]
    file.create_dataset(
        "scores", (ROWS_OF_A_LIE, 2), np.float32, chunks=(100, 2), compression="gzip"
    )


@pytest.mark.parametrize(
    "change",
    [external_scores, virtual_scores, linked_scores, endless_scores, endless_compressed_scores],
)
def test_a_shard_that_is_no_plain_table_is_refused(
    run: RunDir,
    secret: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[h5py.File, Path], None],
) -> None:
    path = shards.shard_path(run, 0)
    with h5py.File(path, "r+") as file:
        change(file, secret)
    capsys.readouterr()
    assert rescore(run) == 2
    require_refusal(capsys, path)
    require_no_secret(run.root.parent)


@pytest.mark.parametrize("name", ["../outside.h5", "../../outside.h5", "/etc/passwd", "../orfs.h5"])
def test_a_store_outside_the_run_is_refused(
    run: RunDir, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Even a store of the very same reads is not looked at."""
    for folder in (run.root.parent, run.root.parent.parent):
        for file_name in ("outside.h5", "orfs.h5"):
            shutil.copyfile(run.store, folder / file_name)
    edit_json(run.record, lambda record: record.update(store=name))
    capsys.readouterr()
    for command in (rescore, export):
        assert command(run) == 2
        require_refusal(capsys, run.record)


def test_a_run_inside_a_validation_uses_the_store_of_the_validation(
    run: RunDir, tmp_path: Path
) -> None:
    inner = RunDir(tmp_path / "validation" / "devices-1")
    shutil.copytree(run.root, inner.root)
    inner.store.rename(tmp_path / "validation" / "orfs.h5")
    edit_json(inner.record, lambda record: record.update(store="../orfs.h5"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "validation")
    assert rescore(inner) == 0
    assert rescore(RunDir(link / "devices-1")) == 0


def pipe(path: Path) -> None:
    """Put a named pipe in place of a file."""
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    """Put a link to a device without an end in place of a file."""
    path.unlink()
    path.symlink_to("/dev/zero")


def outside(path: Path) -> None:
    """Move a file out of the run, and leave a link to it."""
    target = path.parents[2] / f"moved-{path.name}"
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("replace", [pipe, endless, outside])
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (export, "summary.json"),
        (export, "reads.tsv"),
        (export, "run.json"),
        (export, "orfs.h5"),
        (rescore, "run.json"),
        (rescore, "orfs.h5"),
        (rescore, "shards/plan.json"),
        (rescore, "shards/00000.h5"),
    ],
)
def test_what_is_no_regular_file_blocks_no_command(
    run: RunDir,
    capsys: pytest.CaptureFixture[str],
    command: Callable[[RunDir], int],
    name: str,
    replace: Callable[[Path], None],
) -> None:
    replace(run.root / name)
    capsys.readouterr()
    assert command(run) == 2
    require_refusal(capsys, run.root / name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("replace", [pipe, endless, outside])
@pytest.mark.parametrize("name", ["run.json", "embeddings.h5", "shards/00000.h5"])
def test_a_comparison_reads_regular_files_only(
    run: RunDir, finished_spec: RunSpec, name: str, replace: Callable[[Path], None]
) -> None:
    replace(run.root / name)
    with pytest.raises(UnsafeFileError, match=name):
        compare(run.root, finished_spec.out, embeddings=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("replace", [pipe, endless, outside])
@pytest.mark.parametrize(
    "name", ["summary.json", "run.json", "shards/plan.json", "shards/00000.h5"]
)
def test_a_run_is_not_resumed_over_what_is_no_regular_file(
    run: RunDir, finished_spec: RunSpec, name: str, replace: Callable[[Path], None]
) -> None:
    if name != "summary.json":
        run.summary.unlink()
    replace(run.root / name)
    mode = (run.root / name).lstat().st_mode
    with pytest.raises(UnsafeFileError, match=name):
        predict(finished_spec.model_copy(update={"out": run.root}))
    assert (run.root / name).lstat().st_mode == mode, "nothing is moved"


@pytest.mark.parametrize("folder", ["shards", "logs", "telemetry"])
def test_starting_over_touches_nothing_behind_a_link(
    run: RunDir, finished_spec: RunSpec, tmp_path: Path, folder: str
) -> None:
    """With a link to the shards of another run, `--force` removed them."""
    other = Path(shutil.copytree(finished_spec.out, tmp_path / "other"))
    (other / folder).mkdir(exist_ok=True)
    before = {path: path.read_bytes() for path in (other / folder).rglob("*") if path.is_file()}
    shutil.rmtree(run.root / folder, ignore_errors=True)
    (run.root / folder).symlink_to(other / folder)
    for force in (False, True):
        with pytest.raises(UnsafeFileError, match=f"{folder}: is a symbolic link"):
            predict(finished_spec.model_copy(update={"out": run.root, "force": force}))
    after = {path: path.read_bytes() for path in (other / folder).rglob("*") if path.is_file()}
    assert after == before
    assert run.summary.exists(), "nothing was removed"


def test_logs_and_other_files_are_not_written_through_links(
    run: RunDir, finished_spec: RunSpec, secret: Path
) -> None:
    """The names of the files that a run writes are known before."""
    run.summary.unlink()
    shards.shard_path(run, 0).unlink()
    names = [path.relative_to(run.root) for path in (run.root / "logs").glob("*.log")]
    names += map(Path, ["logs/worker-cpu-core-0.log", "shards/.look", "telemetry/attempt.jsonl"])
    for name in names:
        path = run.root / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(secret)
    with pytest.raises(UnsafeFileError, match=r"attempt\.jsonl: is a symbolic link"):
        predict(finished_spec.model_copy(update={"out": run.root}))
    (run.root / "telemetry" / "attempt.jsonl").unlink()
    predict(finished_spec.model_copy(update={"out": run.root}))
    assert secret.read_bytes() == SECRET


def test_a_report_is_not_written_through_a_link(
    copied: tuple[Path, Profile], tmp_path: Path
) -> None:
    """`virnuc report` writes into a validation that somebody else may have made."""
    validation, profile = copied
    other = tmp_path / "other"
    (validation / "report").rename(other)
    (validation / "report").symlink_to(other)
    before = {path: path.read_bytes() for path in other.iterdir()}
    with pytest.raises(UnsafeFileError, match="report: is a symbolic link"):
        write_report(validation, profile)
    with pytest.raises(UnsafeFileError, match="report: is a symbolic link"):
        rerender(validation)
    assert {path: path.read_bytes() for path in other.iterdir()} == before


@pytest.mark.parametrize("name", ["devices-1/summary.json", "comparison.json"])
def test_a_report_takes_nothing_from_a_file_that_is_a_link(
    copied: tuple[Path, Profile], tmp_path: Path, name: str
) -> None:
    validation, profile = copied
    outside_path = tmp_path / "outside.json"
    (validation / name).rename(outside_path)
    (validation / name).symlink_to(outside_path)
    report = write_report(validation, profile)
    assert name not in report.evidence
    assert "is a symbolic link" in (validation / "report" / "report.txt").read_text()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "pattern",
    [
        "run.json",
        "comparison.json",
        "tuning.json",
        "checkpoint_overhead.json",
        "report/approval.json",
        "baseline/summary.json",
        "devices-1/summary.json",
        "devices-2/run.json",
        "devices-2/reads.tsv",
        "devices-2/prediction_results.txt",
        "devices-2/prediction_results_highestscore.csv",
        "devices-2/telemetry/*.h5",
    ],
)
def test_a_pipe_in_a_validation_is_named_and_not_called_missing(
    copied: tuple[Path, Profile], pattern: str
) -> None:
    """A report waits for nobody who writes into the pipe."""
    validation, profile = copied
    path = next(iter(validation.glob(pattern)), validation / pattern)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    name = path.relative_to(validation).as_posix()
    report = write_report(validation, profile)
    assert any(f"{name}: is a named pipe" in warning for warning in report.warnings), (
        report.warnings
    )
    assert name not in report.evidence


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["devices-2/reads.tsv", "devices-2/failed.tsv"])
def test_results_with_a_pipe_are_not_compared(copied: tuple[Path, Profile], name: str) -> None:
    validation, _ = copied
    (validation / name).unlink()
    os.mkfifo(validation / name)
    with pytest.raises(UnsafeFileError, match="is a named pipe"):
        compare(validation / "devices-1", validation / "devices-2", bits=True)
