"""What an encoder's matrix products alone sustain on a device: the ceiling its speed is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from virnuc_core.encoders.dnabert_s import DnabertLayer, DnabertWeights
from virnuc_core.encoders.esm2 import Esm2Layer, Esm2Weights
from virnuc_core.encoders.precision import Dense, dense, quantise_rows, scaled_dense

AHEAD: Final = 4  # passes launched before the oldest is waited for


def products(layer: Esm2Layer | DnabertLayer) -> tuple[Dense, ...]:
    """The linear layers of one layer of either encoder."""
    if isinstance(layer, Esm2Layer):
        return layer.qkv, layer.out, layer.fc1, layer.fc2
    return layer.qkv, layer.out, layer.gated, layer.wo


def linear_pass(weights: Esm2Weights | DnabertWeights, slots: int, device: torch.device) -> Callable[[], None]:
    """A call that runs `slots` tokens through every linear layer; inputs of float8 layers are already quantised."""
    inputs = []
    for one in products(weights.layers[0]):
        x = torch.randn(slots, one.weight.shape[1], device=device)
        inputs.append(quantise_rows(x) if one.scale is not None else (x.to(one.weight.dtype), None))

    def step() -> None:
        for layer in weights.layers:
            for one, (x, scale) in zip(products(layer), inputs, strict=True):
                dense(x, one) if scale is None else scaled_dense(x, scale, one)

    return step


def sustained_passes(step: Callable[[], None], seconds: float) -> tuple[int, float]:
    """Run `step` on the current CUDA device for at least `seconds`, after a warm-up: passes, and the seconds taken."""
    events: list[torch.cuda.Event] = []
    with torch.inference_mode():
        step()
        torch.cuda.synchronize()
        passes, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            step()
            passes += 1
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > AHEAD:
                events.pop(0).synchronize()
        torch.cuda.synchronize()
    return passes, time.perf_counter() - start
