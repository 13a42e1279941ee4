"""Calibration for int8: measure the inputs of an encoder's linear layers on the user's reads."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from virnuc_core.config import ReadsSpec
from virnuc_core.encoders.calibration import (
    CALIBRATION,
    STATISTICS_DIGEST,
    canonical_bytes,
    statistics_digest,
)
from virnuc_core.encoders.checkpoint import check_models, load_encoder
from virnuc_core.encoders.digests import part_digest
from virnuc_core.encoders.layers import Encoder, LinearLayer, apply_linear
from virnuc_core.encoders.model_config import PRODUCTS
from virnuc_core.encoders.models import NETWORKS, embed_sequences
from virnuc_core.encoders.registry import PROTEIN_ENCODER
from virnuc_core.errors import InputError, WeightsError
from virnuc_core.first_use import first_use
from virnuc_core.reads.sampling import sample
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import atomic_file

# More reads or proteins would hardly change the statistics. Fewer than the minimum would not show
# which inputs are usual.
MAX_CALIBRATION_READS: Final = 4_096
MAX_CALIBRATION_ROWS: Final = 4_096
MIN_CALIBRATION_ROWS: Final = 256
ROWS_PER_BATCH: Final = 64
ROW_SEED: Final = 0  # of the random choice of proteins
CALIBRATION_DESCRIPTION: Final = "the int8 calibration"  # for a process that waits for it


@dataclass
class InputRecord:
    """Statistics of the inputs that one linear layer has got so far."""

    largest: Tensor  # largest absolute value of each input, float32 [in]
    total: Tensor  # sum of each input, float32 [in]
    rows: int  # tokens that were recorded


class CalibrationRecorder:
    """Records statistics of the inputs of all linear layers of an encoder.

    The recorder replaces the encoder's attribute `apply_linear`. It computes the same results and
    updates its statistics on the way.
    """

    def __init__(self, encoder: Encoder) -> None:
        """Begin without any statistics. The encoder is not changed."""
        self._layers = encoder.layers
        # By `id` of the linear layer: layers hold tensors and cannot be keys of a dictionary. The
        # encoder keeps them alive, so an id stays unique.
        self._records: dict[int, InputRecord] = {}

    def __call__(self, x: Tensor, layer: LinearLayer) -> Tensor:
        """Compute a linear layer, and add its input to the layer's statistics.

        Args:
            x: The input, [rows, in].
            layer: The linear layer.

        Returns:
            The output, [rows, out].
        """
        inputs = x.float()
        record = self._records.get(id(layer))
        if record is None:
            # One zero is enough: it is broadcast to all inputs in the first update.
            record = InputRecord(inputs.new_zeros(1), inputs.new_zeros(1), 0)
            self._records[id(layer)] = record
        record.largest = torch.maximum(record.largest, inputs.abs().amax(0))
        record.total = record.total + inputs.sum(0)
        record.rows += len(x)
        return apply_linear(x, layer)

    def tensors(self) -> dict[str, Tensor]:
        """Return the statistics of each linear layer as they are stored in the calibration file.

        Returns:
            By the name in the file, for instance `layers.0.qkv`: the largest absolute inputs and
            the mean inputs, float32 [2, in], on the CPU.
        """
        tensors = {}
        for i, layer in enumerate(self._layers):
            for name, product in zip(PRODUCTS, layer.products, strict=True):
                record = self._records[id(product)]
                mean = record.total / record.rows
                tensors[f"layers.{i}.{name}"] = torch.stack((record.largest, mean)).cpu()
        return tensors


class QuantiseResult(NamedTuple):
    """Where a calibration was written, and on how much data it is based."""

    path: Path
    rows: int  # proteins that were embedded for it


def quantise(models: Path, reads: str, device: torch.device) -> QuantiseResult:
    """Calibrate the protein encoder of a models directory for int8, and store the calibration.

    A sample of the reads is embedded without int8, and the inputs of all linear layers are
    measured. The result is written beside the encoder's weights and replaces an older one.

    Another process that calibrates the same models at the same time waits until this one is done.

    Args:
        models: Models directory.
        reads: FASTA or FASTQ files that resemble the reads of later runs.
        device: Where the encoder runs.

    Raises:
        InputError: The reads cannot be used, or have too few open reading frames.
        WeightsError: The models cannot be used.
    """
    model_length = check_models(models).model_length  # also refuses what is no models directory
    with first_use(models, CALIBRATION_DESCRIPTION):
        proteins = _choose_proteins(reads, model_length)
        tensors = _measure_inputs(models, proteins, device)
        path = _write_calibration(models, tensors, len(proteins))
    return QuantiseResult(path, len(proteins))


def _choose_proteins(reads: str, model_length: int) -> list[bytes]:
    """Return the proteins on which a calibration is based: the same ones for the same reads.

    Raises:
        InputError: The reads have too few open reading frames.
    """
    proteins = _sample_proteins(reads, model_length)
    if len(proteins) < MIN_CALIBRATION_ROWS:
        raise InputError(
            f"only {len(proteins)} distinct frames without a stop; {MIN_CALIBRATION_ROWS} are "
            "needed to tell what is usual",
            file=Path(reads),
            hint="name more reads",
        )
    random_order = np.random.default_rng(ROW_SEED).permutation(len(proteins))
    chosen_proteins = [proteins[i] for i in random_order[:MAX_CALIBRATION_ROWS]]
    return sorted(chosen_proteins, key=len)  # rows of a batch have similar lengths then


def _measure_inputs(models: Path, proteins: list[bytes], device: torch.device) -> dict[str, Tensor]:
    """Embed proteins without int8, and return statistics of the inputs of all linear layers.

    Args:
        models: Models directory.
        proteins: The proteins, in the order in which they are embedded.
        device: Where the encoder runs.

    Returns:
        What `CalibrationRecorder.tensors` returns.

    Raises:
        WeightsError: The encoder cannot be used, or gives NaN or infinity.
    """
    # Only the statistics of the recorder are needed, not the embeddings. The backend `reference` is
    # needed, because the kernels compute some linear layers without `apply_linear`.
    network = NETWORKS[PROTEIN_ENCODER.name]
    encoder = load_encoder(network, models, device, "auto", "reference")
    recorder = CalibrationRecorder(encoder)
    encoder.apply_linear = recorder
    tokenizer = encoder.INFO.open_tokenizer(models)
    for first in range(0, len(proteins), ROWS_PER_BATCH):
        batch_proteins = proteins[first : first + ROWS_PER_BATCH]
        embed_sequences(encoder, tokenizer, batch_proteins, device)

    tensors = recorder.tensors()
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise WeightsError(
            f"{models / PROTEIN_ENCODER.name}: gives NaN or infinity for rows of these reads; see "
            "virnuc models verify"
        )
    return tensors


def _write_calibration(models: Path, tensors: dict[str, Tensor], n_proteins: int) -> Path:
    """Write a calibration beside the weights of the protein encoder, and return its path.

    Args:
        models: Models directory.
        tensors: Statistics of the inputs of the linear layers, by their name in the file.
        n_proteins: How many proteins were embedded for it.
    """
    folder = models / PROTEIN_ENCODER.name
    path = folder / CALIBRATION
    statistics = {name: tensor.numpy() for name, tensor in tensors.items()}
    metadata = {
        "weights": part_digest(folder),
        "rows": str(n_proteins),
        STATISTICS_DIGEST: statistics_digest(statistics),
    }
    with atomic_file(path) as temp_path:
        temp_path.write_bytes(canonical_bytes(save(tensors, metadata)))
    return path


def _sample_proteins(reads: str, model_length: int) -> list[bytes]:
    """Return the distinct proteins in the open reading frames of a sample of reads.

    The sample is staged in a temporary folder: its reads are cut into chunks and translated.

    Args:
        reads: FASTA or FASTQ files.
        model_length: Bases of the chunks into which reads are cut.
    """
    with TemporaryDirectory(prefix="virnuc-quantise-") as temp_folder:
        sample_path = Path(temp_folder, "reads")
        # Calibration looks at proteins only, so mates need not stay together.
        source = ReadsSpec(reads=(reads,), pairs=False)
        sample(source, MAX_CALIBRATION_READS, sample_path)
        spec = StageSpec(reads=(str(sample_path),), model_length=model_length)
        store = OrfStore.open(stage(spec, Path(temp_folder, "orfs.h5")).store)
        return store.protein(0, store.n_uniques)
