"""Two results held against each other: labels and scores joined by id, embeddings by cosine, files byte for byte.

Results are joined by id, never by position, and an id that only one side has is a disagreement. Files of the original
(two columns in the consensus file), of its successor (four columns) and run directories are all read. Results of
different heads, model lengths or reads are refused when the run records say so.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

CLOSE: Final = 1e-3  # relative and absolute tolerance of the strict score test
EXAMPLES: Final = 5
MUST_MATCH: Final = ("head", MODEL_LENGTH, "reads")
RESULT_FILES: Final = ("predictions", "consensus", "reads_table", "failed_rows")
NAMED: Final = 8  # things that differ; of more, their number is said
BLOCK_ROWS: Final = 8_192
BLOCK_BYTES: Final = 1 << 20


# --- reading results -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResultSide:
    """One side of a comparison: the files it has, and the run directory it is or lies in."""

    name: str
    frames: Path | None
    consensus: Path | None
    run: Path | None


def open_side(path: Path, name: str | None = None) -> ResultSide:
    """Find the result files of `path`: a run directory, a folder with the two files, or one of the files.

    Raises `InputError` when there is nothing to compare.
    """
    folder = RunDir(path if path.is_dir() else path.parent)
    run = folder.root if folder.record.is_file() else None
    if path.is_dir():
        frames, consensus = (file if file.is_file() else None for file in (folder.predictions, folder.consensus))
        if frames is None and consensus is None:
            names = f"neither {folder.predictions.name} nor {folder.consensus.name}"
            raise InputError(f"{names} is in this folder", file=path)
        return ResultSide(name or path.name, frames, consensus, run)
    header = _header(path)
    if "Sequence_ID" in header:
        return ResultSide(name or path.name, path, None, run)
    if "Modified_ID" in header:
        return ResultSide(name or path.name, None, path, run)
    raise InputError("not a result file: its first line has neither Sequence_ID nor Modified_ID", file=path, line=1)


def _header(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as handle:
            return handle.readline().rstrip("\r\n").split("\t")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error


def load_frames(path: Path) -> pd.DataFrame:
    """Rows of `prediction_results.txt`: `id`, `virus` (bool), `score1`, `score2` (float64; NaN where not a number)."""
    found = _load(path, ("Sequence_ID", "Prediction"), ("score1", "score2"))
    return _labelled(path, found, {"virus": True, "others": False}, "label '{}' is neither virus nor others")


def load_consensus(path: Path) -> pd.DataFrame:
    """Chunks of the consensus file: `id`, `virus`, and `score1`, `score2` where the file has four columns."""
    scores = ("max_score_0", "max_score_1")
    found = _load(path, ("Modified_ID", "Is_Virus"), scores if set(scores) <= set(_header(path)) else ())
    return _labelled(path, found, {"True": True, "False": False}, "Is_Virus is '{}', neither True nor False")


def _labelled(path: Path, found: pd.DataFrame, labels: Mapping[str, bool], problem: str) -> pd.DataFrame:
    """The table under common names; `InputError` names the first line with another label."""
    found.columns = pd.Index(("id", "virus", "score1", "score2")[: found.shape[1]])
    virus = found["virus"].map(labels)
    if virus.isna().any():
        place = int(np.flatnonzero(virus.isna().to_numpy())[0])
        raise InputError(problem.format(found["virus"].iloc[place]), file=path, line=place + 2)
    return found.assign(virus=virus.astype(np.bool_))


def derive_consensus(frames: pd.DataFrame) -> pd.DataFrame:
    """The vote over each chunk's frames: virus when the largest score2 is at least the largest score1.

    Chunks come in the order of their first row. A frame's id ends in two letters for its frame.
    """
    best = frames.groupby(frames["id"].str.slice(stop=-2), sort=False)[["score1", "score2"]].max().reset_index()
    return best.assign(virus=best["score2"] >= best["score1"])


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
    """Hold result `b` against result `a`.

    `subset_of_a`: side a covers a subset of the reads; b is cut to those reads first. Consensus is derived from the
    frames where a side has no consensus file. Raises `InputError` for files that cannot be read or have nothing in
    common to compare, `RunMismatchError` for results of unlike runs.
    """
    side_a, side_b = open_side(a, names and names[0]), open_side(b, names and names[1])
    refuse_unlike(side_a, side_b)
    subset = _reads_of(side_a) if subset_of_a else None
    parts: dict[str, LabelAgreement] = {}
    for part, load in (("frames", _frames_of), ("consensus", _consensus_of)):
        if mode != "both" and not part.startswith(mode):
            continue
        left, right = load(side_a), load(side_b)
        if left is None or right is None:
            continue
        if subset is not None:
            right = right[_read_ids(right["id"], part).isin(subset)].reset_index(drop=True)
        parts[part] = agreement(left, right, tolerance)
    if not parts:
        raise InputError(f"{a} and {b} have no kind of result in common; mode is '{mode}'")
    covered = None if subset is None else len(subset)
    return Comparison(a=side_a.name, b=side_b.name, tolerance=tolerance, subset_reads=covered, **parts)


def _frames_of(side: ResultSide) -> pd.DataFrame | None:
    return None if side.frames is None else load_frames(side.frames)


def _consensus_of(side: ResultSide) -> pd.DataFrame | None:
    """A side's consensus: its file, else derived from its frames."""
    if side.consensus is not None:
        return load_consensus(side.consensus)
    return None if side.frames is None else derive_consensus(load_frames(side.frames))


