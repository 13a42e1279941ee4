"""Tells by the names of files which of them hold mates, and which belong to the same sample.

This is the only place that knows how sequencers, archives and trimming tools name their files. No
file is opened here. The rule is a small grammar:

- A name without its endings (`.fastq.gz`) is cut into words at `_`, `.`, `-` and blanks.
- A *mate mark* is a word that says which mate the file holds: `R1`, `1P`, `fwd`, or a number after
  the word of a tool (`val_1`, `unmapped_2`). A number alone (`_1`) may be a mate mark, too.
- *Words of tools* (`trimmed`, `fastp`), *lanes* (`L001`) and *set numbers* (`001`) may follow.

Two files are a pair if their names differ only by their mate marks. Some marks are certain. Others
are only a sign, such as `_1`, which may also be the number of a patient. Then
`NamedPair.is_certain` is false, and the caller has to look into the files.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ENDINGS: Final = re.compile(
    r"(?i)(?<=.)(\.(fastq|fq|fasta|fa|fna|ffn|bam|cram|sam))?(\.(gz|bz2|xz|zst|bgz))?\Z"
)
_SEPARATORS: Final = re.compile(r"([_. -])")


def _words(text: str) -> frozenset[str]:
    """Return the words of a text, which are separated by blanks."""
    return frozenset(text.split())


_FORMAT_WORDS: Final = _words("fastq fq fasta fa fna txt sequence")
# Words of tools that leave pairs, and the same reads, in another form.
_TOOL_WORDS: Final = _words(
    """trim trimmed trimgalore trimmomatic trimming fastp cutadapt cut adapter adapters noadapter
    atria skewer sickle bbduk bbmap bbsplit bbnorm clean cleaned cleandata hostile hostremoved
    hostfree nohost nohuman dehosted dehost decontaminated decontam decon kneaddata filtered filter
    filt qc qced qual processed preprocessed raw dedup deduped deduplicated dedupe nodup rmdup umi
    extract extracted corrected cor ecc norm normalized un unmapped mapped aligned unaligned
    unconc conc classified unclassified subsampled subset sampled downsampled fixed repaired sorted
    truncated out rrna nonrrna phix nophix merged concat bowtie2 bwa minimap2 kraken2 sortmerna
    clumped clumpify prinseq"""
)
# Words of tools that divide reads into those with a mate and those without: these have one.
_PAIRED_WORDS: Final = _words("val paired pe notcombined unassembled matched pairs")
_UNPAIRED_WORDS: Final = _words("unpaired unmatched unmated orphan orphans singleton singletons")
# These say the same, but only without a mate mark: `merged_R1` holds mates of merged lanes.
_SINGLE_WORDS: Final = _words("merged collapsed extendedfrags assembled single singles se other")
_NUMBERED_WORDS: Final = _words("r read mate pair end pe p fq fastq")
_MATE_WORDS: Final = {
    "fwd": ("fwd/rev", 1),
    "rev": ("fwd/rev", 2),
    "forward": ("forward/reverse", 1),
    "reverse": ("forward/reverse", 2),
    "fw": ("fw/rv", 1),
    "rv": ("fw/rv", 2),
    "left": ("left/right", 1),
    "right": ("left/right", 2),
    "f": ("f/r", 1),
    "r": ("f/r", 2),
}
# Marks that nobody uses for anything else, at the end of a name or before known words.
_CERTAIN_STYLES: Final = _words("r read mate pair trimmomatic fwd/rev forward/reverse val paired")
# Marks that often mean something else (left lung, plate 1). They are tried last.
_AMBIGUOUS_STYLES: Final = _words("left/right f/r p end fq fastq")
_NUMBERED_MARK: Final = re.compile(r"(r|reads?|mate|pair|end|p|pe|fq|fastq)([123])")
_GLUED_MARK: Final = re.compile(r"([a-z]+)([12])")  # such as `trimmed1`
_TRIMMOMATIC_MARK: Final = re.compile(r"r?([12])([pu])")
_INDEX_MARK: Final = re.compile(r"(?:i|index)([12])")
_NUMBER: Final = re.compile(r"0|[1-9]\d*")
_LANE: Final = re.compile(r"l\d{3}|lane\d+")
_SHORT_LANE: Final = re.compile(r"l\d{1,2}")  # of MGI and Novogene, only beside a flow cell
_FLOW_CELL: Final = re.compile(r"(?=.*\d)(?=.*[A-Z])[A-Z0-9]{8,14}")
_SET_NUMBER: Final = re.compile(r"\d{3}")
_TOOL_SETTING: Final = re.compile(r"(q|qual|len|min|trim)?\d+")  # such as `q20`
# A mate mark that no separator sets apart: `AR1`, `A+R1`, `A_R1(1)`. Other numbers may be anything.
_HIDDEN_NUMBER: Final = re.compile(r"(?<!\d)[123](?!\d)")
_HIDDEN_WORD: Final = re.compile(r"(?i)forward|reverse|fwd|rev")
# What stands before a number that looks like a mate mark: a capital R, or one of these words alone.
_BEFORE_HIDDEN_NUMBER: Final = re.compile(r"(R|(?<![A-Za-z])(?i:r|reads?|mate|pair|end|pe))\Z")
INDEX_REASON: Final = "index reads by its name, left out"
UNPAIRED_REASON: Final = "their names say that the reads have no mate"
UMI_REASON: Final = "molecular tags or index reads by its name (R2 beside R1 and R3), left out"


@dataclass(frozen=True)
class _Mark:
    """A word of a file name that may say which mate the file holds.

    Attributes:
        position: The index of the word.
        style: How the mark is written; mates have marks of the same style.
        number: 1 or 2 for mates; 3 for a third file; any number if `style` is `number`.
        follows_tool: The mark was written by a tool, behind the name of its input.
        is_index: The file holds index reads, not mates.
    """

    position: int
    style: str
    number: int
    follows_tool: bool = False
    is_index: bool = False


@dataclass(frozen=True)
class _Name:
    """The name of a file, cut into words.

    Attributes:
        file: The path, or address.
        folder: The part of the path before the name.
        words: The words of the name without its endings.
        separators: The letter after each word but the last.
    """

    file: str
    folder: str
    words: tuple[str, ...]
    separators: tuple[str, ...]

    @property
    def lower_words(self) -> tuple[str, ...]:
        """Return the words in small letters."""
        return tuple(word.lower() for word in self.words)

    def text_without(self, positions: Iterable[int]) -> str:
        """Return the name with `@` in place of the words at these positions."""
        words = list(self.words)
        for position in positions:
            words[position] = "@"
        pairs = zip(words, (*self.separators, ""), strict=True)
        return "".join(word + separator for word, separator in pairs)


@dataclass(frozen=True)
class NamedPair:
    """Two files that are mates by their names.

    Attributes:
        first: The file of the first mates.
        second: The file of the second mates.
        is_certain: If false, the names may also mean something else (`patient_1`, `patient_2`), and
            only the ids of the reads tell.
        mark_positions: The indexes of the words by which the names differ.
    """

    first: str
    second: str
    is_certain: bool
    mark_positions: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class UnjoinedFiles:
    """Files whose names differ only by something like a mate mark, but that are not joined."""

    files: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class MateNames:
    """What the names of some files say about mates.

    Attributes:
        pairs: The files that are pairs.
        left_out: Files that hold no reads of a sample (index reads), with the reason.
        unjoined: Files that look like mates and are not joined.
        lonely: Files that are certainly named as one mate, and whose other mate is missing.
        similar: Two files whose names differ by a 1 and a 2 within a word (`donor1`, `donor2`).
            This is no mate mark, but if their reads have the same ids, they may be mates.
    """

    pairs: tuple[NamedPair, ...]
    left_out: Mapping[str, str]
    unjoined: tuple[UnjoinedFiles, ...]
    lonely: tuple[str, ...]
    similar: tuple[tuple[str, str], ...] = ()


@dataclass
class NamedSample:
    """The files of one sample, according to their names.

    Attributes:
        name: The name of the sample.
        pairs: File of first mates and file of second mates, one for each lane.
        singles: Files of reads without mates.
    """

    name: str
    pairs: list[tuple[str, str]] = field(default_factory=list)
    singles: list[str] = field(default_factory=list)


def cut_endings(file: str) -> str:
    """Return the name of a file without its folder, format and compression (`.fastq.gz`)."""
    return ENDINGS.sub("", Path(file).name)


def add_word(path: Path, word: str) -> Path:
    """Return a path with a word added to its name, before the endings: `a.fq.gz` to `a_R1.fq.gz`.

    Args:
        path: The path.
        word: The word with its separator, such as `_R1`.
    """
    stem = cut_endings(path.name)
    endings = path.name[len(stem) :]
    return path.with_name(f"{stem}{word}{endings}")


def find_mates(files: Iterable[str]) -> MateNames:
    """Find out which files are mates by their names. No file is opened.

    The order of the files does not matter, except for the order of the result.

    Args:
        files: Paths of FASTQ files. Mates lie in the same folder.
    """
    names = [_parse_name(file) for file in files]
    pairs: list[NamedPair] = []
    left_out: dict[str, str] = {}
    # Try the most certain marks first. A file that has found its mate is not tried again.
    for marks_of_name in _MARK_RULES:
        used_files = {file for pair in pairs for file in (pair.first, pair.second)}
        used_files.update(left_out)
        unused_names = [name for name in names if name.file not in used_files]
        for group in _group_by_mates(unused_names, marks_of_name):
            left_out.update(group.find_left_out())
            pair = group.find_pair()
            if pair is not None:
                pairs.append(pair)
    used_files = {file for pair in pairs for file in (pair.first, pair.second)} | set(left_out)
    unused_names = [name for name in names if name.file not in used_files]
    unjoined = list(_find_unjoined(unused_names))
    reported_files = {file for files_in_doubt in unjoined for file in files_in_doubt.files}
    other_names = [name for name in unused_names if name.file not in reported_files]
    hidden_unjoined, similar = _find_hidden_marks(other_names)
    unjoined += hidden_unjoined
    in_doubt = {file for files_in_doubt in unjoined for file in files_in_doubt.files}
    lonely = tuple(
        name.file
        for name in unused_names
        if name.file not in in_doubt and not _is_unpaired(name) and _certain_mark(name)
    )
    position = {name.file: index for index, name in enumerate(names)}
    pairs.sort(key=lambda pair: min(position[pair.first], position[pair.second]))
    return MateNames(tuple(pairs), left_out, tuple(unjoined), lonely, tuple(similar))


def name_of_pair(first: str, second: str) -> str:
    """Return the name that two files of mates share; empty if their names are not those of mates.

    The lane stays part of the name if it stands before the mate mark.

    Args:
        first: The file of the first mates.
        second: The file of the second mates.
    """
    # The user may have named files of two folders as mates. Only their names are compared here.
    pairs = find_mates(("1/" + Path(first).name, "2/" + Path(second).name)).pairs
    if not pairs:
        pairs = find_mates((Path(first).name, Path(second).name)).pairs
    if not pairs:
        return ""
    name = _parse_name(first)
    return _describe(name, pairs[0].mark_positions, is_pair=True, keep_lane=True).short


def group_samples(
    files: Sequence[str], pairs: Iterable[tuple[str, str]]
) -> tuple[list[NamedSample], list[tuple[str, str]]]:
    """Divide files into samples by their names.

    Files that differ only by the lane or the set number are lanes of one sample. Reads without a
    mate (`unpaired`, or the third file of an archive) belong to the sample of the pairs. Raw and
    trimmed files of the same sample hold the same reads, so they are told apart as two samples.

    Args:
        files: All files, in the order in which the samples shall come.
        pairs: Those that are mates: file of first mates, file of second mates.

    Returns:
        The samples. And the files that clash: a file that cannot be told from another one by its
        name, with this other file.
    """
    second_of_first = dict(pairs)
    seconds = set(second_of_first.values())
    described: list[tuple[_SampleName, tuple[str, ...]]] = []
    for file in files:
        if file in seconds:
            continue
        second = second_of_first.get(file)
        described.append(
            (_describe_files(file, second), (file,) if second is None else (file, second))
        )
    # A description has the name of the sample (`short`), the words that tools have added to it
    # (`variant`), and the name without the mate mark (`label`), by which files are told apart.
    variants = defaultdict[str, set[str]](set)
    for description, _ in described:
        if not description.is_unpaired:
            variants[description.short].add(description.variant)
    samples: dict[str, NamedSample] = {}
    labels: dict[tuple[str, str], str] = {}  # by sample and label: the file that has it
    clashes: list[tuple[str, str]] = []
    for description, group in described:
        name = description.name_among(variants[description.short])
        sample = samples.setdefault(name, NamedSample(name))
        # A lone mate beside pairs of other lanes: its other file is missing.
        is_lone_mate = len(group) == 1 and bool(sample.pairs) and description.is_mate
        earlier_file = labels.setdefault((name, description.label), group[0])
        if earlier_file != group[0] or is_lone_mate:
            clashes.append((group[0], earlier_file if not is_lone_mate else sample.pairs[0][0]))
        elif len(group) == 2:
            sample.pairs.append((group[0], group[1]))
        else:
            sample.singles.append(group[0])
    for sample in samples.values():
        # A file alone keeps its whole name.
        if not sample.pairs and len(sample.singles) == 1:
            sample.name = cut_endings(sample.singles[0])
    return list(samples.values()), clashes


# --- Words ----------------------------------------------------------------------------------------


def _parse_name(file: str) -> _Name:
    """Return the name of a file, cut into words.

    What follows a format within the name (`a_R1.fq.old`) is dropped, unless it is a mate mark, as
    bowtie2 writes it (`a.fastq.1.gz`).
    """
    path = Path(file)
    parts = _SEPARATORS.split(cut_endings(file))
    words, separators = parts[::2], parts[1::2]
    lower_words = [word.lower() for word in words]
    for position in range(1, len(words)):
        rest = lower_words[position + 1 :]
        if lower_words[position] in ("fastq", "fq") and rest and rest[0] not in ("1", "2"):
            words, separators = words[:position], separators[: position - 1]
            break
    return _Name(file, str(path.parent), tuple(words), tuple(separators))


def _mark_at(name: _Name, position: int) -> _Mark | None:
    """Return the mate mark that the word at a position is; None for another word.

    The first word is never a mark, because a name has to remain for the sample.
    """
    if position == 0:
        return None
    word = name.lower_words[position]
    word_before = name.lower_words[position - 1]
    if match := _INDEX_MARK.fullmatch(word):
        return _Mark(position, "r", int(match[1]), is_index=True)
    if match := _NUMBERED_MARK.fullmatch(word):
        return _Mark(position, match[1].removesuffix("s"), int(match[2]))
    if match := _TRIMMOMATIC_MARK.fullmatch(word):
        return _Mark(position, "trimmomatic", int(match[1]), follows_tool=True)
    if word in _MATE_WORDS:
        style, number = _MATE_WORDS[word]
        return _Mark(position, style, number)
    if (match := _GLUED_MARK.fullmatch(word)) and _is_word_of_tool(match[1]):
        return _Mark(position, match[1], int(match[2]), follows_tool=True)
    if _NUMBER.fullmatch(word):
        if position > 1 and (_is_word_of_tool(word_before) or word_before in _NUMBERED_WORDS):
            return _Mark(position, word_before, int(word), follows_tool=True)
        return _Mark(position, "number", int(word))
    return None


def _is_word_of_tool(word: str) -> bool:
    """Return True for a word that tools add to names, such as `trimmed`; in small letters."""
    return word in _TOOL_WORDS or word in _PAIRED_WORDS or word in _UNPAIRED_WORDS


def _is_known_ending(name: _Name, position: int) -> bool:
    """Return True if the word may follow a mate mark: of a tool, a lane, a set number, a format."""
    word = name.lower_words[position]
    return (
        _is_word_of_tool(word)
        or word in _FORMAT_WORDS
        or word in _SINGLE_WORDS
        or _is_lane(name, position)
        or bool(_SET_NUMBER.fullmatch(word) or _TOOL_SETTING.fullmatch(word))
    )


def _is_lane(name: _Name, position: int) -> bool:
    """Return True for a lane of a sequencer.

    `L1` may also be a leaf or a liver. It is a lane only beside the name of a flow cell.
    """
    word = name.lower_words[position]
    if position == 0:
        return False
    if _LANE.fullmatch(word):
        return True
    has_flow_cell = bool(_FLOW_CELL.fullmatch(name.words[position - 1]))
    return has_flow_cell and bool(_SHORT_LANE.fullmatch(word))


def _marks(name: _Name) -> list[_Mark]:
    """Return all words of a name that may be mate marks, from left to right."""
    marks = [_mark_at(name, position) for position in range(1, len(name.words))]
    return [mark for mark in marks if mark is not None]


def _is_unpaired(name: _Name) -> bool:
    """Return True if a name says that the reads of the file have no mate."""
    later_words = name.lower_words[1:]
    for word in later_words:
        glued = _GLUED_MARK.fullmatch(word)
        trimmomatic = _TRIMMOMATIC_MARK.fullmatch(word)
        if word in _UNPAIRED_WORDS or (glued and glued[1] in _UNPAIRED_WORDS):
            return True
        if trimmomatic and trimmomatic[2] == "u":
            return True
    has_mark = _explicit_mark(name) is not None or _number_mark(name) is not None
    return not has_mark and any(word in _SINGLE_WORDS for word in later_words)


# --- Marks ----------------------------------------------------------------------------------------


def _explicit_mark(name: _Name) -> _Mark | None:
    """Return the last mark that is more than a number and not ambiguous; None without one.

    A larger number than 3 (`trim_20`) is the mark only of a name without any other.
    """
    marks = [
        mark
        for mark in reversed(_marks(name))
        if mark.style != "number" and mark.style not in _AMBIGUOUS_STYLES
    ]
    small_numbers = [mark for mark in marks if mark.number <= 3]
    return next(iter([*small_numbers, *marks]), None)


def _letter_mark(name: _Name) -> _Mark | None:
    """Return the last mark that no tool has added, such as `R1`; None without one."""
    for mark in reversed(_marks(name)):
        is_explicit = mark.style != "number" and mark.style not in _AMBIGUOUS_STYLES
        if is_explicit and not mark.follows_tool:
            return mark
    return None


def _number_mark(name: _Name) -> _Mark | None:
    """Return a number that ends the name and may be a mate mark; None without one.

    Known words may follow it, and any words after a point (`a_1.some-tool`).
    """
    for mark in reversed(_marks(name)):
        later = range(mark.position + 1, len(name.words))
        is_known = all(_is_known_ending(name, position) for position in later)
        is_before_point = bool(later) and name.separators[mark.position] == "."
        if mark.style == "number" and (is_known or is_before_point):
            return mark
    return None


def _certain_mark(name: _Name) -> _Mark | None:
    """Return the mark of a name that cannot mean anything else; None if there is no such mark."""
    mark = _explicit_mark(name)
    if mark is None or mark.is_index or mark.style not in _CERTAIN_STYLES:
        return None
    later = range(mark.position + 1, len(name.words))
    return mark if all(_is_known_ending(name, position) for position in later) else None


def _link(name: _Name, mark: _Mark | None) -> tuple[_Mark, ...]:
    """Return a mark with the mark before it, if both have the same number; else nothing.

    A tool that adds its own mark keeps the mark of its input: `a_R1` becomes `a_R1_val_1`.
    """
    if mark is None or mark.style in _CERTAIN_STYLES - {"val", "paired", "trimmomatic"}:
        return ()
    earlier = [other for other in _marks(name) if other.position < mark.position]
    if earlier and earlier[-1].number == mark.number and not earlier[-1].is_index:
        return (earlier[-1], mark)
    return ()


def _only(mark: _Mark | None) -> tuple[_Mark, ...]:
    """Return a tuple with the mark; an empty one for None."""
    return () if mark is None else (mark,)


def _ambiguous_mark(name: _Name) -> _Mark | None:
    """Return the last mark that often means something else, such as `left`; None without one."""
    for mark in reversed(_marks(name)):
        if mark.style in _AMBIGUOUS_STYLES:
            return mark
    return None


_ChooseMarks = Callable[[_Name], tuple[_Mark, ...]]
# Ways to choose the mate marks of a name, the most certain first. Each returns the marks that are
# replaced to compare the name with others; none if the name has no such mark.
_MARK_RULES: Final[tuple[_ChooseMarks, ...]] = (
    lambda name: _only(_explicit_mark(name)),
    lambda name: _link(name, _explicit_mark(name)),
    lambda name: _only(_letter_mark(name)),
    lambda name: _only(_number_mark(name)),
    lambda name: _link(name, _number_mark(name)),
    lambda name: _only(_ambiguous_mark(name)),
)


@dataclass
class _MateGroup:
    """Files whose names differ only by their mate marks.

    Attributes:
        style: The style of the last mark.
        names: The names with their marks, by the number of the mate.
        index_names: The names of files of index reads.
    """

    style: str
    names: dict[int, list[tuple[_Name, tuple[_Mark, ...]]]] = field(default_factory=dict)
    index_names: list[_Name] = field(default_factory=list)

    @property
    def _has_tags(self) -> bool:
        """Return True for R1, R2 and R3: R2 then holds molecular tags or index reads."""
        return self.style == "r" and sorted(self.names) == [1, 2, 3]

    def find_left_out(self) -> dict[str, str]:
        """Return the files without reads of a sample, with the reason why each is left out."""
        left_out: dict[str, str] = {}
        for name in self.index_names:
            words = name.lower_words
            is_illumina = any(_is_lane(name, position) for position in range(1, len(words)))
            # Without files of mates beside it, `I1` may be a name that somebody chose.
            if self.names or is_illumina:
                left_out[name.file] = INDEX_REASON
        if self._has_tags:
            left_out |= {name.file: UMI_REASON for name, _ in self.names[2]}
        return left_out

    def find_pair(self) -> NamedPair | None:
        """Return the two files that are mates; None if there are not exactly two.

        Files 1 and 3 are mates if there is no second file: archives leave out the file of index
        reads, and keep the numbers. This is not certain.
        """
        numbers = sorted(self.names)
        if numbers not in ([1, 2], [1, 3]) and not self._has_tags:
            return None
        firsts, seconds = self.names[1], self.names[2 if numbers == [1, 2] else 3]
        if len(firsts) != 1 or len(seconds) != 1:
            return None
        first, marks = firsts[0]
        second = seconds[0][0]
        is_certain = numbers != [1, 3] and self._is_certain(first, marks)
        positions = tuple(mark.position for mark in marks)
        return NamedPair(first.file, second.file, is_certain, positions)

    @staticmethod
    def _is_certain(name: _Name, marks: tuple[_Mark, ...]) -> bool:
        """Return True if the marks of a name cannot mean anything else."""
        last_mark = marks[-1]
        later = range(last_mark.position + 1, len(name.words))
        has_known_ending = all(_is_known_ending(name, position) for position in later)
        return has_known_ending and any(mark.style in _CERTAIN_STYLES for mark in marks)


def _group_by_mates(names: Iterable[_Name], marks_of_name: _ChooseMarks) -> Iterator[_MateGroup]:
    """Group names that differ only by their mate marks.

    Args:
        names: The names. Those that say that their reads have no mate are passed over.
        marks_of_name: Chooses the marks of a name, see `_MARK_RULES`.

    Yields:
        The groups, in the order of their first name.
    """
    groups: dict[tuple[object, ...], _MateGroup] = {}
    for name in names:
        marks = marks_of_name(name)
        if not marks or _is_unpaired(name):
            continue
        last_mark = marks[-1]
        styles = tuple(mark.style for mark in marks)
        key = (name.folder, styles, name.text_without(mark.position for mark in marks))
        group = groups.setdefault(key, _MateGroup(last_mark.style))
        if last_mark.is_index:
            group.index_names.append(name)
        else:
            group.names.setdefault(last_mark.number, []).append((name, marks))
    yield from groups.values()


def _find_unjoined(names: Sequence[_Name]) -> Iterator[UnjoinedFiles]:
    """Yield files that differ only by a word that looks like a mate mark.

    Args:
        names: The names of files that were not joined.
    """
    groups: dict[tuple[object, ...], dict[int, list[_Name]]] = {}
    for name in names:
        for position in range(len(name.words)):
            mark = _mark_at(name, position) or _first_word_mark(name, position)
            if mark is not None:
                key = (name.folder, mark.style, name.text_without((position,)))
                numbers = groups.setdefault(key, {})
                numbers.setdefault(mark.number, []).append(name)
    reported = set[str]()
    for numbers in groups.values():
        similar = [name for number in sorted(numbers) for name in numbers[number]]
        files = tuple(name.file for name in similar)
        if not (1 in numbers and (2 in numbers or 3 in numbers)) or reported.issuperset(files):
            continue
        reported.update(files)
        if all(_is_unpaired(name) for name in similar):
            reason = UNPAIRED_REASON
        elif set(numbers) - {1, 2, 3}:
            reason = "their names are numbered on"
        elif len(files) > 2:
            reason = "they are more than two"
        else:
            reason = "the mark does not stand where mates are marked"
        yield UnjoinedFiles(files, reason)


def _find_hidden_marks(
    names: Sequence[_Name],
) -> tuple[list[UnjoinedFiles], list[tuple[str, str]]]:
    """Find two files whose names differ only by a number or a word within another word.

    Args:
        names: The names of files that were neither joined nor reported.

    Returns:
        The files that differ by what looks like a mate mark, such as `AR1` and `AR2`. And those
        that differ by another 1 and 2, see `MateNames.similar`.
    """
    # By the name without the number: the number of each file, and whether it looks like a mark
    groups: dict[tuple[str, str], dict[str, tuple[int, bool]]] = {}
    for name in names:
        stem = cut_endings(name.file)
        for match in _HIDDEN_NUMBER.finditer(stem):
            rest = f"{stem[: match.start()]}@{stem[match.end() :]}"
            is_mark = bool(_BEFORE_HIDDEN_NUMBER.search(stem[: match.start()]))
            group = groups.setdefault((name.folder, rest), {})
            group[name.file] = (int(match[0]), is_mark)
        for match in _HIDDEN_WORD.finditer(stem):
            style, number = _MATE_WORDS[match[0].lower()]
            rest = f"{stem[: match.start()]}@{style}@{stem[match.end() :]}"
            group = groups.setdefault((name.folder, rest), {})
            group[name.file] = (number, True)
    unjoined: list[UnjoinedFiles] = []
    similar: list[tuple[str, str]] = []
    reported = set[str]()
    for group in groups.values():
        files = sorted(group, key=lambda file: group[file][0])
        numbers = [group[file][0] for file in files]
        if numbers != [1, 2] or not reported.isdisjoint(files):
            continue
        reported.update(files)
        looks_like_mark = all(is_mark for _, is_mark in group.values())
        if looks_like_mark:
            unjoined.append(UnjoinedFiles((files[0], files[1]), "the mark is not a word by itself"))
        else:
            similar.append((files[0], files[1]))
    return unjoined, similar


def _first_word_mark(name: _Name, position: int) -> _Mark | None:
    """Return a mark for a name that begins like one, such as `R1_lung`; None for other words."""
    match = _NUMBERED_MARK.fullmatch(name.lower_words[position])
    if position == 0 and match and len(name.words) > 1:
        return _Mark(0, match[1], int(match[2]))
    return None


# --- Samples --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SampleName:
    """What the name of a file, or of two mates, says about the sample.

    Attributes:
        short: The name of the sample, without marks, lanes and words of tools.
        variant: The words that tools have added: raw and trimmed files have different ones.
        label: The name; of two mates without the marks. Files of one sample with the same label
            clash.
        is_unpaired: The name says that the reads have no mate.
        is_mate: The file is one of mates, and the other one is missing.
    """

    short: str
    variant: str
    label: str
    is_unpaired: bool = False
    is_mate: bool = False

    def name_among(self, variants: set[str]) -> str:
        """Return the name of the sample, if these are the variants of files with the short name.

        With several variants, the words of tools tell the samples apart.
        """
        if len(variants) <= 1 or not self.variant:
            return self.short
        return f"{self.short}_{self.variant}"


def _describe_files(file: str, second: str | None) -> _SampleName:
    """Return what the name of a file says about its sample.

    Args:
        file: The file, or the file of first mates.
        second: The file of second mates; None for a file alone.
    """
    name = _parse_name(file)
    if second is not None:
        pairs = find_mates((file, second)).pairs
        # Without a pair by name, the user has joined the files. Then the name stays as it is.
        return _describe(name, pairs[0].mark_positions if pairs else (), is_pair=True)
    marks = _only(_certain_mark(name))
    if _is_unpaired(name):
        # Trim Galore calls the single reads of `a_1` `a_1_unpaired_1`.
        mark = _explicit_mark(name) or _number_mark(name)
        marks = _link(name, mark) or _only(mark)
    return _describe(name, tuple(mark.position for mark in marks), is_pair=False)


def _describe(
    name: _Name, mark_positions: tuple[int, ...], *, is_pair: bool, keep_lane: bool = False
) -> _SampleName:
    """Return what a name says about the sample of the file.

    Args:
        name: The name.
        mark_positions: The indexes of its mate marks.
        is_pair: The name is that of two mates.
        keep_lane: Keep a lane that stands before the mate mark.
    """
    lanes = {position for position in range(len(name.words)) if _is_lane(name, position)}
    end = min(mark_positions, default=len(name.words))
    # Cut off what tools, sequencers and earlier mate marks have added before the mark. One word
    # stays in any case.
    if 1 < end < len(name.words) and name.lower_words[end - 1] in _NUMBERED_WORDS:
        end -= 1  # the word to which the number of the mate belongs, as in `a.mate.1`
    while end > 1 and _is_added_word(name, end - 1, has_mark=bool(mark_positions)):
        end -= 1
    head = [position for position in range(end) if keep_lane or position not in lanes]
    if keep_lane:
        while end < min(mark_positions, default=0) and end in lanes:
            head.append(end)
            end += 1
    short = ""
    for position in head:
        separator = name.separators[position - 1] if short else ""
        short += separator + name.words[position]
    variant_words = []
    for position in range(end, len(name.words)):
        word = name.lower_words[position]
        is_set_number = bool(_SET_NUMBER.fullmatch(word))
        is_dividing = word in _PAIRED_WORDS | _UNPAIRED_WORDS | _SINGLE_WORDS | _FORMAT_WORDS
        is_mark = _mark_at(name, position) is not None
        if position not in lanes and not (is_set_number or is_dividing or is_mark):
            variant_words.append(name.words[position])
    is_unpaired = _is_unpaired(name)
    return _SampleName(
        short=short,
        variant="_".join(variant_words),
        label=name.text_without(mark_positions if is_pair else ()),
        is_unpaired=is_unpaired,
        is_mate=bool(mark_positions) and not is_unpaired,
    )


def _is_added_word(name: _Name, position: int, *, has_mark: bool) -> bool:
    """Return True if a word was added to the name of the sample by a sequencer or a tool.

    Args:
        name: The name.
        position: The index of the word. All words after it are such words.
        has_mark: The name has a mate mark after it.
    """
    word = name.lower_words[position]
    if _is_lane(name, position) or _is_word_of_tool(word) or word in _FORMAT_WORDS:
        return True
    if word in _SINGLE_WORDS or not word:  # empty between two separators, as in `a__R1`
        return True
    if not has_mark:
        return False
    # kneaddata calls both files after the first mate: `a_R1_001_kneaddata_paired_2`
    mark = _mark_at(name, position)
    if _SET_NUMBER.fullmatch(word):
        mark = _mark_at(name, position - 1)
    return mark is not None and mark.style == "r" and position + 1 < len(name.words)
