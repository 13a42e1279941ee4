"""Stored embeddings are scored again, by another head or with another threshold."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from virnuc.flows import cli
from virnuc_core import runfiles
from virnuc_core.config import VerdictSpec
from virnuc_core.encoders.checkpoint import check_models, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.convert import init_random, random_tensor
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.model_config import Estimate, HeadCard, HeadShape, read_shape, write_shape
from virnuc_core.encoders.model_files import write_part
from virnuc_core.engine import shards
from virnuc_core.errors import ConfigError, ShardError, WeightsError
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.summary_page import write_rescore_pages
from virnuc_core.results import write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import write
from virnuc_core.tools.rescore import _count_threads, rescore

FRAMES = "prediction_results.txt"
FRAME_FILES = (FRAMES, "prediction_results_highestscore.csv")
FILES = (*FRAME_FILES, "reads.tsv", "failed.tsv")
N_READS = 300
SHARD_ROWS = 53
FAILED_UNIQUE = 7  # a sequence without a finite embedding


def make_models(folder: Path, seed: int, model_length: int = 500) -> Path:
    """Write tiny random models."""
    init_random(folder, esm2="tiny", dnabert_s="tiny", model_length=model_length, seed=seed)
    return folder


def open_head(models: Path) -> Head:
    """Load the head of a models directory."""
    return Head(*open_part(models, HeadShape), torch.device("cpu"))


def score(models: Path, embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score embeddings with the head of a models directory, [uniques, 2]."""
    return open_head(models).scores(torch.from_numpy(embeddings)).numpy()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), seed=1)


@pytest.fixture
def run(tmp_path: Path, models: Path) -> RunDir:
    """A finished run with random embeddings, one of its sequences failed."""
    run = RunDir(tmp_path / "run")
    spec = SimulateSpec(reads=N_READS, genome_length=3_000, seed=2)
    simulation = simulate(spec, tmp_path / "reads.fasta")
    stage(StageSpec(reads=(str(simulation.reads_file),)), run.store)
    store = OrfStore.open(run.store)
    record = runfiles.new_record(
        runfiles.RunRecord,
        (),
        model_length=500,
        fingerprints={"reads": store.fingerprint, "head": fingerprint(models)["head"]},
        store="orfs.h5",
        widths={"dna": 64, "protein": 64},
    )
    write(run.record, record)
    width = open_head(models).shape.width
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(store.n_uniques, width)).astype(np.float32)
    embeddings[FAILED_UNIQUE] = np.nan
    write_shards(run, embeddings, score(models, embeddings))
    write_results(run, store, *shards.read_scores(run))
    return run


def write_shards(run: RunDir, embeddings: NDArray[np.float32], scores: NDArray[np.float32]) -> None:
    """Commit embeddings and scores as the shards of a run."""
    bounds = (*range(0, len(embeddings), SHARD_ROWS), len(embeddings))
    plan = shards.ShardPlan(bounds=bounds, fingerprint="made")
    shards.write_plan(run, plan)
    for shard in range(len(plan)):
        rows = slice(*plan.range(shard))
        shards.commit(run, plan, shard, shards.ShardResult(embeddings[rows], scores[rows]))


def read_files(run: RunDir, names: tuple[str, ...] = FILES) -> list[bytes]:
    """Return the result files of a run."""
    return [(run.root / name).read_bytes() for name in names]


# --- What is written ------------------------------------------------------------------------------


def test_the_same_head_gives_the_same_bytes(tmp_path: Path, run: RunDir, models: Path) -> None:
    out_dir = RunDir(tmp_path / "again")
    summary = rescore(run, models, out_dir)
    assert read_files(out_dir) == read_files(run)
    assert summary.results.fates["failed"] > 0, "the failed sequence stays failed"
    assert summary.head == fingerprint(models)["head"]


def test_another_head_gives_its_own_scores(tmp_path: Path, run: RunDir) -> None:
    other_models = make_models(tmp_path / "other", seed=9)
    files = read_files(run)
    out_dir = RunDir(tmp_path / "new")
    summary = rescore(run, other_models, out_dir)
    assert read_files(run) == files, "the run itself is left alone"
    assert read_files(out_dir) != files

    plan = shards.read_plan(run)
    results = [shards.read_shard(run, plan, shard) for shard in range(len(plan))]
    scores = score(other_models, np.concatenate([result.embeddings for result in results]))
    virus_scores = scores[OrfStore.open(run.store).row_unique[:], 1]
    table = pd.read_csv(out_dir.root / FRAMES, sep="\t", dtype={"score2": np.float32})
    assert np.array_equal(table["score2"], virus_scores[~np.isnan(virus_scores)])

    record = json.loads((out_dir.root / "rescore.json").read_text())
    assert record["schema_version"] == 2
    assert record["head"] == summary.head == fingerprint(other_models)["head"]
    assert sum(record["results"]["fates"].values()) == N_READS


