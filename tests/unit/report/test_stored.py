"""Counts of a validation against its store: the slow count is the twin of the fast one."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import pytest

from tests.damage import edit_json
from virnuc_core.errors import InputError
from virnuc_core.profiles import Profile
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore, seal
from virnuc_core.reads.subsets import choose_reads
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify import verify_report
from virnuc_core.report.verify_store import baseline_tokens, count_store, verify_store


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> StageSummary:
    folder = tmp_path_factory.mktemp("staged")
    simulate(
        SimulateSpec(reads=200, read_length=400, duplicate_share=0.2, seed=3),
        folder / "reads.fasta",
    )
    return stage(
        StageSpec(reads=(str(folder / "reads.fasta"),), model_length=150), folder / "orfs.h5"
    )


def test_the_store_is_counted_as_staging_counted_it(staged: StageSummary) -> None:
    store = OrfStore.open(staged.store)
    counts, messages = count_store(store), staged.counts
    assert store.fingerprint == staged.fingerprint
    for name in ("n_reads", "n_chunks", "n_rows", "n_uniques"):
        assert counts[name] == getattr(messages, name)
    assert counts["reads"] == messages.n_reads
    assert (counts["empty"], counts["duplicate_ids"]) == (
        messages.n_empty,
        messages.n_duplicate_ids,
    )
    assert (counts["ambiguous"], counts["short_for_model"]) == (
        messages.n_ambiguous,
        messages.n_short,
    )
    proteins = store.protein(0, counts["n_uniques"])
    assert counts["protein_tokens"] == sum(len(protein) + 2 for protein in proteins)
    assert counts["row_tokens"] == sum(len(proteins[unique]) + 2 for unique in store.row_unique)
    assert counts["row_tokens"] > counts["protein_tokens"], "duplicates are rows of their own"


def test_tokens_of_a_subset_are_those_of_its_reads_rows_though_mates_share_ids(
    tmp_path: Path,
) -> None:
    for mate, seed in ((1, 3), (2, 4)):
        simulate(SimulateSpec(reads=90, read_length=400, seed=seed), tmp_path / f"r{mate}.fasta")
    store = OrfStore.open(
        stage(
            StageSpec(
                reads=(str(tmp_path / "r1.fasta"), str(tmp_path / "r2.fasta")), model_length=150
            ),
            tmp_path / "s",
        ).store
    )
    assert store.counts.n_duplicate_ids == 90
    drawn_reads = set(choose_reads(store.n_reads, 60, 7).tolist())
    rows = [row for row in range(store.n_rows) if store.row_read[row] in drawn_reads]
    names = store.row_ids(0, store.n_rows, original=True)
    lines = [f"{names[row]}\tvirus\t0.1\t0.9" for row in rows]
    predictions = tmp_path / "prediction_results.txt"
    head = "Sequence_ID\tPrediction\tscore1\tscore2"
    predictions.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    proteins = store.protein(0, len(store.unique_row))
    expected = sum(len(proteins[store.row_unique[row]]) + 2 for row in rows)
    assert baseline_tokens(store, predictions, 60, 7) == expected
    predictions.write_text("\n".join([head, *lines[1:]]) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="not those of the reads the baseline drew"):
        baseline_tokens(store, predictions, 60, 7)


def test_runs_of_other_reads_than_the_store_holds_are_caught(
    copied: tuple[Path, Profile], staged: StageSummary
) -> None:
    out_dir, _ = copied
    assert verify_report(out_dir).ok
    shutil.copyfile(staged.store, out_dir / "orfs.h5")
    differences = "\n".join(verify_report(out_dir).differences)
    assert "devices-1/summary.json: n_reads: says 300, the raw files give 200" in differences
    assert "run.json: fingerprint of the reads" in differences
    edit_json(out_dir / "devices-1" / "summary.json", lambda body: body.update(n_reads=200))
    assert "devices-1/summary.json: n_rows" in "\n".join(verify_report(out_dir).differences)
    (out_dir / "orfs.h5").write_bytes(b"x")
    assert any("orfs.h5" in line for line in verify_report(out_dir).differences)


def with_store(out: Path, staged: StageSummary) -> Path:
    """A validation of these reads, as far as its store goes."""
    store = out / "orfs.h5"
    shutil.copyfile(staged.store, store)
    tally = staged.tally | {"files": [str(Path(name).absolute()) for name in staged.files]}
    edit_json(out / "run.json", lambda body: body.update(staging=tally, spec={"on_error": "stop"}))
    return store


def said_of_the_store(out: Path) -> tuple[list[str], list[str]]:
    """Differences and remarks that name the store, without the rest of the verification, which takes long."""
    verification = Verification()
    try:
        verify_store(verification, RawFolder(out))
    except InputError as error:
        verification.add_difference(str(error))
    differences, remarks = (
        [line for line in lines if "orfs.h5" in line]
        for lines in (verification.differences, verification.remarks)
    )
    return differences, remarks


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_store_of_pairs_is_made_again_as_pairs(
    copied: tuple[Path, Profile], tmp_path: Path, interleaved: bool
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a_R1.fq", "a_R2.fq", "b.fq"):
        text = "".join(
            f"@r{i // (1 + interleaved)}\n{'ACGGTCA' * 40}\n+\n{'I' * 280}\n" for i in range(20)
        )
        (tmp_path / "in" / name).write_text(text)
    spec = StageSpec(reads=(str(tmp_path / "in"),), model_length=150, interleaved=interleaved)
    staged_store = stage(spec, tmp_path / "orfs.h5")
    assert staged_store.n_pairs == (30 if interleaved else 20)
    with_store(copied[0], staged_store)
    edit_json(copied[0] / "run.json", lambda body: body.update(pairs=staged_store.pairs))
    assert said_of_the_store(copied[0]) == ([], [])
    edit_json(copied[0] / "run.json", lambda body: body.update(pairs=[]))
    assert said_of_the_store(copied[0])[0], "single reads are others"


def test_the_store_is_made_again_from_the_reads(
    copied: tuple[Path, Profile], staged: StageSummary
) -> None:
    store = with_store(copied[0], staged)
    assert said_of_the_store(copied[0]) == ([], [])
    with h5py.File(store, "r") as columns:
        place, first_byte = columns["dna_bytes"].id.get_offset(), columns["dna_bytes"][0]
    with store.open("rb+") as file:
        file.seek(place)
        file.write(b"T" if first_byte != ord("T") else b"A")
    assert said_of_the_store(copied[0])[0] == [
        f"{store}: not what was staged (checksum); stage the reads again"
    ]
    seal(store)  # by somebody who knows how
    (difference,), remarks = said_of_the_store(copied[0])
    assert difference.startswith("orfs.h5: columns that its reads do not give: says")
    assert "dna_bytes" in difference
    assert not remarks


def test_reads_that_are_gone_or_changed_are_named(
    copied: tuple[Path, Profile], staged: StageSummary, tmp_path: Path
) -> None:
    with_store(copied[0], staged)
    reads = tmp_path / "moved.fasta"
    edit_json(copied[0] / "run.json", lambda body: body["staging"].update(files=[str(reads)]))
    assert said_of_the_store(copied[0]) == (
        [],
        [f"orfs.h5 was not made again from its reads: {reads} is not there"],
    )
    reads.write_text(">other\nACGTACGT\n")
    (difference,), _ = said_of_the_store(copied[0])
    assert difference.startswith("orfs.h5: fingerprint of its reads")
    edit_json(copied[0] / "run.json", lambda body: body["staging"].pop("files"))
    _, (remark,) = said_of_the_store(copied[0])
    assert (
        remark == "orfs.h5 was not made again from its reads: run.json does not tell where they are"
    )
