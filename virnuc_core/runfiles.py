"""The JSON files of a run: one model for each, functions that read and write them, and `run.json`.

A file of an older version may lack keys or have others. Absent keys become `None` or empty, and
unknown keys are ignored. A file with a value of the wrong type is refused as a whole, and the
error names the value.

Each file carries its own digest in its last field, which is compared when the file is read (see
`checked_files`). Files of older versions have none.
"""

import functools
import hashlib
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, computed_field

import virnuc_core
from virnuc_core import gpus
from virnuc_core.answer import Answer, answer_of
from virnuc_core.checked_files import Match, open_checked, read_checked_json, with_own_digest
from virnuc_core.confidential import redact
from virnuc_core.config import Share, refuse_unreadable
from virnuc_core.encoder_names import DNA, PROTEIN, EncoderName, Molecule
from virnuc_core.errors import (
    ConfigError,
    DamagedFileError,
    RunMismatchError,
    UnreadableError,
    UnsafeFileError,
)
from virnuc_core.machine_name import machine_name
from virnuc_core.rundir import RunDir, write_text_atomically
from virnuc_core.safe_files import open_file
from virnuc_core.sample_familiarity import SampleFamiliarity
from virnuc_core.system_errors import is_regular_file, path_exists, read_with_retries

MODEL_LENGTH: Final = "model length"
# No number of ours is larger, so that sums and ratios of such numbers stay finite.
MAX_NUMBER: Final = 10**18
EMAIL_OPTION: Final = "--email"  # its value, a mail address, is in no file
MAX_SHOWN_DIGEST: Final = 20  # characters of a fingerprint in a message

log = logging.getLogger(__name__)

Positive = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
# Not negative: a clock that ran backwards measured nothing.
Seconds = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]


