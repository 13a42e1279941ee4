"""Reads that come in pairs, as one stream in which mates follow each other, whether two files hold them or one.

Mates are told by name: equal ids, or ids that end in `/1` and `/2`. In the stream all ids end so, which keeps mates
apart. Where broken records are skipped, a read without its mate is an orphan and stands in the stream alone."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from virnuc_core.config import ReadsSpec
from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import Format, ParseLog, ReadBatch, Strings
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sources import Inputs, find_alignment_format_of_file, sample_name

Columns = list[Any]  # of reads that follow each other

MATE_FILE: Final = re.compile(
    r"(.+)_(R?)([12])(_\d{3})?(?:\.\w+)*"
)  # stem, letter, mate, part of a lane
ENDS: Final = (b"/1", b"/2")  # of ids
STEPS: Final = "mates must follow in the same order; --on-error skip judges orphans alone, --no-pairs each read"
ASTRAY: Final = "%s: mates do not follow each other, so each read is judged by itself; samtools collate mends that"
BATCH_READS: Final = 1 << 14
_AT_ONCE: Final = 1 << 12
_NEAR: Final = 1 << 6  # reads among which the next pair is looked for, at first
_FAR: Final = 1 << 16  # and then
_log = logging.getLogger(__name__)


def arranged(spec: ReadsSpec, found: Inputs) -> Inputs:
    """What was found of a spec's inputs, with the files that hold mates, which come first; the log names them."""
    pairs = [*zip(spec.mates_1, spec.mates_2, strict=True)] if spec.pairs else []
    rest = [name for name in found.files if not any(name in pair for pair in pairs)]
    pairs += [(name, name) for name in rest if spec.interleaved and spec.pairs]
    told = dict.fromkeys(pairs, "as asked")
    alike = defaultdict[tuple[Path | str, ...], tuple[list[str], list[str]]](lambda: ([], []))
    for file in rest if spec.pairs and not spec.interleaved else ():
        if form := find_alignment_format_of_file(file):
            from virnuc_core.reads.alignments import (
                SampleFilter,
                mates_follow,
            )  # few files are such

            if follow := mates_follow(
                file, form, SampleFilter(spec.read_group, sample_name((file,)))
            ):
                told[file, file] = "by their flags; --no-pairs judges each read by itself"
            elif follow is not None:
                _log.warning(ASTRAY, file)
        elif match := MATE_FILE.fullmatch(Path(file).name):
            stem, letter, mate, part = match.groups()
            alike[Path(file).parent, stem, letter, part][mate == "2"].append(file)
    for (_, _, letter, _), (firsts, seconds) in alike.items():
        both, named = (*firsts, *seconds), any(name in spec.reads for name in (*firsts, *seconds))
        if firsts and seconds and (len(both) > 2 or named):
            said = "%s seem to hold pairs; each read is judged by itself, -1 and -2 before the files judge pairs"
            _log.warning(said, " and ".join(both))
        elif firsts and seconds:
            told[firsts[0], seconds[0]] = "by their names; --no-pairs judges each read by itself"
        elif letter and not named:
            _log.warning(
                "%s: no file with its mates beside it; each read is judged by itself", both[0]
            )
    for (first, second), how in told.items():
        _log.info("pairs: %s and %s, %s", first, second, how)
    files = [name for pair in told for name in dict.fromkeys(pair)]
    return Inputs(
        (*files, *(name for name in rest if name not in files)), found.ignored, tuple(told)
    )


def pair_batches(inputs: Inputs, log: ParseLog, *, text: bool = True) -> Iterator[ReadBatch]:
    """Batches of the reads of files with mates, with the text of records if asked. Errors: of `parse`; `InputError` for
    files out of step or the wrong way round and, unless `log.on_error` is `skip`, for a read without its mate."""
    for names in inputs.pairs:
        sides = [_Side(name, log) for name in dict.fromkeys(names)]
        held: Columns = [[] for _ in range(5)]
        for placed in chain(_in_turn(sides[0], sides[-1], log), (None,)):
            for column, more in zip(held, placed or (), strict=False):
                column.extend(more)
            if held[0] and (placed is None or len(held[0]) >= BATCH_READS):
                ids, bases, texts = map(Strings.from_strings, (*held[:2], held[2] if text else ()))
                lines, mate = map(np.array, held[3:])
                yield ReadBatch(0, sides[0].form, ids, bases, lines, texts, follows_mate=mate)
                held = [[] for _ in range(5)]


