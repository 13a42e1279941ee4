"""Read BAM, CRAM and SAM as the FASTQ that `samtools fastq` makes of them.

Each read comes once, on the strand from which it was sequenced. pysam gets the records one by one
from a pipe, so that every file is read once, wherever it comes from, and is kept nowhere.
"""

import functools
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from virnuc_core.errors import InputError
from virnuc_core.system_errors import require_readable

NOT_PRIMARY: Final = 0x900  # secondary and supplementary: another record has the read, too
REVERSE: Final = 0x10
_MATE_BITS: Final = 0xC0
_MATE_SUFFIXES: Final = {0x40: "/1", 0x80: "/2"}  # by the mate bits of a flag
_COMPLEMENT: Final = str.maketrans("ACGTMRWSYKVHDBN", "TGCAKYWSRMBDHVN")
_NO_QUALITY: Final = "B"  # for each base of a record without qualities, as samtools writes it
_QUALITY_ZERO: Final = 33  # code of the letter for quality 0
# found among the last bytes of a complete file
_END_MARKS: Final = {
    "BAM": bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000"),
    "CRAM": b"\xe0EOF\0",
}
_TAIL_BYTES: Final = 40
_TEXT_LETTERS: Final = 1 << 20  # of a piece of FASTQ
_N_PEEKED_RECORDS: Final = 1000


class FastqPiece(NamedTuple):
    """Whole records of FASTQ."""

    text: str
    n_left_out: int  # alignments left out since the last piece


class SampleFilter(NamedTuple):
    """A choice of the reads of one sample by their read groups."""

    sample: str = ""  # empty for the reads of all samples
    ungrouped_sample: str = ""  # the sample of reads that have no read group

    def select(self, alignments: Any) -> Iterator[Any]:
        """Return the records of the sample in an open pysam file."""
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


@functools.cache  # a command asks when it checks its input, and again when it starts
def find_samples(file: str, format_: str, ungrouped_sample: str, _changed_ns: int) -> list[str]:
    """Return the samples in a file of alignments, by its read groups.

    Damage is not reported here; it is reported when the reads are parsed. If the file cannot be
    read because of damage, the only sample is `ungrouped_sample`.

    Args:
        file: A BAM, CRAM or SAM file.
        format_: Which of them it is.
        ungrouped_sample: The sample of reads that have no read group. It is among the samples if
            there is such a read; the whole file is read to find one.
        _changed_ns: Modification time of the file. It is part of the cache key, so that a file
            that has changed is read again.

    Returns:
        The sample (SM) of each read group, or its ID if it names no sample.

    Raises:
        InputError: The file has no read groups, or pysam is not installed.
    """
    samples = dict.fromkeys([ungrouped_sample])  # a dict keeps the order and has no duplicates
    pysam = import_pysam(format_, file)
    require_readable(Path(file))
    with suppress(OSError, ValueError), pysam.AlignmentFile(file, check_sq=False) as alignments:
        groups = _samples_by_group(alignments)
        if not groups:
            raise InputError(
                "has no read groups (@RG)",
                file=file,
                hint="--sample-from name makes each whole file a sample",
            )
        samples = dict.fromkeys(groups.values())
        for record in alignments.fetch(until_eof=True):
            is_primary = not record.flag & NOT_PRIMARY
            if is_primary and _sample_of_record(record, groups) is None:
                samples[ungrouped_sample] = None
                break
    return list(samples)


def _samples_by_group(alignments: Any) -> dict[str, str]:
    """Return the sample of each read group of an open pysam file, by the group's ID."""
    groups = alignments.header.to_dict().get("RG", ())
    return {group["ID"]: group.get("SM") or group["ID"] for group in groups if "ID" in group}


def _sample_of_record(record: Any, groups: dict[str, str]) -> str | None:
    """Return the sample of a record; None if it has no read group, or an unknown one."""
    return groups.get(record.get_tag("RG")) if record.has_tag("RG") else None


def mates_follow(
    file: str,
    format_: str,
    sample_filter: SampleFilter = ALL_SAMPLES,
) -> bool | None:
    """Return whether mates follow each other directly, judged by the first records of a file.

    In the output of sequencers and of `samtools collate` they do. In a file that was sorted by
    position they do not.

    Args:
        file: A BAM, CRAM or SAM file.
        format_: Which of them it is.
        sample_filter: Look at these reads only.

    Returns:
        True or false, or None if the first reads have no mates or the file is damaged.

    Raises:
        InputError: pysam is not installed.
    """
    names_of_paired: list[str] = []
    is_sorted_by_position = False
    pysam = import_pysam(format_, file)
    require_readable(Path(file))
    with suppress(OSError, ValueError), pysam.AlignmentFile(file, check_sq=False) as alignments:
        header = alignments.header.to_dict()
        is_sorted_by_position = header.get("HD", {}).get("SO") == "coordinate"
        for record in islice(sample_filter.select(alignments), _N_PEEKED_RECORDS):
            if record.is_paired and not record.flag & NOT_PRIMARY:
                names_of_paired.append(record.query_name)
    if not names_of_paired:
        return None
    has_neighbours = any(name == next_name for name, next_name in pairwise(names_of_paired))
    return has_neighbours and not is_sorted_by_position


