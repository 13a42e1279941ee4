"""Staging on several workers: the same bytes, the same complaints, and nobody left behind."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process_lookup import kill_all
from virnuc.tasks.retries import is_retryable
from virnuc_core.errors import InputError, SpentInputError, WorkerError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.workers import Workers

from ..worker_processes import kill_when_asked, workers_of
from .conftest import WriteReads, shrink
from .made_up import digest, fasta, fastq, made_up_reads


def mixed_files(write: WriteReads) -> tuple[str, ...]:
    """Write regular files, and files that get irregular, broken or damaged far from the start."""
    reads = made_up_reads(900)
    reads_with_shared_ids = [(f"r{i % 500}", bases) for i, (_, bases) in enumerate(reads)]
    wrapped_record = "@w\nACGT\nACGTACG\n+\nIIII\nIIIIIII\n"
    broken_records = "@b\nACGT\n+\nI\n@p\nEEE\n+\nIII\n"
    return (
        write(fastq(reads), "regular.fq"),
        write("", "nothing.fa"),
        write(
            fastq(reads_with_shared_ids[:300])
            + wrapped_record
            + fastq(reads_with_shared_ids[300:]),
            "wrapped.fq",
        ),
        write(
            fasta(reads_with_shared_ids[:200])
            + ">r1.2\nACGTN\n;remark\n>\u00a0\nGGG\n>\nAC\n"
            + fasta(reads_with_shared_ids[200:400]),
            "remark.fa",
        ),
        write(
            fastq(reads_with_shared_ids[:100])
            + broken_records
            + fastq(reads_with_shared_ids[100:400]),
            "broken.fq",
        ),
        write(gzip.compress(fastq(reads).encode())[:-400], "cut_off.fq.gz"),
        write(fasta(reads[:50]), "last.fa"),
    )


def test_workers_give_the_same_bytes_and_leave_no_process_behind(
    write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, block_bytes=20_000)
    files = mixed_files(write)
    digests = set()
    for workers in (1, 2, 3):
        store_path = tmp_path / str(workers) / "orfs.h5"
        spec = StageSpec(reads=files, model_length=100, stage_workers=workers, on_error="skip")
        summary = stage(spec, store_path)
        assert min(summary.chunk_s, summary.translate_s) > 0
        assert workers_of(os.getpid()) == []
        second_summary = stage(spec, store_path)
        assert second_summary.reused
        assert (second_summary.tally, second_summary.by_file, second_summary.warnings()) == (
            summary.tally,
            summary.by_file,
            summary.warnings(),
        )
        digests.add(
            (
                digest(store_path),
                summary.fingerprint,
                summary.by_file,
                (store_path.parent / "skipped.tsv").read_text(),
            )
        )
    assert len(digests) == 1
    assert (summary.counts.n_reads, summary.tally["skipped"]) == (3540, 3)


@pytest.mark.parametrize("at", range(2, 6))
def test_any_number_of_workers_stops_at_the_same_record(
    write: WriteReads, tmp_path: Path, at: int
) -> None:
    """Of several broken records the first in the input is named, whoever comes upon one first."""
    files = mixed_files(write)
    messages = set()
    for workers in (1, 3):
        with pytest.raises(InputError) as error_info:
            stage(StageSpec(reads=files[at:], stage_workers=workers), tmp_path / "orfs.h5")
        messages.add(str(error_info.value))
    assert len(messages) == 1
    assert (
        "broken.fq:401: read 'b'" if at < 5 else "cut_off.fq.gz: the gzip data ends early"
    ) in messages.pop()


CHILD = """
import sys, time
from pathlib import Path
from virnuc_core.reads import store
from virnuc_core.reads.stage import StageSpec, stage
calls = []
def stop(*_, **__):
    calls.append(1)
    if sys.argv[3] != "add" or len(calls) == 2:  # the first batch needs no worker
        print("here", flush=True)
        time.sleep(60)
if sys.argv[3] != "none":
    setattr(store.StoreWriter, sys.argv[3], stop)
try:
    stage(StageSpec(reads=(sys.argv[1],), stage_workers=3), Path(sys.argv[2]))
except KeyboardInterrupt:
    sys.exit(130)
