"""Record what happens in the memory of a GPU while some of a run's work is done.

The peak comes from torch's own counters. On request each allocation is recorded as well, with the
line of Python that made it. torch calls that the memory history. It took the place of the memory
timeline of torch's profiler, and https://pytorch.org/memory_viz shows it.

A CPU has neither: torch counts only the memory of GPUs.
"""

from pathlib import Path
from typing import Final

import torch

from virnuc_core.rundir import atomic_file
from virnuc_core.runfiles import Device, RunFile

# Allocations and releases that a history keeps, the latest ones. A shard has some thousands.
MAX_EVENTS: Final = 200_000
MEBIBYTE: Final = 2**20


class MemoryRecord(RunFile):
    """Memory of one device while it was recorded: bytes of tensors, as torch counts them."""

    start_bytes: int | None = None  # None on a CPU, as all figures
    peak_bytes: int | None = None
    end_bytes: int | None = None
    history: str | None = None  # name of the file with each allocation; None if there is none
    history_bytes: int = 0
    # Why there is no history: `not run: …`. Empty if there is one, or if none was asked for.
    history_reason: str = ""


class MemoryRecorder:
    """Records the memory of this process's GPU from `start` to `stop`. A CPU records nothing."""

    def __init__(self, device: Device, history_path: Path | None, max_mb: int) -> None:
        """Prepare to record. Nothing is recorded yet.

        Args:
            device: The device of this process.
            history_path: The file for the memory history, or None if none is wanted.
            max_mb: A larger file, in MiB, is not kept.
        """
        self._device = device
        self._history_path = history_path
        self._max_mb = max_mb
        self._start_bytes = 0

    @property
    def _is_gpu(self) -> bool:
        return self._device.kind == "cuda"

    def start(self) -> None:
        """Begin to count, and to record each allocation if that is wanted."""
        if not self._is_gpu:
            return
        torch.cuda.reset_peak_memory_stats()
        self._start_bytes = torch.cuda.memory_allocated()
        if self._history_path is not None:
            # stacks="python": the lines of C++ would be looked up slowly, and say little here.
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")

    def stop(self) -> MemoryRecord:
        """End the recording, write the history if one is wanted, and return the figures.

        On a CPU the figures are None, and the record says that the history was not run.
        """
        if not self._is_gpu:
            reason = ""
            if self._history_path is not None:
                reason = f"not run: {self._device.id} is no CUDA device"
            return MemoryRecord(history_reason=reason)
        # Before the history is written: that may itself allocate.
        record = MemoryRecord(
            start_bytes=self._start_bytes,
            peak_bytes=torch.cuda.max_memory_allocated(),
            end_bytes=torch.cuda.memory_allocated(),
        )
        if self._history_path is None:
            return record
        return record.model_copy(update=self._write_history(self._history_path))

    def _write_history(self, path: Path) -> dict[str, object]:
        """Write the memory history, unless it is too large, and stop recording it.

        Returns:
            The fields of the record that tell of the history.
        """
        with atomic_file(path) as temp_path:
            torch.cuda.memory._dump_snapshot(str(temp_path))
        torch.cuda.memory._record_memory_history(enabled=None)
        n_bytes = path.stat().st_size
        if n_bytes > self._max_mb * MEBIBYTE:
            path.unlink()
            reason = f"not kept: {n_bytes:,} bytes are more than max_trace_mb"
            return {"history_bytes": n_bytes, "history_reason": reason}
        return {"history": path.name, "history_bytes": n_bytes}
