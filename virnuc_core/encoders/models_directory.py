"""A models directory looked after: checked, calibrated for int8, and its heads installed, kept and taken back.

The head in use stands in `head/`, and in `heads/NNN-DIGEST/` each that was ever installed. No head is lost: what stands
in `head/` is kept before another takes its place. A kept head appears file by file, its `config.json` last: a folder
without one is half a copy, which the next call completes."""

import ctypes
import logging
import os
import shutil
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from virnuc_core.config import EngineSpec
from virnuc_core.encoders import checkpoint, model_config
from virnuc_core.encoders.checkpoint import (
    open_folder,
    open_part,
    part_digest,
    shape_of,
    tensor_files,
)
from virnuc_core.encoders.layers import Dense, Encoder, dense
from virnuc_core.encoders.model_config import (
    KINDS,
    PRODUCTS,
    DnabertShape,
    Esm2Shape,
    HeadShape,
    read_shape,
)
from virnuc_core.encoders.models import Esm2
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, PackedBatch, Tokenizer
from virnuc_core.errors import ConfigError, DeviceError, InputError, WeightsError, join_first
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import sample
from virnuc_core.rundir import atomic_file, run_lock

Verdict = Literal["ok", "warn", "fail", "not run"]

ANCHOR_LENGTH: Final = 500
TOLERANCE: Final = 2e-4  # of scores and entries, float32 on another machine; half precision is off by ten times as much
NORM_TOLERANCE: Final = 1e-4  # relative
CHANCE: Final = 0.5  # the AUROC of guessing
CONFIG: Final = "config.json"
CALIBRATED: Final = 4_096  # reads, and rows of theirs, that int8 is calibrated on
FEWEST_ROWS: Final = 256
AT_ONCE: Final = 64
log = logging.getLogger(__name__)


class Check(NamedTuple):
    """One question put to a models directory or a machine, and its answer in one line."""

    name: str
    verdict: Verdict
    detail: str


class Anchor(NamedTuple):
    """One row of VirNucPro's public test reads, and what it gives for it in float32 with its 500 head."""

    name: str
    dna: str
    protein: str
    virus: float  # score
    dna_norm: float
    dna_first: float  # entry
    protein_norm: float
    protein_first: float


_PUBLISHED: Final = tomllib.loads(
    Path(__file__).with_name("anchors.toml").read_text(encoding="utf-8")
)
ANCHORS: Final = tuple(Anchor(**row) for row in _PUBLISHED["anchors"])


def torch_device(name: str) -> torch.device:
    """What torch calls by this name; `DeviceError` when it is not there."""
    try:
        torch.empty(1, device=(chosen := torch.device(name))).cpu()
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"device {name} cannot be used: {join_first([error])}") from error
    return chosen


def verify(models: Path, device: torch.device) -> tuple[Check, ...]:
    """Every check of a models directory, in order: all tensors of each part are there, have their shape and hold finite
    numbers; digests; the original's numbers. A part that cannot be opened is a `fail`, not an exception."""
    checks: list[Check] = []
    for part, kind in KINDS.items():
        try:
            shape, read = open_part(models, kind)
            count = checkpoint.check_finite(models / part, shape, read)
            checks.append(
                Check(part, "ok", f"{count:,} numbers, {shape.origin or 'of unknown origin'}")
            )
        except WeightsError as error:
            checks.append(Check(part, "fail", str(error)))
    if any(check.verdict == "fail" for check in checks):
        return (*checks, Check("anchors", "not run", "a part is not sound"))
    digests = checkpoint.fingerprint(models, anew=True)
    checks += [Check(f"{part} sha256", "ok", digest) for part, digest in digests.items()]
    return (*checks, *_anchors(models, device))


def _anchors(models: Path, device: torch.device) -> list[Check]:
    """The original's published numbers, where the weights are the original's."""
    shape, dna_shape = shape_of(models, Esm2Shape), shape_of(models, DnabertShape)
    head_shape = shape_of(models, HeadShape)
    big, base = model_config.ESM2_SIZES["t36_3B"], model_config.DNABERT_SIZES["base"]
    if any(
        one.origin.startswith(model_config.RANDOM_ORIGIN) for one in (shape, dna_shape, head_shape)
    ):
        return [Check("anchors", "not run", "random weights")]
    if any(
        (a.width, a.layers) != (b.width, b.layers) for a, b in ((shape, big), (dna_shape, base))
    ):
        return [Check("anchors", "not run", "not ESM-2 3B and DNABERT-S")]
    if head_shape.model_length != ANCHOR_LENGTH:
        return [
            Check("anchors", "not run", f"the head is for {head_shape.model_length} bases, not 500")
        ]
    esm2, dnabert_s, head = checkpoint.load_all(models, device, EngineSpec(precision="fp32"))
    protein = embed(esm2, Esm2Tokenizer(), [anchor.protein.encode() for anchor in ANCHORS], device)
    dna = embed(
        dnabert_s, DnabertTokenizer(models), [anchor.dna.encode() for anchor in ANCHORS], device
    )
    return [*map(judge, ANCHORS, dna, protein, head.scores(torch.cat((dna, protein), dim=1)))]


