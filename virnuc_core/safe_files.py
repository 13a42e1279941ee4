"""Open, make, rename and remove files of a run without following links.

A run directory may come from a stranger, or lie in a folder in which other users may write. Such a
user can put a symbolic link where we expect a file: reading it would show a private file, and
writing it would destroy one. So every path below an output directory is walked folder by folder,
and each folder is opened through the handle of the folder above it. A link on the way is refused.
The output directory itself may be given through a link, because the user has named it.

A file must be a regular file. A named pipe in its place would block for ever.

HDF5 files have tricks of their own: a dataset may be stored in another file, a link may lead to
another file, and a small file may claim a table that fills the memory. `open_hdf5` refuses them.
"""

import errno
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from virnuc_core.errors import UnsafeFileError, format_bytes
from virnuc_core.system_errors import read_with_retries

if TYPE_CHECKING:
    import h5py

# JSON files of a run are small. The largest have a few hundred bytes for each file of reads.
MAX_JSON_BYTES: Final = 64 << 20
# An attempt to open a file is repeated if another file took its name in the meantime, as happens
# when a process of ours replaces the file. More replacements than this are no accident.
MAX_REPLACEMENTS: Final = 50
COMPARED_BYTES: Final = 1 << 20  # of two files, at a time

# Limits for HDF5 files. Ours have at most 2 levels of groups and some hundred datasets.
MAX_HDF5_DEPTH: Final = 4
MAX_HDF5_OBJECTS: Final = 2_000
MAX_ATTRIBUTE_BYTES: Final = 1 << 20
# gzip can make a table at most about 1030 times smaller.
MAX_COMPRESSION: Final = 1_100
# Of a compressed table in memory. The measurements of a long run need some ten megabytes.
MAX_COMPRESSED_TABLE_BYTES: Final = 2 << 30
# Types of the values of our datasets, as numpy's letters: bool, integers, floats, bytes.
VALUE_KINDS: Final = "biufS"

_FOLDER_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a named pipe returns at once, and the pipe can be refused.
_FILE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

# The output directories in which this process works, without links in their paths.
_directories: set[Path] = set()


@contextmanager
def output_directory(root: Path) -> Iterator[None]:
    """Make all functions of this module follow no link below a directory during the `with` block.

    Without this, the functions know only the folder that directly contains a file, or the
    directory that their caller names.

    Args:
        root: The output directory. It may be given through a link.
    """
    real_root = root.resolve()
    # If the block lies within another one for the same directory, the outer one removes it.
    is_new = real_root not in _directories
    _directories.add(real_root)
    try:
        yield
    finally:
        if is_new:
            _directories.discard(real_root)


def _directory_of(path: Path, root: Path | None) -> Path:
    """Return the directory above a path below which no link is followed.

    Args:
        path: An absolute path.
        root: A directory above the path, if the caller knows one.

    Returns:
        The outermost of the directories that `output_directory` has registered and that contain the
        path. If there is none, `root`, or else the folder of the path.
    """
    if _directories:
        for folder in reversed(path.parents):
            # A path with ".." below the folder could leave it again.
            has_way_out = ".." in path.parts[len(folder.parts) :]
            if not has_way_out and folder.resolve() in _directories:
                return folder
    if root is None:
        return path.parent
    return Path.cwd() / root  # absolute, as the path is


@contextmanager
def _folder_handle(folder: Path, root: Path | None = None, *, make: bool = False) -> Iterator[int]:
    """Open a folder without following links below its output directory.

    Args:
        folder: The folder.
        root: A directory that is the folder or lies above it; see `_directory_of`.
        make: Make the folder, and the folders between `root` and it, if they are not there.

    Yields:
        A handle for the `dir_fd` of functions of `os`. Nothing can be listed through it.

    Raises:
        UnsafeFileError: A folder on the way is a link, or the folder is not below `root`.
        OSError: There is no such folder, or it cannot be opened.
    """
    # Ask for the directory of a file in the folder, so that the folder itself may be the directory.
    folder = Path.cwd() / folder
    directory = _directory_of(folder / "file", root)
    if not folder.is_relative_to(directory) or ".." in folder.relative_to(directory).parts:
        raise UnsafeFileError(f"{folder}: lies outside {directory}, where it must be")
    if make:
        directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, _FOLDER_FLAGS)
    path = directory
    try:
        for name in folder.relative_to(directory).parts:
            path = path / name
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=handle)
            lower_handle = _open_lower_folder(path, handle)
            os.close(handle)
            handle = lower_handle
        try:
            yield handle
        except OSError as error:
            error.filename = _name_whole_path(error.filename, handle, folder)
            error.filename2 = _name_whole_path(error.filename2, handle, folder)
            raise
    finally:
        os.close(handle)


