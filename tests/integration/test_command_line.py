"""The `virnuc` command as people meet it: a process of its own, its two outputs and its exit code."""

from __future__ import annotations

import gzip
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from virnuc.flows import cli
from virnuc.flows.cli.app import app
from virnuc.flows.cli.registry import COMMAND_NAMES

from .processes import ROOT


def virnuc(
    *words: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "virnuc.flows.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


def one_line(err: str) -> None:
    """Standard error holds one line of ours."""
    (line,) = err.splitlines()
    assert line.startswith("virnuc: ")


def inside(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code and both outputs of the command within this process, which starts much sooner."""
    try:
        code = cli.main([str(word) for word in words])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_program_explains_itself() -> None:
    done = virnuc("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"  {name}: " in done.stdout for name in COMMAND_NAMES)


def test_help_and_wrong_options_import_neither_torch_nor_prefect() -> None:
    code = (
        "import sys, virnuc.flows.cli\n"
        "virnuc.flows.cli.main(['--help']); virnuc.flows.cli.main(['predict', 'a']); virnuc.flows.cli.main(['validate', '--bogus'])\n"
        "virnuc.flows.cli.main(['bogus']); virnuc.flows.cli.main(['--bogus'])\n"
        "sys.exit(bool({'torch', 'prefect', 'pandas', 'matplotlib'} & set(sys.modules)))\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.parametrize("name", sorted(COMMAND_NAMES))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inside(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert out.lower().startswith(f"usage: virnuc {name}")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: Literal["bash", "zsh", "fish"]) -> None:
    script = app.generate_completion(shell=shell)
    assert all(word in script for word in ("predict-inbox", "token-budget", "init-random"))


def written_commands() -> list[str]:
    """Every whole `virnuc` command line of the README and the guides."""
    guides = [
        ROOT / "README.md",
        ROOT / "deployments" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    lines = [
        line.partition(" #")[0].strip() for path in guides for line in path.read_text().splitlines()
    ]
    return [line for line in lines if line.startswith("virnuc ") and "…" not in line]


@pytest.mark.parametrize("line", written_commands())
def test_the_guides_commands_are_understood(line: str) -> None:
    called, _, _ = app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
    assert called.__module__.startswith("virnuc.flows.cli.")


@pytest.mark.parametrize(
    "words", [(), ("bogus",), ("predict", "--bogus"), ("models", "bogus"), ("approve", "x")]
)
def test_a_wrong_command_line_is_one_line_and_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = inside(capsys, *words)
    assert code == 2
    if words:
        one_line(err)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("preditc",), "'preditc' is not a command, did you mean 'predict'?; see virnuc --help"),
        (("predict", "a", "-o", "b"), "--models is required; see virnuc predict --help"),
        (("compare", "a"), "--refactored is required; see virnuc compare --help"),
        (("report", "a", "b", "c"), "unexpected arguments: b c; see virnuc report --help"),
        (("models", "convert"), "OUT is required; see virnuc models convert --help"),
    ],
)
def test_what_is_missing_or_too_much_is_named(
    words: tuple[str, ...],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VIRNUC_MODELS", raising=False)
    assert inside(capsys, *words)[2] == f"virnuc: {problem}\n"


def reads_file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


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


def test_a_script_gets_json_and_a_quiet_run_says_its_outcome_only(
    tmp_path: Path,
    few_reads: Path,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        "predict",
        few_reads,
        "-o",
        tmp_path / "out",
        "--models",
        models,
        "--devices",
        "cpu:1",
        "--no-prefect",
    )
    code, printed, said = inside(capsys, *words, "--json", "--quiet")
    assert (code, said) == (0, "")
    told = json.loads(printed)
    assert (told["state"], told["exit_code"], told["results"]) == (
        "Completed",
        0,
        str(tmp_path / "out"),
    )
    assert sum(told["data"]["fates"].values()) == 60

    def in_vain(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("virnuc.flows.cli.run_from_terminal.start_temporary_server", in_vain)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):  # where no server is named
        code, printed, said = inside(capsys, *words[:-1], "--quiet")
    assert printed.splitlines()[0].endswith("; nothing had to be computed")
    assert (code, said) == (0, "")


def test_debug_shows_the_traceback(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "predict",
        tmp_path / "absent.fq",
        "-o",
        tmp_path / "out",
        "--models",
        models,
        "--debug",
    )
    code, _, err = inside(capsys, *words)
    assert code == 2
    assert "Traceback" in err
    assert "InputError" in err


@pytest.mark.slow
def test_a_failed_criterion_is_5_and_the_report_is_printed(
    tmp_path: Path,
    few_reads: Path,
    models: Path,
    child_environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile = tmp_path / "impossible.toml"
    profile.write_text(
        'name = "impossible"\ntitle = "Nobody meets this"\ndevice_names = [""]\n[baseline]\nname = "vanilla"\n'
        'reads = 50\n[targets]\none_device_seconds = { op = "<", value = 0.001 }\n'
    )
    out = tmp_path / "validation"
    words = (
        "--profile",
        profile,
        "--reads",
        few_reads,
        "--models",
        models,
        "--devices",
        "cpu:1",
        "-o",
        out,
    )
    code, printed, said = inside(capsys, "validate", *words)
    assert code == 5, said
    assert "OVERALL: 0 of 1 asked criteria met" in printed
    assert "not met: Time on one device" in printed
    assert inside(capsys, "verify", out)[0] == 0
    changed = json.loads((out / "report" / "report.json").read_text())
    changed["run"]["total_s"] = 0.0005
    (out / "report" / "report.json").write_text(json.dumps(changed))
    assert inside(capsys, "verify", out)[0] == 1

    words = (sys.executable, "-m", "virnuc.flows.cli", "report", str(out), "--serve")
    with subprocess.Popen(
        words, cwd=ROOT, env=child_environment, stdout=subprocess.PIPE, text=True
    ) as shown:
        assert shown.stdout is not None
        address = next(
            line.split()[0] for line in shown.stdout if line.startswith("http://127.0.0.1:")
        )
        assert httpx.get(address, timeout=30).text == (out / "report" / "report.html").read_text()
        shown.send_signal(signal.SIGINT)
    assert shown.returncode == 0


def test_compare_tells_agreement_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = "Sequence_ID\tPrediction\tscore1\tscore2\n"
    a = reads_file(tmp_path, "a.txt", f"{header}r_chunk_1F1\tvirus\t0.1\t0.9\n".encode())
    b = reads_file(tmp_path, "b.txt", f"{header}r_chunk_1F1\tothers\t0.9\t0.1\n".encode())
    assert inside(capsys, "compare", a, a)[0] == 0
    assert inside(capsys, "compare", a, b)[0] == 5
    found = json.loads(inside(capsys, "compare", a, b, "--json", "--mode", "frame")[1])
    assert found["frames"]["agreement"] == 0
    assert inside(capsys, "compare", a, tmp_path / "absent")[0] == 2


def test_models_simulate_devices_and_profiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inside(capsys, "models", "init-random", tmp_path / "m", "--seed", "3")[0] == 0
    assert (
        inside(capsys, "models", "init-random", tmp_path / "m")[0] == 3
    )  # there is a model already
    assert inside(capsys, "simulate", tmp_path / "r.fastq.gz", "--reads", "tiny")[0] == 0
    with gzip.open(tmp_path / "r.fastq.gz", "rt") as handle:
        assert sum(1 for _ in handle) == 40
    assert "1,000 reads" in inside(capsys, "simulate", tmp_path / "usual.fasta")[1]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("r.*")}
    code, _, err = inside(
        capsys, "simulate", tmp_path / "r.fasta"
    )  # beside which others of the name lie
    assert code == 2
    assert (
        f"{tmp_path / 'r.truth.tsv'}, {tmp_path / 'r.genomes.fasta.gz'} would be overwritten; choose"
        in err
    )
    one_line(err)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("r.*")} == before
    assert inside(capsys, "simulate", tmp_path / "r.fasta", "--reads", "20", "--force")[0] == 0
    assert len((tmp_path / "r.truth.tsv").read_text().splitlines()) == 21
    code, _, err = inside(capsys, "simulate", tmp_path / "r.odd")
    assert code == 2
    assert "r.odd" in err
    assert (
        "Unknown option: --bogus"
        in inside(capsys, "simulate", tmp_path / "r.fastq", "--bogus", "3")[2]
    )
    assert "cpu:" in inside(capsys, "devices")[1]
    assert "ci-smoke" in inside(capsys, "profiles")[1]
    assert inside(capsys, "profiles", "absent")[0] == 2


def test_a_run_scored_again_with_another_threshold(
    tmp_path: Path,
    few_reads: Path,
    models: Path,
    prefect_backend: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from virnuc.flows.predict import predict

    out = tmp_path / "out"
    predict(reads=[str(few_reads)], out=out, models=models, devices="cpu:1")
    code, _, err = inside(capsys, "rescore", out, "-o", tmp_path / "strict", "--threshold", "1")
    assert code == 0, err
    assert inside(capsys, "rescore", out, "-o", tmp_path / "strict", "--threshold", "2")[0] == 2
