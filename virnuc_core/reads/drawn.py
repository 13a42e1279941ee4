"""Reads that a flow makes before it uses them: a subset of the user's reads, or synthetic reads.

They are written once, to the folder `drawn` of the output directory. A record beside them says what
they were made from. A later start of the same command finds them and does not make them again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from virnuc_core.errors import ConfigError
from virnuc_core.input_names import STDIN, is_remote
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.sources import sample_name
from virnuc_core.reads.subsets import sample
from virnuc_core.rundir import DRAWN_FOLDER, RunDir
from virnuc_core.runfiles import (
    FileDigest,
    RunFile,
    digest,
    is_as_recorded,
    read_or_set_aside,
    write,
)
from virnuc_core.system_errors import is_regular_file


class DrawnRecord(RunFile):
    """The record of drawn reads: what was asked for, the file, and a line about its content."""

    request: dict[str, str]
    file: FileDigest
    description: str


@dataclass(frozen=True, slots=True)
class DrawnReads:
    """Reads that were made for a flow.

    Attributes:
        path: The file.
        description: A line on how many reads it has.
        reused: It was there before.
    """

    path: Path
    description: str
    reused: bool


def draw_subset(run: RunDir, source: str, n_reads: int, seed: int, *, force: bool) -> DrawnReads:
    """Draw reads from a file, so that their lengths are distributed as in the whole file.

    Args:
        run: The output directory, which this process holds.
        source: A file of reads on this machine.
        n_reads: How many reads to draw. If there are fewer, all are taken.
        seed: Equal seeds draw equal reads.
        force: Draw again, even if the subset is there.

    Raises:
        ConfigError: The source is no file that can be read twice.
        InputError: The reads cannot be used.
    """
    if source == STDIN or is_remote(source) or not is_regular_file(Path(source).resolve()):
        raise ConfigError(
            f"subset: {source} is no file of single reads on this machine, which is read twice; "
            "use virnuc sample"
        )
    # Format and packing are told by the content of a file, so its name needs no ending for them.
    path = run.root / DRAWN_FOLDER / f"{sample_name((source,))}.subset.gz"
    stat = Path(source).stat()
    request = {
        "source": str(Path(source).resolve()),
        "source_bytes": str(stat.st_size),
        "source_changed_ns": str(stat.st_mtime_ns),
        "subset": str(n_reads),
        "seed": str(seed),
    }

    def draw() -> str:
        """Write the subset, and return a line about it."""
        summary = sample(source, n_reads, path, seed, force=True)
        return (
            f"{summary.reads_after:,} of {summary.reads_before:,} reads drawn; "
            f"distance of lengths {summary.distance:.4f}"
        )

    return _make_once(run, path, request, draw, force=force)


def simulate_reads(run: RunDir, n_reads: str, seed: int, *, force: bool) -> DrawnReads:
    """Make labelled synthetic reads, with the table of what each is beside them.

    Args:
        run: The output directory, which this process holds.
        n_reads: How many, or the name of a size such as `small`.
        seed: Equal seeds give equal reads.
        force: Make them again, even if they are there.

    Raises:
        ConfigError: There is no such size.
    """
    spec = SimulateSpec.model_validate({"reads": n_reads, "seed": seed})
    path = run.root / DRAWN_FOLDER / f"simulated-{spec.reads}.fastq.gz"

    def make() -> str:
        """Write the reads, and return a line about them."""
        summary = simulate(spec, path, force=True)
        return f"{spec.reads:,} synthetic reads, {summary.viral_reads:,} viral"

    request = {"simulate": str(spec.reads), "seed": str(seed)}
    return _make_once(run, path, request, make, force=force)


def _make_once(
    run: RunDir, path: Path, request: dict[str, str], make: Callable[[], str], *, force: bool
) -> DrawnReads:
    """Make a file of reads, unless it is there and was made from the same.

    Args:
        run: The output directory.
        path: The file.
        request: What decides its content.
        make: Writes it, and returns a line about it.
        force: Make it even if it is there.
    """
    record_path = path.with_name(f"{path.name}.json")
    record = None if force else read_or_set_aside(record_path, DrawnRecord)
    if (
        record is not None
        and record.request == request
        and is_as_recorded(path, record.file, run.root)
    ):
        return DrawnReads(path, record.description, reused=True)
    path.parent.mkdir(exist_ok=True)
    description = make()
    content = digest(path, run.root)
    assert content is not None  # it has just been written
    write(record_path, DrawnRecord(request=request, file=content, description=description))
    return DrawnReads(path, description, reused=False)
