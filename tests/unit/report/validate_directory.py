"""A finished validate directory, made by the product's own writers from simulated measurements."""

from __future__ import annotations

import atexit
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import h5py
import numpy as np
import pandas as pd

from tests import damage
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.profiles import Profile, load_profile
from virnuc_core.report.compare import compare_runs
from virnuc_core.rundir import RunDir, write_text_atomically
from virnuc_core.runfiles import digest
from virnuc_core.telemetry.log import write_telemetry
from virnuc_core.telemetry.statistics import device_busy, record_table
from virnuc_core.telemetry.tables import (
    BatchRecord,
    DeviceSample,
    HostSample,
    ShardDone,
    StageClock,
)
from virnuc_core.validation import LabelAgreement

from ..telemetry.measurements import telemetry_of

edit_json = damage.edit_json  # most tests look for it here
STARTED = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
ORIGIN_S = 5_000.0
FRAMES = ("F1", "F2", "F3", "R1", "R2", "R3")
PRINTS = {
    "reads": "5eed" * 16,
    PROTEIN.name: "e5e2" * 16,
    DNA.name: "d9a5" * 16,
    "head": "4ead" * 16,
}


@dataclass(frozen=True)
class Recipe:
    """What the directory should look like."""

    gpu: str | None = "NVIDIA GeForce RTX 4090"  # None: CPU cores
    devices: int = 2
    between: tuple[int, ...] = ()  # further runs, on fewer devices than all
    reads: int = 300
    shards: int = 12
    utilisation: tuple[float, ...] = (92.0, 95.0)
    seconds_a_shard: float = 6.0
    wait_ms: float = 0.4
    packing: float = 0.96
    baseline_s: float = 900.0
    baseline_reads: int | None = None
    seed: int = 1


_MADE_FOLDERS: dict[Hashable, Path] = {}  # by what they were made from, for this process


