"""Two results held against each other: labels and scores joined by id, embeddings by cosine, files byte for byte.

Results are joined by id, never by position, and an id that only one side has is a disagreement. Files of the original
(two columns in the consensus file), of its successor (four columns) and run directories are all read. Results of
different heads, model lengths or reads are refused when the run records say so."""

import filecmp
import resource
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core import validation
from virnuc_core.config import refuse_unreadable
from virnuc_core.engine.loader import slices
from virnuc_core.errors import InputError, RunMismatchError
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import read_columns, read_table
from virnuc_core.report.model import BASELINE
from virnuc_core.report.raw_files import COMPARISON
from virnuc_core.rundir import EXACT_FILES, RunDir, atomic_file
from virnuc_core.runfiles import MODEL_LENGTH, RunRecord, find_mismatches, identity, read, write

Part = Literal["frames", "consensus"]
Pair = tuple[pd.DataFrame, pd.DataFrame]  # rows of one side and of the other
Places = NDArray[np.int64]

CLOSE: Final = 1e-3  # relative and absolute tolerance of the strict score test
FOREIGN: Final = 0.01  # share of ids that may be of one side only, of results of the same reads
NEAR: Final = 0.1  # apart at most are the two scores of what is near the threshold
EXAMPLES: Final = 5
NAMED: Final = 8  # files that differ; of more, their number is said
MUST_MATCH: Final = ("head", MODEL_LENGTH, "reads")
SHOWN: Final = 12  # characters of a fingerprint
BLOCK_ROWS: Final = 1_024
BLOCK_LINES: Final = 1 << 16  # some 15 MB
COLUMNS: Final[dict[Part, tuple[str, ...]]] = {
    "frames": ("Sequence_ID", "Prediction", "score1", "score2"),
    "consensus": ("Modified_ID", "Is_Virus", "max_score_0", "max_score_1"),
}
LABELS: Final[dict[Part, tuple[str, str]]] = {
    "frames": ("virus", "others"),
    "consensus": ("True", "False"),
}


def load_results(path: Path) -> pd.DataFrame:
    """Rows of one of the two result files: `id`, `virus` (bool), `score1`, `score2` (float64, NaN where no number; not
    in a consensus file of two columns). `InputError` names the first line with another label."""
    return pd.concat(result_pieces(path), ignore_index=True)


def result_pieces(path: Path) -> Iterator[pd.DataFrame]:
    """What `load_results` gives, piece by piece; its row labels are those of the whole."""
    part, header = _kind(path)
    columns, (virus, others) = COLUMNS[part], LABELS[part]
    if part == "consensus" and not set(columns) <= set(header):
        columns = columns[:2]
    if missing := [name for name in columns if name not in header]:
        raise InputError(
            f"no column {', '.join(missing)}; columns are separated by tabs", file=path, line=1
        )
    try:
        types = dict(zip(columns, ("str", "str", "float64", "float64"), strict=False))
        numbers = {name: ["", "nan", "NaN"] for name in columns[2:]}
        with read_columns(path, types, na_values=numbers, chunksize=BLOCK_LINES) as pieces:
            for piece in pieces:
                found = piece[list(columns)]
                found.columns = pd.Index(("id", "virus", "score1", "score2")[: len(columns)])
                wrong = found["virus"][~found["virus"].isin((virus, others))]
                if len(wrong):
                    problem = f"{columns[1]} is '{wrong.iloc[0]}', neither {virus} nor {others}"
                    raise InputError(problem, file=path, line=int(wrong.index[0]) + 2)
                yield found.assign(virus=found["virus"] == virus)
    except ValueError as error:  # pandas' own errors are such
        raise InputError(f"not a table of results ({error})", file=path) from error


def _kind(path: Path) -> tuple[Part, list[str]]:
    """What a result file holds, and its columns."""
    with (
        refuse_unreadable(path, "text", InputError),
        path.open(encoding="utf-8", errors="surrogateescape") as handle,
    ):
        header = handle.readline().rstrip("\r\n").split("\t")
    for part, columns in COLUMNS.items():
        if columns[0] in header:
            return part, header
    raise InputError(
        "not a result file: its first line has neither Sequence_ID nor Modified_ID",
        file=path,
        line=1,
    )


