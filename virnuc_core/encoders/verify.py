"""Checks of a models directory: is it complete and sound, and does it give VirNucPro's numbers?"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from virnuc_core.answer import weight_remarks
from virnuc_core.config import EngineSpec
from virnuc_core.encoder_names import DNA, PROTEIN, RANDOM_ORIGIN, EncoderName
from virnuc_core.encoders.calibration import CALIBRATION, read_calibration
from virnuc_core.encoders.checkpoint import (
    WeightFacts,
    check_finite,
    load_models,
    open_part,
    shape_of,
    weight_facts,
)
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.models import embed_sequences
from virnuc_core.encoders.registry import ENCODERS, PART_SHAPES, EncoderInfo
from virnuc_core.errors import WeightsError
from virnuc_core.system_errors import path_exists

Verdict = Literal["ok", "warn", "fail", "not run"]

REFERENCE_LENGTH: Final = 500  # VirNucPro scored the reference rows with its model for 500 bases
# Largest accepted differences from VirNucPro's numbers. Results in float32 on another machine
# differ less, results in half precision about ten times as much.
TOLERANCE: Final = 2e-4  # absolute
NORM_TOLERANCE: Final = 1e-4  # relative


class Check(NamedTuple):
    """The result of one check of a models directory or a machine."""

    name: str  # what was checked
    verdict: Verdict
    detail: str  # one line for the user


@dataclass(frozen=True, slots=True)
class ReferenceEmbedding:
    """A sequence, and two numbers of the embedding that VirNucPro computes for it."""

    sequence: str
    norm: float  # Euclidean norm of the embedding
    first_entry: float  # of the embedding


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """An open reading frame from VirNucPro's public test reads, and VirNucPro's float32 results."""

    name: str
    viral_score: float  # P(virus) by VirNucPro's model for 500 bases
    embeddings: dict[EncoderName, ReferenceEmbedding]


def _read_reference_rows() -> tuple[ReferenceRow, ...]:
    """Read the reference rows from `reference_rows.toml`, which is part of the package.

    A row without numbers of every registered encoder cannot be checked, so it is left out.
    """
    path = Path(__file__).with_name("reference_rows.toml")
    rows = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["rows"]:
        if not all(encoder.name in row for encoder in ENCODERS):
            continue
        embeddings = {}
        for encoder in ENCODERS:
            values = row[encoder.name]
            embeddings[encoder.name] = ReferenceEmbedding(
                sequence=values["sequence"], norm=values["norm"], first_entry=values["first"]
            )
        rows.append(ReferenceRow(row["name"], viral_score=row["virus"], embeddings=embeddings))
    return tuple(rows)


REFERENCE_ROWS: Final = _read_reference_rows()


def verify(models: Path, device: torch.device) -> tuple[Check, ...]:
    """Check that a models directory is complete and undamaged, and gives VirNucPro's numbers.

    Each model must have all its tensors, with the right shapes and finite numbers. Then the digest
    of each model is computed from its files, and a calibration for int8 is checked if there is one.
    If the models have the sizes of VirNucPro's, some reference sequences ("anchors") are embedded
    and scored, and compared with VirNucPro's results for them.

    Args:
        models: Models directory.
        device: Where the reference rows are computed.

    Returns:
        The checks in order. A model that cannot be used is a check that failed, not an exception.
    """
    checks = []
    for part, shape_type in PART_SHAPES.items():
        try:
            shape, read_tensor = open_part(models, shape_type)
            count = check_finite(models / part, shape, read_tensor)
        except WeightsError as error:
            checks.append(Check(part, "fail", str(error)))
            continue
        origin = shape.origin or "of unknown origin"
        checks.append(Check(part, "ok", f"{count:,} numbers, {origin}"))
    if any(check.verdict == "fail" for check in checks):
        return (*checks, Check("anchors", "not run", "a part is not sound"))
    checks.append(check_trust(weight_facts(models)))
    digests = fingerprint(models, recompute=True)
    for part, digest in digests.items():
        checks.append(Check(f"{part} sha256", "ok", digest))
    for encoder in ENCODERS:
        if encoder.has_int8 and path_exists(models / encoder.name / CALIBRATION):
            checks.append(_check_calibration(models, encoder, digests[encoder.name]))
    obstacle = _why_not_comparable(models)
    if obstacle:
        return (*checks, Check("anchors", "not run", obstacle))
    return (*checks, *_check_reference_rows(models, device))


def _check_calibration(models: Path, encoder: EncoderInfo, weights_digest: str) -> Check:
    """Check that the int8 calibration of an encoder is undamaged and was made for its weights.

    Args:
        models: Models directory.
        encoder: The encoder.
        weights_digest: Digest of the encoder's weights as they are now.
    """
    name = f"{encoder.name} int8 calibration"
    try:
        calibration = read_calibration(models, encoder)
    except WeightsError as error:
        return Check(name, "fail", str(error))
    if calibration.weights != weights_digest:
        remedy = "make it anew with virnuc models quantize"
        return Check(name, "fail", f"was made for other weights of {encoder.title}; {remedy}")
    return Check(name, "ok", f"{len(calibration.layers)} layers, made for these weights")


def check_trust(weights: WeightFacts) -> Check:
    """Return whether verdicts by these weights mean anything.

    It is a warning if weights are random, or if no test of the classifier is recorded.

    Args:
        weights: What the models directory says about its weights.
    """
    remarks = weight_remarks(weights.origins, weights.has_card)
    if remarks:
        return Check("trust", "warn", " ".join(remarks))
    return Check("trust", "ok", "the weights are not random, and the classifier has a card")


def _why_not_comparable(models: Path) -> str:
    """Return why VirNucPro's numbers do not apply to a models directory; "" if they apply."""
    if not REFERENCE_ROWS:
        return "there are no reference rows of these encoders"
    head = shape_of(models, HeadShape)
    shapes = {encoder.name: shape_of(models, encoder.shape_type) for encoder in ENCODERS}
    if any(shape.origin.startswith(RANDOM_ORIGIN) for shape in (head, *shapes.values())):
        return "random weights"
    for encoder in ENCODERS:
        shape = shapes[encoder.name]
        original = encoder.sizes[encoder.reference_size]
        if (shape.width, shape.layers) != (original.width, original.layers):
            return f"not {PROTEIN.public_title} and {DNA.public_title}"
    if head.model_length != REFERENCE_LENGTH:
        return f"the head is for {head.model_length} bases, not 500"
    return ""


