"""BAM, CRAM and SAM: the store is that of the FASTQ that samtools makes of them; pairs by flags, and what is broken."""

from __future__ import annotations

import io
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from virnuc_core.config import ReadsSpec
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads import alignments
from virnuc_core.reads.samples import samples_by_read_group
from virnuc_core.reads.sources import Source, find_inputs
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore

pysam = pytest.importorskip("pysam", reason="pip install -e '.[bam]'")

UNPAIRED, FIRST, SECOND, REVERSE = 4, 1 | 4 | 8 | 64, 1 | 4 | 8 | 128, 16
Record = tuple[str, int, str]  # name, flag, bases as the file holds them
FORMS = {"bam": "wb", "cram": "wc", "sam": "w"}


def bases(seed: object, n: int = 90) -> str:
    return "".join(random.Random(str(seed)).choices("ACGT", k=n))


def written(
    path: Path,
    records: list[Record],
    order: str = "unsorted",
    contig: str = "",
    groups: tuple[dict[str, str], ...] = (),
    group_of: Callable[[int], str] = lambda _: "",
) -> Path:
    header = {
        "HD": {"VN": "1.6", "SO": order},
        **({"SQ": [{"SN": "c", "LN": 500}]} if contig else {}),
    }
    header |= {"RG": [*groups]} if groups else {}
    more: Any = {"reference_filename": contig} if path.suffix == ".cram" and contig else {}
    with pysam.AlignmentFile(path, FORMS[path.suffix[1:]], header=header, **more) as out:
        for i, (name, flag, letters) in enumerate(records):
            one = pysam.AlignedSegment(out.header)
            one.query_name, one.flag, one.query_sequence = name, flag, letters
            if i % 7:  # the others have no quality
                one.query_qualities = pysam.qualitystring_to_array(bases(i, len(letters)))
            if group := group_of(i):
                one.set_tag("RG", group)
            if contig:
                one.reference_id, one.reference_start, one.cigarstring = 0, 10, f"{len(letters)}M"
            out.write(one)
    return path


def samtools_fastq(path: Path) -> Path:
    made = path.with_suffix(".fq")
    pysam.fastq("-N", "-o", str(made), "-0", str(made), str(path))
    return made


def staged(path: Path | str, **spec: object) -> StageSummary:
    out = Path(path).parent / f"of-{Path(path).name}" / "orfs.h5"
    return stage(StageSpec(reads=(str(path),), model_length=60, **spec), out)


def fastq(path: Path) -> bytes:
    with Source.open(str(path)) as source:
        text = source.read(1 << 30)
        assert source.damage is None
    return text


SINGLE = [(f"r{i}", (UNPAIRED, UNPAIRED | REVERSE)[i % 2], bases(i)) for i in range(40)]
ALIGNED = [
    *SINGLE,
    ("r1", 260, bases(1)),
    ("r2", 2052, bases(2, 30)),
    ("iupac", UNPAIRED | REVERSE, "ACGTNRYKMSWBDHV" * 4),
]
PAIRS = [
    (f"p{i}", flag | REVERSE * (i % 2), bases((i, flag)))
    for i in range(30)
    for flag in (FIRST, SECOND)
]


@pytest.mark.parametrize("form", ["bam", "sam", "cram"])
@pytest.mark.parametrize("records", [ALIGNED, PAIRS], ids=["single", "pairs"])
def test_the_store_is_that_of_the_fastq_that_samtools_makes(
    tmp_path: Path, form: str, records: list[Record]
) -> None:
    path = written(tmp_path / f"a.{form}", records)
    plain = samtools_fastq(path)
    assert fastq(path).splitlines() == plain.read_bytes().splitlines()
    pairs = records is PAIRS
    summary, other = staged(path), staged(plain, interleaved=pairs)
    assert (summary.fingerprint, summary.counts, summary.n_pairs) == (
        other.fingerprint,
        other.counts,
        30 * pairs,
    )
    assert summary.by_file[0].content is not None
    assert summary.by_file[0].content.size == path.stat().st_size
    left_out = f"{path}: 2 secondary or supplementary alignments left out"
    assert (left_out in summary.warnings()) is (not pairs)
    assert staged(path).reused


@pytest.mark.parametrize("form", ["bam", "sam"])
def test_reads_of_one_base_keep_their_quality_and_leave_the_letters_of_python_alone(
    tmp_path: Path, form: str
) -> None:
    lengths = (1, 1, 2, 0, 1, 1, 90, 1, 1)  # the first and the eighth have no quality
    path = written(
        tmp_path / f"a.{form}",
        [(f"r{i}", UNPAIRED, "ACGT"[i % 4] * n) for i, n in enumerate(lengths)],
    )
    wanted = samtools_fastq(path).read_bytes()
    assert [fastq(path) for _ in range(3)] == [wanted] * 3
    assert [bytes([letter])[0] for letter in range(256)] == [*range(256)]


