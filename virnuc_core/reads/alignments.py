"""Convert BAM, CRAM and SAM to the same FASTQ text that `samtools fastq` would write.

Each sequencing read is converted once, on the strand from which it was sequenced. pysam reads the
alignment records from a pipe. So each file is read only once, and no temporary copy is written.
"""

import functools
import gzip
import importlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from virnuc_core.allowed_paths import allowed_folders, require_allowed
from virnuc_core.errors import InputError
from virnuc_core.system_errors import (
    UNUSABLE_PATH_ERRORS,
    is_regular_file,
    read_with_retries,
    require_readable,
)

# Bits of the FLAG field of the SAM format.
# Secondary (0x100) or supplementary (0x800): the read's primary record is elsewhere in the file.
NOT_PRIMARY: Final = 0x900
REVERSE: Final = 0x10  # aligned to the reverse strand
PAIRED: Final = 0x1  # sequenced as one of a pair
_MATE_BITS: Final = 0xC0  # first mate (0x40) or second mate (0x80)
_MATE_SUFFIXES: Final = {0x40: "/1", 0x80: "/2"}  # by the mate bits of FLAG
_COMPLEMENT: Final = str.maketrans("ACGTMRWSYKVHDBN", "TGCAKYWSRMBDHVN")
_NO_QUALITY: Final = "B"  # for each base of a record without qualities, as samtools writes it
_QUALITY_ZERO: Final = 33  # ASCII code of the letter for quality 0 (Phred+33)
# Every complete BAM or CRAM file ends with these bytes (the end-of-file markers of the SAM/BAM and
# CRAM specifications). A file without them was cut off.
_END_MARKS: Final = {
    "BAM": bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000"),
    "CRAM": b"\xe0EOF\0",
}
_TAIL_BYTES: Final = 40  # kept to search for the marker: longer than either of them
_TEXT_LETTERS: Final = 1 << 20  # letters of FASTQ text that are handed on together
_PIECE_BYTES: Final = 1 << 20  # read at a time if a file is only tried
LATE_PAIRS_WARNING: Final = (
    "%s: the first read of a pair is record %d, after the %d records that show whether a file "
    "holds pairs; each read is judged by itself unless --interleaved is given"
)
_N_PEEKED_RECORDS: Final = 1000  # paired records that show whether mates are neighbours
_N_SEARCHED_RECORDS: Final = 1_000_000  # records among which the first paired one is searched
# How a block of BGZF begins: gzip with an extra field (flag 4) that begins with this mark
_BGZF_MARK: Final = b"BC\2\0"
_BGZF_MARK_POSITION: Final = 12


log = logging.getLogger(__name__)


class FastqPiece(NamedTuple):
    """A text of FASTQ that holds whole records only."""

    text: str
    n_left_out: int  # secondary and supplementary alignments left out since the previous piece


class SampleFilter(NamedTuple):
    """Selects the reads of one sample. The read group of a read tells its sample."""

    sample: str = ""  # empty for the reads of all samples
    ungrouped_sample: str = ""  # the sample to which reads without a read group belong

    def select(self, alignments: Any) -> Iterator[Any]:
        """Iterate over the alignment records that belong to the sample.

        Args:
            alignments: An open `pysam.AlignmentFile`. Its records are read once, in file order.

        Returns:
            The records of `self.sample`, or all records if `self.sample` is empty.
        """
        records: Iterator[Any] = alignments.fetch(until_eof=True)
        if not self.sample:
            return records
        groups = _samples_by_group(alignments)
        return (
            record
            for record in records
            if (_sample_of_record(record, groups) or self.ungrouped_sample) == self.sample
        )


ALL_SAMPLES: Final = SampleFilter()