def copy_made_once(made_from: Hashable, make: Callable[[Path], object], out: Path) -> None:
    """Copy a folder to `out`, and make it before if this process has not done so yet.

    Args:
        made_from: All that the content of the folder depends on.
        make: Makes the folder, of which only the path exists already.
        out: Where the copy goes. What is there already stays.
    """
    if made_from not in _MADE_FOLDERS:
        folder = Path(mkdtemp(prefix="virnuc-test-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        make(folder)
        _MADE_FOLDERS[made_from] = folder
    shutil.copytree(_MADE_FOLDERS[made_from], out, dirs_exist_ok=True)


def build(out: Path, recipe: Recipe | None = None, profile: Profile | None = None) -> Profile:
    """Make `out` a finished validation and return the profile to judge it by."""
    recipe = recipe or Recipe()
    profile = profile or load_profile("phase10-1m").model_copy(
        update={"min_reads": 1, "min_compared_chunks": 1, "target_reads": None}
    )
    if recipe.baseline_reads is not None:
        baseline_spec = profile.baseline.model_copy(update={"reads": recipe.baseline_reads})
        profile = profile.model_copy(update={"baseline": baseline_spec})
    made_from = ("validation", recipe, profile.model_dump_json())
    copy_made_once(made_from, lambda folder: _build_anew(folder, recipe, profile), out)
    return profile


def _build_anew(out: Path, recipe: Recipe, profile: Profile) -> None:
    rows = result_rows(recipe)
    names = [f"devices-{count}" for count in sorted({1, *recipe.between, recipe.devices})]
    for name in names:
        build_run(out, name, recipe, rows, count=int(name.split("-")[1]), window_s=profile.window_s)
    build_baseline(out, recipe, rows)
    record = {
        **run_record(recipe, recipe.devices),
        "profile": profile.model_dump(mode="json"),
        "expected_files": [f"{part}/summary.json" for part in ("baseline", *names)],
    }
    write_json(out / "run.json", record)
    compare_runs(out, tuple(names), tolerance=0.01, subset=recipe.baseline_reads is not None)


@dataclass(frozen=True)
class Rows:
    """Result rows by read: ids and scores in input order."""

    lengths: list[int]
    ids: list[list[str]]
    scores: list[np.ndarray]  # float32 [rows of the read, 2]


def result_rows(recipe: Recipe) -> Rows:
    """Reads of 60 to 500 bases with 0 to 3 open frames each."""
    dice = random.Random(recipe.seed)
    lengths, ids, scores = [], [], []
    for number in range(recipe.reads):
        lengths.append(dice.randint(60, 500))
        frames = sorted(dice.sample(range(6), dice.choice((0, 0, 1, 2, 3))))
        ids.append([f"read{number}_chunk_1{FRAMES[f]}" for f in frames])
        virus = np.array([dice.random() for _ in frames], dtype=np.float32)
        scores.append(np.stack([1 - virus, virus], axis=1).reshape(-1, 2))
    return Rows(lengths, ids, scores)


def write_results(
    folder: Path, rows: Rows, *, first_reads: int | None = None, noise: float = 0.0
) -> dict[str, int]:
    """The two result files and reads.tsv; returns the fates. `noise` is added to every score2."""
    frames, chunks, reads = ["Sequence_ID\tPrediction\tscore1\tscore2"], [], []
    chunks.append("Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1")
    reads.append("id\tlength\tchunks\topen_frames\tfate\tviral_score\tlabel\tflags")
    fates = {"viral": 0, "others": 0, "no_open_frame": 0, "empty": 0, "failed": 0}
    for number, (length, ids, scores) in enumerate(
        zip(rows.lengths, rows.ids, rows.scores, strict=True)
    ):
        if first_reads is not None and number >= first_reads:
            break
        virus = np.clip(scores[:, 1] + np.float32(noise), 0, 1).astype(np.float32)
        other_scores = (np.float32(1) - virus).astype(np.float32)
        for name, a, b in zip(ids, other_scores, virus, strict=True):
            frames.append(f"{name}\t{'virus' if b > a else 'others'}\t{a!s}\t{b!s}")
        fate = "no_open_frame"
        if ids:
            is_virus = virus.max() >= other_scores.max()
            chunks.append(f"{ids[0][:-2]}\t{is_virus}\t{other_scores.max()!s}\t{virus.max()!s}")
            fate = "viral" if is_virus else "others"
        fates[fate] += 1
        virus_score = str(virus.max()) if ids else ""
        reads.append(f"read{number}\t{length}\t1\t{len(ids)}\t{fate}\t{virus_score}\t{fate}\t")
    run = RunDir(folder)
    write_text_atomically(run.predictions, "\n".join(frames) + "\n")
    write_text_atomically(run.consensus, "\n".join(chunks) + "\n")
    if first_reads is None:
        write_text_atomically(run.reads_table, "\n".join(reads) + "\n")
        write_text_atomically(run.failed_rows, "Sequence_ID\n")
    return fates


def build_run(
    out: Path, name: str, recipe: Recipe, rows: Rows, *, count: int, window_s: float
) -> None:
    """One run directory: results, shards, telemetry, summary and record."""
    run = RunDir(out / name)
    fates = write_results(run.root, rows)
    write_shards(run, rows, recipe)
    devices = device_records(recipe, count)
    ids = [device["id"] for device in devices]
    records = shards_done(recipe, ids)
    end_s = max(shard.finished_s for shard in records)
    samples, host = device_samples(recipe, ids, end_s), host_samples(end_s)
    clock = StageClock()
    clock.add("Sequence Chunking", 2.0, (ORIGIN_S - 5, ORIGIN_S - 3))
    clock.add("Six-Frame Translation", 3.0, (ORIGIN_S - 3, ORIGIN_S))
    clock.fuse("Nucleotide Splitting", "Six-Frame Translation")
    clock.fuse("Protein Splitting", "Six-Frame Translation")
    busy = max(device_busy(record_table(ShardDone, records, ids)), key=lambda one: one.busy_s)
    clock.add(DNA.title, busy.dna_s)
    clock.add(PROTEIN.title, busy.protein_s, (ORIGIN_S + 1, ORIGIN_S + 1 + busy.protein_s))
    clock.fuse("Feature Merging", PROTEIN.title)
    clock.add("Model Prediction", 0.5, (end_s, end_s + 0.5))
    clock.add("Consensus Scoring", 0.25, (end_s + 0.5, end_s + 0.75))
    wall_s = end_s - ORIGIN_S + 1.0
    # The rest of the time, so that the stages add up to the total. This row is of no class of losses.
    staged_s = sum(stage.seconds or 0.0 for stage in clock.times())
    clock.add("Earlier attempts: committed", 5.0 + wall_s - staged_s)
    telemetry = telemetry_of(
        records, samples, host, clock.times(), origin_s=ORIGIN_S, started=STARTED
    )
    figures = {
        "n_reads": recipe.reads,
        "wall_s": wall_s,
        "sequences_per_hour": 3600 * recipe.reads / (5.0 + wall_s),
    }
    telemetry_file = write_telemetry(run.telemetry, telemetry, window_s=window_s, **figures)
    n_rows = sum(len(ids) for ids in rows.ids)
    summary = {
        "schema_version": 1,
        "wall_s": wall_s,
        "staging_s": 5.0,
        "total_s": wall_s + 5.0,
        "stages": {stage.name: stage.seconds for stage in clock.times()},
        "n_reads": recipe.reads,
        "n_chunks": recipe.reads,
        "n_rows": n_rows,
        "n_uniques": n_rows,
        "fates": fates,
        "telemetry": telemetry_file.name,
        "devices": devices,
        "resumed": False,
        "shards_computed": recipe.shards,
        "shards_reused": 0,
        "restarts": 0,
        "files": {path.name: digest(path).model_dump() for path in run.listed if path.is_file()},
    }
    write_json(run.summary, summary)
    write_json(run.record, run_record(recipe, count))


def device_records(recipe: Recipe, count: int) -> list[dict[str, Any]]:
    if recipe.gpu is None:
        return [
            {"id": f"cpu-core-{i}", "kind": "cpu", "name": "Some Processor", "core": i}
            for i in range(count)
        ]
    return [
        {"id": f"GPU-{i}0000000-aaaa", "kind": "cuda", "name": recipe.gpu, "core": None}
        for i in range(count)
    ]


def run_record(recipe: Recipe, count: int) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "virnuc_version": "0.1.0",
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "created": "2026-03-01T12:00:00+00:00",
        "versions": {"torch": "2.13.0", "python": "3.11.9", "driver": "580.95.05"},
        "host": "lab-gpu-1",
        "spec": {},
        "model_length": 500,
        "fingerprints": PRINTS,
        "resolved": {
            "precision": "fp16" if recipe.gpu else "fp32",
            "attention": "varlen",
            "compile": False,
        },
        "devices": device_records(recipe, count),
        "widths": {"dna": 4, "protein": 6},
        "seeds": {"baseline": 0},
        "store": "../orfs.h5",
    }


def shards_done(recipe: Recipe, devices: list[str]) -> list[ShardDone]:
    """Shards dealt in turn, each with DNA batches, then protein batches."""
    records = []
    for shard in range(recipe.shards):
        device = devices[shard % len(devices)]
        turn = shard // len(devices)
        started_s = ORIGIN_S + 2.0 + turn * recipe.seconds_a_shard
        batches = []
        for encoder, begin_s, number in ((DNA.name, 0.0, 4), (PROTEIN.name, 0.2, 8)):
            span_s = recipe.seconds_a_shard * (0.2 if encoder == DNA.name else 0.75)
            for index in range(number):
                launched_s = started_s + begin_s * recipe.seconds_a_shard + index * span_s / number
                tokens = int(16_384 * recipe.packing) - 13 * index
                batches.append(
                    BatchRecord(
                        device=device,
                        encoder=encoder,
                        shard=shard,
                        index=index,
                        rows=tokens // 52,
                        tokens=tokens,
                        slots=16_384,
                        wait_ms=recipe.wait_ms if index else 20.0,
                        arrived_s=launched_s - 0.001,
                        launched_s=launched_s,
                        device_ms=1000.0 * span_s / number,
                    )
                )
        records.append(
            ShardDone(
                device=device,
                shard=shard,
                rows=500,
                protein_tokens=sum(b.tokens for b in batches if b.encoder == PROTEIN.name),
                dna_tokens=sum(b.tokens for b in batches if b.encoder == DNA.name),
                started_s=started_s,
                finished_s=started_s + recipe.seconds_a_shard,
                dna_s=0.2 * recipe.seconds_a_shard,
                protein_s=0.75 * recipe.seconds_a_shard,
                head_s=0.01,
                commit_s=0.02,
                batches=tuple(batches),
            )
        )
    return records


def device_samples(recipe: Recipe, devices: list[str], end_s: float) -> pd.DataFrame:
    if recipe.gpu is None:
        return record_table(DeviceSample, [], devices)
    samples = []
    for place, device in enumerate(devices):
        level = recipe.utilisation[place % len(recipe.utilisation)]
        for tick in range(int((end_s - ORIGIN_S) / 0.5) + 1):
            wiggle = 3.0 * (-1) ** tick
            samples.append(
                DeviceSample(
                    ORIGIN_S + tick * 0.5, device, level + wiggle, 9 << 30, 400.0 + wiggle, 60.0
                )
            )
    return record_table(DeviceSample, samples, devices)


def host_samples(end_s: float) -> pd.DataFrame:
    ticks = int((end_s - ORIGIN_S) / 0.5) + 1
    return record_table(
        HostSample, [HostSample(ORIGIN_S + i * 0.5, 35.0, 3 << 30) for i in range(ticks)]
    )


def write_shards(run: RunDir, rows: Rows, recipe: Recipe) -> None:
    """Two shard files and the embeddings file, as arrays that depend on the scores only."""
    run.shards.mkdir(parents=True, exist_ok=True)
    scores = np.concatenate(rows.scores).astype(np.float32)
    embeddings = (
        np.random.default_rng(recipe.seed).normal(size=(len(scores), 10)).astype(np.float32)
    )
    half = len(scores) // 2
    for number, part in enumerate((slice(0, half), slice(half, None))):
        with h5py.File(run.shards / f"{number:05d}.h5", "w") as file:
            file["embeddings"], file["scores"] = embeddings[part], scores[part]
    with h5py.File(run.embeddings, "w") as file:
        file["embeddings"], file["scores"] = embeddings, scores


def build_baseline(out: Path, recipe: Recipe, rows: Rows) -> None:
    """The baseline's folder: results that differ in the seventh digit, and its summary."""
    run = RunDir(out / "baseline")
    write_results(run.root, rows, first_reads=recipe.baseline_reads or recipe.reads, noise=1e-7)
    frame_counts = [len(ids) for ids in rows.ids]
    total = sum(frame_counts) * 52
    summary: dict[str, Any] = {
        "schema_version": 1,
        "name": "v1",
        "source": "measured",
        "wall_s": recipe.baseline_s,
        "stages": {DNA.title: recipe.baseline_s * 0.2, PROTEIN.title: recipe.baseline_s * 0.75},
        "subset": None,
        "measured_s": recipe.baseline_s,
        "measured_stages": {
            DNA.title: recipe.baseline_s * 0.2,
            PROTEIN.title: recipe.baseline_s * 0.75,
        },
        "n_reads": recipe.reads,
        "measured_rows": sum(frame_counts[: recipe.baseline_reads or recipe.reads]),
        "devices": device_records(recipe, recipe.devices),
    }
    if recipe.baseline_reads is not None:
        tokens = summary["measured_rows"] * 52
        stages = {DNA.title: recipe.baseline_s * 0.2, PROTEIN.title: recipe.baseline_s * 0.8}
        summary |= {
            "subset": {"reads": recipe.baseline_reads, "tokens": tokens, "total_tokens": total},
            "stages": stages,
            "measured_s": recipe.baseline_s * tokens / total,
            "measured_stages": {name: stage_s * tokens / total for name, stage_s in stages.items()},
        }
    write_json(run.summary, summary)
    # The baseline is measured before the first run.
    started = {"created": "2026-03-01T11:00:00+00:00"}
    write_json(run.record, run_record(recipe, recipe.devices) | started)


def write_json(path: Path, body: object) -> None:
    write_text_atomically(path, json.dumps(body, indent=1) + "\n")


def digest_of(folder: Path) -> str:
    """One digest over every file's name and bytes."""
    sha = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sha.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


def agreement_of(total: int, differing: int) -> LabelAgreement:
    agreeing = total - differing
    share = agreeing / total
    counts = {
        "in_both": total,
        "only_in_a": 0,
        "only_in_b": 0,
        "agreeing": agreeing,
        "agreement": share,
    }
    return LabelAgreement(**counts, score=None, examples=())
