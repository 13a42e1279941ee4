"""The worker process of a baseline: it embeds, merges and scores intermediate files on one device.

A baseline imitates an original program, which works through files: FASTA files of DNA and proteins,
files with embeddings of each encoder, merged embeddings, scores. Equal sequences are embedded again
each time, as the original programs do.

The parent process sends a WorkerSpec, then any number of FileTasks. The worker answers with Ready,
RowsDone, FileDone or Failed.
"""

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from virnuc_core.baseline.batches import BATCHES
from virnuc_core.baseline.networks import (
    PaddedEncoder,
    embed_rows,
    load_network,
    load_tensors,
    plain_scores,
)
from virnuc_core.checked_files import (
    RecordedSha256,
    array_bytes,
    open_checked,
    read_checked_array,
)
from virnuc_core.config import BaselineName
from virnuc_core.encoder_names import EncoderName
from virnuc_core.encoders.checkpoint import open_part
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.registry import ENCODERS, EncoderInfo, encoder_named
from virnuc_core.engine.process import Message, Parent, Ready, WorkerSpec
from virnuc_core.rundir import storage_errors
from virnuc_core.safe_files import write_file
from virnuc_core.system_errors import read_with_retries

REPORT_ROWS_EVERY_S: Final = 1.0
HEAD_BATCH_ROWS: Final = 256
# Of the embeddings of one intermediate file. It has at most 10,000 rows of 3,328 columns.
MAX_ARRAY_BYTES: Final = 4 << 30

# What a worker can do with a file: embed it with an encoder, merge embeddings, score
Operation = Literal[EncoderName, "merge", "predict"]

# v1.0 keeps DNABERT-S loaded; every other encoder is loaded anew for each file.
KEPT_LOADED: Final[tuple[tuple[BaselineName, EncoderName], ...]] = (("v1", "dnabert_s"),)


class FileTask(Message):
    """A task for the worker: one operation on one file."""

    operation: Operation
    algorithm: BaselineName
    folder: str
    file: int  # number of the file, from 1
    sha256: str = ""  # of the FASTA file to embed; empty for other operations


class RowsDone(Message):
    """Message of a worker: how many sequences it embedded since its last message of this kind."""

    rows: int


class FileDone(Message):
    """Message of a worker: a task is done, and how long it took."""

    load_s: float  # seconds to load the model
    compute_s: float  # seconds for everything else


def file_path(folder: Path, kind: str, number: int) -> Path:
    """Return the path of an intermediate file.

    Args:
        folder: Folder of all intermediate files of the baseline.
        kind: What the file holds, for instance `nucleotide.fa`, `esm2.npy`, `merged.npy`.
        number: Number of the file, from 1.
    """
    return folder / f"{number:05d}_{kind}"


def fasta_kind(encoder: EncoderInfo) -> str:
    """Return the kind of FASTA file that an encoder embeds: that of DNA or that of proteins."""
    return "nucleotide.fa" if encoder.molecule == "dna" else "protein.fa"


def write_fasta(path: Path, ids: Sequence[str], sequences: Sequence[bytes]) -> str:
    """Write a FASTA file with each sequence on one line, and return the SHA-256 of its content.

    Args:
        path: The file.
        ids: Name of each sequence.
        sequences: The sequences.

    Raises:
        StorageError: The disk refuses the file.
    """
    records = []
    for name, sequence in zip(ids, sequences, strict=True):
        records.append(b">%s\n%s\n" % (name.encode(), sequence))
    content = b"".join(records)
    with storage_errors(path):
        write_file(path, content)
    return hashlib.sha256(content).hexdigest()


def read_fasta(path: Path, sha256: str) -> list[bytes]:
    """Return the sequences of a FASTA file that `write_fasta` wrote.

    Args:
        path: The file.
        sha256: The digest that `write_fasta` returned.

    Raises:
        DamagedFileError: The file has another content.
        UnsafeFileError: It is no regular file, or it is too large.
        UnreadableError: The system cannot read it.
    """
    recorded = RecordedSha256(sha256)
    remedy = "measure the baseline again"
    open_fasta = partial(open_checked, path, recorded, remedy=remedy)
    with read_with_retries(path, open_fasta) as file:
        lines = file.read().split(b"\n")
    return lines[1::2]  # names and sequences alternate


def save(path: Path, array: NDArray[np.float32]) -> None:
    """Write an array as a .npy file, with its digest.

    NumPy writes to memory first, because its own errors do not tell why a disk refuses a file.

    Raises:
        StorageError: The disk refuses the file.
    """
    with storage_errors(path):
        write_file(path, array_bytes(array))


def load(path: Path) -> NDArray[np.float32]:
    """Return the array in a .npy file that `save` wrote, if the file is as it was written.

    Raises:
        DamagedFileError: The file has another content.
        UnsafeFileError: It is no regular file, or it is too large.
        UnreadableError: The system cannot read it.
    """
    read_array = partial(
        read_checked_array, path, max_bytes=MAX_ARRAY_BYTES, remedy="measure the baseline again"
    )
    return read_with_retries(path, read_array)


def merge_file(folder: Path, number: int) -> None:
    """Write the embeddings of all encoders side by side into one file, and delete the single files.

    Each row has the embedding of the DNA, then that of the protein.

    Args:
        folder: Folder of the intermediate files.
        number: Number of the file, from 1.

    Raises:
        ValueError: The files of the encoders have different numbers of rows.
    """
    paths = [file_path(folder, f"{encoder.name}.npy", number) for encoder in ENCODERS]
    merged = np.concatenate([load(path) for path in paths], axis=1)
    save(file_path(folder, "merged.npy", number), merged)
    for path in paths:
        path.unlink()


