"""A run directory: where its files lie, how they appear, whose they are and who may write.

A directory is ours if its marker file `.virnuc` says so. In any other directory nothing is
overwritten. A process that writes holds the directory's lease. Files are removed by the names of
our own files, never by folder.

Locks of devices and the parent-death signal belong to the operating system. They are freed when
the process dies, so that a killed run leaves no process behind.
"""

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
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.errors import (
    ConfigError,
    DeviceError,
    StorageError,
    UnreadableError,
    UnsafeFileError,
    format_bytes,
    join_first,
)
from virnuc_core.lease import lease, make_folder, require_lease
from virnuc_core.safe_files import (
    check_folder,
    flush_folder,
    open_new_file,
    output_directory,
    path_of_open_file,
    read_file,
    remove_empty_folder,
    remove_file,
    rename_open_file,
)
from virnuc_core.system_errors import (
    UNUSABLE_PATH_ERRORS,
    describe_system_error,
    is_folder,
    is_link,
    is_real_folder,
    is_regular_file,
    list_folder,
    path_exists,
    process_limit_error,
    read_with_retries,
    storage_error,
)

if TYPE_CHECKING:
    import h5py

MARKER_FILE: Final = ".virnuc"
DRAWN_FOLDER: Final = "drawn"  # of reads that a validation has drawn or simulated
# Names of all files that commands write, relative to their output directory; patterns as in glob.
SHARD_FILES: Final = (
    "shards/plan.json",
    "shards/[0-9][0-9][0-9][0-9][0-9]*.h5",
    "shards/damaged/[0-9]*.h5",
)
# The directory beside the runs of a validation with the sequences that are embedded in fp32.
EXACT_FILES: Final = "fp32"
BASELINE_FILES: Final = "baseline_files/[0-9]*_*"  # what a baseline passes from stage to stage
TRACE_FILES: Final = (
    "*.operations.json",
    "*.json.gz",
    "*.memory.pickle",
    "profile.json",
    "profile.md",
)
RECORD_FILES: Final = (
    "run.json",
    "run.json.damaged",
    "summary.json",
    "summary.json.former",
    "summary.json.damaged",
    "summary.html",
    "summary.md",
)
MATE_SUFFIXES: Final = ("_R1", "_R2", "_orphans")  # in names of files where reads come in pairs
RESULT_FILES: Final = (
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "reads.tsv",
    "failed.tsv",
    "digests.json",
)


def _read_files(verdict: str) -> tuple[str, ...]:
    """Return the names of the files that reads with a verdict may be written to.

    There is a name for each format, and for single reads, first mates, second mates and orphans.
    """
    names = []
    for suffix in ("", *MATE_SUFFIXES):
        for file_format in ("fasta", "fastq"):
            names.append(f"{verdict}{suffix}.{file_format}.gz")
    return tuple(names)


