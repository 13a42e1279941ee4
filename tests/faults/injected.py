"""The core over a store in a process of its own: what faults are put into from outside, without a command line."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.convert import init_random

from .scene import python_path

HERE = Path(__file__).resolve().parent
ENGINE = EngineSpec(token_budget=1024, dna_token_budget=1024, shard_tokens=8192, heartbeat_s=0.2)
LENGTH = 300
RESULTS = (
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "reads.tsv",
    "embeddings.h5",
)


@dataclass(frozen=True, slots=True)
class Scene:
    """What all rounds share."""

    reads: Path
    store: Path
    models: Path
    reference: dict[str, bytes]


def write_reads(path: Path, count: int, seed: int) -> None:
    """Write random reads of 60 to 400 bases."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for i in range(count):
            bases = "".join(rng.choices("ACGT", k=rng.randint(60, 400)))
            file.write(f">r{i}\n{bases}\n")


def command(root: Path, scene: Scene, devices: str, engine: EngineSpec) -> list[str]:
    """Return the command of a run as a process of its own."""
    arguments = (
        root,
        scene.store,
        scene.models,
        devices,
        engine.model_dump_json(),
        scene.reads,
        LENGTH,
    )
    return [sys.executable, str(HERE / "run_child.py"), *map(str, arguments)]


def result_bytes(root: Path) -> dict[str, bytes]:
    """Return every byte that is a result, by path."""
    files = [*(root / name for name in RESULTS), *sorted((root / "shards").glob("0*.h5"))]
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


def prepare(folder: Path, reads: int = 250, seed: int = 11) -> Scene:
    """Prepare reads, models, a store and the undisturbed run."""
    scene = Scene(folder / "reads.fasta", folder / "orfs.h5", folder / "models", {})
    write_reads(scene.reads, reads, seed)
    init_random(scene.models, "tiny", "tiny", model_length=LENGTH, seed=3)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    subprocess.run(
        command(folder / "reference", scene, "cpu:1", ENGINE), env=environment, check=True
    )
    scene.reference.update(result_bytes(folder / "reference"))
    return scene


def committed(root: Path) -> int:
    """Count the shards that are committed."""
    return len(list((root / "shards").glob("0*.h5")))
