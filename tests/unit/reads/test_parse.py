"""Parsing: the reads that are found, the errors that are raised, and equality with Biopython."""

from __future__ import annotations

import gzip
import io
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser
from Bio.SeqIO.QualityIO import FastqGeneralIterator
from hypothesis import example, given, settings
from hypothesis import strategies as st

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import ParseLog
from virnuc_core.reads.parse import parse

from .conftest import WriteReads

Pairs = list[tuple[str, str]]


@pytest.fixture(autouse=True, scope="module")
def _small_draws() -> Iterator[None]:
    """Read few bytes at a time, so that `block_bytes` bounds the blocks of small files, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("virnuc_core.reads.sources._PIECE_BYTES", 16)
        yield


def reads_of(*files: str, log: ParseLog | None = None, block_bytes: int = 1 << 20) -> Pairs:
    """(id, bases) of all reads; checks on the way that the columns of each batch fit together."""
    reads: Pairs = []
    long_record = ["", "", ""]  # id, bases and text of a long record, as far as its parts have come
    for batch in parse(files, log, block_bytes=block_bytes):
        if (part := batch.part) is not None:
            long_record = ["", "", ""] if part.is_first else long_record
            assert part.is_dropped or (
                part.n_bases_before == len(long_record[1]) and long_record[0] in ("", batch.id(0))
            )
            long_record = [
                batch.id(0),
                long_record[1] + batch.bases[0].decode(),
                long_record[2] + batch.records[0].decode("utf-8", "replace"),
            ]
            if part.is_last and not part.is_dropped:
                reads.append((long_record[0], long_record[1]))
                assert long_record[1] in re.sub(r"\s", "", long_record[2])
                assert long_record[2].startswith(">")
            continue
        assert len(batch) == len(batch.lines) == len(batch.bases) == len(batch.records)
        assert all(
            column.offsets[-1] == len(column.data)
            for column in (batch.ids, batch.bases, batch.records)
        )
        for i in range(len(batch)):
            bases = batch.bases[i].decode()
            reads.append((batch.id(i), bases))
            assert batch.records[i][:1] == (b"@" if batch.format == "fastq" else b">")
            assert bases in re.sub(r"\s", "", batch.records[i].decode("utf-8", "replace"))
    return reads


def lines_of(*files: str) -> list[int]:
    return [int(line) for batch in parse(files) for line in batch.lines]


def refusal(*files: str) -> InputError:
    with pytest.raises(InputError) as error_info:
        reads_of(*files)
    assert "\n" not in str(error_info.value)
    return error_info.value


def skipping(*files: str) -> tuple[Pairs, ParseLog, list[InputError]]:
    errors: list[InputError] = []
    log = ParseLog("skip", errors.append)
    return reads_of(*files, log=log), log, errors


# what is read


def test_fasta_with_wrapped_lines_comments_and_blank_lines(write: WriteReads) -> None:
    path = write(
        ";made by hand\n\n>a first read\nACGT\nAC\n\n>b\n;not this\nGG\n>c\n>d\tx\nT-.nryu\n"
    )
    assert reads_of(path) == [("a", "ACGTAC"), ("b", "GG"), ("c", ""), ("d", "T-.nryu")]
    assert lines_of(path) == [3, 7, 10, 11]


def test_fastq(write: WriteReads) -> None:
    path = write("@a x\nACGT\n+\n@+>;\n@b\n\n+\n\n@c\nA\n+c\nI\n@d e\nA\n+d e\nI", "reads.fq")
    assert reads_of(path) == [("a", "ACGT"), ("b", ""), ("c", "A"), ("d", "A")]
    assert lines_of(path) == [1, 5, 9, 13]


def test_wrapped_fastq(write: WriteReads) -> None:
    log = ParseLog()
    path = write("@a\nACGT\n+\nIIII\n@b\nAC\nGT\n+\n@@\n++\n@c\nA\n+\nI\n")
    assert reads_of(path, log=log) == [("a", "ACGT"), ("b", "ACGT"), ("c", "A")]
    assert lines_of(path) == [1, 5, 11]
    assert log.n_reads == 3


@pytest.mark.parametrize("end", ["\r\n", "\r"])
@pytest.mark.parametrize(
    "text",
    [">a x\nAC\nGT\n\n>b\nGG\n", "@a\nACGT\n+\nIIII\n@b\nGG\n+b\n!!\n"],
    ids=["fasta", "fastq"],
)
def test_other_line_ends(write: WriteReads, text: str, end: str) -> None:
    assert reads_of(write(text.replace("\n", end))) == [("a", "ACGT"), ("b", "GG")]


def test_no_line_end_at_the_end(write: WriteReads) -> None:
    assert reads_of(write(">a\nACGT")) == [("a", "ACGT")]
    assert reads_of(write("@a\nACGT\n+\nIIII")) == [("a", "ACGT")]


def test_blank_lines_around_fastq_records(write: WriteReads) -> None:
    path = write("\n \n@a\nAC\n+\nII\n\n\n@b\nGT\n+\nII\n\n\n\n\n")
    assert reads_of(path) == [("a", "AC"), ("b", "GT")]
    assert lines_of(path) == [3, 9]


def test_byte_order_mark(write: WriteReads) -> None:
    assert reads_of(write(b"\xef\xbb\xbf>a\nACGT\n")) == [("a", "ACGT")]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("r1 second word", "r1"),
        ("r1\tsecond", "r1"),
        ("  r1 x", "r1"),
        ("<b>r1</b>", "<b>r1</b>"),
        ("été/1 x", "été/1"),
        ("r1\u00a0x", "r1"),
        ("r1\u2028x", "r1"),
        ("r\x01s", "r\\x01s"),
        ("r\x00s", "r\\x00s"),
        ("gi|1|ref|NC_1.1|", "gi|1|ref|NC_1.1|"),
        ("'\"r1\"'", "'\"r1\"'"),
        ("r\u200bs", "r\\u200bs"),
    ],
)
@pytest.mark.parametrize("form", [">{}\nAC\n", "@{}\nAC\n+\nII\n", "@{}\nA\nC\n+\nII\n"])
def test_ids(write: WriteReads, form: str, header: str, expected: str) -> None:
    assert reads_of(write(form.format(header))) == [(expected, "AC")]


def test_an_id_that_is_not_utf8(write: WriteReads) -> None:
    assert reads_of(write(b">r\xff1 x\nAC\n>\xe9 y\nGG\n")) == [("r\\xff1", "AC"), ("\\xe9", "GG")]


def test_reads_without_id_are_named_by_their_number(write: WriteReads) -> None:
    log = ParseLog()
    first_file, second_file = write(">a\nAC\n>\nGG\n", "a.fa"), write("> \nTT\n", "b.fa")
    assert reads_of(first_file, second_file, log=log) == [
        ("a", "AC"),
        ("unnamed_2", "GG"),
        ("unnamed_3", "TT"),
    ]


@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\t\n", b"\xef\xbb\xbf\n"])
def test_an_empty_file_holds_no_reads(write: WriteReads, content: bytes) -> None:
    assert reads_of(write(content), write(">a\nA\n", "b.fa")) == [("a", "A")]


def test_a_record_of_many_blocks(write: WriteReads) -> None:
    bases = "ACGTN" * 5000
    assert reads_of(write(f">a\n{bases}\n>b\nAC\n"), block_bytes=64) == [("a", bases), ("b", "AC")]
    quality = "I" * len(bases)
    assert reads_of(write(f"@a\n{bases}\n+\n{quality}\n@b\nAC\n+\nII\n"), block_bytes=64) == [
        ("a", bases),
        ("b", "AC"),
    ]


# what is refused


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b"\x00\x01\x02", b"LOCUS  X\n", b"ACGT\n", b"# x\n>a\nAC\n", b"\xfe\xff>"],
)
def test_neither_fasta_nor_fastq(write: WriteReads, content: bytes) -> None:
    error = refusal(write(content))
    assert "neither FASTA nor FASTQ" in str(error)
    assert str(error).startswith(str(error.file))


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"@HD\tVN:1.6\nr1\t4\n", "SAM"), (b"BAM\1xx", "BAM"), (b"PK\3\4xx", "zip")],
)
def test_zip_archives_and_alignments_are_named_in_the_error(
    write: WriteReads, content: bytes, word: str
) -> None:
    assert word in str(refusal(write(content)))


BROKEN_FASTQ = {
    "quality too short": ("@b\nACGT\n+\nIII\n", "b"),
    "quality too long": ("@b\nACGT\n+\nIIIII\n", "b"),
    "no plus line": ("@b\nACGT\nIIII\n", "b"),
    "other name after plus": ("@b\nACGT\n+c\nIIII\n", "b"),
    "blank within bases": ("@b\nAC GT\n+\nIIIII\n", "b"),
    "no at sign": ("b\nACGT\n+\nIIII\n", ""),
}


@pytest.mark.parametrize("broken", BROKEN_FASTQ.values(), ids=BROKEN_FASTQ.keys())
def test_a_broken_fastq_record_is_named(write: WriteReads, broken: tuple[str, str]) -> None:
    text, name = broken
    path = write(f"@a\nAC\n+\nII\n{text}@c\nGG\n+\nII\n@d\nTT\n+\nII\n")
    error = refusal(path)
    assert (error.file, error.line, error.read_id) == (path, 5, name)
    assert "expected '@id', bases, '+'" in str(error)


@pytest.mark.parametrize("broken", BROKEN_FASTQ.values(), ids=BROKEN_FASTQ.keys())
def test_reading_goes_on_after_a_broken_record(write: WriteReads, broken: tuple[str, str]) -> None:
    path = write(f"@a\nAC\n+\nII\n{broken[0]}@c\nGG\n+\nII\n@d\nTT\n+\nII\n")
    reads, log, errors = skipping(path)
    assert reads == [("a", "AC"), ("c", "GG"), ("d", "TT")]
    assert log.skipped_by_file.total() == len(errors) == 1
    assert (errors[0].file, errors[0].line) == (path, 5)


def test_fastq_that_ends_within_a_record(write: WriteReads) -> None:
    for end in ("@b", "@b\nACGT", "@b\nACGT\n+", "@b\nACGT\n+\nII"):
        path = write(f"@a\nAC\n+\nII\n{end}")
        assert (refusal(path).line, refusal(path).read_id) == (5, "b")
        reads, log, _ = skipping(path)
        assert (reads, log.skipped_by_file.total()) == ([("a", "AC")], 1)


@pytest.mark.parametrize("first", ["", ";comment\n"], ids=["plain", "with a comment"])
@pytest.mark.parametrize("block_bytes", [50, 1 << 20])
def test_a_cut_off_file_never_gives_half_a_record(
    write: WriteReads, first: str, block_bytes: int
) -> None:
    letters = random.Random(0).choices("ACGT", k=20_000)
    records = [(f"r{i}", "".join(letters[i * 100 : i * 100 + 100])) for i in range(200)]
    compressed = gzip.compress(
        (first + "".join(f">{name}\n{bases}\n" for name, bases in records)).encode()
    )
    for n_lost in (12, 100, 1000, 3000):
        path = write(compressed[:-n_lost])
        assert "cut off" in str(refusal(path))
        errors: list[InputError] = []
        reads = reads_of(path, log=ParseLog("skip", errors.append), block_bytes=block_bytes)
        assert 0 < len(reads) < 200
        assert reads == records[: len(reads)]
        assert len(errors) == 1


def test_text_before_the_first_header(write: WriteReads) -> None:
    path = write(";comment\nACGT\n>a\nAC\n")
    assert (refusal(path).line, "before the first header" in str(refusal(path))) == (2, True)
    with pytest.raises(InputError, match="before the first header"):
        skipping(path)


@pytest.mark.parametrize("form", [">{}\n{}\n", "@{}\n{}\n+\nIIIIII\n"])
@pytest.mark.parametrize("bases", ["ACGEAC", "acgeac", "ACG*AC", "ACG1AC", "ACG\x00AC", "ACGé"])
def test_illegal_letters_are_refused(write: WriteReads, form: str, bases: str) -> None:
    good = form.format("good", "ACGTAC")
    path = write(good + form.format("bad", bases) + good.replace("good", "last"))
    if "é" in bases and form.startswith("@"):
        path = write(
            good + "@bad\nACGé\n+\nIIIII\n" + good.replace("good", "last")
        )  # two bytes, five in all
    error = refusal(path)
    assert error.read_id == "bad"
    assert error.line == good.count("\n") + 1
    assert "base 4" in str(error)
    assert "protein" in str(error)
    reads, log, _ = skipping(path)
    assert ([name for name, _ in reads], log.skipped_by_file.total(), log.n_reads) == (
        ["good", "last"],
        1,
        2,
    )


@pytest.mark.parametrize("text", [">{}\nEE\n", "@{}\nAC\n+\nI\n", "@{}\nEE\n+\nII\n"])
def test_messages_stay_short_and_printable(write: WriteReads, text: str) -> None:
    message = str(refusal(write(text.format("long\x07\x1b[31m" + "x" * 1_000_000))))
    assert len(message) < 1500
    assert message.isprintable()


# equality with Biopython, block by block


def by_biopython(text: str) -> Pairs:
    handle = io.StringIO(text)
    if text.startswith("@"):
        return [
            ((title.split() or [""])[0], bases) for title, bases, _ in FastqGeneralIterator(handle)
        ]
    return [((title.split() or [""])[0], bases) for title, bases in SimpleFastaParser(handle)]


words = st.text(alphabet="abcXYZ019/|:_", min_size=1, max_size=8)
bases = st.text(alphabet="ACGTNacgtn-", max_size=40)
quality_letters = st.characters(min_codepoint=33, max_codepoint=126)


@st.composite
def fasta_texts(draw: st.DrawFn) -> str:
    pieces = []
    for _ in range(draw(st.integers(1, 8))):
        pieces.append(f">{draw(words)}{draw(st.sampled_from(['', ' x', chr(9) + 'y z', ' ']))}\n")
        pieces += [f"{line}\n" for line in draw(st.lists(bases, max_size=4))]
    text = "".join(pieces)
    return text.removesuffix("\n") if draw(st.booleans()) else text


@st.composite
def fastq_texts(draw: st.DrawFn) -> str:
    pieces = []
    for _ in range(draw(st.integers(1, 8))):
        title = draw(words) + draw(st.sampled_from(["", " x", "\ty z"]))
        letters = draw(bases)
        quality = "".join(
            draw(st.lists(quality_letters, min_size=len(letters), max_size=len(letters)))
        )
        cut = draw(st.integers(1, 40)) if letters and draw(st.booleans()) else 40
        rows = [letters[i : i + cut] for i in range(0, len(letters), cut)] or [""]
        marks = [quality[i : i + cut] for i in range(0, len(quality), cut)] or [""]
        plus_title = draw(st.sampled_from(["", title]))
        pieces.append("\n".join([f"@{title}", *rows, f"+{plus_title}", *marks]) + "\n")
    return "".join(pieces)


@settings(max_examples=100)
@given(st.one_of(fasta_texts(), fastq_texts()), st.integers(1, 400), st.booleans())
def test_reads_equal_those_of_biopython_with_any_blocks(
    tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int, windows: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "equal.txt"
    path.write_bytes((text.replace("\n", "\r\n") if windows else text).encode())
    try:
        expected_reads = by_biopython(text)
    except ValueError:
        with pytest.raises(InputError):
            reads_of(str(path), block_bytes=block_bytes)
        return
    assert reads_of(str(path), block_bytes=block_bytes) == expected_reads


@settings(max_examples=100)
@given(st.one_of(fasta_texts(), fastq_texts()), st.integers(1, 400))
def test_lines_and_records_do_not_depend_on_blocks(
    tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_text(text)
    lines = text.split("\n")
    try:
        for batch in parse((str(path),), block_bytes=block_bytes):
            for i in range(len(batch)):
                header = lines[int(batch.lines[i]) - 1]
                assert header.split()[0][1:] == batch.id(i)
                if batch.part is None or batch.part.is_first:
                    assert batch.records[i].decode().split("\n")[0].rstrip() == header.rstrip()
    except InputError:
        return  # the text is broken; what is said of it is tested elsewhere


broken_texts = st.text(alphabet="@>+;ACGTNE \n\r\t!I\u00a0", max_size=200)


@settings(max_examples=100)
@given(
    st.lists(st.one_of(fasta_texts(), fastq_texts(), broken_texts), min_size=1, max_size=4),
    st.integers(1, 200),
)
@example([">\r>\r@"], 1)
def test_messages_and_counts_do_not_depend_on_blocks(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())
    files = tuple(str(path) for path in sorted(folder.iterdir()))
    for on_error in ("stop", "skip"):
        outcomes = []
        for size in (block_bytes, 1 << 20):
            errors: list[InputError] = []
            log = ParseLog(on_error, errors.append)
            reads: Pairs = []
            message = ""
            try:
                reads = reads_of(*files, log=log, block_bytes=size)
            except InputError as error:
                message = str(error)
            counts = (log.n_reads, log.reads_by_file, log.skipped_by_file)
            outcomes.append(
                (reads, message, [*map(str, errors)], counts if not message else ())
            )  # who stops may have seen more
        assert outcomes[0] == outcomes[1]


# anything at all

starts = st.sampled_from(
    [
        b"",
        b">",
        b"@",
        b";",
        b">a\n",
        b"@a\nAC\n+\nII\n",
        b"\x1f\x8b\x08",
        b"BZh9",
        b"\x28\xb5\x2f\xfd",
    ]
)
noise = st.one_of(
    st.binary(max_size=300), st.text(alphabet="@>+;ACGTN \n\r\t!I", max_size=300).map(str.encode)
)


@settings(max_examples=200)
@example(b"", b"@\n" * 150, 64)
@example(b"", b"@a\n+\n" * 80, 64)
@given(starts, noise, st.integers(1, 300))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, start: bytes, rest: bytes, block_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.bin"
    path.write_bytes(start + rest)
    reads_before_error, message = None, ""
    try:
        reads_before_error = reads_of(str(path), block_bytes=block_bytes)
    except InputError as error:
        message = str(error)
    assert reads_before_error is not None or (str(path) in message and "\n" not in message)
    log = ParseLog("skip")
    try:
        reads_kept = reads_of(str(path), log=log, block_bytes=block_bytes)
    except InputError:
        assert reads_before_error is None
        return
    assert (
        log.skipped_by_file.total() > 0
        if reads_before_error is None
        else (reads_kept, log.skipped_by_file.total()) == (reads_before_error, 0)
    )


# real files that break parsers

NASTY_READS = {  # file -> reads that are in it, None where it must be refused
    "N_runs_lassa_consensus.fasta": 2,
    "alignment_with_gaps_lassa.fasta.gz": 15,
    "bgzf.fastq.gz": 3,
    "blank_only.fasta": 0,
    "comment_lines.fasta": None,
    "crlf_example.fastq": 3,
    "crlf_plasmid.NC_002127.1.fasta": 1,
    "crlf_plasmid.NC_002127.1.fasta.gz": 1,
    "crlf_reads.fastq.gz": 10,
    "duplicate_ids_blank_lines.fasta": 5,
    "duplicate_ids_phage.fasta": 2,
    "empty_file.fasta": 0,
    "empty_id_and_seq.fasta": 11,
    "empty_id_and_seq2.fasta": 3,
    "error_control_chars_quality.fastq": None,
    "error_ids_differ.fastq": None,
    "error_short_quality.fastq": None,
    "error_truncated_at_quality.fastq": None,
    "error_wrapped_invalid.fastq": 1,
    "half_N_contig.MIIJ01000039.fasta.gz": 1,
    "interleaved.fastq": 10,
    "iupac_and_N_lowercase_zika34.fasta.gz": 34,
    "lowercase_hiv1.fasta": 1,
    "lowercase_iupac.DQ234790.fasta": 1,
    "messy_headers_h5n1.fasta": 8,
    "multi_member.fastq.gz": 3,
    "multiline.fastq": 2,
    "not_really_gzip.fastq.gz": 1,
    "plus_line_repeats_name.fastq": None,
    "poly_G.fasta": 1,
    "proteins_not_dna.fasta": None,
    "rna_letters.fastq": 4,
    "tricky_at_signs.fastq": 4,
    "truncated.fastq.gz": None,
    "truncated_intact_twin.fastq.gz": 100,
    "wildcard_letters.fasta": 2,
    "wrapped.fastq": 3,
    "zero_length_read.fastq": 5,
}
NASTY_KEPT = {  # refused file -> reads kept and records skipped when going on
    "comment_lines.fasta": None,  # no FASTA by its first line: never skipped as a whole
    "error_control_chars_quality.fastq": (0, 1),
    "error_ids_differ.fastq": (4, 1),
    "error_short_quality.fastq": (4, 1),
    "error_truncated_at_quality.fastq": (4, 1),
    "plus_line_repeats_name.fastq": (0, 2),
    "proteins_not_dna.fasta": (0, 12),
    "truncated.fastq.gz": (20, 1),
}


def test_the_list_of_nasty_files_is_complete(real_data: Path) -> None:
    assert {path.name for path in (real_data / "nasty").iterdir()} == set(NASTY_READS)


@pytest.mark.parametrize("name", [name for name, count in NASTY_READS.items() if count is not None])
def test_nasty_files_that_can_be_read(real_data: Path, name: str) -> None:
    assert len(reads_of(str(real_data / "nasty" / name))) == NASTY_READS[name]


@pytest.mark.parametrize("name", NASTY_KEPT)
def test_nasty_files_that_are_refused(real_data: Path, name: str) -> None:
    path = str(real_data / "nasty" / name)
    error = refusal(path)
    assert path in str(error)
    kept_reads = NASTY_KEPT[name]
    if kept_reads is None:
        with pytest.raises(InputError):
            skipping(path)
        return
    reads, log, errors = skipping(path)
    assert (len(reads), log.skipped_by_file.total(), len(errors)) == (*kept_reads, kept_reads[1])


def test_a_truncated_file_gives_its_whole_records(real_data: Path) -> None:
    nasty = real_data / "nasty"
    all_reads = reads_of(str(nasty / "truncated_intact_twin.fastq.gz"))
    reads, _, errors = skipping(str(nasty / "truncated.fastq.gz"))
    assert reads == all_reads[: len(reads)]
    assert "cut off" in str(errors[0])


def test_the_lower_case_genome_is_the_upper_case_one(real_data: Path) -> None:
    lower = reads_of(str(real_data / "nasty" / "lowercase_hiv1.fasta"))
    upper = reads_of(str(real_data / "viral" / "hiv_1.NC_001802.1.fasta.gz"))
    assert lower[0][1].upper() == upper[0][1]


@pytest.mark.parametrize(
    ("folder", "min_bases", "max_bases"),
    [
        ("viral", 0, 6e6),
        ("host", 0, 6e6),
        ("contigs", 0, 6e6),
        ("reads", 0, 2e6),
        pytest.param("reads", 2e6, 6e6, marks=pytest.mark.slow),
    ],
)
def test_counts_of_the_real_files(
    real_data: Path, folder: str, min_bases: float, max_bases: float
) -> None:
    rows = [line.split("\t") for line in (real_data / "manifest.tsv").read_text().splitlines()]
    columns = rows[0]
    for row in rows[1:]:
        entry = dict(zip(columns, row, strict=False))
        if (
            not entry["file"].startswith(folder)
            or not entry["records"].isdecimal()
            or not min_bases <= int(entry["bases"]) < max_bases
        ):
            continue
        batches = list(parse((str(real_data / entry["file"]),)))
        assert sum(len(batch) for batch in batches) == int(entry["records"]), entry["file"]
        assert sum(len(batch.bases.data) for batch in batches) == int(entry["bases"]), entry["file"]


@pytest.mark.parametrize("before", ["", "@w\nACGT\nACGT\n+\nIIII\nIIII\n"])
@pytest.mark.parametrize(
    "good", ["@good\nACGTACGT\n+\nIIIIIIII\n", "@good\nACGT\nACGT\n+good\nIII\nIIIII\n"]
)
def test_a_record_without_header_does_not_swallow_a_good_one(
    write: WriteReads, before: str, good: str
) -> None:
    """This holds on the fast and on the slow path, and for wrapped records."""
    bad = "bad_no_at\nACGTACGT\n+\nIIIIIIII\n"
    errors: list[InputError] = []
    reads = reads_of(
        write(f"{before}{good}{bad}@next\nACGT\n+\nIIII\n"), log=ParseLog("skip", errors.append)
    )
    assert [name for name, _ in reads][-2:] == ["good", "next"]
    assert [error.line for error in errors] == [(before + good).count("\n") + 1]