def _name_whole_path(filename: object, handle: int, folder: Path) -> object:
    """Return the path by which a user knows a file that was named through the handle of its folder.

    Args:
        filename: The path in an error of the system: relative to the handle, a path of
            `_path_in`, any other path, or None.
        handle: The handle.
        folder: The folder.
    """
    if not isinstance(filename, str):
        return filename
    prefix = f"{_path_in(handle, '')}/"
    # A path that is absolute replaces the folder, so it stays as it is.
    return str(folder / filename.removeprefix(prefix))


def _open_lower_folder(path: Path, handle: int) -> int:
    """Open a folder through the handle of the folder above it, and return its handle.

    Raises:
        UnsafeFileError: It is a symbolic link.
        OSError: It cannot be opened. The error names the whole path.
    """
    try:
        return os.open(path.name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=handle)
    except OSError as error:
        error.filename = str(path)
        # Linux reports a link as ENOTDIR here, because a link is not a folder.
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            mode = os.stat(path.name, dir_fd=handle, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise _unsafe_error(path, mode) from None
        raise


def _unsafe_error(path: Path, mode: int) -> UnsafeFileError:
    """Return the error for a path that is no regular file.

    Args:
        path: The path.
        mode: Its mode, as `os.lstat` returns it.
    """
    if stat.S_ISLNK(mode):
        return UnsafeFileError(
            f"{path}: is a symbolic link, and none is followed inside an output directory; "
            "remove it, or put in its place what it points to"
        )
    if stat.S_ISDIR(mode):
        kind = "a folder"
    elif stat.S_ISFIFO(mode):
        kind = "a named pipe"
    elif stat.S_ISSOCK(mode):
        kind = "a socket"
    else:
        kind = "a device"
    return UnsafeFileError(f"{path}: is {kind}, not a regular file; move it away")


def _require_regular(path: Path, mode: int) -> None:
    """Raise an `UnsafeFileError` if a mode, as `os.lstat` returns it, is not of a regular file."""
    if not stat.S_ISREG(mode):
        raise _unsafe_error(path, mode)


def _entry(path: Path, folder: int) -> os.stat_result:
    """Return what `os.lstat` says about a path, asked through the handle of its folder.

    Raises:
        OSError: There is no such entry, or it cannot be asked for. The error names the whole path.
    """
    try:
        return os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        error.filename = str(path)
        raise


def open_file(path: Path, root: Path | None = None) -> BufferedReader:
    """Open a regular file of a run to read it, without following links.

    Args:
        path: The file.
        root: The run directory. Below it no link is followed. If it is not given, it is the
            directory of `output_directory`, or else the folder of the file.

    Returns:
        The open file, in binary mode. The caller closes it.

    Raises:
        UnsafeFileError: It is no regular file, or a folder on the way is a link.
        OSError: There is no such file, or it cannot be opened.
    """
    path = Path.cwd() / path
    if path.parent == _own_handles():
        # A path of `path_of_open_file`: this process has the file open, whatever its name is now.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        file = cast(BufferedReader, _file_of_handle(handle, path, "rb"))
        _require_regular(path, os.fstat(handle).st_mode)
        return file
    with _folder_handle(path.parent, root) as folder:
        for _ in range(MAX_REPLACEMENTS):
            # The type is checked first, because opening a device may already act on it.
            _require_regular(path, _entry(path, folder).st_mode)
            handle = os.open(path, os.O_RDONLY | _FILE_FLAGS)
            # The file was opened by its whole path. Is it the one in the folder that was walked to?
            # It is not if a folder of the path, or the file, was exchanged in the meantime. A file
            # may be exchanged by a process of ours, so try again.
            if os.path.samestat(os.fstat(handle), _entry(path, folder)):
                return cast(BufferedReader, _file_of_handle(handle, path, "rb"))
            os.close(handle)
    raise _replaced_error(path)


def _replaced_error(path: Path) -> UnsafeFileError:
    """Return the error for a file that is another one at each attempt to open it."""
    return UnsafeFileError(f"{path}: was replaced again and again while it was opened")


def path_of_open_file(file: BinaryIO) -> str:
    """Return a path by which a library can open a file that is open already.

    The path leads to the same file even if somebody has given its name to another file. It is
    valid in this process until `file` is closed.

    Args:
        file: The open file.
    """
    return str(_own_handles() / str(file.fileno()))


def _own_handles() -> Path:
    """Return the folder in which the system shows the open files of this process."""
    return Path(f"/proc/{os.getpid()}/fd")


def regular_file_exists(path: Path) -> bool:
    """Return whether there is a file of this path. No link is followed.

    Unlike `Path.is_file`, this does not call a named pipe, a device or a link absent.

    Raises:
        UnsafeFileError: Something has this path that is no regular file.
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    try:
        status = read_with_retries(path, path.lstat)
    except (FileNotFoundError, NotADirectoryError):
        return False
    _require_regular(path, status.st_mode)
    return True


def have_same_content(path: Path, other_path: Path) -> bool:
    """Return whether two files of runs have the same bytes. No link is followed.

    Raises:
        UnsafeFileError: One of them is no regular file.
        OSError: One of them is absent or cannot be read.
    """
    with open_file(path) as file, open_file(other_path) as other_file:
        if os.fstat(file.fileno()).st_size != os.fstat(other_file.fileno()).st_size:
            return False  # neither file is read: one of them may be huge
        while True:
            block = file.read(COMPARED_BYTES)
            if block != other_file.read(COMPARED_BYTES):
                return False
            if not block:
                return True


def read_file(path: Path, root: Path | None = None, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file of a run, without following links.

    Args:
        path: The file.
        root: The run directory; see `open_file`.
        max_bytes: A larger file is refused.

    Raises:
        UnsafeFileError: It is no regular file, it is too large, or a folder on the way is a link.
        OSError: There is no such file, or it cannot be read.
    """
    with open_file(path, root) as file:
        # `read` takes as much memory as it is asked to read, so it is asked for what the file has.
        # One byte more than allowed shows that the file is too large.
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise UnsafeFileError(f"{path}: has more than {format_bytes(max_bytes)}; remove it")
    return content


def _file_of_handle(handle: int, path: Path, mode: str, buffering: int = -1) -> BinaryIO:
    """Return a Python file for a handle of the operating system.

    Unlike the file of `os.fdopen`, it has the path as its `name`. The parameters `mode` and
    `buffering` are those of `open`.
    """

    def opener(path: str, flags: int) -> int:
        """Return the handle, which is open already."""
        return handle

    return cast(BinaryIO, open(path, mode, buffering, opener=opener))


def open_to_write(
    path: Path, root: Path | None = None, *, append: bool = False, buffering: int = -1
) -> BinaryIO:
    """Open a file of a run to write it, without following links. It is created if it is absent.

    Args:
        path: The file.
        root: The run directory; see `open_file`.
        append: Write behind the content of the file. Otherwise the content is removed.
        buffering: As for `open`. With 0, each `write` reaches the operating system at once.

    Returns:
        The open file, in binary mode. The caller closes it.

    Raises:
        UnsafeFileError: It is no regular file, or a folder on the way is a link.
        OSError: The file cannot be opened.
    """
    path = Path.cwd() / path
    flags = os.O_WRONLY | os.O_CREAT | _FILE_FLAGS
    if append:
        flags |= os.O_APPEND
    with _folder_handle(path.parent, root) as folder:
        try:
            handle = os.open(path.name, flags, 0o666, dir_fd=folder)
        except OSError as error:
            error.filename = str(path)
            # ELOOP: it is a link. ENXIO: it is a pipe that nobody reads, or a socket.
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                _require_regular(path, _entry(path, folder).st_mode)
            raise
        try:
            status = os.fstat(handle)
            _require_regular(path, status.st_mode)
            if status.st_nlink > 1 and append:
                raise _shared_error(path)
            if status.st_nlink > 1:
                # Somebody else's file may have this name as well, or a backup that was made with
                # `cp -l`. It keeps its content: only this name is given to a new file.
                os.unlink(path.name, dir_fd=folder)
                os.close(handle)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS
                handle = os.open(path.name, flags, 0o666, dir_fd=folder)
            elif not append:
                # This is done here and not by O_TRUNC, because the type is only known now.
                os.ftruncate(handle, 0)
        except BaseException:
            os.close(handle)
            raise
    return _file_of_handle(handle, path, "ab" if append else "wb", buffering)


def _shared_error(path: Path) -> UnsafeFileError:
    """Return the error for a file that has a second name, so that a change would reach further."""
    return UnsafeFileError(
        f"{path}: has another name as well (a hard link), and the file of that name would be "
        "changed; put a copy in its place (cp, then mv)"
    )


def open_to_update(path: Path, root: Path | None = None) -> BinaryIO:
    """Open an existing file of a run to read and change it, without following links.

    Args:
        path: The file.
        root: The run directory; see `open_file`.

    Returns:
        The open file, in binary mode and with its content. The caller closes it.

    Raises:
        UnsafeFileError: It is no regular file, a folder on the way is a link, or the file has a
            second name (a hard link), so that a change would reach further.
        OSError: There is no such file, or it cannot be opened.
    """
    path = Path.cwd() / path
    with _folder_handle(path.parent, root) as folder:
        _require_regular(path, _entry(path, folder).st_mode)
        handle = os.open(path.name, os.O_RDWR | _FILE_FLAGS, dir_fd=folder)
    file = _file_of_handle(handle, path, "rb+")
    # The file may have been exchanged after the check above: look at the one that is open.
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        file.close()
        _require_regular(path, status.st_mode)
        raise _shared_error(path)
    return file


def write_file(path: Path, content: bytes | memoryview, root: Path | None = None) -> None:
    """Write a whole file of a run, without following links. Earlier content is replaced.

    The file is written in place: if this process is killed, it may be incomplete.

    Args:
        path: The file. It is created if it is absent.
        content: The new content.
        root: The run directory; see `open_file`.

    Raises:
        UnsafeFileError: It is no regular file, or a folder on the way is a link.
        OSError: The file cannot be written.
    """
    with open_to_write(path, root) as file:
        file.write(content)


def open_new_file(path: Path, root: Path | None = None) -> BinaryIO:
    """Create a file that does not exist yet, without following links, to write and read it.

    Raises:
        FileExistsError: Something has this path already, be it a link to nothing.
        UnsafeFileError: A folder on the way is a link.
        OSError: The file cannot be created.
    """
    path = Path.cwd() / path
    with _folder_handle(path.parent, root) as folder:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS
            handle = os.open(path.name, flags, 0o666, dir_fd=folder)
        except OSError as error:
            error.filename = str(path)
            raise
    return _file_of_handle(handle, path, "rb+")


def create_file(path: Path, content: bytes, root: Path | None = None) -> None:
    """Create a file that does not exist yet, without following links, and write its content.

    Args:
        path: The file.
        content: Its content.
        root: The run directory; see `open_file`.

    Raises:
        FileExistsError: Something has this path already, be it a link to nothing.
        UnsafeFileError: A folder on the way is a link.
        OSError: The file cannot be created or written.
    """
    path = Path.cwd() / path
    with _folder_handle(path.parent, root) as folder:
        # O_EXCL: of several processes that create the same file, only one succeeds.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS
        handle = os.open(path.name, flags, 0o644, dir_fd=folder)
    with _file_of_handle(handle, path, "wb") as file:
        file.write(content)


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Make a folder and its parents, if they are not there. No link is taken for a folder.

    Args:
        folder: The folder.
        root: The run directory; see `open_file`. It may be given through a link.

    Raises:
        UnsafeFileError: The folder, or a folder between it and the run directory, is a link.
        OSError: The folder cannot be made.
    """
    with _folder_handle(folder, root, make=True):
        pass


def remove_file(path: Path, root: Path | None = None, *, missing_ok: bool = False) -> None:
    """Remove a file of a run. If the path itself is a link, the link is removed.

    Args:
        path: The file.
        root: The run directory; see `open_file`.
        missing_ok: Do nothing if there is no such file.

    Raises:
        UnsafeFileError: A folder on the way is a link.
        OSError: The file cannot be removed.
    """
    path = Path.cwd() / path
    try:
        with _folder_handle(path.parent, root) as folder:
            os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        if not missing_ok:
            raise


def remove_empty_folder(folder: Path, root: Path | None = None) -> None:
    """Remove a folder of a run, if it is empty. A link to a folder is not removed.

    Args:
        folder: The folder.
        root: The run directory; see `open_file`.

    Raises:
        UnsafeFileError: A folder on the way is a link.
        OSError: It is not empty, or no folder, or cannot be removed.
    """
    folder = Path.cwd() / folder
    with _folder_handle(folder.parent, root) as parent:
        os.rmdir(folder.name, dir_fd=parent)


def check_folder(folder: Path, root: Path | None = None) -> None:
    """Check that a folder of a run is there, and is reached without following a link.

    Args:
        folder: The folder.
        root: The run directory; see `open_file`.

    Raises:
        UnsafeFileError: The folder, or a folder on the way, is a link.
        OSError: There is no such folder.
    """
    with _folder_handle(folder, root):
        pass


def rename_file(path: Path, new_path: Path, root: Path | None = None) -> None:
    """Rename a file of a run. What had the new name before is replaced, also if it is a link.

    Args:
        path: The file.
        new_path: The new path on the same file system.
        root: The run directory of both; see `open_file`.

    Raises:
        UnsafeFileError: A folder on the way of either path is a link.
        OSError: The file cannot be renamed.
    """
    path = Path.cwd() / path
    new_path = Path.cwd() / new_path
    with (
        _folder_handle(path.parent, root) as folder,
        _folder_handle(new_path.parent, root) as new_folder,
    ):
        try:
            # These paths lead to the folders that were checked, whatever has their names by now.
            os.replace(_path_in(folder, path.name), _path_in(new_folder, new_path.name))
        except IsADirectoryError as error:
            error.filename = str(new_path)  # it is the new name that a folder has
            error.filename2 = None
            raise


def rename_open_file(file: BinaryIO, path: Path, new_path: Path, root: Path | None = None) -> None:
    """Rename a file that this process has open, as `rename_file` does.

    Args:
        file: The open file.
        path: Its path.
        new_path: The new path on the same file system.
        root: The run directory of both; see `open_file`.

    Raises:
        UnsafeFileError: Somebody has given one of the names to another file, or a folder on the way
            is a link.
        OSError: The file cannot be renamed.
    """
    # Another user of the folder may exchange the file at any moment, so look before and after.
    _require_same_file(file, path, root)
    rename_file(path, new_path, root)
    _require_same_file(file, new_path, root)


def _require_same_file(file: BinaryIO, path: Path, root: Path | None) -> None:
    """Raise an `UnsafeFileError` if a path does not lead to a file that this process has open.

    Args:
        file: The open file.
        path: The path.
        root: The run directory; see `open_file`.
    """
    path = Path.cwd() / path
    with _folder_handle(path.parent, root) as folder:
        entry = _entry(path, folder)
    if not os.path.samestat(os.fstat(file.fileno()), entry):
        raise UnsafeFileError(
            f"{path}: is not the file that was written there, because somebody has replaced it; "
            "use a folder that nobody else can write to"
        )


def change_folder(folder: Path, root: Path | None = None) -> None:
    """Make and remove an empty file in a folder of a run, without following links.

    A network file system may answer questions about a folder from its memory. After a change of the
    folder it asks its server what the folder contains.

    Args:
        folder: The folder.
        root: The run directory; see `open_file`.

    Raises:
        UnsafeFileError: The folder, or a folder on the way, is a link.
        OSError: There is no such folder, or it cannot be changed.
    """
    with _folder_handle(folder, root) as handle:
        # Nobody can put a link where the file will be, because nobody knows its name.
        path = _path_in(handle, f".look-{secrets.token_hex(8)}")
        path.touch()
        path.unlink()


def _path_in(folder: int, name: str) -> Path:
    """Return the path of a file in an open folder. It is valid while the handle is open.

    The path leads to the same folder even if somebody has given its name to another one.

    Args:
        folder: The handle of the folder.
        name: The name of the file.
    """
    return Path(f"/proc/self/fd/{folder}", name)


def flush_folder(folder: Path, root: Path | None = None) -> None:
    """Flush a folder, so that renames in it survive a power cut.

    Args:
        folder: The folder.
        root: The run directory; see `open_file`.

    Raises:
        UnsafeFileError: The folder, or a folder on the way, is a link.
        OSError: There is no such folder, or it cannot be flushed.
    """
    with _folder_handle(folder, root) as walked_folder:
        handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=walked_folder)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_hdf5(
    path: Path,
    root: Path | None = None,
    *,
    virtual_sources: str = "",
    check: Callable[[BufferedReader], object] | None = None,
) -> "h5py.File":
    """Open an HDF5 file of a run to read it, after a check of its structure.

    HDF5's own lock is not taken, because the lease protects the directory.

    Args:
        path: The file.
        root: The run directory; see `open_file`.
        virtual_sources: A regular expression. The file may have virtual datasets, which show
            datasets of other files, if the path of each of these files matches it. The caller
            must open these files with this function, too. Without it, virtual datasets are refused.
        check: Is called with the open file before HDF5 gets it. It raises an error if the content
            is not what it should be.

    Returns:
        The open file. Each of its datasets lies in this file, has numbers or bytes of a fixed
        length, and claims no more bytes than the file can hold.

    Raises:
        UnsafeFileError: It is no regular file, a folder on the way is a link, or the file leads to
            other files, or claims more than it holds.
        OSError: There is no such file, or it is no HDF5 file.
    """
    for _ in range(MAX_REPLACEMENTS):
        with open_file(path, root) as opened:
            if check is not None:
                check(opened)
            try:
                file = _open_by_handle(opened.fileno(), path)
            except OSError:
                # HDF5 refuses a file whose name was given to another file in the meantime. Such a
                # file has no name left (no hard link). The other file is opened in the next round.
                if os.fstat(opened.fileno()).st_nlink == 0:
                    continue
                raise
            file_bytes = os.fstat(opened.fileno()).st_size
        break
    else:
        raise _replaced_error(path)
    try:
        _require_plain_hdf5(file, path, file_bytes, virtual_sources)
    except BaseException:
        file.close()
        raise
    return file


def read_dataset(dataset: "h5py.Dataset") -> Any:
    """Return the values of a dataset of an HDF5 file that `open_hdf5` has opened.

    Args:
        dataset: The dataset. It is read as a whole.

    Returns:
        The values as a numpy array.

    Raises:
        UnsafeFileError: The values do not fit into the memory of this machine.
    """
    try:
        if dataset.nbytes <= _memory_bytes():  # bytes of the values in memory, not compressed
            return dataset[:]
    except MemoryError:
        pass  # the message below says the same
    size = format_bytes(dataset.nbytes)
    raise UnsafeFileError(f"{dataset.name} claims {size}, more than this machine's memory")


def require_fits_memory(path: Path, file: BinaryIO) -> None:
    """Raise an `UnsafeFileError` if an open file is larger than the memory of this machine.

    Args:
        path: The path of the file, for the message.
        file: The open file, which is about to be read as a whole.
    """
    n_bytes = os.fstat(file.fileno()).st_size
    if n_bytes > _memory_bytes():
        raise UnsafeFileError(
            f"{path}: has {format_bytes(n_bytes)}, more than this machine's memory; move it away"
        )


def _memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _open_by_handle(handle: int, path: Path) -> "h5py.File":
    """Open an HDF5 file that this process has open already.

    Args:
        handle: The handle of the file.
        path: The path of the file, for error messages.

    Raises:
        OSError: HDF5 refuses the file, or it cannot be read.
    """
    import h5py  # slow to import, and most users of this module read no HDF5

    handle_path = f"/proc/self/fd/{handle}"  # HDF5 opens a file by its path only
    try:
        return h5py.File(handle_path, "r", locking=False)
    except (OSError, RuntimeError) as error:
        reason = str(error).replace(handle_path, str(path))
        number = error.errno if isinstance(error, OSError) else None
        if number is None:
            raise OSError(reason) from None
        raise OSError(number, reason) from None


def _require_plain_hdf5(
    file: "h5py.File", path: Path, file_bytes: int, virtual_sources: str
) -> None:
    """Check that an HDF5 file has only groups and plain datasets of its own. No data is read.

    Args:
        file: The open file.
        path: Its path, for the message.
        file_bytes: The size of the file.
        virtual_sources: A regular expression for the files whose content the file may show by
            virtual datasets, which are then not checked further: the caller opens these files with
            `open_hdf5`, which checks them. Empty: virtual datasets are refused.

    Raises:
        UnsafeFileError: Names what is wrong.
    """
    import h5py

    _require_small_attributes(file.id, path)
    groups = [(file.id, "", 0)]  # groups still to be checked, with their names and depths
    n_objects = 0
    while groups:
        group, group_name, depth = groups.pop()
        for link_name in group:
            name = f"{group_name}/{link_name.decode('utf-8', 'replace')}"
            n_objects += 1
            # Hard links may form a circle, which the limit on the depth ends.
            if n_objects > MAX_HDF5_OBJECTS or depth > MAX_HDF5_DEPTH:
                raise UnsafeFileError(f"{path}: has too many groups and datasets for our files")
            # A soft link may lead to an external link, and an external link to another file.
            if group.links.get_info(link_name).type != h5py.h5l.TYPE_HARD:
                raise UnsafeFileError(f"{path}: {name} is a link, which may lead to another file")
            member = h5py.h5o.open(group, link_name)
            _require_small_attributes(member, path)
            if isinstance(member, h5py.h5g.GroupID):
                groups.append((member, name, depth + 1))
            elif isinstance(member, h5py.h5d.DatasetID):
                if virtual_sources and _is_virtual(member, virtual_sources):
                    continue
                _require_plain_dataset(member, f"{path}: {name}", file_bytes)
            else:
                raise UnsafeFileError(f"{path}: {name} is neither a group nor a dataset")


def _require_small_attributes(member: "h5py.h5g.ObjectID", path: Path) -> None:
    """Raise an `UnsafeFileError` if an attribute of a group or dataset is too large for ours."""
    import h5py

    for index in range(h5py.h5a.get_num_attrs(member)):
        attribute = h5py.h5a.open(member, index=index)
        if attribute.get_storage_size() > MAX_ATTRIBUTE_BYTES:
            name = attribute.name.decode("utf-8", "replace")
            raise UnsafeFileError(f"{path}: its attribute {name} is too large for our files")


def _is_virtual(dataset: "h5py.h5d.DatasetID", sources: str) -> bool:
    """Return whether a dataset is virtual, and all its source files match a regular expression."""
    import h5py

    creation = dataset.get_create_plist()
    if creation.get_layout() != h5py.h5d.VIRTUAL:
        return False
    names = [creation.get_virtual_filename(index) for index in range(creation.get_virtual_count())]
    return all(re.fullmatch(sources, name) for name in names)


def _require_plain_dataset(dataset: "h5py.h5d.DatasetID", name: str, file_bytes: int) -> None:
    """Check that a dataset lies in its own file, and claims no more than the file can hold.

    Args:
        dataset: The dataset.
        name: The path of the file and the name of the dataset, for the message.
        file_bytes: The size of the file.

    Raises:
        UnsafeFileError: Names what is wrong.
    """
    import h5py

    creation = dataset.get_create_plist()
    layout = creation.get_layout()
    if layout == h5py.h5d.VIRTUAL or creation.get_external_count() > 0:
        raise UnsafeFileError(f"{name} shows the content of other files")
    if dataset.dtype.kind not in VALUE_KINDS:
        raise UnsafeFileError(f"{name} has values of a type that our files do not have")
    allowed_filters = (h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE)
    for index in range(creation.get_nfilters()):
        filter_number = creation.get_filter(index)[0]
        if filter_number not in allowed_filters:
            raise UnsafeFileError(f"{name} has filter {filter_number}, which our files do not have")

    # Sizes are Python integers here, so that a product of large numbers does not overflow.
    claimed_bytes = math.prod(dataset.shape or ()) * dataset.dtype.itemsize
    stored_bytes = dataset.get_storage_size()
    if layout == h5py.h5d.CHUNKED:
        # HDF5 loads whole chunks, also if the dataset is smaller than a chunk.
        chunk_bytes = math.prod(creation.get_chunk()) * dataset.dtype.itemsize
        is_too_large = max(claimed_bytes, chunk_bytes) > MAX_COMPRESSED_TABLE_BYTES
        max_bytes = min(stored_bytes, file_bytes) * MAX_COMPRESSION
    else:
        # The bytes of the dataset lie in the file as they are, in one piece.
        start = dataset.get_offset() or 0
        is_too_large = False
        max_bytes = min(stored_bytes, file_bytes - start)
    if is_too_large or claimed_bytes > max_bytes:
        raise UnsafeFileError(
            f"{name} claims {format_bytes(claimed_bytes)}, which the file does not hold"
        )