GROUPS = (
    {"ID": "l1", "SM": "lung"},
    {"ID": "gut"},
    {"ID": "l2", "SM": "lung"},
    {"ID": "none", "SM": "idle"},
)
OF = ("l1", "gut", "l2", "", "unknown")  # in turn; the last two are of no read group


def sample_ids(path: Path, spec: ReadsSpec, sample: str) -> list[str]:
    made = stage(
        StageSpec(**spec.model_dump() | {"model_length": 60}),
        path.parent / f"of-{sample}" / "orfs.h5",
    )
    assert (made.read_group, made.files) == (sample, spec.reads)
    store = OrfStore.open(made.store)
    return store.original_ids(0, store.n_reads)


@pytest.mark.parametrize("form", ["bam", "cram"])
def test_each_read_is_of_the_sample_of_its_read_group(tmp_path: Path, form: str) -> None:
    path = written(tmp_path / f"run.{form}", ALIGNED, groups=GROUPS, group_of=lambda i: OF[i % 5])
    other = written(
        tmp_path / f"lane2.{form}", [("x1", 4, bases(0)), ("x2", 4, bases(1))], groups=GROUPS[:2]
    )
    again = written(
        tmp_path / f"lane3.{form}", [("y", 4, bases(3))], groups=GROUPS[:2], group_of=lambda _: "l1"
    )
    found = samples_by_read_group(ReadsSpec(reads=(str(path), str(other), str(again))))
    three = (str(path), str(other), str(again))
    samples = {
        "lung": three,
        "gut": three,
        "idle": three[:1],
        "run": three[:1],
        "lane2": three[1:2],
    }
    assert {sample: (spec.reads, spec.read_group) for sample, spec in found.items()} == {
        sample: (files, sample) for sample, files in samples.items()
    }
    with pytest.raises(InputError, match=r"no read of read group idle came in from .*run"):
        sample_ids(path, found.pop("idle"), "idle")
    ids = {sample: sample_ids(path, spec, sample) for sample, spec in found.items()}
    wanted: dict[str, list[str]] = {"lung": [], "gut": [], "run": [], "lane2": ["x1", "x2"]}
    for i, (name, flag, _) in enumerate(ALIGNED):
        if not flag & alignments.NOT_PRIMARY:
            wanted[("lung", "gut", "lung", "run", "run")[i % 5]].append(name)
    wanted["lung"].append("y")
    assert ids == wanted
    whole = Counter(
        name for name, flag, _ in ALIGNED if not flag & alignments.NOT_PRIMARY
    ) + Counter(["x1", "x2", "y"])
    assert sum(map(Counter, ids.values()), Counter()) == whole


def test_a_store_of_one_read_group_is_not_that_of_another(tmp_path: Path) -> None:
    path = written(tmp_path / "run.bam", SINGLE, groups=GROUPS, group_of=lambda i: OF[i % 3])
    out = tmp_path / "run" / "orfs.h5"
    spec = StageSpec(reads=(str(path),), read_group="gut", model_length=60)
    assert not stage(spec, out).reused
    assert stage(spec, out).reused
    assert not stage(spec.model_copy(update={"read_group": "lung"}), out).reused
    assert not stage(spec.model_copy(update={"read_group": ""}), out).reused


def test_mates_of_a_read_group_follow_each_other_among_those_of_others(tmp_path: Path) -> None:
    alone = [(f"s{i}", UNPAIRED, bases(i)) for i in range(alignments._N_PEEKED_RECORDS + 1)]
    turns = [
        PAIRS[at] for i in range(0, 60, 4) for at in (i, i + 2, i + 1, i + 3)
    ]  # of two groups in turn
    groups = ["gut"] * len(alone) + ["l1", "none"] * 30
    path = written(tmp_path / "run.bam", alone + turns, groups=GROUPS, group_of=lambda i: groups[i])
    found = {one: staged(path, read_group=one) for one in ("lung", "idle")}
    assert [summary.n_pairs for summary in found.values()] == [15, 15]
    assert staged(path, read_group="gut").n_pairs == 0


def test_read_groups_that_cannot_be_samples_are_told_of(tmp_path: Path) -> None:
    def told(file: Path) -> None:
        samples_by_read_group(ReadsSpec(reads=(str(file),)))

    with pytest.raises(InputError, match=r"a\.bam: has no read groups \(@RG\); --sample-from name"):
        told(written(tmp_path / "a.bam", SINGLE))
    with pytest.raises(InputError, match=r"a\.fq: not a BAM, CRAM or SAM file"):
        told(samtools_fastq(tmp_path / "a.bam"))
    with pytest.raises(
        InputError, match=r"a\.fq: neither BAM, CRAM nor SAM, which alone have read groups"
    ):
        staged(tmp_path / "a.fq", read_group="lung")
    with pytest.raises(
        ConfigError, match=r"b\.bam: read groups of 'x/y': not the name of a directory"
    ):
        told(written(tmp_path / "b.bam", SINGLE, groups=({"ID": "1", "SM": "x/y"},)))
    path = written(tmp_path / "c.bam", SINGLE, groups=GROUPS)
    with pytest.raises(InputError, match=r"no read of read group liver came in from .*c\.bam"):
        staged(path, read_group="liver", on_error="skip")


