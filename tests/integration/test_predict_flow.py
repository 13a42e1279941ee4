"""Predictions as flows, of files, samples and an inbox: what they leave on disk, and what people see of them."""

from __future__ import annotations

import errno
import gzip
import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client

from tests.columns import documented
from virnuc.flows.inbox import predict_inbox
from virnuc.flows.predict import predict
from virnuc.tasks.artifacts import host_key
from virnuc_core.errors import InputError, RunMismatchError
from virnuc_core.inbox import Ledger
from virnuc_core.pipeline import read_summary
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import digest, read_record, sha256_of

from .flow_runs import RESULTS, message, run_of, task_runs

pytestmark = pytest.mark.usefixtures("prefect_backend")


def test_predict_writes_its_files_and_says_so(tmp_path: Path, reads: Path, models: Path) -> None:
    out = tmp_path / "run"
    given = {
        "reads": [str(reads)],
        "out": out,
        "models": models,
        "devices": "cpu:1",
        "write_viral": True,
    }
    state = predict(**given, return_state=True)
    assert state.is_completed()
    summary = read_summary(RunDir(out))
    assert summary is not None
    assert sum(summary.fates.values()) == 300
    record = read_record(RunDir(out))
    assert [(one.file, one.reads, one.content) for one in record.inputs] == [
        (str(reads), 300, digest(reads))
    ]
    asked = {
        name: record.spec[name]
        for name in ("sample", "on_error", "write_viral", "reads", "threshold")
    }
    assert asked == {
        "sample": "few",
        "on_error": "stop",
        "write_viral": True,
        "reads": [str(reads)],
        "threshold": 0.5,
    }
    assert record.attempts[0].command
    assert record.attempts[0].directory == str(Path.cwd())
    assert state.message == f"{summary.fates['viral']:,} of 300 reads are viral"
    assert {*RESULTS, "embeddings.h5", "failed.tsv", "viral.fastq.gz"} == set(summary.files or {})
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(run_of(state))
    assert flow_run.name == "few · cpu:1"
    assert sorted(flow_run.tags) == ["cpu", "few", "virnuc"]
    assert set(task_runs(state)) == {"stage few", "embed few on cpu:1"}
    stages = Artifact.get(host_key("stages-few-cpu-1"))
    assert stages is not None
    assert [row["stage"] for row in json.loads(str(stages.data))][5] == "Stage 6: ESM-2"


def test_a_finished_prediction_is_not_computed_again(
    tmp_path: Path, reads: Path, models: Path
) -> None:
    out = tmp_path / "run"
    given = {"reads": [str(reads)], "out": out, "models": models, "devices": "cpu:1"}
    predict(**given)
    before = {
        path: path.stat().st_mtime_ns
        for path in out.rglob("*")
        if path.is_file() and path.name != "run.json"
    }
    logs = (out / "logs").stat().st_mtime_ns
    state = predict(**given, return_state=True)
    assert (state.message or "").endswith("; nothing had to be computed")
    states = {
        name: run.state.name for name, run in task_runs(state).items() if run.state is not None
    }
    assert states == {"stage few": "Reused", "embed few on cpu:1": "Reused"}
    assert (out / "logs").stat().st_mtime_ns == logs  # no worker was started
    changed = [str(path) for path, when in before.items() if path.stat().st_mtime_ns != when]
    assert [
        name for name in changed if "shards/0" in name or "orfs" in name or "results" in name
    ] == []


