"""Parse FASTA and FASTQ files into batches of reads; errors name the file, line and read id.

The text of a file is first cut into pieces that end where a record ends, judging by line ends only.
This is much cheaper than parsing, and several processes can then parse the pieces independently.

`fast_parser` parses FASTA and four-line FASTQ. If a FASTQ record is irregular (it has not four
lines, or is broken), `slow_parser` parses the rest of that file line by line in this process. Both
give the same reads. A FASTA record that is longer than a block is processed in parts.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import (
    BLANKS,
    Format,
    ParseLog,
    Part,
    Piece,
    ReadBatch,
    cut_fasta,
    cut_fastq,
    first_word,
)
from virnuc_core.reads.sources import Source
from virnuc_core.reads.workers import Workers

Output = TypeVar("Output")  # the result of the work on a batch

# Maximum letters of a header, or of a line of FASTQ; a longer line is not a sequencing read.
LONGEST_LINE: Final = 1 << 26
BLOCK_BYTES: Final = 4_000_000  # of a piece; takes a tenth less processor time than 1,000,000
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_BLANK: Final = b" \t\r\n\v\f"
_LONE_RETURN: Final = re.compile(rb"\r(?!\n|\Z)")  # a line end of old Macs
# A FASTA line that begins with ';': no letter of the same line comes before the ';'.
_COMMENT: Final = re.compile(rb";(?<![^\r\n];)[^\r\n]*")


class _WorkResult(NamedTuple, Generic[Output]):
    """The result of a worker for a piece of text or a batch of reads."""

    value: Output | None  # what `work` returned; None if there are no reads
    n_reads: int = 0
    illegal: tuple[InputError, ...] = ()  # one for each read left out because of its letters
    n_bytes_left: int = 0  # irregular text at the end of the piece, left for the slow parser
    # A read has no id and gets its number in the input as its name, but the number is not known to
    # the worker. The piece must be parsed again with this number.
    needs_read_number: bool = False
    # Why the whole file is refused. It is raised when the turn of this piece comes, because an
    # earlier piece may have an error, too.
    refusal: InputError | None = None
    parse_s: float = 0.0  # seconds spent on parsing


def parse(
    files: tuple[str, ...], log: ParseLog | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Generator[ReadBatch]:
    """Parse the reads of all files in order, in this process.

    Args:
        files: Paths, or `-` for standard input.
        log: Is updated with the counts, and the errors of the records that are left out.
        block_bytes: How much text is parsed at a time. A longer FASTA record comes in parts.

    Yields:
        Batches of reads. Each part of a long FASTA record is a batch of its own.

    Raises:
        InputError: A file is neither FASTA nor FASTQ, or cannot be read. Also for a broken record,
            unless `log.on_error` is `skip`.
    """
    with Workers(1) as this_process:
        yield from map_batches(
            this_process, lambda batch: batch, files, log or ParseLog(), block_bytes=block_bytes
        )


def map_batches(
    workers: Workers,
    work: Callable[[ReadBatch], Output],
    files: tuple[str, ...],
    log: ParseLog,
    *,
    block_bytes: int,
) -> Iterator[Output]:
    """Parse the reads of all files in order, and apply a function to each batch, in parallel.

    A record is irregular if it is not a FASTQ record of four lines. Only the slow parser can read
    it, and it also reads the rest of its file, line by line in this process.

    Args:
        workers: The processes that parse the text and apply the function.
        work: The function. It must be picklable if there are other worker processes.
        files: Paths, or `-` for standard input.
        log: Is updated with the counts, and the errors of the records that are left out.
        block_bytes: How much text is parsed at a time.

    Yields:
        The results of `work` in the order of the reads. If a file turns out to be irregular, the
        results of its later pieces are discarded and the pieces are parsed again.

    Raises:
        InputError: See `parse`. The first error in the order of the files is raised, even if a
            worker found a later one earlier.
        WorkerError: A worker process failed.
    """
    # `closing` closes the open file also after an error.
    with closing(_cut_files(files, log, block_bytes)) as cut_pieces:
        queue = _PieceQueue(cut_pieces)
        irregular_batches: Iterator[ReadBatch] = iter(())
        while True:
            # Parse in parallel up to the first irregular record.
            items = _PendingItems(chain(irregular_batches, queue), log)
            irregular_piece = yield from _work_until_irregular(workers, work, items, log)
            if irregular_piece is None:
                return
            # Parse the rest of this file line by line. Pieces that workers received already are
            # put back, because the slow parser must see the pieces of this file first. (All items
            # that follow a piece are pieces.)
            queue.put_back([item for item in items.pending if isinstance(item, Piece)])
            from virnuc_core.reads.slow_parser import read_irregular  # few runs need it

            irregular_batches = read_irregular(irregular_piece, queue, log, block_bytes)


class _PieceQueue(Iterator[Piece]):
    """Iterates over the pieces of all files. Pieces that were taken too early can be put back."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._returned = deque[Piece]()

    def __next__(self) -> Piece:
        if self._returned:
            return self._returned.popleft()
        return next(self._pieces)

    def put_back(self, pieces: list[Piece]) -> None:
        """Put pieces in front of the others, in their order."""
        self._returned.extendleft(reversed(pieces))