class FileWorker:
    """Executes the tasks of one worker process, and measures how long loading models takes.

    Attributes:
        last_progress_s: When the worker last made progress, on the monotonic clock. Another thread
            reports it to the parent, which ends a worker that hangs.
    """

    def __init__(self, parent: Parent, spec: WorkerSpec) -> None:
        """Prepare for tasks. No model is loaded yet.

        Args:
            parent: Connection to the parent process.
            spec: Settings of the worker: models directory and device.
        """
        self.parent = parent
        self.models = Path(spec.models)
        self.device = torch.device("cuda:0" if spec.device.kind == "cuda" else "cpu")
        self.last_progress_s = time.monotonic()
        self._kept_network: PaddedEncoder | None = None  # that later tasks use again
        self._unreported_rows = 0
        self._reported_s = 0.0  # when the count of rows was last sent

    def do(self, task: FileTask) -> FileDone:
        """Execute one task, and return how long loading a model and all the rest took.

        The result is written to the next intermediate file.
        """
        started_s = time.monotonic()
        self.last_progress_s = started_s
        folder = Path(task.folder)
        load_s = 0.0
        if task.operation == "merge":
            merge_file(folder, task.file)
        elif task.operation == "predict":
            load_s = self.predict(folder, task)
        else:  # the operation is the name of an encoder
            load_s = self.embed(folder, task)
        self.last_progress_s = time.monotonic()
        return FileDone(load_s=load_s, compute_s=self.last_progress_s - started_s - load_s)

    def embed(self, folder: Path, task: FileTask) -> float:
        """Embed a FASTA file, and write the embeddings as a .npy file.

        Args:
            folder: Folder of the intermediate files.
            task: The task. Its operation is the name of the encoder.

        Returns:
            The seconds that loading the model took; about 0 if it was loaded already.
        """
        encoder = encoder_named(task.operation)
        fasta = file_path(folder, fasta_kind(encoder), task.file)
        sequences = read_fasta(fasta, task.sha256)
        started_s = time.monotonic()
        network = self._network(encoder.name, task.algorithm)
        load_s = time.monotonic() - started_s
        form_batches = BATCHES[task.algorithm, encoder.name]
        batches = form_batches([len(sequence) for sequence in sequences])
        embeddings = embed_rows(network, sequences, batches, self._count_rows)
        save(file_path(folder, f"{encoder.name}.npy", task.file), embeddings.numpy())
        self._report_rows()  # those of the last second
        return load_s

    def _network(self, name: EncoderName, algorithm: BaselineName) -> PaddedEncoder:
        """Return a loaded encoder, as the original program would: kept loaded, or loaded again.

        The original programs load most encoders again for each file. `KEPT_LOADED` lists the
        exceptions, at most one encoder for each algorithm.

        Args:
            name: Name of the encoder.
            algorithm: Which original program is imitated.
        """
        # v1.0 computed in half precision on GPUs.
        is_half = algorithm == "v1" and self.device.type == "cuda"
        dtype = torch.float16 if is_half else torch.float32
        if (algorithm, name) not in KEPT_LOADED:
            self._kept_network = None  # frees its memory before another is loaded
            return load_network(self.models, name, self.device, dtype)
        if self._kept_network is None:
            self._kept_network = load_network(self.models, name, self.device, dtype)
        return self._kept_network

    def _count_rows(self, rows: int) -> None:
        """Count embedded sequences, and send the count to the parent about once in a second."""
        self.last_progress_s = time.monotonic()
        self._unreported_rows += rows
        if self.last_progress_s - self._reported_s >= REPORT_ROWS_EVERY_S:
            self._report_rows()

    def _report_rows(self) -> None:
        """Tell the parent how many sequences were embedded since the last report."""
        self.last_progress_s = time.monotonic()
        self.parent.send(RowsDone(rows=self._unreported_rows))
        self._unreported_rows = 0
        self._reported_s = self.last_progress_s

    def predict(self, folder: Path, task: FileTask) -> float:
        """Score a file of merged embeddings, write the scores as a .npy file, and delete the input.

        A row whose embedding is not finite gets the score NaN, so that it is set aside.

        Args:
            folder: Folder of the intermediate files.
            task: The task with the number of the file.

        Returns:
            The seconds that loading the classifier took.
        """
        started_s = time.monotonic()
        shape, read_tensor = open_part(self.models, HeadShape)
        tensors = load_tensors(read_tensor, shape.tensors(), self.device, torch.float32)
        load_s = time.monotonic() - started_s
        merged_path = file_path(folder, "merged.npy", task.file)
        features = torch.from_numpy(load(merged_path))
        scores = []
        with torch.inference_mode():
            for block in features.split(HEAD_BATCH_ROWS):
                scores.append(plain_scores(tensors, block, shape.norm_eps))
        scores_of_rows = torch.cat(scores)
        # Infinity in an embedding can give a score that looks like any other: in the classifier,
        # ReLU makes 0 of negative infinity.
        scores_of_rows[~features.isfinite().all(dim=1)] = torch.nan
        save(file_path(folder, "scores.npy", task.file), scores_of_rows.numpy())
        merged_path.unlink()
        return load_s


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Execute tasks until the parent closes the connection. This is the main function of a worker.

    Args:
        parent: Connection to the parent process.
        spec: Settings of the worker: models directory and device.
    """
    worker = FileWorker(parent, spec)
    # The parent is told regularly when the worker last made progress, and ends one that hangs.
    parent.progress = lambda: worker.last_progress_s
    parent.send(Ready())
    while True:
        task = parent.receive()
        if not isinstance(task, FileTask):
            return
        parent.send(worker.do(task))
