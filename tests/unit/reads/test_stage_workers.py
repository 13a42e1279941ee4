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

from virnuc.tasks.task import is_retryable
from virnuc_core.errors import InputError, SpentInputError, WorkerError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.workers import Workers

from ..worker_processes import kill_when_asked, workers_of
from .conftest import WriteReads, shrink
from .made_up import digest, fasta, fastq, made_up_reads


def mixed_files(write: WriteReads) -> tuple[str, ...]:
    """Regular files, and such that turn out to be irregular, broken or damaged long after they began."""
    reads = made_up_reads(900)
    shared = [(f"r{i % 500}", bases) for i, (_, bases) in enumerate(reads)]
    wrapped = "@w\nACGT\nACGTACG\n+\nIIII\nIIIIIII\n"
    broken = "@b\nACGT\n+\nI\n@p\nEEE\n+\nIII\n"
    return (
        write(fastq(reads), "regular.fq"),
        write("", "nothing.fa"),
        write(fastq(shared[:300]) + wrapped + fastq(shared[300:]), "wrapped.fq"),
        write(
            fasta(shared[:200])
            + ">r1.2\nACGTN\n;remark\n>\u00a0\nGGG\n>\nAC\n"
            + fasta(shared[200:400]),
            "remark.fa",
        ),
        write(fastq(shared[:100]) + broken + fastq(shared[100:400]), "broken.fq"),
        write(gzip.compress(fastq(reads).encode())[:-400], "cut_off.fq.gz"),
        write(fasta(reads[:50]), "last.fa"),
    )


def test_workers_give_the_same_bytes_and_leave_nobody_behind(
    write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, block_bytes=20_000)
    files = mixed_files(write)
    made = set()
    for workers in (1, 2, 3):
        out = tmp_path / str(workers) / "orfs.h5"
        spec = StageSpec(reads=files, model_length=100, stage_workers=workers, on_error="skip")
        summary = stage(spec, out)
        assert min(summary.chunk_s, summary.translate_s) > 0
        assert workers_of(os.getpid()) == []
        again = stage(spec, out)
        assert again.reused
        assert (again.tally, again.by_file, again.warnings()) == (
            summary.tally,
            summary.by_file,
            summary.warnings(),
        )
        made.add(
            (
                digest(out),
                summary.fingerprint,
                summary.by_file,
                (out.parent / "skipped.tsv").read_text(),
            )
        )
    assert len(made) == 1
    assert (summary.counts.n_reads, summary.tally["skipped"]) == (3540, 3)


@pytest.mark.parametrize("at", range(2, 6))
def test_workers_stop_at_the_same_record(write: WriteReads, tmp_path: Path, at: int) -> None:
    """Of several broken records the first in the input is named, whoever comes upon one first."""
    files = mixed_files(write)
    said = set()
    for workers in (1, 3):
        with pytest.raises(InputError) as caught:
            stage(StageSpec(reads=files[at:], stage_workers=workers), tmp_path / "orfs.h5")
        said.add(str(caught.value))
    assert len(said) == 1
    assert (
        "broken.fq:401: read 'b'" if at < 5 else "cut_off.fq.gz: the gzip data ends early"
    ) in said.pop()


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
    """A folder of two files with the same reads: the first is processed by the caller itself, the second by another."""
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
def test_killed_half_way_nothing_half_written_and_nobody_stays(
    write: WriteReads, tmp_path: Path, moment: str
) -> None:
    """While it thinks, with answers unread; once all are read; and while it sends work."""
    out = tmp_path / "run" / "orfs.h5"
    path = two_files(
        write,
        fastq(made_up_reads(20_000 if moment == "none" else 500)) * (10 if moment == "none" else 1),
    )
    with staging(path, out, moment) as (child, members):
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert psutil.wait_procs(members, timeout=120)[1] == []
    assert not out.exists()
    assert list(out.parent.iterdir()) != []  # scratch of the killed one
    if moment != "none":
        stage(StageSpec(reads=(path,)), out)
        assert sorted(entry.name for entry in out.parent.iterdir()) == ["orfs.h5", "orfs.made.json"]


@pytest.mark.parametrize("moment", ["add", "write"])
def test_ctrl_c_leaves_nothing_behind(write: WriteReads, tmp_path: Path, moment: str) -> None:
    """A terminal sends it to all processes at once; only the caller hears it, and says nothing of others."""
    out = tmp_path / "run" / "orfs.h5"
    with staging(two_files(write, fastq(made_up_reads(500))), out, moment) as (child, members):
        os.killpg(child.pid, signal.SIGINT)
    assert child.returncode == 130
    assert psutil.wait_procs(members, timeout=120)[1] == []
    assert list(out.parent.iterdir()) == []


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
    """SIGSTOP for all other processes of staging: they neither work nor end, and hear no other signal than SIGKILL."""
    for member in workers_of(os.getpid()):
        member.suspend()


