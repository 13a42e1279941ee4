"""Which reads teach a head and which ask it, and how good its answers are.

A head is asked about what it has never met, so what is dealt is a cluster of genomes: those that share a sequence on
either strand, a stated share of their k-mers, or a group that the user names. Of the answers there are metrics of
frames, chunks and reads, with intervals over genomes, curves and thresholds; all take weights, so that resampled
genomes and another share of viruses are the same sums."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
from Bio.Seq import Seq
from Bio.SeqIO.FastaIO import SimpleFastaParser
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_curve, roc_curve
from sklearn.model_selection import StratifiedGroupKFold
from xopen import xopen

from virnuc_core import consensus
from virnuc_core.config import DEFAULT_THRESHOLD, TrainSpec, refuse_unreadable
from virnuc_core.encoders.model_config import Estimate
from virnuc_core.errors import InputError, join_first
from virnuc_core.reads.fingerprint import digests
from virnuc_core.reads.simulate import LABELS, TRUTH_HEADER
from virnuc_core.reads.store import OrfStore
from virnuc_core.runfiles import RunFile

Floats = NDArray[np.float64]
Scored = tuple[pd.DataFrame, Floats]  # rows, and the score of each
Points = tuple[tuple[float, ...], tuple[float, ...]]  # x and y
SIDES: Final = ("train", "validation", "test")
K: Final = (
    21  # bases of a k-mer; a shorter sequence tells nothing of where it comes from and is left out
)
BLOCK: Final = 1 << 14  # uniques looked at together
BASES: Final = 1 << 18  # whose k-mers are looked at together
KEPT_HASHES: Final = 1 << 22  # of all k-mers, about so many are compared
_COMPLEMENT: Final = bytes.maketrans(b"ACGT", b"TGCA")
_CODES: Final = np.full(256, 4, np.uint64)
_CODES[np.frombuffer(b"ACGT", np.uint8)] = range(4)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)  # spreads k-mers over all numbers
SAMPLES: Final = 200  # of the bootstrap
BINS: Final = 10  # of the score, for the calibration error
AT_ONCE: Final = 1 << 21  # weights held at a time
POINTS: Final = 100  # of a curve


class Examples(NamedTuple):
    """The rows that a head is made and judged with, and what was left out and why."""

    rows: pd.DataFrame  # read, chunk, unique, sequence (same DNA on either strand: equal), label, genome, cluster, side
    genomes: (
        pd.DataFrame
    )  # by number: genome (its name), label, cluster, side ("": none of its rows is used)
    left_out: dict[str, int]


def _table(path: Path, wanted: tuple[str, ...], known: tuple[str, ...] = ()) -> pd.DataFrame:
    """The wanted columns of a TAB-separated file as text, by line; lines that repeat others are left out. Errors:
    `InputError` names the line, or both where two contradict each other on what stands in the first column."""
    with refuse_unreadable(path, "table with columns between TABs", InputError):
        table = pd.read_csv(
            path, sep="\t", quoting=3, dtype=str, keep_default_na=False, skip_blank_lines=False
        )
    if not isinstance(
        table.index, pd.RangeIndex
    ):  # pandas takes what stands before the first column for names of rows
        raise InputError(
            "more fields than the header names",
            file=path,
            line=2,
            hint=f"wanted {', '.join(wanted)}",
        )
    if missing := [name for name in wanted if name not in table]:
        raise InputError(f"no column {', '.join(missing)}", file=path, line=1)
    if unknown := [name for name in table if name not in (*wanted, *known)]:
        raise InputError(
            f"unknown column {join_first(unknown)}",
            file=path,
            line=1,
            hint=f"wanted {', '.join(wanted)}",
        )
    table = table[list(wanted)].set_axis(np.arange(2, len(table) + 2))
    table = table.mask(table == "").dropna(how="all")
    if len(bad := table.index[table.isna().any(axis=1)]):
        raise InputError(f"wanted {', '.join(wanted)}", file=path, line=int(bad[0]))
    return _one_each(table, path, wanted[0])


def _one_each(table: pd.DataFrame, path: Path, name: str) -> pd.DataFrame:
    table = table.drop_duplicates()
    for line in table.index[table[name].duplicated()]:
        first = table.index[table[name] == (who := table.at[line, name])][0]
        raise InputError(
            f"{name} {who!r} stands on line {first} with other words", file=path, line=int(line)
        )
    return table


def read_truth(path: Path) -> pd.DataFrame:
    """What each read is known to be: columns `read`, `label` (index into LABELS), `genome`, by line of the file. The
    file is TAB-separated, a label `virus` or `others`. Errors: `InputError` names the line and what is wrong with it:
    unknown columns, lines that contradict each other, too few genomes of a class."""
    table = _table(path, ("read", "label", "genome"), TRUTH_HEADER)
    if len(bad := table.index[~table["label"].isin(LABELS)]):
        raise InputError("wanted a label virus or others", file=path, line=int(bad[0]))
    table["label"] = (table["label"] == LABELS[1]).astype(np.int64)
    enough(_one_each(table[["genome", "label"]], path, "genome")["label"].value_counts(), path)
    return table


def enough(counted: Any, file: Path | str = "", what: str = "") -> None:
    """`InputError` when a class has too few genomes, or clusters of them."""
    for label, name in enumerate(LABELS):
        if (count := counted.get(label, 0)) < len(SIDES):
            problem = f"{count} genomes labelled {name}{what}; {len(SIDES)} are needed"
            raise InputError(f"{problem}: to learn from, to stop by, to test with", file=file)


def lines_of(truth: pd.DataFrame, store: OrfStore) -> NDArray[np.int64]:
    """Place in the truth of each read: by its own id (`r7.2`), by that in the file (`r7`), or by its pair's (`r7/1`).
    Errors: `InputError` names reads that the truth does not know."""
    known, line = pd.Index(truth["read"]), np.full(store.n_reads, -1)
    own, filed = (
        pd.Series(names(0, store.n_reads), dtype=object)
        for names in (store.read_ids, store.original_ids)
    )
    for names in (own, filed, filed.str.replace(r"/[12]$", "", regex=True)):
        line = np.where(line < 0, known.get_indexer(names), line)
    if len(unknown := own[line < 0]):
        raise InputError(
            f"{len(unknown)} reads have no line in the truth file, among them {join_first(unknown)}"
        )
    return line


def choose(store: OrfStore, spec: TrainSpec) -> Examples:
    """The rows to learn from and to be judged by, each genome in its cluster; nothing needs to be embedded for it.
    Errors: `InputError` where truth and reads do not fit each other, or a sequence has both labels."""
    table = read_truth(spec.truth)
    line, rng = lines_of(table, store), np.random.default_rng(spec.seed)
    names = pd.Index(table["genome"].unique())
    genome_of, label_of = names.get_indexer(table["genome"])[line], table["label"].to_numpy()[line]
    read, unique = np.asarray(store.row_read), np.asarray(store.row_unique)
    rows = pd.DataFrame({"read": read, "chunk": np.asarray(store.row_chunk), "unique": unique})
    rows["label"], rows["genome"] = label_of[read], genome_of[read]
    blocks = (
        store.dna(low, min(low + BLOCK, store.n_uniques))
        for low in range(0, store.n_uniques, BLOCK)
    )
    found = [
        digests(min(one, one.translate(_COMPLEMENT)[::-1]) for one in pieces)[:, 0]
        for pieces in blocks
    ]
    rows["sequence"] = pd.factorize(np.concatenate([np.zeros(0, np.uint64), *found]))[0][unique]
    left = {"lines of the truth without a read": len(table) - len(np.unique(line))}
    left["reads without an open frame"] = store.n_reads - store.counts.n_open_reads
    long = np.diff(store.dna_offsets)[unique] >= K
    rows, left[f"frames of fewer than {K} bases"] = rows[long], int((~long).sum())
    mixed = rows[rows.groupby("sequence")["label"].transform("nunique") > 1]  # on whichever strand
    if len(mixed):
        pair = (
            mixed[mixed["sequence"] == mixed["sequence"].iloc[0]]
            .drop_duplicates("label")
            .sort_values("label")
        )
        others, virus = (store.read_ids(one, one + 1)[0] for one in pair["read"])
        same, more = (
            f"reads {virus!r} (virus) and {others!r} (others) hold the same",
            mixed["sequence"].nunique() - 1,
        )
        problem = f"{same} sequence, on either strand, as do {more} more"
        raise InputError(problem, hint="correct the truth or leave reads out")
    enough(rows.groupby("label")["genome"].nunique(), what=" have open frames")
    cluster = clusters(rows, store, names, spec)
    rows = rows.assign(cluster=cluster[rows["genome"]])
    if spec.coding_only is not None and spec.genomes is not None:
        within = coding(rows, store, names, spec.coding_only, spec.genomes)
        rows, left["frames outside coding regions"] = rows[within], int((~within).sum())
    reads = rows.groupby("read").agg(
        label=("label", "first"), genome=("genome", "first"), rows=("label", "size")
    )
    kept = draw(reads, spec.rows_per_class, spec.sampling, rng)
    left[f"reads beyond {spec.rows_per_class:,} frames of a class"] = len(reads) - len(kept)
    rows = rows[rows["read"].isin(kept)].reset_index(drop=True)
    enough(rows.groupby("label")["cluster"].nunique(), what=" remain, kin ones counted once")
    rows["side"] = SIDES.index("test") * (deal(rows, spec.test_share, spec.seed) == 0)
    rest = rows.index[rows["side"] == 0]
    rows.loc[rest, "side"] = (deal(rows.loc[rest], spec.validation_share, spec.seed) == 0).astype(
        np.int64
    )
    known = (
        table.drop_duplicates("genome")[["genome", "label"]]
        .reset_index(drop=True)
        .assign(cluster=cluster, side="")
    )
    known.loc[rows["genome"], "side"] = rows["side"].map(SIDES.__getitem__).to_numpy()
    return Examples(rows, known, {what: count for what, count in left.items() if count})


def draw(
    table: pd.DataFrame, limit: int, sampling: str, rng: np.random.Generator
) -> "pd.Index[Any]":
    """Which of a table's entries (`label`, `genome`, `rows`) to take, so that no class has more than `limit` rows: by
    chance or, `even`, one of each genome in turn, so that a large genome gives no more than it must."""
    table = table.iloc[rng.permutation(len(table))]
    if sampling == "even":
        table = table.iloc[np.argsort(table.groupby("genome").cumcount(), kind="stable")]
    return table.index[table.groupby("label")["rows"].cumsum() <= limit]


def clusters(
    rows: pd.DataFrame, store: OrfStore, names: "pd.Index[Any]", spec: TrainSpec
) -> NDArray[np.int64]:
    """The cluster of each genome: two are kin that share a sequence, a group, or `similarity` of the fewer k-mers.
    K-mers are those of the genome's sequence, where it is given, and of its frames: those of few reads meet no others
    of their genome, or are so few that one repeat in common is a large share."""
    known = {} if spec.genomes is None else read_genomes(spec.genomes)
    texts = [known.get(name, "").encode() for name in names]
    whole = pd.DataFrame(
        {"unique": store.n_uniques + np.arange(len(names)), "genome": np.arange(len(names))}
    )
    owners = pd.concat([rows[["unique", "genome"]].drop_duplicates(), whole])
    offsets = np.append(
        store.dna_offsets, store.dna_offsets[-1] + np.cumsum([len(one) for one in texts])
    )
    letters = np.concatenate([store.dna_bytes[:], np.frombuffer(b"".join(texts), np.uint8)])
    sketch = owners.merge(_sketch(letters, offsets), on="unique")
    edges = [
        _kin(rows["genome"], rows["sequence"], 0.0),
        _kin(sketch["genome"], sketch["hash"], spec.similarity),
    ]
    if spec.groups is not None:
        group = _table(spec.groups, ("genome", "group")).set_index("genome")["group"]
        if len(absent := names.difference(group.index)):
            raise InputError(f"no line for genome {join_first(absent)}", file=spec.groups)
        edges.append(_kin(np.arange(len(names)), group[names], 0.0))
    a, b = map(np.concatenate, zip(*edges, strict=True))
    graph = coo_array((np.ones(len(a)), (a, b)), shape=(len(names), len(names)))
    found: NDArray[np.int64] = connected_components(graph, directed=False)[1].astype(np.int64)
    return found


def _kin(genome: Any, item: Any, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of genomes that have an item in common, and at least this share of the items of the one with fewer."""
    held = pd.DataFrame({"genome": genome, "item": pd.factorize(item)[0]}).drop_duplicates()
    items = csr_array((np.ones(len(held)), (held["genome"], held["item"])))
    shared, size = (items @ items.T).tocoo(), np.diff(items.indptr)
    a, b = shared.coords
    kin = shared.data >= share * np.minimum(size[a], size[b])
    return a[kin], b[kin]