class _PendingItems(Iterator[Piece | ReadBatch]):
    """Iterates over the items for the workers, and keeps the items that have no result yet.

    The time to produce the items is added to `log.cut_s`.
    """

    def __init__(self, items: Iterator[Piece | ReadBatch], log: ParseLog) -> None:
        self._items = items
        self._log = log
        self.pending = deque[Piece | ReadBatch]()

    def __next__(self) -> Piece | ReadBatch:
        """Produce the next item, and keep it in `pending` until its result is known."""
        start_s = time.perf_counter()
        try:
            item = next(self._items)
        finally:
            self._log.cut_s += time.perf_counter() - start_s
        self.pending.append(item)
        return item


def _work_until_irregular(
    workers: Workers, work: Callable[[ReadBatch], Output], items: _PendingItems, log: ParseLog
) -> Generator[Output, None, Piece | None]:
    """Let workers parse items, and yield the results of `work` up to the first irregular record.

    Args:
        workers: The processes.
        work: The function for each batch of reads.
        items: Pieces of text, and batches that the slow parser has parsed.
        log: Is updated with the counts and errors of each piece when its turn comes.

    Returns:
        The text of a piece from its first irregular record on; None if everything was parsed. In
        the first case `items.pending` holds the later items that workers received already.

    Raises:
        InputError: A file or record is broken, see `parse`.
    """
    for worker_result in workers.map(partial(_work_on, work), items, _count_bytes):
        item = items.pending.popleft()  # results come in order, so this is the oldest item
        result = worker_result
        if result.needs_read_number:
            # All earlier reads are counted now, so the number for the read without id is known.
            result = _work_on(work, item, log.n_records)
        if result.refusal is not None:
            raise result.refusal
        if isinstance(item, ReadBatch):  # the slow parser has counted its reads
            value = result.value
        else:
            value = _count_piece(item, result, work, log)
        if value is not None:
            yield value
        if isinstance(item, ReadBatch):
            continue

        if result.n_bytes_left > 0:
            regular_text = item.data[: -result.n_bytes_left]
            return item._replace(
                data=item.data[-result.n_bytes_left :],
                first_line=item.first_line + regular_text.count(b"\n"),
            )
        if item.damage is not None:
            if item.is_unreadable:  # not a record but the whole file is lost: that is never skipped
                raise item.damage
            log.skip_or_raise(item.damage)
    return None


def _count_bytes(item: Piece | ReadBatch) -> int:
    """Return the approximate size of an item for workers: its text, or its bases."""
    return len(item.data) if isinstance(item, Piece) else len(item.bases.data)


def _count_piece(
    piece: Piece, result: _WorkResult[Output], work: Callable[[ReadBatch], Output], log: ParseLog
) -> Output | None:
    """Add the reads of a piece to the log, and return the value that is yielded for the piece.

    Args:
        piece: The text.
        result: What a worker returned for it.
        work: The function for a batch of reads. It is called here for a long read that is dropped.
        log: Is updated.

    Returns:
        The result of `work`; None if the piece has no reads, or is a part of a long read that has
        an illegal letter.

    Raises:
        InputError: A read has an illegal letter and `log.on_error` is `stop`.
    """
    log.parse_s += result.parse_s
    part = piece.part
    is_used = log.count_reads(piece.name, part, result.n_reads, result.illegal)
    if is_used or part is None:
        return result.value
    if part.is_last:
        # Values for earlier parts of this long read may have been yielded. Tell the caller to drop
        # them: pass a batch that is marked as dropped through the same function.
        return work(piece.dropped_part(part))
    return None


