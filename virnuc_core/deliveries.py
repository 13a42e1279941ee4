"""Divide the files of an inbox into deliveries: files that are predicted together, as one sample.

A delivery is a file alone, two files of mates, the lanes of a sample, or what a sample sheet in the
inbox says. All its files have to be complete before it is predicted.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from virnuc_core.errors import InputError, VirnucError
from virnuc_core.reads.file_names import NamedPair, cut_endings, find_mates, group_samples
from virnuc_core.reads.mate_files import find_problem_of_pair
from virnuc_core.reads.sample_sheet import find_name_problem, read_sheet

SHEET_SUFFIXES: Final = (".csv", ".tsv")
_SHEET_HEAD_BYTES: Final = 1 << 12
_SHEET_MARK: Final = re.compile(r"(?i)\bfastq_1\b")
# Names in the directory of the results that are not names of samples.
_OWN_NAMES: Final = frozenset({"runs", "fates", "claims", "inbox.tsv"})


@dataclass(frozen=True)
class Delivery:
    """Files that are predicted together. Their names are relative to the inbox.

    Attributes:
        sample: The name of the sample.
        pairs: File of first mates and file of second mates, one for each lane.
        singles: Files of reads without mates.
    """

    sample: str
    pairs: tuple[tuple[str, str], ...] = ()
    singles: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Return all files. The first one stands for the delivery."""
        paired_files = tuple(file for pair in self.pairs for file in pair)
        return paired_files + self.singles

    def key(self, digests: Mapping[str, str]) -> str:
        """Return the digest of the contents of all files and of their roles.

        Of a file alone it is the digest of its content. The order of the lanes does not matter.

        Args:
            digests: SHA-256 of each file.
        """
        if len(self.files) == 1:
            return digests[self.files[0]]
        lanes = [f"pair {digests[first]} {digests[second]}" for first, second in self.pairs]
        lanes += [f"single {digests[file]}" for file in self.singles]
        return hashlib.sha256("\n".join(sorted(lanes)).encode()).hexdigest()


@dataclass
class Grouping:
    """The files of an inbox, grouped.

    Attributes:
        deliveries: The deliveries whose files are all complete.
        held: Files that wait for others, with the reason.
        ignored: Files that hold no reads of a sample (index reads, sample sheets), with the reason.
        failed: Sample sheets that cannot be used, with the reason.
    """

    deliveries: list[Delivery] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class InboxFiles:
    """What is known of the files of an inbox, by their names relative to it.

    Attributes:
        inbox: The folder.
        complete: Files whose content is known.
        arriving: Files that may still be written.
        young: Complete files that came so recently that their mates may still be on the way.
    """

    inbox: Path
    complete: tuple[str, ...]
    arriving: frozenset[str]
    young: frozenset[str] = frozenset()


def group_files(files: InboxFiles, *, join_mates: bool) -> Grouping:
    """Divide the files of an inbox into deliveries.

    The beginnings of files are read where their names alone do not tell whether they are mates.

    Args:
        files: The files.
        join_mates: Files of mates are pairs. If false, only lanes and sheets join files.
    """
    grouping = Grouping()
    used_files = _take_sheets(files, grouping)
    by_folder: dict[Path, list[str]] = {}
    for file in (*files.complete, *sorted(files.arriving)):
        if file not in used_files:
            by_folder.setdefault(Path(file).parent, []).append(file)
    for names in by_folder.values():
        _group_folder(files, sorted(names), grouping, join_mates=join_mates)
    return grouping


def _take_sheets(files: InboxFiles, grouping: Grouping) -> set[str]:
    """Add the samples of all sample sheets to a grouping.

    Args:
        files: The files.
        grouping: Is extended.

    Returns:
        The sheets, and the files that they name.
    """
    used_files = set[str]()
    for sheet in files.complete:
        if not sheet.lower().endswith(SHEET_SUFFIXES) or not _is_sheet(files.inbox / sheet):
            continue
        used_files.add(sheet)
        try:
            samples = read_sheet(files.inbox / sheet)
        except InputError as error:
            grouping.failed[sheet] = str(error)
            continue
        except VirnucError as error:  # the system cannot read it at the moment
            grouping.held[sheet] = str(error)
            continue
        deliveries: list[Delivery] = []
        for sample, reads in samples.items():
            names = {file: _name_in(files.inbox, file, sheet) for file in reads.all_inputs}
            pairs = zip(reads.mates_1, reads.mates_2, strict=True)
            deliveries.append(
                Delivery(
                    sample,
                    tuple((names[first], names[second]) for first, second in pairs),
                    tuple(names[file] for file in reads.reads),
                )
            )
        grouping.ignored[sheet] = f"sample sheet of {len(deliveries)} samples"
        for delivery in deliveries:
            used_files.update(delivery.files)
            _add(files, grouping, delivery, f"which {sheet} names")
    return used_files


