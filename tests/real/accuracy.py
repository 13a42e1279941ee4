"""Compare virnuc with simple methods and with other tools, on reads of genomes that were kept aside.

`python -m tests.real.accuracy WHEELS DATA OUT` cuts reads of three lengths, embeds them, and writes
the tables to OUT/accuracy.md. The arguments are those of `kinds`. The genomes are dealt into folds,
and each read is judged by methods that learnt from the other folds:

- virnuc: a head on embeddings of real ESM-2 8M, as `virnuc train` makes it;
- logistic regression on 4-mers: of the frames that virnuc sees, or of the whole read;
- similarity: the best match among the genomes of the other folds, by `blastn` and by
  `diamond blastx` (left out if the program is not on the PATH).

What each method says is a file OUT/methods/NAME.LENGTH.tsv, and a method whose file is there is not
asked again. So you add another tool by its file. It is tab-separated, with the columns `read` (the
id in OUT/LENGTH/reads.fasta.gz), `score` (larger means more viral; empty if the tool gives none),
`viral` (1 or 0, at the tool's own threshold) and `cpu_ms` (processor time of a read, the same in
each line; may be left out). A read without a line was not given to the tool, and does not count.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import torch
from Bio.Seq import translate
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from virnuc_core import consensus
from virnuc_core.config import DEFAULT_THRESHOLD, TrainSpec
from virnuc_core.encoders.model_config import HeadShape, read_shape
from virnuc_core.reads.simulate import LABELS
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.training.evaluation import by_level, cluster_share, weighted_metrics
from virnuc_core.training.features import load_features
from virnuc_core.training.fitting import HEAD_METHOD, fit_methods
from virnuc_core.training.splits import Examples, assign_training_sides, choose_examples
from virnuc_core.training.truth import OTHERS, TEST_SIDE, VIRUS

from .genomes import COMPLEMENT
from .heads import deal_folds
from .kinds import READS_OF_KIND, read_records, weights_of_drawn_genomes, write_reads_of_kinds
from .material import argument_parser, spec_of
from .training import embed, make_models

LENGTHS: Final = (150, 300, 500)
FOLDS: Final = 4
SAMPLES: Final = 500  # of the bootstrap
VIRAL_KINDS: Final = ("RNA virus", "DNA virus", "phage")
K: Final = 4
MIN_PEPTIDE: Final = 20  # amino acids between two stop codons that are worth a search
MAX_EVALUE: Final = "1e-3"
BLASTN: Final = "blastn"
DIAMOND: Final = "diamond"
VIRNUC: Final = "virnuc"
OF_FRAMES: Final = "4-mers of frames"
OF_READS: Final = "4-mers of reads"
# Methods of fitting.fit_methods, by their names here.
FITTED: Final = {VIRNUC: HEAD_METHOD, OF_FRAMES: "logistic regression on 4-mers"}


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a method says of all reads of one length."""

    scores: NDArray[np.float64]  # larger means more viral, NaN if it gives none, [reads]
    is_called: NDArray[np.bool_]  # viral at its own threshold, [reads]
    is_asked: NDArray[np.bool_]  # [reads]
    cpu_ms: float | None = None  # of a read, without the training


@dataclass(frozen=True, slots=True)
class Asked:
    """The reads of one length, and the folds of their genomes."""

    folder: Path
    table: pd.DataFrame  # read, label, kind, source, fold, has_frame, letters
    genomes: pd.DataFrame  # genome, label, fold

    def is_learnt(self, fold: int) -> NDArray[np.bool_]:
        """Return which reads may be learnt from to judge those of a fold, [reads]."""
        is_learnt: NDArray[np.bool_] = self.table["fold"].to_numpy() != fold
        return is_learnt


# --- Reads and virnuc -----------------------------------------------------------------------------