def derive_consensus(frames: pd.DataFrame) -> pd.DataFrame:
    """The vote over each chunk's frames, in the order of its first row: virus when the largest score2 is at least the
    largest score1. A frame's id ends in two letters for its frame."""
    best = (
        frames.groupby(frames["id"].str.slice(stop=-2), sort=False)[["score1", "score2"]]
        .max()
        .reset_index()
    )
    return best.assign(virus=best["score2"] >= best["score1"])


def compare_runs(
    out: Path, names: tuple[str, ...], *, tolerance: float, subset: bool
) -> tuple[validation.Comparison, ...]:
    """The runs `names` of a validation against its baseline, where that left results, and against the first of them;
    the last against what was embedded in fp32. `comparison.json` keeps them. `subset`: the baseline covers a part of
    the reads only. Errors: those of `compare`."""
    found = []
    for a, b in sides(out, names):
        exact, slow = a == EXACT_FILES, a == BASELINE
        some, bits = exact or (slow and subset), not exact and not slow
        found.append(
            compare(
                out / a, out / b, tolerance=tolerance, subset_of_a=some, bits=bits, embeddings=exact
            )
        )
    write(out / COMPARISON, validation.ComparisonFile(comparisons=tuple(found)))
    return tuple(found)


def sides(out: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    """What a validation compares of its runs `names`, two and two."""
    beside = RunDir(out / BASELINE)
    pairs = (
        [(BASELINE, name) for name in names]
        if beside.predictions.is_file() or beside.consensus.is_file()
        else []
    )
    pairs += [(names[0], name) for name in names[1:]]
    return (
        [*pairs, (EXACT_FILES, names[-1])]
        if names and RunDir(out / EXACT_FILES).embeddings.is_file()
        else pairs
    )


def compare(
    a: Path,
    b: Path,
    *,
    tolerance: float = 0.01,
    mode: Literal["both", "frame", "consensus"] = "both",
    subset_of_a: bool = False,
    bits: bool = False,
    embeddings: bool = False,
) -> validation.Comparison:
    """Hold result `b` against result `a`: run directories, folders with the two files, or one of the files each.

    `subset_of_a`: side a covers a subset of the reads, which may have been staged apart; b is cut to those reads first.
    `embeddings`: of run directories, the embeddings of sequences that both have are compared too; `bits`: and the bytes
    of all. Consensus is derived from the frames where a side has no consensus file. Raises `InputError` for files that
    cannot be read or have nothing in common, `RunMismatchError`, naming it, for another head, length or other reads."""
    files_a, files_b = result_files(a), result_files(b)
    run_a, run_b = (RunDir(path if path.is_dir() else path.parent) for path in (a, b))
    none = RunRecord(fingerprints={})
    record_a, record_b = (
        read(run.record, RunRecord) if run.record.is_file() else none for run in (run_a, run_b)
    )
    if said := [
        f"{name} ({a.name}: {one[:SHOWN]}, {b.name}: {other[:SHOWN]})"
        for name, (one, other) in find_mismatches(identity(record_a), identity(record_b)).items()
        if name in MUST_MATCH and not (subset_of_a and name == "reads")
    ]:
        raise RunMismatchError(
            f"{a.name} and {b.name} cannot be compared: different {'; different '.join(said)}"
        )
    subset = None
    if subset_of_a and run_a.reads_table.is_file():
        subset = set(read_table(run_a.reads_table, {"id": "str"})["id"])
    elif subset_of_a:
        subset = set().union(*map(_reads, result_pieces(next(iter(files_a.values())))))
    parts: dict[str, validation.LabelAgreement] = {}
    for part in [part for part in COLUMNS if mode == "both" or part.startswith(mode)]:
        left, right = _rows(files_a, part), _rows(files_b, part)
        if left is None or right is None:
            continue
        if subset is not None:
            of_subset = [rows[_reads(rows).isin(subset)] for rows in right]
            left, right = (iter([pd.concat(side, ignore_index=True)]) for side in (left, of_subset))
        parts[part] = agreement(_in_step(left, right), tolerance)
    if not parts:
        raise InputError(f"{a} and {b} have no kind of result in common; mode is '{mode}'")
    return validation.Comparison(
        a=a.name,
        b=b.name,
        tolerance=tolerance,
        subset_reads=None if subset is None else len(subset),
        cosines=cosines(a, b, record_a.widths.get("dna")) if embeddings else (),
        bitwise=bitwise(a, b) if bits else None,
        **parts,
    )


def result_files(path: Path) -> dict[Part, Path]:
    """The result files of `path` by what they hold; `InputError` when there is none."""
    if not path.is_dir():
        return {_kind(path)[0]: path}
    run = RunDir(path)
    both: dict[Part, Path] = {"frames": run.predictions, "consensus": run.consensus}
    found = {part: file for part, file in both.items() if file.is_file()}
    if not found:
        raise InputError(
            f"neither {run.predictions.name} nor {run.consensus.name} is in this folder", file=path
        )
    return found


def take_results(path: Path, run: RunDir, store: OrfStore) -> None:
    """Copy the result files of an earlier run of a baseline, over the reads of `store`, into `run`. Errors:
    `InputError` where over one in a hundred ids of either side is none of the other; `RunMismatchError` where a
    run.json beside them tells of other reads or another length."""
    beside = RunDir(path if path.is_dir() else path.parent).record
    told = identity(read(beside, RunRecord)) if beside.is_file() else {}
    if others := find_mismatches(
        told, {"reads": store.fingerprint, MODEL_LENGTH: str(store.model_length)}
    ):
        raise RunMismatchError(
            f"{beside.parent} holds results of other {', '.join(others)}; give those of these reads"
        )
    frames, found = (
        pd.Series(store.row_ids(0, store.n_rows, original=True), dtype="str"),
        result_files(path),
    )
    for part, file in found.items():
        here = pd.Index(frames if part == "frames" else frames.str.slice(stop=-2)).unique()
        there = pd.Index(load_results(file)["id"]).unique()
        strange, absent = there.difference(here), here.difference(there)
        if max(len(strange), len(absent)) > FOREIGN * len(here):
            problem = f"results of other reads: {len(strange):,} of its {len(there):,} ids are not among these reads"
            missing = f"{len(absent):,} of the {len(here):,} ids of these reads are missing"
            raise InputError(
                f"{problem}, {missing}", file=file, hint="give results of the very reads"
            )
    for target, source in {
        run.predictions: found.get("frames"),
        run.consensus: found.get("consensus"),
    }.items():
        if source is None:
            target.unlink(missing_ok=True)
            continue
        with atomic_file(target) as aside:
            shutil.copyfile(source, aside)


def _rows(files: dict[Part, Path], part: Part) -> Iterator[pd.DataFrame] | None:
    """A side's rows, piece by piece; its consensus is derived from its frames where it has no file of it."""
    if part in files:
        return result_pieces(files[part])
    return iter([derive_consensus(load_results(files["frames"]))]) if "frames" in files else None


def _in_step(left: Iterator[pd.DataFrame], right: Iterator[pd.DataFrame]) -> Iterator[Pair]:
    """Rows of both sides: piece by piece while the same ids stand on the same lines, then the rest of both at once."""
    a, b = next(left), next(right)
    while np.array_equal(a["id"].to_numpy(), b["id"].to_numpy()):
        yield a, b
        a, b = next(left, a[:0]), next(right, b[:0])
        if a.empty and b.empty:
            return
    yield pd.concat((a, *left), ignore_index=True), pd.concat((b, *right), ignore_index=True)


def _reads(rows: pd.DataFrame) -> "pd.Series[str]":
    """The read of each row: its id ends in `_chunk_<n>`, that of a frame in two more letters."""
    return rows["id"].str.replace(r"_chunk_\d+(?:[FR]\d)?$", "", regex=True)


def agreement(pairs: Iterable[Pair], tolerance: float) -> validation.LabelAgreement:
    """Join the rows of each pair by id and count. Score differences are of `score2`, where both sides have scores."""
    counted, ids, agreeing = Counter[str](), Counter[str](), Counter[str]()
    differences, close = [], True
    unlike: list[str] = []
    alone: list[str] = []
    for a, b in pairs:
        # for each row of b its row in a, or -1; runs of the same reads have the same ids in the same order
        same_ids = np.array_equal(a["id"].to_numpy(), b["id"].to_numpy())
        partner = np.arange(len(a)) if same_ids else _keys(a["id"]).get_indexer(_keys(b["id"]))
        both = partner >= 0
        left, right = a.iloc[partner[both]], b[both]
        only_a, only_b = a[~np.isin(np.arange(len(a)), partner)], b[~both]
        same = left["virus"].to_numpy() == right["virus"].to_numpy()
        every = pd.concat(
            [left, only_a, only_b]
        )  # an id of one side only is of the class that it has there
        kinds = {
            name: every["virus"] == virus for name, virus in (("viral", True), ("non-viral", False))
        }
        if "score2" in every:
            kinds["near threshold"] = (every["score1"] - every["score2"]).abs() <= NEAR
        agrees = np.append(same, np.zeros(len(every) - len(left), dtype=bool))
        counted.update(
            in_both=len(left),
            only_in_a=len(only_a),
            only_in_b=len(only_b),
            agreeing=int(same.sum()),
        )
        ids.update({name: int(of.sum()) for name, of in kinds.items()})
        agreeing.update({name: int(agrees[of].sum()) for name, of in kinds.items()})
        labels = zip(left["id"][~same][:EXAMPLES], left["virus"][~same], strict=False)
        unlike += [
            f"{name}: {'virus / others' if virus else 'others / virus'}" for name, virus in labels
        ]
        for side, part in (("a", only_a), ("b", only_b)):
            alone += [f"{name}: only in {side}" for name in part["id"][:EXAMPLES]]
        if len(left) and "score2" in left and "score2" in right:
            scores_a, scores_b = (rows[["score1", "score2"]].to_numpy() for rows in (left, right))
            differences.append(np.abs(scores_a - scores_b))
            close = close and np.allclose(scores_a, scores_b, rtol=CLOSE, atol=CLOSE)
    total = counted["in_both"] + counted["only_in_a"] + counted["only_in_b"]
    return validation.LabelAgreement(
        **counted,
        agreement=counted["agreeing"] / total if total else None,
        score=_score_difference(np.concatenate(differences), tolerance, close)
        if differences
        else None,
        classes={
            name: validation.ClassAgreement(ids=n, agreeing=agreeing[name])
            for name, n in ids.items()
        },
        examples=tuple(
            text.encode("utf-8", "replace").decode() for text in (*unlike, *alone)[:EXAMPLES]
        ),
    )


def _keys(ids: "pd.Series[str]") -> "pd.Index[str]":
    """Ids made unique: the second row of an id, and each further one, bears its number."""
    if not ids.duplicated().any():
        return pd.Index(ids)
    number = ids.groupby(ids, sort=False).cumcount()
    return pd.Index(ids.where(number == 0, ids + "\x00" + number.astype(str)))


def _score_difference(
    both: NDArray[np.float64], tolerance: float, close: bool
) -> validation.ScoreDifference | None:
    """Of both scores' absolute differences [n, 2]; `None` when a score is no number: it cannot be near another."""
    if np.isnan(both).any():
        return None
    difference = both[:, 1]
    return validation.ScoreDifference(
        n=len(difference),
        mean=difference.mean(),
        median=np.median(difference),
        p99=np.percentile(difference, 99),
        max=difference.max(),
        share_within_tolerance=(difference <= tolerance).mean(),
        allclose=close,
    )


def meets(comparison: validation.Comparison, minimum: float) -> bool:
    """Whether every agreement that was asked for reaches `minimum` (0 to 1); nothing compared never does."""
    parts = [part for part in (comparison.frames, comparison.consensus) if part is not None]
    return bool(parts) and all(
        part.agreement is not None and part.agreement >= minimum for part in parts
    )


def bitwise(a: Path, b: Path) -> validation.BitwiseEquality:
    """Whether the result files and the shards of two runs hold the same bytes. Nothing to compare is not identity."""
    runs = RunDir(a), RunDir(b)
    files = [path.name for path in runs[0].tables if path.is_file() or (b / path.name).is_file()]
    shards = sorted({f"shards/{path.name}" for run in runs for path in run.shards.glob("*.h5")})
    _, unlike, alone = filecmp.cmpfiles(a, b, [*files, *shards], shallow=False)
    differing = sorted([*unlike, *(f"{name} is in one run only" for name in alone)])
    shared = sum(name not in alone for name in shards)
    more = (f"and {len(differing) - NAMED} more",) if len(differing) > NAMED else ()
    same, told = bool(files and shared and not differing), (*differing[:NAMED], *more)
    return validation.BitwiseEquality(
        identical=same, files_compared=len(files), shards_compared=shared, differing=told
    )


def cosines(a: Path, b: Path, dna_width: int | None = None) -> tuple[validation.CosineStats, ...]:
    """Cosine of the embeddings of each sequence that both runs have, less the mean embedding of `a`, without failed
    rows (NaN): of each encoder, where the DNA width is known. Empty without embeddings or a sequence in common."""
    left, right = RunDir(a).embeddings, RunDir(b).embeddings
    if not left.is_file() or not right.is_file():
        return ()
    try:
        with _open_embeddings(left, right) as files:
            tables = [file["embeddings"] for file in files]
            places, width = _same_sequences(RunDir(a), RunDir(b), files), tables[0].shape[1]
            if not (n := len(places[0])) or tables[1].shape[1] != width:
                return ()
            parts = {"joined": slice(0, width)}
            if dna_width is not None and 0 < dna_width < width:
                parts = {"DNABERT-S": slice(0, dna_width), "ESM-2": slice(dna_width, width)}
            found, blocks = {name: np.full(n, np.nan) for name in parts}, range(0, n, BLOCK_ROWS)
            total, good = np.zeros(width), 0
            for lo in blocks:
                one = _rows_at(tables[0], places[0][lo : lo + BLOCK_ROWS])
                total, good = total + np.nansum(one, 0), good + int((~np.isnan(one[:, 0])).sum())
            for lo in blocks:
                block, middle = slice(lo, lo + BLOCK_ROWS), total / max(1, good)
                one, other = (
                    _rows_at(rows, at[block]) - middle
                    for rows, at in zip(tables, places, strict=True)
                )
                for name, columns in parts.items():
                    x, y = one[:, columns], other[:, columns]
                    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
                    np.divide(
                        np.einsum("ij,ij->i", x, y), norms, out=found[name][block], where=norms > 0
                    )
    except (OSError, KeyError) as error:
        raise InputError(f"embeddings of {a} or {b} cannot be read ({error})") from error
    known = {name: cosine[~np.isnan(cosine)] for name, cosine in found.items()}
    return tuple(
        validation.CosineStats(
            part=name, n=len(v), minimum=v.min(), p1=np.percentile(v, 1), mean=v.mean()
        )
        for name, v in known.items()
        if len(v)
    )


@contextmanager
def _open_embeddings(*paths: Path) -> Iterator[list[h5py.File]]:
    """Embeddings of which every row can be read: HDF5 shows infinity for rows of a shard that it cannot open. All are
    held open, as many as the system allows. Errors: `InputError` names the shard; those of h5py for no such file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        files = [held.enter_context(h5py.File(path, "r")) for path in paths]
        tables = zip(paths, (file["embeddings"] for file in files), strict=True)
        parts = [
            path.parent / one.file_name
            for path, t in tables
            if t.is_virtual
            for one in t.virtual_sources()
        ]
        for part in parts:
            try:
                len(held.enter_context(h5py.File(part, "r"))["embeddings"])
            except (OSError, KeyError, RuntimeError) as error:
                hint = f"run again to compute it; if {len(parts)} files may not be open at once, raise `ulimit -n`"
                raise InputError(f"cannot be read ({error})", file=part, hint=hint) from error
        yield files


def _same_sequences(a: RunDir, b: RunDir, files: list[h5py.File]) -> tuple[Places, Places]:
    """Rows of two embeddings files that are of one sequence: by number where the reads are the same, or by content."""
    keys: list[Any] = [
        file["uniques"][:] if "uniques" in file else range(len(file["embeddings"]))
        for file in files
    ]
    records = [
        read(run.record, RunRecord) if run.record.is_file() else RunRecord(fingerprints={})
        for run in (a, b)
    ]
    if "reads" in find_mismatches(*map(identity, records)):
        for side, (run, record) in enumerate(zip((a, b), records, strict=True)):
            store = OrfStore.open(run.root / record.store)
            dna, protein = store.dna(0, store.n_uniques), store.protein(0, store.n_uniques)
            keys[side] = [b" ".join((dna[number], protein[number])) for number in keys[side]]
    partner = pd.Index(keys[0]).get_indexer(pd.Index(keys[1]))
    return partner[partner >= 0].astype(np.int64), np.flatnonzero(partner >= 0)


def _rows_at(table: h5py.Dataset, at: Places) -> NDArray[np.float64]:
    """The rows of a table at these places, read in the stretches that they form."""
    return np.concatenate(
        [np.asarray(table[low:high], dtype=np.float64) for low, high in slices(at)]
    )