class RunFile(BaseModel):
    """Base of all models of these files: frozen, no NaN or infinity, unknown keys are ignored.

    A field with an alias has the alias as its key in the file. In the program it is known by its
    own name.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
        serialize_by_alias=True,
        validate_by_alias=True,
        validate_by_name=True,
    )


File = TypeVar("File", bound=RunFile)


def write(path: Path, content: RunFile) -> Path:
    """Write a file with its own digest, so that it appears whole, and return its path.

    Args:
        path: The file. A file that has this name already is replaced.
        content: The model of its content.

    Raises:
        UnsafeFileError: A folder on the way to the file is a link.
        OSError: The file cannot be written.
    """
    write_text_atomically(path, with_own_digest(content.model_dump_json(indent=1)))
    return path


def read(path: Path, kind: type[File], root: Path | None = None, *, check: bool = True) -> File:
    """Read a JSON file of a run. No link is followed.

    Args:
        path: The file.
        kind: The model of its content.
        root: The run directory, if the file is in a folder of it. It may be given through a link.
        check: Compare the file with the digest that it carries. Only a caller that computes the
            whole content again, and compares it, may leave this out.

    Returns:
        The content of the file, checked: each value has the type that `kind` says.

    Raises:
        ConfigError: Names the file, and the key with a wrong value.
        DamagedFileError: The file is not as it was written.
        UnsafeFileError: It is no regular file in the run directory, or it is too large.
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """
    with refuse_unreadable(path, "JSON"):
        content = read_with_retries(path, lambda: read_checked_json(path, root, check=check))
        return kind.model_validate_json(content, strict=True)


def read_or_set_aside(path: Path, kind: type[File]) -> File | None:
    """Read a file, or rename it to `NAME.damaged` with a warning if its content is damaged.

    Args:
        path: The file.
        kind: The model of its content.

    Returns:
        The content; None if there is no file or it is damaged.

    Raises:
        ConfigError: The file cannot be opened.
        UnsafeFileError: It is no regular file. Nothing is renamed.
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """
    if not path_exists(path):
        return None
    try:
        return read(path, kind)
    except UnsafeFileError:
        raise
    except ConfigError as error:
        # The cause tells why: the system could not open the file, or its content is damaged.
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

    @property
    def description(self) -> str:
        """Say where the digest is, for `checked_files.require_unchanged`."""
        return "a list such as summary.json"

    def compare(self, file: BufferedReader) -> Match:
        """Compare an open file with this size and digest; see `checked_files.RecordedDigest`."""
        # A file of another size is not read: it may be huge.
        if os.fstat(file.fileno()).st_size != self.size:
            return Match.CHANGED
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Match.SAME if sha256 == self.sha256 else Match.CHANGED


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hexadecimal digits.

    Args:
        path: The file, which may be a link.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path, root: Path | None = None) -> FileDigest | None:
    """Return size and SHA-256 of a file as it is now, or None if there is no such file.

    Args:
        path: The file.
        root: The run directory, if this is a file of a run. Then no link is followed. Without it,
            the file is one that the user has named, and may be a link.

    Raises:
        UnreadableError: The system cannot read the file, so that nothing is known about it.
        UnsafeFileError: It is a file of a run, and it is no regular file.
    """

    def read_digest() -> FileDigest:
        """Open the file and return its size and SHA-256. This is one attempt of several."""
        with path.open("rb") if root is None else open_file(path, root) as file:
            size = os.fstat(file.fileno()).st_size
            return FileDigest(size=size, sha256=hashlib.file_digest(file, "sha256").hexdigest())

    try:
        return read_with_retries(path, read_digest)
    except (FileNotFoundError, NotADirectoryError):
        return None


def measurement_digests(run: RunDir, attempts: Sequence["Attempt"]) -> dict[str, FileDigest]:
    """Return size and SHA-256 of the files that hold the measurements of a run.

    The summary of a run keeps them, so that a later edit of one of these files is noticed.

    Args:
        run: The run directory.
        attempts: Its attempts, which name their telemetry files.

    Returns:
        The digests of `run.json` and of all telemetry files, by their paths below the run
        directory. A file that does not exist is left out.
    """
    names = [run.record.name]
    for attempt in attempts:
        if attempt.telemetry:
            stem = Path(attempt.telemetry).stem
            names += [f"{run.telemetry.name}/{stem}.h5", f"{run.telemetry.name}/{stem}.json"]
    digests = {}
    for name in names:
        content = digest(run.root / name, run.root)
        if content is not None:
            digests[name] = content
    return digests


def changed_files(folder: Path, recorded: Mapping[str, FileDigest | None] | None) -> list[str]:
    """Return the names of files that are not as they were recorded.

    Args:
        folder: The folder of the files.
        recorded: Size and SHA-256 by the name of the file; `None` for a file that did not exist.
            Summaries of old versions have no digests: nothing is compared then.

    Returns:
        The files that have another content than recorded, or are missing, in the recorded order.

    Raises:
        UnreadableError: The system cannot read a file, so that nothing is known about it.
    """
    names = []
    for name, recorded_digest in (recorded or {}).items():
        if not is_as_recorded(folder / name, recorded_digest, folder):
            names.append(name)
    return names


def is_as_recorded(path: Path, recorded: FileDigest | None, root: Path) -> bool:
    """Return whether a file is as it was recorded.

    Args:
        path: The file.
        recorded: Its size and SHA-256; None if there was no such file.
        root: The run directory, below which no link is followed.

    Raises:
        UnreadableError: The system cannot read the file, so that nothing is known about it.
        UnsafeFileError: It is no regular file.
    """
    if recorded is None:
        return not path_exists(path)
    try:
        read_with_retries(path, lambda: open_checked(path, recorded, root).close())
    except (FileNotFoundError, NotADirectoryError, DamagedFileError):
        return False
    return True


class ListedFiles(RunFile):
    """The part of `summary.json`, and of similar files, that lists result files with digests."""

    files: dict[str, FileDigest] | None = None  # by name; None in files of older versions


def listed_digests(run: RunDir) -> dict[str, FileDigest]:
    """Return the recorded digests of the result files in a directory, by their names.

    They are in the summary of a run or baseline, in `rescore.json` after `virnuc rescore`, or in
    `digests.json` where there is neither.

    Returns:
        An empty dictionary if no digests were recorded: these are results of an older version or
        of another program.

    Raises:
        ConfigError: The file with the digests is damaged.
        UnsafeFileError: It is no regular file.
        UnreadableError: The system cannot read it.
    """
    for path in (run.summary, run.former_summary, run.rescore, run.digests):
        if path_exists(path):
            return read(path, ListedFiles, run.root).files or {}
    return {}


def listed_digest(path: Path) -> FileDigest | None:
    """Return the digest that was recorded, in its own folder, for a result file.

    Args:
        path: The result file.

    Returns:
        None if no digest was recorded for it.

    Raises:
        ConfigError: See `listed_digests`, also for the other errors.
    """
    return listed_digests(RunDir(path.parent)).get(path.name)


class Device(RunFile):
    """One device of a run: a GPU by UUID, or one CPU core."""

    # "GPU-3f2c…" or "cpu-core-1"; on a node of a cluster "GPU-3f2c…@node7"
    id: str = Field(min_length=1)
    kind: Literal["cuda", "cpu"]
    name: str  # as the driver or the processor reports it
    core: int | None = None  # CPU only: the core to which its worker is pinned
    # GPU only: its compute capability, (9, 0) for an H100. None: the driver does not tell it.
    capability: tuple[int, int] | None = None

    @property
    def local(self) -> str:
        """The id of the device on its own machine."""
        return self.id.partition("@")[0]


class InputFile(RunFile):
    """One file of reads: its content when it was read, and what was counted in it."""

    file: str
    reads: Count = 0
    empty: Count = 0  # reads without bases
    skipped: Count = 0  # broken records that were left out
    duplicate_ids: Count = 0  # reads with the id of an earlier read, of this file or one before
    orphans: Count = 0  # reads of a file of pairs without their mates
    not_primary: Count = 0  # secondary and supplementary alignments that were left out
    content: FileDigest | None = None  # None: it came through a pipe


def _redact_email_option(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command line in which the value of `--email` is replaced by `…`.

    The address belongs to a person. No result depends on it. It may be given in two ways:
    `--email=ADDRESS` is one word, `--email ADDRESS` is two. Some programs also accept a shorter
    form of the option, such as `--em`.
    """
    words: list[str] = []
    is_address = False  # the word before was the option without its value
    for word in command:
        option, equals, _ = word.partition("=")
        is_option = len(option) > len("--") and EMAIL_OPTION.startswith(option)
        if is_address:
            words.append("…")
        elif is_option and equals:
            words.append(f"{option}=…")
        else:
            words.append(word)
        # A word that stands in place of the address is never an option, whatever it says.
        is_address = is_option and not equals and not is_address
    return tuple(words)


