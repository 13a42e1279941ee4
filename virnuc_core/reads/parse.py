"""Read FASTA and FASTQ files into batches of reads; errors name the file, line and read id.

Files are cut into pieces where records end, as far as line ends show. Cutting costs a fraction of
reading, and the pieces can be read independently of each other, by several processes.

`fast_parser` reads FASTA and four-line FASTQ. From the first FASTQ record that is not of four
lines, or is broken, `slow_parser` reads the rest of that file line by line in this process. Both
give the same reads. A FASTA record that is longer than a block comes in parts.
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

LONGEST_LINE: Final = 1 << 26  # letters of a header, or of a line of FASTQ
BLOCK_BYTES: Final = 4_000_000  # of a piece; takes a tenth less processor time than 1,000,000
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_BLANK: Final = b" \t\r\n\v\f"
_LONE_RETURN: Final = re.compile(rb"\r(?!\n|\Z)")  # a line end of old Macs
_COMMENT: Final = re.compile(rb";(?<![^\r\n];)[^\r\n]*")  # a FASTA line that begins with ';'


class _WorkResult(NamedTuple, Generic[Output]):
    """The result of a worker for one piece of text or one batch of reads."""

    value: Output | None  # None if there are no reads
    n_reads: int = 0
    illegal: tuple[InputError, ...] = ()  # one for each read that was left out
    n_bytes_left: int = 0  # at the end of the piece: irregular, for the slow parser
    needs_read_number: bool = False  # a read has no id: its name needs the number of earlier reads
    parse_s: float = 0.0


def parse(
    files: tuple[str, ...], log: ParseLog | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[ReadBatch]:
    """Read all files in order.

    Args:
        files: Paths, or `-` for standard input.
        log: Takes the counts and the errors of the records that are left out.
        block_bytes: The size of a piece. A longer FASTA record comes in parts.

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
    """Read all files in order, and apply a function to each batch of reads.

    Args:
        workers: Read the pieces and do the work on their batches.
        work: The function. It must be picklable if there are other worker processes.
        files: Paths, or `-` for standard input.
        log: Takes the counts and the errors of the records that are left out.
        block_bytes: The size of a piece.

    Yields:
        The results of `work` in the order of the reads. If a file turns out to be irregular, the
        results of its later pieces are discarded and the pieces are read again.

    Raises:
        InputError: As of `parse`: the first error in the order of the files, even if a later one
            was met earlier.
        WorkerError: A worker process failed.
    """
    with closing(_cut_files(files, log, block_bytes)) as cut_pieces:  # closes files after an error
        queue = _PieceQueue(cut_pieces)
        irregular_batches: Iterator[ReadBatch] = iter(())
        # The pieces are parsed by workers. If one of them finds an irregular record, the rest of
        # its file is parsed line by line in this process, and then the workers continue.
        while True:
            items = _PendingItems(chain(irregular_batches, queue), log)
            rest = yield from _work_until_irregular(workers, work, items, log)
            if rest is None:
                return
            queue.put_back([item for item in items.pending if isinstance(item, Piece)])
            from virnuc_core.reads.slow_parser import read_irregular  # imported late: rarely used

            irregular_batches = read_irregular(rest, queue, log, block_bytes)


