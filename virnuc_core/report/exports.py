"""What other tools read of a run: MultiQC's custom content, Kraken's two tables, and verdicts on contigs."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from virnuc_core.config import DEFAULT_THRESHOLD
from virnuc_core.engine.shards import read_scores, store_of
from virnuc_core.errors import ConfigError
from virnuc_core.pipeline import read_summary
from virnuc_core.reads.subsets import read_columns
from virnuc_core.reads.translate import chunk
from virnuc_core.rundir import RunDir, atomic_file, require_absent, write_text_atomically
from virnuc_core.runfiles import read_record

VIRUSES: Final = 10239  # in NCBI's taxonomy
BINS: Final = 50  # of the histogram of scores
PIECE_READS: Final = 65_536
READ: Final = ("id", "length", "open_frames", "fate", "viral_score")
CONTIGS: Final = "id\tlength\tchunks\tscored_chunks\tviral_chunks\tscored_bases\tviral_bases\tviral_score\tlabel\n"
SECTIONS: Final = Path(__file__).with_name("templates") / "multiqc.json"


def export(run: RunDir, out: Path, sample: str, *, force: bool = True) -> tuple[Path, ...]:
    """Write `virnuc_*_mqc.json` for MultiQC, both tables of Kraken under nf-core's names and `contigs.tsv` to `out`,
    and give them. Errors: `ConfigError` for an incomplete run, or files there without `force`; of store and shards."""
    if (summary := read_summary(run)) is None or not run.reads_table.is_file():
        raise ConfigError(f"{run.root}: holds no complete run; finish it first")
    fates, scores = Counter(summary.fates), np.zeros(BINS, np.int64)
    stem, sections = (
        re.sub(r"[^\w.-]", "_", sample),
        json.loads(SECTIONS.read_text(encoding="utf-8")),
    )
    lines, report = out / f"{stem}.kraken2.classifiedreads.txt", out / f"{stem}.kraken2.report.txt"
    files = (
        out / "contigs.tsv",
        lines,
        report,
        *(out / f"virnuc_{name}_mqc.json" for name in sections),
    )
    require_absent(*files, force=force)
    with atomic_file(lines) as table:
        table.touch()
        for reads in read_columns(
            run.reads_table, dict.fromkeys(READ, "str"), chunksize=PIECE_READS
        ):
            found = (reads.fate == "viral").to_numpy()
            taxon = pd.Series(np.where(found, str(VIRUSES), "0"), reads.index, dtype=str)
            _add(
                table,
                np.where(found, "C", "U"),
                reads.id,
                taxon,
                reads.length,
                taxon + ":" + reads.open_frames,
            )
            scores += np.histogram(pd.to_numeric(reads.viral_score).dropna(), BINS, (0.0, 1.0))[0]
    total, viral = fates.total(), fates["viral"]
    with atomic_file(report) as table:
        clade, own = np.array([total - viral, viral, viral]), np.array([total - viral, 0, viral])
        percent = [f"{100 * count / max(total, 1):6.2f}" for count in clade]
        _add(
            table,
            percent,
            clade,
            own,
            ["U", "R", "D"],
            [0, 1, VIRUSES],
            ["unclassified", "root", "  Viruses"],
        )
    shares = {"viral_percent": viral, "scored_percent": int(scores.sum())}
    general = {"viral": viral, "reads": total} | {
        name: 100 * n / max(total, 1) for name, n in shares.items()
    }
    middles = {(place + 0.5) / BINS: count for place, count in enumerate(scores.tolist())}
    data: dict[str, Mapping[Any, float]] = {"general": general, "fates": fates, "scores": middles}
    for path, (name, section) in zip(files[3:], sections.items(), strict=True):
        write_text_atomically(
            path, json.dumps(section | {"data": {sample: data[name]}}, indent=1) + "\n"
        )
    _write_contigs(
        run, files[0], DEFAULT_THRESHOLD if summary.threshold is None else summary.threshold
    )
    return files


def _write_contigs(run: RunDir, path: Path, threshold: float) -> None:
    """Each read of several chunks with their vote: the mean margin as in reads.tsv, weighed by the bases that the next
    chunk does not hold; they add up to the read. One with a failed row has no vote."""
    store, (scores, failed) = store_of(run, read_record(run)), read_scores(run)
    with atomic_file(path) as table:
        table.write_text(CONTIGS)
        for low in range(0, store.n_reads, PIECE_READS):
            reads = slice(low, min(low + PIECE_READS, store.n_reads))
            rows = slice(*np.searchsorted(store.row_read, (reads.start, reads.stop)))
            unique = np.asarray(store.row_unique[rows])
            found = pd.DataFrame(scores[unique].astype(np.float64), columns=["others", "virus"])
            found["read"], found["chunk"] = (
                np.asarray(store.row_read[rows]) - low,
                np.asarray(store.row_chunk[rows]),
            )
            found["lost"] = failed[unique]
            best = found.groupby(["read", "chunk"], as_index=False).max()
            length, counts = (
                np.asarray(column[reads], np.int64)
                for column in (store.read_length, store.read_chunks)
            )
            cut = chunk(length, store.model_length)
            ends = np.where(np.diff(cut.read, append=-1) == 0, np.roll(cut.start, -1), cut.end)
            best["scored"] = best.virus.notna().astype(
                np.int64
            )  # a chunk of which every row failed is not
            best["bases"] = (ends - cut.start)[
                (np.cumsum(counts) - counts)[best.read] + best.chunk
            ] * best.scored
            best["viral"] = (best.virus >= best.others).astype(np.int64)  # a tie is a virus
            best["viral_bases"], best["margin"] = (
                best.bases * best.viral,
                best.bases * (best.virus - best.others),
            )
            sums = best.groupby("read").sum().reindex(range(len(length)), fill_value=0)[counts > 1]
            voted = (sums.scored > 0) & (sums.lost == 0)
            score = (0.5 + sums.margin / sums.bases / 2).astype(np.float32).where(voted)
            label = np.where(voted, np.where(score >= threshold, "virus", "others"), "")
            ids = np.array(store.read_ids(reads.start, reads.stop), dtype=object)[counts > 1]
            told = (sums[name] for name in ("scored", "viral", "bases", "viral_bases"))
            _add(table, ids, length[counts > 1], counts[counts > 1], *told, score, label)


def _add(table: Path, *columns: object) -> None:
    """Write columns at the end of a table as TAB-separated lines."""
    lines = pd.DataFrame({str(place): np.asarray(column) for place, column in enumerate(columns)})
    lines.to_csv(
        table, mode="a", sep="\t", header=False, index=False, quoting=3, lineterminator="\n"
    )
