"""Files of a run for other tools: Kraken's tables and MultiQC's sections add up, and contigs vote.

The votes are held against a plain count over the result files.
"""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.columns import documented
from tests.damage import edit_json, flip_bit
from virnuc.flows import cli
from virnuc_core.config import RunSpec
from virnuc_core.engine import shards
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.pipeline import predict
from virnuc_core.reads.samples import SampleRow, write_samples
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.report.exports import export
from virnuc_core.report.multiqc_names import export_name
from virnuc_core.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]
CHUNK_BASES = 300
KRAKEN_READ_COLUMNS = ("classified", "id", "taxon", "length", "hits")
KRAKEN_REPORT_COLUMNS = ("percent", "in_clade", "in_taxon", "rank", "taxon", "name")
VIRUSES = "10239"  # in NCBI's taxonomy
Row = dict[str, str]


def read_table(path: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """Read a TAB-separated table; Kraken's have no header, so that `columns` must name theirs."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, columns, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models with random weights."""
    models = tmp_path_factory.mktemp("models") / "models"
    words = ["models", "init-random", str(models), "--head", str(CHUNK_BASES), "--seed", "5"]
    assert cli.main(words) == 0
    return models


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A run of short reads and contigs of up to seven chunks, half of which are viral.

    Among them are reads with the same name, and one without an open frame.
    """
    folder = tmp_path_factory.mktemp("exports")
    dice = random.Random(3)
    records = []
    for length in [150, 299, 300, 301, 450, 600, 601, 900, 1203, 2000, 0] * 4:
        bases = "".join(dice.choices("ACGT", k=length))
        records.append(f">c{length % 7}\n{bases}\n")
    records.append(f'>"=quoted"\n{"TAACTAGCTGA" * 60}\n')
    reads = folder / "contigs.fasta"
    reads.write_text("".join(records))
    out_dir = folder / "out"
    spec = RunSpec(reads=(str(reads),), models=models, devices="cpu:1", out=out_dir)
    predict(spec)
    rows = read_table(out_dir / "reads.tsv")
    scores = [float(row["viral_score"]) for row in rows if row["viral_score"]]
    median_score = float(np.median(scores))  # random weights score by chance: half are viral
    predict(spec.model_copy(update={"threshold": median_score}))
    return out_dir


@dataclass(frozen=True)
class ContigVote:
    """What a plain count says of one contig."""

    scored_chunks: int
    viral_chunks: int
    scored_bases: int
    viral_bases: int
    viral_score: float | None  # None: no base is scored


def count_votes(run: Path) -> dict[str, ContigVote]:
    """Count the votes of each contig from the result files, by its id.

    The result files bear the names that the reads came with, so that they are joined in order.
    """
    frames = iter(read_table(run / "prediction_results.txt"))
    chunks = iter(read_table(run / "prediction_results_highestscore.csv"))
    votes = {}
    for row in read_table(run / "reads.tsv"):
        margins = margins_of(row, frames, chunks)
        num_chunks = int(row["chunks"])
        if num_chunks > 1:
            votes[row["id"]] = weighed_vote(margins, own_bases(int(row["length"]), num_chunks))
    assert list(frames) == []
    assert list(chunks) == []
    return votes


def margins_of(read: Row, frames: Iterator[Row], chunks: Iterator[Row]) -> dict[int, float]:
    """Take the next read's rows, and return the margin of each scored chunk, by its number."""
    name = read["flags"].partition("duplicate_of=")[2] or read["id"]
    own_frames = islice(frames, int(read["open_frames"]))
    chunk_ids = list(dict.fromkeys(frame["Sequence_ID"][:-2] for frame in own_frames))
    margins = {}
    for chunk_id, chunk in zip(chunk_ids, islice(chunks, len(chunk_ids)), strict=True):
        assert chunk["Modified_ID"] == chunk_id
        chunk_name, number = chunk_id.rsplit("_chunk_", 1)
        assert chunk_name == name
        margins[int(number)] = float(chunk["max_score_1"]) - float(chunk["max_score_0"])
    return margins


def own_bases(length: int, num_chunks: int) -> list[int]:
    """Return for each chunk the bases that the next one does not hold, which add up to the read."""
    overlap = num_chunks * CHUNK_BASES - length
    lower, extra = divmod(overlap, num_chunks)
    starts = []
    for number in range(num_chunks):
        starts.append(number * CHUNK_BASES - (lower * number + min(number, lower + extra)))
    ends = [*starts[1:], length]
    bases = [end - start for start, end in zip(starts, ends, strict=True)]
    assert sum(bases) == length
    return bases


def weighed_vote(margins: dict[int, float], bases: list[int]) -> ContigVote:
    """Return the vote of chunks, whose numbers begin at 1, each weighed by its bases."""
    viral = [number for number, margin in margins.items() if margin >= 0]
    scored_bases = sum(bases[number - 1] for number in margins)
    weighed_margin = sum(bases[number - 1] * margin for number, margin in margins.items())
    return ContigVote(
        scored_chunks=len(margins),
        viral_chunks=len(viral),
        scored_bases=scored_bases,
        viral_bases=sum(bases[number - 1] for number in viral),
        viral_score=0.5 + weighed_margin / scored_bases / 2 if scored_bases else None,
    )


def test_contigs_vote_as_a_plain_count_says(run: Path, tmp_path: Path) -> None:
    export(RunDir(run), tmp_path, "lung")
    threshold = json.loads((run / "summary.json").read_text())["threshold"]
    rows = {row["id"]: row for row in read_table(tmp_path / "contigs.tsv")}
    votes = count_votes(run)
    assert documented(tmp_path / "contigs.tsv") == len(votes) > 20
    assert set(rows) == set(votes)
    for name, vote in votes.items():
        row = rows[name]
        for column in ("scored_chunks", "viral_chunks", "scored_bases", "viral_bases"):
            assert int(row[column]) == getattr(vote, column), (name, column)
        if vote.viral_score is None:
            assert (row["viral_score"], row["label"]) == ("", "")
        else:
            score = float(row["viral_score"])  # printed as float32
            assert score == pytest.approx(vote.viral_score, abs=1e-6)
            assert row["label"] == ("virus" if score >= threshold else "others")


def test_the_share_of_chunks_with_a_frame_is_shown_with_either_weights(
    run: Path, tmp_path: Path
) -> None:
    """No row of this run has failed, so the scored chunks are those with an open frame."""
    assert cli.main(["export", str(run), "-o", str(tmp_path / "all")]) == 0
    words = ["export", str(run), "-o", str(tmp_path / "framed"), "--framed-only"]
    assert cli.main(words) == 0
    by_all = read_table(tmp_path / "all" / "contigs.tsv")
    by_framed = read_table(tmp_path / "framed" / "contigs.tsv")
    assert documented(tmp_path / "framed" / "contigs.tsv") == len(by_all)
    n_other_weights = 0
    for row, framed_row in zip(by_all, by_framed, strict=True):
        share = int(row["scored_chunks"]) / int(row["chunks"])
        assert float(row["framed_share"]) == pytest.approx(share, abs=0.00005)
        assert (row["weights"], framed_row["weights"]) == ("all_chunks", "framed_chunks")
        for column in ("id", "length", "chunks", "scored_chunks", "viral_chunks", "framed_share"):
            assert row[column] == framed_row[column]
        assert int(framed_row["scored_bases"]) >= int(row["scored_bases"])
        n_other_weights += row["scored_bases"] != framed_row["scored_bases"]
    assert n_other_weights > 0


def test_files_do_not_depend_on_how_many_reads_are_held_in_memory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(RunDir(run), tmp_path / "whole", "lung")
    monkeypatch.setattr("virnuc_core.report.contigs.PIECE_READS", 3)
    monkeypatch.setattr("virnuc_core.report.kraken.PIECE_FRAGMENTS", 3)
    export(RunDir(run), tmp_path / "pieces", "lung")
    for name in ("contigs.tsv", "lung.kraken2.classifiedreads.txt", "virnuc_scores_mqc.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "pieces" / name).read_bytes()


def test_a_contig_with_a_failed_row_has_no_vote(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, has_failed = shards.read_scores(RunDir(run))
    has_failed[::3] = True
    scores[::3] = np.nan
    monkeypatch.setattr("virnuc_core.report.contigs.read_scores", lambda _: (scores, has_failed))
    export(RunDir(run), tmp_path, "x")
    rows = read_table(tmp_path / "contigs.tsv")
    assert any(row["label"] == "" and row["scored_chunks"] != "0" for row in rows)
    assert any(row["label"] for row in rows)


def test_contigs_of_which_every_row_failed_have_nothing_scored(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, has_failed = shards.read_scores(RunDir(run))
    has_failed[:] = True
    scores[:] = np.nan
    monkeypatch.setattr("virnuc_core.report.contigs.read_scores", lambda _: (scores, has_failed))
    export(RunDir(run), tmp_path, "x")
    for row in read_table(tmp_path / "contigs.tsv"):
        for column in ("scored_chunks", "viral_chunks", "scored_bases", "viral_bases"):
            assert row[column] == "0"
        assert (row["viral_score"], row["label"]) == ("", "")


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the command writes for a sample called `lung`."""
    out_dir = tmp_path_factory.mktemp("exported")
    assert cli.main(["export", str(run), "-o", str(out_dir), "--sample", "lung"]) == 0
    return out_dir


def test_kraken_classifies_the_viral_reads(run: Path, exported: Path) -> None:
    reads = read_table(run / "reads.tsv")
    rows = read_table(exported / "lung.kraken2.classifiedreads.txt", KRAKEN_READ_COLUMNS)
    assert {read_row["fate"] == "viral" for read_row in reads} == {True, False}
    for row, read_row in zip(rows, reads, strict=True):
        is_viral = read_row["fate"] == "viral"
        taxon = VIRUSES if is_viral else "0"
        assert row == {
            "classified": "C" if is_viral else "U",
            "id": read_row["id"],
            "taxon": taxon,
            "length": read_row["length"],
            "hits": f"{taxon}:{read_row['open_frames']}",
        }


def test_the_report_of_kraken_adds_up_to_the_reads(run: Path, exported: Path) -> None:
    fates = Counter(read["fate"] for read in read_table(run / "reads.tsv"))
    rows = read_table(exported / "lung.kraken2.report.txt", KRAKEN_REPORT_COLUMNS)
    viral = str(fates["viral"])
    num_others = str(fates.total() - fates["viral"])
    assert [(row["rank"], row["taxon"], row["in_clade"], row["in_taxon"]) for row in rows] == [
        ("U", "0", num_others, num_others),
        ("R", "1", viral, "0"),
        ("D", VIRUSES, viral, viral),
    ]


@pytest.fixture(scope="module")
def paired_run(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A run of 30 pairs, half of which are viral."""
    folder = tmp_path_factory.mktemp("pairs")
    dice = random.Random(8)
    files = []
    for mate in (1, 2):
        records = []
        for number in range(30):
            bases = "".join(dice.choices("ACG", k=dice.choice([150, 300, 320])))
            records.append(f"@r{number}/{mate}\n{bases}\n+\n{'I' * len(bases)}\n")
        files.append(folder / f"a_R{mate}.fastq")
        files[-1].write_text("".join(records))
    first, second = map(str, files)
    out_dir = folder / "out"
    spec = RunSpec(mates_1=(first,), mates_2=(second,), models=models, devices="cpu:1", out=out_dir)
    predict(spec)
    scores = [float(row["viral_score"]) for row in read_table(out_dir / "pairs.tsv")]
    predict(spec.model_copy(update={"threshold": float(np.median(scores))}))
    return out_dir


def test_pairs_are_exported_by_their_common_verdict(tmp_path: Path, paired_run: Path) -> None:
    out_dir = shutil.copytree(paired_run, tmp_path / "out")
    export(RunDir(out_dir), tmp_path / "export", "lung")
    pairs = read_table(out_dir / "pairs.tsv")
    viral_pairs = [pair["id"].removesuffix("/1") for pair in pairs if pair["fate"] == "viral"]
    rows = read_table(tmp_path / "export" / "lung.kraken2.classifiedreads.txt", KRAKEN_READ_COLUMNS)
    assert [row["id"] for row in rows] == [f"r{number}" for number in range(30)]
    assert [row["id"] for row in rows if row["taxon"] == VIRUSES] == viral_pairs
    assert len(viral_pairs) == 15
    report = read_table(tmp_path / "export" / "lung.kraken2.report.txt", KRAKEN_REPORT_COLUMNS)
    assert [row["in_clade"] for row in report] == ["15", "15", "15"]
    sections = {}
    for name in ("general", "fates", "scores"):
        text = (tmp_path / "export" / f"virnuc_{name}_mqc.json").read_text()
        sections[name] = json.loads(text)
        assert "reads" not in sections[name]["id"]
        assert sections[name]["id"].endswith("fragments"), "never merged with a run of reads"
    data = {name: section["data"]["lung"] for name, section in sections.items()}
    assert (data["general"]["fragments"], data["general"]["viral_fragments"]) == (30, 15)
    assert data["general"]["viral_percent"] == pytest.approx(50)
    assert Counter(data["fates"]) == Counter(pair["fate"] for pair in pairs)
    num_scored = sum(pair["viral_score"] != "" for pair in pairs)
    assert sum(data["scores"].values()) == num_scored
    assert data["general"]["scored_percent"] == pytest.approx(100 * num_scored / 30)
    assert sections["fates"]["section_name"] == "Fates of fragments"
    flip_bit(out_dir / "pairs.tsv")
    with pytest.raises(InputError, match=r"pairs\.tsv: is not as the run left it"):
        export(RunDir(out_dir), tmp_path / "again", "lung")
    (out_dir / "pairs.tsv").unlink()
    with pytest.raises(ConfigError, match=r"pairs\.tsv: is missing; repeat the command"):
        export(RunDir(out_dir), tmp_path / "again", "lung")
    assert not (tmp_path / "again").exists()


def test_a_folder_of_samples_has_one_page_and_one_set_for_multiqc(
    run: Path, paired_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    shutil.copytree(run, folder / "contigs")
    shutil.copytree(paired_run, folder / "lung")
    names = {"contigs": "predicted", "lung": "predicted", "lost": "failed"}
    rows = [
        SampleRow(sample=name, fate=fate, note="no such file" if fate == "failed" else "")
        for name, fate in names.items()
    ]
    write_samples(folder / "samples.tsv", rows)
    assert cli.main(["export", str(folder)]) == 0
    out_dir = folder / "export"
    assert capsys.readouterr().out.splitlines() == [str(path) for path in ordered(out_dir)]

    page = (out_dir / "summary.html").read_text()
    num_reads = len(read_table(run / "reads.tsv")) + len(read_table(paired_run / "reads.tsv"))
    assert f"of {num_reads} reads are viral" in page
    for name in names:
        assert name in page
    for unit, name in (("reads", "contigs"), ("fragments", "lung")):
        alone = tmp_path / f"alone_{name}"
        export(RunDir(folder / name), alone, name)
        for section in ("general", "fates", "scores"):
            together = (out_dir / f"virnuc_{section}_{unit}_mqc.json").read_text()
            assert together == (alone / f"virnuc_{section}_mqc.json").read_text()
        for ending in (".kraken2.report.txt", ".kraken2.classifiedreads.txt"):
            expected = (alone / f"{name}{ending}").read_bytes()
            assert (out_dir / f"{name}{ending}").read_bytes() == expected
        expected = (alone / "contigs.tsv").read_bytes()
        assert (out_dir / f"{name}.contigs.tsv").read_bytes() == expected

    assert cli.main(["export", str(folder), "--sample", "x"]) == 2
    assert "holds several samples" in capsys.readouterr().err
    flip_bit(folder / "lung" / "pairs.tsv")
    assert cli.main(["export", str(folder), "-o", str(tmp_path / "again")]) == 2
    assert not (tmp_path / "again").exists(), "nothing is written if a table is damaged"


def ordered(folder: Path) -> list[Path]:
    """Return the files of an export of samples: page, sections for MultiQC, tables by sample."""
    names = ["summary.html", "summary.md"]
    for unit in ("fragments", "reads"):
        names += [f"virnuc_{section}_{unit}_mqc.json" for section in ("general", "fates", "scores")]
    for sample in ("contigs", "lung"):
        names += [f"{sample}.kraken2.classifiedreads.txt", f"{sample}.kraken2.report.txt"]
        names.append(f"{sample}.contigs.tsv")
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    return [folder / name for name in names]


def test_the_sections_of_multiqc_add_up_to_the_reads(run: Path, exported: Path) -> None:
    reads = read_table(run / "reads.tsv")
    sections = {}
    for name in ("general", "fates", "scores"):
        content = json.loads((exported / f"virnuc_{name}_mqc.json").read_text())
        sections[name] = content["data"]["lung"]
    fates = Counter(row["fate"] for row in reads)
    num_scored = sum(row["viral_score"] != "" for row in reads)
    assert Counter(sections["fates"]) == fates
    assert sum(sections["scores"].values()) == num_scored
    assert sections["general"]["viral_reads"] == fates["viral"]
    assert sections["general"]["reads"] == len(reads)
    assert sections["general"]["scored_percent"] == pytest.approx(100 * num_scored / len(reads))
    assert sections["general"]["viral_percent"] == pytest.approx(100 * fates["viral"] / len(reads))


@pytest.mark.parametrize("sample", ["a b", "P1 (day 3)", "a <img src='x'>\x07 lung_1", "x/../y"])
def test_a_sample_has_one_name_in_all_files(run: Path, tmp_path: Path, sample: str) -> None:
    paths = export(RunDir(run), tmp_path / "out", sample)
    assert sorted(paths) == sorted((tmp_path / "out").iterdir())
    names = set()
    for path in paths:
        if path.name.endswith("_mqc.json"):
            names.update(json.loads(path.read_text())["data"])
        elif path.name != "contigs.tsv":
            names.add(path.name.partition(".kraken2.")[0])
    assert names == {export_name(sample)}


def test_names_that_multiqc_would_merge_are_warned_of_before_anything_is_written(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = tmp_path / "batch"
    rows = [SampleRow(sample=name) for name in ("lung", "lung_trimmed", "lung.bam", "gut")]
    batch.mkdir()
    write_samples(batch / "samples.tsv", rows)
    for name in ("lung_trimmed", "gut"):
        shutil.copytree(run, batch / name)
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "contigs.tsv").write_text("precious")
    words = ["export", str(batch / "lung_trimmed"), "-o", str(occupied)]
    assert cli.main(words) == 2, "files are there"
    (warning,) = caplog.records
    assert "MultiQC shows it as 'lung', as it does lung, lung.bam" in warning.message
    caplog.clear()
    export(RunDir(batch / "gut"), batch / "gut" / "export", "gut")
    assert caplog.records == []


def test_replacing_the_export_of_another_sample_is_warned_of(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export(RunDir(run), tmp_path, "lung")
    caplog.clear()
    export(RunDir(run), tmp_path, "lung")
    assert caplog.records == [], "the same sample"
    with pytest.raises(ConfigError, match="would be overwritten"):
        export(RunDir(run), tmp_path, "gut", force=False)
    export(RunDir(run), tmp_path, "gut")
    messages = [record.message for record in caplog.records]
    expected = "holds the export of sample lung; those of its files that have the same names"
    assert [expected in message for message in messages] == [True, True]
    assert (tmp_path / "lung.kraken2.report.txt").exists(), "this folder is the user's"


def test_a_run_has_no_tables_under_a_former_name_in_its_own_folder(
    run: Path, tmp_path: Path
) -> None:
    copied_run = RunDir(Path(shutil.copytree(run, tmp_path / "run")))
    folder = copied_run.root / "export"
    export(copied_run, folder, "lung")
    (folder / "multiqc_report.html").write_text("of the user")
    paths = export(copied_run, folder, "gut")
    assert sorted(folder.iterdir()) == sorted([*paths, folder / "multiqc_report.html"])
    # A link is not followed to the tables of somebody else.
    other_folder = tmp_path / "other"
    export(copied_run, other_folder, "lung")
    shutil.rmtree(folder)
    folder.symlink_to(other_folder)
    export(copied_run, folder, "gut")
    assert (other_folder / "lung.kraken2.report.txt").exists()


def test_files_that_are_there_stay_unless_force_is_given(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    existing_file = tmp_path / "out" / "contigs.tsv"
    existing_file.parent.mkdir()
    existing_file.write_text("precious")
    words = ["export", str(run), "-o", str(existing_file.parent)]
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert (
        output.err
        == f"virnuc: {existing_file} would be overwritten; choose another name, or --force\n"
    )
    assert [path.name for path in existing_file.parent.iterdir()] == ["contigs.tsv"]
    assert existing_file.read_text() == "precious"
    assert cli.main([*words, "--force"]) == 0
    assert documented(existing_file) > 20
    assert cli.main(words) == 2
    for _ in range(2):
        assert cli.main(["export", str(run)]) == 0, "the run's own are written anew"


def test_a_store_of_other_reads_is_not_taken_for_the_runs(run: Path, tmp_path: Path) -> None:
    copied_run = Path(shutil.copytree(run, tmp_path / "run"))
    other_reads = tmp_path / "other.fasta"
    other_reads.write_text("".join(f">x{number}\n{'ACGTTGCA' * 90}\n" for number in range(45)))
    stage(
        StageSpec(reads=(str(other_reads),), model_length=CHUNK_BASES),
        copied_run / "orfs.h5",
        rebuild=True,
    )
    with pytest.raises(ConfigError, match="holds other reads than the run was made from"):
        export(RunDir(copied_run), tmp_path / "out", "x")


def test_an_edited_table_is_not_exported(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    flip_bit(copied / "reads.tsv")
    with pytest.raises(InputError, match=r"reads\.tsv: is not as the run left it"):
        export(RunDir(copied), tmp_path / "out", "sample")
    assert not (tmp_path / "out").exists()
    assert cli.main(["export", str(copied), "--out", str(tmp_path / "out")]) == InputError.exit_code
    assert "summary.json has another digest" in capsys.readouterr().err
    edit_json(copied / "summary.json", lambda summary: summary.update(files=None))
    caplog.clear()
    assert export(RunDir(copied), tmp_path / "out", "sample"), "older summaries have no digests"
    (warning,) = caplog.records
    assert "reads.tsv: was written by an older version" in warning.message


def test_a_run_that_is_not_complete_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="holds no complete run"):
        export(RunDir(tmp_path), tmp_path / "out", "x")
    assert cli.main(["export", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
