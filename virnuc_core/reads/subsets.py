"""Some of the reads as they stand in the input: a sample with the same distribution of lengths, or those of a verdict.

For a sample the reads are gone through twice: once for their lengths, once to draw. One is drawn from each of as many
equal stretches of the reads in order of length; some 20 bytes a read are held in memory, however long the reads."""

import csv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.fast_parser import ParseLog
from virnuc_core.reads.pairs import pair_batches
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sources import (
    STDIN,
    Inputs,
    can_be_read_twice,
    create_reads_file,
    find_inputs,
)
from virnuc_core.reads.stage import StageSummary
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import MATE
from virnuc_core.rundir import MATE_SUFFIXES, RunDir, require_absent

_BINS: Final = 50  # of a histogram, at most


class SampleSummary(NamedTuple):
    """What was drawn, and how far its lengths are from those of the whole."""

    reads_before: int
    reads_after: int
    bins: (
        pd.DataFrame
    )  # reads of `shortest` to `longest` bases: how many there were `before`, and are `after`
    distance: float  # largest difference of the two cumulative length distributions (Kolmogorov–Smirnov), 0 to 1

    def lines(self) -> list[str]:
        """Both histograms and their distance, for people."""
        rows = [f"{'length':>15} {'before':>12} {'share':>8} {'after':>12} {'share':>8}"]
        for shortest, longest, before, after in self.bins.to_numpy().tolist():
            span = str(shortest) if shortest == longest else f"{shortest}-{longest}"
            shares = before / max(self.reads_before, 1), after / max(self.reads_after, 1)
            rows.append(
                f"{span:>15} {before:>12,} {shares[0]:>8.2%} {after:>12,} {shares[1]:>8.2%}"
            )
        return [
            *rows,
            f"{self.reads_after:,} of {self.reads_before:,} reads; distance of lengths {self.distance:.4f}",
        ]