def import_pysam(format_: str, file: str) -> Any:
    """Import and return pysam, and switch off the messages that it prints about damaged files.

    Raises:
        InputError: It is not installed. The message names the file that needs it.
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
    return pysam


def fastq(
    pysam: Any,
    pieces: Iterator[bytes],
    format_: str,
    file: str,
    sample_filter: SampleFilter = ALL_SAMPLES,
) -> Iterator[FastqPiece]:
    """Convert alignments to FASTQ.

    Args:
        pysam: The package, see `import_pysam`.
        pieces: The bytes of the file.
        format_: `BAM`, `CRAM` or `SAM`.
        file: The name of the file for messages.
        sample_filter: The reads to convert.

    Yields:
        Pieces of FASTQ, each of whole records.

    Raises:
        InputError: The data is damaged or ends early. All good records were yielded before.
    """
    feeder = _PipeFeeder(pieces)
    n_records = 0
    name = ""  # id of the last record that was read, for the error message
    texts: list[str] = []
    n_letters = 0
    n_left_out = 0
    try:
        with open(feeder.outlet, "rb", 0) as source:  # noqa: PTH123 - a descriptor
            feeder.start()
            with pysam.AlignmentFile(source, check_sq=False, ignore_truncation=True) as alignments:
                for record in sample_filter.select(alignments):
                    n_records += 1
                    name = record.query_name
                    if record.flag & NOT_PRIMARY:
                        n_left_out += 1
                        continue
                    text = _fastq_record(record)
                    texts.append(text)
                    n_letters += len(text)
                    if n_letters >= _TEXT_LETTERS:
                        yield FastqPiece("".join(texts), n_left_out)
                        texts = []
                        n_letters = 0
                        n_left_out = 0
        feeder.join()
        # pysam does not report a file that is cut off between two records.
        if not feeder.is_complete or _END_MARKS.get(format_, b"") not in feeder.tail:
            raise OSError
    except (OSError, ValueError) as error:
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
        # The thread may be waiting for standard input. It is a daemon, so it ends with the process.
        feeder.join(timeout_s=1.0)
    yield FastqPiece("".join(texts), n_left_out)


def _fastq_record(record: Any) -> str:
    """Return one record as FASTQ text, on the strand from which it was sequenced."""
    bases = record.query_sequence or ""
    if len(bases) > 1:
        quality = record.query_qualities_str
    else:
        # For a single letter, pysam overwrites an object that Python shares between all strings
        # of that letter. So the text is built here.
        quality = "".join(chr(_QUALITY_ZERO + value) for value in record.query_qualities or ())
    if not quality:
        quality = _NO_QUALITY * len(bases)
    if record.flag & REVERSE:
        bases = bases[::-1].translate(_COMPLEMENT)
        quality = quality[::-1]
    suffix = _MATE_SUFFIXES.get(record.flag & _MATE_BITS, "")
    return f"@{record.query_name}{suffix}\n{bases}\n+\n{quality}\n"


class _PipeFeeder:
    """A thread that writes pieces into a pipe, for a library that reads from descriptors only.

    Attributes:
        outlet: The file descriptor to read from. The reader opens and closes it.
        tail: The last bytes that were written.
        is_complete: All pieces were written.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        """Create the pipe. `start` begins to write the given pieces."""
        self.outlet, self._inlet = os.pipe()
        self.tail = b""
        self.is_complete = False
        self._pieces = pieces
        self._thread = threading.Thread(target=self._feed, daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until all is written, or nobody reads any more."""
        self._thread.join(timeout_s)

    def _feed(self) -> None:
        """Write all pieces into the pipe. This runs in the thread."""
        # After any error, `is_complete` stays false. The reader then reports that the
        # file is cut off.
        with suppress(Exception), open(self._inlet, "wb") as inlet:  # noqa: PTH123 - a descriptor
            for piece in self._pieces:
                self.tail = (self.tail + piece)[-_TAIL_BYTES:]
                inlet.write(piece)
            self.is_complete = True
