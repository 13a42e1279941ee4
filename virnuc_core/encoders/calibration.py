"""The calibration of int8 in a models directory, as it is stored beside an encoder's weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from virnuc_core.encoders.model_config import CONFIG, PRODUCTS, read_shape
from virnuc_core.encoders.registry import PROTEIN_ENCODER, EncoderInfo
from virnuc_core.errors import WeightsError
from virnuc_core.system_errors import is_regular_file, require_readable

CALIBRATION: Final = "int8.safetensors"
# A mean is a float32 sum divided by a count. Because the sum is rounded, the mean of equal numbers
# may be slightly larger than the largest of them. This factor allows for it.
MEAN_TOLERANCE: Final = 1.01


@dataclass(frozen=True)
class StoredCalibration:
    """Statistics of the inputs of an encoder's linear layers, measured on some of the user's reads.

    Attributes:
        layers: For each layer, by the names in `PRODUCTS`: the largest absolute inputs and the mean
            inputs, float32 [2, in].
        weights: Digest of the encoder that was measured. The statistics hold for it alone.
    """

    layers: list[dict[str, NDArray[np.float32]]]
    weights: str


def read_calibration(models: Path, encoder: EncoderInfo = PROTEIN_ENCODER) -> StoredCalibration:
    """Read the int8 calibration that `virnuc models quantize` stored beside an encoder's weights.

    The calibration holds, for each linear layer of the encoder, the largest absolute and the mean
    value of each of its inputs. The int8 mode derives its scales from them.

    Raises:
        WeightsError: The file is missing or damaged, or belongs to an encoder of other sizes.
    """
    folder = models / encoder.name
    path = folder / CALIBRATION
    if not is_regular_file(path):
        raise WeightsError(
            f"{path}: no such file; int8 needs it, and virnuc models quantize makes it from some "
            "reads"
        )
    require_readable(path)
    try:
        with safe_open(path, "np") as file:
            statistics = {}
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                statistics[name] = file.get_tensor(name).astype(np.float32)
            metadata = file.metadata() or {}

        # A missing layer or product raises KeyError, which is reported below.
        n_layers = read_shape(folder / CONFIG, encoder.shape_type).layers
        layers = []
        for i in range(n_layers):
            layers.append({name: statistics[f"layers.{i}.{name}"] for name in PRODUCTS})

        # Each tensor is [2, in]: the largest absolute inputs, then the mean inputs.
        for largest, mean in statistics.values():
            is_sound = np.isfinite(largest) & (np.abs(mean) <= MEAN_TOLERANCE * largest)
            if not is_sound.all():
                raise ValueError("no mean is above the largest")
        return StoredCalibration(layers, metadata["weights"])
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise WeightsError(
            f"{path}: is no calibration for this {encoder.title}; make it with virnuc models "
            "quantize"
        ) from error
