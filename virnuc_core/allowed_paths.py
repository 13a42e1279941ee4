"""Decides which files and folders a user may name.

An administrator can limit the paths of all commands and flows: the environment variable
`VIRNUC_ROOTS` lists folders, separated like those of `PATH`. Then every file that is read or
written because a user named it must lie in one of these folders, after all links are followed. This
matters where people start runs under an account that may read more than they may, such as the
account of a Prefect worker.

`require_allowed` decides. `require_allowed_options` applies it to the values of options, and to the
links in the folders that they name. Code that opens a file whose name comes from another file (a
sample sheet, the record of a run, the header of a CRAM file) calls `require_allowed` itself.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from virnuc_core.errors import ConfigError
from virnuc_core.input_names import STDIN, is_remote
from virnuc_core.system_errors import ErrorKind, classify, real_path, unreadable_error

ROOTS: Final = "VIRNUC_ROOTS"
# Options whose texts are inputs of reads. `-` is standard input, and addresses are not paths.
READS_OPTIONS: Final = frozenset({"reads", "mates_1", "mates_2", "source"})
# Options whose texts are paths only if they end with one of these suffixes. Otherwise the text is
# the name of a profile, or the address of a scheduler.
SUFFIXES_OF_FILES: Final = {
    "profile": (".toml",),
    "name": (".toml",),
    "cluster": (".yaml", ".yml"),
}
# Options that name a folder of which sub-folders are never read.
_FLAT_OPTIONS: Final = READS_OPTIONS
# An inbox checks each of its files when it reads the file, so that one bad link fails that file
# alone and not the whole inbox.
_CHECKED_LATER: Final = frozenset({"inbox"})
_HISTORY_FILE: Final = "virnuc-history.jsonl"
# Temporary folders that this process created and reads again, see `own_folder`.
_own_folders: list[Path] = []


def allowed_folders() -> tuple[Path, ...]:
    """Return the folders of `VIRNUC_ROOTS`, with links followed; empty if every path is allowed."""
    # A folder that cannot be looked at stays as it is named. If links lead to it, less is allowed.
    names = os.environ.get(ROOTS, "").split(os.pathsep)
    return tuple(Path(name).resolve() for name in names if name)


def require_allowed(path: Path, name: str) -> None:
    """Raise an error if a path lies outside the folders of `VIRNUC_ROOTS`, with links followed.

    Without the variable every path is allowed.

    Args:
        path: The path. It need not exist.
        name: The option, or the kind of file, that the message names.

    Raises:
        ConfigError: The path is not allowed.
        UnreadableError: It is not known where the path leads.
    """
    folders = allowed_folders()
    if not folders:
        return
    try:
        # Unlike `Path.resolve`, this raises no error for links that lead to each other. Opening
        # such a link fails later.
        resolved_path = real_path(path)
    except ValueError as error:
        raise ConfigError(f"{name}: {path} is not a path ({error})") from error
    # `_own_folders` are temporary folders of this process, whose files no user has named.
    if not any(resolved_path.is_relative_to(folder) for folder in (*folders, *_own_folders)):
        raise ConfigError(
            f"{name}: {path} lies in none of the folders that {ROOTS} names; "
            "choose a path that does"
        )


def require_allowed_options(options: Iterable[tuple[str, Any]]) -> None:
    """Raise an error if an option names a path that is not allowed, or a folder with such a link.

    The folders that options name are searched for links, because what a link leads to is read or
    written like any other file.

    Args:
        options: The name and the value of each option of a command, or parameter of a flow. Values
            that are not paths are skipped.

    Raises:
        ConfigError: A path is not allowed. The message names the option.
    """
    if not allowed_folders():
        return
    for name, path in paths_of_options(options):
        require_allowed(path, name)
        if name in _CHECKED_LATER:  # the files in it are checked one by one when they are read
            continue
        # Of some folders (`_FLAT_OPTIONS`) only the files are read, and no sub-folders.
        for link in _links_within(path, is_recursive=name not in _FLAT_OPTIONS):
            require_allowed(link, name)


def paths_of_options(options: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Path]]:
    """Yield the name of each option with each path that it names.

    Args:
        options: The name and the value of each option. A value may be a tuple or list of values.
    """
    values = dict(options)
    for name, value in values.items():
        parts = value if isinstance(value, (tuple, list)) else (value,)
        for part in parts:
            if isinstance(part, Path) or _is_path_text(name, part):
                yield name, Path(part)
    # Without a history option, the file beside the output is read and written.
    if "history" in values and values["history"] is None and "out" in values:
        yield "history", Path(values["out"]).absolute().parent / _HISTORY_FILE


def _is_path_text(name: str, value: object) -> bool:
    """Return whether the text of an option names a local file or folder.

    Args:
        name: The name of the option.
        value: One of its values.
    """
    if not isinstance(value, str):
        return False
    if name in READS_OPTIONS:
        return value != STDIN and not is_remote(value)
    # Most options are in neither list. They have no suffixes, so their texts are no paths.
    return value.endswith(SUFFIXES_OF_FILES.get(name, ()))


def _links_within(folder: Path, *, is_recursive: bool) -> Iterator[Path]:
    """Yield each symbolic link in a folder; nothing if the path is not a folder.

    Args:
        folder: The folder.
        is_recursive: Also search sub-folders, and the folders to which links lead. Otherwise links
            to folders are left out, because they are not read.

    Raises:
        UnreadableError: A folder cannot be listed. Its files may still be opened by name, so the
            links among them would go unchecked.
    """
    pending = [str(folder)]
    searched = set[str]()  # real paths: links may lead in circles
    while pending:
        current = pending.pop()
        try:
            resolved_path = str(real_path(Path(current)))
            if resolved_path in searched:
                continue
            searched.add(resolved_path)
            with os.scandir(current) as iterator:
                entries = list(iterator)
        except ValueError:  # a name that no file can have
            continue
        except OSError as error:
            if classify(error) is ErrorKind.TRANSIENT:
                raise unreadable_error(error, Path(current)) from error
            continue  # no folder, or a name that no file can have
        for entry in entries:
            is_folder = _leads_to_folder(entry)
            if entry.is_symlink() and (is_recursive or not is_folder):
                # The caller checks the link before this generator continues, so that a folder
                # outside is never listed.
                yield Path(entry.path)
            if is_recursive and is_folder:
                pending.append(entry.path)


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; False if a link leads nowhere.

    Raises:
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    try:
        return entry.is_dir()
    except OSError as error:
        if classify(error) is ErrorKind.TRANSIENT:
            raise unreadable_error(error, Path(entry.path)) from error
        return False  # for example links that lead to each other


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Allow the paths in a temporary folder that this process has created, in a `with` statement.

    Such a folder may lie outside `VIRNUC_ROOTS`, but no user has named its files.

    Args:
        folder: The folder.
    """
    real_folder = folder.resolve()
    _own_folders.append(real_folder)
    try:
        yield
    finally:
        _own_folders.remove(real_folder)