def test_another_threshold_changes_only_the_verdicts_on_reads(tmp_path: Path, run: RunDir) -> None:
    low = RunDir(tmp_path / "low")
    high = RunDir(tmp_path / "high")
    few_viral = rescore(run, None, high, VerdictSpec(threshold=0.9)).results.fates["viral"]
    many_viral = rescore(run, None, low, VerdictSpec(threshold=0.1)).results.fates["viral"]
    assert few_viral < many_viral
    frame_files = read_files(run, FRAME_FILES)
    assert read_files(low, FRAME_FILES) == frame_files
    assert read_files(high, FRAME_FILES) == frame_files


def test_an_interrupted_rescoring_leaves_no_record_of_the_one_before(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record would be about files that are no longer there."""
    out_dir = RunDir(tmp_path / "out")
    rescore(run, None, out_dir, VerdictSpec(threshold=0.9))
    monkeypatch.setattr("os.replace", interrupt_at("reads.tsv"))
    with pytest.raises(KeyboardInterrupt):
        rescore(run, None, out_dir, VerdictSpec(threshold=0.1))
    assert not (out_dir.root / "rescore.json").exists()


def interrupt_at(name: str) -> Callable[[Path, Path], None]:
    """Return a function that renames files until it comes to `name`."""

    def replace(source: Path, target: Path) -> None:
        if target.name == name:
            raise KeyboardInterrupt
        source.rename(target)

    return replace


def test_the_folder_of_a_head_can_be_given(tmp_path: Path, run: RunDir, models: Path) -> None:
    shutil.copytree(models / "head", tmp_path / "new")
    out_dir = RunDir(tmp_path / "out")
    summary = rescore(run, tmp_path / "new", out_dir)
    assert read_files(out_dir) == read_files(run)
    assert summary.head == fingerprint(models)["head"]


# --- The page -------------------------------------------------------------------------------------


def run_command(*words: object) -> int:
    """Run a command of `virnuc` in this process, and return its exit code."""
    return cli.main([str(word) for word in words])


def test_the_command_writes_a_page_that_says_what_was_scored_again(
    tmp_path: Path, run: RunDir, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again"
    assert run_command("rescore", run.root, "--threshold", "0.2", "-o", out) == 0
    output = capsys.readouterr().out
    assert f"\nResults: {out}\nPage: {out}/summary.html\n" in output
    text = " ".join((out / "summary.md").read_text().split())
    by_run = f"This is the run {run.root}, judged again by the scores of that run"
    assert f"{by_run} with the threshold 0.2. Its own verdicts are in {run.root}." in unescape(text)
    assert output.splitlines()[0] in text, "the page has the answer of the terminal"
    assert "Run run, scored again" in (out / "summary.html").read_text()

    assert run_command("rescore", run.root, "--head", models, "-o", out) == 0
    text = unescape((out / "summary.md").read_text())
    assert f"judged again by the classifier in {models} with the threshold 0.5." in text


def unescape(text: str) -> str:
    """Return Markdown without the backslashes that let letters stand for themselves."""
    return html.unescape(re.sub(r"\\([^\w\s])", r"\1", text))


def test_an_interrupted_rescoring_leaves_no_page_of_the_one_before(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = RunDir(tmp_path / "out")
    assert run_command("rescore", run.root, "-o", out.root) == 0
    assert out.page.exists()
    monkeypatch.setattr("os.replace", interrupt_at("reads.tsv"))
    with pytest.raises(KeyboardInterrupt):
        rescore(run, None, out, VerdictSpec(threshold=0.1))
    assert not out.page.exists()
    assert not out.text_page.exists()


@pytest.mark.parametrize("command", ["export", "rescore"])
def test_commands_that_need_embeddings_name_the_run_that_was_scored_again(
    tmp_path: Path, run: RunDir, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out = tmp_path / "again"
    rescore(run, None, RunDir(out), VerdictSpec(threshold=0.2))
    assert run_command(command, out, "-o", tmp_path / "further") == 2
    assert capsys.readouterr().err.strip() == (
        f"virnuc: {out}: holds results of virnuc rescore, without embeddings of its own; "
        f"name the run that was scored again: {run.root}"
    )


# --- The card of the head -------------------------------------------------------------------------


@pytest.fixture
def head_with_card(tmp_path: Path, models: Path) -> Path:
    """A head that was trained on reads of 900 bases and more."""
    head = Path(shutil.copytree(models / "head", tmp_path / "head"))
    card = HeadCard(
        reads="a",
        truth="b",
        test="c",
        lengths=(900, 950, 990),
        prevalence=0.5,
        auroc=Estimate(value=0.5, low=0.4, high=0.6),
        thresholds={0.01: 0.7},
        uncertain=(0.65, 0.75),
    )
    shape = read_shape(head / "config.json", HeadShape)
    write_shape(shape.model_copy(update={"card": card}), head / "config.json")
    return head


def test_the_card_gives_the_threshold_of_a_false_discovery_rate(
    tmp_path: Path, run: RunDir, head_with_card: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_threshold = rescore(
        run, head_with_card, RunDir(tmp_path / "threshold"), VerdictSpec(threshold=0.7)
    )
    by_rate = rescore(
        run,
        head_with_card,
        RunDir(tmp_path / "rate"),
        VerdictSpec(fdr=0.01, fdr_outside_domain=True),
    )
    assert by_rate.results.threshold == 0.7
    assert by_rate.results.fates == by_threshold.results.fates
    assert "trained on reads of 900 to 990 bases" in caplog.text


def test_the_card_gives_the_uncertain_scores(
    tmp_path: Path, run: RunDir, head_with_card: Path
) -> None:
    with pytest.raises(ConfigError, match="thresholds hold for reads like those"):
        rescore(run, head_with_card, RunDir(tmp_path / "out"), VerdictSpec(abstain=True))
    spec = VerdictSpec(fdr=0.01, abstain=True, fdr_outside_domain=True)
    summary = rescore(run, head_with_card, RunDir(tmp_path / "out"), spec)
    assert summary.uncertain == (0.65, 0.75)
    assert summary.results.fates["uncertain"] > 0
    assert sum(summary.results.fates.values()) == N_READS


def test_without_a_card_a_false_discovery_rate_is_refused(
    tmp_path: Path, run: RunDir, models: Path
) -> None:
    with pytest.raises(ConfigError, match="fdr, abstain: the head has no card"):
        rescore(run, models, RunDir(tmp_path / "out"), VerdictSpec(fdr=0.01))


def test_without_a_head_there_are_no_uncertain_scores(tmp_path: Path, run: RunDir) -> None:
    with pytest.raises(ConfigError, match="give the head with --head"):
        rescore(run, None, RunDir(tmp_path / "out"), VerdictSpec(abstain=True))


# --- What is refused ------------------------------------------------------------------------------


def test_the_files_of_another_run_are_not_replaced(tmp_path: Path, run: RunDir) -> None:
    other_run = RunDir(tmp_path / "other")
    shutil.copytree(run.root, other_run.root)
    files = read_files(other_run)
    with pytest.raises(ConfigError, match="holds a run"):
        rescore(run, None, other_run, VerdictSpec(threshold=0.9))
    assert read_files(other_run) == files


def test_the_files_of_the_run_itself_are_not_replaced(run: RunDir, models: Path) -> None:
    with pytest.raises(ConfigError, match="the run itself"):
        rescore(run, models, run)


def test_a_head_for_another_model_length_is_refused(tmp_path: Path, run: RunDir) -> None:
    short = make_models(tmp_path / "short", seed=1, model_length=300)
    with pytest.raises(ConfigError, match="length 300"):
        rescore(run, short, RunDir(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_head_for_other_encoders_is_refused(tmp_path: Path, run: RunDir) -> None:
    init_random(tmp_path / "wide", esm2="t6_8M", dnabert_s="tiny", model_length=500)
    with pytest.raises(ConfigError, match="other encoders"):
        rescore(run, tmp_path / "wide", RunDir(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_head_of_other_widths_is_refused_even_if_their_sum_fits(
    tmp_path: Path, run: RunDir, models: Path
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(models, odd)
    shutil.rmtree(odd / "head")
    shape = HeadShape(model_length=500, dna_width=60, protein_width=68)
    write_part(odd, shape, partial(random_tensor, shape), "random", "fp32")
    with pytest.raises(ConfigError, match=r"60 \(DNA\) \+ 68 \(protein\), the run has 64 \+ 64"):
        rescore(run, odd, RunDir(tmp_path / "out"))


def test_a_folder_without_a_head_is_refused(tmp_path: Path, run: RunDir) -> None:
    with pytest.raises(WeightsError, match="no head here"):
        rescore(run, tmp_path, RunDir(tmp_path / "out"))
    with pytest.raises(WeightsError):
        rescore(run, tmp_path / "nothing", RunDir(tmp_path / "out"))


def test_a_head_that_is_not_finite_is_refused_as_predict_refuses_it(
    tmp_path: Path, run: RunDir, models: Path
) -> None:
    broken_models = Path(shutil.copytree(models, tmp_path / "broken"))
    tensors = load_file(broken_models / "head" / "model.safetensors")
    tensors["bn1.weight"][3] = torch.inf
    save_file(tensors, broken_models / "head" / "model.safetensors")
    problem = "head: tensor bn1.weight holds NaN or infinity"
    with pytest.raises(WeightsError, match=problem):
        rescore(run, broken_models, RunDir(tmp_path / "out"))
    with pytest.raises(WeightsError, match=problem):
        check_models(broken_models)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, models: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        rescore(RunDir(tmp_path / "nothing"), models, RunDir(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run_is_refused(tmp_path: Path, run: RunDir, models: Path) -> None:
    n_shards = len(shards.read_plan(run))
    shards.shard_path(run, 1).unlink()
    with pytest.raises(ConfigError, match=f"1 of {n_shards} shards"):
        rescore(run, models, RunDir(tmp_path / "out"))


def test_a_damaged_shard_is_refused(tmp_path: Path, run: RunDir, models: Path) -> None:
    path = shards.shard_path(run, 1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(ShardError, match="00001"):
        rescore(run, models, RunDir(tmp_path / "out"))


def test_a_store_of_other_reads_is_refused(tmp_path: Path, run: RunDir, models: Path) -> None:
    spec = SimulateSpec(reads=20, genome_length=3_000, seed=3)
    simulation = simulate(spec, tmp_path / "others.fasta")
    run.store.unlink()
    stage(StageSpec(reads=(str(simulation.reads_file),)), run.store)
    with pytest.raises(ConfigError, match="other reads"):
        rescore(run, models, RunDir(tmp_path / "out"))


def test_the_page_shows_the_command_of_a_terminal_and_none_of_a_script(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, the words of the process are those of its kernel."""
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    out = RunDir(tmp_path / "new")
    summary = rescore(run, None, out, VerdictSpec(threshold=0.4))
    command = ["virnuc", "rescore", "--threshold", "0.4", "https://user:secret@host/"]
    with_command = write_rescore_pages(out, run, summary, None, command).read_text()
    assert "virnuc rescore --threshold 0.4" in with_command
    assert "secret" not in with_command
    without_command = write_rescore_pages(out, run, summary, None).read_text()
    assert "kernel" not in without_command
    assert "virnuc rescore" not in without_command


def test_torch_uses_one_thread_while_shards_are_scored_and_as_many_as_before_afterwards(
    run: RunDir, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 256 rows on many threads took ten times the processor time on a busy machine."""
    n_threads = []
    score_rows = Head.scores

    def watched_scores(head: Head, features: torch.Tensor) -> torch.Tensor:
        n_threads.append(torch.get_num_threads())
        return score_rows(head, features)

    monkeypatch.setattr(Head, "scores", watched_scores)
    n_threads_before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rescore(run, models, RunDir(tmp_path / "new"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(n_threads_before)
    assert len(n_threads) == len(shards.read_plan(run))
    assert set(n_threads) == {1}


@pytest.mark.parametrize(
    ("rows", "cores", "expected"),
    [
        (5_000, 64, 4),  # 67 MB each, a usual shard
        (5_000, 2, 2),
        (40_000, 64, 1),  # a gigabyte, of the largest runs
        (10_000, 64, 2),
        (0, 64, 4),
    ],
)
def test_shards_that_are_scored_together_fit_into_little_memory(
    rows: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    plan = shards.ShardPlan(bounds=(0, rows) if rows else (0,), fingerprint="any")
    assert _count_threads(plan, width=3_328) == expected
