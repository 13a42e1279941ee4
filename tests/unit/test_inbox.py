"""The ledger of an inbox: content decides, fates are final, and runs never share a content."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc_core.errors import (
    ConfigError,
    DeviceError,
    InputError,
    NotFiniteError,
    StorageError,
    VirnucError,
    WeightsError,
    WorkerError,
)
from virnuc_core.inbox import Fate, Ledger, Row
from virnuc_core.runfiles import RunSummary

MODIFIED_S = 1_700_000_000  # when files of these tests were last changed
A_READ = ">a\nA\n"


def put(folder: Path, name: str, text: str = A_READ, age_s: int = 0) -> Path:
    """Write a file that was last changed `age_s` before MODIFIED_S."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (MODIFIED_S - age_s, MODIFIED_S - age_s))
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    (tmp_path / "inbox").mkdir()
    return Ledger(tmp_path / "inbox", tmp_path / "out")


def scan_fates(ledger: Ledger) -> dict[str, str]:
    """Return the fate of each file in the inbox."""
    return {row.file: row.fate for row in ledger.scan(settle_s=60)}


def scan_file(ledger: Ledger, file: str) -> Row:
    """Return the row of a file in the inbox."""
    [row] = [row for row in ledger.scan(settle_s=0) if row.file == file]
    return row


def write_prediction(ledger: Ledger, file: str) -> Fate:
    """Write down that a file was predicted."""
    row = scan_file(ledger, file)
    columns = dict(row) | {"fate": "predicted", "run": "runs/x", "reads": "10", "viral": "3"}
    fate = Fate(**columns)
    ledger.write_fate(fate)
    return fate


def ends_with(outcome: RunSummary | Exception) -> Callable[[Row, Path], RunSummary | Exception]:
    """Return a prediction with this outcome."""
    return lambda _row, _run: outcome


# --- What is seen ---------------------------------------------------------------------------------


def test_new_files_wait_oldest_first(ledger: Ledger) -> None:
    put(ledger.inbox, "b.fa", ">b\nA\n", age_s=10)
    put(ledger.inbox, "a.fa")
    assert list(scan_fates(ledger).items()) == [("b.fa", "waiting"), ("a.fa", "waiting")]


