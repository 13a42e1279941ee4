"""A question about a file that the system does not answer is not answered "no" by us."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tests.failing_files import LIST, READ, STAT, failing_calls, words_of
from virnuc_core.inbox import Ledger
from virnuc_core.system_errors import list_folder, storage_error, target_exists

from .engine.forked_programs import ForkedPrograms

PROGRAMS = "tests.unit.unknown_answers"
# Questions for which a missing permission is an answer: the reads of a user who may not read them
# are refused as reads, and a library that is given such a path cannot open it either.
MAY_BE_REFUSED = {
    "reads": "InputError: ",
    "reference": "returned False",
    "reads in the output": "returned None",
}


def run_program(
    programs: ForkedPrograms, name: str, *arguments: object, variables: dict[str, str]
) -> str:
    """Run a program of `unknown_answers` in a child, which must end well; return what it prints."""
    child = programs.run(f"{PROGRAMS}.{name}", arguments=arguments, variables=variables)
    assert child.returncode == 0, child.stderr
    return child.stdout


def ask(
    programs: ForkedPrograms, kind: str, folder: Path, number: int, calls: str
) -> dict[str, str]:
    """Return how each question of a kind ends in a child for which calls of the system fail."""
    variables = failing_calls("/unreadable", number, calls)
    printed = run_program(programs, "ask_in_child", kind, folder, variables=variables)
    results: dict[str, str] = json.loads(printed.splitlines()[-1])
    return results


@pytest.mark.parametrize(
    "number",
    [errno.ESTALE, pytest.param(errno.EIO, marks=pytest.mark.slow), errno.EACCES],
    ids=errno.errorcode.get,
)
@pytest.mark.parametrize(("kind", "calls"), [("lists", LIST), ("looks", STAT)])
def test_no_question_that_is_not_answered_is_answered_no(
    programs: ForkedPrograms, kind: str, calls: str, number: int, tmp_path: Path
) -> None:
    folder = tmp_path / "unreadable"
    for name in ("heads", "telemetry", "shards", "2026-01-01T0000", "devices-1", "report"):
        (folder / name).mkdir(parents=True)
    for name in ("reads.fasta", "sheet.tsv", "telemetry/telemetry_1.h5"):
        (folder / name).write_text(">read1\nACGT\n")
    mistakes = {}
    for question, result in ask(programs, kind, folder, number, calls).items():
        # An error of ours, or a problem that a report lists, with the system's words.
        is_known = result.startswith(("UnreadableError: ", "returned ")) and (
            words_of(number) in result
        )
        if number == errno.EACCES and question in MAY_BE_REFUSED:
            is_known = result.startswith(MAY_BE_REFUSED[question])
        if not is_known:
            mistakes[question] = result
    assert mistakes == {}


def test_the_same_questions_are_answered_where_the_system_answers(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    """Otherwise the test above could pass because of another error."""
    folder = tmp_path / "readable"
    (folder / "2026-01-01T0000").mkdir(parents=True)
    (folder / "reads.fasta").write_text(">read1\nACGT\n")
    for kind in ("lists", "looks"):
        answers = ask(programs, kind, folder, errno.EIO, LIST + STAT)
        for question, result in answers.items():
            assert words_of(errno.EIO) not in result, question


@pytest.mark.parametrize(
    ("number", "fate"), [(errno.EIO, "waiting"), (errno.EACCES, "failed")], ids=str
)
def test_a_folder_of_an_inbox_that_cannot_be_listed_has_a_row(
    programs: ForkedPrograms, number: int, fate: str, tmp_path: Path
) -> None:
    inbox = tmp_path / "inbox"
    (inbox / "unreadable").mkdir(parents=True)
    (inbox / "sub").mkdir()
    (inbox / "sub" / "reads.fasta").write_text(">read1\nACGT\n")
    variables = failing_calls("/unreadable", number, LIST)
    out = tmp_path / "out"
    printed = run_program(programs, "scan_inbox_in_child", inbox, out, variables=variables)
    rows = {}
    for line in printed.splitlines():
        file, *rest = line.split("|")
        rows[file] = rest
    assert rows["sub/reads.fasta"][0] == "waiting"
    assert rows["unreadable/"][0] == fate
    assert words_of(number) in rows["unreadable/"][1]


def test_an_inbox_is_searched_as_before(tmp_path: Path) -> None:
    """Hidden files and folders, links to folders, and files that are still copied are left out."""
    inbox, elsewhere = tmp_path / "inbox", tmp_path / "elsewhere"
    for folder in (inbox / "a" / "b", inbox / ".hidden", elsewhere):
        folder.mkdir(parents=True)
        (folder / "reads.fasta").write_text(f">{folder.name}\nACGT\n")
    (inbox / ".reads.fasta").touch()
    (inbox / "reads.part").touch()
    (inbox / "link").symlink_to(elsewhere)
    rows = Ledger(inbox, tmp_path / "out").scan(settle_s=-1)
    assert [row.file for row in rows] == ["a/b/reads.fasta"]


def test_a_disk_that_fails_twice_is_reported_without_its_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("virnuc_core.system_errors.shutil.disk_usage", fail)
    error = storage_error(OSError(errno.ENOSPC, "No space left"), tmp_path / "file")
    assert error is not None
    assert "free there" not in str(error)


def test_names_that_no_file_can_have_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for name in ("x" * 300, "zero\0byte", "a", "absent", "absent/file"):
        assert not target_exists(tmp_path / name), name
    assert target_exists(tmp_path)


def test_a_folder_is_listed_by_pattern_in_order(tmp_path: Path) -> None:
    for name in ("b.h5", "a.h5", ".c.h5", "d.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in list_folder(tmp_path, "*.h5")] == [".c.h5", "a.h5", "b.h5"]
    assert list_folder(tmp_path / "absent") == []
    assert list_folder(tmp_path / "d.txt") == []
    assert len(list_folder(tmp_path)) == 4


@pytest.mark.parametrize(
    ("way", "expected"), [("recovers", "True ['one']"), ("stays", "UnreadableError: ")]
)
def test_an_error_while_a_bam_file_is_looked_at_is_not_taken_for_single_reads(
    programs: ForkedPrograms, way: str, expected: str, tmp_path: Path
) -> None:
    pysam = pytest.importorskip("pysam")
    bam = tmp_path / "unreadable.bam"
    header = {"HD": {"VN": "1.6"}, "RG": [{"ID": "1", "SM": "one"}]}
    with pysam.AlignmentFile(bam, "wb", header=header) as file:
        for number in range(40):
            for flag in (77, 141):  # first and second mate, not aligned
                record = pysam.AlignedSegment(file.header)
                record.query_name, record.flag = f"read{number}", flag
                record.query_sequence = "ACGT"
                record.set_tag("RG", "1")
                file.write(record)
    while_file = tmp_path / "failing"
    variables = failing_calls("/unreadable", errno.ESTALE, READ, while_file)
    arguments = (bam, while_file, way)
    printed = run_program(programs, "read_pairs_in_child", *arguments, variables=variables)
    assert printed.startswith(expected)
