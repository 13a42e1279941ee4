"""Calibration of int8: what the linear layers of an ESM-2 take, seen on some thousand of the user's own rows."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from virnuc_core.encoders.checkpoint import CALIBRATION, check_models, load_encoder, part_digest
from virnuc_core.encoders.layers import PRODUCTS, Dense, dense
from virnuc_core.encoders.models import Esm2
from virnuc_core.encoders.models_directory import embed
from virnuc_core.encoders.tokenize import Esm2Tokenizer
from virnuc_core.errors import InputError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import sample
from virnuc_core.rundir import whole_file

READS: Final = 4_096
ROWS: Final = 4_096
FEWEST_ROWS: Final = 256
AT_ONCE: Final = 64


class Seen:
    """Takes the place of an encoder's `dense`: keeps the largest inputs of each linear layer, and their sum."""

    def __init__(self, esm2: Esm2) -> None:
        names = [f"layers.{i}.{name}" for i in range(len(esm2.layers)) for name in PRODUCTS]
        products = (one for layer in esm2.layers for one in layer.products)
        self._names = {id(one): name for name, one in zip(names, products, strict=True)}
        self._found = {name: torch.zeros(1) for name in names}
        self._taken = dict.fromkeys(names, 0)

    def __call__(self, x: Tensor, layer: Dense) -> Tensor:
        name, wide = self._names[id(layer)], x.float()
        new = torch.stack((wide.abs().amax(0), wide.sum(0)))  # [2, in]
        before = self._found[name].to(x.device).expand_as(new)
        self._found[name] = torch.stack((torch.maximum(before[0], new[0]), before[1] + new[1]))
        self._taken[name] += len(x)
        return dense(x, layer)

    def tensors(self) -> dict[str, Tensor]:
        """Largest absolute and mean inputs, float32 [2, in], of each linear layer."""
        return {
            name: torch.stack((found[0], found[1] / self._taken[name])).cpu() for name, found in self._found.items()
        }


def quantise(models: Path, reads: str, device: torch.device) -> tuple[Path, int]:
    """The calibration that was written into a models directory, and how many rows of the reads it was made of.

    Errors: `InputError` for reads that cannot be used, or give too few rows; `WeightsError` for models."""
    model_length = check_models(models).model_length
    with TemporaryDirectory(prefix="virnuc-quantise-") as name:
        drawn = Path(name, "reads")
        sample(reads, READS, drawn)
        spec = StageSpec(reads=(str(drawn),), model_length=model_length)
        store = OrfStore.open(stage(spec, Path(name, "orfs.h5")).store)
        proteins = store.protein(0, store.n_uniques)
    if len(proteins) < FEWEST_ROWS:
        problem = f"only {len(proteins)} distinct frames without a stop; {FEWEST_ROWS} are needed to tell what is usual"
        raise InputError(problem, file=Path(reads), hint="name more reads")
    chosen = np.random.default_rng(0).permutation(len(proteins))[:ROWS]
    rows = sorted((proteins[i] for i in chosen), key=len)
    esm2 = load_encoder(Esm2, models, device, "auto", "reference")
    esm2.dense = seen = Seen(esm2)
    for first in range(0, len(rows), AT_ONCE):
        embed(esm2, Esm2Tokenizer(), rows[first : first + AT_ONCE], device)
    folder = models / "esm2"
    about = {"weights": part_digest(folder), "rows": str(len(rows))}
    with whole_file(folder / CALIBRATION) as aside:
        aside.write_bytes(save(seen.tensors(), about))
    return folder / CALIBRATION, len(rows)
