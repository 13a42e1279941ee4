"""A real validation, forged in more than twenty ways: `verify` names each."""

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
from virnuc_core.encoders.convert import init_random
from virnuc_core.engine.shards import ShardResult, commit, read_plan, read_scores, read_shard
from virnuc_core.profiles import FOLDER as PROFILES
from virnuc_core.profiles import load_profile
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.build import rerender, write_report
from virnuc_core.report.compare import compare_runs
from virnuc_core.report.regression import HISTORY, append_history, read_history
from virnuc_core.report.verify import verify_report
from virnuc_core.results import write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import digest

from ...bare import PROFILE, validate

Forgery = Callable[[Path], None]
ONE, TWO = "devices-1", "devices-2"
pytestmark = (
    pytest.mark.slow
)  # real runs; what weighs most is tried on a made directory in test_verify.py as well


@pytest.fixture(scope="session")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A validation on two cores with one row that could not be embedded, held against an earlier one; untouched."""
    folder = tmp_path_factory.mktemp("validated")
    reads = simulate(SimulateSpec(reads=60, seed=3), folder / "few.fastq.gz").reads_file
    init_random(folder / "models", seed=1)
    validate(reads, folder / "models", folder / "earlier", "cpu:2", shard_tokens=1024)
    shutil.copytree(folder / "earlier", folder / "out")
    out_dir = folder / "out"
    for name in (ONE, TWO):
        set_aside(RunDir(out_dir / name), 3)
    make_older(folder / HISTORY)
    compare_runs(out_dir, (ONE, TWO), tolerance=load_profile(PROFILE).score_tolerance, subset=False)
    write_report(out_dir, load_profile(PROFILE), folder / HISTORY)
    return out_dir


def make_older(path: Path) -> None:
    """Date the only run of a history back, so that it is an earlier one."""
    (entry,) = read_history(path)
    path.unlink()
    append_history(path, entry.model_copy(update={"created": "2020-01-01T00:00:00+00:00"}))


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


def text(name: str, pattern: str, replacement: str) -> Forgery:
    def change(out: Path) -> None:
        (path,) = out.glob(name)
        text_before = path.read_text(encoding="utf-8")
        text_after = re.sub(pattern, replacement, text_before, count=1, flags=re.MULTILINE)
        assert text_after != text_before
        path.write_text(text_after, encoding="utf-8")

    return change


def listed(name: str, forgery: Forgery) -> Forgery:
    """The forger knows that the summary lists the file."""

    def change(out: Path) -> None:
        forgery(out)
        path = out / name
        file_digest = digest(path)
        edit_json(
            path.parent / "summary.json",
            lambda body: body["files"].update({path.name: file_digest.model_dump()}),
        )

    return change


def reported(forgery: Forgery, profile: str | None = None) -> Forgery:
    """The forger has the report made anew from what he forged."""

    def change(out: Path) -> None:
        forgery(out)
        write_report(out, load_profile(profile or PROFILE))

    return change


def body(name: str, *keys: str | int, to: object) -> Forgery:
    def put(whole: dict) -> None:
        for key in keys[:-1]:
            whole = whole[key]
        assert whole[keys[-1]] != to
        whole[keys[-1]] = to

    def change(out: Path) -> None:
        (path,) = out.glob(name)
        edit_json(path, put)

    return change


def table(
    name: str, change_rows: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
) -> Forgery:
    """Change the columns of a group of the telemetry's arrays."""

    def change(out: Path) -> None:
        (path,) = out.glob(f"{TWO}/telemetry/*.h5")
        with h5py.File(path, "r+") as file:
            group = file[name]
            columns = {
                key: values[:] for key, values in group.items() if isinstance(values, h5py.Dataset)
            }
            for key, values in change_rows(columns).items():
                del group[key]
                group[key] = values
        seal_again(path)

    return change


