"""What `virnuc doctor` asks of the machine: packages, disk, locks, driver, GPUs and weights."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import Context
from pathlib import Path
from typing import Final

import torch

from virnuc.flows.output_folder import nearest_existing
from virnuc_core import gpus
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.encoders.backends import triton_problem
from virnuc_core.encoders.checkpoint import check_models, weight_facts
from virnuc_core.encoders.verify import Check, Verdict, check_trust
from virnuc_core.engine.devices import find_gpus
from virnuc_core.errors import ConfigError, DeviceError
from virnuc_core.rundir import atomic_file, run_lock
from virnuc_core.runfiles import versions

GIB: Final = 1 << 30
DISK_FAIL: Final = GIB
DISK_WARN: Final = 20 * GIB  # a million reads of 150 bases leave some 13 GiB of embeddings
# Memory for the public encoders in half precision, and for batches of the default token budget
MEMORY_NEEDED: Final = 16 * GIB
FSYNC_WARN_S: Final = 0.5
PROBE_BYTES: Final = 1 << 20  # what is flushed to measure the disk
MAX_PROCESSES_NAMED: Final = 5


def check_of_problem(problem: str, name: str, detail: str, *, verdict: Verdict = "warn") -> Check:
    """Return the result of a check: `verdict` and the problem if there is one, else `ok`.

    Args:
        problem: Description of the problem. Empty if there is none.
        name: The name of the check.
        detail: The text that is shown if there is no problem.
        verdict: The verdict if there is a problem.
    """
    if problem:
        return Check(name, verdict, problem)
    return Check(name, "ok", detail)


def check_packages() -> Iterator[Check]:
    """Yield the installed versions, and whether torch's compiled bytecode is stored on the disk.

    Without stored bytecode, every start compiles about a thousand files of torch.
    """
    version_list = ", ".join(f"{name} {number}" for name, number in versions().items())
    yield Check("packages", "ok", version_list)
    # The compiled file of torch's main module. It stands for all files of torch.
    compiled_file = torch.__spec__ and torch.__spec__.cached
    problem = ""
    if not compiled_file or not Path(compiled_file).is_file():
        folder = Path(torch.__file__).parents[1]
        problem = (
            "Python compiles torch's thousand files at each start, which takes seconds; "
            f"prevent it once: python -m compileall -q {folder}"
        )
    yield check_of_problem(problem, "bytecode", "what Python compiled of torch is kept")


def check_disk(folder: Path) -> Iterator[Check]:
    """Yield whether there is room where results would go.

    Args:
        folder: The folder for the results, which need not exist yet.
    """
    free_bytes = shutil.disk_usage(nearest_existing(folder)).free
    detail = f"{free_bytes / GIB:.1f} GiB free for {folder}"
    verdict: Verdict = "ok"
    if free_bytes < DISK_WARN:
        detail += "; a million reads of 150 bases leave some 13 GiB"
        verdict = "warn"
    if free_bytes < DISK_FAIL:
        verdict = "fail"
    yield Check("disk", verdict, detail)


def check_file_system(folder: Path) -> Iterator[Check]:
    """Yield whether locks work in the folder for results, and how long a commit takes there.

    Both are tried in a temporary folder, which is removed again. A commit is the writing of a file
    that appears whole: it is flushed to the disk and then renamed.

    Args:
        folder: The folder for the results, which need not exist yet.
    """
    with tempfile.TemporaryDirectory(
        prefix=".virnuc-doctor-", dir=nearest_existing(folder)
    ) as name:
        place = Path(name)
        parent = place.parent
        if _lock_excludes(place):
            yield Check("file locks", "ok", f"locks exclude in {parent}")
        else:
            problem = f"use a local folder: locks do not exclude in {parent}"
            yield Check("file locks", "fail", problem)
        started_s = time.perf_counter()
        with atomic_file(place / "shard") as temp_path:
            temp_path.write_bytes(bytes(PROBE_BYTES))
        elapsed_s = time.perf_counter() - started_s
        verdict: Verdict = "warn" if elapsed_s > FSYNC_WARN_S else "ok"
        yield Check("commits", verdict, f"1 MiB flushed and renamed in {1e3 * elapsed_s:.0f} ms")


def _lock_excludes(folder: Path) -> bool:
    """Return whether a locked run directory cannot be locked a second time.

    On a file system without working locks, the second lock is granted, too.
    """
    with run_lock(folder), ExitStack() as second_lock:
        try:
            # Within the same context, a lock may be taken twice. A new context acts like another
            # thread.
            Context().run(second_lock.enter_context, run_lock(folder))
        except ConfigError:
            return True
    return False


def check_driver_and_gpus() -> Iterator[Check]:
    """Yield whether the driver fits torch, whether our kernels run, and the state of each GPU.

    A machine without a GPU is sound, but gets a warning if a driver or a torch with CUDA is there.
    """
    driver = gpus.NVML.driver()
    torch_cuda = gpus.NVML.torch_cuda()
    try:
        usable = find_gpus()  # those on which torch can compute, or why there is none
        visible_gpus = gpus.NVML.visible()  # those that the driver shows
    except (DeviceError, gpus.NvmlError) as error:
        yield Check("driver", "fail", str(error))
        return
    if not visible_gpus:
        # A driver, or a torch with CUDA, was installed to use GPUs. So somebody expects one here.
        verdict: Verdict = "warn" if driver or torch_cuda else "ok"
        yield Check("driver", verdict, f"{usable.absence}; virnuc computes on CPU cores")
        return
    if driver is None:
        yield Check("driver", "fail", "the NVIDIA driver lists GPUs, and does not tell its version")
        return
    detail = (
        f"driver {driver.version}, which knows CUDA up to {driver.cuda}; torch is for {torch_cuda}"
    )
    if not usable.devices:
        yield Check("driver", "fail", f"{usable.absence}; virnuc computes on CPU cores")
    elif torch.cuda.is_available():
        yield Check("driver", "ok", detail)
        yield _check_kernels()
    else:
        problem = f"{detail}, and cannot start it: install a torch that fits the driver"
        yield Check("driver", "fail", problem)
    for number, gpu in enumerate(visible_gpus):
        try:
            occupancy = gpus.NVML.occupancy(gpu.uuid)
        except gpus.NvmlError as error:
            yield Check(f"cuda:{number}", "fail", f"{gpu.name} does not answer: {error}")
        else:
            yield check_gpu(f"cuda:{number}", gpu, occupancy)


def _check_kernels() -> Check:
    """Return whether Triton, the compiler for GPUs, can compile and run our kernels."""
    reason = triton_problem()
    if reason:
        return Check("kernels", "fail", f"they need Triton, {reason}")
    return Check("kernels", "ok", "Triton can run ours")


def check_gpu(name: str, gpu: gpus.Gpu, occupancy: gpus.Occupancy) -> Check:
    """Return the free memory of a GPU, with a warning if others use it or too little is free."""
    free_bytes = occupancy.memory_free_bytes
    total_bytes = occupancy.memory_total_bytes
    utilisation = "N/A"  # some GPUs do not tell it
    if occupancy.utilisation_percent is not None:
        utilisation = f"{occupancy.utilisation_percent:.0f}"
    detail = (
        f"{gpu.name}, {free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free, "
        f"utilisation {utilisation} %"
    )
    other_processes = [str(pid) for pid in occupancy.process_ids if pid != os.getpid()]
    problem = ""
    if other_processes:
        process_list = ", ".join(other_processes[:MAX_PROCESSES_NAMED])
        problem = f"{detail}; {len(other_processes)} other processes compute here ({process_list})"
    elif free_bytes < MEMORY_NEEDED:
        # The warning names the protein encoder, because it is by far the larger one.
        needed_memory = f"{MEMORY_NEEDED / GIB:.0f} GiB"
        problem = (
            f"{detail}; {PROTEIN.public_title} at the stock token budget wants {needed_memory}"
        )
    return check_of_problem(problem, name, detail)


def check_weights(models: Path | None) -> Iterator[Check]:
    """Yield whether the models directory is complete and its parts fit each other.

    Raises:
        WeightsError: A part is missing, or does not fit the others.
    """
    if models is None:
        yield Check("weights", "not run", "no models directory named (--models, VIRNUC_MODELS)")
        return
    check_models(models)
    yield Check("weights", "ok", f"{models}: {PROTEIN.name}, {DNA.name} and head are there and fit")
    facts = weight_facts(models)
    yield check_trust(facts)
