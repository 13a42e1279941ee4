"""A head trained on real viruses against human chromosome 22, with real and with random ESM-2 8M weights, as a table.

`python -m tests.real.training WHEELS OUT` writes OUT/training.md; no family of viruses is on two sides of a split.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from virnuc_core.encoders.convert import init_random
from virnuc_core.runfiles import read
from virnuc_core.training.train_file import TRAIN_FILE, TrainFile

from .genomes import hosts, viruses, write_checkpoint, write_reads

VIRNUC = Path(sys.executable).with_name("virnuc")
LENGTH = 300  # bases of the reads that are learnt from, and of a chunk
SEED = 0


def make_models(wheels: Path, out: Path) -> tuple[Path, Path]:
    """Models directories: real ESM-2 8M, and random weights of its size. DNABERT-S is small and random in both."""
    real, random = out / "real", out / "random"
    for folder in (real, random):
        init_random(folder, "t6_8M", "tiny", model_length=LENGTH, seed=SEED)
    (real / "esm2").rename(out / "not_used")
    subprocess.run(
        [VIRNUC, "models", "convert", real, "--esm2", write_checkpoint(wheels, out)], check=True
    )
    return real, random


def make_reads(
    wheels: Path, out: Path, of_family: int, windows: int, viral: int, others: int
) -> Path:
    """Labelled reads with their tables, by the beginning of their names; few of the host's have an open frame."""
    write_reads(
        [*viruses(wheels, of_family), *hosts(wheels, windows)], out / "reads", LENGTH, viral, others
    )
    return out / "reads"


def train(reads: Path, models: Path, out: Path, *options: str) -> TrainFile:
    """`virnuc train` as a user starts it; what it found."""
    tables = {name: f"{reads}.{name}.tsv" for name in ("truth", "groups")} | {
        "genomes": f"{reads}.genomes.fasta.gz"
    }
    words = [word for name, path in tables.items() for word in (f"--{name}", path)]
    given = [
        f"{reads}.fasta.gz",
        *words,
        "--models",
        models,
        "--model-length",
        LENGTH,
        "--devices",
        "cpu:2",
        "-o",
        out,
    ]
    command = [VIRNUC, "train", *map(str, given), "--no-progress", "--seed", str(SEED), *options]
    subprocess.run(
        command, check=True, env=os.environ | {"PREFECT_HOME": str(out.parent / "prefect")}
    )
    return read(out / TRAIN_FILE, TrainFile)


def table(found: dict[str, TrainFile]) -> str:
    """AUROC and AUPRC of reads with their intervals, by who was asked, by weights and method, in Markdown."""
    lines = [
        "| asked | ESM-2 | method | reads | clusters | AUROC | AUPRC |",
        "| --- | --- | --- | ---: | ---: | --- | --- |",
    ]
    for asked in dict.fromkeys(one.asked for of in found.values() for one in of.figures):
        for name, of in found.items():
            for one in of.figures:
                if one.asked == asked and one.level == "read" and one.natural:
                    both = " | ".join(str(one.metrics[metric]) for metric in ("auroc", "auprc"))
                    lines.append(
                        f"| {asked} | {name} | {one.method} | {one.rows:,} | {one.clusters} | {both} |"
                    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    cut = make_reads(given.wheels, given.out, of_family=8, windows=600, viral=8_160, others=39_840)
    ready = zip(("real 8M", "random 8M"), make_models(given.wheels, given.out), strict=True)
    made = {name: train(cut, models, given.out / f"train_{models.name}") for name, models in ready}
    (given.out / "training.md").write_text(table(made), encoding="utf-8")
