"""Staging on several workers: the same bytes, the same complaints, and nobody left behind."""

from __future__ import annotations

import errno
import gzip
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tasks.retries import can_help
from virnuc_core.errors import InputError, SpentInputError, WorkerError
from virnuc_core.reads import crew as crew_module
from virnuc_core.reads.crew import Crew
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore

from .conftest import WriteReads
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
            fasta(shared[:200]) + ">r1.2\nACGTN\n;remark\n>\u00a0\nGGG\n>\nAC\n" + fasta(shared[200:400]), "remark.fa"
        ),
        write(fastq(shared[:100]) + broken + fastq(shared[100:400]), "broken.fq"),
        write(gzip.compress(fastq(reads).encode())[:-400], "cut_off.fq.gz"),
        write(fasta(reads[:50]), "last.fa"),
    )


@pytest.mark.usefixtures("small_stretches")
def test_workers_give_the_same_bytes_and_leave_nobody_behind(write: WriteReads, tmp_path: Path) -> None:
    files = mixed_files(write)
    made = set()
    for workers in (1, 2, 3):
        out = tmp_path / str(workers) / "orfs.h5"
        spec = StageSpec(reads=files, model_length=100, workers=workers, on_error="skip")
        summary = stage(spec, out)
        assert min(summary.cut_s, summary.parse_s, summary.chunk_s, summary.translate_s, summary.store_s) > 0
        assert psutil.Process().children() == []
        again = stage(spec, out)
        assert again.reused
        assert (again.tally, again.by_file, again.warnings()) == (summary.tally, summary.by_file, summary.warnings())
        made.add((digest(out), summary.fingerprint, summary.by_file, (out.parent / "skipped.tsv").read_text()))
    assert len(made) == 1
    assert (summary.counts.n_reads, summary.skipped_records, summary.empty_files) == (3540, 3, 1)


@pytest.mark.usefixtures("small_stretches")
@pytest.mark.parametrize("at", range(2, 6))
def test_workers_stop_at_the_same_record(write: WriteReads, tmp_path: Path, at: int) -> None:
    """Of several broken records the first in the input is named, whoever comes upon one first."""
    files = mixed_files(write)
    said = set()
    for workers in (1, 3):
        with pytest.raises(InputError) as caught:
            stage(StageSpec(reads=files[at:], workers=workers), tmp_path / "orfs.h5")
        said.add(str(caught.value))
    assert len(said) == 1
    assert ("broken.fq:401: read 'b'" if at < 5 else "cut_off.fq.gz: the gzip data ends early") in said.pop()


@pytest.mark.usefixtures("small_stretches")
def test_pieces_that_were_laid_and_dropped_last_of_all_leave_no_trace(write: WriteReads, tmp_path: Path) -> None:
    """A record whose quality looks like records, and which is left out itself: other workers have laid them by then."""
    quality = "".join(f"@q{i:03}\nACGT\n+\nIIII\n" for i in range(200))
    half = (len(quality) - quality.count("\n")) // 2
    bases = f"AC!T{'A' * (half - 4)}\n{'C' * half}\n"
    files = (write(fastq(made_up_reads(20)), "a.fq"), write(f"@long\n{bases}+\n{quality}", "b.fq"))
    made = set()
    for workers in (1, 3):
        out = tmp_path / str(workers) / "orfs.h5"
        summary = stage(StageSpec(reads=files, model_length=100, workers=workers, on_error="skip"), out)
        assert (summary.counts.n_reads, summary.skipped_records) == (20, 1)
        made.add(digest(out))
    assert len(made) == 1


CHILD = """
import sys, time
from pathlib import Path
from virnuc_core.reads import write
from virnuc_core.reads.stage import StageSpec, stage
if sys.argv[3] != "none":
    def stop(*_, **__):
        print("here", flush=True)
        time.sleep(60)
    owner, _, name = sys.argv[3].rpartition(".")
    setattr(getattr(write, owner) if owner else write, name, stop)
stage(StageSpec(reads=(sys.argv[1],), workers=3), Path(sys.argv[2]))
"""


