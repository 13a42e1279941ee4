"""Another user may write in the folder of a run: real links, exchanged files and a second user id."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.changing_folders import content_of
from virnuc_core.errors import UnsafeFileError
from virnuc_core.rundir import atomic_file, discard, run_lock, write_text_atomically
from virnuc_core.safe_files import (
    have_same_content,
    open_to_update,
    open_to_write,
    read_file,
    regular_file_exists,
    remove_file,
)

NOBODY = 65534
PRIVATE = b"a private key of the victim"
TRIES = 300
PATIENCE_S = 60.0


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of ours that must neither be shown nor changed."""
    path = tmp_path / "private" / "key"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(PRIVATE)
    path.chmod(0o600)
    return path


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder in which everybody may write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


# --- Temporary files ------------------------------------------------------------------------------


def test_a_temporary_file_that_is_exchanged_for_a_link_is_not_followed(
    shared: Path, victim: Path
) -> None:
    """The body opens its path more than once, as exports do that append piece by piece."""

    def write_in_two_steps() -> None:
        """Write, exchange the file as another user could, and append."""
        with atomic_file(shared / "table.tsv") as temp_path:
            temp_path.write_text("first\n")
            (partial,) = shared.glob(".table.tsv.*.part")
            partial.unlink()
            partial.symlink_to(victim)
            with temp_path.open("a") as file:
                file.write("second\n")
            assert temp_path.read_text() == "first\nsecond\n"

    with pytest.raises(UnsafeFileError, match=r"table\.tsv.*somebody has replaced it"):
        write_in_two_steps()
    assert victim.read_bytes() == PRIVATE
    assert not os.path.lexists(shared / "table.tsv"), "the foreign file got no name of ours"