def test_a_file_that_may_still_be_arriving_is_not_read(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa")
    [arriving] = ledger.scan(settle_s=60, now_s=MODIFIED_S + 59)
    assert (arriving.fate, arriving.sha256) == ("arriving", "")
    [settled_row] = ledger.scan(settle_s=60, now_s=MODIFIED_S + 61)
    assert settled_row.fate == "waiting"


def test_hidden_and_partial_files_are_ignored(ledger: Ledger) -> None:
    for name in (".hidden.fa", "up.fa.part", ".tmp/x.fa", "y.tmp"):
        put(ledger.inbox, name)
    assert scan_fates(ledger) == {}


def test_of_files_with_the_same_content_only_the_oldest_is_predicted(ledger: Ledger) -> None:
    put(ledger.inbox, "second.fa")
    put(ledger.inbox, "sub/first.fa", age_s=5)
    assert scan_fates(ledger) == {"sub/first.fa": "waiting", "second.fa": "duplicate"}


def test_a_renamed_file_is_not_predicted_again(ledger: Ledger) -> None:
    path = put(ledger.inbox, "a.fa")
    write_prediction(ledger, "a.fa")
    assert scan_fates(ledger) == {"a.fa": "predicted"}
    path.rename(ledger.inbox / "b.fa")
    assert scan_fates(ledger) == {"b.fa": "duplicate"}


def test_new_content_under_an_old_name_is_predicted(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa")
    write_prediction(ledger, "a.fa")
    put(ledger.inbox, "a.fa", ">a\nC\n")
    assert scan_fates(ledger) == {"a.fa": "waiting"}


def test_an_unchanged_file_is_not_hashed_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ledger.inbox, "a.fa")
    ledger.write_table(ledger.scan(settle_s=0))
    [known_row] = ledger.read_table()

    def refuse(_: Path) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr("virnuc_core.inbox.sha256_of", refuse)
    [unchanged_row] = ledger.scan(settle_s=0)
    assert unchanged_row.sha256 == known_row.sha256
    put(ledger.inbox, "a.fa", ">a\nAA\n")
    with pytest.raises(AssertionError):
        ledger.scan(settle_s=0)


def test_a_file_that_cannot_be_opened_or_named_does_not_stop_the_others(ledger: Ledger) -> None:
    put(ledger.inbox, "good.fa", ">a\nA\n")
    put(ledger.inbox, os.fsdecode(b"latin-\xe9.fa"), ">b\nA\n")
    put(ledger.inbox, "line\rbreak.fa", ">c\nA\n")
    unreadable = "/proc/self/mem"  # opens, and cannot be read by anybody
    (ledger.inbox / "broken.fa").symlink_to(unreadable)
    (ledger.inbox / "loop.fa").symlink_to("loop.fa")
    for _ in range(2):  # the second scan reads the table of the first
        ledger.write_table(ledger.scan(settle_s=0))
    rows = {row.file: row for row in ledger.read_table()}
    assert {file: row.fate for file, row in rows.items()} == {
        "good.fa": "waiting",
        "latin-\\udce9.fa": "failed",
        "line\\rbreak.fa": "failed",
        "broken.fa": "waiting",  # an error of the disk says nothing about the content
        "loop.fa": "failed",
    }
    assert "Input/output error" in rows["broken.fa"].note
    assert "rename it" in rows["line\\rbreak.fa"].note
    due = [file for file, row in rows.items() if ledger.is_due(row, retry_failed=True)]
    assert due == ["good.fa"]


# --- The table ------------------------------------------------------------------------------------


def test_the_table_has_each_files_fate_and_remembers_files_that_are_gone(ledger: Ledger) -> None:
    path = put(ledger.inbox, "a\tb.fa")
    write_prediction(ledger, "a\tb.fa")
    ledger.write_table(ledger.scan(settle_s=0))
    [row] = ledger.read_table()
    assert (row.file, row.fate) == ("a\tb.fa", "predicted")
    assert (row.reads, row.viral) == ("10", "3")
    path.unlink()
    ledger.write_table(ledger.scan(settle_s=0))
    [row] = ledger.read_table()
    assert (row.file, row.fate) == ("a\tb.fa", "gone")


def test_the_table_shows_a_fate_that_an_overlapping_run_has_found(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa")
    rows = ledger.scan(settle_s=0)
    write_prediction(Ledger(ledger.inbox, ledger.out), "a.fa")
    ledger.write_table(rows)
    [row] = ledger.read_table()
    assert row.fate == "predicted"


def test_a_digest_that_was_changed_in_the_table_is_not_believed(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa")
    sha256 = write_prediction(ledger, "a.fa").sha256
    ledger.write_table(ledger.scan(settle_s=0))
    other_digit = "1" if sha256[-1] == "0" else "0"
    text = ledger.table.read_text()
    ledger.table.write_text(text.replace(sha256, sha256[:-1] + other_digit))
    [row] = ledger.scan(settle_s=0)
    assert row.fate == "waiting"

    def refuse(_row: Row, _run: Path) -> RunSummary:
        pytest.fail("predicted again")

    assert ledger.attempt(row, refuse, retry_failed=False).sha256 == sha256


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"file\tsha256\n", b'"', b"a\tb\n1\t2\t3\n"])
def test_a_damaged_table_is_written_anew(ledger: Ledger, damage: bytes) -> None:
    put(ledger.inbox, "a.fa")
    ledger.write_table(ledger.scan(settle_s=0))
    content = ledger.table.read_bytes()
    for damaged_table in (damage, content.replace(b"waiting", b"wanting"), content[:-20]):
        ledger.table.write_bytes(damaged_table)
        ledger.write_table(ledger.scan(settle_s=0))
        assert [row.file for row in ledger.read_table()] == ["a.fa"]


@pytest.mark.parametrize("name", ["=1+1.fa", "+a.fa", "-a.fa", "@a.fa", "\ta.fa", "'=a.fa"])
def test_file_names_are_not_run_as_formulas(ledger: Ledger, name: str) -> None:
    file = put(ledger.inbox, name)
    ledger.write_table(ledger.scan(settle_s=0))
    first_cell = ledger.table.read_text().splitlines()[1].lstrip('"')
    assert first_cell.startswith("'" + name)
    assert [row.file for row in ledger.read_table()] == [name]
    ledger.write_table(ledger.scan(settle_s=0))
    assert [row.fate for row in ledger.read_table()] == ["waiting"], "no second row for the file"
    file.unlink()
    for _ in range(2):
        ledger.write_table([])
        assert [(row.file, row.fate) for row in ledger.read_table()] == [(name, "gone")]


def test_what_killed_writers_left_is_removed(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa")
    [row] = ledger.scan(settle_s=0)
    partial_table = put(ledger.out, ".inbox.tsv.7.part", "half")
    partial_fate = put(ledger.out, f"fates/.{row.sha256}.json.7.part", "half")
    failed_row = ledger.attempt(row, ends_with(InputError("none")), retry_failed=False)
    ledger.write_table([failed_row])
    assert not partial_table.exists()
    assert not partial_fate.exists()


# --- Attempts -------------------------------------------------------------------------------------


def test_only_one_run_holds_a_content(ledger: Ledger) -> None:
    other_ledger = Ledger(ledger.inbox, ledger.out)
    with (
        ledger.claim("aa") as own_owner,
        other_ledger.claim("aa") as owner,
        other_ledger.claim("bb") as free,
    ):
        assert own_owner == ""
        assert owner == f"process {os.getpid()}"
        assert free == ""
    with other_ledger.claim("aa") as owner:
        assert owner == "", "it was given back"


def test_a_content_that_another_run_holds_is_busy(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa")
    [row] = ledger.scan(settle_s=0)
    with Ledger(ledger.inbox, ledger.out).claim(row.sha256):
        outcome = ledger.attempt(row, ends_with(InputError("none")), retry_failed=False)
    assert outcome.fate == "busy"


@pytest.mark.parametrize(
    "error", [StorageError("disk full"), WeightsError("no esm2"), DeviceError("taken")]
)
def test_an_error_of_the_machine_is_no_attempt_with_the_file(
    ledger: Ledger, error: VirnucError
) -> None:
    put(ledger.inbox, "a.fa")
    [row] = ledger.scan(settle_s=0)
    with pytest.raises(type(error)):
        ledger.attempt(row, ends_with(error), retry_failed=False)
    assert ledger.read_fate(row.sha256) is None


@pytest.mark.parametrize("error", [InputError("no reads"), NotFiniteError("of 9 rows NaN for 5")])
def test_an_error_of_the_file_is_its_fate_at_once(ledger: Ledger, error: VirnucError) -> None:
    put(ledger.inbox, "a.fa")
    [row] = ledger.scan(settle_s=0)
    run_directories: list[Path] = []

    def fail(_row: Row, run: Path) -> Exception:
        run_directories.append(run)
        return error

    failed_row = ledger.attempt(row, fail, retry_failed=False)
    assert failed_row.fate == "failed"
    assert str(error) in failed_row.note
    assert run_directories == [ledger.out / "runs" / row.sha256[:16]]
    assert ledger.attempt(row, fail, retry_failed=False) == failed_row
    assert len(run_directories) == 1, "a failed content is not tried again"


def test_a_failed_file_is_predicted_again_on_request(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa")
    [row] = ledger.scan(settle_s=0)
    failed_row = ledger.attempt(row, ends_with(InputError("no reads")), retry_failed=False)
    assert not ledger.is_due(failed_row, retry_failed=False)
    assert ledger.is_due(failed_row, retry_failed=True)
    summary = RunSummary(n_reads=1, fates={"viral": 1})
    predicted_row = ledger.attempt(failed_row, ends_with(summary), retry_failed=True)
    assert (predicted_row.fate, predicted_row.note) == ("predicted", "")
    assert (predicted_row.reads, predicted_row.viral) == ("1", "1")


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), WorkerError("died"), RecursionError("deep")]
)
def test_a_file_that_always_fails_has_failed_after_three_attempts(
    ledger: Ledger, error: Exception
) -> None:
    put(ledger.inbox, "a.fa")
    for expected_fate in ("waiting", "waiting", "failed"):
        [row] = ledger.scan(settle_s=0)
        assert ledger.is_due(row, retry_failed=False), "the next run tries it again"
        row = ledger.attempt(row, ends_with(error), retry_failed=False)
        assert row.fate == expected_fate
        assert str(error) in row.note
        copy = put(ledger.inbox, "copy.fa", age_s=-5)
        assert [row.fate for row in ledger.scan(settle_s=0)] == [expected_fate, "duplicate"]
        copy.unlink()
    assert not ledger.is_due(row, retry_failed=False)


def attempt_in_killed_process(ledger: Ledger) -> None:
    """Attempt the only file in a process that is killed meanwhile."""

    def kill(_row: Row, _run: Path) -> RunSummary:
        os.kill(os.getpid(), 9)
        raise AssertionError("survived")

    child = os.fork()
    if child == 0:
        ledger.attempt(ledger.scan(settle_s=0)[0], kill, retry_failed=False)
        os._exit(0)
    os.waitpid(child, 0)


def test_a_killed_process_is_an_attempt_and_an_interrupted_one_is_not(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa")

    def interrupt(_row: Row, _run: Path) -> RunSummary:
        raise KeyboardInterrupt

    for expected_fate in ("waiting", "waiting", "failed"):
        with pytest.raises(KeyboardInterrupt):
            ledger.attempt(ledger.scan(settle_s=0)[0], interrupt, retry_failed=False)
        attempt_in_killed_process(ledger)
        [row] = ledger.scan(settle_s=0)
        assert row.fate == expected_fate
    assert "out of memory" in row.note


def test_a_failed_content_is_not_predicted_under_another_name(ledger: Ledger) -> None:
    path = put(ledger.inbox, "a.fa")
    [row] = ledger.scan(settle_s=0)
    ledger.attempt(row, ends_with(InputError("no reads")), retry_failed=False)
    path.rename(ledger.inbox / "b.fa")
    assert scan_fates(ledger) == {"b.fa": "duplicate"}


@pytest.mark.parametrize("damage", [b"{}", b"\xff", b"", b"another number"])
def test_a_damaged_fate_is_set_aside_and_its_file_predicted_again(
    ledger: Ledger, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    put(ledger.inbox, "a.fa")
    path = ledger.out / "fates" / f"{write_prediction(ledger, 'a.fa').sha256}.json"
    if damage == b"another number":  # still a fate, but not the one that was written
        damage = re.sub(rb'"reads": "\d', b'"reads": "7', path.read_bytes())
    path.write_bytes(damage)
    assert scan_fates(ledger) == {"a.fa": "waiting"}
    assert path.with_name(f"{path.name}.damaged").read_bytes() == damage
    assert path.name in caplog.text


# --- Folders --------------------------------------------------------------------------------------


def test_an_inbox_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        Ledger(tmp_path / "absent", tmp_path / "out")


@pytest.mark.parametrize("out", ["inbox", "inbox/results"])
def test_results_inside_the_inbox_are_refused(tmp_path: Path, out: str) -> None:
    (tmp_path / "inbox").mkdir()
    with pytest.raises(ConfigError, match="inside the inbox"):
        Ledger(tmp_path / "inbox", tmp_path / out)


# --- Files that cannot be read at the moment ------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOLCK])
def test_a_file_that_cannot_be_read_now_waits_and_keeps_its_attempts(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    put(ledger.inbox, "a.fa")

    def fail(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    row_before = scan_file(ledger, "a.fa")
    with monkeypatch.context() as server_is_away:
        server_is_away.setattr("virnuc_core.inbox.sha256_of", fail)
        row = scan_file(ledger, "a.fa")
        attempted = ledger.attempt(row_before, refuse_to_predict, retry_failed=False)

    for unread_row in (row, attempted):
        assert (unread_row.fate, unread_row.sha256) == ("waiting", "")
        assert os.strerror(number) in unread_row.note
        assert not ledger.is_due(unread_row, retry_failed=True)
    row_after = scan_file(ledger, "a.fa")
    assert ledger.is_due(row_after, retry_failed=False)
    assert ledger.read_fate(row_after.sha256) is None


def refuse_to_predict(row: Row, run: Path) -> RunSummary | Exception:
    raise AssertionError(f"{row.file} was predicted")


@pytest.mark.parametrize("moment", ["between files", "in a prediction"])
def test_results_whose_directory_has_gone_are_not_begun_anew(ledger: Ledger, moment: str) -> None:
    put(ledger.inbox, "a.fa")
    rows = ledger.scan(settle_s=0)
    ledger.write_table(rows)
    lost = ledger.out.with_name("lost")

    def lose_directory(row: Row, run: Path) -> RunSummary | Exception:
        ledger.out.rename(lost)
        return ConfigError(f"{run}: this directory has gone")

    if moment == "between files":
        ledger.out.rename(lost)
    with pytest.raises(ConfigError, match=r"out: this directory has gone, it was renamed"):
        ledger.attempt(rows[0], lose_directory, retry_failed=False)
    with pytest.raises(ConfigError, match="this directory has gone"):
        ledger.write_table(rows)
    assert not ledger.out.exists()
    next_ledger = Ledger(ledger.inbox, lost)
    [row] = next_ledger.scan(settle_s=0)
    assert next_ledger.is_due(row, retry_failed=False)