def _sketch(letters: NDArray[np.uint8], offsets: NDArray[np.int64]) -> pd.DataFrame:
    """`unique` and `hash` of the k-mers of sequences end to end, the lesser of both strands; of many by minhash."""
    most = ~np.uint64(0) // np.uint64(1 + len(letters) // KEPT_HASHES)
    found, powers = list[pd.DataFrame](), np.uint64(4) ** np.arange(K, dtype=np.uint64)
    for low in range(0, len(letters) - K + 1, BASES):
        words = sliding_window_view(_CODES[letters[low : low + BASES + K - 1]], K)
        hashed = np.minimum(words @ powers, (np.uint64(3) - words[:, ::-1]) @ powers) * _MIX
        hashed ^= hashed >> np.uint64(32)
        at = np.flatnonzero((words < 4).all(axis=1) & (hashed * _MIX <= most))
        first, last = (
            np.searchsorted(offsets, low + at + more, "right") - 1 for more in (0, K - 1)
        )
        same = first == last
        found.append(pd.DataFrame({"unique": first[same], "hash": hashed[at[same]]}))
    return pd.concat(found or [pd.DataFrame(columns=["unique", "hash"])]).drop_duplicates()


def deal(rows: pd.DataFrame, share: float, seed: int) -> NDArray[np.int64]:
    """The fold of each row, [rows]: all have about this share of each class's rows, and no cluster is in two. The first
    one, which is what is held back, is the one with most clusters of the class that has fewer in it: a cluster that
    holds much of a class would be alone in its fold."""
    fewest = int(rows.groupby("label")["cluster"].nunique().min())
    folds = StratifiedGroupKFold(
        max(2, min(round(1 / share), fewest)), shuffle=True, random_state=seed
    )
    found = np.empty(len(rows), np.int64)
    for number, (_, held) in enumerate(folds.split(rows, rows["label"], rows["cluster"])):
        found[held] = number
    counts = rows.assign(fold=found).groupby(["fold", "label"])["cluster"].nunique()
    if len(counts) < 2 * folds.n_splits:
        raise InputError(
            "genomes are kin across both classes, and cannot be dealt to sides; see --similarity"
        )
    order = np.argsort(-counts.groupby("fold").min().to_numpy(), kind="stable")
    return np.argsort(order)[found]


