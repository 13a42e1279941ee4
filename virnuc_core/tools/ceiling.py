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
    """Measure the ceilings of all GPUs at once, each in a process of its own.

    The ceiling is the rate in tokens/s that the linear layers of an encoder sustain on the GPU. A
    run cannot be faster. A CPU has no ceiling.

    Args:
        models: The models directory.
        devices: The devices. Those that are no GPUs are passed over.
        engine: Settings of the runs that follow.
        logs: The folder for the log of each process.

    Returns:
        The multiplications that each encoder needs, with the ceilings by device. A GPU whose
        memory does not hold the token budgets has no ceiling, which is logged.

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
            assert isinstance(answer, Ready)  # a failure was raised by `next_message`
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

    This is what a process of `measure_ceilings` runs. Every encoder is run once before, so that
    the kernels of the first run that follows are compiled, too. If the memory of the GPU does not
    hold a batch, no rate is sent. The process stays until the parent ends it.

    Args:
        parent: The connection to the process that started this one.
        spec: The models, the GPU and the settings.
    """
    device = torch.device("cuda:0")  # the only GPU that this process sees
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
            tokens_per_pass = encoder.token_budget(engine)
            run_layers = linear_pass(layers, tokens_per_pass, device)
            passes_per_s = sustained_rate(run_layers, encoder.ceiling_s)
            rates[encoder.name] = tokens_per_pass * passes_per_s
    except torch.OutOfMemoryError:
        rates = {}  # a run reduces its budgets then, so there is no fixed ceiling
    parent.send(Ready(record=rates))
    parent.receive()  # wait until the parent ends this process


def linear_pass(layers: Sequence[Layer], slots: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs `slots` tokens through every linear layer of an encoder.

    Inputs of int8 layers are quantised beforehand, so that only the products are timed.

    Args:
        layers: The layers of the encoder, all with linear layers of the same shapes.
        slots: The number of tokens, which are random.
        device: The GPU.
    """
    inputs = [_random_input(linear, slots, device) for linear in layers[0].products]

    def run_layers() -> None:
        """Compute every linear layer once. Only the time counts, so the results are dropped.

        The layers of an encoder have the same shapes, so the same random inputs serve all of them.
        """
        for layer in layers:
            for linear, (x, scale) in zip(layer.products, inputs, strict=True):
                if scale is None:  # the layer is not int8
                    F.linear(x, linear.weight, linear.bias)
                else:
                    from virnuc_core.encoders.kernels import int8_product  # it needs triton

                    int8_product(x, scale, linear)

    return run_layers


def _random_input(
    linear: LinearLayer, slots: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return random inputs of a linear layer, [slots, width], in the number type of its weights.

    The second result is the scale of each row, by which int8 numbers are multiplied. It is None
    if the layer is not int8.
    """
    x = torch.randn(slots, linear.weight.shape[1], device=device)
    if linear.scale is None:
        return x.to(linear.weight.dtype), None
    return quantise_rows(x)


def sustained_rate(step: Callable[[], object], seconds: float) -> float:
    """Run `step` on the current CUDA device for at least `seconds`, after a warm-up.

    A few calls are launched ahead, so that the device never waits for Python.

    Returns:
        Calls per second.
    """
    pending_events: list[torch.cuda.Event] = []  # each is reached when its call is done
    n_calls = 0
    with torch.inference_mode():
        step()  # the warm-up
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            step()
            n_calls += 1
            event = torch.cuda.Event()
            event.record()
            pending_events.append(event)
            if len(pending_events) > MAX_PENDING:
                oldest_event = pending_events.pop(0)
                oldest_event.synchronize()
        torch.cuda.synchronize()
    return n_calls / (time.perf_counter() - started_s)