def test_other_reads_are_not_mixed_into_a_run_and_force_starts_over(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    out = tmp_path / "run"
    predict(reads=[str(few_reads)], out=out, models=models, devices="cpu:1")
    other = simulate(SimulateSpec(reads=50, seed=9), tmp_path / "other.fasta").reads_file
    with pytest.raises(
        RunMismatchError, match=r"other reads.*few.* was read then; other\.fasta was not"
    ):
        predict(reads=[str(other)], out=out, models=models, devices="cpu:1")
    state = predict(
        reads=[str(other)], out=out, models=models, devices="cpu:1", force=True, return_state=True
    )
    assert (state.message or "").endswith("of 50 reads are viral")


def test_each_file_of_an_inbox_is_predicted_once(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, str, str]] = []  # by the inbox alone: each prediction sends its own

    def emit(event: str, _resource: str, name: str, payload: dict[str, Any]) -> None:
        sent.append((event, name, payload["reason"]))

    monkeypatch.setattr("virnuc.flows.inbox.emit", emit)
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    for number in (1, 2):
        simulate(
            SimulateSpec(reads=40, seed=number), tmp_path / f"{number}.fasta"
        ).reads_file.rename(inbox / f"{number}.fasta")
    (inbox / "copy.fasta").write_bytes((inbox / "1.fasta").read_bytes())
    (inbox / "broken.fasta").write_text("this is no sequence file\n")
    (inbox / os.fsdecode(b"latin-\xe9.fasta")).write_text(">a\nACGT\n")
    (inbox / "unreadable.fasta").write_text(">a\nACGT\n")

    def hashed(path: Path) -> str:
        if path.name == "unreadable.fasta":
            raise PermissionError(errno.EACCES, "Permission denied")
        return sha256_of(path)

    monkeypatch.setattr(
        "virnuc_core.inbox.sha256_of", hashed
    )  # who runs tests may be allowed to read all
    given = {"inbox": inbox, "out": out, "models": models, "devices": "cpu:1", "settle_s": 0}
    state = predict_inbox(**given, return_state=True)
    assert state.message == "1 duplicate, 3 failed, 2 predicted"
    assert {event for event, *_ in sent} == {"inbox.failed"}
    assert any(
        name == "broken.fasta" and "neither FASTA nor FASTQ" in reason for _, name, reason in sent
    )
    assert len(sent) == 3
    table = {row.file: row for row in Ledger(inbox, out).read_table()}
    assert {
        name: row.fate for name, row in table.items() if name in ("2.fasta", "broken.fasta")
    } == {
        "2.fasta": "predicted",
        "broken.fasta": "failed",
    }
    assert "broken.fasta" in table["broken.fasta"].note
    assert table["2.fasta"].reads == "40"
    run = out / table["2.fasta"].run
    workers = [read_summary(RunDir(out / table[f"{number}.fasta"].run)) for number in (1, 2)]
    assert (
        len({worker["pid"] for summary in workers if summary for worker in summary.workers}) == 1
    ), "kept from file to file"
    assert all((run / name).is_file() for name in RESULTS)
    again = predict_inbox(**given, return_state=True)
    assert (again.name, again.message) == ("Reused", "1 duplicate, 3 failed, 2 predicted")
    assert documented(out / "inbox.tsv") == 6
    assert len(sent) == 3, "a failure is told of once"