def test_a_file_whose_header_is_damaged_fails_alone(tmp_path: Path) -> None:
    whole, broken = (
        written(tmp_path / name, SINGLE, groups=GROUPS[:1]) for name in ("a.bam", "c.cram")
    )
    broken.write_bytes(broken.read_bytes()[:30])
    found = samples_by_read_group(ReadsSpec(reads=(str(broken), str(whole))))
    assert found.pop("c") == ReadsSpec(reads=(str(broken),), read_group="c")
    assert [one.reads for one in found.values()] == [(str(whole),)] * len(found)
    with pytest.raises(InputError, match=r"c\.cram: the CRAM data is damaged, or ends early"):
        staged(broken, read_group="c")


def test_mates_that_do_not_follow_are_judged_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_place = written(tmp_path / "place.bam", PAIRS, order="coordinate")
    apart = written(tmp_path / "apart.bam", PAIRS[::2] + PAIRS[1::2])
    for path in (by_place, apart):
        assert staged(path).n_pairs == 0
        assert f"{path}: mates do not follow each other" in caplog.text
    together = written(tmp_path / "together.bam", PAIRS)
    assert staged(together, pairs=False).n_pairs == 0
    with pytest.raises(InputError, match=r"lost\.bam:.* read 'p3': has no mate .*--no-pairs"):
        staged(written(tmp_path / "lost.bam", PAIRS[:7] + PAIRS[8:]))
    summary = staged(tmp_path / "lost.bam", on_error="skip")
    assert (summary.n_pairs, summary.by_file[0].orphans) == (29, 1)


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        ("bam", -1),
        ("bam", -28),
        ("bam", -300),
        ("bam", 10),
        ("cram", -38),
        ("cram", -300),
        ("cram", 30),
    ],
)
def test_what_is_cut_off_is_named_with_its_last_record(
    tmp_path: Path, kept: int, form: str
) -> None:
    before = threading.enumerate()
    records = [(f"r{i}", UNPAIRED, bases(i, 200)) for i in range(300)]
    path = written(tmp_path / f"a.{form}", records)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        InputError, match=rf"a\.{form}: .*(data is damaged, or ends early|the gzip data ends early)"
    ) as told:
        staged(path)
    if kept == -28 and form == "bam":
        assert (
            "read 'r299': the BAM data is damaged, or ends early, after record 300; copy it again"
            in str(told.value)
        )
        assert staged(path, on_error="skip").counts.n_reads == 300
    assert not [one for one in threading.enumerate() if one not in before]


@pytest.mark.parametrize(
    "problem", [OSError(5, "Input/output error"), EOFError("ends early"), InputError("broken")]
)
def test_a_file_that_cannot_be_read_on_after_a_whole_record_is_damaged(problem: Exception) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"@HD\tVN:1.6\nr0\t4\t*\t0\t0\t*\t*\t0\t0\tACGT\tIIII\n"
        raise problem

    made = alignments.fastq(pysam, pieces(), "SAM", "a.sam")
    assert next(made) == ("@r0\nACGT\n+\nIIII\n", 0)
    with pytest.raises(InputError, match=r"a\.sam: .*ends early, after record 1"):
        next(made)


def test_a_cram_without_its_reference_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REF_PATH", str(tmp_path / "none"))
    reference = tmp_path / "ref.fa"
    letters = bases("ref", 500)
    reference.write_text(f">c\n{letters}\n")
    pysam.faidx(str(reference))
    path = written(
        tmp_path / "a.cram",
        [(f"r{i}", 0, letters[10:100]) for i in range(9)],
        contig=str(reference),
    )
    reference.unlink()
    with pytest.raises(
        InputError,
        match=r"a\.cram: .*is its reference at hand \(REF_PATH\)\? else use samtools fastq",
    ):
        staged(path)


def test_without_pysam_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.bam", SINGLE)
    monkeypatch.setitem(sys.modules, "pysam", None)
    for reads in (path, tmp_path):
        with pytest.raises(
            InputError,
            match=r"a\.bam: this is BAM, but the package pysam is not installed; install it",
        ):
            stage(StageSpec(reads=(str(reads),)), tmp_path / "out" / "orfs.h5")


def test_bam_through_standard_input_and_among_files_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.bam", SINGLE)
    (tmp_path / "a.bam.bai").write_bytes(b"BAI\1")
    assert find_inputs((str(tmp_path),)).files == (str(path),)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    summary = stage(StageSpec(reads=("-",), model_length=60), tmp_path / "out" / "orfs.h5")
    assert summary.fingerprint == staged(path).fingerprint
    assert OrfStore.open(summary.store).read_ids(0, 2) == ["r0", "r1"]