def coding(
    rows: pd.DataFrame, store: OrfStore, names: "pd.Index[Any]", gff: Path, genomes: Path
) -> NDArray[np.bool_]:
    """Whether each row's protein is part of the translation of a coding region (CDS) of its genome: [rows]."""
    letters, texts = read_genomes(genomes), dict.fromkeys(names, "")
    with refuse_unreadable(gff, "GFF", InputError):
        table = pd.read_csv(
            gff, sep="\t", comment="#", header=None, names=range(9), dtype=str, quoting=3
        )
        for name, low, high, strand, phase in table.loc[
            table[2] == "CDS", [0, 3, 4, 6, 7]
        ].itertuples(index=False):
            region = Seq(letters.get(name, "")[int(low) - 1 : int(high)])
            frame = (region.reverse_complement() if strand == "-" else region)[int(phase) :]  # type: ignore[no-untyped-call]
            texts[name] = f"{texts.get(name, '')}*{frame[: len(frame) // 3 * 3].translate()}"
    pairs = zip(rows["unique"].tolist(), names[rows["genome"]], strict=True)
    return np.array(
        [store.protein(unique, unique + 1)[0].decode() in texts[name] for unique, name in pairs],
        bool,
    )


def read_genomes(path: Path) -> dict[str, str]:
    """The sequences of a FASTA file, plain or compressed, by the first word of their headers."""
    with refuse_unreadable(path, "FASTA", InputError), xopen(path, "rt", threads=0) as file:
        records = SimpleFastaParser(file)  # type: ignore[no-untyped-call]
        return {title.split()[0]: letters.upper() for title, letters in records if title.split()}


