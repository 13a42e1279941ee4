"""The heads of a models directory: the one in `head/`, and in `heads/NNN-DIGEST/` each that was ever installed.

No head is lost: what stands in `head/` is kept before another takes its place. A kept head appears file by file, its
`config.json` last: a folder without one is half a copy, which the next call completes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final, NamedTuple

from virnuc_core.encoders.checkpoint import check_widths, open_folder, part_digest
from virnuc_core.encoders.model_config import HeadCard, HeadShape
from virnuc_core.errors import ConfigError, WeightsError
from virnuc_core.rundir import run_lock, whole_file

CHANCE: Final = 0.5  # the AUROC of guessing
CONFIG: Final = "config.json"


class KeptHead(NamedTuple):
    """One head of a models directory."""

    number: int  # 0: it stands in head/ and was not kept so far
    folder: Path
    digest: str
    installed: bool
    shape: HeadShape


def kept_heads(models: Path) -> list[KeptHead]:
    """The heads of a models directory by number. Errors: `WeightsError` for one that cannot be read."""
    folders = [(number, path) for number, path in [(0, models / "head"), *_kept(models)] if (path / CONFIG).is_file()]
    found = {part_digest(path): (number, path) for number, path in folders}  # of equal ones, the kept one
    installed = part_digest(models / "head") if folders and not folders[0][0] else ""
    opened = ((digest, *one, open_folder(one[1], HeadShape)[0]) for digest, one in found.items())
    return sorted(KeptHead(number, path, digest, digest == installed, shape) for digest, number, path, shape in opened)


def install_head(new: Path, models: Path, *, anyway: bool = False) -> str:
    """Put the head in `new` in place as `models/head`; what there is to say of it.

    Errors: `WeightsError` when its inputs are not what the encoders give or, unless `anyway`, when it may not be better
    than chance, or is worse than the installed one on the same test.
    """
    shape, current = open_folder(new, HeadShape)[0], models / "head"
    before = open_folder(current, HeadShape)[0].card if (current / CONFIG).is_file() else None
    problem, remark = _judge(shape.card, before)
    if problem and not anyway:
        raise WeightsError(f"{new}: not installed: {problem}; --install-anyway puts it in place all the same")
    put = f"installed as {_put(new, shape, models).name}"
    return "; ".join(filter(None, (put, problem and f"although {problem}", remark)))


def use_head(models: Path, number: int) -> KeptHead:
    """Put a kept head in place as `models/head`, and keep what stands there. Errors: `ConfigError`: no such number."""
    heads = {head.number: head for head in kept_heads(models) if head.number}
    if number not in heads:
        known = ", ".join(map(str, heads)) or "none"
        raise ConfigError(f"{models}: no head is kept under {number}; there are {known}, see virnuc models heads")
    _put(heads[number].folder, heads[number].shape, models)
    return heads[number]


def _judge(new: HeadCard | None, before: HeadCard | None) -> tuple[str, str]:
    """Why a head is not to take the place of the one before, and what else to say of the two."""
    if new is None:
        return "it has no card that tells how well it does", ""
    chance = f"its AUROC is {new.auroc}, which may be chance" if new.auroc.low <= CHANCE else ""
    if before is None:
        return chance, ""
    if (new.reads, new.truth, new.test) != (before.reads, before.truth, before.test):
        return chance, "it cannot be compared with the one before, which was tested on other reads"
    both = f"AUROC {new.auroc}, of the one before {before.auroc}, on the same test"
    return (chance or f"it is worse: {both}", "") if new.auroc.value < before.auroc.value else (chance, both)


def _kept(models: Path) -> list[tuple[int, Path]]:
    """Number and folder of each kept head, also of half a copy."""
    return sorted((int(path.name[:3]), path) for path in models.glob("heads/[0-9][0-9][0-9]-????????"))


def _put(head: Path, shape: HeadShape, models: Path) -> Path:
    """Keep all heads that are there and this one, and put it in place; where it is kept."""
    check_widths(models, shape)
    current, aside, former = models / "head", models / ".head.new", models / ".head.old"
    with run_lock(models / "heads"):
        for one in (models / "head.before", current, head):  # the first is of an older version
            if (one / CONFIG).is_file():
                kept = _keep(one, models)
        for left in (aside, former):  # by a killed process
            shutil.rmtree(left, ignore_errors=True)
        _copy(kept, aside)
        if current.exists():
            current.rename(former)
        aside.rename(current)
        shutil.rmtree(former, ignore_errors=True)
    return kept


def _keep(head: Path, models: Path) -> Path:
    """Where a head is kept; it is copied there unless it is there already."""
    digest, others = part_digest(head)[:8], _kept(models)
    new = models / "heads" / f"{others[-1][0] + 1 if others else 1:03d}-{digest}"
    folder = next((path for _, path in others if path.name[4:] == digest), new)
    if not (folder / CONFIG).is_file():
        _copy(head, folder)
    return folder


def _copy(head: Path, folder: Path) -> None:
    for path in sorted(head.iterdir(), key=lambda one: one.name == CONFIG):
        if path.is_file():
            with whole_file(folder / path.name) as aside:
                shutil.copyfile(path, aside)
