"""A baseline's worker process: files in; embedded, merged and scored files out.

It has one device, to which it is pinned. Equal rows are embedded each, as the original programs do.
Messages in: a WorkerSpec, then any number of FileTasks. Out: Ready, RowsDone, FileDone, Failed.
"""

import io
import time
from collections.abc import Sequence
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
from virnuc_core.config import BaselineName
from virnuc_core.encoders.checkpoint import open_part
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.registry import ENCODERS, EncoderInfo, EncoderName, encoder_named
from virnuc_core.engine.process import Message, Parent, Ready, WorkerSpec
from virnuc_core.rundir import storage_errors

REPORT_ROWS_EVERY_S: Final = 1.0
HEAD_BATCH_ROWS: Final = 256

Operation = Literal["dnabert_s", "esm2", "merge", "predict"]  # the encoders by name, then the rest

# v1.0 keeps DNABERT-S loaded; every other encoder is loaded anew for each file.
KEPT_LOADED: Final[tuple[tuple[BaselineName, EncoderName], ...]] = (("v1", "dnabert_s"),)


class FileTask(Message):
    """A file for the baseline's worker."""

    op: Operation
    algorithm: BaselineName
    folder: str
    file: int  # its number in the folder


class RowsDone(Message):
    """Rows that the baseline's worker embedded since its last report."""

    rows: int


class FileDone(Message):
    """One operation on one file."""

    load_s: float  # getting the model ready
    compute_s: float  # the rest


def file_path(folder: Path, kind: str, number: int) -> Path:
    """Return where an intermediate file lies."""
    return folder / f"{number:05d}_{kind}"


def fasta_kind(encoder: EncoderInfo) -> str:
    """Return the kind of file with the sequences that an encoder reads."""
    return "nucleotide.fa" if encoder.molecule == "dna" else "protein.fa"


def write_fasta(path: Path, ids: Sequence[str], sequences: Sequence[bytes]) -> None:
    """Write rows as FASTA, each sequence on one line."""
    records = []
    for name, sequence in zip(ids, sequences, strict=True):
        records.append(b">%s\n%s\n" % (name.encode(), sequence))
    with storage_errors(path):
        path.write_bytes(b"".join(records))


def save(path: Path, array: NDArray[np.float32]) -> None:
    """Write an array. NumPy alone would not say why a disk refuses.

    Raises:
        StorageError: The disk refuses.
    """
    buffer = io.BytesIO()
    np.save(buffer, array)
    with storage_errors(path):
        path.write_bytes(buffer.getbuffer())


def merge_file(folder: Path, number: int) -> None:
    """Join the embeddings of each row of a file, DNA first, and remove the separate ones.

    Raises:
        ValueError: The encoders' files have different numbers of rows.
    """
    paths = [file_path(folder, f"{encoder.name}.npy", number) for encoder in ENCODERS]
    merged = np.concatenate([np.load(path) for path in paths], axis=1)
    save(file_path(folder, "merged.npy", number), merged)
    for path in paths:
        path.unlink()


class FileWorker:
    """Does one task after the other, and measures what loading a model takes."""

    def __init__(self, parent: Parent, spec: WorkerSpec) -> None:
        """Take the device of a worker's settings; nothing is loaded yet."""
        self.parent = parent
        self.models = Path(spec.models)
        self.device = torch.device("cuda:0" if spec.device.kind == "cuda" else "cpu")
        self.progress_s = time.monotonic()
        self._kept_network: PaddedEncoder | None = None
        self._unreported_rows = 0
        self._reported_s = 0.0

    def do(self, task: FileTask) -> FileDone:
        """Do one task."""
        started_s = time.monotonic()
        self.progress_s = started_s
        folder = Path(task.folder)
        load_s = 0.0
        if task.op == "merge":
            merge_file(folder, task.file)
        elif task.op == "predict":
            load_s = self.predict(folder, task)
        else:
            load_s = self.embed(folder, task)
        self.progress_s = time.monotonic()
        return FileDone(load_s=load_s, compute_s=self.progress_s - started_s - load_s)

    def embed(self, folder: Path, task: FileTask) -> float:
        """Embed a file of sequences, and return the seconds that loading the model took."""
        encoder = encoder_named(task.op)
        fasta = file_path(folder, fasta_kind(encoder), task.file)
        sequences = fasta.read_bytes().split(b"\n")[1::2]
        started_s = time.monotonic()
        network = self._network(encoder.name, task.algorithm)
        load_s = time.monotonic() - started_s
        batches = BATCHES[task.algorithm, encoder.name]([len(sequence) for sequence in sequences])
        embeddings = embed_rows(network, sequences, batches, self._count_rows)
        save(file_path(folder, f"{encoder.name}.npy", task.file), embeddings.numpy())
        self._report_rows()
        return load_s

    def _network(self, name: EncoderName, algorithm: BaselineName) -> PaddedEncoder:
        """Return an encoder, loaded anew unless the algorithm keeps it loaded.

        `KEPT_LOADED` lists at most one encoder for each algorithm.
        """
        # v1.0 computed in half precision on GPUs
        is_half = algorithm == "v1" and self.device.type == "cuda"
        dtype = torch.float16 if is_half else torch.float32
        if (algorithm, name) not in KEPT_LOADED:
            self._kept_network = None  # frees its memory before another is loaded
            return load_network(self.models, name, self.device, dtype)
        if self._kept_network is None:
            self._kept_network = load_network(self.models, name, self.device, dtype)
        return self._kept_network

    def _count_rows(self, rows: int) -> None:
        """Count rows that came through an encoder, and report them now and then."""
        self.progress_s = time.monotonic()
        self._unreported_rows += rows
        if self.progress_s - self._reported_s >= REPORT_ROWS_EVERY_S:
            self._report_rows()

    def _report_rows(self) -> None:
        """Tell the parent how many rows were embedded since the last report."""
        self.progress_s = time.monotonic()
        self.parent.send(RowsDone(rows=self._unreported_rows))
        self._unreported_rows = 0
        self._reported_s = self.progress_s

    def predict(self, folder: Path, task: FileTask) -> float:
        """Score a file of merged embeddings and delete it.

        Returns:
            The seconds that loading the head took.
        """
        started_s = time.monotonic()
        shape, read_tensor = open_part(self.models, HeadShape)
        tensors = load_tensors(read_tensor, shape.tensors(), self.device, torch.float32)
        load_s = time.monotonic() - started_s
        merged_path = file_path(folder, "merged.npy", task.file)
        features = torch.from_numpy(np.load(merged_path))
        scores = []
        with torch.inference_mode():
            for block in features.split(HEAD_BATCH_ROWS):
                scores.append(plain_scores(tensors, block, shape.norm_eps))
        save(file_path(folder, "scores.npy", task.file), torch.cat(scores).numpy())
        merged_path.unlink()
        return load_s


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Work on files until the parent ends this process."""
    worker = FileWorker(parent, spec)
    parent.progress = lambda: worker.progress_s
    parent.send(Ready())
    while True:
        task = parent.receive()
        if not isinstance(task, FileTask):
            return
        parent.send(worker.do(task))
