"""Columns and partitions on disk: what lets a store of any size be built in little memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

_HELD_BYTES: Final = 1 << 20  # records kept in memory before a partition is written


class Column:
    """One array on disk that grows at its end and is read back in stretches."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.dtype: np.dtype[np.generic] = np.dtype(dtype)
        self._file = path.open("w+b", buffering=_HELD_BYTES)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, values: NDArray[Any] | bytes) -> None:
        """Add values of the column's type (bytes for a column of bytes)."""
        data = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else values.astype(self.dtype, copy=False)
        if len(data):
            self._file.write(np.ascontiguousarray(data).data)
            self._count += len(data)

    def read(self, low: int, high: int) -> NDArray[Any]:
        """Values `low` to `high`."""
        self._file.flush()
        self._file.seek(low * self.dtype.itemsize)
        data = self._file.read((high - low) * self.dtype.itemsize)
        self._file.seek(0, 2)
        return np.frombuffer(data, self.dtype)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Partition:
    """Records of a few unsigned numbers, sorted into parts as they come; each part keeps the order of arrival."""

    def __init__(self, path: Path, width: int) -> None:
        self._file = path.open("w+b", buffering=0)
        self._width = width
        self._held: list[tuple[NDArray[np.int64], NDArray[np.uint64]]] = []
        self._held_bytes = 0
        self._stretches: dict[int, list[tuple[int, int]]] = defaultdict(list)  # part -> (first record, records)
        self._written = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, part: NDArray[np.int64], *columns: NDArray[Any]) -> None:
        """Add one record for each entry of `part`: the values of the columns at that entry."""
        if not len(part):
            return
        records = np.stack([column.astype(np.uint64, copy=False) for column in columns], axis=1)
        self._held.append((part, records))
        self._held_bytes += records.nbytes + part.nbytes
        self._count += len(part)
        if self._held_bytes >= _HELD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        part = np.concatenate([part for part, _ in self._held])
        records = np.concatenate([records for _, records in self._held])
        order = np.argsort(part, kind="stable")
        names, firsts, counts = np.unique(part[order], return_index=True, return_counts=True)
        self._file.seek(0, 2)
        data = memoryview(np.ascontiguousarray(records[order]).data).cast("B")
        while data:  # an unbuffered file may take less than all
            data = data[self._file.write(data) :]
        for name, first, count in zip(names.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            self._stretches[name].append((self._written + first, count))
        self._written += len(part)
        self._held, self._held_bytes = [], 0

    def parts(self) -> list[int]:
        """Names of the parts that hold something, ascending."""
        self._flush()
        return sorted(self._stretches)

    def read(self, part: int) -> NDArray[np.uint64]:
        """All records of a part, in order of arrival. [n, width]"""
        self._flush()
        pieces = list(self._pieces(part))
        return np.concatenate(pieces) if pieces else np.zeros((0, self._width), np.uint64)

    def _pieces(self, part: int) -> Iterator[NDArray[np.uint64]]:
        for first, count in self._stretches.get(part, []):
            self._file.seek(first * self._width * 8)
            data = bytearray()
            while len(data) < count * self._width * 8:
                data += self._file.read(count * self._width * 8 - len(data))
            yield np.frombuffer(bytes(data), np.uint64).reshape(count, self._width)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def repeats(records: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Which records repeat an earlier one: their index, the index of the first of the kind, and how many-th they are.

    `records` [n, 3]: two halves of a digest and an index that ascends. The first of a kind is number 1, and not listed.
    """
    # most are one of a kind: a quick sort by one half finds the rest, and only they are sorted with care
    order = np.argsort(records[:, 0])
    low = records[order, 0]
    alike = low[1:] == low[:-1]
    in_company = np.zeros(len(order), bool)
    in_company[1:] |= alike
    in_company[:-1] |= alike
    records = records[np.sort(order[in_company])]
    order = np.lexsort((records[:, 1], records[:, 0]))  # stable: equal digests stay in order of index
    low, high, index = (records[order, column] for column in range(3))
    begins = np.ones(len(order), bool)
    begins[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    start_of = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    again = np.flatnonzero(~begins)
    index = index.astype(np.int64)
    return index[again], index[start_of[again]], again - start_of[again] + 1
