"""Building an ORF store: sheets are kept in drafts as the batches come, then gathered into one file.

Nothing is held that grows with the number of reads, but a few words for each sheet of some thousand reads and two bits
for each row.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.reads.batch import offsets_of
from virnuc_core.reads.columns import COLUMNS, FORMAT, SCHEMA_VERSION, StoreCounts
from virnuc_core.reads.crew import Crew
from virnuc_core.reads.draft import BUCKETS, Sheet
from virnuc_core.reads.fingerprint import Fingerprint
from virnuc_core.reads.gather import (
    CountFirsts,
    FindIds,
    FindRows,
    Firsts,
    IsTaken,
    Kept,
    Layout,
    NameCopies,
    Plan,
    WriteStretch,
)
from virnuc_core.reads.lay import Laid
from virnuc_core.reads.spool import Parts, names_of
from virnuc_core.rundir import whole_file

T = TypeVar("T")

_STRETCH_BYTES: Final = 1 << 23  # of sheets that one job copies
_FLUSH_S: Final = 0.02  # between two flushes of what is being written
_ALIGNMENT: Final = 64  # bytes; mapped columns start where any processor can read them


def fingerprint_for(model_length: int) -> Fingerprint:
    """The fingerprint of a store that holds no reads yet."""
    return Fingerprint(f"{FORMAT} {SCHEMA_VERSION} {model_length}")


class StoreWriter:
    """Takes what was laid down in drafts, in the order of the reads, then writes the store whole.

    `folder` is scratch space of the crew. When `strict`, a second read of the same id is refused at the end.
    """

    def __init__(
        self, folder: Path, model_length: int, files: tuple[str, ...], crew: Crew, *, strict: bool = False
    ) -> None:
        self._folder, self._model_length, self._files = folder, model_length, files
        self._crew, self._strict = crew, strict
        self._sheets: list[Sheet] = []
        self._fingerprint = fingerprint_for(model_length)

    def add(self, laid: Laid) -> None:
        """Append one batch."""
        self._sheets.append(laid.sheet)
        self._fingerprint.add(laid.leaves)

    def finish(self, path: Path, numbers: int) -> None:
        """Find the repeats and write the store to `path`, whole; `numbers` were given to batches, kept or dropped.

        Errors: `InputError` naming the first id that stands twice, and where, if strict.
        """
        crew = self._crew
        layout = Layout.of(
            tuple(self._sheets),
            numbers,
            crew.finish("row_digests"),
            crew.finish("id_digests"),
            _STRETCH_BYTES,
        )
        kept = self._keep("layout", layout)
        repeats = [found for found in crew.map(FindIds(kept, bucket) for bucket in range(BUCKETS)) if found]
        copies = crew.finish("copies")
        if self._strict and repeats:
            raise self._twice(layout, *min(repeats))
        mark = self._free_mark(kept, copies)
        for _ in crew.map(FindRows(kept, bucket) for bucket in range(BUCKETS)):
            pass
        again = crew.finish("again")
        kept_again = self._keep("again", again)
        firsts = list(crew.map(CountFirsts(kept, kept_again, stretch) for stretch in range(layout.stretches)))
        counts = self._counts(firsts, sum(map(len, copies)))
        with whole_file(path) as aside:
            at = _create(aside, self._attributes(counts, mark), self._lengths(counts, firsts))
            plan = self._keep("plan", self._plan(aside, at, layout, firsts, again, copies))
            with _flushing(aside):
                for _ in crew.map(WriteStretch(kept, plan, stretch) for stretch in range(layout.stretches)):
                    pass

    def _keep(self, name: str, value: T) -> Kept[T]:
        """Keep what many jobs need; a name is given once."""
        return Kept.of(self._folder / f"{name}.kept", value)

    def _counts(self, firsts: list[Firsts], n_copies: int) -> StoreCounts:
        sheets = self._sheets
        return StoreCounts(
            n_reads=sum(sheet.reads for sheet in sheets),
            n_chunks=sum(sheet.chunks for sheet in sheets),
            n_rows=sum(sheet.rows for sheet in sheets),
            n_uniques=sum(part.rows for part in firsts),
            n_bases=sum(sheet.bases for sheet in sheets),
            n_open_reads=sum(sheet.open_reads for sheet in sheets),
            n_empty=sum(sheet.empty for sheet in sheets),
            n_short=sum(sheet.short for sheet in sheets),
            n_ambiguous=sum(sheet.ambiguous for sheet in sheets),
            n_duplicate_ids=n_copies,
        )

    def _attributes(self, counts: StoreCounts, mark: str) -> dict[str, str | int]:
        return {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "fingerprint": self._fingerprint.hexdigest(),
            "model_length": self._model_length,
            "duplicate_mark": mark,
            **{name: getattr(counts, name) for name in StoreCounts.__slots__},
        }

    def _lengths(self, counts: StoreCounts, firsts: list[Firsts]) -> dict[str, int]:
        """Entries of each column."""
        of_kind = {"read": counts.n_reads, "row": counts.n_rows, "unique": counts.n_uniques}
        return {name: of_kind.get(name.partition("_")[0], 0) for name in COLUMNS} | {
            "read_id_offsets": counts.n_reads + 1,
            "read_id_bytes": sum(sheet.id_bytes for sheet in self._sheets),
            "protein_offsets": counts.n_uniques + 1,
            "dna_offsets": counts.n_uniques + 1,
            "protein_bytes": sum(part.protein for part in firsts),
            "dna_bytes": sum(part.dna for part in firsts),
        }

    def _plan(
        self,
        path: Path,
        at: dict[str, int],
        layout: Layout,
        firsts: list[Firsts],
        again: tuple[Parts, ...],
        copies: tuple[Parts, ...],
    ) -> Plan:
        bits, ranks = self._folder / "bits", self._folder / "ranks"
        with bits.open("wb") as bits_file, ranks.open("wb") as ranks_file:
            for part in firsts:
                bits_file.write(part.words.tobytes())
                in_words = np.bitwise_count(part.words).astype(np.int64)
                ranks_file.write(offsets_of(in_words)[:-1].astype(np.uint32).tobytes())
        ids = [sum(sheet.id_bytes for sheet in layout.sheets[a:b]) for a, b in pairwise(layout.bounds.tolist())]
        return Plan(
            path=path,
            at=at,
            unique=_before([part.rows for part in firsts]),
            id_bytes=_before(ids),
            protein=_before([part.protein for part in firsts]),
            dna=_before([part.dna for part in firsts]),
            first_word=_before([len(part.words) for part in firsts]),
            bits=bits,
            ranks=ranks,
            again=again,
            copies=copies,
        )

    def _free_mark(self, layout: Kept[Layout], copies: tuple[Parts, ...]) -> str:
        """What stands between an id and its number: a dot, or as many as it takes that no such name is an id yet."""
        mark = "."
        while self._is_taken(layout, copies, mark):
            mark += "."
        return mark

    def _is_taken(self, layout: Kept[Layout], copies: tuple[Parts, ...], mark: str) -> bool:
        crew, made_of = self._crew, self._keep(f"copies{len(mark)}", copies)
        for _ in crew.map(NameCopies(layout, made_of, stretch, mark) for stretch in names_of(copies)):
            pass
        names = crew.finish("names")
        made = self._keep(f"names{len(mark)}", names)
        return any(list(crew.map(IsTaken(layout, made, bucket) for bucket in names_of(names))))

    def _twice(self, layout: Layout, read: int, first: int) -> InputError:
        file, line, name = self._place(layout, read)
        first_file, first_line, _ = self._place(layout, first)
        return InputError(
            f"this id stands also on {first_file}:{first_line}",
            file=file,
            line=line,
            read_id=name,
            hint="ids must be unique in strict mode, rename one",
        )

    def _place(self, layout: Layout, read: int) -> tuple[str, int, str]:
        """File, line and id of a read."""
        number = int(np.searchsorted(layout.first_read, read, side="right")) - 1
        sheet, i = layout.sheets[number], read - int(layout.first_read[number])
        lines, id_lengths, ids = sheet.read("line", "id_length", "id_bytes")
        at = offsets_of(id_lengths.astype(np.int64))
        return self._files[sheet.file], int(lines[i]), ids[at[i] : at[i + 1]].tobytes().decode()


@contextmanager
def _flushing(path: Path) -> Iterator[None]:
    """Have the disk take what is written meanwhile, so that little is left to be waited for at the end.

    Errors: `OSError` of the disk, which tells each of them but once.
    """
    done = threading.Event()

    def flush() -> None:
        with path.open("rb+") as file:
            while not done.wait(_FLUSH_S):
                os.fsync(file.fileno())

    with ThreadPoolExecutor(1, "flush") as thread:
        try:
            flushed = thread.submit(flush)
            yield
        finally:
            done.set()
    flushed.result()


def _before(sizes: list[int]) -> NDArray[np.int64]:
    """The sum of the sizes before each."""
    return offsets_of(np.array(sizes, np.int64))[:-1]


def _create(path: Path, attributes: dict[str, str | int], lengths: dict[str, int]) -> dict[str, int]:
    """Make the file of a store with room for all columns; gives the byte at which each begins that is not empty."""
    with h5py.File(path, "w", alignment_threshold=1, alignment_interval=_ALIGNMENT, track_times=False) as file:
        file.attrs.update(attributes)
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_layout(h5py.h5d.CONTIGUOUS)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        layout.set_obj_track_times(False)
        at = {}
        for name, length in lengths.items():
            kind = h5py.h5t.py_create(np.dtype(COLUMNS[name]), logical=True)
            space = h5py.h5s.create_simple((length,))
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space, layout)
            if length:
                at[name] = int(dataset.get_offset())
    if not lengths["read_length"]:
        _zero_offsets(path, at)
    return at


def _zero_offsets(path: Path, at: dict[str, int]) -> None:
    """The one offset that a column of none has: no stretch writes it."""
    with path.open("rb+") as file:
        for name in ("read_id_offsets", "protein_offsets", "dna_offsets"):
            file.seek(at[name])
            file.write(bytes(8))
