"""The JSON files of a run: one model each, one pair of functions that write and read them, and what run.json says.

A file of an older run may lack keys or hold others: what is absent is `None` or empty, what is unknown is passed over.
A file with a value of the wrong kind is refused whole, and the value named."""

import functools
import hashlib
import logging
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, computed_field

import virnuc_core
from virnuc_core import gpus
from virnuc_core.config import Share, refuse_unreadable
from virnuc_core.errors import ConfigError, RunMismatchError
from virnuc_core.rundir import RunDir, write_text_atomically

MODEL_LENGTH: Final = "model length"
MAX_NUMBER: Final = 10**18  # nothing of ours is more; sums and ratios of such numbers stay finite

log = logging.getLogger(__name__)

Positive = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
Seconds = Annotated[
    float, Field(ge=0, le=MAX_NUMBER)
]  # a clock that ran backwards measured nothing
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]


class RunFile(BaseModel):
    """Base of all that such files hold: frozen, no NaN or infinity; a key that is not known here is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


File = TypeVar("File", bound=RunFile)


def write(path: Path, content: RunFile) -> Path:
    """Write a file whole; returns `path`."""
    write_text_atomically(path, content.model_dump_json(indent=1) + "\n")
    return path


def read(path: Path, kind: type[File]) -> File:
    """The content of a file; `ConfigError` names the file, and the key that is wrong."""
    with refuse_unreadable(path, "JSON"):
        return kind.model_validate_json(path.read_bytes(), strict=True)


def read_or_set_aside(path: Path, kind: type[File]) -> File | None:
    """The content of a file; None without one, or for a damaged one, which is kept as `NAME.damaged`, with a warning.
    Errors: `ConfigError` when it cannot be opened."""
    if not path.exists():
        return None
    try:
        return read(path, kind)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise
        log.warning("%s; it is kept as %s.damaged", error, path.name)
        path.replace(path.with_name(f"{path.name}.damaged"))
        return None


class FileDigest(RunFile):
    """Size and content of a file."""

    size: Count
    sha256: str

    def __str__(self) -> str:
        return f"{self.size:,} bytes, SHA-256 {self.sha256}"


def sha256_of(path: Path) -> str:
    """Of a file's content. Errors: `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> FileDigest | None:
    """Of a file as it is now; None when it cannot be read."""
    with suppress(OSError):
        return FileDigest(size=path.stat().st_size, sha256=sha256_of(path))
    return None


class Device(RunFile):
    """One device of a run: a GPU by UUID, or one CPU core."""

    id: str = Field(
        min_length=1
    )  # "GPU-3f2c…" or "cpu-core-1"; of a cluster's node "GPU-3f2c…@node7"
    kind: Literal["cuda", "cpu"]
    name: str  # as the driver or the processor calls itself
    core: int | None = None  # CPU only: the core its worker is pinned to

    @property
    def local(self) -> str:
        """Its name on its own machine."""
        return self.id.partition("@")[0]


class InputFile(RunFile):
    """One file of reads: what it was when it was read, and what was met in it."""

    file: str
    reads: Count = 0
    empty: Count = 0  # reads without bases
    skipped: Count = 0  # broken records left out
    duplicate_ids: Count = 0  # reads whose id an earlier read has, of this file or one before
    orphans: Count = 0  # reads of a file of pairs without their mates
    not_primary: Count = 0  # secondary and supplementary alignments left out
    content: FileDigest | None = None  # None: it came through a pipe


class Attempt(RunFile):
    """One start of a run: the first, or a resume. What was measured is known once it has ended, or was found killed."""

    started: str
    devices: tuple[Device, ...]
    command: tuple[str, ...] = ()
    directory: str = ""  # in which it was given: where its relative paths begin
    wall_s: Seconds | None = None  # of a killed one, until its last sample
    worked_s: Seconds = 0.0  # from its first batch to its last commit
    shards: Count = 0  # that it committed
    deaths: tuple[str, ...] = ()  # of workers, a line each
    telemetry: str | None = None  # file name within telemetry/


