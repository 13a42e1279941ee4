"""Where things lie in a run directory, how a file appears there (whole or not at all), whose it is and who holds it.

A directory is ours when its mark `.virnuc` says so; in any other nothing is overwritten. Who writes in it holds its
lease. What is removed is removed by the names of our own files, never by folder. Locks of devices and the parent-death
signal are the operating system's: freed by death, so that a killed run leaves no process behind."""

import ctypes
import errno
import fnmatch
import gc
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import virnuc_core
from virnuc_core.config import read_small_text
from virnuc_core.errors import (
    ConfigError,
    DeviceError,
    StorageError,
    format_bytes,
    join_first,
    storage_error,
)
from virnuc_core.lease import lease, require_lease

if TYPE_CHECKING:
    import h5py

MARKER_FILE: Final = ".virnuc"
SHARD_FILES: Final = (
    "shards/plan.json",
    "shards/[0-9][0-9][0-9][0-9][0-9]*.h5",
    "shards/damaged/[0-9]*.h5",
)
EXACT_FILES: Final = (
    "fp32"  # directory of the sequences that a validation embeds in fp32, beside its runs
)
BASELINE_FILES: Final = "baseline_files/[0-9]*_*"  # that a baseline passes from stage to stage
TRACE_FILES: Final = ("*.operations.json", "*.json.gz", "profile.json", "profile.md")
RECORD_FILES: Final = (
    "run.json",
    "run.json.damaged",
    "summary.json",
    "summary.json.former",
    "summary.json.damaged",
)
MATE_SUFFIXES: Final = ("_R1", "_R2", "_orphans")  # in names of files where reads come in pairs
RESULT_FILES: Final = (
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "reads.tsv",
    "failed.tsv",
)
VERDICT_FILES: Final = {
    verdict: tuple(
        f"{verdict}{kind}.{form}.gz" for kind in ("", *MATE_SUFFIXES) for form in ("fasta", "fastq")
    )
    for verdict in ("viral", "nonviral")  # files of reads by their verdict
}
EMBEDDING_FILES: Final = (
    "embeddings.h5",
    "pairs.tsv",
    *VERDICT_FILES["viral"],
    *VERDICT_FILES["nonviral"],
    *SHARD_FILES,
)
KEPT_FILES: Final = (
    "telemetry/telemetry_[0-9]*.json",
    "telemetry/telemetry_[0-9]*.h5",
    "telemetry/attempt.jsonl",
)
MEASUREMENT_FILES: Final = (*KEPT_FILES, *(f"telemetry/traces/{name}" for name in TRACE_FILES))
LOG_FILES: Final = ("logs/worker-*.log", "logs/baseline-*.log", "logs/ceiling-*.log")
RUN_FILES: Final = (
    *RECORD_FILES,
    *RESULT_FILES,
    *EMBEDDING_FILES,
    *MEASUREMENT_FILES,
    *LOG_FILES,
)  # of one run: what starting over removes
STAGING_FILES: Final = ("orfs.h5", "orfs.made.json", "skipped.tsv")
VALIDATION_FILES: Final = (
    "comparison.json",
    "tuning.json",
    "checkpoint_overhead.json",
    "regression.json",
)
REPORT_FILES: Final = (
    "report/report.*",
    "report/benchmark_*.md",
    "report/benchmark_*.json",
    "report/approval.json",
)
HEAD_FILES: Final = ("head/config.json", "head/model.safetensors", "head/README.md", "rescore.json")
ENCODER_FILES: Final = tuple(
    f"encoders/{name}" for name in ("esm2", "dnabert_s", *HEAD_FILES[:2])
)  # that trainings embed by
TRAINING_FILES: Final = (*HEAD_FILES, *ENCODER_FILES, "train.json", "train.html", "cuts.fasta")
SWEEP_FILES: Final = ("trial.json", "trials/*.npy", "tune.json", "settings.toml")
# all that any command writes into its output directory
OUR_FILES: Final = (
    *RUN_FILES,
    *STAGING_FILES,
    BASELINE_FILES,
    *VALIDATION_FILES,
    *REPORT_FILES,
    *TRAINING_FILES,
    *SWEEP_FILES,
)
NESTED_RUNS: Final = (
    "baseline",
    EXACT_FILES,
    "devices-[0-9]*",
    "overhead/[0-9]*-o*",
    "trials/*-[0-9]*",
    "lengths",
)
ALL_FILES: Final = (*OUR_FILES, *(f"{run}/{name}" for run in NESTED_RUNS for name in OUR_FILES))
SAMPLES: Final = "samples.tsv"  # of several runs, in directories beside it
GUARDED_FILES: Final = (
    *ALL_FILES,
    SAMPLES,
    "inbox.tsv",
    "fates/*.json",
    f"downloads/{'[0-9a-f]' * 12}-*",
)
INBOX_MARK: Final = "claims/inbox.tsv.lock"
_WRITTEN: Final = map(Path, (*OUR_FILES, SAMPLES, MARKER_FILE))
PARTIAL_FILES: Final = tuple(str(path.with_name(f".{path.name}.[0-9]*.part")) for path in _WRITTEN)
DEVICE_LOCK_PREFIX: Final = "virnuc-device-"
_held: ContextVar[frozenset[Path]] = ContextVar(
    "run directories this context holds", default=frozenset()
)
log = logging.getLogger(__name__)


