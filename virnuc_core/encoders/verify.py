"""Whether a models directory is what it should be: complete, finite, and with the public weights equal to VirNucPro."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch
from Bio.Seq import Seq
from torch import Tensor

from virnuc_core.config import EngineSpec
from virnuc_core.encoders import model_config
from virnuc_core.encoders.checkpoint import check_finite, fingerprint, load_all, open_part
from virnuc_core.encoders.layers import Encoder
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape, HeadShape, Shape
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, PackedBatch, Tokenizer
from virnuc_core.errors import WeightsError

Verdict = Literal["ok", "warn", "fail", "not run"]

ANCHOR_LENGTH: Final = 500
TOLERANCE: Final = 2e-4  # of scores and entries, float32 on another machine; half precision is off by ten times as much
NORM_TOLERANCE: Final = 1e-4  # relative


@dataclass(frozen=True, slots=True)
class Check:
    """One question put to a models directory or a machine, and its answer in one line."""

    name: str
    verdict: Verdict
    detail: str


class Anchor(NamedTuple):
    """One row of VirNucPro's public test reads, and what it gives for it in float32 with its 500 head."""

    name: str
    dna: bytes
    virus: float  # score
    dna_norm: float
    dna_first: float
    protein_norm: float
    protein_first: float

    @property
    def protein(self) -> bytes:
        """The row's translation, by another translator than the reads'."""
        return bytes(Seq(self.dna[: len(self.dna) // 3 * 3]).translate())  # type: ignore[no-untyped-call]


# two made-up reads' reverse strands: virnucpro-broad, tests/data/test_with_orfs.fa (MIT)
_SEQ1: Final = (
    b"TTATTTCGCCGCTTCTTTCGCCGCTTTCAGTTCCGCAATCGCTTCTTTCGCCGCTTCAATCGCTTTACCTTTCGCCGCCATCGCTTCCGCCGCTTTTTTAATC"
    b"GCTTCTGCCAGTTCTGCACGTTTTTCAATCGCTTCTTTCAGTTCTGCAATACGTTTACCTTTGCTAGCCAT"
)
_SEQ2: Final = (
    b"TCAACGTTTTTCAATCGCTTCTTTCAGTTCTGCAATACGTTTACCTTTCGCCGCTTCTTTCGCCGCTTTCAGTTCCGCAATCGCTTCTTTCGCCGCTTCAATC"
    b"GCTTTACCTTTCGCCGCCATCGCTTCCGCCGCTTTTTTAATCGCTTCTGCCAGTTCTGCACGTTTCAT"
)
ANCHORS: Final = (  # their open frames
    Anchor("seq1 R1", _SEQ1, 0.8789939, 3.660475, -0.070582, 14.341653, 0.069515),
    Anchor("seq1 R2", _SEQ1[1:-1], 0.9988405, 3.740260, -0.006739, 13.663273, 0.011022),
    Anchor("seq2 R1", _SEQ2, 0.4498659, 3.904326, 0.071082, 14.291137, 0.084354),
    Anchor("seq2 R2", _SEQ2[1:-1], 0.93954605, 4.107737, 0.062328, 13.813206, 0.008760),
)


def verify(models: Path, device: torch.device) -> tuple[Check, ...]:
    """Every check of a models directory, in order. A part that cannot be opened is a `fail`, not an exception."""
    kinds: tuple[type[Shape], ...] = (Esm2Shape, DnabertShape, HeadShape)
    checks = [_part(models, kind) for kind in kinds]
    if any(check.verdict == "fail" for check in checks):
        return (*checks, Check("anchors", "not run", "a part is not sound"))
    checks += [Check(f"{part} sha256", "ok", digest) for part, digest in fingerprint(models).items()]
    return (*checks, *_anchors(models, device))


def _part(models: Path, kind: type[Shape]) -> Check:
    """All tensors of a part are there, have their shape and hold finite numbers."""
    name = kind.part()
    try:
        shape, read = open_part(models, kind)
        count = check_finite(models / name, shape, read)
    except WeightsError as error:
        return Check(name, "fail", str(error))
    return Check(name, "ok", f"{count:,} numbers, {shape.origin or 'of unknown origin'}")


def _anchors(models: Path, device: torch.device) -> list[Check]:
    """The original's published numbers, where the weights are the original's."""
    shape, dna_shape = open_part(models, Esm2Shape)[0], open_part(models, DnabertShape)[0]
    head_shape = open_part(models, HeadShape)[0]
    big, base = model_config.ESM2_SIZES["t36_3B"], model_config.DNABERT_SIZES["base"]
    reason = None  # why the anchors say nothing about these weights
    if any(one.origin.startswith(model_config.RANDOM_ORIGIN) for one in (shape, dna_shape, head_shape)):
        reason = "random weights"
    elif any((a.width, a.layers) != (b.width, b.layers) for a, b in ((shape, big), (dna_shape, base))):
        reason = "not ESM-2 3B and DNABERT-S"
    elif head_shape.model_length != ANCHOR_LENGTH:
        reason = f"the head is for {head_shape.model_length} bases, not 500"
    if reason is not None:
        return [Check("anchors", "not run", reason)]
    esm2, dnabert_s, head = load_all(models, device, EngineSpec(precision="fp32"))
    protein = embed(esm2, Esm2Tokenizer(), [anchor.protein for anchor in ANCHORS], device)
    dna = embed(dnabert_s, DnabertTokenizer(models), [anchor.dna for anchor in ANCHORS], device)
    scores = head.scores(torch.cat((dna, protein), dim=1))
    return [judge(anchor, *row) for anchor, row in zip(ANCHORS, zip(dna, protein, scores, strict=True), strict=True)]


def embed(encoder: Encoder, tokenizer: Tokenizer, rows: list[bytes], device: torch.device) -> Tensor:
    """Embeddings of a few rows in one batch."""
    tokens, offsets = tokenizer.encode(rows)
    longest = int(offsets.diff().max())
    return encoder.embed(PackedBatch(tokens, offsets.int(), len(rows), longest, len(tokens)).to(device))


def judge(anchor: Anchor, dna: Tensor, protein: Tensor, scores: Tensor) -> Check:
    """One anchor beside what was computed here."""
    here = list(map(float, (scores[1], dna.norm(), dna[0], protein.norm(), protein[0])))
    virus, dna_norm, _, protein_norm, _ = here
    allowed = (TOLERANCE, anchor.dna_norm * NORM_TOLERANCE, TOLERANCE, anchor.protein_norm * NORM_TOLERANCE, TOLERANCE)
    fine = all(abs(a - b) <= most for a, b, most in zip(here, anchor[2:], allowed, strict=True))
    detail = f"virus {virus:.7f} (original {anchor.virus}), DNABERT-S norm {dna_norm:.6f} ({anchor.dna_norm})"
    detail += f", ESM-2 norm {protein_norm:.6f} ({anchor.protein_norm})"
    return Check(f"anchor {anchor.name}", "ok" if fine else "fail", detail)