def scaled(column: str, factor: float) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    def change(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = columns[column].copy()
        values[-1] = (values[-1:] * factor).astype(values.dtype)[0]
        return {column: values}

    return change


def swap(a: str, b: str) -> Forgery:
    def change(out: Path) -> None:
        content = (out / a).read_bytes()
        (out / a).write_bytes((out / b).read_bytes())
        (out / b).write_bytes(content)

    return change


def copied(source: str, target: str) -> Forgery:
    def change(out: Path) -> None:
        (source_file,), (place,) = out.glob(source), out.glob(target)
        if place.is_dir():
            shutil.rmtree(place)
            shutil.copytree(source_file, place)
        else:
            shutil.copyfile(source_file, place)

    return change


def both(*forgeries: Forgery) -> Forgery:
    def change(out: Path) -> None:
        for forgery in forgeries:
            forgery(out)

    return change


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
    (telemetry,) = run.glob("telemetry/*.json")
    wall_s = json.loads((run / "summary.json").read_text())["wall_s"]
    edit_json(telemetry, lambda content: content["summary"].update(wall_s=wall_s))


def slower_baseline_in_every_time(out: Path) -> None:
    """The baseline takes a hundred times as long, with all of its stages."""

    def slow_down(summary: dict) -> None:
        for name in ("wall_s", "measured_s"):
            summary[name] *= 100.0
        for name in ("stages", "measured_stages"):
            summary[name] = {stage: 100.0 * seconds for stage, seconds in summary[name].items()}

    edit_json(out / "baseline" / "summary.json", slow_down)


def history_softened(out: Path) -> None:
    """An earlier run is made slower, in the file of past runs, so that this one looks no worse."""
    path = out.parent / HISTORY
    lines = path.read_text(encoding="utf-8").splitlines()
    older = json.loads(lines[0])
    lines[0] = json.dumps(older | {"tokens_per_s": older["tokens_per_s"] / 2}, sort_keys=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


FORGERIES: dict[str, tuple[Forgery, str]] = {  # how, and what the difference must say
    "a sample raised": (table("host", scaled("cpu_percent", 2.0)), r"telemetry_.*summary\.host\."),
    "a batch removed": (
        table("/", lambda c: {key: values[:-1] for key, values in c.items()}),
        r"batches",
    ),
    "a batch made longer": (table("/", scaled("tokens", 0.5)), rf"{TWO}/telemetry.*tokens"),
    "a batch of half a token": (
        table("/", lambda c: {"tokens": c["tokens"] + 0.5}),
        r"readable .*\(tokens: not whole",
    ),
    "words in place of times": (
        table("/", lambda c: {"wait_ms": c["wait_ms"].astype("S9")}),
        r"readable .*\(wait_ms: not num",
    ),
    "a shard's row removed": (
        table("shards", lambda c: {k: v[:-1] for k, v in c.items()}),
        r"shards_computed",
    ),
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
        reported(listed(f"{TWO}/prediction_results.txt", score_edited)),
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
    "failed reads not counted": (
        reported(text(f"{TWO}/summary.json", r'"failed": 1', '"failed": 0')),
        r"n_reads|fates\.failed",
    ),
    "the threshold of the reads softened": (
        body(f"{TWO}/summary.json", "threshold", to=0.75),
        r"reads\.tsv: line",
    ),
    "the profile's threshold softened": (
        body("run.json", "profile", "targets", "consensus_agreement", "value", to=50.0),
        r"^profile\.targets\.consensus",
    ),
    "a criterion's threshold softened": (
        both(body("report/report.json", "criteria", 4, "target", to=None), rerender),
        r"^criteria\[4\]\.target",
    ),
    "a criterion removed": (
        lambda out: edit_json(out / "report/report.json", lambda b: b["criteria"].pop()),
        r"^criteria",
    ),
    "a verdict turned": (
        both(body("report/report.json", "criteria", 0, "verdict", to="pass"), rerender),
        r"verdict",
    ),
    "a time shortened": (
        reported(
            lambda out: edit_json(
                out / TWO / "summary.json",
                lambda b: b.update(
                    wall_s=b["wall_s"] / 4, total_s=b["staging_s"] + b["wall_s"] / 4
                ),
            )
        ),
        "wall_s",
    ),
    "a time shortened in the telemetry too": (
        reported(
            both(
                lambda out: edit_json(out / TWO / "summary.json", shorter),
                body(f"{TWO}/telemetry/*.json", "summary", "wall_s", to=0.1),
            )
        ),
        r"wall_s says 0\.100, the last stage ended after",
    ),
    "the baseline made slower": (
        reported(body("baseline/summary.json", "measured_s", to=1e4)),
        r"baseline/summary\.json: wall_s",
    ),
    "the one-device run made slower in every file": (
        reported(slower_in_every_file),
        rf"{ONE}/summary\.json: total_s says .*, its stages add up to",
    ),
    "the one-device run made slower into the next run": (
        reported(slower_in_every_file),
        rf"{ONE} took .*, but {TWO} began .* before its end",
    ),
    "the baseline made slower in every time": (
        reported(slower_baseline_in_every_time),
        rf"baseline took .*, but {ONE} began .* before its end",
    ),
    "a baseline's label flipped": (
        text("baseline/prediction_results.txt", "\tvirus\t", "\tothers\t"),
        r"baseline/prediction_results\.txt",
    ),
    "a history line edited": (history_softened, rf"against {HISTORY}: .* give \"nothing\""),
    "an earlier run edited in regression.json": (
        # A report that is made again takes the lines from the history. So the copy is edited after.
        body("regression.json", "history", 0, "tokens_per_s", to=1.0),
        rf"{HISTORY}.*tokens_per_s",
    ),
    "a report of another run copied in": (
        copied("../earlier/report", "report"),
        r"fates|provenance|evidence",
    ),
    "telemetry of another run copied in": (
        copied(f"{ONE}/telemetry/*.h5", f"{TWO}/telemetry/*.h5"),
        rf"{TWO}/telemetry.*: says",
    ),
    "a device renamed": (
        body(f"{TWO}/run.json", "devices", 0, "name", to="NVIDIA H200"),
        rf"{TWO}/run\.json: devices",
    ),
    "a comparison's count edited": (
        reported(body("comparison.json", "comparisons", 0, "consensus", "agreeing", to=1)),
        r"comparison\.json: .*agreeing",
    ),
    "shards swapped": (
        swap(f"{TWO}/shards/00000.h5", f"{TWO}/shards/00001.h5"),
        r"shards/0000[01]\.h5",
    ),
    "a score of a shard edited": (
        lambda out: _edit_shard(out / TWO / "shards" / "00000.h5"),
        r"shards/00000\.h5 is not what was committed",
    ),
    "an evidence file replaced": (
        copied(f"{ONE}/summary.json", f"{TWO}/summary.json"),
        rf"{TWO}.*says",
    ),
    "weights of another run": (
        body(f"{TWO}/run.json", "fingerprints", "head", to="beef"),
        rf"{TWO}/run\.json: head",
    ),
    "a read left out": (
        listed(f"{ONE}/reads.tsv", text(f"{ONE}/reads.tsv", r"^sim_.*\n", "")),
        rf"{ONE}/reads\.tsv: line 2",
    ),
    "staged reads edited": (
        lambda out: _edit_store(out / "orfs.h5"),
        r"orfs\.h5: not what was staged",
    ),
}


def _edit_shard(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["scores"][0, 0] += np.float32(0.25)


def _edit_store(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["protein_bytes"][0] ^= 1


def test_the_true_validation_is_as_reported(validated: Path) -> None:
    verification = verify_report(validated)
    assert verification.differences == []
    assert verification.remarks == []
    assert (validated / TWO / "failed.tsv").read_text(encoding="utf-8").count("\n") > 1


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_named(forged: Path, name: str) -> None:
    forge, message = FORGERIES[name]
    forge(forged)
    lines = verify_report(forged).differences
    assert any(re.search(message, line) for line in lines), lines[:9]


def test_a_report_by_another_profile_is_as_reported(forged: Path) -> None:
    for profile in ("production-6m", "phase10-1m"):
        write_report(forged, load_profile(profile))
        assert verify_report(forged).differences == []


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
