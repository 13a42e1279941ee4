"""`virnuc doctor`: is this machine sound? Packages, room, locks, server, driver, weights, and whether it computes."""

import logging
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import Context
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

import httpx
import numpy as np
import psutil
import torch
from cyclopts import Parameter
from numpy.typing import NDArray

from virnuc.flows.cli.start import prepare_prefect
from virnuc.flows.output_folder import nearest_existing
from virnuc.flows.parameters import ROOTS
from virnuc_core import gpus
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.backends import triton_problem
from virnuc_core.encoders.checkpoint import check_models, load_models
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.models import embed_sequences
from virnuc_core.encoders.registry import ENCODERS
from virnuc_core.encoders.verify import Check, Verdict
from virnuc_core.engine import shards
from virnuc_core.engine.devices import resolve
from virnuc_core.errors import ConfigError, DeviceError, VirnucError
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir, atomic_file, run_lock
from virnuc_core.runfiles import Device, versions
from virnuc_core.tools.bench import Bench, measure

Scores = NDArray[np.float32]  # of all uniques, [n, 2]

GIB: Final = 1 << 30
DISK_FAIL, DISK_WARN = GIB, 20 * GIB  # a million reads of 150 bases leave some 13 GiB of embeddings
MEMORY_NEEDED: Final = (
    16 * GIB
)  # ESM-2 3B in half precision, DNABERT-S, and batches of the stock budget
FSYNC_WARN_S: Final = 0.5
READS, LENGTH, SEED = 40, 200, 11  # of what is computed for a try
ENGINE: Final = EngineSpec(
    token_budget=1024, dna_token_budget=1024, shard_tokens=4096, heartbeat_s=0.5
)
MARKS: Final = {"ok": "ok  ", "warn": "warn", "fail": "FAIL", "not run": "–   "}
LOOPBACK: Final = re.compile(r"(localhost|\[?::1\]?)$|127\.")


def doctor(
    *,
    out: Annotated[
        Path, Parameter(name=("--out", "-o"), help="where runs would be written")
    ] = Path(),
    models: Annotated[
        Path | None, Parameter(env_var="VIRNUC_MODELS", help="models directory")
    ] = None,
    devices: Annotated[
        str, Parameter(help="devices to compute on: cuda:0,cuda:1, cpu:2 or auto")
    ] = "auto",
    compute: Annotated[bool, Parameter(help="embed a tiny model on each device")] = True,
) -> int:
    """Is this machine sound? One line a check; exit code 1 when one failed. Warnings leave it at 0."""
    prepare_prefect()
    asked = {  # the cheap ones first
        "packages": packages(),
        "disk": room(out),
        "file locks": file_system(out),
        "Prefect server": prefect_server(),
        "driver": driver_and_gpus(),
        "weights": weights(models),
        "compute": computes(devices) if compute else iter(()),
    }
    started, counts = time.perf_counter(), Counter[Verdict]()
    for check in findings(asked):
        counts[check.verdict] += 1
        print(f"{MARKS[check.verdict]}  {check.name}: {check.detail}", flush=True)
    said = (
        f"{counts['fail']} failed, {counts['warn']} warnings, {time.perf_counter() - started:.1f} s"
    )
    print(f"\nThis machine is {'not sound' if counts['fail'] else 'sound'}: {said}")
    return int(counts["fail"] > 0)


def findings(checks: Mapping[str, Iterator[Check]]) -> Iterator[Check]:
    """What all checks find, one after the other; the error that ends one of them is told under its name."""
    for name, check in checks.items():
        try:
            yield from check
        except (VirnucError, OSError) as error:
            yield Check(name, "fail", str(error))


def unless(problem: str, name: str, fine: str, *, verdict: Verdict = "warn") -> Check:
    """A check that is fine, or has this verdict and says what the problem is; an empty text is none."""
    return Check(name, verdict if problem else "ok", problem or fine)


