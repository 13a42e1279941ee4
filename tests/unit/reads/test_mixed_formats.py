"""A file in which one format follows another is refused as a whole: nobody knows what would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from virnuc_core.errors import InputError
from virnuc_core.reads.stage import StageSpec, stage

FASTA = "".join(f">a{i}\nACGTACGTAC{'ACGT'[i % 4] * 50}\n" for i in range(4))
FASTQ = "".join(f"@q{i}\nACGTACGTAC{'ACGT'[i % 4] * 50}\n+\n{'I' * 60}\n" for i in range(4))
WRAPPED_FASTQ = "@w\nACGT\nACGT\n+\nIIII\nIIII\n"


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (FASTA + FASTQ, 7, "FASTQ begins in or at this record of a FASTA file"),
        (FASTA + FASTQ + FASTA, 7, "FASTQ begins in or at this record of a FASTA file"),
        (FASTA + "\n" + FASTQ, 7, "FASTQ begins in or at this record of a FASTA file"),
        (FASTQ + FASTA, 17, "FASTA begins in or at this record of a FASTQ file"),
        (FASTQ + FASTA + FASTQ, 17, "FASTA begins in or at this record of a FASTQ file"),
        (WRAPPED_FASTQ + FASTA, 7, "FASTA begins in or at this record of a FASTQ file"),
    ],
)
def test_files_joined_of_two_formats_are_refused(
    tmp_path: Path,
    on_error: Literal["stop", "skip"],
    workers: int,
    text: str,
    line: int,
    message: str,
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text)
    spec = StageSpec(reads=(str(path),), model_length=60, on_error=on_error, stage_workers=workers)
    with pytest.raises(InputError, match=message) as error_info:
        stage(spec, tmp_path / "orfs.h5")
    assert error_info.value.line == line


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("earlier", ["good", "broken"])
def test_any_number_of_workers_names_the_same_file(
    tmp_path: Path, on_error: Literal["stop", "skip"], earlier: str
) -> None:
    """The first error of the input is raised, in whichever process a piece is parsed."""
    broken = "@b\nACGT\n+\nI\n" if earlier == "broken" else ""
    texts = [FASTA, FASTQ + broken, FASTA, FASTA + FASTQ, FASTA, FASTQ + FASTA, FASTA + FASTQ]
    files = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        files.append(str(path))
    messages = set()
    for workers in (1, 2, 3):
        spec = StageSpec(
            reads=tuple(files), model_length=60, on_error=on_error, stage_workers=workers
        )
        with pytest.raises(InputError) as error_info:
            stage(spec, tmp_path / "orfs.h5")
        messages.add(str(error_info.value))
    [message] = messages
    is_broken_record = earlier == "broken" and on_error == "stop"
    assert ("1.txt:17" if is_broken_record else "3.txt:7") in message


def test_at_sign_within_the_bases_is_an_illegal_letter_of_one_record(tmp_path: Path) -> None:
    path = tmp_path / "a.fa"
    path.write_text(FASTA.replace("a1\nACGTACG", "a1\nACG@ACG"))
    spec = StageSpec(reads=(str(path),), model_length=60, on_error="skip")
    assert stage(spec, tmp_path / "orfs.h5").counts.n_reads == 3
