"""Measure the ceiling of each GPU: the rate that the linear layers of an encoder sustain on it.

A process of its own measures each GPU, just before a run. Messages to it: a WorkerSpec. Messages
back: Ready, with the tokens/s of each encoder, or Failed.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.baseline.run import next_message
from virnuc_core.config import EngineSpec
from virnuc_core.encoder_names import Molecule
from virnuc_core.encoders.checkpoint import load_models
from virnuc_core.encoders.layers import Layer, LinearLayer
from virnuc_core.encoders.precision import quantise_rows
from virnuc_core.encoders.registry import ENCODERS, PROTEIN_ENCODER, encoder_named
from virnuc_core.engine.process import LocalWorkers, Parent, Ready, WorkerSpec, worker_specs
from virnuc_core.engine.worker import warm_up
from virnuc_core.pipeline import model_flops
from virnuc_core.runfiles import Device, ModelFlops

log = logging.getLogger(__name__)

MAX_PENDING: Final = 4  # passes launched before the oldest is waited for


def measure_ceilings(
    models: Path, devices: Sequence[Device], engine: EngineSpec, logs: Path
) -> ModelFlops:
    """Measure the ceilings of all GPUs at once. A CPU has none.

    Args:
        models: The models directory.
        devices: The devices.
        engine: Settings of the runs that follow.
        logs: The folder for the log of each process.

    Returns:
        The multiplications of the encoders, with the ceilings by device.

    Raises:
        VirnucError: The models cannot be loaded on a GPU.
        WorkerError: A process failed otherwise, or ended without an answer.
    """
    ceilings = defaultdict[Molecule, dict[str, float]](dict)  # by molecule and device
    gpus = [device for device in devices if device.kind == "cuda"]
    with LocalWorkers(__name__) as workers:
        measuring = set()
        for spec in worker_specs(models, gpus, engine):
            measuring.add(workers.start(spec, logs / f"ceiling-{spec.device.id}.log"))
        while measuring:
            worker, answer = next_message(workers, measuring)
            assert isinstance(answer, Ready)
            measuring.discard(worker)
            if not answer.record:
                log.warning(
                    "%s: no ceiling was measured, its memory does not hold the token budgets",
                    worker.device,
                )
            for encoder, tokens_per_s in answer.record.items():
                ceilings[encoder_named(encoder).molecule][worker.device] = tokens_per_s
    return model_flops(models).model_copy(
        update={"protein_ceilings": ceilings["protein"], "dna_ceilings": ceilings["dna"]}
    )


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Measure the rate of each encoder's linear layers on this process's GPU and tell the parent.

    Every encoder is run once before, so that the kernels of the first run that follows are
    compiled, too. The process stays until the parent ends it.
    """
    device = torch.device("cuda:0")
    engine = spec.engine
    rates: dict[str, float] = {}  # tokens/s by encoder
    try:
        models = load_models(Path(spec.models), device, engine)
        longest_row = PROTEIN_ENCODER.chunk_tokens(models.head.shape.model_length)
        for encoder in ENCODERS:
            network = models.encoders[encoder.name]
            warm_up(network, encoder.token_budget(engine), device, longest_row)
        for encoder in reversed(ENCODERS):
            layers = models.encoders[encoder.name].layers
            budget = encoder.token_budget(engine)
            run_layers = linear_pass(layers, budget, device)
            passes_per_s = sustained_rate(run_layers, encoder.ceiling_s)
            rates[encoder.name] = budget * passes_per_s
    except torch.OutOfMemoryError:
        rates = {}  # a run reduces its budgets then, so there is no fixed ceiling
    parent.send(Ready(record=rates))
    parent.receive()


def linear_pass(layers: Sequence[Layer], slots: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs `slots` tokens through every linear layer.

    Inputs of int8 layers are quantised beforehand, so that only the products are timed.
    """
    inputs = [_random_input(dense, slots, device) for dense in layers[0].products]

    def run_layers() -> None:
        for layer in layers:
            for dense, (x, scale) in zip(layer.products, inputs, strict=True):
                if scale is None:
                    F.linear(x, dense.weight, dense.bias)
                else:
                    from virnuc_core.encoders.kernels import int8_product  # it needs triton

                    int8_product(x, scale, dense)

    return run_layers


def _random_input(
    dense: LinearLayer, slots: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return inputs of a linear layer, [slots, width], and the scale of each row for int8."""
    x = torch.randn(slots, dense.weight.shape[1], device=device)
    if dense.scale is None:
        return x.to(dense.weight.dtype), None
    return quantise_rows(x)


def sustained_rate(step: Callable[[], object], seconds: float) -> float:
    """Run `step` on the current CUDA device for at least `seconds`, after a warm-up.

    Returns:
        Calls per second.
    """
    pending: list[torch.cuda.Event] = []
    n_calls = 0
    with torch.inference_mode():
        step()
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            step()
            n_calls += 1
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
            if len(pending) > MAX_PENDING:
                pending.pop(0).synchronize()
        torch.cuda.synchronize()
    return n_calls / (time.perf_counter() - started_s)