def packages() -> Iterator[Check]:
    """Which there are, and whether Python has kept what it compiled of them."""
    yield Check("packages", "ok", ", ".join(f"{name} {it}" for name, it in versions().items()))
    kept, folder = torch.__spec__ and torch.__spec__.cached, Path(torch.__file__).parents[1]
    text = "Python compiles torch's thousand files at each start, which takes seconds; prevent it once:"
    problem = "" if kept and Path(kept).is_file() else f"{text} python -m compileall -q {folder}"
    yield unless(problem, "bytecode", "what Python compiled of torch is kept")


def prefect_server() -> Iterator[Check]:
    """Which server runs would talk to, and whether it answers."""
    from prefect.settings import get_current_settings

    settings, check = get_current_settings(), "Prefect server"
    if (url := settings.api.url) is None:
        if not settings.server.ephemeral.enabled:
            raise ConfigError("none is named (PREFECT_API_URL) and the embedded one is forbidden")
        yield Check(
            check, "ok", f"none is named: the embedded one, with its data in {settings.home}"
        )
        return
    secret = settings.api.auth_string.get_secret_value() if settings.api.auth_string else ""
    with httpx.Client(base_url=url, timeout=3.0) as server:
        try:
            answers_anybody = server.get("/admin/version").status_code != httpx.codes.UNAUTHORIZED
            server.auth = httpx.BasicAuth(*secret.partition(":")[::2])
            answer = server.get("/admin/version")
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                raise ConfigError(f"{url} wants another PREFECT_API_AUTH_STRING than is set here")
            theirs, ours = answer.raise_for_status().json(), metadata.version("prefect")
            fine = f"{url} answers, version {theirs}"
            yield unless(f"{fine}; this side is {ours}" * (theirs != ours), check, fine)
            yield schedules(server)
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(
                f"{url} does not answer ({type(error).__name__}); start it, or unset it"
            ) from error
    yield from doors(httpx.URL(url), answers_anybody=answers_anybody)


def schedules(server: httpx.Client) -> Check:
    """Does the server's scheduler plan the runs of active schedules, and do workers take those that are due?"""

    def count(**of: object) -> int:
        return int(
            server.post("/flow_runs/count", json={"flow_runs": of}).raise_for_status().json()
        )

    deployed, planned = (
        server.post("/deployments/filter", json={}).raise_for_status().json(),
        {"any_": ["SCHEDULED"]},
    )
    active = [
        one
        for one in deployed
        if not one["paused"] and any(each["active"] for each in one["schedules"])
    ]
    idle = [
        one["name"]
        for one in active
        if not count(deployment_id={"any_": [one["id"]]}, state={"type": planned})
    ]
    if idle:
        said = f"no run of {', '.join(idle)} is planned; look for errors of its scheduler in the server's log"
        return Check("Prefect scheduler", "fail", said)
    late = count(state={"name": {"any_": ["Late"]}})
    problem = f"{late} runs are late; is a worker of their pool at work?" * bool(late)
    return unless(
        problem, "Prefect scheduler", f"{len(active)} active schedules are planned, no run is late"
    )


def doors(url: httpx.URL, *, answers_anybody: bool) -> Iterator[Check]:
    """Who may have workers do what: a server that answers anybody lets anybody run commands as their account."""
    port, here, abroad = (
        url.port or (443 if url.scheme == "https" else 80),
        LOOPBACK.match(url.host),
        [url.host],
    )
    if here:
        with suppress(psutil.Error, OSError):
            seen = [
                one.laddr
                for one in psutil.net_connections("tcp")
                if one.status == psutil.CONN_LISTEN
            ]
            abroad = sorted({at.ip for at in seen if at.port == port and not LOOPBACK.match(at.ip)})
    anybody = f"anybody who reaches {', '.join(abroad)} port {port} can run commands as the workers"
    problems = {
        f"{anybody}: bind 127.0.0.1 and set PREFECT_SERVER_API_AUTH_STRING": answers_anybody
        and abroad,
        "what goes to and fro can be read on the way: put TLS before it": not here
        and url.scheme == "http",
        "workers started here run as root: give them an account with few rights": os.geteuid() == 0,
        f"runs may name any path this account can open: set {ROOTS}": not os.environ.get(ROOTS),
    }
    fine = f"{'open to this machine only' if here else 'TLS'}, {'no password' if answers_anybody else 'a password'}"
    yield unless("; ".join(said for said, so in problems.items() if so), "Prefect doors", fine)


