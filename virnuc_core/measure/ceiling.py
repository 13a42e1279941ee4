"""What the linear layers sustain on each device, measured just before a run, by a process of its own on each.

`python -m virnuc_core.measure.ceiling PARENT_PID`; in: a WorkerSpec. Out: `measured`, or `error`.
"""

from __future__ import annotations

import logging
import queue
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.checkpoint import load_all
from virnuc_core.encoders.dnabert_s import DnabertLayer
from virnuc_core.encoders.esm2 import Esm2Layer
from virnuc_core.encoders.precision import product, quantise_rows
from virnuc_core.engine.devices import Device
from virnuc_core.engine.messages import WorkerSpec
from virnuc_core.engine.pool import NOT_TO_BE_RETRIED, as_raised
from virnuc_core.engine.process import Child, Parent, cancel_token, end_children, spawn
from virnuc_core.engine.runner import Runner
from virnuc_core.errors import WorkerError
from virnuc_core.pipeline import model_flops
from virnuc_core.runfiles import ModelFlops
from virnuc_core.telemetry.flops import ceiling_tokens_per_s

Layers = Sequence[Esm2Layer] | Sequence[DnabertLayer]
log = logging.getLogger(__name__)

AHEAD: Final = 4  # passes launched before the oldest is waited for
MODULE: Final = "virnuc_core.measure.ceiling"
SECONDS: Final = {"esm2": 2.0, "dnabert_s": 1.0}  # each long enough to reach the card's power limit


def measure_ceilings(models: Path, devices: Sequence[Device], engine: EngineSpec, logs: Path) -> ModelFlops:
    """`model_flops` with each GPU's ceilings, all measured at once; a CPU has none.

    Errors: those that a worker would raise; `WorkerError` for others, and when a process ends without an answer.
    """
    plain = model_flops(models)
    inbox: queue.Queue[Any] = queue.Queue()
    token, children = cancel_token(), list[Child]()
    found: dict[str, dict[str, float]] = {"esm2": {}, "dnabert_s": {}}
    try:
        for device in devices:
            if device.kind == "cuda":
                spec = WorkerSpec(str(models.resolve()), device, engine).to_json()
                log_file, environment = logs / f"ceiling-{device.id}.log", device.environment()
                children.append(
                    spawn(MODULE, spec, name=device.id, inbox=inbox, log=log_file, token=token, environment=environment)
                )
        left = set(children)
        while left:
            child, message = inbox.get()
            if child in left and message["event"] != "alive":
                left.discard(child)
                for encoder, rate in _answer(child, message).items():
                    found[encoder][child.name] = rate
    finally:
        end_children(children)
    return plain.model_copy(
        update={"esm2_ceiling_tokens_s": found["esm2"], "dnabert_s_ceiling_tokens_s": found["dnabert_s"]}
    )


def _answer(child: Child, message: Mapping[str, Any]) -> dict[str, float]:
    """Tokens/s by encoder; none from a GPU whose memory does not hold the budgets, which the runs will halve."""
    if message["event"] == "measured":
        return {encoder: message[encoder] for encoder in SECONDS}
    if message["event"] == "error":
        kind, text = str(message["kind"]), str(message["message"])
        if kind == "OutOfMemoryError":
            log.warning("%s: no ceiling was measured, its memory does not hold the token budgets", child.name)
            return {}
        if kind in NOT_TO_BE_RETRIED:
            raise as_raised(kind, text)
        raise WorkerError(f"{child.name}: {text}", worker_traceback=message["traceback"])
    raise WorkerError(f"{child.name}: no ceiling was measured; it said: {child.last_words() or 'nothing'}")


def _measure(spec: WorkerSpec) -> dict[str, float | None]:
    """Tokens/s of each encoder's linear layers on this process's GPU.

    Both encoders are run once before, so that the first run that follows finds its kernels compiled like the second.
    """
    device, engine = torch.device("cuda:0"), spec.engine
    esm2, dnabert_s, head = load_all(Path(spec.models), device, engine)
    budgets = {"esm2": engine.token_budget, "dnabert_s": engine.dna_token_budget}
    Runner(esm2, dnabert_s, head, device).warm_up(budgets, head.model_length // 3 + 2)
    found: dict[str, float | None] = {}
    for name, weights in (("esm2", esm2.weights), ("dnabert_s", dnabert_s.weights)):
        step = linear_pass(weights.layers, budgets[name], device)
        passes, elapsed_s = sustained_passes(step, SECONDS[name])
        found[name] = ceiling_tokens_per_s(budgets[name], passes, elapsed_s)
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


def main() -> None:
    """Measure on one device and tell the parent."""
    parent = Parent()
    spec = WorkerSpec.from_json(parent.spec)
    parent.listen()
    try:
        from virnuc_core.rundir import lock_device

        handle = lock_device(spec.device.id, spec.engine.device_wait_s)  # kept open until this process ends
        parent.send({"event": "measured", "lock": handle, **_measure(spec)})
    except Exception as error:  # noqa: BLE001 - reaches the parent with its traceback
        kind, trace = type(error).__name__, "".join(traceback.format_exception(error))
        parent.send({"event": "error", "kind": kind, "message": str(error), "traceback": trace})


if __name__ == "__main__":
    main()
