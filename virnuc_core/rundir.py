"""Where things lie in a run directory, how a file appears there (whole or not at all), and who holds it.

Locks and the parent-death signal are the operating system's: freed by death, so that a killed run never blocks
anybody and leaves no process behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from virnuc_core.errors import ConfigError, DeviceError, StorageError, size, storage_error

if TYPE_CHECKING:
    import h5py

SYSTEM_LOCKS: Final = Path("/run/lock")


@dataclass(frozen=True, slots=True)
class _Inside:
    """A path within a run directory, by its name there."""

    name: str

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.root / self.name


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Files are the truth; nothing else remembers a run."""

    root: Path

    record = _Inside("run.json")
    store = _Inside("orfs.h5")
    shards = _Inside("shards")
    plan = _Inside("shards/plan.json")
    embeddings = _Inside("embeddings.h5")
    predictions = _Inside("prediction_results.txt")
    consensus = _Inside("prediction_results_highestscore.csv")
    reads_table = _Inside("reads.tsv")
    failed_rows = _Inside("failed.tsv")
    telemetry = _Inside("telemetry")
    report = _Inside("report")
    summary = _Inside("summary.json")
    former_summary = _Inside("summary.json.former")  # while the files it lists are written again

    @property
    def results(self) -> tuple[Path, ...]:
        """What a complete run has."""
        return self.predictions, self.consensus, self.reads_table, self.embeddings

    @property
    def viral(self) -> dict[str, Path]:
        """The viral reads of each format, `fasta` and `fastq`."""
        return {form: self.root / f"viral.{form}.gz" for form in ("fasta", "fastq")}

    @property
    def listed(self) -> tuple[Path, ...]:
        """What the summary lists with size and digest, where it is there."""
        return *self.results, self.failed_rows, *self.viral.values()


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """What the disk refuses while `path` is written is raised as `StorageError`, which names it."""
    try:
        yield
    except OSError as error:
        if (told := storage_error(error, path)) is None:
            raise
        raise told from error


def check_room(folder: Path, nbytes: int, what: str) -> None:
    """See to it that so many bytes can be written in `folder`, which exists. Errors: `StorageError` says how many."""
    if nbytes > (free := shutil.disk_usage(folder).free):
        raise StorageError(
            f"{folder}: {what} need about {size(nbytes)}, {size(free)} are free; make room or choose another directory"
        )


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it and rename it into place, else remove it.

    Errors: whatever the body raises; `StorageError` for what the disk refuses. A reader never sees half a file.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            with aside.open("rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(aside, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # so that the rename survives a power cut
            finally:
                os.close(folder)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def whole_hdf5(path: Path, head: Callable[[bytes], bytes] = lambda _: b"", **options: Any) -> Iterator[h5py.File]:
    """An HDF5 file to fill, which then appears whole; what `head` makes of its bytes stands before them.

    It is made in memory: HDF5 does not live through a disk that refuses. Errors: `StorageError` for one that does.
    """
    import h5py  # takes a while, and few who name a path write HDF5

    with h5py.File(path.name, "w", driver="core", backing_store=False, **options) as file:
        yield file
        file.flush()
        image = file.id.get_file_image()  # without the block for the user
    with whole_file(path) as aside, aside.open("wb") as whole:
        whole.write(head(image))
        whole.write(image)


def write_text_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file whole."""
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _try_lock(handle: int) -> bool:
    """Whether an open file is locked for this process now, which it then names."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.ftruncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    return True


def _holder(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    return f"process {text}" if text else "another process"


@contextmanager
def run_lock(root: Path) -> Iterator[None]:
    """Hold a run directory; `ConfigError` names the process that holds it already.

    A directory that was made for this, and in which nothing was made since, is removed again.
    """
    made = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    path = root / ".lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    ours = False
    try:
        ours = _try_lock(handle)
        if not ours:
            raise ConfigError(f"{root}: {_holder(path)} is working here; wait for it or choose another directory")
        yield
    finally:
        if ours and made and [entry.name for entry in root.iterdir()] == [path.name]:
            path.unlink()
            root.rmdir()
        os.close(handle)


def device_lock_path(device: str) -> Path:
    """The lock file of a device, the same for every run and every user of this machine.

    The system's own folder for locks is taken where everybody may write to it: a service may have a temporary folder
    of its own.
    """
    shared = SYSTEM_LOCKS.is_dir() and SYSTEM_LOCKS.stat().st_mode & stat.S_IWOTH
    folder = (SYSTEM_LOCKS if shared else Path(tempfile.gettempdir())) / "virnuc-devices"
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o1777)  # mkdir's own mode is cut by the umask
    return folder / f"{device}.lock"


def _open_shared(path: Path) -> int:
    """An open handle of a file that any user may lock; Linux refuses O_CREAT on another's file in such a folder."""
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with suppress(PermissionError):  # another user made it just now
        os.fchmod(handle, 0o666)
    return handle


def device_holder(device: str) -> str | None:
    """The process that holds a device, in words; None when nobody does."""
    path = device_lock_path(device)
    if not path.exists():
        return None
    handle = _open_shared(path)
    try:
        return None if _try_lock(handle) else _holder(path)
    finally:
        os.close(handle)


def lock_device(device: str, wait_s: float) -> int:
    """Take a device for this process until it ends; returns the open handle, which must be kept.

    Waits up to `wait_s` for another run to finish with it, then `DeviceError` names the holder.
    """
    path = device_lock_path(device)
    handle = _open_shared(path)
    deadline = time.monotonic() + wait_s
    while not _try_lock(handle):
        if time.monotonic() >= deadline:
            os.close(handle)
            raise DeviceError(f"{device} is in use by {_holder(path)}; wait for it or choose another device")
        time.sleep(0.2)
    return handle


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent dies; leave at once if `parent` already has.

    The initializer of every process we start. The kernel counts the thread that started a process as its parent.
    """
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os._exit(1)
