"""A subset of reads with the same distribution of lengths, drawn by a seed, from input of any size.

The reads are gone through twice: once to count lengths, once to draw, so that every length bin gives exactly its share
and nothing but the chosen places is held in memory.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.parse import ParseLog, parse
from virnuc_core.reads.sources import STDIN, Source, find_inputs, reads_file


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Reads of `shortest` to `longest` bases: how many there were, how many were drawn."""

    shortest: int
    longest: int
    before: int
    after: int = 0


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """What was drawn, and how far its lengths are from those of the whole."""

    reads_before: int
    reads_after: int
    bins: tuple[LengthBin, ...]
    distance: float  # largest difference of the two cumulative length distributions (Kolmogorov–Smirnov), 0 to 1

    def lines(self) -> list[str]:
        """Both histograms and their distance, for people."""
        rows = [f"{'length':>15} {'before':>12} {'share':>8} {'after':>12} {'share':>8}"]
        for part in self.bins:
            span = str(part.shortest) if part.shortest == part.longest else f"{part.shortest}-{part.longest}"
            before, after = part.before / max(self.reads_before, 1), part.after / max(self.reads_after, 1)
            rows.append(f"{span:>15} {part.before:>12,} {before:>8.2%} {part.after:>12,} {after:>8.2%}")
        return [*rows, f"{self.reads_after:,} of {self.reads_before:,} reads; distance of lengths {self.distance:.4f}"]


def sample(source: str, n: int, out: Path, seed: int = 0) -> SampleSummary:
    """Draw `n` reads of a file, a folder or standard input (`-`) into `out`, as they stand, in their order.

    `out` holds the format of the input, gzipped if its name ends in .gz. Asked for more reads than there are, it gives
    all. Errors: `InputError` for reads that cannot be used, or FASTA mixed with FASTQ; `ConfigError` for `n` below 1 or
    a name that belies the format.
    """
    if n < 1:
        raise ConfigError(f"{n} reads were asked for; ask for 1 or more")
    with ExitStack() as held:
        files = find_inputs((source,)).files
        if source == STDIN:  # kept for the second reading
            out.parent.mkdir(parents=True, exist_ok=True)
            kept = held.enter_context(tempfile.NamedTemporaryFile(dir=out.parent, prefix=".sample."))
            with Source.open(STDIN) as stream:
                while piece := stream.read(1 << 20):
                    kept.write(piece)
                if stream.damage is not None:
                    raise stream.damage
            kept.flush()
            files = (kept.name,)
        if any(out.resolve() == Path(name).resolve() for name in files):
            raise ConfigError(f"{out}: is what is drawn from; choose another name")
        lengths = _count_lengths(files, out)
        bins = _bins(lengths)
        quotas = _quotas(np.array([part.before for part in bins], np.int64), n)
        bins = [replace(part, after=quota) for part, quota in zip(bins, quotas.tolist(), strict=True)]
        drawn = _draw(files, bins, out, np.random.default_rng(seed))
    distance = 0.0
    if drawn:
        ordered = sorted(lengths)
        shares = [np.cumsum([counts[length] for length in ordered]) / counts.total() for counts in (lengths, drawn)]
        distance = float(np.abs(shares[0] - shares[1]).max())
    return SampleSummary(lengths.total(), drawn.total(), tuple(bins), distance)


def _count_lengths(files: tuple[str, ...], out: Path) -> Counter[int]:
    lengths: Counter[int] = Counter()
    form = None
    for batch in parse(files, ParseLog()):
        if form not in (None, batch.form):
            raise InputError("FASTA and FASTQ are mixed", file=files[batch.file], hint="sample them one by one")
        form = batch.form
        values, counts = np.unique(batch.bases.lengths, return_counts=True)
        lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    named = out.name.removesuffix(".gz").rpartition(".")[2].lower()
    claims = {"fq": "fastq", "fastq": "fastq", "fa": "fasta", "fna": "fasta", "fasta": "fasta"}.get(named)
    if form is not None and claims not in (None, form):
        raise ConfigError(f"{out}: the reads are {form.upper()}; name the file .{form} or .{form}.gz")
    return lengths


def _bins(lengths: Counter[int]) -> list[LengthBin]:
    """Bins of about equally many reads; a length that occurs often is a bin of its own."""
    enough = lengths.total() / 50
    bins: list[LengthBin] = []
    for length, count in sorted(lengths.items()):
        last = bins[-1] if bins else None
        if last is None or last.before >= enough or count >= enough:
            bins.append(LengthBin(length, length, count))
        else:
            bins[-1] = replace(last, longest=length, before=last.before + count)
    return bins


def _quotas(before: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """How many to draw of each bin: its share of `n`, the remainders to those that miss most by rounding down."""
    total = int(before.sum())
    if total == 0:
        return np.zeros(0, np.int64)
    n = min(n, total)
    quotas, left = np.divmod(before * n, total)
    order = np.argsort(-left, kind="stable")
    quotas[order[: n - int(quotas.sum())]] += 1
    return quotas


def _draw(files: tuple[str, ...], bins: list[LengthBin], out: Path, rng: np.random.Generator) -> Counter[int]:
    """Write the chosen reads; gives the lengths written."""
    chosen = [np.sort(rng.choice(part.before, part.after, replace=False, shuffle=False)) for part in bins]
    upper = np.array([part.longest for part in bins])
    seen = np.zeros(len(bins), np.int64)
    drawn: Counter[int] = Counter()
    with reads_file(out) as target:
        for batch in parse(files, ParseLog()):
            lengths = batch.bases.lengths
            bin_of = np.searchsorted(upper, lengths)
            picked = np.zeros(len(batch), bool)
            for number in np.unique(bin_of).tolist():
                members = np.flatnonzero(bin_of == number)
                first, last = np.searchsorted(chosen[number], (seen[number], seen[number] + len(members)))
                picked[members[chosen[number][first:last] - seen[number]]] = True
                seen[number] += len(members)
            for i in np.flatnonzero(picked).tolist():
                target.write(batch.text[i])
                drawn[int(lengths[i])] += 1
    return drawn
