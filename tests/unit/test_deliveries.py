"""Deliveries of an inbox: mates, lanes, sample sheets and run folders are predicted as one."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc_core.deliveries import Delivery
from virnuc_core.inbox import Ledger, Row
from virnuc_core.runfiles import RunSummary

MODIFIED_S = 1_700_000_000  # when files of these tests were last changed
NOW_S = MODIFIED_S + 10_000


def put(folder: Path, name: str, text: str = "", age_s: int = 0) -> Path:
    """Write a file that was last changed `age_s` before MODIFIED_S; by default a FASTQ file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fastq = text or f"@r1 {name}\nACGT\n+\nIIII\n"
    path.write_bytes(gzip.compress(fastq.encode()) if name.endswith(".gz") else fastq.encode())
    os.utime(path, (MODIFIED_S - age_s, MODIFIED_S - age_s))
    return path


@pytest.fixture
def open_ledger(tmp_path: Path) -> Callable[..., Ledger]:
    """Opens the ledger of the same inbox, with these options."""
    (tmp_path / "inbox").mkdir()

    def open_(**options: object) -> Ledger:
        return Ledger(tmp_path / "inbox", tmp_path / "out", **options)  # type: ignore[arg-type]

    return open_


@pytest.fixture
def ledger(open_ledger: Callable[..., Ledger]) -> Ledger:
    return open_ledger()


def fates(ledger: Ledger, *, settle_s: float = 60, now_s: float = NOW_S) -> dict[str, str]:
    """Return the fate of each file in the inbox."""
    return {row.file: row.fate for row in ledger.scan(settle_s=settle_s, now_s=now_s)}


def predict_all(ledger: Ledger) -> dict[str, Delivery]:
    """Predict whatever is due, and return the delivery of each run directory by its link."""
    deliveries: dict[str, Delivery] = {}

    def predict(row: Row, out: Path) -> RunSummary:
        out.mkdir(parents=True)
        (out / "files").write_text("\n".join(ledger.delivery_of(row).files))
        return RunSummary(n_reads=2, fates={"viral": 1, "others": 1})

    for row in ledger.scan(settle_s=60, now_s=NOW_S):
        if ledger.is_due(row, retry_failed=False):
            predicted = ledger.attempt(row, predict, retry_failed=False)
            assert predicted.fate == "predicted", predicted.note
            deliveries[predicted.sample] = ledger.delivery_of(row)
            link = ledger.out / predicted.sample
            assert (link / "files").read_text().splitlines() == list(ledger.delivery_of(row).files)
    ledger.write_table(ledger.scan(settle_s=60, now_s=NOW_S))
    return deliveries


def test_mates_and_lanes_are_one_delivery_named_by_the_sample(ledger: Ledger) -> None:
    names = [f"P7_S1_L00{lane}_R{mate}_001.fastq.gz" for lane in (1, 2) for mate in (1, 2)]
    for name in [*names, "P7_S1_L001_I1_001.fastq.gz", "gut.fq"]:
        put(ledger.inbox, name)
    assert predict_all(ledger) == {
        "P7_S1": Delivery("P7_S1", pairs=((names[0], names[1]), (names[2], names[3]))),
        "gut": Delivery("gut", singles=("gut.fq",)),
    }
    rows = {row.file: row for row in ledger.read_table()}
    assert {name: row.fate for name, row in rows.items()} == {
        names[0]: "predicted",
        **dict.fromkeys(names[1:], "joined"),
        "P7_S1_L001_I1_001.fastq.gz": "ignored",
        "gut.fq": "predicted",
    }
    assert {rows[name].run for name in names} == {f"runs/{rows[names[0]].delivery[:16]}"}
    assert [rows[name].reads for name in names] == ["2", "", "", ""], "reads are counted once"
    assert predict_all(ledger) == {}, "nothing is predicted twice"


def test_mates_are_joined_once_both_have_settled(ledger: Ledger) -> None:
    put(ledger.inbox, "a_R1.fq", age_s=100)
    put(ledger.inbox, "a_R2.fq")
    put(ledger.inbox, "b_1.fq", age_s=100)
    put(ledger.inbox, "b_2.fq")
    now_s = MODIFIED_S + 59
    assert set(fates(ledger, now_s=now_s).values()) == {"arriving"}
    notes = {row.file: row.note for row in ledger.scan(settle_s=60, now_s=now_s)}
    assert notes["a_R1.fq"] == "waits for a_R2.fq"
    assert fates(ledger) == {
        "a_R1.fq": "waiting",
        "a_R2.fq": "joined",
        "b_1.fq": "waiting",
        "b_2.fq": "joined",
    }


def test_a_lone_first_mate_waits_for_the_other_one_but_not_for_ever(ledger: Ledger) -> None:
    put(ledger.inbox, "a_R1.fq")
    assert fates(ledger, now_s=MODIFIED_S + 500) == {"a_R1.fq": "arriving"}
    assert fates(ledger, now_s=MODIFIED_S + 700) == {"a_R1.fq": "waiting"}
    predict_all(ledger)
    put(ledger.inbox, "a_R2.fq")
    [delivery] = predict_all(ledger).values()
    assert delivery.pairs == (("a_R1.fq", "a_R2.fq"),), "late, but together"


def test_files_that_only_look_like_mates_are_predicted_one_by_one(
    open_ledger: Callable[..., Ledger],
) -> None:
    ledger = open_ledger()
    put(ledger.inbox, "patient_1.fq", "@x1\nA\n+\nI\n")
    put(ledger.inbox, "patient_2.fq", "@y1\nA\n+\nI\n")
    put(ledger.inbox, "bin_1.fasta", ">c1\nA\n")
    put(ledger.inbox, "bin_2.fasta", ">c1\nC\n")
    assert set(fates(ledger).values()) == {"waiting"}
    put(ledger.inbox, "a_R1.fq")
    put(ledger.inbox, "a_R2.fq")
    assert predict_all(open_ledger(join_mates=False))["a"] == Delivery(
        "a", singles=("a_R1.fq", "a_R2.fq")
    ), "each read by itself, one specimen"