# Cached, because the check before a run and the run itself both need the result, and it may take a
# pass over the whole file.
@functools.cache
def find_samples(file: str, format_: str, ungrouped_sample: str, _changed_ns: int) -> list[str]:
    """List the samples of an alignment file, according to its read groups (@RG lines).

    Damage of the file is not reported here, because the later reading of the file reports it. If
    the header cannot be read, the result is `[ungrouped_sample]`.

    Args:
        file: A BAM, CRAM or SAM file.
        format_: `BAM`, `CRAM` or `SAM`, for messages.
        ungrouped_sample: The sample to which reads without a read group belong. It is part of the
            result if there is such a read. The file is read up to the first of them.
        _changed_ns: The modification time of the file. It is part of the key of the cache, so that
            a changed file is read again.

    Returns:
        The sample name (SM) of each read group. A read group without SM is listed by its ID.

    Raises:
        InputError: The file has no read groups, or pysam is not installed.
    """
    samples: dict[str, None] = {}  # a dict has no duplicates and keeps the order
    pysam = import_pysam(format_, file)

    def read() -> None:
        """Fill `samples` from the header and the records. It may be called again."""
        samples.clear()
        samples[ungrouped_sample] = None
        with _open_alignments(pysam, file) as alignments:
            _require_allowed_references(alignments, format_, file)
            groups = _samples_by_group(alignments)
            if not groups:
                raise InputError(
                    "has no read groups (@RG)",
                    file=file,
                    hint="--sample-from name makes each whole file a sample",
                )
            samples.clear()
            samples.update(dict.fromkeys(groups.values()))
            for record in alignments.fetch(until_eof=True):
                is_primary = not record.flag & NOT_PRIMARY
                if is_primary and _sample_of_record(record, groups) is None:
                    samples[ungrouped_sample] = None
                    break

    _read_up_to_damage(Path(file), read)
    return list(samples)


def _read_up_to_damage(path: Path, read: Callable[[], None]) -> None:
    """Call a function that reads an alignment file by pysam. At damage it ends without an error.

    The errors of pysam do not tell damage from a disk or file server that fails to read. So after
    an error the whole file is read once without pysam. If that succeeds, `read` is called again,
    and another error is damage.

    Args:
        path: The file.
        read: Reads the file, and keeps what it finds before the damage. It begins anew if it is
            called again.

    Raises:
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """
    require_readable(path)
    with suppress(OSError, ValueError):
        read()
        return
    if not is_regular_file(path):  # the data of a pipe could not be read a second time
        return
    with suppress(FileNotFoundError, NotADirectoryError):
        read_with_retries(path, lambda: _read_to_end(path))
    with suppress(OSError, ValueError):
        read()


def _read_to_end(path: Path) -> None:
    """Read a whole file and keep nothing of it."""
    with path.open("rb", buffering=0) as file:
        while file.read(_PIECE_BYTES):
            pass


def _samples_by_group(alignments: Any) -> dict[str, str]:
    """Return the sample of each read group of an open pysam file, by the ID of the read group.

    A read group that names no sample (SM) is its own sample, named by its ID.
    """
    groups = alignments.header.to_dict().get("RG", ())
    return {group["ID"]: group.get("SM") or group["ID"] for group in groups if "ID" in group}


def _sample_of_record(record: Any, groups: dict[str, str]) -> str | None:
    """Return the sample of an alignment record; None if its read group is missing or unknown."""
    if not record.has_tag("RG"):
        return None
    return groups.get(record.get_tag("RG"))


