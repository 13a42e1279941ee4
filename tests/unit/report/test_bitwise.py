"""Bytes and embeddings of two runs: one flipped bit is found, and nothing compared is no equality."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.damage import edit_json, list_again
from virnuc_core.errors import RunMismatchError
from virnuc_core.profiles import Profile
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.report import messages
from virnuc_core.report.build import build_report
from virnuc_core.report.compare import compare, compare_bytes, compare_runs
from virnuc_core.report.cosines import cosines
from virnuc_core.report.views.correctness import correctness_section


def test_equal_runs_are_identical(finished: tuple[Path, object]) -> None:
    out_dir = finished[0]
    equality = compare_bytes(out_dir / "devices-1", out_dir / "devices-2")
    assert equality.identical
    assert (equality.files_compared, equality.shards_compared, equality.differing) == (4, 2, ())


def test_one_flipped_bit_in_a_shard_is_found(copied: tuple[Path, object]) -> None:
    out_dir = copied[0]
    with h5py.File(out_dir / "devices-2" / "shards" / "00001.h5", "r+") as file:
        values = file["embeddings"][:]
        values.view(np.uint32)[3, 4] ^= 1
        file["embeddings"][...] = values
    equality = compare_bytes(out_dir / "devices-1", out_dir / "devices-2")
    assert not equality.identical
    assert equality.differing == ("shards/00001.h5",)


def test_zero_and_minus_zero_are_not_the_same_bits(copied: tuple[Path, object]) -> None:
    out_dir = copied[0]
    for name, zero in (("devices-1", 0.0), ("devices-2", -0.0)):
        with h5py.File(out_dir / name / "shards" / "00000.h5", "r+") as file:
            file["scores"][0, 0] = zero
    assert not compare_bytes(out_dir / "devices-1", out_dir / "devices-2").identical


@pytest.mark.parametrize("name", ["prediction_results.txt", "reads.tsv"])
def test_a_changed_result_file_is_named(copied: tuple[Path, object], name: str) -> None:
    path = copied[0] / "devices-2" / name
    path.write_bytes(path.read_bytes().replace(b"read1", b"reaD1", 1))
    assert compare_bytes(copied[0] / "devices-1", copied[0] / "devices-2").differing == (name,)


def test_a_missing_shard_and_a_broken_one_are_named(copied: tuple[Path, object]) -> None:
    shards = copied[0] / "devices-2" / "shards"
    (shards / "00000.h5").unlink()
    (shards / "00001.h5").write_bytes(b"no")
    equality = compare_bytes(copied[0] / "devices-1", copied[0] / "devices-2")
    assert equality.differing[0] == "shards/00000.h5 is in one run only"
    assert equality.differing[1] == "shards/00001.h5"


def test_runs_without_shards_are_not_identical_nor_do_they_differ(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    for name in ("devices-1", "devices-2"):
        for path in (out_dir / name / "shards").iterdir():
            path.unlink()
    comparisons = compare_runs(out_dir, ("devices-1", "devices-2"), tolerance=0.01, subset=False)
    equality = next(pair.bitwise for pair in comparisons if pair.bitwise)
    counts = equality.files_compared, equality.shards_compared
    assert (equality.identical, *counts, equality.differing) == (False, 4, 0, ())
    assert "bit for bit" not in messages.comparison_message(comparisons)
    report = build_report(out_dir, profile)
    (judged,) = [check for check in report.checks if check.id == "same_bytes"]
    assert (judged.verdict, judged.value) == ("not run", None)
    assert judged.reason == "there were no shards, or no result files, to compare"
    assert judged.title not in report.failures
    sentences = correctness_section(comparisons).sentences
    assert "devices-1 and devices-2: not all there to compare (4 files, 0 shards)" in sentences


def test_unlike_runs_are_refused(copied: tuple[Path, object]) -> None:
    edit_json(copied[0] / "devices-2" / "run.json", lambda body: body.update(model_length=300))
    with pytest.raises(RunMismatchError):
        compare(copied[0] / "devices-1", copied[0] / "devices-2", bits=True)


def test_cosines_of_each_encoder_are_of_what_tells_rows_apart(copied: tuple[Path, object]) -> None:
    out_dir = copied[0]
    for name in ("devices-1", "devices-2"):
        with h5py.File(out_dir / name / "embeddings.h5", "r+") as file:
            values = (
                file["embeddings"][:] + 10
            )  # what all have in common: plain cosines are 0.99 and more
            if name == "devices-2":
                middle = values.mean(0)
                values[0, 4:] = (
                    2 * middle[4:] - values[0, 4:]
                )  # the ESM-2 part of one row lies on the other side
                values[1, :4] += values[1, :4] - middle[:4]  # twice as far the same way
            file["embeddings"][...] = values
        list_again(out_dir / name)
    cosines_of_part = {
        stats.part: stats
        for stats in cosines(out_dir / "devices-1", out_dir / "devices-2", dna_width=4)
    }
    assert cosines_of_part["ESM-2"].minimum == pytest.approx(-1, abs=1e-3)  # float32 + 10
    assert cosines_of_part["DNABERT-S"].minimum == pytest.approx(1, abs=1e-3)
    assert cosines_of_part["ESM-2"].p1 > 0.9
    assert set(cosines_of_part) == {"ESM-2", "DNABERT-S"}
    assert cosines_of_part["ESM-2"].n == len(values)


def embedded(folder: Path, reads: str, noise: float) -> Path:
    """A run of these reads whose embeddings depend on the sequences, and on `noise`."""
    (folder / "reads.fa").parent.mkdir()
    (folder / "reads.fa").write_text(reads)
    store = OrfStore.open(
        stage(StageSpec(reads=(str(folder / "reads.fa"),)), folder / "orfs.h5").store
    )
    letters = zip(store.dna(0, store.n_uniques), store.protein(0, store.n_uniques), strict=True)
    rows = [
        np.random.default_rng(zlib.crc32(b" ".join(sequence))).normal(size=10) + noise
        for sequence in letters
    ]
    with h5py.File(folder / "embeddings.h5", "w") as file:
        file["embeddings"] = np.array(rows, dtype=np.float32)
    record = {"fingerprints": {"reads": store.fingerprint}, "store": "orfs.h5"}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_sequences_of_runs_that_were_staged_apart_meet_by_content(tmp_path: Path) -> None:
    reads = [
        f">r{n}\n{'ATGAAACCC' * 9}{codon * 9}\n"
        for n, codon in enumerate(("GCA", "CAT", "GGG", "CAA"))
    ]
    full_run, part = (
        embedded(tmp_path / "whole", "".join(reads), 0.0),
        embedded(tmp_path / "part", reads[2], 0.01),
    )
    (cosine,) = cosines(part, full_run)
    (reverse_cosine,) = cosines(full_run, part)
    assert cosine.minimum == pytest.approx(
        reverse_cosine.minimum, abs=1e-3
    )  # each is centred by its own first side
    assert cosine.n == reverse_cosine.n == len(OrfStore.open(part / "orfs.h5").unique_row)
    assert 0.99 < cosine.minimum < 1


def test_rows_that_failed_are_left_out(copied: tuple[Path, object]) -> None:
    out_dir = copied[0]
    with h5py.File(out_dir / "devices-2" / "embeddings.h5", "r+") as file:
        rows = len(file["embeddings"])
        file["embeddings"][2] = np.nan
    list_again(out_dir / "devices-2")
    (cosine,) = cosines(out_dir / "devices-1", out_dir / "devices-2")
    assert cosine.n == rows - 1


def test_no_embeddings_no_cosine(copied: tuple[Path, object]) -> None:
    (copied[0] / "devices-2" / "embeddings.h5").unlink()
    assert cosines(copied[0] / "devices-1", copied[0] / "devices-2") == ()
