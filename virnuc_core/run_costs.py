"""What a run costs before it is started: time on GPUs that were measured, and disk space.

The speeds are those of docs/results. A test looks for each of them there.
"""

from dataclasses import dataclass
from typing import Final, Literal

from virnuc_core.encoders.registry import DNA_ENCODER, PROTEIN_ENCODER

BYTES_PER_VALUE: Final = 4  # of an embedding or a score
N_SCORES: Final = 2  # of a row, beside its embeddings
# Seconds until the first batch, with the public weights on a local disk (docs/results).
START_S: Final = 5.5
# GPUs that people ask for, and of which no run was measured.
NOT_MEASURED_GPUS: Final = ("A100", "L40S", "RTX 4090", "L4", "T4")


@dataclass(frozen=True)
class MeasuredSpeed:
    """The speed of a GPU model in a real run with the public sizes of both encoders.

    Attributes:
        gpu: The model.
        precision: The arithmetic of the run.
        tokens_per_s: Tokens of the protein encoder for each second that it computes.
        protein_share: The share of that encoder in the time that the GPU computes. It was measured
            on the H200; other models have its share.
        page: Where the measurement is described, below `docs`.
    """

    gpu: str
    precision: Literal["fp16", "int8"]
    tokens_per_s: int
    protein_share: float
    page: str


# A million reads in fp16: 483 of the 505 s in which an H200 computed. In int8 251 s of 290 s; 22 s
# of the rest were for rows near the threshold, which are embedded a second time.
_SHARE_FP16: Final = 483 / 505
_SHARE_INT8: Final = 251 / 290
MEASURED_SPEEDS: Final = (
    MeasuredSpeed("H200", "fp16", 100_300, _SHARE_FP16, "results/h200-1m-2026-11-24/index.md"),
    MeasuredSpeed("H200", "int8", 194_500, _SHARE_INT8, "results/measurement-diary.md"),
    MeasuredSpeed("H100", "fp16", 101_800, _SHARE_FP16, "results/measurement-diary.md"),
    MeasuredSpeed("H100", "int8", 181_700, _SHARE_INT8, "results/measurement-diary.md"),
)


def estimate_seconds(n_tokens: float, speed: MeasuredSpeed) -> float:
    """Estimate how many seconds a run takes on one GPU, from the command to its end.

    Args:
        n_tokens: Tokens of the protein encoder, of distinct rows (open reading frames).
        speed: The speed of the GPU.
    """
    return START_S + n_tokens / speed.tokens_per_s / speed.protein_share


def embedding_bytes(n_rows: int, width: int) -> int:
    """Return how many bytes the embeddings and scores of some rows take on the disk.

    Args:
        n_rows: Distinct rows (open reading frames).
        width: Values of the embeddings of one row, of all encoders together.
    """
    return BYTES_PER_VALUE * (width + N_SCORES) * n_rows


def public_width() -> int:
    """Return how many values the embeddings of a row have with the public encoders."""
    encoders = (DNA_ENCODER, PROTEIN_ENCODER)
    return sum(encoder.sizes[encoder.reference_size].width for encoder in encoders)
