"""What a run says about how much its reads are like those that its classifier was trained on."""

from typing import Final, Literal

from virnuc_core.config import Spec

Verdict = Literal["familiar", "partly unfamiliar", "unfamiliar", "too few reads", "unknown"]
UNLIKE_TRAINING: Final = ("partly unfamiliar", "unfamiliar")  # verdicts on samples outside
MIN_READS: Final = 50  # below, nothing is said about a sample
UNKNOWN_DOMAIN_NOTE: Final = (
    "It is not known what the classifier was trained on. Reads of kinds that it has never seen get "
    "scores, too, and no measurement can warn you of them."
)


class SampleFamiliarity(Spec):
    """How much the reads of a sample are like those of the classifier's training."""

    verdict: Verdict
    compared: int = 0  # reads that have an open frame of a usual length
    far: int = 0  # of these, by themselves unlike all that the classifier was trained on
    # Shares of far reads among those of one genome of a known kind: the share that 95 of 100
    # genomes do not exceed, and the largest one.
    usual_share: float = 0.0
    largest_share: float = 0.0
    # Mean distance of the reads to the nearest kind, as a multiple of that of reads of known kinds,
    # and the same of one genome of a known kind: what 95 of 100 do not exceed, and the largest.
    # None: the classifier is of an older version, which did not measure it.
    mean_distance: float = 0.0
    usual_distance: float | None = None
    largest_distance: float | None = None

    @property
    def share(self) -> float:
        """Return the share of far reads among those that could be compared."""
        return self.far / max(1, self.compared)

    @property
    def is_outside(self) -> bool:
        """Return whether the sample is farther from the training than known kinds are."""
        return self.verdict in UNLIKE_TRAINING

    @property
    def headline(self) -> str:
        """Return the verdict as a part of the message of a run."""
        if self.verdict == "unknown":
            return "what the classifier was trained on is unknown"
        if self.verdict == "too few reads":
            return "too few reads to tell whether they are like those of the training"
        if self.verdict == "familiar":
            return "the reads are like those of the classifier's training"
        return (
            f"{self.verdict.upper()} SAMPLE: the reads, taken together, are unlike all that the "
            "classifier was trained on"
        )

    @property
    def remark(self) -> str:
        """Return what to know before using the figures; empty for a familiar sample."""
        if self.verdict == "unknown":
            return UNKNOWN_DOMAIN_NOTE
        if self.verdict == "too few reads":
            return (
                f"Only {self.compared:,} reads could be compared with the classifier's training; "
                f"{MIN_READS} are needed to say whether they are like it."
            )
        if self.verdict == "familiar":
            return ""
        share = f"{100 * self.share:.1f} %"
        distance = ""
        if self.usual_distance is not None:
            distance = (
                f"The mean distance of all reads is {self.mean_distance:.2f} times that of reads "
                f"of known kinds (95 of 100 genomes: at most {self.usual_distance:.2f}; none more "
                f"than {self.largest_distance:.2f}). "
            )
        return (
            f"{self.far:,} of {self.compared:,} reads ({share}) are unlike all that the classifier "
            "was trained on (flag unfamiliar in reads.tsv). Of the genomes that its training held "
            f"out, 95 of 100 have at most {100 * self.usual_share:.1f} % such reads, and none has "
            f"more than {100 * self.largest_share:.1f} %. {distance}The sample is {self.verdict}: "
            "its verdicts may be wrong in a way that no figure of the classifier foretells."
        )


UNKNOWN_DOMAIN: Final = SampleFamiliarity(verdict="unknown")