def read_sample(reads: Path, run: RunDir) -> tuple[Asked, Examples]:
    """Deal the genomes into folds, and return the reads and their frames.

    Args:
        reads: The beginning of the names of the files with reads and tables.
        run: The run with the embeddings.
    """
    store = OrfStore.open(run.store)
    examples = choose_examples(store, spec_of(reads))
    genomes = examples.genomes.assign(fold=deal_folds(examples.genomes, FOLDS, seed=0))
    truth = pd.read_csv(f"{reads}.truth.tsv", sep="\t")
    number_of_genome = pd.Index(genomes["genome"])
    genome_of_read = number_of_genome.get_indexer(pd.Index(truth["genome"]))
    table = truth[["read"]].copy()
    for column in ("label", "kind", "source", "fold"):
        table[column] = genomes[column].to_numpy()[genome_of_read]
    letters = dict(read_records(Path(f"{reads}.fasta.gz")))
    table["letters"] = table["read"].map(letters)
    table["has_frame"] = table.index.isin(examples.rows["read"])
    return Asked(reads.parent, table, genomes), examples


def ask_frames(
    asked: Asked, examples: Examples, run: RunDir, models: Path, spec: TrainSpec
) -> dict[str, Verdicts]:
    """Judge each read by methods on its open frames that never met its genome: `FITTED`.

    A read without an open frame has no verdict: it is not called viral, and ranks last.

    Args:
        asked: The reads, and the folds of their genomes.
        examples: The frames of the reads.
        run: The run with the embeddings.
        models: The models directory of the embeddings.
        spec: The settings of the training.
    """
    old_shape = read_shape(models / "head" / "config.json", HeadShape)
    shape = old_shape.model_copy(update={"hidden": spec.hidden})
    features = load_features(run, OrfStore.open(run.store), examples.rows)
    folds = asked.genomes["fold"].to_numpy()[features.rows["genome"]]
    scores_of_method = {name: np.empty(len(folds)) for name in FITTED}
    with threadpool_limits(1), torch.random.fork_rng(devices=[]):
        for fold in range(FOLDS):
            tested = np.flatnonzero(folds == fold)
            others = np.flatnonzero(folds != fold)
            sides = np.full(len(folds), TEST_SIDE)
            rows = features.rows.iloc[others]
            sides[others] = assign_training_sides(rows, spec.validation_share, fold)
            scorers = fit_methods(features, sides, shape, spec, fold).scorers
            for name, method in FITTED.items():
                scores_of_method[name][tested] = scorers[method](features.select(tested))
    verdicts = {}
    for name, row_scores in scores_of_method.items():
        scored = by_level(features.rows, row_scores)["read"]
        scores = np.zeros(len(asked.table))
        scores[scored.index] = scored["score"]
        is_called = asked.table["has_frame"].to_numpy() & consensus.is_viral(
            scores, DEFAULT_THRESHOLD
        )
        verdicts[name] = Verdicts(scores, is_called, _all_reads(asked))
    return verdicts


# --- Simple methods -------------------------------------------------------------------------------


def ask_four_mers(asked: Asked) -> Verdicts:
    """Judge each read by a logistic regression on 4-mers, learnt from reads of the other folds."""
    start_s = _cpu_seconds()
    shares = np.array([_four_mer_shares(letters) for letters in asked.table["letters"]])
    cpu_s = _cpu_seconds() - start_s
    labels = asked.table["label"].to_numpy()
    scores = np.empty(len(labels))
    for fold in range(FOLDS):
        is_learnt = asked.is_learnt(fold)
        regression = LogisticRegression(C=0.1, max_iter=1_000, class_weight="balanced")
        model = make_pipeline(StandardScaler(), regression)
        model.fit(shares[is_learnt], labels[is_learnt])
        start_s = _cpu_seconds()
        scores[~is_learnt] = model.predict_proba(shares[~is_learnt])[:, VIRUS]
        cpu_s += _cpu_seconds() - start_s
    is_called = scores >= DEFAULT_THRESHOLD
    return Verdicts(scores, is_called, _all_reads(asked), 1000 * cpu_s / len(scores))


