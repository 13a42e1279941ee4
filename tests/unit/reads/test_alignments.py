"""BAM, CRAM and SAM give the store of the FASTQ that samtools makes of them."""

from __future__ import annotations

import gzip
import io
import logging
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
    options: Any = {"reference_filename": contig} if path.suffix == ".cram" and contig else {}
    with pysam.AlignmentFile(path, FORMS[path.suffix[1:]], header=header, **options) as file:
        for i, (name, flag, letters) in enumerate(records):
            record = pysam.AlignedSegment(file.header)
            record.query_name, record.flag, record.query_sequence = name, flag, letters
            if i % 7:  # the others have no quality
                record.query_qualities = pysam.qualitystring_to_array(bases(i, len(letters)))
            if group := group_of(i):
                record.set_tag("RG", group)
            if contig:
                record.reference_id, record.reference_start, record.cigarstring = (
                    0,
                    10,
                    f"{len(letters)}M",
                )
            file.write(record)
    return path


def samtools_fastq(path: Path) -> Path:
    fastq_path = path.with_suffix(".fq")
    pysam.fastq("-N", "-o", str(fastq_path), "-0", str(fastq_path), str(path))
    return fastq_path


def staged(path: Path | str, **spec: object) -> StageSummary:
    store_path = Path(path).parent / f"of-{Path(path).name}" / "orfs.h5"
    return stage(StageSpec(reads=(str(path),), model_length=60, **spec), store_path)


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
def test_alignments_give_the_store_of_samtools_fastq(
    tmp_path: Path, form: str, records: list[Record]
) -> None:
    path = written(tmp_path / f"a.{form}", records)
    fastq_path = samtools_fastq(path)
    assert fastq(path).splitlines() == fastq_path.read_bytes().splitlines()
    pairs = records is PAIRS
    summary, fastq_summary = staged(path), staged(fastq_path, interleaved=pairs)
    assert (summary.fingerprint, summary.counts, summary.n_pairs) == (
        fastq_summary.fingerprint,
        fastq_summary.counts,
        30 * pairs,
    )
    assert summary.by_file[0].content is not None
    assert summary.by_file[0].content.size == path.stat().st_size
    left_out = f"{path}: 2 secondary or supplementary alignments left out"
    assert (left_out in summary.warnings()) is (not pairs)
    assert staged(path).reused


@pytest.mark.parametrize("form", ["bam", "sam"])
def test_reads_of_one_base_keep_their_quality_and_do_not_change_pythons_letters(
    tmp_path: Path, form: str
) -> None:
    lengths = (1, 1, 2, 0, 1, 1, 90, 1, 1)  # the first and the eighth have no quality
    path = written(
        tmp_path / f"a.{form}",
        [(f"r{i}", UNPAIRED, "ACGT"[i % 4] * n) for i, n in enumerate(lengths)],
    )
    expected_fastq = samtools_fastq(path).read_bytes()
    assert [fastq(path) for _ in range(3)] == [expected_fastq] * 3
    assert [bytes([letter])[0] for letter in range(256)] == [*range(256)]


GROUPS = (
    {"ID": "l1", "SM": "lung"},
    {"ID": "gut"},
    {"ID": "l2", "SM": "lung"},
    {"ID": "none", "SM": "idle"},
)
OF = ("l1", "gut", "l2", "", "unknown")  # in turn; the last two are of no read group


def sample_ids(path: Path, spec: ReadsSpec, sample: str) -> list[str]:
    summary = stage(
        StageSpec(**spec.model_dump() | {"model_length": 60}),
        path.parent / f"of-{sample}" / "orfs.h5",
    )
    assert (summary.read_group, summary.files) == (sample, spec.reads)
    store = OrfStore.open(summary.store)
    return store.original_ids(0, store.n_reads)


