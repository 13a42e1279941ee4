"""What `virnuc doctor` computes: a tiny model on each device, beside a plain reference."""

import logging
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from virnuc.flows.cli.doctor_checks import check_of_problem
from virnuc_core.allowed_paths import own_folder
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.checkpoint import load_models
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.models import embed_sequences
from virnuc_core.encoders.registry import ENCODERS
from virnuc_core.encoders.verify import Check, Verdict
from virnuc_core.engine import shards
from virnuc_core.engine.devices import resolve
from virnuc_core.errors import DeviceError, VirnucError
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device
from virnuc_core.tools.bench import Bench, measure_job

Scores = NDArray[np.float32]  # of all distinct sequences, [n, 2]

# the reads that are computed for a try
N_READS: Final = 40
MODEL_LENGTH: Final = 200
SEED: Final = 11
ENGINE: Final = EngineSpec(
    token_budget=1024, dna_token_budget=1024, shard_tokens=4096, heartbeat_s=0.5
)
# of P(virus): float32 sums in another order; half precision has a thousandth of the digits
TOLERANCE: Final = {"cpu": 1e-5, "cuda": 5e-3}


@dataclass(frozen=True)
class Trial:
    """A tiny model and staged reads, to be scored by each device.

    Attributes:
        folder: Where the runs of the devices go.
        models: The models directory.
        store: The store of the reads' open reading frames.
    """

    folder: Path
    models: Path
    store: Path

    @classmethod
    def prepare(cls, folder: Path) -> "Trial":
        """Write tiny models with random weights, and staged reads, into a folder.

        They are the same each time, because the seed is fixed. Staging translates the reads and
        writes their open reading frames to the store.
        """
        trial = cls(folder, models=folder / "models", store=folder / "orfs.h5")
        init_random(trial.models, model_length=MODEL_LENGTH, seed=SEED)
        simulation = simulate(SimulateSpec(reads=N_READS, seed=SEED), folder / "reads.fasta")
        reads = (str(simulation.reads_file),)
        stage(StageSpec(reads=reads, model_length=MODEL_LENGTH), trial.store)
        return trial

    def scores_of(self, device: Device) -> Scores:
        """Return the scores that a device computes in a worker process, as in a real run.

        The run is written to a folder with the name of the device.

        Raises:
            VirnucError: The device cannot be used, or does not compute.
        """
        devices = Devices(kind=device.kind, ids=(device.id,))
        run = RunDir(self.folder / device.id)
        job = Bench(self.store, self.models, devices).job(run, ENGINE)
        # Settings name only how many cores to use, and not which ones. So the job gets the device.
        measure_job(replace(job, devices=(device,)))
        scores, _ = shards.read_scores(job.run)
        return scores

    def reference_scores(self) -> Scores:
        """Return the scores that all devices should have.

        They are computed by this process on the CPU in float32, with plain attention, one sequence
        at a time.
        """
        cpu = torch.device("cpu")
        orfs = OrfStore.open(self.store)
        engine = EngineSpec(precision="fp32", attention="reference")
        loaded_models = load_models(self.models, cpu, engine)
        embeddings = []  # [sequences, width] of each encoder
        for encoder in ENCODERS:
            network = loaded_models.encoders[encoder.name]
            tokenizer = encoder.open_tokenizer(self.models)
            rows = []
            for sequence in encoder.sequences(orfs, 0, orfs.n_uniques):
                rows.append(embed_sequences(network, tokenizer, [sequence], cpu))
            embeddings.append(torch.cat(rows))
        return np.asarray(loaded_models.head.scores(torch.cat(embeddings, dim=1)))


def check_compute(devices: str) -> Iterator[Check]:
    """Yield for each device whether its scores equal those of the reference.

    All devices score the same reads with tiny random models, side by side, in a temporary folder.

    Args:
        devices: The devices, as `--devices` takes them.

    Raises:
        DeviceError: There are no such devices.
    """
    device_list = resolve(Devices.parse(devices))
    futures: dict[Device, Future[Scores]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="virnuc-doctor-") as name,
        own_folder(Path(name)),  # allowed even if VIRNUC_ROOTS names other folders only
        _without_logs(),  # log lines of these tiny runs would only disturb the list of checks
    ):
        trial = Trial.prepare(Path(name))
        with ThreadPoolExecutor(max_workers=len(device_list)) as threads:
            for device in device_list:
                futures[device] = threads.submit(trial.scores_of, device)
            reference = trial.reference_scores()
    scores_of_device: dict[Device, Scores] = {}
    for device, future in futures.items():
        try:
            scores = future.result()
        except VirnucError as error:
            # A device that is used by another run is not a fault of the machine.
            verdict: Verdict = "warn" if isinstance(error, DeviceError) else "fail"
            yield Check(f"compute {device.id}", verdict, str(error))
            continue
        scores_of_device[device] = scores
        yield check_scores(device, reference, scores)
    yield from check_agreement(scores_of_device)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Turn off all logging of this process in a `with` block."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def check_scores(device: Device, reference: Scores, scores: Scores) -> Check:
    """Return whether a device's scores equal the reference, within the tolerance of its kind.

    Args:
        device: The device.
        reference: The scores that it should have, float32 [n, 2].
        scores: The scores that it has computed, float32 [n, 2].
    """
    name = f"compute {device.id}"
    # The engine writes NaN as the score of a sequence that it could not compute.
    if reference.shape != scores.shape or np.isnan(scores).any():
        return Check(name, "fail", "scores are missing")
    tolerance = TOLERANCE[device.kind]
    differences = np.abs(reference.astype(np.float64) - scores)
    largest_difference = float(differences.max(initial=0.0))
    if reference.tobytes() == scores.tobytes():
        closeness = "bit for bit"
    else:
        closeness = f"to {largest_difference:.1e} (allowed {tolerance:.0e})"
    subject = f"{device.name}: {len(scores)} sequences, end to end,"
    if largest_difference > tolerance:
        detail = f"{subject} DIFFERS from the float32 reference {closeness}"
        return Check(name, "fail", detail)
    return Check(name, "ok", f"{subject} equals the float32 reference {closeness}")


def check_agreement(scores_of_device: Mapping[Device, Scores]) -> Iterator[Check]:
    """Yield for each device model whether all devices of this model gave the same bytes.

    A device model is a name such as "NVIDIA H100". A model with a single device is left out.

    Args:
        scores_of_device: The scores by device. Devices that could not compute are absent.
    """
    devices_of_model: dict[str, list[Device]] = {}
    for device in scores_of_device:
        devices_of_model.setdefault(device.name, []).append(device)
    for model, devices in devices_of_model.items():
        if len(devices) == 1:
            continue
        first_device = devices[0]
        expected_bytes = scores_of_device[first_device].tobytes()
        deviating = [
            device.id for device in devices if scores_of_device[device].tobytes() != expected_bytes
        ]
        problem = ""
        if deviating:
            problem = f"{', '.join(deviating)} not equal to {first_device.id}"
        detail = f"{len(devices)} agree bit for bit"
        yield check_of_problem(problem, f"devices agree: {model}", detail, verdict="fail")
