"""A FASTA record longer than a block comes in parts and gives the same store in little memory."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zstandard

from virnuc.flows.preflight import count_rows
from virnuc_core.config import ReadsSpec
from virnuc_core.errors import InputError
from virnuc_core.reads import sampling, subsets
from virnuc_core.reads.fast_parser import Strings
from virnuc_core.reads.sampling import sample
from virnuc_core.reads.sources import Source
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore, StoreWriter
from virnuc_core.reads.subsets import write_reads
from virnuc_core.reads.translate import _read_columns, _write_segment
from virnuc_core.reads.workers import Workers
from virnuc_core.rundir import RunDir

from .conftest import WriteReads, shrink
from .made_up import Pairs, digest, fasta, fastq
from .store_checks import check_equals_twin

BLOCKS = (64, 1 << 20)  # bytes; a record of 3,000 bases is long for the first two


def chromosome(name: str, length: int, seed: int, end: str = "\n", letters: str = "ACGT") -> str:
    bases = "".join(random.Random(seed).choices(letters, k=length))
    return f">{name} of something{end}" + "".join(
        f"{bases[i : i + 70]}{end}" for i in range(0, length, 70)
    )


def staged(
    spec: StageSpec, folder: Path, block_bytes: int, workers: int = 1
) -> tuple[StageSummary, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, block_bytes=block_bytes)
        patch.setattr("virnuc_core.reads.translate._WINDOW_BASES", 10 * block_bytes)
        store_path = folder / f"{block_bytes}_{workers}" / "orfs.h5"
        summary = stage(spec.model_copy(update={"workers": workers}), store_path)
        assert stage(spec, store_path).reused
        skipped_list = store_path.with_name("skipped.tsv")
        return (
            summary,
            digest(store_path),
            skipped_list.read_text() if skipped_list.exists() else "",
        )


@pytest.mark.parametrize(
    ("end", "odd"),
    [("\n", ""), ("\r\n", ""), ("\n", ";a comment\n"), ("\r\n", "AC GT\n"), ("\n", "\n\n")],
)
def test_a_record_in_parts_gives_the_same_store(
    write: WriteReads, tmp_path: Path, end: str, odd: str
) -> None:
    text = (
        chromosome("one", 10_000, 1, end)
        + chromosome("short", 100, 2, end)
        + chromosome("one", 20_001, 3, end, "A")
    )
    text += (
        chromosome("n", 900, 4, end, "ACGTNnacgt")
        + f"{odd}>empty{end}"
        + chromosome("last", 5001, 5, end).rstrip()
    )
    spec = StageSpec(
        reads=(write(text), write("@q\nACGTACGT\n+\nIIIIIIII\n", "q.fq")), model_length=60
    )
    runs = [staged(spec, tmp_path, size, workers) for size in BLOCKS for workers in (1, 2)]
    assert len({store_digest for _, store_digest, _ in runs}) == 1
    assert {summary.counts.n_reads for summary, *_ in runs} == {7}
    assert {summary.counts.n_duplicate_ids for summary, *_ in runs} == {1}


def test_a_single_long_line_and_a_header_alone_give_the_same_store(
    write: WriteReads, tmp_path: Path
) -> None:
    text = f">{'x' * 3000}\n{'ACGT' * 4000}\n>{'y' * 3000}"
    runs = [staged(StageSpec(reads=(write(text),)), tmp_path, size) for size in BLOCKS]
    assert len({store_digest for _, store_digest, _ in runs}) == 1


@pytest.mark.parametrize("place", [10, 2_990])
@pytest.mark.parametrize("odd", ["E", "E\n;comment\n"])
def test_a_long_record_with_an_illegal_letter_is_left_out_completely(
    write: WriteReads, tmp_path: Path, place: int, odd: str
) -> None:
    bad = "".join(random.Random(1).choices("ACGT", k=3_000))
    bad = f"{bad[:place]}{odd}{bad[place:]}EE"
    path = write(f"{chromosome('a', 4000, 2)}>bad\n{bad}\n{chromosome('b', 4000, 3)}")
    with pytest.raises(
        InputError, match=rf"reads\.fa:60: read 'bad': 'E' at base {place + 1} is not a nucleotide"
    ):
        staged(StageSpec(reads=(path,)), tmp_path, 64)
    spec = StageSpec(reads=(path,), on_error="skip")
    runs = [staged(spec, tmp_path, size) for size in BLOCKS]
    assert len({(store_digest, skipped_text) for _, store_digest, skipped_text in runs}) == 1
    assert [(s.counts.n_reads, s.tally["skipped"]) for s, *_ in runs] == [(2, 1)] * len(runs)


def test_a_long_record_that_is_cut_off_is_left_out(write: WriteReads, tmp_path: Path) -> None:
    path = write(
        gzip.compress((chromosome("a", 400, 2) + chromosome("b", 90_000, 3)).encode())[:-3000],
        "a.fa.gz",
    )
    spec = StageSpec(reads=(path,), on_error="skip")
    runs = [staged(spec, tmp_path, size) for size in BLOCKS]
    assert len({(store_digest, skipped_text) for _, store_digest, skipped_text in runs}) == 1
    assert [(s.counts.n_reads, s.tally["skipped"]) for s, *_ in runs] == [(1, 1)] * len(runs)


def test_samples_and_exports_of_long_records_are_complete(
    write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        chromosome("bad", 900, 1, letters="ACGTE"),
        *(chromosome(f"c{i}", 300 * i, i) for i in range(1, 6)),
    ]
    path, good = write("".join(texts)), write("".join(texts[1:]), "good.fa")
    run, contents, parse = RunDir(tmp_path / "run"), {}, subsets.parse
    summary = stage(StageSpec(reads=(path,), on_error="skip"), run.store)
    assert summary.counts.n_reads == 5
    run.reads_table.write_text(
        "id\tfate\n" + "".join(f"c{i}\t{('others', 'viral')[i % 2]}\n" for i in range(1, 6))
    )
    for size in BLOCKS:
        shrink(monkeypatch, block_bytes=size)
        for module in (subsets, sampling):
            monkeypatch.setattr(module, "parse", partial(parse, block_bytes=size))
        assert write_reads(run, OrfStore.open(run.store), summary) == 3
        assert (
            gzip.decompress((run.root / "viral.fasta.gz").read_bytes()).decode()
            == texts[1] + texts[3] + texts[5]
        )
        sample(ReadsSpec(reads=(good,)), 3, tmp_path / "drawn.fa", force=True)
        contents[size] = (tmp_path / "drawn.fa").read_text()
    assert len(set(contents.values())) == 1
    assert contents[64].count(">") == 3
    with pytest.raises(InputError, match="not the reads that were staged"):
        write_reads(
            run, OrfStore.open(run.store), summary.model_copy(update={"files": (good, path)})
        )


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_a_record_after_a_long_one_without_line_end_stays_a_record(
    write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    shrink(monkeypatch, block_bytes=BLOCKS[0])
    for module in (subsets, sampling):
        monkeypatch.setattr(module, "parse", partial(module.parse, block_bytes=BLOCKS[0]))
    long_record, next_record = f">long\n{'ACGCA' * 600}", ">next\nACGT\n"
    paths = write(long_record + end, "in/a.fa"), write(next_record, "in/b.fa")
    text = long_record + (end or "\n") + next_record
    assert sample(ReadsSpec(reads=(str(tmp_path / "in"),)), 2, tmp_path / "out.fa").reads_after == 2
    assert (tmp_path / "out.fa").read_bytes().decode() == text
    staging, run = (
        stage(StageSpec(reads=paths), tmp_path / "run" / "orfs.h5"),
        RunDir(tmp_path / "run"),
    )
    run.reads_table.write_text("id\tfate\nlong\tviral\nnext\tviral\n")
    assert write_reads(run, OrfStore.open(staging.store), staging) == 2
    assert gzip.decompress((run.root / "viral.fasta.gz").read_bytes()).decode() == text


def test_a_read_longer_than_32_bits_can_count(tmp_path: Path) -> None:
    ones, length = np.array([1]), np.array([3_000_000_000])
    ids = Strings.from_strings([b"wheat"])
    with Workers(1) as workers:
        writer = StoreWriter(tmp_path, 500)
        writer.add(
            _write_segment(tmp_path, _read_columns(ids, ones, length, 500, ones - 1, ones < 0), 0)
        )
        writer.find_repeats(workers)
        writer.write(tmp_path / "orfs.h5", "x", workers)
    store = OrfStore.open(tmp_path / "orfs.h5")
    assert store.read_length[0] == store.counts.n_bases == 3_000_000_000
    assert store.read_chunks[0] == 6_000_000


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        bz2.compress,
        partial(lzma.compress, preset=0),  # the other presets pack no better and take longer
        zstandard.ZstdCompressor().compress,
    ],
    ids=["gz", "bz2", "xz", "zst"],
)
def test_highly_compressed_data_comes_in_bounded_pieces(
    write: WriteReads, pack: Callable[[bytes], bytes]
) -> None:
    path = write(pack(b">a\n" + b"A" * (1 << 26)), "a.fa")
    with Source.open(path) as source:
        sizes = [len(piece) for piece in itertools.islice(iter(lambda: source.read(1), b""), 1000)]
    assert sum(sizes) == (1 << 26) + 3
    assert max(sizes) < 40_000_000


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"]
)
@pytest.mark.parametrize("bound", [1, 64, 1 << 20])
def test_nothing_is_lost_between_bounded_pieces(
    write: WriteReads, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes], bound: int
) -> None:
    monkeypatch.setattr("virnuc_core.reads.sources._UNPACKED_BYTES", bound)
    monkeypatch.setattr("virnuc_core.reads.sources._PIECE_BYTES", 50)
    texts = [random.Random(n).randbytes(5) * 30 + b"A" * n for n in (0, 1, 63, 64, 4000)]
    with Source.open(write(b"".join(map(pack, texts)), "a.fa")) as source:
        assert b"".join(iter(lambda: source.read(1), b"")) == b"".join(texts)
    assert source.damage is None


def random_reads(*lengths: int) -> Pairs:
    reads = [
        (f"r{i}", "".join(random.Random(i).choices("ACGTacgtN", k=length)))
        for i, length in enumerate(lengths)
    ]
    return [*reads, ("again", reads[-1][1])]


@pytest.mark.parametrize("text", [fasta, fastq])
def test_long_reads_equal_the_slow_twin_with_any_blocks(
    write: WriteReads, tmp_path: Path, text: Callable[[Pairs], str]
) -> None:
    reads = random_reads(0, 5, 3000, 61, 7001)
    spec = StageSpec(
        reads=(write(gzip.compress(text(reads).encode()), "reads.gz"),), model_length=100
    )
    for size in BLOCKS:
        check_equals_twin(OrfStore.open(staged(spec, tmp_path, size)[0].store), reads)


LETTER = "@bad\n" + "ACGTE" * 600 + "\n+\n" + "IIIII" * 600 + "\n"
QUALITY = "@bad\n" + "ACGT" * 600 + "\n+\n" + "IIII" * 599 + "\n"


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        (fastq, LETTER),
        (fastq, QUALITY),
        (fastq, "cut"),
        (fasta, ">bad\n" + "ACGTE" * 600 + "\n"),
        (fasta, "cut"),
    ],
    ids=["letter", "quality", "cut", "FASTA letter", "FASTA cut"],
)
def test_nothing_is_left_of_a_dropped_long_read(
    write: WriteReads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: Callable[[Pairs], str],
    bad: str,
) -> None:
    """Reads around a long broken one stay whole in staging, samples and exports, in any blocks."""
    reads, later_reads = random_reads(50, 3000), random_reads(2000, 70)
    later_reads = [(f"last{name}", bases) for name, bases in later_reads]
    whole_text = text(reads) + ("" if bad == "cut" else bad) + text(later_reads)
    compressed = gzip.compress(whole_text.encode())
    if bad == "cut":
        random_bases = "".join(random.Random(9).choices("ACGT", k=9000))
        compressed = gzip.compress((whole_text + text([("bad", random_bases)])).encode())[:-1000]
    spec = StageSpec(reads=(write(compressed, "reads.gz"),), model_length=100, on_error="skip")
    run, skipped_texts = RunDir(tmp_path / "run"), set()
    run.root.mkdir()
    good_reads, parse = reads + later_reads, subsets.parse
    run.reads_table.write_text(
        "id\tfate\n"
        + "".join(
            f"{name}\t{('others', 'viral')[i % 2]}\n" for i, (name, _) in enumerate(good_reads)
        )
    )
    for size in BLOCKS:
        summary, _, skipped_text = staged(spec, tmp_path, size)
        skipped_texts.add(skipped_text)
        assert summary.tally["skipped"] == 1
        store = OrfStore.open(summary.store)
        check_equals_twin(store, good_reads)
        for module in (subsets, sampling):
            monkeypatch.setattr(module, "parse", partial(parse, block_bytes=size))
        assert write_reads(run, store, summary) == 3
        viral = gzip.decompress((run.root / f"viral.{text.__name__}.gz").read_bytes()).decode()
        assert viral == "".join(text([a_read]) for a_read in good_reads[1::2])
    assert len(skipped_texts) == 1


def test_a_sample_of_long_fastq_reads(
    write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, samples, parse = random_reads(*range(0, 2000, 100)), set(), sampling.parse
    for size in BLOCKS:
        monkeypatch.setattr(sampling, "parse", partial(parse, block_bytes=size))
        sample(
            ReadsSpec(reads=(write(gzip.compress(fastq(reads).encode()), "reads.gz"),)),
            9,
            tmp_path / "drawn.fq",
            force=True,
        )
        samples.add((tmp_path / "drawn.fq").read_text())
    (text,) = samples
    assert sum(fastq([a_read]) in text for a_read in reads) == text.count("+\n") == 9


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_the_limit_of_fastq_lines_is_the_same_in_every_packing(
    write: WriteReads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pack: Callable[[bytes], bytes],
) -> None:
    monkeypatch.setattr("virnuc_core.reads.parse.LONGEST_LINE", 5000)
    monkeypatch.setattr("virnuc_core.reads.sources._UNPACKED_BYTES", 150)
    reads = random_reads(10, 5000, 10)
    for size in (64, 100, 4000):
        spec = StageSpec(reads=(write(pack(fastq(reads).encode()), "reads.x"),), model_length=100)
        check_equals_twin(OrfStore.open(staged(spec, tmp_path, size)[0].store), reads)
        too_long = write(pack(fastq(random_reads(10, 6000)).encode()), "long.x")
        with pytest.raises(
            InputError, match=r"long\.x:5: a line of this record is longer than 5,000 letters"
        ):
            staged(StageSpec(reads=(too_long,)), tmp_path / "long", size)


@pytest.mark.parametrize("head", [b">", b"@"])
def test_preflight_unpacks_little_of_highly_compressed_data(
    write: WriteReads, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    n_unpacked, original_read = [0], Source.read

    def counted(self: Source, size: int) -> bytes:
        piece = original_read(self, size)
        n_unpacked[0] += len(piece)
        return piece

    monkeypatch.setattr(Source, "read", counted)
    monkeypatch.setattr("virnuc_core.reads.parse.LONGEST_LINE", 1 << 20)
    path = write(gzip.compress(head + b"a\n" + b"A" * (1 << 24)), "swells.gz")
    with pytest.raises(InputError, match="is longer than") if head == b"@" else nullcontext():
        count_rows((path,), "stop")
    assert 0 < n_unpacked[0] < 8 << 20


MEASURED = """
import sys
from pathlib import Path
from virnuc.flows.preflight import count_rows
from virnuc_core.reads.stage import StageSpec, stage
def peak():  # of this program: what getrusage tells begins with the peak of who started it
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
count_rows((sys.argv[1],), "stop")
looked = peak()
stage(StageSpec(reads=(sys.argv[1],)), Path(sys.argv[2]))
print(looked, peak())
"""


@pytest.mark.slow
@pytest.mark.parametrize("bases", ["".join(random.Random(7).choices("ACGT", k=1000)), "A" * 1000])
def test_memory_does_not_grow_with_the_length_of_a_record(tmp_path: Path, bases: str) -> None:
    """Measure peaks over one line of 20, 40 and 80 million bases, with and without open frames."""
    peaks = []
    for size in (20, 40, 80):
        path = tmp_path / f"{size}.fa.gz"
        path.write_bytes(gzip.compress(b">long\n" + bases.encode() * (size * 1000)))
        command = [sys.executable, "-c", MEASURED, str(path), str(tmp_path / str(size) / "orfs.h5")]
        figures = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        peaks.append([int(kilobytes) / 1000 for kilobytes in figures])
    preflight_peaks, staging_peaks = zip(*peaks, strict=True)
    assert max(preflight_peaks) - min(preflight_peaks) < 15
    assert staging_peaks[2] < 400
    assert staging_peaks[2] - staging_peaks[0] < 60, staging_peaks
