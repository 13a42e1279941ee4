"""The `virnuc` command as people meet it: a process of its own, its two outputs and its exit code."""

from __future__ import annotations

import gzip
import json
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.damage import edit_json
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


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


def require_one_line(err: str) -> None:
    """Standard error holds one line of ours."""
    (line,) = err.splitlines()
    assert line.startswith("virnuc: ")


def run_inside(capsys: pytest.CaptureFixture[str], *words: object) -> Outcome:
    """Run the command within this process, which starts much sooner."""
    try:
        code = cli.main([str(word) for word in words])
    except SystemExit as end:
        code = int(end.code or 0)
    output = capsys.readouterr()
    return Outcome(code, output.out, output.err)


def test_the_program_explains_itself() -> None:
    process = virnuc("--help")
    assert (process.returncode, process.stderr) == (0, "")
    for name in COMMAND_NAMES:
        assert f"  {name}: " in process.stdout


def test_help_wrong_options_and_inspect_import_neither_torch_nor_prefect(tmp_path: Path) -> None:
    reads = tmp_path / "reads.fasta"
    reads.write_text(">r\nACGTACGT\n")
    program = (
        "import sys\n"
        "from virnuc.flows.cli import main\n"
        "for words in (['--help'], ['predict', 'a'], ['validate', '--bogus'], ['bogus'], ['--bogus'],\n"
        "    ['inspect', *sys.argv[1:]]):\n"
        "    main(words)\n"
        "sys.exit(bool({'torch', 'prefect', 'pandas', 'matplotlib'} & set(sys.modules)))\n"
    )
    words = [sys.executable, "-c", program, str(reads)]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert "1 reads, all of them read" in process.stdout  # the last command did its work