def _without_email(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run without the mail address for NCBI."""
    return {name: value for name, value in settings.items() if name != "email"}


class Attempt(RunFile):
    """One start of a run, the first or a resume.

    Its measurements are known once it has ended or was found killed.
    """

    started: str
    devices: tuple[Device, ...]
    # Records of older versions may hold a mail address. It is removed when they are read.
    command: Annotated[tuple[str, ...], AfterValidator(_redact_email_option)] = ()
    directory: str = ""  # working directory of the command, from which relative paths start
    wall_s: Seconds | None = None  # of a killed attempt: until its last sample
    worked_s: Seconds = 0.0  # from its first batch to its last commit
    shards: Count = 0  # that it committed
    deaths: tuple[str, ...] = ()  # of workers, a line each
    telemetry: str | None = None  # file name in telemetry/


# Raised by one whenever the same reads, weights and settings give other scores or verdicts than
# before. The changelog says what changed, and by how much. Runs of two such versions are never
# mixed in one directory.
RESULTS_VERSION: Final = 1


class RunRecord(RunFile):
    """`run.json`: what a run was made from, so that nothing foreign is ever mixed into it."""

    schema_version: int = 1
    virnuc_version: str | None = None
    results_version: int = 1  # see `RESULTS_VERSION`; records without it are of the first one
    git_commit: str | None = None
    versions: dict[str, str] = {}
    created: str = "unknown"
    host: str = ""
    # The settings as they were given, without the mail address.
    spec: Annotated[dict[str, Any], AfterValidator(_without_email)] = {}
    model_length: Count | None = None
    widths: dict[str, Count] = {}  # of the two parts of an embedding: dna, protein
    # Of the reads, of each encoder by its name, and of the head; for int8 of its calibration
    fingerprints: dict[str, str]
    # The settings that decide result bytes, `auto` replaced, and the kind of device.
    resolved: dict[str, Any] = {}
    devices: tuple[Device, ...] = ()  # of the newest attempt
    seeds: dict[str, int] = {}
    store: str = ""  # relative to the run directory
    inputs: tuple[InputFile, ...] = ()
    pairs: tuple[tuple[str, str], ...] | None = None  # files of first and second mates, if known
    attempts: tuple[Attempt, ...] = ()


def now() -> str:
    """Return the time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@functools.cache  # the code that this process has imported does not change
def git_commit() -> str | None:
    """Return the commit of the checkout that virnuc runs from.

    Returns:
        All 40 digits of the commit, and a `+` if files differ from it. None if it is not known:
        because virnuc is installed without a checkout, or because git cannot be run or fails. A
        warning says so in the second case.
    """
    checkout = Path(virnuc_core.__file__).resolve().parents[1]
    # `git describe` is the only command that also says whether files differ. It would print the
    # name of a tag; with all tags excluded it falls back to the commit.
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40"]
    command += ["--exclude=*", "--dirty=+"]
    try:
        if not path_exists(checkout / ".git"):
            return None
        result = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=10, check=True
        )
        return result.stdout.strip()
    except subprocess.CalledProcessError as error:
        messages = error.stderr.strip().splitlines()
        reason = messages[0] if messages else str(error)
    except (OSError, subprocess.SubprocessError, UnreadableError) as error:
        reason = str(error)
    log.warning("%s: its commit is not known and not recorded (%s)", checkout, reason)
    return None


