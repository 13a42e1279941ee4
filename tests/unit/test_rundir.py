"""Whose a directory is, who holds it, and what is never touched."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from virnuc_core import rundir
from virnuc_core.errors import ConfigError, DeviceError, UnsafeFileError
from virnuc_core.lease import make_folder
from virnuc_core.rundir import (
    ALL_FILES,
    MARKER_FILE,
    RUN_FILES,
    DeviceRequests,
    atomic_file,
    atomic_hdf5,
    check_output,
    device_holder,
    discard,
    lock_device,
    require_own_directory,
    run_lock,
    write_text_atomically,
)


def contents(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def put(root: Path, *names: str) -> dict[str, str]:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"somebody's {name}\n")
    return contents(root)


def test_a_folder_with_other_files_is_used_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "docs"
    put(root, "a.md", "img/b.png", ".hidden")
    for name in ("reads.tsv", "pairs.tsv"):
        with run_lock(root):
            write_text_atomically(root / name, "ours\n")
    with run_lock(tmp_path / "new"):
        write_text_atomically(tmp_path / "new" / "reads.tsv", "ours\n")
    assert [record.message for record in caplog.records] == [
        f"{root}: holds other files (a.md, img), and the results are written beside them; "
        "a directory of their own keeps them apart"
    ]


def test_a_held_directory_is_marked_and_its_holder_is_named_to_other_threads_and_processes(
    tmp_path: Path,
) -> None:
    root, messages = tmp_path / "run", []

    def intrude() -> None:
        with suppress(ConfigError), run_lock(root):
            messages.append("held twice")

    with run_lock(root):
        assert json.loads((root / MARKER_FILE).read_bytes())["product"] == "virnuc"
        with (
            run_lock(root),
            run_lock(root / "." / "x" / ".."),
        ):  # the same context, whatever it calls the place
            pass
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        code = f"from virnuc_core.rundir import *; run_lock(Path({str(root)!r})).__enter__()"
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert f"process {os.getpid()} is working here" in process.stderr
        assert messages == []
        put(root, "orfs.h5")
    intrude()
    assert messages == ["held twice"]


def test_a_killed_holder_blocks_nobody_and_its_half_files_are_swept(tmp_path: Path) -> None:
    root = tmp_path / "run"
    code = f"""
import os, signal
from pathlib import Path
from virnuc_core.rundir import run_lock, atomic_file
with run_lock(Path({str(root)!r})), atomic_file(Path({str(root)!r}, "shards", "00001.h5")) as aside:
    aside.write_text("half")
    Path({str(root)!r}, "shards", "of others.part").write_text("not ours")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", code], check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(list((root / "shards").glob(".00001.h5.*.part"))) == 1
    with run_lock(root), atomic_file(root / "summary.json") as temp_file:
        temp_file.write_text("{}")
        assert [path.name for path in (root / "shards").iterdir()] == ["of others.part"]
        with run_lock(root):
            assert temp_file.exists()


def test_a_damaged_mark_is_made_whole_where_the_record_says_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"fingerprints": {"reads": "r"}}))
    for damaged_content in (b"", b"\0" * 300, b'{"product": "vir'):
        (tmp_path / MARKER_FILE).write_bytes(damaged_content)
        with run_lock(tmp_path):
            assert json.loads((tmp_path / MARKER_FILE).read_bytes())["product"] == "virnuc"


def test_nothing_stays_where_nothing_was_made(tmp_path: Path) -> None:
    run_folder, theirs = tmp_path / "made", tmp_path / "theirs"
    files_before = put(theirs, "letter.txt")
    for root in (run_folder, theirs):
        with run_lock(root):
            assert (root / MARKER_FILE).exists()
    assert not run_folder.exists()
    assert contents(theirs) == files_before


@pytest.mark.parametrize(
    "name",
    [
        "summary.json",
        "viral.fasta.gz",
        "shards/00000.h5",
        "devices-2/run.json",
        "inbox.tsv",
        "downloads/0123456789ab-a.fq",
    ],
)
def test_a_file_of_our_name_in_a_directory_of_others_is_named_and_left(
    tmp_path: Path, name: str
) -> None:
    files_before = put(tmp_path, name, "letter.txt", "shards/mine.txt")
    with (
        pytest.raises(ConfigError, match=f"not made by virnuc, and {name} would be overwritten"),
        run_lock(tmp_path),
    ):
        pass
    assert contents(tmp_path) == files_before


