"""The files of a run are one set: what is cut, edited, missing or of another threshold is noticed and mended."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from virnuc_core.config import Devices
from virnuc_core.errors import ConfigError, RunMismatchError
from virnuc_core.pipeline import read_summary
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary, read

from .runs import classify_store, copy_run, result_bytes

pytestmark = pytest.mark.usefixtures("forked_workers")

ONE = Devices.parse("cpu:1")
FILES = (
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "reads.tsv",
    "failed.tsv",
    "embeddings.h5",
)
Staged = tuple[Path, StageSummary]


def contents(root: Path) -> dict[str, bytes]:
    """Every file that a user reads."""
    return {name: (root / name).read_bytes() for name in FILES}


def test_the_summary_lists_every_result_file(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    root = copy_run(reference, tmp_path / "run")
    assert set(read(root / "summary.json", RunSummary).files or {}) == set(FILES)
    classify_store(root, staged, tiny_models, ONE, write_viral=True)
    listed_files = read(root / "summary.json", RunSummary).files or {}
    assert set(listed_files) == {*FILES, "viral.fasta.gz"}
    assert listed_files["reads.tsv"].size == (root / "reads.tsv").stat().st_size


@pytest.mark.parametrize("name", FILES)
def test_a_complete_run_whose_file_is_cut_edited_or_missing_is_repaired(
    name: str,
    tmp_path: Path,
    staged: Staged,
    tiny_models: Path,
    reference: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = copy_run(reference, tmp_path / "run")
    body = (root / name).read_bytes()
    if name == "reads.tsv":
        (root / name).unlink()
    elif name == "failed.tsv":
        (root / name).write_bytes(body + b"read0F1\n")
    elif name == "prediction_results.txt":
        (root / name).write_bytes(body[: len(body) // 2])
    else:
        (root / name).write_bytes(body[:-9] + bytes([body[-9] ^ 1]) + body[-8:])
    with caplog.at_level(logging.WARNING):
        classify_store(root, staged, tiny_models, ONE)
    assert contents(root) == contents(reference)
    (message,) = [record.message for record in caplog.records if name in record.message]
    assert str(root) in message
    caplog.clear()
    classify_store(root, staged, tiny_models, ONE)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING], "once is enough"


def test_a_run_killed_while_results_are_rewritten_mixes_no_thresholds(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    root = copy_run(reference, tmp_path / "run")
    program = (
        "from tests.unit.engine.runs import change_threshold_and_die; change_threshold_and_die()"
    )
    arguments = [str(root), str(staged[0]), str(tiny_models), *staged[1].files]
    child = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=Path(__file__).parents[3], check=False
    )
    assert child.returncode == -signal.SIGKILL
    assert (root / "reads.tsv").read_bytes() != (reference / "reads.tsv").read_bytes(), (
        "killed after it was written"
    )
    assert not (root / "summary.json").exists()
    second_summary = classify_store(root, staged, tiny_models, ONE)
    assert contents(root) == contents(reference)
    assert second_summary == read_summary(RunDir(reference)), "what was measured is not lost"
    assert not list(root.glob("summary.json.*"))


def test_viral_reads_of_another_threshold_do_not_stay(
    tmp_path: Path,
    staged: Staged,
    tiny_models: Path,
    reference: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = copy_run(reference, tmp_path / "run")
    viral = root / "viral.fasta.gz"
    low = {"threshold": 0.43}
    summary = classify_store(root, staged, tiny_models, ONE, write_viral=True, **low)
    content = viral.read_bytes()
    assert gzip.decompress(content).count(b">") == summary.fates["viral"] > 0
    (root / "reads.tsv").unlink()
    classify_store(root, staged, tiny_models, ONE, **low)
    assert viral.read_bytes() == content, "they are of this threshold, and stay"
    viral.write_bytes(content[:-20])
    classify_store(root, staged, tiny_models, ONE, write_viral=True, **low)
    assert viral.read_bytes() == content
    viral.unlink()
    modified_ns = (root / "reads.tsv").stat().st_mtime_ns
    classify_store(root, staged, tiny_models, ONE, **low)
    assert (root / "reads.tsv").stat().st_mtime_ns == modified_ns, "they may be taken elsewhere"
    classify_store(root, staged, tiny_models, ONE, write_viral=True, **low)
    assert viral.read_bytes() == content
    classify_store(root, staged, tiny_models, ONE, threshold=0.5)
    assert not viral.exists(), (
        "they are of another threshold, and nobody asked for those of this one"
    )
    assert [
        record.message
        for record in caplog.records
        if f"{viral} was written by an earlier command" in record.message
    ]
    assert contents(root) == contents(reference)


def test_a_run_of_an_older_version_lists_its_files_from_now_on(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    root = copy_run(reference, tmp_path / "run")
    path = root / "summary.json"
    path.write_text(
        read(path, RunSummary).model_copy(update={"files": None}).model_dump_json(exclude={"files"})
    )
    (root / "reads.tsv").write_text("of another threshold\n")
    second_summary = classify_store(root, staged, tiny_models, ONE)
    assert contents(root) == contents(reference)
    assert second_summary == read_summary(RunDir(reference))


# --- damaged JSON files ---


@pytest.mark.parametrize(
    "text", [b"\xff\xfe\x00", b"[" * 100_000, b'{"wall_s": "x"}'], ids=["bytes", "deep", "other"]
)
@pytest.mark.parametrize("name", ["summary.json", "run.json"])
def test_a_damaged_file_is_set_aside_and_the_run_goes_on(
    name: str,
    text: bytes,
    tmp_path: Path,
    staged: Staged,
    tiny_models: Path,
    reference: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = copy_run(reference, tmp_path / "run")
    (root / name).write_bytes(text)
    with caplog.at_level(logging.WARNING):
        second_summary = classify_store(root, staged, tiny_models, ONE)
    assert second_summary.shards_computed in (0, second_summary.shards), (
        "no shard was computed again"
    )
    assert result_bytes(root) == result_bytes(reference)
    assert contents(root) == contents(reference)
    assert (root / f"{name}.damaged").read_bytes() == text
    (message,) = [
        record.message for record in caplog.records if f"{name}.damaged" in record.message
    ]
    assert str(root / name) in message
    assert read_summary(RunDir(root)) == second_summary
    classify_store(root, staged, tiny_models, ONE)


def test_shards_of_another_run_without_a_readable_record_are_refused(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    """Nothing says what they are of: they are not moved, not mixed, and only force starts over."""
    from .runs import SMALL

    root = copy_run(reference, tmp_path / "run")
    (root / "run.json").write_text("{")
    other_settings = SMALL.model_copy(update={"token_budget": 2048})
    for _ in range(2):
        with pytest.raises(RunMismatchError, match=r"run\.json.*--force"):
            classify_store(root, staged, tiny_models, ONE, engine=other_settings)
    assert result_bytes(root) == result_bytes(reference)
    classify_store(root, staged, tiny_models, ONE)
    assert result_bytes(root) == result_bytes(reference)


def test_a_record_that_cannot_be_opened_is_not_called_damaged(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    root = copy_run(reference, tmp_path / "run")
    (root / "run.json").unlink()
    (root / "run.json").mkdir()
    with pytest.raises(ConfigError, match=r"run\.json"):
        classify_store(root, staged, tiny_models, ONE)
    assert (root / "run.json").is_dir()
    shutil.rmtree(root / "run.json")


def test_the_heads_card_tells_threshold_uncertain_scores_and_lengths(
    tmp_path: Path, staged: Staged, tiny_models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models, root = Path(shutil.copytree(tiny_models, tmp_path / "models")), tmp_path / "run"
    config = models / "head" / "config.json"
    told = {
        "lengths": [900, 950, 990],
        "prevalence": 0.5,
        "thresholds": {"0.01": 0.7},
        "uncertain": [0.2, 0.8],
    }
    digests = {name: name * 8 for name in ("reads", "truth", "test")}
    card = {**digests, **told, "auroc": {"value": 0.9, "low": 0.8, "high": 1.0}}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"card": card}))
    with pytest.raises(ConfigError, match=r"900 to 990 bases.*--fdr-outside-domain"):
        classify_store(root, staged, models, ONE, fdr=0.01)
    assert not root.exists(), "nothing was computed or written"
    used = {"fdr": 0.01, "fdr_outside_domain": True}
    summary = classify_store(root, staged, models, ONE, **used)
    assert (summary.threshold, summary.uncertain, "uncertain" in summary.fates) == (
        0.7,
        None,
        False,
    )
    assert "the head was trained on reads of 900 to 990 bases" in caplog.text
    assert [warning for warning in summary.warnings if "900 to 990" in warning]
    plain = contents(root)
    unsure = classify_store(root, staged, models, ONE, abstain=True, **used)
    assert unsure.uncertain == (0.2, 0.8)
    assert unsure.fates["uncertain"] > 0
    assert read_summary(RunDir(root)) == unsure
    assert unsure.telemetry == summary.telemetry, "nothing was computed anew"
    assert classify_store(root, staged, models, ONE, threshold=0.7).fates == summary.fates
    assert contents(root) == plain
    with pytest.raises(ConfigError, match=r"use one of 0\.01"):
        classify_store(root, staged, models, ONE, fdr=0.05)
    assert contents(root) == plain
