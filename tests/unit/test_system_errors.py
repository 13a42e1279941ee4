"""What an error of the system proves about a file, and the advice for each."""

import errno
import os
from pathlib import Path

import h5py
import pytest

from virnuc_core import system_errors
from virnuc_core.errors import StorageError, UnreadableError, VirnucError
from virnuc_core.system_errors import (
    ADVICE,
    ErrorKind,
    classify,
    describe_system_error,
    error_number,
    path_exists,
    read_with_retries,
    storage_error,
)

# For each error a word that its advice must hold. Written down from the manual pages: open(2),
# fcntl(2), nfs(5), getrlimit(2).
EXPECTED_WORDS = {
    errno.ENOSPC: "room",
    errno.EDQUOT: "quota",
    errno.EFBIG: "ulimit -f",
    errno.EIO: "disk",
    errno.EROFS: "mounted for writing",
    errno.ENOLCK: "lockd",
    errno.ESTALE: "mounted again",
    errno.ETIMEDOUT: "file server",
    errno.EHOSTDOWN: "file server",
    errno.EHOSTUNREACH: "file server",
    errno.ENETDOWN: "file server",
    errno.ENETUNREACH: "file server",
    errno.ECONNREFUSED: "file server",
    errno.ECONNRESET: "file server",
    errno.ECONNABORTED: "file server",
    errno.ENOTCONN: "file server",
    errno.ESHUTDOWN: "file server",
    errno.EREMOTEIO: "file server",
    errno.ENOKEY: "kinit",
    errno.EKEYEXPIRED: "kinit",
    errno.EKEYREVOKED: "kinit",
    errno.EKEYREJECTED: "kinit",
    errno.EACCES: "permissions",
    errno.EPERM: "permissions",
    errno.EBUSY: "other program",
    errno.EDEADLK: "other program",
    errno.EAGAIN: "ulimit -a",
    errno.EINTR: "wait",
    errno.EMFILE: "ulimit -n",
    errno.ENFILE: "open files",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory",
    errno.EUCLEAN: "fsck",
    errno.EBADMSG: "fsck",
    errno.ENODEV: "connected",
    errno.ENXIO: "connected",
    errno.EISDIR: "directory",
    errno.ELOOP: "symbolic links",
    errno.ENAMETOOLONG: "shorter",
    errno.ENOSYS: "another file system",
    errno.EOPNOTSUPP: "another file system",
}
ROOM_ERRORS = (errno.ENOSPC, errno.EDQUOT)
NOT_KNOWN_ERRORS = (
    errno.ESTALE,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.ENOLCK,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EINTR,
    errno.ENFILE,
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_errors, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))


def test_every_entry_of_the_table_is_tested() -> None:
    assert set(ADVICE) == set(EXPECTED_WORDS)


@pytest.mark.parametrize("number", EXPECTED_WORDS, ids=errno.errorcode.get)
def test_advice_fits_the_error(number: int) -> None:
    error = OSError(number, "whatever")

    text = describe_system_error(error)

    assert text.startswith(f"{os.strerror(number)}; ")
    assert EXPECTED_WORDS[number] in text
    assert ("make room" in text) == (number in ROOM_ERRORS)


def test_an_error_without_advice_has_the_alternative_alone() -> None:
    error = OSError(errno.EXDEV, "whatever")

    assert describe_system_error(error) == "Invalid cross-device link"
    text = describe_system_error(error, "choose another directory")
    assert text == "Invalid cross-device link; choose another directory"


@pytest.mark.parametrize("number", EXPECTED_WORDS, ids=errno.errorcode.get)
def test_nothing_but_absence_is_called_absent(number: int) -> None:
    assert classify(OSError(number, "whatever")) in (ErrorKind.TRANSIENT, ErrorKind.REFUSED)


@pytest.mark.parametrize("number", NOT_KNOWN_ERRORS, ids=errno.errorcode.get)
def test_what_may_pass_is_tried_again_and_then_stops_without_a_verdict(
    tmp_path: Path, number: int
) -> None:
    attempts = []

    def fail() -> None:
        attempts.append(number)
        raise OSError(number, "whatever")

    with pytest.raises(UnreadableError) as raised:
        read_with_retries(tmp_path / "a.h5", fail)

    assert len(attempts) == 1 + len(system_errors.RETRY_PAUSES_S)
    assert str(raised.value).startswith(f"{tmp_path}/a.h5: cannot be read: {os.strerror(number)}; ")
    assert "\n" not in str(raised.value)


def test_a_limit_of_this_process_is_not_tried_again(tmp_path: Path) -> None:
    attempts = []

    def fail() -> None:
        attempts.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(UnreadableError, match="ulimit -n"):
        read_with_retries(tmp_path / "a.h5", fail)
    assert len(attempts) == 1


def test_a_read_that_succeeds_later_is_used(tmp_path: Path) -> None:
    errors = [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "io")]

    def read() -> str:
        if errors:
            raise errors.pop()
        return "content"

    assert read_with_retries(tmp_path / "a.h5", read) == "content"


def test_absence_is_certain_and_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for path in (tmp_path / "absent", tmp_path / "file" / "absent"):
        attempts = []

        def read(path: Path = path, attempts: list[Path] = attempts) -> bytes:
            attempts.append(path)
            return path.read_bytes()

        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            read_with_retries(path, read)
        assert len(attempts) == 1
        assert not path_exists(path)


def test_what_is_refused_for_good_is_not_tried_again(tmp_path: Path) -> None:
    attempts = []

    def read() -> bytes:
        attempts.append(tmp_path)
        return tmp_path.read_bytes()  # a directory

    with pytest.raises(UnreadableError, match="Is a directory; move away the directory"):
        read_with_retries(tmp_path, read)
    assert len(attempts) == 1


def test_errors_of_hdf5_are_classified_by_the_number_in_their_text(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("no HDF5" * 100)
    expected_kinds = {
        tmp_path / "absent.h5": ErrorKind.ABSENT,
        tmp_path / "text.h5" / "absent.h5": ErrorKind.ABSENT,
        tmp_path / "text.h5": ErrorKind.CONTENT,
        tmp_path: ErrorKind.REFUSED,
    }
    for path, expected_kind in expected_kinds.items():
        with pytest.raises(OSError, match="Unable to synchronously open file") as raised:
            h5py.File(path, "r")
        assert classify(raised.value) is expected_kind

    text = "Can't synchronously read data (file read failed: errno = 5, error message = 'I/O')"
    assert error_number(RuntimeError(text)) == errno.EIO
    assert classify(KeyError("no object of this name")) is ErrorKind.CONTENT


def test_existence_is_not_denied_by_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "absent")
    assert path_exists(link)

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(Path, "lstat", stale)
    with pytest.raises(UnreadableError, match="Stale file handle"):
        path_exists(link)


def test_a_lock_that_cannot_be_had_is_no_lack_of_room(tmp_path: Path) -> None:
    error = storage_error(OSError(errno.ENOLCK, "no locks"), tmp_path / "orfs.h5")

    assert isinstance(error, StorageError)
    assert "lockd" in str(error)
    assert "make room" not in str(error)


def test_a_file_that_cannot_be_read_is_no_error_of_the_system() -> None:
    """A caller that suppresses `OSError` must not suppress it."""
    assert not issubclass(UnreadableError, OSError)
    assert issubclass(UnreadableError, VirnucError)
