"""What other tools read of a run: Kraken's tables and MultiQC's sections add up, contigs vote as a plain count says."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.columns import documented
from virnuc.flows import cli
from virnuc_core.config import RunSpec
from virnuc_core.engine import shards
from virnuc_core.errors import ConfigError
from virnuc_core.pipeline import predict
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.report.exports import export
from virnuc_core.rundir import RunDir

pytestmark = pytest.mark.slow
SIZE = 300  # of a chunk


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short reads and contigs of up to seven chunks, among them twins by name and one without an open frame."""
    folder, rng = tmp_path_factory.mktemp("exports"), random.Random(3)
    lengths = [150, 299, 300, 301, 450, 600, 601, 900, 1203, 2000, 0]
    reads = [("".join(rng.choices("ACGT", k=length)), f"c{length % 7}") for length in lengths * 4]
    reads.append(("TAACTAGCTGA" * 60, '"=quoted"'))
    text = "".join(f">{name}\n{bases}\n" for bases, name in reads)
    (folder / "contigs.fasta").write_text(text)
    assert (
        cli.main(
            ["models", "init-random", str(folder / "models"), "--head", str(SIZE), "--seed", "5"]
        )
        == 0
    )
    spec = {
        "reads": (str(folder / "contigs.fasta"),),
        "models": folder / "models",
        "devices": "cpu:1",
    }
    out = folder / "out"
    predict(RunSpec(out=out, **spec))
    scores = [float(row["viral_score"]) for row in table(out / "reads.tsv") if row["viral_score"]]
    predict(
        RunSpec(out=out, threshold=float(np.median(scores)), **spec)
    )  # weights of chance: half of them are viral
    return out


def twin(run: Path) -> dict[str, tuple[int, int, int, int, float]]:
    """By id: scored and viral chunks, scored and viral bases, weighed score; a step a read, chunk and frame."""
    scored = iter(table(run / "prediction_results_highestscore.csv"))
    rows = iter(table(run / "prediction_results.txt"))
    found, row = {}, next(rows, None)
    chunk = next(scored, None)
    for read in table(run / "reads.tsv"):
        name = read["flags"].partition("duplicate_of=")[2] or read["id"]
        left, votes = int(read["open_frames"]), []
        while left:
            assert chunk is not None
            frames = 0
            while row is not None and left and row["Sequence_ID"][:-2] == chunk["Modified_ID"]:
                frames, left, row = frames + 1, left - 1, next(rows, None)
            assert frames
            assert chunk["Modified_ID"].startswith(f"{name}_chunk_")
            number = int(chunk["Modified_ID"].rpartition("_")[2])
            votes.append((number, float(chunk["max_score_1"]) - float(chunk["max_score_0"])))
            chunk = next(scored, None)
        length, count = int(read["length"]), int(read["chunks"])
        if count < 2:
            continue
        overlap = count * SIZE - length
        lower, extra = divmod(overlap, count)
        starts = [i * SIZE - (lower * i + min(i, lower + extra)) for i in range(count)]
        adds = [b - a for a, b in zip(starts, [*starts[1:], length], strict=True)]
        assert sum(adds) == length
        weighed = [(adds[number - 1], margin) for number, margin in votes]
        bases = sum(one for one, _ in weighed)
        score = (
            0.5 + sum(one * margin for one, margin in weighed) / bases / 2
            if bases
            else float("nan")
        )
        viral = [one for one, margin in weighed if margin >= 0]
        found[read["id"]] = (len(weighed), len(viral), bases, sum(viral), score)
    assert (row, chunk) == (None, None)
    return found