def test_a_file_of_an_inbox_replaced_before_it_is_read_does_not_pass_for_what_it_was(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    file = inbox / "r.fasta"
    file.write_text(">a\nACGT\n")
    seen: list[str] = []

    def hashed(path: Path) -> str:
        seen.append(sha256_of(path))
        if len(seen) == 2:  # on being seen, and before work begins
            path.write_text(">b\nTTGT\n")
        return seen[-1]

    monkeypatch.setattr("virnuc_core.inbox.sha256_of", hashed)
    monkeypatch.setattr("virnuc.flows.inbox.shared_workers", lambda *_, **__: nullcontext())
    given = {"inbox": inbox, "out": out, "models": models, "devices": "cpu:1", "settle_s": 0}
    assert predict_inbox(**given, return_state=True).message == "1 waiting"
    fate = Ledger(inbox, out).read_fate(seen[0])
    assert fate is not None
    assert "was replaced before it was read" in fate.note
    assert not RunDir(out / "runs" / seen[0][:16]).shards.exists()


@pytest.mark.slow
def test_samples_of_a_sheet_share_their_workers_and_a_broken_one_fails_alone(
    tmp_path: Path, models: Path, few_reads: Path
) -> None:
    out, sheet = tmp_path / "out", tmp_path / "sheet.tsv"
    made = [
        simulate(SimulateSpec(reads=40, seed=seed), tmp_path / f"{seed}.fastq").reads_file
        for seed in range(5)
    ]
    (tmp_path / "broken.fastq").write_text("@r1\nACGT\n+\nIII\n")
    (tmp_path / "others.fastq").write_text("@r1\nACGT\n+\nIIII\n")
    (tmp_path / "empty.fastq").touch()
    lines = [f"s{seed}\t{path.name}\t" for seed, path in enumerate(made)]
    lines[2:2] = [
        "cut off\tbroken.fastq\t",
        f"lanes\t{few_reads}\t",
        f"steps\t{made[0]}\tothers.fastq",
        "absent\tno.fq\t",
        f"long\t{'x' * 300}\t",
        "empty\tempty.fastq\t",
    ]
    sheet.write_text("\n".join(["sample\tfastq_1\tfastq_2", *lines, "lanes\t0.fastq\t"]))
    given = {"samples": sheet, "out": out, "models": models, "devices": "cpu:1"}
    state = predict(**given, return_state=True)
    assert state.is_failed()
    assert (state.message or "").startswith("5 of 11 samples failed, the others are done (")
    assert "; cut off: " in (state.message or "")
    assert documented(out / "samples.tsv") == 11
    rows = {
        line.split("\t")[0]: line.split("\t")[1:]
        for line in (out / "samples.tsv").read_text().splitlines()[1:]
    }
    assert list(rows) == [
        "s0",
        "s1",
        "cut off",
        "lanes",
        "steps",
        "absent",
        "long",
        "empty",
        "s2",
        "s3",
        "s4",
    ]
    assert {name for name, row in rows.items() if row[0] == "failed"} == {
        "cut off",
        "steps",
        "absent",
        "long",
        "empty",
    }
    assert "broken.fastq:1" in rows["cut off"][-1]
    assert "no such file" in rows["absent"][-1]
    assert "File name too long" in rows["long"][-1]
    assert "empty.fastq: holds no reads" in rows["empty"][-1]
    assert rows["lanes"][1] == "100"
    found = {
        name: read_summary(RunDir(out / name))
        for name, row in rows.items()
        if row[0] == "predicted"
    }
    assert (
        len({worker["pid"] for summary in found.values() if summary for worker in summary.workers})
        == 1
    )
    runs = task_runs(state)
    assert {"stage s0", "embed s4 on cpu:1"} <= runs.keys()
    assert "broken.fastq" in message(runs["stage cut off"])
    alone = predict(
        reads=[str(made[3])],
        out=tmp_path / "alone",
        models=models,
        devices="cpu:1",
        return_state=True,
    )
    assert alone.is_completed()
    assert all(
        (out / "s3" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
        for name in RESULTS
    )
    times = {name: RunDir(out / name).summary.stat().st_mtime_ns for name in found}
    sheet.write_text(
        sheet.read_text().replace("broken.fastq", "1.fastq").replace("no.fq", "2.fastq")
    )
    again = predict(**given, return_state=True)
    assert "3 of 11 samples failed" in (again.message or "")
    assert {f"{step} {name}" for step in ("stage", "embed") for name in found}.isdisjoint(
        task_runs(again)
    )
    assert {name: RunDir(out / name).summary.stat().st_mtime_ns for name in found} == times, (
        "only what was not complete"
    )


@pytest.mark.slow
def test_read_groups_of_a_bam_are_samples(tmp_path: Path, models: Path) -> None:
    pysam = pytest.importorskip("pysam")
    made = (
        simulate(SimulateSpec(reads=60, seed=4), tmp_path / "made.fastq")
        .reads_file.read_text()
        .splitlines()
    )
    bam, out, groups = tmp_path / "run.bam", tmp_path / "out", ("lung", "gut", "run")
    with pysam.AlignmentFile(
        bam, "wb", header={"RG": [{"ID": "1", "SM": "lung"}, {"ID": "gut"}]}
    ) as written:
        for at in range(0, len(made), 4):
            one = pysam.AlignedSegment(written.header)
            one.query_name, one.flag, one.query_sequence = made[at][1:].split()[0], 4, made[at + 1]
            one.set_tags([("RG", group) for group in ("1", "gut", "")[at // 4 % 3 :][:1] if group])
            written.write(one)
    given = {
        "reads": [str(bam)],
        "sample_from": "read-group",
        "out": out,
        "models": models,
        "devices": "cpu:1",
    }
    given |= {"write_viral": True, "write_nonviral": True}
    told = predict(**given, return_state=True).message
    for number, group in enumerate(groups):
        wanted = [line[1:].split()[0] for line in made[4 * number :: 12]]
        table = (out / group / "reads.tsv").read_text().splitlines()[1:]
        assert [line.split("\t")[0] for line in table] == wanted
        packed = [
            gzip.decompress(path.read_bytes()).decode()
            for path in (out / group).glob("*viral.fastq.gz")
        ]
        assert sorted(line[1:] for text in packed for line in text.splitlines()[::4]) == sorted(
            wanted
        )
        assert read_record(RunDir(out / group)).spec["read_group"] == group
    assert documented(out / "samples.tsv") == 3
    again = predict(**given, return_state=True)
    assert (again.message, task_runs(again)) == (told, {})


def test_a_content_another_run_works_on_is_left_to_it(tmp_path: Path, models: Path) -> None:
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    made = simulate(SimulateSpec(reads=40, seed=1), tmp_path / "1.fasta").reads_file
    made.rename(inbox / "1.fasta")
    given = {"inbox": inbox, "out": out, "models": models, "devices": "cpu:1", "settle_s": 0}
    ledger = Ledger(inbox, out)
    with ledger.claim(ledger.scan(settle_s=0)[0].sha256):
        state = predict_inbox(**given, return_state=True)
    assert state.message == "1 waiting"
    assert not (out / "runs").exists()
    assert predict_inbox(**given, return_state=True).message == "1 predicted"


@pytest.mark.slow
def test_a_run_of_other_settings_holds_up_no_other_file_and_is_no_files_fate(
    tmp_path: Path, models: Path
) -> None:
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    made = simulate(SimulateSpec(reads=40, seed=1), tmp_path / "1.fasta").reads_file
    made.rename(inbox / "1.fasta")
    ledger = Ledger(inbox, out)
    started = ledger.out / "runs" / ledger.scan(settle_s=0)[0].sha256[:16]
    predict(
        reads=[str(inbox / "1.fasta")],
        out=started,
        models=models,
        devices="cpu:1",
        token_budget=2048,
    )
    simulate(SimulateSpec(reads=40, seed=2), tmp_path / "2.fasta").reads_file.rename(
        inbox / "2.fasta"
    )
    given = {"inbox": inbox, "out": out, "models": models, "devices": "cpu:1", "settle_s": 0}
    state = predict_inbox(**given, token_budget=4096, return_state=True)
    assert state.message == "1 predicted, 1 waiting"
    rows = {row.file: row for row in ledger.read_table()}
    assert rows["1.fasta"].fate == "waiting"
    assert "token_budget 2048 → 4096" in rows["1.fasta"].note
    assert not (out / "fates" / f"{rows['1.fasta'].sha256}.json").exists()
    assert predict_inbox(**given, token_budget=2048, return_state=True).message == "2 predicted"


def test_broken_reads_fail_the_flow_with_their_own_error_and_are_not_tried_again(
    tmp_path: Path, models: Path
) -> None:
    broken = tmp_path / "broken.fastq"
    good = "".join(f"@r{number}\n{'ACGT' * 30}\n+\n{'I' * 120}\n" for number in range(4_000))
    broken.write_text(
        f"{good}@last\nACGT\n+\nII\n"
    )  # further on than the look before the start reaches
    state = predict(
        reads=[str(broken)], out=tmp_path / "run", models=models, devices="cpu:1", return_state=True
    )
    with pytest.raises(InputError, match=r"broken\.fastq"):
        state.result()
    staged = task_runs(state)["stage broken"]
    assert staged.run_count == 1
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.name != ".virnuc"] == []


def test_duplicate_ids_are_refused_where_that_is_asked_for(tmp_path: Path, models: Path) -> None:
    twice = tmp_path / "twice.fasta"
    twice.write_text(">r1\nACGTACGTACGT\n>r1\nACGTACGTACGA\n")
    given = {"reads": [str(twice)], "out": tmp_path / "run", "models": models, "devices": "cpu:1"}
    with pytest.raises(InputError, match="r1"):
        predict(**given, strict=True)


def test_reads_without_an_open_frame_give_files_with_headers_only(
    tmp_path: Path, models: Path
) -> None:
    stops = tmp_path / "stops.fasta"
    stops.write_text(f">none\n>stops\n{'TAACTAGTTAG' * 9}\n")
    state = predict(
        reads=[str(stops)], out=tmp_path / "run", models=models, devices="cpu:1", return_state=True
    )
    assert state.message == "0 of 2 reads are viral"
    assert len((tmp_path / "run" / "prediction_results.txt").read_text().splitlines()) == 1


def test_no_thread_of_ours_outlives_a_flow(tmp_path: Path, few_reads: Path, models: Path) -> None:
    predict(reads=[str(few_reads)], out=tmp_path / "run", models=models, devices="cpu:1")
    names = [thread.name for thread in threading.enumerate()]
    assert [
        name for name in names if name.startswith(("progress artifact", "cancel watch", "read cpu"))
    ] == []
