"""What can be asked of a machine before work: driver, GPUs, locks, disk, weights, and whether it computes.

Each check is a function to one or more `Finding`s. None raises: what cannot be found out is a finding, too.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.checkpoint import check_models, fingerprint
from virnuc_core.encoders.convert import init_random
from virnuc_core.engine import shards
from virnuc_core.engine.devices import resolve
from virnuc_core.errors import ConfigError, DeviceError, VirnucError
from virnuc_core.measure.bench import Bench, measure
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir, device_holder, held_devices, run_lock, whole_file
from virnuc_core.runfiles import Device

Verdict = Literal["ok", "warn", "fail", "not run"]
Scores = NDArray[np.float32]  # of all uniques, [n, 2]

GIB: Final = 1 << 30
DISK_FAIL, DISK_WARN = GIB, 20 * GIB  # a million reads of 150 bases leave some 13 GiB of embeddings
SHM_WARN: Final = GIB  # loader processes hand batches over through /dev/shm
HASHED_BYTES: Final = 2 * GIB  # more is hashed only when asked: it would take longer than all else
MEMORY_NEEDED: Final = 16 * GIB  # ESM-2 3B in half precision, DNABERT-S, and batches of the stock budget
FSYNC_WARN_S: Final = 0.5
READS: Final = 40
LENGTH: Final = 200
SEED: Final = 11
# of P(virus): float32 sums in another order; half precision has a thousandth of the digits
TOLERANCE: Final = {"fp32": 1e-5, "fp16": 5e-3}
ENGINE: Final = EngineSpec(token_budget=1024, dna_token_budget=1024, shard_tokens=4096, heartbeat_s=0.5)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's answer."""

    check: str
    verdict: Verdict
    detail: str


