"""Sample sheets as people and spreadsheet programs write them, and addresses in them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from virnuc_core.config import ReadsSpec
from virnuc_core.errors import InputError
from virnuc_core.reads.mate_files import find_reads
from virnuc_core.reads.sample_sheet import read_sheet
from virnuc_core.reads.samples import check_sheet_files

HEADER = "sample,fastq_1,fastq_2\n"
LINE = "a,a_1.fq,a_2.fq\n"
PAIR = ReadsSpec(mates_1=("a_1.fq",), mates_2=("a_2.fq",))


def sheet(folder: Path, content: str | bytes) -> Path:
    """Write a sheet."""
    path = folder / "sheet.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "content",
    [
        (HEADER + LINE).replace(",", ";"),
        "sep=,\n" + HEADER + LINE,
        "sep=;\r\n" + (HEADER + LINE).replace(",", ";").replace("\n", "\r\n"),
        '"sep=|"\n' + (HEADER + LINE).replace(",", "|"),
        "\n \n,,,\n" + HEADER + LINE,
        "Sample,FASTQ_1,Fastq_2\n" + LINE,
        "# plate 7\n" + HEADER + LINE,
        "#sample,fastq_1,fastq_2\n" + LINE,
        (HEADER + LINE).replace("\n", "\r"),
        "sample,fastq_1,fastq_2,,\na,a_1.fq,a_2.fq,,\n,,,,\n",
        '"sample","fastq_1","fastq_2"\n"a\n","a_1.fq","a_2.fq"\n',
        "\ufeff" + HEADER + "\u200ba\u00a0,\u200ba_1.fq ,a_2.fq\u2060\n",
        (HEADER + LINE).replace(",", "\t").encode("utf-16"),
        ("\ufeff" + HEADER + LINE).encode("utf-16-be"),
        HEADER + LINE + "\n\n,,\n",
    ],
)
def test_a_sheet_that_means_one_thing_only_is_accepted(
    tmp_path: Path, content: str | bytes
) -> None:
    assert read_sheet(sheet(tmp_path, content)) == {"a": PAIR}


def test_other_words_for_no_second_file_and_fasta(tmp_path: Path) -> None:
    text = "sample,fastq_1,fastq_2,fasta\na,a.fq,NA,\nb,b.fq,n/a,\nc,,,c.fa\n"
    samples = read_sheet(sheet(tmp_path, text))
    assert [samples[name].reads for name in "abc"] == [("a.fq",), ("b.fq",), ("c.fa",)]


def test_a_sheet_of_files_alone_names_samples_by_their_files(tmp_path: Path) -> None:
    rows = ["fastq_1,fastq_2", "P_S1_L001_R1_001.fastq.gz,P_S1_L001_R2_001.fastq.gz"]
    rows += ["P_S1_L002_R1_001.fastq.gz,P_S1_L002_R2_001.fastq.gz", "gut.fq,"]
    samples = read_sheet(sheet(tmp_path, "\n".join(rows)))
    assert list(samples) == ["P_S1", "gut"]
    assert len(samples["P_S1"].mates_1) == 2
    with pytest.raises(InputError, match=r"b/x\.fq: named as a/x\.fq is; add a column sample"):
        read_sheet(sheet(tmp_path, "fastq_1\na/x.fq\nb/x.fq\n"))


def test_a_separator_letter_in_a_name_does_not_divide_a_line(tmp_path: Path) -> None:
    name = str(tmp_path / "a\u2028_1.fq")
    Path(name).write_text("@r\nA\n+\nI\n")
    assert read_sheet(sheet(tmp_path, f"{HEADER}a,{name},\n"))["a"].reads == (name,)
    with pytest.raises(InputError, match=r"sheet\.csv:2: .*invisible character U\+2028.*remove it"):
        read_sheet(sheet(tmp_path, f"{HEADER}a,b\u2028_1.fq,\n"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            HEADER.replace(",", "\t") + LINE,
            r"csv:2: .*separated by commas.*of the first line by TAB",
        ),
        ("sample,fastq_1,fastq_1\n" + LINE, r"csv:1: the column fastq_1 is named twice"),
        ("sample;reads\na;b\n", r"csv:1: no column .*; found: sample, reads"),
        (
            "probe,datei\na,b\n",
            r"csv:1: no column sample; the first line names .*found: probe, datei",
        ),
        ("", r"csv:1: no column sample; .*the sheet is empty"),
        ("\n\nprobe,x\n", r"csv:3: no column sample"),
        (
            (HEADER + "\xe9,a.fq,\n").encode("latin-1"),
            "not valid UTF-8 .save the sheet as CSV UTF-8",
        ),
        (b"PK\x03\x04rest", "a workbook, not a table as text; save it as CSV"),
        ("sample,fastq_1\n".encode("utf-16-le"), "NUL bytes; save the sheet as CSV UTF-8"),
    ],
)
def test_a_sheet_that_is_not_clear_is_refused_with_what_was_found(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_sheet(sheet(tmp_path, content))


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder with three files of reads, a link to the first, and a second name of it."""
    (tmp_path / "sub").mkdir()
    for name in ("x_1.fq", "x_2.fq", "y_1.fq"):
        (tmp_path / name).write_text("@r\nA\n+\nI\n")
    (tmp_path / "soft.fq").symlink_to("x_1.fq")
    os.link(tmp_path / "x_1.fq", tmp_path / "hard.fq")
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            "A,x_1.fq,x_2.fq\nB,x_1.fq,x_2.fq",
            r"csv:3: sample 'B': .*also a file of sample 'A' \(line 2\), and so is its mate",
        ),
        ("A,x_1.fq,x_2.fq\nB,x_2.fq,x_1.fq", "give each pair to one sample"),
        ("A,x_1.fq,x_2.fq\nB,hard.fq,./x_2.fq", "give each pair to one sample"),
        ("A,x_1.fq,x_2.fq\nA,x_2.fq,x_1.fq", "named twice"),
        ("A,x_1.fq,x_2.fq\nA,./x_1.fq,sub/../x_2.fq", "named twice"),
        ("A,x_1.fq,\nA,soft.fq,", "named twice"),
        ("A,x_1.fq,soft.fq", r"name the same file, .*x_1\.fq; .* \(is it .*x_2\.fq\?\)"),
    ],
)
def test_a_pair_belongs_to_one_sample(linked: Path, rows: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_sheet(sheet(linked, HEADER + rows))


@pytest.mark.parametrize(
    "rows",
    [
        "A,x_1.fq,\nB,soft.fq,",
        "A,x_1.fq,\nB,hard.fq,",
        "A,x_1.fq,x_2.fq\nB,y_1.fq,x_2.fq",
        "A,https://h/r.fq,\nB,https://h/r.fq,",
    ],
)
def test_a_file_of_two_samples_is_warned_of(
    linked: Path, rows: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert list(read_sheet(sheet(linked, HEADER + rows))) == ["A", "B"]
    assert "sheet.csv:3: sample 'B': " in caplog.text
    assert "is also a file of sample 'A' (line 2)" in caplog.text


def test_doubtful_lines_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rows = ["a,l1_R1.fq,l2_R2.fq", "a,l2_R1.fq,l1_R2.fq", "b,x_2.fq,x_1.fq"]
    rows += ["p,patient_1.fq,", "P,patient_2.fq,"]
    read_sheet(sheet(tmp_path, HEADER + "\n".join(rows)))
    assert [record.message.split("sheet.csv:")[1] for record in caplog.records] == [
        "2: l1_R1.fq and l1_R2.fq are not on one line, although their names are those of mates",
        "3: l2_R1.fq and l2_R2.fq are not on one line, although their names are those of mates",
        "4: x_2.fq is in fastq_1 and x_1.fq in fastq_2, although their names are those of mates",
        " samples 'p' and 'P' differ only by capital letters",
    ]


def test_reads_without_mates_of_an_archive_belong_to_their_sample(tmp_path: Path) -> None:
    samples = read_sheet(sheet(tmp_path, f"{HEADER}X,SRR_1.fq,SRR_2.fq\nX,SRR.fq,\n"))
    assert samples == {
        "X": ReadsSpec(mates_1=("SRR_1.fq",), mates_2=("SRR_2.fq",), reads=("SRR.fq",))
    }


# --- Files that are not there ---------------------------------------------------------------------


def test_a_sheet_without_a_usable_sample_is_refused_with_each_line(linked: Path) -> None:
    path = sheet(linked, f"{HEADER}a,'{linked}/x_1.fq','{linked}/x_2.fq'\nb,‘no.fq’,\nc,no.fq,\n")
    with pytest.raises(InputError) as error_info:
        check_sheet_files(path)
    quotes = "no such file or folder; remove the quotes around the path"
    assert str(error_info.value) == (
        f"{path}:2: sample 'a': '{linked}/x_1.fq': {quotes}, the file is there without them; "
        f"{path}:2: sample 'a': '{linked}/x_2.fq': {quotes}, the file is there without them; "
        f"{path}:3: sample 'b': ‘no.fq’: {quotes}; and 1 more"
    )
    assert error_info.value.exit_code == 2


def test_files_that_are_not_there_are_told_before_the_others_are_predicted(
    linked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (linked / "empty").mkdir()
    rows = ["a,x_1.fq,x_2.fq", "b,no.fq,", "c,y_1.fq,sub", "d,empty,", "e,https://h/x.fq,"]
    path = sheet(linked, HEADER + "\n".join(rows))
    check_sheet_files(path)
    end = "this sample will fail, the others are predicted"
    sub = path.parent / "sub"
    empty = path.parent / "empty"
    assert [record.message for record in caplog.records] == [
        f"{path}:3: sample 'b': no.fq: no such file or folder; check the path; {end}",
        f"{path}:4: sample 'c': {sub}: is a folder; name the file of mates in it; {end}",
        f"{path}:5: sample 'd': {empty}: the folder holds no FASTA, FASTQ, BAM, CRAM or SAM file; "
        f"name the files; {end}",
    ]


def test_a_missing_file_of_a_sheet_of_files_alone_is_told_by_its_line(tmp_path: Path) -> None:
    path = sheet(tmp_path, "fastq_1\nno.fq\n")
    with pytest.raises(InputError, match=r"sheet\.csv:2: no\.fq: no such file or folder"):
        check_sheet_files(path)


# --- Addresses and the home folder ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s3://bucket/x_1.fq.gz", r"s3://bucket/x_1\.fq\.gz: .*\(aws s3 cp s3://bucket/x_1"),
        ("s3:/bucket/x.fq", r"\(aws s3 cp s3://bucket/x\.fq \.\)"),
        ("S3://bucket/x.fq", r"aws s3 cp s3://bucket"),
        ("gs://b/x.fq", r"gcloud storage cp gs://b/x\.fq"),
        ("ftp://h/x.fq", r"curl -O ftp://h/x\.fq"),
        ("ftp:/h/x.fq", r"curl -O ftp://h/x\.fq"),
        ("az://c/x.fq", "azcopy copy az://c"),
        ("drs://h/x", "drs:// is not read directly; fetch it first, and name"),
        ("https:/h/x.fq", "has one slash; write https://h/x"),
        ("me@node7:/data/x.fq", r"\(scp me@node7:/data/x\.fq \.\)"),
    ],
)
def test_an_address_that_is_not_read_is_refused_with_the_command_that_fetches_it(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ReadsSpec(reads=(name,))
    with pytest.raises(InputError, match=rf"sheet\.csv:2: sample 'a': .*{message}"):
        read_sheet(sheet(tmp_path, f"{HEADER}a,{name},\n"))


def test_passwords_of_addresses_are_not_shown() -> None:
    with pytest.raises(InputError) as error_info:
        ReadsSpec(reads=("ftp://me:geheim@h/x.fq",))
    assert "geheim" not in str(error_info.value)


def test_the_home_folder_and_file_addresses_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.chdir(tmp_path)
    assert ReadsSpec(reads=("~/x.fq",)).reads == ("/home/ada/x.fq",)
    assert ReadsSpec(mates_1=("~/1",), mates_2=("~/2",)).mates_2 == ("/home/ada/2",)
    assert ReadsSpec(reads=("file:///data/a%20b.fq",)).reads == ("/data/a b.fq",)
    assert read_sheet(sheet(tmp_path, f"{HEADER}a,~/x.fq,\n"))["a"].reads == ("/home/ada/x.fq",)
    Path("~").mkdir()
    Path("~/x.fq").touch()
    assert ReadsSpec(reads=("~/x.fq",)).reads == ("~/x.fq",), "a folder that is called so"


def test_mates_on_two_lines_of_one_sample_are_warned_of_and_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a_R1.fq", "a_R2.fq"):
        (tmp_path / name).write_text("@r\nACGT\n+\nIIII\n")
    [reads] = read_sheet(sheet(tmp_path, "sample,fastq_1\nA,a_R1.fq\nA,a_R2.fq\n")).values()
    assert "are not on one line, although their names are those of mates" in caplog.text
    assert find_reads(reads).pairs == ((str(tmp_path / "a_R1.fq"), str(tmp_path / "a_R2.fq")),)