def test_a_folder_of_others_is_left_in_a_directory_that_is_held_too(tmp_path: Path) -> None:
    """Samples have folders by any name, of which the guard of the directory above knows nothing."""
    files_before = put(tmp_path, "lung/reads.tsv")
    with (
        run_lock(tmp_path),
        pytest.raises(
            ConfigError, match=r"not made by virnuc, and reads\.tsv would be overwritten"
        ),
        run_lock(tmp_path / "lung"),
    ):
        pass
    assert contents(tmp_path / "lung") == {"reads.tsv": files_before["lung/reads.tsv"]}


def test_a_directory_of_others_without_our_names_may_be_used_and_is_ours_then(
    tmp_path: Path,
) -> None:
    put(tmp_path, "reads.fq", "logs/theirs.log", "shards/notes.txt")
    for _ in range(2):
        with run_lock(tmp_path):
            put(tmp_path, "summary.json")


def test_a_run_of_a_version_without_marks_is_ours(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"fingerprints": {"reads": "r"}}))
    put(tmp_path, "summary.json", "baseline/summary.json")
    with run_lock(tmp_path), run_lock(tmp_path / "baseline"):
        assert (tmp_path / "baseline" / MARKER_FILE).exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [("tune.json", '{"candidates": []}'), ("claims/inbox.tsv.lock", ""), ("tune.json", "{}")],
)
def test_a_sweep_or_an_inbox_of_a_version_without_marks_is_ours(
    tmp_path: Path, name: str, text: str
) -> None:
    put(tmp_path, name, "settings.toml", "inbox.tsv")
    (tmp_path / name).write_text(text)
    if text == "{}":  # somebody else's
        with pytest.raises(ConfigError, match="not made by virnuc"):
            require_own_directory(tmp_path)
    else:
        require_own_directory(tmp_path)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_mark_that_is_no_file_of_ours_is_not_followed(tmp_path: Path, kind: str) -> None:
    root, victim = tmp_path / "run", tmp_path / "victim"
    root.mkdir()
    victim.write_text("precious")
    {"link": lambda at: at.symlink_to(victim), "fifo": os.mkfifo, "folder": Path.mkdir}[kind](
        root / MARKER_FILE
    )
    with pytest.raises(ConfigError, match=r"\.virnuc"), run_lock(root):
        pass
    assert victim.read_text() == "precious"


def test_starting_over_removes_our_files_by_name_and_names_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = (
        "letter.txt",
        "shards/notes.txt",
        "logs/app.log",
        "telemetry/deep/er.txt",
        "shards/1.h5",
    )
    put(tmp_path, *theirs)
    put(
        tmp_path,
        "run.json",
        "shards/00000.h5",
        "shards/123456.h5",
        "telemetry/traces/profile.md",
        "logs/worker-x.log",
    )
    discard(tmp_path, *RUN_FILES)
    assert sorted(contents(tmp_path)) == sorted(theirs)
    assert not (tmp_path / "telemetry" / "traces").exists()
    [message] = caplog.messages
    assert "left as it is: logs/app.log, shards/1.h5, shards/notes.txt and 1 more" in message