@functools.cache
def version_of(package: str, absent: str = "absent") -> str:
    """Return the version of an installed package without importing it.

    Args:
        package: The name of the package.
        absent: The text to return if the package is not installed.
    """
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return absent


def versions() -> dict[str, str]:
    """Return what versions a run computes with.

    Returns:
        Name → version, of Python and the computing packages ("absent" for one that is not
        installed). A machine with a GPU driver adds `driver` and `cuda_driver`, the newest CUDA
        version that the driver supports.
    """
    result = {"python": platform.python_version()}
    for package in ("torch", "numpy", "h5py", "tokenizers", "safetensors", "prefect"):
        result[package] = version_of(package)
    driver = gpus.NVML.driver()
    if driver is not None:
        result["driver"] = driver.version
        result["cuda_driver"] = driver.cuda
    return result


def redact_credentials(word: str) -> str:
    """Remove user names, passwords and queries, which may hold signatures, from an address.

    Args:
        word: A word of a command line.

    Returns:
        The address with `…` in place of what was removed. A word that is no address is returned
        unchanged.
    """
    if "://" not in word:
        return word
    user_or_query = r"(?<=://)\S*@|[?#].*"  # what is before an @, and what follows ? or #
    return re.sub(user_or_query, "…", word)


def new_record(kind: type[File], devices: Sequence[Device], **made_from: Any) -> File:
    """Return the record of a run that starts now. Nothing is written.

    Args:
        kind: Model of the record.
        devices: The devices that the run uses.
        **made_from: The other fields of the record, by name: what the run is made from, such as
            fingerprints of the reads and of the weights.

    Returns:
        The record, with the versions and the host of this process, and with one attempt: the
        command of this process, without passwords, signatures and the mail address.
    """
    started = now()
    first_attempt = Attempt(
        started=started,
        devices=tuple(devices),
        command=tuple(redact(redact_credentials(word)) for word in sys.argv),
        directory=str(Path.cwd()),
    )
    fields = {
        "virnuc_version": virnuc_core.__version__,
        "results_version": RESULTS_VERSION,
        "git_commit": git_commit(),
        "versions": versions(),
        "created": started,
        "host": machine_name(),
        "devices": tuple(devices),
        "attempts": (first_attempt,),
    }
    return kind(**{**fields, **made_from})