def test_deliveries_with_one_name_do_not_overwrite_each_other(ledger: Ledger) -> None:
    for folder in ("monday", "tuesday"):
        for mate in (1, 2):
            put(ledger.inbox, f"{folder}/S1_R{mate}.fq", f"@{folder}\nACGT\n+\nIIII\n")
    put(ledger.inbox, "runs.fq")  # a name of our own folders
    names = sorted(predict_all(ledger))
    assert names[0] == "S1"
    assert names[1].startswith("S1-")
    assert names[2].startswith("runs-")
    assert {str((ledger.out / name).readlink()) for name in names} == {
        row.run for row in ledger.read_table() if row.fate == "predicted"
    }


def test_a_copy_of_a_delivery_is_a_duplicate(ledger: Ledger) -> None:
    for name in ("a_R1.fq", "a_R2.fq"):
        text = f"@r\n{'ACGT' if '1' in name else 'TTTT'}\n+\nIIII\n"
        put(ledger.inbox, name, text)
        put(ledger.inbox, f"copy/{name.replace('a', 'b')}", text)
    assert len(predict_all(ledger)) == 1
    assert sorted(fates(ledger).values()) == ["duplicate", "joined", "joined", "predicted"]


def test_a_sheet_dropped_with_its_files_names_the_samples(ledger: Ledger) -> None:
    text = "sample,fastq_1,fastq_2\nlung,x1.fq,x2.fq\nlung,y1.fq,y2.fq\ngut,z.fq,\n"
    put(ledger.inbox, "plate/sheet.csv", text)
    for name in ("x1.fq", "x2.fq", "y1.fq", "z.fq"):
        put(ledger.inbox, f"plate/{name}")
    rows = {row.file: row for row in ledger.scan(settle_s=60, now_s=NOW_S)}
    assert rows["plate/sheet.csv"].fate == "ignored"
    assert rows["plate/x1.fq"].fate == "arriving"
    assert rows["plate/x1.fq"].note == "waits for plate/y2.fq, which plate/sheet.csv names"
    assert rows["plate/z.fq"].fate == "waiting"
    put(ledger.inbox, "plate/y2.fq")
    assert predict_all(ledger) == {
        "gut": Delivery("gut", singles=("plate/z.fq",)),
        "lung": Delivery("lung", (("plate/x1.fq", "plate/x2.fq"), ("plate/y1.fq", "plate/y2.fq"))),
    }


def test_a_sheet_that_cannot_be_used_has_failed_with_its_reason(ledger: Ledger) -> None:
    put(ledger.inbox, "sheet.csv", "sample,fastq_1,fastq_2\na/b,x.fq,\n")
    [row] = ledger.scan(settle_s=60, now_s=NOW_S)
    assert row.fate == "failed"
    assert "sheet.csv:2: sample 'a/b': not the name of a directory" in row.note


@pytest.mark.parametrize("sign", ["RunInfo.xml", ""])
def test_a_run_folder_is_taken_when_it_is_complete(
    open_ledger: Callable[..., Ledger], sign: str
) -> None:
    # Without the files of a sequencer, the user says how completion is marked.
    ledger = open_ledger(completion=() if sign else ("finished", "*.done"))
    names = [f"run42/Data/A_S1_L001_R{mate}_001.fastq.gz" for mate in (1, 2)]
    for name in [*names, "run42/InterOp/metrics.bin", "run42/notes.txt"]:
        put(ledger.inbox, name)
    put(ledger.inbox, "outside.fq")
    if sign:
        put(ledger.inbox, f"run42/{sign}")
    assert fates(ledger) == {**dict.fromkeys(names, "arriving"), "outside.fq": "waiting"}
    # The last file needs not settle once the folder is complete.
    completion = put(ledger.inbox, "run42/RTAComplete.txt" if sign else "run42/x.done")
    os.utime(completion, (NOW_S, NOW_S))
    os.utime(ledger.inbox / names[1], (NOW_S, NOW_S))
    assert predict_all(ledger) == {
        "A_S1": Delivery("A_S1", pairs=((names[0], names[1]),)),
        "outside": Delivery("outside", singles=("outside.fq",)),
    }


def test_a_delivery_whose_file_was_replaced_is_taken_by_the_next_run(ledger: Ledger) -> None:
    put(ledger.inbox, "a_R1.fq")
    put(ledger.inbox, "a_R2.fq")
    [row, _] = ledger.scan(settle_s=60, now_s=NOW_S)
    put(ledger.inbox, "a_R2.fq", "@r1\nTT\n+\nII\n")

    def never(row: Row, out: Path) -> RunSummary:
        raise AssertionError("predicted")

    changed_row = ledger.attempt(row, never, retry_failed=False)
    assert (changed_row.fate, "was replaced" in changed_row.note) == ("arriving", True)


def test_a_fate_of_an_older_version_is_read(ledger: Ledger) -> None:
    put(ledger.inbox, "a.fq")
    predict_all(ledger)
    [row] = ledger.read_table()
    path = ledger.out / "fates" / f"{row.sha256}.json"
    # As it was written before samples and deliveries were recorded.
    fate = ledger.read_fate(row.sha256)
    assert fate is not None
    old_fate = fate.changed(sample="", delivery="", seal="").with_seal()
    path.write_text(old_fate.model_dump_json(exclude={"sample", "delivery"}))
    assert ledger.read_fate(row.sha256) is not None
    assert fates(ledger) == {"a.fq": "predicted"}