def test_a_prediction_passes_on_its_work_before_it_loads_what_evaluates_it(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    """The command up to the moment at which workers get their tasks; a child process stands for one."""
    program = """
import os, sys
from virnuc.flows.cli import main
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import Child, LocalWorkers

HEAVY = {"torch", "prefect", "pandas", "matplotlib", "jinja2", "Bio", "nvitop", "sqlite3", "sklearn", "huggingface_hub"}

def tell_and_end(*_, **__):
    print(len(sys.modules), *sorted(HEAVY & sys.modules.keys()), flush=True)
    os._exit(0)

Pool.compute = tell_and_end
LocalWorkers._make = lambda self, spec: Child("time", spec, self._inbox)
main(sys.argv[1:])
"""
    words = ["predict", few_reads, "-o", tmp_path / "out", "--models", models]
    words += ["--devices", "cpu:1", "--no-prefect", "--no-progress"]
    process = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    count, *heavy = process.stdout.split()
    assert int(count) > 0, process.stderr
    assert heavy == [], "needed later, and takes long to import"


@pytest.mark.parametrize("name", sorted(COMMAND_NAMES))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_inside(capsys, name, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.lower().startswith(f"usage: virnuc {name}")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: Literal["bash", "zsh", "fish"]) -> None:
    script = app.generate_completion(shell=shell)
    assert all(word in script for word in ("predict-inbox", "token-budget", "init-random"))


def written_commands() -> list[str]:
    """Return every whole `virnuc` command line in the code blocks of the README and the guides."""
    guides = [
        ROOT / "README.md",
        ROOT / "deployments" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    lines = []
    for path in guides:
        text = path.read_text().replace("\\\n", " ")  # a line may be continued on the next one
        blocks = text.split("```")[1::2]  # every second part stands between fences
        for block in blocks:
            lines += [line.partition(" #")[0].strip() for line in block.splitlines()]
    return [line for line in lines if line.startswith("virnuc ") and "…" not in line]


@pytest.mark.parametrize("line", written_commands())
def test_the_guides_commands_are_understood(line: str) -> None:
    command, _, _ = app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
    assert command.__module__.startswith("virnuc.flows.cli.")


@pytest.mark.parametrize(
    "words", [(), ("bogus",), ("predict", "--bogus"), ("models", "bogus"), ("approve", "x")]
)
def test_a_wrong_command_line_is_one_line_and_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_inside(capsys, *words)
    assert outcome.code == 2
    if words:
        require_one_line(outcome.err)


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
    assert run_inside(capsys, *words).err == f"virnuc: {problem}\n"


def reads_file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


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
    outcome = run_inside(capsys, *words, "--json", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    result = json.loads(outcome.out)
    assert result["state"] == "Completed"
    assert result["exit_code"] == 0
    assert result["results"] == str(tmp_path / "out")
    assert sum(result["data"]["fates"].values()) == 60

    def refuse_to_start(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("virnuc.flows.cli.server_choice.start_temporary_server", refuse_to_start)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):  # where no server is named
        outcome = run_inside(capsys, *words[:-1], "--quiet")
    assert "nothing had to be computed" in outcome.out.splitlines()
    assert (outcome.code, outcome.err) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable", ["VIRNUC_DISABLE_CHECKPOINTING", "VIRNUCPRO_DISABLE_CHECKPOINTING"]
)
def test_checkpoints_are_disabled_by_a_variable_too(
    tmp_path: Path,
    few_reads: Path,
    models: Path,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "1")
    out_dir = tmp_path / "out"
    words = ["predict", few_reads, "-o", out_dir, "--models", models, "--devices", "cpu:1"]
    outcome = run_inside(capsys, *words, "--no-prefect")
    assert outcome.code == 0
    assert (out_dir / "prediction_results.txt").exists()
    assert not list((out_dir / "shards").glob("*.h5"))
    for tool in (["rescore", out_dir, "--threshold", "0.4", "-o", tmp_path / "rescored"],):
        outcome = run_inside(capsys, *tool)
        assert outcome.code == 2
        assert "checkpoints were disabled" in outcome.err


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
    outcome = run_inside(capsys, *words)
    assert outcome.code == 2
    assert "Traceback" in outcome.err
    assert "InputError" in outcome.err


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
    out_dir = tmp_path / "validation"
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
        out_dir,
    )
    outcome = run_inside(capsys, "validate", *words)
    assert outcome.code == 5, outcome.err
    assert "OVERALL: 0 of 1 CRITERIA MET" in outcome.out
    assert "not met: Time on one device" in outcome.out
    assert run_inside(capsys, "verify", out_dir).code == 0
    edit_json(
        out_dir / "report" / "report.json", lambda report: report["run"].update(total_s=0.0005)
    )
    assert run_inside(capsys, "verify", out_dir).code == 1

    words = (sys.executable, "-m", "virnuc.flows.cli", "report", str(out_dir), "--serve")
    with subprocess.Popen(
        words, cwd=ROOT, env=child_environment, stdout=subprocess.PIPE, text=True
    ) as output:
        assert output.stdout is not None
        address = next(
            line.split()[0] for line in output.stdout if line.startswith("http://127.0.0.1:")
        )
        assert (
            httpx.get(address, timeout=30).text == (out_dir / "report" / "report.html").read_text()
        )
        output.send_signal(signal.SIGINT)
    assert output.returncode == 0


def test_compare_tells_agreement_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = "Sequence_ID\tPrediction\tscore1\tscore2\n"
    a = reads_file(tmp_path, "a.txt", f"{header}r_chunk_1F1\tvirus\t0.1\t0.9\n".encode())
    b = reads_file(tmp_path, "b.txt", f"{header}r_chunk_1F1\tothers\t0.9\t0.1\n".encode())
    assert run_inside(capsys, "compare", a, a).code == 0
    assert run_inside(capsys, "compare", a, b).code == 5
    comparison = json.loads(run_inside(capsys, "compare", a, b, "--json", "--mode", "frame").out)
    assert comparison["frames"]["agreement"] == 0
    assert run_inside(capsys, "compare", a, tmp_path / "absent").code == 2


def test_random_models_are_not_written_over_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("models", "init-random", tmp_path / "m")
    assert run_inside(capsys, *words, "--seed", "3").code == 0
    assert run_inside(capsys, *words).code == 3


def test_simulate_writes_the_asked_number_of_reads_and_the_truth_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_inside(capsys, "simulate", tmp_path / "r.fastq.gz", "--reads", "tiny").code == 0
    with gzip.open(tmp_path / "r.fastq.gz", "rt") as handle:
        assert len(handle.readlines()) == 4 * 10
    usual = run_inside(capsys, "simulate", tmp_path / "usual.fasta").out
    assert "1,000 reads" in usual
    named_files = [Path(line.partition(": ")[0]) for line in usual.splitlines()]
    assert sorted(named_files) == sorted(tmp_path.glob("usual.*"))
    outcome = run_inside(capsys, "simulate", tmp_path / "r.fasta", "--reads", "20", "--force")
    assert outcome.code == 0
    header, *rows = (tmp_path / "r.truth.tsv").read_text().splitlines()
    assert header.startswith("read")
    assert len(rows) == 20


def test_simulate_does_not_write_over_the_truth_of_other_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_inside(capsys, "simulate", tmp_path / "r.fastq.gz", "--reads", "tiny").code == 0
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("r.*")}
    outcome = run_inside(capsys, "simulate", tmp_path / "r.fasta")
    assert outcome.code == 2
    overwritten = f"{tmp_path / 'r.truth.tsv'}, {tmp_path / 'r.genomes.fasta.gz'}"
    assert f"{overwritten} would be overwritten; choose" in outcome.err
    require_one_line(outcome.err)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("r.*")} == times


def test_simulate_refuses_unknown_formats_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_inside(capsys, "simulate", tmp_path / "r.odd")
    assert outcome.code == 2
    assert "r.odd" in outcome.err
    outcome = run_inside(capsys, "simulate", tmp_path / "r.fastq", "--bogus", "3")
    assert "Unknown option: --bogus" in outcome.err


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--parallel", "leave it out"),
        ("--keep-intermediate", "leave it out"),
        ("--gpus=0,1", "--devices cuda:0,cuda:1"),
    ],
)
def test_options_of_virnucpro_are_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, advice: str
) -> None:
    words = ("predict", "reads.fa", "-o", tmp_path / "out", "--models", tmp_path, "--force", option)
    outcome = run_inside(capsys, *words)
    assert outcome.code == 2
    assert advice in outcome.err
    require_one_line(outcome.err)


def test_devices_and_profiles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cpu:" in run_inside(capsys, "devices").out
    assert "ci-smoke" in run_inside(capsys, "profiles").out
    assert run_inside(capsys, "profiles", "absent").code == 2


@pytest.mark.slow
def test_a_run_scored_again_with_another_threshold(
    tmp_path: Path,
    few_reads: Path,
    models: Path,
    prefect_backend: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from virnuc.flows.prefect_flows.predict import predict

    out_dir = tmp_path / "out"
    predict(reads=[str(few_reads)], out=out_dir, models=models, devices="cpu:1")
    words = ("rescore", out_dir, "-o", tmp_path / "strict", "--threshold")
    outcome = run_inside(capsys, *words, "1")
    assert outcome.code == 0, outcome.err
    assert run_inside(capsys, *words, "2").code == 2