def driver_and_gpus() -> Iterator[Check]:
    """The driver and the CUDA that torch was built for; then each visible GPU."""
    built = torch.version.cuda
    driver = gpus.NVML.driver()
    visible = gpus.NVML.visible()
    if driver is None or not visible:
        said = "no NVIDIA driver or GPU is visible; virnuc computes on CPU cores"
        yield Check("driver", "warn" if built else "ok", said)
        return
    text = f"driver {driver.version}, which knows CUDA up to {driver.cuda}; torch is for {built}"
    problem = (
        ""
        if torch.cuda.is_available()
        else f"{text}, and cannot start it: install a torch that fits the driver"
    )
    yield unless(problem, "driver", text, verdict="fail")
    if not problem:
        missing = triton_problem()
        yield unless(
            f"they need Triton, {missing}" * bool(missing),
            "kernels",
            "Triton can run ours",
            verdict="fail",
        )
    for number, gpu in enumerate(visible):
        yield gpu_finding(f"cuda:{number}", gpu, gpus.NVML.occupancy(gpu.uuid))


def gpu_finding(name: str, gpu: gpus.Gpu, occupancy: gpus.Occupancy) -> Check:
    """Report the free memory of a GPU, and warn if others use it or if the models do not fit."""
    free = occupancy.memory_free_bytes
    total = occupancy.memory_total_bytes
    utilisation = "N/A"
    if occupancy.utilisation_percent is not None:
        utilisation = f"{occupancy.utilisation_percent:.0f}"
    text = (
        f"{gpu.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, utilisation {utilisation} %"
    )
    others = [str(pid) for pid in occupancy.process_ids if pid != os.getpid()]
    problem = ""
    if others:
        problem = f"{text}; {len(others)} other processes compute here ({', '.join(others[:5])})"
    elif free < MEMORY_NEEDED:
        problem = f"{text}; ESM-2 3B at the stock token budget wants {MEMORY_NEEDED / GIB:.0f} GiB"
    return unless(problem, name, text)


def room(folder: Path) -> Iterator[Check]:
    """Room where results would go."""
    free = shutil.disk_usage(nearest_existing(folder)).free
    more = "; a million reads of 150 bases leave some 13 GiB" if free < DISK_WARN else ""
    verdict: Verdict = "fail" if free < DISK_FAIL else "warn" if more else "ok"
    yield Check("disk", verdict, f"{free / GIB:.1f} GiB free for {folder}{more}")


def file_system(folder: Path) -> Iterator[Check]:
    """Does a run directory's lock exclude, and is a file flushed and renamed like a shard, where results would go?"""
    with tempfile.TemporaryDirectory(
        prefix=".virnuc-doctor-", dir=nearest_existing(folder)
    ) as name:
        excludes, place = True, Path(name)
        with run_lock(place), suppress(ConfigError), ExitStack() as again:
            Context().run(again.enter_context, run_lock(place))  # as another thread would hold it
            excludes = False
        said = "locks exclude in" if excludes else "use a local folder: locks do not exclude in"
        yield Check("file locks", "ok" if excludes else "fail", f"{said} {place.parent}")
        started = time.perf_counter()
        with atomic_file(place / "shard") as aside:
            aside.write_bytes(bytes(1 << 20))
        seconds = time.perf_counter() - started
        said = f"1 MiB flushed and renamed in {1e3 * seconds:.0f} ms"
        yield Check("commits", "warn" if seconds > FSYNC_WARN_S else "ok", said)


def weights(models: Path | None) -> Iterator[Check]:
    """Is the models directory whole?"""
    if models is None:
        yield Check("weights", "not run", "no models directory named (--models, VIRNUC_MODELS)")
        return
    check_models(models)
    yield Check("weights", "ok", f"{models}: esm2, dnabert_s and head are there and fit")