def test_a_folder_that_is_a_link_is_not_emptied_of_what_is_not_ours(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "run"
    files_before = put(elsewhere, "shard.h5", "deep/00000.h5")
    root.mkdir()
    (root / "shards").symlink_to(elsewhere)
    discard(root, *RUN_FILES)
    assert contents(elsewhere) == files_before


def test_places_where_something_could_be_lost_are_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, models = tmp_path / "home", tmp_path / "work" / "models"
    home.mkdir()
    models.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(models.parent)
    (tmp_path / "alias").symlink_to(home)
    places = {
        Path("/"): "root",
        home: "home",
        tmp_path / "alias": "home",
        models: "models",
        Path(): "models",
    }
    for place, message in places.items():
        with pytest.raises(ConfigError, match=message):
            check_output(place, models=models)
    other_folder = tmp_path / "other"
    check_output(Path(), models=other_folder)
    check_output(Path("/proc"), models=other_folder)
    for place, message in {Path(): "working directory", Path("/proc"): "mount point"}.items():
        with pytest.raises(ConfigError, match=message):
            check_output(place, models=other_folder, force=True)
    check_output(tmp_path / "new", models=models, force=True)


def test_an_input_is_never_an_output(tmp_path: Path) -> None:
    root = tmp_path / "run"
    files_before = put(root, MARKER_FILE, "viral.fasta.gz", "a.fasta", "devices-1/reads.tsv")
    (root / MARKER_FILE).write_text('{"product": "virnuc"}')
    (tmp_path / "link.gz").symlink_to(root / "viral.fasta.gz")
    os.link(root / "devices-1" / "reads.tsv", tmp_path / "hard.txt")
    check_output(
        root, models=tmp_path / "models", reads=[str(root / "a.fasta"), "-", "absent", "/dev/null"]
    )
    for name in (root / "viral.fasta.gz", tmp_path / "link.gz", tmp_path / "hard.txt"):
        with pytest.raises(ConfigError, match="is read, and would be overwritten"):
            check_output(root, models=tmp_path / "models", reads=[str(name)])
    assert set(contents(root)) == set(files_before)


def test_a_device_is_held_by_name_until_its_process_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "virnuc_core.rundir.DEVICE_LOCK_PREFIX", f"virnuc-of-{tmp_path.name}-{os.getpid()}-"
    )
    assert device_holder("GPU-a") is None
    handle = lock_device("GPU-a", 0)
    assert device_holder("GPU-a") == f"process {os.getpid()}"
    with pytest.raises(DeviceError, match=f"GPU-a is in use by process {os.getpid()}"):
        lock_device("GPU-a", 0.1)
    os.close(handle)
    assert device_holder("GPU-a") is None
    os.close(lock_device("GPU-a", 0))
    assert not os.get_inheritable(lock_device("GPU-b", 0))


def test_locking_a_device_opens_no_file(tmp_path: Path) -> None:
    """A device's lock was a file once, in a folder where anybody may put a link."""
    program = (
        "import os, sys\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(args[0]) if event == 'open' else None)\n"
        "from virnuc_core.rundir import device_holder, lock_device\n"
        "opened.clear()\n"
        "assert device_holder('GPU-planted') is None\n"
        "os.close(lock_device('GPU-planted', 0))\n"
        "print(opened)\n"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    output = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    assert output.stdout == "[]\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def precious_folder(tmp_path: Path) -> Path:
    """A folder of another run. All its files have names that we would write or remove."""
    folder = tmp_path / "precious"
    put(folder, "plan.json", "00000.h5", "worker-0.log", "report.txt", "attempt.jsonl", "run.json")
    (folder / "damaged").mkdir()
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "shards",
        "shards/damaged",
        "logs",
        "telemetry",
        "telemetry/traces",
        "report",
        "head",
        "devices-1",
        "devices-1/shards",
        "baseline_files",
        "trials",
        "downloads",
        "claims",
    ],
)
def test_a_folder_of_ours_that_is_a_link_is_refused_before_anything_is_changed(
    tmp_path: Path, precious_folder: Path, name: str
) -> None:
    root = tmp_path / "run"
    put(root, "run.json", MARKER_FILE)
    (root / MARKER_FILE).write_text('{"product": "virnuc"}')
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).symlink_to(precious_folder)
    before = contents(precious_folder)
    refusal = re.escape(f"{root / name}: is a symbolic link")
    with pytest.raises(UnsafeFileError, match=refusal), run_lock(root):
        raise AssertionError("the directory was taken")
    with pytest.raises(UnsafeFileError, match=refusal):
        check_output(root, models=tmp_path / "models", force=True)
    discard(root, *ALL_FILES)
    assert contents(precious_folder) == before
    assert (root / name).is_symlink()


def test_a_link_that_appears_during_the_run_is_not_followed(
    tmp_path: Path, precious_folder: Path
) -> None:
    root = tmp_path / "run"
    before = contents(precious_folder)
    with run_lock(root):
        (root / "shards").symlink_to(precious_folder)
        for make in (
            lambda: write_text_atomically(root / "shards" / "plan.json", "[]"),
            lambda: make_folder(root / "shards" / "damaged"),
        ):
            with pytest.raises(UnsafeFileError, match="shards: is a symbolic link"):
                make()
        with (
            pytest.raises(UnsafeFileError, match="shards: is a symbolic link"),
            atomic_hdf5(root / "shards" / "00000.h5", root=root, make_folders=False) as file,
        ):
            file["x"] = 1
        discard(root, *ALL_FILES)
    assert contents(precious_folder) == before


