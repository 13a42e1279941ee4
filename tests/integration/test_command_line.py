"""The `virnuc` command as people meet it: a process of its own, its two outputs and its exit code."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import COMMANDS
from virnuc_core.reads.simulate import SimulateSpec, simulate

Make = Callable[[Path, Path], list[str]]  # (folder, good models) -> words after `virnuc predict`


def virnuc(*words: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of standard error."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("virnuc: ")
    return lines[0]


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        done = virnuc("--help")
        times.append(time.perf_counter() - started)
        assert done.returncode == 0
        assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert min(times) < 0.5


def test_help_and_wrong_options_import_neither_torch_nor_prefect() -> None:
    code = (
        "import sys, flows.cli\n"
        "flows.cli.main(['--help']); flows.cli.main(['predict', 'a']); flows.cli.main(['validate', '--bogus'])\n"
        "sys.exit(bool({'torch', 'prefect', 'pandas', 'matplotlib'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    done = virnuc(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: virnuc {name}")
    assert done.stderr == ""


@pytest.mark.parametrize("words", [(), ("bogus",), ("predict", "--bogus"), ("models", "bogus"), ("approve", "x")])
def test_a_wrong_command_line_is_one_line_and_2(words: tuple[str, ...]) -> None:
    done = virnuc(*words)
    assert done.returncode == 2
    if words:
        one_line(done)


def reads_file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def good_reads(folder: Path) -> Path:
    return reads_file(folder, "good.fasta", b">r1\nACGTACGTACGTACGTACGT\n")


def missing_file(folder: Path, models: Path) -> list[str]:
    return [str(folder / "absent.fq"), "--models", str(models)]


def missing_models(folder: Path, _: Path) -> list[str]:
    return [str(good_reads(folder)), "--models", str(folder / "absent")]


def models_without_a_part(folder: Path, models: Path) -> list[str]:
    copy = shutil.copytree(models, folder / "m")
    shutil.rmtree(copy / "dnabert_s")
    return [str(good_reads(folder)), "--models", str(copy)]


def models_without_weights(folder: Path, models: Path) -> list[str]:
    copy = shutil.copytree(models, folder / "m")
    (copy / "esm2" / "model.safetensors").unlink()
    return [str(good_reads(folder)), "--models", str(copy)]


def models_of_the_wrong_width(folder: Path, models: Path) -> list[str]:
    copy = shutil.copytree(models, folder / "m")
    config = json.loads((copy / "head" / "config.json").read_text())
    config["dna_width"] += 1
    (copy / "head" / "config.json").write_text(json.dumps(config))
    return [str(good_reads(folder)), "--models", str(copy)]


def output_that_is_a_file(folder: Path, models: Path) -> list[str]:
    reads_file(folder, "taken", b"")
    return [str(good_reads(folder)), "--models", str(models), "-o", str(folder / "taken")]


def no_such_gpu(folder: Path, models: Path) -> list[str]:
    return [str(good_reads(folder)), "--models", str(models), "--devices", "cuda:63"]


def too_many_cores(folder: Path, models: Path) -> list[str]:
    return [str(good_reads(folder)), "--models", str(models), "--devices", "cpu:4096"]


def half_precision_on_a_core(folder: Path, models: Path) -> list[str]:
    return [str(good_reads(folder)), "--models", str(models), "--devices", "cpu:1", "--precision", "fp16"]


def a_budget_out_of_range(folder: Path, models: Path) -> list[str]:
    return [str(good_reads(folder)), "--models", str(models), "--token-budget", "3"]


REFUSED_AT_ONCE: list[tuple[Make, int, str]] = [
    (missing_file, 2, "absent.fq"),
    (missing_models, 3, "absent"),
    (models_without_a_part, 3, "dnabert_s"),
    (models_without_weights, 3, "model.safetensors"),
    (models_of_the_wrong_width, 3, "head"),
    (output_that_is_a_file, 2, "is a file"),
    (no_such_gpu, 4, "cuda:63"),
    (too_many_cores, 4, "cpu:4096"),
    (half_precision_on_a_core, 2, "fp16"),
    (a_budget_out_of_range, 2, "token_budget"),
]


@pytest.mark.parametrize(("make", "code", "said"), REFUSED_AT_ONCE, ids=[case[0].__name__ for case in REFUSED_AT_ONCE])
def test_what_cannot_work_is_refused_before_anything_starts(
    make: Make, code: int, said: str, tmp_path: Path, models: Path
) -> None:
    words = make(tmp_path, models)
    out = [] if "-o" in words else ["-o", str(tmp_path / "out")]
    devices = [] if "--devices" in words else ["--devices", "cpu:1"]
    started = time.perf_counter()
    done = virnuc(
        "predict", *words, *out, *devices, environment={**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9"}
    )
    assert done.returncode == code, done.stderr
    assert said in one_line(done)
    assert not (tmp_path / "out").exists()
    assert time.perf_counter() - started < 20


def truncated_gz(folder: Path) -> Path:
    whole = simulate(SimulateSpec(reads=500, seed=1), folder / "whole.fastq.gz").reads_file.read_bytes()
    return reads_file(folder, "cut.fastq.gz", whole[: len(whole) // 2])


FOUND_WHILE_READING: list[tuple[str, Callable[[Path], Path], str]] = [
    ("no sequences", lambda f: reads_file(f, "notes.txt", b"dear diary\n"), "notes.txt"),
    ("truncated gz", truncated_gz, "cut.fastq.gz"),
    ("no sequence", lambda f: reads_file(f, "half.fastq", b"@r1\nACGT\n+\nIIII\n@r2\n"), "half.fastq:5"),
]


@pytest.mark.parametrize(
    ("make", "said"), [case[1:] for case in FOUND_WHILE_READING], ids=[c[0] for c in FOUND_WHILE_READING]
)
def test_broken_reads_are_one_line_and_leave_nothing_half_written(
    make: Callable[[Path], Path], said: str, tmp_path: Path, models: Path, child_environment: dict[str, str]
) -> None:
    words = ["predict", make(tmp_path), "-o", tmp_path / "out", "--models", models, "--devices", "cpu:1"]
    done = virnuc(*words, environment=child_environment)
    assert done.returncode == 2, done.stderr
    assert said in one_line(done)
    left = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != ".lock"]
    assert left == []


def test_duplicate_ids_are_refused_where_that_is_asked_for(
    tmp_path: Path, models: Path, child_environment: dict[str, str]
) -> None:
    twice = reads_file(tmp_path, "twice.fasta", b">r1\nACGTACGTACGT\n>r1\nACGTACGTACGA\n")
    words = ["predict", twice, "-o", tmp_path / "out", "--models", models, "--devices", "cpu:1", "--strict"]
    refused = virnuc(*words, environment=child_environment)
    assert refused.returncode == 2
    assert "r1" in one_line(refused)


def test_predict_says_what_it_found_and_nothing_alarming(
    tmp_path: Path, reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    words = ["predict", reads, "-o", out, "--models", models, "--devices", "cpu:1"]
    done = virnuc(*words, environment=child_environment)
    assert done.returncode == 0, done.stderr
    assert "of 300 reads are viral" in done.stdout
    assert "Total wall time" in done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "WARNING", "ERROR", "prefect"))
    again = virnuc(*words, environment=child_environment)
    assert "nothing had to be computed" in again.stdout


def test_debug_shows_the_traceback(tmp_path: Path, models: Path) -> None:
    done = virnuc("predict", tmp_path / "absent.fq", "-o", tmp_path / "out", "--models", models, "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "InputError" in done.stderr


def test_a_failed_criterion_is_5_and_the_report_is_printed(
    tmp_path: Path, reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    profile = tmp_path / "impossible.toml"
    profile.write_text(
        'name = "impossible"\ntitle = "Nobody meets this"\ndevice_names = [""]\n[baseline]\nname = "vanilla"\n'
        'reads = 50\n[targets]\none_device_seconds = { op = "<", value = 0.001 }\n'
    )
    out = tmp_path / "validation"
    words = ["validate", "--profile", profile, "--reads", reads, "--models", models, "--devices", "cpu:1", "-o", out]
    done = virnuc(*words, environment=child_environment)
    assert done.returncode == 5, done.stderr
    assert "OVERALL: 0 of 7 CRITERIA MET" in done.stdout
    assert "not met: Time on one device" in done.stdout
    assert virnuc("verify", out).returncode == 0
    changed = json.loads((out / "report" / "report.json").read_text())
    changed["run"]["total_s"] = 0.0005
    (out / "report" / "report.json").write_text(json.dumps(changed))
    assert virnuc("verify", out).returncode == 1


def test_compare_tells_agreement_by_its_exit_code(tmp_path: Path) -> None:
    header = "Sequence_ID\tPrediction\tscore1\tscore2\n"
    a = reads_file(tmp_path, "a.txt", f"{header}r_chunk_1F1\tvirus\t0.1\t0.9\n".encode())
    b = reads_file(tmp_path, "b.txt", f"{header}r_chunk_1F1\tothers\t0.9\t0.1\n".encode())
    assert virnuc("compare", a, a).returncode == 0
    assert virnuc("compare", a, b).returncode == 5
    found = json.loads(virnuc("compare", a, b, "--json", "--mode", "frame").stdout)
    assert found["frames"]["agreement"] == 0
    assert virnuc("compare", a, tmp_path / "absent").returncode == 2


def test_models_simulate_devices_and_profiles(tmp_path: Path) -> None:
    assert virnuc("models", "init-random", tmp_path / "m", "--seed", "3").returncode == 0
    assert virnuc("models", "init-random", tmp_path / "m").returncode == 3  # there is a model already
    assert virnuc("simulate", tmp_path / "r.fastq.gz", "--preset", "tiny").returncode == 0
    with gzip.open(tmp_path / "r.fastq.gz", "rt") as handle:
        assert sum(1 for _ in handle) == 40
    assert virnuc("simulate", tmp_path / "r.odd").returncode == 2
    assert json.loads(virnuc("devices", "--json").stdout)[-1]["devices"].startswith("cpu:")
    assert "ci-smoke" in virnuc("profiles").stdout
    assert virnuc("profiles", "absent").returncode == 2


def test_a_run_scored_again_with_another_threshold(
    tmp_path: Path, reads: Path, models: Path, prefect_backend: None
) -> None:
    from flows.predict import predict

    out = tmp_path / "out"
    predict(reads=[str(reads)], out=out, models=models, devices="cpu:1")
    done = virnuc("rescore", out, "-o", tmp_path / "strict", "--threshold", "1")
    assert done.returncode == 0, done.stderr
    assert virnuc("rescore", out, "-o", tmp_path / "strict", "--threshold", "2").returncode == 2