def _read_ids(ids: pd.Series[str], part: str) -> pd.Series[str]:
    """Reads of rows: ids end in `_chunk_<n>`, and those of frames in two more letters."""
    chunks = ids.str.slice(stop=-2) if part == "frames" else ids
    return chunks.str.replace(r"_chunk_\d+$", "", regex=True)


def _reads_of(side: ResultSide) -> set[str]:
    """The reads a side covers: those of its reads.tsv, else those with a row in its files."""
    beside = RunDir((side.frames or side.consensus or Path()).parent).reads_table
    if beside.is_file():
        return set(_load(beside, ("id",))["id"])
    if side.frames is not None:
        return set(_read_ids(load_frames(side.frames)["id"], "frames"))
    return set() if side.consensus is None else set(_read_ids(load_consensus(side.consensus)["id"], "consensus"))


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


def refuse_unlike(a: ResultSide, b: ResultSide) -> None:
    """Raise `RunMismatchError` naming what differs when the two were made with another head, S or other reads."""
    others = differing(*(_made_from(side.run) for side in (a, b)))
    said = [
        f"{name} ({a.name}: {_brief(others[name][0])}, {b.name}: {_brief(others[name][1])})"
        for name in MUST_MATCH
        if name in others
    ]
    if said:
        raise RunMismatchError(f"{a.name} and {b.name} cannot be compared: different {'; different '.join(said)}")


def _made_from(run: Path | None) -> dict[str, str]:
    """What a run record tells of how its results were made."""
    if run is None:
        return {}
    try:
        return made_from(read_file(RunDir(run).record, RunRecord))
    except ConfigError as error:
        raise InputError(f"not a readable run record ({error})", file=RunDir(run).record) from error


def _brief(value: str) -> str:
    return value if len(value) <= 16 else f"{value[:12]}…"


# --- below the labels ------------------------------------------------------------------------------------------------


def cosines(a: Path, b: Path, dna_width: int | None = None) -> tuple[CosineStats, ...]:
    """Cosine of each sequence's embedding in run `a` and run `b`; by encoder too, when the DNA width is known.

    Empty when a run keeps no embeddings, or not of the same sequences. Rows that failed (NaN) on either side raise no
    cosine but are left out of `n`. Raises `RunMismatchError` for unlike runs.
    """
    refuse_unlike(open_side(a), open_side(b))
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
            found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in parts}
            for lo in range(0, n, BLOCK_ROWS):
                blocks = [np.asarray(rows[lo : lo + BLOCK_ROWS], dtype=np.float64) for rows in (rows_a, rows_b)]
                for name, columns in parts.items():
                    found[name].append(_cosine(*(block[:, columns] for block in blocks)))
    except (OSError, KeyError) as error:
        raise InputError(f"embeddings of {a} or {b} cannot be read ({error})") from error
    return tuple(stats for name, values in found.items() if (stats := _stats(name, np.concatenate(values))))


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Row by row; NaN where a row has no length or is not a number."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("ij,ij->i", a, b)
    cosine: NDArray[np.float64] = np.divide(dots, norms, out=np.full(len(a), np.nan), where=norms > 0)
    return cosine


def _stats(name: str, values: NDArray[np.float64]) -> CosineStats | None:
    known = values[~np.isnan(values)]
    if not known.size:
        return None
    p1 = float(np.percentile(known, 1))
    return CosineStats(part=name, n=int(known.size), minimum=float(known.min()), p1=p1, mean=float(known.mean()))


def bitwise(a: Path, b: Path) -> BitwiseEquality:
    """Compare result files byte for byte, and every array of every shard bit for bit.

    Raises `RunMismatchError` for unlike runs. Nothing to compare is not identity.
    """
    refuse_unlike(open_side(a), open_side(b))
    run_a, run_b = RunDir(a), RunDir(b)
    files = [(getattr(run_a, part), getattr(run_b, part)) for part in RESULT_FILES]
    files = [pair for pair in files if any(path.is_file() for path in pair)]
    names_a, names_b = ({path.name for path in run.shards.glob("*.h5")} for run in (run_a, run_b))
    shared = sorted(names_a & names_b)
    differing = [
        *(one.name for one, other in files if not same_bytes(one, other)),
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


def same_bytes(a: Path, b: Path) -> bool:
    """Whether both files are there and hold the same bytes."""
    if not a.is_file() or not b.is_file() or a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as left, b.open("rb") as right:
        while block := left.read(BLOCK_BYTES):
            if block != right.read(BLOCK_BYTES):
                return False
    return True


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
