"""Reads of kinds that a classifier has not seen: flagged, left without a verdict, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from virnuc_core import pipeline
from virnuc_core.config import VerdictSpec
from virnuc_core.encoders.composition import COMPOSITION, compare_reads, write_composition
from virnuc_core.errors import ConfigError, RunMismatchError, WeightsError
from virnuc_core.reads.stage import StageSpec, StageSummary
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.tools.rescore import rescore
from virnuc_core.training.familiarity import fit_composition

from ..training.coding_genomes import reads_of_kind, rows_of_genomes, stage_reads
from .runs import ONE_CORE, Staged, classify_store

pytestmark = pytest.mark.usefixtures("forked_workers")

VIRUS, HOST, FOREIGN = 1, 2, 3
N_READS = 80  # of each genome of a sample
CARD = {
    "reads": "r",
    "truth": "t",
    "test": "s",
    "lengths": [150, 150, 150],
    "prevalence": 0.01,
    "thresholds": {"0.05": 0.5},
    "uncertain": [0.5, 0.5],
    "auroc": {"value": 0.9, "low": 0.8, "high": 1.0},
}


@pytest.fixture(scope="module")
def models(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, whose head says that it was trained on two kinds of genome."""
    folder = tmp_path_factory.mktemp("familiar")
    reads: list[str] = []
    genomes: list[tuple[str, int]] = []
    for kind, name in ((VIRUS, "virus"), (HOST, "host")):
        for genome in range(6):
            reads += reads_of_kind(kind, genome, 30)
            genomes += [(name, 100 * kind + genome)] * 30
    store = stage_reads(reads, folder / "training")
    composition = fit_composition(store, rows_of_genomes(store, genomes), seed=0)
    assert composition is not None
    models = Path(shutil.copytree(tiny_models, folder / "models"))
    config = models / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"card": CARD, "origin": "made"}))
    write_composition(composition, models / "head")
    return models


def stage_sample(folder: Path, *kinds: int) -> Staged:
    """Stage a sample of reads of new genomes, one of each kind."""
    reads = [read for kind in kinds for read in reads_of_kind(kind, 99, N_READS)]
    stage_reads(reads, folder / "reads")
    spec = StageSpec(reads=(str(folder / "reads" / "reads.fasta"),), model_length=300)
    store = folder / "run" / "orfs.h5"
    return store, pipeline.stage_reads(spec, store)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StageSummary]:
    """A sample with a virus of a known kind, and a genome of an unknown one."""
    return stage_sample(tmp_path_factory.mktemp("foreign"), VIRUS, FOREIGN)


@pytest.fixture(scope="module")
def foreign_run(foreign: Staged, models: Path) -> RunDir:
    """A run over it, in the folder of its store."""
    run = RunDir(foreign[0].parent)
    classify_store(run.root, foreign, models, ONE_CORE)
    return run


def reads_table(run: RunDir) -> pd.DataFrame:
    """Return `reads.tsv`."""
    return pd.read_csv(run.reads_table, sep="\t", keep_default_na=False)


def test_far_reads_have_a_flag_and_their_verdict(
    foreign: Staged, foreign_run: RunDir, models: Path
) -> None:
    table = reads_table(foreign_run)
    is_flagged = table["flags"] == "unfamiliar"
    assert is_flagged[:N_READS].mean() < 0.15
    assert is_flagged[N_READS:].mean() > 0.5
    assert set(table["fate"]) <= {"viral", "others"}
    summary = json.loads(foreign_run.summary.read_text())
    assert summary["familiarity"]["verdict"] == "unfamiliar"
    assert summary["familiarity"]["far"] == is_flagged.sum()
    assert "random" in summary["origins"]["esm2"], "a warning is not hidden by random weights"
    assert summary["answer"]["message"].endswith(summary["answer"]["domain_warning"])
    assert summary["answer"]["domain_warning"].startswith("UNFAMILIAR SAMPLE")
    assert any("unlike all that the classifier was trained on" in w for w in summary["warnings"])
    assert foreign_run.composition.read_bytes() == (models / "head" / COMPOSITION).read_bytes()


def test_a_known_sample_has_few_flags(models: Path, tmp_path: Path) -> None:
    sample = stage_sample(tmp_path, VIRUS, HOST)
    summary = classify_store(sample[0].parent, sample, models, ONE_CORE, fdr=0.05)
    assert summary.familiarity is not None
    assert summary.familiarity.verdict == "familiar"
    assert not summary.warnings or "unlike" not in " ".join(summary.warnings)
    assert summary.answer.domain_warning == ""
    [note] = [remark for remark in summary.remarks if "--fdr" in remark]
    assert "150 bases of these kinds: host, virus" in note