class _PieceQueue(Iterator[Piece]):
    """The pieces of all files in order. Pieces that were taken too early can be put back."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._returned = deque[Piece]()

    def __next__(self) -> Piece:
        """Return the next piece: first those that were put back, then new ones."""
        if self._returned:
            return self._returned.popleft()
        return next(self._pieces)

    def put_back(self, pieces: list[Piece]) -> None:
        """Put pieces in front of the others, in their order."""
        self._returned.extendleft(reversed(pieces))


class _PendingItems(Iterator[Piece | ReadBatch]):
    """An iterator over the items for workers.

    `pending` holds the items that workers have received but whose results have not arrived yet.
    """

    def __init__(self, items: Iterator[Piece | ReadBatch], log: ParseLog) -> None:
        self._items = items
        self._log = log
        self.pending = deque[Piece | ReadBatch]()

    def __next__(self) -> Piece | ReadBatch:
        """Return the next item, and add the time that it took to cut it to the log."""
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
    """Yield the results of `work`, up to the first irregular record.

    Returns:
        None if everything was parsed. Otherwise the rest of a piece, beginning with an irregular
        record; `items.pending` then holds the later items that workers have received already.

    Raises:
        InputError: A file or record is broken, see `parse`.
    """
    for worker_result in workers.map(partial(_work_on, work), items, _count_bytes):
        item = items.pending.popleft()  # results arrive in the order of the items
        result = worker_result
        if result.needs_read_number:
            # All earlier reads are counted now, so this piece can be parsed again here.
            result = _work_on(work, item, log.n_records)
        if isinstance(item, ReadBatch):  # the slow parser has counted its reads
            value = result.value
        else:
            value = _count_piece(item, result, work, log)
        if value is not None:
            yield value
        if isinstance(item, ReadBatch):
            continue
        if result.n_bytes_left > 0:
            regular = item.data[: -result.n_bytes_left]
            return item._replace(
                data=item.data[-result.n_bytes_left :],
                first_line=item.first_line + regular.count(b"\n"),
            )
        if item.damage is not None:
            if item.is_unreadable:
                raise item.damage
            log.skip_or_raise(item.damage)
    return None


def _count_bytes(item: Piece | ReadBatch) -> int:
    """Return the approximate memory of an item in bytes."""
    return len(item.data) if isinstance(item, Piece) else len(item.bases.data)


def _count_piece(
    piece: Piece, result: _WorkResult[Output], work: Callable[[ReadBatch], Output], log: ParseLog
) -> Output | None:
    """Count the reads of a piece in the log.

    Returns:
        The result of `work` for this piece, or None if the piece is part of a long read that is
        left out.

    Raises:
        InputError: A read has an illegal letter, and broken records are not skipped.
    """
    log.parse_s += result.parse_s
    part = piece.part
    is_used = log.count_reads(piece.name, part, result.n_reads, result.illegal)
    if is_used or part is None:
        return result.value
    if part.is_last:
        # The earlier parts were passed on before the error was found. This tells their consumer to
        # discard them.
        return work(piece.dropped_part(part))
    return None


def _work_on(
    work: Callable[[ReadBatch], Output],
    item: Piece | ReadBatch,
    n_earlier_records: int | None = None,
) -> _WorkResult[Output]:
    """Parse a piece up to its first irregular record, and apply `work` to its reads.

    This is the task of a worker process.

    Args:
        work: The function for the batch of reads, without those that have illegal letters.
        item: A piece, or a batch that was read already.
        n_earlier_records: The number of records before the piece, or None if it is not known yet.
            It is needed only if a read has no id, because such reads are numbered.
    """
    if isinstance(item, ReadBatch):
        return _WorkResult(work(item))
    if item.damage is not None or not (item.data or item.part):
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
    if n_earlier_records is None and not ids.lengths.all():
        return _WorkResult(None, needs_read_number=True)
    named_batch = replace(cut_batch, ids=ids.fill_empty_ids(n_earlier_records or 0))
    batch, illegal = named_batch.drop_illegal(item.name)
    parse_s = time.perf_counter() - start_s
    value = work(batch) if len(batch) > 0 else None
    return _WorkResult(value, len(batch), tuple(illegal), n_bytes_left, parse_s=parse_s)


def _cut_files(files: tuple[str, ...], log: ParseLog, block_bytes: int) -> Generator[Piece]:
    """Yield the text of all files in pieces.

    For a file that cannot be read, a piece with the error is yielded. So the error is raised only
    after the reads of the earlier files were processed.
    """
    for file_index, name in enumerate(files):
        try:
            with Source.open(name, log.read_group) as source:
                yield from _FileCutter(file_index, source, block_bytes).pieces()
                log.contents[name] = source.content()
                log.not_primary[name] = source.left_out
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
    """Cuts the text of one file into pieces."""

    def __init__(self, file_index: int, source: Source, block_bytes: int) -> None:
        """Read the beginning of a file and find its format.

        Args:
            file_index: Position of the file among the inputs.
            source: The open file.
            block_bytes: Size of a piece.

        Raises:
            InputError: The file is neither FASTA nor FASTQ.
        """
        self._file_index = file_index
        self._source = source
        self._block_bytes = block_bytes
        self._reader = _TextReader(source, block_bytes)
        self._format = self._reader.format
        self._text = self._reader.beginning  # read, but not in a piece yet
        self._line = self._reader.first_line  # number of the first line of `_text`
        self._has_ended = False  # all of the file was read
        self._n_wanted = block_bytes  # length of `_text` to read up to
        self._part: Part | None = None  # the next part, within a record longer than a block

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces. The last one has `is_last`, and the damage of the file, if any.

        Raises:
            InputError: A record has a line that is too long to be read.
        """
        while self._text or not self._has_ended:
            self._read_more()
            piece: Piece | None
            # Text that ends a file is left to `_last_piece`.
            if self._part is not None:
                if self._has_ended and b"\n>" not in self._text:
                    break
                piece = self._cut_part(self._part)
            else:
                if self._has_ended and self._source.damage is None:
                    break
                piece = self._cut_records()

            if piece is not None:
                yield piece
            elif self._has_ended:
                break
            elif self._part is None and self._format == "fasta" and b"\n" in self._text:
                # A whole block without the end of a record: this record is returned in parts.
                header = self._text[1 : self._text.index(b"\n")]
                self._part = Part(first_word(header), self._line, is_first=True)
            else:
                self._want_longer_text()
        yield self._last_piece()

    def _read_more(self) -> None:
        """Read text until the wanted length is reached, and replace lone returns by newlines."""
        while len(self._text) < self._n_wanted and not self._has_ended:
            more = self._reader.read(self._n_wanted - len(self._text))
            self._text += more
            self._has_ended = not more
        if b"\r" in self._text:
            if self._has_ended and self._text.endswith(b"\r"):
                self._text += b"\n"
            self._text = _LONE_RETURN.sub(b"\n", self._text)

    def _cut_records(self) -> Piece | None:
        """Remove all complete records from the front of the text and return them as a piece.

        Returns:
            The piece, or None if the text contains no complete record.
        """
        end = _find_end_of_records(self._text, self._format)
        return self._cut(end, None) if end > 0 else None

    def _cut_part(self, part: Part) -> Piece | None:
        """Remove the next part of a long FASTA record from the front of the text and return it.

        Returns:
            The part, or None if more text must be read first.
        """
        text = self._text
        record_end = text.find(b"\n>") + 1
        if record_end > 0:
            self._part = None
            return self._cut(record_end, part._replace(is_last=True))
        # Line ends at the end are left for the next part: a '>' after them would be a header.
        end = len(text.rstrip(b"\r\n")) or len(text) - 1
        if end == 0:
            return None
        sequence_start = text.index(b"\n") if part.is_first else 0
        bases = text[sequence_start:end].translate(None, BLANKS)
        self._part = part._replace(is_first=False, n_bases_before=part.n_bases_before + len(bases))
        return self._cut(end, part)

    def _cut(self, end: int, part: Part | None) -> Piece:
        """Remove the first `end` bytes of the text and return them as a piece."""
        data = self._text[:end]
        line = self._line
        self._text = self._text[end:]
        self._line += _count_newlines(data)
        self._n_wanted = self._block_bytes
        return Piece(self._file_index, self._source.name, self._format, data, line, part=part)

    def _want_longer_text(self) -> None:
        """Double the length of the text to read, because no record ends in the current text.

        Each time more text was read, the whole text is searched again. Because the length doubles,
        this happens only a few times.

        Raises:
            InputError: The last line is too long already.
        """
        last_line_start = self._text.rfind(b"\n") + 1
        if len(self._text) - last_line_start > LONGEST_LINE:
            raise InputError(
                f"a record with lines too long to be read: {LONGEST_LINE:,} letters and no end",
                file=self._source.name,
                line=self._line,
                hint="only sequences of FASTA may be as long",
            )
        self._n_wanted = min(2 * len(self._text), last_line_start + LONGEST_LINE + 1)

    def _last_piece(self) -> Piece:
        """Return the remaining text as the last piece of the file."""
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
    """Reads a file's text from its first record on; comments of FASTA become blanks.

    Attributes:
        format: The format, as the first letter shows it.
        first_line: The number of the line of the first record.
        beginning: The first text, from the first record on. `read` gives what follows.
    """

    def __init__(self, source: Source, block_bytes: int) -> None:
        """Read up to the first record, and find out the format.

        Args:
            source: The open file.
            block_bytes: Number of bytes to read at a time.

        Raises:
            InputError: The file is neither FASTA nor FASTQ.
        """
        self._source = source
        self._block_bytes = block_bytes
        self._line_mark = b""  # first letter of the line in which the text before was cut
        # Until the format is known: `read` removes comments from FASTA only.
        self.format: Format = "fastq"
        self.first_line = 1
        beginning = self._skip_blanks(self.read(block_bytes).removeprefix(_BYTE_ORDER_MARK))
        mark = beginning[:1]
        if mark in (b">", b";"):
            self.format = "fasta"
            beginning = self._skip_blanks(self._blank_out_comments(beginning))
            if beginning and not beginning.startswith(b">"):
                raise InputError(
                    "text stands before the first header",
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
        """Return the text without blanks at its beginning.

        If the whole text is blank, further text is read. `first_line` counts the skipped lines.
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
        """Return at least `size` bytes of text; fewer only before the end, none at the end."""
        text = self._source.read(size)
        if text and self.format == "fasta":
            return self._blank_out_comments(text)
        return text

    def _blank_out_comments(self, text: bytes) -> bytes:
        """Replace each line that begins with ';' by a blank.

        The text may begin in the middle of a line. `_line_mark` is the first letter of that line.
        """
        mark = self._line_mark
        marked_text = mark + text
        line_start = max(marked_text.rfind(b"\n"), marked_text.rfind(b"\r")) + 1
        self._line_mark = marked_text[line_start : line_start + 1]
        if b";" not in marked_text:
            return text
        return _COMMENT.sub(b" ", marked_text).removeprefix(mark)


def _find_end_of_records(text: bytes, format_: Format) -> int:
    """Return the number of bytes at the front of the text that are complete records.

    FASTQ is assumed to have four lines per record. A worker finds out if that is wrong.
    """
    if format_ == "fasta":
        return text.rfind(b"\n>") + 1
    n_lines = _count_newlines(text)
    if n_lines < 4:
        return 0
    # Step back from the end: over the incomplete last line, then over the lines of an incomplete
    # record.
    end = len(text)
    for _ in range(n_lines % 4 + 1):
        end = text.rfind(b"\n", 0, end)
    return end + 1


def _count_newlines(text: bytes) -> int:
    """Return the number of newlines. NumPy is many times faster here than `bytes.count`."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n")))
