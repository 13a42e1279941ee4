"""Checks before a flow begins: what could only fail later is refused at once. Nothing is started
here.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from virnuc.flows.output_folder import require_writable
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
from virnuc_core.errors import InputError
from virnuc_core.input_names import is_remote
from virnuc_core.run_costs import embedding_bytes
from virnuc_core.rundir import RunDir
from virnuc_core.system_errors import path_exists

if TYPE_CHECKING:
    from virnuc_core.config import OnError
    from virnuc_core.encoders.model_config import HeadShape
    from virnuc_core.runfiles import Device

BATCH_BYTES: Final = 1 << 16  # unpacked bytes of a batch that is looked at, about
# batches of a file; what is wrong in a small file shows only after its good reads
N_BATCHES: Final = 2
# bytes of a packed file for a base of a read that occurs once, at most; FASTQ has 2 to 3 a base
MAX_BYTES_PER_BASE: Final = 6


def preflight(settings: FlowSettings) -> Devices:
    """Check what a flow needs: reads, weights, devices, settings, its own files and the output.

    Args:
        settings: The settings of the flow.

    Returns:
        The devices that the flow computes on, each by its name. For a cluster, whose nodes are not
        known yet, what the settings say.

    Raises:
        VirnucError: The flow could not work. The error names the setting or file.
    """
    from virnuc_core.engine.devices import resolve, resolve_engine

    cluster = getattr(settings, "cluster", None)  # not every flow can use a cluster
    if cluster:
        _require_readable(Path(cluster))
    devices: tuple[Device, ...] = ()
    engine = EngineSpec()
    if not cluster:
        devices = resolve(Devices.parse(settings.devices))
        engine = resolve_engine(settings.engine(), devices)

    head = _check_models(settings)
    n_rows = _check_reads(settings, head.model_length)
    settings.check_output_folder()
    settings.check_flow_files()
    if devices and engine.precision == "int8":
        from virnuc_core.encoders.digests import fingerprint

        fingerprint(settings.models, "int8")  # raises an error for weights that were not calibrated
    # A run that was begun before has a plan of its shards. Part of its embeddings may be written
    # already, so the room that it needs is not estimated.
    is_planned = path_exists(RunDir(settings.out).plan)
    nbytes = 0
    if not is_planned:
        nbytes = embedding_bytes(n_rows, head.width)
    require_writable(
        settings.out, nbytes, "the embeddings of these reads (estimated from the first ones)"
    )

    if cluster:  # its nodes are checked when they are started
        return Devices.parse(settings.devices)
    return Devices(kind=devices[0].kind, ids=tuple(device.id for device in devices))


def _require_readable(cluster: Path) -> None:
    """Raise an error if the cluster is described by a YAML file that cannot be read.

    Args:
        cluster: The setting `cluster`. It may also be an address, which is not checked here.
    """
    if cluster.suffix in (".yaml", ".yml"):
        with refuse_unreadable(f"cluster {cluster}", "YAML"):
            read_small_text(cluster)


def _check_models(settings: FlowSettings) -> "HeadShape":
    """Check the headers of the weights, and that the head supports the requested thresholds.

    The head is the classifier. Some thresholds, such as `--fdr`, need figures that only some heads
    have.

    Returns:
        The shape of the head: the sizes of its layers, and what it was trained for.
    """
    from virnuc_core.encoders.checkpoint import check_models
    from virnuc_core.encoders.head_card import score_thresholds

    head = check_models(settings.models, getattr(settings, "model_length", None))
    if isinstance(settings, VerdictSpec):
        score_thresholds(head, settings)  # raises an error if the head lacks these figures
    return head


def _check_reads(settings: FlowSettings, model_length: int) -> int:
    """Check the beginning of every local file of reads.

    Files that must be downloaded first are not checked. Nor are those of several samples, of which
    each is checked before its own run.

    Args:
        settings: The settings of the flow. Some flows take no reads.
        model_length: Length of a chunk in bases.

    Returns:
        A lower bound of the rows (open reading frames) that the reads have. 0 if nothing is known.

    Raises:
        InputError: A file cannot be read, or none holds reads.
    """

    from virnuc_core.reads.mate_files import refuse_one_file_as_both_mates

    if not isinstance(settings, RunSettings) or getattr(settings, "has_samples", False):
        return 0
    refuse_one_file_as_both_mates(settings)
    local = tuple(name for name in settings.all_inputs if not is_remote(name))
    if not local:
        return 0
    is_all_local = len(local) == len(settings.all_inputs)
    # For a prediction, an input without reads is a result: that of a negative control.
    needs_reads = is_all_local and not isinstance(settings, PredictSettings)
    n_rows = count_rows(local, settings.on_error, model_length, needs_reads=needs_reads)
    if isinstance(settings, PredictSettings) and settings.written_verdicts:
        from virnuc_core.reads.subsets import require_rereadable  # few runs need it

        # Some reads are written out after the run, for which the files are read a second time.
        require_rereadable(local)
    if settings.read_group:  # nothing tells how many of the rows belong to it
        return 0
    return n_rows


def count_rows(
    reads: tuple[str, ...],
    on_error: "OnError",
    model_length: int = DEFAULT_MODEL_LENGTH,
    *,
    needs_reads: bool = True,
) -> int:
    """Return a lower bound of the number of rows of some reads, from the beginning of every file.

    Pipes and standard input are not read here, because they can be read only once. Empty files are
    an error only if all files are empty and the run needs reads.

    Args:
        reads: Files and folders.
        on_error: What to do with damaged records.
        model_length: Length of a chunk in bases.
        needs_reads: `reads` are all reads of a run that can do nothing without reads.

    Returns:
        A lower bound of the number of rows (open reading frames).

    Raises:
        InputError: A file cannot be read, or none holds reads.
    """
    from virnuc_core.reads.sources import can_be_read_twice, find_inputs

    names = find_inputs(reads).files
    n_rows = 0
    empty = []
    for name in names:
        if not can_be_read_twice(name):  # what is read here would be lost to the run
            continue
        beginning = _read_beginning(name, on_error, model_length)
        file_bytes = Path(name).stat().st_size
        # The file has at least `file_bytes / MAX_BYTES_PER_BASE` bases. It is assumed to have as
        # many rows per base as its beginning. `n_bases` is at least 1, also for an empty file.
        n_rows += file_bytes * beginning.n_rows // (MAX_BYTES_PER_BASE * beginning.n_bases)
        if beginning.is_empty:
            empty.append(name)
    if needs_reads and empty and len(empty) == len(names):
        raise InputError(
            "holds no reads",
            file=empty[0],
            hint="was it written to the end? name a file with reads",
        )
    return n_rows


@dataclass(frozen=True, slots=True)
class Beginning:
    """Counts over the first batches of a file.

    Attributes:
        n_bases: Number of bases plus 1, so that dividing by it is safe.
        n_rows: Open reading frames.
        is_empty: Whether there was no read, and no damaged record either.
    """

    n_bases: int
    n_rows: int
    is_empty: bool


def _read_beginning(name: str, on_error: "OnError", model_length: int) -> Beginning:
    """Read and translate the first batches of a file, and return how much they hold.

    Raises:
        InputError: The file cannot be read.
    """
    from virnuc_core.reads.fast_parser import ParseLog
    from virnuc_core.reads.parse import parse
    from virnuc_core.reads.translate import chunk, translate_chunks

    log = ParseLog(on_error)
    n_reads = 0
    n_rows = 0
    n_bases = 1  # so that dividing by the number is safe
    batches = parse((name,), log, block_bytes=BATCH_BYTES)
    for batch in islice(batches, N_BATCHES):
        # Cut the reads into chunks of the model's length, and find their open reading frames.
        chunks = chunk(batch.bases.lengths, model_length)
        rows = translate_chunks(batch.bases, chunks)
        n_reads += len(batch)
        n_rows += len(rows.chunk)
        n_bases += len(batch.bases.data)
    return Beginning(n_bases, n_rows, is_empty=not n_reads and not log.skipped_by_file)