@pytest.mark.parametrize("form", ["bam", "cram"])
def test_each_read_belongs_to_the_sample_of_its_read_group(tmp_path: Path, form: str) -> None:
    path = written(tmp_path / f"run.{form}", ALIGNED, groups=GROUPS, group_of=lambda i: OF[i % 5])
    other_path = written(
        tmp_path / f"lane2.{form}", [("x1", 4, bases(0)), ("x2", 4, bases(1))], groups=GROUPS[:2]
    )
    third_path = written(
        tmp_path / f"lane3.{form}", [("y", 4, bases(3))], groups=GROUPS[:2], group_of=lambda _: "l1"
    )
    specs = samples_by_read_group(ReadsSpec(reads=(str(path), str(other_path), str(third_path))))
    three = (str(path), str(other_path), str(third_path))
    files_of_sample = {
        "lung": three,
        "gut": three,
        "idle": three[:1],
        "run": three[:1],
        "lane2": three[1:2],
    }
    assert {sample: (spec.reads, spec.read_group) for sample, spec in specs.items()} == {
        sample: (files, sample) for sample, files in files_of_sample.items()
    }
    assert sample_ids(path, specs.pop("idle"), "idle") == [], "named by the header: no reads"
    ids = {sample: sample_ids(path, spec, sample) for sample, spec in specs.items()}
    expected_ids: dict[str, list[str]] = {"lung": [], "gut": [], "run": [], "lane2": ["x1", "x2"]}
    for i, (name, flag, _) in enumerate(ALIGNED):
        if not flag & alignments.NOT_PRIMARY:
            expected_ids[("lung", "gut", "lung", "run", "run")[i % 5]].append(name)
    expected_ids["lung"].append("y")
    assert ids == expected_ids
    all_ids = Counter(
        name for name, flag, _ in ALIGNED if not flag & alignments.NOT_PRIMARY
    ) + Counter(["x1", "x2", "y"])
    assert sum(map(Counter, ids.values()), Counter()) == all_ids


def test_the_store_of_another_read_group_is_not_reused(tmp_path: Path) -> None:
    path = written(tmp_path / "run.bam", SINGLE, groups=GROUPS, group_of=lambda i: OF[i % 3])
    store_path = tmp_path / "run" / "orfs.h5"
    spec = StageSpec(reads=(str(path),), read_group="gut", model_length=60)
    assert not stage(spec, store_path).reused
    assert stage(spec, store_path).reused
    assert not stage(spec.model_copy(update={"read_group": "lung"}), store_path).reused
    assert not stage(spec.model_copy(update={"read_group": ""}), store_path).reused


def test_pairs_are_detected_among_the_reads_of_one_read_group(tmp_path: Path) -> None:
    unpaired_reads = [
        (f"s{i}", UNPAIRED, bases(i)) for i in range(alignments._N_PEEKED_RECORDS + 1)
    ]
    turns = [
        PAIRS[index] for i in range(0, 60, 4) for index in (i, i + 2, i + 1, i + 3)
    ]  # of two groups in turn
    groups = ["gut"] * len(unpaired_reads) + ["l1", "none"] * 30
    path = written(
        tmp_path / "run.bam", unpaired_reads + turns, groups=GROUPS, group_of=lambda i: groups[i]
    )
    summaries = {sample: staged(path, read_group=sample) for sample in ("lung", "idle")}
    assert [summary.n_pairs for summary in summaries.values()] == [15, 15]
    assert staged(path, read_group="gut").n_pairs == 0


