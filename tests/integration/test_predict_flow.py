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
from prefect.settings import PREFECT_UI_URL

from tests.columns import documented
from virnuc.flows.inbox import NOTHING_NEW
from virnuc.flows.prefect_flows.inbox import predict_inbox
from virnuc.flows.prefect_flows.predict import predict
from virnuc.tasks.artifacts import host_key
from virnuc.tasks.result_links import RESULTS_URL
from virnuc_core.answer import RANDOM_NOTE, RANDOM_WEIGHTS
from virnuc_core.errors import InputError, RunMismatchError
from virnuc_core.inbox import Ledger
from virnuc_core.pipeline import read_summary
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import digest, read_record, sha256_of

from .flow_runs import RESULTS, message, run_of, task_runs

pytestmark = pytest.mark.usefixtures("prefect_backend", "forked_workers")


def test_predict_writes_its_files_and_says_so(
    tmp_path: Path, reads: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_dir = tmp_path / "run"
    monkeypatch.setenv(RESULTS_URL, f"{tmp_path}=https://files.example.org")
    arguments = {
        "reads": [str(reads)],
        "out": out_dir,
        "models": models,
        "devices": "cpu:1",
        "write_viral": True,
    }
    state = predict(**arguments, return_state=True)
    assert state.is_completed()
    summary = read_summary(RunDir(out_dir))
    assert summary is not None
    assert sum(summary.fates.values()) == 300
    record = read_record(RunDir(out_dir))
    assert [
        (input_file.file, input_file.reads, input_file.content) for input_file in record.inputs
    ] == [(str(reads), 300, digest(reads))]
    expected_columns = {
        name: record.spec[name]
        for name in ("sample", "on_error", "write_viral", "reads", "threshold")
    }
    assert expected_columns == {
        "sample": "few",
        "on_error": "stop",
        "write_viral": True,
        "reads": [str(reads)],
        "threshold": 0.5,
    }
    assert record.attempts[0].command
    assert record.attempts[0].directory == str(Path.cwd())
    assert state.message == summary.answer.message
    assert state.message.startswith(f"{summary.fates['viral']:,} of 300 reads are viral; ")
    assert state.message.endswith(RANDOM_WEIGHTS)
    table = Artifact.get("reads-few")
    assert table is not None
    assert RANDOM_NOTE in str(table.description)
    assert f"[few · cpu:1]({PREFECT_UI_URL.value()}/runs/flow-run/{run_of(state)})" in str(
        table.description
    )
    summary_text = Artifact.get("summary-few")
    assert summary_text is not None
    assert "(https://files.example.org/run/summary.html)" in str(summary_text.description)
    assert {*RESULTS, "embeddings.h5", "failed.tsv", "viral.fastq.gz"} == set(summary.files or {})
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(run_of(state))
    assert flow_run.name == "few · cpu:1"
    assert sorted(flow_run.tags) == ["cpu", "few", "virnuc"]
    names = {"stage few", "embed few on cpu:1"}
    assert set(task_runs(state, *names)) == names
    stages = Artifact.get(host_key("stages-few-cpu-1"))
    assert stages is not None
    assert [row["stage"] for row in json.loads(str(stages.data))][5] == "Stage 6: ESM-2"


def test_a_finished_prediction_is_not_computed_again(
    tmp_path: Path, reads: Path, models: Path
) -> None:
    out_dir = tmp_path / "run"
    arguments = {"reads": [str(reads)], "out": out_dir, "models": models, "devices": "cpu:1"}
    predict(**arguments)
    times_before = {
        path: path.stat().st_mtime_ns
        for path in out_dir.rglob("*")
        if path.is_file() and path.name != "run.json"
    }
    logs = (out_dir / "logs").stat().st_mtime_ns
    state = predict(**arguments, return_state=True)
    assert (state.message or "").endswith("; nothing had to be computed")
    expected = {"stage few": "Reused", "embed few on cpu:1": "Reused"}
    states = {name: run.state_name for name, run in task_runs(state, *expected).items()}
    assert states == expected
    assert (out_dir / "logs").stat().st_mtime_ns == logs  # no worker was started
    changed_files = [
        str(path)
        for path, modified_ns in times_before.items()
        if path.stat().st_mtime_ns != modified_ns
    ]
    assert [
        name for name in changed_files if "shards/0" in name or "orfs" in name or "results" in name
    ] == []


def test_other_reads_are_not_mixed_into_a_run_and_force_starts_over(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    out_dir = tmp_path / "run"
    predict(reads=[str(few_reads)], out=out_dir, models=models, devices="cpu:1")
    other_reads = simulate(SimulateSpec(reads=50, seed=9), tmp_path / "other.fasta").reads_file
    with pytest.raises(
        RunMismatchError, match=r"other reads.*few.* was read then; other\.fasta was not"
    ):
        predict(reads=[str(other_reads)], out=out_dir, models=models, devices="cpu:1")
    state = predict(
        reads=[str(other_reads)],
        out=out_dir,
        models=models,
        devices="cpu:1",
        force=True,
        return_state=True,
    )
    assert "of 50 reads are viral; " in (state.message or "")


def test_each_file_of_an_inbox_is_predicted_once(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_messages: list[
        tuple[str, str, str]
    ] = []  # by the inbox alone: each prediction sends its own

    def emit(event: str, _resource: str, name: str, payload: dict[str, Any]) -> None:
        sent_messages.append((event, name, payload["reason"]))

    monkeypatch.setattr("virnuc.flows.inbox.emit", emit)
    inbox, out_dir = tmp_path / "inbox", tmp_path / "out"
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
    arguments = {
        "inbox": inbox,
        "out": out_dir,
        "models": models,
        "devices": "cpu:1",
        "settle_s": 0,
    }
    state = predict_inbox(**arguments, return_state=True)
    assert state.message == "1 duplicate, 3 failed, 2 predicted"
    assert {event for event, *_ in sent_messages} == {"inbox.failed"}
    assert any(
        name == "broken.fasta" and "neither FASTA nor FASTQ" in reason
        for _, name, reason in sent_messages
    )
    assert len(sent_messages) == 3
    table = {row.file: row for row in Ledger(inbox, out_dir).read_table()}
    assert {
        name: row.fate for name, row in table.items() if name in ("2.fasta", "broken.fasta")
    } == {
        "2.fasta": "predicted",
        "broken.fasta": "failed",
    }
    assert "broken.fasta" in table["broken.fasta"].note
    assert table["2.fasta"].reads == "40"
    run = out_dir / table["2.fasta"].run
    workers = [read_summary(RunDir(out_dir / table[f"{number}.fasta"].run)) for number in (1, 2)]
    assert (
        len({worker["pid"] for summary in workers if summary for worker in summary.workers}) == 1
    ), "kept from file to file"
    assert all((run / name).is_file() for name in RESULTS)
    second_state = predict_inbox(**arguments, return_state=True)
    assert (second_state.name, second_state.message) == (
        NOTHING_NEW,
        "nothing new: 1 duplicate, 3 failed, 2 predicted",
    )
    assert documented(out_dir / "inbox.tsv") == 6
    assert len(sent_messages) == 3, "a failure is told of once"


def test_a_file_of_an_inbox_replaced_before_it_is_read_does_not_pass_for_what_it_was(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, out_dir = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    file = inbox / "r.fasta"
    file.write_text(">a\nACGT\n")
    predicted: list[str] = []

    def hashed(path: Path) -> str:
        predicted.append(sha256_of(path))
        if len(predicted) == 2:  # on being seen, and before work begins
            path.write_text(">b\nTTGT\n")
        return predicted[-1]

    monkeypatch.setattr("virnuc_core.inbox.sha256_of", hashed)
    monkeypatch.setattr("virnuc.flows.inbox.shared_workers", lambda *_, **__: nullcontext())
    arguments = {
        "inbox": inbox,
        "out": out_dir,
        "models": models,
        "devices": "cpu:1",
        "settle_s": 0,
    }
    assert predict_inbox(**arguments, return_state=True).message == "1 waiting"
    fate = Ledger(inbox, out_dir).read_fate(predicted[0])
    assert fate is not None
    assert "was replaced before it was read" in fate.note
    assert not RunDir(out_dir / "runs" / predicted[0][:16]).shards.exists()


def test_mates_and_lanes_in_an_inbox_are_predicted_as_one_sample(
    tmp_path: Path, models: Path, reads: Path
) -> None:
    inbox, out_dir = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    lines = gzip.decompress(reads.read_bytes()).decode().splitlines(keepends=True)
    for lane in (1, 2):
        text = "".join(lines[(lane - 1) * 80 : lane * 80])
        for mate in (1, 2):
            (inbox / f"P7_S1_L00{lane}_R{mate}_001.fastq").write_text(text)
    (inbox / "ntc_R1.fq.gz").write_bytes(gzip.compress(b""))
    (inbox / "ntc_R2.fq.gz").write_bytes(gzip.compress(b""))
    arguments = {
        "inbox": inbox,
        "out": out_dir,
        "models": models,
        "devices": "cpu:1",
        "settle_s": 0,
    }
    state = predict_inbox(**arguments, return_state=True)
    assert state.message == "4 joined, 2 predicted"
    with get_client(sync_client=True) as client:
        assert {"P7_S1", "ntc"} < {*client.read_flow_run(run_of(state)).tags}
    assert documented(out_dir / "inbox.tsv") == 6
    rows = {row.file: row for row in Ledger(inbox, out_dir).read_table()}
    assert rows["P7_S1_L001_R1_001.fastq"].reads == "80"
    assert rows["ntc_R1.fq.gz"].reads == "0"
    record = read_record(RunDir(out_dir / "P7_S1"))
    assert record.spec["sample"] == "P7_S1", "virnuc export uses this name"
    assert record.pairs is not None
    assert [Path(file).name for pair in record.pairs for file in pair] == [
        f"P7_S1_L00{lane}_R{mate}_001.fastq" for lane in (1, 2) for mate in (1, 2)
    ]
    assert all((out_dir / "P7_S1" / name).is_file() for name in RESULTS)
    assert len((out_dir / "ntc" / "pairs.tsv").read_text().splitlines()) == 1, "a header"
    assert predict_inbox(**arguments, return_state=True).name == NOTHING_NEW


def test_an_inbox_without_work_says_so(tmp_path: Path, models: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    arguments = {"inbox": inbox, "out": tmp_path / "out", "models": models, "devices": "cpu:1"}
    empty_state = predict_inbox(**arguments, return_state=True)
    assert (empty_state.name, empty_state.message) == (
        "Nothing new",
        "nothing new: the inbox is empty",
    )
    (inbox / "1.fasta").write_text(">r\nACGT\n")  # it was written just now
    state = predict_inbox(**arguments, return_state=True)
    assert (state.name, state.message) == ("Nothing new", "nothing new: 1 arriving")


@pytest.mark.slow
def test_samples_of_a_sheet_share_their_workers_and_a_broken_one_fails_alone(
    tmp_path: Path, models: Path, few_reads: Path
) -> None:
    out_dir, sheet = tmp_path / "out", tmp_path / "sheet.tsv"
    samples = [
        simulate(SimulateSpec(reads=40, seed=seed), tmp_path / f"{seed}.fastq").reads_file
        for seed in range(5)
    ]
    (tmp_path / "broken.fastq").write_text("@r1\nACGT\n+\nIII\n")
    (tmp_path / "others.fastq").write_text("@r1\nACGT\n+\nIIII\n")
    (tmp_path / "empty.fastq").touch()
    lines = [f"s{seed}\t{path.name}\t" for seed, path in enumerate(samples)]
    lines[2:2] = [
        "cut off\tbroken.fastq\t",
        f"lanes\t{few_reads}\t",
        f"steps\t{samples[0]}\tothers.fastq",
        "absent\tno.fq\t",
        f"long\t{'x' * 300}\t",
        "empty\tempty.fastq\t",
    ]
    sheet.write_text("\n".join(["sample\tfastq_1\tfastq_2", *lines, "lanes\t0.fastq\t"]))
    results = {"samples": sheet, "out": out_dir, "models": models, "devices": "cpu:1"}
    state = predict(**results, return_state=True)
    assert state.is_failed()
    assert (state.message or "").startswith("4 of 11 samples failed, the others are done (")
    assert "; cut off: " in (state.message or "")
    assert documented(out_dir / "samples.tsv") == 11
    rows = {
        line.split("\t")[0]: line.split("\t")[1:]
        for line in (out_dir / "samples.tsv").read_text().splitlines()[1:]
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
    }
    assert "broken.fastq:1" in rows["cut off"][-1]
    assert "no such file" in rows["absent"][-1]
    assert "File name too long" in rows["long"][-1]
    assert rows["empty"][:2] == ["predicted", "0"], "a negative control is a result"
    assert rows["lanes"][1] == "100"
    arguments = {
        name: read_summary(RunDir(out_dir / name))
        for name, row in rows.items()
        if row[0] == "predicted"
    }
    assert (
        len(
            {
                worker["pid"]
                for summary in arguments.values()
                if summary
                for worker in summary.workers
            }
        )
        == 1
    )
    runs = task_runs(state, "stage s0", "embed s4 on cpu:1", "stage cut off")
    assert "broken.fastq" in message(runs["stage cut off"])
    single_run = predict(
        reads=[str(samples[3])],
        out=tmp_path / "alone",
        models=models,
        devices="cpu:1",
        return_state=True,
    )
    assert single_run.is_completed()
    assert all(
        (out_dir / "s3" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
        for name in RESULTS
    )
    times = {name: RunDir(out_dir / name).summary.stat().st_mtime_ns for name in arguments}
    sheet.write_text(
        sheet.read_text().replace("broken.fastq", "1.fastq").replace("no.fq", "2.fastq")
    )
    second_state = predict(**results, return_state=True)
    assert "2 of 11 samples failed" in (second_state.message or "")
    assert {f"{step} {name}" for step in ("stage", "embed") for name in arguments}.isdisjoint(
        task_runs(second_state)
    )
    assert {
        name: RunDir(out_dir / name).summary.stat().st_mtime_ns for name in arguments
    } == times, "only what was not complete"


@pytest.mark.slow
def test_read_groups_of_a_bam_are_samples(tmp_path: Path, models: Path) -> None:
    pysam = pytest.importorskip("pysam")
    fastq_lines = (
        simulate(SimulateSpec(reads=60, seed=4), tmp_path / "made.fastq")
        .reads_file.read_text()
        .splitlines()
    )
    bam, out_dir, groups = tmp_path / "run.bam", tmp_path / "out", ("lung", "gut", "run")
    with pysam.AlignmentFile(
        bam, "wb", header={"RG": [{"ID": "1", "SM": "lung"}, {"ID": "gut"}]}
    ) as bam_file:
        for first_line in range(0, len(fastq_lines), 4):
            segment = pysam.AlignedSegment(bam_file.header)
            segment.query_name, segment.flag, segment.query_sequence = (
                fastq_lines[first_line][1:].split()[0],
                4,
                fastq_lines[first_line + 1],
            )
            segment.set_tags(
                [("RG", group) for group in ("1", "gut", "")[first_line // 4 % 3 :][:1] if group]
            )
            bam_file.write(segment)
    arguments = {
        "reads": [str(bam)],
        "sample_from": "read-group",
        "out": out_dir,
        "models": models,
        "devices": "cpu:1",
    }
    arguments |= {"write_viral": True, "write_nonviral": True}
    message = predict(**arguments, return_state=True).message
    for number, group in enumerate(groups):
        expected_ids = [line[1:].split()[0] for line in fastq_lines[4 * number :: 12]]
        table = (out_dir / group / "reads.tsv").read_text().splitlines()[1:]
        assert [line.split("\t")[0] for line in table] == expected_ids
        packed_sequences = [
            gzip.decompress(path.read_bytes()).decode()
            for path in (out_dir / group).glob("*viral.fastq.gz")
        ]
        assert sorted(
            line[1:] for text in packed_sequences for line in text.splitlines()[::4]
        ) == sorted(expected_ids)
        assert read_record(RunDir(out_dir / group)).spec["read_group"] == group
    assert documented(out_dir / "samples.tsv") == 3
    second_state = predict(**arguments, return_state=True)
    assert (second_state.message, task_runs(second_state)) == (message, {})


def test_a_content_another_run_works_on_is_left_to_it(tmp_path: Path, models: Path) -> None:
    inbox, out_dir = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    simulated_reads = simulate(SimulateSpec(reads=40, seed=1), tmp_path / "1.fasta").reads_file
    simulated_reads.rename(inbox / "1.fasta")
    arguments = {
        "inbox": inbox,
        "out": out_dir,
        "models": models,
        "devices": "cpu:1",
        "settle_s": 0,
    }
    ledger = Ledger(inbox, out_dir)
    with ledger.claim(ledger.scan(settle_s=0)[0].sha256):
        state = predict_inbox(**arguments, return_state=True)
    assert state.message == "1 waiting"
    assert not (out_dir / "runs").exists()
    assert predict_inbox(**arguments, return_state=True).message == "1 predicted"


@pytest.mark.slow
def test_a_run_of_other_settings_holds_up_no_other_file_and_is_no_files_fate(
    tmp_path: Path, models: Path
) -> None:
    inbox, out_dir = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    simulated_reads = simulate(SimulateSpec(reads=40, seed=1), tmp_path / "1.fasta").reads_file
    simulated_reads.rename(inbox / "1.fasta")
    ledger = Ledger(inbox, out_dir)
    run_folder = ledger.out / "runs" / ledger.scan(settle_s=0)[0].sha256[:16]
    predict(
        reads=[str(inbox / "1.fasta")],
        out=run_folder,
        models=models,
        devices="cpu:1",
        token_budget=2048,
    )
    simulate(SimulateSpec(reads=40, seed=2), tmp_path / "2.fasta").reads_file.rename(
        inbox / "2.fasta"
    )
    arguments = {
        "inbox": inbox,
        "out": out_dir,
        "models": models,
        "devices": "cpu:1",
        "settle_s": 0,
    }
    state = predict_inbox(**arguments, token_budget=4096, return_state=True)
    assert state.message == "1 predicted, 1 waiting"
    rows = {row.file: row for row in ledger.read_table()}
    assert rows["1.fasta"].fate == "waiting"
    assert "token_budget 2048 → 4096" in rows["1.fasta"].note
    assert not (out_dir / "fates" / f"{rows['1.fasta'].sha256}.json").exists()
    assert predict_inbox(**arguments, token_budget=2048, return_state=True).message == "2 predicted"


def test_broken_reads_fail_the_flow_with_their_own_error_and_are_not_tried_again(
    tmp_path: Path, models: Path
) -> None:
    broken_file = tmp_path / "broken.fastq"
    good = "".join(f"@r{number}\n{'ACGT' * 30}\n+\n{'I' * 120}\n" for number in range(4_000))
    broken_file.write_text(
        f"{good}@last\nACGT\n+\nII\n"
    )  # further on than the look before the start reaches
    state = predict(
        reads=[str(broken_file)],
        out=tmp_path / "run",
        models=models,
        devices="cpu:1",
        return_state=True,
    )
    with pytest.raises(InputError, match=r"broken\.fastq"):
        state.result()
    staging = task_runs(state, "stage broken")["stage broken"]
    assert staging.run_count == 1
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.name != ".virnuc"] == []


def test_duplicate_ids_are_refused_where_that_is_asked_for(tmp_path: Path, models: Path) -> None:
    duplicates = tmp_path / "twice.fasta"
    duplicates.write_text(">r1\nACGTACGTACGT\n>r1\nACGTACGTACGA\n")
    arguments = {
        "reads": [str(duplicates)],
        "out": tmp_path / "run",
        "models": models,
        "devices": "cpu:1",
    }
    with pytest.raises(InputError, match="r1"):
        predict(**arguments, strict=True)


def test_reads_without_an_open_frame_give_files_with_headers_only(
    tmp_path: Path, models: Path
) -> None:
    stops = tmp_path / "stops.fasta"
    stops.write_text(f">none\n>stops\n{'TAACTAGTTAG' * 9}\n")
    state = predict(
        reads=[str(stops)], out=tmp_path / "run", models=models, devices="cpu:1", return_state=True
    )
    assert (state.message or "").startswith("0 of 2 reads are viral; ")
    assert len((tmp_path / "run" / "prediction_results.txt").read_text().splitlines()) == 1


def test_no_thread_of_ours_outlives_a_flow(tmp_path: Path, few_reads: Path, models: Path) -> None:
    predict(reads=[str(few_reads)], out=tmp_path / "run", models=models, devices="cpu:1")
    names = [thread.name for thread in threading.enumerate()]
    assert [
        name for name in names if name.startswith(("progress artifact", "cancel watch", "read cpu"))
    ] == []