class RunRecord(RunFile):
    """`run.json`: what a run was made of, so that nothing foreign is ever mixed into it."""

    schema_version: int = 1
    virnuc_version: str | None = None
    git_commit: str | None = None
    versions: dict[str, str] = {}
    created: str = "unknown"
    host: str = ""
    spec: dict[str, Any] = {}  # the settings as they were given
    model_length: Count | None = None
    widths: dict[str, Count] = {}  # of an embedding's two parts: dna, protein
    fingerprints: dict[str, str]  # reads, esm2, dnabert_s, head, and of int8 its calibration
    resolved: dict[
        str, Any
    ] = {}  # the settings that decide result bytes, `auto` replaced; and the kind of device
    devices: tuple[Device, ...] = ()  # of the newest attempt
    seeds: dict[str, int] = {}
    store: str = ""  # relative to the run directory
    inputs: tuple[InputFile, ...] = ()
    pairs: tuple[tuple[str, str], ...] | None = (
        None  # files of first and second mates; None: nothing tells
    )
    attempts: tuple[Attempt, ...] = ()


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@functools.cache  # runs of this process are of what it has imported
def git_commit() -> str | None:
    """Commit of the checkout virnuc runs from, with `+` when files differ from it; None outside a checkout."""
    here = Path(virnuc_core.__file__).resolve().parents[1]
    words = [
        "git",
        "-C",
        str(here),
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty=+",
    ]
    with suppress(OSError, subprocess.SubprocessError):
        if (here / ".git").exists():
            return subprocess.run(
                words, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
    return None


@functools.cache
def version_of(package: str, absent: str = "absent") -> str:
    """Of a package that is installed here, without importing it."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return absent


def versions() -> dict[str, str]:
    """Versions of what computes, of the driver and of the newest CUDA it runs."""
    computing = ("torch", "numpy", "h5py", "tokenizers", "safetensors", "prefect")
    found = {"python": platform.python_version()} | {
        package: version_of(package) for package in computing
    }
    driver = gpus.NVML.driver()
    if driver is not None:
        found["driver"] = driver.version
        found["cuda_driver"] = driver.cuda
    return found


def new_record(kind: type[File], devices: Sequence[Device], **made: Any) -> File:
    """A record of a run that starts now on `devices`; `made` are its other fields: what it is made of."""
    at, found = now(), tuple(devices)
    # of addresses, the query may be a signature
    command = tuple(
        re.sub(r"(?<=://)\S*@|[?#].*", "…", word) if "://" in word else word for word in sys.argv
    )
    here = {
        "virnuc_version": virnuc_core.__version__,
        "git_commit": git_commit(),
        "versions": versions(),
    }
    start = Attempt(started=at, devices=found, command=command, directory=str(Path.cwd()))
    of = {"created": at, "host": platform.node(), "devices": found, "attempts": (start,)}
    return kind(**here | of | made)


def read_record(run: RunDir) -> RunRecord:
    """The record of a run; `ConfigError` when it is absent or not readable."""
    if not run.record.is_file():
        raise ConfigError(f"{run.root}: not a run directory (no readable run.json)")
    return read(run.record, RunRecord)


def identity(record: RunRecord) -> dict[str, str]:
    """The fingerprints of reads and weights of any run or baseline, and its model's length."""
    length = {} if record.model_length is None else {MODEL_LENGTH: str(record.model_length)}
    return {name: record.fingerprints[name] for name in sorted(record.fingerprints)} | length


def find_mismatches(
    a: Mapping[str, str], b: Mapping[str, str], *, strict: bool = False
) -> dict[str, tuple[str, str]]:
    """The names of what tells two jobs apart, with what each side says; what only one tells counts when `strict`."""
    names = [name for name in dict.fromkeys((*a, *b)) if strict or (name in a and name in b)]
    return {
        name: (a.get(name, "nothing"), b.get(name, "nothing"))
        for name in names
        if a.get(name) != b.get(name)
    }


def changed_inputs(before: Sequence[InputFile], files: Sequence[str]) -> list[str]:
    """What tells files of reads from those that a run was made from, a sentence each, by their content."""
    now = [
        InputFile(file=name, content=digest(Path(name)) if Path(name).is_file() else None)
        for name in files
    ]
    kept = {one.content for one in before} & {one.content for one in now} - {None}
    gone, new = (
        {Path(one.file).name for one in side if one.content not in kept} for side in (before, now)
    )
    said = [f"{name} has other content" for name in sorted(gone & new)]
    said += [f"{name} was read then" for name in sorted(gone - new)] if before else []
    return said + [f"{name} was not" for name in sorted(new - gone)]


def resume_or_refuse(run: RunDir, fresh: RunRecord) -> RunRecord:
    """The record to go on with: `fresh`, or the same run's with one more attempt. Errors: `RunMismatchError`."""
    before = read_or_set_aside(run.record, RunRecord)
    if before is None:
        return fresh
    told = (
        identity(one) | {key: str(one.resolved[key]) for key in sorted(one.resolved)}
        for one in (before, fresh)
    )
    if others := find_mismatches(*told, strict=True):
        short = {
            name: [text if len(text) <= 20 else text[:12] + "…" for text in pair]
            for name, pair in others.items()
        }
        said = "; ".join(f"{name} {a} → {b}" for name, (a, b) in short.items())
        raise RunMismatchError(
            f"{run.root} holds another run ({said}); choose another directory or --force"
        )
    return before.model_copy(
        update={"devices": fresh.devices, "attempts": (*before.attempts, *fresh.attempts)}
    )


class ModelFlops(RunFile):
    """FLOPs of a token in the linear layers of each encoder, and the tokens/s that those layers alone sustain."""

    esm2_per_token: Positive | None = None
    dnabert_s_per_token: Positive | None = None
    esm2_ceiling_tokens_s: dict[str, Positive] = {}  # by device, where it was measured
    dnabert_s_ceiling_tokens_s: dict[str, Positive] = {}


class RunCounts(RunFile):
    """What a run counted and timed of itself. `None`: nothing tells."""

    stopped_at_limit: Annotated[bool, BeforeValidator(bool)] = False
    wall_s: Seconds | None = None  # all attempts, without staging
    staging_s: Seconds | None = None
    total_s: Seconds | None = None
    stages: dict[
        str, Seconds | None
    ] = {}  # the nine and the other parts of `telemetry.tables.ROWS`; None: fused
    n_reads: Count | None = None
    n_chunks: Count | None = None
    n_rows: Count | None = None
    n_uniques: Count | None = None
    fates: dict[str, Count] = {}
    pairs: dict[str, Count] = {}  # by their fates; none in a run of single reads
    resumed: Annotated[bool, BeforeValidator(bool)] = (
        False  # whatever stands there: only a plain no is a no
    )
    shards_computed: Count | None = None
    shards_reused: Count | None = None
    damaged: tuple[str, ...] = ()  # shards that were found unreadable, and computed again
    reduced_budgets: dict[
        str, Count
    ] = {}  # shard → what its token budgets were divided by, for want of memory
    restarts: Count | None = None
    rows_set_aside: Count | None = None  # uniques that ended every worker, or were not finite
    rows_repeated: Count | None = (
        None  # of the shards that were computed: uniques that fp16 decided, not int8
    )
    log_errors: Count | None = None  # lines of the workers' logs that tell of errors
    warnings: tuple[str, ...] = ()
    attempts: tuple[
        Attempt, ...
    ] = ()  # that ended or were killed; a complete run that is started again has none

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own way
    @property
    def sequences_per_hour(self) -> float | None:
        """Reads over the whole time, staging included; `None` for a run that did not do all its work in that time."""
        whole = not (
            self.resumed or self.shards_reused or self.stopped_at_limit or len(self.attempts) > 1
        )
        return (
            3600.0 * self.n_reads / self.total_s
            if whole and self.n_reads and self.total_s
            else None
        )


class RunSummary(RunCounts):
    """`summary.json`, written last: with it a run is complete, unless it says that it was ended at a time limit."""

    schema_version: int = 1
    protein_tokens: Count | None = None  # of the uniques, specials included
    threshold: Share | None = None  # viral score from which a read is called viral
    uncertain: tuple[Share, Share] | None = None  # scores of which no verdict was wanted
    rows_virus: Count | None = None
    chunks_virus: Count | None = None
    chunks_scored: Count | None = None
    telemetry: str | None = (
        None  # file name within telemetry/; None when nothing had to be computed
    )
    devices: tuple[Device, ...] = ()
    workers: tuple[dict[str, Any], ...] = ()
    shards: Count | None = None
    deaths: tuple[str, ...] | None = None
    flops: ModelFlops | None = None
    files: dict[str, FileDigest] | None = (
        None  # the result files, by name; None: an older version wrote them
    )