def test_a_worker_that_is_stopped_is_an_error(
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


def test_a_worker_that_is_stopped_with_nothing_to_do_is_ended() -> None:
    with Workers(2) as workers:
        assert list(workers.map(abs, range(-20, 0))) == list(range(20, 0, -1))
        stop_all()
    assert workers_of(os.getpid()) == []


def test_a_worker_that_dies_spends_what_came_through_a_pipe(tmp_path: Path) -> None:
    """Another try would begin in the middle of the reads: it must not be made, and the message says so."""
    fifo = tmp_path / "reads.fq"
    os.mkfifo(fifo)
    (tmp_path / "text").write_text(fastq(made_up_reads(3_000)))
    feeder = subprocess.Popen([sys.executable, "-c", FEEDER, str(tmp_path / "text"), str(fifo)])
    killer = threading.Thread(target=kill_first_worker)
    killer.start()
    try:
        said = r"worker process (ended|could not be started).* what came from .*reads.fq is gone"
        with pytest.raises(SpentInputError, match=said):
            stage(StageSpec(reads=(str(fifo),), stage_workers=2), tmp_path / "orfs.h5")
    finally:
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


def kill_first_worker() -> None:
    for _ in range(2000):
        for member in workers_of(os.getpid()):
            member.kill()
            return
        time.sleep(0.01)


def test_workers_import_nothing_from_the_folder_people_stand_in(
    write: WriteReads, tmp_path: Path
) -> None:
    """Neither its modules, nor the script of the caller once more."""
    for name in ("numpy.py", "signal.py", "pickle.py"):
        write("raise SystemExit(3)", name)
    script = write(
        "import sys, pathlib\n"
        "from virnuc_core.reads.stage import StageSpec, stage\n"
        "made = stage(StageSpec(reads=(sys.argv[1],), stage_workers=2), pathlib.Path(sys.argv[2]))\n"
        "print(made.counts.n_reads)\n",
        "script/mine.py",
    )
    command = [sys.executable, script, two_files(write, ">a\nACGT\n"), str(tmp_path / "orfs.h5")]
    root = str(Path(__file__).resolve().parents[3])
    said = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stdout) == (0, "2\n"), said.stderr


def test_errors_of_a_worker_come_with_its_traceback() -> None:
    with (
        pytest.raises(WorkerError, match="ValueError: invalid literal") as caught,
        Workers(2) as workers,
    ):
        list(workers.map(int, ["1", "2", "no", "4"]))
    assert "invalid literal" in caught.value.__notes__[0]
    with (
        pytest.raises(FileNotFoundError),
        Workers(2) as workers,
    ):  # of the disk: as if it had happened here
        list(workers.map(os.stat, ["/", "/", "/no such file"]))
    with pytest.raises(ValueError, match="invalid literal"), Workers(1) as workers:
        list(workers.map(int, ["1", "no"]))
    assert workers_of(os.getpid()) == []


def test_an_interrupt_while_others_are_at_work_leaves_no_thread_that_complains(
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


def test_results_stand_in_order_and_little_work_needs_no_other_process() -> None:
    here = str(os.getpid())
    with Workers(8) as workers:
        assert list(workers.map(os.readlink, ["/proc/self"])) == [here]
        assert workers_of(os.getpid()) == []
    with Workers(2) as workers:
        assert list(workers.map(abs, range(-50, 0))) == list(range(50, 0, -1))
        assert {*workers.map(os.readlink, ["/proc/self"] * 4)} - {here}
    assert workers_of(os.getpid()) == []


@pytest.mark.parametrize(("count", "nbytes"), [(2, 0), (3, 0), (2, 30_000_000)])
def test_few_items_are_drawn_ahead(count: int, nbytes: int) -> None:
    items = iter(range(40))
    with Workers(count) as workers:
        for done, _ in enumerate(workers.map(abs, items, lambda _: nbytes), 1):
            drawn = 40 - items.__length_hint__()
            assert drawn <= done + (2 if nbytes else 16 * (count - 1) + 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_reads_behind_a_broken_record_of_a_cut_off_file_are_kept(
    tmp_path: Path, workers: int
) -> None:
    whole = "".join(f"@r{i}\n{'ACGT' * 30}\n+\n{'I' * 120}\n" for i in range(5000))
    text = f"@first\n{'ACGT' * 30}\n+\n{'I' * 120}\n@bad\n{'ACGT' * 1_000_000}\n+\n{'I' * 10}\n{whole}@cut\nACGT"
    cut = gzip.compress(text.encode(), 1)[:-8]  # without its checksum and length
    (tmp_path / "cut.fq.gz").write_bytes(cut)
    spec = StageSpec(
        reads=(str(tmp_path / "cut.fq.gz"),),
        model_length=300,
        stage_workers=workers,
        on_error="skip",
    )
    made = stage(spec, tmp_path / "orfs.h5")
    assert made.counts.n_reads == 5001
    listed = (tmp_path / "skipped.tsv").read_text()
    assert made.tally["skipped"] == 2, "the broken one, and what the cut took"
    assert "bad" in listed
    store = OrfStore.open(made.store)
    assert store.read_ids(0, 3) == ["first", "r0", "r1"]