def _work_on(
    work: Callable[[ReadBatch], Output],
    item: Piece | ReadBatch,
    n_earlier_records: int | None = None,
) -> _WorkResult[Output]:
    """Parse a piece of text up to its first irregular record, and apply a function to its reads.

    This runs in the worker processes.

    Args:
        work: The function. It gets the batch of reads without those that have illegal letters.
        item: A piece, or a batch of reads that was parsed before.
        n_earlier_records: The number of records before the piece; None if it is not known yet. It
            is needed only if a read has no id.

    Returns:
        The value of the function with counts; or, if `n_earlier_records` is needed but None, a
        result that asks for it.
    """
    if isinstance(item, ReadBatch):
        return _WorkResult(work(item))
    has_text = bool(item.data or item.part)  # the last part of a long read may have no text
    if item.damage is not None or not has_text:
        return _WorkResult(None)

    start_s = time.perf_counter()
    n_bytes_left = 0
    cut_batch: ReadBatch | None
    if item.format == "fastq":
        cut_batch, n_bytes_left = cut_fastq(item)
    else:
        cut_batch = cut_fasta(item)
    if cut_batch is None:
        return _WorkResult(None, n_bytes_left=n_bytes_left)
    ids = cut_batch.ids.printable_ids()
    has_empty_id = not ids.lengths.all()
    if has_empty_id and n_earlier_records is None:
        return _WorkResult(None, needs_read_number=True)
    named_batch = replace(cut_batch, ids=ids.fill_empty_ids(n_earlier_records or 0))
    try:
        batch, illegal = named_batch.drop_illegal(item.name)
    except InputError as error:
        return _WorkResult(None, refusal=error)
    parse_s = time.perf_counter() - start_s
    value = work(batch) if len(batch) > 0 else None
    return _WorkResult(value, len(batch), tuple(illegal), n_bytes_left, parse_s=parse_s)


def _cut_files(files: tuple[str, ...], log: ParseLog, block_bytes: int) -> Generator[Piece]:
    """Cut the text of all files into pieces that can be parsed independently.

    When a file is read to its end, its digest and the number of alignments left out are written to
    the log. For a file that cannot be read, a piece with the error is yielded instead of raising
    it. So the reads of all earlier files are processed before the error is raised.
    """
    for file_index, name in enumerate(files):
        try:
            with Source.open(name, log.read_group) as source:
                for piece in _FileCutter(file_index, source, block_bytes).pieces():
                    log.bytes_used[name] = source.n_bytes_used
                    yield piece
                log.contents[name] = source.content()
                log.not_primary[name] = source.n_left_out
        except InputError as error:
            yield Piece(
                file_index,
                name,
                format="fasta",
                data=b"",
                first_line=1,
                is_last=True,
                damage=error,
                is_unreadable=True,
            )