"""


def two_files(write: WriteReads, reads: str) -> str:
    """Write a folder of two files with the same reads: one for the caller, one for a child."""
    write(reads, "reads/a.fq")
    return str(Path(write(reads, "reads/b.fq")).parent)


@contextmanager
def staging(
    path: str, out: Path, moment: str
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A process that stages until `moment`, and its workers."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, path, str(out), moment],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    with child, child.stdout:
        if moment != "none":
            assert child.stdout.readline() == "here\n"
        members: list[psutil.Process] = []
        while not members:
            members = workers_of(child.pid)
            time.sleep(0.01)
        yield child, members


@pytest.mark.parametrize("moment", ["add", "find_repeats", "none"])
def test_a_killed_staging_leaves_no_partial_file_and_no_process(
    write: WriteReads, tmp_path: Path, moment: str
) -> None:
    """While it thinks, with answers unread; once all are read; and while it sends work."""
    store_path = tmp_path / "run" / "orfs.h5"
    path = two_files(
        write,
        fastq(made_up_reads(20_000 if moment == "none" else 500)) * (10 if moment == "none" else 1),
    )
    with staging(path, store_path, moment) as (child, members):
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert psutil.wait_procs(members, timeout=120)[1] == []
    assert not store_path.exists()
    assert list(store_path.parent.iterdir()) != []  # scratch of the killed one
    if moment != "none":
        stage(StageSpec(reads=(path,)), store_path)
        assert sorted(entry.name for entry in store_path.parent.iterdir()) == [
            "orfs.h5",
            "orfs.made.json",
        ]


@pytest.mark.parametrize("moment", ["add", "write"])
def test_ctrl_c_leaves_nothing_behind(write: WriteReads, tmp_path: Path, moment: str) -> None:
    """A terminal sends it to all processes at once; only the caller reacts, and is silent."""
    store_path = tmp_path / "run" / "orfs.h5"
    with staging(two_files(write, fastq(made_up_reads(500))), store_path, moment) as (
        child,
        members,
    ):
        os.killpg(child.pid, signal.SIGINT)
    assert child.returncode == 130
    assert psutil.wait_procs(members, timeout=120)[1] == []
    assert list(store_path.parent.iterdir()) == []


def test_a_worker_that_dies_is_an_error(
    write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_when_asked(monkeypatch)
    with pytest.raises(WorkerError, match=r"worker process ended \(exit code -9\)"):
        stage(
            StageSpec(reads=(two_files(write, ">a\nACGT\n"),), stage_workers=2),
            tmp_path / "orfs.h5",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["reads"]
    assert workers_of(os.getpid()) == []


def stop_all() -> None:
    """Stop all children of staging: they neither work nor end, and only SIGKILL reaches them."""
    for member in workers_of(os.getpid()):
        member.suspend()


def test_a_stopped_worker_is_an_error(
    write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Workers._submit

    def submit_and_stop(self: Workers, *job: Any) -> Any:
        answer = submit(self, *job)
        stop_all()
        return answer

    monkeypatch.setattr(Workers, "_submit", submit_and_stop)
    monkeypatch.setattr("virnuc_core.reads.workers.SILENCE_S", 0.5)
    with pytest.raises(WorkerError, match=r"worker process has not moved for 0\.5 s"):
        stage(
            StageSpec(reads=(two_files(write, ">a\nACGT\n"),), stage_workers=3),
            tmp_path / "orfs.h5",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["reads"]
    assert workers_of(os.getpid()) == []


def test_a_stopped_idle_worker_is_ended() -> None:
    with Workers(2) as workers:
        assert list(workers.map(abs, range(-20, 0))) == list(range(20, 0, -1))
        stop_all()
    assert workers_of(os.getpid()) == []


def test_a_dead_worker_makes_piped_reads_unrepeatable(tmp_path: Path) -> None:
    """A retry would begin in the middle of the reads, so the error forbids it."""
    fifo = tmp_path / "reads.fq"
    os.mkfifo(fifo)
    (tmp_path / "text").write_text(fastq(made_up_reads(3_000)))
    feeder = subprocess.Popen([sys.executable, "-c", FEEDER, str(tmp_path / "text"), str(fifo)])
    staging_has_ended = threading.Event()
    killer = threading.Thread(target=kill_first_worker, args=(staging_has_ended,))
    killer.start()
    try:
        message = r"worker process (ended|could not be started).* what came from .*reads.fq is gone"
        with pytest.raises(SpentInputError, match=message):
            stage(StageSpec(reads=(str(fifo),), stage_workers=2), tmp_path / "orfs.h5")
    finally:
        staging_has_ended.set()
        killer.join()
        feeder.kill()
        feeder.wait()
    assert not is_retryable(SpentInputError("gone"))
    assert not (tmp_path / "orfs.h5").exists()


FEEDER = """
import sys
text = open(sys.argv[1]).read()
with open(sys.argv[2], "w") as fifo:
    for _ in range(1000):
        fifo.write(text)
