"""Whether a models directory is what it should be: complete, finite, and with the public weights equal to VirNucPro."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from virnuc_core.config import EngineSpec, Spec
from virnuc_core.encoders import model_config
from virnuc_core.encoders.checkpoint import check_finite, fingerprint, load_all, open_part
from virnuc_core.encoders.layers import Encoder
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape, HeadShape, Shape
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, PackedBatch, Tokenizer
from virnuc_core.errors import DeviceError, WeightsError

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


class Anchor(Spec):
    """One row of VirNucPro's public test reads, and what it gives for it in float32 with its 500 head."""

    name: str
    dna: str
    protein: str
    virus: float  # score
    dna_norm: float
    dna_first: float  # entry
    protein_norm: float
    protein_first: float


def anchors() -> tuple[Anchor, ...]:
    """The published rows."""
    body = tomllib.loads(Path(__file__).with_name("anchors.toml").read_text(encoding="utf-8"))
    return tuple(map(Anchor.model_validate, body["anchors"]))


def torch_device(name: str) -> torch.device:
    """What torch calls by this name; `DeviceError` when it is not there."""
    try:
        torch.empty(1, device=(chosen := torch.device(name)))
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"device {name} cannot be used: {str(error).splitlines()[0]}") from error
    return chosen


def verify(models: Path, device: torch.device) -> tuple[Check, ...]:
    """Every check of a models directory, in order. A part that cannot be opened is a `fail`, not an exception."""
    checks = [_part(models, kind) for kind in (Esm2Shape, DnabertShape, HeadShape)]
    if any(check.verdict == "fail" for check in checks):
        return (*checks, Check("anchors", "not run", "a part is not sound"))
    checks += [Check(f"{part} sha256", "ok", digest) for part, digest in fingerprint(models, anew=True).items()]
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
    if any(one.origin.startswith(model_config.RANDOM_ORIGIN) for one in (shape, dna_shape, head_shape)):
        return [Check("anchors", "not run", "random weights")]
    if any((a.width, a.layers) != (b.width, b.layers) for a, b in ((shape, big), (dna_shape, base))):
        return [Check("anchors", "not run", "not ESM-2 3B and DNABERT-S")]
    if head_shape.model_length != ANCHOR_LENGTH:
        return [Check("anchors", "not run", f"the head is for {head_shape.model_length} bases, not 500")]
    esm2, dnabert_s, head = load_all(models, device, EngineSpec(precision="fp32"))
    known = anchors()
    protein = embed(esm2, Esm2Tokenizer(), [anchor.protein.encode() for anchor in known], device)
    dna = embed(dnabert_s, DnabertTokenizer(models), [anchor.dna.encode() for anchor in known], device)
    scores = head.scores(torch.cat((dna, protein), dim=1))
    return [*map(judge, known, dna, protein, scores)]


def embed(encoder: Encoder, tokenizer: Tokenizer, rows: list[bytes], device: torch.device) -> Tensor:
    """Embeddings of a few rows in one batch."""
    tokens, offsets = tokenizer.encode(rows)
    batch = PackedBatch(tokens, offsets.int(), len(rows), int(offsets.diff().max()), len(tokens))
    return encoder.embed(batch.to(device))


def judge(anchor: Anchor, dna: Tensor, protein: Tensor, scores: Tensor) -> Check:
    """One anchor beside what was computed here."""
    virus, dna_norm, protein_norm = float(scores[1]), float(dna.norm()), float(protein.norm())
    close = (virus, anchor.virus), (float(dna[0]), anchor.dna_first), (float(protein[0]), anchor.protein_first)
    norms = (dna_norm, anchor.dna_norm), (protein_norm, anchor.protein_norm)
    fine = all(abs(here - there) <= TOLERANCE for here, there in close)
    fine &= all(abs(here - there) <= there * NORM_TOLERANCE for here, there in norms)
    detail = f"virus {virus:.7f} (original {anchor.virus}), DNABERT-S norm {dna_norm:.6f} ({anchor.dna_norm})"
    detail += f", ESM-2 norm {protein_norm:.6f} ({anchor.protein_norm})"
    return Check(f"anchor {anchor.name}", "ok" if fine else "fail", detail)
