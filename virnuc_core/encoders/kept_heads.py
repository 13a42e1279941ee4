"""The heads of a models directory: the one in `head/`, and in `heads/NNN-DIGEST/` each that was ever installed.

No head is lost: what stands in `head/` is kept before another takes its place. A kept head appears file by file, its
`config.json` last: a folder without one is half a copy, which the next call completes.
"""

import ctypes
import logging
import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from virnuc_core.encoders.checkpoint import check_widths, open_folder, part_digest, tensor_files
from virnuc_core.encoders.model_config import HeadShape, read_shape
from virnuc_core.errors import ConfigError, WeightsError
from virnuc_core.rundir import run_lock, whole_file

CHANCE: Final = 0.5  # the AUROC of guessing
CONFIG: Final = "config.json"
log = logging.getLogger(__name__)


class KeptHead(NamedTuple):
    """One head of a models directory."""

    number: int  # 0: it stands in head/ and was not kept so far
    folder: Path
    digest: str
    installed: bool
    shape: HeadShape


def kept_heads(models: Path) -> list[KeptHead]:
    """The heads of a models directory by number; one that cannot be read is left out with a warning."""
    found, now = dict[str, KeptHead](), ""
    for number, path in [(0, models / "head"), *_kept(models)]:
        if (path / CONFIG).is_file():
            try:
                digest, shape = part_digest(path), read_shape(path / CONFIG, HeadShape)
            except WeightsError as error:
                log.warning("%s", error)
                continue
            now = now if number else digest
            found[digest] = KeptHead(number, path, digest, digest == now, shape)  # of equal ones, the kept one
    return sorted(found.values())


def install_head(new: Path, models: Path, *, anyway: bool = False) -> str:
    """Put the head in `new` in place as `models/head`; what there is to say of it. Errors: those of `_put`;
    `WeightsError` unless `anyway` when it may be chance, or is worse on the same test."""
    card, current = read_shape(new / CONFIG, HeadShape).card, models / "head" / CONFIG
    before = next((head.shape.card for head in kept_heads(models) if head.installed), None)
    problem, both = "", ""
    if card is None:
        problem = "it has no card that tells how well it does"
    elif card.auroc.low <= CHANCE:
        problem = f"its AUROC is {card.auroc}, which may be chance"
    elif before is None or (card.reads, card.test) != (before.reads, before.test):
        both = "the one before was not tested on these reads, so the two cannot be compared" * current.is_file()
    else:
        both = f"AUROC {card.auroc}, of the one before {before.auroc}, on the same test"
        problem = f"it is worse: {both}" * (card.auroc.value < before.auroc.value)
    if problem and not anyway:
        raise WeightsError(f"{new}: not installed: {problem}; --install-anyway puts it in place all the same")
    return f"installed as {_put(new, models).name}; {f'although {problem}' if problem else both}".removesuffix("; ")


def use_head(models: Path, number: int) -> Path:
    """Put a kept head in place as `models/head`, and keep what stands there; where it is kept. Errors: `ConfigError`
    when there is no such number; those of `_put`."""
    heads = dict(_kept(models))
    if number not in heads:
        known = ", ".join(map(str, heads)) or "none"
        raise ConfigError(f"{models}: no head is kept under {number}; there are {known}, see virnuc models heads")
    return _put(heads[number], models)


def _kept(models: Path) -> list[tuple[int, Path]]:
    """Number and folder of each kept head, also of half a copy."""
    named = [(path.name.partition("-")[0], path) for path in models.glob("heads/[0-9][0-9][0-9]*-????????")]
    return sorted((int(number), path) for number, path in named if number.isdecimal())


def _put(head: Path, models: Path) -> Path:
    """Keep all heads that are there and this one, and put it in place; where it is kept. Errors: `WeightsError`."""
    check_widths(models, open_folder(head, HeadShape)[0])
    current, aside, former = models / "head", models / ".head.new", models / ".head.old"
    with run_lock(models / "heads"):
        for one in (models / "head.before", current, head):  # the first is of an older version
            if (one / CONFIG).is_file() and tensor_files(one):
                digest, others = part_digest(one), _kept(models)
                new = models / "heads" / f"{others[-1][0] + 1 if others else 1:03d}-{digest[:8]}"
                kept = next((path for _, path in others if path.name.endswith(f"-{digest[:8]}")), new)
                if not (kept / CONFIG).is_file() or part_digest(kept) != digest:  # half a copy, or one damaged since
                    _copy(one, kept)
        for left in (aside, former):  # by a killed process
            shutil.rmtree(left, ignore_errors=True)
        _copy(kept, aside)
        there, here = map(os.fsencode, (aside, current))  # exchanged (flag 2): there is no moment without a head
        if not current.exists() or ctypes.CDLL(None).renameat2(-100, there, -100, here, 2):
            if current.exists():  # a network file system cannot; after a kill use-head puts one back
                current.rename(former)
            aside.rename(current)
        for left in (aside, former):
            shutil.rmtree(left, ignore_errors=True)
    return kept


def _copy(head: Path, folder: Path) -> None:
    for path in sorted(head.iterdir(), key=lambda one: one.name == CONFIG):
        if path.is_file():
            with whole_file(folder / path.name) as aside:
                shutil.copyfile(path, aside)
