"""Calibration of int8: what an encoder's linear layers are given for some of the user's reads."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from virnuc_core.encoders.calibration import CALIBRATION
from virnuc_core.encoders.checkpoint import check_models, load_encoder
from virnuc_core.encoders.digests import part_digest
from virnuc_core.encoders.layers import Dense, Encoder, dense
from virnuc_core.encoders.model_config import PRODUCTS
from virnuc_core.encoders.models import NETWORKS, embed_sequences
from virnuc_core.encoders.registry import PROTEIN_ENCODER
from virnuc_core.errors import InputError, WeightsError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import sample
from virnuc_core.rundir import atomic_file

MAX_CALIBRATION_READS: Final = 4_096
MAX_CALIBRATION_ROWS: Final = 4_096
MIN_CALIBRATION_ROWS: Final = 256
ROWS_PER_BATCH: Final = 64
ROW_SEED: Final = 0


@dataclass
class InputRecord:
    """What one linear layer was given so far."""

    largest: Tensor  # largest absolute values, float32 [in]
    total: Tensor  # sums, float32 [in]
    rows: int


class CalibrationRecorder:
    """Records what the linear layers of an encoder are given; takes the place of its `dense`."""

    def __init__(self, encoder: Encoder) -> None:
        """Record nothing so far."""
        self._layers = encoder.layers
        self._records: dict[int, InputRecord] = {}  # by the identity of the linear layer

    def __call__(self, x: Tensor, layer: Dense) -> Tensor:
        """Compute a linear layer, and record its input [rows, in]."""
        wide = x.float()
        record = self._records.get(id(layer))
        if record is None:
            record = InputRecord(wide.new_zeros(1), wide.new_zeros(1), 0)
            self._records[id(layer)] = record
        record.largest = torch.maximum(record.largest, wide.abs().amax(0))
        record.total = record.total + wide.sum(0)
        record.rows += len(x)
        return dense(x, layer)

    def tensors(self) -> dict[str, Tensor]:
        """Return the largest absolute and the mean inputs of each linear layer, float32 [2, in].

        Returns:
            The tensors by their names in the calibration's file.
        """
        tensors = {}
        for i, layer in enumerate(self._layers):
            for name, product in zip(PRODUCTS, layer.products, strict=True):
                record = self._records[id(product)]
                mean = record.total / record.rows
                tensors[f"layers.{i}.{name}"] = torch.stack((record.largest, mean)).cpu()
        return tensors


class QuantiseResult(NamedTuple):
    """A calibration that was written."""

    path: Path
    rows: int  # frames that it was made from


def quantise(models: Path, reads: str, device: torch.device) -> QuantiseResult:
    """Calibrate a models directory for int8 on a sample of reads, and store the result in it.

    Args:
        models: Models directory.
        reads: FASTA or FASTQ files like those to come.
        device: Where the encoder runs.

    Raises:
        InputError: The reads cannot be used, or have too few open reading frames.
        WeightsError: The models cannot be used.
    """
    proteins = _sample_proteins(reads, check_models(models).model_length)
    if len(proteins) < MIN_CALIBRATION_ROWS:
        raise InputError(
            f"only {len(proteins)} distinct frames without a stop; {MIN_CALIBRATION_ROWS} are "
            "needed to tell what is usual",
            file=Path(reads),
            hint="name more reads",
        )
    order = np.random.default_rng(ROW_SEED).permutation(len(proteins))
    rows = sorted((proteins[i] for i in order[:MAX_CALIBRATION_ROWS]), key=len)
    network = NETWORKS[PROTEIN_ENCODER.name]
    encoder = load_encoder(network, models, device, "auto", "reference")
    recorder = CalibrationRecorder(encoder)
    encoder.dense = recorder
    tokenizer = encoder.INFO.open_tokenizer(models)
    for first in range(0, len(rows), ROWS_PER_BATCH):
        embed_sequences(encoder, tokenizer, rows[first : first + ROWS_PER_BATCH], device)
    folder, tensors = models / encoder.INFO.name, recorder.tensors()
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise WeightsError(
            f"{folder}: gives NaN or infinity for rows of these reads; see virnuc models verify"
        )
    path = folder / CALIBRATION
    metadata = {"weights": part_digest(folder), "rows": str(len(rows))}
    with atomic_file(path) as temp_path:
        temp_path.write_bytes(save(tensors, metadata))
    return QuantiseResult(path, len(rows))


def _sample_proteins(reads: str, model_length: int) -> list[bytes]:
    """Return the distinct proteins of the open reading frames of a sample of reads."""
    with TemporaryDirectory(prefix="virnuc-quantise-") as name:
        sample_path = Path(name, "reads")
        sample(reads, MAX_CALIBRATION_READS, sample_path)
        spec = StageSpec(reads=(str(sample_path),), model_length=model_length)
        store = OrfStore.open(stage(spec, Path(name, "orfs.h5")).store)
        return store.protein(0, store.n_uniques)
