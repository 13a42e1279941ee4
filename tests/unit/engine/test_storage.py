"""A disk that takes no more: said at once, by path and room, in every process; no row is accused of it."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from virnuc.tasks.retries import is_retryable
from virnuc_core.config import Devices
from virnuc_core.errors import StorageError
from virnuc_core.pipeline import read_summary
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.rundir import RunDir, atomic_file
from virnuc_core.system_errors import storage_error

from .runs import classify_store, copy_run, no_workers_left, result_bytes

ONE = Devices.parse("cpu:1")


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """No process started meanwhile, nor this one, can make a file larger; a full disk refuses in the same way."""
    limit_before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limit_before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit_before)


@pytest.mark.slow
def test_a_commit_the_disk_refuses_ends_the_run_at_once_and_it_goes_on_later(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path, reference: Path
) -> None:
    root = tmp_path / "run"
    sizes = sorted(path.stat().st_size for path in (reference / "shards").glob("*.h5"))
    with (
        largest_file(sizes[-1] - 1),
        pytest.raises(
            StorageError, match=r"shards/\d+\.h5: File too large.* to come take about"
        ) as error_info,
    ):
        classify_store(root, staged, tiny_models, ONE)
    assert not is_retryable(error_info.value)
    assert error_info.value.exit_code == 1
    logs = "".join(path.read_text() for path in (root / "logs").glob("worker-*.log"))
    assert "Traceback" not in logs
    assert not list((root / "shards").glob(".*"))
    assert no_workers_left()
    classify_store(root, staged, tiny_models, ONE)
    assert result_bytes(root) == result_bytes(reference)


def test_results_the_disk_refuses_are_named_and_no_summary_says_they_are_there(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path, reference: Path
) -> None:
    run = RunDir(copy_run(reference, tmp_path / "run"))
    run.predictions.unlink()
    size = RunDir(reference).predictions.stat().st_size
    with (
        largest_file(size - 1),
        pytest.raises(StorageError, match=r"prediction_results\.txt: File too large"),
    ):
        classify_store(run.root, staged, tiny_models, ONE)
    assert not run.predictions.exists()
    classify_store(run.root, staged, tiny_models, ONE)
    assert result_bytes(run.root) == result_bytes(reference)
    assert read_summary(run) is not None


@pytest.mark.usefixtures("forked_workers")
def test_a_run_the_disk_cannot_hold_is_refused_before_it_computes(
    tmp_path: Path,
    staged: tuple[Path, StageSummary],
    tiny_models: Path,
    reference: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what is left to do: the shards that lie there need no more room."""
    root, lease = (
        copy_run(reference, tmp_path / "run"),
        sum(p.stat().st_size for p in reference.rglob("*.h5")),
    )
    free = SimpleNamespace(free=lease // 2)
    monkeypatch.setattr("virnuc_core.rundir.shutil.disk_usage", lambda _: free)
    fresh = RunDir(tmp_path / "fresh")
    with pytest.raises(
        StorageError, match=r"fresh: \d+ shards and the result files need about .* MB are free"
    ):
        classify_store(fresh.root, staged, tiny_models, ONE)
    assert not list(fresh.shards.glob("0*"))
    last_shard = max((root / "shards").glob("0*"))
    last_shard.unlink()
    classify_store(root, staged, tiny_models, ONE)
    assert last_shard.exists()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("limit", [3_000, 60_000])
def test_staging_the_disk_refuses_says_so(
    tmp_path: Path, reads_file: Path, workers: int, limit: int
) -> None:
    (tmp_path / "again.fasta").write_bytes(reads_file.read_bytes())
    spec = StageSpec(
        reads=(str(reads_file), str(tmp_path / "again.fasta")),
        model_length=300,
        stage_workers=workers,
    )
    with largest_file(limit), pytest.raises(StorageError, match="File too large"):
        stage(spec, tmp_path / "run" / "orfs.h5")
    assert list((tmp_path / "run").iterdir()) == []


def test_storage_errors_are_recognised_by_errno(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS):
        with pytest.raises(StorageError, match=r"a\.txt: .* free"), atomic_file(tmp_path / "a.txt"):
            raise OSError(number, "whatever")
    assert storage_error(OSError(errno.EACCES, "no")) is None
    assert storage_error(ValueError("errno = 28")) is None
