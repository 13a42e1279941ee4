"""Pairs as labs deliver them: every convention of names, end of ids and compression, in one run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore

from .made_up import Pairs, digest, fastq, pack_with
from .name_conventions import CONVENTIONS

ID_STYLES = {
    "equal": "{name}",
    "slash": "{name}/{mate}",
    "point": "{name}.{mate}",
    "underscore": "{name}_{mate}",
    "colon": "{name}:{mate}",
    "Casava": "{name} {mate}:N:0:ACGT",
    "archive": "{name} {name}/{mate} length=20",
}
PACKINGS = ("plain", "gzip", "bzip2", "xz", "zstd")
N_PAIRS = 4  # in each convention's files
Names = dict[str, int]  # the length of each read by its name


def write_packed(rng: random.Random, path: Path, text: str) -> None:
    """Write text with a random compression, in two members, under a name that does not tell it."""
    content = text.encode()
    packing = rng.choice(PACKINGS)
    if packing != "plain":
        middle = rng.randrange(len(content) + 1)
        members = (content[:middle], content[middle:])
        content = b"".join(pack_with(packing, member) for member in members)
    path.write_bytes(content)


def made_up_mates(rng: random.Random, convention: int, style: str) -> tuple[Pairs, Pairs, Names]:
    """Return first mates, second mates, and the length of each mate by its name in the store."""
    mates: tuple[Pairs, Pairs] = ([], [])
    lengths: Names = {}
    for number in range(N_PAIRS):
        name = f"c{convention}x{number}"
        for mate in (1, 2):
            bases = "".join(rng.choices("ACGT", k=rng.randint(1, 150)))
            mates[mate - 1].append((ID_STYLES[style].format(name=name, mate=mate), bases))
            lengths[f"{name}/{mate}"] = len(bases)
    return mates[0], mates[1], lengths


def staged(folders: list[str], out: Path, workers: int) -> StageSummary:
    """Stage some folders; a piece of text is small, so that other workers get some."""
    return stage(StageSpec(reads=tuple(folders), model_length=60, stage_workers=workers), out)


@pytest.mark.parametrize("style", ID_STYLES)
def test_pairs_of_every_convention_go_through_staging_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    monkeypatch.setattr("virnuc_core.reads.stage.BLOCK_BYTES", 2_000)
    rng = random.Random(style)
    folders: list[str] = []
    expected_pairs: set[tuple[str, str]] = set()
    expected_lengths: Names = {}
    left_out_files: set[str] = set()
    for number, (first, second, singles, left_out) in enumerate(CONVENTIONS.values()):
        folder = tmp_path / f"in{number}"
        folder.mkdir()
        folders.append(str(folder))
        files = [folder / f"{name}.fastq" for name in (first, second)]
        firsts, seconds, lengths = made_up_mates(rng, number, style)
        expected_lengths |= lengths
        for file, reads in zip(files, (firsts, seconds), strict=True):
            write_packed(rng, file, fastq(reads))
        expected_pairs.add((str(files[0]), str(files[1])))
        for name in singles.split():
            single = f"c{number}-{name}"
            write_packed(rng, folder / f"{name}.fastq", fastq([(single, "ACGT" * 10)]))
            expected_lengths[single] = 40
        for name in left_out.split():
            left_out_files.add(str(folder / f"{name}.fastq"))
            write_packed(rng, folder / f"{name}.fastq", fastq(firsts))

    n_workers = 2 if style == "slash" else 1  # another process takes half a second to start
    summary = staged(folders, tmp_path / "orfs.h5", n_workers)
    assert set(summary.pairs) == expected_pairs
    assert set(summary.left_out) == left_out_files
    store = OrfStore.open(tmp_path / "orfs.h5")
    names = store.read_ids(0, store.n_reads)
    assert dict(zip(names, store.read_length[:].tolist(), strict=True)) == expected_lengths
    assert len(names) == len(expected_lengths)
    assert summary.n_pairs == N_PAIRS * len(CONVENTIONS)
    assert (summary.tally["duplicate_ids"], summary.tally["skipped"]) == (0, 0)
    for number in range(0, 2 * summary.n_pairs, 2):
        assert (names[number][-2:], names[number + 1]) == ("/1", f"{names[number][:-2]}/2")
    if n_workers > 1:
        staged(folders, tmp_path / "alone.h5", 1)
        assert digest(tmp_path / "alone.h5") == digest(tmp_path / "orfs.h5")
