"""Real validations, forged in more than a hundred ways: `verify` names each.

The quick tests try one forgery of each kind. The slow ones try all of them: every figure of every file, by
a careful forger (see `tests.forging`), and by a thorough one where another file contradicts him.

A forger who computes the whole validation again with other numbers, consistently, cannot be told from an
honest one. Nor can one who renews all digests of a file whose figures stand nowhere else, such as the samples
of a device. Only a copy elsewhere helps, as docs/report.md says.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.damage import edit_json, seal_again
from tests.forging import (
    Forgery,
    both,
    careful,
    clumsy,
    copied,
    emptied,
    figure,
    listed,
    removed,
    renew_all_digests,
    reported,
    scaled,
    summarised_again,
    swapped,
    telemetry,
    text,
    thorough,
)
from tests.forked_workers import Forker, workers_of
from virnuc_core.encoders.convert import init_random
from virnuc_core.engine.shards import ShardResult, commit, read_plan, read_scores, read_shard
from virnuc_core.profiles import FOLDER as PROFILES
from virnuc_core.profiles import load_profile
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.store import OrfStore, seal
from virnuc_core.report.approvals import APPROVAL, APPROVALS, keep_answer
from virnuc_core.report.build import rerender, write_report
from virnuc_core.report.compare import compare_runs
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.report.regression import (
    HISTORY,
    append_history,
    approval_line,
    read_history,
)
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify import verify_report
from virnuc_core.report.verify_runs import verify_weights
from virnuc_core.results import write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import digest
from virnuc_core.validation import ApprovalRecord

from ...bare import PROFILE, validate

pytestmark = pytest.mark.usefixtures("telemetry_once")

ONE, TWO = "devices-1", "devices-2"
DEATH = "shard 00000: the worker on cpu-core-0 was ended by SIGKILL"


@pytest.fixture(scope="session")
def validated(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Path:
    """A validation on two cores, held against an earlier one and approved. To be copied.

    One row could not be embedded, and a worker died in the run on one device.
    """
    folder = tmp_path_factory.mktemp("validated")
    reads = simulate(SimulateSpec(reads=60, seed=3), folder / "few.fastq.gz").reads_file
    init_random(folder / "models", seed=1)
    with workers_of(forker):
        validate(reads, folder / "models", folder / "earlier", "cpu:2", shard_tokens=1024)
    shutil.copytree(folder / "earlier", folder / "out")
    out_dir = folder / "out"
    for name in (ONE, TWO):
        set_aside(RunDir(out_dir / name), 3)
    let_a_worker_die(out_dir / ONE)
    renew_all_digests(out_dir)
    make_older(folder / HISTORY)
    compare_runs(out_dir, (ONE, TWO), tolerance=load_profile(PROFILE).score_tolerance, subset=False)
    report = write_report(out_dir, load_profile(PROFILE), folder / HISTORY)
    answer = ApprovalRecord(
        when="2030-01-01T00:00:00+00:00", verdict="rejected", reviewer="Ada", note="too slow"
    )
    keep_answer(out_dir, folder / HISTORY, approval_line(report, answer))
    rerender(out_dir)
    return out_dir


def make_older(path: Path) -> None:
    """Date the only run of a history back, so that it is an earlier one."""
    (entry,) = read_history(path)
    path.unlink()
    append_history(path, entry.model_copy(update={"created": "2020-01-01T00:00:00+00:00"}))


def let_a_worker_die(run: Path) -> None:
    """As if a worker of the run had died and another one had gone on."""

    def in_record(body: dict) -> None:
        body["attempts"][-1]["deaths"] = [DEATH]

    def in_summary(body: dict) -> None:
        body.update(restarts=1, deaths=[DEATH])
        body["attempts"][-1]["deaths"] = [DEATH]

    edit_json(run / "run.json", in_record)
    edit_json(run / "summary.json", in_summary)


def set_aside(run: RunDir, unique: int) -> None:
    """As if the row of this sequence had ended every worker."""
    plan = read_plan(run)
    shard = next(number for number in range(len(plan)) if unique < plan.range(number)[1])
    result = read_shard(run, plan, shard)
    for array in (result.embeddings, result.scores):
        array[unique - plan.range(shard)[0]] = np.nan
    commit(run, plan, shard, ShardResult(result.embeddings, result.scores))
    scores, failed_rows = read_scores(run)
    written_files = write_results(
        run, OrfStore.open(run.root.parent / "orfs.h5"), scores, failed_rows
    )
    files = {path.name: digest(path).model_dump() for path in run.listed if path.is_file()}
    message_of = {
        name: getattr(written_files, name)
        for name in ("fates", "rows_virus", "chunks_virus", "chunks_scored")
    }
    edit_json(run.summary, lambda body: body.update(message_of, files=files, rows_set_aside=1))
    (path,) = run.telemetry.glob("*.h5")
    with h5py.File(path, "r+") as file:
        file["shards/skipped"][shard] = 1
    seal_again(path)


@pytest.fixture
def forged(validated: Path, tmp_path: Path) -> Path:
    """A copy to be changed, beside its history and an earlier validation."""
    shutil.copytree(validated.parent, tmp_path / "there", ignore=shutil.ignore_patterns("models"))
    return tmp_path / "there" / "out"


# Forgeries that are more than one figure


def score_edited(out: Path) -> None:
    text(f"{TWO}/prediction_results.txt", r"\t0\.\d+$", "\t0.5000001")(out)


def shorter(summary: dict) -> None:
    summary.update(wall_s=0.1, total_s=summary["staging_s"] + 0.1)
    summary["attempts"][-1]["wall_s"] = 0.1


def slower_in_every_file(out: Path) -> None:
    """The one-device run takes longer in each file that has its time, so that scaling looks better."""
    run = out / ONE

    def slow_down(summary: dict) -> None:
        summary["wall_s"] += 100.0
        summary["total_s"] += 100.0
        summary["attempts"][-1]["wall_s"] += 100.0

    edit_json(run / "summary.json", slow_down)
    (path,) = run.glob("telemetry/*.json")
    wall_s = json.loads((run / "summary.json").read_text())["wall_s"]
    edit_json(path, lambda content: content["summary"].update(wall_s=wall_s))


def slower_baseline_in_every_time(out: Path) -> None:
    """The baseline takes a hundred times as long, with all of its stages."""

    def slow_down(summary: dict) -> None:
        for name in ("wall_s", "measured_s"):
            summary[name] *= 100.0
        for name in ("stages", "measured_stages"):
            summary[name] = {stage: 100.0 * seconds for stage, seconds in summary[name].items()}

    edit_json(out / "baseline" / "summary.json", slow_down)


def death_hidden(out: Path) -> None:
    """The run on one device has no restart any more, and so is a timing."""

    def hide(summary: dict) -> None:
        summary.update(restarts=0, deaths=[])
        summary["attempts"][-1]["deaths"] = []

    edit_json(out / ONE / "summary.json", hide)


def history_lines(out: Path) -> tuple[Path, list[str]]:
    """Return the history beside a validation, and its lines: two runs and an answer."""
    path = out.parent / HISTORY
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    return path, lines


def history_softened(out: Path) -> None:
    """An earlier run is made slower, in the file of past runs, so that this one looks no worse."""
    path, lines = history_lines(out)
    older = json.loads(lines[0])
    lines[0] = json.dumps(older | {"tokens_per_s": older["tokens_per_s"] / 2}, sort_keys=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def history_line_dropped(number: int) -> Forgery:
    def drop(out: Path) -> None:
        path, lines = history_lines(out)
        del lines[number]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    return drop


def answer_in_history_edited(out: Path) -> None:
    path, lines = history_lines(out)
    lines[2] = lines[2].replace('"rejected"', '"approved"')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def recorded_baseline(out: Path) -> None:
    """The time of the baseline was not measured here any more: a number without source."""

    def record(summary: dict) -> None:
        summary.update(source="recorded", wall_s=12_600.0, measured_s=None, measurements=None)

    edit_json(out / "baseline" / "summary.json", record)
    (out / "baseline" / "run.json").unlink()


def regression_emptied(out: Path) -> None:
    edit_json(out / "regression.json", lambda body: body.update(history=[]))


def later_start(out: Path) -> None:
    """The run on two devices began before the baseline had ended."""

    def start(body: dict) -> None:
        body["attempts"][-1]["started"] = "2020-01-01T00:00:00+00:00"

    edit_json(out / TWO / "run.json", start)
    edit_json(out / TWO / "summary.json", start)


def edit_shard(out: Path) -> None:
    with h5py.File(out / TWO / "shards" / "00000.h5", "r+") as file:
        file["scores"][0, 0] += np.float32(0.25)


def embedding_edited(out: Path) -> None:
    with h5py.File(out / TWO / "shards" / "00000.h5", "r+") as file:
        file["embeddings"][0, 0] += np.float32(0.25)


def scores_committed_again(out: Path) -> None:
    """All scores of a shard are others, with every checksum of the shard."""
    run = RunDir(out / TWO)
    plan = read_plan(run)
    result = read_shard(run, plan, 0)
    commit(run, plan, 0, ShardResult(result.embeddings, result.scores[:, ::-1].copy()))


def store_edited(*, is_sealed: bool) -> Forgery:
    def edit(out: Path) -> None:
        with h5py.File(out / "orfs.h5", "r+") as file:
            file["protein_bytes"][0] ^= 1
        if is_sealed:
            seal(out / "orfs.h5")

    return edit


def nan_hidden(out: Path) -> None:
    """The row that could not be embedded gets a score of its own."""
    for name in (ONE, TWO):
        run = RunDir(out / name)
        plan = read_plan(run)
        for shard in range(len(plan)):
            result = read_shard(run, plan, shard)
            if np.isnan(result.scores).any():
                embeddings = np.nan_to_num(result.embeddings, nan=0.5)
                commit(
                    run, plan, shard, ShardResult(embeddings, np.nan_to_num(result.scores, nan=0.5))
                )


Forger = Callable[[Forgery, str], Forgery]  # see `tests.forging`
Forgeries = dict[str, tuple[Forgery, str]]  # name → how, and what a difference must say

REPORT: Forgeries = {
    "a criterion's threshold softened": (
        both(figure("report/report.json", "criteria", 4, "target", to=None), rerender),
        r"^criteria\[4\]\.target",
    ),
    "a criterion removed": (
        lambda out: edit_json(out / "report/report.json", lambda b: b["criteria"].pop()),
        r"^criteria",
    ),
    "a verdict turned": (
        both(figure("report/report.json", "criteria", 0, "verdict", to="pass"), rerender),
        r"verdict",
    ),
    "a warning removed": (
        both(figure("report/report.json", "warnings", to=[]), rerender),
        r"^warnings",
    ),
    "a figure of the accounting": (
        both(figure("report/report.json", "accounting", "fates", "failed", to=0), rerender),
        r"^accounting\.fates\.failed",
    ),
    "a figure of the evidence": (
        both(figure("report/report.json", "evidence", "run.json", "size", to=1), rerender),
        r"^evidence\.run\.json\.size",
    ),
    "the printed verdict": (
        text("report/report.txt", r"^OVERALL: .*$", "OVERALL: ALL CRITERIA PASSED"),
        r"^report/report\.txt: line",
    ),
    "a number of the Markdown": (
        text("report/report.md", r"\b60\b", "6,000"),
        r"^report/report\.md: line",
    ),
    "a number of the page": (
        text("report/report.html", r">60<", ">6,000<"),
        r"^report/report\.html: line",
    ),
    "the benchmark": (text("report/benchmark_*.md", r"\d\.\d", "9.9"), r"^report/benchmark_.*\.md"),
    "the benchmark for programs": (
        text("report/benchmark_*.json", r": \d+\.\d+", ": 9.9"),
        r"^report/benchmark_.*\.json",
    ),
    "a form removed": (removed("report/report.html"), r"^report/report\.html: missing"),
    "a report of another run copied in": (
        copied("../earlier/report", "report"),
        r"fates|provenance|evidence",
    ),
    "the profile's threshold softened": (
        figure("run.json", "profile", "targets", "consensus_agreement", "value", to=50.0),
        r"^profile\.targets\.consensus",
    ),
    "judged by a softer profile of the same name": (
        lambda out: write_report(
            out, load_profile(PROFILE).model_copy(update={"score_tolerance": 0.5})
        ),
        r"^profile\.score_tolerance",
    ),
    "an answer removed": (
        reported(removed(f"report/{APPROVAL}"), PROFILE),
        rf"^report/{APPROVAL} is missing",
    ),
    "all answers removed": (
        reported(removed(f"report/{APPROVAL}", f"report/{APPROVALS}"), PROFILE),
        rf"^report/{APPROVALS}: .* is missing, which {HISTORY} has",
    ),
    "an answer edited": (
        careful(figure(f"report/{APPROVAL}", "verdict", to="approved"), PROFILE),
        rf"^report/{APPROVAL} against report/{APPROVALS}\.verdict: says \"approved\"",
    ),
    "a note of an answer edited": (
        careful(figure(f"report/{APPROVAL}", "note", to="fine"), PROFILE),
        rf"^report/{APPROVAL} against report/{APPROVALS}\.note",
    ),
    "an answer edited in the file of all answers": (
        text(f"report/{APPROVALS}", '"rejected"', '"approved"'),
        rf"{APPROVALS}:1: ",
    ),
}

HISTORIES: Forgeries = {
    "a history line edited": (history_softened, rf"against {HISTORY}: .* give \"nothing\""),
    "a history line dropped": (
        history_line_dropped(0),
        rf"{HISTORY}:1: the line before it was edited or removed",
    ),
    "the line of this run dropped": (
        history_line_dropped(1),
        rf"{HISTORY}:2: the line before it was edited or removed",
    ),
    "an answer edited in the history": (
        answer_in_history_edited,
        rf"{HISTORY}:3: not a history entry",
    ),
    "an earlier run edited in regression.json": (
        # A report that is made again takes the lines from the history. So the copy is edited after.
        figure("regression.json", "history", 0, "tokens_per_s", to=1.0),
        rf"{HISTORY}.*tokens_per_s",
    ),
    "the run edited in regression.json": (
        figure("regression.json", "entry", "total_s", to=1.0),
        r"^regression\.json: entry\.total_s",
    ),
    "regression.json removed": (removed("regression.json"), r"regression"),
    "the earlier runs removed from regression.json": (
        regression_emptied,
        r"^regression\.json: the earlier runs",
    ),
}

RESULTS: Forgeries = {
    "a label flipped": (
        text(f"{TWO}/prediction_results.txt", "\tvirus\t", "\tothers\t"),
        "prediction_results.txt",
    ),
    "a label flipped, listed": (
        listed(
            f"{ONE}/prediction_results.txt",
            text(f"{ONE}/prediction_results.txt", "\tvirus\t", "\tothers\t"),
        ),
        rf"{ONE}/prediction_results\.txt: line 2 says .*its shards give",
    ),
    "a score edited, listed and reported": (
        reported(listed(f"{TWO}/prediction_results.txt", score_edited), PROFILE),
        rf"{TWO}/prediction_results\.txt: line \d+",
    ),
    "a chunk's verdict edited, listed": (
        listed(
            f"{TWO}/prediction_results_highestscore.csv",
            text(f"{TWO}/prediction_results_highestscore.csv", "\tTrue\t", "\tFalse\t"),
        ),
        r"highestscore\.csv: line 2",
    ),
    "a failed row hidden": (
        both(
            listed(f"{TWO}/failed.tsv", text(f"{TWO}/failed.tsv", r"^sim_.*\n", "")),
            listed(f"{TWO}/reads.tsv", text(f"{TWO}/reads.tsv", r"\tfailed\t", "\tothers\t")),
        ),
        rf"{TWO}/(failed|reads)\.tsv: line",
    ),
    "a row of NaN given scores": (
        thorough(nan_hidden, PROFILE),
        rf"{TWO}/(summary\.json: rows_set_aside|failed\.tsv: line)",
    ),
    "random weights called those of the authors": (
        thorough(
            figure(f"{TWO}/summary.json", "origins", "head", to="the authors' release"), PROFILE
        ),
        rf"{TWO}/summary\.json: origins",
    ),
    "random weights kept quiet": (
        thorough(figure(f"{TWO}/summary.json", "origins", to={}), PROFILE),
        rf"{TWO}/summary\.json: origins",
    ),
    "a card given to a classifier that was never tested": (
        thorough(figure(f"{TWO}/summary.json", "has_card", to=True), PROFILE),
        rf"{TWO}/summary\.json: has_card",
    ),
    "failed reads not counted": (
        reported(figure(f"{TWO}/summary.json", "fates", "failed", to=0), PROFILE),
        r"n_reads|fates\.failed",
    ),
    "a read left out": (
        listed(f"{ONE}/reads.tsv", text(f"{ONE}/reads.tsv", r"^sim_.*\n", "")),
        rf"{ONE}/reads\.tsv: line 2",
    ),
    "a baseline's label flipped": (
        text("baseline/prediction_results.txt", "\tvirus\t", "\tothers\t"),
        r"baseline/prediction_results\.txt",
    ),
    "shards swapped": (
        swapped(f"{TWO}/shards/00000.h5", f"{TWO}/shards/00001.h5"),
        r"shards/0000[01]\.h5",
    ),
    "a score of a shard edited": (edit_shard, r"shards/00000\.h5 is not what was committed"),
    "an embedding of a shard edited": (
        embedding_edited,
        r"shards/00000\.h5: has other bytes than were committed",
    ),
    "scores of a shard committed again": (
        thorough(scores_committed_again, PROFILE),
        rf"{TWO}/prediction_results\.txt: line 2",
    ),
    "the plan of the shards edited": (
        lambda out: edit_json(out / TWO / "shards/plan.json", lambda body: body["bounds"].pop(1)),
        r"shards/00000\.h5|plan",
    ),
    "the threshold of the reads softened": (
        figure(f"{TWO}/summary.json", "threshold", to=0.75),
        r"reads\.tsv: line",
    ),
    "staged reads edited": (store_edited(is_sealed=False), r"orfs\.h5: not what was staged"),
    "staged reads edited and sealed": (
        store_edited(is_sealed=True),
        r"columns that its reads do not give: says \[\"protein_bytes\"\]",
    ),
}

TIMES: Forgeries = {
    "a time shortened": (
        reported(
            lambda out: edit_json(
                out / TWO / "summary.json",
                lambda b: b.update(
                    wall_s=b["wall_s"] / 4, total_s=b["staging_s"] + b["wall_s"] / 4
                ),
            ),
            PROFILE,
        ),
        "wall_s",
    ),
    "a time shortened in the telemetry too": (
        reported(
            both(
                lambda out: edit_json(out / TWO / "summary.json", shorter),
                figure(f"{TWO}/telemetry/*.json", "summary", "wall_s", to=0.1),
            ),
            PROFILE,
        ),
        r"wall_s says 0\.100, the last stage ended after",
    ),
    "the one-device run made slower in every file": (
        thorough(slower_in_every_file, PROFILE),
        rf"{ONE}/summary\.json: total_s says .*, its stages add up to",
    ),
    "the one-device run made slower into the next run": (
        thorough(slower_in_every_file, PROFILE),
        rf"{ONE} took .*, but {TWO} began .* before its end",
    ),
    "the baseline made slower": (
        reported(figure("baseline/summary.json", "measured_s", to=1e4), PROFILE),
        r"baseline/summary\.json: wall_s",
    ),
    "the baseline made slower in every time": (
        thorough(slower_baseline_in_every_time, PROFILE),
        rf"baseline took .*, but {ONE} began .* before its end",
    ),
    "the baseline's time taken from elsewhere": (
        thorough(recorded_baseline, PROFILE),
        r"^baseline/summary\.json: source: says \"recorded\"",
    ),
    "a run dated back": (thorough(later_start, PROFILE), rf"{TWO}/telemetry.*outside the attempt"),
    "a death hidden": (
        thorough(death_hidden, PROFILE),
        rf"{ONE}/summary\.json: attempts\[0\]\.deaths",
    ),
    "a death hidden by half": (
        thorough(both(figure(f"{ONE}/summary.json", "restarts", to=0)), PROFILE),
        rf"{ONE}/summary\.json: restarts",
    ),
    "a device renamed": (
        figure(f"{TWO}/run.json", "devices", 0, "name", to="NVIDIA H200"),
        rf"{TWO}/run\.json: devices",
    ),
    "weights of another run": (
        figure(f"{TWO}/run.json", "fingerprints", "head", to="beef"),
        rf"{TWO}/run\.json: head",
    ),
}

MEASUREMENTS: Forgeries = {
    "a sample of the host raised": (
        telemetry(TWO, "host", scaled("cpu_percent", 2.0)),
        r"telemetry_.*summary\.host\.",
    ),
    "a batch removed": (
        telemetry(TWO, "/", lambda c: {key: values[:-1] for key, values in c.items()}),
        r"batches",
    ),
    "a batch made longer": (
        telemetry(TWO, "/", scaled("tokens", 0.5)),
        rf"{TWO}/telemetry.*tokens",
    ),
    "a batch of half a token": (
        telemetry(TWO, "/", lambda c: {"tokens": c["tokens"] + 0.5}),
        r"readable .*\(tokens: not whole",
    ),
    "words in place of times": (
        telemetry(TWO, "/", lambda c: {"wait_ms": c["wait_ms"].astype("S9")}),
        r"readable .*\(wait_ms: not num",
    ),
    "waits shortened, and the telemetry summarised again": (
        careful(
            both(telemetry(TWO, "/", scaled("wait_ms", 0.0)), summarised_again(TWO)),
            PROFILE,
        ),
        rf"{TWO}/telemetry/telemetry_.*\.h5, which summary\.json lists",
    ),
    "fuller batches, and the telemetry summarised again": (
        careful(
            both(telemetry(TWO, "/", scaled("slots", 0.5)), summarised_again(TWO)),
            PROFILE,
        ),
        rf"{TWO}/telemetry/telemetry_.*\.h5",
    ),
    "a shard's row removed": (
        telemetry(TWO, "shards", lambda c: {k: v[:-1] for k, v in c.items()}),
        r"shards_computed",
    ),
    "telemetry of another run copied in": (
        copied(f"{ONE}/telemetry/*.h5", f"{TWO}/telemetry/*.h5"),
        rf"{TWO}/telemetry.*: says",
    ),
    "an evidence file replaced": (
        copied(f"{ONE}/summary.json", f"{TWO}/summary.json"),
        rf"{TWO}.*says",
    ),
}

# What is removed, and the report made anew: evidence that disappears is named
GONE: tuple[str, ...] = (
    f"{ONE}/telemetry/*.h5",
    f"{TWO}/telemetry/*.h5",
    f"{TWO}/telemetry/*.json",
    f"{ONE}/summary.json",
    f"{TWO}/summary.json",
    f"{TWO}/run.json",
    f"{ONE}/run.json",
    TWO,
    ONE,
    "baseline",
    "baseline/summary.json",
    "baseline/run.json",
    "baseline/prediction_results.txt",
    "comparison.json",
    f"{TWO}/reads.tsv",
    f"{TWO}/failed.tsv",
    f"{TWO}/prediction_results.txt",
    f"{TWO}/embeddings.h5",
    f"{TWO}/shards/00001.h5",
)
EMPTY: tuple[str, ...] = (
    "comparison.json",
    "regression.json",
    f"{TWO}/summary.json",
    f"{TWO}/reads.tsv",
    f"{TWO}/telemetry/*.h5",
    f"{TWO}/shards/00000.h5",
    "baseline/summary.json",
)


def edited(
    name: str, *keys: str | int, to: object, forger: Forger = careful, named: str = ""
) -> tuple[str, Forgery, str]:
    """Return a figure of a file as a forgery: its name, the forgery, and what a difference must say.

    Args:
        name: The file, as a pattern of `Path.glob`.
        keys: Where the figure is in the file.
        to: Its new value. `...` removes it.
        forger: How the forger hides it.
        named: What the difference must say. By default it names the file.
    """
    place = ".".join(str(key) for key in keys)
    label = f"{forger.__name__}: {name}: {place} = {'gone' if to is ... else to}"
    file_name = re.escape(name).replace(r"\*", ".*")
    return label, forger(figure(name, *keys, to=to), PROFILE), named or file_name


SUMMARY, BASELINE, COMPARISON = f"{TWO}/summary.json", "baseline/summary.json", "comparison.json"
DEVICE = ("devices", 0)
PAIR = ("comparisons", 2)
FIGURES = [
    # of a run, edited in one file
    edited(SUMMARY, "wall_s", to=0.5),
    edited(SUMMARY, "staging_s", to=9.0),
    edited(SUMMARY, "total_s", to=0.5),
    edited(SUMMARY, "total_s", to=...),
    edited(SUMMARY, "stages", "ESM-2", to=9.0),
    edited(SUMMARY, "n_reads", to=6_000),
    edited(SUMMARY, "n_chunks", to=6_000),
    edited(SUMMARY, "n_rows", to=0),
    edited(SUMMARY, "n_uniques", to=1),
    edited(SUMMARY, "fates", "failed", to=0),
    edited(SUMMARY, "shards_computed", to=1),
    edited(SUMMARY, "shards_reused", to=1),
    edited(SUMMARY, "resumed", to=True),
    edited(SUMMARY, "stopped_at_limit", to=True),
    edited(SUMMARY, "restarts", to=3),
    edited(SUMMARY, "rows_set_aside", to=0),
    edited(SUMMARY, "rows_repeated", to=7),
    edited(SUMMARY, "log_errors", to=7),
    edited(SUMMARY, "warnings", to=["all is well"]),
    edited(SUMMARY, "reduced_budgets", to={"0": 2}),
    edited(SUMMARY, "damaged", to=["shard 0"]),
    edited(SUMMARY, "protein_tokens", to=1),
    edited(SUMMARY, "rows_virus", to=0),
    edited(SUMMARY, "chunks_virus", to=0),
    edited(SUMMARY, "chunks_scored", to=1),
    edited(SUMMARY, *DEVICE, "kind", to="cuda"),
    edited(SUMMARY, *DEVICE, "name", to="RTX 4090"),
    edited(SUMMARY, "attempts", 0, "wall_s", to=0.5),
    edited(SUMMARY, "attempts", 0, "worked_s", to=0.5),
    edited(SUMMARY, "attempts", to=[]),
    edited(SUMMARY, "telemetry", to=None),
    edited(SUMMARY, "measurements", to=...),
    edited(f"{TWO}/run.json", "host", to="elsewhere"),
    edited(f"{ONE}/run.json", "host", to="elsewhere"),
    edited(f"{TWO}/run.json", "versions", "torch", to="1.0"),
    edited(f"{TWO}/run.json", "fingerprints", "reads", to=...),
    edited(f"{TWO}/run.json", "fingerprints", "head", to="beef"),
    edited(f"{TWO}/run.json", "model_length", to=...),
    edited(f"{TWO}/run.json", "resolved", "precision", to="fp16"),
    edited(f"{TWO}/run.json", *DEVICE, "kind", to="cuda"),
    edited(f"{TWO}/run.json", "attempts", to=[]),
    edited(f"{TWO}/telemetry/*.json", "summary", "throughput", "tokens_per_sec", to=1e6),
    edited(f"{TWO}/telemetry/*.json", "summary", "dataloader", "avg_packing_efficiency", to=1.0),
    edited(f"{TWO}/telemetry/*.json", "summary", "total_sequences", to=1),
    edited(f"{TWO}/telemetry/*.json", "windows", 0, "tokens", to=1),
    # of the baseline
    edited(BASELINE, "wall_s", to=9e4),
    edited(BASELINE, "wall_s", to=...),
    edited(BASELINE, "measured_s", to=...),
    edited(BASELINE, "stages", "ESM-2", to=9e4),
    edited(BASELINE, "n_reads", to=6_000),
    edited(BASELINE, "n_rows", to=1),
    edited(BASELINE, "measured_rows", to=1),
    edited(BASELINE, "name", to="v1"),
    edited(BASELINE, *DEVICE, "kind", to="cuda"),
    edited(BASELINE, "fingerprint", to="beef"),
    edited("baseline/run.json", "host", to="elsewhere"),
    edited("baseline/run.json", "fingerprints", "esm2", to=...),
    # of the comparison
    edited(COMPARISON, *PAIR, "tolerance", to=0.5),
    edited(COMPARISON, *PAIR, "frames", "agreeing", to=1),
    edited(COMPARISON, *PAIR, "frames", "agreement", to=0.5),
    edited(COMPARISON, *PAIR, "frames", "score", "max", to=0.5),
    edited(COMPARISON, *PAIR, "frames", "score", "allclose", to=False),
    edited(COMPARISON, *PAIR, "frames", "classes", "viral", "ids", to=1),
    edited(COMPARISON, *PAIR, "consensus", "in_both", to=1),
    edited(COMPARISON, *PAIR, "bitwise", "identical", to=False),
    edited(COMPARISON, *PAIR, "bitwise", "shards_compared", to=1),
    edited(COMPARISON, *PAIR, to=...),
    edited(COMPARISON, "measurements", to=...),
    # of the validation
    edited("run.json", "fingerprints", "reads", to="beef"),
    edited("run.json", "staging", "reads", to=1),
    edited("run.json", "staging", "skipped", to=1),
    edited("run.json", "inputs", 0, "reads", to=1),
    edited("run.json", "inputs", 0, "content", "sha256", to="beef"),
    edited("run.json", "profile", "min_reads", to=1_000, named=r"^profile\.min_reads"),
    # of a run, with all lists of digests: another file still says what it was
    edited(SUMMARY, "wall_s", to=0.5, forger=thorough),
    edited(SUMMARY, "total_s", to=0.5, forger=thorough),
    edited(SUMMARY, "stages", "ESM-2", to=9.0, forger=thorough),
    edited(SUMMARY, "n_reads", to=6_000, forger=thorough),
    edited(SUMMARY, "n_rows", to=0, forger=thorough),
    edited(SUMMARY, "n_rows", to=..., forger=thorough),
    edited(SUMMARY, "fates", "failed", to=0, forger=thorough),
    edited(SUMMARY, "shards_computed", to=1, forger=thorough, named=r"telemetry_.*shards_computed"),
    edited(SUMMARY, "rows_set_aside", to=0, forger=thorough),
    edited(SUMMARY, "chunks_virus", to=0, forger=thorough),
    edited(
        SUMMARY, *DEVICE, "kind", to="cuda", forger=thorough, named=rf"{TWO}/run\.json: devices"
    ),
    edited(SUMMARY, "attempts", to=[], forger=thorough),
    edited(f"{TWO}/run.json", "fingerprints", "reads", to=..., forger=thorough),
    edited(f"{TWO}/run.json", "fingerprints", "head", to="beef", forger=thorough),
    edited(f"{TWO}/run.json", "resolved", "precision", to="fp16", forger=thorough),
    edited(f"{TWO}/run.json", *DEVICE, "kind", to="cuda", forger=thorough),
    edited(BASELINE, "measured_s", to=9e4, forger=thorough),
    edited(BASELINE, "n_reads", to=6_000, forger=thorough),
    edited(BASELINE, "measured_rows", to=1, forger=thorough),
    edited(COMPARISON, *PAIR, "consensus", "agreeing", to=1, forger=thorough),
    edited(COMPARISON, *PAIR, to=..., forger=thorough),
    # the file's own digest was left as it was
    (f"clumsy: {SUMMARY}", clumsy(SUMMARY, "wall_s", to=0.5), SUMMARY),
    (f"clumsy: {BASELINE}", clumsy(BASELINE, "wall_s", to=9e4), BASELINE),
    (f"clumsy: {COMPARISON}", clumsy(COMPARISON, "comparisons", to=[]), COMPARISON),
    ("clumsy: run.json", clumsy("run.json", "host", to="elsewhere"), r"run\.json"),
    ("clumsy: regression.json", clumsy("regression.json", "history", to=[]), r"regression\.json"),
    ("clumsy: answer", clumsy(f"report/{APPROVAL}", "verdict", to="approved"), APPROVAL),
]
for name in GONE:
    pattern = re.escape(name).replace(r"\*", ".*")
    FIGURES.append((f"removed: {name}", reported(removed(name), PROFILE), pattern))
for name in EMPTY:
    pattern = re.escape(name).replace(r"\*", ".*")
    FIGURES.append((f"emptied: {name}", emptied(name), pattern))

FORGERIES: Forgeries = {**REPORT, **HISTORIES, **RESULTS, **TIMES, **MEASUREMENTS}
FORGERIES |= {name: (forgery, pattern) for name, forgery, pattern in FIGURES}
# One of each kind, for the quick tests
QUICK = (
    "a verdict turned",
    "an answer removed",
    "the earlier runs removed from regression.json",
    "scores of a shard committed again",
    "random weights called those of the authors",
    "the one-device run made slower in every file",
    "the baseline's time taken from elsewhere",
    "a death hidden",
    "waits shortened, and the telemetry summarised again",
    f"careful: {ONE}/run.json: host = elsewhere",
    f"removed: {TWO}/telemetry/*.h5",
    f"removed: {TWO}",
    "removed: baseline",
)
SLOW = [name for name in FORGERIES if name not in QUICK]


def assert_named(out: Path, name: str) -> None:
    """Forge a validation, and look for the difference that names it."""
    forge, message = FORGERIES[name]
    forge(out)
    lines = verify_report(out).differences
    assert any(re.search(message, line) for line in lines), lines[:9]


def test_there_are_as_many_forgeries_as_figures() -> None:
    assert len(FORGERIES) >= 150
    assert set(QUICK) <= FORGERIES.keys()


def test_the_true_validation_is_as_reported(validated: Path) -> None:
    verification = verify_report(validated)
    assert verification.differences == []
    assert verification.remarks == []
    assert (validated / TWO / "failed.tsv").read_text(encoding="utf-8").count("\n") > 1


@pytest.mark.parametrize("name", QUICK)
def test_a_forgery_of_each_kind_is_named(forged: Path, name: str) -> None:
    assert_named(forged, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_forgery_is_named(forged: Path, name: str) -> None:
    assert_named(forged, name)


@pytest.mark.slow
def test_a_report_by_another_profile_is_as_reported(forged: Path) -> None:
    for profile in ("production-6m", "phase10-1m"):
        write_report(forged, load_profile(profile))
        assert verify_report(forged).differences == []


@pytest.mark.slow
def test_a_profile_file_that_was_changed_later_is_a_remark(forged: Path, tmp_path: Path) -> None:
    shipped = PROFILES / f"{PROFILE}.toml"
    own = tmp_path / "own.toml"
    own.write_text(shipped.read_text(encoding="utf-8"), encoding="utf-8")
    edit_json(forged / "run.json", lambda body: body["spec"].update(profile=str(own)))
    write_report(forged, load_profile(PROFILE))
    assert verify_report(forged).remarks == []

    own.write_text(shipped.read_text(encoding="utf-8").replace("99", "98"), encoding="utf-8")
    assert load_profile(str(own)) != load_profile(PROFILE)
    verification = verify_report(forged)
    assert verification.differences == []
    (remark,) = verification.remarks
    assert f"{own} has other thresholds now than when the validation began" in remark


def replace_models(models: Path) -> None:
    """Put other random models in the place of these."""
    shutil.rmtree(models)
    init_random(models, seed=2)


@pytest.mark.parametrize(
    ("change_models", "reason"),
    [
        (shutil.rmtree, "cannot be read now"),
        (replace_models, "has other weights now"),
    ],
)
def test_weights_that_are_gone_are_a_remark(
    forged: Path, tmp_path: Path, change_models: Callable[[Path], object], reason: str
) -> None:
    """What the records say of the weights cannot be compared then."""
    models = tmp_path / "models"
    init_random(models, seed=1)
    for name in (".", ONE, TWO):
        edit_json(forged / name / "run.json", lambda body: body["spec"].update(models=str(models)))
    renew_all_digests(forged)
    raw = RawFolder(forged)
    verification = Verification()
    verify_weights(verification, raw)
    assert verification.remarks == []
    assert verification.figures > 0
    change_models(models)
    verification = Verification()
    verify_weights(verification, raw)
    assert verification.differences == []
    (remark,) = verification.remarks
    assert str(models) in remark
    assert reason in remark
