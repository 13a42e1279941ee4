"""Two results held against each other: labels and scores joined by id, embeddings by cosine, files byte for byte.

Results are joined by id, never by position, and an id that only one side has is a disagreement. Files of the original
(two columns in the consensus file), of its successor (four columns) and run directories are all read. Results of
different heads, model lengths or reads are refused when the run records say so.
"""

from __future__ import annotations

import csv
import filecmp
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.errors import ConfigError, InputError, RunMismatchError
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import MODEL_LENGTH, RunRecord, differing, made_from
from virnuc_core.runfiles import read as read_file
from virnuc_core.validation import BitwiseEquality, Comparison, CosineStats, LabelAgreement, ScoreDifference

Mode = Literal["both", "frame", "consensus"]
Part = Literal["frames", "consensus"]

CLOSE: Final = 1e-3  # relative and absolute tolerance of the strict score test
EXAMPLES: Final = 5
MUST_MATCH: Final = ("head", MODEL_LENGTH, "reads")
RESULT_FILES: Final = ("predictions", "consensus", "reads_table", "failed_rows")
NAMED: Final = 8  # things that differ; of more, their number is said
BLOCK_ROWS: Final = 8_192
COLUMNS: Final[dict[Part, tuple[str, ...]]] = {
    "frames": ("Sequence_ID", "Prediction", "score1", "score2"),
    "consensus": ("Modified_ID", "Is_Virus", "max_score_0", "max_score_1"),
}
LABELS: Final[dict[Part, dict[str, bool]]] = {
    "frames": {"virus": True, "others": False},
    "consensus": {"True": True, "False": False},
}


# --- reading results -------------------------------------------------------------------------------------------------


def load_results(path: Path) -> pd.DataFrame:
    """Rows of one of the two result files: `id`, `virus` (bool), `score1`, `score2` (float64; NaN where no number).

    A consensus file of two columns has no scores. `InputError` names the first line with another label.
    """
    part = _part_of(path)
    columns, labels = COLUMNS[part], LABELS[part]
    scored = part == "frames" or set(columns) <= set(_header(path))
    found = _load(path, columns[:2], columns[2:] if scored else ())
    found.columns = pd.Index(("id", "virus", "score1", "score2")[: found.shape[1]])
    virus = found["virus"].map(labels)
    if virus.isna().any():
        place = int(np.flatnonzero(virus.isna().to_numpy())[0])
        problem = f"{columns[1]} is '{found['virus'].iloc[place]}', neither {' nor '.join(labels)}"
        raise InputError(problem, file=path, line=place + 2)
    return found.assign(virus=virus.astype(np.bool_))


def derive_consensus(frames: pd.DataFrame) -> pd.DataFrame:
    """The vote over each chunk's frames: virus when the largest score2 is at least the largest score1.

    Chunks come in the order of their first row. A frame's id ends in two letters for its frame.
    """
    best = frames.groupby(frames["id"].str.slice(stop=-2), sort=False)[["score1", "score2"]].max().reset_index()
    return best.assign(virus=best["score2"] >= best["score1"])


def _part_of(path: Path) -> Part:
    header = _header(path)
    for part, columns in COLUMNS.items():
        if columns[0] in header:
            return part
    raise InputError("not a result file: its first line has neither Sequence_ID nor Modified_ID", file=path, line=1)


def _header(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as handle:
            return handle.readline().rstrip("\r\n").split("\t")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error


def _load(path: Path, texts: Sequence[str], scores: Sequence[str] = ()) -> pd.DataFrame:
    """The columns asked for, in that order; scores as float64, all else as text."""
    columns = [*texts, *scores]
    missing = [name for name in columns if name not in _header(path)]
    if missing:
        raise InputError(f"no column {', '.join(missing)}; columns are separated by tabs", file=path, line=1)
    try:
        return pd.read_csv(
            path,
            sep="\t",
            usecols=columns,
            dtype={**dict.fromkeys(texts, "str"), **dict.fromkeys(scores, "float64")},
            keep_default_na=False,
            na_values={name: ["", "nan", "NaN"] for name in scores},
            quoting=csv.QUOTE_NONE,
            encoding="utf-8",
            encoding_errors="surrogateescape",
        )[columns]
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"not a table of results ({error})", file=path) from error