def _check_reference_rows(models: Path, device: torch.device) -> list[Check]:
    """Embed and score the reference rows in float32, and compare them with VirNucPro's numbers.

    A reference row is an open reading frame with the DNA and the protein that are embedded.

    Returns:
        One check for each reference row.
    """
    loaded = load_models(models, device, EngineSpec(precision="fp32"))
    embeddings: dict[EncoderName, Tensor] = {}
    for encoder in ENCODERS:
        sequences = [row.embeddings[encoder.name].sequence.encode() for row in REFERENCE_ROWS]
        tokenizer = encoder.open_tokenizer(models)
        network = loaded.encoders[encoder.name]
        embeddings[encoder.name] = embed_sequences(network, tokenizer, sequences, device)
    joined = torch.cat([embeddings[encoder.name] for encoder in ENCODERS], dim=1)
    scores = loaded.head.scores(joined)
    checks = []
    for i, row in enumerate(REFERENCE_ROWS):
        row_embeddings = {name: values[i] for name, values in embeddings.items()}
        checks.append(check_reference_row(row, row_embeddings, scores[i]))
    return checks


def check_reference_row(
    row: ReferenceRow, embeddings: dict[EncoderName, Tensor], scores: Tensor
) -> Check:
    """Compare the embeddings and the score of a reference row with VirNucPro's numbers.

    Args:
        row: The reference row with VirNucPro's numbers.
        embeddings: What each encoder computed for the row, [width] each.
        scores: P(others) and P(virus) that the classifier computed for the row, [2].

    Returns:
        A check that is `ok` if the viral score, and norm and first entry of each embedding, are
        within the tolerances.
    """
    viral_score = float(scores[1])
    is_equal = np.isclose(viral_score, row.viral_score, rtol=0, atol=TOLERANCE)
    details = [f"virus {viral_score:.7f} (original {row.viral_score})"]
    for encoder in ENCODERS:
        expected = row.embeddings[encoder.name]
        embedding = embeddings[encoder.name]
        first_entry = float(embedding[0])
        is_equal &= np.isclose(first_entry, expected.first_entry, rtol=0, atol=TOLERANCE)
        norm = float(embedding.norm())
        is_equal &= np.isclose(norm, expected.norm, rtol=NORM_TOLERANCE, atol=0)
        details.append(f"{encoder.title} norm {norm:.6f} ({expected.norm})")
    verdict: Verdict = "ok" if is_equal else "fail"
    return Check(f"anchor {row.name}", verdict, ", ".join(details))
