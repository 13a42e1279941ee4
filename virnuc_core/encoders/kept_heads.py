"""The classifiers ("heads") of a models directory: the installed one and the archive of all others.

`head/` holds the installed classifier, which runs use. `heads/NNN-DIGEST/` is the archive: a copy
of every classifier that was ever installed. The content of `head/` is copied to the archive before
another classifier replaces it, so no classifier is lost. A copy is written file by file, with
`config.json` last. A folder of the archive without `config.json` is therefore an incomplete copy,
and the next call completes it.
"""

import ctypes
import logging
import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from virnuc_core.encoders.checkpoint import check_widths, open_folder, tensor_files
from virnuc_core.encoders.digests import part_digest
from virnuc_core.encoders.model_config import CONFIG, HeadCard, HeadShape, read_shape
from virnuc_core.encoders.registry import HEAD
from virnuc_core.errors import ConfigError, WeightsError
from virnuc_core.rundir import atomic_file, run_lock
from virnuc_core.system_errors import is_regular_file, list_folder, path_exists

CHANCE_AUROC: Final = 0.5  # the area under the ROC curve of a classifier that guesses
ARCHIVE: Final = "heads"  # folder of the archive in a models directory
DIGEST_LETTERS: Final = 8  # of a classifier's digest, in the name of its folder
# Arguments of renameat2(2), which Python does not offer
AT_FDCWD: Final = -100  # relative paths are relative to the working directory
RENAME_EXCHANGE: Final = 2  # exchange the two names
log = logging.getLogger(__name__)


class KeptHead(NamedTuple):
    """One classifier of a models directory."""

    number: int  # number in the archive; 0: it is only in head/, not in the archive
    digest: str
    is_installed: bool
    shape: HeadShape


class KeptFolder(NamedTuple):
    """A folder of the archive. It may hold an incomplete copy."""

    number: int
    path: Path


def kept_heads(models: Path) -> list[KeptHead]:
    """Return all classifiers of a models directory, each once, ordered by number.

    These are the installed classifier and those of the archive. A classifier that cannot be read,
    or a copy that is not what was archived, is left out, and a warning is logged.
    """
    by_digest: dict[str, KeptHead] = {}
    installed_digest = ""
    for number, path in [KeptFolder(0, models / HEAD), *_kept_folders(models)]:
        if not is_regular_file(path / CONFIG):  # not there, or an incomplete copy
            continue
        try:
            digest, shape = part_digest(path), read_shape(path / CONFIG, HeadShape)
            if number > 0:
                _require_archived_digest(path, digest)
        except WeightsError as error:
            log.warning("%s", error)
            continue
        if number == 0:
            installed_digest = digest
        # The installed classifier comes first in this loop. If the archive has a copy of it, this
        # replaces number 0 by the number in the archive.
        by_digest[digest] = KeptHead(number, digest, digest == installed_digest, shape)
    return sorted(by_digest.values())  # by number, which is the first field


class Comparison(NamedTuple):
    """How a new classifier compares with the installed one."""

    problem: str  # why the new one should not be installed; "" if there is no reason
    remark: str  # a further sentence for the user; "" if there is none


def install_head(new_head: Path, models: Path, *, install_anyway: bool = False) -> str:
    """Install a classifier as `models/head`, unless it seems worse than the installed one.

    The new and the former classifier are both copied to the archive `models/heads`.

    Args:
        new_head: Folder of the new classifier.
        models: Models directory.
        install_anyway: Install it even if it may be no better than chance, or worse than the
            installed one on the same test reads.

    Returns:
        A message for the user, in one line: under which name it is in the archive, and how it
        compares with the former one.

    Raises:
        WeightsError: The classifier should not be installed, or does not fit the encoders.
    """
    card = read_shape(new_head / CONFIG, HeadShape).card
    comparison = _compare_cards(card, models)
    problem = comparison.problem
    if problem and not install_anyway:
        raise WeightsError(
            f"{new_head}: not installed: {problem}; --install-anyway puts it in place all the same"
        )
    message = f"installed as {_install(new_head, models).name}"
    if problem:
        return f"{message}; although {problem}"
    if comparison.remark:
        return f"{message}; {comparison.remark}"
    return message


def _compare_cards(card: HeadCard | None, models: Path) -> Comparison:
    """Compare the test results of a new classifier with chance and with the installed classifier.

    The measure is the area under the ROC curve (AUROC): 0.5 for guessing, 1 without errors.

    Args:
        card: What the new classifier's training recorded; None if it has no card.
        models: Models directory, with the installed classifier if there is one.

    Returns:
        Why the new classifier should not be installed, if there is a reason, and a remark.
    """
    if card is None:
        return Comparison("it has no card that tells how well it does", "")
    if card.auroc.low <= CHANCE_AUROC:  # the lower end of its 95 % interval
        return Comparison(f"its AUROC is {card.auroc}, which may be chance", "")

    installed_card = None
    for head in kept_heads(models):
        if head.is_installed:
            installed_card = head.shape.card

    # Two AUROCs compare only if both were measured on the same test reads.
    is_same_test = False
    if installed_card is not None:
        has_same_reads = card.reads == installed_card.reads
        is_same_test = has_same_reads and card.test == installed_card.test
    if installed_card is None or not is_same_test:
        remark = ""
        if is_regular_file(models / HEAD / CONFIG):  # there is an installed classifier
            remark = "the one before was not tested on these reads, so the two cannot be compared"
        return Comparison("", remark)

    comparison = f"AUROC {card.auroc}, of the one before {installed_card.auroc}, on the same test"
    if card.auroc.value < installed_card.auroc.value:
        return Comparison(f"it is worse: {comparison}", comparison)
    return Comparison("", comparison)


