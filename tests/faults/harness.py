"""Rounds of a real run that is struck at a random moment, resumed on other devices, and compared byte for byte.

`python tests/faults/harness.py --rounds 200 --seed 1 --out table.md` runs the long form and prints its table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.convert import init_random

HERE = Path(__file__).resolve().parent
ENGINE = EngineSpec(token_budget=1024, dna_token_budget=1024, shard_tokens=8192, heartbeat_s=0.2)
LENGTH = 300
RESULTS = (
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "reads.tsv",
    "embeddings.h5",
)
STRIKES = ("worker", "loader", "parent", "everything", "interrupt", "terminate", "flip", "truncate")
GONE_WITHIN_S = 120.0  # what outlives its run outlives this as well; a busy machine takes its time


@dataclass(frozen=True, slots=True)
class Scene:
    """What all rounds share."""

    reads: Path
    store: Path
    models: Path
    reference: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did and saw."""

    number: int
    strike: str
    first: str
    second: str
    struck_after_shards: int
    resumed: bool
    identical: bool
    processes_left: int


def write_reads(path: Path, count: int, seed: int) -> None:
    """Random reads of 60 to 400 bases."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for i in range(count):
            file.write(f">r{i}\n{''.join(rng.choices('ACGT', k=rng.randint(60, 400)))}\n")


def command(root: Path, scene: Scene, devices: str, engine: EngineSpec) -> list[str]:
    """The run as a process of its own."""
    arguments = (root, scene.store, scene.models, devices, engine.model_dump_json(), scene.reads, LENGTH)
    return [sys.executable, str(HERE / "run_child.py"), *map(str, arguments)]


def result_bytes(root: Path) -> dict[str, bytes]:
    """Every byte that is a result."""
    files = [*(root / name for name in RESULTS), *sorted((root / "shards").glob("0*.h5"))]
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


def prepare(folder: Path, reads: int = 250, seed: int = 11) -> Scene:
    """Reads, models, store and the undisturbed run."""
    scene = Scene(folder / "reads.fasta", folder / "orfs.h5", folder / "models", {})
    write_reads(scene.reads, reads, seed)
    init_random(scene.models, "tiny", "tiny", model_length=LENGTH, seed=3)
    subprocess.run(command(folder / "reference", scene, "cpu:1", ENGINE), check=True)
    scene.reference.update(result_bytes(folder / "reference"))
    return scene


def committed(root: Path) -> int:
    """Shards that are there."""
    return len(list((root / "shards").glob("0*.h5")))


def strike(kind: str, run: subprocess.Popen[bytes], rng: random.Random) -> list[psutil.Process]:
    """Hit the run; the processes that must be gone afterwards."""
    parent = psutil.Process(run.pid)
    family = parent.children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended in this very moment
        _hit(kind, parent, family, rng)
    return family


def _hit(kind: str, parent: psutil.Process, family: list[psutil.Process], rng: random.Random) -> None:
    workers = parent.children()
    loaders = [p for p in family if p not in workers]
    if kind == "worker" and workers:
        rng.choice(workers).kill()
    elif kind == "loader" and (loaders or workers):
        rng.choice(loaders or workers).kill()
    elif kind == "parent":
        parent.kill()
    elif kind == "everything":
        for process in [parent, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    elif kind in ("interrupt", "terminate"):
        parent.send_signal(signal.SIGINT if kind == "interrupt" else signal.SIGTERM)


def damage(root: Path, kind: str, rng: random.Random) -> None:
    """Flip a byte of, or cut, one committed shard."""
    shards = sorted((root / "shards").glob("0*.h5"))
    if not shards:
        return
    victim = rng.choice(shards)
    body = bytearray(victim.read_bytes())
    if kind == "flip":
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    else:
        del body[rng.randrange(len(body)) :]
    victim.write_bytes(body)


def play(number: int, kind: str, root: Path, scene: Scene, rng: random.Random) -> Round:
    """One round."""
    cores = len(os.sched_getaffinity(0))
    devices = ["cpu:1", "cpu:2"] if cores > 1 else ["cpu:1"]
    first, second = rng.choice(devices), rng.choice(devices)
    loaders = 1 if kind == "loader" else 0
    engine = ENGINE.model_copy(update={"num_workers": loaders})
    total = sum(name.startswith("shards/") for name in scene.reference)
    after = rng.randrange(total)
    with subprocess.Popen(command(root, scene, first, engine), stderr=subprocess.DEVNULL) as run:
        while committed(root) < after and run.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        family = strike(kind, run, rng) if run.poll() is None else []
        status = run.wait()
    _, left = psutil.wait_procs(family, timeout=GONE_WITHIN_S)
    if kind in ("flip", "truncate"):
        damage(root, kind, rng)
    again = status != 0 or kind in ("flip", "truncate")
    if again:
        subprocess.run(command(root, scene, second, ENGINE), check=True)
    same = result_bytes(root) == scene.reference
    return Round(number, kind, first, second if again else "-", after, again, same, len(left))


def rounds(count: int, seed: int, folder: Path, scene: Scene, first: int = 0) -> list[Round]:
    """Play `count` rounds from number `first` on, every kind of strike in turn."""
    rng = random.Random(seed)
    played = []
    for number in range(first, first + count):
        root = folder / f"round-{number:04d}"
        played.append(play(number, STRIKES[number % len(STRIKES)], root, scene, rng))
        shutil.rmtree(root)
    return played


def table(played: list[Round]) -> str:
    """Markdown: one line a kind of strike."""
    lines = ["| strike | rounds | resumed | bytes identical | processes left |", "| --- | --- | --- | --- | --- |"]
    kinds = Counter(r.strike for r in played)
    for kind in STRIKES:
        own = [r for r in played if r.strike == kind]
        if own:
            lines.append(
                f"| {kind} | {kinds[kind]} | {sum(r.resumed for r in own)} | {sum(r.identical for r in own)} "
                f"| {sum(r.processes_left for r in own)} |"
            )
    good = sum(r.identical and not r.processes_left for r in played)
    return "\n".join([*lines, "", f"{good} of {len(played)} rounds good"])


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="virnuc-faults-") as name:
        scene = prepare(Path(name))
        started = time.monotonic()
        played = rounds(options.rounds, options.seed, Path(name), scene)
    text = table(played) + f"\n\nseed {options.seed}, {time.monotonic() - started:.0f} s\n"
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if all(r.identical and not r.processes_left for r in played) else 1


if __name__ == "__main__":
    sys.exit(main())
