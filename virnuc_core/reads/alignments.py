"""BAM, CRAM and SAM as the FASTQ that `samtools fastq` makes of them: each read once, on the strand it was read from.

Records go through pysam one by one, from a pipe, so that whatever a file comes through is read once and kept nowhere.
"""

import functools
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any, Final

from virnuc_core.errors import InputError

NOT_PRIMARY: Final = 0x900  # secondary and supplementary: the read stands in another record too
REVERSE: Final = 0x10
MATE: Final = {0x40: "/1", 0x80: "/2"}
_COMPLEMENT: Final = str.maketrans("ACGTMRWSYKVHDBN", "TGCAKYWSRMBDHVN")
_NO_QUALITY: Final = "B"  # for each base of a record without any, as samtools writes it
# among the last bytes of a whole file
_END: Final = {
    "BAM": bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000"),
    "CRAM": b"\xe0EOF\0",
}
_END_BYTES: Final = 40
_TEXT_LETTERS: Final = 1 << 20  # of a piece
_LOOKED_AT: Final = 1000  # records


@functools.cache  # asked before the start and at it
def samples_of(file: str, form: str, rest: str, _changed_ns: int) -> list[str]:
    """Whose reads a file holds: of each read group the sample (SM), else the ID; and `rest` where a read is of none of
    them, for which the file is read. Errors: `InputError` without read groups, or pysam; damage is for who reads it,
    `rest` where nothing can be told."""
    found = dict.fromkeys((rest,))
    with (
        suppress(OSError, ValueError),
        pysam_for(form, file).AlignmentFile(file, check_sq=False) as opened,
    ):
        if not (groups := _groups(opened)):
            hint = "--sample-from name makes each whole file a sample"
            raise InputError("has no read groups (@RG)", file=file, hint=hint)
        found = dict.fromkeys(groups.values())
        if any(
            not one.flag & NOT_PRIMARY and _sample(one, groups) is None
            for one in opened.fetch(until_eof=True)
        ):
            found[rest] = None
    return [*found]


def _groups(opened: Any) -> dict[str, str]:
    return {
        one["ID"]: one.get("SM") or one["ID"]
        for one in opened.header.to_dict().get("RG", ())
        if "ID" in one
    }


def _sample(record: Any, groups: dict[str, str]) -> str | None:
    return groups.get(record.get_tag("RG")) if record.has_tag("RG") else None


def _records(opened: Any, kept: tuple[str, str]) -> Iterator[Any]:
    """The records of a sample, or all for ""; of a sample that is called as the second of `kept` those of no group."""
    groups, (wanted, rest) = _groups(opened), kept
    every = opened.fetch(until_eof=True)
    return (one for one in every if (_sample(one, groups) or rest) == wanted) if wanted else every


def mates_follow(file: str, form: str, kept: tuple[str, str] = ("", "")) -> bool | None:
    """Whether mates follow each other, as `samtools collate` and sequencers leave them, and not those of a sort by
    place; None where the first reads that are `kept` have none, or of damage. Errors: `InputError` without pysam."""
    names: list[str] = []
    with (
        suppress(OSError, ValueError),
        pysam_for(form, file).AlignmentFile(file, check_sq=False) as opened,
    ):
        by_place = opened.header.to_dict().get("HD", {}).get("SO") == "coordinate"
        first = islice(_records(opened, kept), _LOOKED_AT)
        names += (one.query_name for one in first if one.is_paired and not one.flag & NOT_PRIMARY)
    return any(one == other for one, other in pairwise(names)) and not by_place if names else None


def pysam_for(form: str, file: str) -> Any:
    """The package. Errors: `InputError` that names the file, where it is not installed."""
    try:
        pysam = importlib.import_module("pysam")
    except ImportError as error:
        problem, hint = (
            f"this is {form}, but the package pysam is not installed",
            "install it, or use samtools fastq",
        )
        raise InputError(problem, file=file, hint=hint) from error
    pysam.set_verbosity(0)  # of damage our own error tells
    return pysam


def fastq(
    pysam: Any, pieces: Iterator[bytes], form: str, file: str, kept: tuple[str, str] = ("", "")
) -> Iterator[tuple[str, int]]:
    """Whole records of FASTQ, and how many alignments were left out between them; `pieces` hold a file of this `form`.
    `kept` names the sample whose reads these are, and what those without a read group are called. Errors: `InputError`
    where the data is damaged or ends early."""
    outlet, inlet = os.pipe()
    tail, ended = b"", False

    def feed() -> None:
        nonlocal tail, ended
        with suppress(Exception), open(inlet, "wb") as into:  # noqa: PTH123 - a descriptor
            for piece in pieces:  # whatever stops this leaves the file not `ended`
                tail = (tail + piece)[-_END_BYTES:]
                into.write(piece)
            ended = True

    feeder = threading.Thread(target=feed, daemon=True)
    count, left_out, name, held, letters = 0, 0, "", list[str](), 0
    try:
        with open(outlet, "rb", 0) as source:  # noqa: PTH123
            feeder.start()
            with pysam.AlignmentFile(source, check_sq=False, ignore_truncation=True) as opened:
                for count, record in enumerate(_records(opened, kept), 1):  # noqa: B007 - told of damage
                    name, flag = record.query_name, record.flag
                    if flag & NOT_PRIMARY:
                        left_out += 1
                        continue
                    bases = record.query_sequence or ""
                    if len(bases) > 1:
                        quality = record.query_qualities_str
                    else:  # pysam makes the text of a single one in a byte that all of Python shares
                        quality = "".join(chr(33 + one) for one in record.query_qualities or ())
                    quality = quality or _NO_QUALITY * len(bases)
                    if flag & REVERSE:
                        bases, quality = bases[::-1].translate(_COMPLEMENT), quality[::-1]
                    held.append(f"@{name}{MATE.get(flag & 0xC0, '')}\n{bases}\n+\n{quality}\n")
                    letters += len(held[-1])
                    if letters >= _TEXT_LETTERS:
                        yield "".join(held), left_out
                        left_out, held, letters = 0, [], 0
        feeder.join()
        if not ended or _END.get(form, b"") not in tail:
            raise OSError
    except (OSError, ValueError) as error:
        yield "".join(held), left_out
        problem = f"the {form} data is damaged, or ends early, after record {count:,}"
        hint = (
            "is its reference at hand (REF_PATH)? else use samtools fastq --reference"
            if form == "CRAM"
            else ""
        )
        raise InputError(problem, file=file, read_id=name, hint=hint or "copy it again") from error
    finally:
        feeder.join(1.0)  # one that waits for standard input is left behind
    yield "".join(held), left_out