def mates_follow(
    file: str,
    format_: str,
    sample_filter: SampleFilter = ALL_SAMPLES,
) -> bool | None:
    """Return whether the two mates of a pair are next to each other in an alignment file.

    The first 1,000 paired records decide. Sequencers and `samtools collate` leave mates next to
    each other. Sorting by position separates them. Single reads may come before the first pair.

    Args:
        file: A BAM, CRAM or SAM file.
        format_: `BAM`, `CRAM` or `SAM`, for messages.
        sample_filter: The sample whose reads are considered.

    Returns:
        True or False; None if none of the first million records is paired or the file is damaged.

    Raises:
        InputError: pysam is not installed.
    """
    names_of_paired: list[str] = []
    is_sorted_by_position = False
    pysam = import_pysam(format_, file)

    def read() -> None:
        """Note the order of the file and the names of its first paired records."""
        nonlocal is_sorted_by_position
        names_of_paired.clear()
        with _open_alignments(pysam, file) as alignments:
            _require_allowed_references(alignments, format_, file)
            header = alignments.header.to_dict()
            is_sorted_by_position = header.get("HD", {}).get("SO") == "coordinate"
            records = sample_filter.select(alignments)
            for record in islice(records, _N_SEARCHED_RECORDS):
                if _is_of_pair(record):
                    names_of_paired.append(record.query_name)
                    break
            if not names_of_paired:
                return
            # Its mate may lie behind the records that were searched.
            for record in islice(records, _N_SEARCHED_RECORDS):
                if _is_of_pair(record):
                    names_of_paired.append(record.query_name)
                    if len(names_of_paired) >= _N_PEEKED_RECORDS:
                        break

    _read_up_to_damage(Path(file), read)
    if not names_of_paired:
        return None
    has_neighbours = any(name == next_name for name, next_name in pairwise(names_of_paired))
    # In a file that is sorted by position, some mates are neighbours by chance.
    return has_neighbours and not is_sorted_by_position


def _is_of_pair(record: Any) -> bool:
    """Return whether an alignment record is the primary one of a read that has a mate."""
    return bool(record.flag & PAIRED) and not record.flag & NOT_PRIMARY


def is_plain_gzip(head: bytes) -> bool:
    """Return whether a file is gzipped, but not in the blocks of BGZF that pysam expects.

    Args:
        head: The first bytes of the file.
    """
    mark_end = _BGZF_MARK_POSITION + len(_BGZF_MARK)
    return head.startswith(b"\x1f\x8b") and head[_BGZF_MARK_POSITION:mark_end] != _BGZF_MARK


@contextmanager
def _open_alignments(pysam: Any, file: str) -> Iterator[Any]:
    """Open an alignment file, and close it at the end. A BAM file may be in plain gzip.

    Args:
        pysam: The package as returned by `import_pysam`.
        file: The path.

    Yields:
        A `pysam.AlignmentFile`, whose records can be read once, in file order.
    """
    with Path(file).open("rb") as stream:
        is_gzip = is_plain_gzip(stream.read(_BGZF_MARK_POSITION + len(_BGZF_MARK)))
    # check_sq=False: a file of unaligned reads names no reference sequences (@SQ).
    # ignore_truncation=True: a file may lack the block that marks its end.
    if not is_gzip:
        with pysam.AlignmentFile(file, check_sq=False, ignore_truncation=True) as alignments:
            yield alignments
        return
    with gzip.open(file, "rb") as unpacked:
        feeder = _PipeFeeder(iter(functools.partial(unpacked.read, _PIECE_BYTES), b""))
        with open(feeder.outlet, "rb", 0) as source:  # noqa: PTH123 - a descriptor
            feeder.start()
            with pysam.AlignmentFile(source, check_sq=False) as alignments:
                yield alignments
        feeder.join()


def _require_allowed_references(alignments: Any, format_: str, file: str) -> None:
    """Raise an error if the header of a CRAM file names a reference that may not be opened.

    CRAM stores reads as differences from a reference genome. The header may name the file with the
    genome (tag UR), and the library behind pysam opens this file when it decodes reads. So whoever
    writes a header could make this process read any file. If paths are limited (`VIRNUC_ROOTS`),
    the reference must lie in an allowed folder. A file that does not exist is not opened, so its
    name does not matter: headers often name the path of another machine.

    Args:
        alignments: The open pysam file. No record may have been read from it.
        format_: `BAM`, `CRAM` or `SAM`. BAM and SAM need no reference.
        file: The name of the file for messages.

    Raises:
        ConfigError: A reference exists, but lies outside the allowed folders.
        InputError: A reference is an address.
    """
    if format_ != "CRAM" or not allowed_folders():
        return
    names: dict[str, None] = {}  # many sequences name the same file: a dict has no duplicates
    for sequence in alignments.header.to_dict().get("SQ", ()):
        names[str(sequence.get("UR", ""))] = None
    for name in names:
        path = name.removeprefix("file:")
        if "://" in path:
            raise InputError(
                f"its header names a reference at an address ({path})",
                file=file,
                hint="fetch the reference and set REF_PATH, or use samtools fastq --reference",
            )
        if path and _may_be_opened(Path(path)):
            require_allowed(Path(path), f"{file}: the reference that its header names")


