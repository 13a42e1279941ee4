"""Switches of speed: which of several equal ways a CUDA device computes an encoder."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

import torch

from virnuc_core.encoders.precision import Resolved
from virnuc_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tuning:
    """What has not been measured to pay is off.

    Every switch changes rounding at most, never the method: results are equal bit for bit within one setting only.
    """

    kernels: bool = False  # norms, activations and quantisation by our own kernels, in place of the compiled block
    residual_product: bool = False  # with `kernels`: the residual is added inside the matrix product (fp16, bf16, fp32)
    gated_product: bool = False  # with `kernels`: DNABERT-S's gated unit in one kernel (fp16, bf16)

    def check(self, precision: Resolved, *, compile: bool | None) -> None:
        """Raise `ConfigError` for switches that exclude each other."""
        if self.kernels and compile:
            raise ConfigError("tuning: own kernels replace the compiled block; set compile or kernels, not both")
        if (self.residual_product or self.gated_product) and not self.kernels:
            raise ConfigError("tuning: residual_product and gated_product are parts of kernels; set kernels too")
        if (self.residual_product or self.gated_product) and precision == "fp8":
            raise ConfigError("tuning: residual_product and gated_product do not exist for fp8; leave them off")
        if self.gated_product and precision == "fp32":
            raise ConfigError("tuning: gated_product computes in fp16 or bf16, precision is fp32; leave it off")


PLAIN: Final = Tuning()
GATED_COLUMNS: Final = 128  # a gated unit's halves are interleaved in turns of so many rows


def measured_best(device: torch.device, precision: Resolved, *, gated: bool) -> Tuning:
    """The fastest way that measurements have shown for a device and precision; plain torch where there is no Triton.

    `gated` is for DNABERT-S, whose gated unit gains from a product of its own; ESM-2's feed-forward loses by it.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return PLAIN
    half = precision in ("fp16", "bf16")
    own_product = gated and half and torch.cuda.get_device_capability(device) >= (9, 0)
    return Tuning(kernels=True, residual_product=half, gated_product=own_product)
