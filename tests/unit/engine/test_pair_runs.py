"""Runs over pairs: what they leave, how it is kept whole, and that they are not mixed with runs over single reads."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from tests.columns import documented
from virnuc_core.config import ClassifySpec, Devices
from virnuc_core.errors import RunMismatchError
from virnuc_core.pipeline import classify, stage_reads
from virnuc_core.reads.stage import StageSpec
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunRecord, RunSummary, read

from .runs import SMALL

VIRAL = tuple(
    f"{kind}viral_{mate}.fastq.gz" for kind in ("", "non") for mate in ("R1", "R2", "orphans")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of pairs, called as sequencers call them, one packed."""
    place = tmp_path_factory.mktemp("pairs")
    for mate in (1, 2):
        rng = random.Random(mate)
        reads = ("".join(rng.choices("ACG" if i % 3 else "ACGT", k=120)) for i in range(30))
        text = "".join(
            f"@p{i} {mate}:N:0:ACGT\n{bases}\n+\n{'F' * 120}\n" for i, bases in enumerate(reads)
        ).encode()
        name = f"lung_S1_R{mate}_001.fastq"
        (place / (name + ".gz" * (mate == 2))).write_bytes(
            gzip.compress(text) if mate == 2 else text
        )
    return place


def predict_pairs(root: Path, models: Path, reads: dict[str, object], **more: object) -> RunSummary:
    run, force = RunDir(root), bool(more.get("force"))
    staging = stage_reads(StageSpec(model_length=300, **reads), run.store, force=force)
    spec = ClassifySpec(models=models, devices=Devices.parse("cpu:1"), **{"engine": SMALL, **more})
    return classify(run, staging, spec)


@pytest.mark.slow
def test_a_run_over_pairs_is_one_set_of_files_and_no_other_run(
    tmp_path: Path, folder: Path, tiny_models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, mate_files, options = (
        tmp_path / "run",
        sorted(map(str, folder.iterdir())),
        {"reads": (str(folder),)},
    )
    predict_pairs(root, tiny_models, options)
    scores = [line.split("\t")[3] for line in (root / "pairs.tsv").read_text().splitlines()[1:]]
    median = sorted(float(score) for score in scores if score)[15]
    low = {"write_viral": True, "write_nonviral": True, "threshold": median}
    summary = predict_pairs(root, tiny_models, options, **low)
    assert documented(root / "pairs.tsv") == 30
    assert documented(root / "reads.tsv") == 60
    assert sum(summary.pairs.values()) == 30
    assert summary.pairs["viral"] > 0
    listed_files = read(root / "summary.json", RunSummary).files or {}
    assert {"pairs.tsv", *VIRAL} <= set(listed_files)
    assert read(root / "run.json", RunRecord).pairs == (tuple(mate_files),)
    contents_before = {
        name: (root / name).read_bytes() for name in ("pairs.tsv", "reads.tsv", *VIRAL)
    }
    heads = [gzip.decompress(contents_before[name]).decode().splitlines()[::4] for name in VIRAL]
    assert [line.replace(" 1:", " 2:") for line in heads[0]] == heads[1]
    assert len(heads[0]) == summary.pairs["viral"]
    assert [line.replace(" 1:", " 2:") for line in heads[3]] == heads[4]
    assert len(heads[0]) + len(heads[3]) == 30
    assert heads[2] == heads[5] == []

    (root / "pairs.tsv").write_bytes(contents_before["pairs.tsv"][:-20])
    (root / VIRAL[1]).unlink()
    caplog.clear()
    predict_pairs(root, tiny_models, {"mates_1": mate_files[:1], "mates_2": mate_files[1:]}, **low)
    assert {name: (root / name).read_bytes() for name in contents_before} == contents_before, (
        "mended, and -1 -2 are the same run"
    )
    assert any(
        "pairs.tsv, viral_R2.fastq.gz not as the run left it" in record.message
        for record in caplog.records
    )

    named = {"reads": tuple(mate_files)}
    for single in (named | {"pairs": False}, options | {"pairs": False}):
        with pytest.raises(
            RunMismatchError, match=r"pairs yes → no\); choose another directory or --force"
        ):
            predict_pairs(root, tiny_models, single)
    predict_pairs(root, tiny_models, options, threshold=median)
    assert (root / VIRAL[0]).exists()
    predict_pairs(root, tiny_models, options, threshold=0.99)
    assert not [*root.glob("viral*")], "those of another judgement do not stay"
    summary = predict_pairs(root, tiny_models, named | {"pairs": False}, force=True)
    assert not (root / "pairs.tsv").exists()
    assert summary.pairs == {}
    caplog.clear()
    predict_pairs(root, tiny_models, named | {"pairs": False})
    assert not any("not as the run left it" in record.message for record in caplog.records)
    with pytest.raises(RunMismatchError, match=r"pairs no → yes\)"):
        predict_pairs(root, tiny_models, options)