def test_contigs_vote_as_a_plain_count_says(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(RunDir(run), tmp_path / "whole", "lung")
    monkeypatch.setattr("virnuc_core.report.exports.PIECE_READS", 3)
    export(RunDir(run), tmp_path / "pieces", "lung")
    for name in ("contigs.tsv", "lung.kraken2.classifiedreads.txt", "virnuc_scores_mqc.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "pieces" / name).read_bytes()
    threshold = json.loads((run / "summary.json").read_text())["threshold"]
    wanted, found = twin(run), {row["id"]: row for row in table(tmp_path / "whole" / "contigs.tsv")}
    assert documented(tmp_path / "whole" / "contigs.tsv") == len(wanted) > 20
    assert set(found) == set(wanted)
    for name, (scored, viral, bases, viral_bases, score) in wanted.items():
        row = found[name]
        told = [
            int(row[column])
            for column in ("scored_chunks", "viral_chunks", "scored_bases", "viral_bases")
        ]
        assert told == [scored, viral, bases, viral_bases], name
        if bases == 0:
            assert (row["viral_score"], row["label"]) == ("", "")
        else:
            assert float(row["viral_score"]) == pytest.approx(score, abs=1e-6)  # printed as float32
            assert row["label"] == ("virus" if float(row["viral_score"]) >= threshold else "others")


def test_a_contig_with_a_failed_row_has_no_vote(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, failed = shards.read_scores(RunDir(run))
    failed[::3], scores[::3] = True, np.nan
    monkeypatch.setattr("virnuc_core.report.exports.read_scores", lambda _: (scores, failed))
    before = {row["id"]: row for row in table(export(RunDir(run), tmp_path, "x")[0])}
    assert any(row["label"] == "" and row["scored_chunks"] != "0" for row in before.values())
    assert any(row["label"] for row in before.values())
    failed[:], scores[:] = True, np.nan
    counted = (
        "scored_chunks",
        "viral_chunks",
        "scored_bases",
        "viral_bases",
        "viral_score",
        "label",
    )
    told = {
        tuple(row[name] for name in counted) for row in table(export(RunDir(run), tmp_path, "x")[0])
    }
    assert told == {("0", "0", "0", "0", "", "")}


def test_kraken_and_multiqc_tell_what_reads_tsv_tells(run: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(run), "-o", str(tmp_path), "--sample", "lung"]) == 0
    reads = table(run / "reads.tsv")
    lines = [
        line.split("\t")
        for line in (tmp_path / "lung.kraken2.classifiedreads.txt").read_text().splitlines()
    ]
    viral = [read["fate"] == "viral" for read in reads]
    assert 0 < sum(viral) < len(viral)
    assert [line[:4] for line in lines] == [
        ["C" if one else "U", read["id"], "10239" if one else "0", read["length"]]
        for one, read in zip(viral, reads, strict=True)
    ]
    report = [
        line.split("\t") for line in (tmp_path / "lung.kraken2.report.txt").read_text().splitlines()
    ]
    assert [(int(line[1]), line[3], line[4]) for line in report] == [
        (len(reads) - sum(viral), "U", "0"),
        (sum(viral), "R", "1"),
        (sum(viral), "D", "10239"),
    ]
    sections = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*_mqc.json")}
    assert Counter(read["fate"] for read in reads) == Counter(
        sections["virnuc_fates_mqc.json"]["data"]["lung"]
    )
    scored = sum(read["viral_score"] != "" for read in reads)
    assert sum(sections["virnuc_scores_mqc.json"]["data"]["lung"].values()) == scored
    general = sections["virnuc_general_mqc.json"]["data"]["lung"]
    assert (general["viral"], general["reads"]) == (sum(viral), len(reads))
    assert general["scored_percent"] == pytest.approx(100 * scored / len(reads))


def test_files_that_are_there_stay_unless_force_is_given(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "out" / "contigs.tsv"
    kept.parent.mkdir()
    kept.write_text("precious")
    words = ["export", str(run), "-o", str(kept.parent)]
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert said.err == f"virnuc: {kept} would be overwritten; choose another name, or --force\n"
    assert [path.name for path in kept.parent.iterdir()] == ["contigs.tsv"]
    assert kept.read_text() == "precious"
    assert cli.main([*words, "--force"]) == 0
    assert documented(kept) > 20
    assert cli.main(words) == 2
    for _ in range(2):
        assert cli.main(["export", str(run)]) == 0, "the run's own are written anew"


def test_a_store_of_other_reads_is_not_taken_for_the_runs(run: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(run, tmp_path / "run"))
    other = tmp_path / "other.fasta"
    other.write_text("".join(f">x{at}\n{'ACGTTGCA' * 90}\n" for at in range(45)))
    stage(StageSpec(reads=(str(other),), model_length=SIZE), moved / "orfs.h5", anew=True)
    with pytest.raises(ConfigError, match="holds other reads than the run was made from"):
        export(RunDir(moved), tmp_path / "out", "x")


def test_a_run_that_is_not_complete_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="holds no complete run"):
        export(RunDir(tmp_path), tmp_path / "out", "x")
    assert cli.main(["export", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