# --- labels and scores -----------------------------------------------------------------------------------------------


def compare(
    a: Path,
    b: Path,
    *,
    tolerance: float = 0.01,
    mode: Mode = "both",
    subset_of_a: bool = False,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Hold result `b` against result `a`: run directories, folders with the two files, or one of the files each.

    `subset_of_a`: side a covers a subset of the reads; b is cut to those reads first. Consensus is derived from the
    frames where a side has no consensus file. Raises `InputError` for files that cannot be read or have nothing in
    common to compare, `RunMismatchError` for results of unlike runs.
    """
    files_a, files_b = _files(a), _files(b)
    names = names or (a.name, b.name)
    refuse_unlike(a, b, names)
    subset = _reads_of(a, files_a) if subset_of_a else None
    parts: dict[str, LabelAgreement] = {}
    for part in COLUMNS:
        if mode != "both" and not part.startswith(mode):
            continue
        left, right = _rows(files_a, part), _rows(files_b, part)
        if left is None or right is None:
            continue
        if subset is not None:
            right = right[_read_ids(right["id"], part).isin(subset)].reset_index(drop=True)
        parts[part] = agreement(left, right, tolerance)
    if not parts:
        raise InputError(f"{a} and {b} have no kind of result in common; mode is '{mode}'")
    covered = None if subset is None else len(subset)
    return Comparison(a=names[0], b=names[1], tolerance=tolerance, subset_reads=covered, **parts)


def _files(path: Path) -> dict[Part, Path]:
    """The result files of `path` by what they hold; `InputError` when there is none."""
    if not path.is_dir():
        return {_part_of(path): path}
    run = RunDir(path)
    both: dict[Part, Path] = {"frames": run.predictions, "consensus": run.consensus}
    if not any(file.is_file() for file in both.values()):
        raise InputError(f"neither {run.predictions.name} nor {run.consensus.name} is in this folder", file=path)
    return {part: file for part, file in both.items() if file.is_file()}


def _rows(files: dict[Part, Path], part: Part) -> pd.DataFrame | None:
    """A side's rows; its consensus is derived from its frames where it has no file of it."""
    if part in files:
        return load_results(files[part])
    return derive_consensus(load_results(files["frames"])) if "frames" in files else None


def _read_ids(ids: pd.Series[str], part: Part) -> pd.Series[str]:
    """Reads of rows: ids end in `_chunk_<n>`, and those of frames in two more letters."""
    chunks = ids.str.slice(stop=-2) if part == "frames" else ids
    return chunks.str.replace(r"_chunk_\d+$", "", regex=True)


def _reads_of(path: Path, files: dict[Part, Path]) -> set[str]:
    """The reads a side covers: those of its reads.tsv, else those with a row in its files."""
    beside = _folder(path).reads_table
    if beside.is_file():
        return set(_load(beside, ("id",))["id"])
    part, file = next(iter(files.items()))
    return set(_read_ids(load_results(file)["id"], part))


def agreement(a: pd.DataFrame, b: pd.DataFrame, tolerance: float) -> LabelAgreement:
    """Join two loaded results by id and count. Score differences are of `score2`, where both sides have scores."""
    # for each row of b its row in a, or -1; runs of the same reads have the same ids in the same order
    same_ids = a["id"].equals(b["id"])
    partner = np.arange(len(a)) if same_ids else _keys(a["id"]).get_indexer(_keys(b["id"]))
    both = partner >= 0
    left, right = a.iloc[partner[both]], b[both]
    only_a, only_b = a[~np.isin(np.arange(len(a)), partner)], b[~both]
    same = left["virus"].to_numpy() == right["virus"].to_numpy()
    total = len(left) + len(only_a) + len(only_b)
    return LabelAgreement(
        in_both=len(left),
        only_in_a=len(only_a),
        only_in_b=len(only_b),
        agreeing=int(same.sum()),
        agreement=float(same.sum()) / total if total else None,
        score=_score_difference(left, right, tolerance),
        examples=_examples(left[~same], right[~same], only_a, only_b),
    )


def _keys(ids: pd.Series[str]) -> pd.Index[str]:
    """Ids made unique: the second row of an id, and each further one, bears its number."""
    if not ids.duplicated().any():
        return pd.Index(ids)
    number = ids.groupby(ids, sort=False).cumcount()
    return pd.Index(ids.where(number == 0, ids + "\x00" + number.astype(str)))


def _score_difference(left: pd.DataFrame, right: pd.DataFrame, tolerance: float) -> ScoreDifference | None:
    if "score2" not in left or "score2" not in right or not len(left):
        return None
    scores_a, scores_b = (side[["score1", "score2"]].to_numpy() for side in (left, right))
    if np.isnan(scores_a - scores_b).any():
        return None  # a score that is no number cannot be near another
    difference = np.abs(scores_a - scores_b)[:, 1]
    return ScoreDifference(
        n=len(difference),
        mean=float(difference.mean()),
        median=float(np.median(difference)),
        p99=float(np.percentile(difference, 99)),
        max=float(difference.max()),
        tolerance=tolerance,
        share_within_tolerance=float((difference <= tolerance).mean()),
        allclose=np.allclose(scores_a, scores_b, rtol=CLOSE, atol=CLOSE),
    )


def _examples(left: pd.DataFrame, right: pd.DataFrame, only_a: pd.DataFrame, only_b: pd.DataFrame) -> tuple[str, ...]:
    words = {True: "virus", False: "others"}
    rows = zip(left["id"][:EXAMPLES], left["virus"], right["virus"], strict=False)
    found = [f"{name}: {words[bool(a)]} / {words[bool(b)]}" for name, a, b in rows]
    for side, part in (("a", only_a), ("b", only_b)):
        found += [f"{name}: only in {side}" for name in part["id"][:EXAMPLES]]
    return tuple(text.encode("utf-8", "replace").decode() for text in found[:EXAMPLES])


def meets(comparison: Comparison, minimum: float) -> bool:
    """Whether every agreement that was asked for reaches `minimum` (0 to 1); nothing compared never does."""
    parts = [part for part in (comparison.frames, comparison.consensus) if part is not None]
    return bool(parts) and all(part.agreement is not None and part.agreement >= minimum for part in parts)


# --- the same job? ---------------------------------------------------------------------------------------------------


def refuse_unlike(a: Path, b: Path, names: tuple[str, str] | None = None) -> None:
    """Raise `RunMismatchError` naming what differs when the two were made with another head, S or other reads."""
    one, other = names or (a.name, b.name)
    others = differing(_made_from(a), _made_from(b))
    said = [
        f"{name} ({one}: {_brief(others[name][0])}, {other}: {_brief(others[name][1])})"
        for name in MUST_MATCH
        if name in others
    ]
    if said:
        raise RunMismatchError(f"{one} and {other} cannot be compared: different {'; different '.join(said)}")


def _made_from(path: Path) -> dict[str, str]:
    """What the run record tells of how these results were made; nothing where there is none."""
    record = _folder(path).record
    try:
        return made_from(read_file(record, RunRecord)) if record.is_file() else {}
    except ConfigError as error:
        raise InputError(f"not a readable run record ({error})", file=record) from error


def _folder(path: Path) -> RunDir:
    return RunDir(path if path.is_dir() else path.parent)


def _brief(value: str) -> str:
    return value if len(value) <= 16 else f"{value[:12]}…"


# --- below the labels ------------------------------------------------------------------------------------------------


def cosines(a: Path, b: Path, dna_width: int | None = None) -> tuple[CosineStats, ...]:
    """Cosine of each sequence's embedding in run `a` and run `b`; by encoder too, when the DNA width is known.

    Empty when a run keeps no embeddings, or not of the same sequences. Rows that failed (NaN) on either side raise no
    cosine but are left out of `n`. Raises `RunMismatchError` for unlike runs.
    """
    refuse_unlike(a, b)
    left, right = RunDir(a).embeddings, RunDir(b).embeddings
    if not left.is_file() or not right.is_file():
        return ()
    try:
        with h5py.File(left, "r") as file_a, h5py.File(right, "r") as file_b:
            rows_a, rows_b = file_a["embeddings"], file_b["embeddings"]
            n, width = rows_a.shape
            if rows_b.shape != (n, width) or not n:
                return ()
            parts = {"joined": slice(0, width)}
            if dna_width is not None and 0 < dna_width < width:
                parts |= {"DNABERT-S": slice(0, dna_width), "ESM-2": slice(dna_width, width)}
            cosine = {name: np.empty(n) for name in parts}
            for lo in range(0, n, BLOCK_ROWS):
                block = slice(lo, lo + BLOCK_ROWS)
                one, other = (np.asarray(rows[block], dtype=np.float64) for rows in (rows_a, rows_b))
                for name, columns in parts.items():
                    cosine[name][block] = _cosine(one[:, columns], other[:, columns])
    except (OSError, KeyError) as error:
        raise InputError(f"embeddings of {a} or {b} cannot be read ({error})") from error
    known = {name: values[~np.isnan(values)] for name, values in cosine.items()}
    return tuple(
        CosineStats(part=name, n=len(v), minimum=float(v.min()), p1=float(np.percentile(v, 1)), mean=float(v.mean()))
        for name, v in known.items()
        if len(v)
    )


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Row by row; NaN where a row has no length or is not a number."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("ij,ij->i", a, b)
    cosine: NDArray[np.float64] = np.divide(dots, norms, out=np.full(len(a), np.nan), where=norms > 0)
    return cosine


def bitwise(a: Path, b: Path) -> BitwiseEquality:
    """Compare result files byte for byte, and every array of every shard bit for bit.

    Raises `RunMismatchError` for unlike runs. Nothing to compare is not identity.
    """
    refuse_unlike(a, b)
    run_a, run_b = RunDir(a), RunDir(b)
    files = [(getattr(run_a, part), getattr(run_b, part)) for part in RESULT_FILES]
    files = [pair for pair in files if any(path.is_file() for path in pair)]
    names_a, names_b = ({path.name for path in run.shards.glob("*.h5")} for run in (run_a, run_b))
    shared = sorted(names_a & names_b)
    differing = [
        *(one.name for one, other in files if not _same_bytes(one, other)),
        *(f"shards/{name} is in one run only" for name in sorted(names_a ^ names_b)),
        *(
            f"shards/{name}: {what}"
            for name in shared
            for what in _shard_differences(run_a.shards / name, run_b.shards / name)
        ),
        *(() if files else ("no result file to compare",)),
        *(() if shared else ("no shard to compare",)),
    ]
    more = (f"and {len(differing) - NAMED} more",) if len(differing) > NAMED else ()
    return BitwiseEquality(
        identical=not differing,
        files_compared=len(files),
        shards_compared=len(shared),
        differing=(*differing[:NAMED], *more),
    )


def _same_bytes(a: Path, b: Path) -> bool:
    return a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)


def _shard_differences(a: Path, b: Path) -> Iterator[str]:
    try:
        with h5py.File(a, "r") as file_a, h5py.File(b, "r") as file_b:
            arrays_a, arrays_b = _arrays(file_a), _arrays(file_b)
            for name in sorted(arrays_a.keys() | arrays_b.keys()):
                left, right = arrays_a.get(name), arrays_b.get(name)
                if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
                    yield f"{name} is not the same kind of array"
                elif left.tobytes() != right.tobytes():
                    yield f"{name} differs"
    except OSError as error:
        yield f"cannot be read ({error})"


def _arrays(file: h5py.File) -> dict[str, NDArray[Any]]:
    return {name: item[()] for name, item in file.items() if isinstance(item, h5py.Dataset)}
