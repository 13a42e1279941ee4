"""A run in a process of its own, so that all of it can be killed.

`python run_child.py ROOT STORE MODELS DEVICES ENGINE READS LENGTH`
"""

from __future__ import annotations

import sys
from pathlib import Path

from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.errors import VirnucError
from virnuc_core.pipeline import classify
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.rundir import RunDir


def main() -> int:
    """Stage (reused when it is there) and classify; the exit status is the command line's."""
    root, store, models, devices, engine, reads, length = sys.argv[1:]
    try:
        staging = stage(StageSpec(reads=(reads,), model_length=int(length)), Path(store))
        summary = classify(
            RunDir(Path(root)),
            staging,
            ClassifySpec(
                models=Path(models),
                devices=Devices.parse(devices),
                engine=EngineSpec.model_validate_json(engine),
            ),
            monitor=RunMonitor(sample_s=0.2),
        )
    except VirnucError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"OSError: {error}", file=sys.stderr)
        return 1
    return 6 if summary.fates["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
