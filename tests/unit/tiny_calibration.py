"""An int8 calibration for the tiny ESM-2 that is made without measuring anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save

from virnuc_core.encoders.calibration import (
    CALIBRATION,
    STATISTICS_DIGEST,
    canonical_bytes,
    statistics_digest,
)
from virnuc_core.encoders.digests import part_digest
from virnuc_core.encoders.model_config import ESM2_SIZES, PRODUCTS


def write_calibration(models: Path) -> Path:
    """Write a calibration for the tiny ESM-2 as `quantise` does, without its measurement."""
    shape = ESM2_SIZES["tiny"]
    widths = dict.fromkeys(PRODUCTS, shape.width) | {"down": shape.ffn_width}
    statistics = {
        f"layers.{layer}.{name}": np.ones((2, width), np.float32)
        for layer in range(shape.layers)
        for name, width in widths.items()
    }
    metadata = {
        "weights": part_digest(models / "esm2"),
        "rows": "300",
        STATISTICS_DIGEST: statistics_digest(statistics),
    }
    path = models / "esm2" / CALIBRATION
    path.write_bytes(canonical_bytes(save(statistics, metadata)))
    return path