class RescoredRun(RunFile):
    """The part of `rescore.json` that says which run was scored again."""

    run: str = ""


def read_record(run: RunDir) -> RunRecord:
    """Read the record of a run.

    Args:
        run: The run directory.

    Returns:
        The content of `run.json`.

    Raises:
        ConfigError: It is absent or cannot be read. Results of `virnuc rescore` have none: the
            error names their run.
    """
    if not path_exists(run.record):
        if path_exists(run.rescore):
            former_run = read(run.rescore, RescoredRun, run.root).run
            raise ConfigError(
                f"{run.root}: holds results of virnuc rescore, without embeddings of its own; "
                f"name the run that was scored again: {former_run}"
            )
        raise ConfigError(f"{run.root}: not a run directory (no readable run.json)")
    return read(run.record, RunRecord)


def identity(record: RunRecord) -> dict[str, str]:
    """Return what a run or baseline computes: fingerprints of reads and weights, model length.

    Args:
        record: The record of the run or baseline.

    Returns:
        Name → value. The model length is left out if the record does not have it.
    """
    result = dict(sorted(record.fingerprints.items()))
    if record.model_length is not None:
        result[MODEL_LENGTH] = str(record.model_length)
    return result


def find_mismatches(
    a: Mapping[str, str], b: Mapping[str, str], *, strict: bool = False
) -> dict[str, tuple[str, str]]:
    """Return the keys whose values differ, with both values.

    Args:
        a: Identity of one run or baseline, as `identity` returns it.
        b: Identity of the other.
        strict: A key that only one of them has counts as a difference.

    Returns:
        Key → the values in `a` and in `b`. The text "nothing" stands for a value that is absent.
    """
    mismatches = {}
    for name in dict.fromkeys((*a, *b)):  # each name once, in order
        is_in_both = name in a and name in b
        if a.get(name) != b.get(name) and (strict or is_in_both):
            mismatches[name] = (a.get(name, "nothing"), b.get(name, "nothing"))
    return mismatches


def changed_inputs(recorded: Sequence[InputFile], files: Sequence[str]) -> list[str]:
    """Describe how files of reads differ from those that a run was made from.

    Files are compared by content, so that a file that was only moved or renamed is not reported.

    Args:
        recorded: The files as the run's record lists them.
        files: Names of the files now.

    Returns:
        One sentence for each file that is changed, missing or new. Each completes a message about
        the run: "x.fa was read then" (by the run, and not now), "y.fa was not" (read then).
    """
    recorded_contents = {file.content for file in recorded}
    contents = {}
    for name in files:
        # Pipes and folders have no content that could be compared.
        contents[name] = digest(Path(name)) if is_regular_file(Path(name)) else None
    # None stands for a content that is not known, so two of them are not the same.
    shared_contents = (recorded_contents & set(contents.values())) - {None}

    missing = {Path(file.file).name for file in recorded if file.content not in shared_contents}
    new = {Path(name).name for name, content in contents.items() if content not in shared_contents}
    # A name that is in both sets is the same file, which had another content then.
    sentences = [f"{name} has other content" for name in sorted(missing & new)]
    if recorded:
        sentences += [f"{name} was read then" for name in sorted(missing - new)]
    sentences += [f"{name} was not" for name in sorted(new - missing)]
    return sentences