"""


def kill_first_worker(staging_has_ended: threading.Event) -> None:
    while not staging_has_ended.wait(0.01):
        members = workers_of(os.getpid())
        if members:
            kill_all(members[:1])
            return


def test_workers_import_nothing_from_the_working_directory(
    write: WriteReads, tmp_path: Path
) -> None:
    """Neither its modules, nor the script of the caller once more."""
    for name in ("numpy.py", "signal.py", "pickle.py"):
        write("raise SystemExit(3)", name)
    script = write(
        "import sys, pathlib\n"
        "from virnuc_core.reads.stage import StageSpec, stage\n"
        "spec = StageSpec(reads=(sys.argv[1],), stage_workers=2)\n"
        "made = stage(spec, pathlib.Path(sys.argv[2]))\n"
        "print(made.counts.n_reads)\n",
        "script/mine.py",
    )
    command = [sys.executable, script, two_files(write, ">a\nACGT\n"), str(tmp_path / "orfs.h5")]
    root = str(Path(__file__).resolve().parents[3])
    process = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stdout) == (0, "2\n"), process.stderr


def test_errors_of_a_worker_carry_its_traceback() -> None:
    with (
        pytest.raises(WorkerError, match="ValueError: invalid literal") as error_info,
        Workers(2) as workers,
    ):
        list(workers.map(int, ["1", "2", "no", "4"]))
    assert "invalid literal" in error_info.value.__notes__[0]
    with (
        pytest.raises(FileNotFoundError),
        Workers(2) as workers,
    ):  # of the disk: as if it had happened here
        list(workers.map(os.stat, ["/", "/", "/no such file"]))
    with pytest.raises(ValueError, match="invalid literal"), Workers(1) as workers:
        list(workers.map(int, ["1", "no"]))
    assert workers_of(os.getpid()) == []


def test_an_interrupt_during_work_leaves_no_failing_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complaints: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)

    def items() -> Iterator[int]:
        yield from (0, *[600] * 6)  # of six for two processes four wait
        time.sleep(0.2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Workers(3) as workers:
        list(workers.map(time.sleep, items()))
    assert workers_of(os.getpid()) == []
    assert not complaints


def test_results_are_in_order_and_one_item_starts_no_child() -> None:
    this_process = str(os.getpid())
    with Workers(8) as workers:
        assert list(workers.map(os.readlink, ["/proc/self"])) == [this_process]
        assert workers_of(os.getpid()) == []
    with Workers(2) as workers:
        assert list(workers.map(abs, range(-50, 0))) == list(range(50, 0, -1))
        assert {*workers.map(os.readlink, ["/proc/self"] * 4)} - {this_process}
    assert workers_of(os.getpid()) == []


@pytest.mark.parametrize(("count", "nbytes"), [(2, 0), (3, 0), (2, 30_000_000)])
def test_only_few_items_are_drawn_ahead(count: int, nbytes: int) -> None:
    items = iter(range(40))
    with Workers(count) as workers:
        for n_results, _ in enumerate(workers.map(abs, items, lambda _: nbytes), 1):
            n_drawn = 40 - items.__length_hint__()
            assert n_drawn <= n_results + (2 if nbytes else 16 * (count - 1) + 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_reads_behind_a_broken_record_of_a_cut_off_file_are_kept(
    tmp_path: Path, workers: int
) -> None:
    good_records = "".join(f"@r{i}\n{'ACGT' * 30}\n+\n{'I' * 120}\n" for i in range(5000))
    first_record = f"@first\n{'ACGT' * 30}\n+\n{'I' * 120}\n"
    broken_record = f"@bad\n{'ACGT' * 1_000_000}\n+\n{'I' * 10}\n"
    text = f"{first_record}{broken_record}{good_records}@cut\nACGT"
    cut = gzip.compress(text.encode(), 1)[:-8]  # without its checksum and length
    (tmp_path / "cut.fq.gz").write_bytes(cut)
    spec = StageSpec(
        reads=(str(tmp_path / "cut.fq.gz"),),
        model_length=300,
        stage_workers=workers,
        on_error="skip",
    )
    summary = stage(spec, tmp_path / "orfs.h5")
    assert summary.counts.n_reads == 5001
    skipped_text = (tmp_path / "skipped.tsv").read_text()
    assert summary.tally["skipped"] == 2, "the broken one, and what the cut took"
    assert "bad" in skipped_text
    store = OrfStore.open(summary.store)
    assert store.read_ids(0, 3) == ["first", "r0", "r1"]