def driver_and_gpus() -> Iterator[Finding]:
    """NVML, the driver and the CUDA that torch was built for; then each visible GPU."""
    import pynvml
    import torch

    built = torch.version.cuda
    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        count = int(pynvml.nvmlDeviceGetCount())
        supported = int(pynvml.nvmlSystemGetCudaDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        said = f"no NVIDIA driver is visible ({error}); virnuc computes on CPU cores"
        yield Finding("driver", "warn" if built else "ok", said)
        return
    text = f"driver {version}, CUDA {supported // 1000}.{supported % 1000 // 10}, {count} GPUs; torch is for {built}"
    problem = ""
    if built is None:
        problem = ": a torch without CUDA; install one that has it"
    elif supported // 1000 < int(built.split(".")[0]):
        problem = f": the driver is too old for CUDA {built}"
    elif not torch.cuda.is_available():
        problem = ": torch cannot start CUDA here"
    yield Finding("driver", "fail" if problem else "ok", text + problem)
    if count and not problem:
        import nvitop

        yield from (gpu_finding(f"cuda:{number}", gpu) for number, gpu in enumerate(nvitop.Device.cuda.all()))


def gpu_finding(name: str, gpu: Any) -> Finding:
    """One GPU, as nvitop tells of it."""
    total, free = int(gpu.memory_total()), int(gpu.memory_free())
    others = [str(process.pid) for process in gpu.processes().values() if process.pid != os.getpid()]
    text, problem = f"{gpu.name()}, {free / GIB:.1f} of {total / GIB:.1f} GiB free", ""
    if (holder := device_holder(gpu.uuid())) is not None:
        problem = f"; a virnuc run holds it ({holder})"
    elif others:
        problem = f"; {len(others)} other processes compute here ({', '.join(others[:5])})"
    elif free < MEMORY_NEEDED:
        problem = f"; ESM-2 3B at the stock token budget wants {MEMORY_NEEDED / GIB:.0f} GiB"
    return Finding(name, "warn" if problem else "ok", f"{text}, utilisation {gpu.gpu_utilization()} %{problem}")


def locks() -> Iterator[Finding]:
    """Devices that virnuc runs hold on this machine."""
    held = [f"{name} ({holder})" for name in held_devices() if (holder := device_holder(name))]
    yield Finding("device locks", "warn" if held else "ok", ", ".join(held) or "no device is held by a run")


def room(folder: Path) -> Iterator[Finding]:
    """Room where results would go, and in the shared memory that loader processes hand their batches over through."""
    free, shared = shutil.disk_usage(_nearest(folder)).free, Path("/dev/shm")
    verdict: Verdict = "fail" if free < DISK_FAIL else "warn" if free < DISK_WARN else "ok"
    more = "" if verdict == "ok" else "; a million reads of 150 bases leave some 13 GiB"
    yield Finding("disk", verdict, f"{free / GIB:.1f} GiB free for {folder}{more}")
    if not shared.is_dir():
        yield Finding("shared memory", "warn", "no /dev/shm; leave num_workers at 0")
        return
    free = shutil.disk_usage(shared).free
    more = "" if free >= SHM_WARN else "; loader processes may fail, leave num_workers at 0 (docker: --shm-size)"
    yield Finding("shared memory", "warn" if more else "ok", f"{free / GIB:.1f} GiB free in {shared}{more}")


def file_system(folder: Path) -> Iterator[Finding]:
    """Do locks exclude, and do renames and flushes work, where results would go?

    The lock is that of a run directory, asked for twice; the file is written aside, flushed and renamed like a shard.
    """
    place = _nearest(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".virnuc-doctor-", dir=place) as name:
            try:
                with run_lock(Path(name)), ExitStack() as again:
                    Context().run(again.enter_context, run_lock(Path(name)))  # as another thread would hold it
                    yield Finding("file locks", "fail", f"two holders of one lock in {place}; use a local folder")
            except ConfigError:
                yield Finding("file locks", "ok", f"locks exclude in {place}")
            except OSError as error:
                said = f"no locks in {place} ({error.strerror}); use a local folder for runs"
                yield Finding("file locks", "fail", said)
            started = time.perf_counter()
            with whole_file(Path(name) / "shard") as aside:
                aside.write_bytes(bytes(1 << 20))
            seconds = time.perf_counter() - started
            verdict: Verdict = "warn" if seconds > FSYNC_WARN_S else "ok"
            yield Finding("commits", verdict, f"1 MiB flushed and renamed in {1e3 * seconds:.0f} ms")
    except OSError as error:
        yield Finding("file locks", "fail", f"{place} cannot be written: {error.strerror or error}")


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


def weights(models: Path | None, *, hashed: bool) -> Iterator[Finding]:
    """Is the models directory whole, and what are the digests of its parts?"""
    if models is None:
        yield Finding("weights", "not run", "no models directory named (--models, VIRNUC_MODELS)")
        return
    try:
        check_models(models)
    except VirnucError as error:
        yield Finding("weights", "fail", str(error))
        return
    size = sum(path.stat().st_size for path in models.glob("*/*.safetensors"))
    yield Finding("weights", "ok", f"{models}: esm2, dnabert_s and head are there and fit ({size / GIB:.2f} GiB)")
    if size > HASHED_BYTES and not hashed:
        yield Finding("weights sha256", "not run", f"{size / GIB:.1f} GiB take a while; --hash does it")
        return
    prints = fingerprint(models)
    text = ", ".join(f"{part} {digest[:16]}" for part, digest in prints.items())
    yield Finding("weights sha256", "ok", text)


def compute(devices: str) -> Iterator[Finding]:
    """Does each device (`cuda:0,cuda:1`, `cpu:2`, `auto`) compute what the reference computes, and the same bytes?

    A tiny model with random weights goes the whole way, reads to scores, through a worker process on every device at
    once; the reference is plain float32 on the CPU.
    """
    try:
        found = resolve(Devices.parse(devices))
    except VirnucError as error:
        yield Finding("compute", "fail", str(error))
        return
    with tempfile.TemporaryDirectory(prefix="virnuc-doctor-") as name, ExitStack() as quiet:
        logging.disable(logging.CRITICAL)  # what matters of these runs is in the findings
        quiet.callback(logging.disable, logging.NOTSET)
        store, models = Path(name, "orfs.h5"), Path(name, "models")
        init_random(models, model_length=LENGTH, seed=SEED)
        reads = simulate(SimulateSpec(reads=READS, seed=SEED), Path(name, "reads.fasta")).reads_file
        stage(StageSpec(reads=(str(reads),), model_length=LENGTH), store)

        def answer(device: Device) -> Scores | VirnucError:
            """The scores by the engine on one device, or what went wrong."""
            try:
                one = Devices(kind=device.kind, ids=(device.id,))
                job = Bench(store, models, one).job(RunDir(Path(name, device.id)), ENGINE)
                measure(replace(job, devices=(device,)))  # a core has no name in settings
                return shards.read_scores(job.run)[0]
            except VirnucError as error:
                return error

        reference = _reference(models, OrfStore.open(store))
        with ThreadPoolExecutor(max_workers=len(found)) as threads:
            answers = list(threads.map(answer, found))
    scores = []
    for device, said in zip(found, answers, strict=True):
        if isinstance(said, VirnucError):
            taken = isinstance(said, DeviceError)  # another run's device is no fault of the machine
            yield Finding(f"compute {device.id}", "warn" if taken else "fail", str(said))
        else:
            scores.append((device, said))
            yield judge(device, reference, said)
    yield from together(scores)


def judge(device: Device, reference: Scores, answer: Scores) -> Finding:
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


def together(found: Sequence[tuple[Device, Scores]]) -> Iterator[Finding]:
    """Do devices of one name give the same bytes? Nothing is said of a name that stands alone."""
    for name in dict.fromkeys(device.name for device, _ in found):
        (first, scores), *others = [(device, answer) for device, answer in found if device.name == name]
        if others:
            odd = [device.id for device, answer in others if answer.tobytes() != scores.tobytes()]
            text = f"{', '.join(odd)} not equal to {first.id}" if odd else f"{len(others) + 1} agree bit for bit"
            yield Finding(f"devices agree: {name}", "fail" if odd else "ok", text)


def _reference(models: Path, orfs: OrfStore) -> Scores:
    """Scores in float32 in this process, by the plain attention, one sequence a batch: nothing packed, no worker."""
    import torch

    from virnuc_core.encoders.checkpoint import load_all
    from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer
    from virnuc_core.encoders.verify import embed

    cpu = torch.device("cpu")
    esm2, dnabert_s, head = load_all(models, cpu, EngineSpec(precision="fp32", attention="reference"))
    as_dna, as_protein = DnabertTokenizer(models), Esm2Tokenizer()
    dna = [embed(dnabert_s, as_dna, [row], cpu) for row in orfs.dna(0, orfs.n_uniques)]
    protein = [embed(esm2, as_protein, [row], cpu) for row in orfs.protein(0, orfs.n_uniques)]
    scores: Scores = head.scores(torch.cat((torch.cat(dna), torch.cat(protein)), dim=1)).numpy()
    return scores