VERDICT_FILES: Final = {verdict: _read_files(verdict) for verdict in ("viral", "nonviral")}
EMBEDDING_FILES: Final = (
    "embeddings.h5",
    "composition.json",
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
# Files of one run: what starting over removes.
RUN_FILES: Final = (
    *RECORD_FILES,
    *RESULT_FILES,
    *EMBEDDING_FILES,
    *MEASUREMENT_FILES,
    *LOG_FILES,
)
STAGING_FILES: Final = ("orfs.h5", "orfs.made.json", "skipped.tsv")
VALIDATION_FILES: Final = (
    "comparison.json",
    "tuning.json",
    "checkpoint_overhead.json",
    "regression.json",
    # reads that were drawn or simulated for a validation, with their records and labels
    f"{DRAWN_FOLDER}/*.gz",
    f"{DRAWN_FOLDER}/*.gz.json",
    f"{DRAWN_FOLDER}/simulated-*.truth.tsv",
)
REPORT_FILES: Final = (
    "report/report.*",
    "report/benchmark_*.md",
    "report/benchmark_*.json",
    "report/approval.json",
    "report/approvals.jsonl*",
)
HEAD_FILES: Final = (
    "head/config.json",
    "head/model.safetensors",
    "head/composition.json",
    "head/README.md",
    "rescore.json",
)
# A training embeds its reads by a models directory of its own.
ENCODER_FILES: Final = tuple(
    f"encoders/{name}" for name in (PROTEIN.name, DNA.name, *HEAD_FILES[:2])
)
TRAINING_FILES: Final = (*HEAD_FILES, *ENCODER_FILES, "train.json", "train.html", "cuts.fasta")
SWEEP_FILES: Final = ("trial.json", "trials/*.npy", "tune.json", "settings.toml")
# All that any command writes into its output directory.
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
SAMPLES: Final = "samples.tsv"  # of several runs, each in a directory beside this file
# Files that may lie in a directory of somebody else and are never overwritten there.
GUARDED_FILES: Final = (
    *ALL_FILES,
    SAMPLES,
    "inbox.tsv",
    "fates/*.json",
    f"downloads/{'[0-9a-f]' * 12}-*",
)
INBOX_MARK: Final = "claims/inbox.tsv.lock"
_WRITTEN_FILES: Final = map(Path, (*OUR_FILES, SAMPLES, MARKER_FILE))
# Temporary files that a killed process may leave; see `atomic_file`.
PARTIAL_FILES: Final = tuple(
    str(path.with_name(f".{path.name}.[0-9]*.part")) for path in _WRITTEN_FILES
)
DEVICE_LOCK_PREFIX: Final = "virnuc-device-"
_held: ContextVar[frozenset[Path]] = ContextVar(
    "run directories this context holds", default=frozenset()
)
log = logging.getLogger(__name__)


class _PathInside(str):
    """The name of a file in a run directory, used as a class attribute of `RunDir`.

    `run.record` then is the path `run.root / "run.json"`.
    """

    def __get__(self, run: "RunDir", owner: type["RunDir"]) -> Path:
        """Return the path of this file in the given run directory (descriptor protocol)."""
        return run.root / self


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. The files are the truth; nothing else remembers a run."""

    root: Path

    record = _PathInside("run.json")
    store = _PathInside("orfs.h5")
    shards = _PathInside("shards")
    plan = _PathInside("shards/plan.json")
    embeddings = _PathInside("embeddings.h5")
    predictions = _PathInside("prediction_results.txt")
    consensus = _PathInside("prediction_results_highestscore.csv")
    reads_table = _PathInside("reads.tsv")
    pairs_table = _PathInside("pairs.tsv")  # only where reads come in pairs
    failed_rows = _PathInside("failed.tsv")
    composition = _PathInside("composition.json")  # a copy of the classifier's, if it has one
    telemetry = _PathInside("telemetry")
    journal = _PathInside("telemetry/attempt.jsonl")  # what an attempt measures, as it comes
    report = _PathInside("report")
    summary = _PathInside("summary.json")
    former_summary = _PathInside("summary.json.former")  # while its files are written again
    rescore = _PathInside("rescore.json")  # in a directory with results of `virnuc rescore`
    page = _PathInside("summary.html")
    text_page = _PathInside("summary.md")
    digests = _PathInside("digests.json")  # of result files in a directory without a summary

    def reads_of(self, verdicts: Iterable[str] = VERDICT_FILES) -> tuple[Path, ...]:
        """Return the paths to which reads with these verdicts may be written.

        There is a path for each format and each mate, whether the file exists or not.

        Args:
            verdicts: Keys of `VERDICT_FILES`, "viral" or "nonviral"; both if not given.
        """
        return tuple(self.root / name for verdict in verdicts for name in VERDICT_FILES[verdict])

    @property
    def tables(self) -> tuple[Path, ...]:
        """The results as text. The table of pairs exists only where reads come in pairs."""
        return (
            self.predictions,
            self.consensus,
            self.reads_table,
            self.failed_rows,
            self.pairs_table,
        )

    @property
    def listed(self) -> tuple[Path, ...]:
        """The files that the summary lists with size and digest, if they exist."""
        return (*self.tables, self.embeddings, self.composition, *self.reads_of())


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the `with` block into a `StorageError` that names `path`.

    Errors that do not come from the disk, such as a missing file, are raised as they are.

    Args:
        path: The file that the block writes.

    Raises:
        StorageError: The disk is full, broken or read-only.
    """
    try:
        yield
    except OSError as error:
        storage_problem = storage_error(error, path)
        if storage_problem is None:
            raise
        raise storage_problem from error


def check_room(folder: Path, n_bytes: int, what: str) -> None:
    """Check that a folder has room for a number of bytes.

    Args:
        folder: An existing folder.
        n_bytes: Number of bytes that will be written.
        what: Description of these bytes for the message, in the plural: "12 shards".

    Raises:
        StorageError: There is less room.
    """
    free_bytes = shutil.disk_usage(folder).free
    if n_bytes > free_bytes:
        raise StorageError(
            f"{folder}: {what} need about {format_bytes(n_bytes)}, "
            f"{format_bytes(free_bytes)} are free; make room or choose another directory"
        )


@contextmanager
def atomic_file(
    path: Path, *, root: Path | None = None, make_folders: bool = True
) -> Iterator[Path]:
    """Write a file so that it appears whole or not at all.

    The body writes to a temporary file in the same folder. The file is then flushed and renamed
    into place, or removed if the body raises.

    The path that the body gets leads to the open file itself and not to its name. So another user
    who may write in the folder cannot exchange the file for a link while the body opens it again.

    Args:
        path: The file.
        root: The run directory, below which no link is followed. A process that holds the
            directory (`run_lock`) need not give it.
        make_folders: Make the folder of the file if it is not there.

    Yields:
        A path of the temporary file, which is empty. It is valid in this process until the end of
        the body, and its folder is not the folder of the file.

    Raises:
        StorageError: The disk refuses.
        UnsafeFileError: A folder between the run directory and the file is a link, or somebody has
            replaced the temporary file.
        ConfigError: The lease of the directory is lost. The process that takes over removes older
            temporary files, so that none of them is renamed later.
    """
    # The name is unique over machines that share the folder.
    temp_path = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    with storage_errors(path):
        require_lease(path)
        if make_folders:
            make_folder(path.parent)
        try:
            check_folder(path.parent, root)
            with open_new_file(temp_path, root) as file:
                yield Path(path_of_open_file(file))
                os.fsync(file.fileno())
                require_lease(path)
                rename_open_file(file, temp_path, path, root)
            flush_folder(path.parent, root)
        except FileNotFoundError:
            require_lease(path)
            raise
        finally:
            # If the folder is a link, no file was made. The error of the check above is raised.
            with suppress(UnsafeFileError):
                remove_file(temp_path, root, missing_ok=True)


def _no_user_block(image: bytes) -> bytes:
    """Return no bytes: the HDF5 file begins directly with its content."""
    return b""


@contextmanager
def atomic_hdf5(
    path: Path,
    user_block: Callable[[bytes], bytes] = _no_user_block,
    *,
    root: Path | None = None,
    make_folders: bool = True,
    **options: Any,
) -> Iterator["h5py.File"]:
    """Write an HDF5 file so that it appears whole or not at all.

    The file is built in memory, because the HDF5 library may crash the process if the disk refuses
    a write.

    Args:
        path: The file.
        user_block: Returns the block of bytes that is written before the HDF5 content, such as a
            checksum. Its argument is the HDF5 content.
        root: The run directory; see `atomic_file`.
        make_folders: Make the folder of the file if it is not there.
        options: Further arguments of `h5py.File`.

    Yields:
        The open file. The caller writes the datasets.

    Raises:
        StorageError: The disk refuses.
    """
    import h5py  # slow to import, and most users of this module write no HDF5

    with h5py.File(str(path), "w", driver="core", backing_store=False, **options) as hdf5:
        yield hdf5
        hdf5.flush()
        image = hdf5.id.get_file_image()  # without the user block
    with (
        atomic_file(path, root=root, make_folders=make_folders) as temp_path,
        temp_path.open("wb") as file,
    ):
        file.write(user_block(image))
        file.write(image)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 text file so that it appears whole or not at all.

    Args:
        path: The file. Its folder is made if it is not there.
        text: The content.

    Raises:
        StorageError: The disk refuses.
        UnsafeFileError: A folder between the run directory and the file is a link.
        ConfigError: The lease of the directory is lost.
    """
    with atomic_file(path) as temp_path:
        temp_path.write_text(text, encoding="utf-8")


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Without such a file, or without an object, it is empty.

    Raises:
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """
    if not is_regular_file(path):
        return {}
    try:
        content = json.loads(read_with_retries(path, lambda: read_file(path)))
    except (OSError, ValueError, RecursionError, UnsafeFileError):
        # The file was removed meanwhile, or it is no JSON file of ours.
        return {}
    return content if isinstance(content, dict) else {}


def _matching_paths(root: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Yield the paths in a directory that match any of the patterns. No link is followed.

    Unlike `Path.glob`, this yields no path in a folder that is a symbolic link. The link itself is
    yielded if it matches.

    Raises:
        UnreadableError: The system cannot list a folder, so that nothing is known about it.
    """
    # The names in each folder. Hundreds of patterns ask for the same few folders.
    names_of_folder: dict[Path, list[str]] = {}

    def names_in(folder: Path) -> list[str]:
        """List a folder below the root. It has no names if it is absent, or if it is a link.

        The root itself may be a link, because the user has named it.
        """
        if folder not in names_of_folder:
            names_of_folder[folder] = []
            if folder == root or not is_link(folder):
                names_of_folder[folder] = [path.name for path in list_folder(folder)]
        return names_of_folder[folder]

    def search(folder: Path, parts: list[str]) -> Iterator[Path]:
        """Yield the paths in a folder that match the parts of a pattern.

        Args:
            folder: The folder.
            parts: The pattern, split at each `/`. The first part is for names in `folder`, the next
                one for names in its sub-folders, and so on.
        """
        names = names_in(folder)
        if not names:
            return  # to make an expression of a pattern takes longer than to list a folder
        for name in fnmatch.filter(names, parts[0]):
            if len(parts) == 1:
                yield folder / name
            else:
                yield from search(folder / name, parts[1:])

    for pattern in patterns:
        yield from search(root, pattern.split("/"))


def _folders_of(patterns: Iterable[str]) -> set[str]:
    """Return the patterns of the folders of files: `traces` and `traces/*` for `traces/*/a.json`.

    Args:
        patterns: The patterns of the files. Files without a folder have none to return.
    """
    folder_patterns: set[str] = set()
    for pattern in patterns:
        parts = pattern.split("/")
        for depth in range(1, len(parts)):
            folder_patterns.add("/".join(parts[:depth]))
    return folder_patterns


def require_no_links(root: Path) -> None:
    """Refuse an output directory if one of the folders that we use in it is a symbolic link.

    Another user may have put the link there. What we write or remove in this folder would be
    written or removed elsewhere.

    Args:
        root: The output directory.

    Raises:
        UnsafeFileError: Names the link.
    """
    for folder in _matching_paths(root, sorted(_folders_of((*GUARDED_FILES, INBOX_MARK)))):
        if is_link(folder):
            check_folder(folder, root)  # raises the error


def is_ours(root: Path) -> bool:
    """Return whether a directory was made by virnuc.

    A directory is ours if it has our marker file, or records that only virnuc writes. A directory
    whose lease this process holds is ours as well, and so are the nested runs in it.

    Args:
        root: The directory, which need not exist.
    """
    marker = _read_json_object(root / MARKER_FILE)
    if marker.get("product") == "virnuc" or path_exists(root / INBOX_MARK):
        return True
    # Records of a run, and of a search for the best engine settings. Only virnuc writes them.
    if "fingerprints" in _read_json_object(root / "run.json"):
        return True
    if "candidates" in _read_json_object(root / "tune.json"):
        return True
    real_root = root.resolve()
    for held_root in _held.get():  # the directories whose leases this process holds
        if real_root.is_relative_to(held_root):
            name = str(real_root.relative_to(held_root))
            if any(fnmatch.fnmatch(name, pattern) for pattern in (".", *NESTED_RUNS)):
                return True
    return False


def require_own_directory(root: Path) -> None:
    """Refuse a directory that is not ours and contains a file with a name that we would write.

    Args:
        root: The directory, which need not exist.

    Raises:
        ConfigError: Names the files.
    """
    if is_ours(root):
        return
    paths = {str(path.relative_to(root)) for path in _matching_paths(root, GUARDED_FILES)}
    # A process of ours may have begun to write between the two calls. It writes the marker first,
    # so the second call of `is_ours` sees it.
    if paths and not is_ours(root):
        raise ConfigError(
            f"{root} was not made by virnuc, and {join_first(sorted(paths))} would be overwritten; "
            "choose another directory"
        )


def require_absent(*files: Path, force: bool) -> None:
    """Raise an error if one of these files exists, unless they may be overwritten.

    Args:
        *files: Files that a command is about to write.
        force: The user allows to overwrite them.

    Raises:
        ConfigError: Names the files that exist.
    """
    if force:
        return
    existing = [path for path in files if path_exists(path)]
    if existing:
        raise ConfigError(
            f"{join_first(existing)} would be overwritten; choose another name, or --force"
        )


def check_output(
    out: Path, *, models: Path, reads: Iterable[str] = (), force: bool = False
) -> None:
    """Refuse an output directory in which input files or files of others could be lost.

    This function changes nothing.

    Args:
        out: The output directory. It need not exist.
        models: The models directory.
        reads: The files of reads.
        force: Whether earlier results are to be removed.

    Raises:
        ConfigError: The message says what would be lost.
    """
    real_root = out.resolve()
    real_models = models.resolve()
    if real_root == Path("/"):
        raise ConfigError(f"{out} is the root directory; choose a directory of its own for results")
    if real_root == _home_directory():
        raise ConfigError(
            f"{out} is your home directory; choose a directory of its own for results"
        )
    # `virnuc train` puts the encoders that it uses into the folder `encoders` of its output
    # directory, so that folder is allowed.
    if real_models.is_relative_to(real_root) and real_models != real_root / "encoders":
        raise ConfigError(
            f"{out} is or holds the models directory {models}; choose another directory for results"
        )
    is_working_directory = real_root == Path.cwd()
    if force and (is_working_directory or os.path.ismount(real_root)):
        description = "the working directory" if is_working_directory else "a mount point"
        raise ConfigError(
            f"{out} is {description}, where --force removes nothing; choose a directory in it"
        )
    if is_folder(real_root):
        _refuse_reads_in_output(out, reads)
        require_own_directory(real_root)
        require_no_links(real_root)


def _home_directory() -> Path | None:
    """Return the user's home directory, or None if the user has none."""
    with suppress(RuntimeError):
        return Path("~").expanduser().resolve()
    return None


def _refuse_reads_in_output(out: Path, reads: Iterable[str]) -> None:
    """Raise a `ConfigError` if a file of reads is one of the files that would be written in `out`.

    Files are compared by device and inode, so links are recognised.
    """
    paths = _matching_paths(out.resolve(), ALL_FILES)
    outputs = [read_with_retries(path, path.stat) for path in paths if is_regular_file(path)]
    for name in reads:
        path = Path(name)
        try:
            file = read_with_retries(path, path.stat, expected_errors=UNUSABLE_PATH_ERRORS)
        except (OSError, ValueError):
            continue  # an address, no file, or a file that cannot be opened; reported later
        if any(os.path.samestat(file, output) for output in outputs):
            raise ConfigError(
                f"{name} is read, and would be overwritten; choose another directory than {out}"
            )


@contextmanager
def run_lock(root: Path) -> Iterator[None]:
    """Hold the lease of a directory while the `with` block writes in it.

    The directory and its marker file are created if they are missing. Temporary files of killed
    processes are removed first. If the block writes nothing, a directory or marker file that was
    created here is removed again. Nested calls for the same directory do nothing.

    Args:
        root: The directory.

    Raises:
        ConfigError: Another process holds the directory, or files of others would be overwritten.
        UnsafeFileError: A folder that we use in the directory is a link.
        StorageError: The disk refuses.
    """
    # If this process holds the directory already, it must not have gone meanwhile.
    require_lease(root)
    real_root = root.resolve()
    if real_root in _held.get():
        yield
        return
    require_own_directory(root)
    require_no_links(root)
    marker = root / MARKER_FILE
    is_new_directory = not path_exists(root)
    is_new_marker = True  # until the marker file is looked for
    is_lost = False  # another process has taken over, or the directory was renamed or removed
    try:
        with ExitStack() as resources:
            resources.enter_context(output_directory(root))
            is_new_marker = _take_directory(root, resources)
            if is_new_marker and not is_new_directory:
                _warn_of_other_files(root)
            # Nested calls, and `is_ours`, see that this process holds the directory.
            _held.set(_held.get() | {real_root})
            resources.callback(lambda: _held.set(_held.get() - {real_root}))
            for path in list(_matching_paths(root, PARTIAL_FILES)):
                remove_file(path, root, missing_ok=True)
            try:
                with _explain_by_lost_lease(root):
                    yield
            finally:
                is_lost = _has_lost_lease(root)
                if is_new_marker and _is_certainly_unused(root):
                    require_lease(marker)  # never remove the marker of another process
                    marker.unlink(missing_ok=True)
    finally:
        # A directory that this call created is removed if it is empty, and so is an older directory
        # of ours whose files the block has removed. An empty directory of the user's is kept.
        may_be_removed = (is_new_directory or not is_new_marker) and not is_lost
        # Not empty, or not known to be so: the directory is kept.
        with suppress(OSError):
            if may_be_removed and not marker.exists():
                root.rmdir()


def _warn_of_other_files(root: Path) -> None:
    """Log a warning if an output directory that is new to us holds files or folders of others."""
    entries = read_with_retries(root, lambda: list(root.iterdir()))
    names = sorted(path.name for path in entries if not path.name.startswith("."))
    if names:
        log.warning(
            "%s: holds other files (%s), and the results are written beside them; a directory of "
            "their own keeps them apart",
            root,
            join_first(names),
        )


def _is_certainly_unused(root: Path) -> bool:
    """Return whether no file of ours is in a directory. If that cannot be told, it may be used."""
    try:
        return next(_matching_paths(root, GUARDED_FILES), None) is None
    except UnreadableError:
        return False


@contextmanager
def _explain_by_lost_lease(root: Path) -> Iterator[None]:
    """Replace any error in the `with` block if the lease of the directory was lost meanwhile.

    If the directory was renamed, removed or taken over, files of the run are missing, and errors
    such as "no such file" or "stage again" would mislead.

    Raises:
        ConfigError: The block has failed, and the lease is lost. It says why.
    """
    try:
        yield
    except Exception as error:
        # If the lease cannot be read, it explains nothing: the first error is raised again.
        with suppress(UnreadableError):
            try:
                require_lease(root)
            except ConfigError as lost_lease:
                raise lost_lease from error
        raise


def _has_lost_lease(root: Path) -> bool:
    """Return true if this process no longer holds a directory, or if this cannot be found out."""
    try:
        require_lease(root)
    except (ConfigError, UnreadableError):
        return True
    return False


def _take_directory(root: Path, resources: ExitStack) -> bool:
    """Take the lease of a directory and write its marker file.

    Args:
        root: The directory.
        resources: The lease is released when this stack is closed.

    Returns:
        True if there was no marker file before.

    Raises:
        ConfigError: Another process holds the directory, or it cannot be written.
        StorageError: The disk refuses.
        LimitError: This process may not open enough files.
    """
    marker = root / MARKER_FILE
    try:
        owner = resources.enter_context(lease(marker, root))
        if owner:  # another process holds the directory
            raise ConfigError(
                f"{root}: {owner} is working here; wait for it or choose another directory"
            )
        is_new = not path_exists(marker)
        if not is_new and (is_link(marker) or not is_regular_file(marker)):
            raise ConfigError(f"{marker} is not a file of virnuc's; choose another directory")
        # A marker that is new is empty, and a killed process may have left a damaged one.
        if _read_json_object(marker).get("product") != "virnuc":
            content = {"product": "virnuc", "version": virnuc_core.__version__}
            write_text_atomically(marker, json.dumps(content) + "\n")
    except OSError as error:
        # A read-only file system will not change, so the advice below is better: another directory.
        if error.errno != errno.EROFS:
            storage_problem = storage_error(error, marker)
            if storage_problem is not None:
                raise storage_problem from error
        limit = process_limit_error(error)
        if limit is not None:
            raise limit from error
        reason = describe_system_error(error, "choose another directory")
        raise ConfigError(f"{marker}: cannot be written: {reason}") from error
    return is_new


def discard(root: Path, *patterns: str) -> None:
    """Remove the files of ours that match the patterns, then the folders that are empty.

    Files of others in these folders are kept, and a warning names them.

    Args:
        root: The directory. This process must hold its lease.
        patterns: Names relative to the directory, as in `Path.glob`.

    Raises:
        UnreadableError: The system cannot list a folder or look at a file.
        OSError: A file or folder cannot be removed.
    """
    require_lease(root)
    for path in list(_matching_paths(root, patterns)):
        if not is_real_folder(path):
            remove_file(path, root, missing_ok=True)

    folders = {*_matching_paths(root, _folders_of(patterns)), root}
    foreign = []  # files of others, which keep a folder of ours from being empty
    # The deepest folders come first, so that a folder is empty when its sub-folders were removed.
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        if folder == root:
            # The root may keep other files: the user's, and those of ours that no pattern matches.
            # They need no warning. A folder above it may be one that this user may not change.
            with suppress(OSError):
                root.rmdir()
            continue
        if not is_real_folder(folder):
            continue
        try:
            remove_empty_folder(folder, root)
        except OSError as error:
            # Only a folder that is not empty stays. After any other error, files of ours may stay
            # behind, so it is raised.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # A sub-folder in `folders` was examined before, and its own files are in the list.
            foreign += [path for path in list_folder(folder) if path not in folders]
    if foreign:
        names = sorted(str(path.relative_to(root)) for path in foreign)
        log.warning("%s: not made by virnuc and left as it is: %s", root, join_first(names))


# The process that uses a device binds an abstract Unix socket named after it. Such a socket is
# not a file: it needs no folder or permission, all users see the same one, and it ends with its
# process.
_SOCKET: Final = (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
# What a server of workers answers to a process that wants its device.
_PROMISED: Final = b"1"
_REFUSED: Final = b"0"
ANSWER_S: Final = 10.0  # seconds to wait for this answer, also of a server on a busy machine
RELEASE_S: Final = 30.0  # seconds that ending an idle worker may take
MAX_REQUESTS: Final = 32  # for a device, that a server of workers answers at a time


def device_holder(device: str) -> str | None:
    """Return a description of the process that holds a device, or None if nobody does.

    Args:
        device: Id of the device, as for `lock_device`.

    Returns:
        "process 123", or "another process" if its number is not available.
    """
    with socket.socket(*_SOCKET) as client:
        try:
            client.connect(f"\0{DEVICE_LOCK_PREFIX}{device}")
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # the holder's queue is full, so its process id is not available
            return "another process"
        # Linux returns three C integers of 4 bytes each.
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, _user_id, _group_id = struct.unpack("3i", credentials)
    if pid == 0:  # the process is in another PID namespace, such as a container
        return "another process"
    return f"process {pid}"


def lock_device(device: str, wait_s: float) -> int:
    """Reserve a device for this process until it ends.

    Args:
        device: Id of the device.
        wait_s: How long to wait for it, in seconds.

    Returns:
        A file handle that must be kept open.

    Raises:
        DeviceError: Names the process that still holds the device.
    """
    deadline_s = time.monotonic() + wait_s
    is_promised = False
    lock = socket.socket(*_SOCKET)
    while True:
        try:
            # A name that begins with \0 is no file. Only one socket can have it at a time.
            lock.bind(f"\0{DEVICE_LOCK_PREFIX}{device}")
            lock.listen(socket.SOMAXCONN)  # so that others can ask who holds it
            return lock.detach()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                # Another error does not say that the device is in use.
                lock.close()
                reason = describe_system_error(error)
                raise DeviceError(f"{device} cannot be taken: {reason}") from error
            if not is_promised and ask_for_device(device):
                # A server with idle workers has promised to end the one on this device. One promise
                # counts, so that nobody can hold up this process for ever.
                is_promised = True
                deadline_s = max(deadline_s, time.monotonic() + RELEASE_S)
            if time.monotonic() >= deadline_s:
                lock.close()
                holder = device_holder(device) or "another process"
                raise DeviceError(
                    f"{device} is in use by {holder}; wait for it or choose another device"
                ) from error
        time.sleep(0.2)


def _requests_address(device: str) -> str:
    """Return the address at which a server of workers hears who wants its device."""
    return f"\0{DEVICE_LOCK_PREFIX}asked-{device}"


def ask_for_device(device: str) -> bool:
    """Ask the server of workers that holds a device, if there is one, to give it back.

    Args:
        device: Id of the device, as for `lock_device`.

    Returns:
        True if the server has promised it. False if a run computes there, or if no server holds it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(ANSWER_S)
        try:
            client.connect(_requests_address(device))
            return client.recv(1) == _PROMISED
        except OSError:
            return False


class DeviceRequests:
    """Receives the requests of other processes for a device that a server of workers holds."""

    def __init__(self, device: str) -> None:
        """Listen for requests.

        Args:
            device: Id of the device, as for `lock_device`.

        Raises:
            DeviceError: Another server listens already.
        """
        self._socket = socket.socket(*_SOCKET)
        try:
            self._socket.bind(_requests_address(device))
            self._socket.listen(socket.SOMAXCONN)
        except OSError as error:
            self._socket.close()
            raise DeviceError(f"another server of workers holds {device}") from error

    def take(self) -> list[socket.socket]:
        """Return the connections of requests that have come. Each must be answered.

        These are `MAX_REQUESTS` at most, because any user of the machine may ask, as often as
        they like. The next call returns the others.
        """
        clients: list[socket.socket] = []
        with suppress(OSError):  # no further request
            while len(clients) < MAX_REQUESTS:
                client, _ = self._socket.accept()
                clients.append(client)
        return clients

    def answer(self, clients: Iterable[socket.socket], *, is_free: bool) -> None:
        """Answer requests.

        Args:
            clients: What `take` has returned. The connections are closed.
            is_free: The device is given back now. If false, a run computes there.
        """
        for client in clients:
            with client, suppress(OSError):
                client.send(_PROMISED if is_free else _REFUSED)

    def close(self) -> None:
        """Listen no longer."""
        self._socket.close()


def relax_garbage_collection() -> None:
    """Make Python's garbage collector run less often.

    With Python's default thresholds, the collector takes a third of the time in which libraries
    are imported.
    """
    gc.set_threshold(50_000, 50, 100)  # Python's own: 700 (later 2,000), 10, 10


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent, the thread that started it, dies.

    Args:
        parent: Process id of the parent. If it is already gone, this process ends at once.
    """
    PR_SET_PDEATHSIG = 1  # noqa: N806 - the kernel's name
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Give this process a name, which `ps` and `top` show where they do not show command lines.

    Args:
        name: The name. Linux keeps 15 bytes of it.
    """
    PR_SET_NAME = 15  # noqa: N806 - the kernel's name
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, name.encode())


def parent_bound_command(program: str, *words: str) -> list[str]:
    """Return the command of a Python process that dies with the thread that starts it.

    The process is bound before it imports anything slow.

    Args:
        program: Python source.
        words: Arguments of the program, its `sys.argv[1:]`.
    """
    imports = "import sys; from virnuc_core.rundir import die_with_parent, relax_garbage_collection"
    # The first argument of the process is the number of this process, its parent.
    bind = "die_with_parent(int(sys.argv.pop(1)))"
    source = f"{imports}; {bind}; relax_garbage_collection(); {program}"
    # -P: no module of the folder in which the command was given
    return [sys.executable, "-P", "-c", source, str(os.getpid()), *words]