class _Inside(str):
    """The name of a path within a run directory, which gives that path."""

    def __get__(self, run: "RunDir", owner: type["RunDir"]) -> Path:
        return run.root / self


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
    pairs_table = _Inside("pairs.tsv")  # where reads come in pairs
    failed_rows = _Inside("failed.tsv")
    telemetry = _Inside("telemetry")
    journal = _Inside("telemetry/attempt.jsonl")  # what an attempt measures, as it comes
    report = _Inside("report")
    summary = _Inside("summary.json")
    former_summary = _Inside("summary.json.former")  # while the files it lists are written again

    def reads_of(self, verdicts: Iterable[str] = VERDICT_FILES) -> tuple[Path, ...]:
        """The reads with these verdicts, by format and, where they come in pairs, by mate."""
        return tuple(self.root / name for verdict in verdicts for name in VERDICT_FILES[verdict])

    @property
    def tables(self) -> tuple[Path, ...]:
        """Results as text; that of pairs is there where reads come in pairs."""
        return (
            self.predictions,
            self.consensus,
            self.reads_table,
            self.failed_rows,
            self.pairs_table,
        )

    @property
    def listed(self) -> tuple[Path, ...]:
        """What the summary lists with size and digest, where it is there."""
        return (*self.tables, self.embeddings, *self.reads_of())


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
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
        problem = f"{what} need about {format_bytes(nbytes)}, {format_bytes(free)} are free; make room or choose another directory"
        raise StorageError(f"{folder}: {problem}")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which is flushed and renamed into place, or removed when the body raises. Errors:
    those of the body; `StorageError` for what the disk refuses; `ConfigError` when the directory's lease is lost: who
    takes that removes temporary files that are older, so that none is renamed later."""
    aside = path.with_name(
        f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part"
    )  # machines may share the folder
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            with aside.open("rb+") as handle:
                os.fsync(handle.fileno())
            require_lease(path)
            os.replace(aside, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # so that the rename survives a power cut
            finally:
                os.close(folder)
        except FileNotFoundError:
            require_lease(path)
            raise
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def atomic_hdf5(
    path: Path, head: Callable[[bytes], bytes] = lambda _: b"", **options: Any
) -> Iterator["h5py.File"]:
    """An HDF5 file to fill, which then appears whole; what `head` makes of its bytes stands before them. It is made in
    memory: HDF5 does not live through a disk that refuses, which is a `StorageError`."""
    import h5py  # takes a while, and few who name a path write HDF5

    with h5py.File(
        str(path), "w", driver="core", backing_store=False, **options
    ) as file:  # no other of its name
        yield file
        file.flush()
        image = file.id.get_file_image()  # without the block for the user
    with atomic_file(path) as aside, aside.open("wb") as whole:
        whole.write(head(image))
        whole.write(image)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 text file whole."""
    with atomic_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty for anything else."""
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and isinstance(found := json.loads(read_small_text(path)), dict):
            return found
    return {}


def _found(root: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """What lies in a directory under these names."""
    names = (
        [path.name for path in root.iterdir()] if root.is_dir() else []
    )  # few of hundreds of patterns have one
    return (
        path
        for pattern in patterns
        if fnmatch.filter(names, pattern.split("/")[0])
        for path in root.glob(pattern)
    )


def is_ours(root: Path) -> bool:
    """Whether a directory's mark says so, or, where there is none, its record; or it is held, or a run's within one."""
    marked = _json(root / MARKER_FILE).get("product") == "virnuc" or (root / INBOX_MARK).exists()
    if (
        marked
        or "fingerprints" in _json(root / "run.json")
        or "candidates" in _json(root / "tune.json")
    ):
        return True
    place = root.resolve()
    within = [str(place.relative_to(held)) for held in _held.get() if place.is_relative_to(held)]
    return any(fnmatch.fnmatch(name, pattern) for name in within for pattern in (".", *NESTED_RUNS))


def require_own_directory(root: Path) -> None:
    """`ConfigError` when a directory is not ours and something in it has a name that we would write."""
    found = (
        ()
        if is_ours(root)
        else sorted({str(path.relative_to(root)) for path in _found(root, GUARDED_FILES)})
    )
    if found and not is_ours(
        root
    ):  # asked again: who makes the first file has made the mark before
        problem = f"was not made by virnuc, and {join_first(found)} would be overwritten; choose another directory"
        raise ConfigError(f"{root} {problem}")


def require_absent(*files: Path, force: bool) -> None:
    """`ConfigError` when one of these files is there already, unless by `force`."""
    if not force and (taken := [path for path in files if os.path.lexists(path)]):
        raise ConfigError(
            f"{join_first(taken)} would be overwritten; choose another name, or --force"
        )


def check_output(
    out: Path, *, models: Path, reads: Iterable[str] = (), force: bool = False
) -> None:
    """Refuse an output directory in which input or something of others could be lost; nothing is touched."""
    place, weights = out.resolve(), models.resolve()
    special = {Path("/"): "the root directory"}
    with suppress(RuntimeError):  # who runs this has no home
        special = {Path("~").expanduser().resolve(): "your home directory"} | special
    if what := special.get(place):
        raise ConfigError(f"{out} is {what}; choose a directory of its own for results")
    if (
        weights.is_relative_to(place) and weights != place / "encoders"
    ):  # those a training there embeds by
        raise ConfigError(
            f"{out} is or holds the models directory {models}; choose another directory for results"
        )
    if force and (os.path.ismount(place) or place == Path.cwd()):
        what = "the working directory" if place == Path.cwd() else "a mount point"
        raise ConfigError(
            f"{out} is {what}, where --force removes nothing; choose a directory in it"
        )
    if place.is_dir():
        outputs = [path.stat() for path in _found(place, ALL_FILES) if path.is_file()]
        for name in reads:
            with suppress(OSError, ValueError):
                at = Path(name).stat()
                if any(os.path.samestat(at, one) for one in outputs):
                    raise ConfigError(
                        f"{name} is read, and would be overwritten; choose another directory than {out}"
                    )
        require_own_directory(place)


@contextmanager
def run_lock(root: Path) -> Iterator[None]:
    """Hold a directory for writing; who holds it already, in the same thread, holds it again for nothing. What killed
    writers left half made is removed first, and afterwards a directory or mark that was made for this, if nothing else
    was. Errors: `ConfigError` names the process that holds it, or what of others would be overwritten."""
    place = root.resolve()
    if place in _held.get():
        yield
        return
    require_own_directory(root)
    made, fresh, mark = not root.exists(), True, root / MARKER_FILE
    try:
        with ExitStack() as holding:
            try:
                if other := holding.enter_context(lease(mark, root)):
                    raise ConfigError(
                        f"{root}: {other} is working here; wait for it or choose another directory"
                    )
                fresh = not os.path.lexists(mark)
                if not fresh and (mark.is_symlink() or not mark.is_file()):
                    raise ConfigError(f"{mark} is not a file of virnuc's; choose another directory")
                if _json(mark).get("product") != "virnuc":  # new or damaged
                    write_text_atomically(
                        mark,
                        json.dumps({"product": "virnuc", "version": virnuc_core.__version__})
                        + "\n",
                    )
            except OSError as error:
                told = None if error.errno == errno.EROFS else storage_error(error, mark)
                why = f"{mark}: cannot be written: {error.strerror}; choose another directory"
                raise told or ConfigError(why) from error
            _held.set(_held.get() | {place})
            holding.callback(lambda: _held.set(_held.get() - {place}))
            for path in [*_found(root, PARTIAL_FILES)]:
                path.unlink(missing_ok=True)
            try:
                yield
            finally:
                if fresh and next(_found(root, GUARDED_FILES), None) is None:
                    require_lease(mark)
                    mark.unlink(missing_ok=True)
    finally:
        if (made or not fresh) and not mark.exists():
            with suppress(OSError):  # something else is in it
                root.rmdir()


def discard(root: Path, *patterns: str) -> None:
    """Remove files of ours by name, and the folders that are empty then; what else lies in those is left, and named."""
    require_lease(root)
    for path in [*_found(root, patterns)]:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
    within = {str(folder) for pattern in patterns for folder in list(Path(pattern).parents)[:-1]}
    folders = {*_found(root, within), root}
    left = []
    for folder in sorted(folders, key=lambda one: len(one.parts), reverse=True):
        if folder.is_dir():
            with suppress(OSError):  # not empty
                folder.rmdir()
            left += [] if folder == root or not folder.exists() else [*folder.iterdir()]
    names = sorted(str(path.relative_to(root)) for path in left if path not in folders)
    if names:
        log.warning("%s: not made by virnuc and left as it is: %s", root, join_first(names))


# A device is held by a socket of its name, in no folder: one for all users, nothing in its way, gone with its process.
_SOCKET: Final = (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


def device_holder(device: str) -> str | None:
    """The process that holds a device, in words; None when nobody does."""
    with socket.socket(*_SOCKET) as asking:
        try:
            asking.connect(f"\0{DEVICE_LOCK_PREFIX}{device}")
            pid = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[
                0
            ]
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # asked too often
            pid = 0
    return f"process {pid}" if pid else "another process"


def lock_device(device: str, wait_s: float) -> int:
    """Take a device until this process ends; a handle to keep. `DeviceError` names who holds it after `wait_s`."""
    deadline, holding = time.monotonic() + wait_s, socket.socket(*_SOCKET)
    while True:
        try:
            holding.bind(f"\0{DEVICE_LOCK_PREFIX}{device}")
            holding.listen(socket.SOMAXCONN)  # so that others can ask who it is
            return holding.detach()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                holding.close()
                who = device_holder(device) or "another process"
                raise DeviceError(
                    f"{device} is in use by {who}; wait for it or choose another device"
                ) from error
        time.sleep(0.2)


def relax_garbage_collection() -> None:
    """Let Python look for garbage in circles seldom: while libraries load that takes a third of the time."""
    gc.set_threshold(50_000, 50, 100)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent, the thread that started us, dies; leave if `parent` already has."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def parent_bound_command(program: str, *words: str) -> list[str]:
    """The command of a Python process that does `program` on these words, and is bound to the thread that starts it
    before it imports what takes time."""
    first = "import sys; from virnuc_core.rundir import die_with_parent, relax_garbage_collection"
    bind = "die_with_parent(int(sys.argv.pop(1)))"
    binding = f"{first}; {bind}; relax_garbage_collection(); {program}"
    # -P: no module of the folder people stand in
    return [sys.executable, "-P", "-c", binding, str(os.getpid()), *words]