def test_a_file_that_is_exchanged_during_the_rename_is_noticed(
    shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_replace = os.replace

    def replace_and_exchange(source: Path, target: Path) -> None:
        """Rename, as asked, and put a link in the place at once."""
        real_replace(source, target)
        if target.name == "table.tsv":
            target.unlink()
            target.symlink_to(victim)

    monkeypatch.setattr(os, "replace", replace_and_exchange)
    with pytest.raises(UnsafeFileError, match=r"table\.tsv: .*somebody has replaced it"):
        write_text_atomically(shared / "table.tsv", "text")
    assert victim.read_bytes() == PRIVATE


def test_a_temporary_file_has_the_rights_of_any_new_file(shared: Path) -> None:
    write_text_atomically(shared / "ours", "text")
    (shared / "plain").write_text("text")
    modes = [stat.S_IMODE((shared / name).stat().st_mode) for name in ("ours", "plain")]
    assert modes[0] == modes[1]


# --- Hard links -----------------------------------------------------------------------------------


def test_a_hard_link_is_replaced_and_its_other_name_keeps_its_content(
    shared: Path, victim: Path
) -> None:
    path = shared / "attempt.jsonl"
    os.link(victim, path)
    with open_to_write(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert victim.read_bytes() == PRIVATE
    assert victim.stat().st_nlink == 1


@pytest.mark.parametrize("change", [lambda path: open_to_write(path, append=True), open_to_update])
def test_nothing_is_written_into_a_file_with_a_second_name(
    shared: Path, victim: Path, change: Callable[[Path], object]
) -> None:
    path = shared / "worker-0.log"
    os.link(victim, path)
    with pytest.raises(UnsafeFileError, match=r"worker-0\.log: has another name .*hard link"):
        change(path)
    assert victim.read_bytes() == PRIVATE


def test_removing_a_hard_link_removes_only_its_name(shared: Path, victim: Path) -> None:
    run = shared / "run"
    with run_lock(run):
        write_text_atomically(run / "summary.json", "{}")
        os.link(victim, run / "reads.tsv")
        os.link(victim, run / "failed.tsv")
        remove_file(run / "reads.tsv", run)
        discard(run, "failed.tsv")
        assert not (run / "reads.tsv").exists()
        assert not (run / "failed.tsv").exists()
    assert victim.read_bytes() == PRIVATE


def test_a_copy_of_hard_links_keeps_the_run_that_it_was_copied_from(tmp_path: Path) -> None:
    """Backups are often made with `cp -al`."""
    run = tmp_path / "run"
    with run_lock(run):
        write_text_atomically(run / "summary.json", "old")
    shutil.copytree(run, tmp_path / "backup", copy_function=os.link)
    with run_lock(run):
        write_text_atomically(run / "summary.json", "new")
    assert (tmp_path / "backup" / "summary.json").read_text() == "old"


# --- What is no regular file ----------------------------------------------------------------------


def test_a_pipe_is_neither_a_file_nor_absent(tmp_path: Path) -> None:
    assert not regular_file_exists(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    assert regular_file_exists(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafeFileError, match="pipe: is a named pipe"):
        regular_file_exists(tmp_path / "pipe")


def test_files_are_compared_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "b").write_bytes(b"x" * 2_999_999 + b"y")
    (tmp_path / "c").write_bytes(b"x" * 3_000_000)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    assert have_same_content(tmp_path / "a", tmp_path / "c")
    assert not have_same_content(tmp_path / "a", tmp_path / "b")
    assert not have_same_content(tmp_path / "a", tmp_path / "huge")
    with pytest.raises(UnsafeFileError, match="symbolic link"):
        have_same_content(tmp_path / "a", tmp_path / "link")


# --- A second user --------------------------------------------------------------------------------


def attack(folder: str, victim: str, ended: object) -> None:
    """Replace whatever appears in a folder by links to a file of another user, as that user."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        Path(victim).read_bytes()
    except PermissionError:
        pass
    else:
        os._exit(3)
    while not ended.is_set():  # type: ignore[attr-defined]
        for path in Path(folder).iterdir():
            if path.is_symlink():
                continue
            try:
                path.unlink()
                path.symlink_to(victim)
            except OSError:
                continue  # it was renamed in the meantime
    os._exit(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_second_user_who_exchanges_files_gets_nothing_and_destroys_nothing(
    shared: Path, victim: Path
) -> None:
    """Each write ends with the file that was written, or with a refusal in one line."""
    # The second user must be able to walk through pytest's folders, of which there are more if the
    # tests run in several processes.
    names = [folder.name.startswith("pytest-of") for folder in shared.parents]
    if True not in names:
        pytest.skip("the tests have a base folder of their own, whose permissions are left alone")
    for folder in shared.parents[: names.index(True) + 1]:
        folder.chmod(0o711)
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    attacker = context.Process(target=attack, args=(str(shared), str(victim), ended))
    attacker.start()
    refusals: list[str] = []
    number = 0
    give_up_s = time.monotonic() + PATIENCE_S
    try:
        # A busy machine may let the attacker begin late.
        while number < TRIES or (not refusals and time.monotonic() < give_up_s):
            number += 1
            try:
                with atomic_file(shared / "table.tsv") as temp_path:
                    temp_path.write_text("first\n")
                    with temp_path.open("a") as file:
                        file.write(f"{number}\n")
                with open_to_write(shared / "log", append=True) as log:
                    log.write(b"line\n")
                with open_to_write(shared / "journal") as journal:
                    journal.write(b"line\n")
                read_file(shared / "table.tsv")
            except (UnsafeFileError, FileNotFoundError, FileExistsError) as error:
                refusals.append(str(error))
            assert victim.read_bytes() == PRIVATE
            for path in shared.iterdir():
                assert PRIVATE not in content_of(path)
    finally:
        ended.set()
        attacker.join(PATIENCE_S)
    assert attacker.exitcode == 0, "the attacker could read the private file, or did not run"
    assert not [refusal for refusal in refusals if "\n" in refusal]
    assert refusals, "the attacker was never in time: the test shows nothing"
    assert victim.read_bytes() == PRIVATE
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