def embed(
    encoder: Encoder, tokenizer: Tokenizer, rows: list[bytes], device: torch.device
) -> Tensor:
    """Embeddings of a few rows in one batch."""
    tokens, offsets = tokenizer.encode(rows)
    batch = PackedBatch(tokens, offsets.int(), len(rows), int(offsets.diff().max()), len(tokens))
    return encoder.embed(batch.to(device))


def judge(anchor: Anchor, dna: Tensor, protein: Tensor, scores: Tensor) -> Check:
    """One anchor beside what was computed here."""
    virus, dna_norm, protein_norm = float(scores[1]), float(dna.norm()), float(protein.norm())
    entries = (
        [virus, float(dna[0]), float(protein[0])],
        [anchor.virus, anchor.dna_first, anchor.protein_first],
    )
    norms = [dna_norm, protein_norm], [anchor.dna_norm, anchor.protein_norm]
    fine = np.allclose(*entries, rtol=0, atol=TOLERANCE) and np.allclose(
        *norms, rtol=NORM_TOLERANCE, atol=0
    )
    detail = f"virus {virus:.7f} (original {anchor.virus}), DNABERT-S norm {dna_norm:.6f} ({anchor.dna_norm})"
    detail += f", ESM-2 norm {protein_norm:.6f} ({anchor.protein_norm})"
    return Check(f"anchor {anchor.name}", "ok" if fine else "fail", detail)


class KeptHead(NamedTuple):
    """One head of a models directory."""

    number: int  # 0: it stands in head/ and was not kept so far
    digest: str
    installed: bool
    shape: HeadShape


def kept_heads(models: Path) -> list[KeptHead]:
    """The heads of a models directory by number; one that cannot be read is left out with a warning."""
    found, now = dict[str, KeptHead](), ""
    for number, path in [(0, models / "head"), *_kept(models)]:
        if (path / CONFIG).is_file():
            try:
                digest, shape = part_digest(path), read_shape(path / CONFIG, HeadShape)
            except WeightsError as error:
                log.warning("%s", error)
                continue
            now = now if number else digest
            found[digest] = KeptHead(
                number, digest, digest == now, shape
            )  # of equal ones, the kept one
    return sorted(found.values())


def install_head(new: Path, models: Path, *, anyway: bool = False) -> str:
    """Put the head in `new` in place as `models/head`; what there is to say of it. Errors: those of `_put`;
    `WeightsError` unless `anyway` when it may be chance, or is worse on the same test."""
    card, current = read_shape(new / CONFIG, HeadShape).card, models / "head" / CONFIG
    before = next((head.shape.card for head in kept_heads(models) if head.installed), None)
    problem, both = "", ""
    if card is None:
        problem = "it has no card that tells how well it does"
    elif card.auroc.low <= CHANCE:
        problem = f"its AUROC is {card.auroc}, which may be chance"
    elif before is None or (card.reads, card.test) != (before.reads, before.test):
        both = (
            "the one before was not tested on these reads, so the two cannot be compared"
            * current.is_file()
        )
    else:
        both = f"AUROC {card.auroc}, of the one before {before.auroc}, on the same test"
        problem = f"it is worse: {both}" * (card.auroc.value < before.auroc.value)
    if problem and not anyway:
        raise WeightsError(
            f"{new}: not installed: {problem}; --install-anyway puts it in place all the same"
        )
    return f"installed as {_put(new, models).name}; {f'although {problem}' if problem else both}".removesuffix(
        "; "
    )


def use_head(models: Path, number: int) -> Path:
    """Put a kept head in place as `models/head`, and keep what stands there; where it is kept. Errors: `ConfigError`
    when there is no such number; those of `_put`."""
    heads = dict(_kept(models))
    if number not in heads:
        known = ", ".join(map(str, heads)) or "none"
        raise ConfigError(
            f"{models}: no head is kept under {number}; there are {known}, see virnuc models heads"
        )
    return _put(heads[number], models)


def _kept(models: Path) -> list[tuple[int, Path]]:
    """Number and folder of each kept head, also of half a copy."""
    named = [
        (path.name.partition("-")[0], path)
        for path in models.glob("heads/[0-9][0-9][0-9]*-????????")
    ]
    return sorted((int(number), path) for number, path in named if number.isdecimal())