def _four_mer_shares(letters: bytes) -> NDArray[np.float64]:
    """Return the share of each 4-mer in a read and its reverse complement, [256]."""
    counts = np.zeros(4**K)
    for strand in (letters, letters.translate(COMPLEMENT)[::-1]):
        digits = np.frombuffer(
            strand.translate(bytes.maketrans(b"ACGT", bytes(range(4)))), np.uint8
        )
        codes = np.zeros(len(digits) - K + 1, np.int64)
        for offset in range(K):
            codes = 4 * codes + digits[offset : offset + len(codes)]
        counts += np.bincount(codes, minlength=4**K)
    shares: NDArray[np.float64] = counts / counts.sum()
    return shares


def ask_similarity(asked: Asked, program: str) -> Verdicts:
    """Judge each read by its best match among the genomes of the other folds.

    A read is viral if it is more similar to a virus than to any other genome. The score is the
    difference of the two bit scores. A read without a match has the score 0 and is not viral.

    Args:
        asked: The reads and genomes.
        program: `BLASTN`, or `DIAMOND`, which compares the translated read with all peptides
            between stop codons of the genomes.
    """
    folder = asked.folder / program
    folder.mkdir(exist_ok=True)
    sequences = dict(read_records(asked.folder / "reads.genomes.fasta.gz"))
    label_of_genome = asked.genomes["label"].to_numpy()
    if program == DIAMOND:
        texts = [_peptides(sequences[name]) for name in asked.genomes["genome"]]
    else:
        texts = [[sequences[name]] for name in asked.genomes["genome"]]
    scores = np.zeros(len(asked.table))
    cpu_s = 0.0
    for fold in range(FOLDS):
        database = folder / f"genomes-{fold}.fasta"
        with database.open("wb") as file:
            for number in np.flatnonzero(asked.genomes["fold"] != fold):
                for part, text in enumerate(texts[number]):
                    file.write(b">%d_%d\n%b\n" % (number, part, text))
        queries = folder / f"reads-{fold}.fasta"
        tested = np.flatnonzero(~asked.is_learnt(fold))
        lines = [b">%d\n%b\n" % (read, asked.table["letters"].iloc[read]) for read in tested]
        queries.write_bytes(b"".join(lines))
        start_s = _cpu_seconds(resource.RUSAGE_CHILDREN)
        matches = _search(program, database, queries)
        cpu_s += _cpu_seconds(resource.RUSAGE_CHILDREN) - start_s
        genome_of_match = matches["genome"].str.partition("_")[0].astype(int).to_numpy()
        matches["label"] = label_of_genome[genome_of_match]
        best = matches.pivot_table("bits", "read", "label", "max", fill_value=0.0)
        best = best.reindex(columns=range(len(LABELS)), fill_value=0.0)
        scores[best.index] = best[VIRUS] - best[OTHERS]
    return Verdicts(scores, scores > 0, _all_reads(asked), 1000 * cpu_s / len(scores))