@pytest.mark.parametrize("options", [{"fdr": 0.05}, {"abstain": True}])
def test_thresholds_of_the_card_are_refused_outside_its_domain(
    options: dict[str, object], foreign: Staged, models: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--fdr-outside-domain"):
        classify_store(tmp_path / "run", foreign, models, ONE_CORE, **options)
    assert not (tmp_path / "run").exists()


def test_asked_for_twice_they_are_used_and_far_reads_get_no_verdict(
    foreign: Staged, models: Path, tmp_path: Path
) -> None:
    options = {"abstain": True, "fdr_outside_domain": True}
    summary = classify_store(tmp_path / "run", foreign, models, ONE_CORE, **options)
    table = reads_table(RunDir(tmp_path / "run"))
    is_flagged = table["flags"] == "unfamiliar"
    assert is_flagged.sum() > N_READS / 2
    assert (table["fate"] == "uncertain").equals(is_flagged), "the card's own range is empty"
    assert (table.loc[is_flagged, "label"] == "").all()
    assert summary.fates["uncertain"] == is_flagged.sum()


def test_rescoring_writes_the_same_flags(foreign_run: RunDir, models: Path, tmp_path: Path) -> None:
    kept = rescore(foreign_run, None, RunDir(tmp_path / "kept"), VerdictSpec(threshold=0.5))
    scored = rescore(foreign_run, models, RunDir(tmp_path / "scored"))
    assert kept.familiarity == scored.familiarity
    for name in ("kept", "scored"):
        flags = reads_table(RunDir(tmp_path / name))["flags"]
        assert flags.equals(reads_table(foreign_run)["flags"])
    with pytest.raises(ConfigError, match="--fdr-outside-domain"):
        rescore(foreign_run, models, RunDir(tmp_path / "refused"), VerdictSpec(fdr=0.05))


def test_a_head_that_says_nothing_of_its_training_gives_no_flag(
    foreign: Staged, tiny_models: Path, tmp_path: Path
) -> None:
    summary = classify_store(tmp_path / "run", foreign, tiny_models, ONE_CORE)
    assert summary.familiarity is not None
    assert summary.familiarity.verdict == "unknown"
    assert set(reads_table(RunDir(tmp_path / "run"))["flags"]) == {""}
    assert not (tmp_path / "run" / COMPOSITION).exists()


def test_another_composition_is_another_run(
    foreign: Staged, foreign_run: RunDir, models: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(models, tmp_path / "models"))
    path = changed / "head" / COMPOSITION
    path.write_text(path.read_text().replace('"far_from": ', '"far_from": 1'))
    with pytest.raises(RunMismatchError, match="head"):
        classify_store(foreign_run.root, foreign, changed, ONE_CORE)


def test_a_damaged_composition_is_named(foreign: Staged, models: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(models, tmp_path / "models"))
    (broken / "head" / COMPOSITION).write_text("{}")
    with pytest.raises(WeightsError, match=COMPOSITION):
        classify_store(tmp_path / "run", foreign, broken, ONE_CORE)


def test_a_lost_copy_is_written_again(foreign: Staged, foreign_run: RunDir, models: Path) -> None:
    flags = reads_table(foreign_run)["flags"]
    foreign_run.composition.unlink()
    foreign_run.reads_table.unlink()
    classify_store(foreign_run.root, foreign, models, ONE_CORE)
    assert foreign_run.composition.exists()
    assert reads_table(foreign_run)["flags"].equals(flags)


def test_blocks_of_rows_give_the_same_flags(
    foreign: Staged, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from virnuc_core.encoders import composition as module

    composition = module.read_composition(models / "head")
    assert composition is not None
    store = OrfStore.open(foreign[0])
    whole = compare_reads(store, composition)
    monkeypatch.setattr(module, "BLOCK_ROWS", 7)
    monkeypatch.setattr(module, "BLOCK_UNIQUES", 5)
    in_blocks = compare_reads(store, composition)
    assert whole.is_far is not None
    assert in_blocks.is_far is not None
    assert (whole.is_far == in_blocks.is_far).all()
    assert whole.sample == in_blocks.sample