class _Side:
    """The reads of a file whose turn has not come yet, as far as it was read."""

    def __init__(self, file: str, log: ParseLog) -> None:
        self.file, self._batches = file, parse((file,), log)
        # names that mates share, bases, text, line; and which mate each says it is, 0 where it does not
        self._reads: Columns = [[], [], [], [], b""]
        self._at = 0  # the next of them
        self.form: Format = "fastq"

    def __len__(self) -> int:
        return len(self._reads[0]) - self._at

    def has(self, count: int) -> bool:
        """Whether so many reads are left; they are there then."""
        while len(self) < count and (batch := next(self._batches, None)) is not None:
            if batch.part is not None:
                raise InputError(
                    "too long for the read of a pair", file=self.file, line=int(batch.lines[0])
                )
            self.form, names = (
                batch.format,
                [one[:-2] if one[-2:] in ENDS else one for one in batch.ids],
            )
            letters = np.frombuffer(batch.records.data + bytes(3), np.uint8)
            # an id that was not printable is longer than in its header
            after = np.minimum(batch.records.offsets[:-1] + 1 + batch.ids.lengths, len(letters) - 3)
            casava = (letters[after] == ord(" ")) & (letters[after + 2] == ord(":"))
            mate = np.where(
                letters[after - 2] == ord("/"), letters[after - 1], casava * letters[after + 1]
            ) - ord("0")
            says = (mate * ((mate == 1) | (mate == 2))).astype(np.uint8).tobytes()
            new = names, [*batch.bases], [*batch.records], batch.lines.tolist(), says
            self._reads = [
                old[self._at :] + more for old, more in zip(self._reads, new, strict=True)
            ]
            self._at = 0
        return len(self) >= count

    def next(self, count: int, column: int = 0) -> Any:
        """A column of the next reads."""
        return self._reads[column][self._at : self._at + count]

    def take(self, count: int) -> Columns:
        """The next reads, whose turn has come."""
        taken = [self.next(count, column) for column in range(5)]
        self._at += count
        return taken

    def error(self, reads: Columns, at: int, problem: str, hint: str = STEPS) -> InputError:
        """Of one of the reads."""
        return InputError(
            problem, file=self.file, line=reads[3][at], read_id=reads[0][at].decode(), hint=hint
        )


def _in_turn(first: _Side, second: _Side, log: ParseLog) -> Iterator[Columns]:
    """Mates after each other, and orphans between them; `first` is `second` where one file holds both."""
    step, paired, most = 2 if first is second else 1, False, _AT_ONCE
    while first.has(step) and second.has(1):
        if first.form != second.form:
            raise InputError(
                f"is {first.form}, but {second.file} with its mates {second.form}", file=first.file
            )
        count = min(len(first), len(second), most) // step
        ours, theirs = first.next(step * count)[::step], second.next(step * count)[step - 1 :: step]
        both = enumerate(zip(ours, theirs, strict=True)) if ours != theirs else ()
        same = next((at for at, (one, other) in both if one != other), count)
        taken = first.take(step * same)
        mates = second.take(same) if step == 1 else [column[1::2] for column in taken]
        yield _mates([column[::step] for column in taken], mates, first, second)
        paired, most = paired or same > 0, min(2 * most, _AT_ONCE)
        if same < count:
            lost, others = (1, 0) if first is second else _next_pair(first, second, paired)
            yield _orphans(first, lost, second, 2 - step, log)
            yield _orphans(second, others, first, 2, log)
            most = _NEAR  # where some are lost there may be more
    for side, other, mate in ((first, second, 2 - step), (second, first, 2)):
        while side.has(1):
            yield _orphans(side, len(side), other, mate, log)


def _mates(ours: Columns, theirs: Columns, first: _Side, second: _Side) -> Columns:
    for mate, side, reads in ((1, first, ours), (2, second, theirs)):
        if (at := reads[4].find(3 - mate)) >= 0:
            raise side.error(
                reads, at, f"is mate {3 - mate}, mate {mate} belongs here", "are the files swapped?"
            )
    woven = (
        list(chain.from_iterable(zip(*both, strict=True)))
        for both in zip(ours[1:4], theirs[1:4], strict=True)
    )
    return [[name + end for name in ours[0] for end in ENDS], *woven, [False, True] * len(ours[0])]


def _orphans(side: _Side, count: int, other: _Side, mate: int, log: ParseLog) -> Columns:
    """Reads without their mates; where one file holds both mates each is what it says, else the first."""
    reads = side.take(count)
    if count and log.on_error == "stop":
        then = [
            f"where '{name.decode()}' is next, at line {other.next(1, 3)[0]}"
            for name in other.next(1)
        ]
        raise side.error(reads, 0, f"has no mate in {other.file}, {(*then, 'which ends')[0]}")
    ids = [
        b"%b/%d" % (name, mate or said or 1) for name, said in zip(reads[0], reads[4], strict=True)
    ]
    return [ids, *reads[1:4], [False] * count]


def _next_pair(first: _Side, second: _Side, paired: bool) -> tuple[int, int]:
    """How many reads of each file stand before the next pair; all, where none comes and some were `paired` before.
    Errors: `InputError` for files that do not hold their reads in the same order."""
    for reach in (_NEAR, _FAR):
        ended = not (first.has(reach) | second.has(reach))
        ours, theirs = first.next(reach), second.next(reach)
        place = {name: at for at, name in reversed([*enumerate(theirs)])}
        lost = next((at for at, name in enumerate(ours) if name in place), None)
        if lost is not None:
            others = place[ours[lost]]
            if {*theirs[:others]}.isdisjoint(ours):
                return lost, others
            break
    else:
        if paired and ended:
            return len(first), len(second)
    problem = f"its mates do not follow in {second.file}, where '{theirs[0].decode()}' is next"
    raise first.error(first.take(1), 0, problem)
