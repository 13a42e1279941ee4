"""A baseline's worker process: one device, pinned; file numbers in, embedded files out.

`python -m virnuc_core.baseline.worker PARENT_PID`; JSON lines on standard input and output. In: the spec, then
`{"op": "dnabert_s" | "esm2" | "merge" | "predict", "file": n}` any number of times. Out: `ready`, `alive`, `rows`,
`done`, `error`. A closed standard input, or the death of the parent, ends it.
"""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass
from typing import Any

from virnuc_core.config import BaselineName
from virnuc_core.engine.devices import Device, pin_to_core
from virnuc_core.engine.process import Parent
from virnuc_core.rundir import lock_device

DEVICE_WAIT_S = 60.0  # for another run to finish with the device


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The first line a worker reads."""

    folder: str
    models: str
    algorithm: BaselineName
    device: Device

    def to_json(self) -> dict[str, Any]:
        """As sent to the worker."""
        return {
            "folder": self.folder,
            "models": self.models,
            "algorithm": self.algorithm,
            "device": self.device.record(),
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> WorkerSpec:
        """As read by the worker."""
        return cls(body["folder"], body["models"], body["algorithm"], Device(**body["device"]))


def main() -> None:
    """Run one worker until its parent closes its input or dies."""
    parent = Parent()  # from here on this process cannot outlive its parent; so nothing slow is imported before
    spec = WorkerSpec.from_json(parent.spec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if spec.device.core is not None:
        pin_to_core(spec.device.core)
    parent.listen()
    try:
        handle = lock_device(spec.device.id, DEVICE_WAIT_S) if spec.device.kind == "cuda" else None
        from virnuc_core.baseline.operations import Operations

        Operations(parent, spec).serve()
    except Exception as error:  # noqa: BLE001 - a worker's failure reaches its parent with its traceback
        parent.send(
            {"event": "error", "kind": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        )
        os._exit(1)
    if handle is not None:
        os.close(handle)  # held until here


if __name__ == "__main__":
    main()