def computes(devices: str) -> Iterator[Check]:
    """Does each device compute, with a tiny model from reads to scores, what the reference does, and the same bytes?"""
    found = resolve(Devices.parse(devices))
    with tempfile.TemporaryDirectory(prefix="virnuc-doctor-") as name, ExitStack() as quiet:
        logging.disable(logging.CRITICAL)  # what matters of these runs is in the findings
        quiet.callback(logging.disable, logging.NOTSET)
        store, models = Path(name, "orfs.h5"), Path(name, "models")
        init_random(models, model_length=LENGTH, seed=SEED)
        reads = simulate(SimulateSpec(reads=READS, seed=SEED), Path(name, "reads.fasta")).reads_file
        stage(StageSpec(reads=(str(reads),), model_length=LENGTH), store)

        def scored(device: Device) -> Scores:
            one = Devices(kind=device.kind, ids=(device.id,))
            job = Bench(store, models, one).job(RunDir(Path(name, device.id)), ENGINE)
            measure(replace(job, devices=(device,)))  # a core has no name in settings
            return shards.read_scores(job.run)[0]

        with ThreadPoolExecutor(max_workers=len(found)) as threads:
            running = [(device, threads.submit(scored, device)) for device in found]
            reference = _reference(models, OrfStore.open(store))
    answers: dict[Device, Scores] = {}
    for device, future in running:
        try:
            answers[device] = future.result()
            yield judge(device, reference, answers[device])
        except VirnucError as error:
            taken = isinstance(
                error, DeviceError
            )  # another run's device is no fault of the machine
            yield Check(f"compute {device.id}", "warn" if taken else "fail", str(error))
    yield from together(answers)


def judge(device: Device, reference: Scores, answer: Scores) -> Check:
    """One device's scores beside the reference's."""
    # of P(virus): float32 sums in another order; half precision has a thousandth of the digits
    name, tolerance = f"compute {device.id}", 5e-3 if device.kind == "cuda" else 1e-5
    if reference.shape != answer.shape or np.isnan(answer).any():
        return Check(name, "fail", "scores are missing")
    apart = float(np.abs(reference.astype(np.float64) - answer).max(initial=0.0))
    how = (
        "bit for bit"
        if reference.tobytes() == answer.tobytes()
        else f"to {apart:.1e} (allowed {tolerance:.0e})"
    )
    text, what = (
        f"{device.name}: {len(answer)} sequences, end to end,",
        f"the float32 reference {how}",
    )
    return unless(
        f"{text} DIFFERS from {what}" * (apart > tolerance),
        name,
        f"{text} equals {what}",
        verdict="fail",
    )


def together(found: Mapping[Device, Scores]) -> Iterator[Check]:
    """Do devices of one name give the same bytes? Nothing is said of a name that stands alone."""
    for name in dict.fromkeys(device.name for device in found):
        first, *others = [device for device in found if device.name == name]
        if others:
            odd = ", ".join(
                one.id for one in others if found[one].tobytes() != found[first].tobytes()
            )
            problem, fine = (
                odd and f"{odd} not equal to {first.id}",
                f"{len(others) + 1} agree bit for bit",
            )
            yield unless(problem, f"devices agree: {name}", fine, verdict="fail")


def _reference(models: Path, orfs: OrfStore) -> Scores:
    """Scores in float32 in this process, by the plain attention, one sequence a batch: nothing packed, no worker."""
    cpu = torch.device("cpu")
    loaded = load_models(models, cpu, EngineSpec(precision="fp32", attention="reference"))
    parts = []  # [rows, width] of each encoder
    for encoder in ENCODERS:
        network, tokenizer = loaded.encoders[encoder.name], encoder.open_tokenizer(models)
        rows = []
        for sequence in encoder.sequences(orfs, 0, orfs.n_uniques):
            rows.append(embed_sequences(network, tokenizer, [sequence], cpu))
        parts.append(torch.cat(rows))
    return np.asarray(loaded.head.scores(torch.cat(parts, dim=1)))
