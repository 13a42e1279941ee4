"""What a run answers, and what its reader must know before using the figure.

The figure is the number of viral reads. `answer_of` computes the answer from the summary of a run.
The terminal, `--json`, the message of the flow, the artifact, `summary.json`, the summary page and
the validation report all show what it returns, so they cannot contradict each other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from virnuc_core.encoder_names import NAMES, RANDOM_ORIGIN
from virnuc_core.sample_familiarity import SampleFamiliarity

HEAD: Final = "head"  # the name of the classifier's folder in a models directory
PART_TITLES: Final[dict[str, str]] = {
    HEAD: "the classifier",
    **{names.name: names.title for names in NAMES},
}
SCORED_FATES: Final = ("viral", "others", "uncertain")
# Why reads have no verdict, by their fate, in the order in which they are listed
UNJUDGED_REASONS: Final = {
    "no_open_frame": "no open reading frame",
    "uncertain": "an uncertain score",
    "empty": "no bases",
    "failed": "set aside (failed.tsv)",
}
NOT_A_NEGATIVE: Final = "Reads without a verdict are unknown. They do not count as not viral."
RANDOM_NOTE: Final = "No score or verdict means anything. Use such weights only to try things out."
RANDOM_WEIGHTS: Final = "RANDOM WEIGHTS: no verdict on a read means anything"
UNTESTED_NOTE: Final = (
    "The classifier has no card: no test on known reads is recorded for it. Its error rate on your "
    "reads is unknown."
)
UNKNOWN_WEIGHTS_NOTE: Final = (
    "An older version of virnuc made this run. It did not record where the weights come from."
)


class RunFacts(Protocol):
    """What the answer is computed from. The summary of a run has it."""

    @property
    def n_reads(self) -> int | None:
        """Number of reads; None if it was not recorded."""

    @property
    def fates(self) -> Mapping[str, int]:
        """Number of reads by what became of them."""

    @property
    def pairs(self) -> Mapping[str, int]:
        """Number of pairs by what became of them; empty for single reads."""

    @property
    def n_short(self) -> int | None:
        """Number of reads shorter than half of the classifier's length; None: not recorded."""

    @property
    def model_length(self) -> int | None:
        """Bases of the chunks that the classifier was made for; None: not recorded."""

    @property
    def origins(self) -> Mapping[str, str]:
        """Return the origin of the weights of each model, by its folder; empty: not recorded."""

    @property
    def has_card(self) -> bool | None:
        """Return True if the classifier has a card with a test result; None: not recorded."""

    @property
    def familiarity(self) -> SampleFamiliarity | None:
        """Return the comparison of the reads with those of the training; None: not recorded."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on how the reads differ from those that the classifier was trained on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run answers.

    Attributes:
        reads: Number of reads.
        viral: Reads that are called viral.
        others: Reads that are called not viral.
        scored: Reads with a score.
        without_verdict: Reads without a verdict. They are not "not viral".
        why_without_verdict: Number of these reads by reason.
        too_short: Reads shorter than half of the classifier's length; None: not recorded.
        model_length: The classifier's length in bases; None: not recorded.
        pairs: Number of pairs of reads; 0 for single reads.
        viral_pairs: Pairs that are called viral.
        random_weights: Titles of the models whose weights are random; None: not recorded.
        tested: Whether the classifier has a card with the result of a test; None: not recorded.
        remarks: What to know before using the figures, a sentence or two each, worst first.
        message: The answer in one line.
        domain_warning: That the reads are unlike those of the classifier's training; empty if they
            are like them, or if it is not known. It is the last line on a terminal.
    """

    reads: int
    viral: int
    others: int
    scored: int
    without_verdict: int
    why_without_verdict: dict[str, int]
    too_short: int | None
    model_length: int | None
    pairs: int
    viral_pairs: int
    random_weights: tuple[str, ...] | None
    tested: bool | None
    remarks: tuple[str, ...]
    message: str
    domain_warning: str

    @property
    def headline(self) -> str:
        """Return the first part of the message: how many reads, and pairs, are viral."""
        return _headline(self.reads, self.viral, self.pairs, self.viral_pairs)


def answer_of(run: RunFacts) -> Answer:
    """Return what a run answers, and what its reader must know first.

    Args:
        run: The summary of a run, or the sum of several.
    """
    fates = run.fates
    reads = sum(fates.values()) if run.n_reads is None else run.n_reads
    viral = fates.get("viral", 0)
    scored = sum(fates.get(fate, 0) for fate in SCORED_FATES)
    reasons: dict[str, int] = {}
    for fate, reason in UNJUDGED_REASONS.items():
        if fates.get(fate, 0):
            reasons[reason] = fates[fate]
    without_verdict = sum(reasons.values())
    pairs = sum(run.pairs.values())
    viral_pairs = run.pairs.get("viral", 0)
    random_weights = random_parts(run.origins)
    parts = [_headline(reads, viral, pairs, viral_pairs)]
    if reads:
        parts += _count_parts(scored, reasons, run.n_short)
    if random_weights:
        parts.append(RANDOM_WEIGHTS)
    elif run.has_card is False:
        parts.append("the classifier is untested (it has no card)")
    familiarity = _stated_familiarity(run)
    domain_warning = ""
    if familiarity is not None:
        parts.append(familiarity.headline)
        if familiarity.is_outside:
            domain_warning = familiarity.headline
    return Answer(
        reads=reads,
        viral=viral,
        others=fates.get("others", 0),
        scored=scored,
        without_verdict=without_verdict,
        why_without_verdict=reasons,
        too_short=run.n_short,
        model_length=run.model_length,
        pairs=pairs,
        viral_pairs=viral_pairs,
        random_weights=random_weights,
        tested=run.has_card,
        remarks=remarks_of(run),
        message="; ".join(parts),
        domain_warning=domain_warning,
    )