def _search(program: str, database: Path, queries: Path) -> pd.DataFrame:
    """Search reads in a database, and return read, genome and bit score of each match."""
    output = queries.with_suffix(".tsv")
    index: list[str | Path]
    search: list[str | Path]
    if program == DIAMOND:
        index = ["diamond", "makedb", "--quiet", "--in", database, "--db", database]
        search = ["diamond", "blastx", "--quiet", "--sensitive", "--threads", "1"]
        search += ["--query", queries, "--db", database, "--out", output]
        search += ["--evalue", MAX_EVALUE, "--outfmt", "6", "qseqid", "sseqid", "bitscore"]
    else:
        index = ["makeblastdb", "-dbtype", "nucl", "-in", database]
        search = ["blastn", "-task", "blastn", "-query", queries, "-db", database, "-out", output]
        search += ["-evalue", MAX_EVALUE, "-outfmt", "6 qseqid sseqid bitscore"]
    subprocess.run(index, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(search, check=True)
    return pd.read_csv(
        output,
        sep="\t",
        names=["read", "genome", "bits"],
        dtype={"read": int, "genome": str, "bits": float},
    )


def _peptides(letters: bytes) -> list[bytes]:
    """Return what a genome can code for between stop codons, in six frames."""
    peptides = []
    for strand in (letters, letters.translate(COMPLEMENT)[::-1]):
        for frame in range(3):
            codons = strand[frame : frame + (len(strand) - frame) // 3 * 3].decode()
            for peptide in translate(codons).split("*"):
                if len(peptide) >= MIN_PEPTIDE:
                    peptides.append(peptide.encode())
    return peptides


def _all_reads(asked: Asked) -> NDArray[np.bool_]:
    """Return that all reads are asked, [reads]."""
    return np.ones(len(asked.table), bool)


def _cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """Return the processor time of this process, or of its children that have ended."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


# --- Files of verdicts ----------------------------------------------------------------------------


def write_verdicts(path: Path, asked: Asked, verdicts: Verdicts) -> None:
    """Write what a method says, see the top of this module."""
    table = asked.table[["read"]].assign(
        score=verdicts.scores, viral=verdicts.is_called.astype(int), cpu_ms=verdicts.cpu_ms
    )
    table[verdicts.is_asked].to_csv(path, sep="\t", index=False)


def read_verdicts(path: Path, asked: Asked) -> Verdicts:
    """Read what a method says, see the top of this module."""
    lines = pd.read_csv(path, sep="\t", dtype={"read": str}).set_index("read")
    unknown = lines.index.difference(pd.Index(asked.table["read"]))
    if len(unknown):
        raise ValueError(f"{path}: reads that are not in the sample, such as {unknown[0]}")
    lines_of_reads = lines.reindex(asked.table["read"])
    cpu_ms = None
    if "cpu_ms" in lines and lines["cpu_ms"].notna().any():
        cpu_ms = float(lines["cpu_ms"].max())
    return Verdicts(
        scores=lines_of_reads["score"].to_numpy(np.float64),
        is_called=lines_of_reads["viral"].eq(1).to_numpy(),
        is_asked=asked.table["read"].isin(lines.index).to_numpy(),
        cpu_ms=cpu_ms,
    )


# --- Tables ---------------------------------------------------------------------------------------


def write_table(asked: Asked, verdicts: dict[str, Verdicts]) -> str:
    """Return a table in Markdown: a row for each figure, a column for each method.

    Args:
        asked: The reads.
        verdicts: What each method says, by its name.
    """
    table = asked.table
    weights = weights_of_drawn_genomes(table, SAMPLES)
    has_frame = table["has_frame"].to_numpy()
    is_virus = table["label"].eq(VIRUS).to_numpy()
    rows: dict[str, list[str]] = {}
    for method in verdicts.values():
        is_framed = has_frame & method.is_asked
        cells = {
            "reads asked": f"{method.is_asked.sum():,}",
            "AUROC, all reads": auroc_cell(table, weights, method.scores, method.is_asked),
            "AUROC, reads with an open frame": auroc_cell(table, weights, method.scores, is_framed),
            "recall, all viral reads": share_cell(table, method, is_virus),
            "false positives, all others": share_cell(table, method, ~is_virus),
        }
        for kind in READS_OF_KIND:
            is_kind = table["kind"].eq(kind).to_numpy()
            name = "recall" if kind in VIRAL_KINDS else "false positives"
            n_genomes = table.loc[is_kind, "source"].nunique()
            row = f"{name}: {kind} (genomes: {n_genomes}, reads: {is_kind.sum():,})"
            cells[row] = share_cell(table, method, is_kind)
        milliseconds = "" if method.cpu_ms is None else f"{method.cpu_ms:.2g}"
        cells["processor time of a read, ms"] = milliseconds
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    lines = [f"| | {' | '.join(verdicts)} |", f"| --- |{' --- |' * len(verdicts)}"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def auroc_cell(
    table: pd.DataFrame,
    weights: NDArray[np.float64],
    scores: NDArray[np.float64],
    is_asked: NDArray[np.bool_],
) -> str:
    """Return the AUROC of some reads, and its 95 % interval over genomes drawn within their kind.

    Args:
        table: The reads, with the column label.
        weights: How often the genome of each read was drawn; once each in row 0, [draws, reads].
        scores: What a method says; all NaN if it gives no scores, [reads].
        is_asked: Which reads are asked, [reads].
    """
    if np.isnan(scores[is_asked]).any():
        return "no score"
    n_asked = int(is_asked.sum())
    ranks = rankdata(scores[is_asked]) / n_asked  # only the order counts for an AUROC
    ranked = table[is_asked].assign(score=ranks)
    asked_weights = weights[:, is_asked]
    values = weighted_metrics(ranked, asked_weights)["auroc"]
    auroc, *drawn = values
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"{auroc:.3f} ({low:.3f} to {high:.3f})"


def share_cell(table: pd.DataFrame, method: Verdicts, is_wanted: NDArray[np.bool_]) -> str:
    """Return which share of some reads is called viral, and its 95 % interval over genomes."""
    is_counted = is_wanted & method.is_asked
    called = method.is_called[is_counted].astype(float)
    sources = table.loc[is_counted, "source"].to_numpy()
    estimate = cluster_share(called, np.ones(len(called)), sources, seed=0)
    if estimate is None:
        return "no reads"
    if len(np.unique(sources)) == 1:
        return f"{estimate.value:.2f}"  # one genome says nothing of others
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def compare(wheels: Path, data: Path, out: Path, length: int) -> str:
    """Return the table of one length.

    Args:
        wheels: The folder that `make real-data` fills.
        data: The folder with the genomes of other kinds.
        out: The folder to write to.
        length: Bases of a read, and of a chunk of the head.
    """
    folder = out / str(length)
    folder.mkdir(exist_ok=True)
    reads = folder / "reads"
    if not Path(f"{reads}.truth.tsv").exists():
        write_reads_of_kinds(wheels, data, folder, length)
    models = out / "models" / "real"
    if not models.exists():
        models.parent.mkdir()
        make_models(wheels, models.parent)
    run = RunDir(folder / "run")
    if not (run.root / "train.json").exists():
        embed(reads, models, run.root, length)
    asked, examples = read_sample(reads, run)

    methods = out / "methods"
    methods.mkdir(exist_ok=True)
    if not all((methods / f"{name}.{length}.tsv").exists() for name in FITTED):
        for name, verdicts in ask_frames(asked, examples, run, models, spec_of(reads)).items():
            write_verdicts(methods / f"{name}.{length}.tsv", asked, verdicts)
    others = {OF_READS: partial(ask_four_mers, asked)}
    for program in (BLASTN, DIAMOND):
        if shutil.which(program):
            others[program] = partial(ask_similarity, asked, program)
    for name, judge in others.items():
        path = methods / f"{name}.{length}.tsv"
        if not path.exists():
            write_verdicts(path, asked, judge())
    paths = {path.name.split(".")[0]: path for path in sorted(methods.glob(f"*.{length}.tsv"))}
    own = [name for name in (*FITTED, OF_READS, BLASTN, DIAMOND) if name in paths]
    names = [*own, *(name for name in paths if name not in own)]
    return write_table(asked, {name: read_verdicts(paths[name], asked) for name in names})


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the methods at each length, and write the tables."""
    parser = argument_parser()
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    text = ""
    for length in options.lengths:
        table = compare(options.wheels, options.data, options.out, length)
        text += f"## Reads of {length} bases\n\n{table}\n"
        (options.out / "accuracy.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