def use_head(models: Path, number: int) -> Path:
    """Install a classifier of the archive as `models/head`.

    The classifier that was installed before is copied to the archive, unless it is there already.

    Args:
        models: Models directory.
        number: Number of the classifier in the archive.

    Returns:
        The classifier's folder in the archive.

    Raises:
        ConfigError: The archive has no classifier with this number.
        WeightsError: The copy is not what was archived, or does not fit the encoders. Nothing is
            changed then.
    """
    folders = dict(_kept_folders(models))
    if number not in folders:
        known_numbers = ", ".join(map(str, folders)) or "none"
        raise ConfigError(
            f"{models}: no head is kept under {number}; there are {known_numbers}, "
            "see virnuc models heads"
        )
    folder = folders[number]
    if is_regular_file(folder / CONFIG):  # an incomplete copy is refused by `_install`
        _require_archived_digest(folder, part_digest(folder))
    return _install(folder, models)


def _require_archived_digest(folder: Path, digest: str) -> None:
    """Raise a `WeightsError` if a copy has another digest than the name of its folder says.

    Args:
        folder: Folder of the copy in the archive, named `NNN-DIGEST`.
        digest: Digest of its files as they are now.
    """
    archived_digest = folder.name.rpartition("-")[2]
    if digest[:DIGEST_LETTERS] != archived_digest:
        raise WeightsError(
            f"{folder}: is not the head that was kept here: its digest begins with "
            f"{digest[:DIGEST_LETTERS]}, that of the kept one with {archived_digest}; install the "
            "head again from where it came"
        )


def _kept_folders(models: Path) -> list[KeptFolder]:
    """Return the folders of the archive by number, including incomplete copies.

    A folder is named `NNN-DIGEST`: a number of three or more digits, and the first eight letters of
    the classifier's digest. Anything else in the archive is ignored.
    """
    folders = []
    for path in list_folder(models / ARCHIVE, "[0-9][0-9][0-9]*-????????"):
        number = path.name.partition("-")[0]
        if number.isdecimal():  # the pattern also matches other characters after three digits
            folders.append(KeptFolder(int(number), path))
    return sorted(folders)


def _install(head: Path, models: Path) -> Path:
    """Install a classifier as `models/head`, and archive it and the former classifier.

    Another process that installs at the same time waits. The archive copies are made first, and
    `head/` is replaced as a whole, so a kill at any moment loses no classifier.

    Args:
        head: Folder of the classifier.
        models: Models directory.

    Returns:
        The classifier's folder in the archive.

    Raises:
        WeightsError: The classifier is damaged, or does not fit the encoders.
    """
    shape, _ = open_folder(head, HeadShape)
    check_widths(models, shape)
    installed = models / HEAD
    new_copy, former = models / ".head.new", models / ".head.old"
    with run_lock(models / ARCHIVE):
        if is_regular_file(installed / CONFIG) and tensor_files(installed):
            _archive_head(installed, models)
        archive_folder = _archive_head(head, models)

        # Remove what a killed process may have left, and copy to a temporary name.
        for leftover in (new_copy, former):
            shutil.rmtree(leftover, ignore_errors=True)
        _copy_head(archive_folder, new_copy)

        # Replace head/ in one step if the file system can do that, else in two. If the process is
        # killed between the two, there is no head/, and `virnuc models use-head` restores it.
        if not path_exists(installed):
            new_copy.rename(installed)
        elif not _swap_folders(new_copy, installed):
            installed.rename(former)
            new_copy.rename(installed)
        for leftover in (new_copy, former):
            shutil.rmtree(leftover, ignore_errors=True)
    return archive_folder


def _archive_head(head: Path, models: Path) -> Path:
    """Copy a classifier to the archive, unless the archive has a complete copy of it.

    Args:
        head: Folder of the classifier.
        models: Models directory.

    Returns:
        The classifier's folder in the archive: an existing one for the same digest, or a new one
        with the next number.
    """
    digest = part_digest(head)
    suffix = f"-{digest[:DIGEST_LETTERS]}"
    folders = _kept_folders(models)  # the last one has the highest number
    number = folders[-1].number + 1 if folders else 1
    archive_folder = models / ARCHIVE / f"{number:03d}{suffix}"
    for folder in folders:
        if folder.path.name.endswith(suffix):
            archive_folder = folder.path
            break
    has_config = is_regular_file(archive_folder / CONFIG)
    is_complete = has_config and part_digest(archive_folder) == digest
    if not is_complete:  # a new folder, an incomplete copy, or a copy that was damaged later
        _copy_head(head, archive_folder)
    return archive_folder


def _swap_folders(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step, so that both names exist at every moment.

    Returns:
        True if it was done; false if the file system cannot do it, like some network file systems.
    """
    libc = ctypes.CDLL(None)  # the C library of this process
    failed = libc.renameat2(
        AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE
    )
    return not failed


def _copy_head(head: Path, folder: Path) -> None:
    """Copy the files of a classifier to a folder, each atomically, `config.json` last.

    A folder with `config.json` is therefore complete.
    """
    # False sorts before True, so config.json comes last.
    for path in sorted(list_folder(head), key=lambda path: path.name == CONFIG):
        if is_regular_file(path):
            with atomic_file(folder / path.name) as temp_path:
                shutil.copyfile(path, temp_path)
