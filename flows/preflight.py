"""Checks before a flow begins: what would only fail later is refused at once. Nothing is started here."""

import os
import tempfile
import threading
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.settings.shared import FlowSettings, RunSettings
from virnuc_core.config import (
    DEFAULT_MODEL_LENGTH,
    Devices,
    EngineSpec,
    VerdictSpec,
    read_small_text,
    refuse_unreadable,
)
from virnuc_core.errors import (
    ConfigError,
    InputError,
    storage_error,
)
from virnuc_core.rundir import SAMPLES, RunDir, check_room

if TYPE_CHECKING:
    from virnuc_core.config import OnError


LOOKED_AT_BYTES: Final = 1 << 16  # unpacked bytes of a batch, about


BASES_IN_FILE: Final = (
    6  # bytes of a file for a base of a read that occurs once, at most: FASTQ has 2 to 3 a base
)


LOOKED_AT: Final = (
    2  # batches of a file: what is wrong in a small one shows after its good reads only
)


def preflight(settings: FlowSettings, ahead: ExitStack | None = None) -> Devices:
    """The devices by name, `auto` too, of a flow that can work. Errors: what could only fail later, of reads, weights'
    headers, devices, settings and output, and of the files one flow alone takes. Workers of a prediction that may have
    something to compute load meanwhile; `ahead` keeps them."""
    from virnuc_core.engine import devices, process

    run, remote = RunDir(settings.out), getattr(settings, "cluster", None)
    if (file := Path(remote or "")).suffix in (".yaml", ".yml"):
        with refuse_unreadable(f"cluster {file}", "YAML"):
            read_small_text(file)
    found = () if remote else devices.resolve(Devices.parse(settings.devices))
    engine = devices.resolve_engine(settings.engine(), found[0].kind) if found else EngineSpec()
    over = any(map(os.path.exists, (run.summary, run.former_summary, settings.out / SAMPLES)))
    if (
        ahead is not None
        and found
        and isinstance(settings, PredictSettings)
        and (settings.force or not over)
    ):
        ahead.enter_context(
            process.LocalWorkers(
                process.WORKER, process.worker_specs(settings.models, found, engine)
            )
        )
    from virnuc_core.encoders.checkpoint import check_models
    from virnuc_core.encoders.digests import fingerprint
    from virnuc_core.encoders.head_card import score_thresholds
    from virnuc_core.reads.sources import is_remote

    head, rows = check_models(settings.models, getattr(settings, "model_length", None)), 0
    if ahead is not None and isinstance(
        settings, PredictSettings
    ):  # the digest of new weights takes seconds
        threading.Thread(target=fingerprint, args=(settings.models,), daemon=True).start()
    if isinstance(settings, VerdictSpec):
        score_thresholds(head, settings)
    if isinstance(settings, RunSettings) and not getattr(settings, "many", False):
        local = tuple(name for name in settings.named if not is_remote(name))
        if local:
            rows = readable(
                local, settings.on_error, head.model_length, alone=len(local) == len(settings.named)
            )
            rows *= not settings.read_group  # nothing tells how many of them are of it
        if local and isinstance(settings, PredictSettings) and settings.written:
            from virnuc_core.reads.subsets import readable_twice  # few runs need it

            readable_twice(local)
    settings.check_place()
    settings.check_own_files()
    if found and engine.precision == "int8":
        fingerprint(settings.models, "int8")
    room = 0 if run.plan.exists() else 4 * head.width * rows
    writable(settings.out, room, "the embeddings of these reads, by their first,")
    if remote:  # its nodes are looked at once they are asked for
        return Devices.parse(settings.devices)
    return Devices(kind=found[0].kind, ids=tuple(device.id for device in found))


def readable(
    reads: tuple[str, ...],
    on_error: "OnError",
    model_length: int = DEFAULT_MODEL_LENGTH,
    *,
    alone: bool = True,
) -> int:
    """The rows that reads surely have, by the beginning of every file; `alone`: there are no others. Pipes and standard
    input are left for staging, and empty files among others. Errors: those of `parse`; `InputError` when all are
    empty."""
    from virnuc_core.reads.fast_parser import ParseLog
    from virnuc_core.reads.parse import parse
    from virnuc_core.reads.sources import find_inputs
    from virnuc_core.reads.translate import chunk, translate

    files, empty, least = find_inputs(reads).files, [], 0
    for name in files:
        if Path(name).is_file():
            log, bases, rows, found = ParseLog(on_error), 1, 0, 0
            for batch in islice(parse((name,), log, block_bytes=LOOKED_AT_BYTES), LOOKED_AT):
                chunks, found = chunk(batch.bases.lengths, model_length), found + len(batch)
                begin = batch.bases.offsets[chunks.read]
                rows += len(
                    translate(batch.bases.data, begin + chunks.start, begin + chunks.end).chunk
                )
                bases += len(batch.bases.data)
            least += Path(name).stat().st_size * rows // (BASES_IN_FILE * bases)
            empty += [name] * (not found and not log.skipped_by_file)
    if alone and empty and len(empty) == len(files):
        raise InputError(
            "holds no reads",
            file=empty[0],
            hint="was it written to the end? name a file with reads",
        )
    return least


def nearest(out: Path) -> Path:
    """`out`, or what is there nearest above it."""
    return next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())


def writable(out: Path, nbytes: int = 0, what: str = "") -> None:
    """Check that `out` is or can become a directory to write `nbytes` in; leaves nothing behind."""
    place = nearest(out)
    if not place.is_dir():
        raise ConfigError(f"{out}: {place} is a file; choose another directory")
    try:
        with tempfile.TemporaryFile(
            dir=place
        ) as file:  # permission bits know nothing of full or read-only disks
            file.write(b"virnuc")
            file.flush()
    except OSError as error:
        raise storage_error(error, out) or ConfigError(
            f"{out}: cannot write in {place}: {error.strerror or error}; make room or choose another directory"
        ) from error
    check_room(place, nbytes, what)