class Figures(RunFile):
    """One line of the table: who scored what, and how well."""

    method: str  # head, or a baseline
    asked: str  # cross-validation, test, or the bases of cut fragments
    level: str
    prevalence: float  # share of viral ones that the metrics hold for
    natural: bool  # that of the rows themselves
    rows: int
    clusters: int  # of genomes
    metrics: dict[str, Estimate | None]  # None where one is not defined


def by_level(rows: pd.DataFrame, score: Floats) -> dict[str, pd.DataFrame]:
    """Return the scores that a prediction would give the frames, their chunks and their reads.

    Args:
        rows: Frames with their read, chunk, label and cluster.
        score: P(virus) of each frame.

    Returns:
        For "frame", "chunk" and "read" a table with the columns score, label and cluster.
    """
    frames = rows[["read", "chunk", "label", "cluster"]].assign(score=score)
    first_label_and_cluster = {"label": ("label", "first"), "cluster": ("cluster", "first")}
    chunks = frames.groupby(["read", "chunk"]).agg(
        max_score=("score", "max"), min_score=("score", "min"), **first_label_and_cluster
    )
    chunks["score"] = consensus.chunk_scores(
        chunks["max_score"].to_numpy(), chunks["min_score"].to_numpy()
    )
    reads = chunks.groupby("read").agg(**first_label_and_cluster)
    read_of_chunk = np.unique(chunks.index.get_level_values("read"), return_inverse=True)[1]
    # The mean is linear: the mean of scores is the score of the mean margin.
    reads["score"] = consensus.mean_margins(chunks["score"].to_numpy(), read_of_chunk, len(reads))
    return {"frame": frames, "chunk": chunks, "read": reads}


