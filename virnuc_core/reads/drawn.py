"""Reads that a flow makes before it uses them: a subset of the user's reads, or synthetic reads.

They are written once, to the folder `drawn` of the output directory. A record beside them says what
they were made from. A later start of the same command finds them and does not make them again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field

from virnuc_core.config import INPUT_FIELDS, ReadsSpec
from virnuc_core.errors import ConfigError
from virnuc_core.input_names import STDIN, is_remote
from virnuc_core.reads.sampling import sample
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.sources import find_inputs, sample_name
from virnuc_core.rundir import DRAWN_FOLDER, RunDir
from virnuc_core.runfiles import (
    FileDigest,
    RunFile,
    digest,
    is_as_recorded,
    read_or_set_aside,
    write,
)
from virnuc_core.system_errors import is_folder, is_regular_file

# Settings of reading that decide which reads a subset is drawn of, and which are mates.
_READING_SETTINGS: Final = ("interleaved", "pairs", "on_error", "read_group")


class DrawnRecord(RunFile):
    """The record of drawn reads: what was asked for, the files, and a line about their content."""

    request: dict[str, str]
    # By name. Records of older versions do not have them.
    files: dict[str, FileDigest] = Field(default_factory=dict)
    # The files by their use, as in `ReadsSpec`.
    reads: tuple[str, ...] = ()
    mates_1: tuple[str, ...] = ()
    mates_2: tuple[str, ...] = ()
    interleaved: bool = False
    description: str


@dataclass(frozen=True, slots=True)
class DrawnReads:
    """Reads that were made for a flow.

    Attributes:
        reads: The files, and which of them hold mates.
        description: A line on how many reads there are.
        reused: They were there before.
    """

    reads: ReadsSpec
    description: str
    reused: bool

    @property
    def path(self) -> Path:
        """The file with the reads; of pairs in two files, the one with the first mates."""
        return Path(self.reads.all_inputs[0])


@dataclass(frozen=True, slots=True)
class _MadeReads:
    """Reads that have just been written, and a line about them."""

    reads: ReadsSpec
    description: str


def draw_subset(
    run: RunDir, source: ReadsSpec, n_reads: int, seed: int, *, force: bool
) -> DrawnReads:
    """Draw reads, so that their lengths are distributed as in all reads. Mates stay together.

    Args:
        run: The output directory, which this process holds.
        source: Files and folders of reads on this machine, and which of them hold mates.
        n_reads: How many reads to draw. If there are fewer, all are taken.
        seed: Equal seeds draw equal reads.
        force: Draw again, even if the subset is there.

    Raises:
        ConfigError: The source cannot be read twice, or `n_reads` is 1 and the reads are pairs.
        InputError: The reads cannot be used.
    """
    for name in source.all_inputs:
        if name == STDIN or is_remote(name) or not _is_file_or_folder(Path(name)):
            raise ConfigError(
                f"subset: {name} is no file or folder on this machine, which is read twice; "
                "put the reads into a file"
            )
    # Format and packing are told by the content of a file, so its name needs no ending for them.
    path = run.root / DRAWN_FOLDER / f"{sample_name(source.all_inputs)}.subset.gz"
    request = {"subset": str(n_reads), "seed": str(seed)} | _describe_source(source)

    def draw() -> _MadeReads:
        """Write the subset, and return its files with a line about it."""
        summary = sample(source, n_reads, path, seed, force=True)
        return _MadeReads(
            summary.reads, f"{summary.counts()} drawn; distance of lengths {summary.distance:.4f}"
        )

    return _make_once(run, path, request, draw, force=force)


def _is_file_or_folder(path: Path) -> bool:
    """Return whether a path is a regular file or a folder, also through a link."""
    return is_folder(path) or is_regular_file(path.resolve())


def _describe_source(source: ReadsSpec) -> dict[str, str]:
    """Return what decides the content of a subset beside its number and seed.

    These are the files with their sizes and times, and how they are read.

    Raises:
        InputError: A file does not exist.
    """
    files = find_inputs(source.all_inputs).files
    description = {}
    for number, file in enumerate(files, 1):
        stat = Path(file).stat()
        suffix = "" if number == 1 else f"_{number}"
        description[f"source{suffix}"] = str(Path(file).resolve())
        description[f"source{suffix}_bytes"] = str(stat.st_size)
        description[f"source{suffix}_changed_ns"] = str(stat.st_mtime_ns)
    settings = source.model_dump(mode="json", include=set(_READING_SETTINGS))
    for name in _READING_SETTINGS:
        if settings[name] != ReadsSpec.model_fields[name].default:
            description[name] = str(settings[name])
    if source.mates_1:
        description["mates"] = str(len(source.mates_1))  # the first files; see `all_inputs`
    return description


def simulate_reads(
    run: RunDir, n_reads: str, seed: int, *, pairs: bool = False, force: bool
) -> DrawnReads:
    """Make labelled synthetic reads, with the table of what each is beside them.

    Args:
        run: The output directory, which this process holds.
        n_reads: How many, or the name of a size such as `small`.
        seed: Equal seeds give equal reads.
        pairs: Make pairs of mates, in two files.
        force: Make them again, even if they are there.

    Raises:
        ConfigError: There is no such size.
    """
    spec = SimulateSpec.model_validate({"reads": n_reads, "seed": seed, "pairs": pairs})
    path = run.root / DRAWN_FOLDER / f"simulated-{spec.reads}.fastq.gz"

    def make() -> _MadeReads:
        """Write the reads, and return their files with a line about them."""
        summary = simulate(spec, path, force=True)
        return _MadeReads(
            summary.reads,
            f"{summary.n_reads:,} synthetic reads, {summary.viral_reads:,} viral",
        )

    request = {"simulate": str(spec.reads), "seed": str(seed)}
    if pairs:
        request["pairs"] = "two files"
    return _make_once(run, path, request, make, force=force)


def _make_once(
    run: RunDir,
    path: Path,
    request: dict[str, str],
    make: Callable[[], _MadeReads],
    *,
    force: bool,
) -> DrawnReads:
    """Make files of reads, unless they are there and were made from the same.

    Args:
        run: The output directory.
        path: The file; of pairs in two files, their common name.
        request: What decides their content.
        make: Writes them, and returns their names with a line about them.
        force: Make them even if they are there.
    """
    record_path = path.with_name(f"{path.name}.json")
    record = None if force else read_or_set_aside(record_path, DrawnRecord)
    if record is not None and record.request == request and _are_as_recorded(record, run):
        return DrawnReads(_reads_of(record, run), record.description, reused=True)
    path.parent.mkdir(exist_ok=True)
    made = make()
    names_by_use = {use: _names_of(getattr(made.reads, use)) for use in INPUT_FIELDS}
    record = DrawnRecord(
        request=request,
        files={path.name: _digest_of(path, run) for path in map(Path, made.reads.all_inputs)},
        interleaved=made.reads.interleaved,
        description=made.description,
        **names_by_use,
    )
    write(record_path, record)
    return DrawnReads(made.reads, made.description, reused=False)


def _names_of(files: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of files without their folder."""
    return tuple(Path(file).name for file in files)


def _digest_of(path: Path, run: RunDir) -> FileDigest:
    """Return the size and SHA-256 of a file that has just been written."""
    content = digest(path, run.root)
    assert content is not None
    return content


def _are_as_recorded(record: DrawnRecord, run: RunDir) -> bool:
    """Return whether all files of a record are there and unchanged."""
    folder = run.root / DRAWN_FOLDER
    return bool(record.files) and all(
        is_as_recorded(folder / name, content, run.root) for name, content in record.files.items()
    )


def _reads_of(record: DrawnRecord, run: RunDir) -> ReadsSpec:
    """Return the files of a record as inputs."""
    folder = run.root / DRAWN_FOLDER
    files_by_use = {
        use: tuple(str(folder / name) for name in getattr(record, use)) for use in INPUT_FIELDS
    }
    return ReadsSpec(**files_by_use, interleaved=record.interleaved)