def _is_sheet(path: Path) -> bool:
    """Return True if a table names a column `fastq_1` near its beginning."""
    try:
        with path.open("rb") as file:
            head = file.read(_SHEET_HEAD_BYTES)
    except OSError:
        return False
    return bool(_SHEET_MARK.search(head.replace(b"\0", b"").decode("utf-8", "replace")))


def _name_in(inbox: Path, file: str, sheet: str) -> str:
    """Return the name of a file of a sheet, relative to the inbox.

    A file that does not exist yet is expected beside the sheet.
    """
    path = Path(file)
    if path.is_absolute() or path.is_relative_to(inbox):
        path = path.absolute()
    if path.is_relative_to(inbox.absolute()):
        return str(path.relative_to(inbox.absolute()))
    return str(Path(sheet).parent / file)


def _add(files: InboxFiles, grouping: Grouping, delivery: Delivery, reason: str = "") -> None:
    """Add a delivery to a grouping if all its files are complete. Otherwise its files are held.

    Args:
        files: The files.
        grouping: Is extended.
        delivery: The delivery.
        reason: Why the delivery needs a file, for the note.
    """
    complete = set(files.complete)
    missing = [file for file in delivery.files if file not in complete]
    if not missing:
        grouping.deliveries.append(delivery)
        return
    note = f"waits for {missing[0]}"
    if reason:
        note += f", {reason}"
    for file in delivery.files:
        if file in complete:
            grouping.held[file] = note


def _group_folder(
    files: InboxFiles, names: list[str], grouping: Grouping, *, join_mates: bool
) -> None:
    """Add the deliveries of one folder, without the files of sheets, to a grouping.

    Args:
        files: All files of the inbox.
        names: The files of the folder.
        grouping: Is extended.
        join_mates: Files of mates are pairs.
    """
    mates = find_mates(names)
    grouping.ignored |= {
        file: reason for file, reason in mates.left_out.items() if file in files.complete
    }
    names = [name for name in names if name not in mates.left_out]
    pairs: list[tuple[str, str]] = []
    if join_mates:
        pairs = [(p.first, p.second) for p in mates.pairs if _are_mates(files, p)]
    samples, clashes = group_samples(names, pairs)
    clashing_files = {file for clash in clashes for file in clash}
    lonely = set(mates.lonely) if join_mates else set[str]()
    for sample in samples:
        delivery = Delivery(sample.name, tuple(sample.pairs), tuple(sample.singles))
        young = [file for file in delivery.files if file in lonely & files.young]
        if young:
            grouping.held |= dict.fromkeys(young, "waits for the file of its mates")
        elif clashing_files.isdisjoint(delivery.files):
            _add(files, grouping, delivery)
        else:
            clashing_files.update(delivery.files)
    # Files that cannot be told apart by their names are predicted one by one.
    second_of_first = dict(pairs)
    seconds = set(second_of_first.values())
    for file in sorted(clashing_files - seconds):
        second = second_of_first.get(file)
        if second is None:
            delivery = Delivery(cut_endings(file), singles=(file,))
        else:
            delivery = Delivery(cut_endings(file), pairs=((file, second),))
        _add(files, grouping, delivery)


def _are_mates(files: InboxFiles, pair: NamedPair) -> bool:
    """Return True if two files that are mates by their names are joined.

    If one of them is still arriving, that is assumed: the other one has to wait in any case. It is
    also assumed if one cannot be read now, because their prediction then says why.
    """
    if files.arriving & {pair.first, pair.second}:
        return True
    real_pair = NamedPair(
        str(files.inbox / pair.first), str(files.inbox / pair.second), pair.is_certain
    )
    try:
        return not find_problem_of_pair(real_pair)
    except VirnucError:
        return True


def link_names(sample: str, key: str) -> Iterable[str]:
    """Return the names under which the results of a sample may be shown, the best one first.

    Args:
        sample: The name of the sample.
        key: The digest of the delivery. It tells deliveries with the same name apart.
    """
    name = re.sub(r"[^\w.+=@-]", "_", sample).strip(".-_") or "sample"
    name = name[:80]
    names = [name, f"{name}-{key[:8]}", f"{name}-{key[:16]}"]
    is_reserved = name.lower() in _OWN_NAMES or bool(find_name_problem(name))
    return names[1:] if is_reserved else names