def resume_or_refuse(run: RunDir, new: RunRecord) -> RunRecord:
    """Return the record to continue with. Nothing is written.

    A record with damaged content is renamed to `run.json.damaged`; then the run starts anew.

    Args:
        run: The run directory.
        new: The record of the run that is about to start.

    Returns:
        `new` if the directory has no usable record, or if one of the two runs writes no shards.
        Otherwise the record in the directory, which is of the same run, with the devices of `new`
        and with one more attempt.

    Raises:
        RunMismatchError: The directory holds another run.
    """
    recorded_run = read_or_set_aside(run.record, RunRecord)
    if recorded_run is None:
        return new
    mismatches = find_mismatches(_full_identity(recorded_run), _full_identity(new), strict=True)
    if mismatches:
        details = "; ".join(
            f"{name} {_shorten(old)} → {_shorten(current)}"
            for name, (old, current) in mismatches.items()
        )
        raise RunMismatchError(
            f"{run.root} holds another run ({details}); choose another directory or --force"
        )
    if not (keeps_shards(recorded_run) and keeps_shards(new)):
        return new  # there is nothing to go on from, so earlier attempts are no part of this run
    attempts = (*recorded_run.attempts, *new.attempts)
    return recorded_run.model_copy(update={"devices": new.devices, "attempts": attempts})


def keeps_shards(record: RunRecord) -> bool:
    """Return whether a run writes what it computes to shards, so that it can be continued.

    Records of older versions do not tell; their runs all did.
    """
    engine = record.spec.get("engine")
    return not isinstance(engine, dict) or bool(engine.get("commit", True))


def _full_identity(record: RunRecord) -> dict[str, str]:
    """Return what decides the bytes of a run's results: its identity and its resolved settings."""
    settings = {name: str(value) for name, value in sorted(record.resolved.items())}
    return {**identity(record), "results version": str(record.results_version), **settings}


def _shorten(text: str) -> str:
    """Shorten a fingerprint for a message. Texts of at most `MAX_SHOWN_DIGEST` letters stay."""
    if len(text) <= MAX_SHOWN_DIGEST:
        return text
    return text[:12] + "…"


class ProductRate(RunFile):
    """How fast one implementation of matrix products computes the linear layers of an encoder."""

    encoder: EncoderName
    device: str
    product: str  # the implementation and its number format
    # own: our product; library: one of a library, in the same number format; reference: in another
    role: Literal["own", "library", "reference"]
    # None: not measured
    tokens_per_s: Positive | None = None
    joules_per_million_tokens: Positive | None = None
    power_limited: float | None = None  # share of the readings at the power limit, 0 to 1


class ModelFlops(RunFile):
    """FLOPs per token in the linear layers of each encoder, and the ceilings of these layers.

    A ceiling is the rate, in tokens/s, that the linear layers alone sustain with the fastest
    product that was measured in the number format of the run, by device. `products` has all.
    """

    protein_per_token: Annotated[Positive | None, Field(alias=PROTEIN.flops_field)] = None
    dna_per_token: Annotated[Positive | None, Field(alias=DNA.flops_field)] = None
    protein_ceilings: Annotated[dict[str, Positive], Field(alias=PROTEIN.ceiling_field)] = {}
    dna_ceilings: Annotated[dict[str, Positive], Field(alias=DNA.ceiling_field)] = {}
    products: tuple[ProductRate, ...] = ()

    def per_token(self, molecule: Molecule) -> float | None:
        """Return the FLOPs per token of the encoder of this molecule; None if they are unknown."""
        return self.dna_per_token if molecule == "dna" else self.protein_per_token

    @classmethod
    def fastest(cls, products: Sequence[ProductRate]) -> list[ProductRate]:
        """Return the fastest product of each encoder and device in the number format of the run."""
        fastest: dict[tuple[EncoderName, str], ProductRate] = {}
        for rate in products:
            if rate.role == "reference" or rate.tokens_per_s is None:
                continue
            place = (rate.encoder, rate.device)
            best = fastest.get(place)
            if best is None or rate.tokens_per_s > (best.tokens_per_s or 0.0):
                fastest[place] = rate
        return list(fastest.values())

    def ceilings(self, molecule: Molecule) -> dict[str, float]:
        """Return the measured ceilings of the encoder of this molecule, in tokens/s by device."""
        return self.dna_ceilings if molecule == "dna" else self.protein_ceilings