def measure(table: pd.DataFrame, weights: Floats) -> pd.DataFrame:
    """The metrics, a column each, by row of `weights` [samples, rows of the table]; NaN where one is not defined."""
    order = np.argsort(-table["score"].to_numpy(np.float64), kind="stable")
    score, virus = table["score"].to_numpy(np.float64)[order], table["label"].to_numpy()[order] == 1
    weights = weights[:, order]
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)  # of equal scores
    hit, false = (np.cumsum(weights * kind, axis=1)[:, last] for kind in (virus, ~virus))
    missed, called = score - virus, weights * consensus.is_viral(score, DEFAULT_THRESHOLD)
    bins = np.eye(BINS)[np.minimum((score * BINS).astype(int), BINS - 1)]
    with np.errstate(invalid="ignore", divide="ignore"):
        recall, wrong = hit / hit[:, -1:], false / false[:, -1:]
        steps = np.diff(recall, axis=1, prepend=0)
        found = {
            "auroc": (np.diff(wrong, axis=1, prepend=0) * (recall - steps / 2)).sum(axis=1),
            "auprc": np.nansum(steps * hit / (hit + false), axis=1),
            "precision": called @ virus / called.sum(axis=1),
            "recall": called @ virus / (weights @ virus),
            "f1": 2 * (called @ virus) / (called.sum(axis=1) + weights @ virus),
            "brier": weights @ missed**2 / weights.sum(axis=1),
            "ece": np.abs((weights * missed) @ bins).sum(axis=1) / weights.sum(axis=1),
        }
    return pd.DataFrame(found)


