"""Files of a run are opened, made and removed without following links, and without surprises."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from virnuc_core import safe_files
from virnuc_core.errors import UnsafeFileError
from virnuc_core.safe_files import (
    MAX_HDF5_OBJECTS,
    change_folder,
    make_folder,
    open_file,
    open_hdf5,
    open_new_file,
    open_to_update,
    open_to_write,
    output_directory,
    read_file,
    remove_file,
    rename_file,
)

PRIVATE_TEXT = b"a private key"
ROWS_OF_A_LIE = 8 * 10**9


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder with a file that nobody else may see or change."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "key").write_bytes(PRIVATE_TEXT)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a file and a folder."""
    root = tmp_path / "run"
    (root / "shards").mkdir(parents=True)
    (root / "run.json").write_text("{}")
    (root / "shards" / "plan.json").write_text("[]")
    return root


def make_socket(path: Path) -> None:
    """Create a Unix socket. Its name must be short, so it is created from its own folder."""
    folder = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(folder)


INTRUDERS: dict[str, Callable[[Path], object]] = {
    "a symbolic link": lambda path: path.symlink_to("/dev/zero"),
    "a named pipe": os.mkfifo,
    "a socket": make_socket,
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", INTRUDERS)
@pytest.mark.parametrize("name", ["run.json", "shards/plan.json"])
def test_what_is_no_regular_file_is_refused_without_waiting(
    run: Path, kind: str, name: str
) -> None:
    path = run / name
    path.unlink()
    INTRUDERS[kind](path)
    with pytest.raises(UnsafeFileError, match=re.escape(f"{path}: is {kind}")):
        read_file(path, run)
    with pytest.raises(UnsafeFileError, match=re.escape(f"{path}: is {kind}")):
        open_hdf5(path, run)
    with pytest.raises(UnsafeFileError, match=re.escape(f"{path}: is {kind}")):
        open_to_write(path, run)


def test_a_pipe_that_somebody_reads_is_not_written(run: Path) -> None:
    path = run / "log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(UnsafeFileError, match="named pipe"):
            open_to_write(path, run, append=True)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_a_device_is_refused() -> None:
    with pytest.raises(UnsafeFileError, match="is a device"):
        read_file(Path("/dev/zero"))


def test_absence_stays_absence(run: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(run / "absent.json"))):
        read_file(run / "absent.json", run)
    with pytest.raises(FileNotFoundError, match=re.escape(str(run / "absent"))):
        read_file(run / "absent" / "plan.json", run)
    with pytest.raises(NotADirectoryError):
        read_file(run / "run.json" / "plan.json", run)


@pytest.mark.parametrize("change", [rename_file, remove_file, open_new_file, open_to_update])
def test_an_error_names_the_file_as_the_user_knows_it(
    run: Path, change: Callable[..., object]
) -> None:
    """Files are reached through handles of their folders, whose names tell a user nothing."""
    (run / "new").write_text("there")
    (run / "reads.tsv" / "folder").mkdir(parents=True)
    arguments = {
        rename_file: (run / "new", run / "reads.tsv"),
        remove_file: (run / "absent",),
        open_new_file: (run / "reads.tsv",),
        open_to_update: (run / "absent",),
    }[change]
    with pytest.raises(OSError, match=re.escape(str(run))) as caught:
        change(*arguments)
    assert caught.value.filename == str(arguments[-1])
    assert "/proc/" not in str(caught.value)