def _put(head: Path, models: Path) -> Path:
    """Keep all heads that are there and this one, and put it in place; where it is kept. Errors: `WeightsError`."""
    checkpoint.check_widths(models, open_folder(head, HeadShape)[0])
    current, aside, former = models / "head", models / ".head.new", models / ".head.old"
    with run_lock(models / "heads"):
        for one in (current, head):
            if (one / CONFIG).is_file() and tensor_files(one):
                digest, others = part_digest(one), _kept(models)
                new = models / "heads" / f"{others[-1][0] + 1 if others else 1:03d}-{digest[:8]}"
                kept = next(
                    (path for _, path in others if path.name.endswith(f"-{digest[:8]}")), new
                )
                if (
                    not (kept / CONFIG).is_file() or part_digest(kept) != digest
                ):  # half a copy, or one damaged since
                    _copy(one, kept)
        for left in (aside, former):  # by a killed process
            shutil.rmtree(left, ignore_errors=True)
        _copy(kept, aside)
        there, here = map(
            os.fsencode, (aside, current)
        )  # exchanged (flag 2): there is no moment without a head
        if not current.exists() or ctypes.CDLL(None).renameat2(-100, there, -100, here, 2):
            if (
                current.exists()
            ):  # a network file system cannot; after a kill use-head puts one back
                current.rename(former)
            aside.rename(current)
        for left in (aside, former):
            shutil.rmtree(left, ignore_errors=True)
    return kept


def _copy(head: Path, folder: Path) -> None:
    for path in sorted(head.iterdir(), key=lambda one: one.name == CONFIG):
        if path.is_file():
            with atomic_file(folder / path.name) as aside:
                shutil.copyfile(path, aside)


class Seen:
    """Takes the place of an ESM-2's `dense`: keeps the largest inputs of each linear layer, and their sum."""

    def __init__(self, esm2: Esm2) -> None:
        self._layers = esm2.layers
        self._found = dict[
            int, tuple[Tensor, Tensor, int]
        ]()  # of each product: both [in], and of how many rows

    def __call__(self, x: Tensor, layer: Dense) -> Tensor:
        wide = x.float()
        largest, total, rows = self._found.get(id(layer), (wide.new_zeros(1), wide.new_zeros(1), 0))
        self._found[id(layer)] = (
            torch.maximum(largest, wide.abs().amax(0)),
            total + wide.sum(0),
            rows + len(x),
        )
        return dense(x, layer)

    def tensors(self) -> dict[str, Tensor]:
        """Largest absolute and mean inputs, float32 [2, in], of each linear layer."""
        found = {}
        for i, layer in enumerate(self._layers):
            for name, product in zip(PRODUCTS, layer.products, strict=True):
                largest, total, rows = self._found[id(product)]
                found[f"layers.{i}.{name}"] = torch.stack((largest, total / rows)).cpu()
        return found


def quantise(models: Path, reads: str, device: torch.device) -> tuple[Path, int]:
    """The calibration that was written into a models directory, and how many rows of the reads it was made of. Errors:
    `InputError` for reads that cannot be used, or give too few rows; `WeightsError` for models."""
    model_length = checkpoint.check_models(models).model_length
    with TemporaryDirectory(prefix="virnuc-quantise-") as name:
        drawn = Path(name, "reads")
        sample(reads, CALIBRATED, drawn)
        spec = StageSpec(reads=(str(drawn),), model_length=model_length)
        store = OrfStore.open(stage(spec, Path(name, "orfs.h5")).store)
        proteins = store.protein(0, store.n_uniques)
    if len(proteins) < FEWEST_ROWS:
        problem = f"only {len(proteins)} distinct frames without a stop; {FEWEST_ROWS} are needed to tell what is usual"
        raise InputError(problem, file=Path(reads), hint="name more reads")
    rows = sorted(
        (proteins[i] for i in np.random.default_rng(0).permutation(len(proteins))[:CALIBRATED]),
        key=len,
    )
    esm2 = checkpoint.load_encoder(Esm2, models, device, "auto", "reference")
    esm2.dense = seen = Seen(esm2)
    for first in range(0, len(rows), AT_ONCE):
        embed(esm2, Esm2Tokenizer(), rows[first : first + AT_ONCE], device)
    folder, found = models / "esm2", seen.tensors()
    if not all(bool(tensor.isfinite().all()) for tensor in found.values()):
        raise WeightsError(
            f"{folder}: gives NaN or infinity for rows of these reads; see virnuc models verify"
        )
    with atomic_file(folder / checkpoint.CALIBRATION) as aside:
        aside.write_bytes(save(found, {"weights": part_digest(folder), "rows": str(len(rows))}))
    return folder / checkpoint.CALIBRATION, len(rows)