class _FileCutter:
    """Cuts the text of one file into pieces that can be parsed independently.

    A piece ends where a record ends. A FASTA record that is longer than a block is cut into parts.
    """

    def __init__(self, file_index: int, source: Source, block_bytes: int) -> None:
        """Read the first text of the file and find out its format.

        Args:
            file_index: The index of the file among the inputs.
            source: The opened file.
            block_bytes: The wanted size of a piece.

        Raises:
            InputError: The file is neither FASTA nor FASTQ.
        """
        self._file_index = file_index
        self._source = source
        self._block_bytes = block_bytes
        self._reader = _TextReader(source, block_bytes)
        self._format = self._reader.format
        self._text = self._reader.beginning  # was read, but is not in a piece yet
        self._line = self._reader.first_line  # number of the first line of `_text`
        self._has_ended = False  # the file was read to its end
        self._n_wanted = block_bytes  # `_text` is filled up to this length
        # The next part of the current long record; None between records.
        self._part: Part | None = None

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the file. The last piece has `is_last`, and any damage of the file.

        Raises:
            InputError: A record has a line that is too long to be read.
        """
        while self._text or not self._has_ended:
            self._read_more()
            # All text that is left belongs into the last piece if no further cut is needed.
            piece: Piece | None
            if self._part is not None:
                if self._has_ended and b"\n>" not in self._text:  # no other record follows
                    break
                piece = self._cut_part(self._part)
            else:
                # Of a damaged file, only the whole records before the damage can be used. They are
                # cut off here, and the last piece has the rest.
                if self._has_ended and self._source.damage is None:
                    break
                piece = self._cut_records()

            if piece is not None:
                yield piece
            elif self._has_ended:
                break
            elif self._part is None and self._format == "fasta" and b"\n" in self._text:
                # No record ends within a block of FASTA: this record is long. Cut it into parts.
                header = self._text[1 : self._text.index(b"\n")]
                self._part = Part(first_word(header), self._line, is_first=True)
            else:
                self._want_longer_text()
        yield self._last_piece()

    def _read_more(self) -> None:
        """Fill `_text` up to the wanted length, and turn line ends of old Macs into newlines."""
        while len(self._text) < self._n_wanted and not self._has_ended:
            new_text = self._reader.read(self._n_wanted - len(self._text))
            self._text += new_text
            self._has_ended = not new_text
        if b"\r" in self._text:
            # A "\r" at the end of the text may be the first half of "\r\n". Only at the end of the
            # file it is certain that no "\n" follows.
            if self._has_ended and self._text.endswith(b"\r"):
                self._text += b"\n"
            self._text = _LONE_RETURN.sub(b"\n", self._text)

    def _cut_records(self) -> Piece | None:
        """Remove all whole records from the front of the text and return them as a piece.

        Returns:
            None if the text has no whole record.
        """
        end = _find_end_of_records(self._text, self._format)
        return self._cut(end, None) if end > 0 else None

    def _cut_part(self, part: Part) -> Piece | None:
        """Remove the text of the next part of a long FASTA record and return it as a piece.

        A `Piece` is text of a file, and its `Part` tells the position of this text within the
        record. `_part` is set to the position of the next part, or to None after the last part.

        Args:
            part: The position of the part to cut.

        Returns:
            The piece. None if more text must be read first.
        """
        text = self._text
        record_end = text.find(b"\n>") + 1  # 0 if the next header is not in the text
        if record_end > 0:
            self._part = None
            return self._cut(record_end, part._replace(is_last=True))
        # The next header is recognised by a line end and a '>'. If this part took the line end and
        # the next text begins with '>', the header would be missed. So line ends at the end of the
        # text are left for the next part.
        end = len(text.rstrip(b"\r\n"))
        if end == 0:  # only line ends: the last one is enough for this
            end = len(text) - 1
        if end == 0:  # a single line end
            return None
        sequence_start = text.index(b"\n") if part.is_first else 0
        bases = text[sequence_start:end].translate(None, BLANKS)
        self._part = part._replace(is_first=False, n_bases_before=part.n_bases_before + len(bases))
        return self._cut(end, part)

    def _cut(self, end: int, part: Part | None) -> Piece:
        """Remove the first `end` bytes of the text and return them as a piece.

        The line number is moved forward, and the next piece is wanted in the usual size.

        Args:
            end: The number of bytes.
            part: The position within a long FASTA record; None for whole records.
        """
        data = self._text[:end]
        line = self._line
        self._text = self._text[end:]
        self._line += _count_newlines(data)
        self._n_wanted = self._block_bytes
        return Piece(self._file_index, self._source.name, self._format, data, line, part=part)

    def _want_longer_text(self) -> None:
        """Double the wanted length of the text, because no record ends in it.

        With doubling, each byte of a long record is searched only a few times.

        Raises:
            InputError: The last line is longer than `LONGEST_LINE`.
        """
        last_line_start = self._text.rfind(b"\n") + 1
        if len(self._text) - last_line_start > LONGEST_LINE:
            raise InputError(
                f"a line of this record is longer than {LONGEST_LINE:,} letters",
                file=self._source.name,
                line=self._line,
                hint="only sequences of FASTA may be so long",
            )
        # One letter more than allowed is enough to find out that the line is too long.
        self._n_wanted = min(2 * len(self._text), last_line_start + LONGEST_LINE + 1)

    def _last_piece(self) -> Piece:
        """Return all text that is left as the last piece of the file.

        If the file is damaged within a long record, the piece marks the record as dropped.
        """
        damage = self._source.damage
        part = self._part
        if part is not None:
            part = part._replace(is_last=True, is_dropped=damage is not None)
        return Piece(
            self._file_index,
            self._source.name,
            self._format,
            self._text,
            self._line,
            is_last=True,
            damage=damage,
            part=part,
        )


class _TextReader:
    """Reads the text of a file from its first record on. Comment lines of FASTA become blanks.

    Attributes:
        format: The format, according to the first letter.
        first_line: The line number of the first record.
        beginning: The first text, from the first record on. `read` returns the text after it.
    """

    def __init__(self, source: Source, block_bytes: int) -> None:
        """Read up to the first record and find out the format.

        Args:
            source: The opened file.
            block_bytes: How much text is read at a time.

        Raises:
            InputError: The file is neither FASTA nor FASTQ.
        """
        self._source = source
        self._block_bytes = block_bytes
        # The first letter of the line in which the text read so far ends. It shows whether the
        # rest of this line, in the next text, belongs to a comment.
        self._line_mark = b""
        # Until the format is known, "fastq" makes `read` return the text unchanged.
        self.format: Format = "fastq"
        self.first_line = 1
        beginning = self._skip_blanks(self.read(block_bytes).removeprefix(_BYTE_ORDER_MARK))
        mark = beginning[:1]
        if mark in (b">", b";"):
            self.format = "fasta"
            beginning = self._skip_blanks(self._blank_out_comments(beginning))
            if beginning and not beginning.startswith(b">"):
                raise InputError(
                    "there is text before the first header",
                    file=source.name,
                    line=self.first_line,
                    hint="expected a line that starts with '>'",
                )
        elif beginning and mark != b"@":
            problem = "this is neither FASTA nor FASTQ: it does not start with '>' or '@'"
            if beginning.startswith(b"PK"):
                problem = "this is a zip archive; unpack it first"
            raise InputError(problem, file=source.name)
        self.beginning = beginning

    def _skip_blanks(self, text: bytes) -> bytes:
        """Remove blanks at the front of a text; while it is all blank, read more.

        `first_line` is moved forward by the lines that were removed.

        Returns:
            A text that does not begin with a blank; empty if the file has nothing but blanks.
        """
        while True:
            letters = text.lstrip(_BLANK)
            n_blanks = len(text) - len(letters)
            self.first_line += text[:n_blanks].count(b"\n")
            if letters:
                return letters
            text = self.read(self._block_bytes)
            if not text:
                return b""

    def read(self, size: int) -> bytes:
        """Return at least `size` bytes of text, with comments of FASTA replaced by blanks.

        Only at the end of the file fewer bytes are returned, and none after the end.

        Args:
            size: The wanted number of bytes.
        """
        text = self._source.read(size)
        if text and self.format == "fasta":
            return self._blank_out_comments(text)
        return text

    def _blank_out_comments(self, text: bytes) -> bytes:
        """Return a text of FASTA in which each line that begins with ';' is replaced by one blank.

        A line may begin in one text and end in the next. `_line_mark` remembers how it began.
        """
        # Put the first letter of a divided line in front of its rest, so that the rest of a comment
        # is recognised, too.
        mark = self._line_mark
        marked_text = mark + text
        line_start = max(marked_text.rfind(b"\n"), marked_text.rfind(b"\r")) + 1
        self._line_mark = marked_text[line_start : line_start + 1]
        if b";" not in marked_text:
            return text
        return _COMMENT.sub(b" ", marked_text).removeprefix(mark)


def _find_end_of_records(text: bytes, format_: Format) -> int:
    """Return how many bytes at the front of a text are whole records, judging by line ends only.

    For FASTQ this assumes four lines per record; irregular records are noticed by the parser.

    Returns:
        0 if the text has no whole record.
    """
    if format_ == "fasta":
        return text.rfind(b"\n>") + 1  # all records but the last, which may be incomplete
    n_lines = _count_newlines(text)
    if n_lines < 4:
        return 0
    # Go back over the incomplete last line, and over the 0 to 3 lines of an incomplete record.
    end = len(text)
    for _ in range(n_lines % 4 + 1):
        end = text.rfind(b"\n", 0, end)
    return end + 1


def _count_newlines(text: bytes) -> int:
    """Count the newlines; numpy is many times as fast as `bytes.count`."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n")))