def judge(
    asked: str, method: str, scored: Sequence[Scored], prevalence: float, seed: int = 0
) -> list[Figures]:
    """Lines of the table for each level and both prevalences; over several scorings of the same rows their means."""
    lines, levels = [], [by_level(*one) for one in scored]
    for level in levels[0]:
        tables, rng = [one[level] for one in levels], np.random.default_rng(seed)
        own, of = float(tables[0]["label"].mean()), tables[0].groupby("cluster")["label"].mean()
        of = of.where(
            of.isin((0, 1)), 0.5
        )  # clusters of both classes, which --groups may make, are their own kind
        times = np.ones(
            (1 + SAMPLES, int(of.index.max()) + 1)
        )  # that each cluster is drawn, within its kind
        for value in of.unique():
            members = of.index[of == value]
            times[1:, members] = rng.multinomial(
                len(members), [1 / len(members)] * len(members), SAMPLES
            )
        for share in (None, prevalence):
            parts = np.array_split(times, 1 + len(times) * len(tables[0]) // AT_ONCE)
            found = [
                pd.concat([measure(table, _weights(table, part, share)) for part in parts])
                for table in tables
            ]
            means = sum(found[1:], found[0]) / len(found)
            metrics = {name: _interval(mean.to_numpy(), of) for name, mean in means.items()}
            told = {
                "rows": len(tables[0]),
                "clusters": len(of),
                "natural": share is None,
                "metrics": metrics,
            }
            lines.append(
                Figures(method=method, asked=asked, level=level, prevalence=share or own, **told)
            )
    return lines


def _weights(table: pd.DataFrame, times: Floats, share: float | None) -> Floats:
    """Of each row, as often as its cluster was drawn; with a share of viral rows that each sample is brought to."""
    weights, virus = times[:, table["cluster"]], table["label"].to_numpy() == 1
    if share is not None:
        own = (weights @ virus / weights.sum(axis=1))[:, None]
        weights *= np.where(virus, share / own, (1 - share) / (1 - own))
    return weights


def _interval(found: Floats, of: "pd.Series[float]") -> Estimate | None:
    """The first of them, and between what 95 % of all lie; anything where a class has one cluster alone."""
    known = np.clip(found[np.isfinite(found)], 0, 1)
    told = len(known) > 0 and min((of < 1).sum(), (of > 0).sum()) > 1
    low, high = np.quantile(known, (0.025, 0.975)).tolist() if told else (0, 1)
    return Estimate(value=known[0], low=low, high=high) if np.isfinite(found[0]) else None


def thresholds(
    table: pd.DataFrame, shares: Sequence[float], prevalence: float
) -> dict[float, float]:
    """The least score from which no more than each share of what is called viral is not, where there is one. One more
    false read than there are is counted, above all others: of few reads nobody can tell a small share."""
    label, score, own = (
        np.append(table["label"], 0),
        np.append(table["score"], 2.0),
        table["label"].mean(),
    )
    weights = np.where(label == 1, prevalence / own, (1 - prevalence) / (1 - own))
    precision, _, at = precision_recall_curve(label, score, sample_weight=weights)
    held = {share: at[precision[:-1] >= 1 - share] for share in shares}
    return {share: float(scores[0]) for share, scores in held.items() if len(scores)}


def false_share(table: pd.DataFrame, threshold: float, prevalence: float) -> float | None:
    """The share that is not viral of what a threshold calls viral; None where it calls nothing so."""
    weights = _weights(table, np.ones((1, int(table["cluster"].max()) + 1)), prevalence)[0]
    called, virus = consensus.is_viral(table["score"].to_numpy(), threshold), table["label"] == 1
    return float(weights[called & ~virus].sum() / weights[called].sum()) if called.any() else None


def curves(table: pd.DataFrame) -> dict[str, Points]:
    """ROC, precision and recall, and reliability at the prevalence of the table itself."""
    label, score = table["label"], table["score"]
    wrong, hits, _ = roc_curve(label, score)
    precision, recall, _ = precision_recall_curve(label, score)
    real, said = calibration_curve(label, score, n_bins=BINS)
    found = {
        "ROC": (wrong, hits),
        "precision and recall": (recall, precision),
        "reliability": (said, real),
    }
    thin = {
        name: np.unique(np.linspace(0, len(x) - 1, POINTS).astype(int))
        for name, (x, _) in found.items()
    }
    return {
        name: (tuple(x[thin[name]].tolist()), tuple(y[thin[name]].tolist()))
        for name, (x, y) in found.items()
    }


def histogram(table: pd.DataFrame) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reads of both classes, others first, by score, in equal bins from 0 to 1."""
    of = (table.loc[table["label"] == label, "score"] for label in (0, 1))
    others, virus = (tuple(np.histogram(scores, 2 * BINS, (0, 1))[0].tolist()) for scores in of)
    return others, virus
