"""What the linear layers sustain on each device, measured just before a run, by a process of its own on each.

Messages in: an EngineWorkerSpec. Out: Measured, or Failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.checkpoint import load_all
from virnuc_core.encoders.dnabert_s import DnabertLayer
from virnuc_core.encoders.esm2 import Esm2Layer
from virnuc_core.encoders.precision import product, quantise_rows
from virnuc_core.engine.devices import Device
from virnuc_core.engine.messages import EngineWorkerSpec, Measured
from virnuc_core.engine.process import LocalWorkers, Parent
from virnuc_core.engine.runner import Runner
from virnuc_core.pipeline import model_flops
from virnuc_core.runfiles import ModelFlops

Layers = Sequence[Esm2Layer] | Sequence[DnabertLayer]
log = logging.getLogger(__name__)

AHEAD: Final = 4  # passes launched before the oldest is waited for
SECONDS: Final = {"esm2": 2.0, "dnabert_s": 1.0}  # each long enough to reach the card's power limit
SILENCE_S: Final = 1_800.0  # loading 3 B weights from a slow disk is silent


def measure_ceilings(models: Path, devices: Sequence[Device], engine: EngineSpec, logs: Path) -> ModelFlops:
    """`model_flops` with each GPU's ceilings, all measured at once; a CPU has none.

    Errors: those that a worker would raise; `WorkerError` for others, and when a process ends without an answer.
    """
    plain = model_flops(models)
    found: dict[str, dict[str, float]] = {"esm2": {}, "dnabert_s": {}}
    with LocalWorkers(__name__) as workers:
        measuring = set()
        for device in devices:
            if device.kind == "cuda":
                spec = EngineWorkerSpec(models=str(models.resolve()), device=device, engine=engine)
                measuring.add(workers.start(spec, logs / f"ceiling-{device.id}.log"))
        while measuring:
            worker, event = workers.expect(measuring, SILENCE_S)
            assert isinstance(event, Measured)
            measuring.discard(worker)
            if not event.tokens_per_s:
                log.warning("%s: no ceiling was measured, its memory does not hold the token budgets", worker.device)
            for encoder, rate in event.tokens_per_s.items():
                found[encoder][worker.device] = rate
    return plain.model_copy(
        update={"esm2_ceiling_tokens_s": found["esm2"], "dnabert_s_ceiling_tokens_s": found["dnabert_s"]}
    )


def _measure(spec: EngineWorkerSpec) -> dict[str, float]:
    """Tokens/s of each encoder's linear layers on this process's GPU.

    Both encoders are run once before, so that the first run that follows finds its kernels compiled like the second.
    """
    device, engine = torch.device("cuda:0"), spec.engine
    esm2, dnabert_s, head = load_all(Path(spec.models), device, engine)
    budgets = {"esm2": engine.token_budget, "dnabert_s": engine.dna_token_budget}
    Runner(esm2, dnabert_s, head, device).warm_up(budgets, head.model_length // 3 + 2)
    found: dict[str, float] = {}
    for name, weights in (("esm2", esm2.weights), ("dnabert_s", dnabert_s.weights)):
        step = linear_pass(weights.layers, budgets[name], device)
        passes, elapsed_s = sustained_passes(step, SECONDS[name])
        found[name] = budgets[name] * passes / elapsed_s
    return found


def linear_pass(layers: Layers, slots: int, device: torch.device) -> Callable[[], None]:
    """A call that runs `slots` tokens through every linear layer; inputs of float8 layers are already quantised."""
    inputs = []
    for one in layers[0].products:
        x = torch.randn(slots, one.weight.shape[1], device=device)
        inputs.append(quantise_rows(x) if one.scale is not None else (x.to(one.weight.dtype), None))

    def step() -> None:
        for layer in layers:
            for one, (x, scale) in zip(layer.products, inputs, strict=True):
                product(x, scale, one)

    return step


def sustained_passes(step: Callable[[], object], seconds: float) -> tuple[int, float]:
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


def work(parent: Parent, spec: EngineWorkerSpec) -> None:
    """Measure on one device, tell the parent, and stay until it ends this process."""
    try:
        found = _measure(spec)
    except torch.OutOfMemoryError:
        found = {}  # the runs will halve the budgets
    parent.send(Measured(tokens_per_s=found))
    parent.receive()
