"""The doctor's last question: does each device compute what the reference computes?

A tiny model with random weights goes the whole way, reads to scores, through a worker process on every device at once.
Devices of one kind must agree bit for bit; all must agree with the plain float32 reference on the CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flows.doctor_checks import Finding
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.engine import shards
from virnuc_core.engine.devices import Device
from virnuc_core.errors import DeviceError, VirnucError
from virnuc_core.pipeline import ClassifySpec, Watch, measure_embedding, prepare
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir

READS: Final = 40
LENGTH: Final = 200
SEED: Final = 11
# of P(virus): float32 sums in another order; half precision has a thousandth of the digits
TOLERANCE: Final = {"fp32": 1e-5, "fp16": 5e-3}
ENGINE: Final = EngineSpec(token_budget=1024, dna_token_budget=1024, shard_tokens=4096, heartbeat_s=0.5)


@dataclass(frozen=True, slots=True)
class Small:
    """A tiny model and a few staged reads in a scratch folder."""

    models: Path
    staging: StageSummary
    store: Path
    reference: NDArray[np.float32]  # scores of all uniques, [n, 2]


def compute(devices: Sequence[Device]) -> Iterator[Finding]:
    """Each device's answer, then whether devices of one kind agree bit for bit."""
    with tempfile.TemporaryDirectory(prefix="virnuc-doctor-") as name:
        folder = Path(name)
        small = _prepare(folder)
        with ThreadPoolExecutor(max_workers=len(devices)) as threads:
            answers = list(threads.map(lambda device: _answer(device, small, folder / device.id), devices))
    found = []
    for device, answer in zip(devices, answers, strict=True):
        if isinstance(answer, VirnucError):
            taken = isinstance(answer, DeviceError)  # another run's device is no fault of the machine
            yield Finding(f"compute {device.id}", "warn" if taken else "fail", str(answer))
        else:
            found.append((device, answer))
            yield judge(device, small.reference, answer)
    yield from together(found)


def judge(device: Device, reference: NDArray[np.float32], answer: NDArray[np.float32]) -> Finding:
    """One device's scores beside the reference's."""
    tolerance = TOLERANCE["fp16" if device.kind == "cuda" else "fp32"]
    if reference.shape != answer.shape or np.isnan(answer).any():
        return Finding(f"compute {device.id}", "fail", "scores are missing")
    apart = float(np.abs(reference.astype(np.float64) - answer).max()) if len(reference) else 0.0
    same = "bit for bit" if reference.tobytes() == answer.tobytes() else f"to {apart:.1e} (allowed {tolerance:.0e})"
    fine = apart <= tolerance
    word = "equals" if fine else "DIFFERS from"
    text = f"{device.name}: {len(answer)} sequences, end to end, {word} the float32 reference {same}"
    return Finding(f"compute {device.id}", "ok" if fine else "fail", text)


def together(found: Sequence[tuple[Device, NDArray[np.float32]]]) -> Iterator[Finding]:
    """Do devices of one name give the same bytes? Nothing is said of a name that stands alone."""
    for name in dict.fromkeys(device.name for device, _ in found):
        (first, scores), *others = [(device, answer) for device, answer in found if device.name == name]
        if others:
            odd = [device.id for device, answer in others if answer.tobytes() != scores.tobytes()]
            text = f"{', '.join(odd)} not equal to {first.id}" if odd else f"{len(others) + 1} agree bit for bit"
            yield Finding(f"devices agree: {name}", "fail" if odd else "ok", text)


def _prepare(folder: Path) -> Small:
    from virnuc_core.encoders.checkpoint import init_random

    models, store = folder / "models", folder / "orfs.h5"
    init_random(models, model_length=LENGTH, seed=SEED)
    reads = simulate(SimulateSpec(reads=READS, seed=SEED), folder / "reads.fasta").reads_file
    staging = stage(StageSpec(reads=(str(reads),), model_length=LENGTH), store)
    return Small(models, staging, store, _reference(models, OrfStore.open(store)))


def _reference(models: Path, orfs: OrfStore) -> NDArray[np.float32]:
    """Scores in float32 in this process, by the plain attention, one sequence a batch: nothing packed, no worker."""
    import torch

    from virnuc_core.encoders.load import load_dnabert_s, load_esm2, load_head
    from virnuc_core.encoders.packed import PackedBatch
    from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer

    device, parts = torch.device("cpu"), []
    for load, tokenizer, rows in (
        (load_dnabert_s, DnabertTokenizer(models), orfs.dna(0, orfs.n_uniques)),
        (load_esm2, Esm2Tokenizer(), orfs.protein(0, orfs.n_uniques)),
    ):
        encoder = load(models, device, "fp32", "reference", False)
        vectors = []
        for row in rows:
            tokens, offsets = tokenizer.encode([row])
            batch = PackedBatch(tokens, offsets.int(), 1, len(tokens), len(tokens))
            with torch.inference_mode():
                vectors.append(encoder.embed(batch)[:1])
        parts.append(torch.cat(vectors))
    scores: NDArray[np.float32] = load_head(models, device).scores(torch.cat(parts, dim=1)).numpy()
    return scores


def _answer(device: Device, small: Small, out: Path) -> NDArray[np.float32] | VirnucError:
    """The scores by the engine on one device, or what went wrong."""
    devices = Devices(kind="cuda", ids=(device.id,)) if device.kind == "cuda" else Devices.parse("cpu:1")
    try:
        run = RunDir(out)
        job = prepare(run, ClassifySpec(store=small.store, models=small.models, devices=devices, engine=ENGINE))
        measure_embedding(replace(job, devices=(device,)), Watch())  # a core has no name in settings
        return shards.read_scores(run)[0]
    except VirnucError as error:
        return error