@pytest.mark.parametrize("form", ["bam", "sam"])
def test_pairs_behind_the_records_that_are_searched_are_warned_of(
    tmp_path: Path,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    single_reads = [(f"s{i}", UNPAIRED, bases(i)) for i in range(40)]
    path = written(tmp_path / f"run.{form}", single_reads + PAIRS)
    assert staged(path).n_pairs == len(PAIRS) // 2
    monkeypatch.setattr(alignments, "_N_SEARCHED_RECORDS", 41)
    assert staged(path).n_pairs == len(PAIRS) // 2, "record 41 is of a pair"
    assert "the first read of a pair" not in caplog.text
    monkeypatch.setattr(alignments, "_N_SEARCHED_RECORDS", 40)
    assert staged(path).n_pairs == 0
    expected_line = f"{path}: the first read of a pair is record 41, after the 40 records"
    assert caplog.text.count(expected_line) == 1
    assert staged(path, interleaved=True).n_pairs == len(PAIRS) // 2, "as the warning says"


def test_unusable_read_groups_are_refused_by_name(tmp_path: Path) -> None:
    def told(file: Path) -> None:
        samples_by_read_group(ReadsSpec(reads=(str(file),)))

    with pytest.raises(InputError, match=r"a\.bam: has no read groups \(@RG\); --sample-from name"):
        told(written(tmp_path / "a.bam", SINGLE))
    with pytest.raises(InputError, match=r"a\.fq: only BAM, CRAM and SAM have read groups"):
        told(samtools_fastq(tmp_path / "a.bam"))
    with pytest.raises(
        InputError, match=r"a\.fq: only BAM, CRAM and SAM have read groups; this is none"
    ):
        staged(tmp_path / "a.fq", read_group="lung")
    with pytest.raises(
        ConfigError, match=r"b\.bam: read groups of 'x/y': not the name of a directory"
    ):
        told(written(tmp_path / "b.bam", SINGLE, groups=({"ID": "1", "SM": "x/y"},)))
    path = written(tmp_path / "c.bam", SINGLE, groups=GROUPS)
    with pytest.raises(InputError, match=r"c\.bam: no read belongs to read group liver"):
        staged(path, read_group="liver", on_error="skip")


def test_a_file_with_a_damaged_header_fails_alone(tmp_path: Path) -> None:
    good_path, broken_path = (
        written(tmp_path / name, SINGLE, groups=GROUPS[:1]) for name in ("a.bam", "c.cram")
    )
    broken_path.write_bytes(broken_path.read_bytes()[:30])
    samples = samples_by_read_group(ReadsSpec(reads=(str(broken_path), str(good_path))))
    assert samples.pop("c") == ReadsSpec(reads=(str(broken_path),), read_group="c")
    assert [spec.reads for spec in samples.values()] == [(str(good_path),)] * len(samples)
    with pytest.raises(InputError, match=r"c\.cram: the CRAM data is damaged, or ends early"):
        staged(broken_path, read_group="c")


def test_scattered_mates_are_judged_alone_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_place = written(tmp_path / "place.bam", PAIRS, order="coordinate")
    scattered_path = written(tmp_path / "apart.bam", PAIRS[::2] + PAIRS[1::2])
    for path in (by_place, scattered_path):
        assert staged(path).n_pairs == 0
        assert f"{path}: mates do not follow each other" in caplog.text
    collated_path = written(tmp_path / "together.bam", PAIRS)
    assert staged(collated_path, pairs=False).n_pairs == 0
    with pytest.raises(InputError, match=r"lost\.bam:.* read 'p3': has no mate .*--no-pairs"):
        staged(written(tmp_path / "lost.bam", PAIRS[:7] + PAIRS[8:]))
    summary = staged(tmp_path / "lost.bam", on_error="skip")
    assert (summary.n_pairs, summary.by_file[0].orphans) == (29, 1)


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        ("bam", -1),
        ("bam", -27),
        ("bam", -300),
        ("bam", 10),
        ("cram", -38),
        ("cram", -300),
        ("cram", 30),
    ],
)
def test_a_cut_off_file_is_refused_with_its_last_record(
    tmp_path: Path, kept: int, form: str
) -> None:
    threads_before = threading.enumerate()
    records = [(f"r{i}", UNPAIRED, bases(i, 200)) for i in range(300)]
    path = written(tmp_path / f"a.{form}", records)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        InputError, match=rf"a\.{form}: .*(data is damaged, or ends early|the gzip data ends early)"
    ) as error_info:
        staged(path)
    if kept == -27 and form == "bam":
        assert (
            "read 'r299': the BAM data is damaged, or ends early, after record 300; copy it again"
            in str(error_info.value)
        )
        assert staged(path, on_error="skip").counts.n_reads == 300
    assert not [thread for thread in threading.enumerate() if thread not in threads_before]


BAM_END_BYTES = 28  # of the block that ends a file


def content_of(summary: StageSummary) -> tuple[list[str], list[int], int]:
    """Return what a store holds, whatever files it was made of."""
    store = OrfStore.open(summary.store)
    return store.read_ids(0, store.n_reads), store.read_flags[:].tolist(), summary.n_pairs


def test_bam_without_its_end_block_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "a.bam", PAIRS)
    whole = content_of(staged(path))
    path.write_bytes(path.read_bytes()[:-BAM_END_BYTES])
    with caplog.at_level(logging.WARNING):
        summary = staged(path)
    assert content_of(summary) == whole
    assert f"a.bam: {len(PAIRS)} records were read, but the block that ends" in caplog.text


@pytest.mark.parametrize("zeros", [1, 512, 300_000])
@pytest.mark.parametrize("pairs", [True, False])
def test_zeros_behind_a_bam_file_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, zeros: int, pairs: bool
) -> None:
    path = written(tmp_path / "a.bam", PAIRS)
    whole = content_of(staged(path, pairs=pairs))
    path.write_bytes(path.read_bytes() + bytes(zeros))
    assert content_of(staged(path, pairs=pairs)) == whole
    assert "block that ends" not in caplog.text


