"""The journal of an attempt: a file that keeps its measurements even if it is killed.

`telemetry/log.py` reads it back as tables.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final

from pydantic import TypeAdapter

from virnuc_core.checked_files import Match, compare_text
from virnuc_core.lease import make_folder
from virnuc_core.safe_files import open_to_write
from virnuc_core.telemetry.tables import DeviceSample, HostSample, ShardDone

LINE_DIGEST_LETTERS: Final = 16  # of the SHA-256 at the end of a line of a journal

# A line of a journal. A text is the start of the attempt, and after that a worker's death.
JournalRecord = ShardDone | DeviceSample | HostSample | str
JOURNAL_RECORD: Final = TypeAdapter[JournalRecord](JournalRecord)


@contextmanager
def journal(
    path: Path, origin_s: float, started: datetime, devices: Sequence[str]
) -> Iterator["JournalWriter"]:
    """Open the journal of an attempt: a file that keeps its measurements even if it is killed.

    An attempt is one start of the command on a run directory. The first line of its journal has
    the start of the attempt and its devices. Then each sample, each committed shard and each
    death of a worker adds a line at once.

    Args:
        path: The file. An earlier journal is replaced.
        origin_s: `time.monotonic()` at the start of the attempt.
        started: The wall clock at the same moment.
        devices: The devices of the attempt.

    Yields:
        The object that adds records to the journal.
    """
    make_folder(path.parent)
    with open_to_write(path, buffering=0) as file:  # each line is written at once
        writer = JournalWriter(file)
        writer(json.dumps([origin_s, started.isoformat(), *devices]))
        yield writer


class JournalWriter:
    """Adds records to the journal of an attempt. Call it with one or more records.

    An error of the disk does not stop the run here, because the next commit meets it as well.

    Attributes:
        error: The first error of the disk, or `None`.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Write to an open file without a buffer."""
        self._file = file
        self.error: OSError | None = None

    def __call__(self, *records: JournalRecord) -> None:
        """Add a line for each record. If the disk fails, keep its first error in `error`."""
        lines = [_line_with_digest(JOURNAL_RECORD.dump_json(record)) for record in records]
        try:
            self._file.write(b"".join(lines))
        except OSError as error:
            self.error = self.error or error


def _line_with_digest(text: bytes) -> bytes:
    """Return a line of a journal: the text, a TAB, and the beginning of the text's SHA-256."""
    digest = hashlib.sha256(text).hexdigest()[:LINE_DIGEST_LETTERS]
    return text + b"\t" + digest.encode() + b"\n"


def parse_line(line: bytes) -> JournalRecord:
    """Return the record in a line of a journal, if the line is as it was written.

    Lines of older versions have no digest.

    Raises:
        ValueError: The line was cut off or changed.
    """
    text, has_digest, digest = line.partition(b"\t")
    recorded = digest.decode("ascii", "replace") if has_digest else None
    if compare_text(text, recorded, LINE_DIGEST_LETTERS) is Match.CHANGED:
        raise ValueError("was changed after it was written")
    return JOURNAL_RECORD.validate_json(text)
