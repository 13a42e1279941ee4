"""The ledger of an inbox: content decides, fates are final, overlapping runs never work on the same content."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from virnuc_core.errors import (
    ConfigError,
    DeviceError,
    InputError,
    NotFiniteError,
    StorageError,
    WeightsError,
    WorkerError,
)
from virnuc_core.inbox import Fate, Ledger, Row
from virnuc_core.runfiles import RunSummary

OLD = 1_700_000_000


def put(folder: Path, name: str, text: str, age: int = 0) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (OLD - age, OLD - age))
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    (tmp_path / "inbox").mkdir()
    return Ledger(tmp_path / "inbox", tmp_path / "out")


def fates(ledger: Ledger, **options: float) -> dict[str, str]:
    return {
        row.file: row.fate for row in ledger.scan(settle_s=options.pop("settle_s", 60), **options)
    }


def predicted(ledger: Ledger, file: str) -> Fate:
    row = next(row for row in ledger.scan(settle_s=0) if row.file == file)
    fate = Fate(**dict(row) | {"fate": "predicted", "run": "runs/x", "reads": "10", "viral": "3"})
    ledger.record(fate)
    return fate


def test_new_files_wait_oldest_first(ledger: Ledger) -> None:
    put(ledger.inbox, "b.fa", ">b\nA\n", age=10)
    put(ledger.inbox, "a.fa", ">a\nA\n")
    assert list(fates(ledger).items()) == [("b.fa", "waiting"), ("a.fa", "waiting")]


def test_a_file_that_may_still_be_arriving_is_not_read(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")
    rows = ledger.scan(settle_s=60, now_s=OLD + 59)
    assert [(row.fate, row.sha256) for row in rows] == [("arriving", "")]
    assert [row.fate for row in ledger.scan(settle_s=60, now_s=OLD + 61)] == ["waiting"]


def test_hidden_and_partial_files_are_left_alone(ledger: Ledger) -> None:
    for name in (".hidden.fa", "up.fa.part", ".tmp/x.fa", "y.tmp"):
        put(ledger.inbox, name, ">a\nA\n")
    assert fates(ledger) == {}


def test_of_files_with_one_content_only_the_oldest_is_predicted(ledger: Ledger) -> None:
    put(ledger.inbox, "second.fa", ">a\nA\n")
    put(ledger.inbox, "sub/first.fa", ">a\nA\n", age=5)
    assert fates(ledger) == {"sub/first.fa": "waiting", "second.fa": "duplicate"}


def test_a_renamed_file_is_not_predicted_again_and_a_new_content_under_an_old_name_is(
    ledger: Ledger,
) -> None:
    path = put(ledger.inbox, "a.fa", ">a\nA\n")
    predicted(ledger, "a.fa")
    assert fates(ledger) == {"a.fa": "predicted"}
    path.rename(ledger.inbox / "b.fa")
    assert fates(ledger) == {"b.fa": "duplicate"}
    put(ledger.inbox, "a.fa", ">a\nC\n")
    assert fates(ledger)["a.fa"] == "waiting"


def test_the_table_tells_each_files_fate_and_remembers_files_that_are_gone(ledger: Ledger) -> None:
    path = put(ledger.inbox, "a\tb.fa", ">a\nA\n")
    predicted(ledger, "a\tb.fa")
    ledger.write_table(ledger.scan(settle_s=0))
    row = ledger.read_table()[0]
    assert (row.file, row.fate, row.reads, row.viral) == ("a\tb.fa", "predicted", "10", "3")
    path.unlink()
    ledger.write_table(ledger.scan(settle_s=0))
    assert [(row.file, row.fate) for row in ledger.read_table()] == [("a\tb.fa", "gone")]


def test_an_unchanged_file_is_not_hashed_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")
    ledger.write_table(ledger.scan(settle_s=0))
    before = ledger.read_table()[0].sha256

    def never(_: Path) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr("virnuc_core.inbox.sha256_of", never)
    assert [row.sha256 for row in ledger.scan(settle_s=0)] == [before]
    put(ledger.inbox, "a.fa", ">a\nAA\n")
    with pytest.raises(AssertionError):
        ledger.scan(settle_s=0)


def test_only_one_run_holds_a_content(ledger: Ledger) -> None:
    other = Ledger(ledger.inbox, ledger.out)
    with ledger.claim("aa") as mine, other.claim("aa") as theirs, other.claim("bb") as another:
        assert (mine, theirs, another) == ("", f"process {os.getpid()}", "")
    with other.claim("aa") as now_mine:
        assert not now_mine


def test_the_table_of_an_overlapping_run_shows_the_fate_found_meanwhile(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")
    rows = ledger.scan(settle_s=0)
    predicted(Ledger(ledger.inbox, ledger.out), "a.fa")
    ledger.write_table(rows)
    assert ledger.read_table()[0].fate == "predicted"


def test_only_what_is_wrong_with_the_file_is_its_fate(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")
    [waiting] = ledger.scan(settle_s=0)
    asked: list[Path] = []

    def broken(row: Row, run: Path) -> Exception:
        asked.append(run)
        return InputError("no reads", file=ledger.inbox / row.file)

    for machine in (StorageError("disk full"), WeightsError("no esm2"), DeviceError("taken")):
        with pytest.raises(type(machine)):
            ledger.work(waiting, lambda row, run, error=machine: error, retry_failed=False)
        assert ledger.fate(waiting.sha256) is None, "no attempt of the file's"
    odd = put(ledger.inbox, "odd.fa", "of rows that no model has numbers for")
    [row] = [row for row in ledger.scan(settle_s=0) if row.file == odd.name]
    unlike = ledger.work(
        row, lambda row, run: NotFiniteError("of 9 rows NaN for 5"), retry_failed=False
    )
    assert (unlike.fate, unlike.note) == ("failed", "of 9 rows NaN for 5"), (
        "it holds up no other file"
    )
    odd.unlink()
    failed = ledger.work(waiting, broken, retry_failed=False)
    assert (failed.fate, "no reads" in failed.note, asked) == (
        "failed",
        True,
        [ledger.out / "runs" / waiting.sha256[:16]],
    )
    assert [ledger.wants_work(failed, retry_failed=again) for again in (False, True)] == [
        False,
        True,
    ]
    assert ledger.work(waiting, broken, retry_failed=False) == failed, "another run was faster"
    summary = RunSummary(n_reads=1, fates={"viral": 1})
    done = ledger.work(failed, lambda row, run: summary, retry_failed=True)
    assert (done.fate, done.reads, done.viral, done.note) == ("predicted", "1", "1", "")
    with Ledger(ledger.inbox, ledger.out).claim(done.sha256):
        assert ledger.work(waiting, broken, retry_failed=False).fate == "busy"


@pytest.mark.parametrize(
    "problem", [MemoryError("no room"), WorkerError("died"), RecursionError("deep")]
)
def test_a_file_that_always_fails_is_failed_after_its_attempts(
    ledger: Ledger, problem: Exception
) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")
    for attempt in (1, 2, 3):
        [row] = ledger.scan(settle_s=0)
        assert ledger.wants_work(row, retry_failed=False), "it is tried again by the next run"
        row = ledger.work(row, lambda row, run: problem, retry_failed=False)
        assert (row.fate, str(problem) in row.note) == (
            "failed" if attempt == 3 else "waiting",
            True,
        )
        put(ledger.inbox, "copy.fa", ">a\nA\n", age=-5)
        assert [row.fate for row in ledger.scan(settle_s=0)] == [row.fate, "duplicate"]
        (ledger.inbox / "copy.fa").unlink()
    assert not ledger.wants_work(row, retry_failed=False)


def test_what_kills_the_process_is_an_attempt_and_what_interrupts_it_is_none(
    ledger: Ledger,
) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")

    def interrupted(_row: Row, _run: Path) -> RunSummary:
        raise KeyboardInterrupt

    for fate in ("waiting", "waiting", "failed"):
        with pytest.raises(KeyboardInterrupt):
            ledger.work(ledger.scan(settle_s=0)[0], interrupted, retry_failed=False)
        child = os.fork()
        if child == 0:
            ledger.work(
                ledger.scan(settle_s=0)[0],
                lambda row, run: os.kill(os.getpid(), 9),
                retry_failed=False,
            )
        os.waitpid(child, 0)
        [row] = ledger.scan(settle_s=0)
        assert row.fate == fate
    assert "out of memory" in row.note
    renamed = put(ledger.inbox, "b.fa", ">a\nA\n")
    (ledger.inbox / "a.fa").unlink()
    assert renamed.exists()
    assert fates(ledger) == {"b.fa": "duplicate"}, (
        "a failed content does not come again under another name"
    )


def test_a_file_that_cannot_be_opened_or_named_does_not_stop_the_others(ledger: Ledger) -> None:
    put(ledger.inbox, "good.fa", ">a\nA\n")
    put(ledger.inbox, os.fsdecode(b"latin-\xe9.fa"), ">b\nA\n")
    put(ledger.inbox, "line\rbreak.fa", ">c\nA\n")
    (ledger.inbox / "broken.fa").symlink_to(
        "/proc/self/mem"
    )  # opens, and cannot be read by anybody
    (ledger.inbox / "loop.fa").symlink_to("loop.fa")
    for _ in range(2):  # the table of the first is read by the second
        ledger.write_table(ledger.scan(settle_s=0))
    rows = {row.file: row for row in ledger.read_table()}
    assert {name: row.fate for name, row in rows.items()} == {
        "good.fa": "waiting",
        "latin-\\udce9.fa": "failed",
        "line\\rbreak.fa": "failed",
        "broken.fa": "failed",
        "loop.fa": "failed",
    }
    assert "Input/output error" in rows["broken.fa"].note
    assert "rename it" in rows["line\\rbreak.fa"].note
    assert [ledger.wants_work(row, retry_failed=True) for row in rows.values()].count(True) == 1


@pytest.mark.parametrize("damage", [b"{}", b"\xff", b"", b"changed"])
def test_a_damaged_fate_is_set_aside_and_its_file_predicted_anew(
    ledger: Ledger, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")
    path = ledger.out / "fates" / f"{predicted(ledger, 'a.fa').sha256}.json"
    if damage == b"changed":  # still a fate, but not the one that was written
        damage = re.sub(rb'"reads": "\d', b'"reads": "7', path.read_bytes())
    path.write_bytes(damage)
    assert fates(ledger) == {"a.fa": "waiting"}
    assert path.with_name(f"{path.name}.damaged").read_bytes() == damage
    assert path.name in caplog.text


def test_a_digest_that_was_changed_in_the_table_is_not_believed(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")
    sha256 = predicted(ledger, "a.fa").sha256
    ledger.write_table(ledger.scan(settle_s=0))
    text = ledger.table.read_text()
    ledger.table.write_text(text.replace(sha256, sha256[:-1] + ("0" if sha256[-1] != "0" else "1")))
    (row,) = ledger.scan(settle_s=0)
    assert row.fate == "waiting"
    assert (
        ledger.work(row, lambda *_: pytest.fail("predicted again"), retry_failed=False).sha256
        == sha256
    )


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"file\tsha256\n", b'"', b"a\tb\n1\t2\t3\n"])
def test_a_damaged_table_is_made_anew(ledger: Ledger, damage: bytes) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")
    ledger.write_table(ledger.scan(settle_s=0))
    whole = ledger.table.read_bytes()
    for bad in (damage, whole.replace(b"waiting", b"wanting"), whole[:-20]):
        ledger.table.write_bytes(bad)
        ledger.write_table(ledger.scan(settle_s=0))
        assert [row.file for row in ledger.read_table()] == ["a.fa"]


def test_what_killed_writers_left_is_swept(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fa", ">a\nA\n")
    [row] = ledger.scan(settle_s=0)
    left = [
        put(ledger.out, name, "half")
        for name in (".inbox.tsv.7.part", f"fates/.{row.sha256}.json.7.part")
    ]
    ledger.write_table([ledger.work(row, lambda row, run: InputError("none"), retry_failed=False)])
    assert not any(path.exists() for path in left)


def test_folders_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        Ledger(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "inbox").mkdir()
    for out in ("inbox", "inbox/results"):
        with pytest.raises(ConfigError, match="inside the inbox"):
            Ledger(tmp_path / "inbox", tmp_path / out)
