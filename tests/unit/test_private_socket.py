"""The socket of `virnuc serve`: nobody but its user can reach it, and nothing of others is removed."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from virnuc_core.errors import UnsafeFileError
from virnuc_core.private_socket import (
    LOCK,
    MAX_MESSAGE_BYTES,
    SOCKET,
    InUseError,
    Messages,
    PrivateListener,
    connect,
    socket_folders,
)

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "private"


def is_answered(folder: Path) -> bool:
    """Return whether somebody listens in a folder. The connection is closed again."""
    found = connect(folder)
    if found is None:
        return False
    found[0].release()
    return True


def is_served(listener: PrivateListener) -> bool:
    """Return whether a listener accepts a connection that waits. It is closed again."""
    accepted = listener.accept_own(5.0)
    if accepted is None:
        return False
    accepted[0].release()
    return True


@pytest.fixture
def ends() -> Iterator[tuple[Messages, socket.socket]]:
    ours, other = socket.socketpair()
    with ours, other:
        yield Messages(ours), other


def test_a_folder_that_is_made_is_closed_to_others(folder: Path) -> None:
    with PrivateListener(folder):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770])
def test_a_folder_that_others_can_enter_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(UnsafeFileError, match="open for other users"):
        PrivateListener(folder)
    with pytest.raises(UnsafeFileError, match="open for other users"):
        connect(folder)


def test_a_link_to_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    folder.symlink_to(target)
    with pytest.raises(UnsafeFileError, match="is a link"):
        PrivateListener(folder)
    with pytest.raises(UnsafeFileError, match="is a link"):
        connect(folder)


@needs_root
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(UnsafeFileError, match="another user"):
        PrivateListener(folder)
    with pytest.raises(UnsafeFileError, match="another user"):
        connect(folder)


@needs_root
def test_nobody_listens_in_a_folder_that_the_user_may_not_see() -> None:
    """As in a container whose user has the home directory of root."""
    with TemporaryDirectory(prefix="virnuc-test-") as name:
        folder = Path(name) / "virnuc"  # a temporary directory is closed for other users
        folder.mkdir(mode=0o700)
        os.setresuid(NOBODY, NOBODY, 0)
        try:
            assert connect(folder) is None
        finally:
            os.setresuid(0, 0, 0)


def test_a_folder_with_a_long_name_works(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    with PrivateListener(folder) as listener:
        assert is_answered(folder)
        assert is_served(listener)


def test_the_socket_that_a_killed_server_left_is_replaced(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / SOCKET))
    assert connect(folder) is None
    with PrivateListener(folder):
        assert is_answered(folder)


def test_a_file_with_the_name_of_the_socket_is_not_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / SOCKET).write_text("precious")
    with pytest.raises(UnsafeFileError, match="not a socket of yours"):
        PrivateListener(folder)
    assert (folder / SOCKET).read_text() == "precious"


@needs_root
def test_a_socket_of_another_user_is_not_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / SOCKET))
    os.chown(folder / SOCKET, NOBODY, NOBODY)
    with pytest.raises(UnsafeFileError, match="not a socket of yours"):
        PrivateListener(folder)


def test_a_link_in_place_of_the_lock_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        PrivateListener(folder)
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_server_is_refused_and_the_first_one_goes_on(folder: Path) -> None:
    with PrivateListener(folder) as first:
        with pytest.raises(InUseError, match="another server of yours"):
            PrivateListener(folder)
        assert is_answered(folder)
        assert is_served(first)
    assert not is_answered(folder)
    PrivateListener(folder).close()


def test_nobody_listens_where_there_is_no_folder(folder: Path) -> None:
    assert connect(folder) is None
    assert not folder.exists()


@needs_root
def test_a_runtime_folder_of_another_user_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After `su` or `sudo`, the variable may still name the folder of the user before."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    os.chown(runtime, NOBODY, NOBODY)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    (only,) = socket_folders()
    assert only.is_relative_to(tmp_path / ".cache")


@needs_root
def test_a_process_of_another_user_is_not_served_even_if_it_can_connect(folder: Path) -> None:
    """The folder is opened for the other user here, to see that the second barrier holds, too."""
    code = (
        "import os, socket, sys\n"
        "client = socket.socket(socket.AF_UNIX)\n"
        "os.chdir(sys.argv[1])\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"client.connect({SOCKET!r})\n"
        "print(client.recv(1))\n"
    )
    with PrivateListener(folder) as listener:
        folder.chmod(0o777)
        (folder / SOCKET).chmod(0o777)
        command = [sys.executable, "-c", code, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outsider:
            assert listener.accept_own(60.0) is None
            # The connection was closed without a byte.
            assert outsider.communicate(timeout=60)[0] == "b''\n"


@needs_root
def test_a_server_of_another_user_is_not_used(folder: Path) -> None:
    """Root makes the socket, and a process of another user listens at it."""
    folder.mkdir(mode=0o700)
    code = (
        "import os, socket, sys\n"
        "server = socket.socket(socket.AF_UNIX)\n"
        f"server.bind(sys.argv[1] + '/{SOCKET}')\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "server.listen()\n"
        "print('listens', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as outsider:
        assert outsider.stdout is not None
        assert outsider.stdout.readline() == "listens\n"
        with pytest.raises(UnsafeFileError, match="another user listens"):
            connect(folder)
        outsider.communicate(timeout=60)


@pytest.mark.parametrize("text", ["", "a line\n", "µ 中 \N{DNA DOUBLE HELIX}", "x" * 3_000_000])
def test_texts_arrive_as_they_were_sent(text: str) -> None:
    ours, other = socket.socketpair()
    with ours, other:
        sender = threading.Thread(target=Messages(ours).send, args=(text,))
        sender.start()
        assert Messages(other).receive() == text
        sender.join()


def test_texts_of_several_threads_arrive_whole(
    ends: tuple[Messages, socket.socket],
) -> None:
    messages, other = ends
    texts = {letter * 1_000_000 for letter in "abc"}  # more than the system takes at once
    senders = [threading.Thread(target=messages.send, args=(text,)) for text in texts]
    for sender in senders:
        sender.start()
    receiver = Messages(other)
    assert {receiver.receive() for _ in senders} == texts
    for sender in senders:
        sender.join()


def test_a_text_that_was_sent_in_part_ends_the_connection() -> None:
    """Otherwise the other end would take the next text for the rest of this one."""
    ours, other = socket.socketpair()
    with ours, other:
        messages = Messages(ours)
        ten_ms = struct.pack("ll", 0, 10_000)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, ten_ms)
        with pytest.raises(BlockingIOError):
            messages.send("x" * 3_000_000)  # more than fits into the buffer of the system
        with pytest.raises(BrokenPipeError):
            messages.send("next")
        assert Messages(other).receive() is None


def test_an_end_that_takes_nothing_counts_as_gone_after_a_minute_and_reading_waits() -> None:
    ours, other = socket.socketpair()
    with ours, other:
        ours.settimeout(2.0)  # as while it was connected
        Messages(ours)
        assert ours.gettimeout() is None
        limits = [
            struct.unpack("ll", ours.getsockopt(socket.SOL_SOCKET, option, 16))
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO)
        ]
    assert limits == [(60, 0), (0, 0)], "seconds and microseconds, 0 for no limit"


def test_an_end_in_the_middle_of_a_text_is_an_end(
    ends: tuple[Messages, socket.socket],
) -> None:
    messages, other = ends
    other.sendall(struct.pack("!I", 100) + b"only a part")
    other.close()
    assert messages.receive() is None


def test_a_length_that_no_message_has_ends_the_connection(
    ends: tuple[Messages, socket.socket],
) -> None:
    messages, other = ends
    other.sendall(struct.pack("!I", MAX_MESSAGE_BYTES + 1))
    assert messages.receive() is None
    assert other.recv(1) == b""


def test_waiting_for_a_text_has_a_limit(ends: tuple[Messages, socket.socket]) -> None:
    messages, _ = ends
    assert messages.receive(timeout_s=0.01) is None


def test_a_runtime_folder_that_does_not_exist_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    (only,) = socket_folders()
    assert only.is_relative_to(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert socket_folders()[0] == tmp_path / "virnuc"
    # The last one is a name about which the system gives an error.
    for useless in ("relative", "", f"/{'long' * 2000}"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", useless)
        assert len(socket_folders()) == 1