def two_files(write: WriteReads, reads: str) -> str:
    """A folder of two files with the same reads: the first is laid by the caller itself, the second by another."""
    write(reads, "reads/a.fq")
    return str(Path(write(reads, "reads/b.fq")).parent)


def members_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # a short-lived one of some import, gone by now
            if "crew_member" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize("moment", ["StoreWriter.finish", "Layout.of", "_create"])
def test_killed_half_way_nothing_half_written_stays(write: WriteReads, tmp_path: Path, moment: str) -> None:
    out = tmp_path / "run" / "orfs.h5"
    path = two_files(write, fastq(made_up_reads(500)))
    child = subprocess.Popen([sys.executable, "-c", CHILD, path, str(out), moment], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == "here\n"
        members = members_of(child.pid)
        assert members
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert psutil.wait_procs(members, timeout=10)[1] == []
    assert not out.exists()
    assert list(out.parent.iterdir()) != []  # scratch of the killed one
    stage(StageSpec(reads=(path,)), out)
    assert sorted(entry.name for entry in out.parent.iterdir()) == ["orfs.h5", "orfs.made.json"]


@pytest.mark.parametrize("moment", ["StoreWriter.add", "none"])
def test_members_end_when_their_caller_is_killed(write: WriteReads, tmp_path: Path, moment: str) -> None:
    """While it thinks, with answers unread; and while it sends them a job."""
    path = two_files(write, fastq(made_up_reads(100 if moment != "none" else 20_000)) * (1 if moment != "none" else 10))
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, path, str(tmp_path / "orfs.h5"), moment], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child, child.stdout:
        members: list[psutil.Process] = []
        while not members:
            members = members_of(child.pid)
            time.sleep(0.01)
        if moment == "none":
            time.sleep(0.7)  # they are at work by now
        else:
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert psutil.wait_procs(members, timeout=10)[1] == []


