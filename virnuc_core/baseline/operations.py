"""What a baseline's worker does with a file: embed it twice, merge, predict."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from virnuc_core.baseline.algorithms import (
    ALGORITHMS,
    Batches,
    Reader,
    embed_rows,
    load_dnabert_s,
    load_esm2,
    load_head,
    score_rows,
)
from virnuc_core.baseline.files import Folder, merge_file, read_fasta
from virnuc_core.baseline.worker import WorkerSpec
from virnuc_core.engine.process import Parent

HEARTBEAT_S = 2.0
SAY_ROWS_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one message cost; the rest of its time is `compute_s`."""

    rows: int
    load_s: float = 0.0


class Operations:
    """Does what the messages ask for, one after the other."""

    def __init__(self, parent: Parent, spec: WorkerSpec) -> None:
        self.parent = parent
        self.folder, self.models = Folder(Path(spec.folder)), Path(spec.models)
        self.algorithm = ALGORITHMS[spec.algorithm]
        self.device = torch.device("cuda:0" if spec.device.kind == "cuda" else "cpu")
        self.dtype = self.algorithm.precision(self.device)
        self.dnabert_s: Reader | None = None
        self.progress_s = time.monotonic()
        self._unsaid_rows, self._said_s = 0, 0.0
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        self._by_name: dict[str, Callable[[int], Work]] = {
            "dnabert_s": self._dnabert_s,
            "esm2": self._esm2,
            "merge": self._merge,
            "predict": self._predict,
        }

    def serve(self) -> None:
        """Answer messages until there are no more."""
        self.parent.send({"event": "ready", "pid": os.getpid()})
        self.parent.beat(HEARTBEAT_S, lambda: self.progress_s)
        while (message := self.parent.messages.get()) is not None:
            started = self.progress_s = time.monotonic()
            work = self._by_name[message["op"]](int(message["file"]))
            self._say_rows()
            self.progress_s = time.monotonic()
            self.parent.send(
                {
                    "event": "done",
                    "file": message["file"],
                    "rows": work.rows,
                    "load_s": work.load_s,
                    "compute_s": self.progress_s - started - work.load_s,
                }
            )

    def _dnabert_s(self, file: int) -> Work:
        rows = read_fasta(self.folder.nucleotide(file))
        started = time.monotonic()
        if self.dnabert_s is None or self.algorithm.reload_dnabert_s:
            self.dnabert_s = None  # free the old one first
            self.dnabert_s = load_dnabert_s(self.models, self.device, self.dtype)
        load_s = time.monotonic() - started
        batches = self.algorithm.dna_batches([len(s) for s in rows.sequences])
        self._embed(self.dnabert_s, rows.sequences, batches, self.folder.dnabert_s(file))
        return Work(len(rows.ids), load_s)

    def _esm2(self, file: int) -> Work:
        self.dnabert_s = None
        rows = read_fasta(self.folder.protein(file))
        started = time.monotonic()
        esm2 = load_esm2(self.models, self.device, self.dtype)
        load_s = time.monotonic() - started
        batches = self.algorithm.protein_batches([len(s) for s in rows.sequences])
        self._embed(esm2, rows.sequences, batches, self.folder.esm2(file))
        return Work(len(rows.ids), load_s)

    def _embed(self, reader: Reader, sequences: list[bytes], batches: Batches, target: Path) -> None:
        np.save(target, embed_rows(reader, sequences, batches, self._count_rows).numpy())

    def _merge(self, file: int) -> Work:
        return Work(merge_file(self.folder, file))

    def _predict(self, file: int) -> Work:
        started = time.monotonic()
        head = load_head(self.models, self.device)
        load_s = time.monotonic() - started
        features = torch.from_numpy(np.load(self.folder.merged(file)))
        np.save(self.folder.scores(file), score_rows(head, features).numpy())
        self.folder.merged(file).unlink()
        return Work(len(features), load_s)

    def _count_rows(self, rows: int) -> None:
        self.progress_s = time.monotonic()
        self._unsaid_rows += rows
        if self.progress_s - self._said_s >= SAY_ROWS_EVERY_S:
            self._say_rows()

    def _say_rows(self) -> None:
        if self._unsaid_rows:
            self.parent.send({"event": "rows", "rows": self._unsaid_rows})
        self._unsaid_rows, self._said_s = 0, time.monotonic()