def test_a_folder_that_becomes_a_link_while_a_file_is_written_keeps_the_file_out(
    tmp_path: Path, precious_folder: Path
) -> None:
    root = tmp_path / "run"
    before = contents(precious_folder)

    def write_and_exchange() -> None:
        """Write a file, and exchange its folder for a link before the file is complete."""
        with atomic_file(root / "shards" / "plan.json") as temp_path:
            temp_path.write_text("[]")
            (root / "shards").rename(root / "former")
            (root / "shards").symlink_to(precious_folder)

    with run_lock(root):
        make_folder(root / "shards")
        with pytest.raises(UnsafeFileError, match="shards: is a symbolic link"):
            write_and_exchange()
    assert contents(precious_folder) == before


def test_a_directory_that_is_given_through_a_link_is_used(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    root = tmp_path / "link"
    root.symlink_to(target)
    with run_lock(root):
        write_text_atomically(root / "shards" / "plan.json", "[]")
        make_folder(root / "shards" / "damaged")
    assert (target / "shards" / "plan.json").read_text() == "[]"
    with run_lock(root):
        discard(root, *ALL_FILES)
    assert [path.name for path in target.iterdir()] == [MARKER_FILE]


def test_files_of_one_name_are_made_at_once_in_two_folders(tmp_path: Path) -> None:
    first_file, second = tmp_path / "a" / "x.h5", tmp_path / "b" / "x.h5"
    with atomic_hdf5(first_file) as first_hdf5, atomic_hdf5(second) as two:
        first_hdf5["n"], two["n"] = 1, 2
    assert first_file.is_file()
    assert second.is_file()


def test_a_device_that_cannot_be_locked_is_not_called_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class RefusedSocket(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(rundir.socket, "socket", RefusedSocket)
    with pytest.raises(
        DeviceError, match="GPU-c cannot be taken: Cannot allocate memory"
    ) as raised:
        lock_device("GPU-c", 0.1)
    assert "in use" not in str(raised.value)


def test_a_folder_that_the_disk_does_not_remove_is_not_taken_for_one_with_foreign_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path, _root: Path) -> None:
        """Fail as a disk does that is broken."""
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    monkeypatch.setattr("virnuc_core.rundir.remove_empty_folder", fail)
    with run_lock(tmp_path):
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / "report.json").write_text("{}")
        with pytest.raises(OSError, match="Input/output error"):
            discard(tmp_path, "report/*")
    assert caplog.records == []


def test_a_promise_to_give_a_device_back_that_is_not_kept_holds_nobody_up_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("virnuc_core.rundir.RELEASE_S", 0.3)
    device = f"GPU-promised-{os.getpid()}"
    lock = lock_device(device, 0)
    requests = DeviceRequests(device)
    stopped = threading.Event()

    def promise() -> None:
        """Promise the device to everybody who asks, and keep it."""
        while not stopped.wait(0.01):
            requests.answer(requests.take(), is_free=True)

    liar = threading.Thread(target=promise)
    liar.start()
    with pytest.raises(DeviceError, match="in use"):
        lock_device(device, 0)
    stopped.set()
    liar.join()
    requests.close()
    os.close(lock)


def test_a_flood_of_requests_for_a_device_is_taken_in_parts() -> None:
    """Any user of the machine may ask. Nobody may keep the server busy, or use up its handles."""
    device = f"GPU-flood-{os.getpid()}"
    requests = DeviceRequests(device)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    for client in clients:
        client.connect(rundir._requests_address(device))
    n_answered = 0
    while taken := requests.take():
        assert len(taken) <= 32
        requests.answer(taken, is_free=False)
        n_answered += len(taken)
    assert n_answered == len(clients)
    for client in clients:
        assert client.recv(1) == b"0"
        client.close()
    requests.close()


def test_one_server_alone_receives_the_requests_for_a_device() -> None:
    device = f"GPU-requested-{os.getpid()}"
    requests = DeviceRequests(device)
    with pytest.raises(DeviceError, match="another server"):
        DeviceRequests(device)
    assert not requests.take()
    requests.close()
    DeviceRequests(device).close()