class RunCounts(RunFile):
    """What a run counted and timed of itself. `None`: not recorded."""

    stopped_at_limit: Annotated[bool, BeforeValidator(bool)] = False
    wall_s: Seconds | None = None  # all attempts, without staging
    staging_s: Seconds | None = None
    total_s: Seconds | None = None
    # From the start of the command to its end: what the user waited for (`command_time`). None for
    # runs that no `virnuc predict` has computed, and for those of samples.
    waited_s: Seconds | None = None
    # The nine stages and the other parts of `telemetry.tables.ROWS`. None: fused with another.
    stages: dict[str, Seconds | None] = {}
    n_reads: Count | None = None
    n_chunks: Count | None = None
    n_rows: Count | None = None
    n_uniques: Count | None = None
    fates: dict[str, Count] = {}
    pairs: dict[str, Count] = {}  # by fate; empty for a run of single reads
    # Whatever is recorded there: only a plain false is taken for one.
    resumed: Annotated[bool, BeforeValidator(bool)] = False
    shards_computed: Count | None = None
    shards_reused: Count | None = None
    damaged: tuple[str, ...] = ()  # shards that were unreadable and were computed again
    # Shard → divisor of its token budgets, because the device was short of memory.
    reduced_budgets: dict[str, Count] = {}
    restarts: Count | None = None
    rows_set_aside: Count | None = None  # distinct sequences that killed workers or were not finite
    # Distinct sequences of the computed shards that fp16 decided in place of int8.
    rows_repeated: Count | None = None
    log_errors: Count | None = None  # lines of the workers' logs that report errors
    warnings: tuple[str, ...] = ()
    # What decides whether the verdicts can be trusted; see `answer`. Empty or None: not recorded.
    n_short: Count | None = None  # reads shorter than half of the classifier's length
    model_length: Count | None = None
    origins: dict[str, str] = {}  # of the weights, by the folder of the model
    has_card: bool | None = None  # of the classifier: its training has tested it
    familiarity: SampleFamiliarity | None = None  # with the reads of the classifier's training
    # How the reads differ from those that the classifier was trained on, a sentence each
    remarks: tuple[str, ...] = ()
    # Attempts that ended or were killed. A complete run that is started again adds none.
    attempts: tuple[Attempt, ...] = ()

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own way
    @property
    def sequences_per_hour(self) -> float | None:
        """Reads per hour of the whole run, staging included.

        `None` if the time was not measured, or if it is not that of all of the work: the run was
        resumed, found shards of an earlier run, or stopped at a time limit.
        """
        is_partial = bool(
            self.resumed or self.shards_reused or self.stopped_at_limit or len(self.attempts) > 1
        )
        if is_partial or not self.n_reads or not self.total_s:
            return None
        return 3600.0 * self.n_reads / self.total_s

    @property
    def is_timed(self) -> bool:
        """Return whether the total time is that of the whole work, in one attempt and undisturbed.

        A worker that died and was started again lengthens the run, so its time says nothing about
        the speed of the machine.
        """
        return self.sequences_per_hour is not None and not self.restarts


class RunSummary(RunCounts):
    """`summary.json`, written last.

    A run with this file is complete, unless the file says that it was ended at a time limit.
    """

    schema_version: int = 1
    protein_tokens: Count | None = None  # of the distinct sequences, special tokens included
    threshold: Share | None = None  # viral score from which a read is called viral
    uncertain: tuple[Share, Share] | None = None  # range of scores that get no verdict
    rows_virus: Count | None = None
    chunks_virus: Count | None = None
    chunks_scored: Count | None = None
    telemetry: str | None = None  # file name in telemetry/; None if nothing had to be computed
    devices: tuple[Device, ...] = ()
    workers: tuple[dict[str, Any], ...] = ()
    shards: Count | None = None
    checkpoints: bool = True  # false: the run wrote no shards, so that it has no embeddings
    deaths: tuple[str, ...] | None = None
    flops: ModelFlops | None = None
    files: dict[str, FileDigest] | None = None  # result files by name; None in older versions
    # run.json and the telemetry files, by path below the run directory; None in older versions
    measurements: dict[str, FileDigest] | None = None

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own way
    @property
    def answer(self) -> Answer:
        """Return the result of the run, and what to know before using its figures."""
        return answer_of(self)
