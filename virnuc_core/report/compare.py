"""Two results held against each other: labels, scores, embeddings, bytes.

Results are joined by id, never by position, and an id that only one side has is a disagreement. Files of the original
(two columns in the consensus file), of its successor (four columns) and run directories are all read. Results of
different heads, model lengths or reads are refused when the run records say so.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.errors import InputError, RunMismatchError
from virnuc_core.report.model import Comparison, LabelAgreement, ScoreDifference
from virnuc_core.rundir import RunDir

Mode = Literal["both", "frame", "consensus"]

FRAMES_FILE: Final = "prediction_results.txt"
CONSENSUS_FILE: Final = "prediction_results_highestscore.csv"
FRAME_LABELS: Final = ("others", "virus")
CLOSE: Final = 1e-3  # relative and absolute tolerance of the strict score test
EXAMPLES: Final = 5
MUST_MATCH: Final = ("head", "model length", "reads")


@dataclass(frozen=True, slots=True)
class ResultSide:
    """One side of a comparison: the files it has, and what is known of how they were made."""

    name: str
    frames: Path | None
    consensus: Path | None
    run: Path | None  # run directory, when the side is one or lies in one


def open_side(path: Path, name: str | None = None) -> ResultSide:
    """Find the result files of `path`: a run directory, a folder with the two files, or one of the files.

    Raises `InputError` when there is nothing to compare.
    """
    if path.is_dir():
        frames, consensus = path / FRAMES_FILE, path / CONSENSUS_FILE
        if not frames.is_file() and not consensus.is_file():
            raise InputError(f"neither {FRAMES_FILE} nor {CONSENSUS_FILE} is in this folder", file=path)
        return ResultSide(
            name or path.name,
            frames if frames.is_file() else None,
            consensus if consensus.is_file() else None,
            path if RunDir(path).record.is_file() else None,
        )
    header = _header(path)
    run = path.parent if RunDir(path.parent).record.is_file() else None
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
    frame = _load(path, ["Sequence_ID", "Prediction", "score1", "score2"], scores=("score1", "score2"))
    labels = frame["Prediction"]
    unknown = ~labels.isin(FRAME_LABELS)
    if unknown.any():
        place = int(np.flatnonzero(unknown.to_numpy())[0])
        raise InputError(f"label '{labels.iloc[place]}' is neither virus nor others", file=path, line=place + 2)
    return pd.DataFrame(
        {
            "id": frame["Sequence_ID"],
            "virus": (labels == "virus").to_numpy(),
            "score1": frame["score1"].to_numpy(),
            "score2": frame["score2"].to_numpy(),
        }
    )


def load_consensus(path: Path) -> pd.DataFrame:
    """Chunks of the consensus file: `id`, `virus`, and `score1`, `score2` where the file has four columns."""
    header = _header(path)
    wanted = ["Modified_ID", "Is_Virus"]
    scores = ("max_score_0", "max_score_1") if {"max_score_0", "max_score_1"} <= set(header) else ()
    frame = _load(path, [*wanted, *scores], scores=scores)
    labels = frame["Is_Virus"]
    unknown = ~labels.isin(("True", "False"))
    if unknown.any():
        place = int(np.flatnonzero(unknown.to_numpy())[0])
        raise InputError(f"Is_Virus is '{labels.iloc[place]}', neither True nor False", file=path, line=place + 2)
    columns: dict[str, Any] = {"id": frame["Modified_ID"], "virus": (labels == "True").to_numpy()}
    for column, name in zip(("score1", "score2"), scores, strict=False):
        columns[column] = frame[name].to_numpy()
    return pd.DataFrame(columns)


def derive_consensus(frames: pd.DataFrame) -> pd.DataFrame:
    """The vote over each chunk's frames: virus when the largest score2 is at least the largest score1.

    Chunks come in the order of their first row. A frame's id ends in two letters for its frame.
    """
    chunk = frames["id"].str.slice(stop=-2)
    best = frames.groupby(chunk, sort=False)[["score1", "score2"]].max()
    return pd.DataFrame(
        {
            "id": best.index.to_numpy(),
            "virus": (best["score2"] >= best["score1"]).to_numpy(),
            "score1": best["score1"].to_numpy(),
            "score2": best["score2"].to_numpy(),
        }
    )


def _load(path: Path, columns: Sequence[str], scores: Sequence[str]) -> pd.DataFrame:
    missing = [name for name in columns if name not in _header(path)]
    if missing:
        raise InputError(f"no column {', '.join(missing)}; columns are separated by tabs", file=path, line=1)
    texts = [name for name in columns if name not in scores]
    try:
        return pd.read_csv(
            path,
            sep="\t",
            usecols=list(columns),
            dtype={**dict.fromkeys(texts, "str"), **dict.fromkeys(scores, "float64")},
            keep_default_na=False,
            na_values={name: ["", "nan", "NaN"] for name in scores},
            quoting=csv.QUOTE_NONE,
            encoding="utf-8",
            encoding_errors="surrogateescape",
        )
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"not a table of results ({error})", file=path) from error


def _keys(ids: pd.Series[str]) -> pd.Index[str]:
    """Ids made unique: the second row of an id, and each further one, bears its number."""
    if not ids.duplicated().any():
        return pd.Index(ids)
    number = ids.groupby(ids, sort=False).cumcount()
    return pd.Index(ids.where(number == 0, ids + "\x00" + number.astype(str)))


@dataclass(frozen=True, slots=True)
class _Join:
    """Positions of partners: `a[i]` and `b[i]` bear the same id."""

    a: NDArray[np.intp]
    b: NDArray[np.intp]
    only_a: NDArray[np.intp]
    only_b: NDArray[np.intp]


def _join(ids_a: pd.Series[str], ids_b: pd.Series[str]) -> _Join:
    none = np.empty(0, dtype=np.intp)
    if len(ids_a) == len(ids_b) and (ids_a.to_numpy() == ids_b.to_numpy()).all():
        every = np.arange(len(ids_a), dtype=np.intp)
        return _Join(every, every, none, none)
    partner = _keys(ids_a).get_indexer(_keys(ids_b))  # for each row of b its row in a, or -1
    found = partner >= 0
    lonely = np.ones(len(ids_a), dtype=np.bool_)
    lonely[partner[found]] = False
    return _Join(partner[found], np.flatnonzero(found), np.flatnonzero(lonely), np.flatnonzero(~found))


def agreement(a: pd.DataFrame, b: pd.DataFrame, tolerance: float) -> LabelAgreement:
    """Join two loaded results by id and count. Score differences are of `score2`, where both sides have scores."""
    join = _join(a["id"], b["id"])
    virus_a, virus_b = a["virus"].to_numpy()[join.a], b["virus"].to_numpy()[join.b]
    same = virus_a == virus_b
    total = len(join.a) + len(join.only_a) + len(join.only_b)
    return LabelAgreement(
        in_both=len(join.a),
        only_in_a=len(join.only_a),
        only_in_b=len(join.only_b),
        agreeing=int(same.sum()),
        agreement=float(same.sum()) / total if total else None,
        score=_score_difference(a, b, join, tolerance),
        examples=_examples(a, b, join, np.flatnonzero(~same)),
    )


def _score_difference(a: pd.DataFrame, b: pd.DataFrame, join: _Join, tolerance: float) -> ScoreDifference | None:
    if "score2" not in a or "score2" not in b or not len(join.a):
        return None
    pairs = [(a[name].to_numpy()[join.a], b[name].to_numpy()[join.b]) for name in ("score1", "score2")]
    difference = np.abs(pairs[1][0] - pairs[1][1])
    if np.isnan(difference).any() or np.isnan(pairs[0][0] - pairs[0][1]).any():
        return None  # a score that is no number cannot be near another
    return ScoreDifference(
        n=len(difference),
        mean=float(difference.mean()),
        median=float(np.median(difference)),
        p99=float(np.percentile(difference, 99)),
        max=float(difference.max()),
        tolerance=tolerance,
        share_within_tolerance=float((difference <= tolerance).mean()),
        allclose=all(np.allclose(x, y, rtol=CLOSE, atol=CLOSE) for x, y in pairs),
    )


def _examples(a: pd.DataFrame, b: pd.DataFrame, join: _Join, differing: NDArray[np.intp]) -> tuple[str, ...]:
    words = {True: "virus", False: "others"}
    found = []
    for place in differing[:EXAMPLES].tolist():
        left, right = a.iloc[join.a[place]], b.iloc[join.b[place]]
        found.append(f"{left['id']}: {words[bool(left['virus'])]} / {words[bool(right['virus'])]}")
    found += [f"{a['id'].iloc[place]}: only in a" for place in join.only_a[:EXAMPLES].tolist()]
    found += [f"{b['id'].iloc[place]}: only in b" for place in join.only_b[:EXAMPLES].tolist()]
    return tuple(text.encode("utf-8", "replace").decode() for text in found[:EXAMPLES])


def provenance(run: Path | None) -> dict[str, str]:
    """What must be alike for two results to be comparable, as far as the run record tells."""
    if run is None:
        return {}
    try:
        body = json.loads(RunDir(run).record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"not a readable run record ({error})", file=RunDir(run).record) from error
    prints = body.get("fingerprints") or {}
    known = {"head": prints.get("head"), "reads": prints.get("reads"), "model length": body.get("model_length")}
    return {name: str(value) for name, value in known.items() if value is not None}


def refuse_unlike(a: ResultSide, b: ResultSide) -> None:
    """Raise `RunMismatchError` naming what differs when the two were made with another head, S or other reads."""
    left, right = provenance(a.run), provenance(b.run)
    differing = [
        f"{name} ({a.name}: {_brief(left[name])}, {b.name}: {_brief(right[name])})"
        for name in MUST_MATCH
        if name in left and name in right and left[name] != right[name]
    ]
    if differing:
        raise RunMismatchError(f"{a.name} and {b.name} cannot be compared: different {'; different '.join(differing)}")


def _brief(value: str) -> str:
    return value if len(value) <= 16 else f"{value[:12]}…"


def cut_to_reads(frame: pd.DataFrame, reads: set[str], *, frame_letters: int) -> pd.DataFrame:
    """The rows whose read is in `reads`; ids end in `_chunk_<n>` and `frame_letters` letters."""
    stem = frame["id"].str.slice(stop=-frame_letters) if frame_letters else frame["id"]
    read = stem.str.replace(r"_chunk_\d+$", "", regex=True)
    return frame[read.isin(reads)].reset_index(drop=True)


def reads_of(side: ResultSide) -> set[str]:
    """The reads a side covers: those of its reads.tsv, else those with a row in its files."""
    beside = (side.frames or side.consensus or Path()).parent / RunDir(Path()).reads_table.name
    if beside.is_file():
        return set(_load(beside, ["id"], scores=())["id"])
    if side.frames is not None:
        stems = load_frames(side.frames)["id"].str.slice(stop=-2)
    elif side.consensus is not None:
        stems = load_consensus(side.consensus)["id"]
    else:
        return set()
    return set(stems.str.replace(r"_chunk_\d+$", "", regex=True))


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
    subset = reads_of(side_a) if subset_of_a else None
    frames = None if mode == "consensus" else _compare_frames(side_a, side_b, tolerance, subset)
    votes = None if mode == "frame" else _compare_consensus(side_a, side_b, tolerance, subset)
    if frames is None and votes is None:
        raise InputError(f"{a} and {b} have no kind of result in common; mode is '{mode}'")
    return Comparison(
        a=side_a.name,
        b=side_b.name,
        tolerance=tolerance,
        subset_reads=None if subset is None else len(subset),
        frames=frames,
        consensus=votes,
    )


def _compare_frames(a: ResultSide, b: ResultSide, tolerance: float, subset: set[str] | None) -> LabelAgreement | None:
    if a.frames is None or b.frames is None:
        return None
    left, right = load_frames(a.frames), load_frames(b.frames)
    if subset is not None:
        right = cut_to_reads(right, subset, frame_letters=2)
    return agreement(left, right, tolerance)


def _compare_consensus(
    a: ResultSide, b: ResultSide, tolerance: float, subset: set[str] | None
) -> LabelAgreement | None:
    left, right = votes_of(a), votes_of(b)
    if left is None or right is None:
        return None
    if subset is not None:
        right = cut_to_reads(right, subset, frame_letters=0)
    return agreement(left, right, tolerance)


def votes_of(side: ResultSide) -> pd.DataFrame | None:
    """A side's consensus: its file, else derived from its frames."""
    if side.consensus is not None:
        return load_consensus(side.consensus)
    return None if side.frames is None else derive_consensus(load_frames(side.frames))


def meets(comparison: Comparison, minimum: float) -> bool:
    """Whether every agreement that was asked for reaches `minimum` (0 to 1); nothing compared never does."""
    parts = [part for part in (comparison.frames, comparison.consensus) if part is not None]
    return bool(parts) and all(part.agreement is not None and part.agreement >= minimum for part in parts)
