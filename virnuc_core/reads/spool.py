"""Records on disk, sorted into parts as they come: what lets repeats among any number be found in little memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_HELD_BYTES: Final = 1 << 20  # records kept in memory before a partition is written


@dataclass(frozen=True, slots=True)
class Parts:
    """A finished partition: whoever holds this can read it."""

    path: Path
    width: int
    stretches: Mapping[int, tuple[tuple[int, int], ...]]  # part -> (first record, records), as they lie in the file

    def __len__(self) -> int:
        return sum(count for stretches in self.stretches.values() for _, count in stretches)

    def read(self, part: int) -> NDArray[np.uint64]:
        """All records of a part, in order of arrival. [n, width]"""
        stretches = self.stretches.get(part, ())
        records = np.empty((sum(count for _, count in stretches), self.width), np.uint64)
        if not stretches:
            return records
        done = 0
        with self.path.open("rb") as file:
            for first, count in stretches:
                file.seek(first * self.width * 8)
                records[done : done + count] = np.fromfile(file, np.uint64, count * self.width).reshape(-1, self.width)
                done += count
        return records


def read_all(several: Iterable[Parts], part: int, width: int) -> NDArray[np.uint64]:
    """All records of one part in several partitions. [n, width]"""
    return np.concatenate([np.empty((0, width), np.uint64), *(parts.read(part) for parts in several)])


def names_of(several: Iterable[Parts]) -> list[int]:
    """Names of the parts that hold something in any of several partitions, ascending."""
    return sorted({name for parts in several for name in parts.stretches})


class Partition:
    """Records of a few unsigned numbers, sorted into parts as they come; each part keeps the order of arrival."""

    def __init__(self, path: Path, width: int) -> None:
        self._path, self._width = path, width
        self._file = path.open("wb", buffering=0)
        self._held: list[tuple[NDArray[np.int64], NDArray[np.uint64]]] = []
        self._held_bytes = 0
        self._stretches: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._written = 0

    def add(self, part: NDArray[np.int64], *columns: NDArray[Any]) -> None:
        """Add one record for each entry of `part`: the values of the columns at that entry."""
        if not len(part):
            return
        records = np.stack([column.astype(np.uint64, copy=False) for column in columns], axis=1)
        self._held.append((part, records))
        self._held_bytes += records.nbytes + part.nbytes
        if self._held_bytes >= _HELD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        part = np.concatenate([part for part, _ in self._held])
        records = np.concatenate([records for _, records in self._held])
        order = np.argsort(part, kind="stable")
        names, firsts, counts = np.unique(part[order], return_index=True, return_counts=True)
        data = memoryview(np.ascontiguousarray(records[order]).data).cast("B")
        while data:  # an unbuffered file may take less than all
            data = data[self._file.write(data) :]
        for name, first, count in zip(names.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            self._stretches[name].append((self._written + first, count))
        self._written += len(part)
        self._held, self._held_bytes = [], 0

    def finish(self) -> Parts:
        """Write what is held and close; the parts can be read from now on, and nothing can be added."""
        self._flush()
        self.close()
        return Parts(self._path, self._width, {name: tuple(where) for name, where in self._stretches.items()})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def repeats(records: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Which records repeat an earlier one: their index, the index of the first of the kind, and how many-th they are.

    `records` [n, 3]: two halves of a digest and an index, in any order; earlier is what has the smaller index. The
    first of a kind is number 1, and not listed.
    """
    # most are one of a kind: a quick sort by one half finds the rest, and only they are sorted with care
    order = np.argsort(records[:, 0])
    low = records[order, 0]
    alike = low[1:] == low[:-1]
    in_company = np.zeros(len(order), bool)
    in_company[1:] |= alike
    in_company[:-1] |= alike
    records = records[order[in_company]]
    order = np.lexsort((records[:, 2], records[:, 1], records[:, 0]))
    low, high, index = (records[order, column] for column in range(3))
    begins = np.ones(len(order), bool)
    begins[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    start_of = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    again = np.flatnonzero(~begins)
    index = index.astype(np.int64)
    return index[again], index[start_of[again]], again - start_of[again] + 1
