"""A mixed input gives the results that are recorded in `tests/data/golden`: every byte of the columns, ids and labels.

`python tests/unit/test_golden.py FOLDER` records them; `tests/data/README.md` tells with which version that was done.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import h5py
import pytest

from tests.columns import documented
from tests.forked_workers import Forker, workers_of
from virnuc.flows import cli
from virnuc_core.config import RunSpec
from virnuc_core.pipeline import predict

RECORDED = Path(__file__).resolve().parents[1] / "data" / "golden"
TABLES = {
    "prediction_results.txt": "\t",
    "prediction_results_highestscore.csv": "\t",
    "reads.tsv": "\t",
}
SCORES = ("score1", "score2", "max_score_0", "max_score_1", "viral_score")
TOLERANCE = 2e-5  # of scores: sums of float32 come in another order on another CPU


def write_inputs(folder: Path) -> tuple[str, ...]:
    """Wrapped FASTA with all that FASTA may hold, FASTQ with repeats, gzipped pairs, gzipped lower case."""
    rng = random.Random(20)

    def bases(count: int) -> str:
        return "".join(rng.choice("ACGT") for _ in range(count))

    fasta_lines = []
    for number in range(60):
        sequence = bases(rng.choice([30, 150, 300, 499, 500, 501, 1001, 1203]))
        if number % 7 == 0:
            sequence = sequence.lower()
        if number % 5 == 0:
            sequence = f"{sequence[:20]}NNN{sequence[23:]}"
        if number % 11 == 0:
            sequence = sequence.replace("A", "R", 2).replace("C", "y", 1)
        lines = [sequence[start : start + 60] for start in range(0, len(sequence), 60)]
        fasta_lines.append("\n".join([f">w{number} some words", *lines]))
    (folder / "wrapped.fasta").write_text(
        "\n".join([*fasta_lines, ">empty", "", ">w3 again", "ACGTTGCA", ""])
    )
    known_bases = [bases(150) for _ in range(20)]
    reads = [rng.choice(known_bases) if number % 3 == 0 else bases(150) for number in range(90)]
    (folder / "repeats.fastq").write_text(
        "".join(
            f"@q{number} x\r\n{one}\r\n+\r\n{'I' * len(one)}\r\n"
            for number, one in enumerate(reads)
        )
    )
    for mate in (1, 2):
        mates = [bases(rng.randint(100, 160)) + "N" * (number % 9 == 0) for number in range(40)]
        text = "".join(
            f"@p{number}/{mate} BX\n{one}\n+\n{'F' * len(one)}\n"
            for number, one in enumerate(mates)
        )
        (folder / f"pair_R{mate}.fastq.gz").write_bytes(gzip.compress(text.encode()))
    low = "".join(f">l{number}\n{bases(150).lower()}\n" for number in range(30))
    (folder / "low.fa.gz").write_bytes(gzip.compress(low.encode()))
    names = ("wrapped.fasta", "repeats.fastq", "pair_R1.fastq.gz", "pair_R2.fastq.gz", "low.fa.gz")
    return tuple(str(folder / name) for name in names)


def run(folder: Path) -> Path:
    """A whole prediction; the folder of its results."""
    assert cli.main(["models", "init-random", str(folder / "models"), "--seed", "5"]) == 0
    predict(
        RunSpec(
            reads=write_inputs(folder),
            out=folder / "out",
            models=folder / "models",
            devices="cpu:1",
            pairs=False,  # as recorded: two of the files would be joined by their names
        )
    )
    return folder / "out"


def columns(out: Path) -> dict[str, object]:
    """What must be equal to the byte: digests of the staged columns, their attributes, and all fingerprints."""
    values: dict[str, object] = {
        "fingerprints": json.loads((out / "run.json").read_text())["fingerprints"]
    }
    with h5py.File(out / "orfs.h5") as file:
        values |= {name: str(value) for name, value in file.attrs.items()}
        for name, column in file.items():
            values[name] = (
                f"{column.dtype} {column.shape} {hashlib.sha256(column[...].tobytes()).hexdigest()}"
            )
    return values


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=TABLES[path.name]))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Path:
    with workers_of(forker):
        return run(tmp_path_factory.mktemp("golden"))


def test_staged_columns_and_fingerprints_are_those_recorded(out: Path) -> None:
    assert columns(out) == json.loads((RECORDED / "columns.json").read_text())


@pytest.mark.parametrize("name", TABLES)
def test_result_files_hold_the_recorded_rows(name: str, out: Path) -> None:
    actual_rows, recorded_rows = rows(out / name), rows(RECORDED / name)
    for row, recorded_row in zip(actual_rows, recorded_rows, strict=True):
        assert list(row) == list(recorded_row)
        for column, value in recorded_row.items():
            if column in SCORES and value:
                assert float(row[column]) == pytest.approx(float(value), abs=TOLERANCE), (
                    recorded_row,
                    column,
                )
            else:
                assert row[column] == value, (recorded_row, column)


def test_each_table_has_the_columns_and_values_that_are_documented(out: Path) -> None:
    counts = {name: documented(out / name) for name in (*TABLES, "failed.tsv")}
    assert counts["reads.tsv"] > 200
    assert counts["failed.tsv"] == 0


def test_no_recorded_label_hangs_on_a_rounding() -> None:
    recorded_rows = rows(RECORDED / "prediction_results.txt")
    assert {row["Prediction"] for row in recorded_rows} == {"virus", "others"}
    assert all(
        abs(float(row["score1"]) - float(row["score2"])) > 10 * TOLERANCE for row in recorded_rows
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        made = run(Path(name))
        target = Path(sys.argv[1])
        target.mkdir(parents=True, exist_ok=True)
        (target / "columns.json").write_text(
            json.dumps(columns(made), indent=1, sort_keys=True) + "\n"
        )
        for table in TABLES:
            shutil.copy(made / table, target / table)