@pytest.mark.parametrize("form", ["plain gzip", "two members", "decompressed"])
def test_bam_without_the_blocks_of_bgzf_is_read(tmp_path: Path, form: str) -> None:
    path = written(tmp_path / "a.bam", PAIRS)
    whole = content_of(staged(path))
    content = gzip.decompress(path.read_bytes())
    if form == "plain gzip":
        content = gzip.compress(content)
    elif form == "two members":
        content = gzip.compress(content[:1000]) + gzip.compress(content[1000:])
    path.write_bytes(content)
    assert content_of(staged(path)) == whole


@pytest.mark.parametrize("kept", [-1, -9, -200, 200])
def test_bam_in_plain_gzip_that_is_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path / "a.bam", PAIRS)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()))[:kept])
    with pytest.raises(InputError, match=r"a\.bam: .*(ends early|damaged)"):
        staged(path, pairs=False)


def test_pairs_behind_many_single_reads_are_found(tmp_path: Path) -> None:
    single = [(f"s{i}", UNPAIRED, bases(i)) for i in range(1500)]
    summary = staged(written(tmp_path / "a.bam", [*single, *PAIRS]))
    assert summary.n_pairs == len(PAIRS) // 2
    assert summary.counts.n_reads == len(single) + len(PAIRS)
    store = OrfStore.open(summary.store)
    assert store.read_ids(0, 2) == ["s0", "s1"]
    assert store.read_ids(1500, 1502) == ["p0/1", "p0/2"]


@pytest.mark.parametrize(
    "problem", [OSError(5, "Input/output error"), EOFError("ends early"), InputError("broken")]
)
def test_a_read_error_after_a_whole_record_counts_as_damage(problem: Exception) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"@HD\tVN:1.6\nr0\t4\t*\t0\t0\t*\t*\t0\t0\tACGT\tIIII\n"
        raise problem

    fastq_pieces = alignments.fastq(pysam, pieces(), "SAM", "a.sam")
    assert next(fastq_pieces) == ("@r0\nACGT\n+\nIIII\n", 0)
    with pytest.raises(InputError, match=r"a\.sam: .*ends early, after record 1"):
        next(fastq_pieces)


def test_a_missing_cram_reference_is_named_in_the_error(
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


def test_a_missing_pysam_is_named_in_the_error(
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


def test_bam_is_read_from_standard_input_and_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.bam", SINGLE)
    (tmp_path / "a.bam.bai").write_bytes(b"BAI\1")
    assert find_inputs((str(tmp_path),)).files == (str(path),)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    summary = stage(StageSpec(reads=("-",), model_length=60), tmp_path / "out" / "orfs.h5")
    assert summary.fingerprint == staged(path).fingerprint
    assert OrfStore.open(summary.store).read_ids(0, 2) == ["r0", "r1"]


def written_with_reference(path: Path, reference: Path) -> Path:
    """A CRAM file of which every read is stored as its differences from a reference."""
    letters = bases("ref", 500)
    reference.write_text(f">c\n{letters}\n")
    pysam.faidx(str(reference))
    records = [(f"r{i}", 0, letters[10:100]) for i in range(9)]
    return written(path, records, contig=str(reference))


@pytest.mark.parametrize("spec", [{}, {"read_group": "a"}])
def test_the_reference_that_a_cram_header_names_must_be_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, str]
) -> None:
    monkeypatch.setenv("REF_PATH", str(tmp_path / "none"))
    inside = tmp_path / "inside"
    inside.mkdir()
    reference = tmp_path / "ref.fa"
    path = written_with_reference(inside / "a.cram", reference)
    assert staged(path, **spec).counts.n_reads == 9
    monkeypatch.setenv("VIRNUC_ROOTS", str(inside))
    with pytest.raises(
        ConfigError,
        match=r"a\.cram: the reference that its header names: .*ref\.fa lies in none",
    ):
        staged(path, **spec)
    monkeypatch.setenv("VIRNUC_ROOTS", str(tmp_path))
    assert staged(path, **spec).counts.n_reads == 9


def test_a_reference_of_another_machine_is_not_opened_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REF_PATH", str(tmp_path / "none"))
    inside = tmp_path / "inside"
    inside.mkdir()
    reference = tmp_path / "ref.fa"
    path = written_with_reference(inside / "a.cram", reference)
    reference.unlink()
    monkeypatch.setenv("VIRNUC_ROOTS", str(inside))
    with pytest.raises(InputError, match=r"is its reference at hand"):
        staged(path)