def _stated_familiarity(run: RunFacts) -> SampleFamiliarity | None:
    """Return how the reads compare with the training, if it is worth a line.

    Of random weights no verdict means anything, so nothing is added to that. But reads that are
    unlike the training are always told: the comparison needs no weights, and a random stand-in for
    one encoder leaves the other one real.
    """
    familiarity = run.familiarity
    if familiarity is None or (random_parts(run.origins) and not familiarity.is_outside):
        return None
    return familiarity


def _headline(reads: int, viral: int, pairs: int, viral_pairs: int) -> str:
    """Return how many reads, and pairs, are viral."""
    if not reads:
        return "the input holds no reads; the tables have no lines"
    text = f"{viral:,} of {reads:,} reads are viral"
    if pairs:
        text += f"; {viral_pairs:,} of {pairs:,} pairs"
    return text


def _count_parts(scored: int, reasons: Mapping[str, int], n_short: int | None) -> list[str]:
    """Return the parts of the message on reads with a score, without a verdict, and too short."""
    parts = [f"{scored:,} have a score"]
    without_verdict = sum(reasons.values())
    if without_verdict:
        details = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        parts.append(f'{without_verdict:,} have no verdict, which is not "not viral" ({details})')
    if n_short:
        parts.append(f"{n_short:,} are too short for the classifier")
    return parts


def random_parts(origins: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the titles of the models whose weights are random.

    Args:
        origins: Where the weights of each model come from, by its folder.

    Returns:
        None if the origins are not known.
    """
    if not origins:
        return None
    titles = []
    for part, origin in origins.items():
        if origin.startswith(RANDOM_ORIGIN):
            titles.append(PART_TITLES.get(part, part))
    return tuple(titles)


def weight_remarks(origins: Mapping[str, str], has_card: bool | None) -> tuple[str, ...]:
    """Return what to know of the weights: they are random, or the classifier is untested.

    Args:
        origins: Where the weights of each model come from, by its folder; empty if not known.
        has_card: Whether the classifier has a card with the result of a test; None: not known.
    """
    random_weights = random_parts(origins)
    if random_weights is None:
        return (UNKNOWN_WEIGHTS_NOTE,)
    remarks = []
    if random_weights:
        remarks.append(f"The weights of {_join(random_weights)} are random. {RANDOM_NOTE}")
    if has_card is False:
        remarks.append(UNTESTED_NOTE)
    return tuple(remarks)


def remarks_of(run: RunFacts) -> tuple[str, ...]:
    """Return what to know before using the figures of a run, a sentence or two each, worst first.

    A new remark that needs the models or the reads is computed by the run itself, which keeps it
    in the field `remarks` of its summary. A remark that follows from the summary is added here.

    Args:
        run: The summary of a run, or the sum of several.
    """
    remarks = [*weight_remarks(run.origins, run.has_card)]
    familiarity = _stated_familiarity(run)
    if familiarity is not None and familiarity.remark:
        remarks.append(familiarity.remark)
    remarks += [_as_sentence(remark) for remark in run.remarks]
    reads = sum(run.fates.values()) if run.n_reads is None else run.n_reads
    without_verdict = sum(run.fates.get(fate, 0) for fate in UNJUDGED_REASONS)
    if without_verdict:
        share = _share(without_verdict, reads)
        remarks.append(f"{without_verdict:,} reads ({share}) have no verdict. {NOT_A_NEGATIVE}")
    if run.n_short:
        share = _share(run.n_short, reads)
        length = "of the classifier's length"
        if run.model_length:
            length = f"of the classifier's {run.model_length} bases"
        remarks.append(
            f"{run.n_short:,} reads ({share}) are shorter than half {length}. "
            "Their scores are unreliable, unless the classifier was trained on such reads."
        )
    return tuple(remarks)


def _share(part: int, whole: int) -> str:
    """Return a share in percent as text."""
    return f"{100 * part / whole:.1f} %" if whole else "n/a"


def _join(names: Iterable[str]) -> str:
    """Return names as `A, B and C`."""
    *first, last = names
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def _as_sentence(text: str) -> str:
    """Return a remark with a capital letter at its beginning and a full stop at its end."""
    sentence = text[:1].upper() + text[1:]
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
