"""Samples by a sheet or by file names: which reads are whose, and which sheets are refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.columns import documented
from virnuc_core.config import ReadsSpec
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.sample_sheet import read_sheet
from virnuc_core.reads.samples import (
    SampleRow,
    read_samples,
    samples_by_file_name,
    write_samples,
)
from virnuc_core.reads.sources import find_inputs

HEADER = "sample,fastq_1,fastq_2\n"


def sheet(folder: Path, text: str) -> Path:
    path = folder / "sheet.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("separator", [",", "\t"])
def test_rows_of_a_sample_are_joined_as_lanes_and_other_columns_are_ignored(
    tmp_path: Path, separator: str
) -> None:
    (tmp_path / "b_1.fq").touch()
    rows = (
        "sample,lab,fastq_1,fastq_2",
        "a,x,a_L1_1.fq,a_L1_2.fq",
        "",
        'b,"x",b_1.fq,',
        "a,x,/a_L2_1.fq,a_L2_2.fq",
    )
    samples = read_sheet(sheet(tmp_path, "\ufeff" + "\r\n".join(rows).replace(",", separator)))
    assert list(samples) == ["a", "b"]
    assert samples["a"] == ReadsSpec(
        mates_1=("a_L1_1.fq", "/a_L2_1.fq"), mates_2=("a_L1_2.fq", "a_L2_2.fq")
    )
    assert samples["b"].reads == (str(tmp_path / "b_1.fq"),), "not here, but beside the sheet"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,fastq_1\na,b\n", r"sheet\.csv:1: no column sample; the first line names"),
        ("", r"sheet\.csv:1: no column sample"),
        (HEADER + ",,\n", r"names no sample"),
        (
            "sample,fastq_1,fastq2\na,a_1.fq,a_2.fq\n",
            r"sheet\.csv:1: no column fastq_2; the first line names",
        ),
        ("sample,fastq_1\na,a_1.fq,a_2.fq\n", r"sheet\.csv:2: sample 'a': more cells than columns"),
        (HEADER + ",,,x\n", r"sheet\.csv:2: sample '': more cells"),
        (HEADER + "a,a.fq,\n,b.fq,\n", r"sheet\.csv:3: sample '': not the name of a directory"),
        (HEADER + "a,,a_2.fq\n", r"sheet\.csv:2: sample 'a': no file in fastq_1; name a file"),
        (HEADER + "a,a.fq,a.fq\n", r"sheet\.csv:2: sample 'a': fastq_1 and fastq_2 name the same"),
        (HEADER + "a,a.fq,\nb,b.fq,\na,a.fq,\n", r"sheet\.csv:4: sample 'a': a\.fq is named twice"),
        (
            HEADER + "a,a_1.fq,a_2.fq\n\na,b_1.fq,\n",
            r"sheet\.csv:4: sample 'a': some of its lines have a file in fastq_2",
        ),
        (
            HEADER + "a/b,a.fq,\n",
            r"sheet\.csv:2: sample 'a/b': not the name of a directory; use letters",
        ),
        (HEADER + "..,a.fq,\n", r"not the name"),
        (HEADER + "-o,a.fq,\n", r"not the name"),
        (HEADER + "shards,a.fq,\n", r"'shards': virnuc writes a file of this name"),
        (HEADER + "samples.tsv,a.fq,\n", r"virnuc writes a file of this name"),
        (HEADER + "a,-,\n", r"no file in fastq_1"),
        (
            HEADER + "a,a.fq,\nb," + "b" * 140_000 + ",\n",
            r"sheet\.csv:3: field larger than .*; is a quotation mark left",
        ),
        ("x" * 140_000 + HEADER, r"sheet\.csv:1: field larger"),
        (HEADER + "a" * 100_000 + ",a.fq,\n", r"sheet\.csv:2: sample 'a{100}': not the name"),
    ],
)
def test_a_wrong_sheet_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error_info:
        read_sheet(sheet(tmp_path, text))
    assert "\n" not in str(error_info.value)


def test_a_sheet_written_by_hand_is_accepted(tmp_path: Path) -> None:
    rows = (
        ' sample , fastq_1 , "fastq_2 ",',
        "a, a_1.fq , a_2.fq,",
        ",,,",
        '"b", "b,1.fq", "b 2.fq"',
        "",
        "c,c.fq",
    )
    assert read_sheet(sheet(tmp_path, "\r\n".join(rows))) == {
        "a": ReadsSpec(mates_1=("a_1.fq",), mates_2=("a_2.fq",)),
        "b": ReadsSpec(mates_1=("b,1.fq",), mates_2=("b 2.fq",)),
        "c": ReadsSpec(reads=("c.fq",)),
    }


def test_an_impossible_file_name_fails_only_its_own_sample(tmp_path: Path) -> None:
    samples = read_sheet(sheet(tmp_path, f"{HEADER}a,a.fq,\nb,{'b' * 100_000},\n"))
    assert samples["a"].reads == ("a.fq",)
    with pytest.raises(
        InputError, match=r"^b{100}: cannot be read: File name too long; check the path"
    ):
        find_inputs(samples["b"].all_inputs)


def test_a_sheet_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sheet.csv").write_bytes(b"sample,fastq_1\n\xff\xfe,x\n")
    with pytest.raises(InputError, match="not valid UTF-8"):
        read_sheet(tmp_path / "sheet.csv")
    with pytest.raises(InputError, match=r"absent.*cannot be read"):
        read_sheet(tmp_path / "absent.csv")


def files(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("@r\nACGT\n+\nIIII\n")
    return [str(folder / name) for name in names]


def test_files_become_samples_by_their_names(tmp_path: Path) -> None:
    names = ("lung_S1_L001_R1_001.fastq", "lung_S1_L001_R2_001.fastq", "lung_S1_L002_R1_001.fastq")
    paths = files(tmp_path, *names, "lung_S1_L002_R2_001.fastq", "gut.fq")
    samples = samples_by_file_name(ReadsSpec(reads=(str(tmp_path),)))
    assert samples == {
        "lung_S1": ReadsSpec(mates_1=(paths[0], paths[2]), mates_2=(paths[1], paths[3])),
        "gut": ReadsSpec(reads=(paths[4],)),
    }
    assert samples_by_file_name(ReadsSpec(reads=tuple(paths))) == samples, "as the shell names them"
    assert list(samples_by_file_name(ReadsSpec(reads=(paths[4], paths[0]), pairs=False))) == [
        "gut",
        "lung_S1_L001_R1_001",
    ]


def test_all_files_of_a_specimen_are_one_sample(tmp_path: Path) -> None:
    paths = files(tmp_path, "SRR7.fastq", "SRR7_1.fastq", "SRR7_2.fastq", "P_R1.fq", "P_R2.fq")
    files(tmp_path, "P_I1.fq")
    by_name = samples_by_file_name(ReadsSpec(reads=(str(tmp_path),)))
    assert by_name == {
        "P": ReadsSpec(mates_1=(paths[3],), mates_2=(paths[4],)),
        "SRR7": ReadsSpec(mates_1=(paths[1],), mates_2=(paths[2],), reads=(paths[0],)),
    }
    apart = samples_by_file_name(ReadsSpec(reads=tuple(paths[3:]), pairs=False))
    assert apart == {"P": ReadsSpec(reads=tuple(paths[3:]))}, "each read by itself, one specimen"


def test_a_sample_with_an_empty_or_missing_file_is_kept(
    tmp_path: Path,
) -> None:
    files(tmp_path, "gut.fq")
    empty = [tmp_path / name for name in ("blank_R1.fastq.gz", "blank_R2.fastq.gz", "none.fq")]
    for path in empty:
        path.write_bytes(gzip.compress(b"") if path.suffix == ".gz" else b"")
    (tmp_path / "away.fq").symlink_to(tmp_path / "nothing.fq")
    (tmp_path / "counts.tsv.gz").write_bytes(b"no reads, and not called so")
    samples = samples_by_file_name(ReadsSpec(reads=(str(tmp_path),)))
    assert set(samples) == {"gut", "blank", "none", "away"}
    assert samples["blank"] == ReadsSpec(mates_1=(str(empty[0]),), mates_2=(str(empty[1]),))


def test_equal_and_unfit_sample_names_are_refused(tmp_path: Path) -> None:
    same = files(tmp_path, "a/x.fq", "b/x.fq")
    with pytest.raises(
        ConfigError, match=r"b/x\.fq: named as .*a/x\.fq is; rename one, or write a sample sheet"
    ):
        samples_by_file_name(ReadsSpec(reads=tuple(same)))
    with pytest.raises(
        ConfigError, match="virnuc writes a file of this name itself; use another name, or write"
    ):
        samples_by_file_name(ReadsSpec(reads=tuple(files(tmp_path, "shards.fq"))))


def test_the_table_is_as_documented(tmp_path: Path) -> None:
    table = tmp_path / "samples.tsv"
    row = SampleRow(
        sample="a", fate="predicted", reads=3, scored=2, viral=1, share=0.333333, flags="orphans=1"
    )
    write_samples(
        table,
        [row, SampleRow(sample="b", fate="failed", note="b.fq:\tno\nsuch"), SampleRow(sample="c")],
    )
    assert documented(table) == 3
    assert table.read_text().splitlines()[2] == "b\tfailed\t\t\t\t\t\tb.fq: no such"


def test_names_and_notes_are_not_run_as_formulas(tmp_path: Path) -> None:
    table = tmp_path / "samples.tsv"
    write_samples(table, [SampleRow(sample="=1+1", fate="failed", note="\t@SUM(A1)")])
    cells = table.read_text().splitlines()[1].split("\t")
    assert cells[0] == "'=1+1"
    assert cells[-1] == "'@SUM(A1)"


def test_a_table_of_samples_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        SampleRow(
            sample="=a b", fate="predicted", reads=4, scored=3, viral=1, share=0.25, flags="x=1"
        ),
        SampleRow(sample="lost", fate="failed", note="-no such file"),
        SampleRow(sample="next"),
    ]
    path = tmp_path / "samples.tsv"
    write_samples(path, rows)
    assert read_samples(path) == rows
    for text in ("", "sample\tfate\na\n", "sample\tfate\na\tlost\n", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(InputError, match="is no table of samples"):
            read_samples(path)
    path.unlink()
    with pytest.raises(InputError, match="is no table of samples"):
        read_samples(path)