def test_a_large_file_is_refused(run: Path) -> None:
    with (run / "run.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsafeFileError, match="more than"):
        read_file(run / "run.json", run)


def test_no_folder_below_the_run_is_a_link(run: Path, private: Path) -> None:
    (run / "logs").symlink_to(private)
    refused = re.escape(f"{run / 'logs'}: is a symbolic link")
    with pytest.raises(UnsafeFileError, match=refused):
        read_file(run / "logs" / "key", run)
    with pytest.raises(UnsafeFileError, match=refused):
        open_to_write(run / "logs" / "key", run)
    with pytest.raises(UnsafeFileError, match=refused):
        open_to_write(run / "logs" / "new", run, append=True)
    with pytest.raises(UnsafeFileError, match=refused):
        remove_file(run / "logs" / "key", run)
    with pytest.raises(UnsafeFileError, match=refused):
        rename_file(run / "run.json", run / "logs" / "key", run)
    with pytest.raises(UnsafeFileError, match=refused):
        rename_file(run / "logs" / "key", run / "run.json", run)
    with pytest.raises(UnsafeFileError, match=refused):
        make_folder(run / "logs", run)
    with pytest.raises(UnsafeFileError, match=refused):
        make_folder(run / "logs" / "deeper", run)
    with pytest.raises(UnsafeFileError, match=refused):
        change_folder(run / "logs", run)
    assert {path.name: path.read_bytes() for path in private.iterdir()} == {"key": PRIVATE_TEXT}
    assert (run / "run.json").read_text() == "{}"


def test_a_link_is_removed_or_replaced_itself(run: Path, private: Path) -> None:
    (run / "first").symlink_to(private / "key")
    (run / "second").symlink_to(private / "key")
    remove_file(run / "first", run)
    rename_file(run / "run.json", run / "second", run)
    assert (run / "second").read_text() == "{}"
    assert not (run / "second").is_symlink()
    assert (private / "key").read_bytes() == PRIVATE_TEXT


@pytest.mark.parametrize("through_link", [False, True])
def test_the_run_directory_itself_may_be_given_through_a_link(
    run: Path, tmp_path: Path, through_link: bool
) -> None:
    root = run
    if through_link:
        root = tmp_path / "link"
        root.symlink_to(run)
    make_folder(root / "logs" / "deep", root)
    with open_to_write(root / "logs" / "deep" / "x.log", root) as file:
        file.write(b"one")
    with open_to_write(root / "logs" / "deep" / "x.log", root, append=True) as file:
        file.write(b"two")
    assert read_file(root / "logs" / "deep" / "x.log", root) == b"onetwo"
    rename_file(root / "logs" / "deep" / "x.log", root / "x.log", root)
    assert (run / "x.log").read_bytes() == b"onetwo"
    change_folder(root / "logs", root)
    assert [path.name for path in (run / "logs").iterdir()] == ["deep"]
    remove_file(root / "x.log", root)
    remove_file(root / "x.log", root, missing_ok=True)
    with pytest.raises(FileNotFoundError):
        remove_file(root / "x.log", root)


def test_a_registered_directory_covers_all_folders_below_it(
    run: Path, private: Path, tmp_path: Path
) -> None:
    (run / "devices-1").symlink_to(private)
    link = tmp_path / "link"
    link.symlink_to(run)
    assert read_file(run / "devices-1" / "key") == PRIVATE_TEXT  # nobody has named the run
    for root in (run, link):
        with output_directory(run), pytest.raises(UnsafeFileError, match="devices-1: is a symb"):
            read_file(root / "devices-1" / "key", root / "devices-1")
    assert read_file(run / "devices-1" / "key") == PRIVATE_TEXT


def test_a_path_that_leads_out_of_the_run_is_refused(run: Path, private: Path) -> None:
    with pytest.raises(UnsafeFileError, match="lies outside"):
        read_file(run / ".." / private.name / "key", run)
    with pytest.raises(UnsafeFileError, match="lies outside"):
        read_file(private / "key", run)


def test_a_file_that_is_replaced_all_the_time_can_be_read(run: Path) -> None:
    """Only a replacement at each of many attempts is suspicious."""
    path = run / "run.json"
    real_open = os.open
    n_replacements = 3

    def replace_first(name: object, *arguments: object, **options: object) -> int:
        """Replace the file before it is opened, the first times."""
        nonlocal n_replacements
        if name == path and n_replacements > 0:
            n_replacements -= 1
            (run / "new").write_text("[1]")
            handle = real_open(name, *arguments, **options)  # type: ignore[arg-type]
            (run / "new").replace(path)
            return handle
        return real_open(name, *arguments, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", replace_first)
        assert read_file(path, run) == b"[1]"
    assert n_replacements == 0


def write_external(file: h5py.File, private: Path) -> None:
    """Let a dataset show the bytes of another file."""
    space = h5py.h5s.create_simple((len(PRIVATE_TEXT),))
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_external(str(private / "key").encode(), 0, len(PRIVATE_TEXT))
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, space, creation)


def write_virtual(file: h5py.File, private: Path) -> None:
    """Let a dataset show a dataset of another file."""
    with h5py.File(private / "other.h5", "w") as other:
        other["x"] = np.arange(3)
    layout = h5py.VirtualLayout((3,), "i8")
    layout[:] = h5py.VirtualSource(private / "other.h5", "x", (3,))
    file.create_virtual_dataset("x", layout)


def write_circle(file: h5py.File, private: Path) -> None:
    """Let a group contain itself."""
    group = file.create_group("x")
    group["x"] = group


HOSTILE_FILES: dict[str, Callable[[h5py.File, Path], object]] = {
    "external storage": write_external,
    "virtual dataset": write_virtual,
    "external link": lambda file, private: file.__setitem__(
        "x", h5py.ExternalLink(str(private / "other.h5"), "/x")
    ),
    "soft link": lambda file, private: file.__setitem__("x", h5py.SoftLink("/y")),
    "nested soft link": lambda file, private: file.create_group("g").__setitem__(
        "x", h5py.SoftLink("/y")
    ),
    "circle": write_circle,
    "many groups": lambda file, private: [
        file.create_group(str(number)) for number in range(MAX_HDF5_OBJECTS + 1)
    ],
    "rows that are not there": lambda file, private: file.create_dataset(
        "x", (ROWS_OF_A_LIE,), np.float32
    ),
    "compressed rows that are not there": lambda file, private: file.create_dataset(
        "x", (ROWS_OF_A_LIE,), np.float32, chunks=(1000,), compression="gzip"
    ),
    "a huge chunk": lambda file, private: file.create_dataset(
        "x", (1,), np.float64, chunks=(400_000_000,), maxshape=(None,)
    ),
    "foreign filter": lambda file, private: file.create_dataset(
        "x", data=np.arange(100), chunks=(10,), compression="lzf"
    ),
    "text of any length": lambda file, private: file.create_dataset(
        "x", data=["a"], dtype=h5py.string_dtype()
    ),
    "reference": lambda file, private: file.create_dataset(
        "x", data=file.ref, dtype=h5py.ref_dtype
    ),
    "record": lambda file, private: file.create_dataset("x", data=np.zeros(2, "i4,f8")),
    "nothing": lambda file, private: file.create_dataset("x", data=h5py.Empty("f4")),
    "type": lambda file, private: file.__setitem__("x", np.dtype("i4")),
}


@pytest.mark.parametrize("kind", HOSTILE_FILES)
def test_an_hdf5_file_that_is_no_plain_table_is_refused(
    run: Path, private: Path, kind: str
) -> None:
    path = run / "orfs.h5"
    with h5py.File(path, "w", libver="latest") as file:
        HOSTILE_FILES[kind](file, private)
    with pytest.raises(UnsafeFileError, match=re.escape(str(path))) as refusal:
        open_hdf5(path, run)
    assert "\n" not in str(refusal.value)


def test_a_large_attribute_is_refused(run: Path) -> None:
    with h5py.File(run / "x.h5", "w", libver="latest") as file:
        file.create_group("g").attrs["about"] = np.zeros(2_000_000, np.uint8)
    with pytest.raises(UnsafeFileError, match="attribute about is too large"):
        open_hdf5(run / "x.h5", run)


def test_plain_tables_are_opened(run: Path) -> None:
    path = run / "x.h5"
    columns = {
        "zeros": np.zeros(1_000_000, np.int64),
        "numbers": np.arange(1000.0),
        "names": np.array([b"a", b"bc"]),
        "none": np.empty((0, 7), np.float32),
    }
    with h5py.File(path, "w") as file:
        group = file.create_group("g")
        for name, column in columns.items():
            file.create_dataset(name, data=column)
            if len(column):
                group.create_dataset(name, data=column, compression="gzip", shuffle=True)
        file["one number"] = 7
        file.attrs["text"] = "text"
    with open_hdf5(path, run) as file:
        assert file.attrs["text"] == "text"
        assert file["one number"][()] == 7
        for name, column in columns.items():
            assert np.array_equal(file[name][:], column)
            if len(column):
                assert np.array_equal(file["g"][name][:], column)


def test_a_file_that_is_replaced_after_the_check_is_not_followed(
    run: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody replaces the file between the check of its type and the call of HDF5."""
    path = run / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = [1]
    with h5py.File(private / "y.h5", "w") as file:
        file["x"] = [2]
    real_open = safe_files.open_file

    def open_and_replace(*arguments: Path) -> object:
        """Open the file, then put a link in its place."""
        opened = real_open(*arguments)
        path.unlink()
        path.symlink_to(private / "y.h5")
        return opened

    monkeypatch.setattr(safe_files, "open_file", open_and_replace)
    with pytest.raises(UnsafeFileError, match="is a symbolic link"):
        open_hdf5(path, run)


def test_virtual_datasets_show_only_the_files_that_are_allowed(run: Path) -> None:
    path = run / "embeddings.h5"
    with h5py.File(run / "shards" / "00000.h5", "w") as shard:
        shard["x"] = np.arange(3)
    layout = h5py.VirtualLayout((3,), "i8")
    layout[:] = h5py.VirtualSource("shards/00000.h5", "x", (3,))
    with h5py.File(path, "w", libver="latest") as file:
        file.create_virtual_dataset("x", layout)
    with open_hdf5(path, run, virtual_sources=r"shards/[0-9]+\.h5") as file:
        assert file["x"][:].tolist() == [0, 1, 2]
    with pytest.raises(UnsafeFileError, match="shows the content of other files"):
        open_hdf5(path, run, virtual_sources=r"[0-9]+\.h5")


def test_a_refusal_of_hdf5_is_no_error_of_the_system(run: Path) -> None:
    with pytest.raises(OSError, match="signature not found") as refusal:
        open_hdf5(run / "run.json", run)
    assert "/proc/" not in str(refusal.value)
    assert refusal.value.errno is None  # the content was read, and is no HDF5


def handles_on(folder: Path) -> list[str]:
    """Return the open files of this process in a folder, and the folders on the way to it.

    Other handles of the process may come and go meanwhile, by other threads and by the garbage
    collector.
    """
    handles = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            path = link.readlink()
            if path.is_relative_to(folder) or folder.is_relative_to(path):
                handles.append(str(path))
    return sorted(handles)


def test_open_files_are_closed_again(run: Path) -> None:
    handles_before = handles_on(run)
    os.mkfifo(run / "pipe")
    for path in (run / "run.json", run / "pipe", run / "shards" / "plan.json", run / "absent"):
        for function in (open_hdf5, read_file):
            try:
                function(path, run)
            except (OSError, UnsafeFileError):
                continue
        with open_file(run / "run.json", run):
            pass
    assert handles_on(run) == handles_before


def test_a_small_file_takes_little_memory_whatever_size_is_allowed(tmp_path: Path) -> None:
    """A limit of a petabyte does not ask the system for a petabyte."""
    path = tmp_path / "scores.npy"
    path.write_bytes(b"abc")
    assert read_file(path, max_bytes=1 << 50) == b"abc"