def _may_be_opened(path: Path) -> bool:
    """Return whether a library that is given this path may be able to open a file, now or later.

    Raises:
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    try:
        read_with_retries(path, path.lstat, expected_errors=UNUSABLE_PATH_ERRORS)
    except OSError:
        # There is no such file, no file can have this name, or this user may not reach it.
        return False
    return True


def import_pysam(format_: str, file: str) -> Any:
    """Import the optional package pysam and return it.

    As a side effect, pysam no longer prints its own messages: our errors describe the damage.

    Args:
        format_: The format of the file that needs pysam, for the message.
        file: The file that needs pysam, for the message.

    Returns:
        The module.

    Raises:
        InputError: pysam is not installed.
    """
    try:
        pysam = importlib.import_module("pysam")
    except ImportError as error:
        raise InputError(
            f"this is {format_}, but the package pysam is not installed",
            file=file,
            hint="install it, or use samtools fastq",
        ) from error
    pysam.set_verbosity(0)
    warnings.filterwarnings("ignore", message="no BGZF EOF marker")  # `fastq` says so itself
    return pysam


def fastq(
    pysam: Any,
    pieces: Iterator[bytes],
    format_: str,
    file: str,
    sample_filter: SampleFilter = ALL_SAMPLES,
) -> Iterator[FastqPiece]:
    """Convert an alignment file to FASTQ text while its bytes are being read.

    A thread writes the bytes into a pipe, and pysam reads the pipe. Secondary and supplementary
    alignments are left out and counted, so that each read occurs once.

    Args:
        pysam: The package as returned by `import_pysam`.
        pieces: The bytes of the file, in order. BAM may also be decompressed, without its blocks.
        format_: `BAM`, `CRAM` or `SAM`.
        file: The name of the file for messages.
        sample_filter: The reads to convert.

    Yields:
        FASTQ text of about one million letters at a time; records are never split.

    Raises:
        InputError: The data is damaged or ends early. All records before the damage were yielded.
    """
    feeder = _PipeFeeder(pieces)
    n_records = 0
    name = ""  # query name of the last record, for the message about damage
    texts: list[str] = []
    n_letters = 0
    n_left_out = 0
    has_pairs = False
    try:
        with open(feeder.outlet, "rb", 0) as source:  # noqa: PTH123 - a descriptor
            feeder.start()
            # check_sq=False: a file of unaligned reads names no reference sequences (@SQ).
            with pysam.AlignmentFile(source, check_sq=False, ignore_truncation=True) as alignments:
                _require_allowed_references(alignments, format_, file)
                for record in sample_filter.select(alignments):
                    n_records += 1
                    name = record.query_name
                    if record.flag & NOT_PRIMARY:
                        n_left_out += 1
                        continue
                    if not has_pairs and record.flag & PAIRED:
                        has_pairs = True
                        if n_records > _N_SEARCHED_RECORDS:  # see `mates_follow`
                            log.warning(LATE_PAIRS_WARNING, file, n_records, _N_SEARCHED_RECORDS)
                    text = _fastq_record(record)
                    texts.append(text)
                    n_letters += len(text)
                    if n_letters >= _TEXT_LETTERS:
                        yield FastqPiece("".join(texts), n_left_out)
                        texts = []
                        n_letters = 0
                        n_left_out = 0
        feeder.join()
        if not feeder.is_complete:
            raise OSError  # handled below like damage that pysam has found
        # pysam was told to ignore truncation, so that it yields all records before the end. Check
        # here that the file is complete. SAM and decompressed BAM have no marker of their end.
        is_decompressed = feeder.head.startswith(b"BAM\1")
        end_mark = b"" if is_decompressed else _END_MARKS.get(format_, b"")
        if end_mark not in feeder.tail:
            if format_ == "CRAM":
                raise OSError
            # Every block and record is complete, as in files of programs that write no marker.
            log.warning(
                "%s: %d records were read, but the block that ends a BAM file is missing; "
                "if the file was copied, compare its size with the original",
                file,
                n_records,
            )
    except (OSError, ValueError) as error:
        # Records that were collected before the damage are good.
        yield FastqPiece("".join(texts), n_left_out)
        hint = "copy it again"
        if format_ == "CRAM":
            hint = "is its reference at hand (REF_PATH)? else use samtools fastq --reference"
        raise InputError(
            f"the {format_} data is damaged, or ends early, after record {n_records:,}",
            file=file,
            read_id=name,
            hint=hint,
        ) from error
    finally:
        # After an error the thread may be blocked in reading standard input, which cannot be
        # interrupted. It is a daemon thread: do not wait longer for it.
        feeder.join(timeout_s=1.0)
    yield FastqPiece("".join(texts), n_left_out)


def _fastq_record(record: Any) -> str:
    """Format one alignment record as a FASTQ record, on the strand that was sequenced.

    Bases of an alignment to the reverse strand are complemented and reversed. Missing qualities
    become the letter `B` for each base. The ids of mates end in `/1` and `/2`.
    """
    bases = record.query_sequence or ""
    if len(bases) > 1:
        quality = record.query_qualities_str
    else:
        # `query_qualities_str` has a bug for reads of one base: pysam overwrites the letter of a
        # string that Python shares between all equal one-letter strings, and so corrupts this
        # letter everywhere in the process. Build the text from the numbers instead.
        quality = "".join(chr(_QUALITY_ZERO + value) for value in record.query_qualities or ())
    if not quality:
        quality = _NO_QUALITY * len(bases)
    if record.flag & REVERSE:
        bases = bases[::-1].translate(_COMPLEMENT)
        quality = quality[::-1]
    suffix = _MATE_SUFFIXES.get(record.flag & _MATE_BITS, "")
    return f"@{record.query_name}{suffix}\n{bases}\n+\n{quality}\n"


class _PipeFeeder:
    """Writes bytes into a pipe in a thread, because pysam can only read from a file descriptor.

    Attributes:
        outlet: The file descriptor from which to read. The caller opens and closes it.
        head: The first bytes that were written.
        tail: The last `_TAIL_BYTES` bytes that were written.
        is_complete: All bytes were written without an error.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        """Open the pipe. Nothing is written before `start`.

        Args:
            pieces: The bytes to write, in order. The thread of `start` draws them.
        """
        self.outlet, self._inlet = os.pipe()
        self.head = b""
        self.tail = b""
        self.is_complete = False
        self._pieces = pieces
        self._thread = threading.Thread(target=self._feed, daemon=True)

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended: all is written, or the reading end was closed."""
        self._thread.join(timeout_s)

    def _feed(self) -> None:
        """Write all pieces into the pipe, then close it; this is the body of the thread.

        No error leaves the thread. After an error `is_complete` stays false, and `fastq` reports
        that the file ended early.
        """
        with suppress(Exception), open(self._inlet, "wb") as inlet:  # noqa: PTH123 - a descriptor
            for piece in _without_padding(self._pieces):
                self.head = self.head or piece[:_TAIL_BYTES]
                # The end of the file has the marker by which `fastq` sees that nothing is missing.
                self.tail = (self.tail + piece)[-_TAIL_BYTES:]
                inlet.write(piece)
            self.is_complete = True


def _without_padding(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a file without the zero bytes behind the last block of a BAM file.

    Tape drives and some file servers add such bytes. The last block itself ends with zeros.
    """
    end_mark = _END_MARKS["BAM"]
    without_zeros = end_mark.rstrip(b"\0")
    tail = b""  # the last bytes before `zeros`
    zeros = b""  # zeros that are held back, because it is not known whether more follows
    for piece in pieces:
        content = piece.rstrip(b"\0")
        if content:
            yield zeros + content
            tail = (tail + zeros + content)[-len(without_zeros) :]
            zeros = b""
        zeros += piece[len(content) :]
    if tail == without_zeros:
        zeros = zeros[: len(end_mark) - len(without_zeros)]
    yield zeros
