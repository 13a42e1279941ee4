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

CALIBRATION: Final = "int8.safetensors"
ROUNDING: Final = 1.01  # sums of float32 are rounded, so a mean may lie above the largest value


@dataclass(frozen=True)
class StoredCalibration:
    """What the linear layers of an encoder were given for some reads.

    Attributes:
        layers: For each layer, by the names in `PRODUCTS`: largest absolute and mean inputs,
            float32 [2, in].
        weights: Digest of the weights that it was made with.
    """

    layers: list[dict[str, NDArray[np.float32]]]
    weights: str


def read_calibration(models: Path, encoder: EncoderInfo = PROTEIN_ENCODER) -> StoredCalibration:
    """Read what `virnuc models quantize` has stored beside an encoder's weights.

    Raises:
        WeightsError: It is missing, damaged, or not for an encoder of these sizes.
    """
    folder = models / encoder.name
    path = folder / CALIBRATION
    if not path.is_file():
        raise WeightsError(
            f"{path}: no such file; int8 needs it, and virnuc models quantize makes it from some "
            "reads"
        )
    try:
        with safe_open(path, "np") as file:
            inputs = {}
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                inputs[name] = file.get_tensor(name).astype(np.float32)
            metadata = file.metadata() or {}
        n_layers = read_shape(folder / CONFIG, encoder.shape_type).layers
        layers = []
        for i in range(n_layers):
            layers.append({name: inputs[f"layers.{i}.{name}"] for name in PRODUCTS})
        for largest, mean in inputs.values():
            is_sound = np.isfinite(largest) & (np.abs(mean) <= ROUNDING * largest)
            if not is_sound.all():
                raise ValueError("no mean is above the largest")
        return StoredCalibration(layers, metadata["weights"])
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise WeightsError(
            f"{path}: is no calibration for this {encoder.title}; make it with virnuc models "
            "quantize"
        ) from error
