"""Look through a pickle before it is loaded, and refuse one that would keep the loader busy.

A pickle is a program for a small stack machine. A few hundred bytes can describe tuples that hold
the same tuples again and again: computing the hash of such a tuple takes years. Millions of
instructions take minutes. torch's restricted loader executes both, although it allows no foreign
code. This module follows the instructions without executing them: the stack here holds only the
size of each value.
"""

import io
import itertools
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Final

# The largest ESM-2 has about 27,000 instructions, and a network of 1,024 layers about 500,000.
MAX_INSTRUCTIONS: Final = 1 << 19
MAX_PICKLE_BYTES: Final = 1 << 25  # of the instructions of a checkpoint, without its numbers
# Values in a tuple and in the tuples within it. The tuples of a checkpoint have about ten.
MAX_TUPLE_SIZE: Final = 1_000
# Large integers can be chosen so that all have the same hash, which makes a dictionary slow. A
# checkpoint has a few for each tensor with more than 2 ** 31 numbers.
MAX_LARGE_INTEGERS: Final = 10_000
N_LEGACY_PICKLES: Final = 5  # torch's old format: three of its own, the tensors, their storages

PUSHES_TO_MEMO: Final = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
READS_FROM_MEMO: Final = ("GET", "BINGET", "LONG_BINGET")
LARGE_INTEGERS: Final = ("INT", "LONG", "LONG1", "LONG4")
HASHABLE_COLLECTIONS: Final = (pickletools.pytuple, pickletools.pyfrozenset)
MARK: Final = -1  # stands on the stack for a mark
PICKLE_IN_ZIP: Final = "data.pkl"


class _Machine:
    """The stack and the memo of a pickle, with the size of each value in place of the value."""

    def __init__(self) -> None:
        """Begin with an empty stack."""
        self._stack: list[int] = []
        self._memo: dict[int, int] = {}

    def follow(self, instruction: pickletools.OpcodeInfo, argument: object) -> None:
        """Do to the sizes on the stack what an instruction does to the values that they stand for.

        The size of a tuple is the number of values in it, those of its inner tuples included. Any
        other value has the size 1.

        Args:
            instruction: The instruction of the pickle.
            argument: Its argument, for instance the number of a place in the memo.

        Raises:
            ValueError: The instruction makes a tuple that is too large.
            IndexError, KeyError: The instruction takes a value that is not there.
        """
        name = instruction.name
        if name == "MARK":
            self._stack.append(MARK)
        elif name in PUSHES_TO_MEMO:
            # MEMOIZE has no argument: it takes the next free place of the memo.
            key = argument if isinstance(argument, int) else len(self._memo)
            self._memo[key] = self._stack[-1]
        elif name in READS_FROM_MEMO and isinstance(argument, int):
            self._stack.append(self._memo[argument])
        elif name == "DUP":
            self._stack.append(self._stack[-1])
        else:
            taken_size = self._take(instruction.stack_before)
            for kind in instruction.stack_after:
                size = 1
                if kind in HASHABLE_COLLECTIONS:
                    size += taken_size
                self._stack.append(size)
        if self._stack and self._stack[-1] > MAX_TUPLE_SIZE:
            raise ValueError(f"a tuple of more than {MAX_TUPLE_SIZE:,} values within each other")

    def _take(self, kinds: list[pickletools.StackObject]) -> int:
        """Take what an instruction needs from the stack, and return the sum of the sizes.

        Args:
            kinds: The kinds of values that the instruction takes, the topmost last. If a mark is
                among them, the instruction takes all values down to the last mark.
        """
        size = 0
        if pickletools.markobject in kinds:
            # All values down to the last mark, then what the instruction takes below the mark
            while (value := self._stack.pop()) != MARK:
                size += value
            kinds = kinds[: kinds.index(pickletools.markobject)]
        for _ in kinds:
            size += self._stack.pop()
        return size


def check_checkpoint(path: Path, *, is_zip: bool) -> None:
    """Refuse a pickled checkpoint that its loader would be busy with for more than some seconds.

    Args:
        path: The checkpoint.
        is_zip: Whether it is a zip archive, torch's present format. The old format is a sequence
            of pickles, then the numbers.

    Raises:
        ValueError: There are too many instructions, tuples are nested too much, or the pickle is
            damaged.
        OSError: The file cannot be read.
    """
    budget = itertools.count(1)  # instructions so far, over all pickles of the checkpoint
    if not is_zip:
        with path.open("rb") as file:
            start_of_file = io.BytesIO(file.read(MAX_PICKLE_BYTES))
        for _ in range(N_LEGACY_PICKLES):  # they follow each other in the file
            _check_pickle(start_of_file, budget)
        return

    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            # Other entries hold numbers only. torch reads the instructions from data.pkl. It
            # compares names without their case.
            if PurePosixPath(entry.filename.lower()).name != PICKLE_IN_ZIP:
                continue
            if entry.file_size > MAX_PICKLE_BYTES:
                raise ValueError(f"{entry.filename} has {entry.file_size:,} bytes of instructions")
            with archive.open(entry) as file:
                _check_pickle(file, budget)


def _check_pickle(file: IO[bytes], budget: Iterator[int]) -> None:
    """Follow the instructions of one pickle to its end, without executing them.

    Args:
        file: The file, which is read to the end of the pickle.
        budget: Gives the number of each instruction, counted over all pickles of the checkpoint.

    Raises:
        ValueError: The pickle is damaged, or would keep its loader busy.
    """
    machine = _Machine()
    n_large_integers = 0
    try:
        for instruction, argument, _ in pickletools.genops(file):
            if next(budget) > MAX_INSTRUCTIONS:
                raise ValueError(f"more than {MAX_INSTRUCTIONS:,} instructions, which no model has")
            if instruction.name in LARGE_INTEGERS:
                n_large_integers += 1
            if n_large_integers > MAX_LARGE_INTEGERS:
                raise ValueError(f"more than {MAX_LARGE_INTEGERS:,} large integers")
            machine.follow(instruction, argument)
    except (IndexError, KeyError) as error:
        raise ValueError("a damaged pickle, which takes values that it does not have") from error