def sample(source: str, n: int, out: Path, seed: int = 0, *, force: bool = False) -> SampleSummary:
    """Draw `n` reads of a file or a folder, or all there are, into `out`, as they stand, in their order; gzipped if its
    name ends in .gz. Errors: `InputError` for reads that cannot be used, or cannot be read twice, or FASTA mixed with
    FASTQ; `ConfigError` for `n` below 1, a name that belies the format, or an `out` that is there without `force`."""
    if n < 1:
        raise ConfigError(f"{n} reads were asked for; ask for 1 or more")
    readable_twice((source,))
    files = find_inputs((source,)).files
    if any(out.resolve() == Path(name).resolve() for name in files):
        raise ConfigError(f"{out}: is what is drawn from; choose another name")
    require_absent(out, force=force)
    lengths, read = _lengths(files, out), 0
    drawn = np.argsort(lengths, kind="stable")[choose_reads(len(lengths), n, seed)]
    picked = np.zeros(len(lengths), bool)
    picked[drawn] = True
    with create_reads_file(out) as target:
        for batch in parse(files, ParseLog()):
            for i in np.flatnonzero(picked[read : read + len(batch)]).tolist():
                target.write(batch.records[i])
            read += len(batch) if batch.part is None or batch.part.is_last else 0
    kinds, before = np.unique(lengths, return_counts=True)
    after = np.bincount(np.searchsorted(kinds, lengths[drawn]), minlength=len(kinds))
    shares = (one.cumsum() / max(1, one.sum()) for one in (before, after))
    distance = np.abs(next(shares) - next(shares)).max(initial=0.0)
    at = np.flatnonzero(
        np.diff((before.cumsum() - before) * _BINS // max(1, len(lengths)), prepend=-1)
    )
    columns = (
        kinds[at],
        np.maximum.reduceat(kinds, at),
        *(np.add.reduceat(one, at) for one in (before, after)),
    )
    bins = pd.DataFrame(dict(zip(("shortest", "longest", "before", "after"), columns, strict=True)))
    return SampleSummary(len(lengths), len(drawn), bins, float(distance))


def choose_reads(total: int, wanted: int | None, seed: int) -> NDArray[np.int64]:
    """`wanted` reads that stand for all: one at random from each of as many equal stretches of the input, ascending.
    A fixed step would follow any pattern of the input (mates in turn, tiles of a flow cell)."""
    if wanted is None or wanted >= total:
        return np.arange(total, dtype=np.int64)
    bounds = np.arange(wanted + 1, dtype=np.int64) * total // wanted
    return np.random.default_rng(seed).integers(bounds[:-1], bounds[1:])


def _lengths(files: tuple[str, ...], out: Path) -> NDArray[np.uint32]:
    """Bases of each read. Errors: `InputError`, `ConfigError` for mixed formats, or another than the name says."""
    held, form = [np.zeros(0, np.uint32)], None
    for batch in parse(files, ParseLog()):
        if form not in (None, batch.format):
            raise InputError(
                "FASTA and FASTQ are mixed",
                file=files[batch.file_index],
                hint="sample them one by one",
            )
        form = batch.format
        if batch.part is None:
            held.append(batch.bases.lengths.astype(np.uint32))
        elif batch.part.is_last:
            held.append(np.array([batch.part.n_bases_before + len(batch.bases.data)], np.uint32))
    named = out.name.removesuffix(".gz").rpartition(".")[2].lower()
    claims = {"fq": "fastq", "fastq": "fastq", "fa": "fasta", "fna": "fasta", "fasta": "fasta"}.get(
        named
    )
    if form is not None and claims not in (None, form):
        raise ConfigError(
            f"{out}: the reads are {form.upper()}; name the file .{form} or .{form}.gz"
        )
    return np.concatenate(held)


def readable_twice(reads: Sequence[str]) -> None:
    """`InputError` for what `reads` names and is gone once it was read, so that none of it can be picked."""
    for name in find_inputs(tuple(reads)).files:
        if not can_be_read_twice(name):
            what = f"{'standard input' if name == STDIN else name} cannot be read twice"
            raise InputError(
                what, hint="put the reads into a file to have some of them written out"
            )


def write_reads(
    run: RunDir, store: OrfStore, staging: StageSummary, verdicts: Sequence[str] = ("viral",)
) -> int:
    """Write the reads that `reads.tsv` calls viral, or all others, or each to files of its own, as they stand in the
    input; their number. FASTQ reads go to `viral.fastq.gz`, FASTA reads to `viral.fasta.gz`, empty where none is viral;
    the same input gives the same bytes. Of pairs `pairs.tsv` tells: mates go to `viral_R1` and `viral_R2`, in step,
    reads without a mate to `viral_orphans`. Errors: `InputError` for input that is not what was staged, or is piped."""
    readable_twice(staging.files)
    kinds, goes_to = _kinds(run, store, verdicts)
    read, inputs = 0, Inputs(staging.files, (), staging.pairs)
    log = ParseLog(staging.on_error, read_group=staging.read_group)
    with ExitStack() as stack:
        out: dict[str, BinaryIO] = {}
        begun = False  # a wanted read of which parts are still to come
        for batch in chain(pair_batches(inputs, log), parse(inputs.singles, log)):
            part, last = batch.part, read + len(batch)
            same = last <= store.n_reads and store.original_ids(read, last) == [
                batch.id(i) for i in range(len(batch))
            ]
            if part is not None and part.is_dropped and not begun:
                continue  # nor was it staged
            if not same and (part is None or part.is_last):
                raise InputError(
                    f"reads {read + 1} to {last} are not those that were staged",
                    hint="run predict again",
                )
            begun = same and part is not None and not part.is_last and bool(goes_to[read] >= 0)
            names = [f"{kind}.{batch.format}.gz" for kind in kinds]
            if names[0] not in out:
                out |= {
                    name: stack.enter_context(create_reads_file(run.root / name)) for name in names
                }
            for i in np.flatnonzero((goes_to[read:last] >= 0) & same).tolist():
                out[names[goes_to[read + i]]].write(batch.records[i])
            read = last if part is None or part.is_last else read
        if read != store.n_reads:
            raise InputError(
                f"{read} reads are in the input, {store.n_reads} were staged",
                hint="run predict again",
            )
        for one in staging.by_file:
            if one.content not in (None, log.contents[one.file]):
                raise InputError(
                    "no longer what was staged", file=one.file, hint="run predict again"
                )
        for path in run.reads_of(verdicts):
            if path.name not in out:
                path.unlink(missing_ok=True)  # of an earlier run with other reads
    return int((goes_to >= 0).sum())


def _kinds(run: RunDir, store: OrfStore, verdicts: Sequence[str]) -> tuple[list[str], NDArray[Any]]:
    """Kinds of files for reads of these verdicts, and of each read the place of its kind, -1 for none: [n_reads]."""
    second = (np.asarray(store.read_flags) & MATE) > 0
    lines, path = np.cumsum(~second), run.pairs_table if store.paired else run.reads_table
    viral = read_table(path, {"fate": "str"})["fate"].to_numpy() == "viral"
    if len(viral) != (most := lines.max(initial=0)):
        raise InputError(f"{len(viral)} lines for {most} reads", file=path)
    kind = (
        np.where(second, 1, np.where(np.append(second[1:], False), 0, 2))
        if store.paired
        else np.zeros_like(lines)
    )
    mates = MATE_SUFFIXES if store.paired else ("",)
    firsts = [
        verdicts.index(one) * len(mates) if one in verdicts else -1 for one in ("nonviral", "viral")
    ]
    first = np.array(firsts)[viral[lines - 1].astype(np.int64)]
    return [f"{verdict}{mate}" for verdict in verdicts for mate in mates], np.where(
        first < 0, -1, first + kind
    )


def read_columns(path: Path, columns: Mapping[str, str], **more: Any) -> Any:
    """What pandas reads of a TAB-separated table: these columns, by name and type, with text as it stands."""
    taken: dict[str, Any] = {
        "usecols": list(columns),
        "dtype": dict(columns),
        "quoting": csv.QUOTE_NONE,
    }
    # a read may be called NA
    return pd.read_csv(
        path, sep="\t", keep_default_na=False, encoding_errors="surrogateescape", **taken, **more
    )


def read_table(path: Path, columns: Mapping[str, str]) -> pd.DataFrame:
    """Some columns of `reads.tsv` or `pairs.tsv`, by name and type. Errors: `InputError`."""
    try:
        found: pd.DataFrame = read_columns(path, columns, na_values={"viral_score": [""]})
        return found
    except ValueError as error:  # pandas' own errors are such
        why = f"not a table of reads ({str(error).splitlines()[0]})"
        raise InputError(why, file=path, hint="run predict again") from error
