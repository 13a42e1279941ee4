"""The classifiers of a models directory: installed, kept and taken back.

The one in use stands in `head/`, and `heads/NNN-DIGEST/` has each one that was ever installed. None
is lost: what stands in `head/` is kept before another takes its place. A kept head appears file by
file, its `config.json` last. So a folder without one is half a copy, which the next call completes.
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

CHANCE: Final = 0.5  # the AUROC of guessing
KEPT: Final = "heads"  # folder of the kept heads
DIGEST_LETTERS: Final = 8  # of a digest, in a folder's name
AT_FDCWD: Final = -100  # of renameat2(2): paths are relative to the working directory
RENAME_EXCHANGE: Final = 2
log = logging.getLogger(__name__)


class KeptHead(NamedTuple):
    """One classifier of a models directory."""

    number: int  # 0: it stands in head/ and was not kept so far
    digest: str
    installed: bool
    shape: HeadShape


class KeptFolder(NamedTuple):
    """A folder of a kept head, which may be half a copy."""

    number: int
    path: Path


def kept_heads(models: Path) -> list[KeptHead]:
    """Return the heads of a models directory by number; warn of those that cannot be read."""
    by_digest: dict[str, KeptHead] = {}
    installed_digest = ""
    for number, path in [KeptFolder(0, models / HEAD), *_kept_folders(models)]:
        if not (path / CONFIG).is_file():
            continue
        try:
            digest, shape = part_digest(path), read_shape(path / CONFIG, HeadShape)
        except WeightsError as error:
            log.warning("%s", error)
            continue
        if number == 0:
            installed_digest = digest
        # Of two equal ones, the kept one replaces the installed one, which comes first.
        by_digest[digest] = KeptHead(number, digest, digest == installed_digest, shape)
    return sorted(by_digest.values())


class Comparison(NamedTuple):
    """How a new head compares with the installed one."""

    problem: str  # why it should not be installed; empty if nothing speaks against it
    remark: str


def install_head(new: Path, models: Path, *, anyway: bool = False) -> str:
    """Put a head in place as `models/head`.

    Args:
        new: Folder of the head.
        models: Models directory.
        anyway: Install it even if it may be chance, or is worse on the same test.

    Returns:
        What there is to say about it, in one line.

    Raises:
        WeightsError: It should not be installed, or does not fit the encoders.
    """
    card = read_shape(new / CONFIG, HeadShape).card
    comparison = _compare_with_installed(card, models)
    problem = comparison.problem
    if problem and not anyway:
        raise WeightsError(
            f"{new}: not installed: {problem}; --install-anyway puts it in place all the same"
        )
    message = f"installed as {_put_in_place(new, models).name}"
    if problem:
        return f"{message}; although {problem}"
    if comparison.remark:
        return f"{message}; {comparison.remark}"
    return message


def _compare_with_installed(card: HeadCard | None, models: Path) -> Comparison:
    """Compare a new head's card with that of the installed one."""
    if card is None:
        return Comparison("it has no card that tells how well it does", "")
    if card.auroc.low <= CHANCE:
        return Comparison(f"its AUROC is {card.auroc}, which may be chance", "")
    installed_card = None
    for head in kept_heads(models):
        if head.installed:
            installed_card = head.shape.card
    is_same_test = installed_card is not None and (card.reads, card.test) == (
        installed_card.reads,
        installed_card.test,
    )
    if installed_card is None or not is_same_test:
        remark = ""
        if (models / HEAD / CONFIG).is_file():
            remark = "the one before was not tested on these reads, so the two cannot be compared"
        return Comparison("", remark)
    comparison = f"AUROC {card.auroc}, of the one before {installed_card.auroc}, on the same test"
    if card.auroc.value < installed_card.auroc.value:
        return Comparison(f"it is worse: {comparison}", comparison)
    return Comparison("", comparison)


def use_head(models: Path, number: int) -> Path:
    """Put a kept head in place as `models/head`, and keep what stands there.

    Returns:
        The folder in which the head is kept.

    Raises:
        ConfigError: No head is kept under this number.
        WeightsError: The head does not fit the encoders.
    """
    folders = dict(_kept_folders(models))
    if number not in folders:
        known_numbers = ", ".join(map(str, folders)) or "none"
        raise ConfigError(
            f"{models}: no head is kept under {number}; there are {known_numbers}, "
            "see virnuc models heads"
        )
    return _put_in_place(folders[number], models)


def _kept_folders(models: Path) -> list[KeptFolder]:
    """Return the folders of kept heads by number, half copies included."""
    folders = []
    for path in models.glob(f"{KEPT}/[0-9][0-9][0-9]*-????????"):
        number = path.name.partition("-")[0]
        if number.isdecimal():
            folders.append(KeptFolder(int(number), path))
    return sorted(folders)


def _put_in_place(head: Path, models: Path) -> Path:
    """Keep the present head and this one, and put this one in place.

    Returns:
        The folder in which it is kept.

    Raises:
        WeightsError: It does not fit the encoders.
    """
    shape, _ = open_folder(head, HeadShape)
    check_widths(models, shape)
    current, new, former = models / HEAD, models / ".head.new", models / ".head.old"
    with run_lock(models / KEPT):
        if (current / CONFIG).is_file() and tensor_files(current):
            _keep(current, models)
        kept_folder = _keep(head, models)
        for leftover in (new, former):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        _copy(kept_folder, new)
        if not current.exists():
            new.rename(current)
        elif not _exchange(new, current):
            # After a kill between these two, use-head puts one back.
            current.rename(former)
            new.rename(current)
        for leftover in (new, former):
            shutil.rmtree(leftover, ignore_errors=True)
    return kept_folder


def _keep(head: Path, models: Path) -> Path:
    """Copy a head to the kept ones, unless it is there whole. Return its folder there."""
    digest = part_digest(head)
    suffix = f"-{digest[:DIGEST_LETTERS]}"
    folders = _kept_folders(models)
    number = folders[-1].number + 1 if folders else 1
    kept_folder = models / KEPT / f"{number:03d}{suffix}"
    for folder in folders:
        if folder.path.name.endswith(suffix):
            kept_folder = folder.path
            break
    is_whole = (kept_folder / CONFIG).is_file() and part_digest(kept_folder) == digest
    if not is_whole:  # new, half a copy, or damaged since
        _copy(head, kept_folder)
    return kept_folder


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that both exist at every moment.

    Returns:
        False if the file system cannot do that, as some network file systems.
    """
    libc = ctypes.CDLL(None)
    failed = libc.renameat2(
        AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE
    )
    return not failed


def _copy(head: Path, folder: Path) -> None:
    """Copy the files of a head, its `config.json` last."""
    for path in sorted(head.iterdir(), key=lambda path: path.name == CONFIG):
        if path.is_file():
            with atomic_file(folder / path.name) as temp_path:
                shutil.copyfile(path, temp_path)