def test_a_member_that_dies_is_an_error(write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = crew_module._Member._start

    def start_and_kill(self: crew_module._Member) -> None:
        start(self)
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    monkeypatch.setattr(crew_module._Member, "_start", start_and_kill)
    with pytest.raises(WorkerError, match=r"worker process ended \(exit code -9\)"):
        stage(StageSpec(reads=(two_files(write, ">a\nACGT\n"),), workers=2), tmp_path / "orfs.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["reads"]
    assert psutil.Process().children() == []


def test_a_member_that_dies_spends_what_came_through_a_pipe(tmp_path: Path) -> None:
    """Another try would begin in the middle of the reads: it must not be made, and the message says so."""
    fifo = tmp_path / "reads.fq"
    os.mkfifo(fifo)
    (tmp_path / "text").write_text(fastq(made_up_reads(3_000)))
    feeder = subprocess.Popen([sys.executable, "-c", FEEDER, str(tmp_path / "text"), str(fifo)])
    killer = threading.Thread(target=kill_first_member)
    killer.start()
    try:
        with pytest.raises(SpentInputError, match=r"worker process ended .* what came from .*reads.fq is gone"):
            stage(StageSpec(reads=(str(fifo),), workers=2), tmp_path / "orfs.h5")
    finally:
        killer.join()
        feeder.kill()
        feeder.wait()
    assert not can_help(SpentInputError("gone", hint="again"))
    assert not (tmp_path / "orfs.h5").exists()


FEEDER = """
import sys
text = open(sys.argv[1]).read()
with open(sys.argv[2], "w") as fifo:
    for _ in range(1000):
        fifo.write(text)
"""


def kill_first_member() -> None:
    for _ in range(2000):
        for member in members_of(os.getpid()):
            member.kill()
            return
        time.sleep(0.01)


def test_members_import_nothing_from_the_folder_people_stand_in(
    write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("raise SystemExit(3)", "numpy.py")
    monkeypatch.chdir(tmp_path)
    made = stage(StageSpec(reads=(two_files(write, ">a\nACGT\n"),), workers=2), tmp_path / "orfs.h5")
    assert made.counts.n_reads == 2


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Jobs that members find too."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("crew_jobs")


@pytest.mark.parametrize(
    ("error", "becomes"), [(ValueError("no"), WorkerError), (OSError(errno.ENOSPC, "No space left"), OSError)]
)
def test_a_job_that_fails_elsewhere_brings_its_traceback(
    tmp_path: Path, jobs: ModuleType, error: Exception, becomes: type[Exception]
) -> None:
    with Crew(tmp_path, 2) as crew:
        here, there = crew.submit(jobs.Pid()), crew.submit(jobs.Fails(error))
        with pytest.raises(becomes) as caught:
            there.result()
        assert here.result() == os.getpid()
    told = caught.value if becomes is WorkerError else caught.value.__cause__
    assert isinstance(told, WorkerError)
    assert "raise self.error" in told.worker_traceback
    assert psutil.Process().children() == []


def test_a_draft_that_cannot_be_opened_elsewhere_is_told_like_one_here(tmp_path: Path, jobs: ModuleType) -> None:
    (tmp_path / "sheets.1").mkdir()
    with Crew(tmp_path, 2) as crew:
        crew.submit(jobs.Pid())
        with pytest.raises(IsADirectoryError):
            crew.submit(jobs.Pid()).result()


def test_a_job_that_fails_here_is_told_in_its_turn(tmp_path: Path, jobs: ModuleType) -> None:
    with Crew(tmp_path, 1) as crew:
        failed = crew.submit(jobs.Fails(OSError(errno.ENOSPC, "No space left")))
        assert crew.submit(jobs.Pid()).result() == os.getpid()
        with pytest.raises(OSError, match="No space left"):
            failed.result()


def test_a_crew_starts_no_more_members_than_there_is_work_for(tmp_path: Path, jobs: ModuleType) -> None:
    with Crew(tmp_path, 8) as crew:
        assert crew.submit(jobs.Pid()).result() == os.getpid(), "the first job needs no other process"
        assert list(crew.map([jobs.Pid()] * 3)) == [os.getpid()] * 3, "small jobs start none"
        assert psutil.Process().children() == []
        for _ in range(5):
            crew.submit(jobs.Pid()).result()
        assert len(psutil.Process().children()) == 1
    assert psutil.Process().children() == []


def test_jobs_are_done_here_while_the_others_have_enough(tmp_path: Path, jobs: ModuleType) -> None:
    """As they have while they start. Later each does its part, and the answers stand in order."""
    with Crew(tmp_path, 2) as crew:
        asked = [crew.submit(jobs.Pid()) for _ in range(6)]
        assert [job.done() for job in asked] == [True, False, False, False, True, True]
        here, *others = (job.result() for job in asked)
        assert others == [others[0]] * 3 + [here] * 2
        assert here == os.getpid() != others[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_reads_behind_a_broken_record_of_a_cut_off_file_are_kept(tmp_path: Path, workers: int) -> None:
    whole = "".join(f"@r{i}\n{'ACGT' * 30}\n+\n{'I' * 120}\n" for i in range(5000))
    text = f"@first\n{'ACGT' * 30}\n+\n{'I' * 120}\n@bad\n{'ACGT' * 1_000_000}\n+\n{'I' * 10}\n{whole}@cut\nACGT"
    cut = gzip.compress(text.encode(), 1)[:-8]  # without its checksum and length
    (tmp_path / "cut.fq.gz").write_bytes(cut)
    spec = StageSpec(reads=(str(tmp_path / "cut.fq.gz"),), model_length=300, workers=workers, on_error="skip")
    made = stage(spec, tmp_path / "orfs.h5")
    assert made.counts.n_reads == 5001
    listed = (tmp_path / "skipped.tsv").read_text()
    assert made.skipped_records == 2, "the broken one, and what the cut took"
    assert "bad" in listed
    store = OrfStore.open(made.store)
    assert store.read_ids(0, 3) == ["first", "r0", "r1"]
